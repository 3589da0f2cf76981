"""The fixed script whose instructions are counted. Owns the operations; `instructions.py` runs it under callgrind.

Every operation is made ready first: prompts exist, the tree is warm, the interpreter has seen the call. Then a loop
makes it many times between `begin` and `end`, and a like loop around a call that does nothing reports what the loop
costs. Everything is seeded and the clock is a manual one, so every run executes the same instructions.

    python -m benchmarks.decision.instructions_script REQUEST_MODULE

prints a line of JSON: operation -> how often it is done.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

import preble
from preble._radix import RadixTree

EMPTY = "an empty loop of "  # the number of turns follows
VOCABULARY = 32_000
TURNS = 300
WARM = 30
BLOCK_TOKENS = 16
CHAIN_BLOCKS = 64


class Counted:
    """Counts calls between `begin` and `end` of the extension, and remembers how often each operation was done."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.done: dict[str, int] = {}
        self.turns: dict[str, int] = {}

    def each(self, name: str, call: Callable[[Any], Any], given: list[Any], per_call: float = 1) -> list[Any]:
        """Call with each of `given`; the figure is per operation, of which a call does `per_call`. Returns results."""
        self._loop(EMPTY + str(len(given)), self._request.nothing, given)
        results = self._loop(name, call, given)
        self.done[name], self.turns[name] = round(len(given) * per_call), len(given)
        return results

    def _loop(self, name: str, call: Callable[[Any], Any], given: list[Any]) -> list[Any]:
        results: list[Any] = []
        keep, begin, end = results.append, self._request.begin, self._request.end
        gc.collect()
        begin()
        for one in given:
            keep(call(one))
        end(name)
        return results


class Prompts:
    """Prompts of a few shared documents, as tools have them: 400 + 1,150 shared tokens, 285 of their own."""

    def __init__(self, seed: int, documents: int = 32) -> None:
        self._rng = np.random.default_rng(seed)
        system = self.text(400)
        self._shared = [np.concatenate([system, self.text(1150)]) for _ in range(documents)]
        self._next = 0

    def text(self, length: int) -> Any:
        """Tokens nobody shares."""
        return self._rng.integers(0, VOCABULARY, length, np.int32)

    def take(self, count: int) -> list[Any]:
        """The documents in turn, a question of its own each."""
        self._next += count
        shared = [self._shared[i % len(self._shared)] for i in range(self._next - count, self._next)]
        return [np.concatenate([document, self.text(285)]) for document in shared]

    def strangers(self, count: int) -> list[Any]:
        """As long, but only the system prompt is shared."""
        return [np.concatenate([self._shared[0][:400], self.text(1435)]) for _ in range(count)]


def scheduler_of(workers: int, **spec: Any) -> tuple[preble.GlobalScheduler, preble.ManualClock]:
    """A scheduler with a clock that stands until it is moved."""
    clock = preble.ManualClock()
    specs = [preble.WorkerSpec(f"w{i}", **spec) for i in range(workers)]
    return preble.GlobalScheduler(specs, clock=clock), clock


def serve(scheduler: preble.GlobalScheduler, clock: preble.ManualClock, prompts: Iterable[Any]) -> None:
    """Every call of a request's life, for each prompt."""
    for tokens in prompts:
        clock.advance(0.02)
        request = scheduler.schedule(tokens).request_id
        scheduler.first_token(request)
        scheduler.finish(request, output_tokens=43)
        scheduler.cancel(scheduler.schedule(tokens.tolist()).request_id)
        scheduler.match(tokens)


def requests(counted: Counted) -> None:
    """A request's life on a warm scheduler with 8 workers."""
    prompts = Prompts(1)
    scheduler, clock = scheduler_of(8)
    serve(scheduler, clock, prompts.take(8 * 32))
    decisions = counted.each("schedule: exploit, buffer", scheduler.schedule, prompts.take(TURNS))
    exploited = sum(decision.reason == "exploit" for decision in decisions)
    assert exploited > 0.9 * TURNS, "a cached document is exploited, unless others wait there"
    ids = [decision.request_id for decision in decisions]
    counted.each("first_token", scheduler.first_token, ids)
    assert all(counted.each("finish", scheduler.finish, ids)), "every request was live"
    lists = [tokens.tolist() for tokens in prompts.take(TURNS)]
    decisions = counted.each("schedule: exploit, list", scheduler.schedule, lists)
    ids = [decision.request_id for decision in decisions]
    assert all(counted.each("cancel", scheduler.cancel, ids)), "every request was live"
    matches = counted.each("match: buffer", scheduler.match, prompts.take(TURNS))
    assert all(match.best_tokens >= 1550 for match in matches), "every document is cached"
    scheduler.tick()  # the first one loads what the fit of costs needs
    counted.each("tick: nothing to do", lambda _: scheduler.tick(), [None] * TURNS)
    scheduler.check()


