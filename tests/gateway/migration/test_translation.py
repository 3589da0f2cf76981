"""Other routers' command lines: every option of theirs is known, takes as many words as they say, and becomes what the
table promises; what a fleet would lack is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preble.cli.main import main
from preble.errors import InvalidConfig
from preble.gateway.core.config_sources import load
from preble.gateway.migration.counterparts import ALL, SGLANG, SMG, SUBJECTS, VLLM, Takes, of_router
from preble.gateway.migration.translation import translate
from tests.support.paths import ROOT

URLS = "--worker-urls http://a:1 http://b:2"


def their_options(router: str) -> dict[str, Takes]:
    """What a router's own help lists."""
    for line in (ROOT / "tests" / "data" / "router_options.txt").read_text().splitlines():
        name, _, options = line.partition(": ")
        if name == router:
            return {one.rstrip("!*"): Takes(one[-1]) if one[-1] in "!*" else Takes.ONE for one in options.split()}
    raise AssertionError(router)


def values(line: str, router: str = SGLANG) -> dict[str, Any]:
    return {".".join(path): value for path, value in translate(router, line).values.items()}


@pytest.mark.parametrize("router", ALL)
def test_each_option_of_theirs_is_known_and_takes_as_many_words_as_they_say(router: str) -> None:
    assert {option: takes for option, (_, takes) in of_router(router).items()} == their_options(router)


@pytest.mark.parametrize("router", ALL)
def test_no_option_stands_in_two_rows(router: str) -> None:
    rows = [row for rows in SUBJECTS.values() for row in rows if router in row.routers]
    named = [option for row in rows for option in row.forms()]
    assert len(named) == len(set(named))


@pytest.mark.parametrize("router", ALL)
def test_an_option_that_is_not_refused_is_translated_or_has_a_remark(router: str) -> None:
    samples = {"--control-plane-api-keys": "i:n:admin:longenough", "--tenant-api-key": "t:longenough"}
    samples |= {"--prefill": "http://p:1 8998", "--decode": "http://d:1"}
    silent = {"--policy": "random", "--host": "h", "--model-alias": "a=b", "--ca-cert-paths": "c", "--api-key": "k" * 8}
    beside = {"--service-discovery": "--selector app=x"}
    plain = translate(router, URLS)
    for option, (row, takes) in of_router(router).items():
        word = "" if takes is Takes.NONE else (samples | silent).get(option, "7")
        if row.refused:
            with pytest.raises(InvalidConfig, match=option):
                translate(router, f"{URLS} {option} {word}")
            continue
        found = translate(router, f"{URLS} {option} {word} {beside.get(option, '')}")
        assert found.values != plain.values or found.remarks != plain.remarks, option


def test_a_command_line_as_it_stands_in_a_shells_history() -> None:
    line = (
        "python -m sglang_router.launch_router \\\n  --worker-urls http://a:1 http://b:2 \\\n --port=8000 --host '::'"
    )
    found = values(f"{line} --policy cache_aware --cache-threshold 0.5 --max-concurrent-requests 2000 # as before")
    assert found == {
        "host": "::",
        "port": 8000,
        "workers": ["http://a:1", "http://b:2"],
        "policy": "cache_aware(cache_threshold=0.5)",
        "max_live_requests": 2000,
    }


@pytest.mark.parametrize(
    ("router", "place"), [(SGLANG, ("0.0.0.0", 30000)), (SMG, ("0.0.0.0", 30000)), (VLLM, ("127.0.0.1", 30000))]
)
def test_clients_find_the_gateway_where_the_router_was(router: str, place: tuple[str, int]) -> None:
    found = values(URLS, router)
    assert (found["host"], found["port"]) == place and "policy" not in found


