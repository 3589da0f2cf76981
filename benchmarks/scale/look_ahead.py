"""What it brings that requests wait before a server until its engine has little left to prefill.

    python -m benchmarks.scale.look_ahead [--seeds 20] [--unseen]      a table for docs/experiments/look-ahead.md

The product's queue (`preble.router.server_queue`) stands before a model of an engine that serves what it has in the
order in which it came, as SGLang does by default (prefills first, several prompts in a batch, whose first tokens all
come at its end) or as vLLM does (every iteration decodes, and prefills as many tokens as are left of its budget). The
same requests at the same times come with and without the queue, to servers that are chosen by round robin, by least
load or by a fixed partition of the documents. What is sent takes a millisecond each way.

Of a part of the requests no first token is seen, as of answers that are not streamed (`seen` is the share of the
others); such a request leaves the queue with its end.

A row says how many times as long the first token, the slowest hundredth of them, and the whole answer take as with
everything sent at once (geometric mean over seeds). Rates are parts of what one engine can serve of such requests one
after the other. `costs` is what the queue expects of a prefill, times what it takes.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common.tables import markdown
from preble import ManualClock
from preble.router.server_queue import QueuedRequest, ServerQueue
from preble.transport.look_ahead import LOOK_AHEAD_SECONDS

HOP_SECONDS = 0.001
HEAD_TOKENS = 20  # by which all prompts begin alike, as those of a template do


@dataclass(frozen=True)
class Kind:
    """An engine with its model and machine, in seconds and tokens. `mixed`: prefills and decodes share iterations, and
    what two prompts of one share is computed once. `block`: so many tokens are cached together."""

    name: str
    overhead: float  # of an iteration
    per_token: float  # computed
    per_cached: float
    per_running: float  # that decodes, in an iteration
    places: int
    budget: int  # tokens prefilled in an iteration
    mixed: bool
    block: int

    def prefill(self, missed: int, cached: int) -> float:
        """One prompt by itself."""
        return self.overhead + missed * self.per_token + cached * self.per_cached


CPU = Kind("SGLang, 20M on a core", 0.02, 0.87e-3, 0.2e-3, 0.01, 8, 4096, False, 1)
CORE = Kind("vLLM, 20M on a core", 0.02, 0.74e-3, 0.02e-3, 0.01, 8, 2048, True, 16)
GPU = Kind("SGLang, 7B on a GPU", 0.012, 45e-6, 0.2e-6, 0.15e-3, 128, 8192, False, 1)
MIXED = Kind("vLLM, 7B on a GPU", 0.012, 45e-6, 0.2e-6, 0.15e-3, 128, 2048, True, 16)


@dataclass(frozen=True)
class Traffic:
    """Questions about documents: of so many tokens each, with so many tokens asked and answered. `is_one`: all are
    about the same one, at every worker."""

    name: str
    documents: int  # for each worker
    tokens: tuple[int, int]
    question: int
    output: int
    seconds: float  # of arrivals
    is_one: bool = False


LIVE = Traffic("documents of `run_arms`", 9, (1200, 2000), 16, 12, 60.0)
LONG = Traffic("documents of 4,000 to 20,000 tokens", 30, (4000, 20_000), 64, 100, 60.0)
ONE = Traffic("one system prompt of 1,650 tokens", 1, (1650, 1651), 60, 12, 60.0, True)
ONE_LONG = Traffic("one system prompt of 4,000 tokens", 1, (4000, 4001), 200, 100, 60.0, True)
SHORT = Traffic("chats of 100 tokens, nothing shared", 0, (0, 0), 100, 50, 20.0)


@dataclass(eq=False)
class Asked:
    """One request and what became of it."""

    number: int
    arrived: float
    document: int
    prefix: int
    question: int
    left: int  # tokens to decode
    streamed: bool = True
    worker: int = 0
    missed: int = -1  # yet to be computed; -1: it is not prefilled yet
    cached: int = 0
    first: float = math.nan
    ended: float = math.nan


def drawn(traffic: Traffic, kind: Kind, load: float, workers: int, seed: int) -> list[Asked]:
    """The requests of a run."""
    rng = np.random.default_rng([seed, workers])
    count = traffic.documents * (1 if traffic.is_one else workers)
    sizes = rng.integers(*traffic.tokens, size=count) if count else np.zeros(1, int)
    mean = float(sizes.mean())
    work = kind.prefill(traffic.question, int(mean)) + traffic.output * kind.per_running
    rate = load * workers / work
    asked: list[Asked] = []
    now = float(rng.exponential(1.0 / rate))
    while now < traffic.seconds:
        document = int(rng.integers(count)) if count else -1
        prefix = int(sizes[document]) if count else 0
        asked.append(Asked(len(asked), now, document, prefix, traffic.question, traffic.output))
        now += float(rng.exponential(1.0 / rate))
    return asked


class Engine:
    """One engine: what it has, in the order in which it came, and what it does next."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._waiting: list[Asked] = []
        self._running: list[Asked] = []
        self._cached: set[int] = set()

    def take(self, one: Asked) -> None:
        """A request has arrived."""
        self._waiting.append(one)

    def step(self) -> tuple[float, list[Asked], list[Asked]] | None:
        """An iteration: its seconds, those that get their first token at its end, and those that end. None: nothing is
        there."""
        kind = self._kind
        room = kind.places - len(self._running)
        begins = self._prefill(kind.budget - (len(self._running) if kind.mixed else 0), room)
        if not begins and not self._running:
            return None
        decodes = self._running if kind.mixed or not begins else []
        seconds = kind.overhead + kind.per_running * len(decodes)
        seconds += sum(missed * kind.per_token + cached * kind.per_cached for _, missed, cached in begins)
        for one in decodes:
            one.left -= 1
        ended = [one for one in decodes if one.left <= 0]
        self._running = [one for one in self._running if one.left > 0]
        first = [one for one, _, _ in begins if not one.missed]
        self._running += first
        self._cached.update(one.document for one in first)
        return seconds, first, ended

    def _prefill(self, budget: int, room: int) -> list[tuple[Asked, int, int]]:
        """What is computed now, of whom, and on top of how much that is cached; a long prompt goes on next time."""
        begins: list[tuple[Asked, int, int]] = []
        while self._waiting and budget > 0 and room > len(begins):
            one = self._waiting[0]
            cached = 0
            if one.missed < 0:
                cached = one.prefix if one.document in self._cached else 0
                one.missed = one.prefix + one.question - cached
            part = min(one.missed, budget)
            budget -= part
            one.missed -= part
            begins.append((one, part, cached))
            if one.missed:
                break
            if self._kind.mixed:
                self._cached.add(one.document)
            self._waiting.pop(0)
        return begins


