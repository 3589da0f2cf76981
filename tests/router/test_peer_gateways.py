"""Gateways of different machines that report their bookings to each other: over TCP with keys, by names that stand for
several addresses. Processes and partitions are in `test_peer_processes`; what siblings of one machine do, in
`test_sibling_routers`. Waits end when something happens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from preble import GlobalScheduler, WorkerSpec
from preble.errors import InsecureBind, InvalidConfig
from preble.router import sibling_routers
from preble.router.peer_addresses import ADDRESSES_MAX, PeerAddresses, bound_at, check_peers
from preble.router.shared_bookings import encode, relative_to, within
from preble.router.sibling_routers import PeerDoor, SiblingRouters
from preble.transport.security import create_keys, load_client_keys, load_server_keys
from preble.types import RequestPlaced
from tests.router.test_sibling_routers import PROMPT, SERVER, Side, known
from tests.scheduling.test_rebalancer import PLAIN, PREFIX, ask, plans
from tests.support.transport import asynchronous

_lives = itertools.count(1)


class Gateway(Side):
    """One router of another machine, as far as its peers are concerned. `space`: of its server's model."""

    def __init__(
        self,
        keys: Path | None = None,
        *,
        bind: str = "tcp://127.0.0.1:*",
        space: Any = None,
        server: str = SERVER,
        **times: Any,
    ) -> None:
        self.server = server
        worker = SimpleNamespace(address=f"http://{server}", namespace=space)
        self.router: Any = SimpleNamespace(
            router_id=f"gateway-{next(_lives)}",
            scheduler=GlobalScheduler([server]),
            fleet=SimpleNamespace(worker=lambda worker_id: worker),
            siblings=None,
        )
        pair = (None, None) if keys is None else (load_server_keys(keys), load_client_keys(keys))
        usual = {"report_seconds": 0.005, "beat_seconds": 0.02, "silent_seconds": 60.0}
        self.siblings = SiblingRouters(self.router, "", (), door=PeerDoor(bind, *pair), **{**usual, **times})
        self.siblings.start()

    @property
    def endpoint(self) -> str:
        return self.siblings.endpoints[0]

    def connected(self) -> int:
        return self.count("connected")


@contextlib.asynccontextmanager
async def gateways(count: int = 2, keys: Path | None = None, **options: Any) -> AsyncIterator[list[Gateway]]:
    """So many that know each other; those in the list at the end are closed."""
    made = [Gateway(keys, **options) for _ in range(count)]
    try:
        for one in made:
            one.siblings.follow([other.endpoint for other in made if other is not one])
        await known(lambda: all(one.connected() == count - 1 for one in made))
        await known(lambda: not any(peer.bookings.behind for one in made for peer in one.siblings._siblings))
        yield made
    finally:
        for one in made:
            await one.siblings.close()


# --- the sockets ------------------------------------------------------------------------------------------------------


@asynchronous
async def test_with_keys_gateways_book_each_others_requests_and_a_stranger_reads_nothing(tmp_path: Path) -> None:
    create_keys(tmp_path)
    async with gateways(3, tmp_path) as (one, two, three):
        context = zmq.Context()
        stranger = context.socket(zmq.SUB)
        stranger.subscribe(b"")
        stranger.connect(one.endpoint)
        one.place("1")
        two.place("1")
        await known(lambda: [one.booked(), two.booked(), three.booked()] == [1, 1, 2])
        one.own.ended("1", 3)
        two.own.ended("1", None)
        await known(lambda: [one.booked(), two.booked(), three.booked()] == [0, 0, 0])
        assert not stranger.poll(0)
        stranger.close(0)
        context.term()


@asynchronous
async def test_a_gateway_that_finds_itself_among_its_peers_books_nothing_twice() -> None:
    async with gateways(2) as (one, two):
        both = [one.endpoint, two.endpoint]
        one.siblings.follow(both)
        await known(lambda: one.endpoint in one.siblings._own_addresses)
        await known(lambda: one.count("siblings") == 1)
        one.siblings.follow(both)
        assert one.count("siblings") == 1, "it does not connect there again"
        one.place("1")
        await known(lambda: two.booked() == 1)
        assert one.booked() == 0


@asynchronous
async def test_a_gateway_with_two_addresses_counts_once_and_by_the_other_when_one_falls_silent() -> None:
    async with gateways(2, silent_seconds=0.5) as (one, two):
        second = one.endpoint.replace("127.0.0.1", "localhost")
        two.siblings.follow([one.endpoint, second])
        await known(lambda: len(two.siblings._siblings) == 2 and two.siblings._siblings[1].is_connected)
        one.place("1")
        await known(lambda: two.booked() == 1)
        await known(lambda: two.connected() == 1)
        assert two.count("received") == 1
        first = two.siblings._siblings[0]
        assert first._reader is not None
        first._reader.stop()  # nothing comes from there any more
        await known(lambda: not first.is_connected)
        await known(lambda: two.booked() == 1 and two.siblings._siblings[1].is_booked)
        one.own.ended("1", 2)
        await known(lambda: two.booked() == 0)


