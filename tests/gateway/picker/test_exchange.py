"""What a data plane is answered, message by message, and what is booked meanwhile. Scripted servers say what they are;
requests go nowhere, for the data plane would send them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.gateway.core.header_fields import HeaderFields
from preble.gateway.core.tracing import hand_on
from preble.gateway.picker.messages import (
    BUFFERED,
    BUFFERED_PARTIAL,
    FULL_DUPLEX,
    NONE,
    STREAMED,
    ProcessingResponse,
    body_parts,
    said_by,
)
from preble.gateway.picker.parts import PART_BYTES, read_said
from preble.gateway.picker.pick import endpoint_of
from tests.support.picker import (
    BODY,
    Plane,
    bodies,
    body,
    named,
    passed,
    picking,
    refusal,
    request_headers,
    response_headers,
    trailers,
)
from tests.support.picker import STREAMED as STREAMED_BODY
from tests.support.relay import InOrder, ScriptedServer, chat_answer, chat_events, event, usage_event
from tests.support.transport import asynchronous

SSE = "text/event-stream"
EVENTS = b"".join(map(event, [*chat_events("he", "llo"), usage_event(cached=2), b"[DONE]"]))
SHOWN = b"".join(map(event, [*chat_events("he", "llo"), b"[DONE]"]))
ANSWER = msgspec.json.encode(chat_answer(cached=2))


async def two() -> tuple[ScriptedServer, ScriptedServer]:
    """Two servers, started, so that they have names."""
    return await ScriptedServer().start(), await ScriptedServer().start()


def booked(plane: Plane, server: ScriptedServer) -> int:
    """Requests that are booked there."""
    return plane.gateway.router.scheduler.stats()["workers"][server.worker]["live_requests"]


# --- requests ---------------------------------------------------------------------------------------------------------


@asynchronous
async def test_a_body_in_parts_is_answered_when_it_is_whole_and_goes_on_byte_for_byte() -> None:
    first, second = await two()
    async with picking(first, second, policy=InOrder(first, second)) as plane:
        exchange = plane.exchange()
        assert await plane.say(exchange, request_headers(), body(BODY[:7], end=False)) == []
        answers = await plane.say(exchange, body(BODY[7:]))
        assert [one.WhichOneof("one") for one in answers] == ["request_headers", "request_body"]
        assert named(answers[0]) == first.worker and answers[0].request_headers.response.clear_route_cache
        assert passed(answers) == BODY
        assert answers[1].request_body.response.body_mutation.streamed_response.end_of_stream
        assert booked(plane, first) == 1
        exchange.close()
        await plane.settled()
        assert plane.counted('preble_http_requests_total{model="tiny",route="/v1/chat/completions",status="499"} 1.0')


@asynchronous
async def test_trailers_of_a_request_end_its_body() -> None:
    async with picking(ScriptedServer()) as plane:
        exchange = plane.exchange()
        answers = await plane.say(exchange, request_headers(), body(BODY, end=False), trailers())
        kinds = [one.WhichOneof("one") for one in answers]
        assert kinds == ["request_headers", "request_body", "request_trailers"] and passed(answers) == BODY
        assert not answers[1].request_body.response.body_mutation.streamed_response.end_of_stream
        exchange.close()
        await plane.settled()


@asynchronous
async def test_a_long_body_goes_on_in_parts_that_data_planes_take() -> None:
    long = msgspec.json.encode({"model": "tiny", "messages": [{"role": "user", "content": "x" * 150_000}]})
    async with picking(ScriptedServer()) as plane:
        answers = await plane.say(plane.exchange(), request_headers(), body(long))
        assert passed(answers) == long and len(answers) == 4
        sizes = [len(one.request_body.response.body_mutation.streamed_response.body) for one in answers[1:]]
        assert max(sizes) == PART_BYTES


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=3 * PART_BYTES // 2), st.booleans())
def test_parts_are_the_body_and_only_the_last_one_says_that_it_is(data: bytes, end: bool) -> None:
    answers = [ProcessingResponse.FromString(one) for one in body_parts("request_body", data, end=end)]
    assert passed(answers) == data
    ends = [one.request_body.response.body_mutation.streamed_response.end_of_stream for one in answers]
    assert ends == [False] * (len(ends) - 1) + [end]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, len(STREAMED_BODY)), max_size=6))
def test_wherever_a_body_is_cut_it_is_answered_alike(cuts: list[int]) -> None:
    async def say() -> tuple[str, bytes]:
        async with picking(ScriptedServer()) as plane:
            places = [0, *sorted(cuts), len(STREAMED_BODY)]
            parts = [STREAMED_BODY[a:b] for a, b in zip(places, places[1:], strict=False)]
            answers = await plane.say(plane.exchange(), request_headers(), *bodies(parts))
            assert named(answers[0]) == plane.servers[0].worker
            return passed(answers), passed(answers, "response")

    asynchronous(lambda: _check(say))()


async def _check(say: object) -> None:
    found = await say()  # type: ignore[operator]
    assert msgspec.json.decode(found[0]) == {
        **msgspec.json.decode(STREAMED_BODY),
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize("mode", [BUFFERED, BUFFERED_PARTIAL])
@asynchronous
async def test_a_buffered_body_is_answered_with_the_server(mode: int) -> None:
    async with picking(ScriptedServer()) as plane:
        exchange = plane.exchange()
        (head,) = await plane.say(exchange, request_headers(modes=(mode, STREAMED)))
        assert not head.request_headers.response.HasField("header_mutation")
        (answer,) = await plane.say(exchange, body(BODY))
        assert named(answer) == plane.servers[0].worker
        assert not answer.request_body.response.HasField("body_mutation"), "nothing is changed that need not be"
        exchange.close()
        await plane.settled()


@asynchronous
async def test_a_buffered_body_that_is_edited_says_its_length() -> None:
    async with picking(ScriptedServer()) as plane:
        (_, answer) = await plane.say(
            plane.exchange(), request_headers(modes=(BUFFERED, FULL_DUPLEX)), body(STREAMED_BODY)
        )
        common = answer.request_body.response
        edited = common.body_mutation.body
        assert msgspec.json.decode(edited)["stream_options"] == {"include_usage": True}
        headers = {one.header.key: one.header.raw_value for one in common.header_mutation.set_headers}
        assert headers["content-length"] == str(len(edited)).encode()


@pytest.mark.parametrize("mode", [NONE, STREAMED])
@asynchronous
async def test_where_the_body_is_not_seen_in_time_the_headers_are_answered(mode: int) -> None:
    async with picking(ScriptedServer()) as plane:
        exchange = plane.exchange()
        (answer,) = await plane.say(exchange, request_headers(modes=(mode, NONE)))
        assert named(answer) == plane.servers[0].worker
        (kept,) = await plane.say(exchange, body(BODY))
        assert not kept.request_body.HasField("response")
        exchange.close()
        await plane.settled()


@asynchronous
async def test_a_body_that_was_cut_off_is_placed_by_load_and_is_no_error() -> None:
    async with picking(ScriptedServer()) as plane:
        messages = request_headers(modes=(BUFFERED_PARTIAL, NONE)), body(BODY[:20], end=False), body(BODY[20:])
        answers = await plane.say(plane.exchange(), *messages)
        assert named(answers[1]) == plane.servers[0].worker
        assert [one.WhichOneof("one") for one in answers] == ["request_headers", "request_body", "request_body"]


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nobody/knows?x=1"])
@asynchronous
async def test_requests_without_a_body_go_to_any_server(path: str) -> None:
    async with picking(ScriptedServer()) as plane:
        exchange = plane.exchange()
        (answer,) = await plane.say(exchange, request_headers(path, method="GET", end=True))
        assert named(answer) == plane.servers[0].worker
        await plane.say(exchange, response_headers(), body(b'{"data":[]}', of="response"))
        await plane.settled()
        assert plane.counted('route="other",status="200"')


@asynchronous
async def test_a_body_of_an_unknown_path_need_not_be_json() -> None:
    async with picking(ScriptedServer()) as plane:
        answers = await plane.say(plane.exchange(), request_headers("/odd"), body(b"not json"))
        assert named(answers[0]) == plane.servers[0].worker and passed(answers) == b"not json"


@asynchronous
async def test_what_only_observes_is_not_answered() -> None:
    async with picking(ScriptedServer()) as plane:
        message = request_headers(end=True)
        message.observability_mode = True
        assert await plane.say(plane.exchange(), message) == []
        await plane.settled()


@asynchronous
async def test_without_modes_it_is_full_duplex() -> None:
    async with picking(ScriptedServer()) as plane:
        assert await plane.say(plane.exchange(), request_headers(modes=None)) == []


@asynchronous
async def test_a_trace_goes_on_with_the_request() -> None:
    ended: list[tuple[object, ...]] = []

    def begin(headers: HeaderFields) -> str:
        hand_on({"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"})
        return headers.get(":path")

    async with picking(ScriptedServer()) as plane:
        tracing: Any = SimpleNamespace(begin=begin, end=lambda *said: ended.append(said))
        plane.gateway.tracing = tracing
        exchange = plane.exchange()
        answers = await plane.say(exchange, request_headers(), body(BODY))
        options = answers[0].request_headers.response.header_mutation.set_headers
        headers = {one.header.key: one.header.raw_value for one in options}
        assert headers["traceparent"] == b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"
        exchange.close()
        assert [one[:4] for one in ended] == [("/v1/chat/completions", "POST", "/v1/chat/completions", 499)]


# --- where it may go --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [False, True])
@asynchronous
async def test_a_subset_is_kept_to(text: bool) -> None:
    first, second = await two()
    async with picking(first, second, policy=InOrder(first, second)) as plane:
        for allowed, chosen in (([second.worker], second), (["10.9.9.9:1", first.worker], first)):
            subset = ", ".join(allowed) if text else allowed
            answers = await plane.say(plane.exchange(), request_headers(subset=subset), body(BODY))
            assert named(answers[0]) == chosen.worker


@pytest.mark.parametrize("subset", [[], "", ["10.9.9.9:1"]])
@asynchronous
async def test_a_subset_with_nobody_in_it_is_answered_503(subset: object) -> None:
    async with picking(ScriptedServer()) as plane:
        exchange = plane.exchange()
        status, answer = refusal(await plane.say(exchange, request_headers(subset=subset), body(BODY)))
        assert status == 503 and answer["error"]["code"] == "no_workers" and exchange.is_over
        await plane.settled()


@asynchronous
async def test_further_servers_are_named_where_they_are_asked_for() -> None:
    servers = *await two(), await ScriptedServer().start()
    async with picking(*servers, policy=InOrder(*servers), picker_fallbacks=1) as plane:
        first, second, third = servers
        plane.gateway.router.fleet.worker(second.worker).relayed = 5
        answers = await plane.say(plane.exchange(), request_headers(), body(BODY))
        assert named(answers[0]) == f"{first.worker},{third.worker}", "the one with the fewest requests"
        subset = [first.worker, second.worker]
        answers = await plane.say(plane.exchange(), request_headers(subset=subset), body(BODY))
        assert named(answers[0]) == f"{first.worker},{second.worker}", "but of the subset"
        plane.gateway.router.fleet.worker(second.worker).relayed = 0


@asynchronous
async def test_a_request_that_another_server_has_is_booked_there() -> None:
    first, second = await two()
    async with picking(first, second, policy=InOrder(first, second)) as plane:
        exchange = plane.exchange()
        await plane.say(exchange, request_headers(), body(BODY))
        assert (booked(plane, first), booked(plane, second)) == (1, 0)
        await plane.say(exchange, response_headers(served=second.worker))
        assert (booked(plane, first), booked(plane, second)) == (0, 1)
        await plane.say(exchange, body(ANSWER, of="response"))
        await plane.settled()


@asynchronous
async def test_servers_that_come_and_go_are_chosen_and_left_out() -> None:
    first, second = await two()
    async with picking(first, policy=InOrder(second, first)) as plane:
        await plane.gateway.router.add_worker(second.url)
        answers = await plane.say(plane.exchange(), request_headers(), body(BODY))
        assert named(answers[0]) == second.worker
        await plane.gateway.router.remove_worker(second.url)
        answers = await plane.say(plane.exchange(), request_headers(), body(BODY))
        assert named(answers[0]) == first.worker
        await plane.gateway.router.remove_worker(first.url)
        status, _ = refusal(await plane.say(plane.exchange(), request_headers(), body(BODY)))
        assert status == 503
        await second.stop()


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "status"),
    [(b"{", 400), (b"[1]", 400), (b"\xff{}", 400), (b'{"model":"another","messages":[]}', 404), (b"x" * 2000, 413)],
)
@asynchronous
async def test_a_body_that_will_not_do_is_refused(data: bytes, status: int) -> None:
    async with picking(ScriptedServer(), max_body_bytes=1024) as plane:
        exchange = plane.exchange()
        found, answer = refusal(await plane.say(exchange, request_headers(), body(data)))
        assert found == status and answer["error"]["message"] and exchange.is_over
        await plane.settled()
        assert plane.counted(f'status="{status}"')


@asynchronous
async def test_at_the_bound_of_live_requests_one_more_is_refused() -> None:
    async with picking(ScriptedServer(), max_live_requests=1) as plane:
        held = plane.exchange()
        await plane.say(held, request_headers(), body(BODY))
        (answer,) = await plane.say(plane.exchange(), request_headers(), body(BODY))
        found = answer.immediate_response
        assert found.status.code == 503 and found.details == "preble_queue_full"
        headers = {one.header.key: one.header.raw_value for one in found.headers.set_headers}
        assert headers == {"content-type": b"application/json", "retry-after": b"1"}
        held.close()
        await plane.settled()
        assert named((await plane.say(plane.exchange(), request_headers(), body(BODY)))[0])


@asynchronous
async def test_an_overloaded_fleet_is_answered_429(monkeypatch: pytest.MonkeyPatch) -> None:
    from preble.errors import Overloaded

    async with picking(ScriptedServer()) as plane:

        async def full(*_: object, **__: object) -> None:
            raise Overloaded("the first token would take 9.0 s", retry_after_seconds=9.0)

        monkeypatch.setattr(plane.gateway.router, "place", full)
        (answer,) = await plane.say(plane.exchange(), request_headers(), body(BODY))
        found = answer.immediate_response
        assert found.status.code == 429 and msgspec.json.decode(found.body)["error"]["code"] == "overloaded"
        assert [one.header.raw_value for one in found.headers.set_headers if one.header.key == "retry-after"] == [b"9"]
        await plane.settled()


@asynchronous
async def test_a_picker_that_shuts_down_takes_no_more() -> None:
    async with picking(ScriptedServer()) as plane:
        plane.gateway.draining = True
        status, answer = refusal(await plane.say(plane.exchange(), request_headers(), body(BODY)))
        assert (status, answer["error"]["code"]) == (503, "draining")
        await plane.settled()


@asynchronous
async def test_a_defect_is_answered_500_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with picking(ScriptedServer()) as plane:
        monkeypatch.setattr(plane.picker.destinations, "of", lambda url: 1 / 0)
        status, _ = refusal(await plane.say(plane.exchange(), request_headers(), body(BODY)))
        assert status == 500
        await plane.settled()


# --- answers ----------------------------------------------------------------------------------------------------------


@asynchronous
async def test_a_whole_answer_is_read_and_ends_the_booking() -> None:
    async with picking(ScriptedServer()) as plane:
        exchange = plane.exchange()
        await plane.say(exchange, request_headers(), body(BODY))
        answers = await plane.say(
            exchange, response_headers(), body(ANSWER[:9], end=False, of="response"), body(ANSWER[9:], of="response")
        )
        assert answers[0].WhichOneof("one") == "response_headers" and passed(answers, "response") == ANSWER
        await plane.settled()
        for line in ('output_tokens_total{model="tiny"} 3.0', 'actual_cached_tokens_total{model="tiny"} 2.0'):
            assert plane.counted(f"preble_{line}")
        assert plane.gateway.router.counters.finished == 1
        exchange.close()
        assert plane.counted('status="200"} 1.0') and not plane.counted('status="499"')


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, len(EVENTS)), max_size=8), st.booleans())
def test_wherever_a_stream_is_cut_its_usage_is_read_and_taken_out(cuts: list[int], by_trailers: bool) -> None:
    async def check() -> None:
        async with picking(ScriptedServer()) as plane:
            exchange = plane.exchange()
            await plane.say(exchange, request_headers(), body(STREAMED_BODY))
            places = [0, *sorted(cuts), len(EVENTS)]
            parts = [EVENTS[a:b] for a, b in zip(places, places[1:], strict=False)]
            said = bodies(parts, of="response")
            if by_trailers:
                said[-1] = trailers("response")
            answers = await plane.say(exchange, response_headers(content_type=SSE), *said)
            assert passed(answers, "response") == SHOWN
            last = answers[-1]
            if by_trailers:
                assert last.WhichOneof("one") == "response_trailers"
            else:
                assert last.response_body.response.body_mutation.streamed_response.end_of_stream
            await plane.settled()
            assert plane.counted('preble_output_tokens_total{model="tiny"} 3.0')
            assert plane.counted('preble_actual_cached_tokens_total{model="tiny"} 2.0')
            assert plane.counted('preble_time_to_first_token_seconds_count{model="tiny"} 1.0')

    asynchronous(check)()


@asynchronous
async def test_a_stream_that_is_only_observed_is_changed_nowhere() -> None:
    async with picking(ScriptedServer()) as plane:
        exchange = plane.exchange()
        answers = await plane.say(exchange, request_headers(modes=(FULL_DUPLEX, STREAMED)), body(STREAMED_BODY))
        assert passed(answers) == STREAMED_BODY, "the usage could not be taken out again"
        answers = await plane.say(
            exchange, response_headers(content_type=SSE), *bodies([SHOWN[:50], SHOWN[50:]], of="response")
        )
        assert all(not one.response_body.HasField("response") for one in answers[1:])
        await plane.settled()
        assert plane.counted('preble_output_tokens_total{model="tiny"} 2.0'), "as many as there were events"


@pytest.mark.parametrize(("status", "failed"), [(400, 0), (429, 0), (500, 0), (502, 1), (503, 1)])
@asynchronous
async def test_an_answer_that_is_an_error_gives_the_booking_back(status: int, failed: int) -> None:
    async with picking(ScriptedServer()) as plane:
        exchange = plane.exchange()
        await plane.say(exchange, request_headers(), body(BODY))
        await plane.say(exchange, response_headers(status))
        assert booked(plane, plane.servers[0]) == 0 and plane.gateway.router.counters.failed == failed
        await plane.say(exchange, body(b"{}", of="response"))
        await plane.settled()
        assert plane.counted(f'status="{status}"')


@asynchronous
async def test_without_the_answers_body_the_booking_ends_with_its_head() -> None:
    async with picking(ScriptedServer()) as plane:
        exchange = plane.exchange()
        await plane.say(exchange, request_headers(modes=(BUFFERED, NONE)), body(BODY), response_headers())
        exchange.close()
        await plane.settled()
        assert plane.gateway.router.counters.finished == 1 and plane.counted('status="200"')


@asynchronous
async def test_a_packed_answer_goes_on_unread() -> None:
    async with picking(ScriptedServer()) as plane:
        exchange = plane.exchange()
        await plane.say(exchange, request_headers(), body(BODY))
        head = response_headers()
        head.response_headers.headers.headers.add(key="content-encoding", raw_value=b"gzip")
        answers = await plane.say(exchange, head, body(b"\x1f\x8b", of="response"))
        assert passed(answers, "response") == b"\x1f\x8b"
        await plane.settled()
        assert plane.gateway.router.counters.finished == 1


@asynchronous
async def test_an_answer_that_is_kept_is_asked_for_where_it_is() -> None:
    first, second = await two()
    async with picking(first, second, policy=InOrder(first, second)) as plane:
        asked = msgspec.json.encode({"model": "tiny", "input": "hi"})
        answer = msgspec.json.encode({"id": "resp_1", "object": "response", "status": "completed", "output": []})
        exchange = plane.exchange()
        await plane.say(exchange, request_headers("/v1/responses", subset=[second.worker]), body(asked))
        await plane.say(exchange, response_headers(), body(answer, of="response"))
        for path, method in (("/v1/responses/resp_1", "GET"), ("/v1/responses/resp_1/cancel", "POST")):
            (found,) = await plane.say(plane.exchange(), request_headers(path, method=method, end=True))
            assert named(found) == second.worker
        again = msgspec.json.encode({"model": "tiny", "input": "more", "previous_response_id": "resp_1"})
        answers = await plane.say(plane.exchange(), request_headers("/v1/responses"), body(again))
        assert named(answers[0]) == second.worker


# --- parts ------------------------------------------------------------------------------------------------------------


def test_paths_are_those_of_engines() -> None:
    assert endpoint_of("POST", "/v1/completions")[0].kind == "completions"
    assert endpoint_of("GET", "/v1/completions") == endpoint_of("GET", "/") and endpoint_of("GET", "/")[0].path == ""
    assert endpoint_of("GET", "/v1/responses/a-1")[1] == "a-1"
    assert endpoint_of("GET", "/v1/responses/a/b")[1] is None


def test_a_header_is_read_from_either_place() -> None:
    message = request_headers(headers=[("x-mine", "raw")])
    message.request_headers.headers.headers.add(key="x-old", value="text")
    found = dict(said_by(message).fields or [])
    read = read_said(message.SerializeToString())
    assert read is not None and dict(read.fields or []) == found
    assert (found[b"x-mine"], found[b"x-old"]) == (b"raw", b"text")