@pytest.mark.parametrize(
    ("router", "policy", "ours"),
    [
        (SGLANG, "cache_aware", "cache_aware"),
        (VLLM, "cache_aware", "cache_aware"),
        (SMG, "cache_aware", "cache_aware_spill"),
        (SMG, "least_load", "least_loaded"),
        (SMG, "prefix_hash", "prefix_hash"),
        (VLLM, "consistent_hash", "session_hash"),
        (SGLANG, "power_of_two", "power_of_two"),
    ],
)
def test_a_policy_that_is_named_is_kept(router: str, policy: str, ours: str) -> None:
    found = translate(router, f"{URLS} --policy {policy}")
    assert found.values["policy",] == ours
    assert load(None, {}, {("insecure",): "true"}, {router: f"{URLS} --policy {policy}"}).config.policy == ours


@pytest.mark.parametrize("policy", ["manual", "bucket", "passthrough", "sticky_round_robin"])
def test_a_policy_without_a_counterpart_is_refused_by_name(policy: str) -> None:
    with pytest.raises(InvalidConfig, match=f"--policy {policy} has no counterpart"):
        translate(SGLANG, f"--policy {policy}")


def test_thresholds_of_another_rule_are_said_not_to_be_used() -> None:
    found = translate(SMG, f"{URLS} --policy cache_aware --spill-abs-threshold 9")
    assert found.values["policy",] == "cache_aware_spill"
    assert "--balance-abs-threshold: not used by the rule" in found.remarks


def test_a_key_of_servers_is_also_that_of_clients_and_reaches_each_server() -> None:
    found = values(f"{URLS} --api-key abcdefgh --ca-cert-paths ca.pem")
    table = {"api_key": "abcdefgh", "ca_file": "ca.pem"}
    assert found["servers"] == [{"url": "http://a:1", **table}, {"url": "http://b:2", **table}]
    assert found["api_keys"] == ["abcdefgh"] and "workers" not in found


def test_pods_that_were_discovered_there_are_discovered_here() -> None:
    line = "--service-discovery --selector app=vllm zone=a --service-discovery-port 8000 --api-key abcdefgh"
    found = values(f"{line} --service-discovery-namespace llm")
    table = {"source": "kubernetes", "selector": "app=vllm,zone=a", "port": 8000, "namespace": "llm"}
    assert found["discovery"] == [{**table, "server": {"api_key": "abcdefgh"}}] and found["min_workers"] == 0
    assert load(None, {}, {}, {SGLANG: line}).config.discovery[0].selector == "app=vllm,zone=a"
    assert values("--service-discovery --discovery-file s.json", SMG)["discovery"] == [
        {"source": "file", "path": "s.json"}
    ]


def test_servers_that_prefill_or_decode_only_keep_their_roles() -> None:
    line = "--pd-disaggregation --prefill http://a:1 9000 --prefill http://b:1 none --decode http://c:1"
    found = translate(SGLANG, f"{line} --prefill-policy cache_aware")
    apart = [{"url": f"http://{name}:1", "role": "prefill"} for name in "ab"]
    apart.append({"url": "http://c:1", "role": "decode"})
    assert found.values["servers",] == apart
    assert any(remark.startswith("--prefill: servers, each with its `role`") for remark in found.remarks)
    config = load(None, {}, {("insecure",): "true"}, {SGLANG: f"{line} --worker-urls http://d:1"}).config
    assert [(one.url, one.role) for one in config.servers] == [(one["url"], one["role"]) for one in apart]
    assert config.workers == ["http://d:1"]
    keyed = values(f"{line} --worker-urls http://d:1 --api-key abcdefgh")["servers"]
    assert keyed == [{**one, "api_key": "abcdefgh"} for one in ({"url": "http://d:1"}, *apart)]
    line = "--service-discovery --prefill-selector app=p zone=a --decode-selector app=d --vllm-pd-disaggregation"
    tables = values(line, VLLM)["discovery"]
    assert [(one["selector"], one["server"]) for one in tables] == [
        ("app=p,zone=a", {"role": "prefill"}),
        ("app=d", {"role": "decode"}),
    ]
    loaded = load(None, {}, {("insecure",): "true"}, {VLLM: line}).config.discovery
    assert [table.server.role for table in loaded] == ["prefill", "decode"]
    with pytest.raises(InvalidConfig, match="--encode: no encode workers apart"):
        translate(SMG, f"{URLS} --encode http://e:1")


