"""Long runs: every invariant holds all the way, and once everything that is bounded is full, memory stays flat."""

from __future__ import annotations

import os
import random
from array import array
from collections import deque
from pathlib import Path

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

REQUESTS = 200_000
CHECK_EVERY = 10_000
TOOLS = 400
COST = CostModel([(0, 0.0), (1000, 0.5)], name="linear")  # so that a hit of a hundred tokens is worth something
STATM = Path("/proc/self/statm")
PAGE_BYTES = 4096


def process_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say, or a sanitizer keeps what was freed."""
    if not STATM.exists() or "asan" in os.environ.get("LD_PRELOAD", ""):
        return 0
    return int(STATM.read_text().split()[1]) * PAGE_BYTES


class Traffic:
    """Prompts of a shared system text, one of many tools (some far more popular than others) and a question."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        system = [1] * 20
        self.tools = [
            array("i", system + [self.rng.randrange(2, 32_000) for _ in range(self.rng.randrange(60, 180))])
            for _ in range(TOOLS)
        ]
        self.popularity = [1 / (rank + 1) ** 0.8 for rank in range(TOOLS)]

    def prompts(self, count: int) -> list[array[int]]:
        draw = self.rng.randrange
        tools = self.rng.choices(self.tools, self.popularity, k=count)
        return [tool + array("i", [draw(2, 32_000) for _ in range(draw(5, 20))]) for tool in tools]


def test_two_hundred_thousand_requests_leave_the_bookings_right_and_memory_flat() -> None:
    """ToolBench in small over 8 workers. Half-way through, every cache is full and the window has been filled many
    times over."""
    clock, traffic = ManualClock(1000.0), Traffic(seed=7)
    workers = [WorkerSpec(f"w{i}", kv_capacity_tokens=8000, cost_model=COST) for i in range(8)]
    sched = GlobalScheduler(workers, clock=clock)
    live: deque[tuple[object, str]] = deque()
    peaks, resident, hits = [], [], 0
    for _ in range(REQUESTS // CHECK_EVERY):
        peaks.append(0)
        for number, prompt in enumerate(traffic.prompts(CHECK_EVERY)):
            clock.advance(0.02)  # 50 requests a second, so the window of 180 s turns over 22 times
            decision = sched.schedule(prompt)
            hits += decision.matched_tokens
            live.append((decision.request_id, decision.worker))
            if number % 4:
                sched.first_token(decision.request_id, cached_tokens=decision.matched_tokens)
            if len(live) > 64:
                sched.finish(live.popleft()[0], output_tokens=number % 60)
            if number % 50 == 0:
                sched.tick()
                peaks[-1] = max(peaks[-1], sched.stats()["tree"]["bytes_used"])
        sched.check()
        resident.append(process_bytes())
    stats = sched.stats()
    assert stats["scheduled"] == REQUESTS and stats["live_requests"] == len(live) == 64
    assert all(account["cached_tokens"] > 7500 for account in stats["workers"].values()), "the caches are full"
    assert hits > 0.8 * 140 * REQUESTS, "and used"
    half = len(peaks) // 2
    assert max(peaks[half:]) <= 1.05 * max(peaks[:half]), peaks
    assert max(resident[half:]) - resident[half] <= 4 << 20, resident
    while live:
        sched.finish(live.popleft()[0])
    assert all(account["live_requests"] == 0 for account in sched.stats()["workers"].values())
    sched.check()


def test_without_a_single_tick_the_byte_budget_alone_keeps_memory_flat() -> None:
    """Unique prompts in ever new namespaces, half of the requests cancelled, workers replaced: the worst of callers."""
    sched = GlobalScheduler(
        [WorkerSpec(f"w{i}", kv_capacity_tokens=10**7) for i in range(4)],
        config=SchedulerConfig(max_bytes=2 << 20),
        clock=ManualClock(1.0),
    )
    resident = []
    for number in range(40_000):
        prompt = array("i", [number % 5, *range(number, number + 40)])
        decision = sched.schedule(prompt, namespace=number // 3)
        (sched.cancel if number % 2 else sched.finish)(decision.request_id)
        if number % 2000 == 0:
            sched.remove_worker(f"w{number // 2000 % 4}")
            sched.add_worker(WorkerSpec(f"w{number // 2000 % 4}", kv_capacity_tokens=10**7))
            sched.check()
            resident.append(process_bytes())
    tree = sched.stats()["tree"]
    assert tree["bytes_used"] <= 2 << 20 and tree["shed_nodes"] > 1000
    assert tree["namespaces"] < 20_000
    assert max(resident[10:]) - resident[10] <= 4 << 20, resident
    sched.check()


def test_an_endless_stream_of_cache_events_stays_within_the_index_and_the_tree() -> None:
    """An engine whose removals get lost: the index reaches its bound, forgets everything, and goes on."""
    sched = GlobalScheduler([WorkerSpec("w", kv_capacity_tokens=4096, block_size=16)], clock=ManualClock(1.0))
    tokens_bound = 4096 + 4096 // 4  # an engine that reports what it drops is waited for
    bound = 1024 + 4 * 256
    for number in range(20_000):
        tokens = [number, *range(15)] * 2
        sched.apply("w", [BlockStored([2 * number, 2 * number + 1], None, tokens, 16)])
        if number % 3 == 0:
            sched.apply("w", [BlockRemoved([2 * number + 1])])
        if number % 500 == 0:
            worker = sched.stats()["workers"]["w"]
            assert worker["known_blocks"] <= bound and worker["cached_tokens"] <= tokens_bound
            sched._clock.advance(100.0)
            sched.tick()
            sched.check()
    assert sched.stats()["workers"]["w"]["block_overflows"] > 5
    sched.apply("w", [AllBlocksCleared()])
    for _ in range(3):
        sched._clock.advance(200.0)
        sched.tick()
    assert sched.stats()["tree"]["nodes"] == 0
