"""Pulls of KV in a second simulator, which has no part in ours: another engine, another link, other traffic. Owns that
link, and what that engine does with KV that comes; when a request pulls is the scheduler's to say.

    python -m benchmarks.scale.second_pulls [--cases docs coding unique] [--workers 4] [--loads 0.3 0.8 1.2]
                                            [--seeds 0 1 2] [--capacity 1 2] [--gbits 10 100] [--arms NAME ...]
                                            [--json FILE] [--contest ../shared/contest]

That simulator (`simulator.py` and `cases.py` of the folder `--contest`) is no part of this project and knows no pulls.
They are added here:

    placed -> pull_for -> the links of both are free -> what the source has computed and caches then is on its way
    -> between two iterations of the target, in its cache as blocks, as far as there is memory -> pull_ended -> queued

A link carries one transfer at a time; both engines stand still while they copy; a request waits no longer than its pull
is worth, and takes what has come by then. Requests that share a prefix which is under way do not wait for it: they
compute it, or pull as well. E2 receives no cache events.
Load 1 is about what the best rule of a case can bear, for its number of workers; other fleets have as many requests a
worker. `--capacity` multiplies each worker's KV memory. Hits count what was pulled. Means over the seeds. The second
table: the price beside the best of never, always and the thresholds in mean TTFT; over 1 is a loss.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.scale.second_pairs import (
    CONTEST,
    KV_TOKEN_BYTES,
    LATENCY_SECONDS,
    OUTPUT_MAX,
    PairFleet,
    Places,
    Preble,
    Rule,
    second_simulator,
    skip_without_it,
)
from preble.scheduling.pulls.link_times import Transfer
from preble.types import BOTH, PullCost

MODEL = "mistral7b_a6000"
LAYOUT = "second"
COPY_BYTE_SECONDS = 5e-11  # that both engines stand still
BY_PRICE = -1
FIGURES = ("mean_ttft", "p99_ttft", "mean_latency", "p99_latency")


class PullRule(Rule, Protocol):
    """What places requests, and says which of them pull."""

    def pull_of(self, request: Any) -> PullCost | None:
        """With what a request that was just placed is sent; None: it computes."""

    def pull_ended(self, request: Any, cached_tokens: int, source: str, transfer: Transfer, now: float) -> None:
        """Its worker caches so much of its prompt now."""


# --- rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arm:
    """A rule, and from how many missing tokens on who is placed pulls: None never, BY_PRICE where that pays."""

    name: str
    least_tokens: int | None = None

    @property
    def is_e2(self) -> bool:
        """Whether it is Preble's."""
        return self.name.startswith("e2")

    @property
    def is_fixed(self) -> bool:
        """Whether the price stands beside it."""
        return self.is_e2 and self.least_tokens != BY_PRICE


NEVER = Arm("e2, never")
PRICED = Arm("e2, by the price", BY_PRICE)
ARMS = (
    *(Arm("round_robin"), Arm("least_load"), NEVER, Arm("e2, always", 0)),
    *(Arm(f"e2, from {tokens}", tokens) for tokens in (2048, 8192)),
    PRICED,
)
ALL_ARMS = {arm.name: arm for arm in ARMS}


class Theirs:
    """A rule of the second simulator, which pulls nothing."""

    def __init__(self, policy: Any, workers: Sequence[Any]) -> None:
        self._policy = policy
        policy.bind(workers)

    def choose(self, request: Any, now: float) -> Places:
        """As it says."""
        return None, self._policy.choose(request, now)

    def on_prefilled(self, request: Any, now: float) -> None:
        """Nothing: nobody prefills only."""

    def on_first(self, request: Any, now: float) -> None:
        """It learns of it."""
        self._policy.on_first(request, now)

    def on_done(self, request: Any, now: float) -> None:
        """And of this."""
        self._policy.on_done(request, now)

    def pull_of(self, request: Any) -> PullCost | None:
        """None."""
        return None

    def pull_ended(self, request: Any, cached_tokens: int, source: str, transfer: Transfer, now: float) -> None:
        """Nothing."""


