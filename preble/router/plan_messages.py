"""Plans between routers before the same workers, so that copies and moves of prefixes are made once for all. Owns who
makes them, when they are sent, and their bytes; what a plan is, is the scheduler's (`rebalance_planner`).

The router with the lowest id among those that report makes plans; every router works that out by itself. For a
moment two may do so, or none: the plans of the lowest one replace the others' with its next message. When it is gone,
the next one goes on with the plans that it has followed. Messages hold all active plans, are sent when one has changed
and every `REPEAT_BEATS`, so a lost one is mended by the next. Not thread-safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Annotated, Literal, Protocol, cast

import numpy as np
from msgspec import DecodeError, Meta, Struct
from msgspec.msgpack import Decoder, Encoder

from ..errors import InvalidInput, ProtocolError
from ..scheduling.rebalance_planner import SHARED_MAX, SharedPlan
from ..transport.messages import Id
from ..transport.namespaces import decode_namespace, encode_namespace
from .shared_bookings import relative_to, within

REPEAT_BEATS = 10
PLANS_BYTES_MAX = 4 << 20  # of one message; what is beyond is left out and counted
_TOKENS = np.dtype("<i4")

Finite = Annotated[float, Meta(ge=-1e15, le=1e15)]


class PlanForm(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """One plan on its way: as `SharedPlan`, the namespace and the tokens as bytes."""

    kind: Literal["rebalance", "replica"]
    namespace: bytes
    tokens: bytes
    from_worker: Id
    to_worker: Id
    reason: Annotated[str, Meta(max_length=256)]
    saved_seconds: Finite
    age_seconds: Finite
    expires_in_seconds: Finite | None
    is_active: bool
    holders: Annotated[tuple[Id, ...], Meta(max_length=64)] = ()


class PlanMessage(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """All active plans of the router that makes them."""

    router_id: Id
    plans: Annotated[tuple[PlanForm, ...], Meta(max_length=SHARED_MAX)] = ()
    version: Literal[1] = 1


_encode = Encoder().encode
_DECODER = Decoder(PlanMessage)


class PlanningScheduler(Protocol):
    """What is asked of a scheduler."""

    @property
    def plan_changes(self) -> int | None:
        """Another number when plans have changed; None where there are none."""

    def shared_plans(self) -> list[SharedPlan]:
        """Those that are active."""

    def follow_plans(self, plans: Iterable[SharedPlan] | None) -> None:
        """Carry out these; None: make them here."""


class PlanSharing:
    """One router's side. `scheduler()` is its scheduler now, `worker_space` as `SharedBookings` has it."""

    def __init__(
        self,
        router_id: str,
        scheduler: Callable[[], PlanningScheduler],
        worker_space: Callable[[str], Hashable],
        counters: Counter[str],
    ) -> None:
        self.leader = router_id
        self._router_id = router_id
        self._scheduler_now = scheduler
        self._scheduler: PlanningScheduler | None = None
        self._worker_space = worker_space
        self._counters = counters
        self._sent: int | None = None  # the changes that were sent last
        self._beats = 0

    def beat(self, others: Iterable[str]) -> bytes | None:
        """So much time has passed, and these routers report: what is to be sent to them, if anything is."""
        scheduler, leader = self._scheduler_now(), min([self._router_id, *others])
        if scheduler.plan_changes is None:
            return None
        if leader != self.leader or scheduler is not self._scheduler:
            self.leader, self._scheduler, self._sent = leader, scheduler, None
            scheduler.follow_plans(None if leader == self._router_id else scheduler.shared_plans())
        if leader != self._router_id:
            return None
        self._beats += 1
        if scheduler.plan_changes == self._sent and self._beats < REPEAT_BEATS:
            return None
        self._beats, self._sent = 0, scheduler.plan_changes
        return self._message(scheduler.shared_plans())

    def take(self, data: bytes) -> None:
        """A message has come. One of a router that is not to make plans is passed by, nonsense is counted."""
        try:
            message = _DECODER.decode(data)
            if message.router_id != self.leader or message.router_id == self._router_id:
                return
            plans = [self._read(form) for form in message.plans]
        except (DecodeError, UnicodeDecodeError, RecursionError, ProtocolError, ValueError):
            self._counters["malformed"] += 1
            return
        self._scheduler_now().follow_plans(plans)

    def _message(self, plans: Sequence[SharedPlan]) -> bytes:
        forms, room = [], PLANS_BYTES_MAX
        for plan in plans[:SHARED_MAX]:
            try:
                form = self._form(plan)
            except InvalidInput:  # a namespace that does not travel
                self._counters["left_out"] += 1
                continue
            room -= len(form.tokens) + 1024
            if room < 0:
                self._counters["left_out"] += 1
                break
            forms.append(form)
        return _encode(PlanMessage(self._router_id, tuple(forms)))

    def _form(self, plan: SharedPlan) -> PlanForm:
        space = relative_to(self._worker_space(plan.from_worker), plan.namespace)
        tokens = np.asarray(plan.token_ids, _TOKENS).tobytes()
        named = plan.from_worker, plan.to_worker, plan.reason[:256]
        times = plan.saved_seconds, plan.age_seconds, plan.expires_in_seconds
        kind = cast("Literal['rebalance', 'replica']", plan.kind)
        return PlanForm(kind, encode_namespace(space), tokens, *named, *times, plan.is_active, plan.holders)

    def _read(self, form: PlanForm) -> SharedPlan:
        sent = decode_namespace(form.namespace, "namespace of a plan")
        namespace = within(self._worker_space(form.from_worker), sent)
        tokens = np.frombuffer(form.tokens, _TOKENS)
        return SharedPlan(
            *(form.kind, namespace, tokens.tolist(), form.from_worker, form.to_worker, form.reason),
            *(form.saved_seconds, form.age_seconds, form.expires_in_seconds, form.is_active, form.holders),
        )
