"""The local scheduler: what one worker computes in each iteration. Paper section 4.3, Sarathi's chunked prefill.

The calls of a request's life are compiled, complete in themselves, and extended here by the reports
(`batching/iterations.pyx`); they conduct the waiting queue (`batching/waiting_queue`) and the KV cache
(`batching/kv_cache`). Knows no model, no engine, no socket and no clock but the one it is given.

Life of a request
  1. `add` puts it into the waiting queue, in the priority group of the share of its prompt that is cached now.
  2. `next_batch` admits it: its cached prefix is held against eviction, all but the last token, whose logits are
     needed.
  3. The rest of the prompt is computed in chunks. After each, `complete` publishes the computed tokens in the prefix
     tree, so that other requests share them at once.
  4. The last chunk samples the first output token; from then on it decodes, one token in each iteration, into slots of
     its own.
  5. When memory runs out, the newest running request is preempted: what it computed becomes cache, which may be
     evicted, and it goes to the head of the queue with its output. Resumed, it computes what is no longer cached and
     continues as if nothing had happened: the tokens decide the output, not where their KV came from.
  6. At a stop token, at its length, or when cancelled, all it computed stays in the tree as cache until evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, cast

from .batching._batch import Batch, BatchItem, StepOutput
from .batching.iterations import IterationCore
from .batching.kv_cache import HostMemory
from .batching.requests import Int32Array, LocalConfig, LocalLoad, LocalRequest
from .clock import Clock
from .errors import InvalidInput

if TYPE_CHECKING:
    from .batching.stats import LocalStats

__all__ = ["Batch", "BatchItem", "LocalConfig", "LocalLoad", "LocalRequest", "LocalScheduler", "StepOutput"]


class LocalScheduler(IterationCore):
    """Forms batches for one engine: `add` requests, then in turn `next_batch`, run it, `complete` it.

    `config`: a LocalConfig. `clock` is any callable that gives seconds (default: the monotonic clock); it is asked only
    where `now`, in seconds, is left out. `host`: a HostMemory behind the GPU's, which what is evicted goes to.
    Not thread-safe: one thread drives it. A request over the bound of the queue is refused with `QueueFull`.
    """

    def __init__(self, config: LocalConfig, *, clock: Clock | None = None, host: HostMemory | None = None) -> None:
        super().__init__(config, clock=clock, host=host)

    # --- KV that other engines take, or give --------------------------------------------------------------------------

    def cached_tokens(self, token_ids: Int32Array, namespace: Hashable = None) -> int:
        """Returns the length of the longest cached prefix of `token_ids` in `namespace`. Changes nothing. Raises
        nothing. O(its length)."""
        return self._cache.cached_tokens(token_ids, namespace)

    def cached_slots(self, token_ids: Int32Array, namespace: Hashable = None, now: float | None = None) -> Int32Array:
        """Returns the KV slots of the longest cached prefix of `token_ids` in `namespace`, in order of position; they
        hold its KV until the next call that changes something. Counts as a use, at `now`. Raises `InvalidTime`.
        O(its length)."""
        return self._cache.slots_cached(token_ids, namespace, self._time(now))

    def adopt(
        self,
        token_ids: Int32Array,
        namespace: Hashable,
        write: Callable[[int, Int32Array], None],
        now: float | None = None,
    ) -> int:
        """Cache `token_ids` in `namespace`, at `now`, whose KV another engine has computed: `write(known, slots)`
        stores that of the tokens from position `known` on in their `slots`. Returns how many of them are cached then:
        all or, where running requests need the memory, those that were. Raises `InvalidTime`, `InvalidInput` while a
        batch is in flight, and what `write` does; then nothing is added. O(their number)."""
        if self._batch is not None:
            raise InvalidInput(f"batch {self._batch.step} is in flight: complete or discard it first")
        return self._cache.adopt(token_ids, namespace, len(self._running), write, self._time(now))

    # --- reports ------------------------------------------------------------------------------------------------------

    def load(self) -> LocalLoad:
        """Returns the load at this moment. Changes nothing. Raises nothing. O(1)."""
        return LocalLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used_tokens=self.config.kv_capacity_tokens - self._cache.available_tokens,
            kv_cached_tokens=self._cache.cached_total,
            waiting_uncached_tokens=self._waiting.uncached_tokens,
        )

    def stats(self) -> LocalStats:
        """Returns counters since the start and sizes now. Changes nothing. Raises nothing. O(priority groups).

        `prompt_tokens` and `cached_tokens` count each request once, at its first admission; `deferred` the times a
        request was delayed because a running one was computing its prefix.
        """
        steps, arrived = self._positions()
        found = {
            **self._counts(),
            **self.load()._asdict(),
            "steps": steps,
            "arrived": arrived,
            "overdue_picks": self._waiting.overdue_picks,
            "cache_looks": self._waiting.cache_looks,
            "group_sizes": self._waiting.group_sizes(),
            "oldest_arrival_seconds": self._waiting.oldest_arrival_seconds(),
            "free_tokens": self._cache.free_tokens,
            "evictions": self._cache.evictions,
            "evicted_tokens": self._cache.evicted_tokens,
            "collapsed_events": self._cache.collapsed_events,
        }
        return cast("LocalStats", found)

    def check(self) -> None:
        """Assert every invariant, among them that each KV slot has exactly one owner. Raises AssertionError.
        O(capacity)."""
        self._waiting.check()
        assert len(self._live) == len(self._running) + len(self._waiting), "a live request neither runs nor waits"
        running = len(self._running)
        assert running <= self._places, f"{running} requests run, there is room for {self._places}"
        assert self._running == sorted(self._running, key=attrgetter("number")), "running requests are out of order"
        for live in self._running:
            hold = live.hold
            assert hold is not None and not hold.released, f"{live.request.request_id} runs without a hold"
            assert hold.matched_tokens <= live.computed < live.known_tokens <= live.max_tokens
            assert live.decoding or hold.matched_tokens == live.computed, "computed prompt tokens are not published"
            assert live.scheduled == 0 or self._batch is not None, "tokens are scheduled in no batch"
            self._cache.check_hold(hold, live.slots, live.tokens, live.request.namespace)
        self._cache.check(list(self._private_slots()))

    def _private_slots(self) -> Iterator[Int32Array]:
        """Slots that running requests own outside the tree."""
        for live in self._running:
            if live.hold is not None:
                yield live.slots[live.hold.matched_tokens : live.computed + live.scheduled]

    def show(self) -> str:
        """Returns the running requests, the waiting ones by group, and the tree, as text for people. Raises nothing.
        O(capacity)."""
        lines = [f"running {len(self._running)}, waiting {len(self._waiting)} in groups {self._waiting.group_sizes()}"]
        for live in self._running:
            phase = "decode" if live.decoding else "prefill"
            progress = f"{live.computed}/{live.known_tokens} computed, {live.output_count} output"
            lines.append(f"  {live.request.request_id}: {phase} {progress}")
        return "\n".join([*lines, self._cache.show()])
