"""Random histories of pairs against a naive model of their bookings, and the cheapest pair against all pairs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import preble
from preble import GlobalScheduler, ManualClock, SchedulerConfig, WorkerSpec
from preble.scheduling.pairs.price import HalfTerms, cheapest_pair
from preble.types import BOTH
from tests.scheduling.pairs.test_pairs import COST, prompt

NAMES = {"p0": "prefill", "p1": "prefill", "b": "both", "d": "decode"}
STEPS = ("place", "place", "place", "prefilled", "first", "finish", "cancel", "remove", "add", "wait", "expire")
numbers = st.integers(0, 255)


class NaivePairs:
    """Of each live request: who has its prefill, as long as that lasts, who has it, and since when."""

    def __init__(self) -> None:
        self.live: dict[str, dict[str, Any]] = {}

    def placed(self, found: preble.types.PairDecision, now: float) -> None:  # type: ignore[name-defined]
        half = found.prefill_worker
        booked = {"half": half, "prefills": half is not None, "worker": found.worker, "at": now, "waits": half is None}
        self.live[found.request_id] = booked

    def gone(self, worker: str) -> list[str]:
        """A worker has left: whose requests those are. They stay, booked nowhere."""
        names = [name for name, one in self.live.items() if worker in (one["half"], one["worker"])]
        for name in names:
            for what in ("half", "worker"):
                if self.live[name][what] == worker:
                    self.live[name][what] = None
        return names

    def requests(self, worker: str) -> int:
        return sum((one["half"] == worker) + (one["worker"] == worker) for one in self.live.values())

    def waiting(self, worker: str) -> int:
        halves = sum(one["half"] == worker for one in self.live.values())
        return halves + sum(one["worker"] == worker and one["waits"] for one in self.live.values())


def play(history: list[tuple[int, int]]) -> None:
    clock = ManualClock()
    specs = {name: WorkerSpec(name, role=role) for name, role in NAMES.items()}  # type: ignore[arg-type]
    scheduler = GlobalScheduler(
        specs.values(), cost_model=COST, clock=clock, config=SchedulerConfig(lease_seconds=50.0, calibrate=True)
    )
    model = NaivePairs()
    for number, (step, choice) in enumerate(history):
        act(scheduler, clock, model, STEPS[step % len(STEPS)], choice, f"r{number}", specs)
        for name in scheduler.workers:
            account = scheduler.stats()["workers"][name]
            assert account["live_requests"] == model.requests(name), (name, STEPS[step % len(STEPS)])
            assert account["waiting_requests"] == model.waiting(name), (name, STEPS[step % len(STEPS)])
        scheduler.check()
    for name in list(model.live):
        scheduler.cancel(name)
    assert scheduler.stats()["live_requests"] == 0
    assert all(scheduler.stats()["workers"][name]["waiting_prefill_seconds"] == 0.0 for name in scheduler.workers)
    scheduler.check()


def act(
    scheduler: GlobalScheduler,
    clock: ManualClock,
    model: NaivePairs,
    step: str,
    choice: int,
    name: str,
    specs: dict[str, WorkerSpec],
) -> None:
    there, known = list(scheduler.workers), list(model.live)
    one = known[choice % len(known)] if known else None
    if step == "place":
        try:
            model.placed(
                scheduler.schedule_pair(prompt(choice % 5, 1 + choice * 4), request_id=name, max_new_tokens=9),
                clock(),
            )
        except preble.errors.NoWorkers:
            assert "b" not in there and not ("d" in there and {"p0", "p1"} & set(there))
    elif step == "remove":
        for gone in there[choice % max(len(there), 1) :][:1]:
            assert sorted(scheduler.remove_worker(gone)) == sorted(model.gone(gone))
    elif step == "add":
        new = [spec for spec in specs.values() if spec.id not in there]
        if new:
            scheduler.add_worker(new[0])
    elif step == "wait":
        clock.advance(choice / 64.0)
    elif step == "expire":
        clock.advance(20.0)
        scheduler.tick()
        for old in [key for key, booked in model.live.items() if booked["at"] < clock() - 50.0]:
            del model.live[old]
    elif one is not None:
        end(scheduler, model, step, one)


def end(scheduler: GlobalScheduler, model: NaivePairs, step: str, name: str) -> None:
    booked = model.live[name]
    if step == "prefilled":
        assert scheduler.prefill_done(name) == booked["prefills"]
        booked["half"], booked["prefills"] = None, False
    elif step == "first":
        assert scheduler.first_token(name)
        booked["waits"] = False
    else:
        assert getattr(scheduler, step)(name)
        del model.live[name]


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), max_size=40))
def test_the_bookings_are_the_models_whatever_happens(history: list[tuple[int, int]]) -> None:
    play(history)


prices = st.integers(0, 8).map(float)


@settings(max_examples=200)
@given(st.lists(prices, max_size=7), st.lists(prices, max_size=7), st.integers(0, 6))
def test_the_pair_is_the_cheapest_of_all(firsts: list[float], seconds: list[float], shared: int) -> None:
    """The first `shared` workers may do either half."""

    def terms(index: int) -> HalfTerms:
        return HalfTerms(index, 0, 10, *([0.0] * 10))

    ones = [(price, terms(i), BOTH) for i, price in enumerate(firsts)]
    others = [(price, terms(i if i < shared else 100 + i)) for i, price in enumerate(seconds)]
    found = cheapest_pair(ones, others, 30, lambda one, other, moved: moved / 10.0)
    every = [a + b + 2.0 for a, one, _ in ones for b, other in others if one.row != other.row]
    assert (found is None) == (not every)
    if found is not None:
        assert found.seconds == pytest.approx(min(every)) and found.moved_tokens == 20
        assert found.prefills.row != found.decodes.row
