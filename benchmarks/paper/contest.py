"""The contest: every policy on every workload from light load to overload. Owns which cells there are, and is the face
of `contest_cells` (simulating), `contest_stats` (comparing), `contest_plot` and `contest_page`."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.paper.contest_cells import ORACLE, POLICIES, SOURCES, ContestCell
from benchmarks.paper.contest_cells import run_place as run_place
from benchmarks.paper.contest_page import section as section
from benchmarks.paper.contest_plot import draw as draw

LOADS = (0.3, 0.6, 0.9, 1.2)
SEEDS = 5
QUICK_LOADS = (0.6, 1.2)
QUICK_SEEDS = 3
QUICK_SHARE = 0.3
QUICK_POLICIES = ("e2", "cache_aware", "kv_cost", "lmetric", "round_robin", ORACLE)


def grid(quick: bool) -> Iterator[ContestCell]:
    """All cells; `quick`: two loads, three seeds, six policies, three tenths of the requests."""
    for workload in SOURCES:
        for load in QUICK_LOADS if quick else LOADS:
            for seed in range(QUICK_SEEDS if quick else SEEDS):
                if quick:
                    yield ContestCell(workload, load, seed, QUICK_SHARE, QUICK_POLICIES)
                else:
                    yield ContestCell(workload, load, seed, 1.0, POLICIES)
