"""What the tests of the endpoint picker share: a picker before scripted servers, in the same process, and messages as a
data plane sends them. `exchange` drives one without a network; `port` is where gRPC clients find it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import msgspec

from preble.gateway.core.config import GatewayConfig
from preble.gateway.core.doors import NETWORK
from preble.gateway.core.gateway import Gateway
from preble.gateway.core.metrics import Metrics
from preble.gateway.listeners import GatewayListener
from preble.gateway.picker.exchange import PickExchange
from preble.gateway.picker.messages import FULL_DUPLEX, ProcessingRequest, ProcessingResponse
from preble.gateway.picker.pick import Picker
from preble.gateway.picker.server import PickerServer
from preble.router.router import Router, RouterConfig
from preble.transport.engine_servers.server_info import ServerOptions
from tests.support.relay import ScriptedServer
from tests.support.transport import assert_bookings_are_even, fast, until

CHAT = "/v1/chat/completions"
BODY = msgspec.json.encode({"model": "tiny", "messages": [{"role": "user", "content": "hi there, how are you?"}]})
STREAMED = msgspec.json.encode({**msgspec.json.decode(BODY), "stream": True})
DESTINATION = "x-gateway-destination-endpoint"


# --- what a data plane says -------------------------------------------------------------------------------------------


def request_headers(
    path: str = CHAT,
    headers: Sequence[tuple[str, str]] = (),
    *,
    method: str = "POST",
    end: bool = False,
    modes: tuple[int, int] | None = (FULL_DUPLEX, FULL_DUPLEX),
    subset: Any = None,
) -> Any:
    """The first message of a request. `modes`: of the bodies of request and answer."""
    message = ProcessingRequest()
    given = [(":method", method), (":path", path), ("content-type", "application/json"), *headers]
    for name, value in given:
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.request_headers.end_of_stream = end
    if modes is not None:
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
        message.protocol_config.SetInParent()
    if subset is not None:
        fields = message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields
        value = fields["x-gateway-destination-endpoint-subset"]
        if isinstance(subset, str):
            value.string_value = subset
        else:
            value.list_value.SetInParent()
            for one in subset:
                value.list_value.values.add(string_value=one)
    return message


def body(part: bytes, *, end: bool = True, of: str = "request") -> Any:
    """A part of a body."""
    message = ProcessingRequest()
    place = getattr(message, f"{of}_body")
    place.body, place.end_of_stream = part, end
    place.SetInParent()
    return message


def bodies(parts: Iterable[bytes], *, of: str = "request") -> list[Any]:
    """All parts of a body, the last of which says so."""
    return [*(body(part, end=False, of=of) for part in parts), body(b"", of=of)]


def trailers(of: str = "request") -> Any:
    """Trailers."""
    message = ProcessingRequest()
    getattr(message, f"{of}_trailers").SetInParent()
    return message


def response_headers(
    status: int = 200, content_type: str = "application/json", *, end: bool = False, served: str = ""
) -> Any:
    """The head of an answer."""
    message = ProcessingRequest()
    for name, value in ((":status", str(status)), ("content-type", content_type)):
        message.response_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.response_headers.end_of_stream = end
    if served:
        fields = message.metadata_context.filter_metadata["envoy.lb"].fields
        fields["x-gateway-destination-endpoint-served"].string_value = served
    return message


# --- what it is answered ----------------------------------------------------------------------------------------------


def named(answer: Any) -> str:
    """The destination that an answer names, in its header and in its metadata alike."""
    kind = answer.WhichOneof("one")
    fields = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    value = fields[DESTINATION].string_value
    options = getattr(answer, kind).response.header_mutation.set_headers
    assert [one.header.raw_value.decode() for one in options if one.header.key == DESTINATION] == [value]
    assert all(one.append_action == 2 for one in options), "a client's own header is overwritten"
    return value


def set_headers(answer: Any) -> dict[str, str | None]:
    """The headers that an answer sets, without the destination; None for those that it takes out."""
    mutation = getattr(answer, answer.WhichOneof("one")).response.header_mutation
    found = {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}
    assert found.pop(DESTINATION) and not found.keys() & set(mutation.remove_headers)
    return {**found, **dict.fromkeys(mutation.remove_headers, None)}


def passed(answers: Iterable[Any], of: str = "request") -> bytes:
    """The body that goes on."""
    found = [one for one in answers if one.WhichOneof("one") == f"{of}_body"]
    return b"".join(getattr(one, f"{of}_body").response.body_mutation.streamed_response.body for one in found)


def refusal(answers: Sequence[Any]) -> tuple[int, Any]:
    """Status and body of the only answer, which ends the request."""
    (answer,) = answers
    found = answer.immediate_response
    return found.status.code, msgspec.json.decode(found.body)


class Plane:
    """A data plane before one picker."""

    def __init__(self, picker: Picker, servers: Sequence[ScriptedServer], serving: PickerServer) -> None:
        self.picker, self.servers, self.serving = picker, servers, serving
        self.port = serving.listener.socket.getsockname()[1]

    @property
    def gateway(self) -> Gateway:
        """The picker's gateway."""
        return self.picker.gateway

    def exchange(self) -> PickExchange:
        """A new exchange, without a network."""
        return PickExchange(self.picker)

    async def say(self, exchange: PickExchange, *messages: Any) -> list[Any]:
        """Say these things; what is answered to all of them."""
        found: list[Any] = []
        for message in messages:
            answers: Any = exchange.take(message.SerializeToString())
            if not isinstance(answers, list):
                try:
                    answers = await answers
                except Exception as error:  # noqa: BLE001  as the call does
                    answers = exchange.failed(error)
            found += map(ProcessingResponse.FromString, answers)
        return found

    async def settled(self) -> None:
        """Wait until nothing of any request is left, and check that."""
        gateway = self.gateway
        await until(lambda: gateway.live_choices == 0, "requests have ended")
        assert gateway.bodies.bytes_used == 0
        for worker in gateway.router.fleet.workers.values():
            assert worker.relayed == 0, f"{worker.relayed} places at {worker.address} were not given back"
        assert_bookings_are_even(gateway.router)

    def counted(self, line: str) -> bool:
        """Whether a line is in the metrics."""
        return line in self.gateway.metrics.own_text().decode()


@contextlib.asynccontextmanager
async def picking(
    *servers: ScriptedServer, policy: Any = "e2", router_config: RouterConfig | None = None, **config: Any
) -> AsyncIterator[Plane]:
    """A picker before these servers, which are started and stopped with it."""
    for server in servers:
        if server.port == 0:
            await server.start()
    said = [ServerOptions(role=server.role) if server.kind == "vllm" else ServerOptions() for server in servers]
    addresses = [(server.url, options) for server, options in zip(servers, said, strict=True)]
    router = Router(addresses, policy=policy, config=router_config or fast())
    await router.start(min_workers=len(servers))
    gateway = Gateway(router, None, GatewayConfig(**config), Metrics(time.monotonic))
    picker = Picker(gateway)
    listener = GatewayListener(socket.create_server(("127.0.0.1", 0)), NETWORK)
    serving = PickerServer(picker, listener)
    await serving.start()
    try:
        yield Plane(picker, servers, serving)
    finally:
        await serving.stop(0.0)
        gateway.close()
        await router.close()
        router.scheduler.close()
        for server in servers:
            await server.stop()
        await asyncio.sleep(0)
