"""One simulated worker: the simulated engine, iteration after iteration on the timeline. Owns when iterations begin and
end; the batches are the real local scheduler's, and what follows from their tokens is the simulation's.

Iterations in which the same requests decode, and none of them ends, are one event (a *stretch*): nothing is to be
decided between them and nothing to be reported. Whatever comes to the worker meanwhile breaks it off at the iteration
that then runs. Times, counters and the order of events are those of single iterations, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..batching.kv_cache import HostMemory
from ..engines.simulated import SimulatedEngine
from ..local import StepOutput
from ..types import CacheEvent, WorkerSpec
from .config import SimConfig
from .timeline import Timeline
from .worker_core import SimWorkerCore

Deliver = Callable[["SimWorker", Sequence[StepOutput], Sequence[CacheEvent]], None]
STRETCH_MIN = 2  # iterations; fewer are quicker one by one


class SimWorker(SimWorkerCore):
    """An engine that runs whenever it has work. `deliver(worker, outputs, events)` is called as an iteration ends in
    which a request got its first or last token, or something was evicted; it may be called after others, too."""

    def __init__(self, spec: WorkerSpec, number: int, config: SimConfig, timeline: Timeline, deliver: Deliver) -> None:
        self.name = spec.id
        self.number = number
        running = config.local.max_running if spec.max_running is None else spec.max_running
        local = replace(config.local, kv_capacity_tokens=spec.kv_capacity_tokens, max_running=running)
        host = HostMemory(config.host_tokens, config.host_token_seconds) if config.host_tokens else None
        model = config.engine_model_of(spec)
        engine = SimulatedEngine(model, local, clock=timeline.clock, time_scale=0.0, host=host)
        super().__init__(
            engine,
            engine.scheduler,
            timeline,
            deliver,
            step_seconds=config.step_seconds,
            step_seconds_per_request=config.step_seconds_per_request,
            stretch_min=STRETCH_MIN,
            reported=config.reported,
        )