class Pulling(Preble):
    """The scheduler by its public contract, which knows that its workers can move KV, if the arm has them do so."""

    def __init__(self, workers: Sequence[Any], block_size: int, arm: Arm) -> None:
        super().__init__(workers, [BOTH] * len(workers), block_size, among_all=False)
        self._least_tokens = arm.least_tokens
        if arm.least_tokens is None:
            return
        for name in self.scheduler.workers:
            self.scheduler.can_move_kv(name, LAYOUT, KV_TOKEN_BYTES)

    def choose(self, request: Any, now: float) -> Places:
        """By the price."""
        found = self._at(now).schedule(request.tokens, request_id=request.rid, max_new_tokens=OUTPUT_MAX)
        return None, int(found.worker)

    def pull_of(self, request: Any) -> PullCost | None:
        """The scheduler's, or any of so many tokens."""
        least = self._least_tokens
        if least is None:
            return None
        return self.scheduler.pull_for(request.rid, request.tokens, least_tokens=None if least == BY_PRICE else least)

    def pull_ended(self, request: Any, cached_tokens: int, source: str, transfer: Transfer, now: float) -> None:
        """The scheduler learns of it."""
        self._at(now).pull_ended(request.rid, cached_tokens, source, transfer)


def rule_of(second: Any, arm: Arm, workers: Sequence[Any]) -> PullRule:
    """An arm's rule, for these workers."""
    if arm.is_e2:
        return Pulling(workers, second.BLOCK, arm)
    return Theirs(second.RoundRobin() if arm.name == "round_robin" else second.LeastLoad(), workers)


# --- engines ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Moving:
    """A request whose KV is under way. Of its blocks the target had the first `own`, and the next `come` come."""

    request: Any
    cost: PullCost
    source: Any
    target: Any
    asked_at: float
    deadline: float
    own: int = 0
    come: int = 0
    inserted: int = 0


