"""Traffic that can lose a fleet, on fleets of 2 to 32 workers: cases, their requests, and what is measured of them.

What the contest lacks (`contest_cells`): one system prompt for all, a prefix that is another one every few seconds,
nothing shared, coding agents that wait for each answer, and a fleet of which half is half as fast. Tools and documents
of the contest are beside them, so that every fleet size has both kinds.

A case at load 1 has as many requests a second and worker as the pooled reference of four workers ends of a backlog
(`contest_cells.pooled_config`); no policy has a part in that. The first `WARM` of the requests are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.paper.cells import DIGITS, Store
from benchmarks.paper.contest_cells import DRAINED_TOGETHER, FLEET, local_config, pooled_config
from preble import CostModel, WorkerSpec, sim
from preble.workloads import PromptRequest, Workload, generate, traced

REQUESTS_MIN = 200
WARM = 0.2  # of the requests
HOT_REQUESTS = 40  # a worker, until the viral prefix is another one
HOT_SHARE = 0.7  # of its requests
SLOW = 2.0  # times as long takes an iteration on every second worker of the uneven fleet
FIGURES = ("mean TTFT", "p99 TTFT", "mean latency", "p99 latency")
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Case:
    """A kind of traffic on a fleet, at `load` times what a pooled reference ends; `share` of its requests."""

    name: str
    load: float
    workers: int
    seed: int
    share: float = 1.0


@dataclass(frozen=True)
class FleetCell:
    """A case and who places its requests."""

    case: Case
    policies: tuple[str, ...]

    @property
    def place(self) -> tuple[Any, ...]:
        """Each has requests of its own."""
        return (self.case,)

    @property
    def cost(self) -> float:
        """Many workers and little load take longest."""
        return self.case.workers / self.case.load


def requests_of(case: Case) -> int:
    """How many it has."""
    kind = KINDS[case.name]
    return max(REQUESTS_MIN, round(kind.rps * kind.seconds * case.workers * case.share))


def ids(count: int, *seed: int) -> Ids:
    """Token ids that differ from those of any other seed."""
    return np.random.default_rng([11, *seed]).integers(0, 32_000, count, dtype=np.int32)


# --- requests ---------------------------------------------------------------------------------------------------------


def poisson_times(case: Case, count: int, rps: float, random: np.random.Generator) -> npt.NDArray[np.float64]:
    """When requests come."""
    return np.cumsum(random.exponential(1 / (rps * case.load * case.workers), count))


def system_prompt(case: Case, rps: float, random: np.random.Generator) -> Iterator[PromptRequest]:
    """3,000 tokens for all, 800 of one of 400 users, 60 of the request."""
    for i, at in enumerate(poisson_times(case, requests_of(case), rps, random)):
        user = int(random.integers(0, 400))
        parts = ids(3000, 1), ids(800, 2, case.seed, user), ids(60, 3, case.seed, i)
        yield PromptRequest(str(i), parts, answer(random, 150), arrival_seconds=float(at))


def viral(case: Case, rps: float, random: np.random.Generator) -> Iterator[PromptRequest]:
    """6,000 tokens: of a document that all want for a while, or of one of 60 others."""
    for i, at in enumerate(poisson_times(case, requests_of(case), rps, random)):
        hot = random.random() < HOT_SHARE
        document = i // (HOT_REQUESTS * case.workers) if hot else 1000 + int(random.integers(0, 60))
        parts = ids(6000, 4, case.seed, document), ids(60, 5, case.seed, i)
        yield PromptRequest(str(i), parts, answer(random, 60), arrival_seconds=float(at))


def nothing_shared(case: Case, rps: float, random: np.random.Generator) -> Iterator[PromptRequest]:
    """1,500 tokens, of each request its own."""
    for i, at in enumerate(poisson_times(case, requests_of(case), rps, random)):
        prompt = ids(int(max(50, random.normal(1500, 750))), 6, case.seed, i)
        yield PromptRequest(str(i), (prompt,), answer(random, 120), arrival_seconds=float(at))


def coding_agents(case: Case, rps: float, random: np.random.Generator) -> Iterator[PromptRequest]:
    """Sessions of 8 turns that begin with one of four agents' 4,000 tokens and a repository's; each turn adds what a
    tool said, and is sent 2 s after the answer before it."""
    turns = 8
    sessions = requests_of(case) // turns
    begin = poisson_times(case, sessions, rps / turns, random)
    for session in range(sessions):
        agent = int(random.integers(0, 4))
        parts = [ids(4000, 7, agent), ids(int(random.integers(1000, 6000)), 8, case.seed, session)]
        for turn in range(turns):
            yield PromptRequest(
                f"{session}.{turn}", tuple(parts), answer(random, 100), f"session {session}",
                arrival_seconds=float(begin[session]), after=f"{session}.{turn - 1}" if turn else None,
                pause_seconds=2.0 if turn else 0.0,
            )  # fmt: skip
            parts.append(ids(int(random.integers(100, 1200)), 9, case.seed, session, turn))


def of_contest(name: str, a_group: float) -> Callable[[Case, float, np.random.Generator], Iterator[PromptRequest]]:
    """A generated workload of the contest, with so many requests a group."""

    def make(case: Case, rps: float, random: np.random.Generator) -> Iterator[PromptRequest]:
        count = requests_of(case)
        made = generate(name, requests=count, groups=max(2, round(count / a_group)), seed=case.seed)
        return iter(traced(made, poisson_times(case, count, rps, random)).requests)

    return make


def answer(random: np.random.Generator, mean: int) -> int:
    """Its tokens."""
    return max(4, int(random.normal(mean, mean / 3)))


class Kind(NamedTuple):
    """How requests are made; requests a second and worker that the pooled reference ends (`drained_rps`); for how many
    seconds, at load 1; what a first token may take where requests a second are compared; whether every second worker
    is slow."""

    make: Callable[[Case, float, np.random.Generator], Iterator[PromptRequest]]
    rps: float
    seconds: float
    objective_seconds: float
    uneven: bool = False


KINDS: Mapping[str, Kind] = {
    "system prompt": Kind(system_prompt, 9.0, 20.0, 1.0),
    "viral": Kind(viral, 7.5, 20.0, 2.0),
    "nothing shared": Kind(nothing_shared, 4.6, 30.0, 2.0),
    "coding agents": Kind(coding_agents, 2.9, 40.0, 2.0),
    "tools": Kind(of_contest("toolbench", 3.5), 12.0, 18.0, 2.0),
    "tools, uneven fleet": Kind(of_contest("toolbench", 3.5), 9.0, 24.0, 2.0, uneven=True),
    "documents": Kind(of_contest("loogle", 7.0), 0.6, 170.0, 10.0),
}


def requests(case: Case) -> Workload:
    """A case's requests with their times."""
    kind = KINDS[case.name]
    made = list(kind.make(case, kind.rps, np.random.default_rng([12, case.seed])))
    return Workload(case.name, sorted(made, key=lambda request: request.arrival_seconds))


