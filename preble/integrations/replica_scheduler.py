"""A deployment's replicas as the workers of a `GlobalScheduler`, and the bookings of the calls they are given. Owns
which replica a call is booked on and when that booking ends. Knows no framework, no event loop and no socket; replicas
are names and metadata here, so that all of it runs in a test without a cluster.

    place     -> booked on a replica          routed     -> it went there, or elsewhere: the booking follows
    completed -> the booking ends             a replica leaves -> its bookings end
    expired   -> no word for `lease_seconds`: `tick` ends it, here and in the scheduler
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..clock import Clock, monotonic
from ..config import SchedulerConfig
from ..errors import InvalidConfig, InvalidInput, NoWorkers, QueueFull
from ..scheduler import GlobalScheduler
from ..types import WorkerSpec, check_int
from .booking_exchange import Note
from .prompt_extractors import Tokens

TICK_SECONDS = 1.0
UNREPORTED_SECONDS = 10.0  # of a call whose end nobody reports: about as long as an answer takes
PEER_SECONDS = 300.0  # of another router's call whose end is not reported: that router may be gone


@dataclass(frozen=True, slots=True)
class ReplicaMetadata:
    """What a replica reports about its cache, None where it does not. `events_endpoint` and `replay_endpoint` are
    ZeroMQ endpoints where its engine publishes cache events, "" without."""

    kv_capacity_tokens: int | None = None
    block_size: int | None = None
    events_endpoint: str = ""
    replay_endpoint: str = ""
    events_topic: str = ""


def metadata_of(*given: Mapping[str, Any]) -> ReplicaMetadata:
    """Metadata from what a replica publishes (Ray: `record_replica_metadata`, `record_routing_stats`), later ones
    first.

    Reads `kv_capacity_tokens` and `block_size`, and the endpoints from `kv_event_metadata`, as Ray Serve LLM writes
    them, or from the top. Raises `InvalidInput` naming a field that is not what it should be.
    """
    fields: dict[str, Any] = {}
    for mapping in given:
        nested = mapping.get("kv_event_metadata")
        fields.update({**mapping, **(nested if isinstance(nested, Mapping) else {})})
    return ReplicaMetadata(
        _number(fields, "kv_capacity_tokens", 2**31 - 1),
        _number(fields, "block_size", 65_536),
        _endpoint(fields, "endpoint"),
        _endpoint(fields, "replay_endpoint"),
        str(fields.get("topic") or ""),
    )


def _number(fields: Mapping[str, Any], name: str, high: int) -> int | None:
    value = fields.get(name)
    return None if value is None else check_int(f"{name} of a replica", value, 1, high, InvalidInput)


def _endpoint(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name) or ""
    if not isinstance(value, str) or (value and "://" not in value):
        raise InvalidInput(f"{name} of a replica must be a ZeroMQ endpoint, got {value!r}")
    return value


@dataclass(slots=True, eq=False)
class CallSet:
    """Calls made within one outer request share its id, so the end of one may be taken for another's. Once it is known
    of all of them where they went, and as many have ended at each replica as went there, all are over."""

    open: list[Ticket] = field(default_factory=list)  # those that have a booking
    on_their_way: set[Ticket] = field(default_factory=set)  # those of which is not known where they went
    running: Counter[str] = field(default_factory=Counter)  # went there, less ended there, by replica

    def are_over(self) -> bool:
        return not self.on_their_way and all(count <= 0 for count in self.running.values())


@dataclass(slots=True, eq=False)
class Ticket:
    """One call on its way: its tokens, and the booking it has, if any. `left` are replicas that it was booked on and
    that did not take it. `silent_seconds`: after so long without a word its call is taken to be over, None where its
    end is sure to be reported. `peer`: the router whose call it is, "" for one of this router's."""

    call_id: str
    tokens: Tokens
    booking: int | None = None
    replica: str = ""
    routed: bool = False
    silent_seconds: float | None = None
    peer: str = ""
    left: set[str] = field(default_factory=set)


