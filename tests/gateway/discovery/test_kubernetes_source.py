"""Discovery in Kubernetes against an API server that misbehaves, with the official client."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from preble.errors import TransportError
from preble.gateway.core.config_tables import DiscoveryTable
from preble.gateway.discovery import kubernetes_api, kubernetes_source
from preble.gateway.discovery.known_servers import PodName, Readiness
from preble.gateway.discovery.kubernetes_source import KubernetesSource
from tests.support.discovery import Followed, asked
from tests.support.kubernetes import FakeApiServer, endpoint, endpoint_slice, pod
from tests.support.transport import asynchronous, until

pytest.importorskip("kubernetes.aio", reason="needs the client: pip install 'preble[kubernetes]'")


async def eventually(condition: Callable[[], Any]) -> None:
    """Until it is so."""
    await until(condition, "what the API server says was not followed")


@asynccontextmanager
async def following(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: FakeApiServer, **fields: Any
) -> AsyncIterator[Followed]:
    """A source that follows a server."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    table = DiscoveryTable(source="kubernetes", **fields)
    try:
        async with asked(KubernetesSource(table, time.monotonic, lambda: None, rng=Random(1))) as followed:
            yield followed
    finally:
        await server.stop()


@asynchronous
async def test_pods_are_listed_by_page_and_then_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await FakeApiServer().start()
    server.page_max = 2
    for name in "abcde":
        await server.put("pods", pod(name, f"10.0.0.{ord(name)}"))
    other = pod("other", "10.0.0.9")
    other["metadata"]["labels"]["app"] = "db"
    await server.put("pods", other)
    async with following(tmp_path, monkeypatch, server, selector="app=vllm") as followed:
        await followed.until(**dict.fromkeys("abcde", "ready"))
        assert server.asked["list pods"] == 3 and server.tokens == {"Bearer the-token"}
        await server.put("pods", pod("a", "10.0.0.97", ready=False))
        await server.put("pods", pod("b", "10.0.0.98", terminating=True))
        await server.delete("pods", "c")
        await server.put("pods", pod("f", "10.0.0.102"))
        await followed.until(a="not_ready", b="terminating", d="ready", e="ready", f="ready")
        assert server.asked["list pods"] == 3 and not followed.failures


@asynchronous
async def test_a_connection_that_breaks_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await FakeApiServer().start()
    await server.put("pods", pod("a"))
    async with following(tmp_path, monkeypatch, server, selector="app=vllm") as followed:
        await followed.until(a="ready")
        for number in range(3):
            await eventually(lambda number=number: server.asked["watch pods"] > number)
            await server.cut()
            await server.put("pods", pod(f"b{number}", f"10.0.0.{number}"))
            await eventually(lambda number=number: len(followed.states()) == number + 2)
        assert server.asked["list pods"] == 1, "nothing was missed"


@asynchronous
async def test_what_is_forgotten_is_listed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """410 in a watch: what went meanwhile is gone, what came is there."""
    server = await FakeApiServer().start()
    await server.put("pods", pod("a"))
    await server.put("pods", pod("b", "10.0.0.2"))
    async with following(tmp_path, monkeypatch, server, selector="app=vllm") as followed:
        await followed.until(a="ready", b="ready")
        await eventually(lambda: server.asked["watch pods"] == 1)
        server.mode = "failing"
        await server.cut()
        await eventually(lambda: any("500: etcd is away" in why for why in followed.failures))
        await server.delete("pods", "a")
        await server.put("pods", pod("c", "10.0.0.3"))
        await server.forget()
        assert followed.states() == {"a": "ready", "b": "ready"}, "nobody is lost while it fails"
        server.mode = "well"
        await followed.until(b="ready", c="ready")
        assert server.asked["list pods"] == 2


