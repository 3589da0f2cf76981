"""Whether one rank of a server is hung, by what came from it and what has passed since. Owns the limits and the
verdict; asks nothing, sends nothing, reads no clock.

    silent     no answer to any question, and no output, for `hung_seconds`: process, machine or network
    stalled    answers come, but streams that had begun got no token, and what the engine reports of its work stands
               still, for `hung_seconds`: the engine behind a living front
    idle       requests are there and nothing came of any for `stalled_seconds`, whatever is reported: a prompt may take
               long, and nobody knows how long

A step of the engine may take longer than `hung_seconds` and delays answers, too. So what was usual of late counts: the
longest pause within a minute or so, times `USUAL_TIMES`; and none is called stalled before it has shown
`SIGNS_MIN` signs of work, for an engine that has just started compiles as it goes. An engine that reports that it runs
nothing is not stalled: its output waits at a client that does not read.

A server that stalled, or was idle, is trusted again when it shows work: output, or another report. Not thread-safe.
"""

from __future__ import annotations

from .kv_event_codec import LoadReport

USUAL_TIMES = 2.0
SIGNS_MIN = 64
RECENT_SECONDS = 30.0  # pauses count for one to two such spans
REPORTS_MIN = 2  # of the same content within a stall

SILENT, STALLED, IDLE = "silent for too long", "its engine stands still", "no output for too long"


class RecentPauses:
    """The longest pause of late."""

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
        self._silent_seconds_max = silent_seconds_max
        self._stalled_seconds = stalled_seconds
        self._still_seconds = 0.0  # with streams there, and no sign of work
        self._idle_seconds = 0.0  # with requests there, and no output
        self._silences, self._pauses = RecentPauses(), RecentPauses()
        self._signs = 0
        self._report: LoadReport | None = None
        self._same_reports = 0
        self._held_against = ""  # until it shows work

    # --- what comes ---------------------------------------------------------------------------------------------------

    def answered(self) -> None:
        """The server has said something, whatever it was."""
        if self.silent_seconds:
            self._silences.note(self.silent_seconds)
            self.silent_seconds = 0.0

    def output(self) -> None:
        """Tokens of any request have come."""
        if self.silent_seconds:
            self.answered()
        self._idle_seconds = 0.0
        self._works()

    def reported(self, report: LoadReport) -> None:
        """What the engine says of its work."""
        if report == self._report:
            self._same_reports += 1
            return
        is_first, self._report, self._same_reports = self._report is None, report, 0
        if not is_first:
            self._works()

    def began(self) -> None:
        """A stream's first token has come."""
        self.streams += 1

    def left(self) -> None:
        """Such a stream is over, in whatever way."""
        self.streams -= 1

    def _works(self) -> None:
        self._signs += 1
        self._same_reports = 0
        self._held_against = ""
        if self._still_seconds:
            self._pauses.note(self._still_seconds)
            self._still_seconds = 0.0

    # --- what is made of it -------------------------------------------------------------------------------------------

    def pass_by(self, seconds: float, requests: int) -> None:
        """Time passes with so many requests there."""
        self._silences.pass_by(seconds)
        self._pauses.pass_by(seconds)
        self.silent_seconds += seconds
        self._still_seconds = self._still_seconds + seconds if self.streams else 0.0
        self._idle_seconds = self._idle_seconds + seconds if requests else 0.0

    def verdict(self) -> str:
        """Why the server is to be left alone; "" where it is not."""
        limit = max(self._hung_seconds, USUAL_TIMES * self._silences.longest)
        if self.silent_seconds >= min(limit, self._silent_seconds_max):
            return SILENT
        if not self._held_against:
            idle = IDLE if self._idle_seconds >= self._stalled_seconds else ""
            self._held_against = STALLED if self._stands_still() else idle
        return self._held_against

    def _stands_still(self) -> bool:
        report = self._report
        limit = max(self._hung_seconds, USUAL_TIMES * self._pauses.longest)
        return (
            self._still_seconds >= limit
            and self._signs >= SIGNS_MIN
            and self._same_reports >= REPORTS_MIN
            and report is not None
            and report.running > 0
            and report.used_tokens + report.done_tokens > 0
        )
