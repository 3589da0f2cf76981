"""What `stats` returns is what its types say: the same keys, and values of these types. The types are read at run time,
so that a figure that is added, renamed or dropped fails here."""

from __future__ import annotations

import typing
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import pytest

from preble import (
    BlockStored,
    GlobalScheduler,
    LocalConfig,
    LocalRequest,
    LocalScheduler,
    ManualClock,
    Router,
    SchedulerConfig,
    WorkerSpec,
)
from preble.batching.stats import LocalStats
from preble.router.router import RouterCounters
from preble.router.stats import ReportedLoad, RouterStats, WorkerState
from preble.scheduling.records import DecisionRecording
from preble.scheduling.stats import SchedulerStats
from preble.transport import wire
from tests.router.test_router import PROMPT, SHORT, fleet, good
from tests.support.transport import asynchronous, collect, until


def assert_typed(value: Any, kind: Any, where: str = "stats") -> None:
    """Every TypedDict in it has the keys of its type (but those that may be missing), and the types fit."""
    msgspec.convert(value, kind)
    for at, found, wanted in dicts_in(value, kind, where):
        strange, missing = found.keys() - wanted.__annotations__.keys(), wanted.__required_keys__ - found.keys()
        assert not strange, f"{at} has {sorted(strange)}, which {wanted.__name__} does not know"
        assert not missing, f"{at} lacks {sorted(missing)} of {wanted.__name__}"


def dicts_in(value: Any, kind: Any, where: str) -> typing.Iterator[tuple[str, dict[str, Any], Any]]:
    """Each dict that has a TypedDict, with that and where it stands."""
    if typing.is_typeddict(kind):
        yield where, value, kind
        for name, of in typing.get_type_hints(kind).items():
            if name in value:
                yield from dicts_in(value[name], of, f"{where}.{name}")
        return
    inside = typing.get_args(kind)
    if isinstance(value, list):
        parts = [(f"{where}[{at}]", one, inside[0]) for at, one in enumerate(value)] if inside else []
    elif typing.get_origin(kind) is dict:
        parts = [(f"{where}[{name!r}]", one, inside[1]) for name, one in value.items()]
    else:
        parts = [(where, value, of) for of in inside if typing.is_typeddict(of) and value is not None]
    for at, one, of in parts:
        yield from dicts_in(one, of, at)


def used(scheduler: GlobalScheduler, clock: ManualClock) -> GlobalScheduler:
    """After requests of some kinds, and an event."""
    for number in range(40):
        decision = scheduler.schedule([*range(300), 1000 + number])
        clock.advance(0.05)
        scheduler.first_token(decision, cached_tokens=0)
        clock.advance(0.2)
        if number % 5:
            scheduler.finish(decision, output_tokens=12)
    scheduler.apply("a", [BlockStored([1], None, list(range(16)), 16)])
    scheduler.tick()
    return scheduler


@pytest.mark.parametrize("policy", ["e2", "e2-paper", "kv_cost", "session_hash"])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_scheduler_s_stats_are_typed(policy: str, recorded: bool) -> None:
    clock = ManualClock()
    options: dict[str, Any] = {"record": DecisionRecording(), "shadow": "round_robin"} if recorded else {}
    workers = [WorkerSpec("a", block_size=16), WorkerSpec("b")]
    scheduler = GlobalScheduler(workers, policy=policy, clock=clock, **options)
    assert_typed(scheduler.stats(), SchedulerStats)
    stats = used(scheduler, clock).stats()
    assert_typed(stats, SchedulerStats)
    assert ("records" in stats) == recorded
    scheduler.drain_worker("a", handover_seconds=1.0)
    clock.advance(5.0)
    scheduler.tick()
    stats = scheduler.stats()
    assert_typed(stats, SchedulerStats)
    assert GlobalScheduler(clock=clock, cost_model="mistral-7b/a6000").stats()["workers"] == {}


def test_plans_moves_and_drains_are_typed_where_there_are_any() -> None:
    clock = ManualClock()
    config = SchedulerConfig(rebalance_floor_seconds=0.001, history_seconds=20.0)
    scheduler = GlobalScheduler(["a", "b", "c"], policy="e2-paper", clock=clock, config=config)
    hot = list(range(4000))
    for number in range(300):
        scheduler.schedule([*hot, 10_000 + number])
        clock.advance(0.02)
        if number % 20 == 0:
            scheduler.tick()
    scheduler.drain_worker(scheduler.schedule([*hot, 1]).worker)
    scheduler.tick()
    stats = scheduler.stats()
    assert stats["membership"]["moves"] or stats["plans"]["active"] or stats["plans"]["ended"]
    assert_typed(stats, SchedulerStats)


def test_a_local_scheduler_s_stats_are_typed() -> None:
    local = LocalScheduler(LocalConfig(1000), clock=ManualClock())
    assert_typed(local.stats(), LocalStats)
    local.add(LocalRequest("r", np.arange(20, dtype=np.int32), 4))
    assert_typed(local.stats(), LocalStats)
    local.next_batch()
    assert_typed(local.stats(), LocalStats)


@asynchronous
async def test_a_router_s_stats_are_typed() -> None:
    assert_typed(Router([]).stats(), RouterStats)
    async with fleet(good) as (router, _):
        await collect(router.generate(PROMPT, SHORT))
        await until(lambda: all(one["load"] for one in router.stats()["workers"].values()), "the worker reported")
        assert_typed(router.stats(), RouterStats)


def test_a_strange_or_missing_key_is_found() -> None:
    stats: dict[str, Any] = dict(GlobalScheduler(["a"]).stats())
    with pytest.raises(AssertionError, match="strange"):
        assert_typed({**stats, "strange": 1}, SchedulerStats)
    del stats["workers"]["a"]["draining"]
    with pytest.raises((AssertionError, msgspec.ValidationError), match="draining"):
        assert_typed(stats, SchedulerStats)


def test_states_and_counters_are_those_of_the_code() -> None:
    from preble.router.fleet import STATES

    assert typing.get_args(WorkerState) == STATES
    assert {one.name for one in fields(RouterCounters)} <= RouterStats.__annotations__.keys()
    assert wire.Pong.__struct_fields__ == tuple(ReportedLoad.__annotations__)
