"""What the first minutes cost where servers say how long requests took them that others sent: simulated, beside nothing
said, the right costs given, and rules that need to know nothing. Owns the cases and the table.

    python -m benchmarks.scale.served_before --seeds 8        two minutes

What a server says is of times among others' prefills, so that of two alike a busier one says that it is slower.
Questions about documents of some 1,800 tokens, nine a worker of which a cache holds seven, for a minute and a half;
workers as slow as a small model on a core, which nobody described.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common.tables import markdown
from benchmarks.scale.seeded_cells import means_of_places, print_table, shown
from preble import CostModel, GlobalScheduler, SchedulerConfig, WorkerSpec
from preble.scheduling.calibration import NEUTRAL
from preble.scheduling.cost_factors import scaled
from preble.sim import SimConfig
from preble.sim.config import engine_config
from preble.sim.simulation import Simulation
from preble.types import ServedWork
from preble.workloads.types import PromptRequest, Workload

PLACES, CAPACITY_TOKENS = 8, 12_500
DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 9, 1800, 25, 12
SECONDS = 90.0
RATES = (0.6, 1.25)  # requests a second and worker: nearly idle, near saturation
RULES = ("round_robin", "least_loaded", "e2, costs given", "e2, nothing said", "e2, as said")
# Of an engine of 20 million weights on a core: 0.75 s for 1,400 tokens that miss, 0.02 s for a token.
TRUTH = CostModel([(1, 0.016), (64, 0.055), (256, 0.131), (1024, 0.54)], context=(0, 0, 0, 2.4e-6), start=0.01)
CASES: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {  # how slow each is, and says that it is
    "2 alike, and say so": ((1, 1), (1, 1)),
    "2 alike, one says 2 times slower": ((1, 1), (1, 2)),
    "2 alike, one says 4 times slower": ((1, 1), (1, 4)),
    "2 alike, one says 8 times slower": ((1, 1), (1, 8)),
    "8 alike, say 1 to 4 times": ((1,) * 8, (1, 1, 1.5, 1.5, 2, 2, 4, 4)),
    "2, one 3 times slower, and says so": ((2 / 3, 2), (2 / 3, 2)),
    "2, one 6 times slower, and says so": ((0.6, 3.6), (0.6, 3.6)),
    "4, half 4 times slower, and say so": ((0.5, 0.5, 2, 2), (0.5, 0.5, 2, 2)),
    "8, half 3 times slower, and say so": ((2 / 3,) * 4 + (2,) * 4, (2 / 3,) * 4 + (2,) * 4),
}


@dataclass(frozen=True)
class Cell:
    """One fleet under one load."""

    case: str
    rate: float
    seed: int


class SaidBefore(GlobalScheduler):
    """A scheduler whose workers say something when they join."""

    words: dict[str, ServedWork]

    def add_worker(self, spec: WorkerSpec | str, *, served: ServedWork | None = None) -> WorkerSpec:
        """As the scheduler's own, with what this worker says."""
        name = spec if isinstance(spec, str) else spec.id
        return super().add_worker(spec, served=self.words.get(name))


def questions(workers: int, rate: float, seed: int) -> Workload:
    """The requests of a cell."""
    rng = np.random.default_rng([seed, workers])
    sizes = DOCUMENT_TOKENS * rng.uniform(0.67, 1.1, DOCUMENTS * workers)
    texts = [rng.integers(5, 30_000, int(size)).astype(np.int32) for size in sizes]
    requests: list[PromptRequest] = []
    at = 0.0
    while (at := at + rng.exponential(1.0 / (rate * workers))) < SECONDS:
        document = int(rng.integers(len(texts)))
        parts = (texts[document], rng.integers(5, 30_000, QUESTION_TOKENS).astype(np.int32))
        requests.append(PromptRequest(f"r{len(requests)}", parts, ANSWER_TOKENS, str(document), arrival_seconds=at))
    return Workload("questions", requests)


def run(cell: Cell) -> dict[str, list[float]]:
    """Mean and p99 of TTFT, and mean latency, by rule."""
    slower, says = CASES[cell.case]
    workload = questions(len(slower), cell.rate, cell.seed)
    models = {f"w{number}": scaled(TRUTH, (math.log(factor),) * 5) for number, factor in enumerate(slower)}
    # As real servers said after a run: of warm prompts among others' prefills, a third of what a cold one takes alone.
    words = {f"w{number}": ServedWork(75, 0.44 * one, 206.0, 1540.0, 0.056 * one) for number, one in enumerate(says)}
    found = {}
    for name in RULES:
        policy, _, knows = name.partition(", ")
        given = {one: models[one] if knows == "costs given" else None for one in models}
        specs = tuple(WorkerSpec(one, CAPACITY_TOKENS, max_running=PLACES, cost_model=given[one]) for one in models)
        local = replace(engine_config(), max_running=PLACES, kv_capacity_tokens=CAPACITY_TOKENS)
        knobs = SchedulerConfig(calibrate=True)
        common: dict[str, Any] = {"policy": policy, "cost_model": NEUTRAL, "seed": cell.seed}
        config = SimConfig(specs, scheduler=knobs, local=local, engine_cost_models=models, **common)
        simulation = Simulation(workload, config, None)
        scheduler = SaidBefore(config=knobs, clock=simulation.clock, **common)
        scheduler.words = words if knows == "as said" else {}
        simulation.scheduler = scheduler
        summary = simulation.run().summary()
        found[name] = [summary.mean_ttft_seconds, summary.p99_ttft_seconds, summary.mean_latency_seconds]
    return found


def table(seeds: int) -> str:
    """Means over the seeds: TTFT, its p99, latency."""
    places = [(case, rate) for case in CASES for rate in RATES]
    cells = [Cell(*place, seed) for place in places for seed in range(seeds)]
    rows = []
    for (case, rate), means in zip(places, means_of_places(run, cells, seeds), strict=True):
        cost = means["e2, as said"][0] / means["e2, costs given"][0]
        rows.append([case, f"{rate:g}", *shown(means), f"{cost:.2f}"])
    titles = [name.replace("_", " ") for name in RULES]
    return markdown(["workers", "requests/s a worker", *titles, "TTFT, as said over given"], rows)


if __name__ == "__main__":
    print_table(__doc__, table, 8)
