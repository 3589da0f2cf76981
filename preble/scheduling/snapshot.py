"""A whole scheduler as bytes, and back. Owns the envelope (magic, version, checksum), what of a scheduler is plain
Python, and how time goes on; compiled state is `_snapshot/accounts.pyx`. Read by `GlobalScheduler.snapshot` and
`.restore`.

    magic 8 | version 4 | CRC-32 of all else 4 | length 8 | state | core | blocks of each worker

Nothing of the rest is looked at before all of these are right. A checksum is no signature: whoever can write the bytes
can make them right. What is read is checked for that reason, too, and never makes more memory than its own size
allows; but a snapshot from a stranger may still be wrong about what is cached. docs/fleet.md has the table.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, TypeVar

from .._cost import CostModel
from .._placement.bookings import DecisionCore
from .._placement.request_api import RequestApi, finite_time
from .._snapshot.accounts import cost_at, layout, read_core, write_core
from .._snapshot.blocks import read_blocks, write_blocks
from .._snapshot.codec import Reader, Writer
from ..clock import Clock
from ..errors import InvalidConfig, InvalidInput, SnapshotRefused
from ..policies.base import POLICIES, Policy, resolve
from ..types import BOTH, WorkerSpec
from .cache_mismatch import CacheMismatches
from .leases import Drift
from .rebalancer import Rebalancer, counts_of

T = TypeVar("T")
MAGIC = b"preble\x1a\n"
VERSION = 7
HEADER = struct.Struct("<8sIIQ")
ELAPSED_SECONDS_MAX = 1e9  # that may pass between a snapshot and its restoration


@dataclass(frozen=True, slots=True)
class Parts:
    """What a scheduler hands over of itself. `workers`: by id, with spec, index, blocks, draining, drift and mismatch.
    `reasons`: decisions by reason, without those that `api` counts."""

    api: RequestApi
    config: Any
    seed: int
    policy: Policy | None
    cost_model: CostModel
    workers: Mapping[str, Any]
    rebalancer: Rebalancer | None
    counts: Mapping[str, int]
    reasons: Mapping[str, int]


class OffsetClock:
    """Another clock, ahead of it by a fixed time."""

    def __init__(self, clock: Clock, ahead_seconds: float) -> None:
        self.clock = clock
        self.ahead_seconds = ahead_seconds

    def __call__(self) -> float:
        return self.clock() + self.ahead_seconds


# --- writing ----------------------------------------------------------------------------------------------------------


def take(lock: AbstractContextManager[Any], parts: Callable[[], Parts]) -> bytes:
    """See `GlobalScheduler.snapshot`. The writers' lock is held while memory is copied, not for the checksum."""
    writer = Writer()
    for byte in bytes(HEADER.size):
        writer.byte(byte)
    with lock:
        found = parts()
        writer.value(_state(found), "the scheduler")
        write_core(writer, found.api)
        for worker in found.workers.values():
            write_blocks(writer, worker.blocks)
    writer.seal(_sealed)
    return writer.finish()


def _sealed(whole: memoryview) -> bytes:
    """The header of a snapshot whose other bytes are there."""
    start = HEADER.pack(MAGIC, VERSION, 0, len(whole))
    return HEADER.pack(MAGIC, VERSION, _checksum(start, whole), len(whole))


def _checksum(header: Any, whole: memoryview) -> int:
    """CRC-32 of a snapshot without its checksum."""
    return zlib.crc32(whole[HEADER.size :], zlib.crc32(header[16:24], zlib.crc32(header[:12])))


def _state(parts: Parts) -> tuple[Any, ...]:
    """What is plain Python of a scheduler, as (name, value) pairs."""
    core, workers = parts.api.core, parts.workers.values()
    return (
        ("layout", layout()),
        ("now", parts.api.now()),
        ("config", _pairs({name: _plain_number(value) for name, value in asdict(parts.config).items()})),
        ("seed", parts.seed),
        ("policy", _policy_name(parts.policy)),
        ("cost_model", _cost_fact(parts.cost_model)),
        ("workers", tuple(_worker_fact(core, worker) for worker in workers)),
        ("truth", tuple(_mismatch_fact(core, worker) for worker in workers)),
        ("faded_at", core.accuracy.faded),
        ("counts", _pairs(parts.counts)),
        ("shifts", None if parts.rebalancer is None else parts.rebalancer.state()),
        ("reasons", _pairs(parts.reasons)),
    )


def _plain_number(value: Any) -> int | float:
    if isinstance(value, bool):
        return value
    return int(value) if isinstance(value, int) else float(value)


