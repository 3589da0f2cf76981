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
deadlines that is the oldest. With "priority" those with a deadline are all of one group more, whatever of them is
cached: in the groups of what is, a small one would be served before it is urgent, and the largest too late. This group
takes no turns: the first of it goes before the first of the group whose turn it is where its time is over sooner. One
that cannot make its deadline any more is put last: it goes when nobody else waits, or as the oldest that is beyond the
age bound. Else an overloaded worker would be busy with what comes just too late, since that is what is urgent.

How turns are counted (smooth weighted round robin): each pick adds to every non-empty group its weight as credit, takes
from the group with the most credit (the higher one on a tie), and charges it the weights added. So the shares hold over
any stretch of picks, also when each round picks only one. A group found empty at the end of a round loses its credit.

Re-binning happens as a round begins: newcomers whose place is older than the cache's version get a new one. At most
`rebin_per_round` of them are looked up in one round, in turn, and beyond that the one about to be picked. So with a
queue up to that length every place is exact, and a longer one costs no more per round. Within a round places stay,
also where an admission evicts what they rested on; what the scheduler reads of the request it considers,
`cached_now`, is exact.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable
from itertools import islice
from typing import Protocol

from libc.stdint cimport int64_t

from preble.batching._batch cimport LiveRequest, resumes, uncached_of
from preble.batching.kv_cache cimport KvCache

from ..types import BATCH
from .fair_shares import FairShares

cpdef enum:
    REBIN_PER_ROUND = 64         # of 256 waiting, looking at all took 1.5 times as long, for latencies within 2 %
    QUANTUM_TOKENS = 2048        # computed, by which tenants may be apart before their shares decide alone
    TENANTS_TOGETHER = 16
    OUTPUT_COST = 8              # tokens of a prompt that take as long as one of an output, decoded among others
    DEADLINE_TOKENS = 3000       # that a request must compute, and stands as far behind as its deadline is long
    OVERDUE_EVERY = 8            # where all went first who are overdue, an overloaded worker would serve in order


class CacheView(Protocol):
    """What the queue asks of the cache."""

    @property
    def version(self) -> int:
        """+1 at each change of what is cached."""

    def cached_tokens(self, token_ids, namespace: Hashable) -> int:
        """Length of the longest cached prefix."""


cdef class TenantLine:
    """The newcomers of one tenant and class."""

    def __init__(self, str tenant, bint is_batch, int64_t groups):
        self.tenant = tenant
        self.is_batch = is_batch
        self.arrivals = []
        self.groups = [[] for _ in range(groups)]


cdef int64_t weight_of(int64_t group) noexcept:
    return max(1, group)


cdef tuple sooner(tuple first, list members):
    """The lower of (rank, number), or None, and the lowest of those in order."""
    return first if not members or (first is not None and first <= <tuple> members[0]) else <tuple> members[0]


cdef int insert_number(list numbers, int64_t number) except -1:
    """Into a sorted list; mostly at its end."""
    cdef Py_ssize_t count = len(numbers)
    if count == 0 or <int64_t> numbers[count - 1] < number:
        numbers.append(number)
    else:
        insort(numbers, number)
    return 0


cdef int remove_number(list numbers, int64_t number) except -1:
    """From a sorted list; often from its begin."""
    if <int64_t> numbers[0] == number:
        del numbers[0]
    else:
        del numbers[bisect_left(numbers, number)]
    return 0


