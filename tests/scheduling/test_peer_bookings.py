"""Bookings for other routers: a scheduler that receives them decides as one that placed them itself. Transport
and processes are in router/test_several_routers.py."""

from __future__ import annotations

import numpy as np
import pytest

import preble
from preble.clock import ManualClock
from preble.errors import InvalidInput, InvalidTime, InvalidTokens, UnknownWorker
from preble.scheduling.peer_bookings import is_peer, peer_id
from preble.scheduling.records import DecisionRecording
from preble.types import AllBlocksCleared, PrefixStored, RequestEnded, RequestPlaced, RequestPrefilled

PROMPT = list(range(100, 400))


def scheduler(**options: object) -> preble.GlobalScheduler:
    specs = [preble.WorkerSpec(name, kv_capacity_tokens=20_000, block_size=1) for name in ("a", "b", "c")]
    return preble.GlobalScheduler(specs, clock=ManualClock(10.0), cost_model="mistral-7b/a6000", **options)


def test_a_peer_request_is_booked_like_an_own_one() -> None:
    own, told = scheduler(), scheduler()
    decision = own.schedule(PROMPT, request_id="r", max_new_tokens=40)
    told.apply(decision.worker, [RequestPlaced("A", "r", PROMPT, None, 40)])
    assert told.stats()["workers"] == own.stats()["workers"]
    assert told.match(PROMPT).matched_tokens == own.match(PROMPT).matched_tokens
    own.first_token("r", cached_tokens=0)
    told.apply(decision.worker, [RequestPrefilled("A", "r", 0)])
    assert told.stats()["workers"] == own.stats()["workers"]
    own.finish("r", output_tokens=12)
    told.apply(decision.worker, [RequestEnded("A", "r", 12)])
    assert told.stats()["workers"] == own.stats()["workers"]
    assert told.stats()["live_requests"] == told.stats()["peer_bookings"] == 0
    assert (told.stats()["scheduled"], told.stats()["finished"], told.stats()["peer_requests"]) == (0, 0, 1)
    told.check()


def test_routers_reported_of_each_other_keep_the_same_books() -> None:
    """Each request goes to one of two routers, which learn of the other's at once; a third one learns of all."""
    rng = np.random.default_rng(5)
    prompts = [[*range(1000 * int(g), 1000 * int(g) + 600), *rng.integers(0, 9, 40)] for g in rng.integers(0, 40, 200)]
    third, routers = scheduler(), (scheduler(), scheduler())
    live: list[tuple[int, str, str]] = []
    for number, prompt in enumerate(prompts):
        name, mine = f"r{number}", number % 2
        for each in (third, *routers):
            each._clock.advance(0.05)
        worker = routers[mine].schedule(prompt, request_id=name).worker
        for each in (routers[1 - mine], third):
            each.apply(worker, [RequestPlaced(str(mine), name, prompt)])
        live.append((mine, name, worker))
        if len(live) > 6:
            owner, ended, where = live.pop(0)
            routers[owner].finish(ended, output_tokens=number % 7)
            for each in (routers[1 - owner], third):
                each.apply(where, [RequestEnded(str(owner), ended, number % 7)])
    assert routers[0].stats()["workers"] == routers[1].stats()["workers"] == third.stats()["workers"]
    assert {"rendezvous", "exploit"} <= routers[0].stats()["reasons"].keys()
    for each in (third, *routers):
        each.check()


def among_others(seed: int, tokens: int = 500, **knobs: float) -> preble.GlobalScheduler:
    """A router of several, which has reported work on every worker."""
    names = np.random.default_rng(seed).permutation([f"w{number}" for number in range(12)])
    specs = [preble.WorkerSpec(str(name), kv_capacity_tokens=20_000, block_size=1) for name in names]
    config = preble.SchedulerConfig(**knobs)
    sched = preble.GlobalScheduler(specs, config=config, clock=ManualClock(10.0), cost_model="mistral-7b/a6000")
    for number in range(48):
        name = f"w{number % 12}"
        told = RequestPlaced("A", str(number), [number * 10_000 + at for at in range(tokens)])
        sched.apply(name, [told, RequestEnded("A", str(number), 10)])
    return sched


def test_siblings_that_come_to_different_routers_meet() -> None:
    """Neither knows of the other's request, and their workers were added in different orders."""
    for group in range(20):
        prefix = list(range(50_000 + 1000 * group, 50_900 + 1000 * group))
        first, second = (among_others(seed).schedule([*prefix, seed]).worker for seed in (1, 2))
        assert first == second


