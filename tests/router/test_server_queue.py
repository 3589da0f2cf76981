"""What waits before a server: in which order it is sent, how much at a time, and that nothing waits for nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from preble import ManualClock
from preble.router.server_queue import BATCH_PATIENCE, PACE_STEP, QueuedRequest, ServerQueue
from preble.transport.look_ahead import (
    EARLY_SECONDS,
    OVERDUE_SECONDS,
    OVERDUE_TIMES,
    PACE_MAX,
    PACE_PRIOR_SECONDS,
    PACE_SECONDS,
    SIGHT_REQUESTS,
    TWICE_SECONDS,
    UNSEEN_MAX,
    LookAhead,
    computes_twice,
    twice_share,
)

AHEAD_SECONDS = 0.25


class Timers:
    """Calls that are to come, made when the clock is moved past them."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._calls: list[tuple[float, Callable[[], object]]] = []

    def later(self, seconds: float, call: Callable[[], object]) -> Any:
        entry = (self._clock() + seconds, call)
        self._calls.append(entry)

        class Handle:
            @staticmethod
            def cancel() -> None:
                if entry in self_calls:
                    self_calls.remove(entry)

        self_calls = self._calls
        return Handle

    def pass_by(self, seconds: float) -> None:
        self._clock.advance(seconds)
        while due := [entry for entry in self._calls if entry[0] <= self._clock() + EARLY_SECONDS]:
            self._calls.remove(due[0])
            due[0][1]()


class Door:
    """A queue before a server, and what went through in which order."""

    def __init__(self, seconds: float | None = AHEAD_SECONDS) -> None:
        self.clock = ManualClock()
        self.timers = Timers(self.clock)
        self.queue = ServerQueue(seconds, self.clock, self.timers.later)
        self.sent: list[str] = []
        self._prompts = itertools.count(1)

    def enter(
        self,
        name: str,
        seconds: float,
        *,
        tokens: Any = None,
        cached: int = 0,
        is_batch: bool = False,
        is_streamed: bool = True,
    ) -> None:
        """A request arrives; without `tokens` its prompt is like no other."""
        prompt = np.full(8, next(self._prompts), np.int32) if tokens is None else np.asarray(tokens, np.int32)
        self.queue.enter(
            QueuedRequest(
                name, prompt, cached, seconds, self.clock(), is_batch, is_streamed, lambda: self.sent.append(name)
            )
        )
        self.queue.check()

    def leave(self, name: str, *, has_begun: bool = False) -> bool:
        waited = self.queue.leave(name, has_begun=has_begun)
        self.queue.check()
        return waited


def test_one_at_a_time_goes_where_each_takes_long() -> None:
    door = Door()
    for name in "abc":
        door.enter(name, 1.0)
    assert door.sent == ["a"] and len(door.queue) == 2
    door.leave("a")
    assert door.sent == ["a", "b"]


def test_beside_the_longest_goes_what_the_look_ahead_holds() -> None:
    door = Door()
    door.enter("long", 3.0)
    for number in range(4):
        door.enter(f"short {number}", 0.1)
    assert door.sent == ["long", "short 0", "short 1"]


def test_what_is_cached_overtakes_what_is_not_but_only_what_came_little_sooner() -> None:
    door = Door()
    door.enter("first", 1.0)
    door.enter("cold", 1.0)
    door.clock.advance(0.5)
    door.enter("warm", 0.3)
    door.clock.advance(0.5)
    door.enter("late", 0.3)
    door.leave("first")
    door.leave("warm")
    door.leave("cold")
    assert door.sent == ["first", "warm", "cold", "late"]


def test_batch_work_goes_last_but_goes() -> None:
    door = Door()
    door.enter("first", 1.0)
    door.enter("batch", 1.0, is_batch=True)
    door.enter("soon", 1.0)
    door.clock.advance(BATCH_PATIENCE + 1.0)
    door.enter("later", 1.0)
    for name in ("first", "soon", "batch"):
        door.leave(name)
    assert door.sent == ["first", "soon", "batch", "later"]