cdef class WaitingQueue:
    """Waiting requests in order; see the module. An operation costs O(log n), a memory move and a look at the cache."""

    def __init__(self, config, cache, *, int64_t rebin_per_round=REBIN_PER_ROUND):
        cdef int64_t groups = config.priority_groups + 2 if config.order == "priority" else 1
        if isinstance(cache, KvCache):
            self.cache = cache
        else:
            self.view = cache
        self.priority_groups = config.priority_groups
        self.by_priority = config.order == "priority"
        self.by_length = config.order == "longest_prefix"
        self.max_wait_seconds = config.max_wait_seconds
        self.rebin_per_round = self.looks_left = rebin_per_round
        self.live = {}
        self.preempted = deque()
        self.arrivals = []
        self.last = {}
        self.nobody = TenantLine("", False, groups)
        self.lines = {(False, ""): self.nobody}
        self.unshared = (self.nobody,)
        self.open = ()
        self.shares = {is_batch: FairShares() for is_batch in (False, True)}
        self.latest_arrival = -math.inf
        self.credits = [0] * groups
        self.deferred = []
        self.turns = OVERDUE_EVERY - 1
        self.round_version = self.version()

    def __len__(self) -> int:
        return len(self.live)

    cdef int64_t version(self) except? -1:
        """The cache's."""
        if self.cache is None:
            return self.view.version
        return self.cache.version

    def group_sizes(self) -> list[int]:
        """Newcomers in each group, lowest first, and last those with a deadline. Changes nothing."""
        cdef TenantLine line
        sizes = [0] * len(self.credits)
        for line in self.lines.values():
            for group in range(len(sizes)):
                sizes[group] += len(line.groups[group])
        return sizes

    def oldest_arrival_seconds(self) -> float | None:
        """When the longest-waiting newcomer arrived."""
        firsts = [*self.arrivals[:1], *self.last]
        return self.live[min(firsts)].arrival_seconds if firsts else None

    # --- who waits ----------------------------------------------------------------------------------------------------

    def add(self, LiveRequest live not None) -> None:
        """Queue a newcomer, placed by what is cached of it now."""
        cdef double wait = self.max_wait_seconds
        self.enter(live)
        self.latest_arrival = max(self.latest_arrival, live.arrival_seconds)
        limit = None if live.claim is None else live.claim.deadline_seconds
        if limit is not None:
            wait = <double> limit * (1.0 + <double> uncached_of(live) / DEADLINE_TOKENS)
        self.place(live, self.latest_arrival + wait)
        live.place_version = self.version()
        self.file(live)

    def put_back(self, LiveRequest live not None) -> None:
        """Queue a preempted request ahead of everybody, and of those preempted earlier in this state."""
        self.enter(live)
        self.preempted.appendleft(live)

    def remove(self, LiveRequest live not None) -> None:
        """Forget a waiting request, between rounds."""
        assert not self.deferred, "requests are removed between rounds"
        self.withdraw(live)
        self.leave(live)

    cdef int enter(self, LiveRequest found) except -1:
        self.live[found.number] = found
        found.cached_now = 0
        found.cached_version = -1
        self.uncached_tokens += uncached_of(found)
        return self.look(found)

    cdef int leave(self, LiveRequest found) except -1:
        del self.live[found.number]
        self.uncached_tokens -= uncached_of(found)
        return 0

    # --- rounds -------------------------------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Re-bin newcomers that the cache has changed for, within the round's bound."""
        self.begin()

    cdef int begin(self) except -1:
        cdef Py_ssize_t position
        cdef int64_t number
        self.looks_left = self.rebin_per_round
        if self.round_version != self.version():
            self.round_version = self.version()
            self.sweep_left = len(self.arrivals)
        if not self.sweep_left:
            return 0
        position = bisect_left(self.arrivals, self.sweep_next)
        while self.sweep_left and self.looks_left > 0 and self.arrivals:
            number = self.arrivals[position % len(self.arrivals)]
            self.rebin(self.live[number])
            position += 1
            self.sweep_left -= 1
            self.sweep_next = number + 1
        return 0

    def peek(self, double now) -> LiveRequest | None:
        """The request to consider next, with its look at the cache renewed; None when the round has nobody left."""
        return self.next_at(now)

    cdef LiveRequest next_at(self, double now):
        cdef LiveRequest found = None
        self.picked_by_turn = False
        if self.preempted:
            found = self.preempted[0]
        elif not self.arrivals:
            if not self.last:
                return None
            found = next(iter(self.last.values()))
        else:
            if self.turns >= OVERDUE_EVERY - 1:
                found = self.oldest_overdue(now)
            if found is None:
                self.picked_by_turn = True
                found = self.head_by_turn()
        self.look(found)
        return found

    def take(self, LiveRequest live not None) -> None:
        """Remove the request last peeked at: it was admitted. Its group pays for the turn."""
        self.take_it(live)

    cdef int take_it(self, LiveRequest found) except -1:
        if self.picked_by_turn:
            self.charge(found.group)
            self.turns += 1
        elif not resumes(found) and self.arrivals:
            self.overdue_picks += 1
            self.turns = 0
        if not resumes(found):
            self.charge_prompt(found)
        self.withdraw(found)
        return self.leave(found)

    def defer(self, LiveRequest live not None) -> None:
        """Pass over the request last peeked at until the round ends. It keeps its place and its group its credit."""
        self.put_off(live)

    cdef int put_off(self, LiveRequest found) except -1:
        self.deferred.append(found)
        return self.withdraw(found)

    def put_last(self, LiveRequest live not None) -> None:
        """Let the request last peeked at, a newcomer, go when nobody else waits."""
        self.withdraw(live)
        self.last[live.number] = live

    def is_last(self, LiveRequest live not None) -> bool:
        """Whether it was put last."""
        return live.number in self.last

    def end_round(self) -> None:
        """Give deferred requests their places back."""
        self.end()

    cdef int end(self) except -1:
        cdef LiveRequest found
        cdef tuple lines
        cdef int64_t group
        if self.deferred:
            for found in reversed(self.deferred):
                if resumes(found):
                    self.preempted.appendleft(found)
                else:
                    self.file(found)
            self.deferred.clear()
        if self.has_credit:
            lines, self.has_credit = self.open_lines(), False
            for group in range(len(self.credits)):
                if not self.is_filled(lines, group):
                    self.credits[group] = 0
                elif self.credits[group]:
                    self.has_credit = True
        return 0

    # --- tenants ------------------------------------------------------------------------------------------------------

    def charge_output(self, LiveRequest live not None, int64_t output_tokens) -> None:
        """A request ends: its tenant pays for its output, even if the request is ended early."""
        claim = live.claim
        if claim is not None:
            tokens = OUTPUT_COST * output_tokens
            self.shares[claim.priority == BATCH].correct(claim.tenant, tokens / claim.weight)
            self.open = ()
        elif self.is_shared():
            self.shares[False].correct("", OUTPUT_COST * output_tokens)
            self.open = ()

    cdef int charge_prompt(self, LiveRequest found) except -1:
        """A newcomer is admitted: its tenant pays for what is computed of it. Nobody does where there is only one."""
        claim = found.claim
        if claim is not None:
            self.shares[claim.priority == BATCH].charge(claim.tenant, found.uncached_now / claim.weight)
        elif self.is_shared():
            self.shares[False].charge("", found.uncached_now)
        self.open = ()
        return 0

    cdef bint is_shared(self) noexcept:
        """Whether anybody waits who names a tenant, a deadline or a class."""
        return len(self.lines) > 1

    cdef TenantLine line_of(self, LiveRequest found):
        """Where a newcomer stands, or would."""
        claim = found.claim
        if claim is None:
            return self.nobody
        is_batch = claim.priority == BATCH
        line = self.lines.get((is_batch, claim.tenant))
        return TenantLine(claim.tenant, is_batch, len(self.credits)) if line is None else line

    cdef int open_line(self, TenantLine line) except -1:
        """Somebody stands there where there are shares."""
        if not self.is_shared() and self.nobody.arrivals:
            self.shares[False].join("")
        self.lines[bool(line.is_batch), line.tenant] = line
        self.shares[bool(line.is_batch)].join(line.tenant)
        self.open = ()
        return 0

    cdef int close_line(self, TenantLine line) except -1:
        """Nobody stands there any more."""
        self.shares[bool(line.is_batch)].leave(line.tenant)
        if line is not self.nobody:
            del self.lines[bool(line.is_batch), line.tenant]
        if not self.is_shared():
            self.shares[False].leave("")
        self.open = ()
        return 0

    cdef tuple open_lines(self):
        """Whose requests may be next: those of the least service, interactive ones first. Known until somebody comes,
        goes or is served."""
        if not self.is_shared():
            return self.unshared
        if not self.open:
            is_batch = not self.shares[False].waiting
            self.open = tuple([self.lines[is_batch, tenant] for tenant in self.near(is_batch)])
        return self.open

    cdef list near(self, bint is_batch):
        """The tenants of a class that wait and whose service is next to the least, within the quantum and bound."""
        near = []
        shares = self.shares[bool(is_batch)]
        for account, tenant in islice(shares.lowest(), TENANTS_TOGETHER):
            if account > shares.least + QUANTUM_TOKENS:
                break
            near.append(tenant)
        return near

    cdef LiveRequest oldest_overdue(self, double now):
        """The oldest of those that may be next, or of batch work, if it waited longer than the age bound."""
        cdef tuple lines = self.open_lines()
        cdef TenantLine line
        cdef LiveRequest found
        if self.is_shared():
            lines += tuple([self.lines[True, tenant] for tenant in self.near(True)])
        first = None
        for line in lines:
            if first is None or line.arrivals[0] < first:
                first = line.arrivals[0]
        if self.last:
            first = min(first, next(iter(self.last)))
        found = self.live[first]
        return found if now - found.arrival_seconds > self.max_wait_seconds else None

    # --- turns --------------------------------------------------------------------------------------------------------

    cdef int64_t next_group(self) except -1:
        """The non-empty group that would have the most credit after one more turn; the higher one on a tie. The one of
        those with a deadline, which takes no turns, where all others are empty."""
        cdef tuple lines = self.open_lines()
        cdef int64_t group, credit, most = 0, best = -1
        for group in range(len(self.credits)):
            if self.is_filled(lines, group) and (best < 0 or not self.is_urgent(group)):
                credit = <int64_t> self.credits[group] + weight_of(group)
                if best < 0 or credit >= most:
                    best, most = group, credit
        assert best >= 0, "some group has somebody"
        return best

    cdef bint is_urgent(self, int64_t group) noexcept:
        """Whether it is the one of those with a deadline."""
        return self.by_priority and group > self.priority_groups

    cdef bint is_filled(self, tuple lines, int64_t group) noexcept:
        """Whether somebody of those that may be next is in a group."""
        cdef TenantLine line
        for line in lines:
            if <list> line.groups[group]:
                return True
        return False

    cdef int charge(self, int64_t picked) except -1:
        """A group's turn is over: it pays what all those with somebody in them get. Deadlines cost no turn."""
        cdef tuple lines = self.open_lines()
        cdef int64_t group
        if self.is_urgent(picked):
            return 0
        for group in range(len(self.credits)):
            if group != picked and self.is_filled(lines, group) and not self.is_urgent(group):
                self.credits[group] += weight_of(group)
                self.credits[picked] -= weight_of(group)
                self.has_credit = True
        return 0

    # --- places -------------------------------------------------------------------------------------------------------

    cdef LiveRequest head_by_turn(self):
        """The first of the group whose turn it is, or with a deadline whose time is over sooner. Its place is of this
        round, as far as the bound on looks allows."""
        cdef LiveRequest found
        cdef TenantLine line
        cdef tuple lines
        cdef int64_t group, urgent = len(self.credits) - 1
        while True:
            group, lines = self.next_group(), self.open_lines()
            first = None
            for line in lines:
                first = sooner(first, <list> line.groups[group])
                first = sooner(first, <list> line.groups[urgent])
            found = self.live[first[1]]
            if found.place_version >= self.round_version or self.looks_left <= 0 or not self.rebin(found):
                return found

    cdef int rebin(self, LiveRequest found) except -1:
        """Give a newcomer the place that the cache now says; True if that is another."""
        cdef int64_t group = found.group
        cdef double rank = found.rank
        if found.place_version == self.version():
            return False
        self.look(found)
        found.place_version = self.version()
        self.place(found, rank)
        if found.group == group and found.rank == rank:
            return False
        self.move(found, group, rank)
        return True

    cdef int move(self, LiveRequest found, int64_t group, double rank) except -1:
        """From a place in the groups to the one it has now."""
        cdef int64_t to_group = found.group
        cdef double to_rank = found.rank
        found.group, found.rank = group, rank
        self.drop_from_group(found)
        found.group, found.rank = to_group, to_rank
        return self.put_into_group(found)

    cdef int place(self, LiveRequest found, double rank) except -1:
        """Set (group, rank in it): 63 of 100 tokens cached with P = 10 is group 6; a fully cached prompt is group P."""
        if not self.by_priority:
            found.group = 0
        elif found.claim is not None and found.claim.deadline_seconds is not None:
            found.group = self.priority_groups + 1
        else:
            found.group = self.priority_groups * found.cached_now // found.known_tokens
        found.rank = <double> -found.cached_now if self.by_length else rank
        return 0

    cdef int file(self, LiveRequest found) except -1:
        """Put a newcomer where its place says."""
        cdef TenantLine line = self.line_of(found)
        insert_number(self.arrivals, found.number)
        insert_number(line.arrivals, found.number)
        if line is not self.nobody or self.is_shared():
            self.open_line(line)
        return self.put_into_group(found)

    cdef int withdraw(self, LiveRequest found) except -1:
        """Take a request out of whichever line it stands in."""
        cdef TenantLine line
        if resumes(found):
            self.preempted.remove(found)
            return 0
        if self.last and self.last.pop(found.number, None) is not None:
            return 0
        line = self.line_of(found)
        remove_number(self.arrivals, found.number)
        remove_number(line.arrivals, found.number)
        self.drop_from_group(found)
        if not line.arrivals and (line is not self.nobody or self.is_shared()):
            self.close_line(line)
        return 0

    cdef int put_into_group(self, LiveRequest found) except -1:
        insort(self.line_of(found).groups[found.group], (found.rank, found.number))
        return 0

    cdef int drop_from_group(self, LiveRequest found) except -1:
        cdef list members = self.line_of(found).groups[found.group]
        if <int64_t> (<tuple> members[0])[1] == found.number:
            del members[0]
        else:
            del members[bisect_left(members, (found.rank, found.number))]
        return 0

    cdef int look(self, LiveRequest found) except -1:
        """Bring a waiting request's cached tokens up to date."""
        cdef int64_t version = self.version()
        if found.cached_version == version:
            return 0
        self.looks_left -= 1
        self.cache_looks += 1
        self.uncached_tokens -= uncached_of(found)
        if self.cache is None:
            found.cached_now = self.view.cached_tokens(found.known, found.namespace)
        else:
            found.cached_now = self.cache.matched_of(found)
        found.cached_version = version
        self.uncached_tokens += uncached_of(found)
        return 0

    # --- checks -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that every waiting request stands in exactly one line, in order, and that the sums are right. O(n)."""
        cdef TenantLine line
        cdef LiveRequest found
        filed, in_lines, total = [], [], 0
        for line in self.lines.values():
            in_lines += line.arrivals
            for group in line.groups:
                filed += [number for _, number in group]
            self.check_line(line)
        assert sorted(filed) == self.arrivals, "groups and arrivals list different requests"
        assert sorted(in_lines) == self.arrivals, "lines list different requests"
        assert not self.deferred, "a round did not end"
        waiting = sorted([*self.arrivals, *self.last, *[live.number for live in self.preempted]])
        assert waiting == sorted(self.live), "a waiting request stands in no line"
        for is_batch, shares in self.shares.items():
            shares.check()
            filled = set()
            for line in self.lines.values():
                if bool(line.is_batch) == is_batch and line.arrivals and self.is_shared():
                    filled.add(line.tenant)
            assert {tenant for _, tenant in shares.lowest()} == filled
        for found in self.live.values():
            total += uncached_of(found)
        assert total == self.uncached_tokens, f"uncached_tokens is {self.uncached_tokens}, the sum is {total}"
        assert self.has_credit or not any(self.credits), "a group has credit and none is said to"

    cdef int check_line(self, TenantLine line) except -1:
        cdef LiveRequest found
        cdef int64_t group
        assert line is self.nobody or line.arrivals, "an empty line is kept"
        for group in range(len(line.groups)):
            members = line.groups[group]
            assert members == sorted(members), f"group {group} is out of order"
            for rank, number in members:
                found = self.live[number]
                assert self.line_of(found) is line, f"{found.request.request_id} is in another's line"
                assert found.place == (group, rank), f"{found.request.request_id} is not in its place"
                if found.place_version == found.cached_version == self.version():
                    self.place(found, found.rank)
                    assert found.place == (group, rank), f"{found.request.request_id} has a wrong place"
        return 0
