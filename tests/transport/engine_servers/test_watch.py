"""When a server counts as hung: silence, streams that stand still beside answers, and what is no hang. No clock: time
is passed by hand."""

from __future__ import annotations

from random import Random

import pytest

from preble.transport.engine_servers.kv_event_codec import LoadReport
from preble.transport.engine_servers.watch import (
    DOUBT_TIMES,
    IDLE,
    ON_TIME_MIN,
    OVERDUE_TIMES,
    RECENT_SECONDS,
    SIGNS_MIN,
    SILENT,
    STALLED,
    UNSTARTED,
    UNSURE_SECONDS,
    EngineWatch,
)

HUNG, SILENT_MAX, IDLE_MAX = 1.25, 3.0, 120.0
TURN, BEAT = 0.125, 0.5


@pytest.fixture(params=[BEAT, 5.0], autouse=True)
def load_seconds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every verdict is as soon where reports are asked for only now and then, and when they decide."""
    monkeypatch.setattr(Story, "load_seconds", request.param)


class Story:
    """A server that is asked twice a second, as its link sees it; for its load if that decides, or is so old."""

    load_seconds = BEAT

    def __init__(self) -> None:
        self.watch = EngineWatch(HUNG, SILENT_MAX, IDLE_MAX)
        self.done = 0
        self.seconds = 0.0
        self.reported_at = -BEAT
        self.reports = 0

    def ask(self) -> None:
        """At every heartbeat."""
        if self.seconds % BEAT:
            return
        if self.seconds - self.reported_at >= self.load_seconds or self.watch.wants_report(BEAT):
            self.report()
        else:
            self.watch.answered()

    def report(self, running: int = 1, **fields: int) -> None:
        fields = {"used_tokens": 0, "done_tokens": self.done, **fields}
        self.reported_at, self.reports = self.seconds, self.reports + 1
        self.watch.answered()
        self.watch.reported(LoadReport(running, 0, capacity_tokens=1000, rank=0, **fields))

    def works(self, seconds: float, *, step_seconds: float = TURN) -> None:
        """Tokens come, one stream's, and answers do."""
        for turn in range(1, round(seconds / TURN) + 1):
            self.turn()
            if turn * TURN % step_seconds == 0.0:
                self.done += 1
                self.watch.output()
            self.ask()

    def proves(self, seconds: float) -> None:
        """Prefills that are expected to take so long are on time."""
        for number in range(ON_TIME_MIN):
            self.watch.waits(("proof", number), seconds)
            self.watch.output()
            self.watch.had_first_token(("proof", number))

    def turn(self, requests: int = 1) -> str:
        self.watch.pass_by(TURN, requests)
        self.seconds += TURN
        return self.watch.verdict()

    def answered_turn(self) -> str:
        """The same with an answer in it that says nothing new."""
        self.watch.answered()
        return self.turn()

    def seconds_until(self, verdict: str, *, answers: bool, most: float = 200.0) -> float:
        """How long it takes until it counts as that, when nothing but answers comes, or nothing."""
        began = self.seconds
        while self.turn() != verdict:
            assert self.seconds - began < most, f"never {verdict!r}"
            if answers:
                self.ask()
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


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize(("prefills", "seconds"), [([0.2] * 12, 2.4), ([8.0], 8.0), ([9.0] * 100, 30.0)])
def test_a_step_that_may_compute_all_that_wait_is_given_that_time(
    answers: bool, prefills: list[float], seconds: float
) -> None:
    """Live: ten prompts of 0.2 s were one step of 3.5 s, in which the server answered nothing, and all were moved."""
    story = busy()
    story.proves(max(prefills))
    for name, expected in enumerate(prefills):
        story.watch.waits(name, expected)
    found = story.seconds_until(STALLED if answers else SILENT, answers=answers)
    assert found == pytest.approx(HUNG + seconds, abs=2 * TURN)
    for name in range(len(prefills)):
        story.watch.waits_no_more(name)
    story.watch.output()
    assert story.turn() == ""


