"""`preble replay` as its user types it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from preble import sim, workloads
from preble.cli.main import main
from tests.support.recording import recording_of


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of round robin."""
    file = tmp_path_factory.mktemp("recording") / "traffic.rec"
    workload = workloads.poisson(workloads.generate("toolbench", requests=60, groups=6, seed=1), 2.0, 1)
    config = sim.SimConfig(workers=2, policy="round_robin")
    recording_of(workload, sim.simulate(workload, config), config).write(file)
    return file


def test_it_prints_what_was_what_the_model_says_of_it_and_what_would_have_been(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, rows = tmp_path / "found.json", tmp_path / "rows.csv"
    command = ["replay", str(recording), "--policy", "round_robin,e2", "--workers", "+1", "--set", "history_seconds=60"]
    assert main([*command, "--json", str(found), "--requests-file", str(rows)]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith("traffic.rec: 60 requests in") and "placed by round_robin" in lines[0]
    table = {line.split("  ")[0].strip(): line for line in lines}
    for name in ("measured", "as placed, simulated", "round_robin", "e2"):
        assert any(line.startswith(name) for line in lines), name
    assert table["measured"].split()[1] == "2" and table["e2"].split()[1] == "3"
    content = json.loads(found.read_text())
    assert [run["policy"] for run in content["runs"]] == ["round_robin", "e2"]
    assert content["runs"][0]["workers"] == 3 and content["recording"]["requests"] == 60
    assert content["runs"][0]["mean_ttft_seconds"]["low"] <= content["runs"][0]["mean_ttft_seconds"]["value"]
    with rows.open() as file:
        read = list(csv.DictReader(file))
    assert len(read) == 120 and {row["policy"] for row in read} == {"round_robin", "e2"}
    assert main([*command]) == 0
    assert capsys.readouterr().out == text, "the same command prints the same"


def test_a_picture_is_drawn(recording: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "replay.png"
    assert main(["replay", str(recording), "--policy", "e2", "--plot", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "-2"], "leaves 0 of 2 workers"),
        (["--workers", "many"], "must be a number"),
        (["--policy", "no_such"], "no_such"),
        (["--set", "no_such=1"], "no knob"),
        (["--plot", "picture.jpg"], ".png"),
        (["--requests-file", "rows.txt"], ".csv"),
        (["--json", "/no/such/folder/x"], "no such file"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    recording: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recording), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes"
    file.write_text("mine")
    assert main(["replay", str(file)]) == 2
    assert "notes is no recording" in capsys.readouterr().err
