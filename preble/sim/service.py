"""What agents, tenants and whole sets of requests got of a run: turns an hour, service in seconds, fairness, deadlines,
makespans. Owns these measures; runs nothing.

Service is what a request cost its worker alone: prefill of the prompt tokens that were not cached, and its decoding,
by the cost model. It is booked when the request ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._cost import CostModel
from ..errors import InvalidInput
from ..types import check_int
from ..workloads.types import PromptRequest
from .results import FINISHED, Floats, Result


def ended_between(result: Result, begin_seconds: float, end_seconds: float) -> npt.NDArray[np.bool_]:
    """The requests that finished then, shape [requests]."""
    if not 0.0 <= begin_seconds < end_seconds:
        raise InvalidInput(f"begin_seconds must be before end_seconds, got {begin_seconds!r} and {end_seconds!r}")
    done = result.outcome == FINISHED
    within: npt.NDArray[np.bool_] = done & (result.finish_seconds > begin_seconds)
    return within & (result.finish_seconds <= end_seconds)


def turns_per_hour(result: Result, begin_seconds: float, end_seconds: float) -> float:
    """Requests that finished in that time, as so many an hour. Raises `InvalidInput`."""
    count = int(ended_between(result, begin_seconds, end_seconds).sum())
    return count * 3600.0 / (end_seconds - begin_seconds)


def service_seconds(result: Result, cost_model: CostModel, batch: int = 1) -> Floats:
    """What each request cost, shape [requests]; 0 where it did not finish. `batch`: with how many others it decoded,
    on average, itself included: it pays its share of their iterations. Raises `InvalidInput`."""
    check_int("batch", batch, 1, 1_000_000, InvalidInput)
    seconds = np.zeros(len(result.request_ids))
    for row in np.flatnonzero(result.outcome == FINISHED).tolist():
        prompt, output = int(result.prompt_tokens[row]), int(result.output_tokens[row])
        missed = prompt - max(0, int(result.cached_tokens[row]))
        decoded = cost_model.decode_time(output, prompt, batch) / batch
        seconds[row] = cost_model.prefill_time(missed, prompt) + decoded
    return seconds


def tenants_of(requests: Sequence[PromptRequest]) -> dict[str, list[int]]:
    """Tenant -> its rows."""
    rows: dict[str, list[int]] = {}
    for row, request in enumerate(requests):
        rows.setdefault(request.tenant, []).append(row)
    return rows


def entitlements(
    demand: Mapping[str, float], total: float, weights: Mapping[str, float] | None = None
) -> dict[str, float]:
    """How `total` is fairly divided (max-min): nobody gets more than its demand, and what one leaves goes to the rest
    by weight, 1 where none is named. Raises `InvalidInput` for a demand or total below 0, a weight of 0 or less."""
    weigh = {name: (weights or {}).get(name, 1.0) for name in demand}
    if total < 0.0 or any(asked < 0.0 for asked in demand.values()):
        raise InvalidInput("demand and total must be at least 0")
    if any(not weight > 0.0 for weight in weigh.values()):
        raise InvalidInput("weights must be positive")
    shares: dict[str, float] = {}
    open_to, left = dict(demand), total
    for name in sorted(demand, key=lambda name: demand[name] / weigh[name]):  # who is sated first, first
        own = left * weigh[name] / sum(weigh[other] for other in open_to)
        shares[name] = min(demand[name], own)
        left -= shares[name]
        del open_to[name]
    return shares


def jain_index(values: Sequence[float] | Floats) -> float:
    """Jain's index of fairness: 1 where all are equal, 1 / n where one has everything; NaN for nothing."""
    given = np.asarray(values, dtype=np.float64)
    squares = float((given * given).sum()) * len(given)
    return float(given.sum()) ** 2 / squares if squares else float("nan")


def within_deadlines(result: Result, requests: Sequence[PromptRequest]) -> float:
    """The share of the requests with a deadline whose first token came in time and whose answer came at all. Raises
    `InvalidInput` where none has a deadline."""
    rows = [row for row, request in enumerate(requests) if request.deadline_seconds is not None]
    if not rows:
        raise InvalidInput("requests: none has a deadline")
    limits = np.array([requests[row].deadline_seconds for row in rows], np.float64)
    met = (result.outcome[rows] == FINISHED) & (result.ttft_seconds[rows] <= limits)
    return float(np.mean(met))


def group_makespans(result: Result, requests: Sequence[PromptRequest]) -> dict[str, float]:
    """Group -> seconds from the arrival of its first request to the end of its last; NaN where one did not finish."""
    rows: dict[str, list[int]] = {}
    for row, request in enumerate(requests):
        rows.setdefault(request.group, []).append(row)
    found: dict[str, float] = {}
    for group, own in rows.items():
        ended: Any = result.finish_seconds[own]
        found[group] = float(ended.max() - result.arrival_seconds[own].min())
    return found


def makespan(result: Result) -> float:
    """Seconds from the first arrival to the last end, of all; NaN where a request did not finish."""
    return float(result.finish_seconds.max() - result.arrival_seconds.min())
