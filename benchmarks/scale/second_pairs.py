"""Pairs of workers in a second simulator, which has no part in ours: another engine, another transfer, other traffic.

    python -m benchmarks.scale.second_pairs [--cases unique docs coding] [--workers 2 4 8] [--loads 0.2 0.8 1.2]
                                            [--seeds 0 1 2] [--arms NAME ...] [--gbits 100] [--json FILE]
                                            [--contest ../shared/contest]

That simulator (`simulator.py` and `cases.py` of the folder `--contest`) is no part of this project and knows no pairs.
They are added here as vLLM's servers do it, where KV is pulled:

    placed -> the prompt, for one token, at who prefills -> the request at who decodes, where it waits for memory first
    come, first served -> its KV, as far as it is not cached there, once the links of both are free -> all of its output

So the first token comes from who decodes, after the transfer; an engine goes on meanwhile; and who prefills keeps the
KV until it was pulled. Nobody reports transfers, as attached servers do not: E2 has its guess of them. KV is a 7B
model's in 16 bit. Load 1 is about what the best rule of a case can bear, for its number of workers; other fleets have
as many requests a worker. Means over the seeds.
"""

from __future__ import annotations

import argparse
import heapq
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import preble
from benchmarks.common.paths import SHARED
from preble.types import BOTH, DECODE, PREFILL, Role

CONTEST = SHARED / "contest"
KV_TOKEN_BYTES = 131_072
LATENCY_SECONDS = 0.002
OUTPUT_MAX = 512  # what clients allow
FIGURES = ("mean_ttft", "p99_ttft", "mean_latency", "p99_latency", "mean_tpot", "p99_tpot")
Places = tuple["int | None", int]  # who prefills, None: the same; and who decodes


class Rule(Protocol):
    """What places requests, and learns what becomes of them."""

    def choose(self, request: Any, now: float) -> Places:
        """Where a request goes."""

    def on_prefilled(self, request: Any, now: float) -> None:
        """Who prefills only has done it."""

    def on_first(self, request: Any, now: float) -> None:
        """Its first token has come."""

    def on_done(self, request: Any, now: float) -> None:
        """Its last token has come."""


# --- rules ------------------------------------------------------------------------------------------------------------


class Turns:
    """Round robin: of those that prefill and of those that decode, or of all."""

    def __init__(self, roles: Sequence[Role]) -> None:
        self._prefills = [i for i, role in enumerate(roles) if role == PREFILL]
        self._decodes = [i for i, role in enumerate(roles) if role != PREFILL]
        self._turn = -1

    def choose(self, request: Any, now: float) -> Places:
        """The next ones."""
        self._turn += 1
        first, second = (of[self._turn % len(of)] if of else None for of in (self._prefills, self._decodes))
        assert second is not None, "somebody decodes"
        return first, second

    def on_prefilled(self, request: Any, now: float) -> None:
        """Nothing."""

    def on_first(self, request: Any, now: float) -> None:
        """Nothing."""

    def on_done(self, request: Any, now: float) -> None:
        """Nothing."""


class LeastLoad(Turns):
    """Those with the fewest requests; of equal ones the first."""

    def __init__(self, roles: Sequence[Role]) -> None:
        super().__init__(roles)
        self._live = [0] * len(roles)
        self._prefilling: dict[int, int] = {}

    def choose(self, request: Any, now: float) -> Places:
        """The least loaded of either kind."""
        places = [min(of, key=lambda i: (self._live[i], i)) if of else None for of in (self._prefills, self._decodes)]
        first, second = places
        assert second is not None, "somebody decodes"
        for one in (first, second):
            if one is not None:
                self._live[one] += 1
        if first is not None:
            self._prefilling[request.rid] = first
        return first, second

    def on_prefilled(self, request: Any, now: float) -> None:
        """One less where it was prefilled."""
        self._live[self._prefilling.pop(request.rid)] -= 1

    def on_done(self, request: Any, now: float) -> None:
        """And where it was decoded."""
        self._live[request.worker] -= 1


