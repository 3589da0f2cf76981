"""A whole scheduler as bytes, and back. Owns the envelope (magic, version, checksum), what of a scheduler is plain
Python, and how time goes on; compiled state is `_snapshot/accounts.pyx`. Read by `GlobalScheduler.snapshot` and `.restore`.

    magic 8 | version 4 | CRC-32 of all else 4 | length 8 | facts | core | blocks of each worker

Nothing of the rest is looked at before all of these are right. A checksum is no signature: whoever can write the bytes
can make them right. What is read is checked for that reason, too, and never makes more memory than its own size
allows; but a snapshot from a stranger may still lie about what is cached. docs/snapshot.md has the table.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import partial
from typing import Any

from .._cost import CostModel
from .._placement.request_api import finite_time
from .._snapshot.accounts import cost_at, layout, read_core, write_core
from .._snapshot.blocks import read_blocks, write_blocks
from .._snapshot.codec import Reader, Writer
from ..clock import Clock
from ..errors import InvalidConfig, InvalidInput, SnapshotRefused
from ..policies.base import POLICIES, Policy, resolve
from ..shifts_state import give, taken
from ..types import WorkerSpec
from .cache_mismatch import Truth
from .leases import Drift

GlobalScheduler = Any  # the class is above this module, which is handed it
MAGIC = b"preble\x1a\n"
VERSION = 2
HEADER = struct.Struct("<8sIIQ")
ELAPSED_SECONDS_MAX = 1e9  # that may pass between a snapshot and its restoration


class ShiftedClock:
    """Another clock, ahead of it by a fixed time."""

    def __init__(self, clock: Clock, ahead_seconds: float) -> None:
        self.clock = clock
        self.ahead_seconds = ahead_seconds

    def __call__(self) -> float:
        return self.clock() + self.ahead_seconds


# --- writing ----------------------------------------------------------------------------------------------------------


def take(scheduler: GlobalScheduler) -> bytes:
    """See `GlobalScheduler.snapshot`. The writers' lock is held while memory is copied, not for the checksum."""
    writer = Writer()
    for byte in bytes(HEADER.size):
        writer.byte(byte)
    with scheduler._lock:
        writer.value(_facts(scheduler), "the scheduler")
        write_core(writer, scheduler)
        for worker in scheduler._workers.values():
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


def _facts(scheduler: GlobalScheduler) -> tuple[Any, ...]:
    """What is plain Python of a scheduler, as (name, value) pairs."""
    workers = scheduler._workers.values()
    return (
        ("layout", layout()),
        ("now", scheduler._now()),
        ("config", _pairs({name: _plain_number(value) for name, value in asdict(scheduler.config).items()})),
        ("seed", scheduler._seed),
        ("policy", _policy_name(scheduler._policy)),
        ("cost_model", _cost_fact(scheduler._cost_model)),
        ("workers", tuple(_worker_fact(scheduler, worker) for worker in workers)),
        ("truth", tuple(_truth_fact(scheduler, worker) for worker in workers)),
        ("faded_at", scheduler._core.trust.faded),
        ("counts", _pairs(scheduler._counts_here)),
        ("shifts", taken(scheduler._shifts)),
        ("reasons", _pairs(Counter(scheduler._reasons) + Counter(scheduler._steered_reasons()))),
    )


def _plain_number(value: Any) -> int | float:
    if isinstance(value, bool):
        return value
    return int(value) if isinstance(value, int) else float(value)


def _policy_name(policy: Policy | None) -> tuple[str, bool]:
    """(name, whether the name is enough to have the policy again). Raises InvalidInput for one that keeps books."""
    if policy is None:
        return "e2", True
    if policy.needs:
        raise InvalidInput(f"a snapshot does not keep what policy {policy.name!r} needs counted: {policy.needs}")
    known = policy.name in POLICIES and policy.name != "e2" and type(resolve(policy.name)) is type(policy)
    return policy.name, known


def _worker_fact(scheduler: GlobalScheduler, worker: Any) -> tuple[Any, ...]:
    spec: WorkerSpec = worker.spec
    own, drift = spec.cost_model, worker.drift
    return (
        worker.index,
        spec.id,
        int(spec.kv_capacity_tokens),
        int(spec.block_size),
        _cost_fact(own) if isinstance(own, CostModel) else own,
        None if spec.max_running is None else int(spec.max_running),
        None if spec.labels is None else _pairs(spec.labels),
        worker.draining,
        _cost_fact(cost_at(scheduler._core, worker.index)),
        (int(drift.reports), int(drift.requests), float(drift.since), float(drift.told_at)),
    )


def _truth_fact(scheduler: GlobalScheduler, worker: Any) -> tuple[Any, ...]:
    heard = scheduler._core.trust.facts(worker.index)
    return worker.spec.id, (heard, worker.blocks.compared(), worker.truth.facts())


def _cost_fact(model: CostModel) -> tuple[Any, ...]:
    facts: dict[str, Any] = model.coefficients()
    return _pairs({**facts, "knots": tuple(tuple(point) for point in facts["knots"])})


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


