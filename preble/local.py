"""The local scheduler: what one worker computes in each iteration. Paper section 4.3, Sarathi's chunked prefill.

Owns the state of one worker's requests, from `add` to the last token, and conducts the waiting queue
(`batching/waiting_queue`) and the KV cache (`batching/kv_cache`). Knows no model, no engine, no socket and no clock but
the one it is given.

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

import math
from bisect import insort
from collections.abc import Callable, Hashable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, cast

from .batching._batch import (
    Batch,
    BatchItem,
    LiveRequest,
    StepOutput,
    book_steps,
    decoding_count,
    next_contexts,
    prefilling,
    steps_left,
)
from .batching._kv_slots import Hold
from .batching.kv_cache import HostMemory, KvCache
from .batching.requests import Int32Array, LocalConfig, LocalLoad, LocalRequest
from .batching.retention import Retention
from .batching.waiting_queue import WaitingQueue
from .clock import Clock, monotonic
from .errors import DuplicateRequest, InvalidInput, InvalidTime, QueueFull
from .types import AllBlocksCleared, PrefixEvicted

if TYPE_CHECKING:
    from .batching.stats import LocalStats

__all__ = ["Batch", "BatchItem", "LocalConfig", "LocalLoad", "LocalRequest", "LocalScheduler", "StepOutput"]

STEP_KEPT = 0.8  # of how long iterations took, with each one more
DEFERRALS_PER_ROUND = 64
SHORT_LOOKS = 8  # waiting requests that are passed over for shorter ones, an iteration
CUT_SHORT = ()  # how an answer ended that was cancelled
COUNTERS = (
    *("admitted", "finished", "cancelled", "preempted", "deferred", "too_late"),
    *("prompt_tokens", "cached_tokens", "computed_tokens"),
)
_by_arrival = attrgetter("number")


class LocalScheduler:
    """Forms batches for one engine: `add` requests, then in turn `next_batch`, run it, `complete` it.

    `config`: a LocalConfig. `clock` is any callable that gives seconds (default: the monotonic clock); it is asked only
    where `now`, in seconds, is left out. `host`: a HostMemory behind the GPU's, which what is evicted goes to.
    Not thread-safe: one thread drives it. A request over the bound of the queue is refused with `QueueFull`.
    """

    def __init__(self, config: LocalConfig, *, clock: Clock | None = None, host: HostMemory | None = None) -> None:
        self.config = config
        self._clock = monotonic if clock is None else clock
        retention = Retention() if config.eviction == "returns" else None
        self._cache = KvCache(config.kv_capacity_tokens, retention=retention, host=host)
        self._waiting = WaitingQueue(config, self._cache)
        self._running: list[LiveRequest] = []  # oldest first
        self._places = config.max_running  # who runs decodes in every iteration, so all must fit its budget
        if config.chunked_prefill:
            self._places = min(self._places, config.token_budget)
        self._live: dict[str, LiveRequest] = {}  # request id -> every request, waiting or running
        self._batch: Batch | None = None  # in flight
        self._arrived = 0
        self._step = 0
        self._decodes_till_look = 0
        self._begun_seconds = 0.0  # when the batch in flight began
        self._step_seconds = 0.0  # of the iterations that prefilled lately; 0 before the first
        self._counts = dict.fromkeys(COUNTERS, 0)

    # --- requests come and go -----------------------------------------------------------------------------------------

    def add(self, request: LocalRequest, now: float | None = None) -> None:
        """Queue `request`, at `now`. O(its cached prefix).

        Raises `DuplicateRequest`, `QueueFull`, `InvalidTime`, or `InvalidInput` where prompt and output together could
        never fit the KV capacity; then nothing has changed.
        """
        now = self._time(now)
        if request.request_id in self._live:
            raise DuplicateRequest(f"request {request.request_id!r} is live")
        needed = len(request.token_ids) + request.max_new_tokens - 1  # the last output token is never computed
        if needed > self.config.kv_capacity_tokens:
            raise InvalidInput(
                f"request {request.request_id!r} needs {needed} KV tokens (prompt {len(request.token_ids)}, "
                f"max_new_tokens {request.max_new_tokens}), kv_capacity_tokens is {self.config.kv_capacity_tokens}"
            )
        if len(self._waiting) >= self.config.max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests wait, max_waiting is {self.config.max_waiting}")
        live = LiveRequest(request, self._arrived, now)
        self._arrived += 1
        self._live[request.request_id] = live
        self._waiting.add(live)
        live.follows = self._cache.ask(live.known, request.namespace, now)

    def cancel(self, request_id: str, now: float | None = None) -> bool:
        """End the request with `request_id` in any state, at `now`. What it computed stays cached. Returns False if it
        is not live. Raises `InvalidTime`. O(its tokens).

        If it is part of a batch in flight, that part of the batch counts for nothing.
        """
        now = self._time(now)
        live = self._live.get(request_id)
        if live is None:
            return False
        if live.hold is None:
            self._waiting.remove(live)
            self._cache.give_up(live.follows, now)
        else:
            self._drop_in_flight(live)
            self._stop_running(live, CUT_SHORT, now)
            self._waiting.charge_output(live)
        del self._live[request_id]
        self._counts["cancelled"] += 1
        return True

    # --- the next batch -----------------------------------------------------------------------------------------------

    def next_batch(self, now: float | None = None) -> Batch:
        """Choose what the engine computes next, at `now`. Returns a Batch, empty if nothing is live.
        O(running requests + tokens of the batch).

          1. Make room for the decodes: evict cached tokens that nobody holds; where that is not enough, preempt the
             newest.
          2. Every decoding request gets one token, oldest first.
          3. While a prefill is under way, waiting requests whose own fits whole into half of the token budget are
             admitted before it goes on, in the queue's order (`LocalConfig.short_first`).
          4. Requests in the middle of their prefill get chunks of what is left of the token budget, oldest first.
          5. Waiting requests are admitted in the queue's order while budget, places and memory last, each with its
             first chunk.

        Raises `InvalidInput` while an earlier batch is neither completed nor discarded, `InvalidTime`.
        """
        now = self._time(now)
        if self._batch is not None:
            raise InvalidInput(f"batch {self._batch.step} is in flight: complete or discard it first")
        batch = Batch(self._step)
        if self.config.chunked_prefill:
            self._schedule_decodes(batch, now)  # 1., 2.
            budget, under_way = self.config.token_budget - len(batch), prefilling(self._running)
            if under_way and self.config.short_first:
                budget -= self._admit_short(batch, budget // 2, under_way, now)  # 3.
            budget = self._schedule_prefills(batch, budget, under_way, now)  # 4.
            self._admit(batch, budget, now)  # 5.
        else:
            self._prefill_or_decode(batch, now)
        assert batch or not self._live, "requests are live and none can run"
        if batch:
            self._batch = batch
            self._begun_seconds = now
            self._step += 1
        return batch

    def _prefill_or_decode(self, batch: Batch, now: float) -> None:
        """Without chunks: whole prompts if any can be admitted, else a decode iteration.

        A prefill is under way already only where the iteration that should have computed it was discarded.
        """
        self._schedule_prefills(batch, self.config.kv_capacity_tokens, prefilling(self._running), now)
        if not batch and self._decodes_till_look == 0:
            self._admit(batch, self.config.token_budget, now)
        if batch:
            return
        self._schedule_decodes(batch, now)
        self._decodes_till_look = (self._decodes_till_look or self.config.decodes_per_look) - 1
        if not batch:  # nothing decodes: nothing to wait for
            self._decodes_till_look = 0
            self._admit(batch, self.config.token_budget, now)

    def _schedule_decodes(self, batch: Batch, now: float) -> None:
        """A token for every decoding request, after preempting until each can have a slot.

        The oldest alone always can: `add` saw to it. They fit the budget: each took at least a token of it to be
        admitted.
        """
        while (count := decoding_count(self._running)) > self._cache.free_tokens:  # mostly false, and cheap
            if count <= self._cache.available_tokens:
                break
            self._preempt(self._running[-1], now)
        if count:
            batch.add_decodes(self._running, self._cache.take(count, now))

    def _admit_short(self, batch: Batch, budget: int, under_way: list[LiveRequest], now: float) -> int:
        """Admit waiting requests that are computed whole within a budget, and leave those under way the memory that
        they need; returns what they take. At most `SHORT_LOOKS` others are passed over."""
        taken = passed_over = 0
        needed = sum(live.prefill_end - live.computed for live in under_way)
        self._waiting.begin_round()
        while taken < budget and len(self._running) < self._places and passed_over < SHORT_LOOKS:
            live = self._waiting.peek(now)
            if live is None:
                break
            is_short = live.uncached_now <= budget - taken and not self._is_being_computed(live)
            is_short = is_short and not self._is_too_late(live, now)
            if is_short and self._start_running(live, now, spared=needed):
                count = live.prefill_end - live.computed
                batch.add_chunk(live, self._cache.take(count, now))
                taken += count
            else:
                self._waiting.defer(live)
                passed_over += 1
        self._waiting.end_round()
        return taken

    def _schedule_prefills(self, batch: Batch, budget: int, under_way: list[LiveRequest], now: float) -> int:
        """Give chunks to requests in mid-prefill; returns the budget left.

        A chunk shrinks to the memory there is, down to nothing where decodes have grown into what was there at its
        admission: they end and leave theirs. Without decodes all of it is there, so that something can always run.
        """
        for live in under_way:
            count = min(budget, live.prefill_end - live.computed, self._cache.available_tokens)
            if count == 0:
                break
            batch.add_chunk(live, self._cache.take(count, now))
            budget -= count
        return budget

    def _admit(self, batch: Batch, budget: int, now: float) -> None:
        """Admit waiting requests. The first that does not fit ends the round, so that smaller ones do not starve it."""
        if budget <= 0 or len(self._running) >= self._places or not self._waiting:
            return
        self._waiting.begin_round()
        deferrals = 0
        while budget > 0 and len(self._running) < self._places and deferrals < DEFERRALS_PER_ROUND:
            live = self._waiting.peek(now)
            if live is None:
                break
            if self._is_being_computed(live):
                self._waiting.defer(live)
                deferrals += 1
                continue
            if self._is_too_late(live, now):
                self._waiting.put_last(live)
                self._counts["too_late"] += 1
                continue
            if not self.config.chunked_prefill and len(batch) and live.uncached_now > budget:
                break  # it is computed whole, in a later iteration; a longer one than the budget goes alone
            if not self._start_running(live, now):
                break
            count = live.prefill_end - live.computed
            if self.config.chunked_prefill:
                count = min(budget, count)
            batch.add_chunk(live, self._cache.take(count, now))
            budget -= count
        self._waiting.end_round()
        self._counts["deferred"] += deferrals

    def _is_being_computed(self, live: LiveRequest) -> bool:
        """True if a running request is prefilling tokens that this one shares and would otherwise compute as well.

        They must be at least `min_shared_tokens` beyond what is cached now. Such a request is admitted once they are.
        It cannot be delayed for ever: whatever shares more with it than what is cached is itself delayed by the same
        running request.
        """
        extra = self.config.min_shared_tokens
        end = live.cached_now + extra
        if extra == 0 or end >= live.known_tokens:
            return False
        return any(other.prefill_end >= end and _share(other, live, end, extra) for other in prefilling(self._running))

    def _is_too_late(self, live: LiveRequest, now: float) -> bool:
        """True if a newcomer's first token would come after its deadline though it went now, by how long iterations
        that prefill have taken lately."""
        claim = live.request.claim
        if claim is None or claim.deadline_seconds is None or live.resumes or self._waiting.is_last(live):
            return False
        chunk = max(self.config.token_budget - len(self._running), 1)
        steps = -(-live.uncached_now // chunk) if self.config.chunked_prefill else 1
        return now + steps * self._step_seconds > live.arrival_seconds + claim.deadline_seconds

    def _start_running(self, live: LiveRequest, now: float, spared: int = 0) -> bool:
        """Move a waiting request to the running ones, holding its cached prefix, if memory allows and so many tokens
        of it stay; False otherwise.

        Memory allows it if its own prefill and the next token of every running request fit into what is free or
        evictable; chunks of this batch have their slots already, and a prefill that this batch does not finish
        leaves no budget, or no memory, for others. Outputs are not reserved: most end early, and preemption covers
        the rest. A request preempted for this batch does not fit into it, for what it left is what was missing.
        """
        reserved = len(self._running) + spared
        if live.uncached_now + reserved > self._cache.available_tokens:
            return False  # holding its prefix could only leave less
        hold = self._cache.hold(live.known, live.request.namespace, live.known_tokens - 1, now)
        if live.known_tokens - hold.matched_tokens + reserved > self._cache.available_tokens:
            self._cache.release(hold, now)
            return False
        self._waiting.take(live)
        self._cache.admit(live.follows)
        live.hold = hold
        live.computed = hold.matched_tokens
        live.prefill_end = live.known_tokens
        live.make_buffers()
        live.slots[: live.computed] = self._cache.slots_of(hold)
        insort(self._running, live, key=_by_arrival)
        if live.cached_tokens is None:
            live.cached_tokens = live.computed
            self._counts["prompt_tokens"] += live.known_tokens
            self._counts["cached_tokens"] += live.computed
        self._counts["admitted"] += 1
        return True

    # --- the batch is done --------------------------------------------------------------------------------------------

    def complete(self, batch: Batch, tokens: Mapping[str, int], now: float | None = None) -> list[StepOutput]:
        """Book a computed `batch`, at `now`; `tokens` maps the request id of every item that samples to its token id.

        Returns the output tokens in the order of the items. Tokens of requests cancelled meanwhile are ignored. O(items
        + tokens computed). Raises `InvalidTime`, and `InvalidInput` if `batch` is not the one in flight or a token is
        missing or out of range; then nothing has changed.
        """
        now = self._time(now)
        if not batch:
            return []
        self._check_in_flight(batch)
        picked = batch.sampled(tokens)
        outputs: list[StepOutput] = []
        for live in batch.book_decodes(picked, outputs):
            self._end(live, now)
        self._counts["computed_tokens"] += len(outputs)
        if batch.prefill_tokens:
            for live, token in zip(batch.prefills, picked[batch.decode_count :], strict=True):
                if live.scheduled:  # not cancelled in flight
                    self._book_chunk(batch, live, token, outputs, now)
            self._note_step(now - self._begun_seconds)
        self._batch = None
        return outputs

    def _note_step(self, seconds: float) -> None:
        """An iteration that prefilled took so long."""
        kept = STEP_KEPT if self._step_seconds else 0.0
        self._step_seconds = kept * self._step_seconds + (1.0 - kept) * max(seconds, 0.0)

    def discard(self, batch: Batch) -> None:
        """Give up `batch`, which the engine failed to compute: nothing of it counts, its requests run on.

        Raises `InvalidInput` if `batch` is not the one in flight. O(items).
        """
        if not batch:
            return
        self._check_in_flight(batch)
        for live in batch.lives:
            self._drop_in_flight(live)
        self._batch = None

    def _check_in_flight(self, batch: Batch) -> None:
        if batch is not self._batch:
            raise InvalidInput(f"batch {batch.step} is not the one in flight")

    def _book_chunk(
        self, batch: Batch, live: LiveRequest, token: int | None, outputs: list[StepOutput], now: float
    ) -> None:
        """A prefill chunk is computed: publish it at once. What a decode computes stays private until it ends."""
        self._counts["computed_tokens"] += live.scheduled
        output = batch.book_chunk(live, token)
        self._published(live, now)
        if output is not None:
            outputs.append(output)
            if output.finish_reason is not None:
                self._end(live, now)

    def _end(self, live: LiveRequest, now: float) -> None:
        """A request has its last token."""
        self._stop_running(live, _ending(live), now)
        self._waiting.charge_output(live)
        del self._live[live.request.request_id]
        self._counts["finished"] += 1

    # --- many steps at once -------------------------------------------------------------------------------------------

    def steady_steps(self) -> int:
        """Returns how many of the iterations to come are alike, whatever is sampled: the same requests decode, none
        ends, nobody is admitted and nothing is evicted. Only requests with `planned_ids` make such. Changes nothing.
        Raises nothing. O(running requests)."""
        running = self._running
        if not running or self._batch is not None or (self._waiting and len(running) < self.config.max_running):
            return 0
        return self._decodes_left()

    def _decodes_left(self) -> int:
        """Iterations that those who run can all decode, without an end and without more memory."""
        return min(steps_left(self._running), self._cache.free_tokens // len(self._running))

    def steady_contexts(self) -> list[int]:
        """Returns the context tokens of each request in the first of these iterations. Changes nothing. Raises nothing.
        O(running requests)."""
        return next_contexts(self._running)

    def run_steady(self, steps: int) -> None:
        """Do what `steps` calls of `next_batch` and `complete` would have done, at most `steady_steps()` as it was when
        they began; who came meanwhile waits. Raises AssertionError. O(tokens)."""
        assert steps == 0 or not self._running or steps <= self._decodes_left(), f"{steps} iterations are not alike"
        count = steps * len(self._running)
        book_steps(self._running, steps, self._cache.take(count, self._begun_seconds))
        self._counts["computed_tokens"] += count
        self._step += steps
        if not self.config.chunked_prefill:
            self._decodes_till_look = (self._decodes_till_look - steps) % self.config.decodes_per_look

    # --- leaving the running ones -------------------------------------------------------------------------------------

    def _preempt(self, live: LiveRequest, now: float) -> None:
        """Send a running request back to the head of the queue; its output is kept, its KV becomes evictable cache."""
        live.follows = self._cache.suspend(self._published(live, now), live.follows, now)
        self._leave_running(live)
        self._waiting.put_back(live)
        self._counts["preempted"] += 1

    def _stop_running(self, live: LiveRequest, ending: tuple[int, ...], now: float) -> None:
        """Leave all that an ended request computed in the tree as cache."""
        self._cache.finish(self._published(live, now), ending, live.follows, now)
        self._leave_running(live)

    def _leave_running(self, live: LiveRequest) -> None:
        """The request holds nothing any more."""
        live.hold = None
        live.drop_slots()
        self._running.remove(live)

    def _published(self, live: LiveRequest, now: float) -> Hold:
        """The hold of a running request, whose computed tokens are all in the tree."""
        hold = live.hold
        assert hold is not None
        self._cache.publish(hold, live.tokens[: live.computed], live.slots[: live.computed], now)
        return hold

    def _drop_in_flight(self, live: LiveRequest) -> None:
        """Free the slots of tokens that are scheduled and will not count."""
        if live.scheduled:
            self._cache.give(live.slots[live.computed : live.computed + live.scheduled])
            live.scheduled = 0

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

    def take_events(self) -> list[PrefixEvicted | AllBlocksCleared]:
        """Returns the evictions since the last call, oldest first. See `KvCache` for what happens if nobody calls.
        Raises nothing. O(events)."""
        return self._cache.take_events()

    def load(self) -> LocalLoad:
        """Returns the load at this moment. Changes nothing. Raises nothing. O(1)."""
        return LocalLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used_tokens=self.config.kv_capacity_tokens - self._cache.available_tokens,
            kv_cached_tokens=self._cache.cached_total,
            waiting_uncached_tokens=self._waiting.uncached_tokens,
        )

    @property
    def running_count(self) -> int:
        """Requests that are admitted, and have not ended."""
        return len(self._running)

    def output_counts(self) -> dict[str, int]:
        """Returns the output tokens so far of every live request, by id. Changes nothing. Raises nothing.
        O(live requests)."""
        return {request_id: live.output_count for request_id, live in self._live.items()}

    def stats(self) -> LocalStats:
        """Returns counters since the start and sizes now. Changes nothing. Raises nothing. O(priority groups).

        `prompt_tokens` and `cached_tokens` count each request once, at its first admission; `deferred` the times a
        request was delayed because a running one was computing its prefix.
        """
        found = {
            **self._counts,
            **self.load()._asdict(),
            "steps": self._step,
            "arrived": self._arrived,
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
        assert self._running == sorted(self._running, key=_by_arrival), "running requests are out of order"
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

    def _time(self, now: float | None) -> float:
        seconds = self._clock() if now is None else now
        if not math.isfinite(seconds):
            raise InvalidTime(f"now must be finite, got {seconds!r}")
        return seconds


def _ending(live: LiveRequest) -> tuple[int, ...]:
    """The tokens with which an answer ended: the last, and the one before where that is one that ends answers."""
    last = live.known_tokens - 1
    stopped = int(live.tokens[last]) in live.request.stop_token_ids
    return tuple(int(token) for token in live.tokens[last - stopped : last + 1])


def _share(other: LiveRequest, live: LiveRequest, end: int, extra: int) -> bool:
    """True if both start with the same `end` tokens. Compares the last `extra` first: there most pairs differ."""
    if other.request.namespace != live.request.namespace:
        return False
    mine, theirs = live.tokens[:end], other.tokens[:end]
    return bool((mine[-extra:] == theirs[-extra:]).all() and (mine == theirs).all())
