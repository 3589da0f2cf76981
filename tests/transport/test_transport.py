"""The parts of the transport without a network: event order, outbox, keys; and a server held against raw frames.

A `Peer` is a router reduced to its socket: what it sends and gets is exactly what stands in the test.
"""

from __future__ import annotations

import logging
import os
import stat
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from preble.clock import ManualClock
from preble.errors import InsecureBind, InvalidConfig, QueueFull, TransportError
from preble.transport import wire
from preble.transport.event_stream import EventCursor, ReplayBuffer
from preble.transport.messages import CHUNKS_MAX
from preble.transport.outbox import Outbox, chunk_lots, together
from preble.transport.security import (
    AllowList,
    check_bind,
    create_keys,
    is_loopback,
    load_client_keys,
    load_server_keys,
)
from preble.transport.server import Server, ServerConfig, SessionEnded, bytes_of
from preble.types import AllBlocksCleared, BlockStored, PrefixEvicted, RequestEnded, RequestPlaced, RequestPrefilled
from tests.support.transport import Peer

# --- what tests see of a worker ---------------------------------------------------------------------------------------


def test_chunks_that_come_while_something_else_is_expected_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk of a cancelled request that came before a Pong was lost, and then waited for."""
    last = wire.OutputChunk("r", 1, (), finish_reason="abort")
    pong = wire.Pong(1, next_event_seq=1)
    come: list[wire.Message] = [last, pong]
    monkeypatch.setattr(Peer, "receive", lambda self, timeout_seconds: come.pop(0))
    peer = Peer("tcp://127.0.0.1:1")
    try:
        assert peer.expect(wire.Pong) is pong
        assert peer.expect(wire.OutputChunk) is last
    finally:
        peer.close()


# --- the event stream -------------------------------------------------------------------------------------------------


def batch(number: int) -> tuple[PrefixEvicted, ...]:
    """A batch that can be reported from others."""
    return (PrefixEvicted((number,), 0),)


@given(st.integers(1, 60), st.lists(st.integers(0, 59), max_size=200), st.integers(1, 20))
def test_whatever_order_batches_come_in_each_is_applied_once_and_in_order(
    count: int, arrivals: list[int], max_held: int
) -> None:
    cursor = EventCursor(0, max_held)
    applied: list[int] = []
    for number in [n % count for n in arrivals]:
        applied += [event.token_ids[0] for lot in cursor.offer(number, batch(number)) for event in lot]
        assert applied == list(range(len(applied))), "in order, none twice, none left out"
        assert cursor.next_seq == len(applied)
    for number in range(cursor.next_seq, count):  # the replay
        applied += [event.token_ids[0] for lot in cursor.offer(number, batch(number)) for event in lot]
    assert applied == list(range(count))
    assert not cursor.has_gap


def test_a_gap_is_seen_until_it_is_filled() -> None:
    cursor = EventCursor(5)
    assert cursor.offer(7, batch(7)) == [] and cursor.has_gap
    assert cursor.offer(5, batch(5)) == [batch(5)] and cursor.has_gap
    assert cursor.offer(6, batch(6)) == [batch(6), batch(7)] and not cursor.has_gap


def test_a_loss_at_the_very_end_is_noticed_when_the_end_is_reported() -> None:
    cursor = EventCursor(0)
    cursor.offer(0, batch(0))
    cursor.expect(3)
    assert cursor.has_gap and cursor.next_seq == 1


def test_early_batches_over_the_bound_are_dropped_counted_and_still_missing() -> None:
    cursor = EventCursor(0, max_held=2)
    for number in (3, 4, 5):
        cursor.offer(number, batch(number))
    assert cursor.has_gap and cursor.next_seq == 0 and not cursor.has_had(1)
    assert sum(len(cursor.offer(number, batch(number))) for number in range(6)) == 6


def test_early_batches_are_bounded_in_bytes_too() -> None:
    """Regression: 1,024 batches might be 16 MiB each."""
    cursor: EventCursor[tuple[PrefixEvicted, ...]] = EventCursor(0, max_held=100, max_held_bytes=1000)
    for number in range(1, 60):
        assert cursor.offer(number, batch(number), 300) == []
        assert sum(size for _, size in cursor._held.values()) == cursor._held_bytes <= 1000
    assert cursor.offer(60, batch(60), 1001) == [] and not cursor.has_had(60), "larger than all that may wait"
    assert cursor.has_gap and cursor.next_seq == 0
    assert sum(len(cursor.offer(number, batch(number), 300)) for number in range(61)) == 61, "asked for again"
    assert cursor.offer(61, batch(61), 5000) == [batch(61)], "its turn: it does not wait"
    assert cursor._held_bytes == 0


def test_starting_afresh_forgets_what_was_held_back() -> None:
    cursor = EventCursor(0)
    cursor.offer(9, batch(9))
    cursor.skip_to(12)
    assert not cursor.has_gap
    assert cursor.has_had(9) and cursor.offer(9, batch(9)) == []
    assert cursor.offer(12, batch(12)) == [batch(12)]


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 20), st.integers(1, 300))
def test_the_replay_buffer_keeps_the_newest_within_both_bounds(
    sizes: list[int], max_batches: int, max_bytes: int
) -> None:
    buffer = ReplayBuffer(max_batches, max_bytes)
    for number, size in enumerate(sizes):
        buffer.append(batch(number), size)
        assert buffer.next_seq == number + 1
    kept = range(buffer.first_seq, buffer.next_seq)
    assert len(kept) <= max_batches and sum(sizes[n] for n in kept) == buffer.bytes_used <= max_bytes
    if kept.start:  # one more would have broken a bound
        assert len(kept) == max_batches or buffer.bytes_used + sizes[kept.start - 1] > max_bytes
    assert buffer.page(kept.start, 1000) == [(n, batch(n)) for n in kept]
    assert buffer.page(kept.start - 1, 1000) == [] and buffer.page(kept.stop, 1000) == []


# --- the outbox -------------------------------------------------------------------------------------------------------


def test_waiting_chunks_of_one_request_merge_and_other_messages_keep_their_place() -> None:
    box = Outbox(max_messages=10, max_tokens=100)
    box.push(wire.OutputChunk("a", 0, (1, 2), cached_tokens=7, next_event_seq=5))
    box.push(wire.OutputChunk("b", 4, (9,)))
    box.push(wire.Pong(1, 0))
    box.push(wire.OutputChunk("a", 2, (3,)))
    box.push(wire.OutputChunk("a", 3, (4,), finish_reason="length", next_event_seq=6))
    sent = []
    while box:
        sent.append(box.peek())
        box.pop(len(sent[-1].chunks) if isinstance(sent[-1], wire.OutputChunks) else 1)
    merged = wire.OutputChunk("a", 0, (1, 2, 3, 4), 7, "length", None, 5)  # events that follow its first part follow it
    assert sent == [wire.OutputChunks((merged, wire.OutputChunk("b", 4, (9,))), 5), wire.Pong(1, 0)]
    assert box.tokens == 0 and box.merged == 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), max_size=60))
def test_the_outbox_loses_and_doubles_no_token(pushes: list[tuple[str, int, bool]]) -> None:
    box = Outbox(max_messages=1000, max_tokens=1000)
    made: dict[str, int] = dict.fromkeys("abc", 0)
    got: dict[str, list[int]] = {name: [] for name in "abc"}

    def send() -> None:
        message = box.peek()
        assert isinstance(message, wire.OutputChunk | wire.OutputChunks)
        chunks = message.chunks if isinstance(message, wire.OutputChunks) else (message,)
        for chunk in chunks:
            assert chunk.index == len(got[chunk.request_id])
            got[chunk.request_id] += chunk.token_ids
        box.pop(len(chunks))

    for name, count, router_reads in pushes:
        box.push(wire.OutputChunk(name, made[name], tuple(range(made[name], made[name] + count))))
        made[name] += count
        if router_reads:
            send()
        assert box.tokens == sum(made.values()) - sum(map(len, got.values()))
    while box:
        send()
    assert got == {name: list(range(count)) for name, count in made.items()}


def test_chunks_are_cut_into_lots_that_fit_a_frame() -> None:
    one, many = wire.OutputChunk("a", 0, (1,)), wire.OutputChunk("b", 0, (1,) * 50_000)
    assert not list(chunk_lots([]))
    assert list(map(len, chunk_lots([one] * (2 * CHUNKS_MAX + 1)))) == [CHUNKS_MAX, CHUNKS_MAX, 1]
    assert list(map(len, chunk_lots([many, one, one, many, one, many]))) == [3, 2, 1]
    assert together([one]) is one and together([one, many]) == wire.OutputChunks((one, many), 0)


def test_a_full_outbox_refuses_and_changes_nothing() -> None:
    box = Outbox(max_messages=2, max_tokens=3)
    box.push(wire.OutputChunk("a", 0, (1, 2)))
    box.push(wire.Pong(1, 0))
    with pytest.raises(QueueFull, match="outbox holds 2 messages"):
        box.push(wire.Pong(2, 0))
    box.push(wire.OutputChunk("a", 2, (3,)))  # merges, so it takes no place
    with pytest.raises(QueueFull, match="3 output tokens"):
        box.push(wire.OutputChunk("a", 3, (4,)))
    assert box.peek() == wire.OutputChunk("a", 0, (1, 2, 3)) and len(box) == 2


# --- keys and endpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5", "tcp://127.9.9.9:*", "tcp://[::1]:5", "tcp://localhost:5", "ipc:///x"]
)
def test_endpoints_that_only_this_machine_reaches(endpoint: str) -> None:
    assert is_loopback(endpoint)
    check_bind(endpoint, has_keys=False, insecure=False)


@pytest.mark.parametrize(
    "endpoint", ["tcp://0.0.0.0:5", "tcp://*:5", "tcp://10.0.0.1:5", "tcp://[::]:5", "tcp://gpu-7:5"]
)
def test_anything_else_needs_keys_or_courage(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InsecureBind, match="without keys"):
        check_bind(endpoint, has_keys=False, insecure=False)
    check_bind(endpoint, has_keys=True, insecure=False)
    with caplog.at_level(logging.WARNING, "preble.transport"):
        check_bind(endpoint, has_keys=False, insecure=True)
    assert "without keys" in caplog.text


@pytest.mark.parametrize("endpoint", ["", "5000", "http://127.0.0.1:5", "tcp://127.0.0.1", "tcp://:5", "ipc://"])
def test_an_endpoint_that_is_none_is_named(endpoint: str) -> None:
    with pytest.raises(InvalidConfig, match="endpoint must be"):
        is_loopback(endpoint)


def test_keys_come_back_from_disk_and_secrets_are_private(tmp_path: Path) -> None:
    files = create_keys(tmp_path / "keys")
    server, client = load_server_keys(tmp_path / "keys"), load_client_keys(tmp_path / "keys")
    assert client.server == server.public and server.allowed == {client.public}
    assert len({server.secret, client.secret, server.public, client.public}) == 4
    secret_files = [file for file in files if file.suffix == ".key_secret"]
    assert len(secret_files) == 2 and all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in secret_files)
    assert server.secret.decode() not in repr(server) and client.secret.decode() not in repr(client)


def test_existing_keys_are_not_overwritten_by_accident(tmp_path: Path) -> None:
    create_keys(tmp_path)
    before = load_server_keys(tmp_path)
    with pytest.raises(InvalidConfig, match="exist"):
        create_keys(tmp_path)
    assert load_server_keys(tmp_path) == before
    create_keys(tmp_path, overwrite=True)
    assert load_server_keys(tmp_path) != before


def test_a_pipe_among_the_keys_is_left_out_and_never_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a worker that started, or the thread that lets routers in, waited for its writer for ever."""
    create_keys(tmp_path)
    keys, router = load_server_keys(tmp_path), load_client_keys(tmp_path)
    os.mkfifo(tmp_path / "clients" / "pipe.key")
    assert AllowList(keys).callback("", router.public)
    assert "pipe.key is no CURVE key: it must be a file" in caplog.text
    with pytest.raises(InvalidConfig, match=r"pipe.key is no CURVE key"):
        load_server_keys(tmp_path)


