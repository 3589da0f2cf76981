"""What the measurements come to: the fitted cost model, how far off it is, the table and the file's contents.

Owns no measurement and no picture. Errors are relative: (what the model says - what was measured) / measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from ..._cost import CostModel
from ...costs.thresholds import imbalance_share, rebalance_ratio
from ...errors import EngineError
from .bench import Sample
from .points import DECODE, PREFILL

FEWEST_SAMPLES = 8
# Mean (prompt, cached, output) tokens of two uses of the paper's Table 1.
TABLE1_TOKENS = {"tools": (1835, 1560, 43), "videos": (9865, 8681, 4)}


@dataclass(frozen=True, slots=True)
class PrefillParts:
    """Seconds of one cold prefill of `tokens`, the median run; `total_seconds` is the whole forward pass.

    `plain_seconds` is the same pass run next to it without a stopwatch inside: what the parts should sum to.
    """

    tokens: int
    attention_seconds: float
    linear_seconds: float
    total_seconds: float
    plain_seconds: float

    @property
    def rest_seconds(self) -> float:
        """What is neither."""
        return max(0.0, self.total_seconds - self.attention_seconds - self.linear_seconds)


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of `samples` samples, as fractions without sign."""

    samples: int
    median: float
    maximum: float

    @property
    def text(self) -> str:
        """ "median 2.1 %, max 9.8 % of 14"."""
        if not self.samples:
            return "nothing measured"
        return f"median {self.median:.1%}, max {self.maximum:.1%} of {self.samples}"


@dataclass(frozen=True, slots=True)
class Profile:
    """All samples, the model fitted to those that were not held out, and the parts of cold prefills (torch only)."""

    model: CostModel
    samples: list[Sample]
    parts: list[PrefillParts] = field(default_factory=list)

    def of(self, kind: str) -> list[Sample]:
        """The samples of one kind, shortest first."""
        return sorted((s for s in self.samples if s.point.kind == kind), key=lambda s: (s.tokens, s.context))

    def cold(self) -> list[Sample]:
        """The prefills with nothing before them, shortest first."""
        return [sample for sample in self.of(PREFILL) if sample.point.cold]

    def errors(self, chosen: Callable[[Sample], bool]) -> Errors:
        """The errors of the samples for which `chosen` is true."""
        return errors_of([abs(relative_error(self.model, sample)) for sample in self.samples if chosen(sample)])


def fit(samples: Sequence[Sample], parts: Sequence[PrefillParts], name: str) -> Profile:
    """The profile with its cost model. Raises `EngineError` where there is too little to fit."""
    used = [sample for sample in samples if not sample.point.held_out]
    if len(used) < FEWEST_SAMPLES:
        raise EngineError(f"only {len(used)} points were measured, {FEWEST_SAMPLES} are needed: give it more --seconds")
    model = CostModel.fit(
        [sample.row for sample in used if sample.point.kind == PREFILL],
        decode=[sample.row for sample in used if sample.point.kind == DECODE],
        name=name,
    )
    return Profile(model, list(samples), list(parts))


def predicted(model: CostModel, sample: Sample) -> float:
    """Seconds that the model expects for a sample."""
    if sample.point.kind == DECODE:
        return model.iteration_time((), [sample.context] * sample.tokens)
    return model.prefill_time(sample.tokens, sample.context)


def relative_error(model: CostModel, sample: Sample) -> float:
    """How far the model is off, as a signed fraction of what was measured."""
    return predicted(model, sample) / sample.seconds - 1.0


def errors_of(values: Sequence[float]) -> Errors:
    """Count, median and maximum; zeros of nothing."""
    return Errors(len(values), median(values), max(values)) if values else Errors(0, 0.0, 0.0)


def groups(profile: Profile) -> list[tuple[str, Errors, Errors]]:
    """(what, errors of the points fitted to, errors of the points held out), by kind of point."""
    kinds: list[tuple[str, Callable[[Sample], bool]]] = [
        ("prefill, nothing cached", lambda sample: sample.point.cold),
        ("prefill after cached tokens", lambda sample: sample.point.kind == PREFILL and not sample.point.cold),
        ("decode", lambda sample: sample.point.kind == DECODE),
    ]

    def split(chosen: Callable[[Sample], bool], held_out: bool) -> Errors:
        return profile.errors(lambda sample: chosen(sample) and sample.point.held_out == held_out)

    return [(what, split(chosen, False), split(chosen, True)) for what, chosen in kinds]


def table(profile: Profile) -> str:
    """What was found, for people."""
    lines = ["Cold prefill (* held out of the fit)", f"{'tokens':>9} {'measured':>12} {'model':>12} {'error':>8}"]
    for sample in profile.cold():
        expected = predicted(profile.model, sample)
        mark = "*" if sample.point.held_out else " "
        lines.append(
            f"{sample.tokens:>8,}{mark} {milliseconds(sample.seconds):>12} {milliseconds(expected):>12} "
            f"{relative_error(profile.model, sample):>+8.1%}"
        )
    if profile.parts:
        lines += ["", "Forward pass of a cold prefill, taken apart (whole: timed from outside only)"]
        lines.append(f"{'tokens':>9} {'attention':>12} {'linear':>12} {'rest':>12} {'sum':>12} {'whole':>12}")
        for part in profile.parts:
            seconds = (part.attention_seconds, part.linear_seconds, part.rest_seconds, part.total_seconds)
            cells = " ".join(f"{milliseconds(value):>12}" for value in (*seconds, part.plain_seconds))
            lines.append(f"{part.tokens:>8,}  {cells}")
    lines += ["", f"{'Error of the fit':<30} {'fitted to':<32} held out"]
    lines += [f"{what:<30} {fitted.text:<32} {held.text}" for what, fitted, held in groups(profile)]
    lines += ["", "The paper's thresholds, for e2-paper (docs/policies.md)"]
    lines += [f"{what:<58} {value:.3g}" for what, value in thresholds(profile.model)]
    return "\n".join(lines)


def thresholds(model: CostModel) -> list[tuple[str, float]]:
    """(what, value) of IMBALR and Th_bal, as the options of `preble serve` and `simulate` take them."""
    ratios = {use: rebalance_ratio(model, *tokens) for use, tokens in TABLE1_TOKENS.items()}
    return [
        ("--scheduler-imbalance-share (IMBALR)", imbalance_share(model)),
        *((f"--scheduler-rebalance-ratio (Th_bal), {use}", ratio) for use, ratio in ratios.items()),
    ]


def milliseconds(seconds: float) -> str:
    """ "12.3 ms"."""
    return f"{seconds * 1000:,.3g} ms" if seconds < 1 else f"{seconds * 1000:,.0f} ms"


def document(profile: Profile, about: dict[str, Any]) -> dict[str, Any]:
    """What the model's file says about where it comes from: `about` (machine, engine, settings), errors, samples."""
    return {
        **about,
        "errors": {what: {"fitted": asdict(used), "held_out": asdict(held)} for what, used, held in groups(profile)},
        "samples": [
            {
                **asdict(sample),
                "model_seconds": predicted(profile.model, sample),
                "relative_error": relative_error(profile.model, sample),
            }
            for sample in profile.of(PREFILL) + profile.of(DECODE)
        ],
        "parts": [{**asdict(part), "rest_seconds": part.rest_seconds} for part in profile.parts],
    }