def explorations(counted: Counted) -> None:
    """Prompts nobody has cached, on 64 workers whose caches are full."""
    prompts = Prompts(2)
    scheduler, clock = scheduler_of(64, kv_capacity_tokens=20_000)
    serve(scheduler, clock, prompts.strangers(64 * 14))
    decisions = counted.each("schedule: explore, 64 full workers", scheduler.schedule, prompts.strangers(TURNS // 3))
    assert {decision.reason for decision in decisions} == {"explore"}, "nobody has cached these"
    scheduler.check()


def forgetting(counted: Counted) -> None:
    """Ticks that forget all prompts, as many as that takes."""

    def served() -> preble.GlobalScheduler:
        prompts = Prompts(3)
        scheduler, clock = scheduler_of(8, kv_capacity_tokens=2_000)
        serve(scheduler, clock, prompts.strangers(TURNS))
        clock.advance(1e4)
        return scheduler

    rehearsal, ticks, left = served(), 0, -1
    while rehearsal.stats()["expired_nodes"] != left:
        left = rehearsal.stats()["expired_nodes"]
        rehearsal.tick()
        ticks += 1
    assert left > TURNS // 2, "prompts that no worker keeps are forgotten"
    scheduler = served()
    counted.each("tick: a node forgotten", lambda _: scheduler.tick(), [None] * ticks, left / ticks)
    assert scheduler.stats()["expired_nodes"] == left, "as rehearsed"


def chain(rng: Any) -> tuple[list[int], list[int]]:
    """(hashes, tokens) of blocks that follow each other."""
    hashes = rng.integers(-(2**63), 2**63 - 1, CHAIN_BLOCKS).tolist()
    return hashes, rng.integers(0, VOCABULARY, CHAIN_BLOCKS * BLOCK_TOKENS).tolist()


def chained_events(hashes: list[int], tokens: list[int], blocks: int) -> list[tuple[list[int], int | None, list[int]]]:
    """(hashes, parent, tokens) of events with so many blocks each."""
    return [
        (hashes[i : i + blocks], hashes[i - 1] if i else None, tokens[i * BLOCK_TOKENS : (i + blocks) * BLOCK_TOKENS])
        for i in range(0, CHAIN_BLOCKS, blocks)
    ]


def payload(batch: list[tuple[list[int], int | None, list[int]]]) -> bytes:
    """The batch as an engine sends it."""
    events = []
    for hashes, parent, tokens in batch:
        event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
        events.append({**event, "block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU"})
    packed: bytes = msgpack.packb([0.0, events, 0])
    return packed


def events(counted: Counted) -> None:
    """Stored blocks, per block: a whole chain an event, and a block an event; as objects and as an engine's bytes."""
    for blocks, words in ((CHAIN_BLOCKS, "a chain an event"), (1, "a block an event")):
        rng = np.random.default_rng(4)
        batches = [chained_events(*chain(rng), blocks) for _ in range(40)]
        objects = [[preble.BlockStored(h, p, t, BLOCK_TOKENS) for h, p, t in batch] for batch in batches]
        ways: list[tuple[str, list[Any]]] = [("apply", objects)]
        if hasattr(preble.GlobalScheduler, "apply_raw"):
            ways.append(("apply_raw", list(map(payload, batches))))
        for method, given in ways:
            scheduler, _ = scheduler_of(1, block_size=BLOCK_TOKENS)
            apply = getattr(scheduler, method)
            for batch in given[:10]:
                apply("w0", batch)
            counted.each(f"{method}: {words}", partial(apply, "w0"), given[10:], CHAIN_BLOCKS)
            known = scheduler.stats()["workers"]["w0"]["known_blocks"]
            assert known == len(given) * CHAIN_BLOCKS, f"{method} stored {known} blocks"


def tree(counted: Counted) -> None:
    """The tree's own writes."""
    prompts = Prompts(5)
    grown = RadixTree(window_seconds=1.0)
    grown.add_worker(1 << 30)

    def insert(tokens: Any) -> int:
        return grown.insert(tokens, 1.0, worker=0)

    for tokens in prompts.take(WARM * 4):
        insert(tokens)
    counted.each("insert: a leaf", insert, prompts.take(TURNS))
    runs = [prompts.text(1024) for _ in range(TURNS)]
    for tokens in runs:
        insert(tokens)
    nodes = grown.node_count
    counted.each("insert: a split", insert, [np.concatenate([run[:512], prompts.text(512)]) for run in runs])
    assert grown.node_count == nodes + 2 * TURNS, "every insert split a node"
    grown.check()
    nodes = grown.node_count
    grown.clear_worker(0)
    grown.sweep()
    gone = sum(counted.each("evict: a dead node", lambda _: grown.expire(1e6), [None] * 3, nodes / 3))
    assert gone > nodes - 4, f"{gone} of {nodes} nodes went"


def main() -> int:
    spec = importlib.util.spec_from_file_location("callgrind_request", Path(sys.argv[1]))
    assert spec is not None and spec.loader is not None, "a file with an extension module's suffix has a loader"
    request = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(request)
    gc.disable()
    counted = Counted(request)
    for part in (requests, explorations, forgetting, events, tree):
        part(counted)
    print(json.dumps({"done": counted.done, "turns": counted.turns}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
