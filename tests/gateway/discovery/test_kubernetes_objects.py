"""What pods and EndpointSlices say of servers: addresses, readiness, options; and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from preble.gateway.core.config_tables import DiscoveryTable, ServerFields
from preble.gateway.discovery.known_servers import PodName, Readiness
from preble.gateway.discovery.kubernetes_objects import DELETION_COST, EndpointSlice, Pod, servers_in
from preble.gateway.discovery.source import FoundServers
from preble.transport.engine_servers.server_info import ServerOptions
from tests.support.kubernetes import endpoint, endpoint_slice, pod


def table(**fields: Any) -> DiscoveryTable:
    """A table of discovery in Kubernetes."""
    return DiscoveryTable(source="kubernetes", **fields)


def read(kind: type, things: list[dict[str, Any]]) -> dict[str, Any]:
    """Objects by name, as a watch decodes them."""
    return {one["metadata"]["name"]: msgspec.json.decode(json.dumps(one), type=kind) for one in things}


def of_pods(*pods: dict[str, Any], **fields: Any) -> FoundServers:
    return servers_in(table(selector="app=vllm", **fields), read(Pod, list(pods)), None)


def of_slices(*slices: dict[str, Any], pods: list[dict[str, Any]] | None = None, **fields: Any) -> FoundServers:
    known = None if pods is None else read(Pod, pods)
    return servers_in(table(service="vllm", **fields), known, read(EndpointSlice, list(slices)))


def test_pods_are_servers_as_ready_as_their_condition() -> None:
    pods = [pod("a", "10.0.0.1"), pod("b", "10.0.0.2", ready=False), pod("c", "10.0.0.3", terminating=True)]
    found = of_pods(*pods, pod("done", "10.0.0.4", phase="Succeeded"), pod("new", ""))
    states = {address: one.readiness for address, one in found.servers.items()}
    assert states == {
        "http://10.0.0.1:8000": Readiness.READY,
        "http://10.0.0.2:8000": Readiness.NOT_READY,
        "http://10.0.0.3:8000": Readiness.TERMINATING,
    }
    assert found.servers["http://10.0.0.1:8000"].pod == PodName("llm", "a") and not found.unusable


def test_endpoints_are_servers_and_one_of_unknown_readiness_counts_as_ready() -> None:
    endpoints = [endpoint("10.0.0.1", ready=None, terminating=None), endpoint("10.0.0.2", ready=False)]
    found = of_slices(endpoint_slice("s", [*endpoints, endpoint("10.0.0.3", ready=True, terminating=True)]))
    assert [one.readiness for one in found.servers.values()] == list(Readiness)
    assert not of_slices(endpoint_slice("s", None)).servers, "a Service without pods has null for endpoints"


def test_a_pod_with_addresses_of_two_families_is_one_server() -> None:
    six = endpoint_slice("a6", [endpoint("fd00::1", "p"), endpoint("fd00::2", "q")], family="IPv6")
    four = endpoint_slice("z4", [endpoint("10.0.0.1", "p")])
    assert set(of_slices(six, four).servers) == {"http://10.0.0.1:8000", "http://[fd00::2]:8000"}


def test_annotations_of_a_pod_say_what_a_table_would() -> None:
    said = {
        "preble/model": "m",
        "preble/rank": "2",
        "preble/role": "prefill",
        "preble/block-size": "32",
        "preble/cost-model": "mistral-7b/a6000",
        "preble/events-port": "5557",
        "preble/port": "9000",
        DELETION_COST: "-7",
        "prometheus.io/scrape": "true",
    }
    defaults = ServerFields(api_key="the-key", model="other", kv_capacity_tokens=1000)
    found = of_pods(pod("a", "10.0.0.1", labels={"preble/model": "label"}, annotations=said), server=defaults)
    ((address, server),) = found.servers.items()
    assert address == "http://10.0.0.1:9000#rank=2" and server.deletion_cost == -7
    assert server.options == ServerOptions(
        api_key="the-key",
        model="m",
        role="prefill",
        block_size=32,
        kv_capacity_tokens=1000,
        cost_model="mistral-7b/a6000",
        events_endpoint="tcp://10.0.0.1:5557",
    )


@pytest.mark.parametrize(
    ("annotations", "complaint"),
    [
        ({"preble/cost-model": "/etc/shadow"}, "must name a preset"),
        ({"preble/api-key-variable": "HOME"}, "no annotation of ours"),
        ({"preble/modle": "m"}, "modle is no annotation of ours"),
        ({"preble/port": "70000"}, "must be a port"),
        ({"preble/block-size": "many"}, "block_size"),
        ({"preble/rank": "-1"}, "rank"),
    ],
)
def test_a_pod_that_says_what_it_may_not_is_left_out_with_the_reason(annotations: dict, complaint: str) -> None:
    found = of_pods(pod("a", "10.0.0.1", annotations=annotations), pod("b", "10.0.0.2"))
    assert list(found.servers) == ["http://10.0.0.2:8000"] and complaint in found.unusable["a"]


def test_of_several_ports_one_must_be_named() -> None:
    several = pod("a", "10.0.0.1")
    several["spec"]["containers"][0]["ports"].append({"name": "metrics", "containerPort": 9090})
    assert "one port must be named" in of_pods(several).unusable["a"]
    assert list(of_pods(several, port="metrics").servers) == ["http://10.0.0.1:9090"]
    assert list(of_pods(several, port=8001).servers) == ["http://10.0.0.1:8001"]
    assert "no port is called 'http'; there are: 8000, metrics" in of_pods(several, port="http").unusable["a"]


def test_with_a_selector_beside_the_service_pods_annotate_its_endpoints_and_choose_among_them() -> None:
    slices = endpoint_slice("s", [endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b"), endpoint("10.0.0.3")])
    slices["metadata"]["labels"]["preble/model"] = "of-the-service"
    ours = pod("a", "10.0.0.1", annotations={"preble/model": "of-the-pod"})
    found = of_slices(slices, pods=[ours], selector="app=vllm")
    assert {address: one.options.model for address, one in found.servers.items()} == {
        "http://10.0.0.1:8000": "of-the-pod"
    }
    assert {one.options.model for one in of_slices(slices).servers.values()} == {"of-the-service"}
    ending = pod("a", "10.0.0.1", terminating=True)
    (server,) = of_slices(slices, pods=[ending], selector="app=vllm").servers.values()
    assert server.readiness is Readiness.TERMINATING, "whoever says so first"


def test_workers_of_our_own_are_found_by_their_scheme() -> None:
    (server,) = of_pods(pod("a", "10.0.0.1", 5601), scheme="tcp").servers.values()
    assert (server.address, server.options) == ("tcp://10.0.0.1:5601", None)


@pytest.mark.parametrize(
    ("label", "role"),
    [
        *(("prefill", "prefill"), ("encode-prefill", "prefill"), ("decode", "decode"), ("encode-decode", "decode")),
        *(("prefill-decode", ""), ("both", ""), ("encode-prefill-decode", "")),
    ],
)
def test_a_pod_s_role_is_that_of_llm_d_s_label(label: str, role: str) -> None:
    found = of_pods(pod("a", "10.0.0.1", labels={"llm-d.ai/role": label}))
    (server,) = found.servers.values()
    assert server.options is not None and server.options.role == (role or "both") and not found.unusable


def test_our_own_word_on_a_role_goes_before_llm_d_s_label() -> None:
    said = {"labels": {"llm-d.ai/role": "decode"}, "annotations": {"preble/role": "both"}}
    (server,) = of_pods(pod("a", "10.0.0.1", **said)).servers.values()
    assert server.options is not None and server.options.role == "both"


def test_a_pod_that_encodes_only_is_no_server() -> None:
    found = of_pods(pod("a", "10.0.0.1", labels={"llm-d.ai/role": "encode"}), pod("b", "10.0.0.2"))
    assert set(found.servers) == {"http://10.0.0.2:8000"} and "role" in found.unusable["a"]
