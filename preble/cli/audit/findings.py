"""What an audit found. Owns the figures: what was computed, how much of it for another time, which prefixes, what E2
would have saved, and how sure that is. Reads what `listening` received; changes nothing.

Exact: blocks stored (computed tokens, repeats), and what the metrics count. Guessed: which stored blocks are a prompt
and which its output; the prompts of requests that no event shows; times of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..._cost import CostModel
from ...recording import RecordedWorker
from ...sim.engine_fit import RUNNING_MAX
from ...sim.replay import Estimate95
from ...transport.engine_servers.served_totals import ServedTotals
from .ledger import CacheLedger, Stored, Unit
from .listening import AuditedServer, Received
from .requests import Pace, SeenRequest, requests_of, unseen_requests
from .traffic import PRIOR, RankTraffic, ServerTraffic, prompt_token_seconds, speed_of
from .what_if import WhatIf, what_if

OUTPUT_TOKENS = 128.0  # of a request, where no metrics say it
PREFIXES_SHOWN = 3
DRAWS = 1_000  # of blocks of time, for an interval
STEM_SHARE = 0.6  # of a prefix's requests that must go on alike, or it ends there
SURE_REQUESTS, SURE_SEEN, SURE_ERROR = 200, 0.5, 0.25
FAIR_REQUESTS, FAIR_SEEN, FAIR_ERROR = 50, 0.2, 0.60


@dataclass(frozen=True, slots=True)
class RepeatedPrefix:
    """A prefix that was computed more than once. `start` and `end`: its tokens in the prompt; `requests` that begin
    with it; `repeated_tokens`: computed for another time; `servers`: caches that computed it; `head`: first tokens."""

    name: str
    start: int
    end: int
    requests: int
    repeated_tokens: int
    servers: int
    head: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerFindings:
    """One server: prompt tokens `reused` and `computed` by its metrics (None without), `stored` by its events."""

    url: str
    engine: str
    requests: int
    seen: int
    reused: float | None
    computed: float | None
    stored: Stored
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """What the figures lack. Batches, tokens, units, requests."""

    gaps: int = 0
    resyncs: int = 0
    restarts: int = 0
    unreadable: int = 0
    unanswered: int = 0
    unplaced_tokens: int = 0
    uncompared_tokens: int = 0
    forgotten_units: int = 0
    dropped: int = 0
    silent_servers: int = 0


@dataclass(frozen=True, slots=True)
class AuditFindings:
    """All figures of one audit; seconds and tokens. `twice_share`: of the computed prompt tokens. `prefill_seconds`:
    what the repeats took. `ttft_*`: measured by the servers' metrics, None without. `seen`: requests that events show.
    `model_error`: the replay of what was over what was measured, less 1; None where nothing was. `sure`: "good", "fair"
    or "poor"."""

    seconds: float
    is_interrupted: bool
    servers: tuple[ServerFindings, ...]
    requests: int
    seen: int
    prompt_tokens: float
    computed_tokens: float
    elsewhere_tokens: int
    again_tokens: int
    twice_share: Estimate95
    prefill_seconds: float
    busy_share: float
    ttft_seconds: float | None
    ttft_p99_seconds: float | None
    prefixes: tuple[RepeatedPrefix, ...]
    e2: WhatIf | None
    model_error: float | None
    sure: str
    lost: Lost
    bytes_used: int

    @property
    def twice_tokens(self) -> int:
        return self.elsewhere_tokens + self.again_tokens

    def e2_ttft(self) -> Estimate95 | None:
        """What the mean time to first token would have been: measured, times the ratio of the replays. None where the
        model's error is larger than the change."""
        if self.e2 is None or self.ttft_seconds is None or not self.e2.claims_ttft:
            return None
        return self.e2.ttft_ratio.times(self.ttft_seconds)

    def e2_ttft_p99(self) -> Estimate95 | None:
        """The same of the 99th percentile."""
        if self.e2 is None or self.ttft_p99_seconds is None or not self.e2.claims_p99:
            return None
        return self.e2.p99_ratio.times(self.ttft_p99_seconds)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        claims = {"e2_ttft": self.e2_ttft(), "e2_ttft_p99": self.e2_ttft_p99()}
        found = {name: None if one is None else asdict(one) for name, one in claims.items()}
        return {**asdict(self), "twice_tokens": self.twice_tokens, **found}


