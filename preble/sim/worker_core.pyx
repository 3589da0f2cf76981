"""When the iterations of a simulated worker begin and end, compiled: what happens once for each of them. Owns the
iteration that runs, and the stretch of those that are alike; `worker.py` says what these are.
"""

from libc.math cimport fmax, fmin
from libc.stdint cimport int64_t

from preble.batching._batch cimport Batch
from preble.batching.iterations cimport IterationCore
from preble.sim.event_queue cimport EventQueue

from ..errors import InvalidInput, QueueFull


cdef class SimWorkerCore:
    """An engine that runs whenever it has work; see `SimWorker`."""

    def __init__(self, engine, IterationCore scheduler not None, EventQueue timeline not None, deliver, *,
                 double step_seconds, double step_seconds_per_request, int64_t stretch_min, reported):
        self.engine = engine
        self.scheduler = scheduler
        self.timeline = timeline
        self.deliver = deliver
        self.on_end, self.on_stretch_end = self._end, self._end_stretch
        self.step_seconds, self.step_seconds_per_request = step_seconds, step_seconds_per_request
        self.stretch_min = stretch_min
        self.reported = reported
        self.slowness = 1.0
        self.left = {}
        self.taken_over = []

    def submit(self, request_id, token_ids, planned_ids, claim=None) -> bool:
        """Queue a request; False if the engine refuses it, or is dead and nobody has noticed yet."""
        if self.dead:
            return True                          # it is lost: whoever notices the death sends it elsewhere
        if self.stretch:
            self.cut()
        try:
            self.engine.submit_planned(request_id, token_ids, planned_ids, claim)
        except (QueueFull, InvalidInput):
            return False
        if not self.running:
            self.begin()
        return True

    def abort(self, request_id) -> None:
        """End a request without further tokens."""
        if self.stretch:
            self.cut()
            self.catch_up()
        self.engine.abort(request_id)

    def cached_tokens(self, token_ids) -> int:
        """How many leading tokens are cached; of a dead one, none."""
        return 0 if self.dead else self.engine.scheduler.cached_tokens(token_ids)

    def hold_up(self, double seconds) -> None:
        """The engine stands still for so long before its next iteration; one that idles, from now on."""
        if self.dead or seconds <= 0.0:
            return
        if self.stretch:
            self.cut()
        if self.running:
            self.held_seconds += seconds
        else:
            self.idle_from = fmax(self.idle_from, self.timeline.now) + seconds

    def take_over(self, token_ids, double token_seconds, done) -> None:
        """Cache tokens by KV of another worker before the next iteration, for which the engine stands still, so long
        for each that was not cached; then call `done` with how many of them were cached before, and are now. A dead
        one never does."""
        if self.dead:
            return
        if self.stretch:
            self.cut()
        self.taken_over.append((token_ids, token_seconds, done))
        if not self.running:
            self.begin()

    def slow_down(self, double factor) -> None:
        """What iterations take is multiplied by `factor`, from the next one on."""
        if self.stretch:
            self.cut()
        self.slowness = factor

    def settle(self, double until_seconds) -> None:
        """The simulation is over: what ends by then has ended."""
        cdef int ended = 0
        if self.stretch:
            while ended < self.stretch and self.ends[self.passed + ended] <= until_seconds:
                ended += 1
            self.book(ended)
            self.timeline.pass_by(self.stretch_begun)

    @property
    def iterations(self) -> int:
        """How many have begun; right between stretches, and after `settle`."""
        return self.iterations_begun + (self.stretch > 0)

    def busy_seconds(self, double until_seconds) -> float:
        """Seconds of its iterations, up to a moment that is not before now; as `iterations`."""
        if self.stretch:
            return self.busy + (fmin(until_seconds, self.ends[self.passed]) - self.stretch_begun)
        return self.busy + (fmin(until_seconds, self.end_seconds) - self.begun if self.running else 0.0)

    def output_counts(self) -> dict[str, int]:
        """Output tokens so far of each request that it has, by id; of a dead one, of those it had."""
        if self.stretch:
            self.catch_up()
        return self.left if self.dead else self.scheduler.output_counts()

    def die(self) -> None:
        """Stop at once; what it computes is never reported."""
        self.left = self.output_counts()
        self.busy = self.busy_seconds(self.timeline.now)
        if self.stretch:
            self.iterations_begun += 1
            self.timeline.cancel(self.stretch_event)
            self.stretch = 0
        self.running = False
        self.dead = True
        self.taken_over.clear()
        self.engine.close()

    cdef int begin(self) except -1:
        cdef int64_t steps
        cdef double seconds
        cdef Batch batch
        if self.taken_over:
            self.take_over_waiting()
        self.held_seconds += fmax(self.idle_from - self.timeline.now, 0.0)
        steps = self.scheduler.steady()
        if steps >= self.stretch_min and not self.held_seconds:
            return self.begin_stretch(min(steps, <int64_t> STRETCH_MAX))
        seconds = self.engine.begin_step()
        self.running = seconds > 0.0 or self.engine.has_work()   # a cost model may say that work takes no time
        if self.running:
            batch = self.scheduler._batch
            self.begun = self.timeline.now
            seconds += self.host_seconds(0 if batch is None else len(batch.lives))
            self.end_seconds = self.begun + seconds * self.slowness + self.held_seconds
            self.iterations_begun += 1
            self.timeline.at(self.end_seconds, self.on_end)
        self.idle_from = 0.0 if self.running else self.timeline.now + self.held_seconds
        self.held_seconds = 0.0
        return 0

    cdef int take_over_waiting(self) except -1:
        waiting, self.taken_over = self.taken_over, []
        for token_ids, token_seconds, done in waiting:
            known = cached = self.cached_tokens(token_ids)
            if known < len(token_ids):
                cached = self.engine.scheduler.adopt(token_ids, None, copied)
                self.held_seconds += <double> token_seconds * max(cached - known, 0)
            done(known, cached)
        return 0

    cdef double host_seconds(self, int64_t requests) noexcept:
        """What an iteration of so many requests takes beside the model."""
        return self.step_seconds + self.step_seconds_per_request * requests

    def _end(self, _) -> None:
        """The iteration that runs has ended."""
        if self.dead:
            return
        self.busy += self.end_seconds - self.begun
        outputs = self.engine.end_batch()
        events = self.scheduler.take_events()
        if events:
            events = self.reported(events)
        self.begin()                             # first: what follows from the outputs may submit to this very worker
        if outputs or events:
            self.deliver(self, outputs, events)

    # --- stretches ----------------------------------------------------------------------------------------------------

    cdef int begin_stretch(self, int64_t steps) except -1:
        cdef double now = self.timeline.now
        cdef double beside = self.host_seconds(len(self.scheduler._running))
        cdef list ends = self.engine.steady_ends(steps, now, beside, self.slowness)
        cdef int64_t i
        for i in range(steps):
            self.ends[i] = ends[i]
        self.stretch, self.passed, self.stretch_begun = <int> steps, 0, now
        self.stretch_order = self.timeline.take_number()
        self.running = True
        return self.plan_stretch_end()

    cdef int plan_stretch_end(self) except -1:
        """Its event is that of its last end, at the place that this one would have among others."""
        place = (self.begun_after(self.stretch - 1), self.stretch_order)
        self.stretch_event = self.timeline.at(
            self.ends[self.passed + self.stretch - 1], self.on_stretch_end, None, place)
        return 0

    def _end_stretch(self, _) -> None:
        """The last of its iterations has ended."""
        assert self.stretch, "its event was cancelled with it"
        self.book(self.stretch)
        self.begin()

    cdef double begun_after(self, int ended) noexcept:
        """When the one begins before which so many end."""
        return self.ends[self.passed + ended - 1] if ended else self.stretch_begun

    cdef int cut(self) except -1:
        """Something comes: the stretch ends with the iteration that now runs."""
        cdef int ended = self.ended_by_now()
        if self.stretch > ended + 1:
            self.stretch = ended + 1
            self.timeline.cancel(self.stretch_event)
            return self.plan_stretch_end()
        return 0

    cdef int catch_up(self) except -1:
        """What has ended by now is booked."""
        return self.book(self.ended_by_now())

    cdef int ended_by_now(self) noexcept:
        """How many of its iterations have ended before the event that now happens. The last has not: its end would have
        been an event before this one."""
        cdef double now = self.timeline.now, planned
        cdef int ended = 0
        while ended < self.stretch - 1 and self.ends[self.passed + ended] < now:
            ended += 1
        while ended < self.stretch - 1 and self.ends[self.passed + ended] == now:
            planned = self.begun_after(ended)
            if planned > self.timeline.since:
                break
            if planned == self.timeline.since and self.stretch_order >= self.timeline.order:
                break
            ended += 1
        return ended

    cdef int book(self, int ended) except -1:
        """The first so many of its iterations have ended; it begins with the next."""
        cdef double begun = self.stretch_begun, busy = self.busy
        cdef int i
        for i in range(self.passed, self.passed + ended):
            busy += self.ends[i] - begun
            begun = self.ends[i]
        self.busy, self.stretch_begun = busy, begun
        self.passed += ended
        self.stretch -= ended
        self.iterations_begun += ended
        self.engine.run_steady(ended)
        return 0


def copied(known, slots) -> None:
    """Nothing is stored: the simulated engine has no KV."""