def test_missing_and_broken_key_files_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidConfig, match="server.key_secret"):
        load_server_keys(tmp_path)
    create_keys(tmp_path)
    (tmp_path / "client.key_secret").write_text((tmp_path / "client.key").read_text())
    with pytest.raises(InvalidConfig, match="holds no secret key"):
        load_client_keys(tmp_path)
    (tmp_path / "clients" / "client.key").unlink()
    with caplog.at_level(logging.WARNING, "preble.transport"):
        assert load_server_keys(tmp_path).allowed == frozenset()
    assert "no router can connect" in caplog.text
    (tmp_path / "server.key_secret").write_text('metadata\ncurve\n    public-key = "x"\n    secret-key = "y"\n')
    with pytest.raises(InvalidConfig, match="Z85"):
        load_server_keys(tmp_path)


def test_a_secret_that_others_can_read_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    create_keys(tmp_path)
    (tmp_path / "server.key_secret").chmod(0o644)
    with caplog.at_level(logging.WARNING, "preble.transport"):
        load_server_keys(tmp_path)
    assert "can be read by others" in caplog.text


# --- the server against raw frames ------------------------------------------------------------------------------------

FACTS = wire.Welcome("w0", "fake", "llama", "abc", 1, 1000, None, 4096, (), "", 0, wire.FRAME_BYTES_MAX)
EPOCH = 77


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Make servers that are closed at the end."""
    servers: list[Server] = []

    def make(clock: Callable[[], float] | None = None, **config: object) -> Server:
        server = Server(ServerConfig(**config), FACTS, epoch=EPOCH, **({"clock": clock} if clock else {}))
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.close(linger_seconds=0)


@pytest.fixture
def peer() -> Iterator[Callable[[Server], Peer]]:
    """Make raw routers, each driving its server's poll while it waits."""
    peers: list[Peer] = []

    def make(server: Server, **options: int) -> Peer:
        one = Peer(server.endpoint, pump=lambda: server.poll(0.01), **options)
        peers.append(one)
        return one

    yield make
    for one in peers:
        one.close()


