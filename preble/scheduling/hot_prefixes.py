"""The prefixes that most work is for, and which workers have them. Owns how they are ranked and named; what is counted
of each is `_placement/prefix_groups.pyx`'s, and nothing is counted before somebody watches, or a policy takes plans
(docs/experiments/rebalancing.md).

A prefix is shown by its length and a name, never by its tokens: the name is a keyed hash, so that nobody without the
key can try whether a prompt they guess is among them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..types import check_int
from .rebalance_planner import Group, by_node
from .rebalancer import counted_groups

GlobalScheduler = Any  # the class is above this module, which is handed it
NAMES_MAX = 4096  # prefixes whose name is kept; their tokens need not be hashed again
HOLDERS_MAX = 16  # workers listed for each prefix


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker that serves a prefix, or caches the greater part of it. `requests` and `load` (share of the worker's
    time) are of the window, `cached_tokens` of the prefix are estimated to be there."""

    worker: str
    requests: int
    load: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that several requests begin with. `holders` are the most loaded workers of `holders_count`."""

    name: str
    prefix_tokens: int
    requests: int
    load: float
    has_namespace: bool
    holders: tuple[Holder, ...]
    holders_count: int


class HotPrefixes:
    """Asks schedulers for their hot prefixes. `key` makes the names: the same for the same prefix and key.

    Not thread-safe; the scheduler may be in use by any thread meanwhile.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._names: dict[tuple[int, int, int], str] = {}
        self._names_of: GlobalScheduler = None

    def watch(self, scheduler: GlobalScheduler) -> None:
        """Let the scheduler count from now on: 4,096 places of 96 bytes, and some instructions for each booking."""
        with scheduler.core.tree:
            scheduler.core.groups.start()

    def top(self, scheduler: GlobalScheduler, count: int, *, without: Collection[str] = ()) -> list[SharedPrefix]:
        """The `count` prefixes with most load since `watch`, the most loaded first. No worker of `without`, such as one
        that is lost, is named as a holder. Watches, and changes nothing else but names. The writers' lock is held for
        slices: 512 counted places, or one prefix and all workers."""
        check_int("count", count, 1, 1000)
        self.watch(scheduler)
        if scheduler is not self._names_of:
            self._names, self._names_of = {}, scheduler
        shares = by_node(counted_groups(scheduler.core, scheduler.now(), 0.0))
        ranked = sorted(shares, key=lambda node: (-sum(share.load for share in shares[node]), node))
        found = (self._prefix(scheduler, shares[node], without) for node in ranked[:count])
        return [prefix for prefix in found if prefix is not None]

    def _prefix(
        self, scheduler: GlobalScheduler, shares: Sequence[Group], without: Collection[str] = ()
    ) -> SharedPrefix | None:
        """One prefix; None if it has been forgotten in the meantime."""
        core, group = scheduler.core, shares[0]
        with scheduler.core.tree:
            if not core.groups.lives(group.node, group.generation):
                return None
            name = self._name(core, group)
            has_namespace = core.groups.namespace(group.node) is not None
            held = [
                (worker, core.groups.held(group.node, i))
                for i, worker in enumerate(core.names)
                if worker and worker not in without
            ]
            names = {share.worker: core.names[share.worker] for share in shares}
        asked = {names[share.worker]: share for share in shares}
        holders = sorted(
            _holders(asked, held, group.prefix_tokens), key=lambda one: (-one.load, -one.cached_tokens, one.worker)
        )
        return SharedPrefix(
            name=name,
            prefix_tokens=group.prefix_tokens,
            requests=sum(share.requests for share in shares),
            load=sum(share.load for share in shares),
            has_namespace=has_namespace,
            holders=tuple(holders[:HOLDERS_MAX]),
            holders_count=len(holders),
        )

    def _name(self, core: Any, group: Group) -> str:
        at = (group.node, group.generation, group.prefix_tokens)
        if at not in self._names:
            namespace, token_ids = core.groups.prefix(group.node)
            hashed = hashlib.blake2b(repr(namespace).encode(), digest_size=4, key=self._key)
            hashed.update(array("i", token_ids).tobytes())
            if len(self._names) >= NAMES_MAX:
                self._names.clear()
            self._names[at] = hashed.hexdigest()
        return self._names[at]


def _holders(asked: dict[str | None, Group], held: Iterable[tuple[str, int]], prefix_tokens: int) -> Iterable[Holder]:
    """Who was asked for the prefix, and who has the greater part of it; the first words of it many may have."""
    for worker, cached_tokens in held:
        share = asked.get(worker)
        if share is not None:
            yield Holder(worker, share.requests, share.load, cached_tokens)
        elif 2 * cached_tokens > prefix_tokens:
            yield Holder(worker, 0, 0.0, cached_tokens)
