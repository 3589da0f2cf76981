"""A queue in front of a scheduler, for who has no router: requests wait by shares and slack, and what becomes of them
is called back."""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Sequence
from typing import Any

import pytest

import preble
from preble import GlobalScheduler, ManualClock, WorkerSpec
from preble.errors import DuplicateRequest, InvalidInput, NoWorkers, Overloaded, QueueFull
from preble.policies.base import RequestView, WorkersView
from preble.scheduling.admission import AdmissionQueue
from preble.scheduling.flow_control import FlowConfig

COST = preble.CostModel([(1, 0.001), (1001, 1.001)])  # a millisecond a token
WORK = 0.5


def prompt(number: int, tokens: int = 500) -> list[int]:
    return [10_000 * (number + 1) + token for token in range(tokens)]


class Application:
    """Who holds a queue: what was called back, and its workers, which are told when to begin and to end."""

    def __init__(self, *workers: str, policy: Any = "e2", **flow: Any) -> None:
        self.clock = ManualClock()
        specs = [WorkerSpec(name, kv_capacity_tokens=1_000_000) for name in workers or ("a",)]
        self.scheduler = GlobalScheduler(specs, cost_model=COST, clock=self.clock, policy=policy)
        self.sent: list[Hashable] = []
        self.refused: dict[Hashable, Exception] = {}
        config = FlowConfig(**{"hold_seconds": 1.5 * WORK, "spare_seconds": 0.1, **flow})
        self.queue = AdmissionQueue(self.scheduler, self.turn, self.refused.__setitem__, config=config)
        self.numbers = iter(range(1_000_000))

    def turn(self, request_id: Hashable, decision: preble.Decision) -> None:
        assert decision.request_id == request_id
        self.sent.append(request_id)

    def offer(self, name: Hashable, **options: Any) -> Hashable:
        request_id = self.queue.offer(prompt(next(self.numbers)), request_id=name, **options)
        self.queue.check()
        return request_id

    def serve(self, request_id: Hashable, seconds: float = WORK) -> None:
        self.clock.advance(seconds)
        self.queue.first_token(request_id, cached_tokens=0)
        self.queue.finish(request_id, output_tokens=4)
        self.queue.check()
        self.scheduler.check()


@pytest.mark.parametrize("names", ["abcde", [uuid.UUID(int=number) for number in range(1, 6)]])
def test_what_workers_cannot_begin_soon_waits_and_goes_as_they_can(names: Sequence[Hashable]) -> None:
    app = Application()
    for name in names:
        app.offer(name, tenant="t")
    assert app.sent == [*names[:2]]
    waiting = len(app.queue)
    app.serve(app.sent[0])
    assert len(app.queue) == waiting - 1 and app.sent == [*names[: len(app.sent)]]
    for name in names:
        app.serve(name)
    assert len(app.queue) == 0 and app.scheduler.stats()["live_requests"] == 0


def test_a_quiet_tenant_passes_a_flood() -> None:
    app = Application()
    for number in range(20):
        app.offer(f"flood-{number}", tenant="flood")
    app.offer("quiet", tenant="quiet")
    served = 0
    while "quiet" not in app.sent:
        app.serve(app.sent[served])
        served += 1
    assert served <= 3


def test_its_worker_takes_what_a_flood_wants_as_batch_work() -> None:
    app = Application()
    app.offer("quiet", tenant="quiet")
    for number in range(20):
        app.offer(f"flood-{number}", tenant="flood")
    for served in range(6):
        app.serve(app.sent[served])
    assert app.queue.priority("quiet") == "interactive"
    assert app.sent[-1].startswith("flood") and app.queue.priority(app.sent[-1]) == "batch"
    gone = app.sent[-1]
    assert app.queue.cancel(gone) and app.queue.priority(gone) == "interactive"
    app.queue.check()


def test_who_would_come_too_late_is_refused_at_once() -> None:
    app = Application()
    for number in range(30):
        app.offer(f"r{number}", tenant="t")
    for number in range(10):  # so that the pace is known
        app.serve(f"r{number}")
    with pytest.raises(Overloaded) as refused:
        for number in range(20):
            last = f"late-{number}"
            app.offer(last, tenant="t", deadline_seconds=2.0)
    assert refused.value.retry_after_seconds > 2.0
    assert last not in app.sent and not app.refused
    app.offer(last, tenant="t")  # its name is free


def test_who_cannot_make_its_deadline_any_more_is_refused_when_its_turn_comes() -> None:
    app = Application()
    for number in range(3):
        app.offer(f"r{number}", tenant="t")
    app.offer("late", tenant="t", deadline_seconds=1.0)
    for number in range(3):
        app.serve(f"r{number}", 3.0)
    app.queue.pump()
    assert isinstance(app.refused["late"], Overloaded) and "late" not in app.sent
    app.queue.check()


