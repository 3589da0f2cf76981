"""The sockets by which routers of one deployment report their bookings to each other. Owns sending and receiving, the
heartbeat, and when a sibling counts as gone; what is said is `shared_bookings`'.

    own XPUB  at this router's endpoint  <----- SUB  of each sibling
    SUB       at each sibling's endpoint -----> XPUB of that sibling

Everybody is subscribed to "r": numbered messages, at once where nothing was sent for `REPORT_SECONDS`, else when that
time is over; and one every `BEAT_SECONDS` in any case, so that a loss at the very end is noticed, too. Who is behind
subscribes to a topic that is like no other, and the XPUB, which sees that, sends a snapshot there. So a newcomer asks
by coming. Under "n" there are notes of whoever shares these sockets with the routers, which mean nothing here.

A sibling that is silent for `SILENT_SECONDS` is gone, killed or hung: its bookings are given back. One that comes
again is known by what it says then. What a slow sibling does not read is dropped at `QUEUE_MESSAGES`, which it sees by
the numbers. Belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import zmq

from ..errors import InvalidConfig, PrebleError
from ..transport.socket_reader import FrameReader, set_usual_options
from ..transport.tasks import end_all
from ..transport.worker_address import is_server
from .shared_bookings import (
    COUNTED,
    MESSAGE_BYTES_MAX,
    Report,
    ReportsByWorker,
    SharedBookings,
    SiblingBookings,
    encode,
)

if TYPE_CHECKING:
    from ..scheduler import GlobalScheduler
    from .fleet import Fleet

logger = logging.getLogger("preble.router")

REPORT_SECONDS = 0.005
BEAT_SECONDS = 0.5
SILENT_SECONDS = 5.0
QUEUE_MESSAGES = 256  # for one sibling, at either end
ASK_BEATS = 2  # between two askings for a snapshot
LINGER_MS = 200  # for the last reports, at the end

NOTE_BYTES_MAX = 16 << 20

_REPORTS, _SNAPSHOT, _NOTES = b"r", b"s", b"n"


class SharingRouter(Protocol):
    """What is asked of a router; while it has siblings it reports to `siblings.own` what becomes of its requests."""

    router_id: str
    scheduler: GlobalScheduler
    siblings: SiblingRouters | None

    @property
    def fleet(self) -> Fleet:
        """Its workers."""


class SiblingRouters:
    """The siblings of `router`, which is started: `endpoints` are theirs, `own_endpoint` is where they find this one.
    ZeroMQ endpoints that nobody else can reach: what comes there is booked."""

    def __init__(
        self,
        router: SharingRouter,
        own_endpoint: str,
        endpoints: Sequence[str],
        *,
        report_seconds: float = REPORT_SECONDS,
        beat_seconds: float = BEAT_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        queue_messages: int = QUEUE_MESSAGES,
    ) -> None:
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.own = SharedBookings(router.router_id, self._is_shared, self._wake, self.counters)
        self.on_note: Callable[[bytes], object] | None = None  # is given what siblings note; must not raise
        self.on_reader: Callable[[], object] | None = None  # a sibling listens from now on
        self._router = router
        self._own_endpoint = own_endpoint
        self._report_seconds = report_seconds
        self._beat_seconds = beat_seconds
        self._queue_messages = queue_messages
        self._silent_beats = max(1, round(silent_seconds / beat_seconds))
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._number = 0  # of the next message
        self._readers = 0  # siblings that are subscribed
        self._sent_at = -report_seconds
        self._sent_since_beat = False
        self._due: asyncio.TimerHandle | None = None
        self._publisher: zmq.Socket[bytes] | None = None
        self._subscriptions: FrameReader | None = None
        self._siblings = [_Sibling(self, endpoint) for endpoint in endpoints]
        self._beating: asyncio.Task[None] | None = None

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Report and listen from now on. Raises `InvalidConfig` where the endpoint cannot be had; then none is open."""
        publisher = self._socket(zmq.XPUB, self._own_endpoint)
        publisher.linger = LINGER_MS
        publisher.setsockopt(zmq.XPUB_VERBOSER, 1)  # each coming and leaving is shown
        try:
            publisher.bind(self._own_endpoint)
        except zmq.ZMQError as error:
            publisher.close(0)
            self._context.term()
            raise InvalidConfig(f"cannot listen on {self._own_endpoint}: {error.strerror}") from error
        self._publisher = publisher
        self._subscriptions = FrameReader(publisher, self._take_subscription)
        for sibling in self._siblings:
            sibling.start(self._socket(zmq.SUB, sibling.endpoint))
        self._router.siblings = self
        self._beating = asyncio.ensure_future(self._beat())

    async def close(self) -> None:
        """Send what is still to be reported, and report and listen no more; what siblings have booked is given back."""
        self._router.siblings = None
        if self._beating is None or self._publisher is None or self._subscriptions is None:
            return
        await end_all(self._beating)
        self._flush()
        self._subscriptions.stop()
        for sibling in self._siblings:
            sibling.close()
        self._publisher.close()
        self._publisher = self._beating = None
        self._context.term()

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        set_usual_options(socket, endpoint)
        socket.sndhwm = socket.rcvhwm = self._queue_messages
        socket.maxmsgsize = MESSAGE_BYTES_MAX + 1024
        return socket

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            if not self._sent_since_beat:
                self._send()
            self._sent_since_beat = False
            for sibling in self._siblings:
                sibling.beat(self._silent_beats)

    # --- reporting ----------------------------------------------------------------------------------------------------

    def _is_shared(self, worker_id: str) -> bool:
        """Workers of ours report all requests themselves."""
        return is_server(self._router.fleet.worker(worker_id).address)

    def _wake(self, full: bool) -> None:
        """There is news."""
        if full:
            self._flush()
        elif self._due is None:
            self._due = self._loop.call_at(max(self._sent_at + self._report_seconds, self._loop.time()), self._flush)

    def _flush(self) -> None:
        """Send what is new, if anything is. To nobody nothing is sent, but it counts as lost for who comes."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        news = self.own.take_news()
        if news:
            self._sent_at = self._loop.time()
            if self._readers:
                self.counters["sent"] += sum(map(len, news.values()))
                self._send(news)
            else:
                self._number += 1

    def _send(self, news: ReportsByWorker | None = None) -> None:
        """The next message, with news or as a sign of life."""
        self._sent_since_beat = True
        number, self._number = self._number, self._number + 1
        self._publish(_REPORTS, number, news or {})

    def send_note(self, data: bytes) -> bool:
        """Bytes for `on_note` of all siblings that listen now; False where they were not sent."""
        if self._publisher is None or self._subscriptions is None or len(data) > NOTE_BYTES_MAX:
            return False
        try:
            self._publisher.send_multipart([_NOTES, data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.error("a note to sibling routers was not sent: %s", type(error).__name__)
            return False
        self._subscriptions.look()
        return True

    def _publish(self, topic: bytes, number: int, reports: ReportsByWorker) -> None:
        if self._publisher is None or self._subscriptions is None:
            return
        try:
            # To who has too much unread it is not sent; the others are not kept waiting.
            self._publisher.send_multipart([topic, encode(self._router.router_id, number, reports)], zmq.NOBLOCK)
        except (PrebleError, zmq.ZMQError) as error:
            self.counters["left_out"] += sum(map(len, reports.values()))
            logger.error("a message to sibling routers was not sent: %s", type(error).__name__)
        self._subscriptions.look()

    def _take_subscription(self, parts: list[bytes]) -> str:
        """A sibling comes, asks for a snapshot, or leaves."""
        comes, topic = parts[0][:1] == b"\x01", parts[0][1:]
        if topic == _REPORTS:
            self._readers += 1 if comes else -1
        elif topic == _NOTES:
            if comes and self.on_reader is not None:
                self.on_reader()
        elif topic.startswith(_SNAPSHOT) and comes:
            self.counters["snapshots_sent"] += 1
            self._publish(topic, self._number, self.own.snapshot())
        return ""

    # --- listening ----------------------------------------------------------------------------------------------------

    def apply(self, worker_id: str, reports: Sequence[Report]) -> int:
        """Book what a sibling reports; as `GlobalScheduler.apply`."""
        return self._router.scheduler.apply(worker_id, reports)

    @property
    def router_id(self) -> str:
        """This router's."""
        return self._router.router_id

    def noted(self, data: bytes) -> None:
        """A sibling's note has come."""
        if self.on_note is not None:
            self.on_note(data)

    def worker_available(self) -> None:
        """A worker may take requests, anew perhaps: what siblings have there is asked for."""
        for sibling in self._siblings:
            sibling.bookings.behind = True
            sibling.ask_if_behind()

    def stats(self) -> Mapping[str, Any]:
        """Counters; siblings that are connected, and their bookings. Changes nothing."""
        connected = sum(sibling.is_connected for sibling in self._siblings)
        booked = sum(len(sibling.bookings) for sibling in self._siblings)
        return {
            **self.counters,
            "siblings": len(self._siblings),
            "connected": connected,
            "booked": booked,
            "shared": len(self.own),
        }