class ReplicaScheduler:
    """Places calls on replicas. Thread-safe: completions may come from any thread.

    `policy`, `cost_model`, `seed` and `config` are those of `GlobalScheduler`; `kv_capacity_tokens` and `block_size`
    those of a replica that reports none. `publish` is given each booking of this router's own calls that begins or
    ends, from the thread in which it does. Raises `InvalidConfig`.
    """

    def __init__(
        self,
        *,
        policy: str = "e2",
        cost_model: str | None = None,
        config: SchedulerConfig | None = None,
        kv_capacity_tokens: int = 200_000,
        block_size: int = 1,
        seed: int = 0,
        clock: Clock = monotonic,
        publish: Callable[[Note], object] | None = None,
    ) -> None:
        self._clock = clock
        self._publish = publish
        self.scheduler = GlobalScheduler(
            (), policy=policy, cost_model=cost_model, config=config, clock=clock, seed=seed
        )
        self._defaults = WorkerSpec("default", kv_capacity_tokens=kv_capacity_tokens, block_size=block_size)
        self.counters: Counter[str] = Counter()
        self._specs: dict[str, WorkerSpec] = {}
        self._tickets: OrderedDict[int, tuple[Ticket, float]] = OrderedDict()  # by booking, oldest first
        self._by_call: dict[str, CallSet] = {}  # while one of them has a booking
        self._numbers = itertools.count(1)
        self._next_tick = clock() + TICK_SECONDS
        self._ticking = False
        self._lock = threading.RLock()

    # --- replicas -----------------------------------------------------------------------------------------------------

    def update(self, replicas: Mapping[str, ReplicaMetadata]) -> None:
        """These are the replicas now. Those that left are forgotten, with their cache and their bookings. One whose
        capacity or block size is another than was known begins anew, since the estimate of its cache fits
        neither."""
        with self._lock:
            for name in [name for name in self._specs if name not in replicas]:
                self.remove(name)
            for name, metadata in replicas.items():
                spec = self._spec(name, metadata)
                if self._specs.get(name) == spec:
                    continue
                if name in self._specs:
                    self.counters["replica_restated"] += 1
                    self.remove(name)
                self.scheduler.add_worker(spec)
                self._specs[name] = spec

    def remove(self, name: str) -> int:
        """A replica is gone; returns how many bookings went with it. A name that is not known is no error."""
        with self._lock:
            if self._specs.pop(name, None) is None:
                return 0
            lost = [ticket for ticket, _ in self._tickets.values() if ticket.replica == name]
            for ticket in lost:
                self._give_back(ticket)
            self.scheduler.remove_worker(name)
            self.counters["replicas_removed"] += 1
            self.counters["bookings_of_removed"] += len(lost)
            return len(lost)

    def _spec(self, name: str, metadata: ReplicaMetadata) -> WorkerSpec:
        capacity = metadata.kv_capacity_tokens or self._defaults.kv_capacity_tokens
        return WorkerSpec(
            name, kv_capacity_tokens=capacity, block_size=metadata.block_size or self._defaults.block_size
        )

    # --- a call's life ------------------------------------------------------------------------------------------------

    def place(self, ticket: Ticket, candidates: Iterable[str]) -> str:
        """Book a call on one of the candidates, and return which. A booking it had is given back first: it was not
        taken there, and is placed elsewhere if there is an elsewhere.

        Raises what `GlobalScheduler.schedule` raises (`NoWorkers` without candidates); then nothing is booked.
        """
        with self._lock:
            if ticket.booking is not None:
                ticket.left.add(ticket.replica)
                self._give_back(ticket)
            allowed = set(candidates) & self._specs.keys()
            allowed = allowed - ticket.left or allowed
            return self._book(ticket, allowed)

    def routed(self, ticket: Ticket, replica: str) -> None:
        """The call was taken by this replica. If it was booked on another one, the booking follows it."""
        with self._lock:
            mine = self._by_call.get(ticket.call_id, CallSet())
            ended_first = mine.running[replica] < 0
            if ticket in mine.on_their_way:
                mine.on_their_way.remove(ticket)
                mine.running[replica] += 1
            if ticket.booking is None:
                self.counters["routed_unbooked"] += 1
            elif replica == ticket.replica or not ended_first:  # else the booking stands for the sibling that was ended
                if replica != ticket.replica and replica in self._specs:
                    self._move(ticket, replica)
                ticket.routed = True
            self._end_if_over(ticket.call_id)

    def completed(self, replica: str, call_id: str) -> bool:
        """A call is over, whether it went well or not; True if that ended a booking.

        A replica that refuses a call completes it too, perhaps after the call was booked elsewhere: that ends nothing.
        Among calls of one id on one replica one that is known to have gone there ends, the oldest first.
        """
        with self._lock:
            mine = self._by_call.get(call_id, CallSet())
            here = sorted((one for one in mine.open if one.replica == replica), key=lambda one: not one.routed)
            # Else it was sent, without a word, to a replica that it was not booked on.
            elsewhere = (one for one in mine.open if not one.routed and replica not in one.left)
            ticket = next(itertools.chain(here, elsewhere), None)
            known = {*mine.open, *mine.on_their_way}
            if ticket is None and mine.running[replica] <= 0 and all(replica in one.left for one in known):
                self.counters["completed_unbooked"] += 1
                return False
            mine.running[replica] -= 1
            if ticket is not None:
                self._finish(ticket)
                ticket.left.add(replica)  # of use where it was no end but a refusal, and the call is placed again
            self.counters["completed" if ticket is not None else "completed_unbooked"] += 1
            self._end_if_over(call_id)
            return ticket is not None

    def cancel(self, ticket: Ticket) -> None:
        """The call will not be made: give its booking back, if it has one."""
        with self._lock:
            if ticket.booking is not None:
                self._give_back(ticket)
            self._by_call.get(ticket.call_id, CallSet()).on_their_way.discard(ticket)
            self._end_if_over(ticket.call_id)

    def peer(self, router: str, note: Note) -> None:
        """Book what another router has booked, or end it, where its replica is known here."""
        call_id = f"{router}:{note.booking}"
        with self._lock:
            if note.tokens is None:
                for ticket in list(self._by_call.get(call_id, CallSet()).open):
                    self._give_back(ticket) if note.given_back else self._finish(ticket)
            elif note.replica in self._specs and call_id not in self._by_call:
                ticket = Ticket(call_id, note.tokens, silent_seconds=PEER_SECONDS, peer=router)
                try:
                    self._book(ticket, {note.replica})
                    self.counters["peer_bookings"] += 1
                except (NoWorkers, QueueFull, InvalidInput):
                    self.counters["peer_bookings_refused"] += 1

    def _book(self, ticket: Ticket, allowed: set[str]) -> str:
        number, tokens = next(self._numbers), ticket.tokens
        decision = self.scheduler.schedule(
            tokens.token_ids,
            request_id=number,
            namespace=tokens.namespace,
            max_new_tokens=tokens.max_new_tokens,
            exclude=self._specs.keys() - allowed,
        )
        ticket.booking, ticket.replica, ticket.routed = number, decision.worker, False
        self._tickets[number] = (ticket, self._clock())
        mine = self._by_call.setdefault(ticket.call_id, CallSet())
        mine.open.append(ticket)
        mine.on_their_way.add(ticket)
        if self._publish is not None and not ticket.peer:
            self._publish(Note(number, decision.worker, tokens))
        return decision.worker

    def _move(self, ticket: Ticket, replica: str) -> None:
        """Book it where it went."""
        mine = self._by_call[ticket.call_id]
        self.counters["booking_moved"] += 1
        ticket.left.add(ticket.replica)
        self._give_back(ticket)
        self._book(ticket, {replica})
        now = self._by_call[ticket.call_id]  # others than before, if it was the only one
        now.running, now.on_their_way = mine.running, mine.on_their_way
        now.on_their_way.discard(ticket)

    def _end_if_over(self, call_id: str) -> None:
        """End what stayed open because one's end was taken for another's."""
        mine = self._by_call.get(call_id)
        if mine is not None and mine.are_over():
            for ticket in list(mine.open):
                self._finish(ticket)
                self.counters["completed"] += 1

    def _finish(self, ticket: Ticket) -> None:
        self.scheduler.finish(ticket.booking)
        self._forget(ticket, given_back=False)

    def _give_back(self, ticket: Ticket) -> None:
        self.scheduler.cancel(ticket.booking)
        self._forget(ticket, given_back=True)

    def _forget(self, ticket: Ticket, *, given_back: bool) -> None:
        if ticket.booking is not None:
            del self._tickets[ticket.booking]
            if self._publish is not None and not ticket.peer:
                self._publish(Note(ticket.booking, ticket.replica, given_back=given_back))
        mine = self._by_call[ticket.call_id]
        mine.open.remove(ticket)
        if given_back:
            mine.on_their_way.discard(ticket)
        if not mine.open:
            del self._by_call[ticket.call_id]
        ticket.booking = None

    # --- background ---------------------------------------------------------------------------------------------------

    def tick_due(self) -> bool:
        """Whether `tick` should be called now; True once, then not for a second, nor before that call has ended."""
        with self._lock:
            now = self._clock()
            if self._ticking or now < self._next_tick:
                return False
            self._ticking, self._next_tick = True, now + TICK_SECONDS
            return True

    def tick(self) -> None:
        """The scheduler's background work, and the end of bookings that nobody ended. In a thread of its own: decisions
        wait for its slices only."""
        try:
            self._expire()
            self.scheduler.tick()
        finally:
            self._ticking = False

    def _expire(self) -> None:
        """End bookings that are over as far as anybody knows. Those given back were perhaps never made."""
        with self._lock:
            now, lease_seconds = self._clock(), self.scheduler.config.lease_seconds
            for ticket, since in list(self._tickets.values()):
                if ticket.silent_seconds is not None and since + ticket.silent_seconds <= now:
                    self._finish(ticket)
                    self.counters["bookings_ended_unreported"] += 1
                elif since + lease_seconds <= now:
                    self._give_back(ticket)
                    self.counters["bookings_expired"] += 1

    def stats(self) -> dict[str, Any]:
        """Counters, bookings that are open, and the scheduler's `stats`. Safe to keep."""
        with self._lock:
            return {
                **self.counters,
                "open_bookings": len(self._tickets),
                "replicas": sorted(self._specs),
                "scheduler": self.scheduler.stats(),
            }

    def check(self) -> None:
        """Assert that both sets of bookings agree. O(everything); for tests and doubt."""
        with self._lock:
            assert self._specs.keys() == self.scheduler.workers.keys()
            assert self.scheduler.stats()["live_requests"] == len(self._tickets)
            by_call = [ticket.booking for mine in self._by_call.values() for ticket in mine.open]
            assert sorted(self._tickets) == sorted(number for number in by_call if number is not None)
        self.scheduler.check()


def scheduler_config(given: Mapping[str, Any] | None) -> SchedulerConfig:
    """A `SchedulerConfig` from JSON. Raises `InvalidConfig` naming a field that there is not."""
    try:
        return SchedulerConfig(**(given or {}))
    except TypeError as error:
        raise InvalidConfig(f"config: {error}") from error
