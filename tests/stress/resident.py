"""Is `max_bytes` what the process really grows by? Fills a scheduler far beyond the bound with tool prompts, churns
with lengths that vary a hundredfold, and compares the growth of resident memory with what the scheduler says it has.

Owns the traffic and the measure; `test_resident.py` owns the bounds. One line of JSON a phase, all in bytes:
what the scheduler says (`says_bytes`), what malloc has given out for it (`malloc_bytes`), what the process has grown by
(`resident_bytes`), and the last once more after malloc was asked to return what it can (`trimmed_bytes`).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from preble import GlobalScheduler, ManualClock, SchedulerConfig, WorkerSpec
from tests.stress.leaks import measure

MIB = 1 << 20
SYSTEM_TOKENS, TOOL_TOKENS, QUESTION_TOKENS, TOOLS = 400, 1150, 285, 200  # 1,835 a prompt
VOCABULARY = 32_000
WARM_UP = 50
SMAPS = Path("/proc/self/smaps_rollup")
TICK_EVERY = 100


def resident_bytes() -> int:
    """Resident memory that this process itself wrote, page by page (statm lags behind).

    Pages of files are left out: how much of the libraries' code is mapped depends on what lies in the machine's page
    cache, which once made this 0.2 % of the bound more.
    """
    for line in SMAPS.read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"{SMAPS} has no Anonymous")


@dataclass
class Baseline:
    """What there was before the first prompt that is measured."""

    resident: int
    given_out: int
    said: int


class Fill:
    """One scheduler and prompts of a shared system text, one of many tools, and a question of its own."""

    def __init__(self, max_bytes: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        system = self.tokens(SYSTEM_TOKENS)
        self.tools = [np.concatenate([system, self.tokens(TOOL_TOKENS)]) for _ in range(TOOLS)]
        self.clock = ManualClock(1.0)
        self.sched = GlobalScheduler(
            [WorkerSpec(f"w{i}", kv_capacity_tokens=10**9) for i in range(8)],  # only max_bytes bounds what is kept
            # What plans and fits take has bounds of its own (a megabyte or so); this is about the tree's.
            config=SchedulerConfig(max_bytes=max_bytes, calibrate=False, rebalance_ratio=0.0, replicas_max=1),
            clock=self.clock,
        )
        self.given_out = measure() or (lambda: 0)
        self.count = 0

    def tokens(self, count: int) -> Any:
        return self.rng.integers(0, VOCABULARY, count, dtype=np.int32)

    def usual(self) -> Any:
        return np.concatenate([self.tools[self.rng.integers(TOOLS)], self.tokens(QUESTION_TOKENS)])

    def varied(self) -> Any:
        """A tool's text cut anywhere, so that nodes are split, and a question of 1 to 20,000 tokens, median 150."""
        tool = self.tools[self.rng.integers(TOOLS)]
        question = int(min(20_000, max(1, self.rng.lognormal(5.0, 1.2))))
        return np.concatenate([tool[: self.rng.integers(1, len(tool) + 1)], self.tokens(question)])

    def serve(self, prompt: Any) -> None:
        decision = self.sched.schedule(prompt, max_new_tokens=32)
        self.sched.finish(decision.request_id)
        self.clock.advance(0.01)
        self.count += 1
        if self.count % TICK_EVERY == 0:
            self.sched.tick()

    def baseline(self) -> Baseline:
        gc.collect()
        return Baseline(resident_bytes(), self.given_out(), self.tree()["bytes_used"])

    def tree(self) -> dict[str, int]:
        tree: dict[str, int] = self.sched.stats()["tree"]
        return tree

    def report(self, phase: str, base: Baseline, trim: bool = False) -> None:
        tree = self.tree()
        said = {
            "phase": phase,
            "prompts": self.count,
            "max_bytes": tree["bytes_max"],
            "says_bytes": tree["bytes_used"] - base.said,
            "malloc_bytes": self.given_out() - base.given_out,
            "resident_bytes": resident_bytes() - base.resident,
            "nodes": tree["nodes"],
            "shed_nodes": tree["shed_nodes"],
        }
        if trim:
            ctypes.CDLL(None).malloc_trim(0)
            said["trimmed_bytes"] = resident_bytes() - base.resident
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Is max_bytes what the process really grows by?")
    parser.add_argument("--max-bytes", type=int, default=256 * MIB)
    parser.add_argument("--churn", type=int, default=300_000, help="prompts of varied length once it is full")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    fill = Fill(chosen.max_bytes, chosen.seed)
    for _ in range(WARM_UP):
        fill.serve(fill.usual())
    base = fill.baseline()
    while fill.tree()["shed_nodes"] == 0:
        fill.serve(fill.usual())
    fill.report("full", base)
    for _ in range(fill.count // 2):  # half as many again, so that a third of all prompts has been shed
        fill.serve(fill.usual())
    fill.report("shed", base)
    for lap in range(3):
        for _ in range(chosen.churn // 3):
            fill.serve(fill.varied())
        fill.report("churned", base, trim=lap == 2)


if __name__ == "__main__":
    main()
