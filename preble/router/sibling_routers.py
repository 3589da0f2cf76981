"""The sockets by which routers of one deployment report their bookings to each other. Owns sending and receiving, the
heartbeat, and when a sibling counts as gone; what is said is `shared_bookings`'.

    own XPUB  at this router's endpoint  <----- SUB  of each sibling
    SUB       at each sibling's endpoint -----> XPUB of that sibling

These are the other processes of one gateway, over Unix sockets that only their user may open, and gateways of other
machines (`PeerDoor`), over TCP with CURVE. Both report the same; what processes share beside bookings stays among them.

Everybody is subscribed to "r": numbered messages, at once where nothing was sent for `REPORT_SECONDS`, else when that
time is over; and one every `BEAT_SECONDS` in any case, so that a loss at the very end is noticed, too. Who is behind
subscribes to a topic that is like no other, and the XPUB, which sees that, sends a snapshot there. So a newcomer asks
by coming. Under "p" are the plans of the router that makes them (`plan_messages`), under "n" notes of whoever shares
the Unix sockets with the routers, which mean nothing here.

A sibling's bookings are held on a lease of `SILENT_SECONDS`, which each message renews: one that is silent for so long
is gone, killed, hung or cut off, and they are given back. One that comes again is known by what it says then. What a
slow sibling does not read is dropped at `QUEUE_MESSAGES`, which it sees by the numbers. A router that is found at
several addresses counts once, and one that finds itself at an address leaves it. Belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import zmq

from ..errors import InvalidConfig, PrebleError, UnknownWorker
from ..transport.security import ClientKeys, ServerKeys, apply_client_keys, apply_server_keys, start_authenticator
from ..transport.socket_reader import FrameReader, set_usual_options
from ..transport.tasks import end_all
from ..transport.worker_address import is_server
from .plan_messages import PlanSharing
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
LINKS_MAX = 256  # connected at a time; further addresses are left out, and counted
SNAPSHOTS_A_BEAT = 64  # sent at most; who is not served asks again
# Of a connection to another machine: a cut cable says nothing, and the kernel would try for minutes.
PING_MS, PONG_MS, CONNECT_MS, RECONNECT_MS, RECONNECT_MAX_MS = 1000, 3000, 2000, 100, 1000

NOTE_BYTES_MAX = 16 << 20

_REPORTS, _SNAPSHOT, _NOTES, _PLANS = b"r", b"s", b"n", b"p"


class SharingRouter(Protocol):
    """What is asked of a router; while it has siblings it reports to `siblings.own` what becomes of its requests."""

    router_id: str
    scheduler: GlobalScheduler
    siblings: SiblingRouters | None

    @property
    def fleet(self) -> Fleet:
        """Its workers."""


@dataclass(frozen=True, slots=True)
class PeerDoor:
    """Where gateways of other machines find this router. Without keys, whoever reaches it reads the token ids of
    prompts, and what it reports is booked."""

    endpoint: str
    server_keys: ServerKeys | None = None
    client_keys: ClientKeys | None = None


class SiblingRouters:
    """The siblings of `router`, which is started: `endpoints` are theirs, `own_endpoint` is where they find this one.
    ZeroMQ endpoints that nobody else can reach: what comes there is booked; "" and () where there is one process only.
    `door`: where peers find it, who are named by `follow`."""

    def __init__(
        self,
        router: SharingRouter,
        own_endpoint: str,
        endpoints: Sequence[str],
        *,
        door: PeerDoor | None = None,
        report_seconds: float = REPORT_SECONDS,
        beat_seconds: float = BEAT_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        queue_messages: int = QUEUE_MESSAGES,
    ) -> None:
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.own = SharedBookings(router.router_id, self._is_shared, self._wake, self.counters, self.worker_space)
        self._plans = PlanSharing(router.router_id, lambda: router.scheduler, self.worker_space, self.counters)
        self.on_note: Callable[[bytes], object] | None = None  # is given what siblings note; must not raise
        self.on_reader: Callable[[], object] | None = None  # a sibling listens from now on
        self._router = router
        self._own_endpoint = own_endpoint
        self._door = door
        self._report_seconds = report_seconds
        self._beat_seconds = beat_seconds
        self._queue_messages = queue_messages
        self._silent_beats = max(1, round(silent_seconds / beat_seconds))
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._number = 0  # of the next message
        self._snapshots_left = SNAPSHOTS_A_BEAT
        self._sent_at = -report_seconds
        self._sent_since_beat = False
        self._due: asyncio.TimerHandle | None = None
        self._near: _Publisher | None = None  # for the other processes
        self._publishers: list[_Publisher] = []
        self._end_authenticator: Callable[[], None] | None = None
        self._siblings = [_Sibling(self, endpoint) for endpoint in endpoints]
        self._own_addresses: set[str] = set()  # where this router found itself
        self._left_out = 0  # addresses of peers
        self._beating: asyncio.Task[None] | None = None

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Report and listen from now on. Raises `InvalidConfig` where an endpoint cannot be had; then none is open."""
        try:
            if self._own_endpoint:
                self._near = self._publish_at(self._own_endpoint, None)
            if self._door is not None:
                self._publish_at(self._door.endpoint, self._door.server_keys)
        except InvalidConfig:
            self._close_sockets()
            raise
        for sibling in self._siblings:
            sibling.start(self._socket(zmq.SUB, sibling.endpoint))
        self._router.siblings = self
        self._beating = asyncio.ensure_future(self._beat())

    def _publish_at(self, endpoint: str, keys: ServerKeys | None) -> _Publisher:
        socket = self._socket(zmq.XPUB, endpoint)
        socket.linger = LINGER_MS
        socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # each coming and leaving is shown
        if keys is not None:
            self._end_authenticator = start_authenticator(self._context, keys)
            apply_server_keys(socket, keys)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise InvalidConfig(f"cannot listen on {endpoint}: {error.strerror}") from error
        made = _Publisher(socket, self._take_subscription)
        self._publishers.append(made)
        return made

    @property
    def endpoints(self) -> list[str]:
        """Where this router listens, with the ports that it was given."""
        return [one.socket.getsockopt_string(zmq.LAST_ENDPOINT) for one in self._publishers]

    async def close(self) -> None:
        """Send what is still to be reported, and report and listen no more; what siblings have booked is given back."""
        self._router.siblings = None
        if self._beating is None:
            return
        await end_all(self._beating)
        self._flush()
        for sibling in self._siblings:
            sibling.close()
        self._close_sockets()
        self._beating = None

    def _close_sockets(self) -> None:
        for publisher in self._publishers:
            publisher.close()
        self._publishers.clear()
        self._near = None
        if self._end_authenticator is not None:
            self._end_authenticator()
        self._context.term()

    def follow(self, endpoints: Iterable[str]) -> None:
        """These are the endpoints of peers now. New ones are connected; one that is gone is left once it is silent,
        for who leaves a list of names may still have requests. Beyond `LINKS_MAX` they are left out, with a line in
        the log."""
        if self._beating is None:
            return
        wanted = [endpoint for endpoint in dict.fromkeys(endpoints) if endpoint not in self._own_addresses]
        known = {sibling.endpoint: sibling for sibling in self._siblings if sibling.is_peer}
        for endpoint, sibling in known.items():
            if endpoint not in wanted and not sibling.is_connected:
                self._leave(sibling)
        new = [endpoint for endpoint in wanted if endpoint not in known]
        room = max(LINKS_MAX - len(self._siblings), 0)
        for endpoint in new[:room]:
            sibling = _Sibling(self, endpoint, is_peer=True)
            self._siblings.append(sibling)
            try:
                sibling.start(self._socket(zmq.SUB, endpoint))
            except zmq.ZMQError as error:
                logger.error("no peer can be at %s: %s", endpoint, error.strerror)
                self._leave(sibling)
        if len(new) - room > self._left_out:
            logger.error("%d addresses of peers are left out: %d are the most", len(new) - room, LINKS_MAX)
        self._left_out = max(len(new) - room, 0)

    def _leave(self, sibling: _Sibling) -> None:
        if sibling in self._siblings:
            self._siblings.remove(sibling)
            sibling.close()

    def found_itself(self, sibling: _Sibling) -> None:
        """This router's own messages come from there."""
        self._own_addresses.add(sibling.endpoint)
        self._loop.call_soon(self._leave, sibling)  # its reader is at work

    def is_held_by_another(self, sibling: _Sibling, router_id: str) -> bool:
        """Whether a router's messages come by another address, too, and are booked from there."""
        return any(
            other is not sibling and other.is_booked and other.bookings.router_id == router_id
            for other in self._siblings
        )

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        set_usual_options(socket, endpoint)
        socket.sndhwm = socket.rcvhwm = self._queue_messages
        socket.maxmsgsize = MESSAGE_BYTES_MAX + 1024
        if endpoint.startswith("tcp://"):
            socket.heartbeat_ivl, socket.heartbeat_timeout = PING_MS, PONG_MS
            socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS, RECONNECT_MAX_MS
            socket.connect_timeout = CONNECT_MS
            if kind == zmq.SUB and self._door is not None and self._door.client_keys is not None:
                apply_client_keys(socket, self._door.client_keys)
        return socket

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            if not self._sent_since_beat:
                self._send()
            self._sent_since_beat = False
            self._snapshots_left = SNAPSHOTS_A_BEAT
            for sibling in self._siblings:
                sibling.beat(self._silent_beats)
            self._share_plans()

    def _share_plans(self) -> None:
        try:
            plans = self._plans.beat(one.bookings.router_id for one in self._siblings if one.is_known)
        except Exception:  # a policy of somebody's own failed, say: the signs of life must go on
            logger.exception("plans were not reported to sibling routers")
            return
        if plans is not None:
            self._send_to(self._publishers, _PLANS, plans)

    # --- reporting ----------------------------------------------------------------------------------------------------

    def _is_shared(self, worker_id: str) -> bool:
        """Workers of ours report all requests themselves."""
        return is_server(self._router.fleet.worker(worker_id).address)

    def worker_space(self, worker_id: str) -> Hashable:
        """The part of namespaces that names a worker's model here."""
        try:
            return self._router.fleet.worker(worker_id).namespace
        except UnknownWorker:
            return None  # its bookings are refused

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
            if any(publisher.readers for publisher in self._publishers):
                self.counters["sent"] += sum(map(len, news.values()))
                self._send(news)
            else:
                self._number += 1

    def _send(self, news: ReportsByWorker | None = None) -> None:
        """The next message, with news or as a sign of life."""
        self._sent_since_beat = True
        number, self._number = self._number, self._number + 1
        self._publish(_REPORTS, number, news or {}, self._publishers)

    def send_note(self, data: bytes) -> bool:
        """Bytes for `on_note` of all processes that listen now; False where they were not sent. Peers get none."""
        if self._near is None or len(data) > NOTE_BYTES_MAX:
            return False
        try:
            self._near.send(_NOTES, data)
        except zmq.ZMQError as error:
            logger.error("a note to sibling routers was not sent: %s", type(error).__name__)
            return False
        return True

    def _publish(self, topic: bytes, number: int, reports: ReportsByWorker, to: Iterable[_Publisher]) -> None:
        try:
            data = encode(self._router.router_id, number, reports)
        except PrebleError as error:
            self.counters["left_out"] += sum(map(len, reports.values()))
            logger.error("a message to sibling routers was not made: %s", type(error).__name__)
            return
        self._send_to(to, topic, data)

    def _send_to(self, publishers: Iterable[_Publisher], topic: bytes, data: bytes) -> None:
        for publisher in publishers:
            try:
                publisher.send(topic, data)
            except zmq.ZMQError as error:
                logger.error("a message to sibling routers was not sent: %s", type(error).__name__)

    def _take_subscription(self, publisher: _Publisher, parts: list[bytes]) -> str:
        """A sibling comes, asks for a snapshot, or leaves."""
        comes, topic = parts[0][:1] == b"\x01", parts[0][1:]
        if topic == _REPORTS:
            publisher.readers += 1 if comes else -1
        elif topic == _NOTES:
            if comes and publisher is self._near and self.on_reader is not None:
                self.on_reader()
        elif topic.startswith(_SNAPSHOT) and comes and self._snapshots_left:
            self._snapshots_left -= 1
            self.counters["snapshots_sent"] += 1
            self._publish(topic, self._number, self.own.snapshot(), [publisher])
        return ""

    # --- listening ----------------------------------------------------------------------------------------------------

    def apply(self, worker_id: str, reports: Sequence[Report]) -> int:
        """Book what a sibling reports; as `GlobalScheduler.apply`."""
        return self._router.scheduler.apply(worker_id, reports)

    @property
    def router_id(self) -> str:
        """This router's."""
        return self._router.router_id

    def planned(self, data: bytes) -> None:
        """A sibling's plans have come."""
        self._plans.take(data)

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
        """Counters; siblings that are connected or silent, and their bookings. Changes nothing."""
        connected = sum(sibling.is_booked for sibling in self._siblings)
        silent = sum(not sibling.is_connected for sibling in self._siblings)
        booked = sum(len(sibling.bookings) for sibling in self._siblings)
        return {
            **self.counters,
            "siblings": len(self._siblings),
            "peers_left_out": self._left_out,
            "connected": connected,
            "silent": silent,
            "booked": booked,
            "shared": len(self.own),
        }


