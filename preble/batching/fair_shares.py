"""How much of the workers each tenant has had, in seconds (or tokens) over its weight. Owns these accounts and their
order; knows no requests and no clock.

Virtual time, as in start-time fair queueing: a tenant's account grows by the seconds it is charged over its weight, and
who waits with the lowest account is next. Virtual time is the account of whoever was charged last, before that, or the
lowest of those that wait if that is lower. Who begins to wait starts no lower than this, less `burst_seconds`: what was
not asked for is not saved up beyond that, and what was taken while nobody else wanted it is no debt. An account at or
below that mark says nothing that a new one would not, so it is dropped as soon as its tenant stops waiting; of the
others at most `tenants_max` are kept, those charged last. A tenant beyond them starts anew.

While two tenants wait, the seconds over weight that they get differ by at most one request of each and `burst_seconds`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from ..types import check_int, check_seconds

TENANTS_MAX = 100_000


class FairShares:
    """See the module. Not thread-safe. Each call costs O(log tenants) and a memory move. Raises `InvalidConfig`."""

    def __init__(
        self,
        *,
        burst_seconds: float = 0.0,
        tenants_max: int = TENANTS_MAX,
    ) -> None:
        check_seconds("burst_seconds", burst_seconds)
        check_int("tenants_max", tenants_max, 1, 10_000_000)
        self._burst = burst_seconds
        self._tenants_max = tenants_max
        self._floor = 0.0  # virtual time; it never falls
        self._numbers = 0
        self._waiting: dict[str, tuple[float, int]] = {}  # tenant -> (account, number in the order)
        self._order: list[tuple[float, int, str]] = []  # those that wait; no two numbers are equal
        self._idle: OrderedDict[str, float] = OrderedDict()  # accounts above the floor, the latest charged last

    def __len__(self) -> int:
        """Tenants of which an account is kept."""
        return len(self._waiting) + len(self._idle)

    @property
    def waiting(self) -> int:
        """Tenants that wait."""
        return len(self._waiting)

    @property
    def least(self) -> float:
        """The lowest account of those that wait; infinite where nobody does."""
        return self._order[0][0] if self._order else math.inf

    def account(self, tenant: str) -> float:
        """What it was charged; of an unknown tenant where it would start."""
        found = self._waiting.get(tenant)
        return self._start_of(tenant) if found is None else found[0]

    def lowest(self) -> Iterator[tuple[float, str]]:
        """(account, tenant) of those that wait, the lowest first, who waited first on a tie. Not to be changed
        meanwhile."""
        return ((account, tenant) for account, _, tenant in self._order)

    def join(self, tenant: str) -> None:
        """It begins to wait. Of one that waits already, nothing."""
        if tenant in self._waiting:
            return
        account = self._start_of(tenant)
        self._idle.pop(tenant, None)
        self._place(tenant, account)

    def leave(self, tenant: str) -> None:
        """It does not wait any more. Of one that does not, nothing."""
        found = self._waiting.pop(tenant, None)
        if found is not None:
            self._unplace(found)
            self._keep(tenant, found[0])

    def charge(self, tenant: str, seconds: float) -> None:
        """It is served so many seconds, over its weight; it need not wait."""
        before = self.account(tenant)
        lowest = self._order[0][0] if self._order else before
        self._floor = max(self._floor, min(before, lowest))
        self._set(tenant, before + seconds)

    def correct(self, tenant: str, seconds: float) -> None:
        """What it was charged turns out to be so much more, or less."""
        self._set(tenant, self.account(tenant) + seconds)

    def _set(self, tenant: str, account: float) -> None:
        account = max(account, self._floor - self._burst)
        found = self._waiting.get(tenant)
        if found is None:
            self._keep(tenant, account)
        else:
            self._unplace(found)
            self._place(tenant, account)

    def _start_of(self, tenant: str) -> float:
        mark = self._floor - self._burst
        return max(self._idle.get(tenant, mark), mark)

    def _place(self, tenant: str, account: float) -> None:
        self._numbers += 1
        self._waiting[tenant] = (account, self._numbers)
        insort(self._order, (account, self._numbers, tenant), key=_rank)

    def _unplace(self, found: tuple[float, int]) -> None:
        del self._order[bisect_left(self._order, found, key=_rank)]

    def _keep(self, tenant: str, account: float) -> None:
        """Of one that does not wait, if it says more than a new one would."""
        self._idle.pop(tenant, None)
        if account > self._floor - self._burst:
            self._idle[tenant] = account
            if len(self._idle) > self._tenants_max:
                self._idle.popitem(last=False)

    def check(self) -> None:
        """Assert the order and the bound. O(tenants)."""
        assert sorted(self._order, key=_rank) == self._order, "tenants are out of order"
        assert {t: (a, n) for a, n, t in self._order} == self._waiting, "the order lists others than wait"
        assert len(self._idle) <= self._tenants_max, f"{len(self._idle)} accounts are kept of those that do not wait"
        assert not self._waiting.keys() & self._idle.keys(), "a tenant waits and does not"


def _rank(entry: tuple[float, int, str] | tuple[float, int]) -> tuple[float, int]:
    return entry[:2]
