"""The KV cache of one worker: a pool of slots, the prefix tree that owns most of them, and reports of evictions.

Owns who holds a slot; knows nothing of queues, batches or budgets. What is evicted first is its `Retention`'s to say,
where it has one. Not thread-safe: `LocalScheduler` is its only user.
Every slot is exactly one of: free (in the pool), owned by the tree, or owned by a running request (taken and not yet
published).
"""

from cpython.array cimport array as c_array
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memmove

from preble.batching._batch cimport LiveRequest
from preble.batching._kv_slots cimport Hold, SlotTree
from preble.batching.retention cimport PrefixEnd, Retention

import numpy as np

from ..types import AllBlocksCleared, PrefixEvicted, check_int, check_seconds

HOST = "CPU"                     # what host memory is called in events, as by vLLM

cdef enum:
    EVENTS_MAX = 4096
    EVENT_TOKENS_MAX = 1 << 22
    EVICT_SHARE = 256
    NO_END = -1


cdef class SlotPool:
    """A stack of free KV slot ids, 0 .. capacity - 1. The slot freed last is taken first."""

    def __init__(self, int64_t capacity):
        cdef int32_t[::1] ids
        assert capacity > 0, "a pool has slots"
        self.stack = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        ids = self.stack
        self.data = &ids[0]                      # the array is kept, and nobody moves its memory
        self.capacity = self.free_count = capacity

    @property
    def free_slots(self):
        """The free slots. A view, for checks."""
        return self.stack[: self.free_count]

    def take(self, int64_t count):
        """Remove `count` slots from the pool. A view that holds until slots are given back."""
        self.taken(count)
        return self.stack[self.free_count : self.free_count + count]

    cdef int32_t* taken(self, int64_t count) except NULL:
        if not 0 <= count <= self.free_count:
            raise AssertionError(f"took {count} of {self.free_count} free slots")
        self.free_count -= count
        return self.data + self.free_count

    def give(self, slots) -> None:
        """Put slots back. Cost: their number."""
        cdef const int32_t[::1] returned = np.ascontiguousarray(slots, np.int32)
        if returned.shape[0]:
            self.given(&returned[0], returned.shape[0])

    cdef int given(self, const int32_t* slots, int64_t count) except -1:
        if self.free_count + count > self.capacity:
            raise AssertionError("more slots given back than exist")
        memmove(self.data + self.free_count, slots, count * sizeof(int32_t))
        self.free_count += count
        return 0


