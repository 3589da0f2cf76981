"""What a simulation is given: the fleet, the policy, the delays, and what happens to workers when. Owns its validation,
and the check that these events fit together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Literal

from .._cost import CostModel
from ..config import SchedulerConfig
from ..errors import DuplicateWorker, InvalidConfig, UnknownWorker
from ..local import LocalConfig
from ..policies.base import Policy
from ..scheduling.flow_control import FlowConfig
from ..types import BOTH, CacheEvent, PrefixEvicted, WorkerSpec, check_int, check_seconds

HOST_REPORTS = ("media", "none", "gone", "kept")
A6000_KV_TOKENS = 198_516  # Mistral-7B on an A6000, in the paper authors' configuration


def engine_config() -> LocalConfig:
    """An engine as others build them: what was used least recently is evicted first, and a prefill that has begun goes
    on before others begin."""
    return LocalConfig(A6000_KV_TOKENS, max_running=256, max_waiting=10**6, eviction="lru", short_first=False)


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """A worker stops, with all it has, at `at_seconds`; the router notices `noticed_after_seconds` later."""

    at_seconds: float
    worker: str
    noticed_after_seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class WorkerJoin:
    """A new, empty worker is added. A dead one may come back under its name, once its death has been noticed."""

    at_seconds: float
    spec: WorkerSpec


@dataclass(frozen=True, slots=True)
class WorkerDrain:
    """A worker gets no more requests and ends those that it has; its prefixes go to others within
    `handover_seconds`, in which it still takes requests for what it has cached."""

    at_seconds: float
    worker: str
    handover_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerSlowdown:
    """A worker's iterations take `factor` times what its cost model says, from the next one on; 1 ends it."""

    at_seconds: float
    worker: str
    factor: float


Fault = WorkerDeath | WorkerJoin | WorkerDrain | WorkerSlowdown


def check_faults(workers: Iterable[str], faults: Sequence[Fault]) -> None:
    """Play the faults through on names alone, in the order in which the simulation will.

    Raises `InvalidConfig` (a field; a death that leaves nobody), `UnknownWorker` (a worker not there, or dead), or
    `DuplicateWorker` (a join under a name that is there).
    """
    if not isinstance(faults, tuple | list):
        raise InvalidConfig(f"SimConfig.faults must be a tuple, got {faults!r}")
    for fault in faults:
        _check_fields(fault)
    alive, dead = set(workers), set[str]()
    # (when, place among those of one moment, fault, whether it is a death's being noticed)
    planned = [(fault.at_seconds, place, fault, False) for place, fault in enumerate(faults)]
    heapify(planned)
    place = len(planned)
    while planned:
        now, _, fault, noticed = heappop(planned)
        name = fault.spec.id if isinstance(fault, WorkerJoin) else fault.worker
        if noticed:
            dead.discard(name)
            if not alive | dead:
                raise InvalidConfig(f"SimConfig.faults: at {now} s the last worker, {name!r}, is found dead")
        elif isinstance(fault, WorkerJoin):
            if name in alive | dead:
                raise DuplicateWorker(f"SimConfig.faults: at {now} s worker {name!r} is there and cannot join")
            alive.add(name)
        elif name not in alive:
            state = "dead" if name in dead else "not there"
            raise UnknownWorker(f"SimConfig.faults: at {now} s worker {name!r} is {state}")
        elif isinstance(fault, WorkerDeath):
            alive.discard(name)
            dead.add(name)
            heappush(planned, (now + fault.noticed_after_seconds, place, fault, True))
            place += 1


def _check_fields(fault: Fault) -> None:
    """Its type and its fields."""
    if not isinstance(fault, Fault):
        raise InvalidConfig(f"SimConfig.faults must be of the types that preble.sim has for them, got {fault!r}")
    check_seconds("at_seconds of a fault", fault.at_seconds)
    for name in {"noticed_after_seconds", "handover_seconds", "factor"}.intersection(fault.__slots__):
        check_seconds(f"{type(fault).__name__}.{name}", getattr(fault, name))
    if isinstance(fault, WorkerSlowdown) and fault.factor == 0.0:
        raise InvalidConfig("WorkerSlowdown.factor must be positive, got 0")
    if isinstance(fault, WorkerJoin):
        if not isinstance(fault.spec, WorkerSpec):
            raise InvalidConfig(f"WorkerJoin.spec must be a WorkerSpec, got {fault.spec!r}")
    elif not isinstance(fault.worker, str):
        raise InvalidConfig(f"{type(fault).__name__}.worker must be a worker's name, got {fault.worker!r}")


