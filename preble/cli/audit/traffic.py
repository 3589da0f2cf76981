"""An audit's requests as a `Recording`, to be replayed. Owns the times: what servers measured is only known of many
requests together, and here each is given its own, so that together they took what was measured.

    stored     a request's first token came when its prompt was stored: exact
    arrived    before its iteration began. Prompts that were stored one iteration after the other came while the one
               before them was computed; others found nothing that computed a prompt
    scaled     so that in every stretch of time the times to first token add up to what the server's metrics counted
    ended      when its output was stored (SGLang), else as long after as the mean latency says

A request that no event shows takes an iteration, and waits for a prompt that is being computed. What caches held at the
start comes first, as prompts of one output token that were given up, so that no figure counts them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..._cost import CostModel
from ...recording import RecordedRequest, RecordedWorker, Recording
from ...recording.recorded import CANCELLED
from ...sim.engine_fit import EngineCosts
from ...transport.engine_servers.served_totals import ServedTotals
from .ledger import Unit
from .requests import Counted, SeenRequest

PRIOR = "llama-3-70b/h100-tp4"  # where no metrics say how fast an engine is
SERVED_MIN = 16  # requests before their mean is one
FLOOR_SHARE = 0.75  # of a mean prefill that may be the iteration's own time
REPLAYED_MAX = 20_000  # requests; of more, the newest
HELD_MAX = 4_000  # prefixes of all caches together that are put into them first
OWN_UNITS_MAX = 64  # of a prompt of which nothing is known but its length
STRETCH_FIRST_TOKENS = 8  # of a stretch of time whose times are scaled together, at least
SPEED_APART = 0.2  # of two guesses, in logarithms, before times are guessed anew
SCALE_MAX = 4.0  # and 1 over it


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """A first guess, in seconds: of an iteration, of each new token in it, and of the way to an engine and back."""

    floor: float
    token: float
    hop: float = 0.0

    def costs(self) -> EngineCosts:
        """As the costs of an engine, where nothing better can be learned."""
        return EngineCosts(self.floor, self.token, hop=self.hop)

    def is_like(self, other: EngineSpeed) -> bool:
        """Whether prompts of usual length take about as long."""
        one, two = (speed.floor + 1024 * speed.token + speed.hop for speed in (self, other))
        return abs(math.log(one / two)) < SPEED_APART and abs(math.log(self.token / other.token)) < 2 * SPEED_APART

    @classmethod
    def of(cls, costs: EngineCosts, slowness: float) -> EngineSpeed:
        """As a fit has found it, of a request of usual length."""
        model, context = costs.model(slowness), 2048
        token = (model.prefill_time(1088, context) - model.prefill_time(64, context)) / 1024
        return cls(model.decode_time(1, context) + costs.request, max(token, 1e-9), costs.hop)


def prompt_token_seconds(totals: ServedTotals, rank_seconds: float = math.inf) -> float | None:
    """Seconds of prefill for each computed token; None where the metrics do not say. Requests whose prompts are
    computed in one batch each count the whole of it, so their sum may be far above the time that there was: the most
    is `rank_seconds`, of all ranks together."""
    prefill, computed = totals.prefill.mean, totals.computed.mean
    if totals.prefill.count < SERVED_MIN or not prefill or not computed:
        return None
    return min(prefill / computed, rank_seconds / totals.computed.sum)


def speed_of(totals: ServedTotals, rank_seconds: float = math.inf) -> EngineSpeed:
    """As the metrics of a server or a fleet say it: half of all output tokens come sooner than an iteration without
    prefills takes, a prefill is that and its tokens; what a first token takes beside queue and prefill is the way.
    Without metrics, a large model on a large card."""
    prior = CostModel.preset(PRIOR)
    floor = totals.quantile("token", 0.5) or totals.token.mean or prior.decode_time(1, 1024)
    token, prefill, computed = prompt_token_seconds(totals, rank_seconds), totals.prefill.mean, totals.computed.mean
    if token is None or not prefill or not computed:
        return EngineSpeed(floor, max(1e-9, prior.prefill_time(2048) - prior.prefill_time(1024)) / 1024)
    own = token * computed  # of a prefill, alone
    floor = min(floor, FLOOR_SHARE * own)
    hop = 0.0
    if totals.ttft.mean and totals.queue.mean is not None:
        hop = max(0.0, totals.ttft.mean - totals.queue.mean - prefill)
    return EngineSpeed(floor, (own - floor) / computed, hop)


@dataclass(slots=True, eq=False)
class RankTraffic:
    """What one cache's requests are made of: its worker, its requests, and what it cached at the start, oldest
    first."""

    worker: RecordedWorker
    requests: Sequence[SeenRequest]
    held: Sequence[Unit] = ()


@dataclass(slots=True, eq=False)
class ServerTraffic:
    """One server: its ranks, how fast it seems, and what its metrics counted, None where it has none."""

    ranks: Sequence[RankTraffic]
    speed: EngineSpeed
    served: ServedTotals | None
    counted: Sequence[Counted] = ()


@dataclass(slots=True, eq=False)
class _Timed:
    """A request and the seconds from its arrival to its first token. `stretch`: of time, in which its server counted it
    with others; -1 for none."""

    request: SeenRequest
    worker: str
    first: float
    ttft: float
    stretch: int = -1

    @property
    def arrival(self) -> float:
        return self.first - self.ttft


class AuditedTraffic(NamedTuple):
    """A recording, and its rows whose times to first token were measured together, in order of time."""

    recording: Recording
    together: list[list[int]]


def traffic_of(servers: Sequence[ServerTraffic], unit_tokens: int) -> AuditedTraffic | None:
    """The requests of the servers; None where there are none. Deterministic. O(tokens)."""
    names = _Names(unit_tokens)
    timed = [(server, one) for number, server in enumerate(servers) for one in _timed(server, number, len(servers))]
    timed.sort(key=lambda pair: pair[1].arrival)
    if not timed:
        return None
    timed = timed[-REPLAYED_MAX:]
    made, begin = _held(servers, names)
    start = timed[0][1].arrival
    pace = {id(server): _decode_seconds(server) for server in servers}
    rows = [(one, -1) for one in made]
    rows += [(names.request(one, begin - start, pace[id(server)]), one.stretch) for server, one in timed]
    rows.sort(key=lambda pair: pair[0].arrival_seconds)
    together: dict[int, list[int]] = {}
    for row, (_, stretch) in enumerate(rows):
        if stretch >= 0:
            together.setdefault(stretch, []).append(row)
    recording = Recording(
        workers=tuple(rank.worker for server in servers for rank in server.ranks),
        requests=tuple(one for one, _ in rows),
        block_size=unit_tokens,
        name=f"{len(timed)} requests",
    )
    return AuditedTraffic(recording, [together[stretch] for stretch in sorted(together)])


# --- times ------------------------------------------------------------------------------------------------------------


def _timed(server: ServerTraffic, number: int, servers: int) -> list[_Timed]:
    """The requests of a server, the so many-th of so many, with times to first token that add up to what it counted."""
    found = [one for rank in server.ranks for one in _rank_times(rank, server.speed)]
    found.sort(key=lambda one: one.first)
    for place, stretch in enumerate(_stretches(server.counted)):
        own = [one for one in found if stretch.start < one.first <= stretch.end]
        _scale(own, stretch.ttft_seconds, stretch.first_tokens)
        for one in own:
            one.stretch = place * servers + number
    served = server.served
    if served is not None and served.ttft.count:
        rest = [one for one in found if one.stretch < 0]
        _scale(rest, served.ttft.sum, served.ttft.count)
    return found


def _rank_times(rank: RankTraffic, speed: EngineSpeed) -> list[_Timed]:
    """By the iterations that stored prompts: each ends when it is stored."""
    seen = sorted((one for one in rank.requests if one.is_seen), key=lambda one: one.seconds)
    found: list[_Timed] = []
    spans: list[tuple[float, float]] = []  # of iterations, in order
    at = 0
    while at < len(seen):
        end = seen[at].seconds
        upto = at + 1
        while upto < len(seen) and seen[upto].seconds == end:
            upto += 1
        batch, at = seen[at:upto], upto
        takes = speed.floor + speed.token * sum(one.computed_tokens for one in batch)
        before = spans[-1] if spans else (-math.inf, -math.inf)
        begin = max(end - takes, before[1])
        for place, one in enumerate(batch):
            arrival = begin - 0.5 * speed.floor
            if begin - before[1] < speed.floor:  # the one before had kept it waiting
                arrival = before[0] + (before[1] - before[0]) * (place + 0.5) / len(batch)
            found.append(_Timed(one, rank.worker.id, end, end - arrival + speed.hop))
        spans.append((begin, end))
    ends = [end for _, end in spans]
    for one in rank.requests:
        if not one.is_seen:
            place = int(np.searchsorted(ends, one.seconds))
            waits = max(0.0, ends[place] - one.seconds) if place < len(ends) and spans[place][0] < one.seconds else 0.0
            ttft = waits + speed.floor + speed.hop
            found.append(_Timed(one, rank.worker.id, one.seconds + waits + speed.floor, ttft))
    return found


def _stretches(counted: Sequence[Counted]) -> list[Counted]:
    """Intervals between readings, put together until enough first tokens came in each."""
    found: list[Counted] = []
    for one in counted:
        if found and found[-1].first_tokens < STRETCH_FIRST_TOKENS:
            found[-1] = found[-1].plus(one)
        else:
            found.append(one)
    return [one for one in found if one.first_tokens >= STRETCH_FIRST_TOKENS]


def _scale(requests: Sequence[_Timed], seconds: float, count: float) -> None:
    """Make their mean time to first token that of `count` requests that took `seconds` together."""
    mine = sum(one.ttft for one in requests)
    if not mine or not seconds or not count:
        return
    factor = min(max(seconds / count / (mine / len(requests)), 1.0 / SCALE_MAX), SCALE_MAX)
    for one in requests:
        one.ttft *= factor


def _decode_seconds(server: ServerTraffic) -> float:
    """Of an output token after the first."""
    served = server.served or ServedTotals()
    latency, ttft, output = served.latency.mean, served.ttft.mean, served.output.mean
    if latency and ttft and output and output > 1.0 and latency > ttft:
        return (latency - ttft) / (output - 1.0)
    return server.speed.floor


# --- names ------------------------------------------------------------------------------------------------------------


def _held(servers: Sequence[ServerTraffic], names: _Names) -> tuple[list[RecordedRequest], float]:
    """What fills the caches, and when that is over."""
    most = max(1, HELD_MAX // max(1, sum(len(server.ranks) for server in servers)))
    found, over = [], 0.0
    for server in servers:
        for rank in server.ranks:
            at = 0.0
            for unit in rank.held[-most:]:
                at += 2.0 * (server.speed.floor + server.speed.token * unit.end)
                found.append(names.held(unit, at, rank.worker.id))
            over = max(over, 2.0 * at)
    return found, over


class _Names:
    """Blocks for prompts: a unit's key, and names of their own for what nobody else has."""

    def __init__(self, unit_tokens: int) -> None:
        self._unit_tokens = unit_tokens
        self._own = 0

    def request(self, one: _Timed, later: float, decode_seconds: float) -> RecordedRequest:
        """As it is recorded, `later` by another clock."""
        seen = one.request
        keys = [unit.key for unit in seen.unit.chain() if unit.end] if seen.unit is not None else []
        width = self._unit_tokens
        known = len(keys) * width
        own = seen.prompt_tokens - known
        if not 0 < own <= OWN_UNITS_MAX * width:
            own = width // 2 if known else min(max(1, own), OWN_UNITS_MAX * width)
        output = max(1, seen.output_tokens)
        end = seen.end_seconds
        if end is None or end <= one.first:
            end = one.first + (output - 1) * decode_seconds
        arrival = max(0.0, one.arrival + later)
        return RecordedRequest(
            arrival_seconds=arrival,
            sent_seconds=arrival,
            first_token_seconds=max(arrival, one.first + later),
            end_seconds=max(arrival, end + later),
            prompt_tokens=known + own,
            blocks=np.array([*keys, *self._new(-(-own // width))], np.uint64),
            output_tokens=output,
            worker=one.worker,
            cached_tokens=max(0, min(known + own - seen.computed_tokens, known + own - 1)),
        )

    def held(self, unit: Unit, at: float, worker: str) -> RecordedRequest:
        """A prefix that was cached."""
        keys = [one.key for one in unit.chain() if one.end]
        return RecordedRequest(
            arrival_seconds=at,
            sent_seconds=at,
            end_seconds=at,
            prompt_tokens=max(1, len(keys)) * self._unit_tokens,
            blocks=np.array(keys or self._new(1), np.uint64),
            output_tokens=1,
            worker=worker,
            error=CANCELLED,
        )

    def _new(self, count: int) -> list[int]:
        """Names that nobody has: keys are of 64 bits, these are small."""
        self._own += count
        return list(range(self._own - count, self._own))
