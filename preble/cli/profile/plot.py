"""The profile's pictures: prefill time by length and what it is made of, decode time by context. Owns drawing only.

Paper figures 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..console import GREY, TITLE, caption, duration, new_figure, save_figure, tidy
from .bench import Sample
from .points import DECODE, PREFILL
from .profile import Profile, groups

ATTENTION, LINEAR, REST, LINE = "#d1603d", "#2b6ca3", "#b9b9b9", "#222222"
SERIES = ("#2b6ca3", "#d1603d", "#3f8f5f", "#8a5ba8", "#b8892b", "#4a4a4a")


def draw_prefill(path: Path, profile: Profile, subtitle: str) -> None:
    """Write figure 1 as a PNG. Raises `MissingExtra` without matplotlib."""
    figure, left, right = two_panels()
    if profile.parts:
        draw_parts(left, profile)
    else:
        draw_total(left, profile)
    draw_cached(right, profile)
    share = attention_share(profile)
    finish(figure, path, f"Prefill time grows with the prompt{share}", subtitle, profile)


def draw_decode(path: Path, profile: Profile, subtitle: str) -> None:
    """Write figure 2 as a PNG. Raises `MissingExtra` without matplotlib."""
    figure, left, right = two_panels()
    samples = profile.of(DECODE)
    draw_series(left, profile, samples, by_batch=True)
    draw_series(right, profile, samples, by_batch=False)
    finish(figure, path, "Decode time grows with the context and the batch", subtitle, profile)


def two_panels() -> tuple[Any, Any, Any]:
    figure = new_figure((12.8, 6.0), (0.01, 0.065, 0.98, 0.815), h_pad=0.08)
    return figure, *figure.subplots(1, 2)


def finish(figure: Any, path: Path, title: str, subtitle: str, profile: Profile) -> None:
    """Title, what was run, how good the fit is; write the file."""
    caption(figure, 0.955, title, size=17, title=True)
    caption(figure, 0.905, subtitle, size=10.5)
    notes = [f"{what}: {held.text}" for what, _, held in groups(profile) if held.samples]
    text = f"Lines: the fitted cost model. Its error at points held out of the fit:\n{';  '.join(notes)}."
    caption(figure, 0.032, text)
    save_figure(figure, path)


def draw_parts(axes: Any, profile: Profile) -> None:
    """Attention, linear layers and the rest, stacked, with the engine's own times on top."""
    tokens = [part.tokens for part in profile.parts]
    linear = np.array([part.linear_seconds for part in profile.parts])
    attention = np.array([part.attention_seconds for part in profile.parts])
    rest = np.array([part.rest_seconds for part in profile.parts])
    colours = (LINEAR, ATTENTION, REST)
    axes.stackplot(tokens, linear, attention, rest, colors=colours, alpha=0.8, labels=("linear", "attention", "rest"))
    draw_points(axes, profile.cold(), LINE, "the engine's iteration")
    draw_model(axes, profile, tokens[-1])
    handles, labels = axes.get_legend_handles_labels()
    order = [2, 1, 0, *range(3, len(handles))]  # as they lie on one another
    axes.legend([handles[i] for i in order], [labels[i] for i in order], frameon=False, loc="upper left", fontsize=10)
    label_prefill(axes, "Cold prefill: what one iteration is made of")


def draw_total(axes: Any, profile: Profile) -> None:
    """The whole only: a simulated engine has no parts."""
    draw_points(axes, profile.cold(), SERIES[0], "measured")
    draw_model(axes, profile, max(sample.tokens for sample in profile.cold()))
    axes.legend(frameon=False, loc="upper left", fontsize=10)
    label_prefill(axes, "Cold prefill (a simulated engine has no parts)")


def label_prefill(axes: Any, title: str) -> None:
    """Axes of seconds by prompt tokens, from zero."""
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title(title, **TITLE)
    axes.set_xlabel("prompt tokens", color=GREY)
    scale_time(axes)


def draw_model(axes: Any, profile: Profile, longest: int) -> None:
    """The cost model's line for cold prefills."""
    tokens = np.unique(np.geomspace(1, longest, 300).astype(int))
    axes.plot(tokens, [profile.model.prefill_time(int(n)) for n in tokens], color=LINE, lw=1.4, label="fitted model")


