"""Answers that one server keeps (/v1/responses): which one it is, and which model's they are. Owns the map, and its
bound: the oldest go first."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

ANSWERS_MAX = 65_536


class KeptAnswer(NamedTuple):
    """The worker that keeps an answer, and the model that it was asked of."""

    worker: str
    model: str


class PinnedAnswers:
    """Where answers are kept, by their ids, the newest `answers_max`. Belongs to one asyncio loop."""

    def __init__(self, answers_max: int = ANSWERS_MAX) -> None:
        self._answers_max = answers_max
        self._kept: OrderedDict[str, KeptAnswer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, answer_id: str, kept: KeptAnswer) -> None:
        """A worker has made an answer."""
        self._kept[answer_id] = kept
        self._kept.move_to_end(answer_id)
        while len(self._kept) > self._answers_max:
            self._kept.popitem(last=False)

    def get(self, answer_id: str | None) -> KeptAnswer | None:
        """Where it is kept; None where that is not known (any more)."""
        return None if answer_id is None else self._kept.get(answer_id)