@pytest.mark.parametrize("answers", [True, False])
def test_the_first_long_step_of_an_engine_that_is_slower_than_expected_is_no_hang(answers: bool) -> None:
    """Live: in the fifth second a step of four prompts, expected to take 0.2 s each, took 4 s, while two streams had
    begun. The server counted as standing still, and six requests waited for 10 to 16 s more at the other."""
    story = Story()
    story.watch.began()
    story.works(2.0)
    for _ in range(100):
        story.watch.moved()
    for name in range(4):
        story.watch.waits(name, 0.2)
    for _ in range(round(6.0 / TURN)):
        assert story.turn() == ""
        if answers and story.seconds % 0.5 == 0.0:
            story.report()
    assert story.seconds_until(STALLED if answers else SILENT, answers=answers) < 5.0, "but not for ever"


@pytest.mark.parametrize("answers", [True, False])
def test_behind_a_queue_as_long_as_was_worked_off_of_late_a_hang_is_seen_as_soon(answers: bool) -> None:
    """Forty prompts of 0.2 s wait at any time. Only what is more than that may make the next step longer, or a prompt
    that is long by itself."""
    story = busy()
    for name in range(40):
        story.watch.waits(name, 0.2)
    for name in range(200):
        for _ in range(2):
            story.turn()
            story.report()
            story.watch.output()
        story.watch.waits(name + 40, 0.2)
        story.watch.had_first_token(name)
        assert story.watch.verdict() == ""
    verdict = STALLED if answers else SILENT
    assert story.seconds_until(verdict, answers=answers) <= 2.0
    story.watch.output()
    story.watch.waits("long", 5.0)
    assert story.seconds_until(verdict, answers=answers) >= 5.0


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


# --- when it is asked for its load ------------------------------------------------------------------------------------


def test_a_server_whose_steps_are_usual_is_not_asked_for_its_load() -> None:
    story = busy(step_seconds=2.0)
    story.proves(2.0)
    for number in range(31):
        story.watch.waits(number, 2.0)
        if number == 1:
            before, began = story.reports, story.seconds
        for turn in range(1, round(2.0 / TURN) + 1):
            story.turn()
            assert number == 0 or turn * TURN >= 1.5 or not story.watch.wants_report(BEAT)
            if turn * TURN < 1.5:
                story.ask()
        story.watch.output()
        story.watch.had_first_token(number)
    assert story.seconds - began == 60.0 and story.watch.verdict() == ""
    assert story.reports - before == (60 if Story.load_seconds == BEAT else 10)


def test_a_report_that_output_explains_is_no_sign_of_work() -> None:
    """The first report after output differs from that before it, however long the engine has stood since."""
    story = busy()
    story.done += 1
    story.watch.output()
    for _ in range(round(1.0 / TURN)):
        story.answered_turn()
    story.report()  # of what came a second ago
    assert story.seconds_until(STALLED, answers=True) < HUNG, "it counts from the output"
    story.done += 1
    story.report()
    assert story.watch.verdict() == "", "nothing but work of now explains this one"


def test_reports_are_wanted_until_one_clears_what_is_held_against_a_server() -> None:
    story = busy()
    assert not story.watch.wants_report(0.1)
    story.seconds_until(STALLED, answers=True)
    story.watch.left()
    assert story.watch.wants_report(0.1)
    story.watch.output()
    assert not story.watch.wants_report(0.1)


# --- requests that wait for their first token -------------------------------------------------------------------------


def worked(report: bool = True, *, proven: float | None = 5.0) -> Story:
    """A server that has worked before, and has nothing to do now. `proven`: so long prefills were on time."""
    story = busy()
    story.watch.left()
    story.works(3 * RECENT_SECONDS)
    if proven is not None:
        story.proves(proven)
    if not report:
        story.watch._report, story.watch._same_reports = None, 0
    return story


