"""Two movers of KV with real sockets between them, and engines that compute nothing: what goes wrong on the way and at
either end, keys, bounds. With real engines and processes it is `test_torch_workers`'."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from preble.engines.base import EngineInfo, GenerationRequest
from preble.errors import TransportError
from preble.transport import wire
from preble.transport.kv_followers import KvFollowers, Leader
from preble.transport.kv_transfers import KvLimits
from preble.transport.messages import PullFrom
from preble.transport.security import ServerKeys, create_keys, load_server_keys
from preble.worker.kv_mover import KvMover, PullResult
from tests.support.kv import KvRelay, TokenEngine
from tests.support.transport import HANG_SECONDS

PROMPT = np.arange(500, 1000, dtype=np.int32)
EPOCH = 77
LIMITS = KvLimits(part_bytes=4 * 50)


class Side:
    """One worker: a mover, its engine, and the results. While it is `busy` its jobs wait, until `resume`."""

    def __init__(self, engine: TokenEngine, **options: Any) -> None:
        self.engine = engine
        self.jobs: list[Callable[[], None]] = []
        self.results: list[PullResult] = []
        self.busy = False
        self._in_order = threading.Lock()  # an engine's thread does one job after another
        self.woken = threading.Event()
        bind = options.pop("bind", "tcp://127.0.0.1:*")
        limits = options.pop("limits", LIMITS)
        options = {"epoch": EPOCH, **options}
        calls: Any = (self._call, self.woken.set)
        self.mover = KvMover(engine, engine.info, *calls, bind, limits=limits, **options)
        self.mover.start()

    def _call(self, job: Callable[[], None]) -> None:
        with self._in_order:
            if self.busy:
                self.jobs.append(job)
            else:
                job()

    def resume(self) -> None:
        """Do the jobs that wait, before any that comes now."""
        with self._in_order:
            self.busy = False
            for job in self.jobs:
                job()
            self.jobs.clear()

    def pull(self, source: str, *, wait_seconds: float = HANG_SECONDS, **fields: Any) -> PullResult:
        """Pull all but the last token, and wait for the result."""
        assert self.mover.pull("r", request(source, wait_seconds, **fields))
        return self.result()

    def result(self) -> PullResult:
        """The next result."""
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline:
            self.results += self.mover.take_results()
            if self.results:
                return self.results.pop(0)
            self.woken.wait(0.05)
            self.woken.clear()
        raise AssertionError("no result came")


def request(source: str, wait_seconds: float = HANG_SECONDS, **fields: Any) -> GenerationRequest:
    """A request with a pull."""
    fields = {"epoch": EPOCH, "tokens": len(PROMPT), "wait_us": int(wait_seconds * 1e6), **fields}
    namespace = fields.pop("namespace", None)
    return GenerationRequest("r", PROMPT, namespace=namespace, pull=PullFrom(source, **fields))


def until_true(condition: Callable[[], Any]) -> None:
    """Wait for it."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    """Make sides that are closed at the end."""
    made: list[Side] = []

    def make(engine: TokenEngine | None = None, **options: Any) -> Side:
        made.append(Side(engine or TokenEngine(), **options))
        return made[-1]

    yield make
    for side in made:
        side.mover.close()


Sides = Callable[..., Side]


def full() -> TokenEngine:
    """An engine that caches the prompt."""
    return TokenEngine({None: PROMPT})


def test_a_prefix_moves_and_both_count_it(sides: Sides) -> None:
    source, target = sides(full()), sides(TokenEngine({None: PROMPT[:120]}))
    result = target.pull(source.mover.endpoint)
    assert (result.end, result.cached_tokens, result.moved_tokens, result.moved_bytes) == ("done", 499, 379, 4 * 379)
    assert target.engine.cached_tokens(PROMPT, None) == 499
    assert result.took_us > 0
    until_true(lambda: source.mover.counters.kv_bytes_sent == 4 * 379)  # a part is counted once it is sent
    assert target.mover.counters.kv_bytes_taken == 4 * 379
    assert source.mover.counters.kv_parts_sent == source.mover.counters.kv_asks == 8
    assert target.pull(source.mover.endpoint).moved_tokens == 0, "nothing is missing"


def drop(number: int) -> Any:
    """A judge that loses one answer."""
    return lambda n, parts: [] if n == number else [parts]


def swapped() -> Any:
    """A judge that passes the second answer before the first."""
    held: list[list[bytes]] = []

    def judge(number: int, parts: list[bytes]) -> list[list[bytes]]:
        if number == 0:
            held.append(parts)
            return []
        return [parts, *held] if number == 1 else [parts]

    return judge


@pytest.mark.parametrize(
    ("judge", "end", "moved"),
    [
        (drop(0), "lost", 0),
        (drop(3), "lost", 150),
        (lambda n, parts: [parts, parts], "done", 499),
        (swapped(), "lost", 0),
        (lambda n, parts: [[parts[0], parts[1][:-4]]] if n == 2 else [parts], "lost", 100),
        (lambda n, parts: [[b"\xff", *parts[1:]]] if n == 1 else [parts], "lost", 50),
        (lambda n, parts: [parts[:1]] if n == 1 else [parts], "lost", 50),
        (lambda n, parts: [] if n >= 2 else [parts], "late", 100),
    ],
    ids=["first", "lost", "doubled", "swapped", "cut", "nonsense", "headless", "silent"],
)
def test_whatever_the_network_does_only_whole_parts_in_order_are_taken_over(
    sides: Sides, judge: Any, end: str, moved: int
) -> None:
    source, target = sides(full()), sides()
    with KvRelay(source.mover.endpoint, judge) as relay:
        result = target.pull(relay.endpoint, wait_seconds=0.3 if end == "late" else HANG_SECONDS)
    assert (result.end, result.moved_tokens) == (end, moved)
    assert target.engine.cached_tokens(PROMPT, None) >= moved
    assert target.pull(source.mover.endpoint).end == "done", "the next one goes well"


@pytest.mark.parametrize(
    ("fields", "end", "moved"),
    [
        ({"epoch": EPOCH - 1}, "refused", 0),
        ({"namespace": "other"}, "partial", 0),
        ({"tokens": 70}, "done", 70),
    ],
)
def test_a_source_hands_over_what_it_caches_now_and_nothing_of_an_earlier_life(
    sides: Sides, fields: dict[str, Any], end: str, moved: int
) -> None:
    result = sides().pull(sides(full()).mover.endpoint, **fields)
    assert (result.end, result.moved_tokens) == (end, moved)


def test_a_source_that_has_lost_some_of_it_hands_over_the_rest(sides: Sides) -> None:
    result = sides().pull(sides(TokenEngine({None: PROMPT[:130]})).mover.endpoint)
    assert (result.end, result.cached_tokens, result.moved_tokens) == ("partial", 130, 130)


def test_engines_that_fail_end_a_pull_and_nothing_else(sides: Sides, caplog: pytest.LogCaptureFixture) -> None:
    source, target = sides(full()), sides()
    source.engine.fails = True
    assert target.pull(source.mover.endpoint).end == "refused"
    source.engine.fails, target.engine.fails = False, True
    with caplog.at_level(logging.CRITICAL):
        assert target.pull(source.mover.endpoint).end == "full"
    target.engine.fails = False
    assert target.pull(source.mover.endpoint).end == "done"


def test_a_worker_of_another_layout_is_refused(sides: Sides) -> None:
    other = TokenEngine()
    other.info = EngineInfo("tokens", "tokens", 1000, kv_layout="others", kv_token_bytes=4)
    assert sides(other).pull(sides(full()).mover.endpoint).end == "refused"


def test_a_source_that_is_gone_or_was_never_there_costs_no_waiting(sides: Sides) -> None:
    source, target = sides(full()), sides()
    source.busy = True
    assert target.mover.pull("r", request(source.mover.endpoint))
    until_true(lambda: source.jobs)
    source.mover.close()
    assert target.result().end == "lost", "its connection broke"
    assert target.pull(source.mover.endpoint).end == "lost", "nobody is there any more"
    for nonsense in ("inproc://x", "ipc:///tmp/x", "tcp://nowhere", "", "tcp://127.0.0.1"):
        assert target.pull(nonsense).end == "lost"


def test_bounds_of_asks_and_of_pulls(sides: Sides) -> None:
    limits = KvLimits(part_bytes=4, parts_ahead=3, asks=2, pulls=2)
    source, target = sides(full(), limits=limits), sides(limits=limits)
    source.busy = True
    assert target.pull(source.mover.endpoint).end == "refused", "the third ask is over the bound"
    assert source.mover.counters.kv_asks_refused == 1
    target.busy = True
    assert target.mover.pull("one", request(source.mover.endpoint))
    assert target.mover.pull("two", request(source.mover.endpoint, namespace="another"))
    assert not target.mover.pull("three", request(source.mover.endpoint))
    assert target.mover.counters.pulls_declined == 1
    for name in ("nobody", "one", "one", "two"):
        target.mover.cancel(name)
    assert [(one.engine_id, one.end) for one in (target.result(), target.result())] == [
        ("one", "cancelled"),
        ("two", "cancelled"),
    ]
    assert target.mover.pull("four", request(source.mover.endpoint)), "there is room again"


def shares(count: int, namespace: Any = None, tail: int = 3) -> GenerationRequest:
    """A request without a pull that shares so many tokens with the prompt."""
    tokens = np.concatenate((PROMPT[:count], np.arange(2000, 2000 + tail, dtype=np.int32)))
    return GenerationRequest("f", tokens, namespace=namespace)


def test_requests_that_share_the_prefix_wait_for_what_they_share_and_no_longer(sides: Sides) -> None:
    """Regression: those that came after the one that pulled computed what was on its way."""
    source, target = sides(full()), sides(TokenEngine({None: PROMPT[:100]}))
    source.busy = True
    assert target.mover.pull("r", request(source.mover.endpoint))
    until_true(lambda: len(source.jobs) == LIMITS.parts_ahead)
    for name, follower in (
        *(("other", shares(0)), ("elsewhere", shares(400, "other")), ("cached", shares(90))),
        *(("some", shares(220)), ("all", shares(500)), ("itself", request(source.mover.endpoint))),
    ):
        assert target.mover.pull(name, follower)
    alone = [target.result() for _ in range(3)]
    assert [(one.engine_id, one.end) for one in alone] == [("other", ""), ("elsewhere", ""), ("cached", "")]
    source.resume()
    results = {one.engine_id: one for one in (target.result() for _ in range(4))}
    assert results["r"].end == "done" and results["r"].moved_tokens == 399
    assert {name: (one.end, one.cached_tokens, one.moved_tokens) for name, one in results.items() if name != "r"} == {
        "some": ("joined", 220, 0),
        "all": ("joined", 499, 0),
        "itself": ("joined", 499, 0),
    }
    assert list(results)[0] == "some", "it has what it wants before the rest has come"
    assert source.mover.counters.kv_asks == 8 and target.mover.counters.pulls_joined == 3
    assert target.mover.pull("late", shares(500)) and target.result().end == "", "nothing is on its way any more"


def test_who_waits_for_a_pull_that_ends_early_computes_the_rest(sides: Sides) -> None:
    source, target = sides(full()), sides()
    with KvRelay(source.mover.endpoint, drop(3)) as relay:
        target.busy = True
        assert target.mover.pull("r", request(relay.endpoint)) and target.mover.pull("f", shares(500))
        until_true(lambda: target.jobs)
        target.resume()
        results = {one.engine_id: (one.end, one.cached_tokens) for one in (target.result(), target.result())}
    assert results == {"r": ("lost", 150), "f": ("joined", 150)}


def test_who_shares_little_waits_next_to_no_time(sides: Sides) -> None:
    source, target = sides(full()), sides()
    source.busy = True
    assert target.mover.pull("r", request(source.mover.endpoint))
    assert target.mover.pull("f", shares(1))
    result = target.result()
    assert (result.engine_id, result.end) == ("f", "joined")
    assert result.took_us >= 1e6 * HANG_SECONDS / 500 * 0.99, "a 500th of what the pull is worth"


def test_who_follows_a_pull_takes_no_place_of_one(sides: Sides) -> None:
    """Regression: with as many followers as there may be pulls, no other pull began."""
    limits = KvLimits(part_bytes=4 * 50, pulls=2, followers=3)
    source, target = sides(full()), sides(limits=limits)
    source.busy = True
    assert target.mover.pull("leader", request(source.mover.endpoint))
    until_true(lambda: source.jobs)
    assert target.mover.pull("same", request(source.mover.endpoint))
    until_true(lambda: target.mover.counters.pulls_joined == 1)
    assert target.mover.pull("f", shares(400)) and target.mover.pull("g", shares(400))
    assert target.mover.pull("other", request(source.mover.endpoint, namespace="another"))
    assert not target.mover.pull("h", shares(400)), "three follow"
    assert not target.mover.pull("third", request(source.mover.endpoint, namespace="third")), "two are under way"
    assert target.mover.counters.pulls_declined == 2
    target.mover.cancel("f")
    assert target.result().engine_id == "f"
    assert target.mover.pull("h", shares(400)), "there is room again"


def test_who_follows_a_pull_that_is_cancelled_begins_its_own(sides: Sides) -> None:
    """Regression: its own source, which answers, was never asked. Those that follow it go on following one."""
    slow, source, target = sides(full()), sides(full()), sides(limits=KvLimits(part_bytes=4 * 50, pulls=2))
    slow.busy = True
    assert target.mover.pull("leader", request(slow.mover.endpoint))
    until_true(lambda: slow.jobs)
    for n, (name, tokens) in enumerate((("shorter", 300), ("all", 500), ("again", 500))):
        assert target.mover.pull(name, request(source.mover.endpoint, tokens=tokens))
        until_true(lambda n=n: target.mover.counters.pulls_joined == n + 1)
    assert target.mover.pull("f", shares(500))
    until_true(lambda: target.mover.counters.pulls_joined == 4)
    target.mover.cancel("leader")
    results = {one.engine_id: one for one in (target.result() for _ in range(5))}
    assert {name: (one.end, one.cached_tokens, one.moved_tokens) for name, one in results.items()} == {
        "leader": ("cancelled", 0, 0),
        "f": ("joined", 0, 0),
        "shorter": ("joined", 499, 0),
        "all": ("done", 499, 499),
        "again": ("joined", 499, 0),
    }
    assert source.mover.counters.kv_asks == 10


def test_followers_are_bounded_and_can_be_cancelled() -> None:
    followers = KvFollowers(2)
    leader = Leader(5, PullFrom("x", 1, 100, 10_000_000), PROMPT, None, 0)
    assert followers.due == math.inf
    assert [followers.join(name, shares(50), [leader], 1.0) for name in "abc"] == [True, True, False]
    assert followers.due == pytest.approx(6.0) and len(followers) == 2
    assert followers.progressed(5, 49) == followers.progressed(4, 100) == followers.expired(5.9) == []
    assert [one.engine_id for one in followers.cancelled("a")] == ["a"] and followers.cancelled("a") == []
    assert [one.engine_id for one in followers.expired(6.1)] == ["b"]
    assert len(followers) == 0


def test_a_pull_of_its_own_waits_for_another_only_if_that_brings_all_of_it() -> None:
    followers = KvFollowers(9)
    short, long = (Leader(n, PullFrom("x", 1, tokens, 1000), PROMPT, None, 0) for n, tokens in ((1, 100), (2, 300)))
    assert not followers.join("a", request("x", tokens=200), [short], 0.0)
    assert followers.join("b", request("x", tokens=200), [short, long], 0.0)
    assert followers.join("c", shares(80), [short, long._replace(cached_tokens=80)], 0.0)
    assert not followers.join("d", shares(80), [long._replace(cached_tokens=80)], 0.0), "it is here already"
    assert [one.engine_id for one in followers.ended(2)] == ["b"] and [one.engine_id for one in followers.ended(1)] == [
        "c"
    ]


def test_pulls_from_one_source_share_what_may_be_on_the_way_and_all_end(sides: Sides) -> None:
    """Regression: several at once asked for more than the source keeps for one worker, and parts were dropped."""
    spaces = [None, "b", "c", "d"]
    source = sides(TokenEngine(dict.fromkeys(spaces, PROMPT)))
    target = sides(limits=KvLimits(part_bytes=4 * 50, parts_queued=5))
    source.busy = True
    for namespace in spaces:
        assert target.mover.pull(str(namespace), request(source.mover.endpoint, namespace=namespace))
    until_true(lambda: len(source.jobs) == 5)
    passed_by = threading.Event()
    target.mover._post(passed_by.set)
    assert passed_by.wait(HANG_SECONDS)
    assert sum(one.pull.ahead for one in target.mover._running.values() if one.pull is not None) == 5
    source.resume()
    assert {(one.end, one.moved_tokens) for one in (target.result() for _ in spaces)} == {("done", 499)}
    assert source.mover.counters.kv_parts_unsent == 0


def test_what_may_be_on_the_way_stays_below_the_mark_at_which_zeromq_drops(sides: Sides) -> None:
    """Regression: a socket learns what its other end has read in steps of half its mark, so a mark of `parts_queued`
    looked full with fewer on the way, and the last part of a pull was dropped and waited for."""
    source = sides(limits=KvLimits(parts_queued=5))
    mark = source.mover._router.sndhwm
    read_and_not_known = (mark + 1) // 2 - 1
    assert mark - read_and_not_known >= 5


def test_nonsense_is_counted_and_harms_nobody(sides: Sides) -> None:
    source, target = sides(full()), sides()
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.linger = 0
    stranger.connect(source.mover.endpoint)
    ask = wire.encode(wire.KvAsk("tokens", PROMPT, 600), epoch=EPOCH, session=1, seq=5)
    for parts in ([b"\x00"], [b"", b""], [wire.encode(wire.Ping(1))], [ask, b"x"]):
        stranger.send_multipart(parts)
    stranger.send(ask)
    assert stranger.poll(int(1000 * HANG_SECONDS))
    part = wire.decode(stranger.recv_multipart()[0], wire.KV_ANSWERS)
    assert part.message == wire.KvPart(600, 0, part.message.busy_us) and part.seq == 5  # type: ignore[union-attr]
    stranger.close()
    assert source.mover.counters.kv_malformed == 4
    assert target.pull(source.mover.endpoint).end == "done"


def test_an_ask_for_everything_is_answered_with_one_part(sides: Sides) -> None:
    source = sides(full())
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.linger = 0
    stranger.connect(source.mover.endpoint)
    stranger.send(wire.encode(wire.KvAsk("tokens", PROMPT, 0), epoch=EPOCH))
    assert stranger.poll(int(1000 * HANG_SECONDS))
    frame, data = stranger.recv_multipart()
    assert len(data) == LIMITS.part_bytes
    stranger.close()


def keys_in(directory: Path) -> ServerKeys:
    """A fleet's keys."""
    create_keys(directory)
    return load_server_keys(directory)


