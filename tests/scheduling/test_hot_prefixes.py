"""The hot prefixes of a scheduler: which, in what order, on whom, and that their names report nothing."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from preble import GlobalScheduler, ManualClock, SchedulerConfig
from preble.errors import InvalidInput
from preble.scheduling import hot_prefixes as module
from preble.scheduling.hot_prefixes import HotPrefixes

LONG, SHORT = [7] * 600, [8] * 300


def ask(scheduler: GlobalScheduler, prefix: list[int], times: int, namespace: object = None) -> set[str]:
    """Requests that begin alike; the workers they went to."""
    found = set()
    for number in range(times):
        decision = scheduler.schedule([*prefix, 1000 + number, 5], namespace=namespace)
        scheduler.first_token(decision.request_id)
        scheduler.finish(decision.request_id, output_tokens=4)
        found.add(decision.worker)
    return found


@pytest.fixture
def scheduler() -> GlobalScheduler:
    """Two workers and a clock that stands; somebody watches."""
    scheduler = GlobalScheduler(["a", "b"], clock=ManualClock(1000.0))
    HotPrefixes(b"").watch(scheduler)
    return scheduler


def test_prefixes_come_most_loaded_first_with_the_workers_that_have_them(scheduler: GlobalScheduler) -> None:
    went = ask(scheduler, SHORT, 4)
    ask(scheduler, LONG, 9)
    longest, shortest = HotPrefixes(b"key").top(scheduler, 10)
    assert (longest.prefix_tokens, longest.requests) == (600, 8), "the first of them found nothing in common"
    assert (shortest.prefix_tokens, shortest.requests) == (300, 3)
    assert longest.load > shortest.load > 0.0
    assert {holder.worker for holder in shortest.holders} == went
    assert shortest.holders[0].cached_tokens == 300
    assert shortest.holders_count == 1 and not shortest.has_namespace


def test_who_has_a_prefix_and_is_not_asked_for_it_is_reported_too(scheduler: GlobalScheduler) -> None:
    (busy,) = ask(scheduler, LONG, 3)
    other = "b" if busy == "a" else "a"
    copied = scheduler.schedule([*LONG, 99, 98], exclude=[busy])
    assert copied.worker == other
    scheduler.cancel(copied.request_id)
    scheduler.drain_worker(busy)
    (prefix,) = HotPrefixes(b"key").top(scheduler, 1)
    assert {holder.worker: holder.cached_tokens for holder in prefix.holders} == {busy: 600, other: 600}


def test_a_worker_that_is_left_out_holds_nothing(scheduler: GlobalScheduler) -> None:
    (busy,) = ask(scheduler, LONG, 3)
    other = "b" if busy == "a" else "a"
    scheduler.finish(scheduler.schedule([*LONG, 99, 98], exclude=[busy]).request_id)
    (all_of_it,) = HotPrefixes(b"key").top(scheduler, 1)
    (prefix,) = HotPrefixes(b"key").top(scheduler, 1, without={busy})
    assert {holder.worker for holder in all_of_it.holders} == {busy, other}
    assert [holder.worker for holder in prefix.holders] == [other] and prefix.holders_count == 1
    assert (prefix.requests, prefix.load) == (all_of_it.requests, all_of_it.load), "it was asked for all the same"


def test_a_name_is_of_the_key_the_namespace_and_the_tokens(scheduler: GlobalScheduler) -> None:
    ask(scheduler, LONG, 3)
    ask(scheduler, LONG, 3, namespace=("salt", "secret"))
    mine, again, other = (HotPrefixes(key).top(scheduler, 5) for key in (b"one", b"one", b"two"))
    assert [prefix.name for prefix in mine] == [prefix.name for prefix in again]
    assert len({prefix.name for prefix in (*mine, *other)}) == 4
    assert sorted(prefix.has_namespace for prefix in mine) == [False, True]
    told = json.dumps([asdict(prefix) for prefix in mine])
    assert "secret" not in told and "7, 7" not in told


def test_names_are_kept_in_bounds_and_are_those_of_one_scheduler(
    scheduler: GlobalScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NAMES_MAX", 1)
    ask(scheduler, LONG, 3)
    ask(scheduler, SHORT, 3)
    hot = HotPrefixes(b"key")
    names = [prefix.name for prefix in hot.top(scheduler, 5)]
    assert len(hot._names) == 1
    assert names == [prefix.name for prefix in hot.top(scheduler, 5)]
    other = GlobalScheduler(["a"], clock=ManualClock(1000.0))
    hot.watch(other)
    ask(other, [9] * 600, 3)
    assert hot.top(other, 5)[0].name not in names, "node numbers of two schedulers are not those of one"


def test_holders_are_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOLDERS_MAX", 2)
    scheduler = GlobalScheduler([f"w{i}" for i in range(4)], clock=ManualClock(1000.0))
    HotPrefixes(b"key").watch(scheduler)
    names = set(scheduler.workers)
    for name in sorted(names):
        for number in range(2):
            decision = scheduler.schedule([*LONG, number, int(name[1:]) + 50], exclude=names - {name})
            scheduler.finish(decision.request_id)
    (prefix,) = HotPrefixes(b"key").top(scheduler, 1)
    assert (len(prefix.holders), prefix.holders_count) == (2, 4)


def test_a_prefix_that_is_forgotten_meanwhile_is_left_out(scheduler: GlobalScheduler) -> None:
    ask(scheduler, LONG, 3)
    groups = module.counted_groups(scheduler.core, scheduler.now(), 0.0)
    scheduler.remove_worker("a")
    scheduler.remove_worker("b")
    scheduler.tick(1e6)
    assert HotPrefixes(b"key")._prefix(scheduler, groups) is None


@pytest.mark.parametrize(
    "options", [{"policy": "round_robin"}, {"config": SchedulerConfig(rebalance_ratio=0, replicas_max=1)}]
)
def test_where_nothing_is_counted_there_is_nothing(options: dict[str, object]) -> None:
    scheduler = GlobalScheduler(["a"], clock=ManualClock(1000.0), **options)
    ask(scheduler, LONG, 5)
    assert HotPrefixes(b"key").top(scheduler, 5) == []


def test_a_count_that_is_none_is_refused(scheduler: GlobalScheduler) -> None:
    for count in (0, 1001, True, 2.0):
        with pytest.raises(InvalidInput, match="count"):
            HotPrefixes(b"key").top(scheduler, count)
