"""CPU time to forget a worker's cache, by the number of its marks: the call itself, which decisions wait for, and the
slices that `tick` sweeps afterwards. Beside them, in the same run, the removal of the same marks one event at a time.

    python -m benchmarks.decision.clear --marks 10000 100000 1000000 --seed 0
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from benchmarks.common.facts import environment
from preble._radix import RadixTree

SLICE_MARKS = 256
TAIL_TOKENS = 8


def grown(marks: int, seed: int) -> tuple[RadixTree, list[np.ndarray]]:
    """A tree in which worker 0 holds that many nodes, and worker 1 the same; and the prompts."""
    random = np.random.default_rng(seed)
    tree = RadixTree(max_bytes=1 << 36)
    prompts = [random.integers(0, 1 << 30, TAIL_TOKENS, dtype=np.int32) for _ in range(marks)]
    for worker in (0, 1):
        tree.add_worker(2**31 - 1)
        for prompt in prompts:
            tree.insert(prompt, 1000.0, worker=worker)
    return tree, prompts


def cpu_seconds(call: Any) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def cleared(marks: int, seed: int) -> dict[str, float]:
    """Clear and sweep one worker, and remove another's marks one by one."""
    tree, prompts = grown(marks, seed)
    clear_seconds = cpu_seconds(lambda: tree.clear_worker(0))
    slices = []
    while tree.stats()["ghost_marks"]:
        slices.append(cpu_seconds(lambda: tree.sweep(SLICE_MARKS)))
    by_event_seconds = cpu_seconds(lambda: [tree.unmark(prompt, 1, 0) for prompt in prompts])
    tree.check()
    return {
        "marks": marks,
        "clear_seconds": clear_seconds,
        "worst_slice_seconds": max(slices, default=0.0),
        "all_slices_seconds": sum(slices),
        "one_by_one_seconds": by_event_seconds,
    }


def main() -> None:
    """Measure, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--marks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = [cleared(marks, args.seed) for marks in args.marks]
    print(json.dumps({"rows": rows, "facts": environment(args.seed)}, indent=1))


if __name__ == "__main__":
    main()
