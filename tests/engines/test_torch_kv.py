"""KV that one torch engine hands to another: bit for bit what that would have computed, and never a wrong token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest_plugins = ["tests.support.torch_fixtures"]

from preble.engines.base import MovesKv  # noqa: E402
from preble.engines.torch import TorchEngine  # noqa: E402
from preble.engines.torch.layout import kv_layout  # noqa: E402
from preble.engines.torch.tiny_models import make_tiny_model  # noqa: E402
from preble.errors import EngineError  # noqa: E402
from tests.support.torch_fixtures import Driver, Reference, greedy, joined, prompt  # noqa: E402

MakeEngine = Callable[..., TorchEngine]
TOKEN_BYTES = 2 * 3 * 2 * 32 * 4  # keys and values, layers, heads, numbers, bytes


@pytest.fixture
def source(make_engine: MakeEngine) -> TorchEngine:
    """An engine that caches `prompt(1, 200)`."""
    engine = make_engine(token_budget=64)
    Driver(engine).ask("fill", prompt(1, 200), greedy(1))
    return engine


def moved(source: TorchEngine, target: TorchEngine, token_ids: np.ndarray, *cuts: int) -> int:
    """Hand over the KV of a prompt in parts that end at `cuts` and at its end; returns what is cached then."""
    cached = target.cached_tokens(token_ids, None)
    for end in (*cuts, len(token_ids)):
        cached = target.import_kv(token_ids[:end], None, cached, source.export_kv(token_ids[:end], None, cached))
    target.scheduler.check()
    return cached


def test_what_is_taken_over_is_what_would_have_been_computed_bit_for_bit(
    make_engine: MakeEngine, reference: Reference, source: TorchEngine
) -> None:
    target, computed = make_engine(token_budget=64), make_engine(token_budget=64)
    token_ids = prompt(1, 200)
    assert isinstance(target, MovesKv)
    assert target.info.kv_token_bytes == TOKEN_BYTES and target.info.kv_layout == source.info.kv_layout
    assert moved(source, target, token_ids, 70, 71, 130) == 200
    Driver(computed).ask("compute", token_ids, greedy(1))
    ours, theirs = (bytes(engine.export_kv(token_ids, None, 0)) for engine in (target, computed))
    assert len(ours) == 200 * TOKEN_BYTES and ours == theirs
    for tail in (0, 7):
        request = joined(token_ids, prompt(2, tail))
        answer = Driver(target).ask(f"after {tail}", request, greedy(12))
        assert answer.cached_tokens == min(200, len(request) - 1)
        assert answer.token_ids == reference.greedy(request, 12)


def test_a_wrong_number_in_what_is_taken_over_would_be_seen(make_engine: MakeEngine, source: TorchEngine) -> None:
    """What holds the equality above: the answer is made of what was taken over."""
    token_ids = prompt(1, 200)
    answers = []
    for spoilt in (False, True):
        target = make_engine()
        data = bytearray(source.export_kv(token_ids, None, 0))
        if spoilt:
            data[: len(data) // 2] = bytes(len(data) // 2)
        assert target.import_kv(token_ids, None, 0, bytes(data)) == 200
        answers.append(Driver(target).ask("r", token_ids, greedy(12)).token_ids)
    assert answers[0] != answers[1]


def test_what_is_cached_already_stays_and_the_rest_is_taken_over(
    make_engine: MakeEngine, reference: Reference, source: TorchEngine
) -> None:
    target = make_engine()
    token_ids = prompt(1, 200)
    Driver(target).ask("own", token_ids[:90], greedy(1))
    slots = target.scheduler.cached_slots(token_ids[:90])
    assert target.import_kv(token_ids, None, 50, source.export_kv(token_ids, None, 50)) == 200
    assert np.array_equal(target.scheduler.cached_slots(token_ids)[:90], slots)
    target.scheduler.check()
    assert Driver(target).ask("r", token_ids, greedy(8)).token_ids == reference.greedy(token_ids, 8)
    assert target.import_kv(token_ids[:100], None, 0, source.export_kv(token_ids[:100], None, 0)) == 100, "nothing new"


def test_bytes_that_do_not_fit_change_nothing(make_engine: MakeEngine, source: TorchEngine) -> None:
    target = make_engine()
    token_ids = prompt(1, 200)
    data = bytes(source.export_kv(token_ids, None, 100))
    for wrong in (data[:-1], data + b"x", b""):
        with pytest.raises(EngineError, match="are not the KV of 100 tokens"):
            target.import_kv(token_ids, None, 100, wrong)
    assert target.import_kv(token_ids, None, 100, data) == 0, "those before are not cached"
    assert target.cached_tokens(token_ids, None) == 0
    target.scheduler.check()
    assert target.scheduler.load().kv_cached_tokens == 0


def test_what_is_not_cached_is_not_handed_over(source: TorchEngine) -> None:
    other = joined(prompt(1, 150), prompt(9, 50))
    assert len(source.export_kv(other, None, 100)) == 50 * TOKEN_BYTES
    assert len(source.export_kv(other, None, 150)) == len(source.export_kv(prompt(1, 200), "b", 0)) == 0
    source.scheduler.check()


def test_namespaces_are_kept_apart(make_engine: MakeEngine, source: TorchEngine) -> None:
    target = make_engine()
    token_ids = prompt(1, 200)
    assert target.import_kv(token_ids, "tenant", 0, source.export_kv(token_ids, None, 0)) == 200
    assert target.cached_tokens(token_ids, "tenant") == 200 and target.cached_tokens(token_ids, None) == 0


def test_running_requests_keep_their_memory(make_engine: MakeEngine, reference: Reference, source: TorchEngine) -> None:
    target = make_engine(kv_capacity_tokens=250, token_budget=64)
    driver, token_ids = Driver(target), prompt(1, 200)
    driver.submit("runs", prompt(3, 60), greedy(40))
    driver.step()
    data = source.export_kv(token_ids, None, 0)
    assert target.import_kv(token_ids, None, 0, data) == 0, "60 are held, and it needs one more"
    assert target.import_kv(token_ids[:150], None, 0, source.export_kv(token_ids[:150], None, 0)) == 150
    target.scheduler.check()
    assert driver.run()["runs"].token_ids == reference.greedy(prompt(3, 60), 40)
    assert driver.ask("r", token_ids, greedy(8)).token_ids == reference.greedy(token_ids, 8)
    target.scheduler.check()


def test_what_was_taken_over_is_evicted_like_any_other(
    make_engine: MakeEngine, reference: Reference, source: TorchEngine
) -> None:
    target = make_engine(kv_capacity_tokens=260)
    driver, token_ids = Driver(target), prompt(1, 200)
    assert moved(source, target, token_ids) == 200
    for number in range(4):
        driver.ask(f"other {number}", prompt(10 + number, 120), greedy(4))
    events = target.take_events()
    assert any(np.array_equal(np.asarray(event.token_ids)[:50], token_ids[:50]) for event in events)
    target.scheduler.check()
    assert driver.ask("r", token_ids, greedy(8)).token_ids == reference.greedy(token_ids, 8)


def test_a_failing_device_leaves_no_slot_without_an_owner(
    make_engine: MakeEngine, source: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_engine()
    token_ids = prompt(1, 200)
    data = source.export_kv(token_ids, None, 0)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(target._runner), "write_kv", fail)
        patch.setattr(type(target._runner), "read_kv", fail)
        with pytest.raises(EngineError, match="200 tokens cannot be stored: out of memory"):
            target.import_kv(token_ids, None, 0, data)
        with pytest.raises(EngineError, match="200 tokens cannot be read"):
            source.export_kv(token_ids, None, 0)
    target.scheduler.check()
    assert target.cached_tokens(token_ids, None) == 0
    assert moved(source, target, token_ids) == 200


def test_engines_of_other_weights_or_numbers_have_another_layout(
    make_engine: MakeEngine, tmp_path: Path, source: TorchEngine
) -> None:
    """Equal names and shapes are not enough: a model trained a little further answers otherwise."""
    others = [make_engine(make_tiny_model("llama-1m", tmp_path, seed=1)), make_engine(dtype="bfloat16")]
    layouts = {source.info.kv_layout, make_engine().info.kv_layout, *(one.info.kv_layout for one in others)}
    assert len(layouts) == 3
    model = source._runner._model  # type: ignore[union-attr]
    assert kv_layout(dataclasses.replace(model, max_model_tokens=100)) == source.info.kv_layout
    norm = model.layers[2].input_norm.clone()
    norm[0] += 1e-3
    changed = dataclasses.replace(model.layers[2], input_norm=norm)
    assert kv_layout(dataclasses.replace(model, layers=(*model.layers[:2], changed))) != source.info.kv_layout


def test_bfloat16_travels_as_it_is(make_engine: MakeEngine) -> None:
    one, two = make_engine(dtype="bfloat16"), make_engine(dtype="bfloat16")
    token_ids = prompt(4, 60)
    Driver(one).ask("fill", token_ids, greedy(1))
    data = bytes(one.export_kv(token_ids, None, 0))
    assert len(data) == 60 * TOKEN_BYTES // 2
    assert moved(one, two, token_ids, 20) == 60
    assert bytes(two.export_kv(token_ids, None, 0)) == data
