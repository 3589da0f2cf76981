"""Requests, guessed from what servers stored. Owns which segments of a chain are prompts and which are output, and
where the requests go that no event shows.

A request that misses stores blocks: a chain that branches off is one. What a chain grows by afterwards is

    more of the prompt   a chunk: sooner than so many tokens could be generated
    its output           at the pace of output tokens, and no more than requests generate
    the next turn        anything else: a new request that found all before it cached

A request that finds its whole prompt cached stores nothing. The metrics count it; it is given a prompt that was seen at
the same server, and a moment in the interval in which it was counted. Nothing here depends on chance but `rng`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .ledger import Chain, Segment, Unit

OUTPUT_FACTOR = 4.0  # more output than so many times the mean is none
PACE_SHARE = 0.5  # of the time that output takes; less, and it was computed as a prompt
TURN_FACTOR = 10.0  # a block that takes so much longer than its output would is the next turn's
TRIES = 4  # prompts drawn for an unseen request; the one nearest to their mean length is taken


@dataclass(frozen=True, slots=True)
class Pace:
    """What requests are like, from the metrics: seconds a prompt token and an output token take, output tokens of a
    request; `at_once`: the engine stores a request's output when it ends (SGLang), not block by block (vLLM)."""

    prompt_token_seconds: float
    output_token_seconds: float
    output_tokens: float
    at_once: bool


@dataclass(slots=True, eq=False)
class SeenRequest:
    """A request as far as it is known. `seconds`: when its prompt was stored, or where it is unseen, about when it ran;
    `unit` is the last whole unit of its prompt, None of one shorter than that; `end_seconds`: when its whole output was
    stored, None where that is not known."""

    rank: int
    seconds: float
    unit: Unit | None
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int = 0
    is_seen: bool = True
    end_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """Between two readings of a server's metrics: the requests that ended, the first tokens that came, and the sum of
    their seconds."""

    start: float
    end: float
    requests: float
    first_tokens: float = 0.0
    ttft_seconds: float = 0.0

    def plus(self, other: Counted) -> Counted:
        """This interval and the one after it."""
        return Counted(
            self.start,
            other.end,
            self.requests + other.requests,
            self.first_tokens + other.first_tokens,
            self.ttft_seconds + other.ttft_seconds,
        )


def requests_of(chain: Chain, pace: Pace) -> list[SeenRequest]:
    """The requests of one chain, in order."""
    found: list[SeenRequest] = []
    ended = False  # the last request's output is stored
    before = 0.0
    for segment in chain.segments:
        gap = segment.seconds - before
        kind = _kind(segment, gap, found[-1], pace, ended) if found else "prompt"
        if kind == "prompt":
            cached = segment.end - segment.tokens
            found.append(SeenRequest(chain.rank, segment.seconds, segment.unit, segment.end, segment.end - cached))
            ended = False
        elif kind == "chunk":
            last = found[-1]
            last.unit, last.prompt_tokens = segment.unit, segment.end
            last.computed_tokens += segment.tokens
            last.seconds = segment.seconds
        else:
            found[-1].output_tokens += segment.tokens
            ended = pace.at_once
            found[-1].end_seconds = segment.seconds if ended else None
        before = segment.seconds
    return found


def _kind(segment: Segment, gap: float, request: SeenRequest, pace: Pace, ended: bool) -> str:
    """What a chain grew by, `gap` seconds after its last growth, which was `request`'s."""
    expected = segment.tokens * pace.output_token_seconds
    most = OUTPUT_FACTOR * pace.output_tokens
    if request.output_tokens == 0 and gap < PACE_SHARE * expected:
        return "chunk"
    if ended or request.output_tokens > most or gap < PACE_SHARE * expected:
        return "prompt"
    if pace.at_once:
        return "output" if segment.tokens <= most + segment.tokens / segment.blocks else "prompt"
    return "output" if segment.blocks == 1 and gap <= TURN_FACTOR * expected else "prompt"


def unseen_requests(
    rank: int, seen: Sequence[SeenRequest], intervals: Sequence[Counted], prompt_tokens: float, output_tokens: int,
    resident: Sequence[Unit], in_flight: int, rng: np.random.Generator,
) -> list[SeenRequest]:  # fmt: skip
    """Requests of a rank that its metrics counted and no event shows: as many as they counted beyond
    those seen, in the intervals that counted more than were seen in them.

    `prompt_tokens`: how many they had all together, after those of the requests seen. `resident`: prefixes it held at
    the start. `in_flight`: by how many more requests ran at the end than at the start: they are counted when they
    end."""
    times = sorted(request.seconds for request in seen)
    count = max(0, round(sum(one.requests for one in intervals)) + in_flight - len(times))
    beyond = [one.requests - (bisect_right(times, one.end) - bisect_right(times, one.start)) for one in intervals]
    weights = np.maximum(np.array(beyond, np.float64), 1e-9)
    chosen = rng.choice(len(intervals), count, p=weights / weights.sum()) if count and len(intervals) else ()
    moments = [float(rng.uniform(intervals[at].start, intervals[at].end)) for at in chosen]
    moments.sort()
    mean = max(1.0, prompt_tokens / max(1, len(moments)))
    prompts = sorted(((one.seconds, one.unit) for one in seen if one.unit is not None), key=lambda pair: pair[0])
    pool = [unit for _, unit in prompts] or list(resident)
    if not pool:
        return [SeenRequest(rank, at, None, int(mean), int(mean), output_tokens, False) for at in moments]
    found = []
    for at in moments:
        until = max(1, bisect_right(prompts, at, key=lambda pair: pair[0])) if prompts else len(pool)
        drawn = [pool[int(rng.integers(until))] for _ in range(TRIES)]
        unit = min(drawn, key=lambda one: abs(one.end - mean))
        found.append(SeenRequest(rank, at, unit, unit.end, 0, output_tokens, False))
    return found
