"""Snapshots whose checksum is right and whose numbers are not: each number in turn is set to an extreme, and whatever
`restore` accepts is used until every part of it has been.

    python -m tests.snapshot.extremes                     every number, some minutes
    python -m tests.snapshot.extremes --share 0.05        a seeded share of them

Owns where the numbers lie, what they are set to, and what a restored scheduler must stand: schedules, ends, events,
evictions, workers that come and go, ticks, another snapshot, and `check` after each. Attempts run in a process of its
own, which says before each one which it is: a crash is an attempt that was never done. `test_extremes.py` runs a few.
"""

from __future__ import annotations

import argparse
import random
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from preble import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CostModel,
    GlobalScheduler,
    ManualClock,
    SchedulerConfig,
    WorkerSpec,
)
from preble._snapshot.accounts import layout
from preble._snapshot.codec import Reader, Writer
from preble.errors import InvalidInput, PrebleError, SnapshotRefused
from tests.support.paths import ROOT

HEADER_BYTES = 24
INTS = (0, 1, 2, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**42, 2**62, 2**63 - 1, -1, -(2**63))
REALS = (0.0, -0.0, 1.0, -1.0, 1e-300, 1e15, 1e300, float("inf"), float("-inf"), float("nan"))
SERIALS, NOW_BUCKET = 120, 1016  # of `lived`: its bookings, and the second it ends in, which is a slice of its window
HUNG_SECONDS = 20  # an attempt that takes as long is ended by a signal


# --- what is set ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """Bytes in place of others: `at` counts from the snapshot's start."""

    at: int
    length: int
    put: bytes

    def of(self, data: bytes) -> bytes:
        return resealed(data[: self.at] + self.put + data[self.at + self.length :])

    def __str__(self) -> str:
        return f"{self.put.hex()} for {self.length} bytes at {self.at}"


def resealed(data: bytes) -> bytes:
    """The bytes with a checksum and a length that fit."""
    start = data[:16] + struct.pack("<Q", len(data))
    check = zlib.crc32(data[HEADER_BYTES:], zlib.crc32(start[16:], zlib.crc32(start[:12])))
    return start[:12] + struct.pack("<I", check) + start[16:] + data[HEADER_BYTES:]


def encoded(value: Any) -> bytes:
    writer = Writer()
    writer.value(value, "a value")
    return bytes(writer.finish())


def attempts(data: bytes) -> Iterator[Attempt]:
    """Every number of the plain state, then every four and eight bytes of the rest that are not among unused ones."""
    state = Reader(data, HEADER_BYTES).value()
    length = len(encoded(state))
    for lie in lies(state):
        yield Attempt(HEADER_BYTES, length, encoded(lie))
    words = [struct.pack("<q", value) for value in INTS] + [struct.pack("<d", value) for value in REALS]
    halves = [struct.pack("<I", value % 2**32) for value in INTS[:7]] + [
        struct.pack("<f", value) for value in REALS[7:]
    ]
    for at in places(data, HEADER_BYTES + length):
        for put in [*words, *halves] if at + 8 <= len(data) else halves:
            if data[at : at + len(put)] != put:
                yield Attempt(at, len(put), put)


def lies(value: Any) -> Iterator[Any]:
    """A plain value with one of its numbers replaced."""
    if type(value) is tuple:
        for place, part in enumerate(value):
            yield from (value[:place] + (lie,) + value[place + 1 :] for lie in lies(part))
    elif type(value) is int or type(value) is float:
        yield from (number for number in (*INTS, *REALS) if type(number) is not type(value) or number != value)


