"""One cell of the schedule benchmark, in a process of its own: Preble and the machine's limit on one stream. Owns the
driving of `GlobalScheduler` and its timing; the table is `report.py`'s, the choice of cells `bench_schedule.py`'s.

A process a cell makes resident memory mean something: what an earlier cell freed is not there to be used again. The
process is pinned to one core. Every request is scheduled, and finished IN_FLIGHT requests later; the clock is a manual
one that advances by 20 ms a request, and every 50 requests the scheduler ticks. The first quarter warms up.
Memory is the growth over the stream, with what a first scheduler loads into the process left out.

    python -m benchmarks.decision.cells \
        '{"shape": "toolbench200", "workers": 8, "as_list": false, "count": 6000, "seed": 0}'

prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

import preble
from benchmarks.decision import limits
from benchmarks.decision.shapes import DEFAULT_TRACE, Tokens, digest, prompts

IN_FLIGHT = 64
OUTPUT_TOKENS = 43
SECONDS_PER_REQUEST = 0.02
REQUESTS_PER_TICK = 50


def pin() -> int:
    """Keep this process, and the threads it will start, on the last core it may use; returns that core."""
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def resident_bytes() -> int:
    """Resident memory now, after giving back to the system what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Run:
    """A stream driven through one scheduler; what each call took, and where each request went."""

    def __init__(self, stream: list[Tokens], workers: int, as_list: bool) -> None:
        self._stream = stream
        self._names = [f"w{i}" for i in range(workers)]
        self._give = limits.Fresh(stream, as_list).give
        self.schedule_ns, self.finish_ns = np.full((2, len(stream)), np.nan)
        self.matched, self.chosen = np.full((2, len(stream)), -1)

    def drive(self) -> preble.GlobalScheduler:
        """Schedule all with a new scheduler, and finish most; returns the scheduler."""
        clock = preble.ManualClock()
        scheduler = preble.GlobalScheduler(self._names, clock=clock)
        live: deque[Any] = deque()
        rows = {name: row for row, name in enumerate(self._names)}
        now = time.perf_counter_ns
        for position, tokens in enumerate(self._stream):
            clock.advance(SECONDS_PER_REQUEST)
            fresh = self._give(tokens)
            start = now()
            decision = scheduler.schedule(fresh)
            self.schedule_ns[position] = now() - start
            self.matched[position] = decision.matched_tokens
            self.chosen[position] = rows[decision.worker]
            live.append(decision.request_id)
            if len(live) > IN_FLIGHT:
                ended = live.popleft()
                start = now()
                scheduler.finish(ended, output_tokens=OUTPUT_TOKENS)
                self.finish_ns[position] = now() - start
            if position % REQUESTS_PER_TICK == 0:
                scheduler.tick()
        return scheduler


def times(took_ns: Any, name: str) -> dict[str, float]:
    """p50 and p99 of some calls."""
    return {f"{name}_ns_p50": float(np.percentile(took_ns, 50)), f"{name}_ns_p99": float(np.percentile(took_ns, 99))}


def placement(stream: list[Tokens], matched: Any, chosen: Any, workers: int) -> dict[str, float]:
    """How good the decisions are: share of tokens found cached, and the busiest worker's requests over the mean."""
    counts = np.bincount(chosen, minlength=workers)
    return {
        "hit_fraction": float(np.sum(matched) / sum(map(len, stream))),
        "load_spread": float(counts.max() / counts.mean()),
    }


def measured(shape: str, workers: int, as_list: bool, count: int, seed: int, trace: Path) -> dict[str, Any]:
    """The cell's figures. Raises ValueError for an unknown shape or a missing trace."""
    stream = prompts(shape, count, seed=seed, trace=trace)
    warm = len(stream) // 4
    Run(stream[:1], workers, as_list).drive()  # modules, code and what else a process needs once
    run = Run(stream, workers, as_list)
    before = resident_bytes()
    gc.freeze()  # the stream is no garbage, and would be looked through again and again
    scheduler = run.drive()
    grown = resident_bytes() - before
    scheduler.check()
    limit = limits.limit_of(limits.compiled(), stream, warm, as_list)
    p50 = float(np.percentile(run.schedule_ns[warm:], 50))
    return {
        **times(run.schedule_ns[warm:], "schedule"),
        **times(run.finish_ns[max(warm, IN_FLIGHT) :], "finish"),
        "limit_ns_p50": limit.call_ns_p50,
        "compare_and_copy_ns_p50": limit.compare_and_copy_ns_p50,
        "floor_ns_p50": limit.floor_ns_p50,
        "limit_shared_fraction": limit.shared_fraction,
        "ratio_to_limit": p50 / limit.call_ns_p50,
        **placement(stream[warm:], run.matched[warm:], run.chosen[warm:], workers),
        "tree_bytes_per_prompt": scheduler.stats()["tree"]["bytes_used"] / len(stream),
        "rss_bytes_per_prompt": grown / len(stream),
        "mean_tokens": sum(map(len, stream)) / len(stream),
        "prompts": len(stream),
        "digest": digest(stream),
        "clock_ns": limits.clock_ns(),
    }


def main() -> int:
    wanted = json.loads(sys.argv[1])
    pin()
    cell = {key: wanted[key] for key in ("shape", "workers", "as_list", "count", "seed")}
    found = measured(**cell, trace=Path(wanted.get("trace", DEFAULT_TRACE)))
    print(json.dumps({**cell, **found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