Serve = Callable[..., Server]
MakePeer = Callable[..., Peer]


def test_hello_is_answered_by_what_the_worker_is(serve: Serve, peer: MakePeer) -> None:
    server = serve()
    server.publish(batch(0))
    one = peer(server)
    welcome = one.hello()
    assert (welcome.worker_id, welcome.next_event_seq, welcome.events_endpoint) == ("w0", 1, server.events_endpoint)
    assert one.epoch == EPOCH and server.counters.sessions_opened == 1


def test_a_router_that_expects_another_model_is_refused_naming_both(serve: Serve, peer: MakePeer) -> None:
    server = serve()
    one = peer(server)
    one.send(wire.Hello("router-9", model="mistral"))
    answer = one.receive()
    assert isinstance(answer, wire.Refused)
    assert "'llama'" in answer.text and "'mistral'" in answer.text and "router-9" in answer.text
    assert server.counters.sessions_refused == 1 and not list(server.sessions)


def test_a_router_of_another_version_is_refused_naming_both(serve: Serve, peer: MakePeer) -> None:
    server = serve()
    one = peer(server)
    frame = bytearray(wire.encode(wire.Hello("r")))
    frame[1] = 99  # the version, after the array's head
    one.send_raw(bytes(frame))
    assert one.receive() == wire.Refused(
        f"worker w0 speaks protocol version {wire.PROTOCOL_VERSION}, the router speaks version 99"
    )