def computed_blocks(worker: Any, blocks: Sequence[int], block_size: int) -> int:
    """How many of the first blocks of a prompt a worker can hand over. This engine calls blocks cached from when their
    request is let in."""
    missing: set[int] = set()
    for one in worker.run:
        if one.todo > 0:
            missing.update(one.blocks[(len(one.tokens) - one.todo) // block_size :])
    found = blocks[: worker.hit(blocks)]
    return next((i for i, block in enumerate(found) if block in missing), len(found))


def insert(worker: Any, blocks: Sequence[int], own: int) -> int:
    """Put the blocks after the first `own` in a worker's cache, as far as others can go for them; the whole prefix is
    then the one used last. Returns how many are new."""
    worker.keep(blocks)
    new = [block for block in blocks[own:] if block not in worker.cache]
    worker._evict(len(new))
    worker.let_go(blocks)
    room = max(worker.cap - len(worker.cache) - worker.used_private, 0)
    for block in new[:room]:
        worker.cache[block] = 1
    for block in reversed(blocks):
        if block in worker.cache:
            worker.cache.move_to_end(block)
    return len(new[:room])


class PullFleet(PairFleet):
    """One run: the second simulator's workers, requests and clock, with pulls."""

    def __init__(self, second: Any, workers: int, capacity: float, bytes_per_second: float) -> None:
        super().__init__(second, [BOTH] * workers, MODEL, bytes_per_second)
        for one in self.workers:
            one.cap = round(capacity * one.cap)
        self.pulls = self.moved_tokens = 0
        self._block_size: int = second.BLOCK
        self._stalls = [0.0] * workers  # how long an engine is to stand still before its next iteration
        self._arrived: list[list[Moving]] = [[] for _ in range(workers)]
        self._pull_rule: PullRule

    def play(self, requests: Sequence[Any], rule: PullRule) -> None:
        """All requests, to their end. Times are written into them."""
        self._pull_rule = rule
        self.run(requests, rule)

    def _arrive(self, now: float, request: Any) -> None:
        _, request.worker = self._pull_rule.choose(request, now)
        target, cost = self.workers[request.worker], self._pull_rule.pull_of(request)
        if cost is None:
            self._give(now, target, request)
        else:
            self._ask(now, request, target, cost)

    def _ask(self, now: float, request: Any, target: Any, cost: PullCost) -> None:
        """A transfer begins when both links are free, and not after it is of no use."""
        self.pulls += 1
        moving = Moving(request, cost, self.workers[int(cost.source)], target, now, now + cost.worth_seconds)
        links = (moving.source.i, target.i)
        begin = max(now, *(self._free_at[i] for i in links))
        if begin >= moving.deadline:
            self._at(moving.deadline, self._ended, moving)
            return
        for i in links:
            self._free_at[i] = min(begin + cost.moved_bytes * self._byte_seconds, moving.deadline)
        self._at(begin, self._send, moving)

    def _send(self, now: float, moving: Moving) -> None:
        """The source hands over what it has now."""
        blocks = self._wanted(moving)
        moving.own = moving.target.hit(blocks)
        missing = max(computed_blocks(moving.source, blocks, self._block_size) - moving.own, 0)
        block_seconds = self._block_size * KV_TOKEN_BYTES * self._byte_seconds
        left = max(moving.deadline - now - LATENCY_SECONDS, 0.0)
        moving.come = min(missing, int(left / block_seconds))
        self._hold_up(now, moving.source, moving.come)
        end = min(now + LATENCY_SECONDS + missing * block_seconds, moving.deadline)
        self._at(end, self._come if moving.come else self._ended, moving)

    def _come(self, now: float, moving: Moving) -> None:
        """It is taken over between two iterations."""
        self._arrived[moving.target.i].append(moving)
        self._wake(now, moving.target)

    def _step(self, now: float, worker: Any) -> None:
        arrived, self._arrived[worker.i] = self._arrived[worker.i], []
        for moving in arrived:
            moving.inserted = insert(worker, self._wanted(moving)[: moving.own + moving.come], moving.own)
            self._stalls[worker.i] += self._copy_seconds(moving.inserted)
            self._at(now + self._stalls[worker.i], self._ended, moving)
        stall, self._stalls[worker.i] = self._stalls[worker.i], 0.0
        if stall > 0.0 or arrived:
            self._at(now + stall, self._step, worker)
        else:
            super()._step(now, worker)

    def _ended(self, now: float, moving: Moving) -> None:
        """Its worker has the KV, or never will: the request is queued there."""
        moved = moving.inserted * self._block_size
        self.moved_tokens += moved
        transfer = Transfer(
            moving.cost.moved_tokens,
            moved,
            moved * KV_TOKEN_BYTES,
            now - moving.asked_at,
            self._copy_seconds(moving.come),
            self._copy_seconds(moving.inserted),
        )
        cached = moving.target.hit(self._wanted(moving)) * self._block_size
        self._pull_rule.pull_ended(moving.request, cached, moving.cost.source, transfer, now)
        self._give(now, moving.target, moving.request)

    def _wanted(self, moving: Moving) -> Sequence[int]:
        blocks: Sequence[int] = moving.request.blocks[: moving.cost.tokens // self._block_size]
        return blocks

    def _copy_seconds(self, blocks: int) -> float:
        return blocks * self._block_size * KV_TOKEN_BYTES * COPY_BYTE_SECONDS

    def _hold_up(self, now: float, worker: Any, blocks: int) -> None:
        if blocks:
            self._stalls[worker.i] += self._copy_seconds(blocks)
            self._wake(now, worker)


# --- cells ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """What the arms have in common."""

    case: str
    workers: int
    load: float
    capacity: float


def figures_of(second: Any, requests: Sequence[Any], arm: Arm, cell: Cell, gbits: float, seed: int) -> dict[str, float]:
    """What one run finds. The requests are used up."""
    random.seed(seed)  # by which the second simulator's least load breaks ties
    fleet = PullFleet(second, cell.workers, cell.capacity, gbits / 8 * 1e9)
    fleet.play(requests, rule_of(second, arm, fleet.workers))
    found = {
        "hits": sum(one.cached for one in requests) / sum(len(one.tokens) for one in requests),
        "pulls": float(fleet.pulls),
        "moved_tokens": float(fleet.moved_tokens),
    }
    for what, end in (("ttft", "t_first"), ("latency", "t_done")):
        values = np.array([getattr(one, end) - one.t for one in requests])
        found[f"mean_{what}"], found[f"p99_{what}"] = float(np.mean(values)), float(np.percentile(values, 99))
    return found


def row_of(second: Any, made: dict[int, Sequence[Any]], arm: Arm, cell: Cell, gbits: float | None) -> dict[str, Any]:
    """Means over the seeds; of `gbits` None nothing is pulled."""
    runs = [
        figures_of(second, [replace(one) for one in requests], arm, cell, gbits or 1.0, seed)
        for seed, requests in made.items()
    ]
    means = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
    named = {"case": cell.case, "workers": cell.workers, "load": cell.load, "capacity": cell.capacity}
    return {**named, "gbits": gbits, "arm": arm.name, **means, "ttft_by_seed": [run["mean_ttft"] for run in runs]}


def groups(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The rows of each case, fleet, load and capacity, which are compared with each other."""
    second, cases = second_simulator(args.contest)
    arms = [ALL_ARMS[name] for name in args.arms]
    for name in args.cases:
        build, own_workers = cases.CASES[name]
        for workers in args.workers:
            for load in args.loads:
                made = {seed: build(load * workers / own_workers, seed) for seed in args.seeds}
                for capacity in args.capacity:
                    cell = Cell(name, workers, load, capacity)
                    rows = [row_of(second, made, arm, cell, None) for arm in arms if arm.least_tokens is None]
                    for gbits in args.gbits:
                        pulling = (arm for arm in arms if arm.least_tokens is not None)
                        rows += [row_of(second, made, arm, cell, gbits) for arm in pulling]
                    yield rows


def mean_ratio(row: dict[str, Any], beside: dict[str, Any] | None) -> str:
    """Of mean TTFT."""
    return "" if beside is None else f"{row['mean_ttft'] / beside['mean_ttft']:.3f}"


def print_group(rows: list[dict[str, Any]]) -> None:
    """A line for each."""
    never = next((row for row in rows if row["arm"] == NEVER.name), None)
    for row in rows:
        times = " | ".join(f"{row[name]:.3f}" for name in FIGURES)
        gbits = "any" if row["gbits"] is None else f"{row['gbits']:g}"
        print(
            f"| {row['case']} | {row['workers']} | {row['load']:g} | {row['capacity']:g} | {gbits} | {row['arm']} "
            f"| {times} | {row['hits']:.1%} | {row['pulls']:.1f} | {mean_ratio(row, never)} |",
            flush=True,
        )


def print_verdicts(rows: list[dict[str, Any]]) -> None:
    """How far the price is behind the best fixed rule of a group."""
    fixed = [row for row in rows if ALL_ARMS[row["arm"]].is_fixed]
    never = next((row for row in rows if row["arm"] == NEVER.name), None)
    for row in rows:
        beside = [one for one in fixed if one["gbits"] in (None, row["gbits"])]
        if row["arm"] != PRICED.name or not beside:
            continue
        best = min(beside, key=lambda one: float(one["mean_ttft"]))
        seeds = list(zip(row["ttft_by_seed"], best["ttft_by_seed"], strict=True))
        won, lost = sum(own < other for own, other in seeds), sum(own > other for own, other in seeds)
        p99, latency = (row[name] / best[name] for name in ("p99_ttft", "mean_latency"))
        print(
            f"| {row['case']} | {row['workers']} | {row['load']:g} | {row['capacity']:g} | {row['gbits']:g} "
            f"| {best['arm']} | {mean_ratio(row, best)} | {won}, {lost} | {p99:.3f} "
            f"| {latency:.3f} | {mean_ratio(row, never)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["docs", "coding", "unique"])
    parser.add_argument("--workers", type=int, nargs="+", default=[4])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.8, 1.2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--capacity", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--gbits", type=float, nargs="+", default=[10.0, 100.0])
    parser.add_argument("--arms", nargs="+", metavar="NAME", choices=ALL_ARMS, default=[arm.name for arm in ARMS])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--contest", type=Path, metavar="DIR", default=CONTEST)
    args = parser.parse_args()
    skip_without_it(parser, args.contest)
    print("| case | workers | load | capacity | Gbit/s | arm | TTFT: mean, s | p99 | latency: mean | p99 | hits "
          "| pulls | TTFT / never |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    found = []
    for rows in groups(args):
        print_group(rows)
        found.append(rows)
    print("\n| case | workers | load | capacity | Gbit/s | best fixed rule | price / best | seeds won, lost | p99 TTFT "
          "| latency | price / never |\n|---|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for rows in found:
        print_verdicts(rows)
    if args.json is not None:
        args.json.write_text(json.dumps([row for rows in found for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
