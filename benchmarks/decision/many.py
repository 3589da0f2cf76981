"""Single calls of `schedule` beside `schedule_many` for the same prompts, in a process of its own. Owns that
measurement only.

Two schedulers are warmed alike. Then they take the same batches, in turn: one by single calls, the other by one call
for each batch; who comes first changes with every batch, so that neither finds the prompts always warm. The requests
of an earlier batch end in between, outside of what is timed. Figures: median nanoseconds a prompt either way, and the
median over batches of the one over the other.

`documents`: how many shared documents the prompts of toolbench are about; many make a tree that no cache holds.

    python -m benchmarks.decision.many '{"documents": 200, "workers": 8, "count": 20000, "batch": 64, "seed": 0}'
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections import deque
from typing import Any

import numpy as np

import preble
from benchmarks.decision.cells import OUTPUT_TOKENS, SECONDS_PER_REQUEST, pin
from benchmarks.decision.shapes import VOCABULARY, Tokens

BATCHES_LIVE = 4  # whose requests have not ended


def stream(documents: int, count: int, seed: int) -> list[Tokens]:
    """Prompts as tools have them: 400 tokens for all, 1,150 of a document, 285 of their own."""
    rng = np.random.default_rng([seed, 55])
    system = rng.integers(0, VOCABULARY, 400, np.int32)
    shared = rng.integers(0, VOCABULARY, (documents, 1150), np.int32)
    own = rng.integers(0, VOCABULARY, (count, 285), np.int32)
    return [
        np.concatenate([system, shared[pick], last])
        for pick, last in zip(rng.integers(0, documents, count), own, strict=True)
    ]


class Side:
    """One of the two schedulers, and what its batches took."""

    def __init__(self, workers: int, together: bool) -> None:
        self.clock = preble.ManualClock()
        names = [preble.WorkerSpec(f"w{i}", kv_capacity_tokens=100_000_000) for i in range(workers)]
        self.scheduler = preble.GlobalScheduler(
            names, clock=self.clock, config=preble.SchedulerConfig(max_bytes=8 << 30)
        )
        self._together = together
        self._live: deque[list[Any]] = deque()
        self.took_ns: list[float] = []
        self.chosen: list[str] = []

    def place(self, batch: list[Tokens]) -> None:
        """One batch; ends the requests of an earlier one."""
        schedule = self.scheduler.schedule
        start = time.perf_counter_ns()
        decisions = self.scheduler.schedule_many(batch) if self._together else [schedule(tokens) for tokens in batch]
        self.took_ns.append((time.perf_counter_ns() - start) / len(batch))
        self.chosen += [decision.worker for decision in decisions]
        self._live.append(decisions)
        self.clock.advance(SECONDS_PER_REQUEST * len(batch))
        if len(self._live) > BATCHES_LIVE:
            for decision in self._live.popleft():
                self.scheduler.finish(decision.request_id, output_tokens=OUTPUT_TOKENS)


def measured(documents: int, workers: int, count: int, batch: int, seed: int) -> dict[str, Any]:
    """The figures; the first half of the prompts warms both."""
    given = stream(documents, count, seed)
    batches = [given[at : at + batch] for at in range(0, count - batch + 1, batch)]
    sides = Side(workers, False), Side(workers, True)
    gc.collect()
    gc.freeze()
    for number, prompts in enumerate(batches):
        for side in sides if number % 2 else sides[::-1]:
            side.place([tokens.copy() for tokens in prompts])
    single, together = (side.took_ns[len(batches) // 2 :] for side in sides)
    assert sides[0].chosen == sides[1].chosen, "the same decisions either way"
    return {
        "nodes": sides[1].scheduler.stats()["tree"]["nodes"],
        "single_ns": round(statistics.median(single)),
        "many_ns": round(statistics.median(together)),
        "ratio": round(statistics.median(a / b for a, b in zip(single, together, strict=True)), 3),
    }


def main() -> int:
    wanted = json.loads(sys.argv[1])
    pin()
    print(json.dumps({**wanted, **measured(**wanted)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
