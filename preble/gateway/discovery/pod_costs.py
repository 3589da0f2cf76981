"""What the end of a pod would cost, written on it, so that a scale-down of its ReplicaSet ends the cheapest first. Owns
the annotation's value, and how seldom it is written; the estimate is `scheduling/autoscaling.py`'s.

Kubernetes ends pods of a lower `controller.kubernetes.io/pod-deletion-cost` first, and counts one without as 0: so
every pod is written on. The cost is the milliseconds in which others compute again what only its workers cache, to the
nearest power of two. The estimate is made for the least loaded workers; a pod with another one costs more than any of
them. A cost that stays within its power of two is not written again; each pod's at most once in POD_SECONDS, the pods'
at most WRITES_MAX in LOOK_SECONDS: what is written goes to every watcher of pods in the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from ...clock import Clock
from ...errors import TransportError
from .known_servers import FoundServer, PodName

logger = logging.getLogger("preble.gateway")

LOOK_SECONDS = 15.0
FIRST_LOOK_SECONDS = 1.0  # as long as there are no pods
WRITES_MAX = 10
POD_SECONDS = 60.0
COST_MAX = 1 << 20  # 17 minutes
UNKNOWN_COST = 2 * COST_MAX
UNWRITTEN = -1  # no cost of ours


@dataclass(frozen=True, slots=True)
class WrittenCost:
    """A pod's cost as it was last written, and when; minus infinity where it was there before."""

    cost: int
    at: float


def cost_of(workers: Sequence[str], drain_seconds: Mapping[str, float]) -> int:
    """What the end of a pod with these workers costs, given what the drain of each does that was looked at."""
    if not workers or any(name not in drain_seconds for name in workers):
        return UNKNOWN_COST
    milliseconds = 1e3 * sum(drain_seconds[name] for name in workers)
    return 0 if milliseconds < 1.0 else min(1 << round(math.log2(milliseconds)), COST_MAX)


def costs_to_write(
    pods: Mapping[PodName, Sequence[str]],
    drain_seconds: Mapping[str, float],
    written: Mapping[PodName, WrittenCost],
    now: float,
) -> list[tuple[PodName, int]]:
    """What to write now, the furthest from what is written first, at most WRITES_MAX. `pods`: ids of each one's
    workers. O(pods log pods)."""
    due: list[tuple[int, PodName, int]] = []
    for pod, workers in pods.items():
        cost, before = cost_of(workers, drain_seconds), written.get(pod)
        is_other = before is None or before.cost != cost
        if is_other and (before is None or now - before.at >= POD_SECONDS):
            due.append((-abs(cost - (0 if before is None else before.cost)), pod, cost))
    return [(pod, cost) for _, pod, cost in sorted(due)[:WRITES_MAX]]


class PodCosts:
    """Writes them. Belongs to one asyncio loop. `write` may raise `TransportError`; then it is tried again later."""

    def __init__(
        self,
        pods: Callable[[], Mapping[PodName, tuple[FoundServer, Sequence[str]]]],
        drain_seconds: Callable[[], Mapping[str, float]],
        write: Callable[[PodName, int], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self.writes = self.failures = 0
        self._pods = pods
        self._drain_seconds = drain_seconds
        self._write = write
        self._clock = clock
        self._written: dict[PodName, WrittenCost] = {}

    async def run(self) -> None:
        """Look, write what is due, and wait, until cancelled."""
        while True:
            try:
                await self.look()
            except Exception:
                logger.exception("discovery: the costs of pods were not written")
            await asyncio.sleep(LOOK_SECONDS if self._written else FIRST_LOOK_SECONDS)

    async def look(self) -> None:
        """Write what is due now. What another gateway has written meanwhile counts as written."""
        pods, now = self._pods(), self._clock()
        self._written = {pod: self._seen(pod, found) for pod, (found, _) in pods.items() if self._is_known(pod, found)}
        workers = {pod: names for pod, (_, names) in pods.items()}
        for pod, cost in costs_to_write(workers, self._drain_seconds(), self._written, now):
            try:
                await self._write(pod, cost)
                self.writes += 1
            except TransportError as error:
                self.failures += 1
                logger.warning("discovery: the cost of pod %s was not written: %s", pod.name, error)
                before = self._written.get(pod)
                cost = UNWRITTEN if before is None else before.cost  # to be tried again, not at once
            self._written[pod] = WrittenCost(cost, now)

    def _is_known(self, pod: PodName, found: FoundServer) -> bool:
        return pod in self._written or found.deletion_cost is not None

    def _seen(self, pod: PodName, found: FoundServer) -> WrittenCost:
        before = self._written.get(pod)
        if before is None:
            return WrittenCost(found.deletion_cost or 0, -math.inf)
        return before if found.deletion_cost is None else WrittenCost(found.deletion_cost, before.at)
