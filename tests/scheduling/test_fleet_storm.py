"""Five hundred workers that join and leave at random while requests run: every promise holds, nothing stays behind."""

from __future__ import annotations

import random
from array import array
from collections import Counter

from preble import GlobalScheduler, ManualClock, SchedulerConfig, WorkerSpec
from preble.errors import NoWorkers
from tests.stress.test_soak import process_bytes

WORKERS = 500
STEPS = 60_000
CHECK_EVERY = 6_000
TOOLS = 300
LIVE = 2_000


class Storm:
    """The scheduler, and who is estimated to be where. A worker's name is used again and again."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock(1000.0)
        config = SchedulerConfig(history_seconds=30.0, join_seconds=2.0, max_bytes=16 << 20)
        names = [f"w{i}" for i in range(WORKERS)]
        specs = [WorkerSpec(name, kv_capacity_tokens=10_000, cached_first=True) for name in names]
        self.sched = GlobalScheduler(specs, config=config, clock=self.clock)
        draw = self.rng.randrange
        self.tools = [array("i", [1] * 10 + [draw(2, 30_000) for _ in range(draw(300, 900))]) for _ in range(TOOLS)]
        self.popularity = [1 / (rank + 1) for rank in range(TOOLS)]
        self.there = dict.fromkeys(names, 0)  # name -> its life
        self.draining: set[str] = set()
        self.absent: list[str] = []
        self.live: dict[int, tuple[str, int]] = {}
        self.number = 0
        self.seen: Counter[str] = Counter()

    def step(self) -> None:
        """One thing happens, mostly a request's beginning or end."""
        self.clock.advance(0.01)
        dice = self.rng.random()
        if dice < 0.55 or len(self.live) > LIVE:
            self.request()
        elif dice < 0.9:
            self.end()
        elif dice < 0.93:
            self.leave()
        elif dice < 0.96:
            self.join()
        elif dice < 0.98:
            self.drain()
        else:
            self.sched.tick()

    def request(self) -> None:
        self.number += 1
        tool = self.rng.choices(self.tools, self.popularity)[0]
        prompt = tool + array("i", [self.rng.randrange(2, 30_000) for _ in range(5)])
        try:
            decision = self.sched.schedule(prompt, request_id=self.number)
        except NoWorkers:
            assert self.there.keys() <= self.draining
            return
        assert decision.worker in self.there
        self.live[self.number] = (decision.worker, self.there[decision.worker])
        if self.rng.random() < 0.5:
            assert self.sched.first_token(self.number, cached_tokens=self.rng.randrange(len(prompt)))
        if len(self.live) > LIVE:
            self.end()

    def end(self) -> None:
        if self.live:
            request = next(iter(self.live))
            del self.live[request]
            how = self.rng.choice((self.sched.finish, self.sched.finish, self.sched.cancel))
            assert how(request) and not how(request)
            self.seen["ended"] += 1

    def leave(self) -> None:
        """A worker goes, with the requests that run on it."""
        if len(self.there) > 5:
            name = self.rng.choice(sorted(self.there))
            home = (name, self.there.pop(name))
            self.draining.discard(name)
            self.absent.append(name)
            orphans = self.sched.remove_worker(name)
            assert sorted(orphans) == sorted(request for request, where in self.live.items() if where == home)
            self.seen["orphans"] += len(orphans)
            self.seen["left"] += 1
            for request in orphans[::2]:  # half of them are cancelled, half end late
                assert self.sched.cancel(request)
                del self.live[request]

    def join(self) -> None:
        if self.absent:
            name = self.absent.pop(self.rng.randrange(len(self.absent)))
            self.sched.add_worker(WorkerSpec(name, self.rng.choice([3000, 10_000, 20_000]), cached_first=True))
            self.there[name] = self.number + 1
            self.seen["joined"] += 1

    def drain(self) -> None:
        if len(self.there) - len(self.draining) > 5:
            name = self.rng.choice(sorted(self.there))
            self.sched.drain_worker(name, handover_seconds=self.rng.choice([0.0, 3.0]))
            self.draining.add(name)


def test_five_hundred_workers_join_and_leave_while_requests_run() -> None:
    storm = Storm(seed=14)
    sched, sizes, resident = storm.sched, [], []
    for step in range(1, STEPS + 1):
        storm.step()
        if step % CHECK_EVERY == 0:
            sched.check()
            told = sched.stats()
            assert told["live_requests"] == len(storm.live)
            assert set(told["workers"]) == set(storm.there)
            sizes.append(told["tree"]["bytes_used"])
            resident.append(process_bytes())
    assert min(storm.seen[what] for what in ("ended", "orphans", "left", "joined")) > 300, storm.seen
    moved = sched.stats()["membership"]
    assert moved["given_by_leavers"] > 64, moved
    assert len(moved["moves"]) == 64 and set(moved["leaving"]) <= set(storm.there)
    half = len(sizes) // 2
    assert max(sizes[half:]) <= 1.2 * max(sizes[:half]), f"it grows: {sizes}"
    last = min(sizes[-2:])  # a table of children that is moved to another size is there twice for a moment
    assert last - sizes[half] < (sizes[half] - sizes[0]) / 2, f"it does not level off: {sizes}"
    assert max(resident[half:]) - resident[half] <= 4 << 20, resident
    for request in list(storm.live):
        assert sched.finish(request)
    for name in list(storm.there):
        sched.remove_worker(name)
    for _ in range(4):
        storm.clock.advance(31.0)
        sched.tick()
    told = sched.stats()
    assert (told["live_requests"], told["workers"], told["tree"]["marks"], told["tree"]["nodes"]) == (0, {}, 0, 0)
    assert told["membership"]["leaving"] == {}
    sched.check()
