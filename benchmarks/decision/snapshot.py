"""Seconds to write and to read a snapshot of a scheduler with a million nodes, beside the least a machine needs for as
many bytes: one copy in memory, and `numpy.save` and `numpy.load` of them to memory.

    python -m benchmarks.decision.snapshot --nodes 1000000 --seed 0
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from preble import GlobalScheduler, ManualClock, SchedulerConfig, WorkerSpec


def grown(nodes: int, workers: int, tail_tokens: int, seed: int) -> GlobalScheduler:
    """A scheduler whose tree has that many nodes: shared beginnings of 64 tokens, each with 50 different tails."""
    random = np.random.default_rng(seed)
    specs = [WorkerSpec(f"w{i}", kv_capacity_tokens=2**31 - 1) for i in range(workers)]
    scheduler = GlobalScheduler(specs, config=SchedulerConfig(max_bytes=1 << 36), clock=ManualClock(1000.0))
    head = np.zeros(0, np.int32)
    number = 0
    while scheduler.core.tree.node_count < nodes:
        if number % 50 == 0:
            head = random.integers(0, 1 << 17, 64, dtype=np.int32)
        tail = random.integers(0, 1 << 17, tail_tokens, dtype=np.int32)
        scheduler.core.tree.insert(np.concatenate([head, tail]), 1000.0, worker=number // 50 % workers)
        number += 1
    for request in range(10_000):
        scheduler.schedule(random.integers(0, 1 << 17, 32, dtype=np.int32), request_id=request)
    return scheduler


def seconds_of(call: Callable[[], Any], rounds: int) -> float:
    """Median seconds of a call."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        kept = call()
        taken.append(time.perf_counter() - start)
        del kept
    return statistics.median(taken)


def numpy_round(data: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, data)
    return file.getvalue()


def main() -> None:
    """Grow, measure, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--tail-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    scheduler = grown(asked.nodes, asked.workers, asked.tail_tokens, asked.seed)
    data = scheduler.snapshot()
    array = np.frombuffer(data, np.uint8)
    saved = numpy_round(array)
    environment = {
        **vars(asked),
        "tree": scheduler.stats()["tree"],
        "snapshot_bytes": len(data),
        "snapshot_seconds": seconds_of(scheduler.snapshot, asked.rounds),
        "restore_seconds": seconds_of(lambda: GlobalScheduler.restore(data, clock=ManualClock(0.0)), asked.rounds),
        "copy_seconds": seconds_of(array.copy, asked.rounds),
        "numpy_save_seconds": seconds_of(lambda: numpy_round(array), asked.rounds),
        "numpy_load_seconds": seconds_of(lambda: np.load(io.BytesIO(saved)), asked.rounds),
    }
    environment["snapshot_per_copy"] = environment["snapshot_seconds"] / environment["copy_seconds"]
    environment["restore_per_copy"] = environment["restore_seconds"] / environment["copy_seconds"]
    print(json.dumps(environment, indent=2))


if __name__ == "__main__":
    main()
