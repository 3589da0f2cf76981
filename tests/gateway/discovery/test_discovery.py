"""Discovery and the gateway: the fleet follows, requests are not lost, and it is seen how old what is known is."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from preble import ManualClock, Router
from preble.errors import MissingExtra, TransportError
from preble.gateway.core.config_tables import DiscoveryTable
from preble.gateway.core.metric_families import replica_families
from preble.gateway.discovery import discovery as discovery_module
from preble.gateway.discovery.discovery import Discovery
from preble.gateway.discovery.kept_servers import read_kept, write_kept
from preble.gateway.discovery.known_servers import FoundServer, PodName, Readiness
from preble.gateway.discovery.source import DiscoverySource, FoundServers
from preble.transport.engine_servers.server_info import ServerOptions
from tests.support.attach import FakeServer
from tests.support.gateway import Client, GatewayProcess
from tests.support.kubernetes import FakeApiServer, pod
from tests.support.transport import asynchronous, fast, until

OPTIONS = ServerOptions()
BEGAN_UNIX = 1.7e9
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


def test_sources_that_look_at_different_places_have_different_names() -> None:
    """Their metrics stand side by side, and Prometheus refuses two of one name."""
    fields: list[dict[str, Any]] = [
        {"selector": "app=vllm"},
        {"selector": "app=vllm", "namespace": "blue"},
        {"selector": "app=vllm", "port": 8001},
        {"service": "vllm"},
        {"service": "vllm", "selector": "app=vllm"},
    ]
    tables = [DiscoveryTable(source="kubernetes", **one) for one in fields]
    labels = {DiscoverySource(table, ManualClock(), int).label for table in tables}
    assert len(labels) == len(tables) and "kubernetes:app=vllm" in labels


class DiscoveredFleet:
    """A discovery with its sources, clock and router."""

    def __init__(self, router: Router, tables: list[DiscoveryTable], static: list[str]) -> None:
        self.clock = ManualClock()
        self.router = router
        self.discovery = Discovery(
            *(tables, router, static),
            clock=self.clock,
            unix_clock=lambda: BEGAN_UNIX + self.clock(),
            rng=Random(1),
            make=ScriptedSource,
        )

    @property
    def sources(self) -> list[Any]:
        """Those of the tables that there are now."""
        return [one.source for one in self.discovery._followed]

    async def reload(self, *tables: DiscoveryTable, static: Collection[str] = ()) -> None:
        """Other tables."""
        await self.discovery.change(self.discovery.prepare(tables), static)

    async def step(self, seconds: float = 0.0) -> None:
        """One look, so much later."""
        self.clock.advance(seconds)
        await self.discovery.step()

    async def ready(self, count: int) -> None:
        """Until so many workers are."""
        workers = self.router.fleet.workers
        await until(lambda: sum(one.state == "ready" for one in workers.values()) == count, f"{count} are ready")


@asynccontextmanager
async def following(*tables: DiscoveryTable, static: tuple[str, ...] = ()) -> AsyncIterator[DiscoveredFleet]:
    """A router without workers that discovery fills."""
    router = Router([], config=fast())
    await router.start(min_workers=0)
    try:
        yield DiscoveredFleet(router, list(tables) or [TABLE], list(static))
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
        assert stats["named"] == 4 and stats["workers"] == {"ready": 3} and not stats["refused"]
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


# --- other tables while it runs ---------------------------------------------------------------------------------------


def server(number: int, readiness: Readiness = Readiness.READY) -> FoundServer:
    """One where nobody listens."""
    return FoundServer(f"http://127.0.0.1:{number}", OPTIONS, readiness)


def there(followed: DiscoveredFleet) -> list[int]:
    """The ports of the fleet's workers."""
    return sorted(int(address.rpartition(":")[2]) for address in followed.router.fleet.workers)


@asynchronous
async def test_a_source_that_comes_is_asked_and_one_whose_table_is_the_same_goes_on() -> None:
    other = DiscoveryTable(source="file", path="other.yaml")
    async with following(TABLE) as followed:
        (first,) = followed.sources
        first.say(server(1))
        await followed.step()
        followed.discovery.start()
        await followed.reload(other, TABLE)
        assert followed.sources[1] is first
        await until(lambda: followed.sources[0].runs == 1 and first.runs == 1, "the new one is asked, no other anew")
        followed.sources[0].say(server(2))
        await until(lambda: there(followed) == [1, 2], "followed")
        await followed.discovery.close()