@dataclass(frozen=True)
class Case:
    """One row."""

    kind: Kind
    traffic: Traffic
    load: float
    workers: int = 2
    place: str = "partition"
    costs: float = 1.0
    learned_seconds: float = math.inf  # when costs are known
    streamed: float = 1.0  # the share of the requests whose first token is seen


def _part(number: int) -> float:
    """A number of a request, evenly spread over 0 to 1."""
    return number * 0.6180339887498949 % 1.0


class Run:
    """Requests, queues and engines in one order of events."""

    def __init__(self, case: Case, seconds: float | None) -> None:
        self._case, self._kind, self._place, workers = case, case.kind, case.place, case.workers
        self.clock = ManualClock()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = itertools.count()
        self._engines = [Engine(case.kind) for _ in range(workers)]
        self._idle = [True] * workers
        self._live = [0] * workers
        self._queues = [ServerQueue(seconds, self.clock, self._later) for _ in range(workers)]
        for queue in self._queues:
            queue.computes_twice = not case.kind.mixed
        self._known: list[set[int]] = [set() for _ in range(workers)]

    def _later(self, seconds: float, call: Callable[[], object]) -> Any:
        entry = [call]

        class Handle:
            @staticmethod
            def cancel() -> None:
                entry[0] = lambda: None

        self._at(seconds, lambda: entry[0]())
        return Handle

    def _at(self, seconds: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.clock() + seconds, next(self._serial), call))

    def serve(self, asked: list[Asked]) -> None:
        """Until all have been answered."""
        for one in asked:
            self._at(one.arrived, lambda one=one: self._arrive(one))
        while self._events:
            at, _, call = heapq.heappop(self._events)
            self.clock.advance(max(at - self.clock(), 0.0))
            call()

    def _arrive(self, one: Asked) -> None:
        workers = len(self._engines)
        if self._place == "round robin":
            one.worker = one.number % workers
        elif self._place == "least load" or one.document < 0:
            one.worker = min(range(workers), key=lambda worker: self._live[worker])
        else:
            one.worker = one.document % workers
        self._live[one.worker] += 1
        one.streamed = _part(one.number) < self._case.streamed
        known, block = self._known[one.worker], self._kind.block
        alike = one.prefix if one.document in known else HEAD_TOKENS if known else 0
        cached = alike // block * block
        known.add(one.document)
        costs = self._case.costs if self.clock() < self._case.learned_seconds else 1.0
        expected = costs * self._kind.prefill(one.prefix + one.question - cached, cached)
        prompt = np.full(one.prefix + one.question, one.document, np.int32)
        prompt[:HEAD_TOKENS] = -1
        prompt[one.prefix :] = one.number + 1_000_000
        name, engine = str(one.number), self._engines[one.worker]

        def go() -> None:
            self._at(HOP_SECONDS, lambda: (engine.take(one), self._wake(one.worker)))

        self._queues[one.worker].enter(
            QueuedRequest(name, prompt, cached, expected, one.arrived, is_batch=False, is_streamed=one.streamed, go=go)
        )

    def _wake(self, worker: int) -> None:
        if not self._idle[worker]:
            return
        step = self._engines[worker].step()
        if step is None:
            return
        self._idle[worker] = False
        seconds, first, ended = step

        def over() -> None:
            self._idle[worker] = True
            for one in first:
                one.first = self.clock()
                if one.streamed:
                    self._at(HOP_SECONDS, lambda one=one: self._queues[worker].leave(str(one.number), has_begun=True))
            for one in ended:
                one.ended = self.clock()
                self._at(HOP_SECONDS, lambda one=one: self._queues[worker].leave(str(one.number)))
                self._live[worker] -= 1
            self._wake(worker)

        self._at(seconds, over)