def test_prompts_that_share_nothing_spread() -> None:
    """A router that learns of nobody's requests for a moment does not send all of its own to the best worker of then,
    as one does that thinks itself alone."""
    prompts = [list(range(50_000 + 1000 * number, 50_400 + 1000 * number)) for number in range(24)]
    met = {among_others(3).explain(prompt).worker for prompt in prompts}
    lone = scheduler()
    assert len(met) >= 8
    assert len({lone.explain(prompt).worker for prompt in prompts}) == 1


def test_a_busy_worker_is_not_drawn() -> None:
    sched = among_others(4)
    sched.apply("w3", [RequestPlaced("A", f"long{number}", [number] * 9000) for number in range(12)])
    prompts = [list(range(50_000 + 1000 * number, 50_400 + 1000 * number)) for number in range(40)]
    assert "w3" not in {sched.explain(prompt).worker for prompt in prompts}


def test_a_request_without_a_result_is_given_back() -> None:
    sched = scheduler()
    sched.apply("a", [RequestPlaced("A", "r", PROMPT), RequestEnded("A", "r", None)])
    account = sched.stats()["workers"]["a"]
    assert account["load_seconds"] == account["live_requests"] == account["cached_tokens"] == 0


def test_what_comes_twice_or_late_is_counted_and_changes_nothing() -> None:
    sched = scheduler()
    assert sched.apply("a", [RequestPlaced("A", "r", PROMPT)]) == 1
    before = sched.stats()["workers"]
    told = [RequestPlaced("A", "r", [1, 2]), RequestPrefilled("B", "r"), RequestEnded("A", "s", 3)]
    assert sched.apply("a", told) == 0
    assert sched.apply("b", [RequestEnded("A", "r", 3)]) == 0
    assert sched.stats()["workers"] == before and sched.stats()["peer_events_ignored"] == 4


def test_the_same_id_on_another_worker_or_router_is_another_request() -> None:
    sched = scheduler()
    sched.schedule(PROMPT, request_id="r")
    sched.apply("a", [RequestPlaced("A", "r", PROMPT), RequestPlaced("B", "r", PROMPT)])
    sched.apply("b", [RequestPlaced("A", "r", PROMPT)])
    assert sched.stats()["live_requests"] == 4 and sched.stats()["peer_bookings"] == 3
    sched.check()


def test_a_removed_worker_takes_its_peer_requests_along() -> None:
    sched = scheduler()
    sched.apply("a", [RequestPlaced("A", "r", PROMPT)])
    own = sched.schedule(PROMPT, request_id="mine", exclude=["b", "c"]).request_id
    assert sched.remove_worker("a") == [own]
    assert sched.stats()["live_requests"] == 1
    sched.apply("b", [RequestPlaced("A", "r", PROMPT)])
    assert sched.forget_peer_bookings("b") == 1 and sched.forget_peer_bookings("c") == 0
    assert sched.stats()["peer_bookings"] == 0
    with pytest.raises(UnknownWorker):
        sched.forget_peer_bookings("a")


def test_a_worker_is_not_removed_where_the_clock_fails() -> None:
    """Regression: it had gone by the time the clock was read, and its orphans with it."""
    sched = scheduler()
    own = sched.schedule(PROMPT).request_id
    sched._clock, clock = (lambda: float("nan")), sched._clock
    with pytest.raises(InvalidTime):
        sched.remove_worker("a")
    sched._clock = clock
    assert sched.remove_worker("a") == [own]


def test_a_peer_request_expires_with_its_lease() -> None:
    sched = scheduler(config=preble.SchedulerConfig(lease_seconds=60.0))
    sched.apply("a", [RequestPlaced("A", "r", PROMPT)])
    sched._clock.advance(61.0)
    sched.tick()
    assert sched.stats()["live_requests"] == 0 and sched.stats()["expired_leases"] == 1


