"""Preble's router against Ray Serve's own in one Ray cluster on this machine: TTFT, latency, hits, the cost of choices.

    python -m benchmarks.ray.bench_ray --json benchmarks/results/ray.json --docs  # an hour, in .venv-ray
    python -m benchmarks.ray.bench_ray --requests 60 --repetitions 1  # a look

Within a repetition every arm meets fresh replicas and the same requests at the same times; which arm goes first changes
from one repetition to the next. `fleet` has replicas and clients, `arms` the routers, `report` the page.
Loads are shares of the rate at which the replicas end a burst under Ray's default router, measured first. Repetitions
that the JSON file holds already are not run again, so an interrupted call goes on where it was.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.paths import ROOT

# For the processes that Ray starts: the modules of the checkout, and no thread more than there is work for.
os.environ.update(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
os.environ.update(RAY_USAGE_STATS_ENABLED="0", OPENBLAS_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
os.environ.update(RAY_AUTH_TOKEN=secrets.token_hex(32))  # else Ray leaves one in the home directory

import ray  # Ray reads the environment when it is imported
from ray import serve
from ray.serve.config import RequestRouterConfig

from benchmarks.common.facts import environment
from benchmarks.common.tables import rounded
from benchmarks.ray.fleet import Answer, Client, CompletionRequest, Replica, Sent, Shape, text_of, write_tokenizer
from benchmarks.ray.report import Case, costs, order_of, summary, write_docs
from preble.workloads import generate, poisson

Found = dict[str, Any]
LEAD_SECONDS = 1.0  # between giving the clients their requests and the first arrival
WARM_UP_REQUESTS = 24
CASES = (Case("even", 0.8, 1), Case("even", 0.5, 1), Case("zipf", 1.2, 1), Case("even", 0.8, 2))
ARMS = ("power_of_two", "prefix_affinity", "preble")
ALONE = "preble_alone"  # its routers notify each other nothing; only where there are several
TREE = "LlmPrefixTreeActor"  # the detached actor of Ray's prefix router


@dataclass(frozen=True)
class Load:
    """What is asked: ToolBench-like prompts over `groups` tools."""

    requests: int
    groups: int
    seed: int

    def of(self, repetition: int, workload_kind: str, rps: float | None) -> list[Sent]:
        """A repetition's requests, each repetition's its own; all at once where `rps` is None."""
        seed, zipf = self.seed + repetition, None if workload_kind == "even" else 1.1
        workload = generate("toolbench", requests=self.requests, groups=self.groups, seed=seed, zipf=zipf)
        if rps is not None:
            workload = poisson(workload, rps, seed)
        return [
            Sent(number, CompletionRequest(text_of(one.token_ids.tolist()), one.output_tokens), one.arrival_seconds)
            for number, one in enumerate(workload.requests)
        ]


@dataclass(frozen=True)
class Fleet:
    """The replicas of every run."""

    replicas: int
    shape: Shape
    tokenizer: str

    def router(self, arm: str) -> RequestRouterConfig:
        """How Ray is asked to route in an arm."""
        kwargs: Found = {}
        if arm.startswith("preble"):
            kwargs = {"tokenizer": self.tokenizer, "cost_model": self.shape.cost_model, "share": arm == "preble"}
        name = {"power_of_two": "PowerOfTwo", "prefix_affinity": "PrefixAffinity"}.get(arm, "Preble")
        return RequestRouterConfig(request_router_class=f"benchmarks.ray.arms:{name}", request_router_kwargs=kwargs)

    def start(self, app: str, arm: str) -> None:
        """Fresh replicas under a router; returns when all are up."""
        deployment = serve.deployment(
            Replica,
            num_replicas=self.replicas,
            max_ongoing_requests=1_000_000,  # Ray Serve LLM's: queues are the engines'
            ray_actor_options={"num_cpus": 0.1},
            request_router_config=self.router(arm),
        )
        serve.run(deployment.bind(self.shape, self.tokenizer), name=app, route_prefix=None)


# --- a run ------------------------------------------------------------------------------------------------------------


def run_arm(fleet: Fleet, arm: str, load: Sequence[Sent], clients: int) -> tuple[list[Answer], Found]:
    """Start, warm up, send everything, stop. Requests go to the clients by turns."""
    app = f"{arm}-{secrets.token_hex(4)}"
    fleet.start(app, arm)
    actor = ray.remote(num_cpus=0.1)(Client)
    senders = [actor.remote(app) for _ in range(clients)]
    try:
        ray.get([one.warm_up.remote(WARM_UP_REQUESTS) for one in senders])
        parts = [load[place::clients] for place in range(clients)]
        busy, start = machine_seconds(), time.time() + LEAD_SECONDS
        played = ray.get([one.play.remote(part, start) for one, part in zip(senders, parts, strict=True)])
        used = machine_seconds() - busy
    finally:
        for one in senders:
            ray.kill(one)
        serve.delete(app)
        kill_tree(app)
    answers = sorted((answer for part, _ in played for answer in part), key=lambda answer: answer.number)
    return answers, costs([told for _, told in played], used, len(load))


def kill_tree(app: str) -> None:
    """End the prefix router's actor, which Ray keeps until Serve ends."""
    for name in ray.util.list_named_actors(all_namespaces=True):
        if name["name"] == TREE and app in name["namespace"]:
            ray.kill(ray.get_actor(TREE, namespace=name["namespace"]))


