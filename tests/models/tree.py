"""Naive models of the two compiled trees, to hold them against. Owns nothing of the product and shares no code with it.

A token position is one entry in a dictionary; its key is the namespace and all tokens up to and including this one.
There is no path compression and no linked list: who was used least recently is the order of a dictionary, everything
else is searched for from scratch. Only where nodes end (`ends`) is kept as well, because hits are counted and prefixes
forgotten by the node.
"""

from __future__ import annotations

from collections.abc import Hashable

Tokens = tuple[int, ...]
Key = tuple[Hashable, Tokens]


def prefixes(namespace: Hashable, tokens: Tokens) -> list[Key]:
    """Every position of a prompt, first to last."""
    return [(namespace, tokens[:n]) for n in range(1, len(tokens) + 1)]


def starts_with(key: Key, prefix: Key) -> bool:
    """Whether `prefix` is a position on the way to `key`, or `key` itself."""
    return key[0] == prefix[0] and key[1][: len(prefix[1])] == prefix[1]


class Hits:
    """Numbers of the windows in which something was hit. Where the clock jumped back, hits count in the latest one."""

    def __init__(self, windows: list[int] | None = None) -> None:
        self.windows = windows or []

    def add(self, window: int) -> None:
        self.windows.append(max([window, *self.windows]))

    def seen(self, window: int) -> int:
        """Hits in this window and the one before."""
        window = max([window, *self.windows])
        return self.windows.count(window) + self.windows.count(window - 1)

    def estimate(self, window: int, part: float) -> float:
        """Hits in this window, and of the one before the share that is not yet a whole window ago."""
        latest = max([window, *self.windows])
        part = part if latest == window else 0.0
        return self.windows.count(latest) + self.windows.count(latest - 1) * (1.0 - part)


class NaiveTree:
    """What `RadixTree` promises, in the plainest terms. Sizes are never bounded here; prompts are tuples."""

    def __init__(self, window_seconds: float) -> None:
        self.window_seconds = window_seconds
        self.hits: dict[Key, Hits] = {}  # every known position
        self.ends: set[Key] = set()  # positions where a node ends
        self.namespaces: set[Hashable] = set()
        self.capacity: dict[int, int] = {}
        self.cached: dict[int, dict[Key, None]] = {}  # by worker; least recently used position first
        self.worker_hits: dict[tuple[int, Key], Hits] = {}  # while the worker caches the first token of the node

    # --- facts --------------------------------------------------------------------------------------------------------

    def window(self, now: float) -> int:
        return int(now / self.window_seconds) if now > 0 else 0

    def estimate(self, hits: Hits | None, now: float) -> float:
        part = now / self.window_seconds - self.window(now) if now > 0 else 0.0
        return hits.estimate(self.window(now), part) if hits is not None else 0.0

    def known(self, namespace: Hashable, tokens: Tokens) -> int:
        return sum(key in self.hits for key in prefixes(namespace, tokens))

    def match(self, namespace: Hashable, tokens: Tokens) -> tuple[int, dict[int, int]]:
        path = prefixes(namespace, tokens)
        matched = {worker: sum(key in cached for key in path) for worker, cached in self.cached.items()}
        return self.known(namespace, tokens), {worker: count for worker, count in matched.items() if count}

    def hits_of(self, namespace: Hashable, tokens: Tokens, now: float, worker: int | None) -> float:
        deepest = (namespace, tokens[: self.known(namespace, tokens)])
        return self.estimate(self.hits.get(deepest) if worker is None else self.worker_hits.get((worker, deepest)), now)

    def victims(self, worker: int, need_tokens: int, now: float) -> list[tuple[int, float]]:
        """(tokens up to and including this one, hits) of each token that eviction would take, in order."""
        taken = list(self.cached[worker])[: max(0, need_tokens)]
        return [(len(key[1]), self.estimate(self.worker_hits[worker, key], now)) for key in taken]

    def node_start(self, key: Key) -> Key:
        """The first position of the node that `key` lies in."""
        namespace, tokens = key
        first = max((n for n in range(1, len(tokens)) if (namespace, tokens[:n]) in self.ends), default=0)
        return namespace, tokens[: first + 1]

    def mark_count(self) -> int:
        starts = {self.node_start(end) for end in self.ends}
        return sum(start in cached for start in starts for cached in self.cached.values())

    def is_dead(self, key: Key, now: float) -> bool:
        """Cached nowhere and not hit in this window or the one before."""
        cached_nowhere = not any(self.node_start(key) in cached for cached in self.cached.values())
        return cached_nowhere and self.hits[key].seen(self.window(now)) == 0

    # --- changes ------------------------------------------------------------------------------------------------------

    def add_worker(self, capacity_tokens: int) -> int:
        worker = next(i for i in range(len(self.capacity) + 1) if i not in self.capacity)
        self.capacity[worker] = capacity_tokens
        self.cached[worker] = {}
        return worker

    def drop_worker(self, worker: int) -> None:
        self.clear_worker(worker)
        del self.capacity[worker], self.cached[worker]

    def clear_worker(self, worker: int) -> int:
        dropped = len(self.cached[worker])
        self.cached[worker].clear()
        self.settle()
        return dropped

    def insert(self, namespace: Hashable, tokens: Tokens, now: float, worker: int | None, is_hit: bool) -> int:
        path = prefixes(namespace, tokens)
        known = self.known(namespace, tokens)
        self.namespaces.add(namespace)
        self.ends |= {path[-1]} | ({path[known - 1]} if known else set())
        self.settle()
        counters = [self.hits.setdefault(key, Hits()) for key in path]
        if worker is not None:
            counters += [self.worker_hits.setdefault((worker, key), Hits()) for key in path]
            self.use(worker, path)
        if is_hit:
            for counter in counters:
                counter.add(self.window(now))
        self.settle()
        return known

    def use(self, worker: int, path: list[Key]) -> None:
        """Cache a path; the last token is used before the first, so that eviction takes a path from its end."""
        cached = self.cached[worker]
        for key in reversed(path):
            cached.pop(key, None)
            cached[key] = None
        while len(cached) > self.capacity[worker]:
            del cached[next(iter(cached))]

    def unmark(self, namespace: Hashable, tokens: Tokens, worker: int, kept_tokens: int) -> int:
        if self.known(namespace, tokens) <= kept_tokens:
            return 0
        first = (namespace, tokens[: kept_tokens + 1])
        gone = [key for key in self.cached[worker] if starts_with(key, first)]
        for key in gone:
            del self.cached[worker][key]
        self.settle()
        return len(gone)

    def settle(self) -> None:
        """A worker's hits at a node are lost with the last of its tokens that the worker caches there."""
        for worker, key in list(self.worker_hits):
            if self.node_start(key) not in self.cached[worker]:
                del self.worker_hits[worker, key]

    def forget(self, gone: set[Key]) -> None:
        """Forget positions, and namespaces that have none."""
        self.ends -= gone
        for key in gone:
            del self.hits[key]
        self.namespaces = {key[0] for key in self.hits}


