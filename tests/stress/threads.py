"""Many threads on one scheduler, one radix tree, one slot tree: readers, writers, events, ticks, workers that come and
go, with so little memory that everything is split, evicted, shed and forgotten all the time.

Owns the traffic and what must hold whatever the order of steps. Work is seeded and counted, never timed: each thread
does a fixed number of operations, and the clock is the number of times it was asked. Run as a script it is what
ThreadSanitizer watches; `test_threads.py` runs the same at small size.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable
from itertools import count
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
from preble.errors import UnknownWorker
from preble.types import RequestEnded, RequestPlaced, RequestPrefilled

MIB = 1 << 20
NAMESPACES = (None, "lora", 7)
VOCABULARY = 50  # tokens of prompts that are stored
NEVER_STORED = 1_000_000  # a token of readers only: nothing is known beyond it
PERMANENT = ("w0", "w1", "w2")
LIVE_MAX = 20  # requests a writer keeps open
BLOCK = 4
CLOCK_STEP_SECONDS = 0.001

Job = Callable[[random.Random, int], None]


class Named:
    """An id or a namespace that equals its name, with hash and equality in Python; now and then its hash calls back."""

    def __init__(self, name: Any, call_back: Callable[[], object]) -> None:
        self.name, self.call_back, self.hashed = name, call_back, 0

    def __hash__(self) -> int:
        self.hashed += 1
        if self.hashed % 4 == 0:
            self.call_back()
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return bool(self.name == (other.name if isinstance(other, Named) else other))


class Prompts:
    """Prompts that share stems of several lengths, so that most inserts split or extend what is there."""

    def __init__(self, seed: int, stem_tokens: int = 120, tail_tokens: int = 200) -> None:
        draw = random.Random(seed).randrange
        self.tail_tokens = tail_tokens
        self.stems = [array("i", [draw(VOCABULARY) for _ in range(stem_tokens)]) for _ in range(12)]
        for stem in self.stems[6:]:
            stem[:60] = self.stems[draw(6)][:60]

    def draw(self, rng: random.Random) -> array[int]:
        stem = rng.choice(self.stems)
        tail = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))]
        long = rng.randint(1, self.tail_tokens) if rng.random() < 0.5 else 1
        return stem[: rng.randint(1, len(stem))] + array("i", (tail * (long // len(tail) + 1))[:long])

    def probe(self, rng: random.Random) -> tuple[array[int], int]:
        """A prompt to look up, and how much of it anyone can have stored."""
        prompt = self.draw(rng)
        if rng.random() < 0.5:
            return prompt, len(prompt)
        possible = rng.randrange(len(prompt))
        return prompt[:possible] + array("i", [NEVER_STORED]) + prompt[possible:], possible


def block_hash(namespace: object, prefix: array[int]) -> bytes:
    """A block's key as an engine makes one: the same in every run for the same prefix."""
    return hashlib.blake2b(prefix.tobytes(), digest_size=8, person=repr(namespace).encode()).digest()


def run_together(jobs: list[tuple[Job, int]], seed: int) -> None:
    """Run each job in a thread of its own, so many times as is given, all from one start; raises the first failure."""
    start = threading.Barrier(len(jobs))
    failures: list[BaseException] = []

    def run(job: Job, times: int, number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        start.wait()
        try:
            for step in range(times):
                if failures:
                    return
                job(rng, step)
        except BaseException as failure:  # noqa: BLE001 - raised again below, in the thread that asserts
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(job, times, n)) for n, (job, times) in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# --- the scheduler ----------------------------------------------------------------------------------------------------


