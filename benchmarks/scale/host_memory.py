"""Host memory behind each engine's GPU memory, and what placement makes of it: the tables of
docs/experiments/host-memory.md. Owns the fleets, the loads and what is printed.

    python -m benchmarks.scale.host_memory               # all cells, some minutes
    python -m benchmarks.scale.host_memory --workers 2   # of one fleet

Documents are asked about (LooGLE's lengths); a worker's GPU memory holds four of them, its host memory seventeen. What
is loaded from there comes while other tokens are computed, at the pace of a link. Arms: what schedulers learn of it.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from preble import LocalConfig, sim, workloads
from preble.sim.results import Result
from preble.workloads import Workload

SEEDS = (11, 12, 13)
GPU_TOKENS, HOST_TOKENS = 100_000, 400_000
DOCUMENTS_PER_WORKER, QUESTIONS = 12, 10
# Title, policy, SimConfig.host_reports.
ARMS = (
    ("round robin", "round_robin", "media"),
    ("least load", "least_loaded", "media"),
    ("e2, any medium is a hit", "e2", "kept"),
    ("e2, only the GPU counts", "e2", "gone"),
    ("e2, by capacity", "e2", "none"),
    ("e2, by reports", "e2", "media"),
)
LINKS = {"host memory": 1e-5, "a slow link": 6e-5}  # seconds a token
LOADS = {"nearly idle": 0.03, "busy": 0.3, "overloaded": 2.0}  # requests a second and worker


def documents(workers: int, rps: float, seed: int) -> Workload:
    """Questions about documents, at random."""
    groups = DOCUMENTS_PER_WORKER * workers
    made = workloads.generate("loogle", requests=QUESTIONS * groups, groups=groups, seed=seed)
    return workloads.poisson(made, rps=rps, seed=seed)


def run(workers: int, load: float, link: float, policy: str, reports: str, seed: int) -> Result:
    """One simulation. What is stated of the link is what is stated by default; the truth must be learned."""
    local = LocalConfig(GPU_TOKENS, max_running=256, max_waiting=10**6, eviction="lru", short_first=False)
    behind: dict[str, Any] = {"host_tokens": HOST_TOKENS, "host_token_seconds": link, "host_reports": reports}
    config = sim.SimConfig(workers=workers, policy=policy, local=local, seed=seed, **behind)
    return sim.simulate(documents(workers, load * workers, seed), config)


def cell(workers: int, load: float, link: float, policy: str, reports: str) -> tuple[float, float, float, float]:
    """Mean and p99 TTFT, mean and p99 latency: means over the seeds."""
    found = []
    for seed in SEEDS:
        result = run(workers, load, link, policy, reports, seed)
        both = (result.ttft_seconds, result.latency_seconds)
        found.append([value for one in both for value in (np.nanmean(one), np.nanquantile(one, 0.99))])
    ttft, ttft99, latency, latency99 = np.mean(found, axis=0)
    return float(ttft), float(ttft99), float(latency), float(latency99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 16])
    args = parser.parse_args()
    print("| workers, load, link | arm | TTFT: mean, p99 | latency: mean, p99 |")
    print("|---|---|---|---|")
    for workers in args.workers:
        for load_name, load in LOADS.items():
            for link_name, link in LINKS.items():
                for title, policy, reports in ARMS:
                    ttft, ttft99, latency, latency99 = cell(workers, load, link, policy, reports)
                    row = f"{title} | {ttft:.3f}, {ttft99:.3f} | {latency:.3f}, {latency99:.3f}"
                    print(f"| {workers}, {load_name}, {link_name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