def _policy_name(policy: Policy | None) -> tuple[str, bool]:
    """(name, whether the name is enough to have the policy again). Raises InvalidInput for one that keeps state."""
    if policy is None:
        return "e2", True
    if policy.needs:
        raise InvalidInput(f"a snapshot does not keep what policy {policy.name!r} needs counted: {policy.needs}")
    known = policy.name in POLICIES and policy.name != "e2" and type(resolve(policy.name)) is type(policy)
    return policy.name, known


def _worker_fact(core: DecisionCore, worker: Any) -> tuple[Any, ...]:
    spec: WorkerSpec = worker.spec
    own = spec.cost_model
    return (
        worker.index,
        spec.id,
        int(spec.kv_capacity_tokens),
        int(spec.block_size),
        _cost_fact(own) if isinstance(own, CostModel) else own,
        None if spec.max_running is None else int(spec.max_running),
        None if spec.labels is None else _pairs(spec.labels),
        worker.draining,
        _cost_fact(cost_at(core, worker.index)),
        worker.drift.state(),
        spec.cached_first,
        int(spec.below_capacity_tokens),
        *(() if spec.role == BOTH else (spec.role,)),
    )


def _mismatch_fact(core: DecisionCore, worker: Any) -> tuple[Any, ...]:
    return worker.spec.id, (
        core.accuracy.state(worker.index),
        worker.blocks.compared(),
        worker.cache_mismatches.state(),
    )


def _cost_fact(model: CostModel) -> tuple[Any, ...]:
    state: dict[str, Any] = model.coefficients()
    return _pairs({**state, "knots": tuple(tuple(point) for point in state["knots"])})


