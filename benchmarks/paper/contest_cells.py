"""The contest's simulations: every policy on the same requests, with a pooled reference and the bounds beside them.

Owns the workloads, what saturation is, and what is measured. A cell is a workload at a load with a seed; all policies
run on its requests. Results are kept under a digest of this file, so the page and the pictures are elsewhere.

Saturation. The pooled reference is one worker as fast as all of the fleet together, with their KV and token budgets.
All requests of a workload are given to it at once; it takes them in order of arrival, at most `DRAINED_TOGETHER` at a
time for each worker it stands for. The rate at which it ends them, from the end of the warm-up to the last tenth, is
the workload's saturation; no policy has a part in it. While caches are cold the same machine is slower, so arrivals of
the warm-up are stretched by the rate at which it ends those, and the load is the same in both parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import floor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.paper import setups
from benchmarks.paper.cells import DIGITS, Store
from preble import CostModel, LocalConfig, Policy, sim
from preble.policies.oracle import OraclePartition
from preble.sim.bounds import Bounds, lower_bounds
from preble.workloads import Workload, arrival_times, generate, merged, poisson, read, traced

DATA = Path(__file__).resolve().parent / "data"
FLEET = setups.FLEETS["4xa6000"]
WARM = 0.3  # of the requests, by release: they fill the caches and are not counted
DRAINED_TOGETHER = 128
DRAINS = 2
SAMPLES = 5  # of each trace in DATA
TOOLS, TOOL_GROUPS = 0.8, 0.75  # of the mix; the rest are videos
ORACLE = "oracle_partition"
POLICIES = (
    "e2", "e2-paper", "cache_aware", "cache_aware:struct", "cache_aware_spill", "kv_cost", "lmetric", "llmd_sticky",
    "dualmap", "session_least", "session_hash", "power_of_two", "prefix_hash", "aibrix_prefix", "aibrix_preble",
    "longest_prefix", "least_loaded", "round_robin", "random", ORACLE,
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A workload of the contest. `objective_seconds` is what a first token may take for goodput. `trace`: the name of
    its files in DATA; else it is generated over `groups` by `generator`."""

    title: str
    requests: int
    objective_seconds: float
    generator: str = ""
    groups: int = 0
    zipf: float | None = None
    trace: str = ""


SOURCES: Mapping[str, Source] = {
    "toolbench": Source("ToolBench", 1000, 2.0, "toolbench", 280),
    "toolbench-zipf": Source("ToolBench, Zipf 1.1", 1000, 2.0, "toolbench", 320, zipf=1.1),
    "videoqa": Source("Video QA", 500, 5.0, "videoqa", 130),
    "loogle": Source("LooGLE", 320, 10.0, "loogle", 46),
    "programming": Source("Programming", 1000, 2.0, "programming", 130),
    "embodied": Source("Embodied agents", 1400, 2.0, "embodied", 140),
    "azure-mix": Source("Tools and videos, Azure's times", 900, 5.0, "mix", 260),
    "conversation": Source("Conversations, generated", 240, 10.0, "conversation", 165),
    "mooncake": Source("Mooncake conversations", 240, 10.0, trace="mooncake_conversation"),
    "mooncake-synthetic": Source("Mooncake synthetic", 240, 10.0, trace="mooncake_synthetic"),
}


@dataclass(frozen=True)
class Saturation:
    """The rate at which the pooled reference ends the requests of a workload; see the module."""

    workload: str
    share: float


@dataclass(frozen=True)
class ContestCell:
    """A workload at `load` times its saturation. `share` of the requests is run."""

    workload: str
    load: float
    seed: int
    share: float
    policies: tuple[str, ...]

    @property
    def place(self) -> tuple[Any, ...]:
        """Each cell has requests of its own."""
        return self.workload, self.load, self.seed

    @property
    def cost(self) -> float:
        """Prompts of many tokens take longest."""
        return -SOURCES[self.workload].requests


class Rates(NamedTuple):
    """Requests a second that the pooled reference ends: of the warm-up, and after it (the saturation)."""

    warm_rps: float
    rps: float


# --- requests ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def requests_of(name: str, seed: int, share: float) -> Workload:
    """A workload's requests; of a trace with its times, of others without."""
    source = SOURCES[name]
    count = floor(source.requests * share)
    if source.trace:
        whole = read(DATA / f"{source.trace}_{seed % SAMPLES}.jsonl.gz")
        return replace(whole, requests=[request for request in whole.requests[:count] if fits(request)])
    groups = max(2, round(source.groups * share))
    if source.generator == "mix":
        tools, videos = round(TOOLS * count), count - round(TOOLS * count)
        tool_groups = max(1, round(TOOL_GROUPS * groups))
        return merged(name, [
            generate("toolbench", requests=tools, groups=tool_groups, seed=seed),
            generate("videoqa", requests=videos, groups=max(1, groups - tool_groups), seed=seed),
        ])  # fmt: skip
    return generate(source.generator, requests=count, groups=groups, seed=seed, zipf=source.zipf)


