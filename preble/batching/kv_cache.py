"""The KV cache of one worker: a pool of slots, the prefix tree that owns most of them, and reports of evictions.

Owns who holds a slot; knows nothing of queues, batches or budgets. What is evicted first is its `Retention`'s to say,
where it has one. Not thread-safe: `LocalScheduler` is its only user.
Every slot is exactly one of: free (in the pool), owned by the tree, or owned by a running request (taken and not yet
published).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable

import numpy as np
import numpy.typing as npt

from ..types import AllBlocksCleared, PrefixEvicted, check_int, check_seconds
from ._kv_slots import Hold, SlotTree
from .requests import Int32Array
from .retention import Retention

EVENTS_MAX = 4096
EVENT_TOKENS_MAX = 1 << 22
EVICT_SHARE = 256
NO_END = -1
HOST = "CPU"  # what host memory is called in events, as by vLLM


class SlotPool:
    """A stack of free KV slot ids, 0 .. capacity - 1. The slot freed last is taken first."""

    def __init__(self, capacity: int) -> None:
        self._stack = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self.free_count = capacity

    @property
    def free_slots(self) -> Int32Array:
        """The free slots. A view, for checks."""
        return self._stack[: self.free_count]

    def take(self, count: int) -> Int32Array:
        """Remove `count` slots from the pool. A view that holds until slots are given back."""
        assert 0 <= count <= self.free_count, f"took {count} of {self.free_count} free slots"
        self.free_count -= count
        return self._stack[self.free_count : self.free_count + count]

    def give(self, slots: npt.ArrayLike) -> None:
        """Put slots back. Cost: their number."""
        returned = np.asarray(slots, np.int32)
        end = self.free_count + len(returned)
        assert end <= len(self._stack), "more slots given back than exist"
        self._stack[self.free_count : end] = returned
        self.free_count = end


class KvCache:
    """Prefix tree and slot pool as one: hold a cached prefix, take slots for new tokens, publish them, let them go.

    Evictions become events. Where nobody takes the events and they reach `events_max` or `event_tokens_max`, all
    pending ones collapse into a single `AllBlocksCleared`: the router then expects less than is cached, never more.

    `host`: where what is evicted goes, and from where what is asked for comes back; None: it is gone.
    """

    def __init__(
        self,
        capacity_tokens: int,
        *,
        retention: Retention | None = None,
        host: HostMemory | None = None,
        events_max: int = EVENTS_MAX,
        event_tokens_max: int = EVENT_TOKENS_MAX,
    ) -> None:
        self.capacity_tokens = capacity_tokens
        self.version = 0  # +1 at each change of what is cached
        self.evicted_tokens = 0
        self.evictions = 0
        self.collapsed_events = 0
        self._retention = retention  # None: what was used least recently goes first
        self._host = host
        self._tree = SlotTree()
        self._pool = SlotPool(capacity_tokens)
        self._events: list[PrefixEvicted | AllBlocksCleared] = []
        self._event_tokens = 0
        self._events_max = events_max
        self._event_tokens_max = event_tokens_max

    # --- reads --------------------------------------------------------------------------------------------------------

    @property
    def free_tokens(self) -> int:
        """Slots that hold nothing."""
        return self._pool.free_count

    @property
    def cached_total(self) -> int:
        """Tokens in the tree, held or not."""
        return self._tree.worker_tokens(0)

    @property
    def available_tokens(self) -> int:
        """Slots that `take` can supply: free ones and those of cached tokens that nobody holds."""
        return self._pool.free_count + self._tree.worker_tokens(0) - self._tree.pinned_tokens

    def cached_tokens(self, token_ids: Int32Array, namespace: Hashable) -> int:
        """Length of the longest cached prefix. Changes nothing. Cost: its length."""
        return self._tree.matched(token_ids, namespace=namespace)

    def slots_of(self, hold: Hold) -> Int32Array:
        """Slots of a held prefix, in order of position. Changes nothing."""
        return np.asarray(self._tree.slots(hold), np.int32)

    # --- changes ------------------------------------------------------------------------------------------------------

    def hold(self, token_ids: Int32Array, namespace: Hashable, max_tokens: int, now: float) -> Hold:
        """Pin the longest cached prefix, at most `max_tokens` of it, against eviction. What host memory has more of it
        is loaded, if that pays."""
        if self._host is not None:
            self._load(self._host, token_ids, namespace, max_tokens, now)
        return self._tree.hold(token_ids, now, namespace=namespace, max_tokens=max_tokens)

    def _load(self, host: HostMemory, token_ids: Int32Array, namespace: Hashable, max_tokens: int, now: float) -> None:
        found = min(host.found(token_ids, namespace), max_tokens)
        here = self.cached_tokens(token_ids, namespace)
        if found > here and host.pays(here, found, len(token_ids)):
            host.note_load(self.enter(token_ids[:found], namespace, now))
            host.keep(token_ids[:found], namespace, now)

    def enter(self, token_ids: npt.ArrayLike, namespace: Hashable, now: float) -> int:
        """Cache a prefix that was not computed here, as the most recently used; returns the tokens of it that were not
        cached, 0 where these do not fit. Cost: its length."""
        tokens = np.asarray(token_ids, np.int32)
        hold = self._tree.hold(tokens, now, namespace=namespace, max_tokens=len(tokens))
        held, new = hold.matched_tokens, len(tokens) - hold.matched_tokens
        fits = new <= self.available_tokens
        if new and fits:
            slots = np.empty(len(tokens), np.int32)
            slots[:held] = self.slots_of(hold)
            slots[held:] = self.take(new, now)
            self.publish(hold, tokens, slots, now)
        self._tree.release(hold, now)
        return new if fits else 0

    def publish(self, hold: Hold, token_ids: Int32Array, slots: Int32Array, now: float) -> None:
        """Make `token_ids`, whose KV is in `slots`, a cached and held prefix that others can share at once.

        Both have the full length, from position 0. Where the tree cached some of the tokens meanwhile, its slots stay
        and the given ones are freed; `slots` is corrected in place. Cost: the number of tokens.
        """
        new = len(token_ids) - hold.matched_tokens
        if new == 0:
            return
        redundant = self._tree.extend(hold, token_ids, slots[hold.matched_tokens :], now)
        if len(redundant):
            self._pool.give(redundant)
            slots[:] = self.slots_of(hold)
        if len(redundant) < new:
            self.version += 1

    def release(self, hold: Hold, now: float) -> None:
        """Unpin a held prefix; it stays cached, as the most recently used."""
        self._tree.release(hold, now)

    def take(self, count: int, now: float) -> Int32Array:
        """Take `count` slots for new tokens, evicting where too few are free. `count` is at most `available_tokens`.

        Evicts a little more than asked, the last leaf in part: a full cache would otherwise evict and report in every
        iteration.
        """
        missing = count - self._pool.free_count
        if missing > 0:
            self._evict(max(missing, self.capacity_tokens // EVICT_SHARE), now)
        return self._pool.take(count)

    def give(self, slots: Int32Array) -> None:
        """Free slots that were taken and never published."""
        self._pool.give(slots)

    # --- KV that comes from elsewhere, or goes there ------------------------------------------------------------------

    def slots_cached(self, token_ids: Int32Array, namespace: Hashable, now: float) -> Int32Array:
        """Slots of the longest cached prefix, in order of position, to be read before anything else is done. Counts as
        a use. Cost: its length."""
        hold = self.hold(token_ids, namespace, len(token_ids), now)
        slots = self.slots_of(hold)
        self.release(hold, now)
        return slots

    def adopt(
        self,
        token_ids: Int32Array,
        namespace: Hashable,
        spared: int,
        write: Callable[[int, Int32Array], None],
        now: float,
    ) -> int:
        """Cache `token_ids` whose KV somebody else has computed: `write(known, slots)` puts that of the tokens from
        `known` on into their slots. Returns how many are cached then: all of them or, where that would leave less than
        `spared` of what `take` can supply, those that were. Where `write` raises, nothing is added. Cost: their number.
        """
        hold = self.hold(token_ids, namespace, len(token_ids), now)
        try:
            known = hold.matched_tokens
            new = len(token_ids) - known
            if new == 0 or new + spared > self.available_tokens:
                return known
            slots = self.take(new, now).copy()  # not a view of what is free again, should `write` fail
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

    def ask(self, token_ids: Int32Array, namespace: Hashable, now: float) -> int:
        """A prompt has come and waits. Returns the number of the end that it goes on from, -1 where none is known.
        Cost: its cached prefix."""
        if self._retention is None:
            return NO_END
        _, number = self._tree.reach(token_ids, namespace=namespace)
        return number if self._retention.asked(number, now) else NO_END

    def admit(self, end: int) -> None:
        """Who asked has its prefix, and holds it."""
        if self._retention is not None:
            self._retention.forget(end)

    def give_up(self, end: int, now: float) -> None:
        """Who asked has gone without it."""
        if self._retention is not None:
            self._retention.unwanted(end, now)

    def finish(self, hold: Hold, ending: Hashable, end: int, now: float) -> None:
        """Let a prefix go whose request has ended, its answer with these tokens; it went on from `end`."""
        number = self._tree.end_of(hold)
        self._tree.release(hold, now)
        if self._retention is not None:
            self._retention.ended(number, ending, now)
            if end not in (NO_END, number):
                self._retention.die(end, now)

    def suspend(self, hold: Hold, end: int, now: float) -> int:
        """Let a prefix go whose request, which went on from `end`, waits to go on; returns the number of its end, as
        `ask` does."""
        number = self._tree.end_of(hold)
        self._tree.release(hold, now)
        if self._retention is None:
            return NO_END
        if end not in (NO_END, number):
            self._retention.die(end, now)
        self._retention.want(number, now)
        return number

    # --- evictions ----------------------------------------------------------------------------------------------------

    def take_events(self) -> list[PrefixEvicted | AllBlocksCleared]:
        """Evictions since the last call, oldest first."""
        events, self._events, self._event_tokens = self._events, [], 0
        return events

    def _evict(self, need_tokens: int, now: float) -> None:
        before = self.evicted_tokens
        while self._retention is not None and (end := self._retention.victim(now)) is not None:
            freed, reports, left = self._tree.evict_end(end.number, need_tokens)
            if len(freed):
                self._retention.evicted(end, left, now)
                self._book_eviction(freed, reports, now)
            else:
                self._retention.forget(end.number)  # somebody holds it, or its prefix goes on
            need_tokens -= len(freed)
            if need_tokens <= 0:
                break
        if need_tokens > 0:
            self._book_eviction(*self._tree.evict(need_tokens), now)
        self.version += 1
        self.evictions += self.evicted_tokens > before

    def _book_eviction(self, freed: array[int], reports: list[tuple[array[int], int, Hashable]], now: float) -> None:
        self._pool.give(freed)
        self.evicted_tokens += len(freed)
        for token_ids, kept_tokens, namespace in reports:
            moved = self._host is not None and self._host.keep(token_ids, namespace, now)
            self._report(PrefixEvicted(token_ids, kept_tokens, namespace, HOST if moved else None))
        if self._host is not None:
            self._report_lost(self._host)

    def _report_lost(self, host: HostMemory) -> None:
        """What host memory has lost is gone, as far as it is not here."""
        for event in host.take_lost():
            if isinstance(event, AllBlocksCleared):  # more than anybody could list
                self._report(event)
                continue
            kept = max(event.kept_tokens, self._tree.matched(event.token_ids, namespace=event.namespace))
            if kept < len(event.token_ids):
                self._report(PrefixEvicted(event.token_ids, kept, event.namespace))

    def _report(self, event: PrefixEvicted | AllBlocksCleared) -> None:
        self._event_tokens += 0 if isinstance(event, AllBlocksCleared) else len(event.token_ids)
        self._events.append(event)
        if len(self._events) > self._events_max or self._event_tokens > self._event_tokens_max:
            self.collapsed_events += len(self._events)
            self._events, self._event_tokens = [AllBlocksCleared()], 0

    # --- checks -------------------------------------------------------------------------------------------------------

    def check(self, private_slots: list[Int32Array]) -> None:
        """Assert the tree's invariants and that every slot has exactly one owner.

        `private_slots` are those that running requests own outside the tree. Cost: the capacity.
        """
        self._tree.check()
        if self._retention is not None:
            self._retention.check()
        owners = np.zeros(self.capacity_tokens, np.int32)
        np.add.at(owners, self._pool.free_slots, 1)
        for slots in private_slots:
            np.add.at(owners, slots, 1)
        assert owners.max() <= 1, f"slot {int(owners.argmax())} has two owners"
        unowned = self.capacity_tokens - int(owners.sum())
        assert unowned == self.cached_total, f"{unowned} slots are unowned, the tree caches {self.cached_total} tokens"

    def check_hold(self, hold: Hold, slots: Int32Array, token_ids: Int32Array, namespace: Hashable) -> None:
        """Assert that a request's view of its held prefix is the tree's: same slots, and still cached."""
        if not hold.matched_tokens:
            return
        held = self.slots_of(hold)
        assert np.array_equal(held, slots[: len(held)]), "a running request's slots differ from the tree's"
        assert self.cached_tokens(token_ids[: len(held)], namespace) == len(held), "a held prefix is not cached"
        free = np.isin(held, self._pool.free_slots)
        assert not free.any(), f"slot {int(held[free.argmax()])} is free and held"

    def show(self) -> str:
        """The tree as text."""
        return self._tree.show()


# --- host memory behind the GPU's: what is evicted there goes here, and comes back when a prompt asks for it ---------


def always(here: int, found: int, prompt_tokens: int) -> bool:
    """Load whatever is there, as the engines do."""
    return True


class HostMemory:
    """A cache of `capacity_tokens`; a token takes `token_seconds` to load. `pays(here, found, prompt_tokens)`: whether
    to load from `here` to `found` of a prompt's tokens, or to compute them. What is used least recently goes first. Not
    thread-safe. Raises `InvalidConfig`."""

    def __init__(
        self, capacity_tokens: int, token_seconds: float, pays: Callable[[int, int, int], bool] = always
    ) -> None:
        check_int("HostMemory.capacity_tokens", capacity_tokens, 1, 2**31 - 1)
        check_seconds("HostMemory.token_seconds", token_seconds)
        self.token_seconds = token_seconds
        self.pays = pays
        self.loaded_tokens = 0  # since the start
        self._cache = KvCache(capacity_tokens)
        self._unpaid = 0  # loaded, and nobody has waited for it yet

    def found(self, token_ids: npt.ArrayLike, namespace: Hashable) -> int:
        """Tokens of a prompt that it holds, from the first on. Changes nothing. O(found)."""
        return self._cache.cached_tokens(token_ids, namespace)  # type: ignore[arg-type]

    def keep(self, token_ids: npt.ArrayLike, namespace: Hashable, now: float) -> bool:
        """Hold a prefix, or use it again; False where it does not fit. O(tokens)."""
        self._cache.enter(token_ids, namespace, now)
        return self.found(token_ids, namespace) == len(token_ids)  # type: ignore[arg-type]

    def note_load(self, tokens: int) -> None:
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
