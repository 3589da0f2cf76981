"""The profiler: what it plans, where it looks closer, that a simulated preset comes back, refusals, figures."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preble import CostModel
from preble.cli import console, main
from preble.cli.profile import points, profile
from preble.cli.profile.bench import DECODE_STEPS, Bench, Sample, sample_of
from preble.cli.profile.points import DECODE, PREFILL, Limits, Point
from preble.cli.profile.targets import SimulatedTarget, check_fits, local_config
from preble.costs.thresholds import imbalance_share, rebalance_ratio
from preble.engines.base import OutputChunk
from preble.errors import EngineError, InvalidInput

SMALL = Limits(256, 4)


def simulated(limits: Limits = SMALL, preset: str = "mistral-7b/a6000") -> SimulatedTarget:
    return SimulatedTarget(CostModel.preset(preset), local_config(limits, DECODE_STEPS))


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


# --- what is measured -------------------------------------------------------------------------------------------------


def test_a_plan_is_seeded_has_every_kind_and_no_point_twice() -> None:
    plan = points.plan(Limits(2048, 16), np.random.default_rng(1))
    assert plan == points.plan(Limits(2048, 16), np.random.default_rng(1))
    assert plan != points.plan(Limits(2048, 16), np.random.default_rng(2))
    assert len(set(plan)) == len(plan)
    kinds = {(point.kind, point.cold, point.held_out) for point in plan}
    assert kinds == {(PREFILL, c, h) for c in (True, False) for h in (True, False)} | {
        (DECODE, False, h) for h in (True, False)
    }
    assert {16, 32, 64, 128, 256, 512, 1024, 2048} <= {point.tokens for point in plan if point.cold}
    assert max(point.tokens + point.before for point in plan if point.kind == PREFILL) <= 2 * 2048
    assert {point.tokens for point in plan if point.kind == DECODE and not point.held_out} == {1, 4, 16}


@pytest.mark.parametrize("edge", [17, 63, 64, 500, 1024])
def test_a_step_is_found_to_the_token(edge: int) -> None:
    """Time jumps at `edge`: refining must end with both of its sides measured."""
    found = dict(
        points.refine(
            {n: seconds(n, edge) for n in (16, 48, 128, 512, 1025)}, lambda n: seconds(n, edge), tolerance=0.01, room=40
        )
    )
    measured = {16, 48, 128, 512, 1025, *found}
    assert {edge - 1, edge} <= measured
    assert len(found) <= 40


def seconds(tokens: int, edge: int) -> float:
    return 0.02 if tokens >= edge else 0.01


def test_a_straight_line_is_looked_at_no_closer_and_room_is_kept() -> None:
    line = {n: 0.001 * n for n in (16, 64, 256)}
    assert list(points.refine(line, lambda n: pytest.fail(f"measured {n}"), tolerance=0.01, room=9)) == []
    rough = points.refine({16: 1.0, 500: 1.0, 1000: 9.0}, lambda n: float(n % 7 + 1), tolerance=0.01, room=5)
    assert len(list(rough)) == 5


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point", [Point(PREFILL, 100), Point(PREFILL, 40, 128), Point(DECODE, 1, 64), Point(DECODE, 4, 100)]
)
def test_a_run_takes_what_the_simulated_engine_says(point: Point) -> None:
    target = simulated()
    bench = Bench(target, rng())
    model = CostModel.preset("mistral-7b/a6000")
    for _ in range(3):  # the cached context must be there, and nothing else, every time
        sample = sample_of(point, [bench.run(point)])
        assert sample.seconds == pytest.approx(profile.predicted(model, sample), rel=1e-12)
    target.engine.scheduler.check()


def test_rounds_end_when_time_is_up_and_what_is_missing_is_counted() -> None:
    plan = points.plan(SMALL, rng())
    ticks = itertools.count()
    bench = Bench(simulated(), rng())
    found = bench.measure(plan, 3, lambda: next(ticks) >= len(plan) + 2)
    assert (found.skipped, found.short, len(found.samples)) == (0, len(plan), len(plan))
    assert sorted(len(sample.runs) for sample in found.samples)[-3:] == [1, 2, 2]
    ticks = itertools.count()
    found = bench.measure(plan, 3, lambda: next(ticks) >= 4)
    assert (found.skipped, found.short, len(found.samples)) == (len(plan) - 4, 4, 4)


def test_progress_is_reported_of_every_run() -> None:
    told: list[tuple[int, int]] = []
    plan = [Point(PREFILL, 20), Point(DECODE, 2, 20)]
    Bench(simulated(), rng()).measure(plan, 2, lambda: False, lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


class Broken(SimulatedTarget):
    """A target whose steps are passed through `change`."""

    def __init__(self, change: Callable[[list[OutputChunk]], list[OutputChunk]]) -> None:
        super().__init__(CostModel.preset("mistral-7b/a6000"), local_config(SMALL, DECODE_STEPS))
        self.change = change

    def step(self) -> tuple[float, list[OutputChunk]]:
        seconds, chunks = super().step()
        return seconds, self.change(chunks)


@pytest.mark.parametrize(
    ("point", "change", "message"),
    [
        (Point(PREFILL, 50), lambda chunks: [], "did not finish"),
        (Point(DECODE, 4, 50), lambda chunks: chunks[:3], "did not run 4 sequences"),
        (
            Point(PREFILL, 50, 64),
            lambda chunks: [
                OutputChunk(c.request_id, 0, (1,), cached_tokens=0, finish_reason="length") for c in chunks
            ],
            "had 0 cached",
        ),
        (
            Point(PREFILL, 50),
            lambda chunks: [OutputChunk(c.request_id, 0, (), finish_reason="error", error="oops") for c in chunks],
            "oops",
        ),
    ],
)
def test_an_engine_that_does_something_else_is_not_measured(
    point: Point, change: Callable[[list[OutputChunk]], list[OutputChunk]], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        Bench(Broken(change), rng()).run(point)


# --- fit and report ---------------------------------------------------------------------------------------------------


def test_errors_are_relative_to_what_was_measured_and_held_out_ones_stand_apart() -> None:
    model = CostModel([(0, 0.01), (1000, 0.11)])
    samples = [
        sample_of(Point(PREFILL, 900), [0.1]),
        sample_of(Point(PREFILL, 400), [0.04]),
        sample_of(Point(PREFILL, 100, held_out=True), [0.04, 0.02, 0.1]),
    ]
    assert [round(profile.relative_error(model, sample), 6) for sample in samples] == [0.0, 0.25, -0.5]
    cold = profile.groups(profile.Profile(model, samples))[0]
    assert cold[1] == profile.Errors(2, pytest.approx(0.125), pytest.approx(0.25))
    assert cold[2] == profile.Errors(1, pytest.approx(0.5), pytest.approx(0.5))
    assert profile.errors_of([]) == profile.Errors(0, 0.0, 0.0)


def test_held_out_points_have_no_influence_on_the_fit() -> None:
    samples = Bench(simulated(), rng()).measure(points.plan(SMALL, rng()), 1, lambda: False).samples
    spoiled = [Sample(s.point, s.tokens, s.context, 9.0, (9.0,)) if s.point.held_out else s for s in samples]
    assert spoiled != samples
    good, bad = profile.fit(samples, [], "x"), profile.fit(spoiled, [], "x")
    assert good.model.coefficients() == bad.model.coefficients()
    assert bad.errors(lambda sample: sample.point.held_out).maximum > 0.9


def test_too_little_to_fit_is_refused() -> None:
    with pytest.raises(EngineError, match="only 1 points"):
        profile.fit(
            [sample_of(Point(PREFILL, 64), [0.1])] + [sample_of(Point(PREFILL, 9, 0, True), [0.1])] * 9, [], "x"
        )


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", CostModel.presets())
def test_a_simulated_engines_preset_comes_back(preset: str, tmp_path: Path) -> None:
    """Within 2 % at every length and context in the measured range, measured there or not."""
    truth, model = CostModel.preset(preset), profiled(tmp_path, "--cost-model", preset, "--name", "again")
    assert model.name == "again"
    for missed in np.unique(np.geomspace(16, 8192, 150).astype(int)).tolist():
        for before in (0, 512, 1024, 2500, 4096):
            expected = truth.prefill_time(missed, missed + before)
            assert model.prefill_time(missed, missed + before) == pytest.approx(expected, rel=0.02), (missed, before)
    for batch in range(1, 65):
        for context in (256, 1000, 4096):
            expected = truth.iteration_time((), [context] * batch)
            assert model.iteration_time((), [context] * batch) == pytest.approx(expected, rel=0.02), (batch, context)


def profiled(out: Path, *options: str) -> CostModel:
    """The model of a run of the command with the simulated engine."""
    assert main(["profile", "--engine", "simulated", "--seconds", "1000", "--out", str(out), *options]) == 0
    return CostModel.load(out / "cost_model.json")


def test_the_command_writes_all_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    model = profiled(tmp_path / "a", "--quick")
    said = capsys.readouterr().out
    assert f'cost_model="{tmp_path}/a/cost_model.json"' in said
    words = " ".join(said.split())
    assert f"--scheduler-imbalance-share (IMBALR) {imbalance_share(model):.3g} " in words
    assert f"(Th_bal), tools {rebalance_ratio(model, 1835, 1560, 43):.3g} " in words
    assert "held out" in said and "Error of the fit" in said and "not measured" not in said
    for name in ("figure1_prefill.png", "figure2_decode.png"):
        width, height = struct.unpack(">II", (tmp_path / "a" / name).read_bytes()[16:24])
        assert width > 1000 and height > 500
    measured = json.loads((tmp_path / "a" / "cost_model.json").read_text())["measured"]
    assert measured["engine"] == "simulated" and measured["model"] == "mistral-7b/a6000"
    assert measured["machine"]["cores"] and measured["versions"]["preble"] and measured["skipped_points"] == 0
    assert measured["errors"]["decode"]["held_out"]["maximum"] < 0.02
    assert all(abs(sample["relative_error"]) < 0.02 for sample in measured["samples"])
    assert CostModel.preset(str(tmp_path / "a" / "cost_model.json")).coefficients() == model.coefficients()


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    first, second = (profiled(tmp_path / name, "--quick", "--seed", "3") for name in "ab")
    assert first.coefficients() == second.coefficients()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "63"], "--max-tokens"),
        (["--max-batch", "-1"], "--max-batch"),
        (["--repeats", "0"], "--repeats"),
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--seed", "-1"], "--seed"),
        (["--cost-model", "gpu"], "no cost model preset"),
        (["--cost-model", "missing.json"], "missing.json"),
        (["--engine", "torch", "--model", "missing"], "--model missing"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "torch" in options:
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    assert main(["profile", "--engine", "simulated", "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "cost_model.json").exists()


def test_prompts_longer_than_the_engine_takes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="--max-tokens"):
        check_fits(simulated(SMALL), Limits(1 << 20, 1))


# --- torch ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from preble.engines.torch.tiny_models import make_tiny_model

    return make_tiny_model("llama-1m", tmp_path_factory.mktemp("models"))


def test_a_torch_profile_has_parts_and_a_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--model", str(tiny_model_dir), "--max-tokens", "128", "--max-batch", "2", "--repeats", "1"]
    assert main(["profile", "--quick", "--device", "cpu", "--seconds", "1000", "--out", str(out), *options]) == 0
    content = json.loads((out / "cost_model.json").read_text())["measured"]
    assert content["model"] == tiny_model_dir.name and content["clock"] == "thread CPU time"
    assert [part["tokens"] for part in content["parts"]] == [16, 32, 64, 128]
    for part in content["parts"]:
        assert part["attention_seconds"] > 0 and part["linear_seconds"] > 0 and part["plain_seconds"] > 0
        inside = part["attention_seconds"] + part["linear_seconds"] + part["rest_seconds"]
        assert inside == pytest.approx(part["total_seconds"])
    assert CostModel.load(out / "cost_model.json").prefill_time(128) > 0


def test_a_timed_forward_pass_says_the_same_as_the_engines(tiny_model_dir: Path) -> None:
    """The stopwatch stands around every projection and attention, and changes no logit."""
    import torch

    from preble.cli.profile.parts import TimedRunner, _item
    from preble.engines.torch.loading import load_model
    from preble.engines.torch.runner import Runner

    model = load_model(tiny_model_dir, device=torch.device("cpu"), dtype=torch.float32)
    timed, plain = TimedRunner(model, 64), Runner(model, 64)
    item = _item(50, model.vocab_size, rng())
    calls: list[str] = []
    call = timed.watch.call

    def counted(part: str, function: Callable[..., Any], *args: Any) -> Any:
        calls.append(part)
        return call(part, function, *args)

    timed.watch.call = counted  # type: ignore[method-assign]
    assert torch.equal(timed.forward([item]), plain.forward([item]))
    assert calls.count("attention") == len(model.layers)
    assert calls.count("linear") == 4 * len(model.layers) + 1


def test_torch_is_timed_by_the_wall_where_it_uses_several_threads() -> None:
    torch = pytest.importorskip("torch")
    import time

    from preble.cli.profile.targets import clock_of

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert clock_of(torch.device("cpu")) is time.thread_time
        assert clock_of(torch.device("cuda")) is time.perf_counter
        torch.set_num_threads(2)
        assert clock_of(torch.device("cpu")) is time.perf_counter
    finally:
        torch.set_num_threads(threads)


def test_progress_writes_over_one_line_on_a_terminal_and_seldom_elsewhere() -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        screen = console.Screen(stream)
        screen.show("one")
        screen.show("two")
        screen.clear()
    assert terminal.getvalue().count("\r") == 3 and "two" in terminal.getvalue()
    assert file.getvalue() == ""