def machine_seconds() -> float:
    """Seconds that this machine's processors have worked, of all processes together."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


@contextmanager
def cluster() -> Iterator[None]:
    """A small Ray cluster of this machine, and its end."""
    folder = tempfile.mkdtemp(prefix="preble-ray-")  # short: sockets lie in it, and their paths have a largest length
    try:
        ray.init(
            num_cpus=8, include_dashboard=False, object_store_memory=200 << 20, _temp_dir=folder, log_to_driver=False
        )
        serve.start(proxy_location="Disabled")
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        yield
    finally:
        if ray.is_initialized():
            serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


# --- measuring --------------------------------------------------------------------------------------------------------


def saturation(fleet: Fleet, load: Load) -> float:
    """Requests a second that the replicas end under Ray's default router, when all are there from the start."""
    answers, _ = run_arm(fleet, "power_of_two", load.of(0, "even", None), 1)
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests of the burst failed: {failed[0]}")
    return len(answers) / max(answer.latency_seconds for answer in answers)


def compare(fleet: Fleet, load: Load, args: argparse.Namespace, rps: float, repetition: int) -> list[Found]:
    """A repetition: every arm in every case."""
    runs = []
    for case in CASES:
        sent = load.of(repetition, case.workload, case.load * rps)
        arms = [*ARMS, ALONE] if case.clients > 1 else ARMS
        for place, arm in enumerate(order_of(arms, repetition)):
            answers, cost = run_arm(fleet, arm, sent, case.clients)
            run = {"arm": arm, **case._asdict(), "repetition": repetition, "place": place}
            runs.append({**run, **summary(answers, args.warm), **cost})
            print(line(runs[-1]), flush=True)
    return runs


def line(run: Found) -> str:
    """A run for the person who waits."""
    head = f"{run['repetition']} {run['workload']} {run['load']:.2f} x{run['clients']} {run['arm']:16}"
    if "mean_ttft_seconds" not in run:
        return f"{head} all {run['failed']} requests failed: {run['failures']}"
    times = "TTFT " + " / ".join(f"{run[f'{what}_ttft_seconds']:.3f}" for what in ("mean", "p50", "p99"))
    choice = f"choice {run['mean_choice_ms']:.2f} ms, machine {run['machine_cpu_ms']:.0f} ms"
    return f"{head} {times} s, hits {run['hit_fraction']:.3f}, failed {run['failed']}, {choice}"


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--docs", action="store_true", help="write the section of docs/results.md, too")
    parser.add_argument("--requests", type=int, default=300, help="of each run")
    parser.add_argument("--groups", type=int, default=56, help="tools that prompts are about")
    parser.add_argument("--warm", type=float, default=0.25, help="share of the requests that only fill the caches")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--capacity-tokens", type=int, default=60_000, help="KV cache of a replica")
    parser.add_argument("--cost-model", default="mistral-7b/a6000")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> int:
    """Measure what is missing, keep, write."""
    args = parsed()
    load = Load(args.requests, args.groups, args.seed)
    shape = Shape(args.cost_model, args.capacity_tokens, token_budget=512, max_running=256)
    settings = {"replicas": args.replicas, **asdict(shape), **asdict(load), "warm": args.warm}
    result = kept(args.json, settings) or {"settings": settings, "runs": []}
    done = {run["repetition"] for run in result["runs"]}
    with tempfile.TemporaryDirectory(prefix="preble-words-") as folder, cluster():
        fleet = Fleet(args.replicas, shape, str(write_tokenizer(Path(folder))))
        if "burst_rps" not in result["settings"]:
            result["settings"]["burst_rps"] = saturation(fleet, load)
        rps = result["settings"]["burst_rps"]
        print(f"the replicas end {rps:.2f} requests a second of a burst", flush=True)
        for repetition in range(args.repetitions):
            if repetition not in done:
                result["runs"] += compare(fleet, load, args, rps, repetition)
                result["date"] = datetime.date.today().isoformat()
                result["facts"] = {**environment(args.seed), "ray": ray.__version__}
                if args.json:
                    args.json.write_text(json.dumps(rounded(result), indent=1) + "\n")
    if args.docs:
        write_docs(rounded(result))  # of what is kept, so that it can be made again
    return 0


def kept(file: Path | None, settings: Found) -> Found | None:
    """What a file holds of an earlier call, None where there is none. Raises ValueError if that was of other
    settings."""
    if file is None or not file.exists():
        return None
    found: Found = json.loads(file.read_text())
    before = {name: value for name, value in found["settings"].items() if name != "burst_rps"}
    if before != settings:
        raise ValueError(f"{file.name} holds runs with other settings, {before}: remove it, or name another file")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