def test_who_goes_on_from_tokens_that_are_still_to_be_computed_follows() -> None:
    """Together in one batch SGLang computes both: seen live, a document that was booked as cached was computed anew."""
    door = Door()
    document = [7] * 100
    door.enter("first", 0.01)
    door.enter("document", 0.1, tokens=[*document, 1])
    door.enter("question", 0.01, tokens=[*document, 2], cached=100)
    door.enter("other", 0.01)
    assert door.sent == ["first", "document", "other"]
    door.leave("document")
    assert door.sent[-1] == "question"


def test_who_shares_only_what_is_cached_follows_nobody() -> None:
    door = Door()
    door.enter("one", 0.01, tokens=[7] * 50 + [1] * 50, cached=50)
    door.enter("two", 0.01, tokens=[7] * 50 + [2] * 50, cached=50)
    assert door.sent == ["one", "two"]


def test_who_shares_the_head_of_a_template_with_what_is_cold_does_not_wait_for_it() -> None:
    """Live, before vLLM: all prompts begin alike, by less than a block of it, so that nobody has that cached who has
    nothing cached. Every cached prompt waited for each cold one before it, up to 5 s."""
    door = Door()
    door.enter("cold", 1.0, tokens=[7] * 15 + [1] * 1500)
    door.enter("cached", 0.01, tokens=[7] * 15 + [2] * 1500, cached=1488)
    assert door.sent == ["cold", "cached"]


@pytest.mark.parametrize(("tokens", "waits"), [(100, False), (299, False), (301, True), (1000, True)])
def test_who_would_be_computed_twice_waits_where_that_takes_long(tokens: int, waits: bool) -> None:
    assert TWICE_SECONDS == 0.03
    door = Door()
    door.enter("cold", 0.1, tokens=[7] * 1000)
    door.enter("goes on", 0.01, tokens=[7] * tokens + [2] * 100, cached=tokens)
    assert door.sent == (["cold"] if waits else ["cold", "goes on"])


def test_before_an_engine_that_shares_within_a_batch_who_follows_goes_along() -> None:
    assert computes_twice("sglang") and computes_twice("anything") and not computes_twice("vllm")
    door = Door()
    door.queue.computes_twice = False
    door.enter("document", 0.9, tokens=[7] * 1000)
    door.enter("question", 0.01, tokens=[7] * 1000, cached=999)
    assert door.sent == ["document", "question"]


@pytest.mark.parametrize("computes_twice", [True, False])
def test_who_follows_does_not_overtake_who_waits(computes_twice: bool) -> None:
    """Live, before vLLM: a question that counted as cached went before the document that waited, and computed it; the
    document then waited seven seconds."""
    door = Door()
    door.queue.computes_twice = computes_twice
    door.enter("busy", 1.0)
    door.enter("document", 1.0, tokens=[7] * 1000)
    door.enter("question", 0.01, tokens=[7] * 1000, cached=999)
    assert door.sent == ["busy"]
    door.leave("busy", has_begun=True)
    assert door.sent == (["busy", "document"] if computes_twice else ["busy", "document", "question"])
    door.leave("document", has_begun=True)
    assert door.sent == ["busy", "document", "question"]


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.data(),
)
def test_the_share_is_counted_token_by_token(one: list[int], other: list[int], data: st.DataObject) -> None:
    cached, others_cached = data.draw(st.integers(0, len(one))), data.draw(st.integers(0, len(other) - 1))
    both = 0
    while both < min(cached, len(other)) and one[both] == other[both]:
        both += 1
    # What the other one has cached is alike where this one has it cached, too, or it shares nothing that counts.
    expected = max(both - others_cached, 0) / (len(other) - others_cached)
    as_ids = [np.asarray(tokens, np.int32) for tokens in (one, other)]
    assert twice_share(as_ids[0], cached, as_ids[1], others_cached) == expected


