"""A million operations of every kind at bounded state: bytes in use must not grow, and an emptied tree must be as small
as it was.

Owns the traffic, the measure and the bound. Counted are the bytes that malloc has given out and not got back, Python's
objects included: the script restarts itself with PYTHONMALLOC=malloc, so that a reference too many shows as well as a
block not freed. Measured is after each of ten laps of the same operations, with everything ended and forgotten: what
an emptied part says it has left (slabs and tables, which stay as large as they once had to be; `check` has compared the
number with a recount) must not go on growing after the fifth lap, and all that no part accounts for must not have grown
since the first.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import sys
import warnings
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from preble import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    GlobalScheduler,
    PrefixEvicted,
    SchedulerConfig,
    WorkerSpec,
)
from preble._radix import RadixTree
from preble.batching._kv_slots import SlotTree
from preble.errors import CacheMismatchWarning, PrebleError

MIB = 1 << 20
LAPS = 10
TABLES_GROWTH_MAX = 1.25  # a table may double late, when deleted entries happen to lie unfavourably
GROWTH_BYTES_MAX = 16 << 10  # after the first lap; of a million operations, 32 bytes lost in every 1,800th are more
BLOCK = 16
SLOTS = 2000
NAMESPACES = (None, "lora", 7)
CLOCK_STEP_SECONDS = 0.002
LAP_SECONDS = 1e6  # a multiple of the window

Step = Callable[[], object]


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def measure() -> Callable[[], int] | None:
    """A function that reports the bytes malloc has given out, None where the system has none."""
    library = ctypes.CDLL(None)
    if hasattr(library, "__sanitizer_get_current_allocated_bytes"):
        allocated = library.__sanitizer_get_current_allocated_bytes
        allocated.restype = ctypes.c_size_t
        return lambda: int(allocated())
    if not hasattr(library, "mallinfo2"):
        return None
    library.mallinfo2.restype = Mallinfo

    def given_out() -> int:
        info = library.mallinfo2()
        return int(info.uordblks + info.hblkhd)

    return given_out


class Traffic:
    """One scheduler, one radix tree and one slot tree, and steps that use each in every way, wrong ones included."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.seconds = 0.0
        self.prompts = self.make_prompts()
        self.workers = [f"w{i}" for i in range(6)]
        self.live: deque[Any] = deque()
        self.refused = 0
        self.sched = GlobalScheduler(
            # Fits allocate in numpy, which keeps small blocks of ever more sizes: that would hide what is lost here.
            config=SchedulerConfig(max_bytes=2 * MIB, history_seconds=25.0, lease_seconds=20.0, calibrate=False),
            clock=self.now,
        )
        self.tree = RadixTree(max_bytes=MIB, window_seconds=25.0)
        self.slots = SlotTree()
        self.free = list(range(SLOTS))
        self.open_workers()
        steps: dict[Step, int] = {
            **{self.schedule: 30, self.first_token: 20, self.end: 28, self.look: 10, self.events: 6, self.tick: 1},
            **{self.mistake: 4, self.change_tree: 10, self.serve_slots: 6, self.replace_worker: 1},
        }
        self.steps, self.weights = list(steps), list(steps.values())

    def now(self) -> float:
        """The clock: it moves whenever it is asked."""
        self.seconds += CLOCK_STEP_SECONDS
        return self.seconds

    def make_prompts(self) -> list[Any]:
        """Prompts of 1 to 400 tokens over shared stems, as arrays and, every fourth, as lists."""
        draw = self.rng.randrange
        stems = [array("i", [draw(1000) for _ in range(200)]) for _ in range(40)]
        made: list[Any] = []
        for number in range(4000):
            stem = stems[draw(len(stems))]
            prompt = stem[: draw(len(stem) + 1)] + array("i", [draw(1000) for _ in range(draw(1, 200))])
            made.append(prompt if number % 4 else prompt.tolist())
        return made

    def open_workers(self) -> None:
        for name in self.workers:
            self.sched.add_worker(WorkerSpec(name, kv_capacity_tokens=20_000, block_size=BLOCK))
        for _ in range(3):
            self.tree.add_worker(10_000)

    def run(self, operations: int) -> None:
        """The same operations at the same place within the window as in each lap before, so that whatever has grown to
        its largest need in one lap grows no further in the next."""
        self.rng.seed(self.seed)
        self.seconds = (self.seconds // LAP_SECONDS + 1) * LAP_SECONDS
        for step in self.rng.choices(self.steps, self.weights, k=operations):
            step()

    # Steps.

    def schedule(self) -> None:
        self.live.append(
            self.sched.schedule(
                self.rng.choice(self.prompts), namespace=self.rng.choice(NAMESPACES), max_new_tokens=20
            ).request_id
        )
        if len(self.live) > 64:
            self.end()

    def first_token(self) -> None:
        if self.live:
            self.sched.first_token(self.rng.choice(self.live), cached_tokens=self.rng.choice((None, 0, 1)))

    def end(self) -> None:
        if not self.live:
            return
        request, how = self.live.popleft(), self.rng.random()
        if how < 0.7:
            self.sched.finish(request, output_tokens=10)
        elif how < 0.98:
            self.sched.cancel(request)  # the rest is left to its lease

    def look(self) -> None:
        prompt, namespace = self.rng.choice(self.prompts), self.rng.choice((*NAMESPACES, "nobody's"))
        self.sched.match(prompt, namespace=namespace)
        if self.rng.random() < 0.2:
            self.sched.explain(prompt, namespace=namespace)
            self.sched.stats()

    def events(self) -> None:
        worker, prompt = self.rng.choice(self.workers), array("i", self.rng.choice(self.prompts))
        blocks = len(prompt) // BLOCK
        tokens = prompt[: blocks * BLOCK]
        hashes = [hash(tuple(tokens[: (i + 1) * BLOCK])) for i in range(blocks)]
        kind = self.rng.random()
        if kind < 0.5:
            self.sched.apply(
                worker, [BlockStored(hashes, None, tokens, BLOCK), BlockStored([1], 99, [0] * BLOCK, BLOCK)]
            )
        elif kind < 0.7:
            self.sched.apply(worker, [BlockRemoved(hashes[blocks // 2 :]), BlockRemoved([12345])])
        elif kind < 0.99:
            self.sched.apply(worker, [PrefixEvicted(prompt, len(prompt) // 2)])
        else:
            self.sched.apply(worker, [AllBlocksCleared()])

    def tick(self) -> None:
        self.sched.tick()

    def replace_worker(self) -> None:
        name = self.rng.choice(self.workers)
        self.sched.drain_worker(name)
        self.sched.remove_worker(name)
        self.sched.add_worker(WorkerSpec(name, kv_capacity_tokens=20_000, block_size=BLOCK))

    def mistake(self) -> None:
        """Calls that must be refused; each leaves by another way out."""
        prompt = self.rng.choice(self.prompts)
        self.refuse(lambda: self.sched.schedule([]))
        self.refuse(lambda: self.sched.schedule([*prompt, -1]))
        self.refuse(lambda: self.sched.schedule([*prompt, 1 << 40], namespace="never made"))
        self.refuse(lambda: self.sched.schedule([*prompt, "x"]))
        self.refuse(lambda: self.sched.schedule(prompt, exclude=["nobody"]))
        self.refuse(lambda: self.sched.schedule(prompt, exclude=self.workers))
        self.refuse(lambda: self.sched.schedule(prompt, request_id=self.live[0] if self.live else []))
        self.refuse(lambda: self.sched.match(memoryview(b"abcd")))
        self.refuse(lambda: self.sched.apply("w0", [BlockStored([1], None, [1, 2, 3], BLOCK)]))
        self.refuse(lambda: self.tree.insert([1, 2], float("nan")))
        self.refuse(lambda: self.slots.release(self.slots.hold([1, -2], 0.0), 0.0))

    def refuse(self, call: Step) -> None:
        try:
            call()
        except PrebleError:
            self.refused += 1
        else:
            raise AssertionError("a mistake was not refused")

    def change_tree(self) -> None:
        prompt, namespace, kind = self.rng.choice(self.prompts), self.rng.choice(NAMESPACES), self.rng.random()
        worker = self.rng.randrange(3)
        if kind < 0.7:
            self.tree.insert(prompt, self.now(), worker=worker, namespace=namespace)
        elif kind < 0.8:
            self.tree.unmark(prompt, worker, len(prompt) // 2, namespace=namespace)
        elif kind < 0.9:
            self.tree.match(prompt, namespace=namespace)
            self.tree.victims(worker, 500, self.now())
        elif kind < 0.98:
            self.tree.expire(self.now(), 100)
        else:
            self.tree.clear_worker(worker)

    def serve_slots(self) -> None:
        prompt, namespace, now = self.rng.choice(self.prompts), self.rng.choice(NAMESPACES), self.now()
        hold = self.slots.hold(prompt, now, namespace=namespace)
        missing = len(prompt) - hold.matched_tokens
        if missing > len(self.free):
            self.free.extend(self.slots.evict(missing - len(self.free))[0])
        own = [self.free.pop() for _ in range(missing)]
        self.free.extend(self.slots.extend(hold, prompt, own, now))
        self.slots.slots(hold)
        self.slots.release(hold, now)

    # The end of everything.

    def settle(self) -> dict[str, int]:
        """End and forget everything, so that what is still allocated has no owner but tables and slabs; returns what
        each part says it still has allocated. Workers are opened again after the measurement."""
        while self.live:
            self.sched.finish(self.live.popleft())
        for name in self.workers:
            self.sched.remove_worker(name)
        for worker in range(3):
            self.tree.drop_worker(worker)
        while self.sched.stats()["tree"]["nodes"] or self.tree.node_count or self.sched.stats()["live_requests"]:
            self.seconds += 100.0  # more than two windows, and than a lease
            self.sched.tick()
            self.tree.expire(self.now())
        self.free.extend(self.slots.evict(SLOTS)[0])
        self.slots.release(self.slots.hold([1], 0.0), 0.0)  # makes it look for empty namespaces
        for part in (self.sched, self.tree, self.slots):
            part.check()
        assert len(self.free) == SLOTS
        gc.collect()
        return {
            "scheduler": self.sched.stats()["tree"]["bytes_used"],
            "radix tree": self.tree.bytes_used,
            "slot tree": self.slots.bytes_used,
        }


def planted(bytes_lost: int) -> Step:
    """A step that loses some bytes each time, to prove that this would be seen."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    return lambda: library.malloc(ctypes.c_size_t(bytes_lost))


def run(operations: int, seed: int, lost_bytes: int, given_out: Callable[[], int]) -> list[str]:
    """What is wrong, in words; empty when memory stays flat."""
    traffic = Traffic(seed)
    if lost_bytes:
        traffic.steps.append(planted(lost_bytes))
        traffic.weights.append(1)
    sizes, parts = [], []
    for lap in range(LAPS):
        traffic.run(operations // LAPS)
        parts.append(traffic.settle())
        sizes.append(given_out())
        traffic.open_workers()
        sys.stdout.write(
            f"{(lap + 1) * operations // LAPS:>9} operations: {sizes[-1]:>10} bytes given out, {parts[-1]}\n"
        )
    wrong = [
        f"{name} has {parts[-1][name] - parts[LAPS // 2][name]} bytes more than half-way, though it is empty"
        for name in parts[0]
        if parts[-1][name] > parts[LAPS // 2][name] * TABLES_GROWTH_MAX
    ]
    growth = (sizes[-1] - sum(parts[-1].values())) - (sizes[0] - sum(parts[0].values()))
    if growth > GROWTH_BYTES_MAX:
        wrong.append(f"{growth} bytes more are given out that no part accounts for, allowed are {GROWTH_BYTES_MAX}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Does memory stay flat over many operations?")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lose", type=int, default=0, metavar="BYTES", help="plant a leak: the run must fail")
    chosen = parser.parse_args()
    if os.environ.get("PYTHONMALLOC") != "malloc":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONMALLOC": "malloc"})
    warnings.simplefilter("ignore", CacheMismatchWarning)  # the traffic lies on purpose
    given_out = measure()
    if given_out is None:
        sys.stdout.write("not measured: this C library has no mallinfo2\n")
        return 3
    wrong = run(chosen.operations, chosen.seed, chosen.lose, given_out)
    sys.stdout.write("".join(f"LEAK: {line}\n" for line in wrong) or "memory stays flat\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
