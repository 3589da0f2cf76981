"""A small fleet under fire: workers killed, stopped, restarted, crowded while requests run. No token lost or doubled.

The faults come from a seed; what the machine makes of them differs from run to run, the promises do not: every request
ends with exactly the tokens of an undisturbed run or, when nobody could take it, with a typed error; books end even.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time

from transport_support import WorkerProcess, assert_books_are_even, asynchronous, collect, expected_tokens, fast, until

from preble import SamplingParams
from preble.errors import NoWorkers, QueueFull
from preble.router import Router

FAULT_SECONDS = 8.0
CLIENTS = 12
NAMES = ("a", "b", "c")
OPTIONS = ("--kv-capacity-tokens", "3000", "--max-requests", "8")


class Fleet:
    """Three workers, of which one at a time is in trouble."""

    def __init__(self) -> None:
        self.workers = {name: WorkerProcess("--id", name, *OPTIONS, time_scale=0.1) for name in NAMES}

    async def trouble(self, rng: random.Random) -> None:
        """One fault, and its end."""
        name = rng.choice(NAMES)
        worker = self.workers[name]
        if rng.random() < 0.5:
            worker.kill()
            await asyncio.sleep(rng.random() * 0.3)
            # In a thread: the clients go on while it starts.
            self.workers[name] = await asyncio.to_thread(
                WorkerProcess, "--id", name, *OPTIONS, endpoint=worker.endpoint, time_scale=0.1
            )
            worker.stop()
        else:
            worker.signal(signal.SIGSTOP)
            await asyncio.sleep(0.5 + rng.random())
            worker.signal(signal.SIGCONT)

    def stop(self) -> None:
        """End all processes."""
        for worker in self.workers.values():
            worker.stop()


async def client(number: int, router: Router, until_time: float, outcome: dict[str, int]) -> None:
    """Send one request after the other; some are cancelled half-way."""
    rng = random.Random(number)
    while time.monotonic() < until_time:
        start = rng.randrange(6) * 1000
        prompt = [*range(start, start + 300), number]
        wanted = rng.randrange(5, 60)
        try:
            stream = router.generate(prompt, SamplingParams(max_new_tokens=wanted))
            if rng.random() < 0.15:
                await anext(stream)
                await stream.aclose()
                outcome["left"] += 1
            else:
                tokens, _ = await collect(stream)
                assert tokens == expected_tokens(prompt, wanted), "a token was lost, doubled or wrong"
                outcome["answered"] += 1
        except (QueueFull, NoWorkers):
            outcome["turned_away"] += 1
            await asyncio.sleep(0.05)


@asynchronous
async def test_under_fire_every_answer_is_whole_and_the_books_end_even() -> None:
    fleet = Fleet()
    outcome = {"answered": 0, "left": 0, "turned_away": 0}
    config = fast(quiet_after_seconds=0.4, max_attempts=20)
    try:
        async with Router([worker.endpoint for worker in fleet.workers.values()], config=config) as router:
            end = time.monotonic() + FAULT_SECONDS
            clients = [asyncio.ensure_future(client(i, router, end, outcome)) for i in range(CLIENTS)]
            rng = random.Random(7)
            while time.monotonic() < end:
                await fleet.trouble(rng)
                await asyncio.sleep(0.2)
            await asyncio.gather(*clients)
            stats = router.stats()
            assert outcome["answered"] > CLIENTS and stats["resumed"] > 0, (outcome, stats)
            assert stats["token_gaps"] == 0 and stats["failed"] == outcome["turned_away"]
            await until(
                lambda: all(one["state"] == "ready" for one in router.stats()["workers"].values()), "all are back"
            )
            assert_books_are_even(router)
            cached = {name: one["cached_tokens"] for name, one in router.scheduler.stats()["workers"].items()}
            assert set(cached) == set(NAMES) and max(cached.values()) <= 3000
    finally:
        fleet.stop()
