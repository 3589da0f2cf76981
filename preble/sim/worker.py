"""One simulated worker: the simulated engine, iteration after iteration on the timeline. Owns when iterations begin and
end; the batches are the real local scheduler's, and what follows from their tokens is the simulation's.

Iterations in which the same requests decode, and none of them ends, are one event (a *stretch*): nothing is to be
decided between them and nothing to be reported. Whatever comes to the worker meanwhile breaks it off at the iteration
that then runs. Times, counters and the order of events are those of single iterations, to the bit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..batching.kv_cache import HostMemory
from ..engines.simulated import SimulatedEngine
from ..errors import InvalidInput, QueueFull
from ..local import StepOutput
from ..types import CacheEvent, Claim, WorkerSpec
from ..workloads.types import Int32Array
from .config import SimConfig
from .timeline import Timeline

Deliver = Callable[["SimWorker", Sequence[StepOutput], Sequence[CacheEvent]], None]
TakeOver = tuple[Int32Array, float, Callable[[int, int], None]]  # tokens, seconds, what is done then
STRETCH_MIN = 2  # iterations; fewer are quicker one by one
STRETCH_MAX = 32  # what is computed ahead may be for nothing


@dataclass(slots=True)
class _Stretch:
    """Iterations that are alike: when the first of them begins, and when each ends. `event`: of the last end; `order`:
    as which of all events each would have been planned."""

    begun: float
    ends: list[float]
    event: int
    order: int

    def begun_after(self, ended: int) -> float:
        """When the one begins before which so many end."""
        return self.ends[ended - 1] if ended else self.begun


class SimWorker:
    """An engine that runs whenever it has work. `deliver(worker, outputs, events)` is called as an iteration ends in
    which a request got its first or last token, or something was evicted; it may be called after others, too."""

    def __init__(self, spec: WorkerSpec, number: int, config: SimConfig, timeline: Timeline, deliver: Deliver) -> None:
        self.name = spec.id
        self.number = number
        self._busy_seconds = 0.0  # of the iterations that have ended
        self._begun = self._end_seconds = 0.0  # when the iteration that runs began, and when it will end
        self._iterations = 0
        self._slowness = 1.0  # what an iteration's time is multiplied by
        running = config.local.max_running if spec.max_running is None else spec.max_running
        local = replace(config.local, kv_capacity_tokens=spec.kv_capacity_tokens, max_running=running)
        host = HostMemory(config.host_tokens, config.host_token_seconds) if config.host_tokens else None
        model = config.engine_model_of(spec)
        self.engine = SimulatedEngine(model, local, clock=timeline.clock, time_scale=0.0, host=host)
        self._timeline = timeline
        self._deliver = deliver
        self._config = config
        self._running = False
        self._dead = False
        self._stretch: _Stretch | None = None
        self._left: dict[str, int] = {}  # output tokens of its requests when it died
        self._held_seconds = 0.0  # by which the next iteration ends later
        self._taken_over: list[TakeOver] = []  # KV that waits for the end of an iteration

    def submit(
        self, request_id: str, token_ids: Int32Array, planned_ids: Int32Array, claim: Claim | None = None
    ) -> bool:
        """Queue a request; False if the engine refuses it, or is dead and nobody has noticed yet."""
        if self._dead:
            return True  # it is lost: whoever notices the death sends it elsewhere
        if self._stretch is not None:
            self._cut(self._stretch)
        try:
            self.engine.submit_planned(request_id, token_ids, planned_ids, claim)
        except (QueueFull, InvalidInput):
            return False
        if not self._running:
            self._begin()
        return True

    def abort(self, request_id: str) -> None:
        """End a request without further tokens."""
        if self._stretch is not None:
            self._cut(self._stretch)
            self._catch_up(self._stretch)
        self.engine.abort(request_id)

    def cached_tokens(self, token_ids: Int32Array) -> int:
        """How many leading tokens are cached; of a dead one, none."""
        return 0 if self._dead else self.engine.scheduler.cached_tokens(token_ids)

    def hold_up(self, seconds: float) -> None:
        """The engine stands still for so long before its next iteration; one that idles has the time."""
        if self._running and not self._dead and seconds > 0.0:
            if self._stretch is not None:
                self._cut(self._stretch)
            self._held_seconds += seconds

    def take_over(self, token_ids: Int32Array, seconds: float, done: Callable[[int, int], None]) -> None:
        """Cache tokens by KV of another worker before the next iteration, for which the engine stands still; then call
        `done` with how many of them were cached before, and are now. A dead one never does."""
        if self._dead:
            return
        if self._stretch is not None:
            self._cut(self._stretch)
        self._taken_over.append((token_ids, seconds, done))
        if not self._running:
            self._begin()

    def slow_down(self, factor: float) -> None:
        """What iterations take is multiplied by `factor`, from the next one on."""
        if self._stretch is not None:
            self._cut(self._stretch)
        self._slowness = factor

    def settle(self, until_seconds: float) -> None:
        """The simulation is over: what ends by then has ended."""
        stretch = self._stretch
        if stretch is not None:
            self._book(stretch, bisect_right(stretch.ends, until_seconds))
            self._timeline.pass_by(stretch.begun)

    @property
    def iterations(self) -> int:
        """How many have begun; right between stretches, and after `settle`."""
        return self._iterations + (self._stretch is not None)

    def busy_seconds(self, until_seconds: float) -> float:
        """Seconds of its iterations, up to a moment that is not before now; as `iterations`."""
        stretch = self._stretch
        if stretch is not None:
            return self._busy_seconds + (min(until_seconds, stretch.ends[0]) - stretch.begun)
        now = min(until_seconds, self._end_seconds)
        return self._busy_seconds + (now - self._begun if self._running else 0.0)

    def output_counts(self) -> dict[str, int]:
        """Output tokens so far of each request that it has, by id; of a dead one, of those it had."""
        if self._stretch is not None:
            self._catch_up(self._stretch)
        return self._left if self._dead else self.engine.scheduler.output_counts()

    def die(self) -> None:
        """Stop at once; what it computes is never reported."""
        self._left = self.output_counts()
        self._busy_seconds = self.busy_seconds(self._timeline.now)
        if self._stretch is not None:
            self._iterations += 1
            self._timeline.cancel(self._stretch.event)
            self._stretch = None
        self._running = False
        self._dead = True
        self._taken_over.clear()
        self.engine.close()

    def _begin(self) -> None:
        if self._taken_over:
            self._take_over_waiting()
        steps = self.engine.steady_steps()
        if steps >= STRETCH_MIN and not self._held_seconds:
            self._begin_stretch(min(steps, STRETCH_MAX))
            return
        seconds = self.engine.begin_step()
        self._running = seconds > 0.0 or self.engine.has_work()  # a cost model may say that work takes no time
        if self._running:
            self._begun = self._timeline.now
            host_seconds = self._host_seconds(self.engine.batch_requests)
            self._end_seconds = self._begun + (seconds + host_seconds) * self._slowness + self._held_seconds
            self._iterations += 1
            self._timeline.at(self._end_seconds, self._end)
        self._held_seconds = 0.0

    def _take_over_waiting(self) -> None:
        waiting, self._taken_over = self._taken_over, []
        for token_ids, seconds, done in waiting:
            known = cached = self.cached_tokens(token_ids)
            if known < len(token_ids):
                cached = self.engine.scheduler.adopt(token_ids, None, _copied)
                self._held_seconds += seconds
            done(known, cached)

    def _host_seconds(self, requests: int) -> float:
        """What an iteration of so many requests takes beside the model."""
        return self._config.step_seconds + self._config.step_seconds_per_request * requests

    def _end(self, _: object) -> None:
        if self._dead:
            return
        self._busy_seconds += self._end_seconds - self._begun
        outputs = self.engine.end_batch()
        events = self._config.reported(self.engine.take_events())
        self._begin()  # first: what follows from the outputs may submit to this very worker
        self._deliver(self, outputs, events)

    # --- stretches ----------------------------------------------------------------------------------------------------

    def _begin_stretch(self, steps: int) -> None:
        now, beside = self._timeline.now, self._host_seconds(self.engine.running_requests)
        ends = self.engine.steady_ends(steps, now, beside, self._slowness)
        order = self._timeline.take_number()
        event = self._timeline.at(ends[-1], self._end_stretch, None, (ends[-2], order))
        self._running = True
        self._stretch = _Stretch(now, ends, event, order)

    def _end_stretch(self, _: object) -> None:
        stretch = self._stretch
        assert stretch is not None, "its event was cancelled with it"
        self._book(stretch, len(stretch.ends))
        self._stretch = None
        self._begin()

    def _cut(self, stretch: _Stretch) -> None:
        """Something comes: the stretch ends with the iteration that now runs."""
        ended = self._ended(stretch)
        if len(stretch.ends) > ended + 1:
            del stretch.ends[ended + 1 :]
            self._timeline.cancel(stretch.event)
            place = (stretch.begun_after(ended), stretch.order)
            stretch.event = self._timeline.at(stretch.ends[-1], self._end_stretch, None, place)

    def _catch_up(self, stretch: _Stretch) -> None:
        """What has ended by now is booked."""
        self._book(stretch, self._ended(stretch))

    def _ended(self, stretch: _Stretch) -> int:
        """How many of its iterations have ended before the event that now happens. The last has not: its end would have
        been an event before this one."""
        now, ended = self._timeline.now, 0
        while stretch.ends[ended] < now:
            ended += 1
        while stretch.ends[ended] == now and (stretch.begun_after(ended), stretch.order) < self._timeline.place:
            ended += 1
        return ended

    def _book(self, stretch: _Stretch, ended: int) -> None:
        """The first so many of its iterations have ended; it begins with the next."""
        begun, busy = stretch.begun, self._busy_seconds
        for end in stretch.ends[:ended]:
            busy += end - begun
            begun = end
        self._busy_seconds, stretch.begun = busy, begun
        del stretch.ends[:ended]
        self._iterations += ended
        self.engine.run_steady(ended)


def _copied(known: int, slots: Int32Array) -> None:
    """Nothing is stored: the simulated engine has no KV."""