def drained_rps(name: str, seed: int) -> float:
    """Requests a second and worker that the pooled reference ends of a backlog; of the uneven fleet as many fewer as it
    is slower."""
    made = [replace(one, after=None, pause_seconds=0.0).at(0.0) for one in requests(Case(name, 1.0, 4, seed)).requests]
    config = pooled_config(FLEET.workers, order="fcfs", max_running=DRAINED_TOGETHER * FLEET.workers)
    ends = np.sort(sim.simulate(Workload(name, made), config).finish_seconds)
    first, last = int(WARM * len(ends)), int(0.9 * len(ends))
    speed = (1.0 + 1.0 / SLOW) / 2.0 if KINDS[name].uneven else 1.0
    return float((last - first) / (ends[last] - ends[first])) / FLEET.workers * speed


# --- fleets -----------------------------------------------------------------------------------------------------------


def slow_model() -> CostModel:
    """The fleet's cost model, each iteration `SLOW` times as long."""
    coefficients: dict[str, Any] = CostModel.preset(FLEET.cost_model).coefficients()
    start, *context = coefficients["context"]
    pair_start, *pair = coefficients["pair"]
    return CostModel(
        [(tokens, SLOW * seconds) for tokens, seconds in coefficients["knots"]],
        context=(start, *(SLOW * seconds for seconds in context)),
        pair=(pair_start, *(SLOW * seconds for seconds in pair)),
        name=f"{FLEET.cost_model}, {SLOW:g} times as slow",
    )


def config_of(case: Case, policy: str) -> sim.SimConfig:
    """The fleet under a policy."""
    local = local_config()
    slow = slow_model() if KINDS[case.name].uneven else None
    specs = tuple(
        WorkerSpec(f"w{i}", kv_capacity_tokens=local.kv_capacity_tokens, cost_model=slow if i % 2 else None)
        for i in range(case.workers)
    )
    return sim.SimConfig(workers=specs, policy=policy, cost_model=FLEET.cost_model, local=local, seed=case.seed)


def measured(case: Case, policies: Sequence[str]) -> dict[str, list[float]]:
    """`FIGURES` in seconds, by policy, on the same requests."""
    workload, found = requests(case), {}
    counted = np.arange(len(workload)) >= WARM * len(workload)
    for name in policies:
        found[name] = figures_of(sim.simulate(workload, config_of(case, name)), counted)
    return found


def figures_of(result: sim.Result, counted: npt.NDArray[np.bool_]) -> list[float]:
    """`FIGURES` of the counted requests that have them."""
    return [
        float(f"{figure:.{DIGITS}g}")
        for values in (result.ttft_seconds[counted], result.latency_seconds[counted])
        for figure in (np.nanmean(values), np.nanpercentile(values, 99))
    ]


def run_place(cells: Sequence[FleetCell], directory: Path) -> dict[FleetCell, dict[str, Any]]:
    """Simulate cells one after the other, in this process."""
    store, found = Store(directory), {}
    for cell in cells:
        found[cell] = {"runs": measured(cell.case, cell.policies)}
        store.put(cell, found[cell])
    return found