cdef class KvCache:
    """Prefix tree and slot pool as one: hold a cached prefix, take slots for new tokens, publish them, let them go.

    Evictions become events. Where nobody takes the events and they reach `events_max` or `event_tokens_max`, all
    pending ones collapse into a single `AllBlocksCleared`: the router then expects less than is cached, never more.

    `host`: where what is evicted goes, and from where what is asked for comes back; None: it is gone.
    """

    def __init__(self, int64_t capacity_tokens, *, Retention retention=None, host=None,
                 int64_t events_max=EVENTS_MAX,
                 int64_t event_tokens_max=EVENT_TOKENS_MAX):
        self.capacity_tokens = capacity_tokens
        self._retention = retention
        self.host = host
        self.tree = SlotTree()
        self.pool = SlotPool(capacity_tokens)
        self.events = []
        self.events_max = events_max
        self.event_tokens_max = event_tokens_max

    # --- reads --------------------------------------------------------------------------------------------------------

    @property
    def free_tokens(self) -> int:
        """Slots that hold nothing."""
        return self.pool.free_count

    @property
    def cached_total(self) -> int:
        """Tokens in the tree, held or not."""
        return self.tree.t.workers[0].tokens

    @property
    def available_tokens(self) -> int:
        """Slots that `take` can supply: free ones and those of cached tokens that nobody holds."""
        return self.available()

    cdef int64_t available(self) noexcept:
        return self.pool.free_count + self.tree.t.workers[0].tokens - self.tree.t.workers[0].pinned

    def cached_tokens(self, token_ids, namespace) -> int:
        """Length of the longest cached prefix. Changes nothing. Cost: its length."""
        return self.tree.matched(token_ids, namespace=namespace)

    cdef int64_t matched_of(self, LiveRequest live) except -1:
        return self.tree.matched_ids(live.token_data, <uint32_t> live.known_tokens, live.namespace)

    def slots_of(self, Hold hold not None):
        """Slots of a held prefix, in order of position. Changes nothing."""
        return np.asarray(self.tree.slots(hold), np.int32)

    # --- changes ------------------------------------------------------------------------------------------------------

    def hold(self, token_ids, namespace, max_tokens, now) -> Hold:
        """Pin the longest cached prefix, at most `max_tokens` of it, against eviction. What host memory has more of it
        is loaded, if that pays."""
        if self.host is not None:
            self.load(token_ids, namespace, max_tokens, now)
        return self.tree.hold(token_ids, now, namespace=namespace, max_tokens=max_tokens)

    cdef Hold hold_of(self, LiveRequest live, int64_t max_tokens, double now):
        """`hold` for a request."""
        if self.host is not None:
            self.load(live.known, live.namespace, max_tokens, now)
        return self.tree.hold_ids(live.token_data, <uint32_t> max_tokens, live.namespace)

    cdef int load(self, object token_ids, object namespace, int64_t max_tokens, double now) except -1:
        """Load what host memory has more of a prompt, if that pays."""
        found = min(self.host.found(token_ids, namespace), max_tokens)
        here = self.cached_tokens(token_ids, namespace)
        if found > here and self.host.pays(here, found, len(token_ids)):
            self.host.note_load(self.enter(token_ids[:found], namespace, now))
            self.host.keep(token_ids[:found], namespace, now)
        return 0

    def enter(self, token_ids, namespace, now) -> int:
        """Cache a prefix that was not computed here, as the most recently used; returns the tokens of it that were not
        cached, 0 where these do not fit. Cost: its length."""
        tokens = np.asarray(token_ids, np.int32)
        hold = self.tree.hold(tokens, now, namespace=namespace, max_tokens=len(tokens))
        held, new = hold.matched_tokens, len(tokens) - hold.matched_tokens
        fits = new <= self.available()
        if new and fits:
            slots = np.empty(len(tokens), np.int32)
            slots[:held] = self.slots_of(hold)
            slots[held:] = self.take(new, now)
            self.publish(hold, tokens, slots, now)
        self.tree.release(hold, now)
        return new if fits else 0

    def publish(self, Hold hold not None, token_ids, slots, now) -> None:
        """Make `token_ids`, whose KV is in `slots`, a cached and held prefix that others can share at once.

        Both have the full length, from position 0. Where the tree cached some of the tokens meanwhile, its slots stay
        and the given ones are freed; `slots` is corrected in place. Cost: the number of tokens.
        """
        new = len(token_ids) - hold.matched_tokens
        if new == 0:
            return
        redundant = self.tree.extend(hold, token_ids, slots[hold.matched_tokens :], now)
        if len(redundant):
            self.pool.give(redundant)
            slots[:] = self.slots_of(hold)
        if len(redundant) < new:
            self.version += 1

    cdef Hold published(self, LiveRequest live):
        """The hold of a running request, whose computed tokens are all in the tree."""
        cdef Hold hold = live.hold
        cdef int64_t held = hold.matched_tokens
        cdef c_array redundant
        if live.computed == held:
            return hold
        redundant = self.tree.extend_ids(hold, live.token_data, live.slot_data + held, <uint32_t> live.computed)
        if len(redundant):
            self.pool.given(<int32_t*> redundant.data.as_ints, len(redundant))
            self.tree.copy_slots(hold, live.slot_data)
        if len(redundant) < live.computed - held:
            self.version += 1
        return hold

    def release(self, Hold hold not None, now) -> None:
        """Unpin a held prefix; it stays cached, as the most recently used."""
        self.tree.release(hold, now)

    cdef int let_go(self, Hold hold) except -1:
        return self.tree.let_go(hold)

    def take(self, int64_t count, double now):
        """Take `count` slots for new tokens, evicting where too few are free. `count` is at most `available_tokens`.

        Evicts a little more than asked, the last leaf in part: a full cache would otherwise evict and report in every
        iteration.
        """
        self.make_room(count, now)
        return self.pool.take(count)

    cdef int32_t* slots_for(self, int64_t count, double now) except NULL:
        """`take`, as a pointer."""
        self.make_room(count, now)
        return self.pool.taken(count)

    cdef int make_room(self, int64_t count, double now) except -1:
        cdef int64_t missing = count - self.pool.free_count
        if missing > 0:
            self.evict(max(missing, self.capacity_tokens // EVICT_SHARE), now)
        return 0

    def give(self, slots) -> None:
        """Free slots that were taken and never published."""
        self.pool.give(slots)

    cdef int give_back(self, const int32_t* slots, int64_t count) except -1:
        return self.pool.given(slots, count)

    # --- KV that comes from elsewhere, or goes there ------------------------------------------------------------------

    def slots_cached(self, token_ids, namespace, now):
        """Slots of the longest cached prefix, in order of position, to be read before anything else is done. Counts as
        a use. Cost: its length."""
        hold = self.hold(token_ids, namespace, len(token_ids), now)
        slots = self.slots_of(hold)
        self.release(hold, now)
        return slots

    def adopt(self, token_ids, namespace, spared, write, now) -> int:
        """Cache `token_ids` whose KV somebody else has computed: `write(known, slots)` puts that of the tokens from
        `known` on into their slots. Returns how many are cached then: all of them or, where that would leave less than
        `spared` of what `take` can supply, those that were. Where `write` raises, nothing is added. Cost: their number.
        """
        hold = self.hold(token_ids, namespace, len(token_ids), now)
        try:
            known = hold.matched_tokens
            new = len(token_ids) - known
            if new == 0 or new + spared > self.available():
                return known
            slots = self.take(new, now).copy()   # not a view of what is free again, should `write` fail
            try:
                write(known, slots)
            except BaseException:
                self.give(slots)
                raise
            self.publish(hold, token_ids, np.concatenate([self.slots_of(hold), slots]), now)
            return len(token_ids)
        finally:
            self.release(hold, now)

    # --- whose prefix it is -------------------------------------------------------------------------------------------

    cdef int64_t asked(self, LiveRequest live, double now) except? -2:
        """A prompt has come and waits. Returns the number of the end that it goes on from, -1 where none is known.
        Cost: its cached prefix."""
        cdef int64_t number
        if self._retention is None:
            return NO_END
        number = self.tree.end_of_ids(live.token_data, <uint32_t> live.known_tokens, live.namespace)
        return number if number >= 0 and self._retention.note_asked(number, now) else NO_END

    cdef int admitted(self, int64_t end) except -1:
        """Who asked has its prefix, and holds it."""
        if self._retention is not None and end != NO_END:
            self._retention.drop(end)
        return 0

    def give_up(self, int64_t end, double now) -> None:
        """Who asked has gone without it."""
        if self._retention is not None:
            self._retention.unwanted(end, now)

    cdef int ended(self, Hold hold, object ending, int64_t end, double now) except -1:
        """Let a prefix go whose request has ended, its answer with these tokens; it went on from `end`."""
        cdef int64_t number = self.tree.end_of(hold)
        self.tree.let_go(hold)
        if self._retention is not None:
            self._retention.note_end(number, ending, now)
            if end != NO_END and end != number:
                self._retention.die(end, now)
        return 0

    def suspend(self, Hold hold not None, int64_t end, double now) -> int:
        """Let a prefix go whose request, which went on from `end`, waits to go on; returns the number of its end, as
        `asked` does."""
        number = self.tree.end_of(hold)
        self.tree.let_go(hold)
        if self._retention is None:
            return NO_END
        if end != NO_END and end != number:
            self._retention.die(end, now)
        self._retention.want(number, now)
        return number

    # --- evictions ----------------------------------------------------------------------------------------------------

    def take_events(self) -> list[PrefixEvicted | AllBlocksCleared]:
        """Evictions since the last call, oldest first."""
        events, self.events, self.event_tokens = self.events, [], 0
        return events

    cdef int evict(self, int64_t need_tokens, double now) except -1:
        cdef int64_t before = self.evicted_tokens
        cdef PrefixEnd end
        while self._retention is not None:
            end = self._retention.first_to_go(now)
            if end is None:
                break
            freed, reports, left = self.tree.evict_end(end.number, need_tokens)
            if len(freed):
                self._retention.note_evicted(end, left, now)
                self.book_eviction(freed, reports, now)
            else:
                self._retention.drop(end.number)         # somebody holds it, or its prefix goes on
            need_tokens -= len(freed)
            if need_tokens <= 0:
                break
        if need_tokens > 0:
            freed, reports = self.tree.evict(need_tokens)
            self.book_eviction(freed, reports, now)
        self.version += 1
        self.evictions += self.evicted_tokens > before
        return 0

    cdef int book_eviction(self, object freed, list reports, double now) except -1:
        cdef c_array slots = freed
        self.pool.given(<int32_t*> slots.data.as_ints, len(slots))
        self.evicted_tokens += len(slots)
        for token_ids, kept_tokens, namespace in reports:
            moved = self.host is not None and self.host.keep(token_ids, namespace, now)
            self.report(PrefixEvicted(token_ids, kept_tokens, namespace, HOST if moved else None))
        return 0 if self.host is None else self.report_lost()

    cdef int report_lost(self) except -1:
        """What host memory has lost is gone, as far as it is not here."""
        for event in self.host.take_lost():
            if isinstance(event, AllBlocksCleared):      # more than anybody could list
                self.report(event)
                continue
            kept = max(event.kept_tokens, self.tree.matched(event.token_ids, namespace=event.namespace))
            if kept < len(event.token_ids):
                self.report(PrefixEvicted(event.token_ids, kept, event.namespace))
        return 0

    cdef int report(self, object event) except -1:
        self.event_tokens += 0 if isinstance(event, AllBlocksCleared) else len(event.token_ids)
        self.events.append(event)
        if len(self.events) > self.events_max or self.event_tokens > self.event_tokens_max:
            self.collapsed_events += len(self.events)
            self.events, self.event_tokens = [AllBlocksCleared()], 0
        return 0

    # --- checks -------------------------------------------------------------------------------------------------------

    def check(self, list private_slots) -> None:
        """Assert the tree's invariants and that every slot has exactly one owner.

        `private_slots` are those that running requests own outside the tree. Cost: the capacity.
        """
        self.tree.check()
        if self._retention is not None:
            self._retention.check()
        owners = np.zeros(self.capacity_tokens, np.int32)
        np.add.at(owners, self.pool.free_slots, 1)
        for slots in private_slots:
            np.add.at(owners, slots, 1)
        assert owners.max() <= 1, f"slot {int(owners.argmax())} has two owners"
        unowned = self.capacity_tokens - int(owners.sum())
        assert unowned == self.cached_total, f"{unowned} slots are unowned, the tree caches {self.cached_total} tokens"

    def check_hold(self, Hold hold not None, slots, token_ids, namespace) -> None:
        """Assert that a request's view of its held prefix is the tree's: same slots, and still cached."""
        if not hold.matched_tokens:
            return
        held = self.slots_of(hold)
        assert np.array_equal(held, slots[: len(held)]), "a running request's slots differ from the tree's"
        assert self.cached_tokens(token_ids[: len(held)], namespace) == len(held), "a held prefix is not cached"
        free = np.isin(held, self.pool.free_slots)
        assert not free.any(), f"slot {int(held[free.argmax()])} is free and held"

    def show(self) -> str:
        """The tree as text."""
        return self.tree.show()


# --- host memory behind the GPU's: what is evicted there goes here, and comes back when a prompt asks for it ---------


def always(here, found, prompt_tokens) -> bool:
    """Load whatever is there, as the engines do."""
    return True


class HostMemory:
    """A cache of `capacity_tokens`; a token takes `token_seconds` to load. `pays(here, found, prompt_tokens)`: whether
    to load from `here` to `found` of a prompt's tokens, or to compute them. What is used least recently goes first. Not
    thread-safe. Raises `InvalidConfig`."""

    __slots__ = ("token_seconds", "pays", "loaded_tokens", "_cache", "_unpaid")

    def __init__(self, capacity_tokens, token_seconds, pays=always) -> None:
        check_int("HostMemory.capacity_tokens", capacity_tokens, 1, 2**31 - 1)
        check_seconds("HostMemory.token_seconds", token_seconds)
        self.token_seconds = token_seconds
        self.pays = pays
        self.loaded_tokens = 0  # since the start
        self._cache = KvCache(capacity_tokens)
        self._unpaid = 0  # loaded, and nobody has waited for it yet

    def found(self, token_ids, namespace) -> int:
        """Tokens of a prompt that it holds, from the first on. Changes nothing. O(found)."""
        return self._cache.cached_tokens(token_ids, namespace)

    def keep(self, token_ids, namespace, now) -> bool:
        """Hold a prefix, or use it again; False where it does not fit. O(tokens)."""
        self._cache.enter(token_ids, namespace, now)
        return self.found(token_ids, namespace) == len(token_ids)

    def note_load(self, tokens) -> None:
        """So many tokens are on their way to the GPU's memory."""
        self.loaded_tokens += tokens
        self._unpaid += tokens

    def take_seconds(self) -> float:
        """How long what was noted since the last call takes to load."""
        tokens, self._unpaid = self._unpaid, 0
        return tokens * self.token_seconds

    def take_lost(self) -> list[PrefixEvicted | AllBlocksCleared]:
        """What it had no room for since the last call, oldest first."""
        return self._cache.take_events()
