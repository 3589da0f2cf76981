"""Requests that wait in front of the workers of a scheduler, for applications that send them themselves and have no
`Router`. Owns what waits and what was charged; who is next and who is refused is `FlowControl`'s.

    queue = AdmissionQueue(scheduler, on_turn=send, on_refused=refuse)

    queue.offer(token_ids, request_id="r1", tenant="a", deadline_seconds=2.0)   # may call send("r1", decision) at once
    queue.first_token("r1", cached_tokens=512)                                  # in place of the scheduler's own calls
    queue.finish("r1", output_tokens=64)                                        # each makes room, and may call send
    queue.pump()                                                                # and once a second, as time passes

What acts where. `GlobalScheduler.schedule(tenant=..., deadline_seconds=..., priority=...)` has no queue: it counts each
tenant's seconds, and refuses what would come too late, or batch work where others wait, for its caller to ask again.
Here it waits instead, by shares and slack. A `Router` has such a queue of its own.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .._placement.request_api import hashable
from ..errors import CapacityExceeded, DuplicateRequest, NoWorkers
from ..types import BATCH, BOTH, INTERACTIVE, PREFILL, Claim, Priority, claim_of
from .charges import Charges
from .flow_control import FlowConfig, FlowControl, HeldRequest, Turn
from .predicted_wait import PredictedWait

if TYPE_CHECKING:
    from .._placement.decision import Decision, Match
    from ..types import PairDecision


class Scheduling(Protocol):
    """What is asked of a `GlobalScheduler`."""

    @property
    def schedule(self) -> Callable[..., Decision]:
        """Choose a worker and book."""

    @property
    def schedule_pair(self) -> Callable[..., PairDecision]:
        """Choose a worker or a pair, and book."""

    def prefill_done(self, request_id: Hashable, *, cached_tokens: int | None = None) -> bool:
        """The prefill of a pair's request is done."""

    def first_token(self, request_id: Hashable, *, cached_tokens: int | None = None) -> bool:
        """The prefill is done."""

    def finish(
        self, request_id: Hashable, *, output_tokens: int | None = None, cached_tokens: int | None = None
    ) -> bool:
        """The request is done."""

    def cancel(self, request_id: Hashable) -> bool:
        """Give the booking back."""

    def match(self, token_ids: Any, *, namespace: Hashable = None) -> Match:
        """What each worker is estimated to cache."""

    def prefill_seconds(self, worker_id: str, prompt_tokens: int, cached_tokens: int) -> float:
        """What a prefill takes."""

    def booked_seconds(self, request_id: Hashable) -> float:
        """What a request is booked for."""

    def service_seconds(self, worker_id: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """What a request took."""

    def now(self) -> float:
        """Seconds."""

    @property
    def workers(self) -> Any:
        """Specs by id."""


def held_request(
    scheduler: Scheduling,
    worker: str,
    token_ids: Any,
    namespace: Hashable,
    claim: Claim,
    limit_seconds: float,
    now: float,
    owner: Any,
) -> HeldRequest:
    """A request that may wait, with its work as estimated now on a worker like `worker`: without its output. Batch work
    without a deadline waits for ever."""
    match = scheduler.match(token_ids, namespace=namespace)
    seconds, whole = (scheduler.prefill_seconds(worker, match.prompt_tokens, known) for known in (match.best_tokens, 0))
    is_batch, has_deadline = claim.priority == BATCH, claim.deadline_seconds is not None
    limit = math.inf if is_batch and not has_deadline else limit_seconds
    return HeldRequest(claim.tenant, seconds, limit, has_deadline, is_batch, now, owner, whole - seconds)


@dataclass(slots=True, eq=False)
class _Offered:
    """A request as it was offered. `failed`: with what it ended before `offer` returned."""

    request_id: Hashable
    token_ids: Any
    exclude: tuple[str, ...]
    asked: dict[str, Any]
    claim: Claim
    is_new: bool = True
    failed: Exception | None = None


class AdmissionQueue:
    """See the module. Not thread-safe: belongs to one thread or loop. `on_turn(request_id, decision)`: a worker was
    chosen and booked, send the request there; `on_refused(request_id, error)`: a request that waited is refused, or
    cannot be placed, with what its policy raised where it is that. Neither may raise; both may call this queue.

    At most `FlowConfig.waiting_max` requests wait; beyond, the newest of the tenant with the most of them is refused.
    Requests that are scheduled past this queue are not seen here, and what waits is underestimated by them.
    `workers_yield`: they are given each request's `priority`, and let others pass batch work as `LocalScheduler` does;
    then more of a flood may run there. `pairs`: requests are placed by `schedule_pair`, so `on_turn` is given its
    decisions; a request waits for who would prefill it.
    """

    def __init__(
        self,
        scheduler: Scheduling,
        on_turn: Callable[[Hashable, Any], object],
        on_refused: Callable[[Hashable, Any], object],
        *,
        config: FlowConfig | None = None,
        workers_yield: bool = False,
        pairs: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self._workers_yield = workers_yield
        self._pairs = pairs
        self._on_turn, self._on_refused = on_turn, on_refused
        self._waits = PredictedWait()
        self.control = FlowControl(config or FlowConfig(), self._waits, self)
        self._held: dict[Hashable, HeldRequest] = {}  # requests that wait
        self._yielding: set[Hashable] = set()  # requests that run as batch work
        self._charges = Charges()
        self._numbers = itertools.count(1)  # of requests without a name
        self._news: deque[tuple[Callable[[Hashable, Any], object], Hashable, Any]] = deque()  # calls to be made

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self.control)

    def offer(
        self,
        token_ids: Any,
        *,
        request_id: Hashable = None,
        tenant: str | None = None,
        deadline_seconds: float | None = None,
        priority: Priority | None = None,
        namespace: Hashable = None,
        exclude: Collection[str] = (),
        **asked: Any,
    ) -> Hashable:
        """Let a request wait for its turn, which may come at once; returns its id, made up when None. `token_ids` must
        not change before its turn. `asked`: further arguments of `GlobalScheduler.schedule`.

        Raises `Overloaded` where it would come too late, with the time that it would take, `QueueFull` at the bound,
        `NoWorkers`, `DuplicateRequest`, `InvalidInput`, and what `schedule` does where its turn comes at once; then
        nothing of it is kept. O(tenants that wait) where it has a deadline, else O(log of those that wait).
        """
        claim = claim_of(tenant, deadline_seconds, priority)
        if request_id is None:
            request_id = f"queued-{next(self._numbers)}"
        hashable("request_id", request_id)
        if request_id in self._held or request_id in self._charges.names():
            raise DuplicateRequest(f"request_id {request_id!r} is live")
        worker = next(iter(self.workers()), None)
        if worker is None:
            raise NoWorkers("no worker may take a request: the scheduler has none")
        now = self.scheduler.now()
        limit = math.inf if deadline_seconds is None else float(deadline_seconds)
        offered = _Offered(request_id, token_ids, tuple(exclude), {"namespace": namespace, **asked}, claim)
        held = held_request(self.scheduler, worker, token_ids, namespace, claim, limit, now, offered)
        self._held[request_id] = held
        try:
            self.control.offer(held, now)
        except BaseException:
            self._held.pop(request_id, None)
            self.control.withdraw(held)
            raise
        finally:
            offered.is_new = False
            self._report()
        if offered.failed is not None:
            raise offered.failed
        return request_id

    def priority(self, request_id: Hashable) -> Priority:
        """The class in which its worker should take a request that had its turn: "batch" also where its tenant wanted
        more than its share then. Changes nothing."""
        return BATCH if request_id in self._yielding else INTERACTIVE

    # --- a request's life ---------------------------------------------------------------------------------------------

    def prefill_done(self, request_id: Hashable, *, cached_tokens: int | None = None) -> bool:
        """As `GlobalScheduler.prefill_done`, which is a pair's first token; others may go then."""
        known = self.scheduler.prefill_done(request_id, cached_tokens=cached_tokens)
        self.started(request_id, cached_tokens)
        self.pump()
        return known

    def first_token(self, request_id: Hashable, *, cached_tokens: int | None = None) -> bool:
        """As `GlobalScheduler.first_token`; others may go then."""
        known = self.scheduler.first_token(request_id, cached_tokens=cached_tokens)
        self.started(request_id, cached_tokens)
        self.pump()
        return known

    def finish(
        self, request_id: Hashable, *, output_tokens: int | None = None, cached_tokens: int | None = None
    ) -> bool:
        """As `GlobalScheduler.finish`; its tenant's account is corrected by what it took, and others may go."""
        known = self.scheduler.finish(request_id, output_tokens=output_tokens, cached_tokens=cached_tokens)
        self.ended(request_id, output_tokens, cached_tokens)
        self.pump()
        return known

    def cancel(self, request_id: Hashable) -> bool:
        """Nobody wants it any more: one that waits does so no more, of one that runs the booking is given back. False
        if it is neither."""
        waited = request_id in self._held
        known = waited or self.scheduler.cancel(request_id)
        self.ended(request_id)
        self.pump()
        return known

    def pump(self) -> None:
        """Place what can go. The calls above do it; besides, call it about once a second: workers come and go, and a
        request waits for the worker with its prefix only for so long."""
        self.control.pump(self.scheduler.now())
        self._report()

    def started(self, request_id: Hashable, cached_tokens: int | None = None) -> None:
        """A first token came, and the scheduler knows it already."""
        self._waits.started(request_id, self.scheduler.now())
        self._charges.started(request_id, cached_tokens)

    def ended(self, request_id: Hashable, output_tokens: int | None = None, cached_tokens: int | None = None) -> None:
        """A request has ended, however, and the scheduler knows it already."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self.control.withdraw(held)
        self._yielding.discard(request_id)
        self._waits.left(request_id, self.scheduler.now())
        ended = self._charges.ended(request_id, self.scheduler.service_seconds, cached_tokens, output_tokens)
        if ended is not None:
            self.control.ended(*ended)

    def _report(self) -> None:
        """Call back, now that all is as it should be: what is called may call this queue."""
        while self._news:
            call, request_id, about = self._news.popleft()
            call(request_id, about)

    # --- asked by the flow control ------------------------------------------------------------------------------------

    def workers(self) -> Collection[str]:
        """See `FlowOwner`: those that compute prompts of what is placed here."""
        able = (BOTH, PREFILL) if self._pairs else (BOTH,)
        return [name for name, spec in self.scheduler.workers.items() if spec.role in able]

    def workers_yield(self) -> bool:
        """See `FlowOwner`."""
        return self._workers_yield

    def try_turn(self, held: HeldRequest, closed: frozenset[str], anywhere: bool) -> Turn | None:
        """See `FlowOwner`."""
        offered: _Offered = held.owner
        name, exclude = offered.request_id, (*offered.exclude, *closed) if anywhere else offered.exclude
        schedule: Callable[..., Any] = self.scheduler.schedule_pair if self._pairs else self.scheduler.schedule
        try:
            decision = schedule(offered.token_ids, request_id=name, exclude=exclude, **offered.asked)
        except Exception as error:  # noqa: BLE001  a policy may raise anything, and is not to stop the others
            self._end(held, error)
            return None
        worker = (decision.prefill_worker if self._pairs else None) or decision.worker
        if worker in closed:
            self.scheduler.cancel(name)
            return Turn(worker, 0.0, False)
        seconds = self.scheduler.booked_seconds(name)
        self._waits.placed(name, worker, held.tenant, seconds, self.scheduler.now())
        self._charges.placed(name, offered.claim, worker, decision.prompt_tokens, seconds)
        if held.yields:
            self._yielding.add(name)
        del self._held[name]
        self._news.append((self._on_turn, name, decision))
        return Turn(worker, seconds, True)

    def refuse(self, held: HeldRequest, error: CapacityExceeded) -> None:
        """See `FlowOwner`."""
        self._end(held, error)

    def _end(self, held: HeldRequest, error: Exception) -> None:
        """A request ends without a worker: its caller still waits for `offer` to return, or learns of it so."""
        offered: _Offered = held.owner
        del self._held[offered.request_id]
        if offered.is_new:
            offered.failed = error
        else:
            self._news.append((self._on_refused, offered.request_id, error))

    def check(self) -> None:
        """Assert that what waits and what was charged agree. O(requests)."""
        self.control.check()
        self._waits.check()
        waiting = {held.owner.request_id for held in self.control.held()}
        assert waiting == self._held.keys(), "others wait than are held"
        assert not self._held.keys() & set(self._charges.names()), "a request waits and runs"
        assert self._yielding <= set(self._charges.names()), "a request yields and does not run"
