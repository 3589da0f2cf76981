"""E2 and sessions: a session's next turn reckons with passing most of what is ahead where its prompt is cached, and the
worker takes cached prompts first."""

from __future__ import annotations

import pytest

import preble
from preble.clock import ManualClock
from preble.errors import InvalidInput
from preble.types import SessionHint

SESSION, OTHERS = list(range(4000)), 10**6


def busy_holder(prompts: int = 10, cached_first: bool = True) -> preble.GlobalScheduler:
    """Two workers; "a" has served a session's turn, and has so many prompts of 2,000 tokens before it."""
    specs = [preble.WorkerSpec(name, cached_first=cached_first) for name in "ab"]
    scheduler = preble.GlobalScheduler(specs, clock=ManualClock(1000.0))
    first = scheduler.schedule(SESSION)
    assert first.worker == "a"
    scheduler.first_token(first.request_id)
    scheduler.finish(first.request_id, output_tokens=20)
    for number in range(prompts):
        scheduler.schedule([OTHERS + number] * 2000, exclude=["b"])
    return scheduler


def queue_of(scheduler: preble.GlobalScheduler, prompt: list[int], session: SessionHint | None = None) -> list[float]:
    """Seconds of queue in each worker's price."""
    return [cost.queue_seconds for cost in scheduler.explain(prompt, session=session).workers]


def test_the_next_turn_passes_most_of_what_is_ahead_where_it_is_cached() -> None:
    scheduler = busy_holder()
    turn, shorter, other = [*SESSION, 7], [*SESSION[:2000], *[8] * 2000], [9] * 4000
    whole = queue_of(scheduler, other)
    assert whole[0] > 2.0 and whole[1] == 0.0
    assert queue_of(scheduler, turn)[0] == pytest.approx(0.2 * whole[0], rel=0.1), "all of it is cached"
    assert queue_of(scheduler, shorter)[0] == pytest.approx(0.6 * whole[0], rel=0.1), "half of it is"


def test_where_engines_serve_in_order_of_arrival_nobody_passes() -> None:
    """One system prompt before many users: half as long again was p99 of the time to first token when each user's next
    question was thought to pass what waits before an engine that lets nobody pass."""
    scheduler = busy_holder(5, cached_first=False)
    turn, other = [*SESSION, 7], [9] * 4000
    for session in (None, SessionHint("talk")):
        assert queue_of(scheduler, turn, session) == queue_of(scheduler, other)
    assert scheduler.schedule(turn, session=SessionHint("talk")).worker == "b"


def test_a_fleet_of_both_kinds_prices_each_worker_as_it_serves() -> None:
    scheduler = busy_holder(5)
    scheduler.add_worker(preble.WorkerSpec("c"))
    for number in range(2):
        scheduler.schedule([*SESSION, *[OTHERS + number] * 2000], exclude=["a", "b"])
    turn = [*SESSION, 7]
    passing, _, waiting = queue_of(scheduler, turn, SessionHint("talk"))
    before = queue_of(scheduler, turn)  # others have gone on from it
    assert passing < 0.4 * before[0] and waiting == before[2]
    again = preble.GlobalScheduler.restore(scheduler.snapshot(), clock=ManualClock(1000.0))
    assert queue_of(again, turn, SessionHint("talk")) == pytest.approx([passing, 0.0, waiting])


def test_a_prefix_that_others_have_gone_on_from_is_no_session() -> None:
    scheduler = busy_holder()
    turn = [*SESSION, 7]
    passing = queue_of(scheduler, turn)[0]
    for question in (8, 9):
        scheduler.schedule([*SESSION, question], exclude=["b"])
    waiting = queue_of(scheduler, turn)[0]
    assert waiting > 3 * passing, "those who ask beside it have as much cached as it has"
    named = queue_of(scheduler, turn, SessionHint("talk"))[0]
    assert named < 0.4 * waiting, "unless its client says that it is one"
    assert queue_of(scheduler, turn, SessionHint(parent="root"))[0] == waiting
    shared = queue_of(scheduler, turn, SessionHint("key", shared=True))[0]
    assert shared == waiting, "nobody passes those who may have the same name"


def test_it_stays_where_others_leave() -> None:
    scheduler = busy_holder(5)
    assert scheduler.schedule([*SESSION, 7]).worker == "a"
    scheduler = busy_holder(5)
    for question in (8, 9):
        scheduler.schedule([*SESSION, question], exclude=["b"])
    assert scheduler.schedule([*SESSION, 7]).worker == "b"


@pytest.mark.parametrize("session", ["talk", 7, {"session": "talk"}])
def test_what_is_no_hint_is_refused_and_changes_nothing(session: object) -> None:
    scheduler = preble.GlobalScheduler(["a"], clock=ManualClock(0.0))
    for call in (scheduler.schedule, scheduler.explain):
        with pytest.raises(InvalidInput, match="session must be a SessionHint"):
            call(SESSION, session=session)
    assert scheduler.stats()["live_requests"] == 0


def test_the_quick_way_and_the_one_that_weighs_everybody_decide_alike() -> None:
    for session in (None, SessionHint("talk")):
        chosen = [busy_holder().schedule([*SESSION, 7], session=session, explain=explain).worker for explain in (0, 1)]
        assert chosen[0] == chosen[1]