def until_doubted(story: Story, most: float = 200.0) -> float:
    """How long it takes until a token is asked for, while nothing but answers comes."""
    began = story.seconds
    while not story.watch.is_doubted:
        assert story.seconds - began < most, "no token is ever asked for"
        assert story.turn() == ""
        story.ask()
    return story.seconds - began


@pytest.mark.parametrize("phase", range(4))
def test_a_server_that_begins_nothing_is_seen_within_two_seconds(phase: int) -> None:
    """That it has taken the request is the last that it reports, up to half a second after it hangs; then a token is
    asked for, and does not come either."""
    story = worked()
    for _ in range(phase):
        story.answered_turn()
    began = story.seconds
    story.watch.waits("a", 0.1)
    story.done += 1
    until_doubted(story)
    story.watch.asked(True)
    story.seconds_until(UNSTARTED, answers=True)
    assert story.seconds - began <= 2.0
    story.watch.waits_no_more("a")
    for _ in range(40):
        story.report()
        assert story.turn(0) == UNSTARTED, "that its requests went elsewhere is no sign of life"
    story.watch.output()
    assert story.turn(0) == "" and not story.watch.is_doubted


def test_prefills_that_take_long_are_given_several_times_what_they_are_expected_to() -> None:
    story = worked()
    story.watch.waits("a", 6.0)
    story.watch.waits("b", 4.0)
    until_doubted(story)
    story.watch.asked(True)
    assert story.seconds_until(UNSTARTED, answers=True) == pytest.approx(OVERDUE_TIMES * 10.0, abs=TURN)


@pytest.mark.parametrize("sign", ["another report", "an event", "output of another", "a first token", "a token"])
def test_any_sign_of_work_is_waited_from(sign: str) -> None:
    story = worked()
    story.watch.waits("a", 0.1)
    until_doubted(story)
    story.watch.asked(True)
    story.turn()
    if sign == "another report":
        story.report(used_tokens=7)
    elif sign == "an event":
        story.watch.moved()
    elif sign == "a first token":
        story.watch.waits_no_more("a")
        story.watch.output()
    else:
        story.watch.output()
    for _ in range(round(HUNG / 2 / TURN) - 1):
        assert story.answered_turn() == "" and not story.watch.is_doubted


@pytest.mark.parametrize(
    ("expected", "proven", "chunk_seconds"),
    [
        *((1.0, None, seconds) for seconds in (1.0, 5.0, 30.0)),  # nothing is known of it yet
        *((1.0, 0.4, seconds) for seconds in (1.0, 5.0, 30.0)),  # only of prompts that are much shorter
        *((1.0, 1.0, seconds) for seconds in (0.5, 1.0, 3.0)),  # its reports show the work
        (8.0, 4.0, 30.0),  # nothing shows it, and it takes four times as long as was expected
    ],
)
def test_a_prefill_of_half_a_minute_at_a_slow_engine_is_no_hang(
    expected: float, proven: float | None, chunk_seconds: float
) -> None:
    """A token that is asked for waits behind it. What its engine reports changes with each chunk."""
    story = worked(proven=proven)
    story.watch.waits("a", expected)
    asked = False
    for turn in range(1, round(30.0 / TURN)):
        if story.watch.is_doubted and not asked:
            story.watch.asked(True)
        elif asked and not story.watch.is_doubted:
            story.watch.asked(False)
        asked = story.watch.is_doubted
        if turn * TURN % chunk_seconds == 0.0:
            story.done += 1
        story.ask()
        assert story.turn() == "", f"after {turn * TURN} s"
    story.watch.output()
    story.watch.had_first_token("a")
    assert story.turn() == ""