class _Sibling:
    """One sibling: its socket, what it has running, and whether it is connected."""

    def __init__(self, siblings: SiblingRouters, endpoint: str) -> None:
        self.endpoint = endpoint
        self.bookings = SiblingBookings(siblings.apply, siblings.counters)
        self.is_connected = False
        self._noted = siblings.noted
        self._counters = siblings.counters
        self._name = siblings.router_id
        self._socket: zmq.Socket[bytes] | None = None
        self._reader: FrameReader | None = None
        self._silent_beats = 0
        self._ask_beats = 0  # until a snapshot may be asked for
        self._asked = 0
        self._topic = b""

    def start(self, socket: zmq.Socket[bytes]) -> None:
        """Listen to it, whenever it comes."""
        self._socket = socket
        self._reader = FrameReader(socket, self._take)
        socket.subscribe(_REPORTS)
        socket.subscribe(_NOTES)
        self.ask_if_behind()
        socket.connect(self.endpoint)

    def close(self) -> None:
        """Listen no more, and book nothing for it any more."""
        if self._reader is not None and self._socket is not None:
            self._reader.stop()
            self._socket.close(0)
        self.bookings.drop()

    def beat(self, silent_beats: int) -> None:
        """Some time has passed, and nothing came in it if nothing came."""
        self._silent_beats += 1
        self._ask_beats = max(0, self._ask_beats - 1)
        if self.is_connected and self._silent_beats >= silent_beats:
            self.is_connected = False
            self.bookings.drop()
            logger.warning("sibling router at %s is silent; its bookings are given back", self.endpoint)
        elif self.is_connected:
            self.ask_if_behind()

    def ask_if_behind(self) -> None:
        """Ask for a snapshot where one is needed, and none was asked for just now."""
        if not self.bookings.behind or self._ask_beats or self._socket is None or self._reader is None:
            return
        self._ask_beats = ASK_BEATS
        if self._topic:
            self._socket.unsubscribe(self._topic)
        self._asked += 1
        self._topic = b"%b%b/%d" % (_SNAPSHOT, self._name.encode(), self._asked)
        self._socket.subscribe(self._topic)
        self._reader.look()

    def _take(self, parts: list[bytes]) -> str:
        """A message has come; of an earlier asking it is passed by."""
        self._silent_beats = 0
        self.is_connected = True
        if parts[0] == _NOTES:
            self._noted(parts[-1])
            return ""
        try:
            if parts[0] == self._topic:
                self.bookings.take_snapshot(parts[-1])
            elif parts[0] == _REPORTS:
                self.bookings.take(parts[-1])
        except Exception:  # a policy of somebody's own failed, say: whoever is not listened to is never known again
            self._counters["refused"] += 1
            self.bookings.behind = True
            logger.exception("a message of the sibling router at %s was not booked", self.endpoint)
        self.ask_if_behind()
        return ""