def find(received: Received, *, seed: int = 0, on_step: Callable[[str], None] = lambda _: None) -> AuditFindings:
    """The figures of what was received. Deterministic for a seed; `on_step` says what is being done."""
    ledger = received.ledger
    paces = {server.url: _pace(server, received.seconds) for server in received.servers}
    requests = _requests(received, paces, seed)
    served = [server.served for server in received.servers if server.served is not None]
    total = _sum(served)
    stored = ledger.stored()
    counted = {server.url: _counted(server, requests) for server in received.servers}
    seen = sum(one.is_seen for one in requests)
    prompt = total.prompt.sum or float(sum(one.prompt_tokens for one in requests))
    computed = total.computed.sum or float(sum(one.computed_tokens for one in requests if one.is_seen))
    rank_seconds = max(1e-9, received.seconds * len(ledger.ranks))
    prefill = sum(
        ledger.ranks[rank].stored.twice * paces[server.url].prompt_token_seconds
        for server in received.servers
        for rank in server.ranks
    )
    e2 = _what_if(received, requests, on_step)
    error = None if e2 is None else e2.error
    lost = _lost(received, stored)
    requests_counted = max(seen, round(sum(max(count, mine) for count, mine in counted.values())))
    return AuditFindings(
        seconds=received.seconds,
        is_interrupted=received.is_interrupted,
        servers=tuple(_server(server, ledger, requests) for server in received.servers),
        requests=requests_counted,
        seen=seen,
        prompt_tokens=prompt,
        computed_tokens=computed,
        elsewhere_tokens=stored.elsewhere,
        again_tokens=stored.again,
        twice_share=_twice_share(ledger, stored, computed),
        prefill_seconds=prefill,
        busy_share=prefill / rank_seconds,
        ttft_seconds=total.ttft.mean,
        ttft_p99_seconds=total.quantile("ttft", 0.99),
        prefixes=repeated_prefixes(requests),
        e2=e2,
        model_error=error,
        sure=_sure(requests_counted, seen, None if e2 is None else e2.uncertainty, lost),
        lost=lost,
        bytes_used=ledger.bytes_used,
    )


def _sum(totals: Sequence[ServedTotals]) -> ServedTotals:
    found = ServedTotals()
    for one in totals:
        found = found.plus(one)
    return found


def _pace(server: AuditedServer, seconds: float) -> Pace:
    """As its metrics say, else as a model of a large engine does."""
    prior = CostModel.preset(PRIOR)
    totals = server.served or ServedTotals()
    said = prompt_token_seconds(totals, seconds * max(1, len(server.ranks)))
    prompt = prior.prefill_time(1024) / 1024 if said is None else said
    token = totals.quantile("token", 0.5) or totals.token.mean or prior.decode_time(1, 1024)
    output = totals.output.mean or OUTPUT_TOKENS
    at_once = server.info is not None and server.info.engine == "sglang"
    return Pace(prompt, token, output, at_once)