def test_with_keys_only_workers_of_the_fleet_get_kv(sides: Sides, tmp_path: Path) -> None:
    fleet, others = keys_in(tmp_path / "fleet"), keys_in(tmp_path / "others")
    source = sides(full(), keys=fleet)
    assert sides(keys=fleet).pull(source.mover.endpoint).end == "done"
    for stranger in (sides(), sides(keys=others)):
        result = stranger.pull(source.mover.endpoint, wait_seconds=1.0)
        assert result.moved_tokens == 0 and result.end in ("lost", "late")
    assert source.mover.counters.kv_asks == 10
    assert sides(keys=fleet).pull(sides(full()).mover.endpoint, wait_seconds=1.0).moved_tokens == 0, "nor from others"


def test_an_endpoint_that_cannot_be_had_is_a_typed_error(sides: Sides) -> None:
    source = sides(full())
    with pytest.raises(TransportError, match="cannot bind"):
        Side(TokenEngine(), bind=source.mover.endpoint)


def test_a_mover_that_fails_gives_back_what_it_has_and_takes_no_more(
    sides: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    target = sides()
    with caplog.at_level(logging.CRITICAL):
        target.mover._post(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        target.mover._thread.join(HANG_SECONDS)
        assert not target.mover.pull("r", request("tcp://127.0.0.1:9"))