class _Publisher:
    """A socket at which siblings listen to this router."""

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[_Publisher, list[bytes]], str]) -> None:
        self.socket = socket
        self.readers = 0  # siblings that are subscribed
        self._reader = FrameReader(socket, lambda parts: take(self, parts))

    def send(self, topic: bytes, data: bytes) -> None:
        """To who has too much unread it is not sent; the others are not kept waiting. Raises `ZMQError`."""
        self.socket.send_multipart([topic, data], zmq.NOBLOCK)
        self._reader.look()

    def close(self) -> None:
        """What was sent last goes out within `LINGER_MS`."""
        self._reader.stop()
        self.socket.close()


class _Sibling:
    """One sibling: its socket, what it has running, and whether it is connected."""

    def __init__(self, siblings: SiblingRouters, endpoint: str, *, is_peer: bool = False) -> None:
        self.endpoint = endpoint
        self.is_peer = is_peer
        self.bookings = SiblingBookings(
            siblings.apply, siblings.counters, worker_space=siblings.worker_space, accepts=self._accepts
        )
        self.is_connected = False
        self._is_spare = False  # this router itself, or one that reports by another address
        self._siblings = siblings
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
        socket.subscribe(_PLANS)
        if not self.is_peer:
            socket.subscribe(_NOTES)
        self.ask_if_behind()
        socket.connect(self.endpoint)

    def close(self) -> None:
        """Listen no more, and book nothing for it any more."""
        if self._reader is not None and self._socket is not None:
            self._reader.stop()
            self._socket.close(0)
        self.bookings.drop()

    @property
    def is_booked(self) -> bool:
        """Whether what it reports is booked."""
        return self.is_connected and not self._is_spare

    @property
    def is_known(self) -> bool:
        """Whether its router is known by its id."""
        return self.is_booked and bool(self.bookings.router_id)

    def _accepts(self, router_id: str) -> bool:
        """Whether the messages of a router's life are booked from here."""
        own = router_id == self._siblings.router_id
        if own and not self._is_spare:
            self._siblings.found_itself(self)
        self._is_spare = own or self._siblings.is_held_by_another(self, router_id)
        if self._is_spare and self.bookings.router_id:
            self.bookings.drop()  # of an earlier life
        return not self._is_spare

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
        if not self.bookings.behind or self._is_spare or self._ask_beats or self._socket is None:
            return
        if self._reader is None:
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
        if parts[0] == _NOTES and not self.is_peer:
            self._noted(parts[-1])
            return ""
        try:
            if parts[0] == self._topic:
                self.bookings.take_snapshot(parts[-1])
            elif parts[0] == _REPORTS:
                self.bookings.take(parts[-1])
            elif parts[0] == _PLANS and not self._is_spare:
                self._siblings.planned(parts[-1])
        except Exception:  # a policy of somebody's own failed, say: whoever is not listened to is never known again
            self._counters["refused"] += 1
            self.bookings.behind = True
            logger.exception("a message of the sibling router at %s was not booked", self.endpoint)
        self.ask_if_behind()
        return ""
