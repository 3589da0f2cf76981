"""What one worker computes in each iteration, compiled: the life of a request from `add` to its last token. Owns the
running requests and the batch in flight, and conducts queue and cache; `local.py` says what a request goes through, and
adds what is read of it all.

It is compiled because the simulator runs thousands of such iterations a second. A naive model of it, in which
everything is recomputed at every question, is `tests/models/local.py`.
"""

from libc.math cimport isfinite
from libc.stdint cimport int64_t
from libc.string cimport memcmp

from preble.batching._batch cimport (Batch, LiveRequest, StepOutput, decodes_in, prefills_in, resumes, run_steps,
                                     steps_in, uncached_of)
from preble.batching._kv_slots cimport Hold
from preble.batching.kv_cache cimport KvCache
from preble.batching.waiting_queue cimport WaitingQueue

from ..clock import monotonic
from ..errors import DuplicateRequest, InvalidInput, InvalidTime, QueueFull
from ..types import AllBlocksCleared, PrefixEvicted
from .retention import Retention

cdef enum:
    DEFERRALS_PER_ROUND = 64
    SHORT_LOOKS = 8              # waiting requests that are passed over for shorter ones, an iteration
    RESTS_MAX = 8                # iterations in a row in which batch work does not decode while others prefill

cdef double STEP_KEPT = 0.8      # of how long iterations took, with each one more
cdef tuple CUT_SHORT = ()        # how an answer ended that was cancelled
cdef list NOBODY = []


