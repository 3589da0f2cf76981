"""What `GlobalScheduler` keeps of requests that name a tenant, a deadline or a class: each tenant's seconds of worker
time, and who is refused because its first token would come too late. Owns these accounts; places nothing.

    predicted wait at a worker = c (Q + P)

    Q   seconds of prefill booked there and not seen done, of all requests, also those that name nothing
    P   seconds to prefill what the worker lacks of this prompt
    c   what requests with a deadline really waited over what was predicted of them, in 1/16 to 16: sums, of which each
        new request leaves 0.98, from `LEARNED_MIN` requests on; 1 before

A worker at which nothing is booked is never too late: the cost model may be wrong, and only who is served can show it.

At most `tenants_max` tenants have an account. Beyond that, of those with nothing running the one whose last request
ended first loses it; its seconds are summed up as `dropped_seconds`. If all have requests running, there are more
accounts than that, at most one for each live request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping

from .._placement.bookings import DecisionCore
from .._placement.request_api import choice_to_come, hashable, names_session, output_limit
from ..batching.fair_shares import TENANTS_MAX
from ..errors import DuplicateRequest, NoWorkers, Overloaded
from ..lazy_typing import TYPE_CHECKING, Any, dataclass
from ..types import BATCH, Claim, check_int
from .charges import Charge, Charges, ServiceSeconds

if TYPE_CHECKING:
    from typing import Protocol

    from .._placement.decision import Decision

    class Booking(Protocol):
        """What is asked of a scheduler, under its lock."""

        @property
        def core(self) -> DecisionCore:
            """Where it is booked."""

        @property
        def schedule(self) -> Callable[..., Decision]:
            """Choose a worker and book."""

        def booked_seconds(self, request_id: Hashable) -> float:
            """What a request is booked for."""

        def now(self) -> float:
            """Seconds."""


SPARE_SECONDS = 0.15  # booked at a worker, beyond which it takes no batch work
KEPT_SHARE = 0.98
LEARNED_MIN = 8
SCALE_MAX = 16.0
PREDICTED_MIN_SECONDS = 0.01  # of less nothing is learned: a clock's tick, a network's delay


@dataclass(slots=True)
class Account:
    """Of one tenant: seconds of worker time so far, and requests that are live."""

    seconds: float = 0.0
    live: int = 0


class Tenants:
    """See the module. Called under the writers' lock, each call O(1) but for `admit`, which is O(workers). Looks on at
    requests as a `RequestObserver` does. Raises `InvalidConfig`."""

    def __init__(self, service_seconds: ServiceSeconds, *, tenants_max: int = TENANTS_MAX) -> None:
        self._service_seconds = service_seconds
        self._tenants_max = check_int("tenants_max", tenants_max, 1, 10_000_000)
        self._busy: dict[str, Account] = {}  # of tenants with something running
        self._idle: OrderedDict[str, Account] = OrderedDict()  # of the others, who ended last at the end
        self._charges = Charges()
        self._predicted: dict[Hashable, tuple[float, float]] = {}  # live key -> (booked at, seconds predicted)
        self._learned = 0
        self._waited_seconds = self._predicted_seconds = 0.0
        self._refused = 0
        self._dropped_seconds = 0.0

    # --- before a decision --------------------------------------------------------------------------------------------

    def admit(self, claim: Claim, booked: Mapping[str, float], own: Mapping[str, float]) -> frozenset[str]:
        """The workers at which a request would come too late. `booked` and `own` are Q and P by worker that may take
        it. Raises `Overloaded` where that is all of them; then nothing has changed but the count."""
        scale = self.scale
        waits = {name: scale * (booked[name] + own[name]) for name in own}
        late = frozenset(name for name, wait in waits.items() if booked[name] > 0.0 and self._is_late(claim, wait))
        if claim.priority == BATCH:
            late |= frozenset(name for name in own if scale * booked[name] > SPARE_SECONDS)
        if len(late) < len(own):
            return late
        raise self.refusal(claim, min(waits.values()))

    def refusal(self, claim: Claim, wait: float) -> Overloaded:
        """Count a request that is refused, with so many seconds to wait where it would come first."""
        self._refused += 1
        if claim.deadline_seconds is not None and wait > claim.deadline_seconds:
            text = f"the first token would take {wait:.3g} s, it is of use for {claim.deadline_seconds:.3g} s"
        else:
            text = f"every worker has work for {wait:.3g} s, which goes before batch work"
        return Overloaded(text, retry_after_seconds=max(wait, 1e-3))

    @staticmethod
    def _is_late(claim: Claim, wait: float) -> bool:
        return claim.deadline_seconds is not None and wait > claim.deadline_seconds

    @property
    def scale(self) -> float:
        """c of the module."""
        if self._learned < LEARNED_MIN or self._predicted_seconds <= 0.0:
            return 1.0
        return min(max(self._waited_seconds / self._predicted_seconds, 1.0 / SCALE_MAX), SCALE_MAX)

    # --- a request's life ---------------------------------------------------------------------------------------------

    def placed(
        self,
        key: Hashable,
        claim: Claim,
        worker: str,
        prompt_tokens: int,
        seconds: float,
        predicted_seconds: float | None,
        now: float,
    ) -> None:
        """A request was booked. `predicted_seconds`: Q + P of its worker, where it has a deadline."""
        self._begin(claim.tenant).seconds += seconds
        self._charges.placed(key, claim, worker, prompt_tokens, seconds)
        if predicted_seconds is not None and predicted_seconds >= PREDICTED_MIN_SECONDS:
            self._predicted[key] = now, predicted_seconds

    def on_first_token(self, key: Hashable, now: float, cached_tokens: int | None) -> None:
        """See `RequestObserver`."""
        self._charges.started(key, cached_tokens)
        booked = self._predicted.pop(key, None)
        if booked is not None:
            at, predicted = booked
            self._learned += 1
            self._waited_seconds = KEPT_SHARE * self._waited_seconds + max(now - at, 0.0)
            self._predicted_seconds = KEPT_SHARE * self._predicted_seconds + predicted

    def on_finish(self, key: Hashable, now: float, cached_tokens: int | None, output_tokens: int | None) -> None:
        """See `RequestObserver`."""
        self._predicted.pop(key, None)
        ended = self._charges.ended(key, self._service_seconds, cached_tokens, output_tokens)
        if ended is not None:
            self._settle(*ended)

    def on_cancel(self, key: Hashable, now: float) -> None:
        """See `RequestObserver`. What nobody has a first token of is given back, as its booking is."""
        self._predicted.pop(key, None)
        ended = self._charges.ended(key, self._service_seconds)
        if ended is not None:
            charge = ended[0]
            self._settle(charge, 0.0 if charge.has_begun else -charge.seconds)

    def _settle(self, charge: Charge, more_seconds: float) -> None:
        tenant = charge.claim.tenant
        account = self._busy[tenant]
        account.seconds = max(account.seconds + more_seconds, 0.0)
        account.live -= 1
        if not account.live:
            self._idle[tenant] = self._busy.pop(tenant)
            self._keep_bound()

    def _begin(self, tenant: str) -> Account:
        """The account of a tenant that has something running from now on."""
        account = self._busy.get(tenant)
        if account is None:
            account = self._idle.pop(tenant) if tenant in self._idle else Account()
            self._busy[tenant] = account
            self._keep_bound()
        account.live += 1
        return account

    def _keep_bound(self) -> None:
        if self._idle and len(self._idle) + len(self._busy) > self._tenants_max:
            _, account = self._idle.popitem(last=False)
            self._dropped_seconds += account.seconds

    # --- questions ----------------------------------------------------------------------------------------------------

    def seconds(self) -> dict[str, float]:
        """Of worker time, by tenant."""
        return {tenant: account.seconds for one in (self._busy, self._idle) for tenant, account in one.items()}

    def stats(self) -> dict[str, Any]:
        """For `GlobalScheduler.stats`."""
        return {
            "accounts": len(self._busy) + len(self._idle),
            "live_requests": len(self._charges),
            "refused": self._refused,
            "wait_scale": self.scale,
            "dropped_seconds": self._dropped_seconds,
        }

    def check(self, live: Collection[Hashable]) -> None:
        """Assert that every charge is of a live request and counted in its account. O(all)."""
        assert all(key in live for key in self._charges.names()), "a request was charged and is not live"
        assert all(key in live for key in self._predicted), "a wait was predicted for what is not live"
        assert sum(one.live for one in self._busy.values()) == len(self._charges), "live requests are off"
        assert all(one.live for one in self._busy.values()), "an account is with those that have something running"
        assert not any(one.live for one in self._idle.values()), "a tenant with something running is with the others"
        assert len(self._busy) + len(self._idle) <= max(self._tenants_max, len(self._busy)), "too many accounts"


# --- placing ----------------------------------------------------------------------------------------------------------


def place_claimed(
    scheduler: Booking, tenants: Tenants, claim: Claim, token_ids: Any, exclude: list[str], asked: dict[str, Any]
) -> Decision:
    """Leave out the workers at which a request would come too late, place it, and charge what it is booked for. Raises
    `Overloaded`, and what `schedule` does; then nothing has changed. Under the lock."""
    predicted: dict[str, float] = {}
    late: frozenset[str] = frozenset()
    if claim.deadline_seconds is not None or claim.priority == BATCH:
        booked, own = _waits(scheduler, token_ids, exclude, asked)
        late = tenants.admit(claim, booked, own)
        predicted = {name: booked[name] + own[name] for name in own}
    try:
        decision = scheduler.schedule(token_ids, exclude=[*exclude, *late] or (), **asked)
    except NoWorkers:
        if not late:
            raise
        # Who is in time leaves: it takes only what it has cached, and nothing where no other is left.
        raise tenants.refusal(claim, tenants.scale * min(predicted[name] for name in late)) from None
    key = scheduler.core.live_key(decision.request_id)
    seconds = scheduler.booked_seconds(decision.request_id)
    wait = None if claim.deadline_seconds is None else predicted.get(decision.worker)
    tenants.placed(key, claim, decision.worker, decision.prompt_tokens, seconds, wait, scheduler.now())
    return decision


def _waits(
    scheduler: Booking, token_ids: Any, exclude: list[str], asked: dict[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds of prefill that wait, seconds of its own prefill) of a prompt, by worker that may take it. Changes
    nothing. Raises what is wrong with the request."""
    core, request_id, session = scheduler.core, asked["request_id"], asked["session"]
    for name in ("request_id", "namespace", "group"):
        hashable(name, asked[name])
    if request_id is not None and core.live_key(request_id) is not None:
        raise DuplicateRequest(f"request_id {request_id!r} is live")
    of_session = session is not None and names_session(session)
    limit = output_limit(asked["max_new_tokens"])
    left_out = core.leave_out(exclude)
    try:
        _, _, _, rows, names = choice_to_come(
            core, None, token_ids, asked["namespace"], limit, scheduler.now(), None, of_session
        )
    finally:
        core.take_back(left_out)
    booked = {names[row[0]]: core.loads.account(row[0])["waiting_prefill_seconds"] for row in rows}
    return booked, {names[row[0]]: row[3] + row[10] for row in rows}  # prefill and loading