def _requests(received: Received, paces: Mapping[str, Pace], seed: int) -> list[SeenRequest]:
    """Seen and unseen, of all ranks."""
    by_rank = {rank: server for server in received.servers for rank in server.ranks}
    found: list[SeenRequest] = []
    for chain in received.ledger.chains:
        found += requests_of(chain, paces[by_rank[chain.rank].url])
    rng = np.random.default_rng(seed)
    for server in received.servers:
        totals = server.served
        if totals is None or not server.has_events:
            continue
        own = [one for one in found if one.rank in server.ranks]
        output = max(1, round(paces[server.url].output_tokens))
        for one in own:
            one.output_tokens = one.output_tokens or output
        missing = totals.prompt.sum - sum(one.prompt_tokens for one in own)
        resident = [unit for rank in server.ranks for unit in received.held.get(rank, ())]
        unseen = unseen_requests(server.ranks[0], own, server.counted, missing, output, resident, server.in_flight, rng)
        for one in unseen:
            if one.unit is not None:
                bits = [rank for rank in server.ranks if one.unit.ever >> rank & 1]
                one.rank = bits[0] if bits else one.rank
        found += unseen
    return found


def _counted(server: AuditedServer, requests: Sequence[SeenRequest]) -> tuple[float, int]:
    """(requests by its metrics, requests by its events)."""
    seen = sum(one.is_seen for one in requests if one.rank in server.ranks)
    return (server.served.requests if server.served is not None else 0.0), seen


def _server(server: AuditedServer, ledger: CacheLedger, requests: Sequence[SeenRequest]) -> ServerFindings:
    count, seen = _counted(server, requests)
    stored = Stored()
    for rank in server.ranks:
        for name in Stored.__slots__:
            setattr(stored, name, getattr(stored, name) + getattr(ledger.ranks[rank].stored, name))
    totals = server.served
    says = totals is not None and totals.prompt.count > 0 and totals.computed.count > 0
    return ServerFindings(
        url=server.url,
        engine=f"{server.info.engine} {server.info.version}" if server.info is not None else "no answer",
        requests=max(round(count), seen),
        seen=seen,
        reused=max(0.0, totals.prompt.sum - totals.computed.sum) if says and totals is not None else None,
        computed=totals.computed.sum if says and totals is not None else None,
        stored=stored,
        problems=tuple(server.problems),
    )


def _twice_share(ledger: CacheLedger, stored: Stored, computed: float) -> Estimate95:
    """Of the computed prompt tokens, with an interval from drawing blocks of time anew."""
    value = min(1.0, stored.twice / computed) if computed else 0.0
    bins = [ledger.bins[key] for key in sorted(ledger.bins)]
    if not bins or not stored.twice:
        return Estimate95(value, 0.0, value if bins else 1.0)
    both = np.array(bins, np.float64)
    drawn = np.random.default_rng(0).integers(len(both), size=(DRAWS, len(both)))
    sums = both[drawn].sum(axis=1)
    low, high = np.percentile(sums[:, 1] / np.maximum(sums[:, 0], 1e-12), (2.5, 97.5))
    scale = value * both[:, 0].sum() / both[:, 1].sum()
    return Estimate95(value, min(1.0, float(low * scale)), min(1.0, float(high * scale)))


def _lost(received: Received, stored: Stored) -> Lost:
    counters = [feed.counters for server in received.servers for feed in server.feeds]
    ledger = received.ledger
    return Lost(
        gaps=sum(one.gaps for one in counters),
        resyncs=sum(one.resyncs for one in counters),
        restarts=sum(one.restarts for one in counters) + sum(server.restarts for server in received.servers),
        unreadable=sum(server.unreadable for server in received.servers)
        + sum(one.malformed_frames for one in counters),
        unanswered=sum(server.unanswered for server in received.servers),
        unplaced_tokens=stored.unplaced,
        uncompared_tokens=max(0, stored.computed - stored.compared),
        forgotten_units=ledger.forgotten_units,
        dropped=ledger.refused_units + ledger.dropped_hashes + ledger.dropped_segments,
        silent_servers=sum(not server.has_events for server in received.servers),
    )