class Preble:
    """The scheduler by its public contract, as a router before attached servers uses it."""

    def __init__(self, workers: Sequence[Any], roles: Sequence[Role], block_size: int, *, among_all: bool) -> None:
        self._now = self._ticked = 0.0
        specs = [
            preble.WorkerSpec(str(i), kv_capacity_tokens=one.cap * block_size, block_size=block_size, role=role)
            for i, (one, role) in enumerate(zip(workers, roles, strict=True))
        ]
        self.scheduler = preble.GlobalScheduler(specs, cost_model="mistral-7b/a6000", clock=lambda: self._now)
        self._pairs: set[int] = set()
        if among_all:  # pairs are thought of once somebody with a role has been there
            spare = self.scheduler.add_worker(preble.WorkerSpec("spare", role=PREFILL))
            self.scheduler.remove_worker(spare.id)

    def _at(self, now: float) -> preble.GlobalScheduler:
        self._now = max(self._now, now)
        while self._ticked + 1.0 <= self._now:
            self._ticked += 1.0
            self.scheduler.tick()
        return self.scheduler

    def choose(self, request: Any, now: float) -> Places:
        """By the price."""
        found = self._at(now).schedule_pair(request.tokens, request_id=request.rid, max_new_tokens=OUTPUT_MAX)
        if found.prefill_worker is None:
            return None, int(found.worker)
        self._pairs.add(request.rid)
        return int(found.prefill_worker), int(found.worker)

    def on_prefilled(self, request: Any, now: float) -> None:
        """The prefill's booking ends."""
        self._at(now).prefill_done(request.rid)

    def on_first(self, request: Any, now: float) -> None:
        """The decode has begun."""
        self._at(now).first_token(request.rid, cached_tokens=self._cached(request))

    def on_done(self, request: Any, now: float) -> None:
        """Its booking ends."""
        self._at(now).finish(request.rid, output_tokens=request.out, cached_tokens=self._cached(request))
        self._pairs.discard(request.rid)

    def _cached(self, request: Any) -> int | None:
        return None if request.rid in self._pairs else request.cached


# --- engines ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Half:
    """What of a request on two workers is underway. `prompt`: the request for one token at who prefills."""

    request: Any
    prompt: Any
    prefills: Any
    decodes: Any


