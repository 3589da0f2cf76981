"""Prefills that plans ask for before their traffic moves (`SchedulerConfig.warm_up_seconds`). Owns which of them run.

The router sends each as a request for one token to the very worker that the plan names, and reports to the scheduler
when it is done. It is a favour, never a duty: one that cannot be sent, is refused, or whose worker goes away is
counted and not repeated, and the plan goes on without it when its time is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidInput, QueueFull, TransportError, UnknownWorker
from ..transport import wire
from ..types import SamplingParams
from .fleet import Fleet

if TYPE_CHECKING:
    from ..scheduler import GlobalScheduler

WARM_UPS_MAX = 64  # at a time; one more is not sent

_ONE_TOKEN = SamplingParams(max_new_tokens=1)


@dataclass(slots=True)
class WarmUpCounters:
    """What became of warm-ups in this router."""

    warm_ups: int = 0
    warm_ups_done: int = 0
    warm_ups_failed: int = 0


class WarmUps:
    """The warm-ups of one router. Belongs to its asyncio loop."""

    def __init__(self, scheduler: GlobalScheduler) -> None:
        self.counters = WarmUpCounters()
        self.scheduler = scheduler
        self._running: dict[str, tuple[int, str]] = {}  # wire id -> (plan, worker)
        self._sent = 0

    def send(self, fleet: Fleet) -> None:
        """Send what plans have asked for since the last call."""
        for asked in self.scheduler.warm_ups():
            self.counters.warm_ups += 1
            self._sent += 1
            wire_id = f"warm-up/{self._sent}"
            try:
                if len(self._running) >= WARM_UPS_MAX:
                    raise QueueFull(f"{WARM_UPS_MAX} warm-ups are running")
                token_ids = np.asarray(asked.token_ids, dtype=np.int32)
                fleet.send(asked.worker, wire.GenerationRequest(wire_id, token_ids, _ONE_TOKEN, asked.namespace))
            except (QueueFull, TransportError, UnknownWorker, InvalidInput):
                self.counters.warm_ups_failed += 1
            else:
                self._running[wire_id] = (asked.plan, asked.worker)

    def take(self, message: wire.OutputChunk | wire.Rejected, worker_id: str) -> bool:
        """Whether the message is of a warm-up; if it is the end of one, the plan's traffic moves."""
        plan, worker = self._running.get(message.request_id, (0, ""))
        if worker != worker_id:
            return False
        if isinstance(message, wire.Rejected) or message.finish_reason in ("error", "invalid", "abort"):
            del self._running[message.request_id]
            self.counters.warm_ups_failed += 1
        elif message.finish_reason is not None:
            del self._running[message.request_id]
            self.counters.warm_ups_done += 1
            self.scheduler.warmed(plan)
        return True

    def lose(self, worker_id: str) -> None:
        """The worker has gone, and its warm-ups with it."""
        for wire_id in [wire_id for wire_id, (_, worker) in self._running.items() if worker == worker_id]:
            del self._running[wire_id]
            self.counters.warm_ups_failed += 1