def places(data: bytes, start: int) -> Iterator[int]:
    """Where a number begins: each word of heads, of items in use and of lists, and of what is alike by the thousand
    (free items, the lists of them, zeros) a few. Behind the leases, where texts lie between, each byte."""
    node_bytes, mark_bytes, lease_bytes, row_bytes, *_ = layout()
    head = struct.unpack_from("<QQqq10I", data, start)
    nodes, marks, free_nodes, free_marks, table, draining, _, room, rows = head[4:13]
    at = start + 88
    epochs = at + 24 * rows
    yield from range(start, epochs + 4 * (room - rows), 4)
    at = epochs + 4 * (room - rows)
    yield from items(data, at, nodes * 1024, node_bytes, 60)
    at += nodes * 1024 * node_bytes
    yield from few(at, free_nodes)
    at += 4 * free_nodes
    yield from items(data, at, marks * 1024, mark_bytes, 12)
    at += marks * 1024 * mark_bytes
    yield from few(at, free_marks)
    at += 4 * free_marks
    (tokens,) = struct.unpack_from("<Q", data, at)
    yield from (at, at + 4)
    yield from few(at + 8, tokens)
    at += 8 + 4 * tokens
    book = data.index(struct.pack("<qq", SERIALS, NOW_BUCKET), at)  # entries, tables and namespaces lie between
    yield from few(at, (book - at) // 4, 3)
    yield from range(book, book + 40, 4)
    at = book + 40
    for row in range(at, at + rows * row_bytes, row_bytes):
        yield from range(row, row + 64, 4)
        yield from few(row + 64, (row_bytes - 64) // 4, 17)
    at += rows * row_bytes
    leases, free_leases = struct.unpack_from("<II", data, book + 32)
    yield from items(data, at, leases * 1024, lease_bytes, 8)
    at += leases * 1024 * lease_bytes
    yield from few(at, free_leases)
    yield from range(at + 4 * free_leases, len(data) - 3)


def items(data: bytes, at: int, count: int, size: int, used: int) -> Iterator[int]:
    """The words of a slab's items, of those whose word at `used` is 0 or even of nodes, of four."""
    free = 0
    for item in range(at, at + count * size, size):
        (word,) = struct.unpack_from("<I", data, item + used)
        in_use = word % 2 == 1 if used == 60 else word != 0
        free += not in_use
        if in_use or free <= 4:
            yield from range(item, item + size, 4)


def few(at: int, count: int, every: int = 97) -> Iterator[int]:
    """The first, the last, and some in between, of words."""
    return (at + 4 * n for n in range(count) if n < 4 or n >= count - 4 or n % every == 0)


# --- what a scheduler must stand --------------------------------------------------------------------------------------


def lived() -> bytes:
    """A snapshot of a scheduler in which everything has happened."""
    clock = ManualClock(1000.0)
    own = CostModel([(0, 0.01), (100, 0.2)], context=(0, 0, 0, 1e-4), name="own")
    specs = [
        WorkerSpec("a", kv_capacity_tokens=100, block_size=4),
        WorkerSpec("b", kv_capacity_tokens=300, cost_model=own, labels={"rack": "1"}, max_running=3),
        WorkerSpec("gone"),
        WorkerSpec("c", kv_capacity_tokens=10**6),
    ]
    sched = GlobalScheduler(specs, config=SchedulerConfig(history_seconds=36.0, max_bytes=1 << 20), clock=clock, seed=5)
    draw = random.Random(5)
    for step in range(120):
        tokens = [draw.randrange(3) for _ in range(draw.randrange(4, 40))]
        space = draw.choice([None, "lora", ("salt", 7)])
        sched.schedule(tokens, request_id=f"id-{step}", namespace=space, max_new_tokens=draw.choice([None, 9]))
        if step % 3:
            sched.first_token(f"id-{step}", cached_tokens=draw.choice([None, 0]))
        if step % 4:
            sched.finish(f"id-{step}", output_tokens=draw.choice([None, 7]))
        if step % 5 == 0:
            sched.apply("a", [BlockStored([step, -step - 1], None, (tokens * 2)[:8], 4, namespace=space)])
        if step % 11 == 0:
            clock.advance(1.5)
            sched.tick()
            sched.renew(f"id-{step}")
        if step == 100:
            sched.remove_worker("gone")
    sched.reconcile_counts("b", running=3, waiting=1)
    return sched.snapshot()


def use(sched: GlobalScheduler, clock: ManualClock) -> None:
    """Everything once, and `check` in between."""
    sched.check()
    sched.stats()
    for step in range(6):
        tokens = [step % 3] * (5 + step) if step % 2 else [1, 0, 2, 1] * 9
        asked: dict[str, Any] = {"namespace": (None, "lora", ("salt", 7))[step % 3]}
        sched.match(tokens, **asked)
        sched.explain(tokens, **asked)
        decision = sched.schedule(tokens, **asked, explain=step % 2 == 0)
        sched.first_token(decision.request_id, cached_tokens=0 if step % 2 else None)
        if step % 3:
            sched.finish(decision.request_id, output_tokens=5)
    sched.check()
    for name in list(sched.workers)[:2]:
        sched.apply(name, [BlockStored([77, 78], None, [1, 0, 2, 1, 1, 0, 2, 1], 4), BlockRemoved([78, 0])])
    for request_id in list(sched.core.leases)[::2]:
        sched.finish(request_id, output_tokens=3)
    for request_id in list(sched.core.leases)[::2]:
        sched.cancel(request_id)
    sched.check()
    for step in range(8):  # full, so that what is oldest goes
        sched.finish(sched.schedule([step] * 90, request_id=("full", step)).request_id)
    clock.advance(2.0)
    sched.tick()
    sched.check()
    again = ManualClock(clock())
    sched = GlobalScheduler.restore(sched.snapshot(), clock=again)
    sched.add_worker("new")
    for step in range(3):
        sched.schedule([5] * (step + 1), exclude=[next(iter(sched.workers))])
    sched.apply(next(iter(sched.workers)), [AllBlocksCleared()])
    sched.remove_worker(next(iter(sched.workers)))
    again.advance(10_000.0)
    sched.tick()
    sched.check()


def attempt(data: bytes) -> str:
    """ "refused" or "used". Raises what may not be."""
    clock = ManualClock(2000.0)
    try:
        sched = GlobalScheduler.restore(data, clock=clock)
    except (SnapshotRefused, InvalidInput):
        return "refused"
    if not sched.workers:
        sched.add_worker("only")
    try:
        use(sched, clock)
    except PrebleError as error:
        return f"used, with {type(error).__name__}"
    return "used"


# --- running them -----------------------------------------------------------------------------------------------------


def chosen(share: float, seed: int) -> list[Attempt]:
    draw = random.Random(seed)
    return [one for one in attempts(lived()) if draw.random() < share]


def run_here(share: float, seed: int, first: int) -> None:
    """Attempts from `first` on, each announced before it is made."""
    data = lived()
    for number, one in enumerate(chosen(share, seed)):
        if number < first:
            continue
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        signal.alarm(HUNG_SECONDS)
        began = time.monotonic()
        try:
            what = attempt(one.of(data))
        except BaseException as error:  # noqa: BLE001 - each is a finding
            what = f"FAILED {type(error).__name__}: {error}"
        sys.stdout.write(f"{what} in {time.monotonic() - began:.1f} s: {one}\n")
        sys.stdout.flush()
    signal.alarm(0)
    sys.stdout.write("done\n")


def run(share: float, seed: int = 1) -> tuple[dict[str, int], list[str]]:
    """How often each thing became of attempts, and what was found: failures, crashes."""
    counts: dict[str, int] = {}
    found: list[str] = []
    first, plan = 0, chosen(share, seed)
    while first < len(plan):
        command = [sys.executable, "-m", "tests.snapshot.extremes", "--here", str(first)]
        command += ["--share", str(share), "--seed", str(seed)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        lines = ended.stdout.splitlines()
        for line in lines:
            if " in " in line:
                what = line.partition(" in ")[0].partition(":")[0]
                counts[what] = counts.get(what, 0) + 1
                if line.startswith("FAILED"):
                    found.append(line)
                    sys.stderr.write(line + "\n")
        if lines and lines[-1] == "done":
            break
        numbers = [int(line) for line in lines if line.isdigit()]
        last = numbers[-1] if numbers else first
        found.append(f"CRASHED, exit status {ended.returncode}: {plan[last]}\n{ended.stderr[-2000:]}")
        sys.stderr.write(found[-1][:300] + "\n")
        first = last + 1
    return counts, found


def main() -> int:
    parser = argparse.ArgumentParser(description="Restore snapshots with extreme numbers.")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--here", type=int, default=None, help="make the attempts from this one on in this process")
    asked = parser.parse_args()
    if asked.here is not None:
        run_here(asked.share, asked.seed, asked.here)
        return 0
    counts, found = run(asked.share, asked.seed)
    sys.stdout.write("\n".join([str(counts), *found]) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