def fits(request: Any) -> bool:
    """Whether a worker's KV holds it, prompt and output."""
    return bool(request.prompt_tokens + request.output_tokens <= FLEET.kv_tokens)


def left_out(cell: ContestCell) -> int:
    """Requests of the trace's sample that do not fit a worker."""
    source = SOURCES[cell.workload]
    if not source.trace:
        return 0
    given = read(DATA / f"{source.trace}_{cell.seed % SAMPLES}.jsonl.gz", limit=floor(source.requests * cell.share))
    return len(given) - len(requests_of(cell.workload, cell.seed, cell.share))


def arriving(name: str, seed: int, share: float, rates: Rates, load: float) -> Workload:
    """A workload's requests at `load`: at the times of its trace, stretched to that; Poisson for others."""
    made = requests_of(name, seed, share)
    if SOURCES[name].generator == "mix":
        tools = [request for request in made.requests if request.request_id.startswith("toolbench")]
        videos = [request for request in made.requests if not request.request_id.startswith("toolbench")]
        return merged(name, [
            stretched(replace(made, requests=tools), azure("code", seed, TOOLS), rates, load * len(tools) / len(made)),
            stretched(
                replace(made, requests=videos), azure("conv", seed, 1 - TOOLS), rates, load * len(videos) / len(made)
            ),
        ])  # fmt: skip
    if SOURCES[name].trace:
        return stretched(made, arrival_times(made), rates, load)
    return stretched(made, arrival_times(poisson(made, 1.0, seed + 1000)), rates, load)


def stretched(workload: Workload, times_seconds: npt.NDArray[np.float64], rates: Rates, load: float) -> Workload:
    """The first of the times, the gaps of the warm-up and those after it scaled to `load` times their rates."""
    times = times_seconds[: len(workload)]
    warm, last = warm_requests(len(workload)), len(workload) - 1
    before = (times[: warm + 1] - times[0]) * (warm / (load * rates.warm_rps) / (times[warm] - times[0]))
    after = (times[warm + 1 :] - times[warm]) * ((last - warm) / (load * rates.rps) / (times[last] - times[warm]))
    return traced(workload, np.concatenate([before, before[-1] + after]))


def warm_requests(requests: int) -> int:
    """How many of so many warm the caches."""
    return max(1, floor(WARM * requests))


def azure(kind: str, seed: int, part: float) -> npt.NDArray[np.float64]:
    """Times of an Azure trace: of its rows in DATA, those of one sample."""
    count = round(SOURCES["azure-mix"].requests * part)
    start = seed % SAMPLES * count
    return arrival_times(read(DATA / f"azure_{kind}.csv.gz"))[start : start + count]


# --- fleets -----------------------------------------------------------------------------------------------------------


def local_config() -> LocalConfig:
    """The local scheduler of every worker under every policy."""
    return setups.local_config(FLEET, setups.SYSTEMS["e2"])


def pooled_model(workers: int) -> CostModel:
    """The fleet's cost model, of a worker as fast as `workers` of them.

    An iteration takes what it would with its tokens and contexts divided among them; attention of chunks to their
    contexts takes its share of the time.
    """
    coefficients: dict[str, Any] = CostModel.preset(FLEET.cost_model).coefficients()
    start, flat, base, slope = coefficients["context"]
    pair_start, *pair = coefficients["pair"]
    return CostModel(
        [(tokens * workers, seconds) for tokens, seconds in coefficients["knots"]],
        context=(start * workers, flat, base, slope / workers),
        pair=(pair_start, *(seconds / workers for seconds in pair)),
        name=f"{workers} x {FLEET.cost_model}",
    )


def pooled_config(workers: int, **changes: Any) -> sim.SimConfig:
    """The pooled reference."""
    local = local_config()
    pooled = replace(
        local,
        kv_capacity_tokens=local.kv_capacity_tokens * workers,
        token_budget=local.token_budget * workers,
        max_running=local.max_running * workers,
    )
    return sim.SimConfig(
        workers=1, policy="round_robin", cost_model=pooled_model(workers), local=replace(pooled, **changes)
    )


