"""The picker behind its port: gRPC's own client speaks to it, as data planes and health probes do."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from preble.gateway.picker.messages import (
    FULL_DUPLEX,
    HEALTH_SERVICE,
    NOT_SERVING,
    SERVICE,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
)
from tests.stress import picker_aborts
from tests.stress.picker_aborts import channel, process
from tests.support.picker import BODY, body, named, passed, picking, request_headers, response_headers, set_headers
from tests.support.relay import ScriptedServer, chat_answer
from tests.support.transport import asynchronous, until

grpc = pytest.importorskip("grpc")
aio = pytest.importorskip("grpc.aio")

ABORTS = 2_000


async def health(connection: Any, service: str) -> int:
    """What a probe is answered."""
    check = connection.unary_unary(
        f"/{HEALTH_SERVICE}/Check",
        request_serializer=HealthCheckRequest.SerializeToString,
        response_deserializer=HealthCheckResponse.FromString,
    )
    return int((await check(HealthCheckRequest(service=service))).status)


async def read(call: Any, count: int) -> list[Any]:
    """So many answers."""
    return [await call.read() for _ in range(count)]


@asynchronous
async def test_an_exchange_from_end_to_end() -> None:
    answer = str(chat_answer()).encode()
    async with picking(ScriptedServer()) as plane, channel(plane) as connection:
        call = process(connection)
        await call.write(request_headers())
        await call.write(body(BODY[:10], end=False))
        await call.write(body(BODY[10:]))
        answers = await read(call, 2)
        assert named(answers[0]) == plane.servers[0].worker and passed(answers) == BODY
        await call.write(response_headers())
        await call.write(body(answer, of="response"))
        assert passed(await read(call, 2), "response") == answer
        await call.done_writing()
        assert await call.read() is aio.EOF and await call.code() is grpc.StatusCode.OK
        await plane.settled()


@asynchronous
async def test_a_request_that_two_servers_share_from_end_to_end() -> None:
    answer = str(chat_answer()).encode()
    first, second = ScriptedServer(role="prefill"), ScriptedServer(role="decode")
    async with picking(first, second) as plane, channel(plane) as connection:
        call = process(connection)
        await call.write(request_headers())
        await call.write(body(BODY))
        answers = await read(call, 2)
        assert named(answers[0]) == second.worker and passed(answers) == BODY
        assert set_headers(answers[0]) == {"x-prefiller-host-port": first.worker}
        await call.write(response_headers())
        await call.write(body(answer, of="response"))
        assert passed(await read(call, 2), "response") == answer
        await call.done_writing()
        assert await call.read() is aio.EOF and await call.code() is grpc.StatusCode.OK
        await plane.settled()


@asynchronous
async def test_bodies_of_megabytes_go_through_both_ways() -> None:
    long = BODY[:-1] + b',"pad":"' + b"x" * (3 << 20) + b'"}'
    async with picking(ScriptedServer()) as plane, channel(plane) as connection:
        call = process(connection)
        await call.write(request_headers())
        parts = [long[at : at + 60_000] for at in range(0, len(long), 60_000)]

        async def write() -> None:
            for number, part in enumerate(parts):
                await call.write(body(part, end=number == len(parts) - 1))

        writing = asyncio.ensure_future(write())
        answers: list[Any] = []
        while not answers or not answers[-1].request_body.response.body_mutation.streamed_response.end_of_stream:
            answers.append(await call.read())
        await writing
        assert passed(answers) == long
        call.cancel()
        await plane.settled()


@asynchronous
async def test_one_message_with_megabytes_is_taken() -> None:
    long = BODY[:-1] + b',"pad":"' + b"x" * (3 << 20) + b'"}'
    async with picking(ScriptedServer()) as plane, channel(plane) as connection:
        call = process(connection)
        await call.write(request_headers(modes=(2, FULL_DUPLEX)))
        await call.write(body(long))
        answers = await read(call, 2)
        assert named(answers[1]) == plane.servers[0].worker
        call.cancel()
        await plane.settled()


@asynchronous
async def test_bounds_that_change_while_it_runs_hold_for_what_comes_then() -> None:
    long = BODY[:-1] + b',"pad":"' + b"x" * (2 << 20) + b'"}'
    async with picking(ScriptedServer(), max_body_bytes=1024, max_live_requests=1) as plane:
        more = {"max_body_bytes": 4 << 20, "max_live_requests": 10}
        plane.gateway.configure(msgspec.structs.replace(plane.gateway.config, **more))
        async with channel(plane) as connection:
            calls = [process(connection) for _ in range(5)]
            for call in calls:
                await call.write(request_headers(modes=(2, FULL_DUPLEX)))
                await call.write(body(long))
                assert named((await read(call, 2))[1]) == plane.servers[0].worker
            for call in calls:
                call.cancel()
        await plane.settled()


@asynchronous
async def test_a_refusal_ends_the_exchange() -> None:
    async with picking(ScriptedServer()) as plane, channel(plane) as connection:
        call = process(connection)
        await call.write(request_headers())
        await call.write(body(b"{"))
        (answer,) = await read(call, 1)
        assert answer.immediate_response.status.code == 400
        assert await call.read() is aio.EOF and await call.code() is grpc.StatusCode.OK
        await plane.settled()


@asynchronous
async def test_health_is_that_of_the_picker() -> None:
    async with picking(ScriptedServer()) as plane, channel(plane) as connection:
        for service in ("", SERVICE, "readiness", "liveness"):
            assert await health(connection, service) == SERVING
        plane.gateway.leaving = True
        assert await health(connection, SERVICE) == NOT_SERVING and await health(connection, "liveness") == SERVING


@asynchronous
async def test_what_is_not_served_is_said_to_be() -> None:
    async with picking(ScriptedServer()) as plane, channel(plane) as connection:
        call = connection.unary_unary("/another.Service/Do")
        with pytest.raises(aio.AioRpcError) as error:
            await call(b"x")
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
        raw = connection.stream_stream(f"/{SERVICE}/Process")()
        await raw.write(b"\xff\xff no message")
        assert await raw.code() is grpc.StatusCode.INTERNAL
        await plane.settled()


@asynchronous
async def test_exchanges_that_are_given_up_anywhere_leave_no_booking() -> None:
    await picker_aborts.run(ABORTS, seed=22)


@asynchronous
async def test_a_connection_that_breaks_ends_its_exchanges() -> None:
    async with picking(ScriptedServer()) as plane:
        connection = channel(plane)
        calls = [process(connection) for _ in range(5)]
        for call in calls:
            await call.write(request_headers())
            await call.write(body(BODY))
            await call.read()
        assert plane.gateway.live_choices == 5
        await connection.close(None)
        await plane.settled()


@asynchronous
async def test_a_stop_lets_exchanges_end() -> None:
    async with picking(ScriptedServer()) as plane, channel(plane) as connection:
        call = process(connection)
        await call.write(request_headers())
        await call.write(body(BODY))
        await read(call, 2)
        stopping = asyncio.ensure_future(plane.serving.stop(30.0))
        await until(lambda: plane.serving.is_stopping, "it is asked for")
        await call.write(response_headers())
        await call.write(body(b"{}", of="response"))
        assert len(await read(call, 2)) == 2
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        await stopping
        await plane.settled()
