"""Whether one rank of a server is hung, by what came from it and what has passed since. Owns the limits and the
verdict; asks nothing, sends nothing, reads no clock.

    silent     no answer to any question, and no output, for `hung_seconds`: process, machine or network
    stalled    answers come, but streams that had begun got no token, and what the engine reports of its work stands
               still, for `hung_seconds`: the engine behind a living front
    unstarted  answers come, but nothing shows work while requests wait for their first token: no output of any, no
               cache event, the same reports, for `hung_seconds`. After half of that it is asked for a token, and makes
               none in the other half, nor in `OVERDUE_TIMES` what the prefills of all that wait are expected to take
    idle       requests are there and nothing came of any for `stalled_seconds`, whatever is reported: for servers that
               report nothing of their work

A step of the engine may take longer than `hung_seconds` and delays answers, too. So what was usual of late counts: the
longest pause within a minute or so, times `USUAL_TIMES`, and on top of it what the prefills of those that wait are
expected to take, since the next step may compute them all; but for as much as has waited of late and was worked off,
whose steps are among the pauses. None is called stalled before it has shown `SIGNS_MIN` signs
of work, for an engine that has just started compiles as it goes. An engine that reports that it runs
nothing is not stalled: its output waits at a client that does not read.

Why a token is asked for: a long prefill shows in the reports (blocks are taken chunk by chunk), but what is done before
it does not, such as a grammar that is compiled or a video that is fetched; and other requests are not held up by that.

What is expected is worth little before it has proved right. It has where `ON_TIME_MIN` first tokens came on time, one
of them of a prefill at least half as long as any that waits, and none was late since. Where it has not, no
engine is doubted before `DOUBT_TIMES` `hung_seconds`, no silence before `silent_seconds_max`; a step is given
`OVERDUE_TIMES` what is expected of it, and a token that is asked for `UNSURE_SECONDS` or longer.

Reports cost the server time: but for some now and then they are wanted where they decide (`wants_report`). The first
one in a pause says from where on it stands still; the next that differs counts as work of now, so where that stopped
in between, a verdict is later by up to the time between the two, half of a limit at the most.

A server that stalled, began nothing or was idle is trusted again when it shows work: output, events, another report.
Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import islice
from typing import NamedTuple

from .kv_event_codec import LoadReport

USUAL_TIMES = 2.0
DOUBT_TIMES = 4.0
OVERDUE_TIMES = 4.0
ON_TIME_MIN = 4
UNSURE_SECONDS = 30.0
BATCH_MAX = 64  # requests whose prefills are added up: when more have been computed, the first have begun
STEP_SECONDS_MAX = 30.0  # a step is given at the most for them
SIGNS_MIN = 64
RECENT_SECONDS = 30.0  # pauses count for one to two such spans
REPORTS_MIN = 2  # of the same content within a stall

SILENT, STALLED, IDLE = "silent for too long", "its engine stands still", "no output for too long"
UNSTARTED = "it begins no request"


class _UnbegunRequest(NamedTuple):
    """A request without a first token: what its prefill is expected to take, since when it waits, and what the prefills
    of all were then expected to take together, its own included. In seconds."""

    seconds: float
    since: float
    queue_seconds: float


class RecentPauses:
    """The longest pause of late; or the most of anything else."""

    def __init__(self) -> None:
        self._now = self._before = 0.0
        self._age_seconds = 0.0

    def note(self, seconds: float) -> None:
        """A pause has ended."""
        self._now = max(self._now, seconds)

    def pass_by(self, seconds: float) -> None:
        """Time passes."""
        self._age_seconds += seconds
        if self._age_seconds >= RECENT_SECONDS:
            self._now, self._before, self._age_seconds = 0.0, self._now, 0.0

    @property
    def longest(self) -> float:
        """In seconds."""
        return max(self._now, self._before)


class EngineWatch:
    """See the module. Seconds are arguments of `pass_by`; `silent_seconds_max` bounds what silence may be usual."""

    def __init__(self, hung_seconds: float, silent_seconds_max: float, stalled_seconds: float) -> None:
        self.silent_seconds = 0.0
        self.streams = 0  # that have begun and not ended
        self._hung_seconds = hung_seconds
        self._half_seconds = hung_seconds / 2
        self._doubt_seconds = DOUBT_TIMES * hung_seconds
        self._silent_seconds_max = silent_seconds_max
        self._stalled_seconds = stalled_seconds
        self._still_seconds = 0.0  # with streams there, and no sign of work
        self._idle_seconds = 0.0  # with requests there, and no output
        self._quiet_seconds = 0.0  # with requests there that wait for their first token, and no sign of work
        self._probe_seconds: float | None = None  # since a token was asked for; None: none is
        self._probe_limit = 0.0
        self._waiting: dict[Hashable, _UnbegunRequest] = {}  # the oldest first
        self._waiting_seconds = 0.0  # that their prefills are expected to take
        self._now_seconds = 0.0  # that have passed
        self._paused_until_seconds = -1.0  # when the last quiet time ended that was long
        self._on_time = 0  # first tokens since one was late
        self._proven_seconds = 0.0  # the longest prefill of those
        self._silences, self._pauses, self._quiets = RecentPauses(), RecentPauses(), RecentPauses()
        self._queues = RecentPauses()  # of work, behind which a first token has come
        self._signs = 0
        self._is_current = False  # output has come since time passed, and since the last report
        self._report: LoadReport | None = None
        self._same_reports = 0
        self._worked = False  # since the last report
        self._held_against = ""  # until it shows work

    # --- what comes ---------------------------------------------------------------------------------------------------

    def answered(self) -> None:
        """The server has said something, whatever it was."""
        if self.silent_seconds:
            self._silences.note(self.silent_seconds)
            self.silent_seconds = 0.0

    def output(self) -> None:
        """Tokens of any request have come. Asked for each part of each answer: where no time has passed since the last
        one there is nothing to do but count."""
        if self._is_current:
            self._signs += 1
            return
        if self.silent_seconds:
            self.answered()
        self._idle_seconds = 0.0
        self._works()
        self._is_current = True

    def reported(self, report: LoadReport) -> None:
        """What the engine says of its work. A change is a sign of work, unless work was seen since the last report,
        which explains it."""
        if report == self._report:
            self._same_reports += 1
        else:
            is_news = self._report is not None and not self._worked
            self._report, self._same_reports = report, 0
            if is_news:
                self._works()
        self._worked = self._is_current = False

    def moved(self) -> None:
        """Its cache has changed."""
        self._works()

    def waits(self, name: Hashable, expected_seconds: float) -> None:
        """A request waits there for its first token, whose prefill is expected to take so long. No name is used
        twice."""
        self._waiting_seconds += expected_seconds
        self._waiting[name] = _UnbegunRequest(expected_seconds, self._now_seconds, self._waiting_seconds)

    def waits_no_more(self, name: Hashable) -> _UnbegunRequest | None:
        """It is over. Returns what was known of it; None, and nothing happens, where it does not wait."""
        found = self._waiting.pop(name, None)
        if found is not None:
            self._waiting_seconds = self._waiting_seconds - found.seconds if self._waiting else 0.0
        return found

    def had_first_token(self, name: Hashable) -> None:
        """It has its first token, or its whole answer. Again, and of one that does not wait, it does nothing."""
        found = self.waits_no_more(name)
        if found is None:
            return
        self._queues.note(found.queue_seconds)
        was_shown = self._paused_until_seconds < found.since  # all the while something showed work
        if was_shown or self._now_seconds - found.since <= self._overdue_seconds(found.seconds):
            self._on_time += 1
            self._proven_seconds = max(self._proven_seconds, found.seconds)

    def asked(self, is_asked: bool) -> None:
        """A token is asked for from now on; or that was refused, which says nothing of the engine."""
        self._probe_seconds = 0.0 if is_asked else None
        if is_asked:
            expected = self._expected()
            least = self._half_seconds if self._is_proven(expected) else UNSURE_SECONDS
            self._probe_limit = max(least, OVERDUE_TIMES * sum(expected))

    def made_token(self) -> None:
        """That token has come: the engine works, and whatever waits there waits for something else."""
        self._probe_seconds, self._quiet_seconds = None, 0.0
        self.output()

    def began(self) -> None:
        """A stream's first token has come."""
        self.streams += 1

    def left(self) -> None:
        """Such a stream is over, in whatever way."""
        self.streams -= 1

    def _works(self) -> None:
        self._signs += 1
        self._same_reports = 0
        self._worked = True
        self._held_against = ""
        if self._still_seconds:
            self._pauses.note(self._still_seconds)
            self._still_seconds = 0.0
        if self._quiet_seconds:
            if self._quiet_seconds > self._half_seconds:
                self._note_long_quiet()
            self._quiets.note(self._quiet_seconds)
            self._quiet_seconds = 0.0

    def _note_long_quiet(self) -> None:
        """What waits has been worked on, but nothing showed that for long; longer than was to be expected?"""
        self._paused_until_seconds = self._now_seconds
        if self._quiet_seconds > self._overdue_seconds(sum(self._expected())):
            self._on_time, self._proven_seconds = 0, 0.0

    # --- what is made of it -------------------------------------------------------------------------------------------

    def pass_by(self, seconds: float, requests: int) -> None:
        """Time passes with so many requests there."""
        self._now_seconds += seconds
        self._is_current = False
        self._silences.pass_by(seconds)
        self._pauses.pass_by(seconds)
        self._quiets.pass_by(seconds)
        self._queues.pass_by(seconds)
        self.silent_seconds += seconds
        self._quiet_seconds = self._quiet_seconds + seconds if self._waiting else 0.0
        if self._probe_seconds is not None:
            self._probe_seconds += seconds
        self._still_seconds = self._still_seconds + seconds if self.streams else 0.0
        self._idle_seconds = self._idle_seconds + seconds if requests else 0.0

    def verdict(self) -> str:
        """Why the server is to be left alone; "" where it is not."""
        limit = max(self._hung_seconds, USUAL_TIMES * self._silences.longest)
        if self._is_longer(self.silent_seconds, min(limit, self._silent_seconds_max), self._silent_seconds_max):
            return SILENT
        if not self._held_against:
            idle = IDLE if self._idle_seconds >= self._stalled_seconds else ""
            self._held_against = STALLED if self._stands_still() else UNSTARTED if self._begins_nothing() else idle
        return self._held_against

    @property
    def is_doubted(self) -> bool:
        """Whether nothing shows that it works on the requests that wait: a token is to be asked for."""
        return self._same_reports > 0 and self._is_doubtful(self._quiet_seconds)

    def wants_report(self, beat_seconds: float) -> bool:
        """Whether what it reports of its work decides soon, where it is asked once in so many seconds: a doubt within
        the next, or a verdict before `REPORTS_MIN` more and one in reserve; or it is held against it, or nearly, and
        another report may clear it. For a verdict one is wanted after half of the time, too: from then on it counts."""
        if self._held_against or self._probe_seconds is not None:
            return True
        if self._quiet_seconds and self._is_doubtful(self._quiet_seconds + beat_seconds):
            return True
        still = self._still_seconds
        ahead = max((REPORTS_MIN + 1) * beat_seconds, still if self._worked else 0.0)
        return still > 0.0 and self._is_still(still + ahead)

    def _is_doubtful(self, quiet: float) -> bool:
        """Whether it is, by a quiet time of so many seconds."""
        if quiet < self._half_seconds or self._signs < SIGNS_MIN:
            return False
        if self._probe_seconds is not None or quiet >= max(self._doubt_seconds, USUAL_TIMES * self._quiets.longest):
            return True
        return quiet >= self._quiets.longest and self._is_proven(self._expected())

    def _is_longer(self, seconds: float, limit: float, doubt_seconds: float) -> bool:
        """Whether a pause is longer than a limit and than one step more: of the longest prefill that waits, and of all
        that is beyond what was worked off of late, for in that no step was longer than is usual. Where what is expected
        of them is not proven, the step may be several times as long, and `doubt_seconds` are the least limit."""
        if seconds < limit or not self._waiting:
            return seconds >= limit
        expected = self._expected()
        step = max(sum(expected) - self._queues.longest, max(expected))
        if not self._is_proven(expected):
            limit, step = max(limit, doubt_seconds), OVERDUE_TIMES * step
        return seconds >= limit + min(step, STEP_SECONDS_MAX)

    def _expected(self) -> list[float]:
        """What each prefill of the oldest that wait is expected to take, in seconds."""
        return [one.seconds for one in islice(self._waiting.values(), BATCH_MAX)]

    def _is_proven(self, expected: list[float]) -> bool:
        """Whether such prefills, by what was expected of them, were on time here."""
        return self._on_time >= ON_TIME_MIN and max(expected, default=0.0) <= USUAL_TIMES * self._proven_seconds

    def _overdue_seconds(self, expected: float) -> float:
        """After which what was expected to take so long is late."""
        return self._half_seconds + OVERDUE_TIMES * expected

    def _begins_nothing(self) -> bool:
        return (
            self._probe_seconds is not None
            and self._probe_seconds >= self._probe_limit
            and self._quiet_seconds >= max(self._hung_seconds, USUAL_TIMES * self._quiets.longest)
            and self._same_reports >= REPORTS_MIN
            and self.is_doubted
        )

    def _is_still(self, seconds: float) -> bool:
        """Whether streams have stood for too long in so many seconds."""
        limit = max(self._hung_seconds, USUAL_TIMES * self._pauses.longest)
        return self._signs >= SIGNS_MIN and self._is_longer(seconds, limit, self._doubt_seconds)

    def _stands_still(self) -> bool:
        report = self._report
        return (
            self._is_still(self._still_seconds)
            and self._same_reports >= REPORTS_MIN
            and report is not None
            and report.running > 0
            and report.used_tokens + report.done_tokens > 0
        )
