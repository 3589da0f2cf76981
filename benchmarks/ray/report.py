"""Statistics of `bench_ray.py`, and its section of docs/results.md. Measures nothing.

    python -m benchmarks.ray.report     # write the section anew from benchmarks/results/ray.json

A repetition is one sample: its requests wait for each other and are no independent ones. Intervals are Student's, 95 %,
over repetitions; differences are taken within a repetition, where both arms met the same requests.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.facts import typed_today
from benchmarks.common.paths import RESULTS
from benchmarks.common.tables import markdown
from benchmarks.live.engine_report import interval, shown
from benchmarks.paper import measured

Found = dict[str, Any]
SECTION = RESULTS / "ray.md"
NAMES = {
    "power_of_two": "Ray, power of two choices",
    "prefix_affinity": "Ray, PrefixCacheAffinityRouter",
    "preble_alone": "Preble, handles apart (`share` false)",
    "preble": "Preble",
}
INTRODUCTION = """
Measured live through Ray Serve on one machine: {replicas} replicas, each an engine that sleeps as long as an iteration
takes on a GPU (`{cost_model}`, {kv_capacity_tokens} tokens of KV cache, chunks of {token_budget}) and really queues,
caches and evicts; no GPU and no model. ToolBench-like prompts over {groups} tools, as text; Poisson arrivals, the same
for every router, sent on time whatever came of earlier ones; outputs stream. 100 % load is {burst_rps:.1f} requests a
second: what the replicas end of a burst under Ray's default router, which is no bound for routers that find more in
caches. Each run has fresh replicas and {requests} requests, the first {first} of which fill caches and are not counted;
{repetitions} repetitions with prompts and arrivals of their own, the order of routers rotated. Times count from a
request's arrival at the process that holds the handle, to its first token there. Hits are what the replicas found in
their caches.

Ray's routers have their default settings, and so has Preble's, given a tokenizer and the replicas' cost model;
replicas report the size of their caches to it. Two handles are two processes that share the load by turns; each has a
router of its own. Preble's inform each other of what they book through an actor, Ray's prefix routers share one tree in
an actor.
"""
COSTS = """
A choice is `choose_replicas`, waiting included: Preble reads and tokenises the prompt in a thread, Ray's prefix router
asks its tree's actor and blocks the handle's loop meanwhile. Nearly all of Preble's time is the tokenizer's, and there
is none where requests bring token ids. After it, `on_request_routed`. CPU is that of the process with the handle; the
actors of Ray's tree and of Preble's notes are not in it.
"""
# (field, title, whether more is better)
MEASURES = (
    ("mean_ttft_seconds", "mean TTFT, s", False),
    ("p50_ttft_seconds", "p50 TTFT, s", False),
    ("p99_ttft_seconds", "p99 TTFT, s", False),
    ("mean_latency_seconds", "mean latency, s", False),
    ("p99_latency_seconds", "p99 latency, s", False),
    ("hit_fraction", "hit fraction", True),
)


class Case(NamedTuple):
    """What a run is a repetition of, its arm aside."""

    workload: str
    load: float
    clients: int

    def title(self) -> str:
        """For people."""
        kind = "all tools alike" if self.workload == "even" else "tools by Zipf's law, 1.1"
        handles = "one handle" if self.clients == 1 else f"{self.clients} handles"
        return f"{self.load:.0%} load, {kind}, {handles}"


def order_of(arms: Sequence[str], repetition: int) -> list[str]:
    """Arms in the order of a repetition: each has each place equally often."""
    start = repetition % len(arms)
    return [*arms[start:], *arms[:start]]


def summary(answers: Sequence[Any], warm: float) -> Found:
    """What a run is compared by, of the requests after the first `warm` of them. Requests that failed are counted, of
    all, and in nothing else."""
    counted = [one for one in answers[int(warm * len(answers)) :] if not one.error]
    failures = [one.error for one in answers if one.error]
    result: Found = {"counted": len(counted), "failed": len(failures)}
    result["failures"] = {kind: failures.count(kind) for kind in sorted(set(failures))}
    replicas = [one.replica for one in counted]
    result["requests_by_replica"] = sorted(replicas.count(name) for name in set(replicas))
    if not counted:
        return result
    for name in ("ttft_seconds", "latency_seconds", "reach_seconds"):
        values = [getattr(one, name) for one in counted]
        result[f"mean_{name}"] = statistics.fmean(values)
        result[f"p50_{name}"] = float(np.percentile(values, 50))
        result[f"p99_{name}"] = float(np.percentile(values, 99))
    result["hit_fraction"] = sum(one.cached_tokens for one in counted) / sum(one.prompt_tokens for one in counted)
    return result


def costs(played: Sequence[Found], busy_seconds: float, requests: int) -> Found:
    """What routing cost a request: of the processes that hold a handle, and of the whole machine."""
    choices = [ms for router in played for ms in router["choice_ms"]]
    after = [ms for router in played for ms in router["after_ms"]]
    reasons = [router["reasons"] for router in played if router["reasons"]]
    return {
        "choices_per_request": len(choices) / requests,
        "mean_choice_ms": statistics.fmean(choices),
        "p99_choice_ms": float(np.percentile(choices, 99)),
        "mean_after_ms": statistics.fmean(after),
        "client_cpu_ms": 1e3 * sum(router["cpu_seconds"] for router in played) / requests,
        "machine_cpu_ms": 1e3 * busy_seconds / requests,
        "reasons": reasons,
    }


# --- the page ---------------------------------------------------------------------------------------------------------


def cases(result: Found) -> list[Case]:
    """The cases of a result, in the order in which they were run first."""
    found = [Case(run["workload"], run["load"], run["clients"]) for run in result["runs"]]
    return list(dict.fromkeys(found))


def values_of(result: Found, case: Case, arm: str, name: str) -> list[float]:
    """A figure of an arm, by repetition."""
    runs = [
        run
        for run in result["runs"]
        if run["arm"] == arm and Case(run["workload"], run["load"], run["clients"]) == case
    ]
    return [run[name] for run in sorted(runs, key=lambda run: run["repetition"])]


def arms_of(result: Found, case: Case) -> list[str]:
    """The arms of a case, Preble last."""
    return [arm for arm in NAMES if values_of(result, case, arm, "failed")]


def times_table(result: Found, case: Case) -> str:
    """A line for each arm."""
    rows = []
    for arm in arms_of(result, case):
        cells = [shown(*interval(values_of(result, case, arm, name))) for name, _, _ in MEASURES]
        rows.append([NAMES[arm], *cells, f"{sum(values_of(result, case, arm, 'failed')):.0f}"])
    return markdown(["", *(title for _, title, _ in MEASURES), "failed"], rows)


def difference(result: Found, case: Case, arm: str, name: str) -> tuple[float, float]:
    """Preble less another arm, repetition by repetition."""
    pairs = zip(values_of(result, case, "preble", name), values_of(result, case, arm, name), strict=True)
    return interval([mine - other for mine, other in pairs])


def differences_table(result: Found, case: Case) -> str:
    """A line for each arm that Preble is compared with."""
    rows = []
    for arm in arms_of(result, case)[:-1]:
        cells = [shown(*difference(result, case, arm, name), sign="+") for name, _, _ in MEASURES]
        rows.append([NAMES[arm], *cells])
    return markdown(["Preble less", *(title for _, title, _ in MEASURES)], rows)


def losses(result: Found) -> Iterator[str]:
    """Where Preble's mean is the worse one, and whether that may be chance."""
    for case in cases(result):
        for arm in arms_of(result, case)[:-1]:
            for name, title, more_is_better in MEASURES:
                mean, half = difference(result, case, arm, name)
                worse = -mean if more_is_better else mean
                if worse > 0:
                    other = statistics.fmean(values_of(result, case, arm, name))
                    than = f"{title} worse by {worse:.3f} than the {other:.3f} of {NAMES[arm]}"
                    yield f"{case.title()}: {than} ({chance(worse, half)})"