def test_keys_of_operators_users_and_tenants() -> None:
    keys = "--control-plane-api-keys 'a:Ann:admin:adminkey1' 'b:Bob:user:user:key2'"
    found = values(f"{URLS} {keys} --tenant-api-key x:tenantkey --tenant-api-key y:other:key", SMG)
    assert (found["admin_keys"], found["api_keys"]) == (["adminkey1"], ["user:key2"])
    assert found["keys"] == [{"key": "tenantkey", "name": "x"}, {"key": "other:key", "name": "y"}]


@pytest.mark.parametrize(
    ("endpoint", "ours"),
    [
        ("", "http://localhost:4318/v1/traces"),
        ("--otlp-traces-endpoint collector:4317", "http://collector:4318/v1/traces"),
        ("--otlp-traces-endpoint [::1]:4317", "http://[::1]:4318/v1/traces"),
        ("--otlp-traces-endpoint http://c:9", "http://c:4318/v1/traces"),
    ],
)
def test_traces_go_to_the_collectors_port_for_http(endpoint: str, ours: str) -> None:
    assert values(f"{URLS} --enable-trace {endpoint}")["traces_endpoint"] == ours


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--worker-url http://a:1", "--worker-url is no option of sglang-router; did you mean --worker-urls"),
        ("--port", "--port lacks its value"),
        ("--port many", "--port takes a number, got 'many'"),
        ("--dp-aware yes", "--dp-aware takes no value, got 'yes'"),
        ("--host 'a", "cannot be read: No closing quotation"),
        ("--worker-urls $URLS", r"'\$URLS' is for a shell to fill in"),
        ("--worker-urls grpc://a:1", "servers are reached by http:// or https://"),
        ("--decode grpc://a:1", "servers are reached by http:// or https://"),
        ("--service-discovery", "--service-discovery needs --selector"),
        ("--ca-cert-paths a b", "put the certificates into one file"),
        ("--control-plane-api-keys a:b:root:c", "ID:NAME:ROLE:KEY"),
        ("--host " + "x" * 70_000, "at most 65536 characters"),
    ],
)
def test_a_wrong_line_is_refused_with_what_is_wrong(line: str, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        translate(SGLANG, line)


def test_files_variables_and_flags_go_before_a_command_line(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("max_live_requests: 11\ndrain_seconds: 12\n")
    line = f"{URLS} --host 127.0.0.1 --max-concurrent-requests 1 --shutdown-grace-period-secs 2 --max-payload-size 4096"
    loaded = load(file, {"PREBLE_DRAIN_SECONDS": "13"}, {("port",): "14"}, {SGLANG: line})
    config = loaded.config
    assert (config.max_live_requests, config.drain_seconds, config.port, config.max_body_bytes) == (11, 13, 14, 4096)
    assert loaded.origins["max_body_bytes"] == "from sglang-router" and loaded.origins["port"] == "--port"


def test_config_prints_a_file_that_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{URLS} --host 127.0.0.1 --policy power_of_two --retry-max-retries 3"
    assert main(["config", "--from-sglang-router", line]) == 0
    shown = capsys.readouterr().out
    assert "# --retry-max-retries: a request goes on elsewhere" in shown
    file = tmp_path / "gateway.yaml"
    file.write_text(shown)
    assert load(file, {}, {}).config == load(None, {}, {}, {SGLANG: line}).config


def test_without_a_key_an_open_address_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--from-smg", URLS]) == 2
    assert "host 0.0.0.0 is not loopback and there are no api_keys" in capsys.readouterr().err
    assert main(["config", "--from-smg", URLS, "--insecure"]) == 0