@asynchronous
async def test_a_restarted_gateway_with_two_addresses_has_nothing_left_of_its_earlier_life() -> None:
    """Regression: what was booked by the one address stayed when its next life was known by the other first."""
    worker = SimpleNamespace(namespace=None)
    fleet = SimpleNamespace(worker=lambda worker_id: worker)
    router: Any = SimpleNamespace(router_id="here", scheduler=GlobalScheduler([SERVER]), fleet=fleet)
    siblings = SiblingRouters(router, "", ["tcp://10.0.0.1:70", "tcp://10.0.0.2:70"])  # it is not started
    one, two = siblings._siblings
    one._take([one._topic, encode("earlier", 0, {SERVER: [RequestPlaced("earlier", "1", PROMPT.tolist(), None, 8)]})])
    two._take([b"r", encode("earlier", 0, {})])
    assert (one.is_booked, two.is_booked) == (True, False)
    assert router.scheduler.stats()["peer_bookings"] == 1
    for sibling in (two, one):
        sibling._take([b"r", encode("later", 0, {})])
    assert (one.is_booked, two.is_booked) == (False, True)
    assert router.scheduler.stats()["peer_bookings"] == 0
    siblings._close_sockets()


@asynchronous
async def test_one_that_leaves_the_list_is_left_once_it_is_silent() -> None:
    async with gateways(2, silent_seconds=0.5) as made:
        one, two = made
        one.place("1")
        await known(lambda: two.booked() == 1)
        two.siblings.follow([])
        assert two.booked() == 1, "it still has its request, and reports the end of it"
        made.remove(one)
        one.siblings._beating.cancel()  # type: ignore[union-attr]
        await known(lambda: two.booked() == 0)
        two.siblings.follow([])
        assert two.count("siblings") == 0
        await one.siblings.close()


@asynchronous
async def test_more_addresses_than_there_may_be_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sibling_routers, "LINKS_MAX", 3)
    async with gateways(2) as (one, _):
        one.siblings.follow([f"tcp://127.0.0.1:{port}" for port in range(1, 8)])
        assert (one.count("siblings"), one.count("peers_left_out")) == (3, 5)


@asynchronous
async def test_snapshots_are_sent_so_often_a_beat_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sibling_routers, "SNAPSHOTS_A_BEAT", 2)
    async with gateways(2, beat_seconds=30.0) as (one, _):
        one.siblings._snapshots_left = 2
        before, (door,) = one.count("snapshots_sent"), one.siblings._publishers
        for number in range(5):
            one.siblings._take_subscription(door, [b"\x01s/%d" % number])
        assert one.count("snapshots_sent") == before + 2


@asynchronous
async def test_what_processes_share_of_limits_does_not_go_to_peers(tmp_path: Path) -> None:
    async with gateways(2) as (one, two):
        notes: list[bytes] = []
        two.siblings.on_note = notes.append
        assert not one.siblings.send_note(b"of a key")
        one.siblings._publishers[0].send(b"n", b"of a key")
        one.place("1")
        await known(lambda: two.booked() == 1)
        assert notes == []


@asynchronous
async def test_plans_of_one_gateway_are_carried_out_by_the_other() -> None:
    async with gateways(2) as made:
        for one in made:
            specs = [WorkerSpec(f"w{i}", block_size=1) for i in range(3)]
            one.router.scheduler = GlobalScheduler(specs, policy="e2-paper", cost_model=PLAIN)
            for number in range(10):
                ask(one.router.scheduler, PREFIX, number, tokens=500, max_new_tokens=10)
        leader = min(made, key=lambda one: one.router.router_id)
        (other,) = (one for one in made if one is not leader)
        await known(lambda: {one.siblings._plans.leader for one in made} == {leader.router.router_id})
        for one in (other, leader):
            one.router.scheduler.tick()
        assert plans(leader.router.scheduler)
        await known(lambda: plans(other.router.scheduler))
        (plan,), (followed,) = plans(leader.router.scheduler), plans(other.router.scheduler)
        same = ("kind", "from_worker", "to_worker", "prefix_tokens", "reason")
        assert [plan[name] for name in same] == [followed[name] for name in same]
        assert other.router.scheduler.stats()["plans"]["redirects"] == 1


@asynchronous
async def test_gateways_that_met_models_in_another_order_mean_the_same_prompts() -> None:
    """The first model that a router meets is in no namespace of its own: bookings went astray between two routers
    that had met their servers in different orders."""
    one, two = Gateway(space=None), Gateway(space=("model", "second"))
    try:
        one.siblings.follow([two.endpoint])
        two.siblings.follow([one.endpoint])
        await known(lambda: one.connected() == two.connected() == 1)
        await known(lambda: not any(side.siblings._siblings[0].bookings.behind for side in (one, two)))
        one.own.placed("1", SERVER, PROMPT, ("text", "lora", "a"), 8)
        two.own.placed("1", SERVER, PROMPT, ("text", "model", "second", "lora", "a"), 8)
        await known(lambda: (one.booked(), two.booked()) == (1, 1))
        best = len(PROMPT) - 1
        there = ("text", "model", "second", "lora", "a")
        assert two.router.scheduler.match(PROMPT, namespace=there).best_tokens == best
        assert one.router.scheduler.match(PROMPT, namespace=("text", "lora", "a")).best_tokens == best
        assert one.router.scheduler.match(PROMPT).best_tokens == 0
    finally:
        for side in (one, two):
            await side.siblings.close()


