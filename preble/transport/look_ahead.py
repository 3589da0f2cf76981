"""How much an engine with its own loop is given ahead of what it computes. Owns what it was sent and has not begun;
knows no engine, has no clock of its own.

An engine serves what it has in the order in which it came, and computes what waits in one batch, whose first tokens all
come at its end. What it is not sent yet can still be overtaken. So it is sent one request, and beside the longest of
those that it has not begun as much as it prefills in `seconds`, so that it need not wait for who sends:

    sent, no first token yet     [ the longest ][ the others, and the next one: at most `seconds` ]

What a prefill was expected to take is held against what it took: while there is anything that was sent and has not
begun, the engine works on that, so the time between two first tokens is that of the prefills that have begun. `pace`
says how many times as long as expected they took, of the last seconds; room and patience are reckoned by it. For before
anything has been learned an engine may be ten times as slow as was thought, and then most prompts are cold.

A request that does not begin counts until `OVERDUE_TIMES` what all of them were expected to take, `OVERDUE_SECONDS` at
least: what delays it (a picture is fetched, a grammar compiled) does not keep the engine busy. When it begins after
all, the pace is measured, as at most `PACE_MAX`: a slow engine's first requests are overdue all.

An answer that is not streamed shows no first token, and its end says little of when its prefill was over. It counts for
as long as it and all before it are expected to take, or until the first token of one that was sent later: the engine
serves them in order. Where no first tokens come (`SIGHT_REQUESTS` at first, then one among `UNSEEN_MAX` such requests)
nobody corrects what prefills are thought to take, so they are all sent at once: held back by it, they would be answered
as slowly as was thought.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

LOOK_AHEAD_SECONDS = 1.0
OVERDUE_TIMES = 4.0
OVERDUE_SECONDS = 1.0
PACE_SECONDS = 4.0  # of work, in which what was measured of the pace counts half
PACE_PRIOR_SECONDS = 0.1  # of work as expected, which stand beside what was measured
PACE_MAX = 32.0
SIGHT_REQUESTS = 4  # as many as a cost model is corrected by
UNSEEN_MAX = 64
TWICE_SECONDS = 0.03  # of work done twice, from which on a request waits instead: about a step of decoding
EARLY_SECONDS = 1e-9  # by so much a timer may ring before its time


class _SentRequest(NamedTuple):
    """One that was sent: its prefill as expected, and until when it counts."""

    seconds: float
    until: float
    is_streamed: bool


class LookAhead:
    """See the module. `requests`: so many are sent in any case. `lanes`: engines behind one door (data-parallel ranks),
    each with a look-ahead. Not thread-safe. Calls are O(requests that were sent and not begun)."""

    def __init__(self, seconds: float, requests: int = 1, lanes: int = 1) -> None:
        self.seconds = seconds
        self.requests = requests
        self._lanes = lanes
        self._sent: dict[str, _SentRequest] = {}
        self._overdue: dict[str, float] = {}  # sent, not begun, and counted no more: what was expected
        self._total_seconds = 0.0
        self._worked_seconds = self._expected_seconds = PACE_PRIOR_SECONDS
        self._begun = 0  # first tokens that came
        self._unseen = 0  # requests that show none and were sent since the last one that came
        self._worked_until = -math.inf  # what was sent and had not begun has been measured until then

    def __len__(self) -> int:
        """Requests that were sent and not begun, as far as they count."""
        return len(self._sent)

    def __contains__(self, name: str) -> bool:
        return name in self._sent

    @property
    def is_blind(self) -> bool:
        """Whether too few first tokens come to say how long prefills take."""
        return self._begun < SIGHT_REQUESTS or self._unseen >= UNSEEN_MAX

    def has_room(self, seconds: float, *, is_streamed: bool = True) -> bool:
        """Whether one more, with a prefill of so many seconds, may be sent."""
        lanes = self._lanes
        if len(self._sent) < self.requests * lanes or (self.is_blind and not is_streamed):
            return True
        longest = math.fsum(heapq.nlargest(lanes, (one.seconds for one in self._sent.values())))
        return self.pace * (self._total_seconds - longest + seconds) <= self.seconds * lanes

    @property
    def pace(self) -> float:
        """What prefills take, over what they were expected to take; 1 before any was seen."""
        return min(max(self._worked_seconds / self._expected_seconds, 1.0 / PACE_MAX), PACE_MAX)

    def add(self, name: str, seconds: float, now: float, *, is_streamed: bool = True) -> None:
        """A request is sent; its prefill is expected to take so long."""
        assert name not in self._sent and name not in self._overdue, f"{name!r} was sent"
        if not self._sent and not self._overdue:
            self._worked_until = now
        self._total_seconds += seconds
        if is_streamed:
            patience = max(OVERDUE_TIMES * self.pace * self._total_seconds, OVERDUE_SECONDS)
        else:
            patience = self.pace * (seconds if self.is_blind else self._total_seconds)
            self._unseen += 1
        self._sent[name] = _SentRequest(seconds, now + patience, is_streamed)

    def begin(self, name: str, now: float) -> bool:
        """Its first token has come, or its answer where that is not streamed; False if it does not count."""
        sent = self._sent.get(name)
        expected = self._overdue.get(name) if sent is None else sent.seconds
        if expected is None or (sent is not None and not sent.is_streamed):
            return self.remove(name)
        self._begun += 1
        self._unseen = 0
        if sent is not None:
            expected += self._begin_before(name, now)
        worked = min(len(self._sent) + len(self._overdue), self._lanes) * max(now - self._worked_until, 0.0)
        most = PACE_MAX * (self._total_seconds + math.fsum(self._overdue.values()))
        self._worked_seconds += min(worked, most)
        self._expected_seconds += expected
        self._worked_until = now
        if self._worked_seconds > PACE_SECONDS:
            self._worked_seconds, self._expected_seconds = self._worked_seconds / 2.0, self._expected_seconds / 2.0
        return self.remove(name)

    def _begin_before(self, name: str, now: float) -> float:
        """Those that were sent before it and show no first token do not count any more; what they were expected to
        take."""
        expected = 0.0
        for other, one in itertools.takewhile(lambda item: item[0] != name, self._sent.items()):
            if not one.is_streamed and one.until > now:
                self._sent[other] = one._replace(until=now)
                expected += one.seconds
        return expected

    def remove(self, name: str) -> bool:
        """It is over; False if it does not count."""
        sent = self._sent.pop(name, None)
        if sent is None:
            self._overdue.pop(name, None)
            return False
        self._total_seconds = self._total_seconds - sent.seconds if self._sent else 0.0
        return True

    def expire(self, now: float) -> list[str]:
        """Those that should have begun do not count any more."""
        found = {name: one for name, one in self._sent.items() if one.until <= now + EARLY_SECONDS}
        for name, one in found.items():
            self.remove(name)
            if one.is_streamed:
                self._overdue[name] = one.seconds
            else:  # what it took is not known: neither its work is counted nor the time
                self._worked_until = max(self._worked_until, one.until)
        return list(found)

    @property
    def expires_at(self) -> float:
        """When the next one does not count any more; infinite where none is there."""
        return min((one.until for one in self._sent.values()), default=math.inf)

    def check(self) -> None:
        """Assert that the sum is that of those that were sent."""
        total = math.fsum(one.seconds for one in self._sent.values())
        assert math.isclose(total, self._total_seconds, rel_tol=1e-9, abs_tol=1e-6), "the seconds sent are off"
        assert not self._sent.keys() & self._overdue.keys(), "one counts, and does not"


def computes_twice(engine: str) -> bool:
    """Whether an engine computes what two prompts of one batch share for each of them. Run: SGLang 0.5.23 does; with
    vLLM 0.32 the second one reads it in the same step. One that nobody has run is taken to."""
    return engine != "vllm"


def twice_share(token_ids: Int32Array, cached_tokens: int, others_ids: Int32Array, others_cached: int) -> float:
    """Of what another prompt, with so many of its own cached, is still to compute: the share that this one counts among
    its cached tokens. In one batch both would compute that. O(tokens)."""
    size = min(len(token_ids), len(others_ids), cached_tokens)
    if size <= others_cached or token_ids[others_cached] != others_ids[others_cached]:
        return 0.0
    differs = token_ids[:size] != others_ids[:size]
    first = int(differs.argmax())
    same = first if differs[first] else size
    return max(same - others_cached, 0) / (len(others_ids) - others_cached)