@asynchronous
async def test_the_servers_of_a_source_that_goes_end_their_requests_when_the_others_have_answered() -> None:
    a, b = await FakeServer("vllm").start(), await FakeServer("vllm").start()
    other = DiscoveryTable(source="file", path="other.yaml")
    async with following(TABLE) as followed:
        router = followed.router
        followed.sources[0].say(at(a))
        await followed.step()
        await followed.ready(1)
        placed = await router.place([1] * 40)
        await followed.reload(other)
        await followed.step(TABLE.doubt_seconds - 1.0)
        assert not router.scheduler.stats()["workers"][placed.worker]["draining"], "nobody else has answered yet"
        followed.sources[0].say(at(b))
        await followed.step()
        assert router.scheduler.stats()["workers"][placed.worker]["draining"]
        await followed.step(1.0)
        assert a.url in router.fleet.workers, "a request runs there"
        placed.finish(2)
        await followed.step(1.0)
        assert set(router.fleet.workers) == {b.url} and not followed.discovery._left
        assert [one["source"] for one in followed.discovery.stats()] == ["file:other.yaml"]
    await a.kill()
    await b.kill()


@asynchronous
async def test_the_servers_of_a_source_that_goes_are_left_though_the_others_never_answer() -> None:
    async with following(TABLE) as followed:
        followed.sources[0].say(server(1))
        await followed.step()
        await followed.reload(DiscoveryTable(source="file", path="other.yaml"))
        for seconds in (0.0, TABLE.doubt_seconds, 1.0):
            await followed.step(seconds)
        assert there(followed) == []


@asynchronous
async def test_a_server_that_another_source_names_is_not_left_with_the_one_that_goes() -> None:
    other = DiscoveryTable(source="file", path="other.yaml")
    async with following(TABLE) as followed:
        followed.sources[0].say(server(1), server(2))
        await followed.step()
        kept = followed.router.fleet.workers["http://127.0.0.1:2"]
        await followed.reload(other)
        followed.sources[0].say(server(2), server(3))
        await followed.step()
        await followed.step(1.0)
        assert there(followed) == [2, 3] and followed.router.fleet.workers["http://127.0.0.1:2"] is kept
        assert followed.discovery.stats()[0]["servers"]["serving"] == 2


@asynchronous
async def test_a_table_that_looks_at_the_same_place_in_another_way_takes_over_what_is_known_there() -> None:
    async with following(TABLE) as followed:
        followed.sources[0].say(server(1), server(2))
        await followed.step()
        await followed.reload(DiscoveryTable(source="file", path="servers.yaml", servers_max=7))
        await followed.step(5.0)
        (stats,) = followed.discovery.stats()
        assert there(followed) == [1, 2] and (stats["age_seconds"], stats["has_answered"]) == (5.0, False)
        followed.sources[0].say(server(1), server(2))
        await followed.step()
        assert there(followed) == [1, 2] and followed.discovery.stats()[0]["age_seconds"] == 0.0
        await followed.reload()
        await followed.step()
        await followed.step()
        assert there(followed) == [] and followed.discovery.stats() == []


@asynchronous
async def test_a_server_that_the_configuration_names_from_now_on_is_no_longer_its_sources() -> None:
    """It was drained when its source named it no more, or for ever withheld."""
    async with following(TABLE) as followed:
        fleet, (source,) = followed.router.fleet, followed.sources
        source.say(*map(server, (1, 2, 3, 4)))
        await followed.step()
        source.say(*map(server, (1, 3, 4)), server(2, Readiness.NOT_READY))
        await followed.step()
        source.say(*map(server, (3, 4)), server(1, Readiness.TERMINATING), server(2, Readiness.NOT_READY))
        await followed.step()
        static = [f"http://127.0.0.1:{number}" for number in (1, 2, 3)]
        assert fleet.workers[static[1]].withheld
        await followed.reload(TABLE, static=static)
        assert there(followed) == [2, 3, 4], "one that drained is left, to be joined anew by who named it"
        assert not fleet.workers[static[1]].withheld
        source.say()
        for seconds in (0.0, TABLE.doubt_seconds, 1.0):
            await followed.step(seconds)
        assert there(followed) == [2, 3]