cdef class IterationCore:
    """What callers ask of a local scheduler for each request and each iteration. Complete in itself; `LocalScheduler`
    adds the reports. One thread drives it."""

    def __init__(self, config, *, clock=None, host=None):
        self.config = config
        self._clock = monotonic if clock is None else clock
        retention = Retention() if config.eviction == "returns" else None
        self._cache = KvCache(config.kv_capacity_tokens, retention=retention, host=host)
        self._waiting = WaitingQueue(config, self._cache)
        self._running = []
        self._live = {}
        self.capacity, self.token_budget = config.kv_capacity_tokens, config.token_budget
        self.max_waiting = config.max_waiting
        self.min_shared_tokens, self.decodes_per_look = config.min_shared_tokens, config.decodes_per_look
        self.chunked, self.short_first = config.chunked_prefill, config.short_first
        self._places = min(config.max_running, config.token_budget) if config.chunked_prefill else config.max_running

    # --- requests come and go -----------------------------------------------------------------------------------------

    def add(self, request, now=None) -> None:
        """Queue `request`, a LocalRequest, at `now`. O(its cached prefix).

        Raises `DuplicateRequest`, `QueueFull`, `InvalidTime`, or `InvalidInput` where prompt and output together could
        never fit the KV capacity; then nothing has changed.
        """
        cdef double at = self.time(now)
        cdef LiveRequest live
        request_id = request.request_id
        if request_id in self._live:
            raise DuplicateRequest(f"request {request_id!r} is live")
        needed = len(request.token_ids) + request.max_new_tokens - 1  # the last output token is never computed
        if needed > self.capacity:
            raise InvalidInput(
                f"request {request_id!r} needs {needed} KV tokens (prompt {len(request.token_ids)}, "
                f"max_new_tokens {request.max_new_tokens}), kv_capacity_tokens is {self.capacity}"
            )
        if len(self._waiting) >= self.max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests wait, max_waiting is {self.max_waiting}")
        live = LiveRequest(request, self.arrived, at)
        self.arrived += 1
        self._live[request_id] = live
        self._waiting.add(live)
        live.follows = self._cache.asked(live, at)

    def cancel(self, request_id, now=None) -> bool:
        """End the request with `request_id` in any state, at `now`. What it computed stays cached. Returns False if it
        is not live. Raises `InvalidTime`. O(its tokens).

        If it is part of a batch in flight, that part of the batch counts for nothing.
        """
        cdef double at = self.time(now)
        cdef LiveRequest live = self._live.get(request_id)
        if live is None:
            return False
        if live.hold is None:
            self._waiting.remove(live)
            self._cache.give_up(live.follows, at)
        else:
            self.drop_in_flight(live)
            self.stop_running(live, CUT_SHORT, at)
            self._waiting.charge_output(live, live.output_count)
        del self._live[request_id]
        self.cancelled += 1
        return True

    # --- the next batch -----------------------------------------------------------------------------------------------

    def next_batch(self, now=None) -> Batch:
        """Choose what the engine computes next, at `now`. Returns a Batch, empty if nothing is live.
        O(running requests + tokens of the batch).

          1. Make room for the decodes: evict cached tokens that nobody holds; where that is not enough, preempt the
             newest.
          2. Every decoding request gets one token, oldest first.
          3. While a prefill is under way, waiting requests whose own fits whole into half of the token budget are
             admitted before it goes on, in the queue's order (`LocalConfig.short_first`), unless it would miss its
             deadline by that.
          4. Requests in the middle of their prefill get chunks of what is left of the token budget, oldest first.
          5. Waiting requests are admitted in the queue's order while budget, places and memory last, each with its
             first chunk.

        Batch work yields (`Claim.priority`): its prefills under way come after those of others, and after others that
        wait, who leave them the memory that they need; and while others prefill it does not decode, for `RESTS_MAX`
        iterations in a row. So what others wait for is hardly longer for it.

        Raises `InvalidInput` while an earlier batch is neither completed nor discarded, `InvalidTime`.
        """
        cdef double at = self.time(now)
        if self._batch is not None:
            raise InvalidInput(f"batch {self._batch.step} is in flight: complete or discard it first")
        return self.formed(at)

    cdef Batch formed(self, double now):
        cdef Batch batch = Batch(self.step)
        cdef int64_t budget
        cdef list under_way
        if self.chunked and self.yielding:
            self.form_by_class(batch, now)
        elif self.chunked:
            self.schedule_decodes(batch, now, False)                             # 1., 2.
            budget = self.token_budget - len(batch.lives)
            under_way = prefills_in(self._running)
            if under_way and self.short_first:
                budget -= self.admit_short(batch, budget // 2, under_way, now)   # 3.
            budget = self.schedule_prefills(batch, budget, under_way, now)       # 4.
            self.admit(batch, budget, now, NOBODY)                               # 5.
        else:
            self.prefill_or_decode(batch, now)
        assert batch.lives or not self._live, "requests are live and none can run"
        if batch.lives:
            self._batch = batch
            self.begun_seconds = now
            self.step += 1
        return batch

    cdef int form_by_class(self, Batch batch, double now) except -1:
        """As in 1. to 5., where batch work runs."""
        cdef LiveRequest live
        cdef int64_t budget
        cdef list under_way, urgent, behind
        cdef bint resting = self.rests()
        self.rested = self.rested + 1 if resting else 0
        self.schedule_decodes(batch, now, resting)
        budget = self.token_budget - len(batch.lives)
        under_way = prefills_in(self._running)
        urgent = [live for live in under_way if not live.yields]
        behind = [live for live in under_way if live.yields]
        if urgent and self.short_first:
            budget -= self.admit_short(batch, budget // 2, under_way, now)
        budget = self.schedule_prefills(batch, budget, urgent, now)
        if behind:
            budget = self.admit(batch, budget, now, behind)
            budget = self.schedule_prefills(batch, budget, behind, now)
        self.admit(batch, budget, now, NOBODY)
        if resting and not batch.lives:          # what rests has the memory that the others lack
            self.schedule_decodes(batch, now, False)
            if not batch.lives:                  # and was preempted: the others have it now
                self.schedule_prefills(batch, self.token_budget, prefills_in(self._running), now)
        return 0

    cdef bint rests(self):
        """Whether batch work decodes nothing in this iteration: others prefill, and it has not rested for long."""
        cdef LiveRequest live
        if self.rested < RESTS_MAX:
            for live in self._running:
                if live.computed < live.prefill_end and not live.yields:
                    return True
        return False

    cdef int prefill_or_decode(self, Batch batch, double now) except -1:
        """Without chunks: whole prompts if any can be admitted, else a decode iteration.

        A prefill is under way already only where the iteration that should have computed it was discarded.
        """
        self.schedule_prefills(batch, self.capacity, prefills_in(self._running), now)
        if not batch.lives and self.decodes_till_look == 0:
            self.admit(batch, self.token_budget, now, NOBODY)
        if batch.lives:
            return 0
        self.schedule_decodes(batch, now, False)
        self.decodes_till_look = (self.decodes_till_look or self.decodes_per_look) - 1
        if not batch.lives:                      # nothing decodes: nothing to wait for
            self.decodes_till_look = 0
            self.admit(batch, self.token_budget, now, NOBODY)
        return 0

    cdef int schedule_decodes(self, Batch batch, double now, bint resting) except -1:
        """A token for every decoding request, but for batch work that is `resting`, after preempting until each can
        have a slot.

        The oldest alone always can: `add` saw to it. They fit the budget: each took at least a token of it to be
        admitted.
        """
        cdef list decoding = awake_in(self._running) if resting else self._running
        cdef int64_t count = decodes_in(decoding)
        while count > self._cache.pool.free_count:       # mostly false, and cheap
            if count <= self._cache.available():
                break
            self.preempt(self._running[len(self._running) - 1], now)
            decoding = awake_in(self._running) if resting else self._running
            count = decodes_in(decoding)
        if count:
            batch.decode(decoding, self._cache.slots_for(count, now))
        return 0

    cdef int64_t admit_short(self, Batch batch, int64_t budget, list under_way, double now) except -1:
        """Admit waiting requests that are computed whole within a budget, and leave those under way the memory that
        they need; returns what they take. At most `SHORT_LOOKS` others are passed over. Nobody is admitted where one
        under way would miss its deadline with such a budget in each iteration."""
        cdef LiveRequest live
        cdef int64_t taken = 0, passed_over = 0, needed = 0, count
        cdef bint is_short
        for live in under_way:
            count = live.prefill_end - live.computed
            needed += count
            if self.is_late_in(live, (count + budget - 1) // max(budget, 1), now):
                return 0
        self._waiting.begin()
        while taken < budget and len(self._running) < self._places and passed_over < SHORT_LOOKS:
            live = self._waiting.next_at(now)
            if live is None:
                break
            is_short = uncached_of(live) <= budget - taken and not self.is_being_computed(live)
            is_short = is_short and not self.is_too_late(live, now)
            if is_short and self.start_running(live, now, needed):
                count = live.prefill_end - live.computed
                batch.compute(live, self._cache.slots_for(count, now), count)
                taken += count
            else:
                self._waiting.put_off(live)
                passed_over += 1
        self._waiting.end()
        return taken

    cdef int64_t schedule_prefills(self, Batch batch, int64_t budget, list under_way, double now) except? -1:
        """Give chunks to requests in mid-prefill; returns the budget left.

        A chunk shrinks to the memory there is, down to nothing where decodes have grown into what was there at its
        admission: they end and leave theirs. Without decodes all of it is there, so that something can always run.
        """
        cdef LiveRequest live
        cdef int64_t count
        for live in under_way:
            count = min(min(budget, live.prefill_end - live.computed), self._cache.available())
            if count == 0:
                break
            batch.compute(live, self._cache.slots_for(count, now), count)
            budget -= count
        return budget

    cdef int64_t admit(self, Batch batch, int64_t budget, double now, list behind) except? -1:
        """Admit waiting requests; returns the budget left. The first that does not fit ends the round, so that smaller
        ones do not starve it. `behind`: prefills under way that others go before; who yields as they do ends the
        round."""
        cdef LiveRequest live
        cdef int64_t deferrals = 0, spared = 0, count
        if budget <= 0 or len(self._running) >= self._places or not len(self._waiting.live):
            return budget
        for live in behind:
            spared += live.prefill_end - live.computed
        self._waiting.begin()
        while budget > 0 and len(self._running) < self._places and deferrals < DEFERRALS_PER_ROUND:
            live = self._waiting.next_at(now)
            if live is None or (spared and live.yields):
                break
            if self.is_being_computed(live):
                self._waiting.put_off(live)
                deferrals += 1
                continue
            if self.is_too_late(live, now):
                self._waiting.put_last(live)
                self.too_late += 1
                continue
            if not self.chunked and len(batch.lives) and uncached_of(live) > budget:
                break                            # computed whole, in a later iteration; a longer one goes alone
            if not self.start_running(live, now, spared):
                break
            count = live.prefill_end - live.computed
            if self.chunked:
                count = min(budget, count)
            batch.compute(live, self._cache.slots_for(count, now), count)
            budget -= count
        self._waiting.end()
        self.deferred += deferrals
        return budget

    cdef bint is_being_computed(self, LiveRequest live) except -1:
        """True if a running request is prefilling tokens that this one shares and would otherwise compute as well.

        They must be at least `min_shared_tokens` beyond what is cached now. Such a request is admitted once they are.
        It cannot be delayed for ever: whatever shares more with it than what is cached is itself delayed by the same
        running request.
        """
        cdef LiveRequest other
        cdef int64_t end = live.cached_now + self.min_shared_tokens
        if self.min_shared_tokens == 0 or end >= live.known_tokens:
            return False
        for other in self._running:
            if other.computed < other.prefill_end and other.prefill_end >= end:
                if share(other, live, end, self.min_shared_tokens):
                    return True
        return False

    cdef bint is_too_late(self, LiveRequest live, double now) except -1:
        """True if a newcomer's first token would come after its deadline though it went now, by how long iterations
        that prefill have taken lately."""
        cdef int64_t chunk, steps = 1
        if live.claim is None or resumes(live) or self._waiting.is_last(live):
            return False
        chunk = max(self.token_budget - <int64_t> len(self._running), 1)
        if self.chunked:
            steps = (uncached_of(live) + chunk - 1) // chunk
        return self.is_late_in(live, steps, now)

    cdef bint is_late_in(self, LiveRequest live, int64_t steps, double now) except -1:
        """True if so many more iterations that prefill end after its deadline, by how long they have taken lately."""
        claim = live.claim
        if claim is None or claim.deadline_seconds is None:
            return False
        return now + steps * self.step_seconds > live.arrival_seconds + <double> claim.deadline_seconds

    cdef bint start_running(self, LiveRequest live, double now, int64_t spared) except -1:
        """Move a waiting request to the running ones, holding its cached prefix, if memory allows and so many tokens
        of it stay; False otherwise.

        Memory allows it if its own prefill and the next token of every running request fit into what is free or
        evictable; chunks of this batch have their slots already, and a prefill that this batch does not finish
        leaves no budget, or no memory, for others. Outputs are not reserved: most end early, and preemption covers
        the rest. A request preempted for this batch does not fit into it, for what it left is what was missing.
        """
        cdef int64_t reserved = len(self._running) + spared
        cdef Hold hold
        if uncached_of(live) + reserved > self._cache.available():
            return False                         # holding its prefix could only leave less
        hold = self._cache.hold_of(live, live.known_tokens - 1, now)
        if live.known_tokens - <int64_t> hold.matched_tokens + reserved > self._cache.available():
            self._cache.let_go(hold)
            return False
        self._waiting.take_it(live)
        self._cache.admitted(live.follows)
        live.hold = hold
        live.computed = hold.matched_tokens
        live.prefill_end = live.known_tokens
        live.make_room()
        self._cache.tree.copy_slots(hold, live.slot_data)
        run_in_order(self._running, live)
        self.yielding += live.yields
        if live.cached_tokens is None:
            live.cached_tokens = live.computed
            self.prompt_tokens += live.known_tokens
            self.cached_tokens += live.computed
        self.admitted += 1
        return True

    # --- the batch is done --------------------------------------------------------------------------------------------

    def complete(self, Batch batch not None, tokens, now=None) -> list[StepOutput]:
        """Book a computed `batch`, at `now`; `tokens` maps the request id of every item that samples to its token id.

        Returns the output tokens in the order of the items. Tokens of requests cancelled meanwhile are ignored. O(items
        + tokens computed). Raises `InvalidTime`, and `InvalidInput` if `batch` is not the one in flight or a token is
        missing or out of range; then nothing has changed.
        """
        cdef double at = self.time(now)
        cdef LiveRequest live
        cdef Py_ssize_t i
        cdef list picked, outputs = []
        if not batch.lives:
            return outputs
        self.check_in_flight(batch)
        picked = batch.sampled(tokens)
        for live in batch.book_decodes(picked, outputs):
            self.end(live, at)
        self.computed_tokens += len(outputs)
        if batch.prefill_tokens:
            for i in range(batch.decode_count, len(batch.lives)):
                live = batch.lives[i]
                if live.scheduled:               # not cancelled in flight
                    self.book_chunk(batch, live, picked[i], outputs, at)
            self.note_step(at - self.begun_seconds)
        self._batch = None
        return outputs

    def complete_planned(self, Batch batch not None, now=None) -> list[StepOutput]:
        """As `complete`, where every request has `planned_ids`, for a simulator: returns only the outputs that are a
        request's first or last, and those of prefills. O(items). Raises as `complete`, and `InvalidInput` for a request
        without a plan; then nothing has changed."""
        cdef double at = self.time(now)
        cdef LiveRequest live = batch.unplanned()
        cdef Py_ssize_t i
        cdef list ended = [], outputs = []
        if live is not None:
            raise InvalidInput(f"complete_planned is for planned_ids; {live.request.request_id!r} has none")
        if not batch.lives:
            return outputs
        self.check_in_flight(batch)
        self.computed_tokens += batch.book_planned_decodes(outputs, ended)
        for live in ended:
            self.end(live, at)
        if batch.prefill_tokens:
            for i in range(batch.decode_count, len(batch.lives)):
                live = batch.lives[i]
                if live.scheduled:               # not cancelled in flight
                    self.book_chunk(batch, live, batch.planned_token(live), outputs, at)
            self.note_step(at - self.begun_seconds)
        self._batch = None
        return outputs

    cdef int note_step(self, double seconds) except -1:
        """An iteration that prefilled took so long."""
        cdef double kept = STEP_KEPT if self.step_seconds else 0.0
        self.step_seconds = kept * self.step_seconds + (1.0 - kept) * max(seconds, 0.0)
        return 0

    def discard(self, Batch batch not None) -> None:
        """Give up `batch`, which the engine failed to compute: nothing of it counts, its requests run on.

        Raises `InvalidInput` if `batch` is not the one in flight. O(items).
        """
        cdef LiveRequest live
        if not batch.lives:
            return
        self.check_in_flight(batch)
        for live in batch.lives:
            self.drop_in_flight(live)
        self._batch = None

    cdef int check_in_flight(self, Batch batch) except -1:
        if batch is not self._batch:
            raise InvalidInput(f"batch {batch.step} is not the one in flight")
        return 0

    cdef int book_chunk(self, Batch batch, LiveRequest live, object token, list outputs, double now) except -1:
        """A prefill chunk is computed: publish it at once. What a decode computes stays private until it ends."""
        cdef StepOutput output
        self.computed_tokens += live.scheduled
        output = batch.booked_chunk(live, token)
        self._cache.published(live)
        if output is not None:
            outputs.append(output)
            if output.finish_reason is not None:
                self.end(live, now)
        return 0

    cdef int end(self, LiveRequest live, double now) except -1:
        """A request has its last token."""
        self.stop_running(live, ending_of(live), now)
        self._waiting.charge_output(live, live.output_count)
        del self._live[live.request.request_id]
        self.finished += 1
        return 0

    # --- many steps at once -------------------------------------------------------------------------------------------

    def steady_steps(self) -> int:
        """Returns how many of the iterations to come are alike, whatever is sampled: the same requests decode, none
        ends, nobody is admitted and nothing is evicted. Only requests with `planned_ids` make such. Changes nothing.
        Raises nothing. O(running requests)."""
        return self.steady()

    cdef int64_t steady(self) noexcept:
        if not self._running or self._batch is not None:
            return 0
        if len(self._waiting.live) and <int64_t> len(self._running) < self._places:
            return 0
        return self.decodes_left()

    cdef int64_t decodes_left(self) noexcept:
        """Iterations that those who run can all decode, without an end and without more memory."""
        return min(steps_in(self._running), self._cache.pool.free_count // <int64_t> len(self._running))

    def steady_contexts(self) -> list[int]:
        """Returns the context tokens of each request in the first of these iterations. Changes nothing. Raises nothing.
        O(running requests)."""
        cdef LiveRequest live
        return [live.computed + 1 for live in self._running]

    def run_steady(self, int64_t steps) -> None:
        """Do what `steps` calls of `next_batch` and `complete` would have done, at most `steady_steps()` as it was when
        they began; who came meanwhile waits. Raises AssertionError. O(tokens)."""
        cdef int64_t count = steps * <int64_t> len(self._running), look
        if count:
            assert steps <= self.decodes_left(), f"{steps} iterations are not alike"
            run_steps(self._running, steps, self._cache.slots_for(count, self.begun_seconds))
        self.computed_tokens += count
        self.step += steps
        self.rested = 0
        if not self.chunked:
            look = (self.decodes_till_look - steps) % self.decodes_per_look
            self.decodes_till_look = look + self.decodes_per_look if look < 0 else look

    # --- leaving the running ones -------------------------------------------------------------------------------------

    cdef int preempt(self, LiveRequest live, double now) except -1:
        """Send a running request back to the head of the queue; its output is kept, its KV becomes evictable cache."""
        live.follows = self._cache.suspend(self._cache.published(live), live.follows, now)
        self.leave_running(live)
        self._waiting.put_back(live)
        self.preempted += 1
        return 0

    cdef int stop_running(self, LiveRequest live, tuple ending, double now) except -1:
        """Leave all that an ended request computed in the tree as cache."""
        self._cache.ended(self._cache.published(live), ending, live.follows, now)
        return self.leave_running(live)

    cdef int leave_running(self, LiveRequest live) except -1:
        """The request holds nothing any more."""
        live.hold = None
        live.drop_slots()
        self._running.remove(live)
        self.yielding -= live.yields
        return 0

    cdef int drop_in_flight(self, LiveRequest live) except -1:
        """Free the slots of tokens that are scheduled and will not count."""
        if live.scheduled:
            self._cache.give_back(live.slot_data + live.computed, live.scheduled)
            live.scheduled = 0
        return 0

    # --- reports ------------------------------------------------------------------------------------------------------

    def take_events(self) -> list[PrefixEvicted | AllBlocksCleared]:
        """Returns the evictions since the last call, oldest first. See `KvCache` for what happens if nobody calls.
        Raises nothing. O(events)."""
        return self._cache.take_events()

    @property
    def running_count(self) -> int:
        """Requests that are admitted, and have not ended."""
        return len(self._running)

    def output_counts(self) -> dict[str, int]:
        """Returns the output tokens so far of every live request, by id. Changes nothing. Raises nothing.
        O(live requests)."""
        cdef LiveRequest live
        return {request_id: live.output_count for request_id, live in self._live.items()}

    def _counts(self) -> dict[str, int]:
        """Counters since the start."""
        return {
            "admitted": self.admitted,
            "finished": self.finished,
            "cancelled": self.cancelled,
            "preempted": self.preempted,
            "deferred": self.deferred,
            "too_late": self.too_late,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.computed_tokens,
        }

    def _positions(self) -> tuple[int, int]:
        """Iterations that have begun, and requests that have come."""
        return self.step, self.arrived

    def _time(self, now) -> float:
        """`now`, or what the clock says. Raises InvalidTime."""
        return self.time(now)

    cdef double time(self, object now) except? -1.0:
        cdef double seconds = self._clock() if now is None else now
        if not isfinite(seconds):
            raise InvalidTime(f"now must be finite, got {seconds!r}")
        return seconds


cdef list awake_in(list running):
    """Those that are no batch work."""
    cdef LiveRequest live
    return [live for live in running if not live.yields]


cdef tuple ending_of(LiveRequest live):
    """The tokens with which an answer ended: the last, and the one before where that is one that ends answers."""
    cdef int64_t last = live.known_tokens - 1
    token = live.token_data[last]
    if live.stops is not None and token in live.stops:
        return live.token_data[last - 1], token
    return (token,)


cdef int run_in_order(list running, LiveRequest live) except -1:
    """Insert by order of arrival; mostly at the end."""
    cdef Py_ssize_t place = len(running)
    while place > 0 and (<LiveRequest> running[place - 1]).number > live.number:
        place -= 1
    running.insert(place, live)
    return 0


cdef bint share(LiveRequest other, LiveRequest live, int64_t end, int64_t extra) except -1:
    """True if both start with the same `end` tokens. Compares the last `extra` first: there most pairs differ."""
    if other.namespace is not live.namespace and other.namespace != live.namespace:
        return False
    if memcmp(live.token_data + end - extra, other.token_data + end - extra, extra * sizeof(live.token_data[0])):
        return False
    return not memcmp(live.token_data, other.token_data, (end - extra) * sizeof(live.token_data[0]))
