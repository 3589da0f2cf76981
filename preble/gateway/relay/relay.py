"""A request on its way to a server that runs already, and the answer's way back. Owns the order of things: body in,
routing key, place, body out, answer back; where it goes on when a server fails; and what is counted of it.

Until the first byte of an answer's body, nothing has been promised: a server that cannot be reached, breaks off, or
says 502, 503, 504 or 429, is left for another one; so is one whose stream begins with an error of its own. What else it
answers is the client's answer, whatever its status. A
whole answer of at most `WHOLE_BYTES` is passed on when it is whole, so that one that breaks off is asked for elsewhere,
too. A stream that breaks off later ends with an error event.

A client that goes away ends the request: the connection to the server is closed, at which engines abort.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect

from ...errors import PrebleError, TransportError, WorkerLost
from ...router.placement import Placement, PrefillPlace
from ...transport.engine_servers.http_client import TRACE_HEADERS, Unreachable
from ...transport.engine_servers.http_pool import Answer
from ..api.http import JSON, Receive, Send, error_events, read_whole
from ..connections import BoundedProtocol
from ..core.byte_budget import SMALL_BYTES, ByteShare
from ..core.config import is_keyless
from ..core.gateway import Gateway, decision_headers
from ..core.header_fields import headers_of
from ..core.http_errors import ApiError, unavailable
from ..core.models import ServedModel
from ..core.request_context import RequestContext
from .body import RelayedBody
from .endpoints import Endpoint
from .form import MEDIA_TYPE
from .headers import answer_headers, request_head, value_of
from .learned import Learned, changes_for, looked_over
from .pairs import (
    ANSWER_BYTES_MAX,
    SGLANG,
    PrefillRefused,
    bootstrap_fields,
    handed_over,
    is_separable,
    no_prefill,
    prefill_fields,
)
from .pinned import KeptAnswer
from .progress import RelayProgress, tokens_seen
from .resume import Emitted, can_resume, closing, continuation, count_tokens, names_enough, output_limit
from .routing_key import RoutingKey, routing_key
from .servers import ServerPools, parts_of
from .stream import PassingStream
from .stream_errors import is_opening, server_fault
from .usage import UsageReader, usage_reader

Scope = MutableMapping[str, Any]

WHOLE_BYTES = 1 << 20
FULL = frozenset({429, 503})  # the server takes no more
BROKEN = frozenset({502, 504})  # something between us and the server, or behind it
MODE_HEADER = "x-preble-mode"
RELAY, RESUMABLE = "relay", "relay-resumable"
# A stream that cannot go on elsewhere is lost when it is broken off, and engines hold some events back until they are
# whole (the arguments of a tool's call): it may be silent for so many times the limit of one that can.
PATIENCE = 4.0


class Relay(Learned):
    """What all relayed requests of one gateway share. Belongs to its loop."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self.pools = ServerPools(gateway.router)
        self.rng = random.Random()  # for what servers must not have the same of

    def at(self, endpoint: Endpoint) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        """The handler of one endpoint."""

        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            await self._handle(endpoint, scope, receive, send)

        return handle

    def can_remember(self, body: RelayedBody) -> bool:
        """Whether a body and what is answered to it may be kept, to go on elsewhere: where the request allows that, and
        large bodies do not fill half of what there may be."""
        bodies = self.gateway.bodies
        return can_resume(body) and (len(body.data) <= SMALL_BYTES or 2 * bodies.bytes_used <= bodies.bytes_max)

    async def kept(self, answer_id: str | None) -> KeptAnswer | None:
        """Where an answer is kept, also one that another process of this gateway passed on."""
        kept, processes = self.pinned.get(answer_id), self.gateway.processes
        if kept is None and answer_id is not None and processes is not None:
            found = await processes.keeper(answer_id)
            if found is not None:
                kept = KeptAnswer(*found)
                self.pinned.put(answer_id, kept)
        return kept

    async def _handle(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self.gateway
        if gateway.draining:
            raise unavailable("this gateway is shutting down", "draining")
        if gateway.live_choices >= gateway.config.max_live_requests:
            raise unavailable(f"{gateway.live_choices} requests are live, the bound of this gateway", "queue_full")
        gateway.live_choices += 1
        try:
            with gateway.bodies.share() as share:
                media_type = MEDIA_TYPE if endpoint.takes_form else JSON
                data = await read_whole(scope, receive, gateway.config.max_body_bytes, share, media_type)
                # What asks for an answer by its id has no body, or one that says nothing of where it goes.
                if endpoint.by_id:
                    body = RelayedBody(data, endpoint)
                else:
                    body = await looked_over(data, endpoint, headers_of(scope))
                del data
                await Exchange(self, endpoint, body, share, scope, send).attended(receive)
        finally:
            gateway.live_choices -= 1


class Exchange:
    """One request and its answer."""

    def __init__(
        self, relay: Relay, endpoint: Endpoint, body: RelayedBody, share: ByteShare, scope: Scope, send: Send
    ) -> None:
        self._relay = relay
        self._gateway = relay.gateway
        self._endpoint = endpoint
        self._body = body
        self._share = share
        self._scope = scope
        self._send = send
        self._context: RequestContext = scope["preble.context"]
        self._connection: BoundedProtocol | None = scope.get("preble.connection")
        self._client_gone = False
        self._began = False  # the client has been sent something
        self._is_answered = False  # all of it was written, and is counted in any case
        self._answer: Answer | None = None
        self._prefilling: asyncio.Task[None] | None = None  # at another server
        self._lost_text = ""
        self._continuation: dict[str, bytes] = {}
        self._passing: tuple[PassingStream, UsageReader] | None = None
        self._placement: Placement
        self._served = ServedModel("")
        self._progress: RelayProgress

    async def attended(self, receive: Receive) -> None:
        """Do it all, unless the client goes away first. Raises `ClientDisconnect`, `ApiError` and what placing does."""
        task = asyncio.current_task()
        assert task is not None, "a request is served by a task"
        connection, watcher = self._connection, None

        def gone() -> None:
            if not self._is_answered:
                self._client_gone = True
                task.cancel()

        if connection is None:
            watcher = asyncio.ensure_future(_until_gone(receive, gone))
        elif not connection.attend(gone, self._read_on):
            raise ClientDisconnect
        try:
            await self._run()
        except asyncio.CancelledError:
            if self._client_gone:
                raise ClientDisconnect from None
            raise
        finally:
            if connection is not None:
                connection.attend(None)
            if watcher is not None:
                watcher.cancel()

    def _read_on(self) -> None:
        """The client has read what was written."""
        if self._answer is not None:
            self._answer.go_on()

    async def _run(self) -> None:
        gateway, context, body = self._gateway, self._context, self._body
        kept = await self._kept()
        if not self._endpoint.by_id:
            self._served = await gateway.models.get_now(body.model)
        elif kept is not None:
            self._served = ServedModel(kept.model)
        elif context.models is not None:
            raise ApiError(404, "no answer of this id is known here", param="id", code="not_found")
        if self._endpoint.generates:
            gateway.check_choices(body.n * body.prompts)
        key = await self._relay.key_of(context, body, self._served)
        context.charge(max(body.n * body.prompts - 1, 0))
        self._progress = RelayProgress(gateway, context, key)
        exclude = self._relay.all_but(kept, self._served.exclude)
        separable = is_separable(body, self._endpoint, self._served.engine)
        placement = self._placement = await self._relay.place(
            context, body, key, exclude, client=context.key_name, separable=separable
        )
        try:
            await self._pass_on(key)
        except asyncio.CancelledError:  # the client has gone, or its time is over
            self._count_unfinished()
            raise
        finally:
            placement.cancel()
            self._hang_up()

    async def _kept(self) -> KeptAnswer | None:
        """Where the answer is kept that is asked for, or gone on from; None where there is none, or nobody knows."""
        by_id = self._endpoint.by_id
        return await self._relay.kept(self._scope["path_params"]["id"] if by_id else self._body.previous_response_id)

    @property
    def _resumable(self) -> bool:
        """Whether the stream that passes can be gone on with elsewhere, now."""
        return self._passing is not None and self._passing[0].resumable

    def _hang_up(self) -> None:
        if self._answer is not None:
            self._answer.close()
        if self._prefilling is not None:
            self._prefilling.cancel()
            self._prefilling = None

    # --- the request --------------------------------------------------------------------------------------------------

    async def _pass_on(self, key: RoutingKey) -> None:
        """Ask one server after the other until one has begun to answer, and pass that answer on."""
        while True:
            try:
                answer = await self._ask()
                if answer.status in FULL or answer.status in BROKEN:
                    await self._elsewhere(f"the server answers {answer.status}", full=answer.status in FULL)
                    continue
                first = await self._first_part(answer)
                fault = server_fault(first) if answer.status == 200 and _is_stream(answer) else None
                if fault is not None:
                    await self._elsewhere(fault.text, full=fault.full)
                    continue
            except TransportError as error:
                await self._elsewhere(str(error), doubt=isinstance(error, Unreachable))
                continue
            break
        self._progress.placed(self._placement)
        if _is_stream(answer):
            await self._pass_stream(answer, first, key)
        else:
            await self._pass_whole(answer, first, key)

    async def _elsewhere(self, text: str, *, full: bool = False, doubt: bool = False) -> None:
        self._hang_up()
        self._answer = None
        await self._placement.failed(text, full=full, doubt=doubt)

    async def _ask(self) -> Answer:
        """The answer of the placement's server, when its head is here. Raises `TransportError`."""
        placement = self._placement
        placement.on_lost = self._lost
        await placement.turn()
        changes = self._changes(placement)
        if placement.prefill is not None:
            changes |= await self._prefill(placement.prefill)
        return await self._send_to(placement, self._body.edited(changes), self._sent)

    async def _send_to(
        self, place: Placement | PrefillPlace, data: bytes, on_sent: Callable[[Answer], object]
    ) -> Answer:
        """Send the request with this body to a server; its answer, when its head is here. Raises `TransportError`."""
        scope = self._scope
        (host, base), key = parts_of(place.url), place.options.api_key
        own = [(b"x-request-id", self._context.request_id.encode())]
        own += [(name.encode(), value.encode()) for name, value in TRACE_HEADERS.get().items()]
        rank = place.rank
        if key:
            own.append((b"authorization", f"Bearer {key}".encode()))
        if rank is not None:
            own.append((b"x-data-parallel-rank", b"%d" % rank))
        target = base + (scope.get("raw_path") or scope["path"].encode())
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        head = request_head(
            target,
            host,
            scope["headers"],
            len(data) if data or scope["method"] != "GET" else None,
            method=scope["method"].encode(),
            hide_keys=bool(key) or not is_keyless(self._gateway.config),
            own=own,
            ranked=rank is not None,
        )
        return await self._relay.pools.of(place).send(head, data, on_sent=on_sent)

    # --- the prefill at another server --------------------------------------------------------------------------------

    async def _prefill(self, place: PrefillPlace) -> dict[str, bytes]:
        """Have a prompt prefilled elsewhere; returns what the placement's own server must be sent for that. Raises
        `TransportError`; then the placement keeps away from that server."""
        changes = self._changes(place)
        if place.info.engine == SGLANG:
            fields = bootstrap_fields(place, self._relay.rng)
            data = self._body.edited({**changes, **fields})
            self._prefilling = asyncio.ensure_future(self._prefill_beside(place, data))
            return fields
        try:
            answer = await self._prefilled(place, self._body.edited({**changes, **prefill_fields(self._body)}))
            fields = handed_over(answer)
        except PrefillRefused:
            fields = {}
        except TransportError:
            self._keep_away(place)
            raise
        self._placement.prefilled()
        return fields

    async def _prefill_beside(self, place: PrefillPlace, data: bytes) -> None:
        """See to the prefill while the other server waits for it; where it fails, that one need not wait."""
        try:
            await self._prefilled(place, data)
        except PrefillRefused:
            pass  # so does the other
        except TransportError as error:
            self._keep_away(place)
            self._break_off(str(error))
            return
        self._placement.prefilled()

    async def _prefilled(self, place: PrefillPlace, data: bytes) -> bytes:
        """The whole answer of the server that prefills, which is hung up on where nobody waits for it any more. Raises
        `TransportError` for any but a good one."""
        answer: Answer | None = None
        stall: Stall | None = None
        limit = self._gateway.config.stalled_after_seconds

        def sent(answer: Answer) -> None:
            nonlocal stall
            if stall is not None:
                stall.cancel()
            stall = Stall(answer, limit)

        try:
            answer = await self._send_to(place, data, sent)
            parts, size = [], 0
            while part := await answer.read():
                parts.append(part)
                size += len(part)
                if size > ANSWER_BYTES_MAX:
                    raise TransportError(f"the server that prefills answers more than {ANSWER_BYTES_MAX} bytes")
            if answer.status != 200:
                raise no_prefill(answer.status, b"".join(parts))
            return b"".join(parts)
        finally:
            if stall is not None:
                stall.cancel()
            if answer is not None:
                answer.close()

    def _keep_away(self, place: PrefillPlace) -> None:
        self._placement.failed_workers.add(place.worker)
        place.doubt()

    def _changes(self, place: Placement | PrefillPlace) -> dict[str, bytes]:
        """What is edited into the body for a server, the usage of a stream and where to go on among it."""
        changes = changes_for(place, self._body, self._served, self._placement.worker_claim)
        return {**changes, **self._body.usage_changes(), **self._continuation}

    def _sent(self, answer: Answer) -> None:
        self._answer = answer
        if self._placement.attempt is None:
            self._lost()

    def _lost(self) -> None:
        """The placement's server is lost, or its client's time is over."""
        self._break_off(f"worker {self._placement.worker} is lost")

    def _break_off(self, text: str) -> None:
        """Do without the answer, where the request can go on elsewhere."""
        if self._answer is not None and (self._resumable or not self._began):
            self._answer.break_off(TransportError(text))

    # --- the answer ---------------------------------------------------------------------------------------------------

    async def _first_part(self, answer: Answer) -> bytes:
        """What of the body there must be before a byte of it is passed on: of a stream some, an error or output among
        it; of another one all, if it is not too long. Raises `TransportError`, also for a stream that only begins."""
        if _is_stream(answer):
            stall = Stall(answer, self._gateway.config.stalled_after_seconds)
            try:
                first = await answer.read()
                while first and is_opening(self._endpoint.kind, first) and (more := await answer.read()):
                    first += more
                return first
            finally:
                stall.cancel()
        first = await answer.read()
        parts, size = [first], len(first)
        while size <= WHOLE_BYTES and (part := await answer.read()):
            parts.append(part)
            size += len(part)
        return b"".join(parts) if len(parts) > 1 else first

    async def _begin(self, answer: Answer, mode: str, length: bytes = b"") -> None:
        if not self._resumable:  # nobody needs it any more
            self._body.forget()
            self._share.give_back()
        own = {MODE_HEADER: mode, **decision_headers(self._context.progress)}
        headers = answer_headers(answer.headers, own)
        if length:
            headers.append((b"content-length", length))
        self._began = True
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def _pass_whole(self, answer: Answer, first: bytes, key: RoutingKey) -> None:
        """Pass on an answer that is no stream. Raises `TransportError` for one that breaks off after it has begun."""
        reader = usage_reader(self._endpoint, False) if 200 <= answer.status < 300 else None
        if answer.is_whole:
            await self._pass_at_once(reader, first, key)
            return
        await self._begin(answer, RELAY, value_of(answer.headers, b"content-length"))
        part = first
        while part:
            if reader is not None:
                self._read(reader, part, key)
            await self._write(part)
            part = await answer.read()
        self._count_whole(reader, key)
        await self._write(b"", more=False)

    async def _pass_at_once(self, reader: UsageReader | None, body: bytes, key: RoutingKey) -> None:
        """Pass on an answer that is here as a whole. It leaves before it is read and counted; but what it takes of its
        key's limits is known to the next request, wherever that comes in."""
        assert self._answer is not None, "it is passed on"
        await self._begin(self._answer, RELAY, b"%d" % len(body))
        if self._context.spend is not None:
            self._count_whole(reader, key, body)
            await self._write(body, more=False)
            return
        await self._write(body, more=False)
        self._is_answered = True
        try:
            await asyncio.sleep(0)  # the loop writes before it goes on here
        finally:
            self._count_whole(reader, key, body)

    def _count_whole(self, reader: UsageReader | None, key: RoutingKey, body: bytes = b"") -> None:
        """An answer is whole, of which this was not read yet."""
        if reader is not None:
            if body:
                self._read(reader, body, key)
            reader.end()
            self._finish(reader, key)

    async def _pass_stream(self, answer: Answer, first: bytes, key: RoutingKey) -> None:
        """Pass on a stream, and go on elsewhere where it breaks off and that can be done."""
        may_go_on = answer.status == 200 and self._relay.can_remember(self._body)
        resumable = may_go_on and names_enough(self._body, first)
        reader = usage_reader(self._endpoint, True, remove_usage=bool(self._body.usage_changes()))
        stream = PassingStream(
            self._endpoint.kind, reader, resumable=resumable, cumulative=self._placement.info.cumulative
        )
        self._passing = stream, reader
        await self._begin(answer, RESUMABLE if resumable else RELAY)

        def take(part: bytes) -> bytes:
            self._placement.saw_output()
            had = reader.first_token
            part = stream.take(part)
            if stream.fault_text and self._answer is not None:
                self._answer.break_off(TransportError(stream.fault_text))
            self._pin(reader)
            if reader.first_token and not had:
                self._note_first_token(reader, key)
            return part

        try:
            await self._write(take(first))
            while not await self._flow(answer, stream, take):
                found = await self._found(stream)
                if found.finish_reason is not None or found.has_all(output_limit(self._body)):
                    end = closing(found, await self._prompt_tokens(key), self._body.include_usage)
                    self._progress.left(reader, found.tokens, found.reason or "length")
                    self._placement.finish(found.tokens)
                    await self._write(stream.cut() + end, more=False)
                    return
                answer = await self._go_on(stream, found)
        except PrebleError as error:
            self._count_unfinished()
            self._placement.broke_off(error)
            self._gateway.metrics.broken_off(self._endpoint.kind)
            await self._write(error_events(error, self._endpoint.path, stream.last), more=False)
            return
        rest = stream.end()
        self._finish(reader, key)
        await self._write(rest, more=False)

    async def _flow(self, answer: Answer, stream: PassingStream, take: Callable[[bytes], bytes]) -> bool:
        """Pass on what comes until the answer is whole; False where it was lost and may be gone on with. Raises
        `TransportError` where it may not."""
        self._answer = answer
        stall = Stall(answer, self._gateway.config.stalled_after_seconds, stream)
        connection = self._connection
        try:
            if connection is None:
                while part := await answer.read():
                    await self._write(take(part))
            else:
                cycle = connection.cycle
                write = cycle.write_part

                def sink(part: bytes) -> bool:
                    part = take(part)
                    return write(part) if part else True

                way = cycle.way_of_chunks()
                if way is not None:
                    flow, direct = way
                    stream.plain.connect(cycle, flow, direct, self._placement.on_output)
                answer.flow(sink, None if way is None else stream.plain.take)
                await answer.flown()
            if not stream.is_ended:
                raise TransportError(stream.fault_text or "the stream ended before its end")
        except TransportError as error:
            if not stream.resumable:
                raise
            self._lost_text = str(error)
            return False
        finally:
            stall.cancel()
        return True

    async def _prompt_tokens(self, key: RoutingKey) -> int:
        """As many as the prompt has, by the model's tokenizer where there is one."""
        if not key.exact and self._body.include_usage:
            key = await routing_key(
                self._body,
                self._gateway.codec,
                model=self._context.model,
                engine=self._served.engine,
                mismatches=self._relay.mismatches,
            )
        return len(key.token_ids)

    async def _found(self, stream: PassingStream) -> Emitted:
        """What the client was sent, and what is asked of another server so that it goes on. Raises `WorkerLost` where
        none can."""
        found = stream.emitted()
        if found is not None and not self._relay.mismatches.text_only(self._endpoint.kind, self._context.model):
            await count_tokens(found, self._gateway.codec)
        changes = None if found is None else continuation(self._body, found)
        if found is None or changes is None:
            raise WorkerLost(f"the stream cannot be gone on with after: {self._lost_text}")
        self._continuation = changes
        return found

    async def _go_on(self, stream: PassingStream, found: Emitted) -> Answer:
        """The answer of another server that goes on with the stream. Raises `PrebleError` where none does."""
        text = self._lost_text
        self._placement.emitted(self._placement.prompt, found.tokens)
        await self._elsewhere(text)
        cumulative = stream.cumulative
        while True:
            try:
                answer = await self._ask()
                if answer.status == 200 and _is_stream(answer):
                    break
                full = answer.status in FULL
                if not (full or answer.status >= 500):
                    raise WorkerLost(f"the stream cannot be gone on with after: {text}")
                await self._elsewhere(f"the server answers {answer.status}", full=full)
            except WorkerLost:
                raise
            except TransportError as error:
                await self._elsewhere(str(error), doubt=isinstance(error, Unreachable))
        if self._endpoint.kind == "generate" and self._placement.info.cumulative != cumulative:
            raise WorkerLost(f"the stream cannot be gone on with after: {text}")
        stream.go_on(found)
        return answer

    async def _write(self, part: bytes, *, more: bool = True) -> None:
        if part or not more:
            await self._send({"type": "http.response.body", "body": part, "more_body": more})

    # --- what is read in passing --------------------------------------------------------------------------------------

    def _read(self, reader: UsageReader, part: bytes, key: RoutingKey) -> None:
        had = reader.first_token
        reader.feed(part)
        self._pin(reader)
        if reader.first_token and not had:
            self._note_first_token(reader, key)

    def _note_first_token(self, reader: UsageReader, key: RoutingKey) -> None:
        self._placement.first_token(self._cached(reader, key))
        self._progress.first_token()

    def _cached(self, reader: UsageReader, key: RoutingKey) -> int | None:
        decision = self._placement.decision
        return key.cached(reader.cached_tokens, reader.prompt_tokens, decision.matched_tokens if decision else 0)

    def _pin(self, reader: UsageReader) -> None:
        """Remember where an answer is kept that may be asked for again."""
        if self._endpoint.kind == "responses" and reader.answer_id is not None:
            self._relay.pinned.put(reader.answer_id, KeptAnswer(self._placement.worker, self._context.model))

    def _count_unfinished(self) -> None:
        """Count what a client was sent of an answer that ends before it is whole."""
        self._progress.placed(self._placement)
        if self._passing is None:
            self._progress.left(None, 0)
            return
        stream, reader = self._passing
        self._progress.left(reader, tokens_seen(self._endpoint.kind, reader, stream.plain.passed))

    def _finish(self, reader: UsageReader, key: RoutingKey) -> None:
        reason = reader.finish_reasons[0] if reader.finish_reasons else "stop"
        self._placement.finish(reader.output_tokens or 0, self._cached(reader, key), reason)
        self._progress.finished(reader)
        self._pin(reader)
        kind = self._endpoint.kind
        # Of a stream that went on elsewhere, and of several choices of SGLang's, the count is of more than the prompt.
        is_of_prompt = not self._continuation and (kind != "generate" or self._body.n == 1)
        counted = reader.prompt_tokens if is_of_prompt else None
        if self._relay.mismatches.compare(kind, self._context.model, key, counted):
            self._gateway.metrics.tokens_differ(kind)


class Stall:
    """Breaks an answer off that has been silent for too long: `limit_seconds` where `stream` can go on elsewhere, else
    `PATIENCE` times that."""

    def __init__(self, answer: Answer, limit_seconds: float, stream: PassingStream | None = None) -> None:
        self._answer = answer
        self._limit_seconds = limit_seconds
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._limit, self._look)

    @property
    def _limit(self) -> float:
        is_resumable = self._stream is not None and self._stream.resumable
        return self._limit_seconds if is_resumable else self._limit_seconds * PATIENCE

    def cancel(self) -> None:
        """It is over."""
        self._timer.cancel()

    def _look(self) -> None:
        left = self._answer.last_at + self._limit - self._loop.time()
        if left <= 0.0 and not self._answer.is_paused:
            self._answer.break_off(TransportError(f"silent for {self._limit:g} s"))
        else:
            self._timer = self._loop.call_later(left if left > 0.0 else self._limit, self._look)


def _is_stream(answer: Answer) -> bool:
    return value_of(answer.headers, b"content-type").startswith(b"text/event-stream")


async def _until_gone(receive: Receive, gone: Callable[[], None]) -> None:
    """The body has been read: from now on the only news from a client is that it has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    gone()
