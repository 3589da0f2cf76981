"""The gateway's configuration: where values come from, what is refused and what is said then."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from preble import cli
from preble.errors import InvalidConfig
from preble.gateway.core.addresses import counted_as
from preble.gateway.core.config import FIELDS, SECRET, GatewayConfig, changes, flag_of, variable_of
from preble.gateway.core.config_sources import load
from preble.gateway.core.config_tables import address_of, options_of, source_name
from preble.gateway.core.config_text import descriptions, schema, shown


def written(path: Path, text: str) -> Path:
    """A file with that text."""
    path.write_text(text)
    return path


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = written(tmp_path / "c.yaml", "port: 1\nhost: 127.0.0.1\ndrain_seconds: 1\nscheduler: {max_bytes: 2097152}\n")
    environment = {"PREBLE_PORT": "2", "PREBLE_DRAIN_SECONDS": "2.5", "PREBLE_SCHEDULER_MAX_BYTES": "4194304"}
    loaded = load(file, environment, {("port",): "3"})
    config = loaded.config
    assert (config.port, config.drain_seconds, config.host) == (3, 2.5, "127.0.0.1")
    assert config.scheduler.max_bytes == 4194304 and config.max_live_requests == 4096
    assert loaded.origins["port"] == "--port" and loaded.origins["drain_seconds"] == "PREBLE_DRAIN_SECONDS"
    assert loaded.origins["host"] == str(file) and "policy" not in loaded.origins


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    yaml = written(tmp_path / "c.yaml", "workers: [tcp://a:1]\ninsecure: true\nscheduler:\n  calibrate: true\n")
    toml = written(tmp_path / "c.toml", 'workers = ["tcp://a:1"]\ninsecure = true\n[scheduler]\ncalibrate = true\n')
    assert load(yaml, {}, {}).config == load(toml, {}, {}).config
    assert load(yaml, {}, {}).config.scheduler.calibrate is True


def test_lists_in_variables_are_separated_by_commas() -> None:
    config = load(None, {"PREBLE_WORKERS": "tcp://a:1, tcp://b:2,", "PREBLE_INSECURE": "true"}, {}).config
    assert config.workers == ["tcp://a:1", "tcp://b:2"] and config.insecure is True


DEEP = 100_000  # levels: the YAML loader would end the process with its stack


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("c.yaml", "port: 1\nworkers: " + "[" * DEEP, r"c\.yaml: line 2, column 41: .* nested more than 32 deep"),
        ("c.yaml", "".join(f"{' ' * n}a:\n" for n in range(99)), r"c\.yaml: line 33, column 33: .* nested more than"),
        ("c.yml", "{a: " * DEEP, r"c\.yml: line 1, column 129: .* nested more than 32 deep"),
        ("c.toml", "a = " + "[" * DEEP, r"c\.toml: lists and tables are nested too deeply"),
    ],
)
def test_a_file_that_is_nested_very_deeply_is_refused(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    with pytest.raises(InvalidConfig, match=complaint):
        load(written(tmp_path / name, text), {}, {})


@pytest.mark.parametrize("name", ["SERVERS", "DISCOVERY", "KEYS"])
def test_a_variable_that_is_nested_very_deeply_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"PREBLE_{name} must be a list of tables in JSON: .* nested too deeply"):
        load(None, {f"PREBLE_{name}": "[" * DEEP}, {})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("polici: e2", r"no such key polici; did you mean policy\?"),
        ("scheduler: {max_byte: 1}", r"no such key scheduler\.max_byte; did you mean scheduler\.max_bytes\?"),
        ("zzzzz: 1", r"no such key zzzzz$"),
        ("port: many", "port: Expected `int`, got `str` "),
        ("port: 70000", "port: Expected `int` <= 65535"),
        ("policy: best", "policy must be one of"),
        ("scheduler: {max_bytes: 1}", "SchedulerConfig.max_bytes must be"),
        ("scheduler: 7", "scheduler must be a table"),
        ("- a", "must hold a table"),
        ("a: [", "c.yaml"),
        ("api_keys: [short]", "api_keys: Expected `str` of length >= 8"),
        ("host: 0.0.0.0", "anyone could use the workers"),
        (
            "workers: [tcp://a:1, localhost:5001]",
            "'localhost:5001' does not say what is there: write tcp://localhost:5001 .*yaml",
        ),
        ("workers: [tcp//a:1]", "workers: .* has no scheme"),
        ("workers: [tcp://a]", "workers: .* has no port: write tcp://a:PORT"),
        ("workers: [tcp://a:70000]", "workers: .* a port from 1 to 65535"),
        ("workers: [tcp://a:1/]", "workers: .* nothing after it"),
        ("workers: [htp://a:1]", "workers: .* begins with htp://"),
        ("workers: ['http://a b:1']", "workers: .* has blanks in it"),
        ("traces_endpoint: collector:4318", "traces_endpoint must be like http://"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(InvalidConfig, match=complaint):
        load(written(tmp_path / "c.yaml", text), {}, {})


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    for path, complaint in (
        (tmp_path / "none.yaml", "cannot be read"),
        (written(tmp_path / "c.ini", ""), "must end in"),
        (written(tmp_path / "big.yaml", " " * ((1 << 20) + 1)), "the limit is 1048576"),
    ):
        with pytest.raises(InvalidConfig, match=complaint):
            load(path, {}, {})
    assert load(written(tmp_path / "empty.yaml", ""), {}, {}).config == GatewayConfig()


def test_of_variables_only_near_misses_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="did you mean PREBLE_WORKERS"):
        load(None, {"PREBLE_WORKRS": "tcp://a:1"}, {})
    assert load(None, {"PREBLE_HYPOTHESIS": "long", "OTHER_PORT": "1"}, {}).config == GatewayConfig()


def test_beyond_loopback_something_must_keep_strangers_out() -> None:
    assert load(None, {"PREBLE_HOST": "0.0.0.0", "PREBLE_API_KEYS": "long-enough"}, {}).config.host == "0.0.0.0"
    assert load(None, {"PREBLE_HOST": "0.0.0.0", "PREBLE_INSECURE": "1"}, {}).config.insecure is True


def test_what_is_shown_can_be_loaded_and_holds_no_secret(tmp_path: Path) -> None:
    given = {"PREBLE_API_KEYS": "very-secret-1", "PREBLE_POLICY": "random", "PREBLE_SCHEDULER_EXPLOIT_RATIO": "0.4"}
    text = shown(load(None, given, {}))
    assert "very-secret" not in text and "1 keys, not shown" in text
    assert 'policy: "random"  # PREBLE_POLICY' in text
    again = load(written(tmp_path / "c.yaml", text), {}, {}).config
    assert (again.policy, again.scheduler.exploit_ratio, again.api_keys) == ("random", 0.4, [])


SERVERS = """
servers:
  - url: http://host-a:30000
    api_key: very-secret-1
    block_size: 16
  - {url: "https://host-b", api_key_variable: KEY_OF_B, model: llama, require_events: true}