def test_at_the_bound_of_live_requests_a_peer_one_is_left_out() -> None:
    sched = scheduler(config=preble.SchedulerConfig(live_requests_max=2))
    told = [RequestPlaced("A", str(number), PROMPT) for number in range(3)]
    assert sched.apply("a", told) == 2
    assert sched.stats()["live_requests"] == 2 and sched.stats()["peer_events_ignored"] == 1
    sched.check()


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (RequestPlaced("A", "r", [-1]), InvalidTokens),
        (RequestPlaced("A", "r", []), InvalidTokens),
        (RequestPlaced("A", 7, [1]), InvalidInput),
        (RequestPlaced(None, "r", [1]), InvalidInput),
        (RequestPlaced("A", "r", [1], []), InvalidInput),
        (RequestPlaced("A", "r", [1], None, 0), InvalidInput),
        (RequestPrefilled("A", "live", 10**6), InvalidInput),
        (RequestPrefilled("A", "live", -1), InvalidInput),
        (RequestEnded("A", "live", -2), InvalidInput),
    ],
)
def test_a_lying_worker_is_refused(event: object, error: type[Exception]) -> None:
    sched = scheduler()
    sched.apply("a", [RequestPlaced("A", "live", PROMPT)])
    before = sched.stats()
    with pytest.raises(error):
        sched.apply("a", [event])
    assert sched.stats() == before
    sched.check()


def test_a_snapshot_keeps_peer_requests() -> None:
    sched = scheduler()
    sched.apply("a", [RequestPlaced("A", "r", PROMPT)])
    again = preble.GlobalScheduler.restore(sched.snapshot(), clock=ManualClock(10.0))
    assert again.stats()["peer_bookings"] == 1


def test_where_peers_report_sooner_less_is_left_to_the_draw() -> None:
    """Queues grow from the first worker to the last; the longer the delay, the more of them are drawn."""
    prompts = [list(range(50_000 + 1000 * number, 50_400 + 1000 * number)) for number in range(40)]
    reached = []
    for delay_seconds in (0.05, 0.005, 0.0):
        sched = among_others(5, 9000, peer_delay_seconds=delay_seconds)
        for number in range(1, 12):
            waiting = range(10**6 + 10_000 * number, 10**6 + 10_100 * number)
            sched.apply(f"w{number}", [RequestPlaced("A", f"waits {number}", list(waiting))])
        reached.append(len({sched.explain(prompt).worker for prompt in prompts}))
    assert reached[0] > reached[1] > reached[2]


def test_a_restored_router_draws_as_the_one_before() -> None:
    sched = among_others(5)
    again = preble.GlobalScheduler.restore(sched.snapshot(), clock=ManualClock(10.0))
    prompts = [list(range(50_000 + 1000 * number, 50_400 + 1000 * number)) for number in range(20)]
    assert [again.explain(prompt) for prompt in prompts] == [sched.explain(prompt) for prompt in prompts]
    assert {again.schedule(prompt).reason for prompt in prompts} & {"rendezvous"}
    assert again.stats()["reasons"]["rendezvous"] > 0
    third = preble.GlobalScheduler.restore(again.snapshot(), clock=ManualClock(10.0))
    assert third.stats()["reasons"] == again.stats()["reasons"]


def test_a_restored_router_receives_of_an_end() -> None:
    sched = scheduler()
    sched.apply("a", [RequestPlaced("A", "r", PROMPT)])
    again = preble.GlobalScheduler.restore(sched.snapshot(), clock=ManualClock(10.0))
    assert again.apply("a", [RequestEnded("A", "r", 3)]) == 1
    assert again.stats()["live_requests"] == 0


def test_a_policy_with_books_knows_the_requests_of_others() -> None:
    sched = scheduler(policy="kv_cost")
    sched.apply("a", [RequestPlaced("A", "r", PROMPT)])
    assert sched.stats()["peer_bookings"] == 1
    other = sched.schedule(list(range(5000, 5300)))
    assert other.worker != "a"  # nothing is cached of it anywhere, and a has work
    sched.apply("a", [RequestEnded("A", "r", 3)])
    sched.check()


def test_records_are_of_own_requests_only() -> None:
    sched = scheduler(record=DecisionRecording())
    sched.apply("a", [RequestPlaced("A", "r", PROMPT), RequestPrefilled("A", "r", 0), RequestEnded("A", "r", 3)])
    assert sched.records() == ()
    sched.check()


def test_events_of_blocks_and_requests_are_taken_in_order() -> None:
    sched = scheduler()
    placed, ended = RequestPlaced("A", "r", PROMPT), RequestEnded("A", "r", 3)
    sched.apply("a", [placed, ended, AllBlocksCleared(), PrefixStored(PROMPT[:50])])
    assert sched.match(PROMPT).matched_tokens == {"a": 50}


def test_ids_of_peer_requests_are_distinguished() -> None:
    assert is_peer(peer_id("w", "A", "r"))
    assert not is_peer(("w", "A", "r", "x")) and not is_peer("mirrored") and not is_peer(None)
