"""`preble simulate`: its table, its JSON, its progress and its wrong options. What it simulates is tested elsewhere."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from preble import CostModel, SchedulerConfig, sim
from preble.cli import main
from preble.policies.base import POLICIES
from preble.workloads import generate, poisson

SMALL = ["simulate", "--requests", "40", "--groups", "4", "--rps", "8", "--workers", "3"]


def test_the_table_has_a_row_a_policy_and_is_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*SMALL, "--policy", "round_robin,e2,least_loaded", "--slo-ttft", "0.3"]
    assert main(asked) == 0
    first = capsys.readouterr()
    lines = first.out.splitlines()
    assert lines[0].startswith("toolbench: 40 requests, generated") and "poisson 8 rps" in lines[0]
    assert lines[1].startswith("3 workers, mistral-7b/a6000, 198516 KV tokens, 512 tokens an iteration, priority")
    assert [line.split()[0] for line in lines[5:]] == ["round_robin", "e2", "least_loaded"]
    assert max(map(len, lines)) <= 120
    assert "requests/s" not in first.out and first.err.count("requests/s") == 3
    assert "40/40" in first.err
    assert main(asked) == 0
    assert capsys.readouterr().out == first.out


def test_the_figures_are_those_of_the_library(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = tmp_path / "found.json"
    options = ["--policy", "e2-paper", "--kv-capacity", "6000", "--token-budget", "256", "--order", "fcfs",
               "--seed", "5", "--event-delay", "0.1", "--event-loss", "0.5", "--kill", "w1@1.5", "--slo-ttft", "0.4",
               "--cost-model", "mistral-7b/a100", "--scheduler-rebalance-ratio", "0", "--scheduler-replicas-max", "2",
               "--scheduler-imbalance-share", "0.7", "--json", str(place)]  # fmt: skip
    assert main([*SMALL, *options]) == 0
    local = {"kv_capacity_tokens": 6000, "token_budget": 256, "order": "fcfs"}
    workload = poisson(generate("toolbench", requests=40, groups=4, seed=5), 8.0, 5)
    result = sim.simulate(
        workload,
        sim.SimConfig(
            workers=3,
            policy="e2-paper",
            cost_model="mistral-7b/a100",
            scheduler=SchedulerConfig(rebalance_ratio=0.0, replicas_max=2, imbalance_share=0.7),
            seed=5,
            event_delay_seconds=0.1,
            event_loss=0.5,
            local=replace(sim.SimConfig().local, **local),
            faults=(sim.WorkerDeath(1.5, "w1"),),
        ),  # fmt: skip
    )
    found = json.loads(place.read_text())
    report = found["policies"]["e2-paper"]
    assert report["trace_hash"] == result.trace_hash
    assert report["p99_ttft_seconds"] == result.summary().p99_ttft_seconds
    assert report["goodput"] == result.goodput(0.4)
    assert report["counts"] == result.counts
    assert report["counts"]["resumed"] > 0 and report["counts"]["event_batches"] > 0
    assert found["workload"]["arrivals"] == "poisson 8 rps, seed 5"
    assert found["config"]["faults"][0]["at_seconds"] == 1.5
    out = capsys.readouterr().out
    assert "resumed on another worker\n" in out
    row = next(line for line in out.splitlines() if line.startswith("e2-paper ")).split()
    summary = result.summary()
    assert row[1:] == [
        *(f"{getattr(summary, f'{name}_ttft_seconds'):.3f}" for name in ("mean", "p50", "p99")),
        *(f"{getattr(summary, f'{name}_latency_seconds'):.3f}" for name in ("mean", "p50", "p99")),
        f"{summary.hit_fraction:.1%}", f"{summary.load_spread:.2f}", f"{result.goodput(0.4):.1%}", result.trace_hash,
    ]  # fmt: skip


def test_a_cost_model_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As `preble profile` writes it. Twice as fast an engine, half the time to the first token."""
    found = []
    for name, factor in (("slow", 1.0), ("fast", 0.5)):
        place = tmp_path / f"{name}.json"
        CostModel([(0, 0.02 * factor), (1000, 0.12 * factor)], name=name).save(place)
        result = tmp_path / f"{name}-found.json"
        options = ["--requests", "1", "--policy", "e2", "--cost-model", str(place), "--json", str(result)]
        assert main(["simulate", *options]) == 0
        assert str(place) in capsys.readouterr().out
        found.append(json.loads(result.read_text())["policies"]["e2"]["mean_ttft_seconds"])
    assert found[1] == pytest.approx(found[0] / 2)