def _sure(requests: int, seen: int, error: float | None, lost: Lost) -> str:
    """How far the figures can be trusted."""
    share = seen / max(1, requests)
    whole = not (lost.resyncs or lost.unreadable or lost.dropped or lost.silent_servers)
    if whole and requests >= SURE_REQUESTS and share >= SURE_SEEN and error is not None and abs(error) <= SURE_ERROR:
        return "good"
    fair = requests >= FAIR_REQUESTS and share >= FAIR_SEEN and (error is None or abs(error) <= FAIR_ERROR)
    return "fair" if fair else "poor"


def _what_if(received: Received, requests: Sequence[SeenRequest], on_step: Callable[[str], None]) -> WhatIf | None:
    """The requests once more, as they were placed and by E2. None where there is no request, or nobody publishes."""
    of_rank: dict[int, list[SeenRequest]] = {}
    for one in requests:
        of_rank.setdefault(one.rank, []).append(one)
    servers = []
    for server in received.servers:
        if server.info is None or not server.has_events:
            continue
        speed = speed_of(server.served or ServedTotals(), received.seconds * max(1, len(server.ranks)))
        ranks = [
            RankTraffic(_worker(server, place), of_rank.get(rank, []), received.held.get(rank, ()))
            for place, rank in enumerate(server.ranks)
        ]
        servers.append(ServerTraffic(ranks, speed, server.served, server.counted))
    return what_if(servers, received.ledger.unit_tokens, received.seconds, on_step)


def _worker(server: AuditedServer, place: int) -> RecordedWorker:
    """One of its ranks."""
    info = server.info
    assert info is not None
    return RecordedWorker(
        id=server.url if info.ranks == 1 else f"{server.url}?rank={place}",
        kv_capacity_tokens=info.kv_capacity_tokens,
        block_size=info.block_size,
        max_running=info.max_running or RUNNING_MAX,
        engine=info.engine,
    )


# --- prefixes ---------------------------------------------------------------------------------------------------------


def repeated_prefixes(requests: Sequence[SeenRequest]) -> tuple[RepeatedPrefix, ...]:
    """The prefixes whose repeats took most, `PREFIXES_SHOWN` of them. A prefix goes on as long as most of its requests
    do. O(units of all prompts)."""
    asked: dict[int, int] = {}
    units: dict[int, Unit] = {}
    ends: dict[int, int] = {}
    for request in requests:
        unit = request.unit
        if unit is None:
            continue
        ends[unit.key] = ends.get(unit.key, 0) + 1
        while unit is not None and unit.key not in units:
            units[unit.key] = unit
            unit = unit.parent
    children: dict[int | None, list[Unit]] = {}
    for unit in sorted(units.values(), key=lambda one: -one.end):
        asked[unit.key] = asked.get(unit.key, 0) + ends.get(unit.key, 0)
        parent = unit.parent.key if unit.parent is not None else None
        children.setdefault(parent, []).append(unit)
        if parent is not None:
            asked[parent] = asked.get(parent, 0) + asked[unit.key]
    found, begun = [], list(children.get(None, ()))
    while begun:
        stem = [begun.pop()]
        while True:
            following = children.get(stem[-1].key, [])
            heir = max(following, key=lambda one: asked[one.key], default=None)
            if heir is None or asked[heir.key] < STEM_SHARE * asked[stem[0].key]:
                begun += following
                break
            begun += [one for one in following if one is not heir]
            stem.append(heir)
        repeated = sum(unit.repeats for unit in stem)
        if repeated:
            found.append(_prefix(stem, asked[stem[0].key], repeated))
    found.sort(key=lambda one: (-one.repeated_tokens, one.name))
    return tuple(found[:PREFIXES_SHOWN])


def _prefix(stem: Sequence[Unit], requests: int, repeated: int) -> RepeatedPrefix:
    first, last = stem[0], stem[-1]
    head = tuple(int(token) for token in np.frombuffer(first.head, np.int32))
    start = first.parent.end if first.parent is not None else 0
    servers = max(unit.ever.bit_count() for unit in stem)
    return RepeatedPrefix(f"{last.key:016x}", start, last.end, requests, repeated, servers, head)