def test_an_engine_that_was_late_is_given_time_until_it_is_on_time_again() -> None:
    story = worked()
    story.watch.waits("a", 0.1)
    for _ in range(round(2.0 / TURN)):
        story.answered_turn()
    story.watch.output()
    story.watch.had_first_token("a")
    story.works(3 * RECENT_SECONDS)
    story.watch.waits("b", 0.1)
    assert until_doubted(story) == pytest.approx(DOUBT_TIMES * HUNG, abs=TURN)
    story.watch.asked(True)
    assert story.seconds_until(UNSTARTED, answers=True) == pytest.approx(UNSURE_SECONDS, abs=TURN)
    story.watch.output()
    story.watch.had_first_token("b")
    story.works(3 * RECENT_SECONDS)
    story.proves(0.1)
    story.watch.waits("c", 0.1)
    assert until_doubted(story) <= 1.0


def test_an_answer_that_does_not_stream_counts_as_on_time_where_reports_showed_work_all_the_while() -> None:
    story = worked(proven=None)
    for name in range(ON_TIME_MIN):
        story.watch.waits(name, 0.1)
        story.works(10.0, step_seconds=0.5)
        story.watch.had_first_token(name)
    story.watch.waits("a", 0.1)
    assert until_doubted(story) <= 1.0


def test_a_question_for_a_token_that_is_refused_says_nothing() -> None:
    story = worked()
    story.watch.waits("a", 0.1)
    until_doubted(story)
    for turn in range(200):
        story.watch.asked(turn % 4 != 3)
        story.report()
        assert story.turn() == ""


def test_a_quiet_time_that_was_usual_of_late_is_waited_for() -> None:
    story = worked()
    story.watch.waits("a", 0.1)
    for _ in range(round(4.0 / TURN)):
        story.answered_turn()
    story.watch.output()
    assert until_doubted(story) == pytest.approx(2 * 4.0, abs=TURN)
    story.watch.waits_no_more("a")
    story.proves(0.1)
    story.watch.waits("b", 0.1)
    asked_after = until_doubted(story)
    story.watch.asked(True)
    assert asked_after == pytest.approx(8.0, abs=TURN), "as long as it was usual"
    assert asked_after + story.seconds_until(UNSTARTED, answers=True) == pytest.approx(2 * 8.0, abs=TURN)


def test_a_server_that_reports_nothing_is_idle_only_after_long() -> None:
    story = worked(report=False)
    story.watch.waits("a", 0.1)
    for _ in range(round(60.0 / TURN)):
        assert story.answered_turn() == "" and not story.watch.is_doubted
    while not (verdict := story.answered_turn()):
        pass
    assert verdict == IDLE