def drained(name: str, share: float) -> Rates:
    """Rates of the drained backlog, mean over `DRAINS` samples; see the module."""
    config = pooled_config(FLEET.workers, order="fcfs", max_running=DRAINED_TOGETHER * FLEET.workers)
    warm_rps, rps = [], []
    for seed in range(DRAINS):
        made = requests_of(name, seed, share)
        backlog = replace(made, requests=[request.at(0.0) for request in made.requests])
        ends = np.sort(sim.simulate(backlog, config).finish_seconds)
        first, last = warm_requests(len(ends)), floor(0.9 * len(ends))
        warm_rps.append(first / ends[first])
        rps.append((last - first) / (ends[last] - ends[first]))
    return Rates(rounded(float(np.mean(warm_rps))), rounded(float(np.mean(rps))))


# --- measuring --------------------------------------------------------------------------------------------------------


def run_place(cells: Sequence[ContestCell], directory: Path) -> dict[ContestCell, dict[str, Any]]:
    """Simulate cells one after the other, in this process."""
    store, found = Store(directory), {}
    for cell in cells:
        found[cell] = run_cell(cell, saturation(cell, store))
        store.put(cell, found[cell])
    return found


def saturation(cell: ContestCell, store: Store) -> Rates:
    """A workload's rates, kept like a cell. Processes that need them at once each find the same."""
    key = Saturation(cell.workload, cell.share)
    known = store.get(key)
    if known is None:
        known = drained(key.workload, key.share)._asdict()
        store.put(key, known)
    return Rates(**known)


def run_cell(cell: ContestCell, rates: Rates) -> dict[str, Any]:
    """All policies, the pooled reference and the bounds of one cell. `runs` has the figures by policy."""
    workload = arriving(cell.workload, cell.seed, cell.share, rates, cell.load)
    objective = SOURCES[cell.workload].objective_seconds
    local = local_config()
    bounds = lower_bounds(
        workload.requests,
        CostModel.preset(FLEET.cost_model),
        FLEET.workers,
        local.token_budget,
        warmup_requests=warm_requests(len(workload)),
    )
    runs = {}
    for name in cell.policies:
        config = sim.SimConfig(
            workers=FLEET.workers,
            policy=policy_of(name, workload),
            cost_model=FLEET.cost_model,
            local=local,
            seed=cell.seed,
        )
        runs[name] = measured(sim.simulate(workload, config), bounds.counted, objective)
    pooled = measured(sim.simulate(workload, pooled_config(FLEET.workers)), bounds.counted, objective)
    return {
        "saturation_rps": rates.rps,
        "requests": bounds.requests,
        "left_out": left_out(cell),
        "runs": runs,
        "pooled": pooled,
        "bounds": bound_figures(bounds, objective),
    }


def policy_of(name: str, workload: Workload) -> str | Policy:
    """The policy as `SimConfig` takes it."""
    if name == ORACLE:
        return OraclePartition({request.request_id: request.group for request in workload.requests})
    return name


def measured(result: sim.Result, counted: npt.NDArray[np.bool_], objective_seconds: float) -> dict[str, float]:
    """Figures over the counted requests; load spread is of all. Who never got a first token misses the objective."""
    ttft, latency = result.ttft_seconds[counted], result.latency_seconds[counted]
    cached, prompts = result.cached_tokens[counted], result.prompt_tokens[counted]
    figures = {
        "hit_fraction": float(np.maximum(cached, 0).sum() / prompts.sum()),
        "load_spread": float(result.busy_seconds.max() / result.busy_seconds.mean()),
        "goodput": float(np.mean(ttft <= objective_seconds)),
        "unfinished": int(np.isnan(latency).sum()),
    }
    for name, values in (("ttft", ttft), ("latency", latency)):
        done = values[~np.isnan(values)]
        figures[f"mean_{name}_seconds"] = float(np.mean(done))
        figures[f"p50_{name}_seconds"] = float(np.percentile(done, 50))
        figures[f"p99_{name}_seconds"] = float(np.percentile(done, 99))
    return {name: rounded(value) for name, value in figures.items()}


def bound_figures(bounds: Bounds, objective_seconds: float) -> dict[str, float]:
    """What the policies' figures cannot be better than, under the same names."""
    figures = {
        "hit_fraction": bounds.hit_fraction_ceiling,
        "goodput": bounds.goodput(objective_seconds),
        "mean_ttft_seconds": bounds.mean_ttft_seconds,
        "p99_ttft_seconds": bounds.p99_ttft_seconds,
        "mean_latency_seconds": bounds.mean_latency_seconds,
        "p99_latency_seconds": bounds.p99_latency_seconds,
    }
    return {name: rounded(value) for name, value in figures.items()}


def rounded(value: float) -> float:
    """To `DIGITS` significant digits."""
    return float(f"{value:.{DIGITS}g}")
