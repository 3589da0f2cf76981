"""Writing and reading the frequent frames: our codec beside the msgpack package, in one run. Owns the frames and the
table.

    python -m benchmarks.transport.bench_wire

msgpack only turns lists of plain values into bytes and back; ours makes messages of them and checks every field. Each
figure is the median of repetitions that take turns; a frame is in the processor's caches, as one that has just come is
not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import msgpack
import numpy as np

from benchmarks.common.facts import commit, machine
from preble.transport import wire
from preble.types import PrefixEvicted, RequestEnded, RequestPlaced, RequestPrefilled, SamplingParams

PROMPT_TOKENS, EVICTED_TOKENS, EVICTIONS = 1838, 900, 8  # a mean prompt of ToolBench
CALLS, REPETITIONS = 500, 60
ALL = wire.ROUTER_MESSAGES | wire.WORKER_MESSAGES


def messages() -> dict[str, wire.Message]:
    """A message of each kind that is frequent."""
    prompt, path = (np.arange(count, dtype=np.int32) for count in (PROMPT_TOKENS, EVICTED_TOKENS))
    events = {
        f"event: a request of {PROMPT_TOKENS:,} tokens": (RequestPlaced("router-3", "r12345", prompt, None, 100),),
        "event: its first token": (RequestPrefilled("router-3", "r12345", 1500),),
        "event: its end": (RequestEnded("router-3", "r12345", 40),),
        f"{EVICTIONS} events: evictions": (PrefixEvicted(path, 500),) * EVICTIONS,
    }
    return {
        f"request of {PROMPT_TOKENS:,} tokens": wire.GenerationRequest(
            "r12345", prompt, SamplingParams(max_new_tokens=100)
        ),
        "output chunk of a token": wire.OutputChunk("r12345", 7, (42,), next_event_seq=1000),
        **{name: wire.Events(1000, batch) for name, batch in events.items()},
    }


def microseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS * 1e6


def row(name: str, message: wire.Message) -> str:
    frame = wire.encode(message, epoch=1, session=3, seq=70_000)
    values = msgpack.unpackb(frame)
    ways = (
        partial(wire.encode, message, epoch=1, session=3, seq=70_000),
        partial(msgpack.packb, values),
        partial(wire.decode, frame, ALL),
        partial(msgpack.unpackb, frame),
    )
    times = [[microseconds(way) for way in ways] for _ in range(REPETITIONS)]
    medians = " | ".join(f"{statistics.median(column):.2f}" for column in zip(*times, strict=True))
    return f"| {name} | {len(frame):,} | {medians} |"


def main() -> None:
    print(f"commit {commit()}, {machine()}\n")
    print("| frame | bytes | write, us | msgpack | read, us | msgpack |\n|---|---|---|---|---|---|")
    for name, message in messages().items():
        print(row(name, message))


if __name__ == "__main__":
    main()