@dataclass(frozen=True, slots=True)
class KvLink:
    """How workers hand KV to each other. Raises `InvalidConfig` naming the field.

    A transfer takes `latency_seconds`, and its bytes by `bytes_per_second`; a token has `token_bytes`. For each byte
    the engines at both ends stand still for `copy_byte_seconds`. `least_tokens`: from so many missing tokens on the
    chosen worker pulls, whatever that costs; None: where the scheduler's price says.
    """

    latency_seconds: float = 0.002
    bytes_per_second: float = 1.25e9
    token_bytes: int = 131_072  # Llama-3-8B and Mistral-7B, 16 bit
    copy_byte_seconds: float = 5e-11
    least_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("latency_seconds", "bytes_per_second", "copy_byte_seconds"):
            check_seconds(f"KvLink.{name}", getattr(self, name))
        if self.bytes_per_second == 0.0:
            raise InvalidConfig("KvLink.bytes_per_second must be positive, got 0")
        check_int("KvLink.token_bytes", self.token_bytes, 1, 2**31 - 1)
        if self.least_tokens is not None:
            check_int("KvLink.least_tokens", self.least_tokens, 0, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class SimConfig:
    """A fleet and how it is driven. Raises `InvalidConfig` naming the field.

    workers: WorkerSpecs, or a number of equal ones, named w0, w1, ...; an engine's KV capacity and cost model are its
    spec's, else those of `local` and `cost_model`.
    routers: schedulers over the same workers; each request comes to one of them by chance, and the others learn of it
    from its worker (docs/fleet.md).
    policy: a name or a `Policy`; `scheduler`: the global scheduler's knobs; `local`: the local schedulers'.
    step_seconds, step_seconds_per_request: what an iteration takes beside the model (the engine's own scheduling,
    sampling, detokenising), once and for each request in its batch.
    network_seconds: from router to worker; events of a worker reach the router `event_delay_seconds` after they
    happen, and a share of `event_loss` of its batches of cache events never does.
    peer_delay_seconds: routers before attached servers report their requests to each other, so much later than each
    knows of its own; None: it is the workers that report, with their events.
    engine_cost_models: by worker, what its engine really costs, where that is not what the scheduler is given.
    faults: what happens to workers, in any order of time; of one moment, in the order given. They are checked against
    each other here: a name must be there when something happens to it, and somebody must be left.
    kv_link: how workers hand KV to each other; None: they do not. Workers with a role (`WorkerSpec.role`) need one.
    host_tokens, host_token_seconds: the host memory behind each engine's GPU memory, 0 for none, and what it takes to
    load a token from there.
    host_reports: what schedulers learn of that: "media", each move; "none", only its size; "gone", that what leaves the
    GPU is gone; "kept", that it is still there, as if it were on the GPU.
    flow: how requests wait in front of the workers by tenants, deadlines and classes; None: they do not.
    until_seconds: when the simulation is broken off; requests not finished by then count as unfinished.
    """

    workers: int | tuple[WorkerSpec, ...] = 2
    routers: int = 1
    policy: str | Policy = "e2"
    cost_model: str | CostModel = "mistral-7b/a6000"
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    local: LocalConfig = field(default_factory=engine_config)
    seed: int = 0
    step_seconds: float = 0.0
    step_seconds_per_request: float = 0.0
    network_seconds: float = 0.0
    event_delay_seconds: float = 0.0
    event_loss: float = 0.0
    peer_delay_seconds: float | None = None
    engine_cost_models: Mapping[str, str | CostModel] = field(default_factory=dict, hash=False)
    faults: tuple[Fault, ...] = ()
    host_tokens: int = 0
    host_token_seconds: float = 1e-5
    host_reports: Literal["media", "none", "gone", "kept"] = "media"
    flow: FlowConfig | None = None
    kv_link: KvLink | None = None
    until_seconds: float = math.inf

    def __post_init__(self) -> None:
        check_int("SimConfig.seed", self.seed, 0, 2**63 - 1)
        check_int("SimConfig.routers", self.routers, 1, 1024)
        for name in ("step_seconds", "step_seconds_per_request", "network_seconds", "event_delay_seconds"):
            check_seconds(f"SimConfig.{name}", getattr(self, name))
        check_int("SimConfig.host_tokens", self.host_tokens, 0, 2**31 - 1)
        check_seconds("SimConfig.host_token_seconds", self.host_token_seconds)
        if self.host_reports not in HOST_REPORTS:
            raise InvalidConfig(f"SimConfig.host_reports must be one of {HOST_REPORTS}, got {self.host_reports!r}")
        if self.peer_delay_seconds is not None:
            check_seconds("SimConfig.peer_delay_seconds", self.peer_delay_seconds)
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
        if self.flow is not None and not isinstance(self.flow, FlowConfig):
            raise InvalidConfig(f"SimConfig.flow must be a FlowConfig or None, got {self.flow!r}")
        if self.kv_link is not None and not isinstance(self.kv_link, KvLink):
            raise InvalidConfig(f"SimConfig.kv_link must be a KvLink or None, got {self.kv_link!r}")
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
        if self.has_roles and self.kv_link is None:
            raise InvalidConfig("SimConfig.workers: a worker with a role needs a kv_link")
        for spec in self._all_specs(specs):
            self.model_of(spec)
            self.engine_model_of(spec)

    def _all_specs(self, specs: Iterable[WorkerSpec]) -> list[WorkerSpec]:
        """Workers at the start, and those that join."""
        joins = (fault.spec for fault in self.faults if isinstance(fault, WorkerJoin))
        return [*specs, *(spec for spec in joins if isinstance(spec, WorkerSpec))]

    @property
    def has_roles(self) -> bool:
        """Whether some worker does not do both."""
        return any(spec.role != BOTH for spec in self._all_specs(self.specs()))

    def specs(self) -> list[WorkerSpec]:
        """The workers at the start."""
        if not isinstance(self.workers, int):
            return list(self.workers)
        return [WorkerSpec(f"w{i}", kv_capacity_tokens=self.local.kv_capacity_tokens) for i in range(self.workers)]

    def stated(self, spec: WorkerSpec) -> WorkerSpec:
        """A worker as it is given to the schedulers."""
        if not self.host_tokens or self.host_reports == "gone":
            return spec
        if self.host_reports == "kept":
            return replace(spec, kv_capacity_tokens=max(spec.kv_capacity_tokens, self.host_tokens))
        return replace(spec, below_capacity_tokens=self.host_tokens)

    def reported(self, events: Sequence[CacheEvent]) -> Sequence[CacheEvent]:
        """What of an engine's evictions is reported."""
        if not self.host_tokens or self.host_reports == "media":
            return events
        if self.host_reports == "gone":
            return [replace(one, moved_to=None) if isinstance(one, PrefixEvicted) else one for one in events]
        if self.host_reports == "kept":
            return [one for one in events if not isinstance(one, PrefixEvicted) or one.moved_to is None]
        return []

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