class NaiveHold:
    """A prefix in use; its last token is `tokens[-1]`."""

    def __init__(self, namespace: Hashable, tokens: Tokens) -> None:
        self.namespace = namespace
        self.tokens = tokens


class NaiveSlots:
    """What `SlotTree` promises: a slot for each cached token; prefixes in use stay, the others go LRU, leaf first."""

    def __init__(self) -> None:
        self.slots: dict[Key, int] = {}  # every cached position
        self.unused: dict[Key, None] = {}  # those in no hold, least recently used first
        self.holds: list[NaiveHold] = []

    def matched(self, namespace: Hashable, tokens: Tokens) -> int:
        return sum(key in self.slots for key in prefixes(namespace, tokens))

    def is_held(self, key: Key) -> bool:
        return any(starts_with((hold.namespace, hold.tokens), key) for hold in self.holds)

    def hold(self, namespace: Hashable, tokens: Tokens, max_tokens: int | None) -> NaiveHold:
        matched = self.matched(namespace, tokens)
        hold = NaiveHold(namespace, tokens[: matched if max_tokens is None else min(matched, max(0, max_tokens))])
        self.holds.append(hold)
        self.settle([])
        return hold

    def slots_of(self, hold: NaiveHold) -> list[int]:
        return [self.slots[key] for key in prefixes(hold.namespace, hold.tokens)]

    def extend(self, hold: NaiveHold, tokens: Tokens, slots: list[int]) -> list[int]:
        """Cache what is not; returns the slots of what is."""
        redundant = []
        for key, slot in zip(prefixes(hold.namespace, tokens)[len(hold.tokens) :], slots, strict=True):
            if key in self.slots:
                redundant.append(slot)
            else:
                self.slots[key] = slot
        hold.tokens = tokens
        self.settle([])
        return redundant

    def release(self, hold: NaiveHold) -> None:
        self.holds.remove(hold)
        self.settle(prefixes(hold.namespace, hold.tokens))

    def settle(self, released: list[Key]) -> None:
        """Positions in a hold are not up for eviction; those of a released path become so, its last token first."""
        for key in [key for key in self.unused if self.is_held(key)]:
            del self.unused[key]
        for key in reversed(released):
            if not self.is_held(key):
                self.unused[key] = None

    def evict(self, need_tokens: int) -> list[tuple[Key, int]]:
        """The positions and slots freed, in order."""
        freed = [(key, self.slots.pop(key)) for key in list(self.unused)[: max(0, need_tokens)]]
        for key, _ in freed:
            del self.unused[key]
        return freed