def test_a_follower_is_free_when_the_one_before_it_is_given_up() -> None:
    door = Door()
    door.enter("busy", 1.0)
    door.enter("document", 1.0, tokens=[7] * 9)
    door.enter("question", 0.1, tokens=[7] * 9, cached=8)
    assert door.sent == ["busy"]
    assert door.leave("document"), "it waited"
    assert door.sent == ["busy", "question"]


def test_a_request_that_does_not_begin_does_not_hold_the_others_up_for_ever() -> None:
    door = Door()
    door.enter("stuck", 1.0)
    door.enter("next", 1.0)
    door.timers.pass_by(OVERDUE_TIMES * 1.0 - 0.1)
    assert door.sent == ["stuck"]
    door.timers.pass_by(0.2)
    assert door.sent == ["stuck", "next"]
    assert not door.leave("stuck"), "it was sent"


def test_a_short_one_is_given_a_second_to_begin() -> None:
    door = Door(0.0)
    door.enter("stuck", 0.001)
    door.enter("next", 0.001)
    door.timers.pass_by(OVERDUE_SECONDS - 0.1)
    assert door.sent == ["stuck"]
    door.timers.pass_by(0.2)
    assert door.sent == ["stuck", "next"]


def see(door: Door) -> None:
    """As many first tokens come, as soon as expected, as it takes to know how long prefills take."""
    for number in range(SIGHT_REQUESTS):
        door.enter(f"seen {number}", 0.01)
        door.timers.pass_by(0.01)
        door.leave(f"seen {number}", has_begun=True)
    door.sent.clear()


def test_one_whose_first_token_nobody_sees_counts_as_long_as_expected() -> None:
    door = Door()
    see(door)
    door.enter("whole", 1.0, is_streamed=False)
    door.enter("next", 1.0)
    door.timers.pass_by(0.9)
    assert door.sent == ["whole"]
    door.timers.pass_by(0.2)
    assert door.sent == ["whole", "next"]


def test_answers_that_show_no_first_token_are_not_held_back_by_what_nobody_measured() -> None:
    """A preset's costs were ten times those of two fast servers: with whole answers alone nothing ever corrected them,
    and the gateway let through 40 of 200 requests a second."""
    door = Door()
    names = [str(number) for number in range(50)]
    for name in names:
        door.enter(name, 1.0, is_streamed=False)
    assert door.sent == names
    door.enter("streamed", 1.0)
    assert len(door.queue) == 1, "its first token will be seen: that one waits"
    door.enter("whole", 1.0, is_streamed=False)
    assert door.sent == [*names, "whole"], "and does not keep another from going"
    door.timers.pass_by(1.1)
    assert door.sent == [*names, "whole", "streamed"], "each counts by itself: fifty do not last fifty times as long"


def test_when_prefills_have_been_seen_whole_answers_wait_like_others() -> None:
    door = Door()
    see(door)
    for name in "abc":
        door.enter(name, 1.0, is_streamed=False)
    assert door.sent == ["a"] and len(door.queue) == 2
    door.timers.pass_by(1.1)
    assert door.sent == ["a", "b"]


def test_where_no_first_token_comes_any_more_whole_answers_are_all_sent_at_once_again() -> None:
    door = Door()
    see(door)
    names = [str(number) for number in range(UNSEEN_MAX + 9)]
    for name in names:
        door.enter(name, 0.2, is_streamed=False)
    assert door.sent == names[:2], "they wait"
    while len(door.sent) < UNSEEN_MAX:
        assert door.sent == names[: len(door.sent)] and len(door.queue) == len(names) - len(door.sent)
        door.timers.pass_by(0.1)
    assert door.sent == names
    for name in "abc":
        door.enter(name, 9.0, is_streamed=False)
    assert door.sent == [*names, *"abc"]
    door.timers.pass_by(30.0)
    door.enter("streamed", 0.01)
    door.leave("streamed", has_begun=True)
    for name in "def":
        door.enter(name, 9.0, is_streamed=False)
    assert door.sent == [*names, *"abc", "streamed", "d"], "one was seen again"


