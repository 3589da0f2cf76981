"""Leases that cannot leak: a booking for the length of a block, and the ways in which a lost one comes back.

Owns what ends a booking whose own call never comes: leaving the block (`Lease`), its time to live (`give_back`), and
the word of the engine that does not have the request (`reconcile`). Where an engine reports only how many it has, the
difference is shown and nothing is ended (`Drift`). What a booking is, and how it ends, is in `_placement/bookings.pyx`
and `_placement/request_api.pyx`.

A booking is distinguished from a later one under the same request id by its key, which is never used again. Whoever
acts on one holds the writers' lock, compares, and then calls: the id cannot be booked anew in between.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from .._core.dict_keys import key_value
from .._placement.bookings import DecisionCore
from .._placement.decision import Decision
from .._placement.request_api import RequestApi, RequestHandle, finite_time, hashable, iterable, request_id_of
from ..errors import InvalidInput, UnknownWorker
from ..lazy_typing import TYPE_CHECKING, Any, dataclass
from .peer_bookings import Cancel, is_peer

if TYPE_CHECKING:
    from .._core.token_types import TokenIds


class Lease(RequestHandle):
    """One request's booking, for the length of a `with` or `async with` block. Made by `GlobalScheduler.lease`.

    Entering it schedules the request, and raises what `schedule` raises; then nothing is booked. Leaving the block ends
    the booking in every case: after `finish` there is nothing left to do, else it is cancelled, whether by an error,
    by a cancelled task or for want of a `finish`. It can be entered once. Neither entering nor leaving suspends a
    coroutine, so no cancellation can come between the booking and the block.

    A call about a booking that has ended returns False and is counted (`late_calls`), as with the scheduler's own
    calls; one that has expired, or whose id another request has taken since, is left alone. Calls before the block
    raise InvalidInput. Thread-safe. Where a scheduler asks for a request's id a lease will do.
    """

    __slots__ = ("_asked", "_calls", "_core", "_decision", "_entered", "_excluded", "_key", "_over", "_token_ids")

    def __init__(self, calls: RequestApi, token_ids: TokenIds, exclude: Iterable[str], asked: dict[str, Any]) -> None:
        self._calls, self._core = calls, calls.core
        self._token_ids = token_ids  # read again by `reroute`
        self._excluded = list(iterable("exclude", exclude))
        self._asked = asked
        self._decision: Decision | None = None
        self._key: int | None = None
        self._entered = self._over = False

    # --- the block ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Lease:
        with self._core.tree:
            if self._entered:
                raise InvalidInput("a lease can be entered once; ask the scheduler for another one")
            self._entered = True
        self._book(self._excluded or ())
        return self

    def __exit__(self, *failure: object) -> None:
        with self._core.tree:
            self._over = True
            if self.live:
                self._calls.cancel(self.request_id)

    async def __aenter__(self) -> Lease:
        return self.__enter__()

    async def __aexit__(self, *failure: object) -> None:
        self.__exit__()

    # --- inside it ----------------------------------------------------------------------------------------------------

    @property
    def decision(self) -> Decision:
        """Where the request went, by its last booking."""
        if self._decision is None:
            raise InvalidInput("nothing is booked: use a lease as `with scheduler.lease(...) as lease`")
        return self._decision

    @property
    def request_id(self) -> Hashable:
        """The request's id, the same after `reroute`."""
        return self.decision.request_id

    @property
    def worker(self) -> str:
        """The worker of the last booking."""
        return self.decision.worker

    @property
    def live(self) -> bool:
        """Whether the booking has not ended: finished, cancelled, expired, or given back by `reconcile`."""
        return self._key is not None and self._core.leases.get(self._core.live_key(self.request_id)) == self._key

    def first_token(self, *, cached_tokens: int | None = None) -> bool:
        """As `GlobalScheduler.first_token`, of this booking. Returns False where it has ended. O(1) more."""
        return self._report(self._calls.first_token, cached_tokens=cached_tokens)

    def renew(self) -> bool:
        """As `GlobalScheduler.renew`: the time to live begins anew. Returns False where it has ended. O(1) more."""
        return self._report(self._calls.renew)

    def finish(self, *, output_tokens: int | None = None, cached_tokens: int | None = None) -> bool:
        """As `GlobalScheduler.finish`. The lease is over; leaving the block does nothing more. Returns False where the
        booking has ended. O(1) more."""
        return self._end(self._calls.finish, output_tokens=output_tokens, cached_tokens=cached_tokens)

    def cancel(self) -> bool:
        """As `GlobalScheduler.cancel`. The lease is over before the block is. Returns False where the booking has
        ended. O(1) more."""
        return self._end(self._calls.cancel)

    def reroute(self, *, exclude: Iterable[str] = ()) -> Decision:
        """Give the booking back and book the same prompt anew, on none of the workers it has been on or was asked to
        avoid, nor on those in `exclude`; of the former, workers that have left are forgotten. Returns the new Decision.
        Costs what `schedule` does, O(tokens + workers).

        A booking that has expired meanwhile is simply made anew. Raises InvalidInput once the lease is over and
        UnknownWorker for a name in `exclude`, and then nothing has changed; else what `schedule` raises (NoWorkers when
        none is left), and then nothing is booked and `reroute` may be tried again.
        """
        chosen, calls = list(iterable("exclude", exclude)), self._calls
        with self._core.tree:
            decision, names = self.decision, [name for name in self._core.names if name is not None]
            if self._over:
                raise InvalidInput(f"the lease of request {decision.request_id!r} is over")
            strange = [name for name in chosen if name not in names]
            if strange:
                raise UnknownWorker(f"no worker {strange[0]!r}, which exclude names")
            if self.live:
                calls.cancel(decision.request_id)
            tried = dict.fromkeys([*self._excluded, decision.worker, *chosen])
            self._excluded = [name for name in tried if name in names]
            self._asked["request_id"] = decision.request_id
            return self._book(self._excluded)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _book(self, exclude: Iterable[str]) -> Decision:
        decision = self._calls.schedule(self._token_ids, exclude=exclude, **self._asked)
        self._decision = decision
        self._key = self._core.leases.get(self._core.live_key(decision.request_id))
        return decision

    def _report(self, call: Callable[..., bool], **reported: int | None) -> bool:
        with self._core.tree:
            request_id = self.request_id
            if self.live:
                return call(request_id, **reported)
            self._core.late_calls += 1
            return False

    def _end(self, call: Callable[..., bool], **reported: int | None) -> bool:
        with self._core.tree:
            ended = self._report(call, **reported)
            self._over = True
            return ended


