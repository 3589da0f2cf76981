"""A request on its way to a server that runs already, and the answer's way back. Owns the order of things: body in,
routing key, place, body out, answer back; where it goes on when a server fails; and what is counted of it.

Until the first byte of an answer's body, nothing has been promised: a server that cannot be reached, breaks off, or
says 502, 503, 504 or 429, is left for another one. What else it answers is the client's answer, whatever its status. A
whole answer of at most `WHOLE_BYTES` is passed on when it is whole, so that one that breaks off is asked for elsewhere,
too. A stream that breaks off later ends with an error event.

A client that goes away ends the request: the connection to the server is closed, at which engines abort.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.requests import ClientDisconnect, Request

from ...errors import PrebleError, TransportError
from ...router.placement import Placement
from ...transport.engine_servers.http_client import TRACE_HEADERS, Unreachable
from ...transport.engine_servers.http_pool import Answer
from ..api.http import DONE, Receive, Send, body_of, off_loop, sse
from ..core.config import is_keyless
from ..core.gateway import Gateway, decision_headers
from ..core.http_errors import api_error_of, unavailable
from ..core.models import ServedModel
from ..core.request_context import RequestContext
from ..core.sessions import with_body
from .body import RelayedBody, read_body
from .endpoints import Endpoint
from .headers import answer_headers, request_head, value_of
from .pinned import PinnedAnswers
from .progress import RelayProgress
from .routing_key import Mismatches, RoutingKey, routing_key
from .servers import ServerPools, path_of
from .usage import UsageReader, usage_reader

Scope = MutableMapping[str, Any]

WHOLE_BYTES = 1 << 20
FULL = frozenset({429, 503})  # the server takes no more
BROKEN = frozenset({502, 504})  # something between us and the server, or behind it
MODE_HEADER = "x-preble-mode"


class Relay:
    """What all relayed requests of one gateway share. Belongs to its loop."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.pools = ServerPools(gateway.router)
        self.mismatches = Mismatches()
        self.pinned = PinnedAnswers()

    def at(self, endpoint: Endpoint) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        """The handler of one endpoint."""

        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            await self._handle(endpoint, scope, receive, send)

        return handle

    async def _handle(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self.gateway
        if gateway.draining:
            raise unavailable("this gateway is shutting down", "draining")
        if gateway.live_choices >= gateway.config.max_live_requests:
            raise unavailable(f"{gateway.live_choices} requests are live, the bound of this gateway", "queue_full")
        gateway.live_choices += 1
        try:
            async with body_of(Request(scope, receive), gateway) as data:
                # What asks for an answer by its id has no body, or one that says nothing of where it goes.
                read = RelayedBody if endpoint.by_id else read_body
                body = await off_loop(len(data), read, data, endpoint)
                exchange = Exchange(self, endpoint, body, scope, send)
                await exchange.attended(receive)
        finally:
            gateway.live_choices -= 1


class Exchange:
    """One request and its answer."""

    def __init__(self, relay: Relay, endpoint: Endpoint, body: RelayedBody, scope: Scope, send: Send) -> None:
        self._relay = relay
        self._gateway = relay.gateway
        self._endpoint = endpoint
        self._body = body
        self._scope = scope
        self._send = send
        self._context: RequestContext = scope["preble.context"]
        self._client_gone = False
        self._began = False  # the client has been sent something
        self._answer: Answer | None = None
        self._placement: Placement
        self._served = ServedModel("")
        self._progress: RelayProgress

    async def attended(self, receive: Receive) -> None:
        """Do it all, unless the client goes away first. Raises `ClientDisconnect`, `ApiError` and what placing does."""
        task = asyncio.current_task()
        assert task is not None, "a request is served by a task"
        watcher = asyncio.ensure_future(self._watch(receive, task))
        try:
            await self._run()
        except asyncio.CancelledError:
            if self._client_gone:
                raise ClientDisconnect from None
            raise
        finally:
            watcher.cancel()

    async def _watch(self, receive: Receive, task: asyncio.Task[Any]) -> None:
        """The body has been read: from now on the only news from a client is that it has gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client_gone = True
        task.cancel()

    async def _run(self) -> None:
        gateway, context, body = self._gateway, self._context, self._body
        if not self._endpoint.by_id:
            self._served = await gateway.models.get_now(body.model)
        served = self._served
        context.model = served.name
        context.stream = body.stream
        named = {name: body.text(name) for name in ("prompt_cache_key", "user")}
        context.session = with_body(context.session, **named)
        began = gateway.metrics.clock()
        key = await routing_key(
            body,
            gateway.codec,
            model=context.model,
            engine=served.engine,
            namespace=served.namespace,
            mismatches=self._relay.mismatches,
            tokens_max=served.max_model_tokens,
        )
        gateway.metrics.phase("tokenize", gateway.metrics.clock() - began)
        context.charge(max(body.n * body.prompts - 1, 0))
        self._progress = RelayProgress(gateway, context, key)
        placement = self._placement = await gateway.router.place(
            key.token_ids,
            namespace=key.namespace,
            request_id=f"{context.request_id}#{secrets.token_hex(6)}",
            client=context.key_name,
            first_token_seconds=gateway.left_seconds(context),
            session=context.session or None,
            max_new_tokens=body.max_tokens or None,
            exclude=self._excluded(),
            streamed=body.stream,
        )
        try:
            await self._pass_on(key)
        finally:
            placement.cancel()
            self._hang_up()

    def _excluded(self) -> frozenset[str]:
        """Workers that it must not go to: those of other models, and all but the one that keeps what is asked for."""
        endpoint, exclude = self._endpoint, self._served.exclude
        named = self._scope["path_params"].get("id") if endpoint.by_id else self._body.previous_response_id
        keeper = self._relay.pinned.get(named)
        ids = self._gateway.router.fleet.worker_ids
        return exclude if keeper is None or keeper not in ids else exclude.union(ids) - {keeper}

    def _hang_up(self) -> None:
        if self._answer is not None:
            self._answer.close()

    # --- the request --------------------------------------------------------------------------------------------------

    async def _pass_on(self, key: RoutingKey) -> None:
        """Ask one server after the other until one has begun to answer, and pass that answer on."""
        while True:
            try:
                answer = await self._ask()
                if answer.status in FULL or answer.status in BROKEN:
                    await self._elsewhere(f"the server answers {answer.status}", full=answer.status in FULL)
                    continue
                reader = usage_reader(self._endpoint, self._is_stream(answer), remove_usage=self._adds_usage)
                first = await self._first_part(answer)
            except TransportError as error:
                await self._elsewhere(str(error), doubt=isinstance(error, Unreachable))
                continue
            break
        self._progress.placed(self._placement)
        await self._pass_back(answer, reader, first, key)

    async def _elsewhere(self, text: str, *, full: bool = False, doubt: bool = False) -> None:
        self._hang_up()
        self._answer = None
        await self._placement.failed(text, full=full, doubt=doubt)

    @property
    def _adds_usage(self) -> bool:
        """Whether the stream's usage is asked for by the gateway, and not by the client."""
        body = self._body
        if not (body.stream and self._endpoint.usage_option) or body.include_usage:
            return False
        return not body.given("stream_options") or isinstance(body.small("stream_options"), dict)

    async def _ask(self) -> Answer:
        """The answer of the placement's server, when its head is here. Raises `TransportError`."""
        placement, scope = self._placement, self._scope
        placement.on_lost = self._lost
        data = self._body.edited(self._changes())
        url, key = placement.url, placement.options.api_key
        own = [(b"x-request-id", self._context.request_id.encode())]
        own += [(name.encode(), value.encode()) for name, value in TRACE_HEADERS.get().items()]
        rank = placement.rank
        if key:
            own.append((b"authorization", f"Bearer {key}".encode()))
        if rank is not None:
            own.append((b"x-data-parallel-rank", b"%d" % rank))
        target = path_of(url) + (scope.get("raw_path") or scope["path"].encode())
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        head = request_head(
            target,
            urlsplit(url).netloc.rpartition("@")[2].encode(),
            scope["headers"],
            len(data) if data or scope["method"] != "GET" else None,
            method=scope["method"].encode(),
            hide_keys=bool(key) or not is_keyless(self._gateway.config),
            own=own,
            ranked=rank is not None,
        )
        pool = self._relay.pools.of(placement)
        return await pool.send(head, data, on_sent=self._sent)

    def _changes(self) -> dict[str, bytes]:
        """What is edited into the body: the rank, as SGLang wants it, and the usage of a stream."""
        changes: dict[str, bytes] = {}
        placement = self._placement
        if placement.rank is not None and placement.info.engine == "sglang" and self._endpoint.generates:
            changes["routed_dp_rank"] = b"%d" % placement.rank
        if self._served.sent_name is not None and "model" in self._body.fields:
            changes["model"] = msgspec.json.encode(self._served.sent_name)
        if self._adds_usage:
            options = self._body.small("stream_options") or {}
            changes["stream_options"] = msgspec.json.encode({**options, "include_usage": True})
        return changes

    def _sent(self, answer: Answer) -> None:
        self._answer = answer
        if self._placement.attempt is None:
            self._lost()

    def _lost(self) -> None:
        """The placement's server is lost, or its client's time is over."""
        if self._answer is not None and not self._began:
            self._answer.break_off(TransportError(f"worker {self._placement.worker} is lost"))

    # --- the answer ---------------------------------------------------------------------------------------------------

    def _is_stream(self, answer: Answer) -> bool:
        return value_of(answer.headers, b"content-type").startswith(b"text/event-stream")

    async def _first_part(self, answer: Answer) -> bytes:
        """What of the body there must be before a byte of it is passed on: of a stream some, of another one all, if it
        is not too long."""
        first = await answer.read()
        if self._is_stream(answer):
            return first
        parts, size = [first], len(first)
        while size <= WHOLE_BYTES and (part := await answer.read()):
            parts.append(part)
            size += len(part)
        return b"".join(parts) if len(parts) > 1 else first

    async def _pass_back(self, answer: Answer, reader: UsageReader, first: bytes, key: RoutingKey) -> None:
        placement, send = self._placement, self._send
        well = 200 <= answer.status < 300
        headers = answer_headers(answer.headers, {MODE_HEADER: "relay", **decision_headers(self._context.progress)})
        if not self._is_stream(answer):
            length = b"%d" % len(first) if answer.is_whole else value_of(answer.headers, b"content-length")
            if length:
                headers.append((b"content-length", length))
        self._began = True
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        part = first
        try:
            while part:
                placement.saw_output()
                if well:
                    part = self._read(reader, part)
                if part:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                part = await answer.read()
        except TransportError as error:
            if not self._is_stream(answer):
                raise
            await send({"type": "http.response.body", "body": _error_event(error), "more_body": False})
            return
        rest = reader.end() if well else b""
        if well:
            self._finish(reader, key)
        await send({"type": "http.response.body", "body": rest, "more_body": False})

    def _read(self, reader: UsageReader, part: bytes) -> bytes:
        """Read a part in passing; what of it goes on."""
        had = reader.first_token
        part = reader.feed(part)
        self._pin(reader)
        if reader.first_token and not had:
            self._placement.first_token(reader.cached_tokens)
            self._progress.first_token()
        return part

    def _pin(self, reader: UsageReader) -> None:
        """Remember where an answer is kept that may be asked for again."""
        if self._endpoint.kind == "responses" and reader.answer_id is not None:
            self._relay.pinned.put(reader.answer_id, self._placement.worker)

    def _finish(self, reader: UsageReader, key: RoutingKey) -> None:
        reason = reader.finish_reasons[0] if reader.finish_reasons else "stop"
        self._placement.finish(reader.output_tokens or 0, reader.cached_tokens if key.exact else None, reason)
        self._progress.finished(reader)
        self._pin(reader)
        self._relay.mismatches.compare(self._endpoint.kind, self._context.model, key, reader.prompt_tokens)


def _error_event(error: PrebleError) -> bytes:
    return sse(api_error_of(error).body()) + DONE