def test_malformed_and_oversized_frames_are_counted_and_answered_and_the_session_lives(
    serve: Serve, peer: MakePeer
) -> None:
    server = serve(max_frame_bytes=4096)
    one = peer(server)
    one.hello()
    for parts in ([b"garbage"], [b""], [b"\0" * 5000], [wire.encode(wire.Draining())], [b"two", b"frames"]):
        one.send_raw(*parts)
        answer = one.receive()
        assert isinstance(answer, wire.Fault), answer
    assert server.counters.malformed_frames == 5
    one.send(wire.Replay(0))
    assert isinstance(one.receive(), wire.ReplayEnd)


def test_a_monstrous_frame_costs_its_sender_the_connection_and_nobody_else(serve: Serve, peer: MakePeer) -> None:
    server = serve(max_frame_bytes=4096)
    bad, good = peer(server), peer(server)
    good.hello()
    bad.send_raw(b"\0" * 100_000)
    assert bad.receive(timeout_seconds=0.3) is None
    good.send(wire.Replay(0))
    assert isinstance(good.receive(), wire.ReplayEnd)


def test_frames_of_no_session_are_counted_and_reported_so(serve: Serve, peer: MakePeer) -> None:
    server = serve()
    one = peer(server)
    one.send(wire.Ping(1))
    answer = one.receive()
    assert isinstance(answer, wire.Closed) and answer.code == "no_session"
    one.hello()
    one.epoch += 1  # as if the worker had been restarted between
    one.send(wire.Ping(1))
    answer = one.receive()
    assert isinstance(answer, wire.Closed) and answer.code == "no_session"
    assert server.counters.stale_frames == 2