def worker_class(second: Any) -> Any:
    """The second simulator's worker, which hands over KV as well."""

    class PairWorker(second.Worker):  # type: ignore[misc]
        """See the module. `pull(worker, request, missing tokens, now)` is called for a request that has its memory."""

        def __init__(self, i: int, model: str, pull: Callable[[Any, Any, int, float], None]) -> None:
            super().__init__(i, model)
            self.pulling = 0
            self.handed: set[int] = set()  # requests whose KV comes from elsewhere, by number
            self._pull = pull

        def admit(self, now: float) -> None:
            """As usual; those that are handed over wait for their KV, and compute nothing."""
            if self.wait and self.pulling and not self.run and not self._evict(self._needs(self.wait[0])):
                return  # the memory is taken by those that wait for KV
            super().admit(now)
            came = [one for one in self.run if one.rid in self.handed and one.todo > 0]
            for one in came:
                missing, one.todo = one.todo, 0
                self.pref_tokens -= missing
                self.run.remove(one)
                self.pulling += 1
                self._pull(self, one, missing, now)

        def _needs(self, request: Any) -> int:
            tail = -(-(len(request.tokens) % second.BLOCK + request.out) // second.BLOCK) + 1
            return len(request.blocks) - self.hit(request.blocks) + tail

        def pulled(self, request: Any) -> None:
            """Its KV is here."""
            self.pulling -= 1
            self.run.append(request)

        def step(self, now: float) -> Any:
            """As usual; the first token of one that was handed over is one of these as well."""
            found = super().step(now)
            if found is None:
                return None
            seconds, done, first = found
            for one in (*self.run, *done):
                if one.rid in self.handed and one.gen == 1:
                    one.t_first = now + seconds
                    first.append(one)
            self.handed.difference_update(one.rid for one in done)
            return seconds, done, first

        def keep(self, blocks: Sequence[int]) -> None:
            """Let these blocks, which are cached, stay until they were pulled."""
            for block in blocks:
                self.pins[block] = self.pins.get(block, 0) + 1

        def let_go(self, blocks: Sequence[int]) -> None:
            """They may go."""
            for block in blocks:
                self._unpin(block)

    return PairWorker


class PairFleet:
    """One run: the second simulator's workers, requests and clock, with pairs."""

    def __init__(self, second: Any, roles: Sequence[Role], model: str, bytes_per_second: float) -> None:
        made = worker_class(second)
        self.workers = [made(i, model, self._pull) for i in range(len(roles))]
        self.separated = 0
        self._byte_seconds = 1.0 / bytes_per_second
        self._free_at = [0.0] * len(roles)  # when a worker's link is
        self._halves: dict[int, Half] = {}
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._count = 0
        self._followers: dict[int, list[Any]] = {}
        self._rule: Rule

    def run(self, requests: Sequence[Any], rule: Rule) -> None:
        """All requests, to their end. Times are written into them."""
        self._rule = rule
        for one in requests:
            if one.after >= 0:
                self._followers.setdefault(one.after, []).append(one)
            else:
                self._at(one.t, self._arrive, one)
        while self._events:
            now, _, call, about = heapq.heappop(self._events)
            call(now, about)

    def _at(self, when: float, call: Callable[[float, Any], None], about: Any) -> None:
        heapq.heappush(self._events, (when, self._count, call, about))
        self._count += 1

    def _arrive(self, now: float, request: Any) -> None:
        first, second = self._rule.choose(request, now)
        request.worker = second
        if first is None:
            self._give(now, self.workers[second], request)
            return
        self.separated += 1
        prompt = replace(request, out=1, worker=first)
        self._halves[request.rid] = Half(request, prompt, self.workers[first], self.workers[second])
        self._give(now, self.workers[first], prompt)

    def _give(self, now: float, worker: Any, request: Any) -> None:
        worker.wait.append(request)
        self._wake(now, worker)

    def _wake(self, now: float, worker: Any) -> None:
        if not worker.busy:
            worker.busy = True
            self._at(now, self._step, worker)

    def _step(self, now: float, worker: Any) -> None:
        found = worker.step(now)
        if found is None:
            worker.busy = False
            return
        seconds, done, first = found
        for one in done:
            half = self._halves.get(one.rid)
            if half is not None and half.prompt is one:
                worker.keep(one.blocks)  # before another step might evict them
        self._at(now + seconds, self._stepped, (worker, done, first))

    def _stepped(self, now: float, about: tuple[Any, Sequence[Any], Sequence[Any]]) -> None:
        worker, done, first = about
        for one in first:
            if not self._is_prompt(one):
                self._rule.on_first(one, now)
        for one in done:
            if self._is_prompt(one):
                self._prefilled(now, self._halves[one.rid])
                continue
            self._rule.on_done(one, now)
            for follower in self._followers.pop(one.rid, ()):
                follower.t += now
                self._at(follower.t, self._arrive, follower)
        self._at(now, self._step, worker)

    def _is_prompt(self, request: Any) -> bool:
        half = self._halves.get(request.rid)
        return half is not None and half.prompt is request

    def _prefilled(self, now: float, half: Half) -> None:
        self._rule.on_prefilled(half.request, now)
        half.decodes.handed.add(half.request.rid)
        self._give(now, half.decodes, half.request)

    def _pull(self, worker: Any, request: Any, missing: int, now: float) -> None:
        half = self._halves[request.rid]
        begin = max(now, self._free_at[half.prefills.i], self._free_at[worker.i])
        end = begin + missing * KV_TOKEN_BYTES * self._byte_seconds
        self._free_at[half.prefills.i] = self._free_at[worker.i] = end
        request.cached = half.prompt.cached
        self._at(end + LATENCY_SECONDS, self._pulled, half)

    def _pulled(self, now: float, half: Half) -> None:
        del self._halves[half.request.rid]
        half.prefills.let_go(half.prompt.blocks)
        half.decodes.pulled(half.request)
        for worker in (half.prefills, half.decodes):  # who prefills may have waited for this memory
            self._wake(now, worker)


# --- cells ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arm:
    """A rule, how many of the workers prefill only (a share), and what the others do. `among_all`: nobody has a role,
    and any two may be a pair."""

    rule: str
    prefill_share: float = 0.0
    others: Role = BOTH
    among_all: bool = False

    def name(self, workers: int) -> str:
        """As the table has it."""
        prefills = self.prefills(workers)
        if self.among_all:
            return f"{self.rule}, {workers} both, pairs among them"
        return f"{self.rule}, {prefills} prefill, {workers - prefills} {self.others}" if prefills else self.rule

    def prefills(self, workers: int) -> int:
        """How many prefill only."""
        return max(1, round(self.prefill_share * workers)) if self.prefill_share else 0

    def roles(self, workers: int) -> list[Role]:
        """Of each worker."""
        prefills = self.prefills(workers)
        return [PREFILL] * prefills + [self.others] * (workers - prefills)


ARMS = (
    *(Arm(rule) for rule in ("round_robin", "least_load", "e2")),
    Arm("e2", among_all=True),
    *(Arm(rule, 0.5, DECODE) for rule in ("round_robin", "least_load")),
    *(Arm("e2", share, others) for share in (0.25, 0.5) for others in (BOTH, DECODE)),
)


def second_simulator(folder: Path) -> tuple[Any, Any]:
    """Its modules, simulator and cases."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module("simulator"), importlib.import_module("cases")


def rule_of(arm: Arm, workers: Sequence[Any], block_size: int) -> Rule:
    """An arm's rule, for these workers."""
    roles = arm.roles(len(workers))
    if arm.rule == "e2":
        return Preble(workers, roles, block_size, among_all=arm.among_all)
    return Turns(roles) if arm.rule == "round_robin" else LeastLoad(roles)


def figures_of(second: Any, requests: Sequence[Any], arm: Arm, workers: int, bytes_per_second: float) -> dict[str, Any]:
    """What one run finds. The requests are used up."""
    fleet = PairFleet(second, arm.roles(workers), "mistral7b_a6000", bytes_per_second)
    fleet.run(requests, rule_of(arm, fleet.workers, second.BLOCK))
    ttft, latency = (np.array([getattr(one, end) - one.t for one in requests]) for end in ("t_first", "t_done"))
    longer = np.array([one.out for one in requests]) > 1
    tpot = ((latency - ttft) / np.maximum([one.out - 1 for one in requests], 1))[longer]
    found: dict[str, Any] = {"separated": fleet.separated / len(requests)}
    for what, values in (("ttft", ttft), ("latency", latency), ("tpot", tpot)):
        found[f"mean_{what}"], found[f"p99_{what}"] = float(np.mean(values)), float(np.percentile(values, 99))
    return found


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each case, fleet, load and arm: means over the seeds."""
    second, cases = second_simulator(args.contest)
    for name in args.cases:
        build, own_workers = cases.CASES[name]
        for workers in args.workers:
            for load in args.loads:
                for title, arm in {one.name(workers): one for one in ARMS}.items():
                    if args.arms is not None and title not in args.arms:
                        continue
                    runs = [
                        figures_of(
                            second, build(load * workers / own_workers, seed), arm, workers, args.gbits / 8 * 1e9
                        )
                        for seed in args.seeds
                    ]
                    means = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
                    yield {"case": name, "workers": workers, "load": load, "arm": title, **means}


def print_row(row: dict[str, Any], aggregated: dict[str, Any] | None) -> None:
    """One line; beside it, of pairs, p99 TTFT and mean latency over those of E2 with as many that do both."""
    times = " | ".join(f"{row[name]:.4f}" if "tpot" in name else f"{row[name]:.3f}" for name in FIGURES)
    ratios = " | "
    if aggregated is not None and row["separated"] > 0.0:
        ratios = " | ".join(f"{row[name] / aggregated[name]:.3f}" for name in ("p99_ttft", "mean_latency"))
    print(
        f"| {row['case']}, {row['workers']}, {row['load']} | {row['arm']} | {times} | {row['separated']:.0%} "
        f"| {ratios} |",
        flush=True,
    )


def skip_without_it(parser: argparse.ArgumentParser, folder: Path) -> None:
    """End with a message where the second simulator is missing."""
    if not (folder / "simulator.py").exists():
        parser.exit(0, f"skipped: the second simulator is not here, {folder / 'simulator.py'} is missing\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["unique", "docs", "coding"])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.2, 0.8, 1.2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="only these, as the table has them")
    parser.add_argument("--gbits", type=float, default=100.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--contest", type=Path, metavar="DIR", default=CONTEST)
    args = parser.parse_args()
    skip_without_it(parser, args.contest)
    print("| case, workers, load | | TTFT: mean, s | p99 | latency: mean | p99 | TPOT: mean | p99 | in two | p99 TTFT "
          "/ E2's | latency / E2's |\n|---|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    rows, aggregated = [], None
    for row in cells(args):
        aggregated = row if row["arm"] == "e2" else None if row["arm"] == "round_robin" else aggregated
        print_row(row, aggregated)
        rows.append(row)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