def test_the_first_token_of_a_later_one_shows_that_whole_answers_before_it_have_begun() -> None:
    door = Door()
    see(door)
    tokens = list(range(100))
    door.enter("whole", 4.0, tokens=tokens, is_streamed=False)
    door.enter("follows", 0.1, tokens=[*tokens, 1], cached=100)
    door.enter("later", 0.1)
    assert door.sent == ["whole", "later"]
    door.timers.pass_by(0.2)
    door.leave("later", has_begun=True)
    assert door.sent == ["whole", "later", "follows"], "what it goes on from is computed"


@pytest.mark.parametrize("real_seconds", [0.01, 0.1])
def test_a_first_token_says_of_the_pace_what_was_computed_before_it(real_seconds: float) -> None:
    """A tenth of the requests streamed: the time of all prefills was laid on that tenth, so that an engine ten times as
    fast as was thought looked as slow as was thought."""
    ahead = LookAhead(0.25)
    now = 0.0
    for number in range(2000):
        is_streamed = number % 10 == 9
        ahead.add(str(number), 0.1, now, is_streamed=is_streamed)
        now += real_seconds * (8.2 if is_streamed else 0.2)
        ahead.expire(now)
        assert not is_streamed or ahead.begin(str(number), now)
    assert ahead.pace == pytest.approx(real_seconds / 0.1, rel=0.1)
    ahead.check()


def test_an_engine_that_is_slower_than_thought_is_sent_less_from_its_first_token_on() -> None:
    """Live, 14 cold prompts were thought to take 0.2 s each and took 1.3: for the eight seconds until the cost model
    knew, all of them were sent at once, and nobody with a cached prompt overtook them."""
    door = Door()
    for name in "abcdef":
        door.enter(name, 0.05)
    assert door.sent == list("abcdef"), "as much as fits, were it so fast"
    door.timers.pass_by(3.0)
    for name in "abcdef":
        door.leave(name, has_begun=True)
    for name in "ghi":
        door.enter(name, 0.05)
    assert door.sent == list("abcdefg")


def test_an_engine_that_is_faster_than_thought_is_sent_more() -> None:
    door = Door()
    for name in "abcd":
        door.enter(name, 1.0)
    assert door.sent == ["a"]
    for name in "ab":
        door.timers.pass_by(0.05)
        door.leave(name, has_begun=True)
    assert door.sent == ["a", "b", "c", "d"]


def test_those_that_wait_are_put_in_order_anew_when_the_pace_is_known() -> None:
    door = Door()
    door.enter("first", 0.3)
    door.enter("beside", 0.2)
    door.enter("cold", 0.3)
    door.timers.pass_by(0.5)
    door.enter("cached", 0.01)
    assert door.sent == ["first", "beside"]
    door.timers.pass_by(0.8)
    door.leave("first", has_begun=True)
    assert door.sent == ["first", "beside", "cached"], "what is cold would take a second"


def test_what_is_over_without_a_token_says_nothing_of_the_pace() -> None:
    ahead = LookAhead(0.25)
    ahead.add("a", 0.1, 0.0)
    ahead.remove("a")
    assert ahead.pace == 1.0 and not ahead.begin("a", 9.0) and ahead.pace == 1.0


def test_one_that_was_overdue_says_how_slow_the_engine_is_and_one_that_hung_says_no_more_than_the_bound() -> None:
    ahead = LookAhead(0.25)
    ahead.add("slow", 0.2, 0.0)
    assert ahead.expire(1.0) == ["slow"] and len(ahead) == 0
    assert not ahead.begin("slow", 1.3), "it does not count"
    assert ahead.pace == pytest.approx((PACE_PRIOR_SECONDS + 1.3) / (PACE_PRIOR_SECONDS + 0.2))
    other = LookAhead(0.25)
    other.add("hung", 0.01, 0.0)
    other.expire(9.0)
    other.begin("hung", 100.0)
    assert other.pace == pytest.approx((PACE_PRIOR_SECONDS + 0.01 * PACE_MAX) / (PACE_PRIOR_SECONDS + 0.01))
    other.check()


