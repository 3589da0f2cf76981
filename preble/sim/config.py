"""What a simulation is told: the fleet, the policy, the delays, and what goes wrong when. Owns its validation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .._cost import CostModel
from ..errors import InvalidConfig
from ..local import LocalConfig
from ..policy import Policy
from ..scheduler import SchedulerConfig
from ..types import WorkerSpec, check_int

A6000_KV_TOKENS = 198_516  # Mistral-7B on an A6000, in the paper authors' configuration


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """A worker stops, with all it has, at `at_seconds`; the router notices `noticed_after_seconds` later."""

    at_seconds: float
    worker: str
    noticed_after_seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class WorkerJoin:
    """A new, empty worker is added. A dead one may come back under its name."""

    at_seconds: float
    spec: WorkerSpec


@dataclass(frozen=True, slots=True)
class WorkerDrain:
    """A worker gets no more requests and ends those that it has."""

    at_seconds: float
    worker: str


Fault = WorkerDeath | WorkerJoin | WorkerDrain


@dataclass(frozen=True, slots=True)
class SimConfig:
    """A fleet and how it is driven. Raises `InvalidConfig` naming the field.

    workers: WorkerSpecs, or a number of equal ones, named w0, w1, ...; an engine's KV capacity and cost model are its
    spec's, else those of `local` and `cost_model`.
    policy: a name or a `Policy`; `scheduler`: the global scheduler's knobs; `local`: the local schedulers'.
    step_seconds: what an iteration takes beside the model (the engine's own scheduling, detokenising).
    network_seconds: from router to worker; events of a worker reach the router `event_delay_seconds` after they
    happen, and a share of `event_loss` of its batches of cache events never does.
    until_seconds: when the simulation is broken off; requests not finished by then count as unfinished.
    """

    workers: int | tuple[WorkerSpec, ...] = 2
    policy: str | Policy = "e2"
    cost_model: str | CostModel = "mistral-7b/a6000"
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    local: LocalConfig = field(default_factory=lambda: LocalConfig(A6000_KV_TOKENS, max_running=256, max_waiting=10**6))
    seed: int = 0
    step_seconds: float = 0.0
    network_seconds: float = 0.0
    event_delay_seconds: float = 0.0
    event_loss: float = 0.0
    faults: tuple[Fault, ...] = ()
    until_seconds: float = math.inf

    def __post_init__(self) -> None:
        if isinstance(self.workers, int):
            check_int("SimConfig.workers", self.workers, 1, 65_536)
        check_int("SimConfig.seed", self.seed, 0, 2**63 - 1)
        for name in ("step_seconds", "network_seconds", "event_delay_seconds"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise InvalidConfig(f"SimConfig.{name} must be finite and at least 0, got {getattr(self, name)!r}")
        if not 0.0 <= self.event_loss <= 1.0:
            raise InvalidConfig(f"SimConfig.event_loss must be in [0, 1], got {self.event_loss!r}")
        if not self.until_seconds > 0.0:
            raise InvalidConfig(f"SimConfig.until_seconds must be positive, got {self.until_seconds!r}")
        for fault in self.faults:
            if not 0.0 <= fault.at_seconds < math.inf:
                raise InvalidConfig(f"SimConfig.faults: at_seconds must be finite and at least 0, got {fault!r}")

    def specs(self) -> list[WorkerSpec]:
        """The workers at the start."""
        if not isinstance(self.workers, int):
            return list(self.workers)
        return [WorkerSpec(f"w{i}", kv_capacity_tokens=self.local.kv_capacity_tokens) for i in range(self.workers)]

    def model_of(self, spec: WorkerSpec) -> CostModel:
        """How long a worker's iterations take."""
        model = self.cost_model if spec.cost_model is None else spec.cost_model
        return CostModel.preset(model) if isinstance(model, str) else model
