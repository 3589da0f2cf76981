"""The turns of a router's requests that name a tenant, a deadline or a class: what `FlowControl` asks of a router. Owns
the futures on which such requests wait; who is next is the flow control's, what tenants are charged is `Charges`'.

Requests that name nothing of it never come here. Belongs to the router's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, Protocol

from ..clock import Clock
from ..errors import CapacityExceeded, PrebleError
from ..scheduler import GlobalScheduler
from ..scheduling.admission import held_request
from ..scheduling.charges import Charges
from ..scheduling.flow_control import FlowConfig, FlowControl, HeldRequest, Turn
from ..scheduling.predicted_wait import PredictedWait
from ..types import Claim
from .fleet import Fleet
from .request import PlacedRequest


class TurnOwner(Protocol):
    """What is asked of a router."""

    scheduler: GlobalScheduler

    @property
    def fleet(self) -> Fleet:
        """Its workers."""

    def usable_workers(self) -> Collection[str]:
        """Those that take requests."""

    def try_worker(self, live: PlacedRequest, closed: frozenset[str], anywhere: bool) -> tuple[str, bool] | None:
        """Place a request: the worker that was chosen, and whether it went there; not if it is one of `closed`, which
        `anywhere` leaves out beforehand. None if there is no place. Raises what ends the request."""


class Turns:
    """See the module."""

    def __init__(self, config: FlowConfig, waits: PredictedWait, owner: TurnOwner, clock: Clock) -> None:
        self.control = FlowControl(config, waits, self)
        self._owner = owner
        self._clock = clock
        self._held: dict[PlacedRequest, HeldRequest] = {}  # requests that wait
        self._charges = Charges()  # of requests that were placed and have not ended

    async def take(self, live: PlacedRequest, claim: Claim, limit_seconds: float) -> bool:
        """Wait for a request's turn; False if it is to be placed without one. Raises `Overloaded`, `QueueFull`, and
        what ends it while it is placed."""
        if not self.workers():
            return False
        scheduler, some, now = self._owner.scheduler, next(iter(self.workers())), self._clock()
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        held = held_request(scheduler, some, live.prompt, live.namespace, claim, limit_seconds, now, (live, turn))
        self._held[live] = held
        try:
            self.control.offer(held, now)
            return await turn
        finally:
            del self._held[live]
            self.control.withdraw(held)

    def give_up(self, live: PlacedRequest, error: PrebleError) -> None:
        """A request that may wait here ends with an error."""
        held = self._held.get(live)
        if held is not None:
            self.control.withdraw(held)
            self._end(held, error)

    def ended(self, live: PlacedRequest, cached_tokens: int | None, output_tokens: int | None) -> None:
        """A request's attempt is over; with `output_tokens` it has finished."""
        ended = self._charges.ended(live, self._owner.scheduler.service_seconds, cached_tokens, output_tokens)
        if ended is not None:
            self.control.ended(*ended)

    def pump(self) -> None:
        """A worker may have room again, or there may be none any more."""
        if not len(self.control):
            return
        if self.workers():
            self.control.pump(self._clock())
            return
        for held in list(self.control.held()):
            self.control.withdraw(held)
            _settle(held, False)

    # --- asked by the flow control ------------------------------------------------------------------------------------

    def workers(self) -> Collection[str]:
        """Those that take requests."""
        return self._owner.usable_workers()

    def workers_yield(self) -> bool:
        """See `FlowOwner`."""
        return self._owner.fleet.workers_yield()

    def try_turn(self, held: HeldRequest, closed: frozenset[str], anywhere: bool) -> Turn | None:
        """See `FlowOwner`."""
        live: PlacedRequest = held.owner[0]
        live.yields = held.yields
        try:
            found = self._owner.try_worker(live, closed, anywhere)
        except PrebleError as error:
            self._end(held, error)
            return None
        if found is None or not found[1]:
            if found is None:
                _settle(held, False)
                return None
            return Turn(found[0], 0.0, False)
        seconds = self._owner.scheduler.booked_seconds(live.request_id)
        assert live.claim is not None, "only requests with claims have turns"
        self._charges.placed(live, live.claim, found[0], len(live.prompt), seconds)
        _settle(held, True)
        return Turn(found[0], seconds, True)

    def refuse(self, held: HeldRequest, error: CapacityExceeded) -> None:
        """See `FlowOwner`."""
        self._end(held, error)

    @staticmethod
    def _end(held: HeldRequest, error: PrebleError) -> None:
        if not held.owner[1].done():
            held.owner[1].set_exception(error)


def _settle(held: HeldRequest, placed: bool) -> None:
    turn: Any = held.owner[1]
    if not turn.done():
        turn.set_result(placed)
