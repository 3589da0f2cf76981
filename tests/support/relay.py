"""What the tests of relayed requests share: engine servers whose answers are scripts of raw bytes, and a gateway before
them in the same process, with real sockets on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import aiohttp
import uvicorn
from uvicorn.server import ServerState

from preble.gateway.app import make_app
from preble.gateway.connections import BoundedProtocol, ConnectionLimits, Connections
from preble.gateway.core.config import GatewayConfig
from preble.gateway.core.gateway import Gateway
from preble.gateway.core.metrics import Metrics
from preble.policies.base import Policy
from preble.router.router import Router, RouterConfig
from preble.transport.engine_servers.server_info import ServerOptions
from preble.types import Role
from tests.support.transport import assert_bookings_are_even, fast, until

JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def events_of(body: bytes) -> list[Any]:
    """The events of a stream, its end included."""
    found = [one.removeprefix(b"data: ") for one in body.split(b"\n\n") if one]
    return [json.loads(one) if one != b"[DONE]" else None for one in found]


class Call:
    """One request that a server got, and the means to answer it."""

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes, writer: Any) -> None:
        self.method, self.path, self.headers, self.body = method, path, headers, body
        self.gone = asyncio.Event()  # the other side has hung up
        self._writer = writer

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)

    async def write(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def answer(self, value: Any, status: int = 200, headers: str = "") -> None:
        """A whole answer."""
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}content-length: {len(body)}\r\n\r\n"
        await self.write(head.encode() + body)

    async def stream(self, *events: Any, end: bool = True) -> None:
        """A stream of events, each a chunk of its own."""
        await self.write(STREAM_HEAD)
        for one in events:
            await self.write(chunk(event(one)))
        if end:
            await self.write(chunk(event(b"[DONE]")) + b"0\r\n\r\n")

    def reset(self) -> None:
        """Hang up."""
        self._writer.transport.abort()

    def close(self) -> None:
        """Hang up in good order."""
        self._writer.close()


Script = Callable[[Call], Awaitable[None]]


def chat_answer(text: str = "hello", *, prompt: int = 5, cached: int = 0, output: int = 3) -> dict[str, Any]:
    """A whole chat completion."""
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    usage["prompt_tokens_details"] = {"cached_tokens": cached}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "chatcmpl-1", "object": "chat.completion", "model": "tiny", "choices": [choice], "usage": usage}


def chat_events(*texts: str, reason: str | None = "stop", name: str = "chatcmpl-1", opening: bool = True) -> list[Any]:
    """The events of a streamed chat, without the one that has the usage."""
    envelope = {"id": name, "object": "chat.completion.chunk", "created": 7, "model": "tiny"}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}] if opening else []
    deltas += [{"content": text} for text in texts]
    events = [{**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if reason is not None:
        events.append({**envelope, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    return events


def usage_event(*, prompt: int = 5, cached: int = 0, output: int = 3) -> dict[str, Any]:
    """The event that has the usage of a stream."""
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [], "usage": usage}


class ScriptedServer:
    """An engine's server: it says what it is, and answers requests as `script` does. `adapters` are those of `model`
    that /v1/models lists; `more` is in its /server_info, where it is SGLang's."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        kind: str = "sglang",
        ranks: int = 1,
        model: str = "tiny",
        adapters: Sequence[str] = (),
        role: Role = "both",
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self.kind, self.ranks, self.role, self.more = kind, ranks, role, more or {}
        self.model, self.adapters = model, list(adapters)
        self.script = script
        self.calls: list[Call] = []
        self.connections = 0
        self.port = 0
        self.awake = asyncio.Event()
        self.awake.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def worker(self) -> str:
        """What the router calls it."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> ScriptedServer:
        """Listen, at the same port as before if it had one."""
        self._server = await asyncio.start_server(self._meet, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Close the port and every connection."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while (call := await self._read(reader, writer)) is not None:
                await self.awake.wait()
                about_itself = call.method == "GET" and not call.path.startswith("/v1/responses/")
                if about_itself or self.script is None:
                    await self._say(call)
                    continue
                self.calls.append(call)
                script = asyncio.ensure_future(self.script(call))
                watch = asyncio.ensure_future(reader.read(1))
                try:
                    await asyncio.wait([script, watch], return_when=asyncio.FIRST_COMPLETED)
                    if watch.done() and not script.done():
                        call.gone.set()
                        break
                    script.result()
                finally:
                    script.cancel()
                    watch.cancel()
                    await asyncio.gather(script, watch, return_exceptions=True)
        except (ConnectionError, asyncio.CancelledError, asyncio.IncompleteReadError):
            pass
        finally:
            self.connections -= 1
            self._tasks.discard(task)
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        lines = head.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
        if headers.get("transfer-encoding") == "chunked":
            body = await _chunks(reader)
        else:
            body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Call(method, target, headers, body, writer)

    async def _say(self, call: Call) -> None:
        path = call.path.partition("?")[0]
        if path not in self.facts:
            await call.answer({}, 404)
        else:
            await call.answer(self.facts[path])

    @property
    def facts(self) -> dict[str, Any]:
        """What it says of itself, by path."""
        cards = [{"id": self.model, "object": "model", "parent": None, "max_model_len": 4096}]
        cards += [{"id": name, "object": "model", "parent": self.model} for name in self.adapters]
        models = {"/v1/models": {"object": "list", "data": cards}}
        if self.kind == "sglang":
            info = {"version": "0.5.23", "served_model_name": self.model, "page_size": 1, "context_length": 4096}
            if self.role != "both":
                info |= {"disaggregation_mode": self.role, "disaggregation_bootstrap_port": 8123}
            info |= {"max_total_num_tokens": 50_000, "max_running_requests": 8, "dp_size": self.ranks, **self.more}
            load = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}
            loads = [{**load, "max_total_num_tokens": 50_000, "dp_rank": rank} for rank in range(self.ranks)]
            return {"/server_info": {**info, "startup_time": {"a": 1.0}}, "/v1/loads": {"loads": loads}, **models}
        cache = [
            f'vllm:cache_config_info{{block_size="4",engine="{rank}",num_gpu_blocks="12500"}} 1.0'
            for rank in range(self.ranks)
        ]
        return {
            **models,
            "/version": {"version": "0.32.0"},
            "/health": b"",
            "/metrics": "\n".join([*cache, "process_start_time_seconds 1.0", ""]).encode(),
        }


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """A body in chunks, without trailers."""
    parts: list[bytes] = []
    while size := int(await reader.readline(), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readline()
    return b"".join(parts)


class InOrder(Policy):
    """The first of these servers that may take a request."""

    name = reason = "in_order"

    def __init__(self, *servers: ScriptedServer) -> None:
        self._order = [server.worker for server in servers]

    def score(self, request: Any, workers: Any) -> Sequence[float]:
        """Less for those that come first."""
        return [float(self._order.index(worker_id)) for worker_id in workers.ids]


class Front:
    """A gateway that listens, and a client of it."""

    def __init__(
        self, gateway: Gateway, servers: Sequence[ScriptedServer], port: int, session: aiohttp.ClientSession
    ) -> None:
        self.gateway, self.servers, self.port, self.session = gateway, servers, port, session

    @property
    def router(self) -> Router:
        """Its router."""
        return self.gateway.router

    async def post(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of one request."""
        async with self.send(path, body, headers) as answer:
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.read()

    def send(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Any:
        """A request whose answer is to be read by the caller."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json", **(headers or {})}
        return self.session.post(f"http://127.0.0.1:{self.port}{path}", data=data, headers=given)

    async def settled(self) -> None:
        """Wait until nothing of any request is left, and check that."""
        gateway = self.gateway
        await until(lambda: gateway.live_choices == 0, "requests have ended")
        assert gateway.bodies.bytes_used == 0
        assert gateway.router.stats()["live_requests"] == 0
        for worker in gateway.router.fleet.workers.values():
            assert worker.relayed == 0, f"{worker.relayed} places at {worker.address} were not given back"
        gateway.router.check()
        assert_bookings_are_even(gateway.router)


@contextlib.asynccontextmanager
async def serving(
    *servers: ScriptedServer,
    codec: Any = None,
    options: ServerOptions | None = None,
    router_config: RouterConfig | None = None,
    policy: Any = "e2",
    **config: Any,
) -> AsyncIterator[Front]:
    """A gateway before these servers, which are started and stopped with it."""
    for server in servers:
        if server.port == 0:
            await server.start()
    said = [
        ServerOptions(role=server.role) if server.kind == "vllm" and server.role != "both" else options
        for server in servers
    ]
    addresses = [server.url if one is None else (server.url, one) for server, one in zip(servers, said, strict=True)]
    router = Router(addresses, policy=policy, config=router_config or fast())
    await router.start()
    gateway = Gateway(router, codec, GatewayConfig(**config), Metrics(time.monotonic))
    connections = Connections(ConnectionLimits(), lambda why: None)
    listener = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn.Config(make_app(gateway), lifespan="off", log_config=None, ws="none", access_log=False)
    make = partial(BoundedProtocol, connections, config=settings, server_state=ServerState(), app_state={})
    listening = await asyncio.get_running_loop().create_server(make, sock=listener)
    try:
        async with aiohttp.ClientSession() as session:
            yield Front(gateway, servers, listener.getsockname()[1], session)
    finally:
        listening.close()
        gateway.close()
        await router.close()
        router.scheduler.close()
        for server in servers:
            await server.stop()
