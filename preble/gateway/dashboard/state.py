"""What the live page and `preble top` show, kept for the last minutes: workers, prefixes, events, decisions. Owns the
history and its bounds; the page is `api/dashboard.py`'s and that of the files in page/.

Once a tick the loop notes how each worker stands (references only), and a thread makes numbers of it, so that a large
fleet does not hold the loop. Prompts are shown by their lengths and by keyed hashes (`hot_prefixes`), never by their
tokens.

Bounds: HISTORY_TICKS of each number; WORKERS_MAX workers and EVENTS_MAX events, what is beyond them is counted in the
answer; DECISIONS_SHOWN decisions and PREFIXES_SHOWN prefixes in one answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ...clock import Clock
from ...scheduling.hot_prefixes import HotPrefixes
from .events import DashboardEvents
from .history import UNKNOWN, Ratio, Series, percentile

if TYPE_CHECKING:
    from ...router.router import Router
    from ...scheduling.records import DecisionRecord
    from ...transport import wire
    from ..core.request_context import RequestContext
    from ..text.choices import Choice

logger = logging.getLogger("preble.gateway")

TICK_SECONDS = 1.0
HISTORY_TICKS = 300
RECENT_TICKS = 30  # over which rates, hit rates and percentiles are taken
WORKERS_MAX = 1000
DECISIONS_SHOWN = 50
RECORDS_PER_SECOND = 10  # beside `record_share`, so that of an idle fleet every decision is there
PREFIXES_SHOWN = 20
TIMES_MAX = 4096  # of first tokens, and of times between tokens
ANSWERS_MAX = 4  # kept of one tick; who comes in between ticks gets the same bytes
OBSERVED_SECONDS_MIN = 10.0  # a worker that has just come is not said to be busy for its first request
WORKER_SERIES = ("load", "waiting", "kv", "hit")
FLEET_SERIES = (
    "requests_per_second",
    "errors",
    "output_tokens_per_second",
    "hit",
    "loaded",
    "first_token_p50",
    "first_token_p99",
    "seconds_per_token_p50",
    "seconds_per_token_p99",
    "waiting",
    "running",
)
GONE = frozenset({"lost", "refused"})  # states in which nothing of a cache is of use
REFUSED = 429


class Look(NamedTuple):
    """One worker at one moment, as the loop saw it; nothing in it changes later."""

    address: str
    worker_id: str
    state: str
    why: str
    epoch: int
    welcome: wire.Welcome | None
    pong: wire.Pong | None
    waiting: int
    restarts: int
    losses: int
    prompt_tokens: int
    cached_tokens: int


class Recent(NamedTuple):
    """What requests did lately and since the start, as the loop saw it."""

    first_tokens: list[float]
    seconds_per_token: list[float]
    requests: int
    output_tokens: int
    answers: int
    errors: int


class _Tracked:
    """What is kept of one address from tick to tick."""

    def __init__(self, look: Look, now: float) -> None:
        self.look = look
        self.state = look.state
        self.since = self.known_since = now
        self.numbers: dict[str, Any] = {}
        self.series = {name: Series(HISTORY_TICKS) for name in WORKER_SERIES}
        self.hits = Ratio(RECENT_TICKS)
        self.loaded = Ratio(RECENT_TICKS)


class Live:
    """The state of one gateway. What counts and `run` belong to its loop, `state` and `decision` to any thread."""

    def __init__(self, router: Router, clock: Clock) -> None:
        self._router = router
        self._clock = clock
        self._started = clock()
        self._tallies: dict[str, list[int]] = {}  # worker -> prompt tokens, cached ones
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=TIMES_MAX)  # (at, seconds)
        self._token_seconds: deque[tuple[float, float]] = deque(maxlen=TIMES_MAX)  # the same
        self._ended = dict.fromkeys(("answers", "failed_answers", "refused_answers"), 0)
        self._lock = threading.Lock()  # of all below
        self._tick = 0
        self._workers: dict[str, _Tracked] = {}
        self._left_out = 0
        self._fleet = {name: Series(HISTORY_TICKS) for name in FLEET_SERIES}
        self._fleet_hits = Ratio(RECENT_TICKS)
        self._fleet_loaded = Ratio(RECENT_TICKS)
        self._errors = Ratio(RECENT_TICKS)
        self._requests = Ratio(RECENT_TICKS, from_zero=False)
        self._output_tokens = Ratio(RECENT_TICKS, from_zero=False)
        self._totals: dict[str, Any] = {}
        self._events = DashboardEvents()
        self._hot = HotPrefixes(secrets.token_bytes(16))
        self._hot.watch(router.scheduler)
        self._said: dict[tuple[int, bool], dict[str, Any]] = {}
        self._answers: dict[int, bytes] = {}  # of this tick, by ticks of history

    # --- on the loop --------------------------------------------------------------------------------------------------

    def placed(self, choice: Choice) -> None:
        """The first news of a choice. What of its prompt was cached is the engine's word, else our estimate."""
        if choice.decision is None:
            return
        tally = self._tallies.setdefault(choice.worker, [0, 0])
        tally[0] += choice.prompt_tokens
        tally[1] += choice.decision.matched_tokens if choice.cached_tokens is None else choice.cached_tokens

    def first_token(self, seconds: float) -> None:
        """A request has its first token, so long after it came."""
        self._first_tokens.append((self._clock(), seconds))

    def answered(self, status: int, context: RequestContext) -> None:
        """A request has its answer. Of what failed, 5xx and 429 (refused) are errors; other 4xx are the client's."""
        self._ended["answers"] += 1
        self._ended["failed_answers"] += status >= 500
        self._ended["refused_answers"] += status == REFUSED
        now = self._clock()
        for choice in context.progress.choices:
            if choice.seconds_per_token is not None:
                self._token_seconds.append((now, choice.seconds_per_token))

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            try:
                await self.tick()
            except Exception as error:  # noqa: BLE001  the router is being closed, or a policy of somebody's own fails
                logger.warning("the live page misses a tick: %s: %s", type(error).__name__, error)
            await asyncio.sleep(TICK_SECONDS)

    async def tick(self) -> None:
        """Note how everything stands now."""
        now, looks, counters, ended = self._clock(), self._looks(), self._router.counters, self._ended
        first_tokens, token_seconds = (
            [seconds for at, seconds in times if now - at <= RECENT_TICKS * TICK_SECONDS]
            for times in (self._first_tokens, self._token_seconds)
        )
        errors = ended["failed_answers"] + ended["refused_answers"]
        recent = Recent(
            first_tokens, token_seconds, counters.requests, counters.output_tokens, ended["answers"], errors
        )
        totals = {**{name: getattr(counters, name) for name in _COUNTERS}, **ended}
        await asyncio.to_thread(self._digest, now, looks, recent, totals)

    def _looks(self) -> list[Look]:
        workers = self._router.fleet.workers
        known = {worker.worker_id for worker in workers.values()}
        self._tallies = {name: tally for name, tally in self._tallies.items() if name in known}
        return [
            Look(
                address, w.worker_id, w.state, w.why, w.epoch, w.welcome, w.pong, w.waiting,
                w.counters.restarts, w.counters.losses, *self._tallies.get(w.worker_id, (0, 0)),
            )
            for address, w in workers.items()
        ]  # fmt: skip

    # --- in a thread --------------------------------------------------------------------------------------------------

    def _digest(self, now: float, looks: list[Look], recent: Recent, totals: Mapping[str, int]) -> None:
        stats = self._router.scheduler.stats()
        with self._lock:
            self._tick += 1
            self._answers = {}
            shown = looks[:WORKERS_MAX]
            self._left_out = len(looks) - len(shown)
            self._take_workers(now, shown, stats["workers"])
            self._events.plans(stats["plans"], now)
            self._events.policy(stats["policy"], now)
            self._take_fleet(now, shown, recent)
            records = stats.get("records") or {}
            self._totals = {**totals, "live_requests": stats["live_requests"], "reasons": stats["reasons"]}
            self._totals |= {"policy": stats["policy"], "recorded": records.get("made")}
            self._totals |= {"groups": self._router.scheduler.core.groups.live}
            self._totals |= {"index_bytes": stats["tree"]["bytes_used"]}

    def _take_workers(self, now: float, looks: Iterable[Look], accounts: Mapping[str, Any]) -> None:
        before, self._workers = self._workers, {}
        for look in looks:
            tracked = before.pop(look.address, None) or _Tracked(look, now)
            self._workers[look.address] = tracked
            account = accounts.get(look.worker_id)
            state = "draining" if account is not None and account["draining"] and look.state == "ready" else look.state
            if state != tracked.state:
                self._events.worker(look.worker_id or look.address, tracked.state, state, look.why, now)
                tracked.state, tracked.since = state, now
            elif look.epoch != tracked.look.epoch and tracked.look.epoch:
                self._events.worker(look.worker_id, state, state, "it was restarted", now)
            tracked.look = look
            self._take_numbers(tracked, account, now)
        for address, gone in before.items():
            self._events.worker(gone.look.worker_id or address, gone.state, "removed", "", now)

    def _take_numbers(self, tracked: _Tracked, account: Mapping[str, Any] | None, now: float) -> None:
        look, history = tracked.look, self._router.scheduler.config.history_seconds
        up = look.state in ("ready", "suspect", "draining")
        pong = look.pong if up else None
        capacity = look.welcome.kv_capacity_tokens if look.welcome is not None else 0
        observed = max(OBSERVED_SECONDS_MIN, min(history, now - tracked.known_since))
        load = account["load_seconds"] / observed if account is not None and up else 0.0
        cached = account["cached_tokens"] if account is not None else 0
        away = account["away_tokens"] if account is not None else 0
        used = max(pong.kv_used_tokens, pong.kv_cached_tokens) if pong is not None else cached - away
        waiting = look.waiting if up else 0
        hit = tracked.hits.push(look.cached_tokens, look.prompt_tokens)
        kv = min(used / capacity, 1.0) if capacity and up else 0.0
        tracked.numbers = {
            "load": load,
            "load_seconds": account["load_seconds"] if account is not None else 0.0,
            "waiting": waiting,
            "running": pong.running if pong is not None else 0,
            "live_requests": account["live_requests"] if account is not None else 0,
            "kv": kv,
            "kv_capacity_tokens": capacity,
            "cached_tokens": cached,
            "away_tokens": away,
            "hit": hit,
            "loaded": _part(tracked.loaded.push(_loaded_tokens(account), look.cached_tokens)),
            "loaded_tokens": _loaded_tokens(account),
            "host_token_seconds": account["host_token_seconds"] if account is not None else None,
            "disk_token_seconds": account["disk_token_seconds"] if account is not None else None,
            "cache_accuracy": account["cache_accuracy"] if account is not None else None,
        }
        for name in WORKER_SERIES:
            tracked.series[name].push(tracked.numbers[name])

    def _take_fleet(self, now: float, looks: list[Look], recent: Recent) -> None:
        numbers = [tracked.numbers for tracked in self._workers.values()]
        prompts = sum(look.prompt_tokens for look in looks)
        cached = sum(look.cached_tokens for look in looks)
        first_tokens, token_seconds = sorted(recent.first_tokens), sorted(recent.seconds_per_token)
        values = {
            "requests_per_second": self._requests.push(recent.requests, now),
            "errors": self._errors.push(recent.errors, recent.answers),
            "output_tokens_per_second": self._output_tokens.push(recent.output_tokens, now),
            "hit": self._fleet_hits.push(cached, prompts),
            "loaded": _part(self._fleet_loaded.push(sum(one["loaded_tokens"] for one in numbers), cached)),
            "first_token_p50": percentile(first_tokens, 0.5),
            "first_token_p99": percentile(first_tokens, 0.99),
            "seconds_per_token_p50": percentile(token_seconds, 0.5),
            "seconds_per_token_p99": percentile(token_seconds, 0.99),
            "waiting": sum(one["waiting"] for one in numbers),
            "running": sum(one["running"] for one in numbers),
        }
        for name, value in values.items():
            self._fleet[name].push(value)

    # --- answers ------------------------------------------------------------------------------------------------------

    def state(self, after: int | None, gateway: Mapping[str, Any]) -> bytes:
        """Everything as JSON, with the history after tick `after`; None for no history. `gateway` is its `info`."""
        with self._lock:
            count = 0 if after is None else max(0, min(self._tick - after, HISTORY_TICKS))
            if count not in self._answers:
                if len(self._answers) >= ANSWERS_MAX:
                    self._answers.clear()
                self._answers[count] = msgspec.json.encode(self._state(count, gateway))
            return self._answers[count]

    def decision(self, sequence: int) -> dict[str, Any] | None:
        """One decision with every worker's terms; None if it is not among those kept."""
        records = self._router.scheduler.records()
        record = next((one for one in reversed(records) if one.sequence == sequence), None)
        if record is None:
            return None
        return {**_summary(record), "seconds_ago": self._clock() - record.decided_at, "terms": record.workers}

    def _state(self, count: int, gateway: Mapping[str, Any]) -> dict[str, Any]:
        scheduler, now = self._router.scheduler, self._clock()
        records = scheduler.records()
        return {
            "tick": self._tick,
            "tick_seconds": TICK_SECONDS,
            "history_ticks": HISTORY_TICKS,
            "uptime_seconds": now - self._started,
            "window_seconds": scheduler.config.history_seconds,
            "gateway": {**gateway, "records_per_second": RECORDS_PER_SECOND},
            "totals": self._totals,
            "fleet": {name: (series.last(1) or [UNKNOWN])[0] for name, series in self._fleet.items()},
            "fleet_history": {name: series.last(count) for name, series in self._fleet.items()},
            "workers": [self._card(tracked, count, now) for tracked in self._workers.values()],
            "workers_left_out": self._left_out,
            "prefixes": self._hot.top(scheduler, PREFIXES_SHOWN, without=self._gone()),
            "events": self._events.latest(now),
            "events_total": self._events.total,
            "decisions": self._decisions(records[-DECISIONS_SHOWN:], now),
        }

    def _gone(self) -> frozenset[str]:
        """Workers whose caches are of no use now."""
        return frozenset(one.look.worker_id for one in self._workers.values() if one.state in GONE)

    def _decisions(self, records: Sequence[DecisionRecord], now: float) -> list[dict[str, Any]]:
        """The latest first. What was said of a record is kept, for on a large fleet it is long to say."""
        known, self._said = self._said, {}
        for record in reversed(records):
            key = (record.sequence, record.outcome is None)
            self._said[key] = known.get(key) or _summary(record)
            self._said[key]["seconds_ago"] = now - record.decided_at
        return list(self._said.values())

    def _card(self, tracked: _Tracked, count: int, now: float) -> dict[str, Any]:
        look = tracked.look
        return {
            "id": look.worker_id or look.address,
            "address": look.address,
            "state": tracked.state,
            "why": look.why,
            "state_seconds": now - tracked.since,
            "engine": look.welcome.engine if look.welcome is not None else "",
            "model": look.welcome.model if look.welcome is not None else "",
            "restarts": look.restarts,
            "losses": look.losses,
            **tracked.numbers,
            "history": {name: series.last(count) for name, series in tracked.series.items()},
        }


_DECIDED = ("policy", "reason", "worker", "runner_up", "margin", "prompt_tokens")
_BECAME = ("chosen", "session", "outcome", "late_seconds", "regret_seconds", "lost_tokens")
_COUNTERS = ("requests", "finished", "failed", "cancelled", "resumed", "queue_full", "refused", "shed", "output_tokens")


def _loaded_tokens(account: Mapping[str, Any] | None) -> int:
    """Of a worker's hits so far, those that lay in host memory or on disk."""
    return account["host_loaded_tokens"] + account["disk_loaded_tokens"] if account is not None else 0


def _part(ratio: float) -> float:
    """A ratio of what decisions counted on to what engines report as a part of it: they may differ."""
    return ratio if math.isnan(ratio) else min(max(ratio, 0.0), 1.0)


def _summary(record: DecisionRecord) -> dict[str, Any]:
    """A decision in one row: the chosen worker's terms, and what came of it."""
    return {
        "sequence": record.sequence,
        "request_id": str(record.request_id),
        **{name: getattr(record, name) for name in _DECIDED},
        "candidates": sum(terms.candidate for terms in record.workers),
        "workers": len(record.workers),
        **{name: getattr(record, name) for name in _BECAME},
    }
