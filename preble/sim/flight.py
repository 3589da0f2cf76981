"""A request of a simulation on its way. Owns what it has got so far; its life is the simulation's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..workloads.types import Int32Array, PromptRequest
from .worker import SimWorker


@dataclass(slots=True, eq=False)
class Flight:
    """A request on its way: its row, its prompt, what it asked for, and how much of its answer has come: `emitted` is
    right after the first token, at the end, and where its worker dies; `emitted_before` came from workers before this
    one. `handed_over`: another worker has prefilled it for the one that decodes it. `placement`: another number
    whenever it is placed anew, or over."""

    request: PromptRequest
    row: int
    prompt_ids: Int32Array
    planned_ids: Int32Array
    router: int
    emitted: int = 0
    emitted_before: int = 0
    worker: SimWorker | None = None
    handed_over: bool = False
    placement: int = 0

    def tokens_so_far(self) -> Int32Array:
        """The prompt and what is emitted."""
        if not self.emitted:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, self.planned_ids[: self.emitted]])
