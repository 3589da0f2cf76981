"""One router of many before a large fleet, in full but for the sockets: what each thing costs it. Owns the measuring;
the command and the page are `scale.py`'s.

    request -- own share --> schedule, request frame ---.
            -- the rest  --> the other routers, as one |--> worker's KV cache --> event frames --> decode, apply
                                                       '

The measured router's calls are timed one by one: its own requests' decision, first token, end and frames, and for every
request of the fleet the decoding of what its worker publishes, with what comes of it: other routers' requests are
booked, its own are passed by. The other routers are one more scheduler, which is not timed. Each worker has a KV cache
of the usual size and reports its evictions; its engine is not simulated: a first token takes PREFILL_SECONDS, each
further token TOKEN_SECONDS.

    python -m benchmarks.scale.router '{"workload": "toolbench", "requests": 20000, "workers": 100, "routers": 10}'
"""

from __future__ import annotations

import gc
import hashlib
import heapq
import json
import resource
import sys
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from preble import GlobalScheduler, ManualClock, SchedulerConfig, WorkerSpec
from preble.batching.kv_cache import KvCache
from preble.router.peer_requests import PeerRequests
from preble.transport import wire
from preble.types import BlockRemoved, BlockStored, CacheEvent, RequestEnded, RequestPlaced, RequestPrefilled
from preble.workloads import PromptRequest, Workload, generate, poisson

KV_TOKENS = 198_516  # of a worker, as in every simulation here
BLOCK_TOKENS = 16
PREFILL_SECONDS = 0.1
TOKEN_SECONDS = 0.03
TICK_SECONDS = 1.0
OWN, OTHERS = "r0", "r1"
# Requests a second and prefix groups of one worker, as in `routers.py`; at least so many requests a group.
SOURCES = {"toolbench": (250 / 32, 50), "videoqa": (40 / 32, 37), "loogle": (10 / 32, 12)}
REQUESTS_PER_GROUP = 10
COUNTED_SHARE, COUNTED_MAX = 0.5, 200_000  # of the requests, the last: those before fill caches and books
EVENTS_ONLY = frozenset({wire.Events})
Tokens = npt.NDArray[np.int32]
Told = Sequence[CacheEvent]


@dataclass(frozen=True)
class Cell:
    """One run. `routers` share the requests alike; `told`: workers report of "requests" and evictions, or, as engines
    do, of "blocks" only; `calibrate`: as `SchedulerConfig`'s, which is on where no cost model is given."""

    workload: str
    requests: int
    workers: int
    routers: int
    told: str = "requests"
    calibrate: bool = False
    seed: int = 0

    @property
    def counted(self) -> int:
        """Requests whose times count: the last ones."""
        return min(COUNTED_MAX, int(self.requests * COUNTED_SHARE))

    @property
    def per_second(self) -> float:
        """Requests of the whole fleet."""
        return SOURCES[self.workload][0] * self.workers