def test_a_lost_frame_ends_the_session(serve: Serve, peer: MakePeer) -> None:
    server = serve()
    one = peer(server)
    one.hello()
    one.seq += 1
    one.send(wire.Ping(1))
    answer = one.receive()
    assert isinstance(answer, wire.Closed) and answer.code == "gap"
    assert server.counters.frame_gaps == 1 and not list(server.sessions)


def test_a_second_hello_replaces_the_session_and_its_requests(serve: Serve, peer: MakePeer) -> None:
    server = serve()
    one = peer(server)
    one.hello()
    one.send(wire.Hello("again"))
    one.seq = 0
    seen = []
    while not seen:
        seen = [request for _, request in server.poll(0.05)]
    assert seen == [SessionEnded("replaced")] and len(list(server.sessions)) == 1


def test_sessions_are_bounded(serve: Serve, peer: MakePeer) -> None:
    server = serve(max_sessions=1)
    peer(server).hello()
    second = peer(server)
    second.send(wire.Hello("router-2"))
    answer = second.receive()
    assert isinstance(answer, wire.Refused) and "no room for router-2" in answer.text


def test_a_silent_router_expires_but_time_that_the_worker_slept_does_not_count(serve: Serve, peer: MakePeer) -> None:
    clock = ManualClock()
    server = serve(clock=clock, session_timeout_seconds=10.0)
    peer(server).hello()
    clock.advance(3600.0)  # the worker was stopped, not the router
    assert server.poll(0.0) == [] and len(list(server.sessions)) == 1
    ended = []
    for _ in range(100):
        clock.advance(0.5)
        ended += [request for _, request in server.poll(0.0)]
    ended += [request for _, request in server.poll(0.0)]
    assert ended == [SessionEnded("expired")] and server.counters.sessions_expired == 1


def test_a_router_that_does_not_read_gets_merged_chunks_and_no_token_is_lost(serve: Serve, peer: MakePeer) -> None:
    server = serve(send_queue_messages=2)
    slow = peer(server, receive_queue=2, receive_bytes=4096)
    slow.hello()
    (session,) = server.sessions
    total = 60_000
    for position in range(total):  # far more than socket buffers hold, one token each
        server.send(session, wire.OutputChunk("r", position, (position,)))
    assert server.counters.chunks_merged > 0 and session.open
    got: list[int] = []
    while len(got) < total:
        chunk = slow.receive()
        assert isinstance(chunk, wire.OutputChunk) and chunk.index == len(got)
        got += chunk.token_ids
    assert got == list(range(total))


def test_what_a_step_made_travels_together_also_where_it_has_waited(serve: Serve, peer: MakePeer) -> None:
    server = serve(send_queue_messages=2)
    slow = peer(server, receive_queue=2, receive_bytes=4096)
    slow.hello()
    (session,) = server.sessions
    sent, total = server.counters.frames_sent, 20_000
    server.send_chunks(session, [wire.OutputChunk(name, 0, (0,)) for name in "abc"])
    assert server.counters.frames_sent == sent + 1
    for position in range(1, total):
        server.send_chunks(session, [wire.OutputChunk(name, position, (position,)) for name in "abc"])
    assert server.counters.chunks_merged > 0 and session.open
    got: dict[str, list[int]] = {name: [] for name in "abc"}
    while len(got["c"]) < total:
        message = slow.receive()
        assert isinstance(message, wire.OutputChunks)
        for chunk in message.chunks:
            assert chunk.index == len(got[chunk.request_id])
            got[chunk.request_id] += chunk.token_ids
    assert got == {name: list(range(total)) for name in "abc"}


