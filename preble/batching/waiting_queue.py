"""The waiting queue of one worker: in which order waiting requests are considered. Owns that order; admits nobody.

A round is one visit of the scheduler:

    queue.begin_round()                    # re-bin what the cache has changed
    while (live := queue.peek(now)):       # the next request by the rules below; asking again gives the same one
        queue.take(live)                   # it was admitted; or
        queue.defer(live)                  # pass over it until the round ends; or
        queue.put_last(live)               # it cannot make its deadline any more
    queue.end_round()

Who is next:
  1. preempted requests, the longest-serving first: they hold output that somebody is reading;
  2. at every OVERDUE_EVERY-th pick the oldest request, if it waited longer than the age bound, so that nothing
     starves;
  3. the order of the configuration. "priority" (paper section 4.3): group g of 0..P holds the requests with floor(P x
     cached / known tokens) = g, oldest first. Groups take turns in proportion to their weights max(1, g): out of 56
     picks with all groups full and P = 10, ten are from group 10, nine from group 9, ..., one from group 1 and one from
     group 0.

Between tenants, where requests name any (`Claim`): of those with interactive requests here, else of those with batch
work, the one with the least service over its weight is next, and with it those within `QUANTUM_TOKENS` of it, at most
`TENANTS_TOGETHER`: among their requests rules 2 and 3 hold, so that within this slack prefixes still decide. Service is
counted in tokens, for a worker has no cost model: prompt tokens that are computed, and `OUTPUT_COST` for each of the
output, once it has ended (`batching/fair_shares`). A batch request that waited longer than the age bound goes at every
OVERDUE_EVERY-th pick all the same.

Within a group the request goes first whose time is over first: arrival and the age bound, or `deadline_seconds` and as
much again for every `DEADLINE_TOKENS` that it must compute, so that what costs little is in time first. Without
deadlines that is the oldest. One that cannot make its deadline any more is put last: it goes when
nobody else waits, or as the oldest that is beyond the age bound. Else an overloaded worker would be busy with what
comes just too late, since that is what is urgent.

How turns are counted (smooth weighted round robin): each pick adds to every non-empty group its weight as credit, takes
from the group with the most credit (the higher one on a tie), and charges it the weights added. So the shares hold over
any stretch of picks, also when each round picks only one. A group found empty at the end of a round loses its credit.

Re-binning happens as a round begins: newcomers whose place is older than the cache's version get a new one. At most
`rebin_per_round` of them are looked up in one round, in turn, and beyond that the one about to be picked. So with a
queue up to that length every place is exact, and a longer one costs no more per round. Within a round places stay,
also where an admission evicts what they rested on; what the scheduler reads of the request it considers,
`cached_now`, is exact.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable
from itertools import islice
from typing import Protocol

from ..types import BATCH
from ._batch import LiveRequest
from .fair_shares import FairShares
from .requests import Int32Array, LocalConfig

REBIN_PER_ROUND = 64  # of 256 waiting, looking at all costs 1.5 times the simulation, for mean latencies within 2 %
QUANTUM_TOKENS = 2048  # computed, by which tenants may be apart before their shares decide alone
TENANTS_TOGETHER = 16
OUTPUT_COST = 8  # tokens of a prompt that take as long as one of an output, decoded among others
DEADLINE_TOKENS = 1000  # that a request must compute, and stands as far behind as its deadline is long
OVERDUE_EVERY = 8  # where all went first who are overdue, an overloaded worker would serve in order of arrival


class CacheView(Protocol):
    """What the queue asks of the cache."""

    version: int

    def cached_tokens(self, token_ids: Int32Array, namespace: Hashable) -> int:
        """Length of the longest cached prefix."""


class _TenantLine:
    """The newcomers of one tenant and class, without deferred ones."""

    __slots__ = ("arrivals", "groups", "is_batch", "tenant")

    def __init__(self, tenant: str, is_batch: bool, groups: int) -> None:
        self.tenant = tenant
        self.is_batch = is_batch
        self.arrivals: list[int] = []  # numbers in order
        self.groups: list[list[tuple[float, int]]] = [[] for _ in range(groups)]  # (rank, number), sorted


class WaitingQueue:
    """Waiting requests in order; see the module. An operation costs O(log n), a memory move and a look at the cache."""

    def __init__(self, config: LocalConfig, cache: CacheView, *, rebin_per_round: int = REBIN_PER_ROUND) -> None:
        self.overdue_picks = 0
        self.cache_looks = 0
        self.uncached_tokens = 0  # sum of uncached_now over all that wait
        self._config = config
        self._cache = cache
        self._rebin_per_round = rebin_per_round
        self._looks_left = rebin_per_round
        self._live: dict[int, LiveRequest] = {}  # number -> every waiting request
        self._preempted: deque[LiveRequest] = deque()
        self._arrivals: list[int] = []  # numbers of newcomers in order, without deferred ones and those put last
        self._last: dict[int, LiveRequest] = {}  # newcomers that were put last, the longest so first
        groups = config.priority_groups + 1 if config.order == "priority" else 1
        self._nobody = _TenantLine("", False, groups)  # of requests that name no tenant
        self._lines: dict[tuple[bool, str], _TenantLine] = {
            (False, ""): self._nobody
        }  # others only while they have requests
        self._unshared = (self._nobody,)
        self._open: tuple[_TenantLine, ...] = ()  # whose requests may be next; empty where that is to be found anew
        self._shares = {is_batch: FairShares() for is_batch in (False, True)}
        self._latest_arrival = -math.inf
        self._credits = [0] * groups
        self._deferred: list[LiveRequest] = []
        self._picked_by_turn = False
        self._turns = OVERDUE_EVERY - 1  # picks by turn since one for age
        self._round_version = cache.version  # the cache's version as the round began
        self._sweep_left = 0
        self._sweep_next = 0  # the number at which it goes on

    def __len__(self) -> int:
        return len(self._live)

    def group_sizes(self) -> list[int]:
        """Newcomers in each group, lowest first. Changes nothing."""
        sizes = [[len(group) for group in line.groups] for line in self._lines.values()]
        return sizes[0] if len(sizes) == 1 else [sum(of) for of in zip(*sizes, strict=True)]

    def oldest_arrival_seconds(self) -> float | None:
        """When the longest-waiting newcomer arrived."""
        firsts = [*self._arrivals[:1], *self._last]
        return self._live[min(firsts)].arrival_seconds if firsts else None

    # --- who waits ----------------------------------------------------------------------------------------------------

    def add(self, live: LiveRequest) -> None:
        """Queue a newcomer, placed by what is cached of it now."""
        self._enter(live)
        self._latest_arrival = max(self._latest_arrival, live.arrival_seconds)
        claim = live.request.claim
        limit = None if claim is None else claim.deadline_seconds
        wait = self._config.max_wait_seconds
        if limit is not None:
            wait = limit * (1.0 + live.uncached_now / DEADLINE_TOKENS)
        live.place = 0, self._latest_arrival + wait
        live.place = self._place_of(live)
        live.place_version = self._cache.version
        self._file(live)

    def put_back(self, live: LiveRequest) -> None:
        """Queue a preempted request ahead of everybody, and of those preempted earlier in this state."""
        self._enter(live)
        self._preempted.appendleft(live)

    def remove(self, live: LiveRequest) -> None:
        """Forget a waiting request, between rounds."""
        assert not self._deferred, "requests are removed between rounds"
        self._withdraw(live)
        self._leave(live)

    def _enter(self, live: LiveRequest) -> None:
        self._live[live.number] = live
        live.cached_now = 0
        live.cached_version = -1
        self.uncached_tokens += live.uncached_now
        self._look(live)

    def _leave(self, live: LiveRequest) -> None:
        del self._live[live.number]
        self.uncached_tokens -= live.uncached_now

    # --- rounds -------------------------------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Re-bin newcomers that the cache has changed for, within the round's bound."""
        self._looks_left = self._rebin_per_round
        if self._round_version != self._cache.version:
            self._round_version = self._cache.version
            self._sweep_left = len(self._arrivals)
        position = bisect_left(self._arrivals, self._sweep_next)
        while self._sweep_left and self._looks_left > 0 and self._arrivals:
            number = self._arrivals[position % len(self._arrivals)]
            self._rebin(self._live[number])
            position += 1
            self._sweep_left -= 1
            self._sweep_next = number + 1

    def peek(self, now: float) -> LiveRequest | None:
        """The request to consider next, with its look at the cache renewed; None when the round has nobody left."""
        self._picked_by_turn = False
        if self._preempted:
            live = self._preempted[0]
        elif not self._arrivals:
            if not self._last:
                return None
            live = next(iter(self._last.values()))
        else:
            oldest = self._oldest_overdue(now) if self._turns >= OVERDUE_EVERY - 1 else None
            if oldest is None:
                self._picked_by_turn = True
            live = self._head_by_turn() if oldest is None else oldest
        self._look(live)
        return live

    def take(self, live: LiveRequest) -> None:
        """Remove the request last peeked at: it was admitted. Its group pays for the turn."""
        if self._picked_by_turn:
            self._charge(live.place[0])
            self._turns += 1
        elif not live.resumes and self._arrivals:
            self.overdue_picks += 1
            self._turns = 0
        if not live.resumes:
            self._charge_prompt(live)
        self._withdraw(live)
        self._leave(live)

    def defer(self, live: LiveRequest) -> None:
        """Pass over the request last peeked at until the round ends. It keeps its place and its group its credit."""
        self._deferred.append(live)
        self._withdraw(live)

    def put_last(self, live: LiveRequest) -> None:
        """Let the request last peeked at, a newcomer, go when nobody else waits."""
        self._withdraw(live)
        self._last[live.number] = live

    def is_last(self, live: LiveRequest) -> bool:
        """Whether it was put last."""
        return live.number in self._last

    def end_round(self) -> None:
        """Give deferred requests their places back."""
        for live in reversed(self._deferred):
            if live.resumes:
                self._preempted.appendleft(live)
            else:
                self._file(live)
        self._deferred.clear()
        filled = self._filled()
        for group in range(len(self._credits)):
            if group not in filled:
                self._credits[group] = 0

    # --- tenants ------------------------------------------------------------------------------------------------------

    def charge_output(self, live: LiveRequest) -> None:
        """A request ends: its tenant pays for its output."""
        claim = live.request.claim
        if claim is not None:
            tokens = OUTPUT_COST * live.output_count
            self._shares[claim.priority == BATCH].correct(claim.tenant, tokens / claim.weight)
            self._open = ()
        elif self._is_shared:
            self._shares[False].correct("", OUTPUT_COST * live.output_count)
            self._open = ()

    def _charge_prompt(self, live: LiveRequest) -> None:
        """A newcomer is admitted: its tenant pays for what is computed of it. Nobody does where there is only one."""
        claim = live.request.claim
        if claim is not None:
            self._shares[claim.priority == BATCH].charge(claim.tenant, live.uncached_now / claim.weight)
        elif self._is_shared:
            self._shares[False].charge("", live.uncached_now)
        self._open = ()

    @property
    def _is_shared(self) -> bool:
        """Whether anybody waits who names a tenant, a deadline or a class."""
        return len(self._lines) > 1

    def _line_of(self, live: LiveRequest) -> _TenantLine:
        """Where a newcomer stands, or would."""
        claim = live.request.claim
        if claim is None:
            return self._nobody
        key = claim.priority == BATCH, claim.tenant
        return self._lines.get(key) or _TenantLine(claim.tenant, key[0], len(self._credits))

    def _open_line(self, line: _TenantLine) -> None:
        """Somebody stands there where there are shares."""
        if not self._is_shared and self._nobody.arrivals:
            self._shares[False].join("")
        self._lines[line.is_batch, line.tenant] = line
        self._shares[line.is_batch].join(line.tenant)
        self._open = ()

    def _close_line(self, line: _TenantLine) -> None:
        """Nobody stands there any more."""
        self._shares[line.is_batch].leave(line.tenant)
        if line is not self._nobody:
            del self._lines[line.is_batch, line.tenant]
        if not self._is_shared:
            self._shares[False].leave("")
        self._open = ()

    def _open_lines(self) -> tuple[_TenantLine, ...]:
        """Whose requests may be next: those of the least service, interactive ones first. Known until somebody comes,
        goes or is served."""
        if not self._is_shared:
            return self._unshared
        if not self._open:
            is_batch = not self._shares[False].waiting
            self._open = tuple(self._lines[is_batch, tenant] for tenant in self._near(is_batch))
        return self._open

    def _near(self, is_batch: bool) -> list[str]:
        """The tenants of a class that wait and whose service is next to the least, within the quantum and bound."""
        near: list[str] = []
        for account, tenant in islice(self._shares[is_batch].lowest(), TENANTS_TOGETHER):
            if account > self._shares[is_batch].least + QUANTUM_TOKENS:
                break
            near.append(tenant)
        return near

    def _oldest_overdue(self, now: float) -> LiveRequest | None:
        """The oldest of those that may be next, or of batch work, if it waited longer than the age bound."""
        lines = self._open_lines()
        if self._is_shared:
            lines += tuple(self._lines[True, tenant] for tenant in self._near(True))
        first = min(line.arrivals[0] for line in lines)
        if self._last:
            first = min(first, next(iter(self._last)))
        live = self._live[first]
        return live if now - live.arrival_seconds > self._config.max_wait_seconds else None

    # --- turns --------------------------------------------------------------------------------------------------------

    def _next_group(self) -> int:
        """The non-empty group that would have the most credit after one more turn; the higher one on a tie."""
        return max(self._filled(), key=lambda g: (self._credits[g] + self._weight(g), g))

    def _filled(self) -> list[int]:
        """The groups of those that may be next that are not empty."""
        lines = self._open_lines()
        if len(lines) == 1:
            return [g for g, members in enumerate(lines[0].groups) if members]
        return [g for g in range(len(self._credits)) if any(line.groups[g] for line in lines)]

    def _charge(self, picked: int) -> None:
        for group in self._filled():
            self._credits[group] += self._weight(group)
            self._credits[picked] -= self._weight(group)

    @staticmethod
    def _weight(group: int) -> int:
        return max(1, group)

    # --- places -------------------------------------------------------------------------------------------------------

    def _head_by_turn(self) -> LiveRequest:
        """The first of the group whose turn it is. Its place is of this round, as far as the bound on looks allows."""
        while True:
            group, lines = self._next_group(), self._open_lines()
            if len(lines) == 1:
                number = lines[0].groups[group][0][1]
            else:
                number = min(line.groups[group][0] for line in lines if line.groups[group])[1]
            live = self._live[number]
            if live.place_version >= self._round_version or self._looks_left <= 0 or not self._rebin(live):
                return live

    def _rebin(self, live: LiveRequest) -> bool:
        """Give a newcomer the place that the cache now says; True if that is another."""
        if live.place_version == self._cache.version:
            return False
        self._look(live)
        live.place_version = self._cache.version
        place = self._place_of(live)
        if place == live.place:
            return False
        self._drop_from_group(live)
        live.place = place
        self._put_into_group(live)
        return True

    def _place_of(self, live: LiveRequest) -> tuple[int, float]:
        """(group, rank in it): 63 of 100 tokens cached with P = 10 is group 6; a fully cached prompt is group P."""
        if self._config.order == "priority":
            return self._config.priority_groups * live.cached_now // live.known_tokens, live.place[1]
        return 0, -live.cached_now if self._config.order == "longest_prefix" else live.place[1]

    def _file(self, live: LiveRequest) -> None:
        """Put a newcomer where its place says."""
        line = self._line_of(live)
        insort(self._arrivals, live.number)
        insort(line.arrivals, live.number)
        if line is not self._nobody or self._is_shared:
            self._open_line(line)
        self._put_into_group(live)

    def _withdraw(self, live: LiveRequest) -> None:
        """Take a request out of whichever line it stands in."""
        if live.resumes:
            self._preempted.remove(live)
            return
        if self._last.pop(live.number, None) is not None:
            return
        line = self._line_of(live)
        del self._arrivals[bisect_left(self._arrivals, live.number)]
        del line.arrivals[bisect_left(line.arrivals, live.number)]
        self._drop_from_group(live)
        if not line.arrivals and (line is not self._nobody or self._is_shared):
            self._close_line(line)

    def _put_into_group(self, live: LiveRequest) -> None:
        group, rank = live.place
        insort(self._line_of(live).groups[group], (rank, live.number))

    def _drop_from_group(self, live: LiveRequest) -> None:
        group, rank = live.place
        members = self._line_of(live).groups[group]
        del members[bisect_left(members, (rank, live.number))]

    def _look(self, live: LiveRequest) -> None:
        """Bring a waiting request's cached tokens up to date."""
        if live.cached_version == self._cache.version:
            return
        self._looks_left -= 1
        self.cache_looks += 1
        self.uncached_tokens -= live.uncached_now
        live.cached_now = self._cache.cached_tokens(live.known, live.request.namespace)
        live.cached_version = self._cache.version
        self.uncached_tokens += live.uncached_now

    # --- checks -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that every waiting request stands in exactly one line, in order, and that the sums are right. O(n)."""
        lines = self._lines.values()
        filed = sorted(number for line in lines for group in line.groups for _, number in group)
        assert filed == self._arrivals, "groups and arrivals list different requests"
        assert filed == sorted(number for line in lines for number in line.arrivals), "lines list different requests"
        assert not self._deferred, "a round did not end"
        waiting = sorted([*self._arrivals, *self._last, *(live.number for live in self._preempted)])
        assert waiting == sorted(self._live), "a waiting request stands in no line"
        for line in lines:
            self._check_line(line)
        for is_batch, shares in self._shares.items():
            shares.check()
            filled = {line.tenant for line in lines if line.is_batch == is_batch and line.arrivals}
            assert {tenant for _, tenant in shares.lowest()} == (filled if self._is_shared else set())
        total = sum(live.uncached_now for live in self._live.values())
        assert total == self.uncached_tokens, f"uncached_tokens is {self.uncached_tokens}, the sum is {total}"

    def _check_line(self, line: _TenantLine) -> None:
        assert line is self._nobody or line.arrivals, "an empty line is kept"
        for g, group in enumerate(line.groups):
            assert group == sorted(group), f"group {g} is out of order"
            for rank, number in group:
                live = self._live[number]
                assert self._line_of(live) is line, f"{live.request.request_id} is in another's line"
                assert live.place == (g, rank), f"{live.request.request_id} is not in its place"
                exact = live.place_version == live.cached_version == self._cache.version
                assert not exact or live.place == self._place_of(live), f"{live.request.request_id} has a wrong place"
