"""Pulls that are not over keep links busy: what is known of them, and what the price makes of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from preble.errors import InvalidInput
from preble.scheduling.pulls.link_times import Transfer
from preble.scheduling.pulls.under_way import PULLS_MAX, UnderWay
from tests.scheduling.pulls.test_pulls import PROMPT, made, range_of, serve


def test_one_waits_for_the_other_at_either_end() -> None:
    pulls = UnderWay()
    pulls.begin(1, "a", "b", 2.0, 10.0)
    assert (pulls.busy_until("a"), pulls.busy_until("b"), pulls.busy_until("c")) == (12.0, 12.0, 0.0)
    assert pulls.link_seconds("a", "c", 10.5) == pulls.link_seconds("c", "b", 10.5) == 1.5
    assert pulls.link_seconds("c", "d", 10.5) == 0.0
    assert pulls.link_seconds("a", "c", 13.0) == 0.0, "it should be over"
    pulls.begin(2, "a", "c", 5.0, 11.0)
    assert pulls.busy_until("a") == 16.0
    assert pulls.end(2, "a", "c") == 1.0, "so long it was to wait for the first"
    assert pulls.busy_until("a") == 12.0 and pulls.busy_until("c") == 0.0
    assert pulls.end(2, "a", "c") == 0.0, "twice"
    pulls.forget("b")
    assert pulls.end(1, "a", "b") == 0.0 and len(pulls) == 0


def test_over_the_bound_the_one_asked_for_first_is_forgotten() -> None:
    pulls = UnderWay()
    for number in range(PULLS_MAX):
        pulls.begin(number, "a", f"w{number}", 100.0 - number, 0.0)
    pulls.begin("more", "a", "b", 1.0, 0.0)
    assert pulls.busy_until("a") == 99.0, "not 100, which the first had"
    assert len(pulls) == 2 * PULLS_MAX + 1
    pulls.begin("late", "a", "b", 1.0, 98.5)
    assert pulls.busy_until("a") == 99.5 and len(pulls) == 2 * PULLS_MAX + 1 - (PULLS_MAX - 2), "what is over goes"


class Machine(RuleBasedStateMachine):
    """Against a plain list of what was begun."""

    @initialize()
    def begin(self) -> None:
        self.pulls, self.now = UnderWay(), 0.0
        self.model: dict[int, tuple[str, str, float]] = {}

    @rule(number=st.integers(0, 20), workers=st.permutations("abcd"), seconds=st.floats(0.0, 10.0))
    def asked(self, number: int, workers: list[str], seconds: float) -> None:
        if number in self.model and self.model[number][:2] != (workers[0], workers[1]):
            return  # a request pulls once
        self.pulls.begin(number, workers[0], workers[1], seconds, self.now)
        self.model[number] = (workers[0], workers[1], self.now + seconds)

    @rule(number=st.integers(0, 20))
    def over(self, number: int) -> None:
        if number in self.model:
            source, target, _ = self.model.pop(number)
            self.pulls.end(number, source, target)

    @rule(seconds=st.floats(0.0, 5.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def links_are_busy_until_the_last_is_over(self) -> None:
        for worker in "abcd":
            ends = [end for source, target, end in self.model.values() if worker in (source, target)]
            expected = max([0.0, *(end - self.now for end in ends)])
            assert max(self.pulls.busy_until(worker) - self.now, 0.0) == pytest.approx(expected)


Machine.TestCase.settings = settings(max_examples=60, deadline=None)
TestUnderWay = Machine.TestCase


# --- the scheduler ----------------------------------------------------------------------------------------------------


def test_a_second_pull_counts_with_the_first() -> None:
    scheduler, clock = made("a", "b", "c")
    other = range_of(1)
    serve(scheduler, "a")
    serve(scheduler, "a", other)
    first = scheduler.schedule(PROMPT, exclude=["a", "c"])
    alone = scheduler.pull_for(first, PROMPT)
    second = scheduler.schedule(other, exclude=["a", "b"])
    found = scheduler.pull_for(second, other)
    assert alone is not None and found is not None
    assert alone.link_seconds == 0.0 and found.link_seconds == pytest.approx(alone.pull_seconds)
    assert found.pull_seconds == pytest.approx(2 * alone.pull_seconds), "of one source, to another worker"
    clock.advance(found.pull_seconds)
    third = scheduler.schedule([*PROMPT, 1], exclude=["a", "b"])
    again = scheduler.pull_for(third, [*PROMPT, 1])
    assert again is not None and again.link_seconds == 0.0, "nobody has reported anything, but it must be over"


def test_where_too_many_want_one_link_the_rest_computes() -> None:
    """All from one worker, over the 10 Gbit/s that are guessed."""
    scheduler, _ = made("a", "b", "c", token_bytes=400_000)
    prompts = [range_of(number) for number in range(5)]
    for prompt in prompts:
        serve(scheduler, "a", prompt)
    found = []
    for number, prompt in enumerate(prompts):
        decision = scheduler.schedule(prompt, exclude=["a", "bc"[number % 2]])
        found.append(scheduler.pull_for(decision, prompt))
        scheduler.cancel(decision)  # the next waits for nothing but links
    waits = [pull.link_seconds for pull in found if pull is not None]
    assert waits == sorted(waits) and waits[0] == 0.0
    assert 1 < len(waits) < len(found), "at some length of the queue computing is sooner"


def test_a_pull_that_is_not_asked_for_keeps_no_link_busy() -> None:
    scheduler, _ = made("a", "b", "c")
    serve(scheduler, "a")
    decision = scheduler.schedule(PROMPT, exclude=["a", "c"])
    assert scheduler.pull_for(decision, PROMPT, least_tokens=1000) is None, "it lacks 999"
    assert scheduler._kv_moves is not None and len(scheduler._kv_moves.under_way) == 0
    assert scheduler.stats()["pulls"]["asked"] == 0
    with pytest.raises(InvalidInput, match="least_tokens"):
        scheduler.pull_for(decision, PROMPT, least_tokens=-1)
    found = scheduler.pull_for(decision, PROMPT, least_tokens=999)
    assert found is not None and scheduler.stats()["pulls"]["asked"] == 1


def test_what_a_transfer_waited_for_the_link_is_not_its_own_time() -> None:
    scheduler, clock = made("a", "b", "c")
    other = range_of(1)
    serve(scheduler, "a")
    serve(scheduler, "a", other)
    first, second = (scheduler.schedule(p, exclude=["a", x]) for p, x in ((PROMPT, "c"), (other, "b")))
    pulls = [scheduler.pull_for(first, PROMPT), scheduler.pull_for(second, other)]
    assert all(pulls)
    waited = pulls[1].link_seconds  # type: ignore[union-attr]
    clock.advance(0.5)
    for decision, seconds in ((first, 0.25), (second, waited + 0.25)):
        assert scheduler.pull_ended(decision, 999, "a", Transfer(999, 999, 999_000, seconds, 0.0, 0.0))
    moves = scheduler._kv_moves
    assert moves is not None
    took = [moves.links.estimate("a", target, clock()).seconds(999_000.0) for target in "bc"]
    assert took[0] == pytest.approx(took[1])
    assert moves.under_way.busy_until("a") == 0.0 and len(moves.under_way) == 0


def test_who_has_left_keeps_no_link_busy() -> None:
    scheduler, _ = made("a", "b", "c")
    serve(scheduler, "a")
    decision = scheduler.schedule(PROMPT, exclude=["a", "c"])
    assert scheduler.pull_for(decision, PROMPT) is not None
    moves = scheduler._kv_moves
    assert moves is not None and moves.under_way.busy_until("b") > 0.0
    scheduler.remove_worker("b")
    assert moves.under_way.busy_until("b") == 0.0
