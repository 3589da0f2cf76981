"""Two threads against one on one shared scheduler, in a process of its own. Owns that measurement only.

Each thread takes its own prompts of the stream, in turn a `match` and a `schedule` with the `finish` of an earlier
request; all are plain calls, one at a time. Threads start together at a barrier. One thread does a piece of work, then
two threads do such a piece each, on a new scheduler warmed alike; so alternately, `repeats` times. The figure is the
median of operations per second of two threads over the median of one. Prompts come straight from the stream here,
since copying them first would be timed, too; one thread and two pay the same for it.

Beside it stands what the interpreter allows: such loops around a C function that does nothing but compare buffers of
several sizes, keeping the GIL or releasing it. Who releases the GIL must take it again, and a thread that waits for
the GIL is woken by the kernel, which can take longer than a short call does.

    python -m benchmarks.decision.scaling \
        '{"shape": "toolbench200", "workers": 8, "as_list": false, "count": 8000, "seed": 0}'
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import preble
from benchmarks.decision import limits
from benchmarks.decision.cells import IN_FLIGHT, OUTPUT_TOKENS, SECONDS_PER_REQUEST
from benchmarks.decision.shapes import DEFAULT_TRACE, Tokens, prompts

THREADS = (1, 2)
CEILING_BYTES = (8_000, 20_000, 60_000, 200_000, 600_000)
CEILING_SECONDS = 0.2
Work = Callable[[list[Any]], None]


def seconds_together(work: Work, parts: list[list[Any]]) -> float:
    """From the first thread's start to the last one's end, a thread for each part."""
    barrier = threading.Barrier(len(parts))
    spans: list[tuple[float, float]] = []

    def run(part: list[Any]) -> None:
        barrier.wait()
        start = time.perf_counter()
        work(part)
        spans.append((start, time.perf_counter()))

    threads = [threading.Thread(target=run, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(spans) == len(parts), "a thread ended with an error"
    return max(end for _, end in spans) - min(start for start, _ in spans)


def operations(scheduler: preble.GlobalScheduler, kind: str) -> Work:
    """What a thread does with its prompts; it binds the methods once, as any loop should that is to be quick."""

    def matches(part: list[Any]) -> None:
        match = scheduler.match
        for tokens in part:
            match(tokens)

    def schedules(part: list[Any]) -> None:
        schedule, finish = scheduler.schedule, scheduler.finish
        live: deque[Any] = deque()
        for tokens in part:
            live.append(schedule(tokens).request_id)
            if len(live) > IN_FLIGHT:
                finish(live.popleft(), output_tokens=OUTPUT_TOKENS)

    def mixed(part: list[Any]) -> None:
        match, schedule, finish = scheduler.match, scheduler.schedule, scheduler.finish
        live: deque[Any] = deque()
        for position, tokens in enumerate(part):
            if position % 2:
                match(tokens)
                continue
            live.append(schedule(tokens).request_id)
            if len(live) > IN_FLIGHT:
                finish(live.popleft(), output_tokens=OUTPUT_TOKENS)

    return {"match": matches, "schedule": schedules, "mixed": mixed}[kind]


def warmed(stream: list[Tokens], workers: int) -> preble.GlobalScheduler:
    """A scheduler that has served these prompts."""
    clock = preble.ManualClock()
    scheduler = preble.GlobalScheduler([f"w{i}" for i in range(workers)], clock=clock)
    for tokens in stream:
        clock.advance(SECONDS_PER_REQUEST)
        scheduler.finish(scheduler.schedule(tokens).request_id, output_tokens=OUTPUT_TOKENS)
    return scheduler


def warmed_operations(stream: list[Tokens], workers: int, kind: str) -> Work:
    """What a thread does, on a new scheduler that has served these prompts."""
    return operations(warmed(stream, workers), kind)


def ceiling(repeats: int) -> list[dict[str, float]]:
    """How two threads of calls of several lengths scale when nothing is shared but the interpreter."""
    module, rows = limits.compiled(), []
    for size in CEILING_BYTES:
        parts: list[list[Any]] = [[bytearray(size), bytearray(size)] for _ in range(max(THREADS))]
        row: dict[str, float] = {"bytes": size}
        for name, release in (("holding_gil", False), ("releasing_gil", True)):
            probe = seconds_together(comparing(module, release, 2_000), parts[:1])
            calls = int(2_000 * CEILING_SECONDS / probe) + 1
            found = alternately(partial(comparing, module, release, calls), parts, repeats)
            row[f"{name}_call_us"] = 1e6 / (found["per_second_1"] / len(parts[0]) * calls)
            row[f"{name}_ratio"] = found["ratio"]
        rows.append(row)
    return rows


def comparing(module: ModuleType, release: bool, calls: int) -> Work:
    """So many comparisons of the two buffers of a part."""

    def compare(part: list[Any]) -> None:
        mine, other = part
        for _ in range(calls):
            module.equal(mine, other, release)

    return compare


def alternately(make: Callable[[], Work], parts: list[list[Any]], repeats: int) -> dict[str, Any]:
    """Operations per second with one thread and with two, and their ratio; medians of `repeats`."""
    rates: dict[int, list[float]] = {threads: [] for threads in THREADS}
    for _ in range(repeats):
        for threads in THREADS:
            seconds = seconds_together(make(), parts[:threads])
            rates[threads].append(sum(map(len, parts[:threads])) / seconds)
    one, two = (statistics.median(rates[threads]) for threads in THREADS)
    return {"per_second_1": one, "per_second_2": two, "ratio": two / one, "all": [rates[t] for t in THREADS]}


def measured(cell: dict[str, Any], repeats: int, trace: Path) -> dict[str, Any]:
    """The figures of every kind of work for one stream."""
    stream = prompts(cell["shape"], cell["count"], seed=cell["seed"], trace=trace)
    warm, rest = stream[: len(stream) // 4], stream[len(stream) // 4 :]
    half = len(rest) // 2
    given: list[Any] = [tokens.tolist() for tokens in rest] if cell["as_list"] else list(rest)
    parts = [given[:half], given[half : 2 * half]]
    gc.collect()
    gc.freeze()
    found: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "operations_per_thread": half}
    for kind in ("mixed", "match", "schedule"):
        found[kind] = alternately(partial(warmed_operations, warm, cell["workers"], kind), parts, repeats)
    return found


def main() -> int:
    wanted = json.loads(sys.argv[1])
    cell = {key: wanted[key] for key in ("shape", "workers", "as_list", "count", "seed")}
    repeats = wanted.get("repeats", 5)
    found = measured(cell, repeats, Path(wanted.get("trace", DEFAULT_TRACE)))
    if wanted.get("ceiling"):
        found["ceiling"] = ceiling(repeats)
    print(json.dumps({**cell, **found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
