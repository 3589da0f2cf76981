"""Requests on the workers that they really ran on: engines without a scheduler in front. Owns such a run; what it says
of an engine model is `engine_fit.py`'s.

Each request comes to its worker when it was really handed over. So what a run finds, beside what was measured, is what
the model of the engines has wrong, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..clock import ManualClock
from ..local import StepOutput
from ..recording import RecordedRequest
from ..types import CacheEvent
from ..workloads import PromptRequest
from .config import SimConfig
from .timeline import Timeline
from .worker import SimWorker

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedTimes:
    """What a run found, an entry a request: seconds on the recording's clock, NaN where there was none; prompt tokens
    that were cached, -1 where it was never admitted."""

    first_token_seconds: Floats
    end_seconds: Floats
    cached_tokens: npt.NDArray[np.int64]


class PlacedRun:
    """One run; `run` is its face. `requests` and `prompts` belong together, row by row; all have a worker of `config`
    and were sent."""

    def __init__(
        self, requests: Sequence[RecordedRequest], prompts: Sequence[PromptRequest], config: SimConfig
    ) -> None:
        self._requests, self._prompts, self._config = requests, prompts, config
        self._timeline = Timeline(ManualClock())
        specs = enumerate(config.specs())
        self._workers = {
            spec.id: SimWorker(spec, number, config, self._timeline, self._deliver) for number, spec in specs
        }
        self._rows: dict[str, int] = {}
        count = len(requests)
        self._first, self._end = (np.full(count, np.nan) for _ in range(2))
        self._cached = np.full(count, -1, np.int64)

    def run(self) -> PlacedTimes:
        """Everything, in order."""
        for row, (one, prompt) in enumerate(zip(self._requests, self._prompts, strict=True)):
            sent = one.arrival_seconds if one.sent_seconds is None else one.sent_seconds
            self._rows[prompt.request_id] = row
            self._timeline.at(sent + self._config.network_seconds, self._submit, row)
        self._timeline.run(self._config.until_seconds)
        return PlacedTimes(self._first, self._end, self._cached)

    def _submit(self, row: int) -> None:
        prompt = self._prompts[row]
        planned = prompt.output_ids
        if planned is None:
            planned = np.arange(prompt.output_tokens, dtype=np.int32)
        self._workers[self._requests[row].worker].submit(prompt.request_id, prompt.token_ids, planned)

    def _deliver(self, worker: SimWorker, outputs: Sequence[StepOutput], events: Sequence[CacheEvent]) -> None:
        now = self._timeline.now
        for output in outputs:
            if output.index == 0 or output.finish_reason is not None:
                row = self._rows[output.request_id]
                if output.index == 0:
                    self._first[row] = now
                    self._cached[row] = output.cached_tokens
                if output.finish_reason is not None:
                    self._end[row] = now
