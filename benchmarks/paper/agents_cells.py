"""Simulations of agents, tenants, deadlines and sets of samples: which cells there are, and what is measured of each.

All rules run on the same requests. Workers are of the contest's fleet (`contest_cells.FLEET`); what saturation is, is
said there, too. Five kinds of cells:

sessions   `LIVE` coding-agent sessions a worker at all times, in closed loop, pauses cut at `PAUSE_MAX_SECONDS`. Caches
           of all workers together hold `share` of the live sessions' mean prompts. Counted is what happens after
           `WARM_SECONDS`; the run is broken off at `END_SECONDS`. Requests name their sessions, but for one rule.
crowds     the same with `CROWD` live sessions a worker, so that work limits the turns, and not pauses.
flood      `TENANTS` tenants with tools of their own and equal rates, together at `share` of saturation; from
           `FLOOD_SECONDS` on one of them sends ten times as much. Beside it the same without the flood.
deadlines  tools at `share` times the saturation of the contest's fleet, in proportion to the workers; a first token is
           of use for `DEADLINE_SECONDS`.
samples    groups of `SAMPLES` samples of one prompt, all at once: `GROUPS` on `GROUPS_WORKERS` workers. E2 is told the
           groups, and once it is not; one placement knows every answer's length, to show what that would be worth.

In flood and deadlines `OURS` is E2 with `FLOW`: what a tenant wants beyond its share waits, what is late is given up;
`OURS_WHOLE` has our workers, too. `PLAIN` is E2 without; rivals' routers have nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.paper.cells import Store, rounded
from benchmarks.paper.contest_cells import (
    DATA,
    FLEET,
    ContestCell,
    Rates,
    arriving,
    local_config,
    saturation,
    warm_requests,
)
from preble import CostModel, Policy, sim
from preble.policies.base import RequestView, WorkersView
from preble.policies.known import by_rendezvous, hashed
from preble.scheduling.flow_control import FlowConfig
from preble.sim.bounds import lower_bounds
from preble.sim.service import (
    entitlements,
    group_makespans,
    jain_index,
    makespan,
    service_seconds,
    tenants_of,
    turns_per_hour,
    within_deadlines,
)
from preble.workloads import (
    Flood,
    PromptRequest,
    Workload,
    coding_agents,
    generate,
    read_sessions,
    sample_groups,
    sessions_at_once,
    tenant_arrivals,
    tenant_rates,
)
from preble.workloads.agents import COMMON_BLOCKS
from preble.workloads.arrivals import chains_of

OURS, IDS, GROUP_HASH = "e2", "session_ids", "group_hash"
RETURNS = " returns"  # of a rule's name: its workers are ours, which evict who is least likely to be back
OURS_WHOLE, IDS_WHOLE = OURS + RETURNS, IDS + RETURNS
UNNAMED = OURS_WHOLE + " unnamed"  # nothing says which session a request is of
UNHINTED, KNOWN_LENGTHS = "e2_unhinted", "known_lengths"
PLAIN = "e2 without"
FLOW = FlowConfig()
POLICIES: Mapping[str, tuple[str, ...]] = {
    "sessions": (
        *(OURS_WHOLE, UNNAMED, OURS, "cache_aware_spill", IDS, IDS_WHOLE, "session_hash", "kv_cost"),
        *("least_loaded", "round_robin"),
    ),
    "crowds": (
        *(OURS_WHOLE, OURS, "cache_aware_spill", IDS, IDS_WHOLE, "session_hash", "kv_cost"),
        *("least_loaded", "round_robin"),
    ),
    "flood": (OURS, PLAIN, "cache_aware_spill", "kv_cost", "least_loaded", "round_robin"),
    "deadlines": (
        OURS_WHOLE,
        OURS,
        PLAIN,
        "cache_aware_spill",
        "kv_cost",
        "llmd_sticky",
        "least_loaded",
        "round_robin",
    ),
    "samples": (
        OURS,
        UNHINTED,
        "cache_aware",
        GROUP_HASH,
        "cache_aware_spill",
        "kv_cost",
        "least_loaded",
        "round_robin",
        KNOWN_LENGTHS,
    ),
}
SCALE, PROMPT_TOKENS_MAX, TURNS_MIN = 16, 24_000, 5
TRACE = "coding_agents.jsonl.gz"
COPY_IDS = 1 << 26  # more than the trace has blocks
LIVE, CROWD, PAUSE_MAX_SECONDS = 64, 128, 120.0
LIVE_OF = {"sessions": LIVE, "crowds": CROWD}
WARM_SECONDS, END_SECONDS = 80.0, 240.0
TENANTS, FLOOD_FACTOR, FLOOD_SECONDS, TENANTS_SECONDS = 8, 10.0, 60.0, 150.0
DEADLINE_SECONDS, DEADLINE_WORKLOAD = 2.0, "toolbench"
GROUPS, SAMPLES, GROUPS_WORKERS = 64, 16, 8
DECODED_TOGETHER = 16  # with which a request shares its iterations, for seconds of service


@dataclass(frozen=True)
class AgentCell:
    """One cell: `share` is of the live sessions that caches hold, of saturation, or 1. `trace`: a file of
    sessions in DATA; generated ones if ""."""

    kind: str
    workers: int
    share: float
    seed: int
    trace: str = ""

    @property
    def place(self) -> tuple[Any, ...]:
        """Each cell has requests of its own."""
        return self.kind, self.workers, self.share, self.seed

    @property
    def cost(self) -> float:
        """Sessions take longest."""
        return self.workers * LIVE_OF.get(self.kind, 6) / 6.0


class SessionIds(Policy):
    """Session affinity that is told which session a request is of: a session's first request goes to the worker with
    the fewest live requests, the rest, and its sub-agents, follow. For simulations: it remembers, which rules of the
    product may not."""

    name = reason = IDS

    def __init__(self, sessions: Mapping[str, str]) -> None:
        self._sessions = sessions
        self._homes: dict[str, str] = {}

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        home = self._homes.get(self._sessions[str(request.request_id)])
        return [float(name != home) for name in workers.ids]

    def pick(self, scores: Sequence[float], request: RequestView, workers: WorkersView) -> int:
        chosen = super().pick(scores, request, workers)
        self._homes[self._sessions[str(request.request_id)]] = workers.ids[chosen]
        return chosen


class GroupHash(Policy):
    """Consistent hashing that is told which group a request is of: every group has a worker, whatever the loads."""

    name = reason = GROUP_HASH

    def __init__(self, groups: Mapping[str, str]) -> None:
        self._groups = groups

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        order = by_rendezvous(hashed(self._groups[str(request.request_id)].encode()), workers.ids)
        return [float(order.index(place)) for place in range(len(workers))]


class KnownLengths(Policy):
    """Where each sample goes is fixed before: longest answer first, to the worker that would end soonest with it, were
    the iterations of its longest answer and all its work added. No rule can know that; it shows what lengths are
    worth."""

    name = reason = KNOWN_LENGTHS

    def __init__(self, requests: Sequence[PromptRequest], workers: int, cost: CostModel) -> None:
        alone, together = (cost.decode_time(1, 2500, batch) for batch in (1, 101))
        each = (together - alone) / 100
        work, longest = [0.0] * workers, [0] * workers
        groups: list[set[str]] = [set() for _ in range(workers)]
        self._places: dict[str, int] = {}
        for request in sorted(requests, key=lambda request: -request.output_tokens):
            tokens, prefill = request.output_tokens, cost.prefill_time(request.prompt_tokens, request.prompt_tokens)
            added = [each * tokens + (0.0 if request.group in own else prefill) for own in groups]
            ends = [alone * max(longest[i], tokens) + work[i] + added[i] for i in range(workers)]
            place = ends.index(min(ends))
            work[place] += added[place]
            longest[place] = max(longest[place], tokens)
            groups[place].add(request.group)
            self._places[request.request_id] = place

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        return [float(place != self._places[str(request.request_id)]) for place in range(len(workers))]


# --- running ----------------------------------------------------------------------------------------------------------


def run_place(cells: Sequence[AgentCell], directory: Path) -> dict[AgentCell, dict[str, Any]]:
    """Simulate cells one after the other, in this process."""
    store, found = Store(directory), {}
    for cell in cells:
        found[cell] = KINDS[cell.kind](cell, store)
        store.put(cell, found[cell])
    return found


def flow_of(name: str) -> tuple[str, FlowConfig | None]:
    """The policy of a rule, and how requests wait in front of the workers."""
    return {OURS: (OURS, FLOW), OURS_WHOLE: (OURS, FLOW), PLAIN: (OURS, None)}.get(name, (name, None))


def with_workers_of(name: str, config: sim.SimConfig) -> sim.SimConfig:
    """The same fleet, with our workers where a rule's name says so."""
    ours = RETURNS in name
    return replace(config, local=replace(config.local, eviction="returns", short_first=True)) if ours else config