def workload_of(cell: Cell) -> Workload:
    """The fleet's requests, with their times."""
    groups = min(SOURCES[cell.workload][1] * cell.workers, max(1, cell.requests // REQUESTS_PER_GROUP))
    made = generate(cell.workload, requests=cell.requests, groups=groups, seed=cell.seed)
    return poisson(made, cell.per_second, cell.seed + 1)


# --- times ------------------------------------------------------------------------------------------------------------


class Timer:
    """Nanoseconds of calls and bytes of frames, by what they were for. Counts only while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self.nanoseconds: dict[str, array[int]] = defaultdict(lambda: array("q"))
        self.bytes: Counter[str] = Counter()
        self.frames: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        spans = [-(time.perf_counter_ns() - time.perf_counter_ns()) for _ in range(10_000)]
        self.own_ns = int(np.median(spans))

    def call(self, what: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """The answer of a call, timed."""
        start = time.perf_counter_ns()
        answer = function(*args, **named)
        span = time.perf_counter_ns() - start
        if self.on:
            self.nanoseconds[what].append(max(0, span - self.own_ns))
        return answer

    def sent(self, what: str, size: int, events: int = 1) -> None:
        """A frame of so many bytes has crossed the wire."""
        if self.on:
            self.frames[what] += 1
            self.bytes[what] += size
            self.events[what] += events

    def summary(self) -> dict[str, dict[str, float]]:
        """By kind: how many calls, and their microseconds."""
        found = {}
        for what, spans in sorted(self.nanoseconds.items()):
            us = np.frombuffer(spans, np.int64) / 1e3
            p50, p99 = np.quantile(us, (0.5, 0.99)).tolist()
            found[what] = {"count": len(us), "mean_us": float(us.mean()), "p50_us": p50, "p99_us": p99}
        return found


# --- the fleet --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Running:
    """A request on its worker."""

    request: PromptRequest
    router: str
    worker: FleetWorker
    token_ids: Tokens
    matched: int = 0
    hold: Any = None
    slots: Tokens | None = None


class FleetWorker:
    """The KV cache of a worker and what it publishes. A prompt that finds no room runs uncached."""

    def __init__(self, name: str, told: str) -> None:
        self.name = name
        self.frames = self.uncached = 0
        self._cache = KvCache(KV_TOKENS)
        self._blocks = told == "blocks"

    def take(self, running: Running, now: float) -> Told:
        """A prompt has come; the evictions that make room for it and its answer."""
        token_ids, cache = running.token_ids, self._cache
        hold = cache.hold(token_ids, None, len(token_ids) - 1, now)
        running.matched = hold.matched_tokens
        need = len(token_ids) - hold.matched_tokens + running.request.output_tokens
        if need > cache.available_tokens:
            cache.release(hold, now)
            self.uncached += 1
            return ()
        taken = cache.take(need, now).copy()
        running.hold, running.slots = hold, np.concatenate([cache.slots_of(hold), taken])
        evicted = cache.take_events()
        return [_removed(event) for event in evicted] if self._blocks else evicted

    def prefilled(self, running: Running, now: float) -> Told:
        """A prompt is computed and cached: what there is to report of it."""
        if running.hold is not None and running.slots is not None:
            count = len(running.token_ids)
            self._cache.publish(running.hold, running.token_ids, running.slots[:count].copy(), now)
            running.slots = running.slots[count:]
        if self._blocks:
            return _stored(running)
        return (RequestPrefilled(running.router, running.request.request_id, running.matched),)

    def ended(self, running: Running, now: float) -> Told:
        """An answer is whole; its tokens are no part of the prompt and leave."""
        if running.hold is not None and running.slots is not None:
            self._cache.give(running.slots)
            self._cache.release(running.hold, now)
        if self._blocks:
            return ()
        return (RequestEnded(running.router, running.request.request_id, running.request.output_tokens),)


def _hashes(token_ids: Tokens) -> list[int]:
    """Of each whole block, over all before it."""
    found, so_far = [], hashlib.blake2b(digest_size=8)
    data = np.asarray(token_ids, np.int32).tobytes()
    for end in range(4 * BLOCK_TOKENS, len(data) + 1, 4 * BLOCK_TOKENS):
        so_far.update(data[end - 4 * BLOCK_TOKENS : end])
        found.append(int.from_bytes(so_far.digest(), "little") >> 1)
    return found


def _stored(running: Running) -> Told:
    """The blocks of a prompt that were not cached before."""
    hashes, first = _hashes(running.token_ids), running.matched // BLOCK_TOKENS
    if running.hold is None or first >= len(hashes):
        return ()
    tokens = running.token_ids[first * BLOCK_TOKENS : len(hashes) * BLOCK_TOKENS]
    parent = hashes[first - 1] if first else None
    return (BlockStored(hashes[first:], parent, tokens, BLOCK_TOKENS),)  # type: ignore[arg-type]


def _removed(event: Any) -> BlockRemoved:
    """The blocks of an evicted end of a prompt."""
    return BlockRemoved(_hashes(event.token_ids)[event.kept_tokens // BLOCK_TOKENS :])


# --- the run ----------------------------------------------------------------------------------------------------------


class Run:
    """A cell from its first request to its last end."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.timer = Timer()
        self.clock = ManualClock()
        self.workers = {f"w{i}": FleetWorker(f"w{i}", cell.told) for i in range(cell.workers)}
        block = BLOCK_TOKENS if cell.told == "blocks" else 1
        specs = [WorkerSpec(name, kv_capacity_tokens=KV_TOKENS, block_size=block) for name in self.workers]
        config = SchedulerConfig(calibrate=cell.calibrate)
        self.router = GlobalScheduler(specs, clock=self.clock, config=config, seed=cell.seed)
        config = SchedulerConfig(calibrate=False)
        others = GlobalScheduler(specs, clock=self.clock, config=config, seed=cell.seed + 1)
        self.others = others if cell.routers > 1 else None
        self._peers = {name: PeerRequests(OWN) for name in self.workers}
        self._rng = np.random.default_rng([cell.seed, 3])
        self._due: list[tuple[float, int, bool, Running]] = []
        self.matched_tokens = self.prompt_tokens = self.live_requests = 0

    def run(self, workload: Workload, on_counting: Callable[[], None]) -> None:
        """All requests, in virtual time. `on_counting` is called when times begin to count."""
        warm, tick_at, own = len(workload) - self.cell.counted, TICK_SECONDS, 1.0 / self.cell.routers
        drawn = self._rng.random(len(workload))
        for row, request in enumerate(workload.requests):
            if row == warm:
                on_counting()
                self.timer.on = True
            now = request.arrival_seconds
            while tick_at <= now:
                self._until(tick_at)
                self._tick()
                tick_at += TICK_SECONDS
            self._until(now)
            self._arrive(request, OWN if drawn[row] < own else OTHERS, row)
        self.live_requests = self.router.stats()["live_requests"]
        self._until(float("inf"))

    def _tick(self) -> None:
        self.timer.call("tick", self.router.tick)
        if self.others is not None:
            self.others.tick()

    def _until(self, now: float) -> None:
        """Everything that is due by then."""
        while self._due and self._due[0][0] <= now:
            at, row, is_end, running = heapq.heappop(self._due)
            self.clock.set(at)
            if is_end:
                self._end(running, at)
            else:
                self._first_token(running, at)
                heapq.heappush(self._due, (at + TOKEN_SECONDS * running.request.output_tokens, row, True, running))
        if now != float("inf"):
            self.clock.set(now)

    def _arrive(self, request: PromptRequest, router: str, row: int) -> None:
        token_ids, request_id, limit = request.token_ids, request.request_id, request.output_tokens
        if router == OWN:
            decision = self.timer.call(
                "schedule", self.router.schedule, token_ids, request_id=request_id, max_new_tokens=limit
            )
            frame = self.timer.call("submit encode", wire.encode, wire.GenerationRequest(request_id, token_ids))
            self.timer.sent("submit", len(frame))
        else:
            assert self.others is not None
            decision = self.others.schedule(token_ids, request_id=request_id, max_new_tokens=limit)
        running = Running(request, router, self.workers[decision.worker], token_ids)
        told = RequestPlaced(router, request_id, token_ids, None, limit)  # type: ignore[arg-type]
        if self.cell.told == "requests":
            self._publish(running, "placed", (told,))
        evictions = running.worker.take(running, self.clock())
        if evictions:
            self._publish(running, "evicted", evictions)
        if self.timer.on:
            self.matched_tokens += running.matched
            self.prompt_tokens += len(token_ids)
        heapq.heappush(self._due, (self.clock() + PREFILL_SECONDS, row, False, running))

    def _first_token(self, running: Running, now: float) -> None:
        request_id, events = running.request.request_id, running.worker.prefilled(running, now)
        if running.router == OWN:
            self.timer.call("first_token", self.router.first_token, request_id, cached_tokens=running.matched)
            self._stream(running)
        elif self.others is not None:
            self.others.first_token(request_id, cached_tokens=running.matched)
        if events:
            self._publish(running, "stored" if self.cell.told == "blocks" else "prefilled", events)

    def _end(self, running: Running, now: float) -> None:
        request_id, output = running.request.request_id, running.request.output_tokens
        events = running.worker.ended(running, now)
        if running.router == OWN:
            self.timer.call("finish", self.router.finish, request_id, output_tokens=output)
        elif self.others is not None:
            self.others.finish(request_id, output_tokens=output)
        if events:
            self._publish(running, "ended", events)

    def _stream(self, running: Running) -> None:
        """The frames of an answer, one a token; one of them is timed, as they are all alike."""
        frame = wire.encode(
            wire.OutputChunk(running.request.request_id, 1, (17,), next_event_seq=running.worker.frames)
        )
        self.timer.call("chunk decode", wire.decode, frame, wire.WORKER_MESSAGES)
        for _ in range(running.request.output_tokens):
            self.timer.sent("chunk", len(frame))

    def _publish(self, running: Running, what: str, events: Told) -> None:
        """A worker reports to all routers; a single router gets no events about its own requests."""
        worker = running.worker
        if self.cell.routers == 1 and what in ("placed", "prefilled", "ended"):
            return
        own = running.router == OWN and what not in ("evicted", "stored")
        kind = f"own {what}" if own else what
        if self.timer.on:
            frame = wire.encode(wire.Events(worker.frames, tuple(events)), epoch=1)
            self.timer.sent(kind, len(frame), len(events))
            batch = self.timer.call(f"{kind} decode", self._decode, worker.name, frame)
        else:
            batch = self._peers[worker.name].take(events, past=False)  # bytes would change nothing
        worker.frames += 1
        if batch:
            self.timer.call(f"{kind} apply", self.router.apply, worker.name, batch)
        if self.others is not None and (own or what in ("evicted", "stored")):
            self.others.apply(worker.name, events)

    def _decode(self, worker: str, frame: bytes) -> Told:
        """What this router's scheduler is to be informed of a frame."""
        message = wire.decode(frame, EVENTS_ONLY).message
        assert isinstance(message, wire.Events)
        return self._peers[worker].take(message.events, past=False)


def measured(cell: Cell, on_counting: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The figures of a cell."""
    workload = workload_of(cell)
    gc.collect()
    gc.freeze()
    started, run = time.perf_counter(), Run(cell)
    run.run(workload, on_counting)
    counted = cell.counted
    timer, stats = run.timer, run.router.stats()
    found: dict[str, Any] = {
        **asdict(cell),
        "per_second": cell.per_second,
        "requests_counted": counted,
        "prompt_tokens_mean": run.prompt_tokens / counted,
        "hit_fraction": run.matched_tokens / run.prompt_tokens,
        "timer_ns": timer.own_ns,
        "calls": timer.summary(),
        "frames": dict(timer.frames),
        "bytes": dict(timer.bytes),
        "events": dict(timer.events),
        "tree": stats["tree"],
        "live_requests": run.live_requests,
        "uncached": sum(worker.uncached for worker in run.workers.values()),
        "counts": {name: stats[name] for name in ("peer_requests", "peer_events_ignored", "unknown_requests")},
        "run_seconds": time.perf_counter() - started,
    }
    found["process_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(json.dumps(measured(Cell(**json.loads(argument)))), flush=True)
