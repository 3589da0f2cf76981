"""Discovery and the gateway: the fleet follows, requests are not lost, and it is seen how old what is known is."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from preble import ManualClock, Router
from preble.errors import TransportError
from preble.gateway.core.config_tables import DiscoveryTable
from preble.gateway.core.metric_families import replica_family
from preble.gateway.discovery import discovery as discovery_module
from preble.gateway.discovery.discovery import Discovery
from preble.gateway.discovery.known_servers import FoundServer, PodName, Readiness
from preble.gateway.discovery.source import DiscoverySource, FoundServers
from preble.transport.engine_servers.server_info import ServerOptions
from tests.support.attach import FakeServer
from tests.support.gateway import Client, GatewayProcess
from tests.support.kubernetes import FakeApiServer, pod
from tests.support.transport import asynchronous, fast, until

OPTIONS = ServerOptions()
TABLE = DiscoveryTable(source="file", path="servers.yaml", doubt_seconds=30.0, drain_seconds=20.0)


class ScriptedSource(DiscoverySource):
    """A source that says what a test wants. `errors` are raised first."""

    def __init__(self, table: DiscoveryTable, clock: Any, on_news: Callable[[], object], rng: Random) -> None:
        super().__init__(table, clock, on_news)
        self.servers: dict[str, FoundServer] = {}
        self.unusable: dict[str, str] = {}
        self.errors: list[Exception] = []
        self.runs = 0
        self.costs: list[tuple[PodName, int]] = []

    def say(self, *servers: FoundServer, **unusable: str) -> None:
        """The next answer."""
        self.servers, self.unusable = {one.address: one for one in servers}, unusable
        self.confirm(news=True)

    def found(self) -> FoundServers:
        return FoundServers(self.servers, self.unusable)

    async def run(self) -> None:
        self.runs += 1
        if self.errors:
            raise self.errors.pop(0)
        await asyncio.sleep(3600)

    async def write_cost(self, pod: PodName, cost: int) -> None:
        self.costs.append((pod, cost))


class Followed:
    """A discovery with its sources, clock and router."""

    def __init__(self, router: Router, tables: list[DiscoveryTable], static: list[str]) -> None:
        self.clock = ManualClock()
        self.router = router
        self.discovery = Discovery(
            tables, router, static, clock=self.clock, rng=Random(1), make=partial(ScriptedSource)
        )
        self.sources: list[Any] = [one.source for one in self.discovery._followed]

    async def step(self, seconds: float = 0.0) -> None:
        """One look, so much later."""
        self.clock.advance(seconds)
        await self.discovery.step()

    async def ready(self, count: int) -> None:
        """Until so many workers are."""
        workers = self.router.fleet.workers
        await until(lambda: sum(one.state == "ready" for one in workers.values()) == count, f"{count} are ready")


@asynccontextmanager
async def following(*tables: DiscoveryTable, static: tuple[str, ...] = ()) -> AsyncIterator[Followed]:
    """A router without workers that discovery fills."""
    router = Router([], config=fast())
    await router.start(min_workers=0)
    try:
        yield Followed(router, list(tables) or [TABLE], list(static))
        router.check()
        router.scheduler.check()
    finally:
        await router.close()


def at(server: FakeServer, readiness: Readiness = Readiness.READY, **more: Any) -> FoundServer:
    return FoundServer(server.url, OPTIONS, readiness, **more)


@asynchronous
async def test_the_fleet_follows_and_a_server_that_ends_is_left_when_its_requests_have() -> None:
    a, b = await FakeServer("vllm").start(), await FakeServer("vllm", ranks=2).start()
    async with following() as followed:
        router, (source,) = followed.router, followed.sources
        await followed.step()
        assert not router.fleet.workers, "nothing was said yet"
        source.say(at(a), at(b))
        await followed.step()
        await followed.ready(3)
        placed = [await router.place([number] * 40) for number in range(6)]
        there = [one for one in placed if one.url == b.url]
        assert there, "some run on it"
        source.say(at(a), at(b, Readiness.TERMINATING))
        await followed.step()
        workers = router.scheduler.stats()["workers"]
        assert [workers[one.worker_id]["draining"] for one in router.fleet.at(b.url)] == [True, True]
        for one in placed:
            if one not in there:
                one.finish(2)
        await followed.step(1.0)
        assert b.url in router.fleet.workers, "requests run there"
        for one in there:
            one.finish(2)
        await followed.step(1.0)
        assert set(router.fleet.workers) == {a.url}
    await a.kill()
    await b.kill()


@asynchronous
async def test_who_is_not_ready_gets_no_new_requests_and_is_seen_in_the_numbers() -> None:
    servers = [await FakeServer("vllm").start() for _ in range(3)]
    async with following() as followed:
        router, (source,) = followed.router, followed.sources
        source.say(*map(at, servers))
        await followed.step()
        await followed.ready(3)
        source.say(at(servers[0]), at(servers[1]), at(servers[2], Readiness.NOT_READY), bad="why")
        await followed.step()
        for number in range(9):
            placement = await router.place([number] * 40)
            assert placement.url != servers[2].url
            placement.finish(2)
        router.check()
        followed.clock.advance(7.0)
        (stats,) = followed.discovery.stats()
        assert stats["servers"] == {"serving": 2, "withheld": 1, "draining": 0} and stats["age_seconds"] == 7.0
        assert stats["left_out"] == 1 and stats["unusable"] == {"bad": "why"}
        source.say(*map(at, servers))
        await followed.step()
        assert not router.fleet.unusable
    for server in servers:
        await server.kill()


@asynchronous
async def test_what_the_configuration_or_another_source_has_is_not_touched() -> None:
    mine, other = FoundServer("http://127.0.0.1:1", OPTIONS), FoundServer("http://127.0.0.1:2", OPTIONS)
    async with following(TABLE, TABLE, static=(mine.address,)) as followed:
        first, second = followed.sources
        first.say(mine, other)
        second.say(other)
        await followed.step()
        assert set(followed.router.fleet.workers) == {other.address}
        second.say()
        await followed.step(100.0)
        assert set(followed.router.fleet.workers) == {other.address}, "the first has it"
        first.say(mine)
        await followed.step()
        await followed.step(TABLE.doubt_seconds)
        await followed.step(1.0)
        assert not followed.router.fleet.workers
        second.say(other)
        await followed.step()
        assert set(followed.router.fleet.workers) == {other.address}


@asynchronous
async def test_one_that_is_in_the_fleet_already_is_taken_over_and_joined_anew_where_its_options_differ() -> None:
    """As in a process that was started again, and has its workers from the others without their keys."""
    async with following() as followed:
        fleet = followed.router.fleet
        same, keyed = FoundServer("http://127.0.0.1:1", OPTIONS), FoundServer("http://127.0.0.1:2", OPTIONS)
        kept, replaced = fleet.add(same.address, OPTIONS), fleet.add(keyed.address)
        followed.sources[0].say(same, keyed)
        await followed.step()
        assert fleet.workers[same.address] is kept
        assert fleet.workers[keyed.address] is not replaced and fleet.workers[keyed.address].options == OPTIONS


@asynchronous
async def test_a_source_that_fails_is_asked_again_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds < 3600 and seconds > 0.1:
            pauses.append(seconds)
        await sleep(0.0 if seconds < 3600 else seconds)

    async with following() as followed:
        (source,) = followed.sources
        source.errors = [TransportError("away"), ValueError("a defect"), *[TransportError("away")] * 8]
        monkeypatch.setattr(discovery_module.asyncio, "sleep", note)
        followed.discovery.start()
        await until(lambda: source.runs == 11, "it is asked again")
        monkeypatch.undo()
        full = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
        assert all(whole / 2 <= pause <= whole for pause, whole in zip(pauses, full, strict=True))
        assert len(set(pauses)) == len(pauses), "never all gateways at once"
        (stats,) = followed.discovery.stats()
        assert stats["failures"] == 10 and stats["failing"] == "away" and stats["age_seconds"] is None
        source.say()
        followed.clock.advance(1.0)
        source.confirm(news=False)
        assert followed.discovery.stats()[0]["failing"] == ""
        await followed.discovery.close()


@asynchronous
async def test_costs_are_written_on_the_pods_of_those_that_serve() -> None:
    server = await FakeServer("vllm").start()
    table = DiscoveryTable(source="kubernetes", selector="app=vllm", deletion_costs=True)
    async with following(table) as followed:
        (source,), place = followed.sources, PodName("llm", "a")
        source.say(at(server, pod=place))
        await followed.step()
        await followed.ready(1)
        followed.discovery.start()
        await until(lambda: source.costs, "nothing is written")
        assert source.costs[0][0] == place and source.costs[0][1] > 0
        await followed.discovery.close()
    await server.kill()


def scaling(desired: int, observed: float) -> dict[str, Any]:
    return {"desired_workers": desired, "observed_seconds": observed}


def test_desired_replicas_count_servers_and_a_gateway_that_has_just_come_takes_nobody_away() -> None:
    def replicas(desired: int, observed: float, *addresses: str) -> float:
        workers = {address: {"state": "ready"} for address in addresses} | {"http://z": {"state": "lost"}}
        return float(replica_family(scaling(desired, observed), workers).samples[0].value)

    ranks = ["http://a", "http://a#rank=1", "http://b", "http://b#rank=1"]
    assert replicas(5, 100.0, *ranks) == 3 and replicas(1, 100.0, *ranks) == 1
    assert replicas(1, 59.0, *ranks) == 2, "as many as there are"
    assert replicas(9, 59.0, *ranks) == 5 and replicas(1, 0.0) == 1


def metric(text: str, name: str, **labels: str) -> float:
    """A sample's value."""
    for line in text.splitlines():
        found = re.fullmatch(rf"preble_{name}(\{{.*\}})? (\S+)", line)
        if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
            return float(found[2])
    raise AssertionError(f"no sample of {name} with {labels}")


