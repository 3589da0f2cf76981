"""What a simulation found: one row a request, the workers' busy time, and summaries. Owns measuring, not running.

Times are seconds from the start of the workload. A latency runs from a request's arrival to its last token, TTFT to
its first. A request that did not finish has no latency (NaN) and counts against goodput.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidInput

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


# How a request ended. Cut off: it waited for one that was refused, and was never sent.
UNFINISHED, FINISHED, REFUSED, CUT_OFF = range(4)
OUTCOMES = ("unfinished", "finished", "refused", "cut_off")


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run; seconds, fractions, tokens. `tpot` is the time between output tokens, `normalised` the
    latency per output token, `load_spread` the busiest worker's busy time over the mean; busy times are of the whole
    run. Latencies, TTFT and hits are those of finished requests."""

    requests: int
    finished: int
    refused: int
    cut_off: int
    unfinished: int
    mean_latency_seconds: float
    p50_latency_seconds: float
    p90_latency_seconds: float
    p99_latency_seconds: float
    mean_ttft_seconds: float
    p50_ttft_seconds: float
    p99_ttft_seconds: float
    max_ttft_seconds: float
    mean_tpot_seconds: float
    p50_tpot_seconds: float
    p99_tpot_seconds: float
    mean_normalised_seconds: float
    p50_normalised_seconds: float
    p90_normalised_seconds: float
    p99_normalised_seconds: float
    hit_fraction: float
    load_spread: float
    busy_fraction: float
    makespan_seconds: float

    def as_dict(self) -> dict[str, float]:
        """Field names and values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """One run. Every array has a row a request, in the workload's order; `worker` is an index into `workers`, -1 where
    the request was never placed, else where it was placed last; `outcome` an index into `OUTCOMES`. `placed_tokens` is
    what the scheduler estimated cached when it placed the request first, `cached_tokens` what was at its first
    admission (-1: never admitted); `output_tokens` is what it got, which is what it asked for where it finished, unless
    the engine had no more room. `arrival_seconds` is NaN for a request that was never sent; of one cut off, it is when
    that happened. `second_token_seconds`: of a pair, when the worker that decodes brought its first; NaN elsewhere.
    """

    request_ids: tuple[str, ...]
    workers: tuple[str, ...]
    arrival_seconds: Floats
    first_token_seconds: Floats
    second_token_seconds: Floats
    finish_seconds: Floats
    outcome: npt.NDArray[np.int8]
    worker: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    placed_tokens: Ints
    cached_tokens: Ints
    busy_seconds: Floats
    counts: Mapping[str, int]
    scheduler_stats: Mapping[str, Any]

    @property
    def latency_seconds(self) -> Floats:
        """Arrival to last token; NaN where unfinished."""
        return self.finish_seconds - self.arrival_seconds

    @property
    def ttft_seconds(self) -> Floats:
        """Arrival to first token; NaN where there was none."""
        return self.first_token_seconds - self.arrival_seconds

    @property
    def trace_hash(self) -> str:
        """A digest of where and when (to the nanosecond) every request ran: equal for equal runs, on every machine."""
        digest = hashlib.sha256("\n".join((*self.workers, *self.request_ids)).encode())
        for seconds in (self.arrival_seconds, self.first_token_seconds, self.finish_seconds, self.busy_seconds):
            digest.update(np.where(np.isnan(seconds), -1, np.round(seconds * 1e9)).astype("<i8").tobytes())
        tokens = (self.prompt_tokens, self.output_tokens, self.placed_tokens, self.cached_tokens)
        for numbers in (self.outcome, self.worker, *tokens):
            digest.update(numbers.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def goodput(self, ttft_seconds: float, warmup_seconds: float = 0.0) -> float:
        """Share of all requests whose first token came within `ttft_seconds`; the unfinished and refused count as
        missed."""
        met = (self.outcome == FINISHED) & (self.ttft_seconds <= ttft_seconds)
        return float(np.mean(met[self._counted(warmup_seconds)]))

    def _counted(self, warmup_seconds: float) -> npt.NDArray[np.bool_]:
        """The requests to measure: those sent from then on. Raises `InvalidInput` if there are none."""
        counted = self.arrival_seconds >= warmup_seconds
        if not counted.any():
            raise InvalidInput(f"warmup_seconds: no request arrived after {warmup_seconds!r}")
        return counted

    def summary(self, warmup_seconds: float = 0.0) -> Summary:
        """Figures over the requests that arrived from `warmup_seconds` on. Raises `InvalidInput` if none did."""
        counted = self._counted(warmup_seconds)
        done = counted & (self.outcome == FINISHED)
        latency, ttft, output = self.latency_seconds[done], self.ttft_seconds[done], self.output_tokens[done]
        decoded = output > 1
        tpot = (latency - ttft)[decoded] / (output[decoded] - 1)
        makespan = float(np.nanmax(self.finish_seconds)) if done.any() else 0.0
        outcomes = np.bincount(self.outcome[counted], minlength=len(OUTCOMES)).tolist()
        return Summary(
            requests=int(counted.sum()),
            finished=outcomes[FINISHED],
            refused=outcomes[REFUSED],
            cut_off=outcomes[CUT_OFF],
            unfinished=outcomes[UNFINISHED],
            **_spread("latency", latency, (50, 90, 99)),
            **_spread("ttft", ttft, (50, 99)),
            max_ttft_seconds=float(ttft.max()) if len(ttft) else float("nan"),
            **_spread("tpot", tpot, (50, 99)),
            **_spread("normalised", latency / output, (50, 90, 99)),
            hit_fraction=float(self.cached_tokens[done].sum() / max(1, self.prompt_tokens[done].sum())),
            load_spread=float(self.busy_seconds.max() / max(self.busy_seconds.mean(), 1e-12)),
            busy_fraction=float(self.busy_seconds.mean() / makespan) if makespan else 0.0,
            makespan_seconds=makespan,
        )


def _spread(name: str, values: Floats, percentiles: tuple[int, ...]) -> dict[str, float]:
    """Mean and percentiles, NaN where there is nothing to measure."""
    if not len(values):
        values = np.full(1, np.nan)
    found = {f"p{percentile}_{name}_seconds": float(np.percentile(values, percentile)) for percentile in percentiles}
    return {f"mean_{name}_seconds": float(np.mean(values)), **found}
