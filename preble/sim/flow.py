"""The flow control of each router of a simulation (`router/flow_control`). Owns what its requests wait for; places them
by the simulation's own way, and learns of first tokens and ends when the router does."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..clock import ManualClock
from ..errors import CapacityExceeded
from ..router.flow_control import FlowConfig, FlowControl, HeldRequest, Turn
from ..router.predicted_wait import PredictedWait
from ..scheduler import GlobalScheduler
from ..types import BATCH
from .flight import Flight

if TYPE_CHECKING:
    from .._placement.decision import Decision

Book = Callable[["Flight", Collection[str]], "Decision | None"]
Send = Callable[["Flight", "Decision"], None]


@dataclass(slots=True)
class _Charged:
    """A request that was placed, and the seconds that its tenant was charged."""

    held: HeldRequest
    worker: str
    seconds: float
    cached_tokens: int | None = None


class SimFlow:
    """In front of one scheduler. `book` asks it for a worker, `send` sends a booked request, `refuse` ends one."""

    def __init__(
        self,
        config: FlowConfig,
        scheduler: Callable[[], GlobalScheduler],
        clock: ManualClock,
        book: Book,
        send: Send,
        refuse: Callable[[Flight], None],
    ) -> None:
        self._scheduler_now = scheduler
        self._clock = clock
        self._book, self._send, self._refuse = book, send, refuse
        self._waits = PredictedWait()
        self.control = FlowControl(config, self._waits, self)
        self._held: dict[str, HeldRequest] = {}  # by request, also of those that wait no more
        self._charged: dict[str, _Charged] = {}

    @property
    def _scheduler(self) -> GlobalScheduler:
        return self._scheduler_now()

    def offer(self, flight: Flight) -> None:
        """A request has come."""
        request, now = flight.request, self._clock()
        best = self._scheduler.match(request.token_ids).best_tokens
        some = next(iter(self.workers()))
        seconds = self._scheduler.prefill_seconds(some, request.prompt_tokens, best)
        deadline = request.deadline_seconds
        held = HeldRequest(
            request.tenant,
            seconds,
            float("inf") if deadline is None else deadline,
            deadline is not None,
            request.priority == BATCH,
            now,
            flight,
            patience_seconds=self._scheduler.prefill_seconds(some, request.prompt_tokens, 0) - seconds,
        )
        self._held[request.request_id] = held
        try:
            self.control.offer(held, now)
        except CapacityExceeded:
            self._refuse(flight)

    def started(self, request_id: str, cached_tokens: int | None) -> None:
        """A first token was reported."""
        self._waits.started(request_id, self._clock())
        charged = self._charged.get(request_id)
        if charged is not None:
            charged.cached_tokens = cached_tokens

    def ended(self, request_id: str, output_tokens: int | None = None) -> None:
        """The end of a request was reported, or it was lost, or given up."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self.control.withdraw(held)
        self._waits.left(request_id, self._clock())
        charged = self._charged.pop(request_id, None)
        if charged is None or output_tokens is None or charged.cached_tokens is None:
            return
        flight: Flight = charged.held.owner
        real = self._scheduler.service_seconds(
            charged.worker, flight.request.prompt_tokens, charged.cached_tokens, output_tokens
        )
        self.control.correct(charged.held.tenant, charged.held.is_batch, real - charged.seconds)

    def pump(self) -> None:
        self.control.pump(self._clock())

    # --- asked by the flow control ------------------------------------------------------------------------------------

    def workers(self) -> Collection[str]:
        return self._scheduler.workers.keys()

    def try_turn(self, held: HeldRequest, closed: frozenset[str], anywhere: bool) -> Turn | None:
        flight: Flight = held.owner
        decision = self._book(flight, closed if anywhere else ())
        if decision is None:
            return None
        if decision.worker in closed:
            self._scheduler.cancel(decision.request_id)
            return Turn(decision.worker, 0.0, False)
        seconds = self._scheduler.booked_seconds(decision.request_id)
        name = flight.request.request_id
        self._waits.placed(name, decision.worker, held.tenant, seconds, self._clock())
        self._charged[name] = _Charged(held, decision.worker, seconds)
        self._send(flight, decision)
        return Turn(decision.worker, seconds, True)

    def refuse(self, held: HeldRequest, error: CapacityExceeded) -> None:
        self._refuse(held.owner)
