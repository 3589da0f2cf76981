"""Splits a torch prefill into attention and linear layers. Owns the stopwatch around their calls, and no arithmetic.

    attention   reading keys and values of the context out of the KV pool, and attending over them
    linear      the matrix products with weights: queries, keys and values, output, feed-forward, vocabulary
    rest        all else of a forward pass: norms, rotation, activation, embedding, writing to the KV pool, indices

The parts of one forward pass sum to it by construction. On CUDA the stopwatch waits for the device before and after
every part, which makes the sum larger than an undisturbed pass; so the same pass is run without a stopwatch beside
it, and both are reported. The last layer computes only the last row, as the engine always does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...batching._batch import BatchItem
from ...engines.torch.attention import AttentionPlan, KvPool
from ...engines.torch.loading import Layer, Model, choose_device, choose_dtype, load_model
from ...engines.torch.runner import Runner
from .profile import PrefillParts
from .targets import clock_of, synchronise

PROJECTIONS = ("qkv", "output", "gate_up", "down")


class Stopwatch:
    """Adds up the time of calls, by part."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = clock_of(device)
        self.seconds = {"attention": 0.0, "linear": 0.0}

    def call(self, part: str, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """`function(*args)`, timed."""
        synchronise(self._device)
        start = self._clock()
        result = function(*args)
        synchronise(self._device)
        self.seconds[part] += self._clock() - start
        return result


class _TimedProjection:
    """Stands in for a `Projection`."""

    def __init__(self, projection: Any, watch: Stopwatch) -> None:
        self._projection, self._watch = projection, watch

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._watch.call("linear", self._projection, x)


class _TimedPlan(AttentionPlan):
    """Stands in for the `AttentionPlan` that it holds."""

    def __init__(self, plan: AttentionPlan, watch: Stopwatch) -> None:
        super().__init__([], [])
        self._plan, self._watch = plan, watch

    def attend(self, pool: KvPool, layer: int, queries: torch.Tensor) -> torch.Tensor:
        return self._watch.call("attention", self._plan.attend, pool, layer, queries)


class TimedRunner(Runner):
    """The engine's own forward pass, with a stopwatch around attention and projections."""

    def __init__(self, model: Model, kv_slots: int) -> None:
        self.watch = Stopwatch(model.device)
        layers = tuple(self._timed(layer) for layer in model.layers)
        head: Any = _TimedProjection(model.head, self.watch)
        super().__init__(replace(model, layers=layers, head=head), kv_slots)

    def _timed(self, layer: Layer) -> Layer:
        timed: dict[str, Any] = {name: _TimedProjection(getattr(layer, name), self.watch) for name in PROJECTIONS}
        return replace(layer, **timed)

    def _finish_layer(self, index: int, x: torch.Tensor, query: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        return super()._finish_layer(index, x, query, _TimedPlan(plan, self.watch))


def measure_parts(
    model_dir: Path,
    lengths: Sequence[int],
    repeats: int,
    rng: np.random.Generator,
    out_of_time: Callable[[], bool] = lambda: False,
    *,
    device: str = "auto",
    dtype: str = "auto",
) -> list[PrefillParts]:
    """The parts of cold prefills of `lengths` tokens: medians of up to `repeats` rounds in random order, the first of
    which is never cut short by `out_of_time`."""
    chosen = choose_device(device)
    model = load_model(model_dir, device=chosen, dtype=choose_dtype(dtype, chosen), max_model_tokens=max(lengths) + 1)
    timed, plain = TimedRunner(model, max(lengths)), Runner(model, max(lengths))
    for runner in (timed, plain):
        _seconds(runner, _item(max(lengths), model.vocab_size, rng), chosen)
    runs: dict[int, list[PrefillParts]] = {length: [] for length in lengths}
    for turn in range(repeats):
        for length in rng.permutation(np.asarray(lengths)).tolist():
            if turn and out_of_time():
                break
            runs[length].append(_run(timed, plain, _item(length, model.vocab_size, rng), chosen))
    return [_middle(runs[length]) for length in lengths]


def _middle(runs: list[PrefillParts]) -> PrefillParts:
    """The run with the median total: its parts sum to its total, which medians of each would not."""
    return sorted(runs, key=lambda run: run.total_seconds)[(len(runs) - 1) // 2]


def _item(length: int, vocab_size: int, rng: np.random.Generator) -> BatchItem:
    slots = np.arange(length, dtype=np.int32)
    tokens = rng.integers(0, vocab_size, length, dtype=np.int32)
    return BatchItem("profile", 0, tokens, slots, slots, samples=True, is_decode=False)


def _run(timed: TimedRunner, plain: Runner, item: BatchItem, device: torch.device) -> PrefillParts:
    watch = timed.watch
    watch.seconds = {"attention": 0.0, "linear": 0.0}
    total = _seconds(timed, item, device)
    whole = _seconds(plain, item, device)
    return PrefillParts(len(item.token_ids), watch.seconds["attention"], watch.seconds["linear"], total, whole)


def _seconds(runner: Runner, item: BatchItem, device: torch.device) -> float:
    """How long one forward pass takes."""
    synchronise(device)
    clock = clock_of(device)
    start = clock()
    runner.forward([item])
    synchronise(device)
    return clock() - start
