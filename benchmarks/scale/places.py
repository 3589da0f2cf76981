"""What it is worth to know how many requests a worker runs at once, where decoding fills its places and little is left
to prefill: simulated, beside rules that know nothing of it. Owns the cases and the table.

    python -m benchmarks.scale.places --seeds 6        two minutes

Questions about documents of some 1,800 tokens, the n-th asked for in proportion to 1 / n, and answers of 60 tokens in
the mean (geometric); workers with the A6000's costs and eight places. "e2, unknown" is not stated the places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.common.tables import markdown
from benchmarks.scale.seeded_cells import means_of_places, print_table, shown
from preble import WorkerSpec
from preble.sim import SimConfig, simulate
from preble.sim.config import engine_config
from preble.workloads.types import PromptRequest, Workload

PLACES = 8
DOCUMENTS = 10  # for each worker
DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 1800, 25, 60
REQUESTS = 200  # for each worker
RULES = {"round robin": "round_robin", "least load": "least_loaded", "e2, unknown": "e2", "e2": "e2"}
WORKERS = (2, 4, 8)
RATES = (1.0, 3.0, 3.5, 4.0, 4.5)  # requests a second and worker: nearly idle to overloaded


@dataclass(frozen=True)
class Cell:
    """One fleet under one load."""

    workers: int
    rate: float
    seed: int


def questions(cell: Cell) -> Workload:
    """The requests of a cell."""
    rng = np.random.default_rng([cell.seed, cell.workers])
    count = DOCUMENTS * cell.workers
    sizes = DOCUMENT_TOKENS * rng.uniform(0.6, 1.4, count)
    texts = [rng.integers(5, 30_000, int(size)).astype(np.int32) for size in sizes]
    weights = 1.0 / np.arange(1, count + 1)
    arrivals = np.cumsum(rng.exponential(1.0 / (cell.rate * cell.workers), REQUESTS * cell.workers))
    requests = []
    for number, at in enumerate(arrivals.tolist()):
        document = int(rng.choice(count, p=weights / weights.sum()))
        output = int(np.clip(rng.geometric(1.0 / ANSWER_TOKENS), 2, 8 * ANSWER_TOKENS))
        own = rng.integers(5, 30_000, QUESTION_TOKENS).astype(np.int32)
        parts = (texts[document], own)
        requests.append(PromptRequest(f"r{number}", parts, output, str(document), arrival_seconds=at))
    return Workload("questions", requests)


def run(cell: Cell) -> dict[str, list[float]]:
    """Mean and p99 of TTFT, and mean latency, by rule."""
    workload, found = questions(cell), {}
    for name, policy in RULES.items():
        local = replace(engine_config(), max_running=PLACES)
        known = None if name == "e2, unknown" else PLACES
        workers = tuple(
            WorkerSpec(f"w{number}", local.kv_capacity_tokens, max_running=known) for number in range(cell.workers)
        )
        config = SimConfig(workers, policy=policy, local=local, seed=cell.seed)
        summary = simulate(workload, config).summary()
        found[name] = [summary.mean_ttft_seconds, summary.p99_ttft_seconds, summary.mean_latency_seconds]
    return found


def table(seeds: int) -> str:
    """Means over the seeds: TTFT, its p99, latency."""
    places = [(workers, rate) for workers in WORKERS for rate in RATES]
    cells = [Cell(*place, seed) for place in places for seed in range(seeds)]
    rows = []
    for (workers, rate), means in zip(places, means_of_places(run, cells, seeds), strict=True):
        gain = means["e2"][0] / means["e2, unknown"][0]
        rows.append([str(workers), f"{rate:g}", *shown(means), f"{gain:.2f}"])
    return markdown(["workers", "requests/s a worker", *RULES, "TTFT, known over unknown"], rows)


if __name__ == "__main__":
    print_table(__doc__, table, 6)
