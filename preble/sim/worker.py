"""One simulated worker: the simulated engine, iteration after iteration on the timeline. Owns when iterations begin and
end; the batches are the real local scheduler's, and what follows from their tokens is the simulation's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..engines.simulated import GenerationRequest, SimulatedEngine
from ..errors import InvalidInput, QueueFull
from ..local import StepOutput
from ..types import CacheEvent, Claim, SamplingParams, WorkerSpec
from ..workloads.types import Int32Array
from .config import SimConfig
from .timeline import Timeline

Deliver = Callable[["SimWorker", Sequence[StepOutput], Sequence[CacheEvent]], None]


class SimWorker:
    """An engine that runs whenever it has work. `deliver(worker, outputs, events)` is called as an iteration ends."""

    def __init__(self, spec: WorkerSpec, number: int, config: SimConfig, timeline: Timeline, deliver: Deliver) -> None:
        self.name = spec.id
        self.number = number
        self._busy_seconds = 0.0  # of the iterations that have ended
        self._begun = self._end_seconds = 0.0  # when the iteration that runs began, and when it will end
        self.iterations = 0
        self.slowness = 1.0  # what an iteration's time is multiplied by
        running = config.local.max_running if spec.max_running is None else spec.max_running
        local = replace(config.local, kv_capacity_tokens=spec.kv_capacity_tokens, max_running=running)
        self.engine = SimulatedEngine(config.engine_model_of(spec), local, clock=timeline.clock, time_scale=0.0)
        self._timeline = timeline
        self._deliver = deliver
        self._config = config
        self._running = False
        self._dead = False

    def submit(
        self, request_id: str, token_ids: Int32Array, planned_ids: Int32Array, claim: Claim | None = None
    ) -> bool:
        """Queue a request; False if the engine refuses it, or is dead and nobody has noticed yet."""
        if self._dead:
            return True  # it is lost: whoever notices the death sends it elsewhere
        sampling = SamplingParams(max_new_tokens=len(planned_ids), ignore_eos=True)
        try:
            self.engine.submit(GenerationRequest(request_id, token_ids, sampling, claim=claim), planned_ids)
        except (QueueFull, InvalidInput):
            return False
        if not self._running:
            self._begin()
        return True

    def busy_seconds(self, until_seconds: float) -> float:
        """Seconds of its iterations, up to a moment that is not before now."""
        now = min(until_seconds, self._end_seconds)
        return self._busy_seconds + (now - self._begun if self._running else 0.0)

    def die(self) -> None:
        """Stop at once; what it computes is never reported."""
        self._busy_seconds = self.busy_seconds(self._timeline.now)
        self._running = False
        self._dead = True
        self.engine.close()

    def _begin(self) -> None:
        seconds = self.engine.begin_step()
        self._running = seconds > 0.0 or self.engine.has_work()  # a cost model may say that work takes no time
        if self._running:
            self._begun = self._timeline.now
            host_seconds = self._config.step_seconds
            host_seconds += self._config.step_seconds_per_request * self.engine.batch_requests
            self._end_seconds = self._begun + (seconds + host_seconds) * self.slowness
            self.iterations += 1
            self._timeline.at(self._end_seconds, self._end)

    def _end(self, _: object) -> None:
        if self._dead:
            return
        self._busy_seconds += self._end_seconds - self._begun
        outputs = self.engine.end_batch()
        events = self.engine.take_events()
        self._begin()  # first: what follows from the outputs may submit to this very worker
        self._deliver(self, outputs, events)