# --- bookings that nobody ends ----------------------------------------------------------------------------------------


def give_back(core: DecisionCore, cancel: Cancel, keys: Iterable[Hashable], before: float, now: float) -> int:
    """Cancel those of the requests, by key, that were neither booked nor renewed since `before`; returns how many."""
    return sum(_give_back_unseen(core, cancel, key, before, now) for key in keys)


def _give_back_unseen(core: DecisionCore, cancel: Cancel, key: Hashable, before: float, now: float) -> bool:
    """Cancel a request, unless it has ended, was renewed, or its id was booked anew since it was listed. The lock is
    held for this one only, so that no decision waits for a long list."""
    with core.tree:
        return core.seen_at(key) < before and cancel(key, now)


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """What `GlobalScheduler.reconcile` found. `given_back`: ids of the requests whose booking it ended, because the
    engine does not have them. `unknown`: ids of requests the engine has, and that are booked on another worker or not
    at all; nobody waits for them there, so the caller should abort them at the engine."""

    given_back: tuple[Hashable, ...]
    unknown: tuple[Hashable, ...]


def reconcile(
    core: DecisionCore,
    cancel: Cancel,
    worker_id: str,
    live_request_ids: Iterable[Hashable],
    before: float,
    now: float,
) -> Reconciliation:
    """Bring the bookings of a worker in line with what its engine has: those it has are renewed, the others cancelled
    unless they were seen since `before`. Bookings for other routers are renewed only: their end is those routers' to
    report. O(live requests + ids), the lock held for one cancellation at a time."""
    with core.tree:
        peers = _peers_on(core, worker_id)
        # Hash and equality of ids run here, and only here.
        named = [(one, core.live_key(one), peers.get(one, ())) for one in dict.fromkeys(live_request_ids)]
        if worker_id not in core.names:
            raise UnknownWorker(f"worker {worker_id!r} was removed")
        reported = {key for _, key, _ in named if key is not None}
        live = core.live_on(core.names.index(worker_id))
        missing = [key for key in live if key not in reported and not is_peer(key)]
        strange = {key for key in reported if _is_unknown(core, worker_id, key)}
        for key in (reported - strange).union(*(theirs for _, _, theirs in named)):
            core.renew(key, now)
    unknown = tuple(one for one, key, theirs in named if not theirs and (key is None or key in strange))
    given_back = tuple(key_value(key) for key in missing if _give_back_unseen(core, cancel, key, before, now))
    return Reconciliation(given_back, unknown)


