"""The router before servers that already run: SGLang's and vLLM's HTTP servers and event sockets, faked as far as
Preble speaks with them. What is answered, which hits are predicted, and what happens when servers die, hang, lie or
restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import zlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq
from aiohttp import web

from preble import Router, SamplingParams
from preble.clock import ManualClock
from preble.errors import (
    EngineError,
    HandshakeRefused,
    InvalidConfig,
    InvalidInput,
    ProtocolError,
    QueueFull,
    TransportError,
    WorkerLost,
)
from preble.transport.client import LinkConfig
from preble.transport.engine_servers import link
from preble.transport.engine_servers.http_client import EngineServer, Unreachable
from preble.transport.engine_servers.kv_event_subscriber import FeedConfig
from preble.transport.engine_servers.server_info import EventSource, ServerOptions, sglang_info
from preble.transport.engine_servers.watch import ON_TIME_MIN, EngineWatch
from preble.transport.namespaces import keys_of, namespace_of, salt_of
from preble.types import BlockKeys
from tests.support.attach import BLOCK, FakePublisher, FakeServer, batch
from tests.support.transport import (
    FirstByName,
    assert_bookings_are_even,
    asynchronous,
    collect,
    expected_tokens,
    fast,
    until,
)

PROMPT = list(range(100, 141))  # ten blocks and a token
SHORT = SamplingParams(max_new_tokens=12)
LONG = SamplingParams(max_new_tokens=60)
FEED = FeedConfig(audit_seconds=0.2, replay_seconds=1.0)
both_servers = pytest.mark.parametrize("kind", ["sglang", "vllm"])


@contextlib.asynccontextmanager
async def attached(
    *servers: FakeServer,
    options: ServerOptions | None = None,
    router_options: dict[str, Any] | None = None,
    **times: Any,
) -> AsyncIterator[Router]:
    """A started router before these servers; the bookings are even at the end."""
    more: dict[str, Any] = {"policy": FirstByName(), **(router_options or {})}
    for server in servers:
        await server.start()
    router = Router.attach(
        *(server.url for server in servers), options=options, config=fast(feed=FEED, **times), **more
    )
    try:
        await router.start()
        yield router
        await until(lambda: not router.stats()["live_requests"], "requests ended")
        assert_bookings_are_even(router)
    finally:
        await router.close()
        for server in servers:
            server.awake.set()
            await server.kill()


def worker_at(router: Router, server: FakeServer, rank: int = 0) -> Any:
    return router.fleet.workers[f"{server.url}#rank={rank}" if rank else server.url]


def by_name(*servers: FakeServer) -> list[FakeServer]:
    """The order in which `FirstByName` takes them."""
    return sorted(servers, key=lambda server: f"127.0.0.1:{server.port}")


# --- what is answered -------------------------------------------------------------------------------------------------


@both_servers
@asynchronous
async def test_tokens_come_as_the_engine_makes_them_and_predicted_hits_are_the_reported_ones(kind: str) -> None:
    server, rng = FakeServer(kind), random.Random(3)
    async with attached(server) as router:
        for n in range(12):
            prompt = PROMPT[: rng.randrange(5, 41)] + [rng.randrange(1000) for _ in range(rng.randrange(9))]
            feed = worker_at(router, server).link.feed_counters
            await until(lambda: feed.batches == server.publishers[0].next_seq, "events arrived")  # noqa: B023
            predicted = router.scheduler.match(prompt).matched_tokens.get(f"127.0.0.1:{server.port}", 0)
            tokens, chunks = await collect(router.generate(prompt, SHORT))
            assert tokens == expected_tokens(prompt, 12)
            cached = [chunk.cached_tokens for chunk in chunks if chunk.cached_tokens is not None]
            assert cached == [predicted], n
        stats = router.stats()["workers"][server.url]
        assert stats["resyncs"] == stats["malformed_frames"] == stats["events_refused"] == 0
        assert max(server.hit(PROMPT), 0) > 0


@both_servers
@asynchronous
async def test_what_the_server_is_reported_of_a_request(kind: str) -> None:
    server = FakeServer(kind)
    sampling = SamplingParams(
        max_new_tokens=5, temperature=0.5, top_p=0.9, stop_token_ids=(7,), ignore_eos=True, seed=11
    )
    async with attached(server, options=ServerOptions(api_key="secret")) as router:
        await collect(router.generate(PROMPT, sampling, namespace=("lora", "a", "salt", "s")))
    body = server.bodies[0]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert body["cache_salt"] == "s" and body["stream"] is True
    if kind == "sglang":
        told = body["sampling_params"]
        assert body["input_ids"] == PROMPT and body["lora_path"] == "a" and told["sampling_seed"] == 11
        assert (told["max_new_tokens"], told["stop_token_ids"], told["ignore_eos"]) == (5, [7], True)
    else:
        assert body["prompt"] == PROMPT and body["model"] == "a" and body["seed"] == 11
        assert (body["max_tokens"], body["stop_token_ids"], body["ignore_eos"]) == (5, [7], True)
        told = body
    assert (told["temperature"], told["top_p"]) == (0.5, 0.9)


@both_servers
@asynchronous
async def test_each_data_parallel_rank_is_a_worker_with_its_own_cache_and_requests(kind: str) -> None:
    server = FakeServer(kind, ranks=3)
    async with attached(server, router_options={"policy": "round_robin"}) as router:
        await until(lambda: len(router.scheduler.workers) == 3, "all ranks were found")
        assert sorted(router.scheduler.workers) == [f"127.0.0.1:{server.port}/{rank}" for rank in range(3)]
        for n in range(6):
            await collect(router.generate([n] * 9, SHORT))
        counts = [len(cache) for cache in server.cached]
        assert counts == [4, 4, 4], "two prompts of two blocks on every rank"
        for rank in range(3):
            feed = worker_at(router, server, rank).feed_counters
            await until(lambda: feed.batches == server.publishers[rank].next_seq, "its events came")  # noqa: B023
        await router.remove_worker(server.url)
        assert not router.fleet.workers and not router.scheduler.workers


@both_servers
@asynchronous
async def test_a_consumer_that_goes_away_aborts_at_the_engine(kind: str) -> None:
    server = FakeServer(kind)
    server.pause_seconds = 0.01
    async with attached(server) as router:
        stream = router.generate(PROMPT, SamplingParams(max_new_tokens=4000))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: server.cut_off == 1 and not server.running, "the stream was closed")
        if kind == "sglang":
            await until(lambda: server.aborted == [server.bodies[0]["rid"]], "the abort was said, by its name")


@asynchronous
async def test_two_routers_never_call_two_requests_by_one_name() -> None:
    server = FakeServer("sglang")
    async with attached(server) as router:
        other = Router([server.url], config=fast())
        async with other:
            for one in (router, other, router):
                await collect(one.generate(PROMPT, SHORT))
    assert len({body["rid"] for body in server.bodies}) == 3


# --- faults -----------------------------------------------------------------------------------------------------------


@both_servers
@asynchronous
async def test_a_server_that_dies_is_lost_and_its_streams_go_on_elsewhere(kind: str) -> None:
    servers = FakeServer(kind), FakeServer(kind)
    async with attached(*servers) as router:
        first, second = by_name(*servers)
        first.pause_seconds = 0.005
        streams = [asyncio.ensure_future(collect(router.generate([n, *PROMPT], LONG))) for n in range(5)]
        await until(lambda: first.running == 5, "all run on the first")
        await until(lambda: router.counters.output_tokens >= 10, "some tokens came")
        await first.kill(keep_port=True)
        by: set[str] = set()
        for n, (tokens, chunks) in enumerate(await asyncio.gather(*streams)):
            assert tokens == expected_tokens([n, *PROMPT], 60)
            assert chunks[-1].worker == f"127.0.0.1:{second.port}"
            by |= {chunk.worker for chunk in chunks}
        assert by == {f"127.0.0.1:{one.port}" for one in servers}  # a stream may have had no token of the first
        assert router.counters.resumed == 5 and len(second.bodies) == 5
        await until(lambda: worker_at(router, first).state == "lost", "it is lost")
        assert "cannot be reached" in worker_at(router, first).why, "at once, not after a silence"


@pytest.mark.parametrize("stranger", ["server", "other protocol"])
@asynchronous
async def test_a_port_that_is_kept_is_not_taken_by_another_tests_server(stranger: str) -> None:
    """The story above failed once, on a busy machine: a freed port went to a server or a ZeroMQ socket of another test
    before the router had looked, which then found a worker that was ready, or one that it refused."""
    server = FakeServer("sglang", events=False)
    async with attached(server) as router:
        await server.kill(keep_port=True)
        other = FakeServer("sglang", port=server.port, events=False)
        with pytest.raises((OSError, zmq.ZMQError)):
            await (other.start() if stranger == "server" else asyncio.to_thread(bind_zmq, server.port))
        await until(lambda: worker_at(router, server).state == "lost", "it is lost")
        assert "cannot be reached" in worker_at(router, server).why
        await other.kill()


def bind_zmq(port: int) -> None:
    """Listen there with a ZeroMQ socket, for a moment."""
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.bind(f"tcp://127.0.0.1:{port}")


@both_servers
@asynchronous
async def test_a_server_that_hangs_is_suspect_and_ready_again_when_it_answers(kind: str) -> None:
    servers = FakeServer(kind), FakeServer(kind)
    async with attached(*servers, suspect_after_seconds=0.5, give_up_seconds=60.0) as router:
        first, _ = by_name(*servers)
        first.pause_seconds = 0.01
        stream = asyncio.ensure_future(collect(router.generate(PROMPT, LONG)))
        await until(lambda: router.counters.output_tokens >= 3, "some tokens came")
        first.awake.clear()
        tokens, chunks = await stream
        assert tokens == expected_tokens(PROMPT, 60) and len({chunk.worker for chunk in chunks}) == 2
        assert worker_at(router, first).state == "suspect"
        first.awake.set()
        await until(lambda: worker_at(router, first).state == "ready", "it is ready again")
        assert worker_at(router, first).counters.restarts == 0


@asynchronous
async def test_a_server_that_stays_silent_is_given_up() -> None:
    server = FakeServer("sglang")
    async with attached(server, suspect_after_seconds=0.1, give_up_seconds=0.3) as router:
        server.awake.clear()
        await until(lambda: worker_at(router, server).counters.losses, "it was lost")
        assert "silent" in worker_at(router, server).why or worker_at(router, server).state == "lost"


@asynchronous
async def test_an_engine_that_hangs_behind_a_server_that_answers_is_suspect() -> None:
    servers = FakeServer("sglang"), FakeServer("sglang")
    async with attached(*servers, stalled_after_seconds=0.3) as router:
        first, _ = by_name(*servers)

        stuck = asyncio.Event()

        def never(_: int) -> bytes | None:
            first.pause_seconds = 1000.0
            stuck.set()
            return None

        first.on_token = never
        tokens, _ = await collect(router.generate(PROMPT, SHORT))
        assert stuck.is_set() and tokens == expected_tokens(PROMPT, 12)
        assert worker_at(router, first).counters.suspect_spells == 1


@asynchronous
async def test_streams_that_stand_still_beside_a_living_front_go_on_elsewhere_until_the_engine_works_again() -> None:
    servers = FakeServer("vllm"), FakeServer("vllm")
    async with attached(*servers, hung_after_seconds=0.5) as router:
        first, second = by_name(*servers)
        for n in range(3):  # it is known to work
            await collect(router.generate([n, *PROMPT], LONG))
        first.pause_seconds = 0.005
        streams = [asyncio.ensure_future(collect(router.generate([n, *PROMPT], LONG))) for n in range(3)]
        await until(lambda: router.counters.output_tokens >= 190 and first.running == 3, "all are under way")
        first.freeze()
        for n, (tokens, chunks) in enumerate(await asyncio.gather(*streams)):
            assert tokens == expected_tokens([n, *PROMPT], 60)
            assert chunks[-1].worker == f"127.0.0.1:{second.port}"
        stuck = worker_at(router, first)
        assert (stuck.state, stuck.counters.suspect_spells, stuck.counters.losses) == ("suspect", 1, 0)
        await collect(router.generate(PROMPT, SHORT))
        assert stuck.state == "suspect", "that its requests are gone is no sign of life"
        first.thaw()
        await until(lambda: stuck.state == "ready", "it was asked for a token, and made one")
        await collect(router.generate(PROMPT, SHORT))
        assert stuck.counters.suspect_spells == 1


@asynchronous
async def test_a_request_that_waits_for_long_at_a_server_that_works_is_waited_for() -> None:
    """A grammar is compiled for it, say: nothing shows, and others are not held up. A token is asked for, and comes."""
    servers = FakeServer("vllm", events=False), FakeServer("vllm", events=False)
    async with attached(*servers, hung_after_seconds=1.0) as router:
        first, second = by_name(*servers)
        for n in range(ON_TIME_MIN):
            await collect(router.generate([n, *PROMPT], LONG))
        held = asyncio.Event()
        first.before_prefill = lambda prompt: held.wait() if len(prompt) > 1 else None
        stream = asyncio.ensure_future(collect(router.generate(PROMPT, SHORT)))
        probes = lambda: [body for body in first.bodies if body["prompt"] == [1]]  # noqa: E731
        await until(lambda: len(probes()) >= 2, "it was asked for a token")
        assert worker_at(router, first).state == "ready" and not second.bodies
        held.set()
        tokens, _ = await stream
        assert tokens == expected_tokens(PROMPT, 12) and worker_at(router, first).counters.suspect_spells == 0


# What a server is asked that takes so many seconds to report its load, at once and at each heartbeat. "o": output came
# before it, "s": it was silent, "d": silent, and its report decides. "L": its load, "?": whether it is there.
@pytest.mark.parametrize(
    ("took", "beats", "asked"),
    [
        (0.001, "oossdd", "LLLLLLL"),
        (0.0095, "oooooooo", "L---L---L"),
        (1.0, "oooooooooooo", "L---------L--"),
        (0.0095, "ssssssss", "L???L???L"),
        (0.0095, "sodosss", "L?-L-??L"),
        (0.0095, "dddosds", "LLLL-?L?"),
    ],
)
@asynchronous
async def test_a_server_is_asked_for_its_load_the_less_often_the_longer_that_takes_until_it_decides(
    took: float, beats: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, left, seen = ManualClock(), list(beats), []

    async def within(seconds: float, work: Any) -> None:
        work.close()
        clock.advance(seconds)
        if not left:
            server.load = server.check = gone
        watch.beat = left.pop(0) if left else "d"
        seen.append("-")
        raise asyncio.TimeoutError

    async def gone() -> None:
        raise Unreachable("it is gone")

    async def load() -> tuple[()]:
        seen[-1] = "L"
        clock.advance(took)
        return ()

    async def check() -> None:
        seen[-1] = "?"

    class Watch:
        beat = "o"
        silent_seconds = property(lambda self: 0.0 if self.beat == "o" else 0.25)

        def wants_report(self, beat_seconds: float) -> bool:
            assert beat_seconds == 0.5
            return self.beat == "d"

    watch, seen = Watch(), ["-"]
    server = SimpleNamespace(load=load, check=check, connections=1)
    monkeypatch.setattr(link, "within", within)
    own = link.ServerLink.__new__(link.ServerLink)
    own.rank, own._clock, own._ask_now, own._config = 0, clock, asyncio.Event(), LinkConfig(heartbeat_seconds=0.5)
    own._server, own._watch = cast("EngineServer", server), cast("EngineWatch", watch)
    own._connections, own._load_due = 1, 0.0
    monkeypatch.setattr(link.ServerLink, "_recover", lambda self: None)
    monkeypatch.setattr(link.ServerLink, "_report", lambda self, load: None)
    assert await own._ask_loop() == "it is gone"
    assert "".join(seen[:-1]) == asked


@both_servers
@asynchronous
async def test_a_server_that_was_restarted_between_two_questions_has_no_marks(kind: str) -> None:
    """Its port was closed for so short a time that no question met that: it counted as the same, with all its marks."""
    first = FakeServer(kind, events=False)
    async with attached(first, heartbeat_seconds=0.2) as router:
        name = f"127.0.0.1:{first.port}"
        await collect(router.generate(PROMPT, SHORT))
        assert router.scheduler.match(PROMPT).matched_tokens.get(name) == 40
        link = worker_at(router, first).link
        again = FakeServer(kind, life=2, port=first.port, events=False)
        load, restarted = link._server.load, asyncio.Event()

        async def later() -> Any:
            await restarted.wait()
            return await load()

        link._server.load = later  # no question while it is restarted
        await first.kill()
        await again.start()
        restarted.set()
        try:
            await until(lambda: worker_at(router, first).counters.restarts == 1, "it is known to be another")
            await until(lambda: worker_at(router, first).state == "ready", "it is ready")
            assert router.scheduler.match(PROMPT).matched_tokens.get(name, 0) == 0
        finally:
            await again.kill()


@both_servers
@asynchronous
async def test_a_connection_that_was_only_closed_costs_no_marks(kind: str) -> None:
    server = FakeServer(kind, events=False)
    async with attached(server) as router:
        name, link = f"127.0.0.1:{server.port}", worker_at(router, server).link
        await collect(router.generate(PROMPT, SHORT))
        link._server.connections += 1  # something between the two has closed one
        await until(lambda: link._connections == link._server.connections, "it was asked what it is")
        assert router.scheduler.match(PROMPT).matched_tokens.get(name) == 40
        assert (worker_at(router, server).state, worker_at(router, server).counters.losses) == ("ready", 0)


@both_servers
@asynchronous
async def test_a_restarted_server_is_another_epoch_and_its_cache_is_empty(kind: str) -> None:
    first = FakeServer(kind)
    async with attached(first) as router:
        name = f"127.0.0.1:{first.port}"
        await collect(router.generate(PROMPT, SHORT))
        await until(lambda: router.scheduler.match(PROMPT).matched_tokens.get(name) == 40, "its cache is known")
        ports = first.publishers[0].ports
        await first.kill()
        await until(lambda: worker_at(router, first).state == "lost", "it is lost")
        again = FakeServer(kind, life=2, port=first.port, publishers=[FakePublisher(ports=(ports[0], ports[1]))])
        await again.start()
        try:
            await until(lambda: worker_at(router, first).state == "ready", "it is found again")
            assert worker_at(router, first).counters.restarts == 1
            assert router.scheduler.match(PROMPT).matched_tokens.get(name, 0) == 0
            _, chunks = await collect(router.generate(PROMPT, SHORT))
            assert [chunk.cached_tokens for chunk in chunks if chunk.cached_tokens is not None] == [0]
            await until(lambda: router.scheduler.match(PROMPT).matched_tokens.get(name) == 40, "its new cache is known")
        finally:
            await again.kill()


@asynchronous
async def test_a_break_of_the_network_costs_nothing_that_is_known() -> None:
    """The HTTP port closes and opens again, the engine behind it lives: what it cached is still estimated."""
    server = FakeServer("sglang")
    async with attached(server) as router:
        name = f"127.0.0.1:{server.port}"
        await collect(router.generate(PROMPT, SHORT))
        await until(lambda: router.scheduler.match(PROMPT).matched_tokens.get(name) == 40, "its cache is known")
        publishers, server.publishers = server.publishers, ()
        await server.kill()
        await until(lambda: worker_at(router, server).state == "lost", "it is lost")
        server.publishers = publishers
        await server.start()
        await until(lambda: worker_at(router, server).state == "ready", "it is found again")
        assert worker_at(router, server).counters.restarts == 0
        assert router.scheduler.match(PROMPT).matched_tokens.get(name) == 40


@asynchronous
async def test_a_server_is_given_no_requests_before_what_it_published_was_taken() -> None:
    """Half of a replay is what the engine cached long ago: requests went where nothing of theirs was any more, and the
    end of the replay took away what they had put there."""
    server = FakeServer("vllm")
    publisher = server.publishers[0]
    stored = ["BlockStored", [1], None, PROMPT[:BLOCK], BLOCK, None, "GPU"]
    for payload in (batch(1.0, stored), batch(2.0, ["AllBlocksCleared"])):
        await publisher.publish(payload)
    publisher.cut_after = 1  # the first answer says what was stored, and not that it was cleared
    states: list[tuple[str, int]] = []
    async with attached(server) as router:
        worker = worker_at(router, server)
        states.append((worker.state, worker.feed_counters.batches))
        assert router.scheduler.match(PROMPT).matched_tokens.get(worker.worker_id, 0) == 0
    assert states == [("ready", 2)]


@asynchronous
async def test_an_error_when_a_server_has_caught_up_is_counted_and_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = iter([RuntimeError("somebody's own")])
    before = Router.on_available

    def failing(router: Router, worker: Any) -> None:
        error = next(calls, None)
        if error is not None:
            raise error
        before(router, worker)

    monkeypatch.setattr(Router, "on_available", failing)
    server = FakeServer("sglang")
    async with attached(server) as router:
        found = worker_at(router, server)
        await until(lambda: found.counters.errors == 1 and found.state == "ready", "it is back")


@asynchronous
async def test_a_server_whose_replay_is_not_answered_is_given_requests_after_a_time() -> None:
    server = FakeServer("sglang")
    server.publishers[0].mute = True
    async with attached(server, catch_up_seconds=0.05) as router:
        assert worker_at(router, server).state == "ready"
        tokens, _ = await collect(router.generate(PROMPT, SHORT))
        assert tokens == expected_tokens(PROMPT, 12)
        router.fleet.check()


@asynchronous
async def test_events_that_are_lost_for_good_are_forgotten_and_learned_anew() -> None:
    server = FakeServer("sglang")
    other = [7] * 12
    async with attached(server) as router:
        name, publisher = f"127.0.0.1:{server.port}", server.publishers[0]
        await collect(router.generate(PROMPT, SHORT))
        await until(lambda: router.scheduler.match(PROMPT).matched_tokens.get(name) == 40, "its cache is known")
        publisher.next_seq += 3  # what these said, nobody has
        publisher.buffer.clear()
        await server._store(other, 0)
        await until(lambda: router.scheduler.match([*other, 1]).matched_tokens.get(name) == 12, "what is new is known")
        assert not router.scheduler.match(PROMPT).matched_tokens.get(name), "what may be gone is not accepted"
        assert worker_at(router, server).stats()["resyncs"] == 1


LIES: dict[str, bytes] = {
    "no JSON": b"data: {nonsense\n\n",
    "no object": b"data: [1, 2]\n\n",
    "no tokens": b'data: {"output_ids": ["a"], "choices": [{"token_ids": ["a"]}], "meta_info": {}}\n\n',
    "no numbers": b'data: {"output_ids": [-1], "choices": [{"token_ids": [-1]}], "meta_info": {}}\n\n',
    "error": b'data: {"error": {"message": "out of memory", "code": 500}}\n\n',
    "end": b"data: [DONE]\n\n",
    "long line": b'data: {"output_ids": [], "choices": [{"token_ids": []}], "meta_info": {}' + b" " * 9000 + b"}\n\n",
    "deep": b"data: " + b"[" * 5000 + b"\n\n",
}


@both_servers
@pytest.mark.parametrize("lie", LIES)
@asynchronous
async def test_an_answer_that_is_none_costs_the_attempt_and_not_the_request(kind: str, lie: str) -> None:
    servers = FakeServer(kind), FakeServer(kind)
    async with attached(*servers, options=ServerOptions(max_line_bytes=8000)) as router:
        first, _ = by_name(*servers)
        first.on_token = lambda have: LIES[lie] if have == 4 else None
        tokens, _ = await collect(router.generate(PROMPT, SHORT))
        assert tokens == expected_tokens(PROMPT, 12)
        assert router.counters.resumed == 1
        told = lie not in ("error", "end")
        assert router.stats()["workers"][first.url]["malformed_frames"] == told


@asynchronous
async def test_an_error_that_nobody_expects_costs_the_attempt_and_not_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = FakeServer("sglang"), FakeServer("sglang")
    async with attached(*servers) as router:
        first, _ = by_name(*servers)

        async def failing(*_: Any, **__: Any) -> Any:
            raise OSError(24, "Too many open files")
            yield

        monkeypatch.setattr(worker_at(router, first).link._server, "generate", failing)
        tokens, _ = await collect(router.generate(PROMPT, SHORT))
        assert tokens == expected_tokens(PROMPT, 12)
        assert router.stats()["workers"][first.url]["requests_failed"] == 1


@both_servers
@asynchronous
async def test_more_cached_tokens_than_the_prompt_has_are_not_accepted_and_counted(kind: str) -> None:
    server = FakeServer(kind)
    server.lie_tokens = 10_000
    async with attached(server) as router:
        tokens, chunks = await collect(router.generate(PROMPT, SHORT))
        assert tokens == expected_tokens(PROMPT, 12)
        assert all(chunk.cached_tokens is None for chunk in chunks) and router.counters.wrong_reports == 1


PATHS = {"sglang": "/generate", "vllm": "/v1/completions"}


@both_servers
@pytest.mark.parametrize(
    ("status", "error"),
    [(400, InvalidInput), (503, QueueFull), (429, QueueFull), (404, EngineError), (500, WorkerLost)],
)
@asynchronous
async def test_a_refused_request_is_a_typed_error_that_quotes_nothing(kind: str, status: int, error: type) -> None:
    server = FakeServer(kind)
    server.answers[PATHS[kind]] = (status, json.dumps({"error": {"message": "prompt was secret", "type": "Bad"}}))
    times = {"resume_seconds": 0.2, "max_attempts": 2}
    async with attached(server, **times) as router:
        with pytest.raises(error) as caught:
            await collect(router.generate(PROMPT, SHORT))
        assert "secret" not in str(caught.value)


@both_servers
@asynchronous
async def test_more_requests_than_the_bound_are_refused(kind: str) -> None:
    server = FakeServer(kind)
    server.pause_seconds = 0.01
    async with attached(server, options=ServerOptions(max_requests=1)) as router:
        running = asyncio.ensure_future(collect(router.generate(PROMPT, SHORT)))
        await until(lambda: server.running == 1, "one runs")
        with pytest.raises(QueueFull):
            await collect(router.generate(PROMPT, SHORT))
        await running


# --- what servers report ----------------------------------------------------------------------------------------------


@both_servers
@asynchronous
async def test_facts_are_what_the_server_reports(kind: str) -> None:
    server = await FakeServer(kind, ranks=2).start()
    async with EngineServer(server.url) as client:
        facts = await client.info()
        loads = await client.load()
    first, second = server.publishers
    await server.kill()
    assert (facts.engine, facts.model, facts.block_size, facts.kv_capacity_tokens) == (kind, "tiny", BLOCK, 50_000)
    assert (facts.ranks, facts.max_model_tokens) == (2, 4096)
    assert facts.events[0] == EventSource(first.endpoint, first.replay_endpoint, "kv")
    assert facts.events[1] == EventSource(second.endpoint, second.replay_endpoint, "kv")
    assert [load.rank for load in loads] == [0, 1]
    assert facts.start and all("--load-publish-endpoint" in advice for advice in facts.advice)


@both_servers
@asynchronous
async def test_what_keeps_a_server_from_being_attached_is_named_with_its_flag(kind: str) -> None:
    server = await FakeServer(kind, events=False, api_key="right").start()
    stories = [
        (ServerOptions(), "api_key"),
        (ServerOptions(api_key="wrong"), "api_key"),
        (ServerOptions(api_key="right", require_events=True), "--kv-events-config"),
    ]
    for options, complaint in stories:
        with pytest.raises(HandshakeRefused, match=complaint):
            await EngineServer(server.url, options).info()
    async with EngineServer(server.url, ServerOptions(api_key="right")) as client:
        facts = await client.info()
        assert facts.events == () and "--kv-events-config" in facts.advice[0]
    await server.kill()


@pytest.mark.parametrize(("reports", "advised"), [(False, True), (True, False), (None, False)])
def test_an_sglang_server_that_reports_no_hits_at_v1_is_advised_to(reports: bool | None, advised: bool) -> None:
    answer = {"max_total_num_tokens": 1000, **({} if reports is None else {"enable_cache_report": reports})}
    advice = sglang_info("http://a:1", answer, ServerOptions()).advice
    assert any("--enable-cache-report" in one for one in advice) is advised


@both_servers
@asynchronous
async def test_whether_a_server_is_well_is_asked_by_what_costs_it_least(kind: str) -> None:
    """vLLM's load is in the text of its metrics; SGLang's own question after its health computes a token."""
    dear, cheap = {"vllm": ("/metrics", "/health"), "sglang": ("/health", "/v1/loads")}[kind]
    server = await FakeServer(kind).start()
    async with EngineServer(server.url) as client:
        await client.info()
        server.answers = {dear: (500, b"")}
        loads = await client.check()
        assert loads is None if kind == "vllm" else [load.rank for load in loads or ()] == [0]
        server.answers = {cheap: (503, b"")}
        with pytest.raises(TransportError, match="503"):
            await client.check()
    await server.kill()


@asynchronous
async def test_what_vllm_does_not_reports_is_asked_of_the_operator() -> None:
    server = await FakeServer("vllm").start()
    server.answers = {"/metrics": (404, b""), "/kv_event_sources": (404, b"")}
    with pytest.raises(HandshakeRefused, match="ServerOptions.block_size"):
        await EngineServer(server.url).info()
    options = ServerOptions(block_size=32, kv_capacity_tokens=4096, events_endpoint="tcp://127.0.0.1:5557")
    async with EngineServer(server.url, options) as client:
        facts = await client.info()
        assert (facts.block_size, facts.kv_capacity_tokens, facts.start) == (32, 4096, "")
        assert facts.events == (EventSource("tcp://127.0.0.1:5557"),)
    await server.kill()


NONSENSE: list[tuple[str, int, bytes]] = [
    ("/server_info", 200, b'{"max_total_num_tokens": "many", "page_size": 1}'),
    ("/server_info", 200, b"\xff\xfe nonsense"),
    ("/server_info", 200, b'{"max_total_num_tokens": 10, "dp_size": 1000000}'),
    ("/server_info", 503, b""),
    ("/server_info", 307, b""),
    ("/server_info", 200, b'{"max_total_num_tokens": 10, "page_size": 1' + b" " * 3000 + b"}"),
]


@pytest.mark.parametrize(("path", "status", "body"), NONSENSE)
@asynchronous
async def test_facts_that_are_none_are_typed_errors(path: str, status: int, body: bytes) -> None:
    server = await FakeServer("sglang").start()
    server.answers = {path: (status, body)}
    router = Router([(server.url, ServerOptions(max_body_bytes=2000))], config=fast(connect_seconds=0.3))
    with pytest.raises(Exception, match=r"127\.0\.0\.1|JSON") as caught:
        await router.start()
    assert type(caught.value).__module__ == "preble.errors"
    await server.kill()


@pytest.mark.parametrize(
    ("policy", "cached_first"), [("lpm", True), ("dfs-weight", True), ("fcfs", False), (None, False)]
)
def test_an_sglang_server_says_whether_it_takes_cached_prompts_first(policy: str | None, cached_first: bool) -> None:
    answer = {"max_total_num_tokens": 100, "page_size": 1, "schedule_policy": policy}
    assert sglang_info("http://a:1", answer, ServerOptions()).cached_first is cached_first


@pytest.mark.parametrize("path", ["/server_info", "/generate"])
@asynchronous
async def test_a_compressed_body_is_refused_and_not_undone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes of it may become any number."""
    server = FakeServer("sglang")
    meet = server._meet

    @web.middleware
    async def compressing(request: web.Request, handler: Any) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        if request.path == path:
            bomb = zlib.compress(b" " * (64 << 20), 9)
            return web.Response(body=bomb, headers={"Content-Encoding": "deflate"})
        return await meet(request, handler)

    monkeypatch.setattr(server, "_meet", compressing)
    await server.start()
    async with EngineServer(server.url, ServerOptions(max_body_bytes=1 << 30, max_line_bytes=1 << 30)) as asked:
        with pytest.raises(ProtocolError, match="sent a compressed body"):
            await asked.info()
            async for _ in asked.generate([1, 2, 3], SHORT, request_id="r"):
                pass
    await server.kill()


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:1", "127.0.0.1:30000", "http://", "http:///x"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="must be (like )?http://HOST:PORT"):
        EngineServer(url)