def test_at_the_bound_the_flood_loses_its_newest() -> None:
    app = Application(waiting_max=5)
    for number in range(7):
        app.offer(f"flood-{number}", tenant="flood")
    with pytest.raises(QueueFull):
        app.offer("flood-7", tenant="flood")
    app.offer("quiet", tenant="quiet")
    assert list(app.refused) == ["flood-6"] and isinstance(app.refused["flood-6"], QueueFull)


def test_who_waits_and_goes_away_is_forgotten() -> None:
    app = Application()
    for name in "abcd":
        app.offer(name, tenant="t")
    waits = next(name for name in "abcd" if name not in app.sent)
    assert app.queue.cancel(waits) and not app.queue.cancel(waits)
    runs = app.sent[0]
    assert app.queue.cancel(runs) and not app.scheduler.cancel(runs)
    app.queue.check()


def test_what_is_called_back_may_call_the_queue() -> None:
    app = Application()
    done: list[Hashable] = []

    def turn(request_id: Hashable, decision: preble.Decision) -> None:
        done.append(request_id)
        app.queue.first_token(request_id)
        app.queue.finish(request_id, output_tokens=1)

    app.queue = AdmissionQueue(app.scheduler, turn, app.refused.__setitem__, config=FlowConfig(hold_seconds=WORK))
    for name in "abcdef":
        app.offer(name, tenant="t")
    assert done == list("abcdef") and len(app.queue) == 0
    app.queue.check()


def test_a_name_is_made_up_and_none_is_used_twice() -> None:
    app = Application()
    names = [app.offer(None, tenant="t") for _ in range(4)]
    assert len(set(names)) == 4
    for name in names:  # one that runs, one that waits
        with pytest.raises(DuplicateRequest):
            app.offer(str(name), tenant="t")


def test_what_is_wrong_with_a_request_is_said_where_it_is_offered() -> None:
    app = Application()
    for wrong in ({"tenant": 5}, {"deadline_seconds": 0.0}, {"priority": "soon"}, {"max_new_tokens": -1}):
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            app.offer("wrong", **wrong)
    with pytest.raises(InvalidInput):
        app.queue.offer([], request_id="empty")
    assert len(app.queue) == 0 and not app.sent
    app.scheduler.remove_worker("a")
    with pytest.raises(NoWorkers):
        app.offer("nobody", tenant="t")
    app.queue.check()


def test_a_request_that_names_nothing_waits_with_the_others() -> None:
    app = Application()
    for number in range(4):
        app.offer(f"r{number}")
    assert len(app.queue) > 0


class Choosy(preble.Policy):
    name = "choosy"

    def score(self, request: RequestView, workers: WorkersView) -> list[float]:
        if str(request.request_id).startswith("bad"):
            raise ValueError("no such request")
        if request.request_id == "interrupted":
            raise KeyboardInterrupt
        return [0.0] * len(workers.ids)


def test_a_request_for_which_a_policy_raises_ends_and_does_not_stop_the_others() -> None:
    """Regression: it stayed first in its line, and every later call raised its error."""
    app = Application(policy=Choosy(), hold_seconds=0.5 * WORK)
    with pytest.raises(ValueError, match="no such request"):
        app.offer("bad at once")
    with pytest.raises(KeyboardInterrupt):
        app.offer("interrupted")
    assert len(app.queue) == 0
    for name in ("r0", "bad", "r1"):
        app.offer(name)
    app.serve("r0")
    assert app.sent == ["r0", "r1"] and len(app.queue) == 0
    assert list(app.refused) == ["bad"] and isinstance(app.refused["bad"], ValueError)
    app.serve("r1")
    assert app.scheduler.stats()["live_requests"] == 0


@pytest.mark.parametrize("hold_seconds", [None, 0.5 * WORK])
def test_when_the_last_worker_leaves_what_waits_is_refused(hold_seconds: float | None) -> None:
    """Regression: with `hold_seconds` it waited for good, past its deadline; batch work did so without it as well."""
    app = Application(hold_seconds=hold_seconds)
    app.offer("runs")
    app.offer("waits", deadline_seconds=5.0)
    app.offer("batch", priority="batch")
    app.scheduler.remove_worker("a")
    app.queue.pump()
    app.queue.check()
    assert len(app.queue) == 0 and isinstance(app.refused["batch"], NoWorkers)
    assert "waits" in (app.sent if hold_seconds is None else app.refused)
