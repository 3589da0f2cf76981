"""Answers that one server keeps (/v1/responses): which one it is. Owns the map, and its bound: the oldest go first."""

from __future__ import annotations

from collections import OrderedDict

ANSWERS_MAX = 65_536


class PinnedAnswers:
    """Worker ids by the id of an answer, the newest `answers_max`. Belongs to one asyncio loop."""

    def __init__(self, answers_max: int = ANSWERS_MAX) -> None:
        self._answers_max = answers_max
        self._workers: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def put(self, answer_id: str, worker_id: str) -> None:
        """A worker has made an answer."""
        self._workers[answer_id] = worker_id
        self._workers.move_to_end(answer_id)
        while len(self._workers) > self._answers_max:
            self._workers.popitem(last=False)

    def get(self, answer_id: str | None) -> str | None:
        """The worker that made it; None where that is not known (any more)."""
        return None if answer_id is None else self._workers.get(answer_id)
