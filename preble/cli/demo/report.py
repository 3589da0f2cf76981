"""The demo's results as numbers and text. Owns summaries, the table and the JSON document; draws and sends nothing.

Latency counts from a request's planned arrival, not from when the program got round to sending it, so that a sender
held up by a slow worker does not flatter the result.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..console import aligned, commit, machine, versions

RANDOM_WEIGHTS = (
    "The model's weights are random, so its answers are noise; prompts, token counts, KV reuse and timings are real."
)
SIMULATED = (
    "The engine is simulated: a cost model in place of a GPU, {faster:g} times faster than it. "
    "Scheduler, worker processes, transport, prompts and reuse are real; tokens mean nothing."
)


@dataclass(slots=True)
class Record:
    """One request of one phase; times in seconds from the phase's start, None if it failed before."""

    number: int
    document: int
    prompt_tokens: int
    arrival_seconds: float
    worker: str = ""
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_seconds: float | None = None
    done_seconds: float | None = None
    error: str | None = None

    @property
    def ttft_seconds(self) -> float:
        """Planned arrival to first token; NaN if there was none."""
        return math.nan if self.first_token_seconds is None else self.first_token_seconds - self.arrival_seconds

    @property
    def latency_seconds(self) -> float:
        """Planned arrival to last token; NaN if there was none."""
        return math.nan if self.done_seconds is None else self.done_seconds - self.arrival_seconds


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of some seconds; NaN without values."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(slots=True)
class WorkerShare:
    """What one worker did in one phase. `computed_tokens` are prompt tokens whose KV it did not have."""

    requests: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class Phase:
    """One policy's run over all prompts. `wall_seconds` is from the first planned arrival's zero to the last token."""

    policy: str
    records: list[Record]
    worker_ids: list[str]
    wall_seconds: float
    scheduler_stats: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> list[Record]:
        """The records of requests that got all their tokens."""
        return [record for record in self.records if record.error is None and record.done_seconds is not None]

    def ttft(self) -> Spread:
        return spread([record.ttft_seconds for record in self.finished])

    def latency(self) -> Spread:
        return spread([record.latency_seconds for record in self.finished])

    def shares(self) -> dict[str, WorkerShare]:
        """Work by worker, every worker present."""
        shares = {worker: WorkerShare() for worker in self.worker_ids}
        for record in self.finished:
            share = shares.setdefault(record.worker, WorkerShare())
            share.requests += 1
            share.reused_tokens += record.cached_tokens
            share.computed_tokens += record.prompt_tokens - record.cached_tokens
            share.output_tokens += record.output_tokens
        return shares

    @property
    def reused_fraction(self) -> float:
        """Reused prompt tokens over all prompt tokens of finished requests."""
        total = sum(record.prompt_tokens for record in self.finished)
        return sum(record.cached_tokens for record in self.finished) / total if total else 0.0


def spread(seconds: Sequence[float]) -> Spread:
    """Mean and percentiles (nearest rank)."""
    known = [value for value in seconds if not math.isnan(value)] or [math.nan]
    ranks = np.percentile(known, (50, 90, 99), method="inverted_cdf").tolist()
    return Spread(sum(known) / len(known), *ranks)


def speedup(phases: Sequence[Phase]) -> float:
    """Mean TTFT of the first phase over that of the last: how many times sooner the last policy's first tokens come."""
    first, last = phases[0].ttft().mean, phases[-1].ttft().mean
    return first / last if last else math.nan


def headline(phases: Sequence[Phase]) -> str:
    """One sentence that says what came out, whichever way it went."""
    first, last = phases[0], phases[-1]
    ratio = speedup(phases)
    if math.isnan(ratio):
        return f"{last.policy} against {first.policy}: no request finished"
    sooner = f"{ratio:.1f} times sooner" if ratio >= 1 else f"{1 / ratio:.1f} times later"
    return f"With {last.policy}, the first token comes {sooner} on average than with {first.policy}"


def table(phases: Sequence[Phase]) -> str:
    """The results as aligned text, one column per policy, one for the first over the last."""
    rows: list[tuple[str, list[str], str]] = []
    for title, measure in (("TTFT", Phase.ttft), ("latency", Phase.latency)):
        spreads = [measure(phase) for phase in phases]
        for statistic in ("mean", "p50", "p99"):
            values = [getattr(one, statistic) for one in spreads]
            rows.append((f"{title} {statistic}", [milliseconds(v) for v in values], times(values[0], values[-1])))
    reused = [sum(s.reused_tokens for s in phase.shares().values()) for phase in phases]
    shown = [f"{n:,} ({phase.reused_fraction:.0%})" for n, phase in zip(reused, phases, strict=True)]
    rows.append(("prompt tokens reused", shown, ""))
    computed = [sum(s.computed_tokens for s in phase.shares().values()) for phase in phases]
    rows.append(("prompt tokens computed", [f"{n:,}" for n in computed], times(computed[0], computed[-1])))
    for worker in phases[0].worker_ids:
        shares = [phase.shares()[worker] for phase in phases]
        rows.append((f"{worker}: requests", [str(share.requests) for share in shares], ""))
        rows.append((f"{worker}: tokens computed", [f"{share.computed_tokens:,}" for share in shares], ""))
    rows.append(("finished", [f"{len(phase.finished)} of {len(phase.records)}" for phase in phases], ""))
    rows.append(("wall time", [f"{phase.wall_seconds:.1f} s" for phase in phases], ""))
    cells = [[name, *values, last] for name, values, last in [("", [p.policy for p in phases], "better"), *rows]]
    header, *lines = aligned(cells, left=1, gap="   ")
    return "\n".join([header, "-" * max(map(len, (header, *lines))), *lines])


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, or "-" for NaN."""
    return "-" if math.isnan(seconds) else f"{seconds * 1000:,.0f} ms"


def times(first: float, last: float) -> str:
    """ "3.1x" where the first is 3.1 times the last."""
    return f"{first / last:.1f}x" if last > 0 and not math.isnan(first) else "-"


def summary(phase: Phase) -> dict[str, Any]:
    """One phase as plain data, records included."""
    return {
        "policy": phase.policy,
        "ttft_seconds": asdict(phase.ttft()),
        "latency_seconds": asdict(phase.latency()),
        "reused_fraction": phase.reused_fraction,
        "workers": {worker: asdict(share) for worker, share in phase.shares().items()},
        "wall_seconds": phase.wall_seconds,
        "finished": len(phase.finished),
        "failed": len(phase.records) - len(phase.finished),
        "scheduler": dict(phase.scheduler_stats),
        "requests": [asdict(record) for record in phase.records],
    }


def document(settings: Mapping[str, Any], phases: Sequence[Phase], note: str) -> dict[str, Any]:
    """Everything about a run: what was typed, on what, with which versions, and what came out."""
    return {
        "note": note,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "settings": dict(settings),
        "versions": versions(),
        "commit": commit(),
        "machine": machine(),
        "mean_ttft_speedup": speedup(phases),
        "phases": [summary(phase) for phase in phases],
    }