def load(
    kind: Any, config_kind: Any, data: Any, policy: Any, clock: Clock | None, elapsed_seconds: float
) -> GlobalScheduler:
    """See `GlobalScheduler.restore`."""
    elapsed = finite_time("elapsed_seconds", elapsed_seconds)
    if not 0 <= elapsed <= ELAPSED_SECONDS_MAX:
        raise InvalidInput(f"elapsed_seconds must be in [0, {ELAPSED_SECONDS_MAX:g}], got {elapsed_seconds!r}")
    reader = opened(data)
    facts = _read("its facts", lambda: dict(reader.value()))
    if facts.get("layout") != layout():
        raise SnapshotRefused(f"the snapshot has a layout {facts.get('layout')}; this library's is {layout()}")
    scheduler = _read("its facts", lambda: _empty(kind, config_kind, facts, policy, clock))
    then = _read("its time", lambda: finite_time("now", facts["now"]))
    with scheduler._lock:
        _fill(scheduler, reader, facts, then)
        _set_time(scheduler, then + elapsed)
    return scheduler


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


def _empty(kind: Any, config_kind: Any, facts: dict[str, Any], policy: Any, clock: Clock | None) -> GlobalScheduler:
    """A scheduler of the same settings, with no workers."""
    name, by_name = facts["policy"]
    if policy is None and not by_name:
        raise _PolicyWanted(f"policy must be given: the snapshot's {name!r} is not known by its name")
    try:
        resolve(policy if policy is not None else name)
        if clock is not None and not callable(clock):
            raise InvalidConfig(f"clock must be callable, got {clock!r}")
    except InvalidConfig as error:
        raise _PolicyWanted(str(error)) from error
    settings = dict(facts["config"])
    strange = settings.keys() - {field.name for field in fields(config_kind)}
    if strange:
        raise SnapshotRefused(f"the snapshot has settings that this library does not know: {sorted(strange)}")
    return kind(
        (),
        policy=policy if policy is not None else name,
        cost_model=CostModel(**dict(facts["cost_model"])),
        config=config_kind(**settings),
        clock=clock,
        seed=facts["seed"],
    )


def _fill(scheduler: GlobalScheduler, reader: Reader, facts: dict[str, Any], then: float) -> None:
    """Workers, compiled state, blocks and counts of a scheduler that has none."""
    workers = _read("its workers", lambda: [_worker_of(fact) for fact in facts["workers"]])
    end = 1 + max((index for index, *_ in workers), default=-1)
    if len({spec.id for _, spec, *_ in workers}) != len(workers) or end > 65536:
        raise SnapshotRefused("the snapshot contradicts itself: two workers of one id, or more than there may be")
    specs: list[WorkerSpec | None] = [None] * end
    costs: list[CostModel | None] = [None] * end
    for index, spec, _, cost, _ in workers:
        if specs[index] is not None:
            raise SnapshotRefused("the snapshot contradicts itself: two workers of one index")
        specs[index], costs[index] = spec, cost
    read_core(reader, scheduler, specs, costs, then)
    heard = _read("what was heard of caches", lambda: dict(facts.get("truth", ())))
    for index, spec, draining, cost, drift in workers:
        kept = scheduler._adopt(spec, index, draining, cost)
        kept.drift = drift
        _read("what was heard of a cache", partial(_hear, scheduler, kept, heard.get(spec.id)))
        read_blocks(reader, kept.blocks)
    scheduler._core.trust.faded = _read("its time", lambda: finite_time("faded_at", facts.get("faded_at", then)))
    reader.done()
    _read("its plans", lambda: give(scheduler._shifts, facts["shifts"]))
    scheduler._counts_here.update(_read("its counts", lambda: _counts_of(facts["counts"])))
    scheduler._reasons.update(_read("its counts", lambda: _counts_of(facts["reasons"])))


def _hear(scheduler: GlobalScheduler, worker: Any, fact: Any) -> None:
    """What was heard of a worker's cache; nothing in snapshots of libraries that did not listen."""
    heard, compared, truth = (None, None, None) if fact is None else fact
    scheduler._core.hear(worker.index, heard)
    if compared is not None:
        worker.blocks.compare_on(compared)
        worker.truth = Truth.of(truth)


def _worker_of(fact: tuple[Any, ...]) -> tuple[int, WorkerSpec, bool, CostModel, Drift]:
    index, name, capacity, block_size, own, max_running, labels, draining, cost, drift = fact
    if type(index) is not int or index < 0 or type(draining) is not bool:
        raise SnapshotRefused("the snapshot contradicts itself: a worker's index or state")
    model = CostModel(**dict(own)) if isinstance(own, tuple) else own
    if not (model is None or isinstance(model, str | CostModel)):
        raise SnapshotRefused("the snapshot contradicts itself: a worker's cost model")
    spec = WorkerSpec(name, capacity, block_size, model, max_running, None if labels is None else dict(labels))
    return index, spec, draining, CostModel(**dict(cost)), _drift_of(*drift)


def _drift_of(reports: Any, requests: Any, since: Any, told_at: Any) -> Drift:
    if type(reports) is not int or type(requests) is not int or reports < 0:
        raise SnapshotRefused("the snapshot contradicts itself: an engine's reports are no number")
    return Drift(reports, requests, finite_time("since", since), finite_time("told_at", told_at))


def _counts_of(pairs: Any) -> dict[str, int]:
    counts = dict(pairs)
    if not all(type(name) is str and type(count) is int and count >= 0 for name, count in counts.items()):
        raise SnapshotRefused("the snapshot contradicts itself: a counter is no number")
    return counts


def _set_time(scheduler: GlobalScheduler, now: float) -> None:
    """Let the scheduler's time go on from `now`, at the pace of its clock."""
    clock = scheduler._clock
    ahead = now - finite_time("what the clock returned", clock())
    if ahead:
        scheduler._clock = ShiftedClock(clock, ahead)
        scheduler._ahead_seconds = ahead