@pytest.mark.parametrize(
    "namespace",
    [
        *(None, ("model", "m"), ("text",), ("text", "model", "m")),
        *(("model", "m", "lora", "a", "salt", "s"), ("text/8", "model", "m", "salt", "s")),
    ],
)
def test_the_part_for_a_model_comes_out_and_goes_in_at_the_same_place(namespace: Any) -> None:
    space = ("model", "m")
    if namespace is not None and "model" in namespace:
        assert "model" not in (relative_to(space, namespace) or ())
        assert within(space, relative_to(space, namespace)) == namespace
    assert within(None, namespace) == relative_to(None, namespace) == namespace
    assert relative_to(space, within(space, relative_to(space, namespace))) == relative_to(space, namespace)


# --- names ------------------------------------------------------------------------------------------------------------


class Names:
    """A name service."""

    def __init__(self) -> None:
        self.addresses: Sequence[str] | None = ("10.0.0.2", "10.0.0.1", "10.0.0.2")
        self.asked: list[tuple[str, int]] = []

    async def look_up(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        if self.addresses is None:
            raise OSError("no such name")
        return self.addresses


@asynchronous
async def test_a_name_stands_for_all_its_addresses_and_processes_and_keeps_them_while_it_cannot_be_asked() -> None:
    names, found = Names(), list[Sequence[str]]()
    peers = PeerAddresses(["tcp://gateways:70", "tcp://10.0.0.9:80"], 2, found.append, look_up=names.look_up)
    await peers.look()
    usual = [f"tcp://10.0.0.{host}:{port}" for host in (1, 2) for port in (70, 71)]
    fixed = ["tcp://10.0.0.9:80", "tcp://10.0.0.9:81"]
    assert found == [usual + fixed] and names.asked == [("gateways", 70)]
    names.addresses = None
    await peers.look()
    assert found[1] == usual + fixed
    names.addresses = ["fd00::1"]
    await peers.look()
    assert found[2] == ["tcp://[fd00::1]:70", "tcp://[fd00::1]:71", *fixed]
    names.addresses = [f"10.0.{n // 256}.{n % 256}" for n in range(ADDRESSES_MAX + 9)]
    await peers.look()
    assert len(found[3]) == 2 * ADDRESSES_MAX + len(fixed)


@asynchronous
async def test_a_name_that_is_not_known_yet_is_asked_for_again() -> None:
    names, found = Names(), asyncio.Queue[Sequence[str]]()
    names.addresses = None
    peers = PeerAddresses(["tcp://later:70"], 1, found.put_nowait, look_up=names.look_up, look_up_seconds=0.001)
    running = asyncio.ensure_future(peers.run())
    assert await found.get() == []
    names.addresses = ["10.0.0.1"]
    while not (last := await asyncio.wait_for(found.get(), 30.0)):
        pass
    assert last == ["tcp://10.0.0.1:70"]
    running.cancel()


# --- what is refused --------------------------------------------------------------------------------------------------

OK = {"peers": ["tcp://10.0.0.2:7070"], "bind": "tcp://*:7070", "processes": 1, "has_keys": True, "insecure": False}


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"bind": None}, InvalidConfig, "peers needs peer_bind"),
        ({"bind": "7070"}, InvalidConfig, "peer_bind"),
        ({"bind": "http://10.0.0.1:7070"}, InvalidConfig, "peer_bind.*tcp://HOST:PORT"),
        ({"bind": "tcp://0.0.0.0:65534", "processes": 4}, InvalidConfig, "4 processes need as many ports"),
        ({"has_keys": False}, InsecureBind, "tcp://0.0.0.0:7070"),
        ({"has_keys": False, "bind": "tcp://127.0.0.1:7070"}, InvalidConfig, "10.0.0.2.*peer_keys"),
        ({"peers": ["ipc:///tmp/x"]}, InvalidConfig, "peers.*tcp://HOST:PORT"),
        ({"peers": ["tcp://host"]}, InvalidConfig, "peers.*has no port"),
    ],
)
def test_wrong_or_open_addresses_are_refused(change: dict[str, Any], kind: type, text: str) -> None:
    def check(peers: Sequence[str], bind: str | None, **more: Any) -> None:
        check_peers(peers, bind, **more)

    for fine in (OK, {**OK, "has_keys": False, "insecure": True}, {**OK, "peers": [], "bind": None}):
        check(**fine)
    with pytest.raises(kind, match=text):
        check(**{**OK, **change})


def test_each_process_listens_at_a_port_of_its_own() -> None:
    assert [bound_at("tcp://*:7070", process) for process in (0, 3)] == ["tcp://*:7070", "tcp://*:7073"]
