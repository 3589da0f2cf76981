"""Deployment files and their page: they parse, and every `preble` command in them is one that Preble understands.

Runs no container and no service.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from preble import cli
from preble.cli import up
from tests.support.paths import ROOT

yaml = pytest.importorskip("yaml")
DEPLOY = ROOT / "examples/deploy"
UNIT = DEPLOY / "preble.service"
PAGE = ROOT / "docs/deploy.md"


def parsed(words: list[str]) -> argparse.Namespace:
    """What Preble makes of a command; wrong usage fails the test with argparse's message."""
    assert words[0] == "preble"
    args = cli.build_parser(words[1:]).parse_args(words[1:])
    assert args.command in cli.COMMANDS
    return args


def unit_settings() -> dict[str, str]:
    """The unit's settings; each is there once."""
    pairs = [line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line and not line.startswith("#")]
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
    blocks = re.findall(r"^```\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    parts = [part.strip() for block in blocks for line in block.splitlines() for part in line.split("&&")]
    return [part for part in parts if part.startswith("preble ")]


def seconds(text: str) -> float:
    """`45s` or `60` as a number."""
    return float(text.removesuffix("s"))


def compose_services() -> dict[str, dict]:
    """The services of the Compose file."""
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


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
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    # The program need not be installed here; systemd asks whether it can be run.
    unit.write_text(UNIT.read_text().replace("/opt/preble/bin/preble", shutil.which("true") or "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and UNIT.name not in done.stderr, done.stderr


def test_compose_commands_parse_and_workers_have_endpoints_of_their_own() -> None:
    services = compose_services()
    bound: list[str] = []
    for name, service in services.items():
        args = parsed(service["command"])
        assert args.command == "worker" and args.id == name and args.curve_keys
        ports = [endpoint.rpartition(":")[2] for endpoint in (args.bind, args.events_bind)]
        assert service["ports"] == [f"{port}:{port}" for port in ports]
        assert seconds(service["stop_grace_period"]) > args.drain_seconds, "Docker lets it drain"
        bound += ports
    assert len(services) == 2 and len(set(bound)) == len(bound)


def test_compose_keeps_logs_and_restarts_bounded() -> None:
    for service in compose_services().values():
        assert re.fullmatch(r"on-failure:\d+", service["restart"])
        assert {"max-size", "max-file"} <= set(service["logging"]["options"])


def test_the_image_has_what_the_commands_run() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^FROM python:3\.1\d", text, re.M) and "pip install" in text and "USER preble" in text
