"""Measures points on a target: prompts that share nothing they should not, medians of rounds, an end in time.

Owns what is sent and how runs become samples. The order is `points`', the clock the target's; `deadline` is a function
that says whether to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median

import numpy as np

from ...engines.base import GenerationRequest, OutputChunk
from ...errors import EngineError
from ...types import SamplingParams
from .points import DECODE, Point
from .targets import Target

DECODE_STEPS = 5  # timed after one prefill; odd, so that the median is one of them
ATTEMPTS = 3
STEPS_MAX = 64  # of one measurement, before the engine counts as stuck


@dataclass(frozen=True, slots=True)
class Sample:
    """A point and what was found: `tokens` new ones (or the batch) ending at `context`, median `seconds` of `runs`."""

    point: Point
    tokens: int
    context: int
    seconds: float
    runs: tuple[float, ...]

    @property
    def row(self) -> tuple[int, int, float]:
        """As `CostModel.fit` takes it."""
        return self.tokens, self.context, self.seconds


@dataclass(slots=True)
class Results:
    """Samples so far; `skipped` counts the points that there was no time for, `short` those with fewer runs."""

    samples: list[Sample] = field(default_factory=list)
    skipped: int = 0
    short: int = 0


class Bench:
    """Runs points on one target. `rng` draws the tokens of prompts."""

    def __init__(self, target: Target, rng: np.random.Generator) -> None:
        self._target = target
        self._rng = rng
        self._numbers = count()
        self._prefixes: dict[int, np.ndarray] = {}

    def warm_up(self, points: Sequence[Point]) -> None:
        """Run these points and forget how long they took."""
        for point in points:
            self.run(point)

    def run(self, point: Point) -> float:
        """Seconds of one run of a point. Raises `EngineError` where the engine does not do what is to be timed."""
        return self._decode(point) if point.kind == DECODE else self._prefill(point)

    def measure(
        self,
        points: Sequence[Point],
        repeats: int,
        out_of_time: Callable[[], bool],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Results:
        """Every point once, then every point again, up to `repeats` times or until time is up."""
        runs: dict[Point, list[float]] = {point: [] for point in points}
        total = repeats * len(points)
        for done in range(total):
            if out_of_time():
                break
            point = points[done % len(points)]
            runs[point].append(self.run(point))
            progress(done + 1, total)
        results = Results()
        for point, seconds in runs.items():
            results.skipped += not seconds
            results.short += 0 < len(seconds) < repeats
            if seconds:
                results.samples.append(sample_of(point, seconds))
        return results

    # --- one run ------------------------------------------------------------------------------------------------------

    def _prefill(self, point: Point) -> float:
        """A prompt for one output token; again where the engine had another part of it cached than was meant."""
        for _ in range(ATTEMPTS):
            seconds, cached_tokens = self._prompt(point)
            if cached_tokens == point.before:
                return seconds
        raise EngineError(f"of a prompt with {point.before} tokens sent before, the engine had {cached_tokens} cached")

    def _prompt(self, point: Point) -> tuple[float, int]:
        suffix = self._tokens(point.tokens)
        if point.before == 0:
            return self._time_prefill(suffix, namespace=f"cold-{next(self._numbers)}")
        namespace = f"after-{point.before}"
        if point.before not in self._prefixes:
            self._prefixes[point.before] = self._tokens(point.before)
            self._time_prefill(self._prefixes[point.before], namespace)
        return self._time_prefill(np.concatenate((self._prefixes[point.before], suffix)), namespace)

    def _time_prefill(self, tokens: np.ndarray, namespace: str) -> tuple[float, int]:
        request_id = self._submit(tokens, 1, namespace)
        total = 0.0
        for _ in range(STEPS_MAX):
            seconds, chunks = self._step()
            total += seconds
            for chunk in chunks:
                if chunk.request_id == request_id and chunk.finish_reason is not None:
                    return total, chunk.cached_tokens or 0
        raise EngineError(f"a prompt of {len(tokens)} tokens did not finish in {STEPS_MAX} iterations")

    def _decode(self, point: Point) -> float:
        """The median of a few iterations in which every sequence of a batch, and nothing else, decodes."""
        for _ in range(point.tokens):
            tokens = self._tokens(point.before)
            self._submit(tokens, DECODE_STEPS + 1, f"decode-{next(self._numbers)}")
        _, chunks = self._step()
        runs = []
        for _ in range(DECODE_STEPS):
            if len(chunks) != point.tokens:
                raise EngineError(f"the engine did not run {point.tokens} sequences of {point.before} tokens at once")
            seconds, chunks = self._step()
            runs.append(seconds)
        return median(runs)

    def _step(self) -> tuple[float, list[OutputChunk]]:
        seconds, chunks = self._target.step()
        failed = next((chunk.error for chunk in chunks if chunk.finish_reason in ("error", "invalid")), None)
        if failed is not None:
            raise EngineError(f"the engine failed while it was measured: {failed}")
        self._target.engine.take_events()
        return seconds, chunks

    def _submit(self, tokens: np.ndarray, output_tokens: int, namespace: str) -> str:
        request_id = f"profile-{next(self._numbers)}"
        sampling = SamplingParams(max_new_tokens=output_tokens, ignore_eos=True)
        self._target.engine.submit(GenerationRequest(request_id, tokens, sampling, namespace))
        return request_id

    def _tokens(self, length: int) -> np.ndarray:
        return self._rng.integers(0, self._target.vocab_size, length, dtype=np.int32)


def sample_of(point: Point, runs: Sequence[float]) -> Sample:
    """The median of a point's runs. A decode's context grows while it is timed: the middle one counts."""
    context = point.before + (1 + DECODE_STEPS // 2 if point.kind == DECODE else point.tokens)
    return Sample(point, point.tokens, context, max(median(runs), 1e-9), tuple(runs))
