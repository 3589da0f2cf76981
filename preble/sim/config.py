"""What a simulation is given: the fleet, the policy, the delays, and what goes wrong when. Owns its validation, of
which the faults' is in `faults.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .._cost import CostModel
from ..config import SchedulerConfig
from ..errors import DuplicateWorker, InvalidConfig
from ..local import LocalConfig
from ..policies.base import Policy
from ..types import WorkerSpec, check_int
from .faults import Fault, WorkerJoin, check_faults, check_seconds

A6000_KV_TOKENS = 198_516  # Mistral-7B on an A6000, in the paper authors' configuration


@dataclass(frozen=True, slots=True)
class SimConfig:
    """A fleet and how it is driven. Raises `InvalidConfig` naming the field.

    workers: WorkerSpecs, or a number of equal ones, named w0, w1, ...; an engine's KV capacity and cost model are its
    spec's, else those of `local` and `cost_model`.
    routers: schedulers over the same workers; each request comes to one of them by chance, and the others learn of it
    from its worker (docs/routers.md).
    policy: a name or a `Policy`; `scheduler`: the global scheduler's knobs; `local`: the local schedulers'.
    step_seconds, step_seconds_per_request: what an iteration takes beside the model (the engine's own scheduling,
    sampling, detokenising), once and for each request in its batch.
    network_seconds: from router to worker; events of a worker reach the router `event_delay_seconds` after they
    happen, and a share of `event_loss` of its batches of cache events never does.
    engine_cost_models: by worker, what its engine really costs, where that is not what the scheduler is given.
    faults: what happens to workers, in any order of time; of one moment, in the order given. They are checked against
    each other here: a name must be there when something happens to it, and somebody must be left.
    until_seconds: when the simulation is broken off; requests not finished by then count as unfinished.
    """

    workers: int | tuple[WorkerSpec, ...] = 2
    routers: int = 1
    policy: str | Policy = "e2"
    cost_model: str | CostModel = "mistral-7b/a6000"
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    local: LocalConfig = field(default_factory=lambda: LocalConfig(A6000_KV_TOKENS, max_running=256, max_waiting=10**6))
    seed: int = 0
    step_seconds: float = 0.0
    step_seconds_per_request: float = 0.0
    network_seconds: float = 0.0
    event_delay_seconds: float = 0.0
    event_loss: float = 0.0
    engine_cost_models: Mapping[str, str | CostModel] = field(default_factory=dict, hash=False)
    faults: tuple[Fault, ...] = ()
    until_seconds: float = math.inf

    def __post_init__(self) -> None:
        check_int("SimConfig.seed", self.seed, 0, 2**63 - 1)
        check_int("SimConfig.routers", self.routers, 1, 1024)
        for name in ("step_seconds", "step_seconds_per_request", "network_seconds", "event_delay_seconds"):
            check_seconds(f"SimConfig.{name}", getattr(self, name))
        check_seconds("SimConfig.event_loss", self.event_loss)
        if self.event_loss > 1.0:
            raise InvalidConfig(f"SimConfig.event_loss must be in [0, 1], got {self.event_loss!r}")
        if self.until_seconds != math.inf:
            check_seconds("SimConfig.until_seconds", self.until_seconds)
        if self.until_seconds == 0.0:
            raise InvalidConfig("SimConfig.until_seconds must be positive, got 0")
        for name, kind in (("scheduler", SchedulerConfig), ("local", LocalConfig)):
            if not isinstance(getattr(self, name), kind):
                raise InvalidConfig(f"SimConfig.{name} must be a {kind.__name__}, got {getattr(self, name)!r}")
        self._check_fleet()

    def _check_fleet(self) -> None:
        """The workers at the start and all that happens to them."""
        if isinstance(self.workers, int):
            check_int("SimConfig.workers", self.workers, 1, 65_536)
        elif not isinstance(self.workers, tuple | list) or not self.workers:
            raise InvalidConfig(f"SimConfig.workers must be a number or a tuple of WorkerSpec, got {self.workers!r}")
        specs = self.specs()
        for spec in specs:
            if not isinstance(spec, WorkerSpec):
                raise InvalidConfig(f"SimConfig.workers must be WorkerSpecs, got {spec!r}")
        names = [spec.id for spec in specs]
        if len(set(names)) < len(names):
            raise DuplicateWorker(f"SimConfig.workers: a name occurs twice in {names}")
        check_faults(names, self.faults)
        for spec in [*specs, *(fault.spec for fault in self.faults if isinstance(fault, WorkerJoin))]:
            self.model_of(spec)
            self.engine_model_of(spec)

    def specs(self) -> list[WorkerSpec]:
        """The workers at the start."""
        if not isinstance(self.workers, int):
            return list(self.workers)
        return [WorkerSpec(f"w{i}", kv_capacity_tokens=self.local.kv_capacity_tokens) for i in range(self.workers)]

    def model_of(self, spec: WorkerSpec) -> CostModel:
        """What the scheduler is given of a worker. Raises `InvalidConfig` for what is neither preset nor model."""
        return self._model(spec, self.cost_model if spec.cost_model is None else spec.cost_model)

    def engine_model_of(self, spec: WorkerSpec) -> CostModel:
        """How long a worker's iterations take. Raises as `model_of`."""
        if not isinstance(self.engine_cost_models, Mapping):
            raise InvalidConfig(f"SimConfig.engine_cost_models must be a dict, got {self.engine_cost_models!r}")
        own = self.engine_cost_models.get(spec.id)
        return self.model_of(spec) if own is None else self._model(spec, own)

    def _model(self, spec: WorkerSpec, model: str | CostModel) -> CostModel:
        model = CostModel.preset(model) if isinstance(model, str) else model
        if not isinstance(model, CostModel):
            raise InvalidConfig(f"cost_model of worker {spec.id!r} must be a CostModel or a preset name, got {model!r}")
        return model
