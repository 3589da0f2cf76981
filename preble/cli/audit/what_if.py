"""What E2 would have done with the requests of an audit. Owns the workload made of them, the engines' cost as the
metrics say it, and the comparison; running both is the simulator's, with the real scheduler.

A simulation starts with empty caches, the servers did not: what they held at the start comes first, as prompts of one
output token each, and is not counted. Claims are ratios of two runs, placed as it was and placed by E2, times what was
measured, so that an error which both have cancels out. The model's own error is the run of what was, against the
metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..._cost import CostModel
from ...local import LocalConfig
from ...policies.base import Policy, RequestView, WorkersView
from ...sim import Result, SimConfig, simulate
from ...transport.engine_servers.served_totals import ServedTotals
from ...types import WorkerSpec
from ...workloads import PromptRequest, Workload
from .ledger import Unit
from .requests import SeenRequest

PRIOR = "llama-3-70b/h100-tp4"  # where no metrics say how fast an engine is
SERVED_MIN = 16  # requests before their mean is one
FLOOR_SHARE = 0.75  # of a mean prefill that may be the iteration's own time
SPEED_APART = 0.3  # of servers, in logarithms, before they are taken for different: their requests are
SLOWNESS_MAX = 20.0
LAST_KNOT = 8192.0
RUNNING_MAX = 256  # of an engine that does not say
REPLAYED_MAX = 20_000  # requests; of more, the newest
HELD_MAX = 2_000  # prefixes of a cache that are put into it first
OWN_UNITS_MAX = 64  # of a prompt of which nothing is known but its length
BLOCKS = 20  # of time, drawn from for an interval
DRAWS = 1_000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bounded:
    """A figure and the 95 % interval around it."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Bounded:
        return Bounded(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """E2 against what was. `ttft_ratio`, `p99_ratio`, `computed_ratio`: E2's run over that of what was; seconds are of
    the latter. `workers_enough`: the fewest that E2 serves the same with, no slower; `replayed` requests."""

    replayed: int
    ttft_seconds: float
    ttft_p99_seconds: float
    ttft_ratio: Bounded
    p99_ratio: float
    computed_ratio: float
    workers: int
    workers_enough: int
    ttft_enough_seconds: float


class AsPlaced(Policy):
    """Sends each request where it was sent. `servers`: by request id."""

    name = reason = "as placed"

    def __init__(self, servers: Mapping[str, str]) -> None:
        self._servers = servers

    def pick(self, scores: Sequence[float], request: RequestView, workers: WorkersView) -> int:
        return list(workers.ids).index(self._servers[str(request.request_id)])


# --- what engines cost ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Seconds: of an iteration, of each new token in it, and of the way to an engine and back."""

    floor: float
    token: float
    hop: float = 0.0

    def model(self, slowness: float) -> CostModel:
        """As a cost model of an engine that is so much slower."""
        end = self.floor + self.token * LAST_KNOT
        return CostModel([(0.0, self.floor * slowness), (LAST_KNOT, end * slowness)], name="metrics")


def prompt_token_seconds(totals: ServedTotals, rank_seconds: float = math.inf) -> float | None:
    """Seconds of prefill for each computed token; None where the metrics do not say. Requests whose prompts are
    computed in one batch each count the whole of it, so their sum may be far above the time that there was: the most
    is `rank_seconds`, of all ranks together."""
    prefill, computed = totals.prefill.mean, totals.computed.mean
    if totals.prefill.count < SERVED_MIN or not prefill or not computed:
        return None
    return min(prefill / computed, rank_seconds / totals.computed.sum)


def speed_of(totals: ServedTotals, rank_seconds: float = math.inf) -> EngineSpeed:
    """As the metrics of the fleet say it: half of all output tokens come sooner than an iteration without prefills
    takes, a prefill is that and its tokens; what a first token takes beside queue and prefill is the way. Without
    metrics, a large model on a large card."""
    prior = CostModel.preset(PRIOR)
    floor = totals.quantile("token", 0.5) or totals.token.mean or prior.decode_time(1, 1024)
    token, prefill, computed = prompt_token_seconds(totals, rank_seconds), totals.prefill.mean, totals.computed.mean
    if token is None or not prefill or not computed:
        return EngineSpeed(floor, max(1e-9, prior.prefill_time(2048) - prior.prefill_time(1024)) / 1024)
    own = token * computed  # of a prefill, alone
    floor = min(floor, FLOOR_SHARE * own)
    hop = 0.0
    if totals.ttft.mean and totals.queue.mean is not None:
        hop = max(0.0, totals.ttft.mean - totals.queue.mean - prefill)
    return EngineSpeed(floor, (own - floor) / computed, hop)


def slowness_of(served: ServedTotals | None, total: ServedTotals) -> float:
    """How much longer a server's prefill takes by the token than the fleet's; 1 where neither says it."""
    if served is None or min(served.prefill.count, total.prefill.count) < SERVED_MIN:
        return 1.0
    one, all_of_them = (
        totals.prefill.sum / totals.computed.sum if totals.computed.sum else 0.0 for totals in (served, total)
    )
    ratio = one / all_of_them if one and all_of_them else 1.0
    apart = abs(math.log(ratio)) > SPEED_APART
    return min(max(ratio, 1.0 / SLOWNESS_MAX), SLOWNESS_MAX) if apart else 1.0


@dataclass(frozen=True, slots=True)
class AuditedFleet:
    """Engines for a simulation, by the rank of their cache. `engines`: their kinds."""

    specs: Mapping[int, WorkerSpec]
    speed: EngineSpeed
    engines: frozenset[str]

    def config(self, policy: str | Policy, workers: int | None = None) -> SimConfig:
        """A simulation of the first so many, or all."""
        specs = tuple(self.specs.values())[:workers]
        local = LocalConfig(max(spec.kv_capacity_tokens for spec in specs), max_running=RUNNING_MAX)
        local = replace(local, max_waiting=1_000_000, order="fcfs", eviction="lru")
        if self.engines == {"sglang"}:  # prompts in iterations of their own
            local = replace(local, token_budget=8192, chunked_prefill=False)
        return SimConfig(workers=specs, policy=policy, local=local, network_seconds=self.speed.hop)


# --- the workload -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of an audit. The first `before` of them fill caches; `servers`: where each was placed, by id."""

    workload: Workload
    before: int
    servers: Mapping[str, str]


class _Prompts:
    """Token ids that share prefixes as the units do; they are numbers, no tokens of anybody's."""

    def __init__(self, unit_tokens: int) -> None:
        self._numbers: dict[int, int] = {}
        self._within = np.arange(unit_tokens, dtype=np.int64)
        self._unit_tokens = unit_tokens
        self._lone = 0

    def ids(self, unit: Unit | None, tokens: int) -> npt.NDArray[np.int32]:
        """The units of a prefix, and after them something of its own: half a unit of which nobody knows, or all of what
        nobody saw."""
        known = self._numbers
        chain = [one.key for one in unit.chain() if one.end] if unit is not None else []
        numbers = [known.setdefault(key, len(known)) for key in chain]
        width = self._unit_tokens
        own = width // 2 if chain else max(1, min(tokens, OWN_UNITS_MAX * width))
        for _ in range(-(-own // width)):
            self._lone -= 1
            numbers.append(known.setdefault(self._lone, len(known)))
        ids = (np.array(numbers, np.int64)[:, None] * width + self._within).ravel()[: len(chain) * width + own]
        return (ids % (2**31 - 1)).astype(np.int32)


def traffic_of(
    requests: Sequence[SeenRequest], fleet: AuditedFleet, held: Mapping[int, Sequence[Unit]], unit_tokens: int,
    queue_seconds: float,
) -> Traffic:  # fmt: skip
    """The requests as a workload, before them what the caches `held` (by rank)."""
    speed, prompts = fleet.speed, _Prompts(unit_tokens)
    found: list[tuple[float, str, npt.NDArray[np.int32], int]] = []
    begin = 0.0
    for rank, units in held.items():
        at = 0.0
        for unit in units[-HELD_MAX:]:
            at += 2.0 * (speed.floor + speed.token * unit.end)
            found.append((at, fleet.specs[rank].id, prompts.ids(unit, 0), 1))
        begin = max(begin, 2.0 * at)
    before = len(found)
    kept = sorted(requests, key=lambda one: one.seconds)[-REPLAYED_MAX:]
    waited = speed.floor + queue_seconds + speed.hop
    starts = [one.seconds - (waited + speed.token * one.computed_tokens if one.is_seen else 0.0) for one in kept]
    first = min(starts, default=0.0)
    for start, one in zip(starts, kept, strict=True):
        ids = prompts.ids(one.unit, one.prompt_tokens)
        found.append((begin + start - first, fleet.specs[one.rank].id, ids, max(1, one.output_tokens)))
    order = [*sorted(range(before), key=lambda at: found[at][0])]
    order += sorted(range(before, len(found)), key=lambda at: found[at][0])
    rows = [found[at] for at in order]
    made = [
        PromptRequest(f"r{row}", (ids,), output, arrival_seconds=at) for row, (at, _, ids, output) in enumerate(rows)
    ]
    servers = {f"r{row}": server for row, (_, server, _, _) in enumerate(rows)}
    return Traffic(Workload("audit", made, "an audit", "as they came"), before, servers)


# --- the comparison ---------------------------------------------------------------------------------------------------


def what_if(traffic: Traffic, fleet: AuditedFleet, on_step: Callable[[str], None] = lambda _: None) -> WhatIf | None:
    """Run the traffic as it was and by E2; None where there is none. Deterministic."""
    before, count = traffic.before, len(fleet.specs)
    if len(traffic.workload) <= before:
        return None
    on_step("simulating what was")
    then = simulate(traffic.workload, fleet.config(AsPlaced(traffic.servers)))
    on_step("simulating E2")
    mine = simulate(traffic.workload, fleet.config("e2"))
    was, ours = then.ttft_seconds[before:], mine.ttft_seconds[before:]
    mean, p99 = float(np.nanmean(was)), float(np.nanpercentile(was, 99))
    enough, enough_seconds = count, float(np.nanmean(ours))
    for workers in range(count - 1, 0, -1):
        on_step(f"simulating E2 with {workers} of {count} servers")
        fewer = simulate(traffic.workload, fleet.config("e2", workers)).ttft_seconds[before:]
        if np.isnan(fewer).any() or np.mean(fewer) > mean or np.percentile(fewer, 99) > p99:
            break
        enough, enough_seconds = workers, float(np.mean(fewer))
    return WhatIf(
        replayed=len(was),
        ttft_seconds=mean,
        ttft_p99_seconds=p99,
        ttft_ratio=ratio_of_means(ours, was),
        p99_ratio=float(np.nanpercentile(ours, 99)) / max(p99, 1e-9),
        computed_ratio=_computed(mine, before) / max(1.0, _computed(then, before)),
        workers=count,
        workers_enough=enough,
        ttft_enough_seconds=enough_seconds,
    )


def _computed(result: Result, before: int) -> float:
    """Prompt tokens that were computed."""
    return float((result.prompt_tokens[before:] - np.maximum(result.cached_tokens[before:], 0)).sum())


def ratio_of_means(one: Floats, other: Floats, blocks: int = BLOCKS, draws: int = DRAWS) -> Bounded:
    """Mean of `one` over mean of `other`, of the same requests in order of time, with an interval from drawing blocks
    of time anew: neighbours share queues and prefixes and are drawn together."""
    both = ~(np.isnan(one) | np.isnan(other))
    one, other = one[both], other[both]
    if not len(one):
        return Bounded(math.nan, math.nan, math.nan)
    value = float(one.mean() / max(other.mean(), 1e-12))
    count = min(blocks, len(one))
    parts = np.array_split(np.arange(len(one)), count)
    sums = np.array([[one[part].sum(), other[part].sum()] for part in parts])
    drawn = np.random.default_rng(0).integers(count, size=(draws, count))
    totals = sums[drawn].sum(axis=1)
    low, high = np.percentile(totals[:, 0] / np.maximum(totals[:, 1], 1e-12), (2.5, 97.5))
    return Bounded(value, float(low), float(high))
