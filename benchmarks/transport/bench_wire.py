"""Reading what workers tell: the compiled way beside the table of fields, in one run. Owns the frames and the table.

    python -m benchmarks.transport.bench_wire

Each figure is the median of repetitions that take turns; a frame is in the processor's caches, as one that has just
come is not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.common.facts import commit, machine
from preble.transport import wire
from preble.types import PrefixEvicted, RequestEnded, RequestPlaced, RequestPrefilled

PROMPT_TOKENS, EVICTED_TOKENS, EVICTIONS = 1838, 900, 8  # a mean prompt of ToolBench
CALLS, REPETITIONS = 2000, 15
EVENTS_ONLY = frozenset({wire.Events})


def frames() -> dict[str, bytes]:
    """A frame of each kind that is frequent."""
    prompt, path = (np.arange(count, dtype=np.int32) for count in (PROMPT_TOKENS, EVICTED_TOKENS))
    told = {
        f"a request of {PROMPT_TOKENS:,} tokens": (RequestPlaced("router-3", "r12345", prompt, None, 100),),
        "its first token": (RequestPrefilled("router-3", "r12345", 1500),),
        "its end": (RequestEnded("router-3", "r12345", 40),),
        f"{EVICTIONS} evictions": (PrefixEvicted(path, 500),) * EVICTIONS,
    }
    return {name: wire.encode(wire.Events(1000, events), epoch=1) for name, events in told.items()}


def microseconds(decode: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(CALLS):
        decode()
    return (time.perf_counter() - started) / CALLS * 1e6


def row(name: str, frame: bytes) -> str:
    ways = (wire.decode_by_fields, wire.decode)
    times = [[microseconds(partial(way, frame, EVENTS_ONLY)) for way in ways] for _ in range(REPETITIONS)]
    by_fields, compiled = (statistics.median(column) for column in zip(*times, strict=True))
    ratios = sorted(one / other for one, other in times)
    return (
        f"| {name} | {len(frame):,} | {by_fields:.1f} | {compiled:.1f} "
        f"| {statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f}) |"
    )


def main() -> None:
    print(f"commit {commit()}, {machine()}\n")
    print("| frame | bytes | by fields, us | compiled, us | ratio |\n|---|---|---|---|---|")
    for name, frame in frames().items():
        print(row(name, frame))


if __name__ == "__main__":
    main()
