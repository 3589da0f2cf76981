"""What may happen to workers during a simulation. Owns these events and the check that they fit together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from ..errors import DuplicateWorker, InvalidConfig, UnknownWorker
from ..types import WorkerSpec


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


def check_seconds(name: str, seconds: Any) -> None:
    """Raise `InvalidConfig` unless it is a finite number of at least 0."""
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0.0 <= seconds < math.inf:
        raise InvalidConfig(f"{name} must be finite and at least 0, got {seconds!r}")


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
    if isinstance(fault, WorkerDeath):
        check_seconds("WorkerDeath.noticed_after_seconds", fault.noticed_after_seconds)
    if isinstance(fault, WorkerDrain):
        check_seconds("WorkerDrain.handover_seconds", fault.handover_seconds)
    if isinstance(fault, WorkerSlowdown):
        check_seconds("WorkerSlowdown.factor", fault.factor)
        if fault.factor == 0.0:
            raise InvalidConfig("WorkerSlowdown.factor must be positive, got 0")
    if isinstance(fault, WorkerJoin):
        if not isinstance(fault.spec, WorkerSpec):
            raise InvalidConfig(f"WorkerJoin.spec must be a WorkerSpec, got {fault.spec!r}")
    elif not isinstance(fault.worker, str):
        raise InvalidConfig(f"{type(fault).__name__}.worker must be a worker's name, got {fault.worker!r}")