def chance(worse: float, half: float) -> str:
    """What an interval says of a loss."""
    if math.isinf(half):
        return "one repetition says nothing of chance"
    return "the interval excludes 0" if worse > half else "it may be chance: the interval includes 0"


def costs_table(result: Found, case: Case) -> str:
    """What routing costs, a line for each arm."""
    rows = []
    for arm in arms_of(result, case):
        choice, tail, after, client = (
            statistics.fmean(values_of(result, case, arm, name))
            for name in ("mean_choice_ms", "p99_choice_ms", "mean_after_ms", "client_cpu_ms")
        )
        reach = [
            1e3 * statistics.fmean(values_of(result, case, arm, f"{what}_reach_seconds")) for what in ("p50", "p99")
        ]
        cells = [f"{choice:.2f} ({tail:.2f})", f"{after:.2f}", f"{reach[0]:.1f} ({reach[1]:.1f})", f"{client:.1f}"]
        rows.append([NAMES[arm], *cells])
    titles = (
        "a choice, ms (p99)", "after it, ms", "until a replica has the request, ms, p50 (p99)",
        "CPU of the handle's process, ms a request",
    )  # fmt: skip
    return markdown(["", *titles], rows)


def section(result: Found) -> str:
    """The section: losses, tables, what they cost, and what repeats the result."""
    environment, settings, found = result["facts"], result["settings"], cases(result)
    lost = [f"- {loss}" for loss in losses(result)]
    repeats = ", ".join(f"{name} {value}" for name, value in environment.items() if name != "command")
    repetitions = 1 + max(run["repetition"] for run in result["runs"])
    parts = ["## Inside Ray Serve, against Ray's own routers", introduction(settings, repetitions)]
    parts += ["**Losses.** Where Preble's mean is worse:", "\n".join(lost) if lost else "none."]
    for case in found:
        parts += [f"### {case.title()}", times_table(result, case), differences_table(result, case)]
    parts += ["### What routing costs", COSTS.strip(), f"{found[0].title()}:", costs_table(result, found[0])]
    parts += [f"`{typed_today(environment['command'])}`, {result['date']}: {repeats}."]
    return "\n\n".join(parts) + "\n"


def introduction(settings: Found, repetitions: int) -> str:
    """What was measured."""
    return INTRODUCTION.format(
        **{**settings, "kv_capacity_tokens": f"{settings['kv_capacity_tokens']:,}"},
        first=int(settings["warm"] * settings["requests"]),
        repetitions=repetitions,
    ).strip()


def write_docs(result: Found) -> None:
    """Write the section, and put it into the page."""
    SECTION.write_text(section(result))
    measured.update()


if __name__ == "__main__":
    write_docs(json.loads((RESULTS / "ray.json").read_text()))
