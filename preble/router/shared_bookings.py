"""What a router reports of its requests to its siblings, other routers of the same deployment, and what it makes of
their reports. Owns what runs here and there, the order of messages, and their bytes; no socket, no clock.

Attached servers do not report whose requests they have, so the routers before them report to each other. A report is
what a `preble worker` would have said: `RequestPlaced`, `RequestPrefilled`, `RequestEnded`. Booking is the scheduler's
(`peer_bookings`).

    SharedBookings    this router's side: what is new since the last message, and all that runs, for who missed some
    SiblingBookings   one sibling as it is known here. Messages are numbered: one that comes again is passed by, a hole
                      is mended by a snapshot, which is all that runs there. A router's id is made at its start, so
                      another id is another life, and what the earlier one had booked is given back

Namespaces travel without the part that names the worker's model: the first model that a router meets needs no name
there, and routers meet their workers in different orders. Each puts in its own part (`worker_space`).

Nothing that a sibling says is fatal: it is counted, and changes no more than its own bookings. Not thread-safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import DecodeError, Meta, Struct
from msgspec.msgpack import Decoder, Encoder

from ..errors import InvalidInput, PrebleError, ProtocolError, UnknownWorker
from ..transport import wire
from ..transport.messages import EVENTS_MAX, FRAME_BYTES_MAX, INT31, Events, Id, Number
from ..transport.namespaces import encode_namespace
from ..types import RequestEnded, RequestPlaced, RequestPrefilled, Role

Report: TypeAlias = RequestPlaced | RequestPrefilled | RequestEnded
ReportsByWorker: TypeAlias = dict[str, list[Report]]

NEWS_MAX = 4096  # reports that wait for the next message
NEWS_BYTES_MAX = 2 << 20
SNAPSHOT_BYTES_MAX = 48 << 20
MESSAGE_BYTES_MAX = SNAPSHOT_BYTES_MAX + FRAME_BYTES_MAX
PEERS_MAX = 65_536  # bookings for one sibling: what its router may have live
REPORT_BYTES = 64  # of a report beside its token ids and namespace, about
COUNTED = (
    *("sent", "left_out", "received", "refused", "unknown_worker", "over_bound"),
    *("lost", "doubled", "malformed", "snapshots_sent", "snapshots_received", "given_back"),
)

_KINDS = (RequestPlaced, RequestPrefilled, RequestEnded)
_EVENTS_ONLY: frozenset[type] = frozenset((Events,))


# --- bytes ------------------------------------------------------------------------------------------------------------


class SiblingMessage(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """One message of a router: reports by worker, each lot as the frame in which a worker would send it. Of reports
    `number` is its own, of a snapshot that of the message that follows it."""

    router_id: Id
    number: Number
    lots: Annotated[tuple[tuple[Id, bytes], ...], Meta(max_length=EVENTS_MAX)] = ()
    version: Literal[1] = 1

    def reports(self) -> Iterator[tuple[str, Report]]:
        """Each report with its worker. Raises `ProtocolError` for what is no report of this router."""
        for worker_id, frame in self.lots:
            events = wire.decode(frame, _EVENTS_ONLY).message
            for event in events.events if isinstance(events, Events) else ():
                if not isinstance(event, _KINDS) or event.router != self.router_id:
                    raise ProtocolError(f"a {type(event).__name__} is no report of that router")
                yield worker_id, event


_encode = Encoder().encode
_DECODER = Decoder(SiblingMessage)


def encode(router_id: str, number: int, reports: ReportsByWorker) -> bytes:
    """The bytes of a message. Raises `InvalidInput` for reports that do not travel."""
    lots = [
        (worker_id, wire.encode(Events(number, tuple(lot))))
        for worker_id, all_ in reports.items()
        for lot in _lots(all_)
    ]
    return _encode(SiblingMessage(router_id, number, tuple(lots)))


def decode(data: bytes) -> SiblingMessage:
    """The message of its bytes. Raises `ProtocolError`, no other."""
    try:
        return _DECODER.decode(data)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"no message of a sibling: {type(error).__name__}") from error


def bytes_of(report: Report) -> int:
    """What a report takes on its way, about."""
    if not isinstance(report, RequestPlaced):
        return REPORT_BYTES
    named = 0 if report.namespace is None else len(encode_namespace(report.namespace))
    return REPORT_BYTES + 4 * len(report.token_ids) + named


def relative_to(space: Hashable, namespace: Hashable) -> Hashable:
    """A namespace without the part `space` of it, which stands in front, or behind the kind of key that it begins
    with. One that has no such part stays as it is."""
    if not isinstance(space, tuple) or not isinstance(namespace, tuple):
        return namespace
    start = len(namespace) % 2
    if namespace[start : start + len(space)] != space:
        return namespace
    return (*namespace[:start], *namespace[start + len(space) :]) or None


def within(space: Hashable, namespace: Hashable) -> Hashable:
    """The same the other way round: `space` is put in where `relative_to` takes it out."""
    if not isinstance(space, tuple):
        return namespace
    parts = namespace if isinstance(namespace, tuple) else () if namespace is None else (namespace,)
    start = len(parts) % 2
    return (*parts[:start], *space, *parts[start:])


def _anybody(_: str) -> bool:
    """Every router's life."""
    return True