def test_a_router_that_never_reads_loses_its_session_at_the_bound(serve: Serve, peer: MakePeer) -> None:
    server = serve(send_queue_messages=2, max_pending_tokens=1000)
    slow, quick = peer(server, receive_queue=2, receive_bytes=4096), peer(server)
    slow.hello()
    (session,) = server.sessions
    position = 0
    while session.open:
        server.send(session, wire.OutputChunk("r", position, (1,) * 100))
        position += 100
        assert position < 50_000_000, "the bound was never reached"
    assert server.counters.sessions_overflowed == 1
    assert [request for _, request in server.poll(0.0)] == [SessionEnded("slow_reader")]
    quick.hello()  # nobody else noticed


def test_a_router_that_vanishes_is_noticed_when_something_is_sent_to_it(serve: Serve, peer: MakePeer) -> None:
    server = serve()
    one = peer(server)
    one.hello()
    (session,) = server.sessions
    one.close()
    while session.open:
        server.send(session, wire.OutputChunk("r", 0, (1,)))
        ended = server.poll(0.01)
    assert [request for _, request in ended] == [SessionEnded("unreachable")]
    assert server.counters.sessions_unreachable == 1


def test_events_are_replayed_page_by_page_and_too_old_ones_are_admitted_lost(serve: Serve, peer: MakePeer) -> None:
    server = serve(replay_batches=100)
    one = peer(server)
    one.hello()
    for number in range(150):
        server.publish(batch(number))
    one.send(wire.Replay(60))
    page = [one.receive() for _ in range(65)]
    assert [message.number for message in page[:-1] if isinstance(message, wire.Events)] == list(range(60, 124))
    assert page[-1] == wire.ReplayEnd(60, 124, 50, 150)
    one.send(wire.Replay(124))
    assert [one.receive() for _ in range(27)][-1] == wire.ReplayEnd(124, 150, 50, 150)
    one.send(wire.Replay(10))
    assert one.receive() == wire.ReplayEnd(10, 10, 50, 150)
    assert server.counters.replays == 3 and server.counters.replays_too_old == 1


def test_many_events_are_cut_into_frames_and_none_is_lost(serve: Serve) -> None:
    server = serve()
    events = [PrefixEvicted(array("i", range(1, 2000)), 5) for _ in range(500)]
    server.publish(events)
    numbered = server.replay.page(0, 10_000)
    assert 1 < len(numbered) == server.counters.event_batches
    assert sum(len(lot) for _, lot in numbered) == 500


def test_an_event_too_large_for_a_frame_clears_the_estimates_instead(serve: Serve) -> None:
    server = serve(max_frame_bytes=4096)
    server.publish([PrefixEvicted(array("i", range(5000)), 5)])
    assert server.replay.page(0, 10) == [(0, (AllBlocksCleared(),))]
    assert server.counters.events_too_large == 1


def test_what_a_lone_router_does_waits_for_a_number_within_bounds(serve: Serve, peer: MakePeer) -> None:
    server = serve()
    peer(server).hello("one")
    for number in range(1023):
        server.report(RequestEnded("one", str(number)))
    server.publish_reports()
    assert server.replay.next_seq == 0, "nobody waits for it"
    server.report(RequestEnded("one", "1023"))
    numbered = server.replay.next_seq
    assert sum(len(lot) for _, lot in server.replay.page(0, 10)) == 1024, "but no more than so many wait"
    server.report(RequestPlaced("one", "long", array("i", range(1 << 18))))
    assert [len(lot) for _, lot in server.replay.page(numbered, 10)] == [1], "nor so many bytes"
    assert server.counters.events_too_large == 0


def test_what_waits_for_a_number_goes_before_the_events_after_it(serve: Serve, peer: MakePeer) -> None:
    server = serve()
    peer(server).hello("one")
    server.report(RequestEnded("one", "1"))
    server.publish([AllBlocksCleared()])
    assert server.replay.page(0, 10) == [(0, (RequestEnded("one", "1"), AllBlocksCleared()))]


def test_the_request_of_another_router_than_the_one_that_is_left_is_published(serve: Serve, peer: MakePeer) -> None:
    server = serve()
    peer(server).hello("one")
    server.report(RequestEnded("gone", "1"))
    server.publish_reports()
    assert server.replay.page(0, 10) == [(0, (RequestEnded("gone", "1"),))]


