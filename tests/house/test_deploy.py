"""Deployment files and their page: they parse, and every `preble` command in them is one that Preble understands.

Runs no container and no service.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from preble import cli
from preble.cli import up
from preble.errors import InvalidConfig
from preble.gateway.core.config import GatewayConfig
from preble.gateway.core.config_sources import load
from preble.gateway.discovery.file_source import servers_of
from tests.support.paths import ROOT

yaml = pytest.importorskip("yaml")
DEPLOY = ROOT / "examples/deploy"
UNIT, GATEWAY_UNIT = DEPLOY / "preble.service", DEPLOY / "preble-gateway.service"
PAGE = ROOT / "docs/deploy.md"


def parsed(words: list[str]) -> argparse.Namespace:
    """What Preble makes of a command; wrong usage fails the test with argparse's message."""
    assert words[0] == "preble"
    args = cli.build_parser(words[1:]).parse_args(words[1:])
    assert args.command in cli.COMMANDS
    return args


def unit_settings(unit: Path = UNIT) -> dict[str, str]:
    """A unit's settings; each is there once."""
    pairs = [line.split("=", 1) for line in unit.read_text().splitlines() if "=" in line and not line.startswith("#")]
    assert len(dict(map(tuple, pairs))) == len(pairs)
    return dict(map(tuple, pairs))


def unit_command() -> list[str]:
    """`ExecStart` as systemd runs it with the unit's own environment."""
    settings = unit_settings()
    environment = dict(word.split("=", 1) for word in settings["Environment"].split())
    program, *words = re.sub(r"\$\{(\w+)\}", lambda match: environment[match[1]], settings["ExecStart"]).split()
    assert program.endswith("/bin/preble")
    return ["preble", *words]


def page_commands() -> list[str]:
    """Every `preble ...` that a block of the page reports to type, with what follows another command after `&&`."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [part for part in parts if part.startswith("preble ")]


def seconds(text: str) -> float:
    """`45s` or `60` as a number."""
    return float(text.removesuffix("s"))


def compose_services(name: str = "compose.yaml") -> dict[str, dict]:
    """The services of a Compose file."""
    return yaml.safe_load((DEPLOY / name).read_text())["services"]


def test_the_page_has_commands_and_each_parses() -> None:
    commands = page_commands()
    assert {command.split()[1] for command in commands} == {"up", "keygen"} and len(commands) >= 6
    for command in commands:
        parsed(shlex.split(command))


def test_the_units_command_is_a_plan_that_would_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "_keys", lambda directory: None)  # they are on the machine that it is for
    plan = up.make_plan(parsed(unit_command()))
    assert len(plan.names) == 2 and all(bind.startswith("tcp://0.0.0.0:") for bind, _ in plan.binds)
    assert seconds(unit_settings()["TimeoutStopSec"]) > plan.supervisor.drain_seconds, "systemd lets it drain"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("given", [UNIT, GATEWAY_UNIT], ids=lambda path: path.name)
def test_systemd_accepts_the_unit(tmp_path: Path, given: Path) -> None:
    unit = tmp_path / given.name
    # The program need not be installed here; systemd asks whether it can be run.
    unit.write_text(given.read_text().replace("/opt/preble/bin/preble", shutil.which("true") or "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and given.name not in done.stderr, done.stderr


def gateway_config(environment: dict[str, str]) -> GatewayConfig:
    """The configuration of the examples, as the gateway reads it."""
    return load(DEPLOY / "gateway" / "gateway.yaml", environment, {}).config


def test_the_gateways_examples_are_configurations_that_would_serve() -> None:
    keys = {"SERVER_KEY": "the-key-of-servers", "PREBLE_API_KEYS": "a-key-of-a-client,another-one"}
    config = gateway_config(keys)
    assert config.api_keys == ["a-key-of-a-client", "another-one"] and config.min_workers == 0
    (table,) = config.discovery
    file = DEPLOY / "gateway" / Path(table.path or "").name
    found = servers_of(file.read_bytes(), file, table, keys).servers
    assert [one.options.api_key for one in found.values() if one.options] == ["the-key-of-servers"] * 2
    with pytest.raises(InvalidConfig, match="no api_keys"):
        gateway_config({"SERVER_KEY": "the-key-of-servers"})


def test_the_gateways_unit_and_containers_end_after_their_answers() -> None:
    settings, config = unit_settings(GATEWAY_UNIT), GatewayConfig()
    assert parsed(["preble", *settings["ExecStart"].split()[1:]]).command == "serve"
    needed = config.lame_duck_seconds + config.drain_seconds
    assert seconds(settings["TimeoutStopSec"]) > needed
    for name in ("compose.yaml", "compose-servers.yaml"):
        gateway = compose_services(name)["gateway"]
        assert seconds(gateway["stop_grace_period"]) > needed and gateway["read_only"] is True
        assert "/health" in gateway["healthcheck"]["test"][-1] and gateway["cap_drop"] == ["ALL"]


def test_the_servers_of_compose_are_those_of_the_gateways_file() -> None:
    services = compose_services("compose-servers.yaml")
    listed = yaml.safe_load((DEPLOY / "gateway" / "servers.yaml").read_text())
    assert {urlsplit(one["url"]).hostname for one in listed} == services.keys() - {"gateway"}
    for name, service in services.items():
        if name != "gateway":
            options = dict(zip(service["command"][::2], service["command"][1::2], strict=False))
            assert options["--port"] == "8000"
            events = json.loads(service["command"][-1])
            one = next(one for one in listed if name in one["url"])
            assert one["events_endpoint"].endswith(events["endpoint"].rpartition(":")[2])
            assert one["replay_endpoint"].endswith(events["replay_endpoint"].rpartition(":")[2])


def test_compose_commands_parse_and_workers_have_endpoints_of_their_own() -> None:
    services = compose_services()
    gateway, bound = parsed(services.pop("gateway")["command"]), []
    for name, service in services.items():
        args = parsed(service["command"])
        assert args.command == "worker" and args.id == name and args.curve_keys
        ports = [endpoint.rpartition(":")[2] for endpoint in (args.bind, args.events_bind)]
        assert service["ports"] == [f"{port}:{port}" for port in ports]
        assert seconds(service["stop_grace_period"]) > args.drain_seconds, "Docker lets it drain"
        bound += ports
        assert args.bind.replace("0.0.0.0", name) in vars(gateway)["workers"]
    assert len(services) == 2 and len(set(bound)) == len(bound)


def test_compose_keeps_logs_and_restarts_bounded() -> None:
    for service in [*compose_services().values(), *compose_services("compose-servers.yaml").values()]:
        assert re.fullmatch(r"on-failure:\d+", service["restart"])
        assert {"max-size", "max-file"} <= set(service["logging"]["options"])


def test_the_image_has_what_the_commands_run() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^FROM python:3\.1\d", text, re.M) and re.search(r"^USER 10001$", text, re.M)
    (extras,) = set(re.findall(r"\[([a-z,]+)\]\"", text))
    assert {"gateway", "attach", "epp", "kubernetes", "dns"} <= set(extras.split(","))
    assert parsed(json.loads(re.findall(r"^CMD (.*)$", text, re.M)[-1])).command == "serve"