def test_answers_that_are_not_streamed_say_nothing_of_the_pace() -> None:
    ahead = LookAhead(0.25)
    ahead.add("quick", 0.5, 0.0, is_streamed=False)
    ahead.begin("quick", 0.4)
    ahead.add("whole", 0.1, 1.0, is_streamed=False)
    assert ahead.expire(2.0) == ["whole"] and not ahead.begin("whole", 9.0), "it had all of its answer by then"
    assert ahead.pace == 1.0
    ahead.add("streamed", 0.1, 10.0)
    ahead.begin("streamed", 10.3)
    assert ahead.pace == pytest.approx((PACE_PRIOR_SECONDS + 0.3) / (PACE_PRIOR_SECONDS + 0.1))
    ahead.check()


def test_the_pace_is_of_the_last_seconds_and_has_bounds() -> None:
    ahead = LookAhead(0.25)
    now = 0.0

    def prefill(seconds: float, expected: float) -> None:
        nonlocal now
        ahead.add("a", expected, now)
        now += seconds
        assert ahead.begin("a", now)
        now += 5.0  # nothing is there: no work

    for _ in range(20):
        prefill(1.0, 0.1)
    assert ahead.pace == pytest.approx(10.0, rel=0.05)
    for _ in range(20):
        prefill(1.0, 1.0)
    assert ahead.pace == pytest.approx(1.0, rel=0.05)
    for _ in range(20):
        prefill(400.0, 1.0)
    assert ahead.pace == pytest.approx(PACE_MAX, rel=0.01)
    for _ in range(99):
        prefill(0.0, 100.0)
    assert ahead.pace == 1.0 / PACE_MAX


def test_without_a_bound_everything_goes_at_once() -> None:
    door = Door(None)
    for name in "abc":
        door.enter(name, 100.0, tokens=[7] * 9, cached=8)
    assert door.sent == ["a", "b", "c"] and not len(door.queue) and not door.leave("a")


def test_several_engines_behind_one_door_have_a_look_ahead_each() -> None:
    ahead = LookAhead(0.25, lanes=2)
    ahead.add("a", 1.0, 0.0)
    assert ahead.has_room(1.0)
    ahead.add("b", 1.0, 0.0)
    assert not ahead.has_room(1.0) and ahead.has_room(0.5)


def test_so_many_are_sent_in_any_case() -> None:
    ahead = LookAhead(0.0, requests=3)
    for name in "abc":
        assert ahead.has_room(9.0)
        ahead.add(name, 9.0, 0.0)
    assert not ahead.has_room(0.0)