def test_a_request_too_large_for_a_frame_is_left_out_and_counted(serve: Serve, peer: MakePeer) -> None:
    server = serve(max_frame_bytes=4096)
    peer(server).hello("one")
    server.report(RequestPlaced("one", "1", array("i", range(900))))
    server.report(RequestPlaced("one", "2", array("i", range(400))))
    server.publish([])
    assert [event.request_id for _, lot in server.replay.page(0, 10) for event in lot] == ["2"]
    assert server.counters.events_too_large == 1


@given(
    st.sampled_from([RequestPlaced, RequestPrefilled, RequestEnded]),
    st.tuples(st.text(min_size=1, max_size=60), st.text(min_size=1, max_size=60)),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50),
    st.none() | st.text(max_size=50) | st.tuples(st.binary(max_size=50), st.integers(0, 2**62)),
    st.none() | st.integers(1, 2**31 - 1),
)
def test_an_event_about_a_request_takes_no_more_bytes_than_are_reckoned(
    kind: type, names: tuple[str, str], token_ids: list[int], namespace: object, count: int | None
) -> None:
    placed = kind is RequestPlaced
    event = kind(*names, token_ids, namespace, count) if placed else kind(*names, count)
    frames = [wire.encode(wire.Events(0, events)) for events in ((), (event,))]
    assert len(frames[1]) - len(frames[0]) <= bytes_of(event)


def test_events_reach_every_subscriber_numbered_and_under_the_epoch(serve: Serve) -> None:
    server = serve()
    context = zmq.Context.instance()
    subscriber = context.socket(zmq.SUB)
    subscriber.linger = 0
    subscriber.subscribe(b"")
    subscriber.connect(server.events_endpoint)
    try:
        number = 0
        while not subscriber.poll(20):  # a subscription takes a moment to arrive
            server.publish(batch(number))
            number += 1
        envelope = wire.decode(subscriber.recv(), wire.WORKER_MESSAGES)
    finally:
        subscriber.close()
    assert envelope.epoch == EPOCH
    assert isinstance(envelope.message, wire.Events)
    (event,) = envelope.message.events
    assert isinstance(event, PrefixEvicted) and np.array_equal(event.token_ids, [envelope.message.number])


def test_what_waits_for_a_router_that_reads_nothing_is_bounded(serve: Serve) -> None:
    """Regression: 10,000 batches of 64 KiB waited for it, 0.65 GB. What it misses shows as a gap in the numbers."""
    server = serve(replay_bytes=1 << 20)  # 64 batches
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.rcvhwm = 1
    subscriber.subscribe(b"")
    subscriber.connect(server.events_endpoint)
    lot = tuple(BlockStored([number], None, list(range(4000)), 4000) for number in range(3))
    try:
        while not subscriber.poll(20):
            server.publish(batch(0))
        for _ in range(2000):  # 90 MiB
            server.publish(lot)
        numbers = []
        while subscriber.poll(300):
            envelope = wire.decode(subscriber.recv(), wire.WORKER_MESSAGES)
            assert isinstance(envelope.message, wire.Events)
            numbers.append(envelope.message.number)
    finally:
        subscriber.close()
        context.term()
    assert 64 <= len(numbers) < 1000, "what the kernel holds of both ends is there, too"
    assert numbers == sorted(set(numbers))


def test_an_endpoint_in_use_is_named(serve: Serve) -> None:
    first = serve()
    with pytest.raises(TransportError, match=f"cannot bind {first.endpoint}"):
        serve(bind=first.endpoint)


def test_the_server_refuses_to_bind_beyond_loopback_without_keys(serve: Serve) -> None:
    with pytest.raises(InsecureBind):
        serve(bind="tcp://0.0.0.0:*")
    with pytest.raises(InsecureBind):
        serve(events_bind="tcp://0.0.0.0:*")
    assert serve(bind="tcp://0.0.0.0:*", insecure=True).endpoint.startswith("tcp://0.0.0.0:")


@pytest.mark.parametrize("name", ["max_sessions", "session_timeout_seconds", "max_pending_tokens", "replay_batches"])
def test_bounds_must_be_positive(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"ServerConfig.{name} must be positive"):
        ServerConfig(**{name: 0})
