"""When a server counts as hung: silence, streams that stand still beside answers, and what is no hang. No clock: time
is passed by hand."""

from __future__ import annotations

import pytest

from preble.transport.engine_servers.kv_event_codec import LoadReport
from preble.transport.engine_servers.watch import IDLE, RECENT_SECONDS, SIGNS_MIN, SILENT, STALLED, EngineWatch

HUNG, SILENT_MAX, IDLE_MAX = 1.25, 3.0, 120.0
TURN = 0.125


class Story:
    """A server that is asked twice a second, as its link sees it."""

    def __init__(self) -> None:
        self.watch = EngineWatch(HUNG, SILENT_MAX, IDLE_MAX)
        self.done = 0
        self.seconds = 0.0

    def report(self, running: int = 1, **fields: int) -> None:
        fields = {"used_tokens": 0, "done_tokens": self.done, **fields}
        self.watch.answered()
        self.watch.reported(LoadReport(running, 0, capacity_tokens=1000, rank=0, **fields))

    def works(self, seconds: float, *, step_seconds: float = TURN) -> None:
        """Tokens come, one stream's, and answers do."""
        for turn in range(1, round(seconds / TURN) + 1):
            self.turn()
            if turn * TURN % step_seconds == 0.0:
                self.done += 1
                self.watch.output()
            if turn % 4 == 0:
                self.report()

    def turn(self, requests: int = 1) -> str:
        self.watch.pass_by(TURN, requests)
        self.seconds += TURN
        return self.watch.verdict()

    def seconds_until(self, verdict: str, *, answers: bool, most: float = 200.0) -> float:
        """How long it takes until it counts as that, when nothing but answers comes, or nothing."""
        began = self.seconds
        while self.turn() != verdict:
            assert self.seconds - began < most, f"never {verdict!r}"
            if answers and self.seconds % 0.5 == 0.0:
                self.report()
        return self.seconds - began


def busy(step_seconds: float = TURN) -> Story:
    """A server that has worked for some minutes, with a stream under way."""
    story = Story()
    story.watch.began()
    story.works(240.0, step_seconds=step_seconds)
    assert story.watch.verdict() == ""
    return story


def test_a_server_that_says_nothing_is_silent_within_two_seconds() -> None:
    assert busy().seconds_until(SILENT, answers=False) <= 2.0
    assert Story().seconds_until(SILENT, answers=False) <= 2.0


def test_streams_that_stand_still_beside_answers_are_seen_within_two_seconds() -> None:
    story = busy()
    assert story.seconds_until(STALLED, answers=True) <= 2.0
    story.watch.left()
    story.works(0.0)
    for _ in range(100):
        story.report()
        assert story.turn(0) == STALLED, "answers alone do not clear it, nor that its streams went elsewhere"
    story.watch.output()
    assert story.turn(0) == ""


def test_another_report_clears_it_too() -> None:
    story = busy()
    story.seconds_until(STALLED, answers=True)
    story.done += 1
    story.report()
    assert story.watch.verdict() == ""


def test_an_engine_whose_steps_are_long_is_given_that_time() -> None:
    story = busy(step_seconds=2.0)
    assert story.seconds_until(STALLED, answers=True) > 3.5


def test_a_long_pause_is_usual_for_a_minute_and_no_longer() -> None:
    story = busy()
    for _ in range(8):
        story.turn()  # a second and then it goes on
    story.works(RECENT_SECONDS / 2)
    assert story.seconds_until(STALLED, answers=True) >= 2 * 1.0
    story.watch.output()
    story.works(3 * RECENT_SECONDS)
    assert story.seconds_until(STALLED, answers=True) <= 2.0


def test_silence_that_was_usual_counts_up_to_a_bound() -> None:
    story = busy()
    for _ in range(8):
        story.turn()
    story.watch.answered()
    assert 2.0 <= story.seconds_until(SILENT, answers=False) <= SILENT_MAX
    story.watch.answered()
    assert story.seconds_until(SILENT, answers=False) == SILENT_MAX


@pytest.mark.parametrize("why", ["nothing runs", "no streams", "nothing is counted", "it has just started"])
def test_what_may_be_no_hang_is_none(why: str) -> None:
    story = Story()
    if why != "no streams":
        story.watch.began()
    for _ in range(SIGNS_MIN // 2 if why == "it has just started" else 2 * SIGNS_MIN):
        story.watch.output()
    if why == "nothing is counted":
        story.done = 0
    else:
        story.done = 77
    story.report(running=0 if why == "nothing runs" else 1)
    for _ in range(80):
        story.report(running=0 if why == "nothing runs" else 1)
        assert story.turn() == ""


def test_requests_that_get_nothing_for_long_make_a_server_idle_until_it_works() -> None:
    story = Story()
    assert story.seconds_until(IDLE, answers=True) == IDLE_MAX
    assert story.turn(0) == IDLE
    story.watch.output()
    assert story.turn(0) == ""


def test_streams_are_counted_and_time_without_them_is_no_stall() -> None:
    story = busy()
    story.watch.left()
    for _ in range(80):
        story.report()
        assert story.turn(0) == ""
    story.watch.began()
    assert story.seconds_until(STALLED, answers=True) <= 2.0