def measured(case: Case, seconds: float | None, seed: int) -> tuple[float, float, float]:
    """Mean and p99 of TTFT, and mean latency."""
    asked = drawn(case.traffic, case.kind, case.load, case.workers, seed)
    Run(case, seconds).serve(asked)
    waits = np.array([one.first - one.arrived for one in asked])
    latencies = np.array([one.ended - one.arrived for one in asked])
    return float(waits.mean()), float(np.percentile(waits, 99)), float(latencies.mean())


def cases() -> list[Case]:
    """All rows: the live benchmark's engines, GPUs, an idle fleet and one that is asked too much, few and many."""
    found = [Case(CPU, LIVE, load) for load in (0.3, 0.6, 0.8, 1.1)]
    found += [replace(found[1], place=place) for place in ("round robin", "least load")]
    found += [replace(found[1], costs=costs) for costs in (0.1, 10.0)] + [replace(found[1], workers=8)]
    found += [replace(one, costs=0.15, learned_seconds=8.0) for one in found[1:3]]
    found += [Case(CPU, ONE, load, place="least load") for load in (0.5, 0.8, 0.95, 1.1)]
    found += [Case(CORE, LIVE, load) for load in (0.3, 0.6, 0.8, 1.1)]
    found += [Case(CORE, ONE, 0.95, place="least load")]
    found += [Case(CORE, LIVE, 0.6, place="least load"), Case(CORE, LIVE, 0.6, costs=0.15, learned_seconds=8.0)]
    for kind in (GPU, MIXED):
        found += [Case(kind, LONG, load) for load in (0.3, 0.6, 0.8, 1.1)]
        found += [Case(kind, LONG, 0.6, place=place) for place in ("round robin", "least load")]
        found += [Case(kind, LONG, 0.6, costs=costs) for costs in (0.1, 10.0)]
        found += [Case(kind, LONG, 0.6, costs=0.15, learned_seconds=8.0)]
        found += [Case(kind, ONE_LONG, load, place="least load") for load in (0.8, 1.1)]
        found += [Case(kind, SHORT, load, place="least load") for load in (0.5, 2.0)]
        found += [Case(kind, SHORT, 2.0, place="least load", costs=10.0)]
    return found


def unseen_cases() -> list[Case]:
    """Rows in which few first tokens are seen, or none."""
    before = [Case(CPU, LIVE, 0.8), Case(CORE, LIVE, 0.8), Case(GPU, LONG, 0.8), Case(MIXED, LONG, 0.8)]
    before += [Case(MIXED, LONG, 0.3), Case(GPU, SHORT, 2.0, place="least load")]
    changes = [(seen, costs) for seen in (0.0, 0.1, 0.5) for costs in (1.0, 10.0)]
    return [replace(case, streamed=seen, costs=costs) for case in before for seen, costs in changes]


def row(case: Case, seeds: int) -> list[str]:
    """A line of the table."""
    pairs = [(measured(case, None, seed), measured(case, LOOK_AHEAD_SECONDS, seed)) for seed in range(seeds)]
    before, after = (np.array(side) for side in zip(*pairs, strict=True))
    ratios = np.exp(np.log(after / before).mean(axis=0))
    costs = f"{case.costs:g}" + (f" for {case.learned_seconds:g} s" if math.isfinite(case.learned_seconds) else "")
    where = [case.kind.name, case.traffic.name, f"{case.load:g}", str(case.workers), case.place, costs]
    where.append(f"{case.streamed:g}")
    return [*where, f"{before[:, 0].mean():.3f}", *(f"{ratio:.2f}" for ratio in ratios)]


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="runs of each row (%(default)s)")
    parser.add_argument("--unseen", action="store_true", help="rows in which few first tokens are seen")
    args = parser.parse_args(argv)
    names = ["engine", "traffic", "load", "workers", "placed by", "costs", "seen", "mean TTFT at once, s"]
    names += ["mean TTFT, times", "p99 TTFT, times", "mean latency, times"]
    print(markdown(names, [row(case, args.seeds) for case in (unseen_cases() if args.unseen else cases())]))


if __name__ == "__main__":
    main()
