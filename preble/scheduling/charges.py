"""What tenants were charged for the requests that run. Owns one charge a request, from its booking until it ends, and
what is to be corrected then; whose accounts are corrected is the caller's.

A charge is the seconds that the scheduler has booked: the prefill of what is not estimated cached, and the expected
output's part of a busy batch. When the request ends, what it really took is known: what was cached and how much came.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable

from .._cost import CostModel
from .._placement.bookings import DecisionCore
from .._snapshot.accounts import cost_at
from ..lazy_typing import dataclass
from ..types import Claim

BUSY_BATCH = 16  # requests, among which an iteration's decoding is divided where work is said in seconds
# (worker, prompt tokens, cached ones among them, output tokens) -> seconds of that worker.
ServiceSeconds = Callable[[str, int, int, int], float]


def service_of(cost: CostModel, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
    """Seconds of a worker that a request takes: its prefill, and the part of a busy batch that so much output is."""
    prefill = cost.prefill_time(max(prompt_tokens - cached_tokens, 0), prompt_tokens)
    return float(prefill + cost.decode_time(output_tokens, prompt_tokens, BUSY_BATCH) / BUSY_BATCH)


def service_in(core: DecisionCore) -> ServiceSeconds:
    """`service_of` by the cost models that a core has now; 0.0 for a worker that is none. Called under its lock."""

    def seconds(worker: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        if worker not in core.names:
            return 0.0
        cost = cost_at(core, core.names.index(worker))
        return service_of(cost, prompt_tokens, cached_tokens, output_tokens)

    return seconds


@dataclass(slots=True)
class Charge:
    """On whose account a running request is, and what its tenant was charged."""

    claim: Claim
    worker: str
    prompt_tokens: int
    seconds: float
    cached_tokens: int | None = None
    has_begun: bool = False  # its first token has come


class Charges:
    """See the module. Bounded by who calls: a name for each request that runs. Not thread-safe. Every call is O(1)."""

    def __init__(self) -> None:
        self._running: dict[Hashable, Charge] = {}

    def __len__(self) -> int:
        """Requests that run."""
        return len(self._running)

    def placed(self, name: Hashable, claim: Claim, worker: str, prompt_tokens: int, seconds: float) -> None:
        """A request is booked at a worker for so many seconds."""
        self._running[name] = Charge(claim, worker, prompt_tokens, seconds)

    def started(self, name: Hashable, cached_tokens: int | None) -> Charge | None:
        """Its first token has come; what of its prompt was cached, where that is known. None for one without charge."""
        charge = self._running.get(name)
        if charge is not None:
            charge.has_begun = True
            charge.cached_tokens = cached_tokens if charge.cached_tokens is None else charge.cached_tokens
        return charge

    def ended(
        self,
        name: Hashable,
        service_seconds: ServiceSeconds,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> tuple[Charge, float] | None:
        """Its charge, and how many seconds more than that it took, or less: 0.0 where nobody says what was cached and
        how much came. None for one without charge."""
        charge = self._running.pop(name, None)
        if charge is None:
            return None
        cached = charge.cached_tokens if cached_tokens is None else cached_tokens
        if cached is None or output_tokens is None:
            return charge, 0.0
        took = service_seconds(charge.worker, charge.prompt_tokens, cached, output_tokens)
        return charge, took - charge.seconds

    def names(self) -> Collection[Hashable]:
        """Of the requests that run."""
        return self._running.keys()
