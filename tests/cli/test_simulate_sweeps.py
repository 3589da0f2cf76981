"""`preble simulate` over loads, fleets and seeds: tables, intervals, files, picture; knobs and one's own policy."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from preble import SchedulerConfig, sim
from preble.cli import main
from preble.cli.sweeps.settings import scheduler_config
from preble.cli.sweeps.statistics import interval, paired_ratio
from preble.errors import InvalidConfig, InvalidInput
from preble.workloads import generate, poisson

SMALL = ["simulate", "--requests", "30", "--groups", "3"]
OWN = """
from preble import Policy

class First(Policy):
    name = reason = "first"

    def __init__(self, place=0):
        self.place = place

    def score(self, request, workers):
        return [float(at != self.place) for at in range(len(workers))]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rules_of_a_user.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def run(*options: str) -> None:
    assert main([*SMALL, *options]) == 0


# --- sweeps -----------------------------------------------------------------------------------------------------------


def test_every_policy_runs_in_every_cell_on_the_requests_of_the_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "found.json"
    run("--rps", "6,12", "--workers", "2,3", "--seeds", "2", "--seed", "4", "--json", str(place))
    told = capsys.readouterr()
    assert told.out.count("policy ") == 4 and "run 16 of 16" in told.err
    cells = json.loads(place.read_text())["cells"]
    assert [(cell["workers"], cell["rps"], cell["policy"]) for cell in cells] == [
        (workers, rps, policy) for workers in (2, 3) for rps in (6, 12) for policy in ("round_robin", "e2")
    ]
    for cell in (cells[1], cells[6]):
        for found in cell["seeds"]:
            made = poisson(generate("toolbench", requests=30, groups=3, seed=found["seed"]), cell["rps"], found["seed"])
            config = sim.SimConfig(workers=cell["workers"], policy=cell["policy"], seed=found["seed"])
            assert found["trace_hash"] == sim.simulate(made, config).trace_hash
        values = [found["p99_ttft_seconds"] for found in cell["seeds"]]
        assert cell["intervals"]["p99_ttft_seconds"]["mean"] == pytest.approx(np.mean(values))


def test_a_table_over_seeds_has_means_halves_and_a_ratio_to_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--rps", "9", "--seeds", "3"]
    run(*asked)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[3].split()[:3] == ["policy", "mean", "TTFT"]
    assert lines[4].startswith("round_robin") and lines[4].count("±") == 6 and "(" not in lines[4]
    assert lines[5].startswith("e2") and lines[5].count("±") == 6 and lines[5].rstrip().endswith(")")
    run(*asked)
    assert capsys.readouterr().out == out


def test_intervals_are_students() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.half) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    assert interval([5.0]).mean == 5.0 and math.isnan(interval([5.0]).low)
    ratio = paired_ratio([2.0, 4.0], [1.0, 2.0])
    assert (ratio.mean, ratio.low, ratio.high) == (pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.0))
    assert math.isnan(paired_ratio([0.0], [1.0]).mean)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_row_a_request_of_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, found = tmp_path / "requests.csv", tmp_path / "found.json"
    run("--rps", "9", "--workers", "2", "--seeds", "2", "--policy", "e2,random", "--requests-file", str(place),
        "--json", str(found))  # fmt: skip
    with place.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 30
    own = [row for row in rows if row["policy"] == "e2" and row["seed"] == "1"]
    assert {row["outcome"] for row in own} == {"finished"} and {row["worker"] for row in own} <= {"w0", "w1"}
    told = json.loads(found.read_text())["cells"][0]["seeds"][1]
    assert np.mean([float(row["ttft_seconds"]) for row in own]) == pytest.approx(told["mean_ttft_seconds"])
    assert sum(int(row["cached_tokens"]) for row in own) / sum(int(row["prompt_tokens"]) for row in own) == (
        pytest.approx(told["hit_fraction"])
    )


def test_requests_that_were_refused_have_empty_cells(tmp_path: Path) -> None:
    place = tmp_path / "requests.csv"
    run("--workload", "embodied", "--kv-capacity", "1000", "--policy", "e2", "--requests-file", str(place))
    with place.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["outcome"] for row in rows} >= {"refused", "cut_off"}
    assert {row["finish_seconds"] for row in rows if row["outcome"] == "cut_off"} == {""}