def _peers_on(core: DecisionCore, worker_id: str) -> dict[Hashable, list[Hashable]]:
    """Keys of the bookings on a worker for other routers, by the ids that its engine knows their requests by."""
    found: dict[Hashable, list[Hashable]] = {}
    for key in core.live_on(core.names.index(worker_id)) if worker_id in core.names else ():
        if is_peer(key):
            found.setdefault(key[3], []).append(key)
    return found


def _is_unknown(core: DecisionCore, worker_id: str, key: Hashable) -> bool:
    """Whether a request an engine has is not live, or booked on another worker. One that is just being placed, or whose
    worker was removed, may well be this engine's."""
    try:
        return core.lease(key)["worker"] not in (None, worker_id)
    except KeyError:
        return True


@dataclass(slots=True)
class Drift:
    """What an engine's own count of its requests says against the bookings. `requests`: the engine's, less those
    booked, by the last report; `since`: from when on every report has disagreed in the same direction."""

    reports: int = 0
    requests: int = 0
    since: float = 0.0
    reported_at: float = 0.0

    def update(self, engine_requests: int, booked_requests: int, now: float) -> int:
        """A report came; returns the difference."""
        difference = engine_requests - booked_requests
        if difference * self.requests <= 0:
            self.since = now
        self.reports, self.requests, self.reported_at = self.reports + 1, difference, now
        return difference

    def state(self) -> tuple[int, int, float, float]:
        """All of it as plain values, for snapshots."""
        return int(self.reports), int(self.requests), float(self.since), float(self.reported_at)

    @classmethod
    def restored(cls, state: tuple[int, int, float, float]) -> Drift:
        """What `state` said. Raises ValueError, TypeError or InvalidTime."""
        reports, requests, since, reported_at = state
        if type(reports) is not int or type(requests) is not int or reports < 0:
            raise ValueError("an engine's reports are no number")
        return cls(reports, requests, finite_time("since", since), finite_time("reported_at", reported_at))

    def stats(self) -> dict[str, float]:
        """For the worker's part of `GlobalScheduler.stats`."""
        seconds = max(0.0, self.reported_at - self.since) if self.requests else 0.0
        return {"load_reports": self.reports, "drift_requests": self.requests, "drift_seconds": seconds}


# --- arguments --------------------------------------------------------------------------------------------------------


def named_request(value: Hashable) -> Hashable:
    """A request's id, by that or by its Decision or lease. Raises InvalidInput for what can be none."""
    value = request_id_of(value)
    hashable("request_id", value)
    return value


def request_ids_in(name: str, values: Any) -> list[Hashable]:
    """Request ids as a list. Raises InvalidInput for what is no collection, and for one that cannot be an id."""
    found = [request_id_of(one) for one in iterable(name, values)]
    for one in found:
        hashable(f"each of {name}", one)
    return found