class QueueMachine(RuleBasedStateMachine):
    """Against a model that has no sums and no timers: lists that are looked through anew."""

    def __init__(self) -> None:
        super().__init__()
        self.door = Door()
        self.ahead: dict[str, tuple[float, float, bool]] = {}  # seconds, until when it counts, whether it is streamed
        self.overdue: dict[str, float] = {}
        self.waiting: dict[str, tuple[float, int, float, bool, bool]] = {}  # arrival, number, seconds, streamed, batch
        self.expected: list[str] = []
        self.names = itertools.count()
        self.worked = self.thought = PACE_PRIOR_SECONDS
        self.since = 0.0
        self.order_pace = 1.0
        self.begun = self.unseen = 0

    @property
    def is_blind(self) -> bool:
        return self.begun < SIGHT_REQUESTS or self.unseen >= UNSEEN_MAX

    @property
    def pace(self) -> float:
        return min(max(self.worked / self.thought, 1 / PACE_MAX), PACE_MAX)

    def _pump(self) -> None:
        now = self.door.clock()
        late = {name: one for name, one in self.ahead.items() if one[1] <= now + EARLY_SECONDS}
        self.overdue |= {name: seconds for name, (seconds, _, is_streamed) in late.items() if is_streamed}
        self.since = max([self.since, *(until for _, until, is_streamed in late.values() if not is_streamed)])
        self.ahead = {name: one for name, one in self.ahead.items() if name not in late}
        if max(self.pace / self.order_pace, self.order_pace / self.pace) >= PACE_STEP:
            self.order_pace = self.pace
        is_full = False
        for name, (_, _, seconds, is_streamed, _) in sorted(self.waiting.items(), key=self._rank):
            others = [one for one, _, _ in self.ahead.values()]
            is_unseen = self.is_blind and not is_streamed
            if others and self.pace * (sum(others) - max(others) + seconds) > AHEAD_SECONDS:
                is_full = True
            if is_full and not is_unseen:
                continue
            if not others and not self.overdue:
                self.since = now
            total = self.pace * (sum(others) + seconds)
            unseen = self.pace * seconds if self.is_blind else total
            self.unseen += not is_streamed
            until = now + (max(OVERDUE_TIMES * total, OVERDUE_SECONDS) if is_streamed else unseen)
            self.ahead[name] = seconds, until, is_streamed
            del self.waiting[name]
            self.expected.append(name)

    def _rank(self, item: tuple[str, tuple[float, int, float, bool, bool]]) -> tuple[float, int]:
        arrived, number, seconds, _, is_batch = item[1]
        return arrived + self.order_pace * seconds + BATCH_PATIENCE * is_batch, number

    @rule(eighths=st.integers(0, 32), is_batch=st.booleans(), is_streamed=st.booleans())
    def enter(self, eighths: int, is_batch: bool, is_streamed: bool) -> None:
        number, seconds = next(self.names), eighths / 32
        self.waiting[str(number)] = self.door.clock(), number, seconds, is_streamed, is_batch
        self._pump()
        self.door.enter(str(number), seconds, is_batch=is_batch, is_streamed=is_streamed)

    @precondition(lambda self: self.ahead or self.waiting or self.overdue)
    @rule(data=st.data(), has_begun=st.booleans())
    def leave(self, data: st.DataObject, has_begun: bool) -> None:
        name = data.draw(st.sampled_from(sorted({*self.ahead, *self.waiting, *self.overdue})))
        most = PACE_MAX * (sum(one for one, _, _ in self.ahead.values()) + sum(self.overdue.values()))
        waited = self.waiting.pop(name, None) is not None
        late = self.overdue.pop(name, None)
        before = list(itertools.takewhile(lambda other: other != name, self.ahead))
        seconds, _, is_measured = self.ahead.pop(name, (0.0, 0.0, False)) if late is None else (late, 0.0, True)
        if is_measured and has_begun:
            self.begun, self.unseen = self.begun + 1, 0
            for other in before if late is None else ():
                if not self.ahead[other][2] and self.ahead[other][1] > self.door.clock() + EARLY_SECONDS:
                    seconds += self.ahead[other][0]
                    self.ahead[other] = self.ahead[other][0], self.door.clock(), False
            self.worked += min(self.door.clock() - self.since, most)
            self.thought += seconds
            self.since = self.door.clock()
            if self.worked > PACE_SECONDS:
                self.worked, self.thought = self.worked / 2, self.thought / 2
        self._pump()
        assert self.door.leave(name, has_begun=has_begun) is waited

    @rule(eighths=st.integers(1, 40))
    def pass_by(self, eighths: int) -> None:
        for _ in range(eighths):
            self.door.timers.pass_by(0.125)
            self._pump()

    @invariant()
    def they_agree(self) -> None:
        self.door.queue.check()
        assert self.door.sent == self.expected
        assert len(self.door.queue) == len(self.waiting)


TestQueueMachine = pytest.mark.filterwarnings("ignore")(QueueMachine.TestCase)
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
