"""The router's end of a server that already runs: SGLang or vLLM over HTTP and their own event sockets. Owns the
session with one data-parallel rank: its requests, its heartbeat, its name.

    http://host:30000          the server, rank 0; its other ranks are addresses of their own: http://host:30000#rank=1

To `fleet` a `ServerLink` is what a `client.WorkerLink` is to a worker of ours: it opens, runs until the server
is lost, and says why. A server that hangs, in front or behind (`watch`), is suspect after `hung_after_seconds`, and
lost after `give_up_seconds` of silence; one whose port is closed is lost when next asked. One that answers and does
not work is asked for a token until it makes one. Its load is asked for seldom until that decides. A stream that breaks
off is a request to be gone on with elsewhere.

The epoch is that of the server's start where it reports one, else every session is an epoch of its own: then no
estimate outlives a break. A kept connection that the server has closed may mean another start: it is asked for.
Everything here runs on one asyncio loop; nothing is thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Protocol
from urllib.parse import urldefrag, urlsplit

import zmq.asyncio

from ...clock import Clock
from ...errors import (
    EngineError,
    HandshakeRefused,
    InvalidInput,
    PrebleError,
    ProtocolError,
    QueueFull,
    TransportError,
)
from ...types import SamplingParams
from .. import wire
from ..client import LinkConfig, LinkCounters, LinkListener
from ..namespaces import keys_of
from ..tasks import first_of, running, within
from .http_client import EngineServer, Unreachable
from .kv_event_codec import LoadReport
from .kv_event_subscriber import EventFeed, FeedConfig, FeedCounters
from .request_forms import FIELDS, RESUMABLE_FIELDS
from .server_info import ServerInfo, ServerOptions, digits
from .watch import SILENT, EngineWatch

logger = logging.getLogger("preble.transport")

_RANK = "rank="
_REFUSALS = {InvalidInput: "invalid", QueueFull: "queue_full", EngineError: "engine", HandshakeRefused: "engine"}
_ELSEWHERE = "engine_failed"  # for no fault of the request: another worker may do better
JUDGED_EACH_BEAT = 4  # times
LOAD_SHARE = 0.005  # of the time that a server may take to report its load where nothing depends on it
LOAD_SECONDS_MAX = 5.0  # between two such reports
_PROBE = (1,)  # the prompt for which a server that hung is asked for a token


class ServerListener(LinkListener, Protocol):
    """What a link to a server reports to its owner beside what every link does."""

    def on_payload(self, payload: bytes) -> None:
        """The next batch of cache events as the engine wrote it, in order and exactly once."""


class ServerLink:
    """One session with one rank of the server at `address`. `session` is a number that is never used twice there.

    `background` holds what must be waited for before the loop ends: connections that are being closed.
    """

    def __init__(
        self,
        address: str,
        hello: wire.Hello,
        listener: ServerListener,
        config: LinkConfig,
        *,
        session: int,
        context: zmq.asyncio.Context,
        background: set[asyncio.Task[None]],
        options: ServerOptions | None = None,
        feed_config: FeedConfig | None = None,
        counters: LinkCounters | None = None,
        feed_counters: FeedCounters | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        url, rank = urldefrag(address)
        if rank and not (rank.startswith(_RANK) and digits(rank[len(_RANK) :]) is not None):
            raise InvalidInput(f"a server's address is http://host:port or http://host:port#rank=1, got {address!r}")
        self.address = address
        self.rank = int(rank[len(_RANK) :]) if rank else 0
        self.counters = counters or LinkCounters()
        self.feed_counters = feed_counters or FeedCounters()
        self.suspect = False
        self.epoch = 0
        self.welcome: wire.Welcome
        self.info: ServerInfo
        self.more_addresses: tuple[str, ...] = ()
        self._server = EngineServer(url, options)
        self._hello = hello
        self._listener = listener
        self._config = config
        self._feed_config = feed_config
        self._context = context
        self._clock = clock
        self._background = background
        self._feed: EventFeed | None = None
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._prefix = f"{hello.router_id}-{session}-{secrets.token_hex(3)}"
        self._nonce = 0
        self._watch = EngineWatch(config.hung_after_seconds, config.suspect_after_seconds, config.stalled_after_seconds)
        self._connections = 0  # to the server, when it was asked for its start
        self._probing: asyncio.Task[None] | None = None
        self._ask_now = asyncio.Event()
        self._load_due = 0.0  # by the clock: to ask for its load
        self._closed = False

    # --- life ---------------------------------------------------------------------------------------------------------

    async def open(self, *, resume_events_at: tuple[int, int] | None = None) -> wire.Welcome:
        """Ask the server what it is. `resume_events_at` is (epoch, next event number) of an earlier session.

        Raises `HandshakeRefused` when the two do not fit, `TransportError` when it does not answer.
        """
        self.info = info = await self._server.info()
        self._connections = self._server.connections
        if self.rank >= info.ranks:
            raise HandshakeRefused(f"{self.address}: the server has {info.ranks} data-parallel ranks")
        for advice in info.advice:
            logger.warning("%s: %s", self.address, advice)
        self.epoch = int(info.start, 16) % 2**62 + 1 if info.start else secrets.randbelow(2**62) + 1
        if info.events:
            resumed = resume_events_at is not None and resume_events_at[0] == self.epoch
            self._feed = EventFeed(
                info.events[self.rank],
                self,
                self._feed_config,
                context=self._context,
                next_seq=resume_events_at[1] if resume_events_at is not None and resumed else 0,
                counters=self.feed_counters,
            )
        self.welcome = self._welcome(info)
        difference = wire.disagreement(self._hello, self.welcome)
        if difference:
            raise HandshakeRefused(difference)
        if self.rank == 0:
            url, _ = urldefrag(self.address)
            self.more_addresses = tuple(f"{url}#{_RANK}{rank}" for rank in range(1, info.ranks))
        return self.welcome

    def _welcome(self, info: ServerInfo) -> wire.Welcome:
        place = urlsplit(self.address).netloc.rpartition("@")[2]
        return wire.Welcome(
            worker_id=place if info.ranks == 1 else f"{place}/{self.rank}",
            engine=info.engine,
            model=info.model,
            tokenizer_fingerprint="",
            block_size=info.block_size,
            kv_capacity_tokens=info.kv_capacity_tokens,
            max_running=info.max_running,
            max_model_tokens=info.max_model_tokens,
            eos_token_ids=(),
            events_endpoint=info.events[self.rank].endpoint if info.events else "",
            next_event_seq=self.next_event_seq,
            max_frame_bytes=wire.FRAME_BYTES_MAX,
            sampling_fields=FIELDS[info.engine],
            resumable_fields=RESUMABLE_FIELDS[info.engine],
            cached_first=info.cached_first,
            role=info.role,
        )

    async def run(self) -> str:
        """Serve the session until the server is lost; return why. Call once, after `open`."""
        if self._feed is None:
            self._listener.on_caught_up()
        loops: list[Coroutine[Any, Any, str]] = [self._ask_loop(), self._judge_loop()]
        if self._feed is not None:
            loops.append(self._follow(self._feed))
        return await first_of(*loops)

    @property
    def next_event_seq(self) -> int:
        """The event batch to come next; with `epoch`, what a later session needs to go on."""
        return self._feed.next_seq if self._feed is not None else 0

    async def look_for_names(self) -> None:
        """Ask anew which names the server is asked by: adapters come and go. Raises `TransportError`."""
        self.info = replace(self.info, served=await self._server.served())

    def close(self) -> None:
        """Give up every request and close the connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stop_probing()
        for task in self._requests.values():
            task.cancel()
        self._spawn(self._close())

    async def _close(self) -> None:
        await asyncio.gather(*self._requests.values(), return_exceptions=True)
        await self._server.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # --- requests that others send ------------------------------------------------------------------------------------

    def saw_output(self) -> None:
        """The server has sent something that did not come through this link."""
        self._watch.output()
        if self.suspect:
            self._judge()

    def stream_began(self) -> None:
        """A request that did not go through this link has its first token, and streams; `stream_left` ends it."""
        self._watch.began()

    def stream_left(self) -> None:
        """It is over here, in whatever way."""
        self._watch.left()

    def expects(self, name: str, seconds: float) -> None:
        """A request is there, or on its way, whose prefill is expected to take so long; until its first token here, or
        `expects_no_more`."""
        self._watch.waits(name, seconds)

    def first_token_came(self, name: str) -> None:
        """It has its first token, or its whole answer. Again it does nothing."""
        self._watch.had_first_token(name)

    def expects_no_more(self, name: str) -> None:
        """It is over here. Again it does nothing."""
        self._watch.waits_no_more(name)

    def doubt(self) -> None:
        """A request that did not go through this link broke off: if the server is gone, that should be known at
        once."""
        self._ask_now.set()

    # --- requests -----------------------------------------------------------------------------------------------------

    def check_room(self, waiting: int) -> None:
        """Whether one more request may be sent, after so many that wait. Raises `QueueFull` when as many as the options
        allow are there, `TransportError` after `close`."""
        if self._closed:
            raise TransportError(f"link to {self.address} is closed")
        if len(self._requests) + waiting >= self._server.options.max_requests:
            raise QueueFull(f"{len(self._requests) + waiting} requests are at {self.address}, the bound of this link")

    def send(self, message: wire.Message) -> None:
        """Start or abort a request; other messages mean nothing to a server. Raises as `check_room`."""
        if self._closed:
            raise TransportError(f"link to {self.address} is closed")
        if isinstance(message, wire.Abort):
            self._abort(message.request_id)
        elif isinstance(message, wire.GenerationRequest):
            self.check_room(0)
            task = self._requests[message.request_id] = asyncio.ensure_future(self._request(message))
            # Not the task itself: one that is cancelled before its first step runs none of its lines.
            task.add_done_callback(lambda _: self._over(message.request_id))

    def _over(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._watch.waits_no_more(request_id)

    def _abort(self, request_id: str) -> None:
        task = self._requests.get(request_id)
        if task is not None:
            task.cancel()
            self._spawn(self._send_abort(request_id))

    async def _send_abort(self, request_id: str) -> None:
        """The closed connection aborts, too, but SGLang notices that late."""
        try:
            await self._server.abort(self._name(request_id))
        except TransportError as error:
            self.counters.unsent += 1
            logger.debug("abort at %s: %s", self.address, error)

    def _name(self, request_id: str) -> str:
        """What the request is called at the server: unlike any other router's, session's or attempt's."""
        return f"{self._prefix}-{request_id}"

    async def _request(self, submit: wire.GenerationRequest) -> None:
        refusal = await self._stream(submit)
        if refusal is not None and not self._closed:
            self._listener.on_message(refusal)

    async def _stream(self, submit: wire.GenerationRequest) -> wire.Rejected | None:
        """Pass the answer on; the refusal to report if it did not come to its end."""
        index = submit.output_offset
        sampling = submit.sampling.left(max(submit.sampling.max_new_tokens - index, 1), index)
        salt, lora = keys_of(submit.namespace)
        pieces = self._server.generate(
            submit.token_ids,
            sampling,
            request_id=self._name(submit.request_id),
            rank=self.rank if self.info.ranks > 1 else None,
            salt=salt,
            lora=lora,
            claim=submit.claim,
        )
        has_begun = False
        try:
            async for piece in pieces:
                self.saw_output()
                if not has_begun:
                    has_begun = True
                    self._watch.had_first_token(submit.request_id)
                    self._watch.began()
                self._listener.on_message(
                    wire.OutputChunk(
                        submit.request_id,
                        index,
                        piece.token_ids,
                        piece.cached_tokens,
                        piece.finish_reason,
                        logprobs=piece.logprobs,
                    )
                )
                index += len(piece.token_ids)
        except PrebleError as error:
            return self._refusal(submit.request_id, error)
        except Exception as error:
            self.counters.requests_failed += 1
            logger.exception("a request at %s failed", self.address)
            return wire.Rejected(submit.request_id, _ELSEWHERE, f"{type(error).__name__}: {error}")
        finally:
            if has_begun:
                self._watch.left()
        return None

    def _refusal(self, request_id: str, error: PrebleError) -> wire.Rejected:
        self.counters.malformed_frames += isinstance(error, ProtocolError)
        code = next((code for kind, code in _REFUSALS.items() if isinstance(error, kind)), _ELSEWHERE)
        if code == _ELSEWHERE:
            self._ask_now.set()  # if the server is gone, that should be known at once
        return wire.Rejected(request_id, code, str(error))

    # --- heartbeat ----------------------------------------------------------------------------------------------------

    async def _ask_loop(self) -> str:
        """Ask how the server is, again and again; return when nobody is there any more, or another start is."""
        while True:
            is_urgent = self._ask_now.is_set()
            self._ask_now.clear()
            try:
                loads = await self._ask(is_urgent)
                if self._server.connections != self._connections and not await self._is_same_start():
                    return "it was restarted"
            except Unreachable as error:
                return str(error)
            except TransportError as error:
                logger.debug("%s: %s", self.address, error)
            else:
                self._recover()
                if loads is not None:
                    self._take_load(loads)
            await self._until_next_question()

    async def _ask(self, is_urgent: bool) -> tuple[LoadReport, ...] | None:
        """Ask for the load where that is due or decides something, else only whether the server is there, which
        returns None. To write its metrics takes vLLM 8 ms in the process that streams: so that is asked for no more
        than `LOAD_SHARE` of the time while nothing depends on it."""
        began = self._clock()
        if not is_urgent and began < self._load_due and not self._watch.wants_report(self._config.heartbeat_seconds):
            return await self._server.check()
        try:
            return await self._server.load()
        finally:
            now = self._clock()
            self._load_due = now + min((now - began) / LOAD_SHARE, LOAD_SECONDS_MAX)

    def _take_load(self, loads: tuple[LoadReport, ...]) -> None:
        own = next((load for load in loads if load.rank == self.rank), None)
        if own is not None:
            self._watch.reported(own)
        self._report(own)

    async def _until_next_question(self) -> None:
        """A heartbeat, or less where an answer is wanted at once. While output comes nobody needs to ask whether the
        server works: then until its load is due."""
        heartbeat = self._config.heartbeat_seconds
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(heartbeat, self._ask_now.wait())
            is_silent = self._watch.silent_seconds >= heartbeat / 2
            if is_silent or self._ask_now.is_set() or self._clock() >= self._load_due:
                return

    async def _is_same_start(self) -> bool:
        """Whether the server is the one that was met; one that does not say is. Raises `TransportError`."""
        connections = self._server.connections
        try:
            start = (await self._server.info()).start
        except HandshakeRefused:
            return False
        self._connections = connections
        return start == self.info.start

    async def _judge_loop(self) -> str:
        before = self._clock()
        turn = self._config.heartbeat_seconds / JUDGED_EACH_BEAT
        while True:
            await asyncio.sleep(turn)
            now = self._clock()
            # If this process itself was asleep, the server is not to blame for all of the time that has passed.
            passed = min(max(now - before, 0.0), 2 * turn)
            before = now
            self._watch.pass_by(passed, len(self._requests))
            if self._watch.silent_seconds >= self._config.give_up_seconds:
                return f"silent for {self._watch.silent_seconds:.1f} s"
            self._judge()

    def _recover(self) -> None:
        self._watch.answered()
        if self.suspect:
            self._judge()

    def _judge(self) -> None:
        """Report the server suspect, or recovered, when that has changed."""
        why = self._watch.verdict()
        asks = self._watch.is_doubted or bool(why and why != SILENT)
        if asks and self._probing is None and not self._closed:
            self._probing = asyncio.ensure_future(self._probe())
        elif not asks and not self.suspect:
            self._stop_probing()
        if why and not self.suspect:
            self.suspect = True
            self._listener.on_suspect(why)
        elif self.suspect and not why:
            self.suspect = False
            self._stop_probing()
            self._listener.on_recovered()

    async def _probe(self) -> None:
        """Ask for one token until it comes: whoever makes it works, again or still. Where its requests are gone nothing
        else would show that."""
        sampling = SamplingParams(max_new_tokens=1)
        rank = self.rank if self.info.ranks > 1 else None
        for number in itertools.count():
            name = self._name(f"probe-{number}")
            self._watch.asked(True)
            try:
                async for _ in self._server.generate(_PROBE, sampling, request_id=name, rank=rank):
                    self._watch.made_token()
                    self.saw_output()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is asked again
                logger.debug("%s makes no token: %s", self.address, error)
            self._watch.asked(False)
            await asyncio.sleep(self._config.heartbeat_seconds)

    def _stop_probing(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None
            self._watch.asked(False)

    def _report(self, load: LoadReport | None) -> None:
        self._nonce += 1
        self.counters.frames_received += 1
        seen = load or LoadReport(0, 0, 0, 0, self.rank)
        uncached = seen.waiting_uncached_tokens
        pong = wire.Pong(self._nonce, self.next_event_seq, seen.running, seen.waiting, seen.used_tokens, 0, uncached)
        self._listener.on_pong(pong)

    # --- events -------------------------------------------------------------------------------------------------------

    async def _follow(self, feed: EventFeed) -> str:
        try:
            async with running(feed.run(), self._catch_up(feed)) as tasks:
                await asyncio.gather(*tasks)
        except TransportError as error:
            return str(error)
        return "its events ended"

    async def _catch_up(self, feed: EventFeed) -> None:
        await feed.caught_up()
        self._listener.on_caught_up()

    def on_payload(self, payload: bytes) -> None:
        """From the feed: the next batch."""
        self.counters.event_batches += 1
        self._watch.moved()
        self._listener.on_payload(payload)

    def on_resync(self) -> None:
        """From the feed: what came so far is worth nothing."""
        self.counters.resyncs += 1
        self._listener.on_resync()

    def on_load(self, report: LoadReport) -> None:
        """From the feed: the load, sooner than we would have asked."""
        self._report(report)