def _pairs(mapping: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(mapping.items())


# --- reading ----------------------------------------------------------------------------------------------------------


def opened(data: Any) -> Reader:
    """A reader behind the header. Raises InvalidInput unless `data` is bytes, SnapshotRefused saying what is wrong."""
    if not isinstance(data, bytes):
        raise InvalidInput(f"data must be bytes, got a {type(data).__name__}")
    if data[: len(MAGIC)] != MAGIC:
        raise SnapshotRefused("data is no snapshot of a scheduler" if data else "data is empty, no snapshot")
    if len(data) < HEADER.size:
        raise SnapshotRefused(f"the snapshot is cut off after {len(data)} bytes")
    _, version, checksum, length = HEADER.unpack_from(data)
    if version != VERSION:
        raise SnapshotRefused(f"the snapshot is of version {version}; this library reads version {VERSION}")
    if length != len(data):
        raise SnapshotRefused(f"the snapshot has {len(data)} of {length} bytes")
    if checksum != _checksum(data[: HEADER.size], memoryview(data)):
        raise SnapshotRefused("the snapshot is damaged: its checksum does not fit")
    return Reader(data, HEADER.size)


class Snapshot:
    """A snapshot that is being read. `counts` and `reasons` are there once it has filled a scheduler."""

    def __init__(self, data: Any, elapsed_seconds: float) -> None:
        elapsed = finite_time("elapsed_seconds", elapsed_seconds)
        if not 0 <= elapsed <= ELAPSED_SECONDS_MAX:
            raise InvalidInput(f"elapsed_seconds must be in [0, {ELAPSED_SECONDS_MAX:g}], got {elapsed_seconds!r}")
        self._reader = opened(data)
        self._state = state = _read("its state", lambda: dict(self._reader.value()))
        if state.get("layout") != layout():
            raise SnapshotRefused(f"the snapshot has a layout {state.get('layout')}; this library's is {layout()}")
        self._elapsed_seconds = elapsed
        self.counts: dict[str, int] = {}
        self.reasons: dict[str, int] = {}

    def empty(self, kind: Callable[..., T], config_kind: Any, policy: Any, clock: Clock | None) -> T:
        """A scheduler of the same settings, with no workers."""
        made: T = _read("its state", lambda: kind((), **_settings(self._state, config_kind, policy, clock)))
        self._then = _read("its time", lambda: finite_time("now", self._state["now"]))
        return made

    def fill(self, parts: Parts, adopt: Callable[[WorkerSpec, int, bool, CostModel], Any]) -> None:
        """Workers, compiled state, blocks, plans and counts of a scheduler that has none. `adopt` keeps a worker that
        the core knows. Under the lock."""
        state, core = self._state, parts.api.core
        workers = _workers_of(state)
        end = 1 + max((index for index, *_ in workers), default=-1)
        specs: list[WorkerSpec | None] = [None] * end
        costs: list[CostModel | None] = [None] * end
        for index, spec, _, cost, _ in workers:
            specs[index], costs[index] = spec, cost
        read_core(self._reader, parts.api, specs, costs, self._then)
        accuracies = _read("what was reported of caches", lambda: dict(state.get("truth", ())))
        for index, spec, draining, cost, drift in workers:
            kept = adopt(spec, index, draining, cost)
            kept.drift = drift
            _read("what was reported of a cache", partial(_restore_accuracy, core, kept, accuracies.get(spec.id)))
            read_blocks(self._reader, kept.blocks)
        core.accuracy.faded = _read("its time", lambda: finite_time("faded_at", state.get("faded_at", self._then)))
        self._reader.done()
        if parts.rebalancer is not None and state["shifts"] is not None:
            _read("its plans", partial(parts.rebalancer.restore, state["shifts"]))
        self.counts = _read("its counts", lambda: counts_of(state["counts"]))
        self.reasons = _read("its counts", lambda: counts_of(state["reasons"]))

    def clock_of(self, clock: Clock) -> tuple[Clock, float]:
        """A clock that goes on from the snapshot's time at the pace of `clock`, and how far it is ahead of that one."""
        ahead = self._then + self._elapsed_seconds - finite_time("what the clock returned", clock())
        return (OffsetClock(clock, ahead) if ahead else clock), ahead


def _read(what: str, make: Callable[[], Any]) -> Any:
    """What `make` returns; whatever it finds wrong with the snapshot's values is a refusal."""
    try:
        return make()
    except (SnapshotRefused, _PolicyWanted):
        raise
    except (InvalidInput, KeyError, TypeError, ValueError, OverflowError) as error:
        raise SnapshotRefused(f"the snapshot contradicts itself in {what}: {error}") from error


class _PolicyWanted(InvalidConfig):
    """The caller's policy, not the snapshot, is at fault."""


def _settings(state: dict[str, Any], config_kind: Any, policy: Any, clock: Clock | None) -> dict[str, Any]:
    """What a scheduler is made with that is like the one of the snapshot."""
    name, by_name = state["policy"]
    if policy is None and not by_name:
        raise _PolicyWanted(f"policy must be given: the snapshot's {name!r} is not known by its name")
    try:
        resolve(policy if policy is not None else name)
        if clock is not None and not callable(clock):
            raise InvalidConfig(f"clock must be callable, got {clock!r}")
    except InvalidConfig as error:
        raise _PolicyWanted(str(error)) from error
    settings = dict(state["config"])
    strange = settings.keys() - {field.name for field in fields(config_kind)}
    if strange:
        raise SnapshotRefused(f"the snapshot has settings that this library does not know: {sorted(strange)}")
    return {
        "policy": policy if policy is not None else name,
        "cost_model": CostModel(**dict(state["cost_model"])),
        "config": config_kind(**settings),
        "clock": clock,
        "seed": state["seed"],
    }


def _workers_of(state: dict[str, Any]) -> list[tuple[int, WorkerSpec, bool, CostModel, Drift]]:
    workers = _read("its workers", lambda: [_worker_of(fact) for fact in state["workers"]])
    indices = {index for index, *_ in workers}
    if len({spec.id for _, spec, *_ in workers}) != len(workers) or max(indices, default=0) >= 65536:
        raise SnapshotRefused("the snapshot contradicts itself: two workers of one id, or more than there may be")
    if len(indices) != len(workers):
        raise SnapshotRefused("the snapshot contradicts itself: two workers of one index")
    return list(workers)


def _restore_accuracy(core: DecisionCore, worker: Any, fact: Any) -> None:
    """What was reported about a worker's cache; None in snapshots of versions that did not keep it."""
    accuracy, compared, cache_mismatches = (None, None, None) if fact is None else fact
    core.restore_accuracy(worker.index, accuracy)
    if compared is not None:
        worker.blocks.compare_on(compared)
        worker.cache_mismatches = CacheMismatches.restored(cache_mismatches)


def _worker_of(fact: tuple[Any, ...]) -> tuple[int, WorkerSpec, bool, CostModel, Drift]:
    index, name, capacity, block_size, own, max_running, labels, draining, *rest = fact
    cost, drift, cached_first, below, *role = rest
    if type(index) is not int or index < 0 or type(draining) is not bool:
        raise SnapshotRefused("the snapshot contradicts itself: a worker's index or state")
    model = CostModel(**dict(own)) if isinstance(own, tuple) else own
    if not (model is None or isinstance(model, str | CostModel)):
        raise SnapshotRefused("the snapshot contradicts itself: a worker's cost model")
    notes = None if labels is None else dict(labels)
    spec = WorkerSpec(name, capacity, block_size, model, max_running, notes, cached_first, below, *role)
    return index, spec, draining, CostModel(**dict(cost)), Drift.restored(drift)