def test_parquet_says_the_same(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    text, table = tmp_path / "requests.csv", tmp_path / "requests.parquet"
    for place in (text, table):
        run("--policy", "e2,random", "--requests-file", str(place))
    with text.open() as file:
        rows = list(csv.DictReader(file))
    found = parquet.read_table(table).to_pylist()
    assert len(found) == len(rows) == 60
    assert found[7]["latency_seconds"] == float(rows[7]["latency_seconds"])
    assert found[7]["rps"] is None and rows[7]["rps"] == ""


def test_json_holds_values(tmp_path: Path) -> None:
    place = tmp_path / "found.json"
    run("--policy", "e2", "--kill", "w1@1.5", "--set", "history_seconds=60", "--json", str(place))
    config = json.loads(place.read_text())["config"]
    assert config["scheduler"]["history_seconds"] == 60.0 and config["workers"] == 2
    assert config["faults"] == [
        {"type": "WorkerDeath", "at_seconds": 1.5, "worker": "w1", "noticed_after_seconds": 2.0}
    ]
    assert config["local"]["token_budget"] == 512 and config["until_seconds"] is None
    assert "(" not in json.dumps(config)


@pytest.mark.parametrize(
    "options", [["--rps", "4,8", "--workers", "2,3", "--seeds", "2"], ["--workers", "2,4"], ["--seeds", "2"], []]
)
def test_a_picture(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    place = tmp_path / "sweep.png"
    run(*options, "--plot", str(place))
    assert place.read_bytes().startswith(b"\x89PNG")
    assert f"plot: {place}" in capsys.readouterr().out


# --- knobs and policies -----------------------------------------------------------------------------------------------


def test_every_field_of_the_scheduler_can_be_set() -> None:
    found = scheduler_config(["history_seconds=60", "replicas_max=2", "calibrate=false", "max_bytes=2_000_000"])
    assert found == SchedulerConfig(history_seconds=60.0, replicas_max=2, calibrate=False, max_bytes=2_000_000)
    assert scheduler_config(["replicas_max=3", "replicas_max=4"], replicas_max=2).replicas_max == 4
    defaults = SchedulerConfig()
    for name in SchedulerConfig.__dataclass_fields__:
        assert scheduler_config([f"{name}={getattr(defaults, name)}"]) == defaults


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("history_second=3", "there is no knob 'history_second'; did you mean 'history_seconds'"),
        ("zzz=3", "there is no knob 'zzz'; there are history_seconds"),
        ("history_seconds", "must be KEY=VALUE"),
        ("history_seconds=", "must be KEY=VALUE"),
        ("history_seconds=soon", "must be a finite number, got 'soon'"),
        ("history_seconds=nan", "must be a finite number, got 'nan'"),
        ("replicas_max=2.5", "must be a whole number, got '2.5'"),
    ],
)
def test_a_wrong_setting_is_named(text: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        scheduler_config([text])


def test_a_setting_out_of_range_is_the_configurations_error() -> None:
    with pytest.raises(InvalidConfig, match=r"SchedulerConfig\.replicas_max must be an int in \[1, 8\], got 99"):
        scheduler_config(["replicas_max=99"])


@pytest.mark.usefixtures("module")
def test_ones_own_policy_with_arguments_beside_built_in_ones(tmp_path: Path) -> None:
    place = tmp_path / "requests.csv"
    policies = "e2,rules_of_a_user:First,rules_of_a_user:First(place=1),cache_aware(cache_threshold=0.9)"
    run("--policy", policies, "--requests-file", str(place))
    with place.open() as file:
        rows = list(csv.DictReader(file))
    workers = {policy: {row["worker"] for row in rows if row["policy"] == policy} for policy in
               ("rules_of_a_user:First", "rules_of_a_user:First(place=1)")}  # fmt: skip
    assert workers == {"rules_of_a_user:First": {"w0"}, "rules_of_a_user:First(place=1)": {"w1"}}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "rules_nowhere:Mine"], "cannot be imported"),
        (["--policy", "rond_robin"], "did you mean 'round_robin'"),
        (["--set", "replica_max=2"], "did you mean 'replicas_max'"),
        (["--plot", "picture.jpg"], "must end in .png"),
        (["--plot", "no/such/folder/picture.png"], "--plot: there is no such file"),
        (["--requests-file", "requests.txt"], "must end in .csv or .parquet"),
        (["--requests-file", "no/such/folder/requests.csv"], "--requests-file: there is no such file"),
        (["--seeds", "6000"], "make 12000 runs, more than 10000"),
    ],
)
def test_wrong_options_are_reported_before_anything_runs(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *options]) == 2
    told = capsys.readouterr()
    assert words in told.err and told.out == ""


@pytest.mark.parametrize("options", [["--rps", "4,4"], ["--rps", "4,x"], ["--workers", "2,"], ["--seeds", "0"]])
def test_argparse_refuses(options: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*SMALL, *options])
    assert stop.value.code == 2