def draw_points(axes: Any, samples: Sequence[Sample], colour: str, label: str) -> None:
    """Measured points: full where the fit saw them, hollow where it did not."""
    for held_out, face, name in ((False, colour, label), (True, "white", "held out of the fit")):
        chosen = [sample for sample in samples if sample.point.held_out == held_out]
        at, seconds = [sample.tokens for sample in chosen], [sample.seconds for sample in chosen]
        style = {"markersize": 6, "markerfacecolor": face, "markeredgecolor": colour, "zorder": 5}
        axes.plot(at, seconds, "o", color=colour, label=name, **style)


def draw_cached(axes: Any, profile: Profile) -> None:
    """Prefill time by missed tokens, a line for each number of cached tokens before them; logarithmic."""
    befores = sorted({sample.point.before for sample in profile.of(PREFILL)})
    for before, colour in zip(befores, SERIES * len(befores), strict=False):
        samples = [sample for sample in profile.of(PREFILL) if sample.point.before == before]
        low, high = samples[0].tokens, samples[-1].tokens
        tokens = np.unique(np.geomspace(low, high, 120).astype(int))
        line = [profile.model.prefill_time(int(n), int(n) + before) for n in tokens]
        axes.plot(tokens, line, color=colour, lw=1.6, label=f"{before:,} tokens cached" if before else "nothing cached")
        for sample in samples:
            face = "white" if sample.point.held_out else colour
            axes.plot(sample.tokens, sample.seconds, "o", color=colour, markerfacecolor=face, markersize=5.5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_title("Prefill by missed tokens, after a cached context (hollow: held out)", **TITLE)
    axes.set_xlabel("missed tokens (log scale)", color=GREY)
    axes.legend(frameon=False, loc="upper left", fontsize=10)
    scale_time(axes)


def draw_series(axes: Any, profile: Profile, samples: Sequence[Sample], *, by_batch: bool) -> None:
    """Decode time, a line for each batch over the context, or a line for each context over the batch."""

    def split(sample: Sample) -> tuple[int, int]:
        return (sample.tokens, sample.context) if by_batch else (sample.context, sample.tokens)

    fitted = [sample for sample in samples if not sample.point.held_out]
    keys = sorted({split(sample)[0] for sample in fitted})
    longest = max((split(sample)[1] for sample in fitted), default=1)
    for key, colour in zip(keys, SERIES * len(keys), strict=False):
        label = f"batch of {key}" if by_batch else f"context of {key:,}"
        at = np.unique(np.linspace(1, longest, 80).astype(int)).tolist()
        shapes = [(key, n) if by_batch else (n, key) for n in at]
        axes.plot(at, [profile.model.iteration_time((), [c] * b) for b, c in shapes], color=colour, lw=1.6, label=label)
        mine = [sample for sample in samples if split(sample)[0] == key]
        for sample in mine:
            face = "white" if sample.point.held_out else colour
            axes.plot(split(sample)[1], sample.seconds, "o", color=colour, markerfacecolor=face, markersize=5.5)
    axes.set_xlim(left=0)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.25)
    axes.set_title("One decode iteration by context" if by_batch else "The same by batch", **TITLE)
    axes.set_xlabel("context tokens of each sequence" if by_batch else "sequences in the batch", color=GREY)
    axes.legend(frameon=False, loc="upper left", fontsize=10, ncols=2)
    scale_time(axes)


def scale_time(axes: Any) -> None:
    """Seconds on the y axis as people say them."""
    axes.yaxis.set_major_formatter(lambda value, _: duration(value) if value > 0 else "0")
    axes.yaxis.set_minor_formatter("")
    tidy(axes)


def attention_share(profile: Profile) -> str:
    """What attention and linear layers are of the longest prompt, for the title."""
    if not profile.parts:
        return ""
    last = profile.parts[-1]
    attention, linear = last.attention_seconds / last.total_seconds, last.linear_seconds / last.total_seconds
    return f": at {last.tokens:,} tokens {linear:.0%} linear layers, {attention:.0%} attention"