@asynchronous
async def test_a_source_that_cannot_be_made_changes_nothing() -> None:
    def make(table: DiscoveryTable, *_: Any) -> DiscoverySource:
        raise MissingExtra("a package")

    async with following(TABLE) as followed:
        before = followed.sources
        followed.discovery._make = make
        with pytest.raises(MissingExtra):
            followed.discovery.prepare([DiscoveryTable(source="dns", name="x"), TABLE])
        assert followed.sources == before


# --- kept over a restart ----------------------------------------------------------------------------------------------


def keeping(path: Path, **fields: Any) -> DiscoveryTable:
    return DiscoveryTable(source="file", path="servers.yaml", keep=str(path / "kept.json"), **fields)


@asynchronous
async def test_what_was_known_is_begun_with_where_a_source_cannot_be_asked_and_only_there(tmp_path: Path) -> None:
    table = keeping(tmp_path)
    write_kept(table, "file:servers.yaml", map(server, (1, 2, 3)), BEGAN_UNIX - 60.0)
    async with following(table, static=("http://127.0.0.1:3",)) as followed:
        (source,) = followed.sources
        source.errors = [TransportError("away")]
        followed.discovery.start()
        await until(lambda: there(followed) == [1, 2], "the kept ones are taken, but for what the configuration has")
        (stats,) = followed.discovery.stats()
        assert (stats["age_seconds"], stats["has_answered"], stats["failing"]) == (60.0, False, "away")
        await followed.step(5.0)
        source.say(server(2))
        for seconds in (0.0, 1.0):
            await followed.step(seconds)
        assert there(followed) == [2], "the source's word is the latest; of two one is missing, which is no doubt"
        await followed.discovery.close()
    async with following(table) as followed:
        (source,) = followed.sources
        source.say(server(9))
        source.errors = [TransportError("away")]
        followed.discovery.start(is_first=False)
        await until(lambda: source.runs == 2, "it is asked again")
        assert there(followed) == [9], "it has answered"
        await followed.discovery.close()


@asynchronous
async def test_what_is_known_is_written_when_it_changes_and_once_a_minute(tmp_path: Path) -> None:
    table = keeping(tmp_path)

    def read(followed: DiscoveredFleet) -> tuple[list[str], float] | None:
        kept = read_kept(table, "file:servers.yaml", BEGAN_UNIX + followed.clock())
        return None if kept is None else (sorted(found.address[-1] for found in kept.servers), kept.age_seconds)

    async with following(table) as followed:
        (source,) = followed.sources
        followed.discovery.start()
        assert read(followed) is None
        source.say(server(1), server(2))
        await followed.step()
        await until(lambda: read(followed) == (["1", "2"], 0.0), "written")
        source.say(*map(server, (1, 2, 3)))
        await followed.step(0.5)
        assert followed.discovery._followed[0].written_at == 0.0, "not twice within a second"
        await followed.step(0.5)
        await until(lambda: read(followed) == (["1", "2", "3"], 1.0), "the change, which was said a second ago")
        await followed.step(59.0)
        source.confirm(news=False)
        assert read(followed) == (["1", "2", "3"], 60.0)
        await followed.step(1.0)
        await until(lambda: read(followed) == (["1", "2", "3"], 1.0), "it is known to hold since")
        source.say()
        for seconds in (0.0, table.doubt_seconds, 1.0, 1.0):
            await followed.step(seconds)
        await until(lambda: read(followed) == ([], 32.0), "nobody is there, and that is known too")
        await followed.discovery.close()