def _no_space(_: str) -> Hashable:
    """Of workers whose namespaces have no part for their model."""
    return None


def _lots(reports: Iterable[Report]) -> Iterator[list[Report]]:
    """Reports in lots that fit a frame."""
    lot: list[Report] = []
    room = 0
    for report in reports:
        size = bytes_of(report)
        if lot and (len(lot) >= EVENTS_MAX or size > room):
            yield lot
            lot = []
        room = (room if lot else FRAME_BYTES_MAX // 2) - size
        lot.append(report)
    if lot:
        yield lot


# --- this router's requests -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Running:
    worker_id: str
    placed: RequestPlaced
    bytes: int
    prefilled: RequestPrefilled | None = None


class SharedBookings:
    """This router's bookings, as they are reported. `wake(full)` is called when there is news; `full`: at a bound, so
    that it must be taken now.

    `is_shared(worker_id)`: whether siblings learn of a worker's requests from us; of others it is the worker that
    reports. `worker_space(worker_id)`: the part of namespaces that names its model. Bounded by the router's live
    requests, whose token ids are held, not copied.
    """

    def __init__(
        self,
        router_id: str,
        is_shared: Callable[[str], bool],
        wake: Callable[[bool], object],
        counters: Counter[str],
        worker_space: Callable[[str], Hashable] = _no_space,
    ) -> None:
        self._router_id = router_id
        self._worker_space = worker_space
        self._is_shared = is_shared
        self._wake = wake
        self._counters = counters
        self._running: dict[str, _Running] = {}
        self._news: ReportsByWorker = {}
        self._news_count = 0
        self._news_bytes = 0

    def __len__(self) -> int:
        return len(self._running)

    def placed(
        self,
        name: str,
        worker_id: str,
        token_ids: Any,
        namespace: Hashable,
        max_new_tokens: int | None,
        half: Role | None = None,
    ) -> None:
        """An attempt of a request, or a half of one, was booked and sent. `name` is never used twice, `token_ids` are
        never changed. In a namespace that cannot travel it is left out, and counted."""
        if not self._is_shared(worker_id):
            return
        limit = None if max_new_tokens is None else min(max_new_tokens, INT31)
        space = relative_to(self._worker_space(worker_id), namespace)
        report = RequestPlaced(self._router_id, name, token_ids, space, limit, half)
        try:
            size = bytes_of(report)
        except InvalidInput:
            self._counters["left_out"] += 1
            return
        self._running[name] = _Running(worker_id, report, size)
        self._report(worker_id, report, size)

    def first_token(self, name: str, cached_tokens: int | None) -> None:
        """Its first token has come."""
        running = self._running.get(name)
        if running is not None and running.prefilled is None:
            running.prefilled = RequestPrefilled(self._router_id, name, cached_tokens)
            self._report(running.worker_id, running.prefilled)

    def ended(self, name: str, output_tokens: int | None) -> None:
        """Its booking has ended; `output_tokens` None: without a result."""
        running = self._running.pop(name, None)
        if running is not None:
            self._report(running.worker_id, RequestEnded(self._router_id, name, output_tokens))

    def _report(self, worker_id: str, report: Report, size: int = REPORT_BYTES) -> None:
        self._news.setdefault(worker_id, []).append(report)
        self._news_count += 1
        self._news_bytes += size
        self._wake(self._news_count >= NEWS_MAX or self._news_bytes >= NEWS_BYTES_MAX)

    def take_news(self) -> ReportsByWorker:
        """What is new since the last call, by worker, in order."""
        news, self._news = self._news, {}
        self._news_count = self._news_bytes = 0
        return news

    def snapshot(self) -> ReportsByWorker:
        """What runs now: reports that come to that where nothing was known. The oldest are left out, and counted, where
        it is too much for a message."""
        room = SNAPSHOT_BYTES_MAX
        kept: list[_Running] = []
        for running in reversed(self._running.values()):
            room -= running.bytes + REPORT_BYTES
            if room < 0:
                break
            kept.append(running)
        self._counters["left_out"] += len(self._running) - len(kept)
        reports: ReportsByWorker = {}
        for running in reversed(kept):
            lot = reports.setdefault(running.worker_id, [])
            lot += [running.placed] if running.prefilled is None else [running.placed, running.prefilled]
        return reports


# --- a sibling's requests ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Peer:
    worker_id: str
    prefilled: bool = False


class SiblingBookings:
    """One sibling. `apply(worker_id, reports)` is a scheduler's: how many were news; raises as `GlobalScheduler.apply`.

    `behind`: a snapshot is needed, for nothing is known yet or messages are missing. At most `peers_max` requests are
    known; what is beyond is counted and not booked. `worker_space(worker_id)`: as `SharedBookings` has it. Messages of
    a life that `accepts(router_id)` turns away are passed by.
    """

    def __init__(
        self,
        apply: Callable[[str, Sequence[Report]], int],
        counters: Counter[str],
        peers_max: int = PEERS_MAX,
        *,
        worker_space: Callable[[str], Hashable] = _no_space,
        accepts: Callable[[str], bool] = _anybody,
    ) -> None:
        self.router_id = ""
        self.behind = True
        self._apply = apply
        self._counters = counters
        self._peers_max = peers_max
        self._worker_space = worker_space
        self._accepts = accepts
        self._next_number = 0
        self._peers: dict[str, _Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def take(self, data: bytes) -> None:
        """A message of reports has come, in whatever order."""
        message = self._read(data)
        if message is None or not self._accepts(message.router_id):
            return
        if message.router_id != self.router_id:
            self._begin(message.router_id)
        if self.behind:
            return  # the snapshot will say it
        if message.number < self._next_number:
            self._counters["doubled"] += 1
            return
        self._counters["lost"] += message.number - self._next_number
        self.behind = message.number > self._next_number
        if not self.behind:
            self._next_number += 1
            self._book_all(message)

    def take_snapshot(self, data: bytes) -> None:
        """All that runs there has come. It replaces what was known, unless it is older."""
        message = self._read(data)
        if message is None or not self._accepts(message.router_id):
            return
        if message.router_id != self.router_id:
            self._begin(message.router_id)
        elif message.number < self._next_number:
            self._counters["doubled"] += 1
            return
        self._counters["snapshots_received"] += 1
        self._next_number, self.behind = message.number, False
        before = set(self._peers)
        before.difference_update(self._book_all(message))
        self._give_back(before)

    def drop(self) -> None:
        """The sibling is gone, or says nothing: give back what is booked for it, and know it no more."""
        self._give_back(list(self._peers))
        self.router_id, self._next_number, self.behind = "", 0, True

    def _begin(self, router_id: str) -> None:
        """Another life."""
        self.drop()
        self.router_id = router_id

    def _read(self, data: bytes) -> SiblingMessage | None:
        try:
            return decode(data)
        except ProtocolError:
            self._counters["malformed"] += 1
            return None

    def _book_all(self, message: SiblingMessage) -> set[str]:
        """Book what a message says, as far as it can be read; returns the names of the requests that it places."""
        names = set()
        try:
            for worker_id, report in message.reports():
                self._counters["received"] += 1
                if isinstance(report, RequestPlaced):
                    names.add(report.request_id)
                self._book(worker_id, report)
        except ProtocolError:
            self._counters["malformed"] += 1
            self.behind = True
        return names

    def _book(self, worker_id: str, report: Report) -> None:
        name = report.request_id
        if isinstance(report, RequestPlaced):
            space = self._worker_space(worker_id)
            if space is not None:
                report = replace(report, namespace=within(space, report.namespace))
            if self._say(worker_id, report):
                self._peers[name] = _Peer(worker_id)
            return
        peer = self._peers.get(name)
        if peer is None or peer.worker_id != worker_id:
            return  # it was not booked
        if isinstance(report, RequestEnded):
            del self._peers[name]
            self._say(worker_id, report)
        elif not peer.prefilled:
            peer.prefilled = True
            self._say(worker_id, report)

    def _say(self, worker_id: str, report: Report) -> bool:
        """Report to the scheduler; whether it was news."""
        is_new = isinstance(report, RequestPlaced) and report.request_id not in self._peers
        if is_new and len(self._peers) >= self._peers_max:
            self._counters["over_bound"] += 1
            return False
        try:
            return self._apply(worker_id, (report,)) > 0
        except UnknownWorker:
            self._counters["unknown_worker"] += 1
        except PrebleError:
            self._counters["refused"] += 1
        return False

    def _give_back(self, names: Iterable[str]) -> None:
        for name in names:
            peer = self._peers.pop(name)
            self._counters["given_back"] += self._say(peer.worker_id, RequestEnded(self.router_id, name))
