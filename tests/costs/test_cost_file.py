"""Cost models as files, and wherever a preset's name goes: round trips, damage, foreign files. Arrays of contexts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preble import CostModel, GlobalScheduler, WorkerSpec
from preble.errors import InvalidConfig, InvalidInput

MODEL = CostModel(
    [(0, 0.02), (256, 0.02), (8192, 0.8)], context=(0, 0, 0, 2e-6), pair=(1024, 0, 0, 0, 1e-9), name="mine"
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    MODEL.save(path, {"machine": "a test", "errors": {"median": 0.01}})
    return path


@pytest.mark.parametrize("name", CostModel.presets())
def test_a_saved_model_comes_back_to_the_last_digit(tmp_path: Path, name: str) -> None:
    model = CostModel.preset(name)
    model.save(tmp_path / "model.json")
    assert CostModel.load(tmp_path / "model.json").coefficients() == model.coefficients()


def test_a_model_with_a_start_comes_back_and_one_without_is_written_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    model = CostModel([(0, 0.02)], start=0.15)
    model.save(path)
    assert CostModel.load(path).coefficients() == model.coefficients()
    MODEL.save(path)
    assert set(json.loads(path.read_text())["coefficients"]) == {"knots", "context", "pair"}


def test_a_file_says_where_its_numbers_come_from(saved: Path) -> None:
    content = json.loads(saved.read_text())
    assert content["format"] == "preble-cost-model" and content["version"] == 1 and content["name"] == "mine"
    assert content["measured"] == {"machine": "a test", "errors": {"median": 0.01}}


def test_a_file_goes_wherever_a_preset_goes(saved: Path) -> None:
    assert CostModel.preset(str(saved)).coefficients() == MODEL.coefficients()
    prompt = np.arange(1000, dtype=np.int32)

    def seconds(model: CostModel | str | None) -> float:
        """What the scheduler expects this prompt to cost a worker that brings the model, or none."""
        scheduler = GlobalScheduler([WorkerSpec("a", cost_model=model)], clock=lambda: 0.0)
        return scheduler.schedule(prompt, explain=True).costs["a"]

    assert seconds(str(saved)) == seconds(MODEL) != seconds(None)
    fleet = GlobalScheduler(["a"], cost_model=str(saved), clock=lambda: 0.0)
    assert fleet.schedule(prompt, explain=True).costs["a"] == seconds(MODEL)


def changed(edit: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    """What makes a damaged text of a good one."""

    def damage(text: str) -> str:
        content = json.loads(text)
        edit(content)
        return json.dumps(content)

    return damage


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[: len(text) // 2], "not JSON"),
        (lambda text: "", "not JSON"),
        (lambda text: "[" * 100_000, "not JSON"),
        (lambda text: "[1]", "not a JSON object"),
        (lambda text: "{}", "format is None"),
        (lambda text: " " * (16 << 20) + text, "larger than 16777216 bytes"),
        (changed(lambda c: c.update(format="other")), "format is 'other'"),
        (changed(lambda c: c.update(version=2)), "version 2"),
        (changed(lambda c: c.update(name=7)), "name must be a string"),
        (changed(lambda c: c.update(coefficients=[])), "coefficients must be context, knots, pair"),
        (changed(lambda c: c["coefficients"].pop("pair")), "coefficients must be context, knots, pair"),
        (changed(lambda c: c["coefficients"].update(extra=1)), "and nothing else"),
        (changed(lambda c: c["coefficients"].update(knots=5)), "knots"),
        (changed(lambda c: c["coefficients"].update(knots=[[0, 1.0], [5, 0.5]])), "knots must ascend"),
        (changed(lambda c: c["coefficients"].update(knots=[[0, float("nan")]])), "knots"),
        (changed(lambda c: c["coefficients"].update(knots=[[0, 10**400]])), "knots"),
        (changed(lambda c: c["coefficients"].update(pair=[0, 0, 0, -1e-9, 0])), "pair"),
        (changed(lambda c: c["coefficients"].update(context="abcd")), "context"),
        (changed(lambda c: c["coefficients"].update(start=-1)), "start must not be negative"),
        (changed(lambda c: c["coefficients"].update(start="soon")), "start must be"),
    ],
)
def test_damaged_and_foreign_files_are_refused_by_name(saved: Path, damage: Callable[[str], str], reason: str) -> None:
    saved.write_text(damage(saved.read_text()))
    with pytest.raises(InvalidConfig, match=reason) as refusal:
        CostModel.load(saved)
    assert str(saved) in str(refusal.value)


def test_what_is_no_text_or_not_there_is_refused_by_name(saved: Path) -> None:
    saved.write_bytes(b"\xff\xfe\x00\x81")
    for path in (saved, saved.with_name("missing.json"), saved.parent):
        with pytest.raises(InvalidConfig, match=str(path)):
            CostModel.load(path)
    with pytest.raises(InvalidConfig, match=r"missing\.json"):
        GlobalScheduler([WorkerSpec("a", cost_model=str(saved.with_name("missing.json")))])


@pytest.mark.parametrize("measured", [{"x": float("nan")}, {"x": object()}])
def test_a_save_that_fails_leaves_the_old_file(saved: Path, measured: dict[str, Any]) -> None:
    before = saved.read_bytes()
    with pytest.raises(InvalidConfig, match="cannot be written"):
        CostModel.preset("mistral-7b/a100").save(saved, measured)
    with pytest.raises(InvalidConfig, match="cannot be written"):
        MODEL.save(saved.parent / "no" / "such" / "directory.json")
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["model.json"]


# --- arrays of contexts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "contexts",
    [
        np.array([5, 700, 12_000], np.int32),
        np.array([5, 700, 12_000], np.int64),
        np.array([5, -1, 700, -1, 12_000, -1], np.int64)[::2],
        np.array([12_000, 700, 5], np.int32)[::-1],
        np.array([5, 700, 12_000], np.uint64),
        np.array([5, 700, 12_000], np.int16),
        np.array([5.0, 700.0, 12_000.0]),
        np.array([5, 700, 12_000], ">i4"),
        (5, 700, 12_000),
        [5, 700.0, np.int32(12_000)],
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}-{getattr(value, 'strides', '')}",
)
@pytest.mark.parametrize("name", CostModel.presets())
def test_contexts_may_come_as_any_numbers(contexts: Any, name: str) -> None:
    model = CostModel.preset(name)
    expected = model.iteration_time([(512, 900)], [5, 700, 12_000])
    assert model.iteration_time([(512, 900)], contexts) == pytest.approx(expected, rel=1e-12)
    assert model.iteration_time([(512, 900)], iter(contexts)) == pytest.approx(expected, rel=1e-12)


def test_no_contexts_cost_nothing() -> None:
    for dtype in (np.int32, np.int64, np.float64):
        assert MODEL.iteration_time((), np.array([], dtype)) == 0.0


@pytest.mark.parametrize(
    "contexts",
    [
        np.array([5, -1], np.int64),
        np.array([5, -1], np.int32),
        np.array([5.0, np.nan]),
        np.array([[5, 6]]),
        [5, 10**400],
    ],
    ids=str,
)
def test_arrays_of_what_is_no_context_are_refused_by_name(contexts: Any) -> None:
    with pytest.raises(InvalidInput, match="decode_contexts"):
        MODEL.iteration_time((), contexts)


# --- fits -------------------------------------------------------------------------------------------------------------


def test_a_fit_finds_the_knee_steps_and_the_start_of_attention() -> None:
    """Flat, a step where the engine switches kernels, a line, and attention from 2**20 products on."""
    truth = CostModel([(0, 0.01), (127, 0.01), (128, 0.013), (300, 0.013), (8192, 0.5)], pair=(2**20, 0, 0, 2e-6, 1e-9))
    lengths = [16, 64, 100, 127, 128, 200, 300, 400, 600, 800, 1000, 1024, 1025, 1200, 2000, 4000, 8192]
    shapes = [(n, n) for n in lengths] + [(n, n + before) for n in (64, 256, 512) for before in (1000, 4000)]
    decode = [(batch, 500, truth.iteration_time((), [500] * batch)) for batch in (1, 8, 32)]
    model = CostModel.fit([(q, s, truth.prefill_time(q, s)) for q, s in shapes], decode=decode)
    for missed in (20, 90, 127, 128, 290, 350, 900, 1024, 1025, 3000, 7000):
        for before in (0, 2000, 3900):
            expected = truth.prefill_time(missed, missed + before)
            assert model.prefill_time(missed, missed + before) == pytest.approx(expected, rel=0.02), (missed, before)


def test_noise_does_not_bend_the_line() -> None:
    """With 5 % of noise the fit stays nearer to the truth than its samples."""
    rng = np.random.default_rng(5)
    truth = CostModel([(0, 0.01), (256, 0.01), (8192, 0.4)])
    lengths = np.unique(np.geomspace(16, 8192, 40).astype(int)).tolist()
    model = CostModel.fit([(n, n, truth.prefill_time(n) * float(rng.normal(1.0, 0.05))) for n in lengths])
    errors = [abs(model.prefill_time(n) / truth.prefill_time(n) - 1) for n in lengths]
    assert float(np.median(errors)) < 0.025 and max(errors) < 0.06