class Engine:
    """First come, first served; prompts are computed one after the other, a token a turn comes of what has begun.
    `slowness`: how many times as long as was expected a prefill takes. `shows`: its chunks are in the reports.
    `prepares`: the share of requests that wait for something else first, which holds up nobody behind them."""

    PACE, LOAD = 4000.0, 0.5  # prompt tokens a second, as expected; the share of time in which it computes prompts
    LENGTHS = (8, 500, 4000, 100_000)

    def __init__(self, seed: int, slowness: float, shows: bool, prepares: float) -> None:
        self.rng = Random(seed)
        self.story = worked()
        self.slowness, self.shows, self.prepares = slowness, shows, prepares
        self.arrivals = self.LOAD * TURN * self.PACE * len(self.LENGTHS) / sum(self.LENGTHS) / slowness
        self.queue: list[dict[str, float]] = []
        self.running: list[dict[str, float]] = []
        self.names = 0
        self.hangs = False
        self.probe: dict[str, float] | None = None
        self.asked_at = self.expected = 0.0  # of the last probe, what waited before it

    def arrive(self, tokens: float) -> dict[str, float]:
        """A prompt; the one of one token is that of a question whether it works."""
        self.names += 1
        seconds, waits = tokens / self.PACE, tokens > 1 and self.rng.random() < self.prepares
        one = {"name": self.names, "expected": seconds, "prefill": seconds * self.slowness}
        one |= {"prepares": self.rng.uniform(0.0, 30.0) * waits, "output": self.rng.randrange(1, 60)}
        self.queue.append(one)
        if tokens > 1:
            self.story.watch.waits(self.names, seconds)
        return one

    def turn(self) -> str:
        """An eighth of a second of everybody's."""
        story = self.story
        if self.rng.random() < self.arrivals:
            self.arrive(self.rng.choice(self.LENGTHS))
        if not self.hangs:
            self._compute(TURN)
        verdict = story.turn(len(self.queue) + len(self.running))
        story.ask()
        if story.watch.is_doubted and self.probe is None:
            story.watch.asked(True)
            self.asked_at, self.expected = story.seconds, sum(one["expected"] for one in self.queue)
            self.probe = self.arrive(1)
        elif not story.watch.is_doubted and self.probe is not None:
            self.queue.remove(self.probe)
            self.probe = None
            story.watch.asked(False)
        return verdict

    def _compute(self, seconds: float) -> None:
        for one in self.queue:
            one["prepares"] -= seconds
        while seconds > 0.0 and (one := next((one for one in self.queue if one["prepares"] <= 0.0), None)):
            used = min(seconds, one["prefill"])
            one["prefill"] -= used
            seconds -= used
            self.story.done += self.shows
            if one["prefill"] <= 0.0:
                self.queue.remove(one)
                self._begin(one)
        for one in list(self.running):
            self.story.watch.output()
            self.story.done += 1
            one["output"] -= 1
            if one["output"] <= 0:
                self.running.remove(one)
                self.story.watch.left()

    def _begin(self, one: dict[str, float]) -> None:
        watch = self.story.watch
        if one is self.probe:
            watch.made_token()
            self.probe = None
            return
        watch.output()
        watch.had_first_token(int(one["name"]))
        watch.began()
        self.running.append(one)


@pytest.mark.parametrize(
    ("slowness", "shows", "prepares"),
    [(1.0, True, 0.0), (0.3, False, 0.0), (3.5, False, 0.0), (4.7, True, 0.0), (1.0, True, 0.3), (2.0, False, 0.3)],
)
def test_a_schedule_of_long_and_short_prompts_is_no_hang_and_a_hang_in_it_is_seen(
    slowness: float, shows: bool, prepares: float
) -> None:
    """Twenty minutes of each: prefills that take up to 3.5 times what was expected where nothing of them shows, or more
    than 4 times where their chunks do; requests that wait for up to half a minute for something else. Then it hangs."""
    engine = Engine(round(10 * slowness) + shows, slowness, shows, prepares)
    for _ in range(round(1200 / TURN)):
        assert engine.turn() == "", f"after {engine.story.seconds} s, {len(engine.queue)} wait"
    engine.arrive(500)
    engine.hangs, began = True, engine.story.seconds
    rare = Story.load_seconds > BEAT  # work may have stopped up to half of a limit before the report that showed it
    quiet = max(DOUBT_TIMES * HUNG, 2 * engine.story.watch._quiets.longest) * (1.5 if rare else 1.0) + TURN
    while not (verdict := engine.turn()):
        asked = engine.asked_at if engine.probe else engine.story.seconds
        assert asked - began <= quiet
        assert engine.story.seconds - asked <= max(OVERDUE_TIMES * engine.expected, UNSURE_SECONDS)
    assert verdict in (UNSTARTED, STALLED, IDLE)


def test_requests_that_come_to_a_server_that_hangs_do_not_hide_that() -> None:
    """As much work comes as there is time: what came before a token was asked for counts, and no more."""
    story = worked()
    for number in range(round(28.0 / TURN)):
        story.watch.waits(number, TURN)
        if story.watch.is_doubted and story.watch._probe_seconds is None:
            story.watch.asked(True)
        story.turn()
        story.ask()
    assert story.watch.verdict() == UNSTARTED