def test_every_policy_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    names = [*POLICIES, "oracle_partition"]
    assert main([*SMALL, "--policy", ",".join(names)]) == 0
    lines = capsys.readouterr().out.splitlines()[5:]
    assert [line.split()[0] for line in lines] == names
    assert len({(len(line), line.rindex("%")) for line in lines}) == 1  # in columns
    assert len(lines[0]) <= 120


def test_the_oracle_knows_the_groups(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each group is computed once, on its home: more hits than by turns."""
    place = tmp_path / "found.json"
    assert main([*SMALL, "--policy", "round_robin,oracle_partition", "--json", str(place)]) == 0
    found = json.loads(place.read_text())["policies"]
    assert found["oracle_partition"]["hit_fraction"] > found["round_robin"]["hit_fraction"]


def segments(folder: Path, requests: int) -> Path:
    """A file of prompts that share a segment."""
    with gzip.open(folder / "tiny_segments.jsonl.gz", "wt") as file:
        file.write(json.dumps({"id": "s", "n_tokens": 300, "pseudo": True}) + "\n")
    place = folder / "tiny.jsonl.gz"
    with gzip.open(place, "wt") as file:
        for i in range(requests):
            parts = [{"seg": "s"}, {"text": f"what about {i}?"}]
            file.write(json.dumps({"id": f"q{i}", "group": "s", "source": "made up", "parts": parts,
                                   "output_tokens": 3, "output_text": None, "output_kind": "synthetic",
                                   "output_tokens_t1": 4}) + "\n")  # fmt: skip
    return place


def test_a_file_of_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = segments(tmp_path, 9)
    assert main(["simulate", "--workload", str(place), "--requests", "7", "--policy", "e2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tiny: 7 requests") and "poisson 4 rps" in out


def test_a_trace_has_arrivals_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 500 * i, "input_length": 600, "output_length": 2, "hash_ids": [1, 2 + i]} for i in range(5)]
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for more, arrivals in (([], "of the trace"), (["--rps", "2"], "poisson 2 rps")):
        assert main(["simulate", "--workload", str(place), "--policy", "e2", *more]) == 0
        assert arrivals in capsys.readouterr().out


def test_requests_that_do_not_finish_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "found.json"
    asked = ["simulate", "--workload", "embodied", "--requests", "60", "--groups", "2", "--kv-capacity", "1000"]
    assert main([*asked, "--policy", "e2", "--json", str(place)]) == 0
    assert "e2: of 60 requests 2 refused, 58 cut off\n" in capsys.readouterr().out
    assert json.loads(place.read_text())["policies"]["e2"]["mean_ttft_seconds"] is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workload", "no-such-thing"], "'no-such-thing'"),
        (["--policy", "e2,best"], "'best'"),
        (["--policy", "e2,e2"], "twice"),
        (["--policy", ""], "policy"),
        (["--cost-model", "abacus"], "abacus"),
        (["--kill", "w0"], "w0@30"),
        (["--kill", "w0@soon"], "w0@soon"),
        (["--kill", "w0@-1"], "at_seconds"),
        (["--kill", "w0@nan"], "at_seconds"),
        (["--event-loss", "1.5"], "event_loss"),
        (["--event-delay", "nan"], "event_delay_seconds"),
        (["--routers", "0"], "routers"),
        (["--seed", "-1"], "seed"),
        (["--groups", "50"], "groups"),
        (["--json", "no/such/folder/found.json"], "--json"),
    ],
)
def test_wrong_options_are_reported_before_anything_runs(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *options]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.out == ""


def test_a_worker_that_is_not_there_cannot_die(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--kill", "w9@3"]) == 1
    assert "'w9' is not there" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--workers", "0"], ["--rps", "-1"], ["--requests", "x"], ["--order", "lifo"]])
def test_argparse_refuses(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["simulate", *wrong])
    assert stop.value.code == 2


def test_groups_are_not_for_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--workload", str(segments(tmp_path, 2)), "--groups", "3"]) == 2
    assert "--groups" in capsys.readouterr().err
