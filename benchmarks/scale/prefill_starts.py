"""Engines on which beginning a prefill takes most of its time: what a rule is worth that prices that beginning for each
request, although those that wait together begin together. Simulated, beside round robin and least load. Owns the cases
and the table.

    python -m benchmarks.scale.prefill_starts --seeds 4        half a minute

Two traffics: one system prompt of 1,500 tokens, 150 tokens of one of 20 users for each worker and a question; documents
of 1,200 to 2,000 tokens, nine for each worker. Costs as of a small model on one CPU core, eight places, 22,000 tokens.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.common import seeded
from benchmarks.common.tables import markdown
from preble import CostModel, WorkerSpec
from preble.sim import SimConfig, simulate
from preble.sim.config import engine_config
from preble.workloads.types import PromptRequest, Workload

COST = CostModel([(1, 0.035), (8, 0.09), (4096, 2.9)], start=0.38, name="one core")
PLACES, CAPACITY_TOKENS = 8, 22_000
SYSTEM_TOKENS, USER_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 1500, 150, 20, 12
USERS, DOCUMENTS = 20, 9  # for each worker
DOCUMENT_TOKENS = (1200, 2000)
REQUESTS = 100  # for each worker
RULES = {"round robin": "round_robin", "least load": "least_loaded", "e2": "e2"}
WORKERS = (2, 8)
RATES = {"system prompt": (0.4, 0.8, 1.1, 1.3, 1.5, 2.0), "documents": (0.4, 0.7, 0.9, 1.1)}  # a second and worker


@dataclass(frozen=True)
class Cell:
    """One fleet under one load."""

    traffic: str
    workers: int
    rate: float
    seed: int


def questions(cell: Cell) -> Workload:
    """The requests of a cell."""
    rng = np.random.default_rng([cell.seed, cell.workers])

    def text(tokens: int) -> np.ndarray:
        return rng.integers(5, 30_000, tokens).astype(np.int32)

    heads: list[tuple[np.ndarray, ...]]
    heads = [(text(int(size)),) for size in rng.uniform(*DOCUMENT_TOKENS, DOCUMENTS * cell.workers)]
    if cell.traffic == "system prompt":
        system = text(SYSTEM_TOKENS)
        heads = [(system, text(USER_TOKENS)) for _ in range(USERS * cell.workers)]
    arrivals = np.cumsum(rng.exponential(1.0 / (cell.rate * cell.workers), REQUESTS * cell.workers))
    requests = []
    for number, at in enumerate(arrivals.tolist()):
        parts = (*heads[rng.integers(len(heads))], text(QUESTION_TOKENS))
        requests.append(PromptRequest(f"r{number}", parts, ANSWER_TOKENS, str(number), arrival_seconds=at))
    return Workload(cell.traffic, requests)


def run(cell: Cell) -> dict[str, list[float]]:
    """Mean and p99 of TTFT, and mean latency, by rule."""
    workload, found = questions(cell), {}
    local = replace(engine_config(), max_running=PLACES, kv_capacity_tokens=CAPACITY_TOKENS)
    workers = tuple(
        WorkerSpec(f"w{number}", CAPACITY_TOKENS, max_running=PLACES, cost_model=COST) for number in range(cell.workers)
    )
    for name, policy in RULES.items():
        summary = simulate(workload, SimConfig(workers, policy=policy, local=local, seed=cell.seed)).summary()
        found[name] = [summary.mean_ttft_seconds, summary.p99_ttft_seconds, summary.mean_latency_seconds]
    return found


def table(seeds: int) -> str:
    """Means over the seeds: TTFT, its p99, latency."""
    places = [(traffic, workers, rate) for traffic in RATES for workers in WORKERS for rate in RATES[traffic]]
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(run, (Cell(*place, seed) for place in places for seed in range(seeds))))
    rows = []
    for at, (traffic, workers, rate) in enumerate(places):
        own = found[at * seeds : (at + 1) * seeds]
        means = {name: np.mean([one[name] for one in own], axis=0) for name in RULES}
        shown = [" / ".join(f"{seconds:.3g}" for seconds in means[name].tolist()) for name in RULES]
        ratio = means["e2"] / np.minimum(means["round robin"], means["least load"])
        rows.append([traffic, str(workers), f"{rate:g}", *shown, " / ".join(f"{one:.2f}" for one in ratio.tolist())])
    return markdown(["traffic", "workers", "requests/s a worker", *RULES, "e2 over the better of both"], rows)


if __name__ == "__main__":
    seeded.print_table(__doc__, table, seeds=4)