@asynchronous
async def test_a_gateway_finds_its_servers_in_kubernetes_and_keeps_them_when_that_is_away(tmp_path: Path) -> None:
    pytest.importorskip("kubernetes.aio", reason="needs the client: pip install 'preble[kubernetes]'")
    api = await FakeApiServer().start()
    servers = [await FakeServer("vllm", api_key="the-servers-key").start() for _ in range(3)]
    for number, server in enumerate(servers[:2]):
        await api.put("pods", pod(f"p{number}", port=server.port))
    table = {"source": "kubernetes", "selector": "app=vllm", "deletion_costs": True, "drain_seconds": 5}
    table |= {"server": {"api_key_variable": "SERVERS_KEY"}}
    file = tmp_path / "gateway.yaml"
    file.write_text(json.dumps({"discovery": [table], "min_workers": 2}))
    environment = {"SERVERS_KEY": "the-servers-key", "KUBECONFIG": str(api.kubeconfig(tmp_path / "kubeconfig"))}
    start = partial(GatewayProcess, "--config", str(file), log=tmp_path / "log", environment=environment)
    gateway = await asyncio.to_thread(start)

    async def ask(method: str, path: str, body: Any = None) -> tuple[int, Any, Any]:
        def call() -> tuple[int, Any, Any]:
            client = Client(gateway.address)
            try:
                return client.call(method, path, body)
            finally:
                client.close()

        return await asyncio.to_thread(call)

    async def until_workers(count: int) -> None:
        while len((await ask("GET", "/workers"))[2]["workers"]) != count:
            await asyncio.sleep(0.02)

    try:
        status, _, ready = await ask("GET", "/ready")
        assert status == 200 and ready["discovery"][0]["servers"]["serving"] == 2
        assert 0.0 <= ready["discovery"][0]["age_seconds"] < 60.0
        await api.put("pods", pod("p2", port=servers[2].port))
        await until_workers(3)
        await api.put("pods", pod("p0", port=servers[0].port, terminating=True))
        await until_workers(2)
        while not api.patches:
            await asyncio.sleep(0.02)
        await api.stop()
        body = {"prompt": [1] * 40, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
        assert (await ask("POST", "/v1/completions", {**body, "return_token_ids": True}))[0] == 200
        text = (await ask("GET", "/metrics"))[2]
        source = "kubernetes:app=vllm"
        assert metric(text, "discovery_servers", source=source, phase="serving") == 2
        assert metric(text, "discovery_age_seconds", source=source) >= 0
        assert metric(text, "scaling_desired_replicas") >= 1
    finally:
        assert await asyncio.to_thread(gateway.stop) == 0
        await api.stop()
        for server in servers:
            await server.kill()
    assert "the-servers-key" not in gateway.log.read_text()
