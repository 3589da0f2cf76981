"""Documents that fill the caches, from well below saturation to past it: simulated, E2 beside rules that copy less and
rules that know of no cache. Owns the loads and the table; engine, documents and questions are those of
`unknown_costs.py`.

    python -m benchmarks.scale.full_caches --seeds 3        five minutes

Nine documents a worker take two thirds of a cache, so there is room for two more of them and for what is asked about
them. Who copies a document to a worker where all are in use drives out another one, which is then copied back.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.common.tables import markdown
from benchmarks.scale.seeded_cells import means_of_places, print_table, shown
from benchmarks.scale.unknown_costs import ENGINES, Cell, requests_of
from preble import SchedulerConfig, WorkerSpec
from preble.sim import SimConfig
from preble.sim.config import engine_config
from preble.sim.simulation import Simulation

RULES = ("round_robin", "least_loaded", "session_least", "cache_aware_spill", "e2")
ENGINE = "7B, A100"
RATES = (4.0, 13.0, 15.0, 16.0, 17.0)  # requests a second and worker
WORKERS = (2, 4, 8)


def run(cell: Cell) -> dict[str, list[float]]:
    """Mean and p99 of TTFT, and mean latency, by rule."""
    engine, workload = ENGINES[cell.engine], requests_of(cell)
    capacity = engine.capacity_tokens[cell.traffic]
    specs = tuple(WorkerSpec(f"w{number}", capacity, max_running=engine.places) for number in range(cell.workers))
    local = replace(engine_config(), max_running=engine.places, kv_capacity_tokens=capacity)
    found = {}
    for rule in RULES:
        knobs = SchedulerConfig(calibrate=False)
        config = SimConfig(specs, policy=rule, cost_model=engine.cost, scheduler=knobs, local=local, seed=cell.seed)
        summary = Simulation(workload, config, None).run().summary()
        found[rule] = [summary.mean_ttft_seconds, summary.p99_ttft_seconds, summary.mean_latency_seconds]
    return found


def table(seeds: int) -> str:
    """Means over the seeds: TTFT, its p99, latency."""
    places = [(workers, rate) for workers in WORKERS for rate in RATES]
    cells = [Cell(ENGINE, "documents", *place, seed) for place in places for seed in range(seeds)]
    rows = []
    for (workers, rate), means in zip(places, means_of_places(run, cells, seeds), strict=True):
        best = min(means[rule][0] for rule in RULES if rule != "e2")
        rows.append([f"{workers}", f"{rate:g}", *shown(means), f"{means['e2'][0] / best:.2f}"])
    titles = [rule.replace("_", " ") for rule in RULES]
    return markdown(["workers", "requests/s a worker", *titles, "TTFT, over the best other"], rows)


if __name__ == "__main__":
    print_table(__doc__, table, 3)