class SchedulerStress:
    """One scheduler, what its threads do to it, and what they must see."""

    def __init__(self, policy: str, seed: int, objects: bool = False) -> None:
        ticks = count(1)
        self.clock = lambda: next(ticks) * CLOCK_STEP_SECONDS
        self.seed, self.objects = seed, objects
        self.prompts = Prompts(seed)
        self.sched = GlobalScheduler(
            [WorkerSpec(name, kv_capacity_tokens=2000, block_size=BLOCK) for name in PERMANENT],
            policy=policy,
            config=SchedulerConfig(max_bytes=MIB, history_seconds=2.0),
            clock=self.clock,
        )
        self.names = set(PERMANENT)  # every worker there ever was; grows before the scheduler knows
        self.numbers = count()
        self.live: list[deque[Any]] = []
        self.told: deque[tuple[str, str]] = deque()  # the other router's requests: worker, request id
        self.scheduled = self.gone = 0
        self.counting = threading.Lock()

    def named(self, rng: random.Random, name: Any) -> Any:
        """A name, or where ids and namespaces are objects, most often an object that equals it."""
        return Named(name, self.call_back) if self.objects and rng.random() < 0.7 else name

    def call_back(self) -> None:
        assert not self.sched.finish(Named("nobody's", self.sched.now))
        self.sched.match([1, 2, 3], namespace=Named("lora", self.sched.now))

    # Readers.

    def read(self, rng: random.Random, step: int) -> None:
        prompt, possible = self.prompts.probe(rng)
        if step % 8 == 0:
            self.explain(prompt, self.named(rng, rng.choice(NAMESPACES)))
            return
        namespace = rng.choice((*NAMESPACES, "nobody's"))
        asked = self.named(rng, namespace)
        match = self.sched.match(prompt if step % 3 else list(prompt), namespace=asked)
        assert match.prompt_tokens == len(prompt)
        assert match.known_tokens <= (possible if namespace != "nobody's" else 0), "more is known than was ever stored"
        for worker, tokens in match.matched_tokens.items():
            assert worker in self.names
            assert 0 < tokens <= min(match.known_tokens, len(prompt) - 1)

    def explain(self, prompt: array[int], namespace: object) -> None:
        answer = self.sched.explain(prompt, namespace=namespace)
        assert answer.worker in self.names and answer.prompt_tokens == len(prompt)
        assert {cost.worker for cost in answer.workers} <= self.names
        assert all(cost.matched_tokens + cost.missed_tokens == len(prompt) for cost in answer.workers)

    # Writers.

    def writer(self) -> Job:
        """A job that opens requests and ends them, its own ones, in one of four ways."""
        live: deque[Any] = deque()
        self.live.append(live)

        def write(rng: random.Random, step: int) -> None:
            if len(live) < LIVE_MAX and rng.random() < 0.6:
                live.append(self.schedule(rng, step))
            elif live:
                self.end(live.popleft(), rng.random())

        return write

    def schedule(self, rng: random.Random, step: int) -> Any:
        prompt = self.prompts.draw(rng)
        exclude = (rng.choice(PERMANENT),) if step % 16 == 0 else ()
        decision = self.sched.schedule(
            prompt if step % 4 else prompt.tolist(),
            request_id=self.named(rng, next(self.numbers)),
            namespace=self.named(rng, rng.choice(NAMESPACES)),
            max_new_tokens=rng.choice((None, 5, 500)),
            exclude=exclude,
            explain=step % 32 == 0,
        )
        assert decision.worker in self.names and decision.worker not in exclude
        assert 0 <= decision.matched_tokens < decision.prompt_tokens == len(prompt)
        with self.counting:
            self.scheduled += 1
        return decision

    def end(self, decision: Any, how: float) -> None:
        told = decision.matched_tokens if how < 0.5 else None
        if how < 0.8:
            assert self.sched.first_token(decision.request_id, cached_tokens=told)
        if how < 0.7:
            assert self.sched.finish(decision.request_id, output_tokens=int(how * 50))
        else:
            assert self.sched.cancel(decision.request_id)
        assert not self.sched.finish(decision.request_id), "it ended already"

    # Events, time, workers.

    def events(self, rng: random.Random, step: int) -> None:
        worker = rng.choice((*PERMANENT, f"extra-{step % 7}"))
        prompt = self.prompts.draw(rng)
        namespace = rng.choice(NAMESPACES)
        blocks = len(prompt) // BLOCK
        hashes = [block_hash(namespace, prompt[: (i + 1) * BLOCK]) for i in range(blocks)]
        stored = BlockStored(hashes, None, prompt[: blocks * BLOCK], BLOCK, self.named(rng, namespace))
        kind = rng.random()
        if kind < 0.6:
            told: list[Any] = [stored]
        elif kind < 0.8:
            told = [stored, BlockRemoved(hashes[blocks // 2 :])]
        elif kind < 0.97:
            told = [PrefixEvicted(prompt, rng.randrange(len(prompt)), self.named(rng, namespace))]
        else:
            told = [AllBlocksCleared()]
        try:
            assert 0 <= self.sched.apply(worker, told) <= len(told)
        except UnknownWorker:
            assert worker not in PERMANENT

    def tell(self, rng: random.Random, step: int) -> None:
        """Another router's requests, as the workers report of them."""
        if len(self.told) < LIVE_MAX and rng.random() < 0.6:
            worker, request_id = rng.choice(PERMANENT), str(step)
            placed = RequestPlaced("other", request_id, self.prompts.draw(rng), self.named(rng, rng.choice(NAMESPACES)))
            assert self.sched.apply(worker, [placed]) == 1
            self.told.append((worker, request_id))
        elif self.told:
            self.tell_end(rng.random())

    def tell_end(self, how: float) -> None:
        worker, request_id = self.told.popleft()
        news: list[Any] = [RequestEnded("other", request_id, None if how < 0.2 else int(how * 50))]
        if how < 0.7:
            news.insert(0, RequestPrefilled("other", request_id, None if how < 0.5 else 0))
        assert self.sched.apply(worker, news) == len(news)

    def tick(self, rng: random.Random, step: int) -> None:
        self.sched.tick()
        if step % 10 == 0:
            stats = self.sched.stats()
            assert stats["tree"]["bytes_used"] <= MIB and stats["live_requests"] <= (len(self.live) + 1) * LIVE_MAX
            assert stats["peer_bookings"] <= LIVE_MAX
            assert all(worker["cached_tokens"] <= 2500 for worker in stats["workers"].values())  # 2000 and a quarter
        if step % 50 == 0:
            self.sched.check()
            if self.sched.policy == "e2" and not self.objects:  # of some others not everything is kept
                assert len(self.sched.snapshot()) > 0

    def come_and_go(self, rng: random.Random, step: int) -> None:
        name = f"extra-{step % 7}"
        if name in self.sched.workers:
            if step % 2:
                self.sched.drain_worker(name, handover_seconds=step % 3)
            self.gone += len(self.sched.remove_worker(name))
        else:
            self.names.add(name)
            self.sched.add_worker(WorkerSpec(name, kv_capacity_tokens=500, block_size=1 + step % 3))

    # The whole.

    def run(self, operations: int, restored: bool = False) -> dict[str, Any]:
        """Let all threads work, then end and forget everything; returns the statistics before that. `restored`: a
        snapshot of what they have left goes on, with as many threads again."""
        self.work(operations)
        if restored:
            self.sched = GlobalScheduler.restore(self.sched.snapshot(), clock=self.clock)
            self.work(operations)
        stats = self.sched.stats()
        assert stats["scheduled"] == self.scheduled
        assert stats["finished"] + stats["cancelled"] + sum(map(len, self.live)) == self.scheduled
        self.wind_up()
        return stats

    def work(self, operations: int) -> None:
        jobs = [(self.read, operations)] * 2 + [(self.writer(), operations) for _ in range(2)]
        jobs += [(self.events, operations // 2), (self.tick, operations // 4), (self.come_and_go, operations // 8)]
        jobs.append((self.tell, operations // 2))
        run_together(jobs, self.seed)
        self.sched.check()

    def wind_up(self) -> None:
        for live in self.live:
            for decision in live:
                assert self.sched.finish(decision.request_id)
        while self.told:
            self.tell_end(0.6)
        for name in list(self.sched.workers):
            account = self.sched.stats()["workers"][name]
            assert (account["live_requests"], account["waiting_requests"], account["live_output_tokens"]) == (0, 0, 0)
            self.sched.remove_worker(name)
        expired = -1
        while self.sched.stats()["expired_nodes"] > expired:  # a tick takes leaves first, and no more than so many
            expired = self.sched.stats()["expired_nodes"]
            self.sched.tick(1e6)
        tree = self.sched.stats()["tree"]
        assert (tree["nodes"], tree["marks"], self.sched.stats()["live_requests"]) == (0, 0, 0)
        self.sched.check()


def stress_scheduler(
    operations: int, seed: int, policy: str = "e2", objects: bool = False, restored: bool = False
) -> dict[str, Any]:
    """Each thread does about `operations` on one scheduler; returns its statistics. `objects`: ids and namespaces are
    objects whose hash and equality are Python code. `restored`: a snapshot of it then goes on. Raises what a thread has
    found."""
    return SchedulerStress(policy, seed, objects).run(operations, restored)


# --- the trees alone --------------------------------------------------------------------------------------------------


def stress_tree(operations: int, seed: int) -> dict[str, int]:
    """The same for one `RadixTree`: match, hits and victims against insert, unmark, expire, clear and drop."""
    tree = RadixTree(max_bytes=MIB, window_seconds=2.0)
    prompts, ticks, tree_workers = Prompts(seed), count(1), 3
    for capacity in (400, 4000, 40_000, 1000):  # the last one comes and goes
        tree.add_worker(capacity)

    def now() -> float:
        return next(ticks) * CLOCK_STEP_SECONDS

    def read(rng: random.Random, step: int) -> None:
        prompt, possible = prompts.probe(rng)
        namespace = rng.choice(NAMESPACES)
        known, matched = tree.match(prompt, namespace=namespace)
        assert known <= possible and all(0 < tokens <= known for tokens in matched.values())
        assert 0 <= tree.matched(prompt, rng.randrange(tree_workers), namespace=namespace) <= possible
        assert tree.hits(prompt, now(), namespace=namespace) >= 0
        if step % 8 == 0:
            assert all(tokens > 0 for tokens, _, _ in tree.victims(rng.randrange(tree_workers), 100, now()))

    def insert(rng: random.Random, step: int) -> None:
        prompt = prompts.draw(rng)
        worker = rng.randrange(tree_workers) if rng.random() < 0.9 else None
        assert 0 <= tree.insert(prompt, now(), worker=worker, namespace=rng.choice(NAMESPACES)) <= len(prompt)

    def forget(rng: random.Random, step: int) -> None:
        prompt = prompts.draw(rng)
        tree.unmark(prompt, rng.randrange(tree_workers), rng.randrange(len(prompt)), namespace=rng.choice(NAMESPACES))
        tree.expire(now(), 50)
        if step % 64 == 0:
            tree.clear_worker(rng.randrange(tree_workers))
        if step % 100 == 0:
            tree.check()
            assert tree.bytes_used <= MIB

    def come_and_go(rng: random.Random, step: int) -> None:
        if step % 2 == 0:
            tree.drop_worker(tree_workers)
        else:
            assert tree.add_worker(1000) == tree_workers
            tree.insert(prompts.draw(rng), now(), worker=tree_workers)

    run_together(
        [(read, operations)] * 2 + [(insert, operations)] * 2 + [(forget, operations), (come_and_go, operations // 4)],
        seed,
    )
    tree.check()
    stats = tree.stats()
    for worker in range(tree_workers):
        tree.clear_worker(worker)
    if operations // 4 % 2 == 0:
        tree.clear_worker(tree_workers)
    while tree.expire(1e6):
        pass
    tree.check()
    assert (tree.node_count, tree.stats()["marks"]) == (0, 0)
    return stats


def stress_slots(operations: int, seed: int) -> dict[str, int]:
    """The same for one `SlotTree`: threads that hold, extend and release against one that evicts. No slot is lost or
    given twice."""
    slots = 2000
    tree, prompts, ticks = SlotTree(), Prompts(seed, 60, 60), count(1)
    free = list(range(slots))
    short = [0]

    def take(wanted: int) -> list[int]:
        """Free slots, if need be from an eviction; fewer than wanted when others hold them all."""
        taken: list[int] = []
        while len(taken) < wanted:
            try:
                taken.append(free.pop())
            except IndexError:
                evicted = tree.evict(wanted - len(taken))[0]
                if not evicted:
                    break
                free.extend(evicted)
        return taken

    def serve(rng: random.Random, step: int) -> None:
        prompt, namespace, now = prompts.draw(rng), rng.choice(NAMESPACES), next(ticks) * CLOCK_STEP_SECONDS
        hold = tree.hold(prompt, now, namespace=namespace)
        held = hold.matched_tokens
        assert len(tree.slots(hold)) == held <= len(prompt)
        own = take(len(prompt) - held)
        if len(own) == len(prompt) - held:
            redundant = tree.extend(hold, prompt, own, now)
            assert len(tree.slots(hold)) == len(prompt)
            free.extend(redundant)
        else:
            short[0] += 1
            free.extend(own)
        tree.release(hold, now)

    def evict(rng: random.Random, step: int) -> None:
        free.extend(tree.evict(rng.randint(1, 50))[0])
        assert tree.matched(prompts.draw(rng), namespace=rng.choice(NAMESPACES)) >= 0
        if step % 100 == 0:
            tree.check()

    run_together([(serve, operations)] * 3 + [(evict, operations // 2)], seed)
    tree.check()
    assert tree.pinned_tokens == 0
    stats = {**tree.stats(), "short": short[0]}
    free.extend(tree.evict(slots)[0])
    assert sorted(free) == list(range(slots)), "slots were lost or given twice"
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description="Many threads on one scheduler and on the trees alone.")
    parser.add_argument("--operations", type=int, default=2000, help="of each thread")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    sys.setswitchinterval(1e-5)  # let go of the GIL as often as can be
    for name, stress in (
        ("scheduler, e2", lambda n, seed: stress_scheduler(n, seed)),
        ("scheduler, gone on from a snapshot", lambda n, seed: stress_scheduler(n // 4, seed, restored=True)),
        ("scheduler, ids that are objects", lambda n, seed: stress_scheduler(n // 4, seed, objects=True)),
        ("scheduler, a policy in Python", lambda n, seed: stress_scheduler(n // 4, seed, "least_loaded")),
        ("radix tree", stress_tree),
        ("slot tree", stress_slots),
    ):
        stats = stress(chosen.operations, chosen.seed)
        tree = stats.get("tree", stats)
        sys.stdout.write(f"{name}: {tree}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