@pytest.mark.parametrize(
    "wrong",
    [{"block_size": 0}, {"kv_capacity_tokens": -1}, {"answer_seconds": 0}, {"events_endpoint": "5557"}]
    + [{"replay_endpoint": "tcp://a:1"}, {"max_line_bytes": 0}, {"max_requests": 0}],
)
def test_options_out_of_range_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=f"ServerOptions.{next(iter(wrong))}"):
        ServerOptions(**wrong)


NAMESPACES: list[Any] = [None, "tenant", 7, ("lora", "a"), ("salt", "s"), ("lora", "a", "salt", "s"), ("x", (1, b"y"))]


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("as_extra", [False, True])
def test_a_namespace_comes_back_from_the_keys_that_the_engine_reports(namespace: Any, as_extra: bool) -> None:
    salt, lora = keys_of(namespace)
    told = BlockKeys(lora or None, None, None if as_extra else salt or None, (salt,) if as_extra and salt else ())
    if namespace is not None:
        assert namespace_of(told) == namespace


def test_nobody_chooses_the_namespace_of_another_by_a_salt() -> None:
    theirs, _ = keys_of(("tenant", 1))
    for namespace in (("salt", theirs), ("lora", "a", "salt", theirs)):
        for salt, lora in (keys_of(namespace), (salt_of(namespace), "")):
            assert (salt, lora) != (theirs, "")
            assert namespace_of(BlockKeys(lora or None, None, salt, ())) == namespace


def test_salts_of_others_are_themselves_and_never_an_error() -> None:
    for salt in ("preble:", "preble:!!", "preble:AAAA", "other", "preble:" + "é"):
        assert namespace_of(BlockKeys(None, None, salt, ())) in (("salt", salt), 0)
    assert len({keys_of(namespace) for namespace in NAMESPACES}) == len(NAMESPACES)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_an_engine_without_loras_is_given_all_of_a_namespace_as_its_salt(namespace: Any) -> None:
    salt, (_, lora) = salt_of(namespace), keys_of(namespace)
    assert salt == keys_of(namespace)[0] or lora
    assert namespace_of(BlockKeys(None, None, salt, ())) == namespace if salt else namespace is None
