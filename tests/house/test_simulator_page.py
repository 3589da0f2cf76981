"""docs/simulator.md explains the truth: its command prints what stands there, its experiment runs as it stands."""

from __future__ import annotations

import re

import pytest

from preble.cli import main
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "simulator.md"


def test_the_command_prints_what_stands_there(capsys: pytest.CaptureFixture[str]) -> None:
    """After a change of behaviour that was meant: run the command and put its output there."""
    found = re.search(r"```\n\$ preble (.+)\n((?:.*\n)+?)```", PAGE.read_text())
    assert found is not None
    assert main(found[1].split()) == 0
    assert capsys.readouterr().out == found[2]


def test_the_experiment_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"```python\n((?:.*\n)+?)```", PAGE.read_text())
    assert found is not None
    exec(compile(found[1], str(PAGE), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    hits = [int(re.search(r"hits (\d+)%", line)[1]) for line in lines]
    assert all(e2 > round_robin for round_robin, e2 in zip(hits[::2], hits[1::2], strict=True))
