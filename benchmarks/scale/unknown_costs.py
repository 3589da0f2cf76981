"""What it costs not to know what engines take, by what is taken for them at first: simulated, beside the right costs
and rules that need none. Owns the engines, the traffics and the table.

    python -m benchmarks.scale.unknown_costs --seeds 4        half a minute

"nothing said" is a scheduler that was given no cost model. "a GPU's" begins with the measured model of a 7B on an
A6000, by which up to 192 tokens cost nothing, and is corrected by the same samples: what was taken for all engines
until this was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common.tables import markdown
from benchmarks.scale.seeded_cells import means_of_places, print_table, shown
from preble import CostModel, SchedulerConfig, WorkerSpec
from preble.scheduling.calibration import NEUTRAL
from preble.scheduling.cost_factors import scaled
from preble.sim import SimConfig
from preble.sim.config import engine_config
from preble.sim.simulation import Simulation
from preble.workloads.types import PromptRequest, Workload

RULES = ("round_robin", "least_loaded", "e2, costs given", "e2, a GPU's", "e2, nothing said")
SECONDS = 90.0
HEAD_TOKENS, USER_TOKENS, QUESTION_TOKENS = 1500, 150, 25
USERS, DOCUMENTS, DOCUMENT_TOKENS = 20, 9, 1800  # a worker
# SGLang 0.5.23 with 20 million weights in float32 on a core, rounded from what `preble profile --url` fitted. It had
# the machine to itself; two that share it are taken to be half as fast.
ON_A_CORE = CostModel(
    [(1, 0.0235), (8, 0.0388), (128, 0.095), (512, 0.195), (975, 0.348), (2600, 0.349)],
    context=(0.0, 0.0, 0.0, 4.27e-6),
    pair=(0.0, 0.0, 0.0, 0.0, 2.98e-7),
)


@dataclass(frozen=True)
class Engine:
    """What is simulated. `capacity_tokens` by traffic: on a core a cache has no room for its share of the documents,
    on a GPU it has."""

    cost: CostModel
    places: int
    answer_tokens: int
    capacity_tokens: dict[str, int]
    rates: tuple[float, ...]  # requests a second and worker; documents on a core are too many from the second on


GPU_TOKENS = {"one prompt": 100_000, "documents": 21_000}
ENGINES = {
    "20M, a core": Engine(
        scaled(ON_A_CORE, (math.log(2.0),) * 5), 8, 12, {"one prompt": 22_000, "documents": 12_500}, (0.6, 1.4, 1.7)
    ),
    "7B, A6000": Engine(CostModel.preset("mistral-7b/a6000"), 48, 100, GPU_TOKENS, (2.0, 6.0)),
    "7B, A100": Engine(CostModel.preset("mistral-7b/a100"), 48, 100, GPU_TOKENS, (4.0, 10.0)),
    "70B, 4 H100": Engine(CostModel.preset("llama-3-70b/h100-tp4"), 48, 100, GPU_TOKENS, (0.5, 1.0)),
}
Tokens = Callable[[float], npt.NDArray[np.int32]]
Prompt = Callable[[], tuple[int, tuple[npt.NDArray[np.int32], ...]]]  # whose it is, and its parts


@dataclass(frozen=True)
class Cell:
    """One fleet under one load."""

    engine: str
    traffic: str
    workers: int
    rate: float
    seed: int


def one_prompt(rng: np.random.Generator, tokens: Tokens, workers: int) -> Prompt:
    """A system prompt of all before what belongs to a user, before a question."""
    head, users = tokens(HEAD_TOKENS), [tokens(USER_TOKENS) for _ in range(USERS * workers)]

    def prompt() -> tuple[int, tuple[npt.NDArray[np.int32], ...]]:
        user = int(rng.integers(len(users)))
        return user, (head, users[user], tokens(QUESTION_TOKENS))

    return prompt


def about_documents(rng: np.random.Generator, tokens: Tokens, workers: int) -> Prompt:
    """A question about one of nine documents a worker."""
    texts = [tokens(DOCUMENT_TOKENS * rng.uniform(0.67, 1.1)) for _ in range(DOCUMENTS * workers)]

    def prompt() -> tuple[int, tuple[npt.NDArray[np.int32], ...]]:
        document = int(rng.integers(len(texts)))
        return document, (texts[document], tokens(QUESTION_TOKENS))

    return prompt


TRAFFICS = {"one prompt": one_prompt, "documents": about_documents}


def requests_of(cell: Cell) -> Workload:
    """The requests of a cell."""
    rng = np.random.default_rng([cell.seed, cell.workers, list(TRAFFICS).index(cell.traffic)])

    def tokens(count: float) -> npt.NDArray[np.int32]:
        return rng.integers(5, 30_000, int(count)).astype(np.int32)

    prompt = TRAFFICS[cell.traffic](rng, tokens, cell.workers)
    made: list[PromptRequest] = []
    at = 0.0
    while (at := at + rng.exponential(1.0 / (cell.rate * cell.workers))) < SECONDS:
        whose, parts = prompt()
        answer = ENGINES[cell.engine].answer_tokens
        made.append(PromptRequest(f"r{len(made)}", parts, answer, str(whose), arrival_seconds=at))
    return Workload(cell.traffic, made)


def run(cell: Cell) -> dict[str, list[float]]:
    """Mean and p99 of TTFT, and mean latency, by rule."""
    engine, workload = ENGINES[cell.engine], requests_of(cell)
    capacity = engine.capacity_tokens[cell.traffic]
    names = [f"w{number}" for number in range(cell.workers)]
    local = replace(engine_config(), max_running=engine.places, kv_capacity_tokens=capacity)
    priors = {"a GPU's": CostModel.preset("mistral-7b/a6000"), "nothing said": NEUTRAL}
    found = {}
    for rule in RULES:
        policy, _, knows = rule.partition(", ")
        prior = priors.get(knows, engine.cost)
        specs = tuple(WorkerSpec(one, capacity, max_running=engine.places, cost_model=prior) for one in names)
        common: dict[str, Any] = {"policy": policy, "cost_model": prior, "seed": cell.seed}
        knobs = SchedulerConfig(calibrate=knows in priors)
        engines = dict.fromkeys(names, engine.cost)
        config = SimConfig(specs, scheduler=knobs, local=local, engine_cost_models=engines, **common)
        summary = Simulation(workload, config, None).run().summary()
        found[rule] = [summary.mean_ttft_seconds, summary.p99_ttft_seconds, summary.mean_latency_seconds]
    return found


def table(seeds: int) -> str:
    """Means over the seeds: TTFT, its p99, latency."""
    places = [
        (name, traffic, workers, rate)
        for name, engine in ENGINES.items()
        for traffic in TRAFFICS
        for workers in ((2, 8) if name == "20M, a core" else (2,))
        for rate in engine.rates
    ]
    cells = [Cell(*place, seed) for place in places for seed in range(seeds)]
    rows = []
    for (name, traffic, workers, rate), means in zip(places, means_of_places(run, cells, seeds), strict=True):
        gain = means["e2, nothing said"][0] / means["e2, a GPU's"][0]
        cost = means["e2, nothing said"][0] / means["e2, costs given"][0]
        rows.append([name, traffic, f"{workers}", f"{rate:g}", *shown(means), f"{gain:.2f}", f"{cost:.2f}"])
    titles = [rule.replace("_", " ") for rule in RULES]
    last = ["TTFT, over a GPU's", "over given"]
    return markdown(["engine", "traffic", "workers", "requests/s a worker", *titles, *last], rows)


if __name__ == "__main__":
    print_table(__doc__, table, 4)