@asynchronous
async def test_a_list_that_cannot_be_written_is_said_and_follows_all_the_same(tmp_path: Path) -> None:
    table = keeping(tmp_path / "nowhere")
    async with following(table) as followed:
        followed.sources[0].say(server(1))
        followed.discovery.start()
        await until(lambda: followed.discovery.stats()[0]["keep_failing"], "it is said")
        assert "kept.json cannot be written: No such file" in followed.discovery.stats()[0]["keep_failing"]
        assert there(followed) == [1]
        await followed.discovery.close()


def scaling(desired: int, observed: float, **loads: float) -> dict[str, Any]:
    """The advice; of `loads`, by worker, a tenth more is asked for: of workers that are gone."""
    asked = {"prefill_load": 1.1 * sum(loads.values()), "decode_load": 0.0, "worker_loads": loads}
    return {"desired_workers": desired, "observed_seconds": observed, **asked}


def test_desired_replicas_count_servers_and_a_gateway_that_has_just_come_takes_nobody_away() -> None:
    def replicas(desired: int, observed: float, *addresses: str) -> float:
        workers = {address: {"state": "ready"} for address in addresses} | {"http://z": {"state": "lost"}}
        return float(replica_families(scaling(desired, observed), workers, {})[0].samples[0].value)

    ranks = ["http://a", "http://a#rank=1", "http://b", "http://b#rank=1"]
    assert replicas(5, 100.0, *ranks) == 3 and replicas(1, 100.0, *ranks) == 1
    assert replicas(1, 59.0, *ranks) == 2, "as many as there are"
    assert replicas(9, 59.0, *ranks) == 5 and replicas(1, 0.0) == 1


def test_desired_replicas_of_each_of_several_models_are_by_the_loads_of_its_servers() -> None:
    models = {"http://a": "small", "http://b": "small", "http://c": "large", "http://c#rank=1": "large"}
    workers = {address: {"state": "ready", "worker_id": address[7:]} for address in models}
    workers["http://d"] = {"state": "ready", "worker_id": "d"}

    def replicas(observed: float, **loads: float) -> dict[str, float]:
        _, found = replica_families(scaling(5, observed, **loads), workers, models)
        return {sample.labels["model"]: sample.value for sample in found.samples}

    assert replicas(100.0, a=0.7, b=0.7, c=0.1) == {"small": 3.0, "large": 1.0}
    assert replicas(100.0, **{"a": 0.1, "c": 1.4, "c#rank=1": 1.4}) == {"small": 1.0, "large": 3.0}
    assert replicas(100.0) == {"small": 1.0, "large": 1.0}
    assert replicas(59.0, a=0.1, c=0.1) == {"small": 2.0, "large": 1.0}, "as many as there are"


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
    table: dict[str, Any] = {"source": "kubernetes", "selector": "app=vllm", "deletion_costs": True, "drain_seconds": 5}
    table |= {"server": {"api_key_variable": "SERVERS_KEY"}, "keep": str(tmp_path / "kept.json")}
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
        assert metric(text, "scaling_desired_replicas_of_model", model="tiny") >= 1
        # Another source by SIGHUP; and a gateway that starts while the API server is away.
        more = tmp_path / "servers.yaml"
        more.write_text(json.dumps([servers[0].url]))
        other = {"source": "file", "path": str(more), "server": table["server"]}
        file.write_text(json.dumps({"discovery": [table, other], "min_workers": 2}))
        gateway.signal(signal.SIGHUP)
        await until_workers(3)
        kept = tmp_path / "kept.json"
        while str(servers[0].port) in kept.read_text() or str(servers[2].port) not in kept.read_text():
            await asyncio.sleep(0.02)
        assert await asyncio.to_thread(gateway.stop) == 0
        file.write_text(json.dumps({"discovery": [table], "min_workers": 2}))
        gateway = await asyncio.to_thread(start)
        status, _, ready = await ask("GET", "/ready")
        assert status == 200 and ready["discovery"][0]["servers"]["serving"] == 2
        assert ready["discovery"][0]["age_seconds"] > 0.0, "since they were known, not since the start"
    finally:
        assert await asyncio.to_thread(gateway.stop) == 0
        await api.stop()
        for server in servers:
            await server.kill()
    for text in (gateway.log.read_text(), (tmp_path / "kept.json").read_text()):
        assert "the-servers-key" not in text