def config_of(cell: AgentCell, policy: str | Policy, flow: FlowConfig | None = None, **changes: Any) -> sim.SimConfig:
    """The fleet of a cell."""
    local = local_config()
    if "kv_capacity_tokens" in changes:
        local = replace(local, kv_capacity_tokens=changes.pop("kv_capacity_tokens"))
    return sim.SimConfig(
        workers=cell.workers,
        policy=policy,
        cost_model=FLEET.cost_model,
        local=local,
        seed=cell.seed,
        flow=flow,
        **changes,
    )


@lru_cache(maxsize=1)
def sessions_of(trace: str, seed: int, count: int) -> Workload:
    """At least so many sessions to deal out: of the file, as often as it takes, or generated."""
    if not trace:
        return coding_agents(count, seed, scale=SCALE)
    made = read_sessions(DATA / trace, scale=SCALE, prompt_tokens_max=PROMPT_TOKENS_MAX)
    enough = sum(len(chain) >= TURNS_MIN for chain in chains_of(made))
    copies = [copied(made, number) for number in range(max(1, -(-count // (2 * enough))))]
    return replace(made, requests=[request for copy in copies for request in copy])


def copied(workload: Workload, number: int) -> list[PromptRequest]:
    """The same sessions under other names, with tokens of their own after what all sessions have; 0 is the original."""
    if number == 0:
        return list(workload.requests)
    shifted: dict[int, Any] = {}  # by identity, so that what turns share stays shared
    made = []
    for request in workload.requests:
        for part in request.parts:
            if id(part) not in shifted:
                shifted[id(part)] = np.where(part < COMMON_BLOCKS, part, part + number * COPY_IDS).astype(np.int32)
        made.append(replace(
            request,
            request_id=f"{number}:{request.request_id}",
            parts=tuple(shifted[id(part)] for part in request.parts),
            group=f"{number}:{request.group}",
            after=None if request.after is None else f"{number}:{request.after}",
        ))  # fmt: skip
    return made


def run_sessions(cell: AgentCell, _: Store) -> dict[str, Any]:
    """Figures by rule of sessions in closed loop."""
    live = LIVE_OF[cell.kind] * cell.workers
    made = sessions_of(cell.trace, cell.seed, 2 * live)
    workload = sessions_at_once(
        made, live, cell.seed, turns_min=TURNS_MIN, pause_max_seconds=PAUSE_MAX_SECONDS, spread_seconds=40.0, begun=True
    )
    mean = float(np.mean([request.prompt_tokens for request in workload.requests]))
    capacity = round(cell.share * live * mean / cell.workers)
    sessions = {request.request_id: request.group for request in workload.requests}
    unnamed = replace(workload, requests=[replace(request, hint=None) for request in workload.requests])
    runs = {}
    for name in POLICIES[cell.kind]:
        rule = name.partition(" ")[0]
        policy = SessionIds(sessions) if rule == IDS else rule
        config = config_of(cell, policy, kv_capacity_tokens=capacity, until_seconds=END_SECONDS)
        config = with_workers_of(name, config)
        runs[name] = session_figures(sim.simulate(unnamed if name == UNNAMED else workload, config))
    return {"runs": runs, "kv_tokens": capacity}


def session_figures(result: sim.Result) -> dict[str, float]:
    """Of the turns sent after the warm-up. Who has no first token when the run is broken off has waited until then."""
    sent = result.arrival_seconds > WARM_SECONDS
    admitted = sent & (result.cached_tokens >= 0)
    return rounded({
        "turns_per_hour": turns_per_hour(result, WARM_SECONDS, END_SECONDS),
        "turns_from_start": int((result.outcome == sim.results.FINISHED).sum()),
        **times(result, sent, END_SECONDS),
        "hit_fraction": float(result.cached_tokens[admitted].sum() / result.prompt_tokens[admitted].sum()),
        "busy": float(result.busy_seconds.mean() / END_SECONDS),
        "refused": int((result.outcome == sim.results.REFUSED).sum()),
    })  # fmt: skip


def times(result: sim.Result, own: npt.NDArray[np.bool_], until_seconds: float | None = None) -> dict[str, float]:
    """Mean and p99 of TTFT and of latency of these requests. Who waits has waited until then; None: who was not
    answered, for it was refused, is left out."""
    figures = {}
    for name, seconds in (("ttft", result.ttft_seconds), ("latency", result.latency_seconds)):
        taken = seconds[own]
        if until_seconds is not None:
            taken = np.where(np.isnan(taken), until_seconds - result.arrival_seconds[own], taken)
        figures[f"mean_{name}_seconds"] = float(np.nanmean(taken))
        figures[f"p99_{name}_seconds"] = float(np.nanpercentile(taken, 99))
    return figures


def run_flood(cell: AgentCell, store: Store) -> dict[str, Any]:
    """Figures by rule of tenants, one of whom floods."""
    rps = saturation(ContestCell(DEADLINE_WORKLOAD, 1.0, 0, 1.0, ()), store).rps * cell.workers / FLEET.workers
    rates = tenant_rates(TENANTS, cell.share * rps, cell.seed, sigma=0.0)
    made = generate(DEADLINE_WORKLOAD, requests=6000, groups=10 * TENANTS, seed=cell.seed)
    flooder = next(iter(rates))
    flood = Flood(flooder, FLOOD_FACTOR, FLOOD_SECONDS, TENANTS_SECONDS)
    calm, flooded = (
        tenant_arrivals(made, rates, TENANTS_SECONDS, cell.seed, floods) for floods in ((), (flood,))
    )  # fmt: skip
    others, others_calm = (np.array([request.tenant != flooder for request in one.requests]) for one in (flooded, calm))
    runs = {}
    for name in POLICIES["flood"]:
        config = config_of(cell, *flow_of(name), until_seconds=TENANTS_SECONDS)
        before, during = (sim.simulate(workload, config) for workload in (calm, flooded))
        figures = {
            **{f"calm_{key}": value for key, value in flood_times(before, others_calm).items()},
            **{f"others_{key}": value for key, value in flood_times(during, others).items()},
            **{f"flood_{key}": value for key, value in flood_times(during, ~others).items()},
            "hit_fraction": hits(during),
            "others_hit_fraction": hits(during, others),
            "flood_hit_fraction": hits(during, ~others),
            "same_mix_hit_fraction": hits_as_asked(during, flooded),
            "served_fraction": float(np.mean(during.outcome == sim.results.FINISHED)),
            "jain": jain_of(during, flooded),
        }
        figures["others_p99_ratio"] = figures["others_p99_ttft_seconds"] / figures["calm_p99_ttft_seconds"]
        runs[name] = rounded(figures)
    return {"runs": runs}


def flood_times(result: sim.Result, own: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Of those that came while a tenant may have flooded; open waits count so far."""
    return times(result, own & (result.arrival_seconds >= FLOOD_SECONDS), TENANTS_SECONDS)


def hits(result: sim.Result, own: npt.NDArray[np.bool_] | None = None) -> float:
    """Cached over all prompt tokens of the admitted; `own`: of these alone."""
    admitted = result.cached_tokens >= 0 if own is None else own & (result.cached_tokens >= 0)
    return float(result.cached_tokens[admitted].sum() / result.prompt_tokens[admitted].sum())


def hits_as_asked(result: sim.Result, workload: Workload) -> float:
    """The hit fraction if each tenant were served as large a part of its prompts as the others: who is served less of
    what is cached most does not lower it."""
    asked = float(result.prompt_tokens.sum())
    found = 0.0
    for rows in tenants_of(workload.requests).values():
        own = np.isin(np.arange(len(result.prompt_tokens)), rows)
        found += float(result.prompt_tokens[own].sum()) / asked * hits(result, own)
    return found


def jain_of(result: sim.Result, workload: Workload) -> float:
    """Jain's index of the tenants' service over what each is entitled to, in the time of the flood. A tenant's demand
    is what it sent, at the mean cost of a request."""
    seconds = service_seconds(result, CostModel.preset(FLEET.cost_model), DECODED_TOGETHER)
    served = np.where(result.finish_seconds > FLOOD_SECONDS, seconds, 0.0)
    rows = tenants_of(workload.requests)
    mean = float(seconds[seconds > 0.0].mean())
    demand = {tenant: mean * int((result.arrival_seconds[own] > FLOOD_SECONDS).sum()) for tenant, own in rows.items()}
    got = {tenant: float(served[own].sum()) for tenant, own in rows.items()}
    due = entitlements(demand, sum(got.values()))
    return jain_index([got[tenant] / due[tenant] for tenant in got])


def run_deadlines(cell: AgentCell, store: Store) -> dict[str, Any]:
    """Goodput by rule of an overloaded fleet, and what the bound allows."""
    whole = saturation(ContestCell(DEADLINE_WORKLOAD, cell.share, cell.seed, 1.0, ()), store)
    rates = Rates(*(rps * cell.workers / FLEET.workers for rps in whole))
    made = arriving(DEADLINE_WORKLOAD, cell.seed, 1.0, rates, cell.share)
    requests = [replace(request, deadline_seconds=DEADLINE_SECONDS) for request in made.requests]
    warm = warm_requests(len(requests))
    bounds = lower_bounds(
        requests, CostModel.preset(FLEET.cost_model), cell.workers, local_config().token_budget, warmup_requests=warm
    )
    made = replace(made, requests=requests)
    counted = [
        request if count else replace(request, deadline_seconds=None)
        for request, count in zip(requests, bounds.counted, strict=True)
    ]
    runs = {}
    for name in POLICIES["deadlines"]:
        result = sim.simulate(made, with_workers_of(name, config_of(cell, *flow_of(name))))
        runs[name] = rounded({
            "goodput": within_deadlines(result, counted),
            "of_bound": within_deadlines(result, counted) / bounds.goodput(DEADLINE_SECONDS),
            "refused_fraction": float(np.mean(result.outcome[bounds.counted] == sim.results.REFUSED)),
            **times(result, bounds.counted),
            "hit_fraction": hits(result),
        })  # fmt: skip
    return {"runs": runs, "bound": bounds.goodput(DEADLINE_SECONDS)}


def run_samples(cell: AgentCell, _: Store) -> dict[str, Any]:
    """Makespans by rule of groups of samples."""
    workload = sample_groups(max(1, GROUPS * cell.workers // GROUPS_WORKERS), SAMPLES, cell.seed)
    plain = replace(workload, requests=[replace(request, sampled=False) for request in workload.requests])
    cost = CostModel.preset(FLEET.cost_model)
    bounds = lower_bounds(workload.requests, cost, cell.workers, local_config().token_budget)
    even = even_seconds(workload.requests, cost, cell.workers)
    told: dict[str, str | Policy] = {
        UNHINTED: OURS,
        GROUP_HASH: GroupHash({request.request_id: request.group for request in workload.requests}),
        KNOWN_LENGTHS: KnownLengths(workload.requests, cell.workers, cost),
    }
    runs = {}
    for name in POLICIES["samples"]:
        result = sim.simulate(plain if name == UNHINTED else workload, config_of(cell, told.get(name, name)))
        runs[name] = rounded({
            "makespan_seconds": makespan(result),
            "of_bound": makespan(result) / bounds.max_latency_seconds,
            "of_even": makespan(result) / even,
            "mean_group_seconds": float(np.mean(list(group_makespans(result, workload.requests).values()))),
            **times(result, np.ones(len(workload), np.bool_)),
            "hit_fraction": hits(result),
            "load_spread": float(result.busy_seconds.max() / result.busy_seconds.mean()),
        })  # fmt: skip
    return {"runs": runs, **rounded({
        "bound_seconds": bounds.max_latency_seconds,
        "longest_alone_seconds": float(bounds.latency.floors.max()),
        "work_seconds": float(bounds.latency.works.sum()) / cell.workers,
        "even_seconds": even,
    })}  # fmt: skip


def even_seconds(requests: Sequence[PromptRequest], cost: CostModel, workers: int) -> float:
    """When the longest answer ends on a worker with an equal part of all prompts, and of all answers of each length:
    what a placing that knows no lengths can expect, for an iteration takes longer by what each answer in it adds."""
    prompts = {request.group: request.prompt_tokens for request in requests}
    seconds = sum(cost.prefill_time(tokens, tokens) for tokens in prompts.values()) / workers
    outputs = np.array([request.output_tokens for request in requests])
    lengths = np.array([request.prompt_tokens for request in requests])
    for done in range(int(outputs.max())):
        left = outputs > done
        seconds += cost.decode_time(1, float(lengths[left].mean()) + done, max(1.0, float(left.sum()) / workers))
    return seconds


KINDS = {
    "sessions": run_sessions,
    "crowds": run_sessions,
    "flood": run_flood,
    "deadlines": run_deadlines,
    "samples": run_samples,
}