@asynchronous
async def test_a_server_that_forgets_all_the_time_is_asked_with_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a list and a watch that is answered with 410 went round without a pause."""
    server = await FakeApiServer().start()
    await server.put("pods", pod("a"))
    server._oldest = 1 << 40
    async with following(tmp_path, monkeypatch, server, selector="app=vllm") as followed:
        await eventually(lambda: len(followed.failures) >= 3)
        assert server.asked["list pods"] <= len(followed.failures) + 1
        assert followed.states() == {"a": "ready"}


@asynchronous
@pytest.mark.parametrize("mode", ["failing", "silent", "cutting"])
async def test_an_api_server_that_cannot_be_asked_loses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(kubernetes_api, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(kubernetes_source, "WATCH_SECONDS", 1.0)
    server = await FakeApiServer().start()
    await server.put("pods", pod("a"))
    async with following(tmp_path, monkeypatch, server, selector="app=vllm") as followed:
        await followed.until(a="ready")
        server.mode = mode
        await server.cut()
        await eventually(lambda: len(followed.failures) >= 2)
        confirmed_at = followed.source.confirmed_at
        assert followed.states() == {"a": "ready"} and confirmed_at is not None
        server.mode = "well"
        await server.put("pods", pod("b", "10.0.0.2"))
        await followed.until(a="ready", b="ready")
        assert (followed.source.confirmed_at or 0.0) > confirmed_at


@asynchronous
async def test_an_api_server_that_is_away_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await FakeApiServer().start()
    await server.put("pods", pod("a"))
    async with following(tmp_path, monkeypatch, server, selector="app=vllm") as followed:
        await followed.until(a="ready")
        await server.stop()
        await eventually(lambda: len(followed.failures) >= 2)
        assert followed.states() == {"a": "ready"}
        await server.start()
        await server.put("pods", pod("b", "10.0.0.2"))
        await followed.until(a="ready", b="ready")


@asynchronous
async def test_a_quiet_watch_ends_and_confirms_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_source, "WATCH_SECONDS", 1.0)
    server = await FakeApiServer().start()
    await server.put("pods", pod("a"))
    async with following(tmp_path, monkeypatch, server, selector="app=vllm") as followed:
        await followed.until(a="ready")
        version, confirmed_at = followed.source.version, followed.source.confirmed_at or 0.0
        await eventually(lambda: server.asked["watch pods"] >= 3)
        assert followed.source.version == version, "no news"
        assert (followed.source.confirmed_at or 0.0) > confirmed_at and not followed.failures


@asynchronous
async def test_slices_of_a_service_with_the_annotations_of_its_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await FakeApiServer().start()
    await server.put("endpointslices", endpoint_slice("s1", [endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b")]))
    await server.put("endpointslices", endpoint_slice("of-another", [endpoint("10.0.0.7")], service="db"))
    await server.put("pods", pod("a", "10.0.0.1", annotations={"preble/model": "m"}))
    async with following(
        tmp_path, monkeypatch, server, service="vllm", selector="app=vllm", namespace="llm"
    ) as followed:
        await followed.until(a="ready")
        await server.put("pods", pod("b", "10.0.0.2"))
        await followed.until(a="ready", b="ready")
        (options,) = {one.options for one in followed.source.found().servers.values() if one.pod == PodName("llm", "a")}
        assert options is not None and options.model == "m"
        ending = [endpoint("10.0.0.1", "a", ready=False, terminating=True), endpoint("10.0.0.2", "b")]
        await server.put("endpointslices", endpoint_slice("s1", ending))
        await followed.until(a="terminating", b="ready")
        assert followed.source.found().servers["http://10.0.0.1:8000"].readiness is Readiness.TERMINATING


@asynchronous
async def test_more_objects_than_are_kept_are_said_to_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_source, "OBJECTS_PER_SERVER", 1)
    server = await FakeApiServer().start()
    for number in range(4):
        await server.put("pods", pod(f"p{number}", f"10.0.0.{number}"))
    async with following(tmp_path, monkeypatch, server, selector="app=vllm", servers_max=3) as followed:
        await followed.until(p0="ready", p1="ready", p2="ready")
        assert followed.source.found().unusable == {"further pods": "there are more than are kept"}


@asynchronous
async def test_a_cost_is_written_on_a_pod_and_seen_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await FakeApiServer().start()
    await server.put("pods", pod("a"))
    async with following(tmp_path, monkeypatch, server, selector="app=vllm") as followed:
        await followed.until(a="ready")
        await followed.source.write_cost(PodName("llm", "a"), 512)
        assert server.patches == [("a", {"controller.kubernetes.io/pod-deletion-cost": "512"})]

        def costs() -> list[int | None]:
            return [one.deletion_cost for one in followed.source.found().servers.values()]

        await eventually(lambda: costs() == [512])
        with pytest.raises(TransportError, match="404.*not found"):
            await followed.source.write_cost(PodName("llm", "nobody"), 1)


@asynchronous
async def test_without_a_cluster_or_a_kubeconfig_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    make: Callable[[], KubernetesSource] = lambda: KubernetesSource(  # noqa: E731
        DiscoveryTable(source="kubernetes", service="s"), time.monotonic, lambda: None, rng=Random(1)
    )
    with pytest.raises(TransportError, match="no cluster is known here"):
        await make().run()