"""


def test_servers_are_tables_whose_keys_may_stand_in_variables_and_are_never_shown(tmp_path: Path) -> None:
    loaded = load(written(tmp_path / "c.yaml", SERVERS), {"KEY_OF_B": "very-secret-2"}, {})
    first, second = map(options_of, loaded.config.servers)
    assert (first.api_key, first.block_size, first.model) == ("very-secret-1", 16, "")
    assert (second.api_key, second.block_size, second.model) == ("very-secret-2", None, "llama")
    assert second.require_events
    text = shown(loaded)
    assert "very-secret" not in text and "2 keys, not shown" in text and "very-secret" not in repr(first)
    again = load(written(tmp_path / "again.yaml", text), {}, {}).config.servers
    assert [server.url for server in again] == ["http://host-a:30000", "https://host-b"]
    assert again[0].block_size == 16 and again[0].api_key is None
    ranks = json.dumps([{"url": "http://host-a", "rank": rank} for rank in (0, 1)])
    addresses = [address_of(server) for server in load(None, {"PREBLE_SERVERS": ranks}, {}).config.servers]
    assert addresses == ["http://host-a", "http://host-a#rank=1"]
    table = json.dumps([{"url": "http://host-a"}])
    assert load(None, {"PREBLE_SERVERS": table}, {}).config.servers[0].url == "http://host-a"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("servers: [{url: 'tcp://a:1'}]", r"servers\[0\]: url must be http://HOST:PORT, got 'tcp://a:1'"),
        ("servers: [{url: 'http://a/v1'}]", r"servers\[0\]: .* write http://a"),
        ("servers: [{url: 'http://a'}, {url: 'http://a'}]", r"servers\[1\]: http://a is named twice"),
        ("workers: ['http://a']\nservers: [{url: 'http://a'}]", r"servers\[0\]: http://a is named twice"),
        ("servers: [{url: 'http://a'}, {url: 'http://a', rank: 0}]", r"servers\[1\]: http://a is named twice"),
        ("servers: [{url: 'http://a#rank=1', rank: 2}]", r"servers\[0\]: rank is 2, and the url .* names one, too"),
        ("servers: [{url: 'http://a', rank: -1}]", r"servers: Expected `int` >= 0"),
        ("servers: [{url: 'http://a', api_key_variable: NONE_SUCH}]", r"servers\[0\].*no variable NONE_SUCH is set"),
        ("servers: [{url: 'http://a', api_key: k, api_key_variable: HOME}]", r"servers\[0\].*api_key is given, too"),
        ("servers: [{url: 'http://a', replay_endpoint: 'tcp://a:1'}]", r"servers\[0\]: .*of no use without"),
        ("servers: [{url: 'http://a', events_endpoint: 'a:1'}]", r"servers\[0\]: .*must be a ZeroMQ endpoint"),
        ("servers: [{url: 'https://a', ca_file: /none.pem}]", r"servers\[0\]: ca_file /none.pem holds no cert"),
        ("servers: [{url: 'http://a', key: k}]", "servers: Object contains unknown field `key`"),
        ("servers: [{}]", "servers: Object missing required field `url`"),
        ("servers: {url: 'http://a'}", "servers: Expected `array`"),
    ],
)
def test_what_is_wrong_in_a_table_of_a_server_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(InvalidConfig, match=complaint):
        load(written(tmp_path / "c.yaml", text), {}, {})
    with pytest.raises(InvalidConfig, match="PREBLE_SERVERS must be a list of tables in JSON"):
        load(None, {"PREBLE_SERVERS": "[{"}, {})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[{source: kubernetes}]", r"discovery\[0\]: the source kubernetes needs service or selector"),
        ("[{source: dns, path: /a}]", r"discovery\[0\]\.path: is no field of the source dns"),
        ("[{source: file, path: /a, scheme: tcp}]", r"discovery\[0\]\.scheme: is no field of the source file"),
        (
            "[{source: dns, name: a, scheme: tcp, server: {ca_file: /b}}]",
            r"discovery\[0\]\.server: is for servers over HTTP",
        ),
        (
            "[{source: dns, name: a, keep: /k}, {source: dns, name: b, keep: /k}]",
            r"discovery\[1\]\.keep: /k is another source's, too",
        ),
        ("[{source: dns, name: a}, {source: file, path: /a}, {source: dns, name: a}]", r"discovery\[2\]: dns:a is an"),
        ("[{source: file, path: /a}, {source: file, path: /a, doubt_seconds: 1}]", r"discovery\[1\]: file:/a is an"),
        (
            "[{source: kubernetes, selector: a=b, port: 1}, {source: kubernetes, selector: a=b, port: '1'}]",
            r"discovery\[1\]: kubernetes:a=b:1 is another table's, too: a place is looked at once",
        ),
    ],
)
def test_what_is_wrong_in_a_table_of_discovery_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    """Two of one place, too: they shared a name, which Prometheus refuses."""
    with pytest.raises(InvalidConfig, match=complaint):
        load(written(tmp_path / "c.yaml", f"discovery: {text}"), {}, {})


def test_two_resolvers_of_one_name_are_two_places(tmp_path: Path) -> None:
    text = "discovery: [{source: dns, name: a}, {source: dns, name: a, resolver: '10.0.0.1:53'}]"
    tables = load(written(tmp_path / "c.yaml", text), {}, {}).config.discovery
    assert [source_name(table) for table in tables] == ["dns:a", "dns:a@10.0.0.1:53"]


def test_every_field_has_a_flag_and_a_variable_of_its_own() -> None:
    assert len({flag_of(path) for path in FIELDS}) == len({variable_of(path) for path in FIELDS}) == len(FIELDS)
    assert {path[-1] for path in FIELDS} > SECRET


def test_every_option_has_a_sentence_which_help_and_schema_show(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    helped = " ".join(capsys.readouterr().out.split())
    assert cli.main(["config", "--schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == schema()
    tables = printed["$defs"]
    for path, sentence in descriptions().items():
        assert re.match(r'["`A-Z].*[.)]$', sentence), path
        table = tables["SchedulerConfig" if len(path) == 2 else "GatewayConfig"]
        assert table["properties"][path[-1]]["description"] == sentence
        if path[-1] not in SECRET | {"scheduler"}:
            assert re.sub(r"\s|-", "", sentence) in re.sub(r"\s|-", "", helped), path
    assert set(descriptions()) == {*FIELDS, ("scheduler",)}


def test_the_config_command_prints_what_serve_would_use(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREBLE_DRAIN_SECONDS", "7")
    assert cli.main(["config", "--workers", "tcp://a:1", "tcp://b:2", "--insecure"]) == 0
    out = capsys.readouterr().out
    assert 'workers: ["tcp://a:1","tcp://b:2"]  # --workers' in out
    assert "drain_seconds: 7.0  # PREBLE_DRAIN_SECONDS" in out and "insecure: true  # --insecure" in out
    assert cli.main(["serve", "--policy", "best"]) == 2
    assert "policy must be one of" in capsys.readouterr().err


def test_what_needs_a_restart_is_distinguished() -> None:
    old = GatewayConfig()
    new = load(
        None, {"PREBLE_PORT": "1", "PREBLE_POLICY": "random", "PREBLE_SCHEDULER_EXPLOIT_RATIO": "0.4"}, {}
    ).config
    assert changes(old, new) == ({"policy"}, {"port", "scheduler.exploit_ratio"})


def test_addresses_of_all_kinds_are_taken() -> None:
    addresses = ["tcp://10.0.0.5:5001", "tcp://[::1]:5001", "tcp://worker-0.fleet:65535", "ipc:///run/preble/a"]
    addresses += ["http://host-a:30000", "https://engines.example.com", "http://[fd00::1]:8000/engine/1"]
    assert load(None, {"PREBLE_WORKERS": ",".join(addresses)}, {}).config.workers == addresses


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", "unknown"),
    ],
)
def test_addresses_that_one_client_may_have_count_as_one(address: str, counted: str) -> None:
    assert counted_as(address) == counted


@pytest.mark.parametrize(
    ("name", "content"),
    [("c.yaml", f"port: {'9' * 5000}"), ("c.yaml", "port: 2026-13-01"), ("c.toml", f"port = {'9' * 5000}")],
    ids=["yaml-digits", "yaml-month", "toml-digits"],
)
def test_a_value_that_cannot_be_made_is_refused_with_its_file(tmp_path: Path, name: str, content: str) -> None:
    """Regression, by fuzzing: a ValueError."""
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidConfig, match=re.escape(str(tmp_path / name))):
        load(tmp_path / name, {}, {})
