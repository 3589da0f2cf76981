"""One cell of a peer, in a process and an environment of its own: it makes the same stream and prints one line of JSON.
Owns the driving of each peer; nothing of preble is imported.

    PEERS_ENV/bin/python -m benchmarks.decision.peers '{"peer": "dynamo-radix", "shape": "toolbench200", "workers": 8,
                                               "count": 6000, "seed": 0}'

dynamo-select  NVIDIA Dynamo's `SelectionService.select_and_reserve`, without the engines' events: its index takes its
               own decisions for granted, as ours does. `free_reservation` 64 requests later is not in the latency.
dynamo-radix   NVIDIA Dynamo's `compute_block_hash_for_seq` and `RadixTree`, with a choice made in Python: the longest
               overlap if it is half the prompt or more, else the least loaded. Simpler than E2.
ray            Ray Serve LLM's `PrefixTree`, called in the order of its `PrefixCacheAffinityRouter` with the defaults
               (match rate 0.1, no limit of imbalance) and without its actor: the remote calls would be most of it.

Blocks are of 16 tokens. Dynamo gets a list of ints and Ray a string of 4 characters a token; both are built just
before the timed call. One core for the whole process, its threads included: unpinned, each hand-over between threads
wakes an idle core and takes longer.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib.util
import json
import os
import resource
import sys
import time
import types
from collections import deque
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decision.shapes import DEFAULT_TRACE, VOCABULARY, Tokens, digest, prompts

IN_FLIGHT = 64
BLOCK_TOKENS = 16
EXPLOIT_RATIO = 0.5
RAY_MATCH_RATE = 0.1
PACKAGES = {"dynamo-select": "ai-dynamo-runtime", "dynamo-radix": "ai-dynamo-runtime", "ray": "ray"}


class Loads:
    """Requests in flight a worker; the last IN_FLIGHT are."""

    def __init__(self, workers: int) -> None:
        self.queued = [0] * workers
        self._live: deque[int] = deque()

    def book(self, worker: int) -> None:
        """One more for this worker; the oldest of all ends."""
        self.queued[worker] += 1
        self._live.append(worker)
        if len(self._live) > IN_FLIGHT:
            self.queued[self._live.popleft()] -= 1


class DynamoRadix:
    """Hash, find, choose, and record by an event. A block's name is the hash of its tokens: these streams never
    have equal blocks behind different prefixes."""

    def __init__(self, workers: int) -> None:
        from dynamo._core import RadixTree, compute_block_hash_for_seq

        self._tree = RadixTree()
        self._hashes = compute_block_hash_for_seq
        self._loads = Loads(workers)
        self._events = 0

    def prepare(self, tokens: Tokens) -> list[int]:
        """As a tokenizer leaves it."""
        ids: list[int] = tokens.tolist()
        return ids

    def decide(self, tokens: list[int]) -> tuple[int, int]:
        """(worker, its cached tokens)."""
        hashes = self._hashes(tokens, BLOCK_TOKENS)
        scores = {worker: blocks for (worker, _), blocks in self._tree.find_matches(hashes).scores.items()}
        worker = max(scores, key=lambda w: (scores[w], -self._loads.queued[w])) if scores else -1
        if worker < 0 or scores[worker] * BLOCK_TOKENS < EXPLOIT_RATIO * len(tokens):
            worker = min(range(len(self._loads.queued)), key=self._loads.queued.__getitem__)
        cached = scores.get(worker, 0)
        if cached < len(hashes):
            self._record(worker, hashes, cached)
        self._loads.book(worker)
        return worker, cached * BLOCK_TOKENS

    def _record(self, worker: int, hashes: list[int], start: int) -> None:
        self._events += 1
        blocks = [{"block_hash": name, "tokens_hash": name} for name in hashes[start:]]
        stored = {"parent_hash": hashes[start - 1] if start else None, "blocks": blocks}
        event = {"event_id": self._events, "data": {"stored": stored}}
        self._tree.apply_event(worker, json.dumps(event).encode())


class RayTree:
    """Match, the smallest if nothing much matches, the shortest queue of those, insert."""

    def __init__(self, workers: int) -> None:
        self._names = [f"w{i}" for i in range(workers)]
        self._tree = ray_prefix_tree()()
        self._tree.add_tenants(self._names, time.time())
        self._queued = dict.fromkeys(self._names, 0)
        self._rows = {name: row for row, name in enumerate(self._names)}
        self._live: deque[str] = deque()
        self._table = np.array([f"{token:04x}" for token in range(VOCABULARY)], "S4")

    def prepare(self, tokens: Tokens) -> str:
        """4 characters a token."""
        return str(self._table[tokens].tobytes(), "ascii")

    def decide(self, text: str) -> tuple[int, int]:
        """(worker, its cached tokens)."""
        matched, tenants = self._tree.prefix_match(text, self._names)
        if len(matched) / len(text) < RAY_MATCH_RATE:
            candidates = self._tree.get_smallest_tenants() or self._names
        else:
            candidates = tenants or self._names
        chosen = min(candidates, key=self._queued.__getitem__)
        self._tree.insert(text, chosen, time.time())
        self._queued[chosen] += 1
        self._live.append(chosen)
        if len(self._live) > IN_FLIGHT:
            self._queued[self._live.popleft()] -= 1
        return self._rows[chosen], len(matched) // 4 if tenants and chosen in tenants else 0


def ray_prefix_tree() -> Any:
    """Ray's `PrefixTree` class from its installed, unchanged source, with a `ray` that holds only what it names."""
    [found] = [f for f in distribution("ray").files or () if str(f).endswith("prefix_aware/prefix_tree.py")]
    names = ("ray", "ray.serve", "ray.serve._private", "ray.serve._private.constants")
    stubs = {name: types.ModuleType(name) for name in names}
    stubs["ray"].remote = lambda wrapped: wrapped  # type: ignore[attr-defined]
    stubs[names[-1]].SERVE_LOGGER_NAME = "ray.serve"  # type: ignore[attr-defined]
    sys.modules.update(stubs)
    spec = importlib.util.spec_from_file_location("prefix_tree", str(distribution("ray").locate_file(found)))
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules["prefix_tree"] = module
    spec.loader.exec_module(module)
    return module.PrefixTree


class Record:
    """What each decision took and led to."""

    def __init__(self, count: int) -> None:
        self.took_ns = np.full(count, np.nan)
        self.chosen, self.cached = np.full((2, count), -1)

    def figures(self, stream: list[Tokens], warm: int, workers: int) -> dict[str, float]:
        """Times and placement after the warm-up."""
        counts = np.bincount(self.chosen[warm:], minlength=workers)
        return {
            "schedule_ns_p50": float(np.percentile(self.took_ns[warm:], 50)),
            "schedule_ns_p99": float(np.percentile(self.took_ns[warm:], 99)),
            "hit_fraction": float(self.cached[warm:].sum() / sum(map(len, stream[warm:]))),
            "load_spread": float(counts.max() / counts.mean()),
        }


def drive(peer: DynamoRadix | RayTree, stream: list[Tokens], record: Record) -> None:
    """One decision after the other."""
    now = time.perf_counter_ns
    for position, tokens in enumerate(stream):
        fresh: Any = peer.prepare(tokens)
        start = now()
        worker, cached = peer.decide(fresh)
        record.took_ns[position] = now() - start
        record.chosen[position], record.cached[position] = worker, cached


async def drive_select(stream: list[Tokens], workers: int, record: Record) -> int:
    """The same for the service that only speaks asyncio; returns resident memory before the service goes."""
    from dynamo._core import SelectionService

    service = SelectionService()
    for worker in range(workers):
        row = {"worker_id": worker, "model_name": "m", "endpoint": f"http://w{worker}", "block_size": BLOCK_TOKENS}
        row |= {"max_num_batched_tokens": 8192, "data_parallel_start_rank": 0, "data_parallel_size": 1}
        await service.upsert_worker(row)
    live: deque[str] = deque()
    now = time.perf_counter_ns
    for position, tokens in enumerate(stream):
        fresh = tokens.tolist()
        start = now()
        reply = await service.select_and_reserve({"model_name": "m", "token_ids": fresh})
        record.took_ns[position] = now() - start
        record.chosen[position] = reply["worker_id"]
        record.cached[position] = len(fresh) - reply["effective_prefill_tokens"]
        live.append(reply["selection_id"])
        if len(live) > IN_FLIGHT:
            await service.free_reservation(live.popleft())
    resident = resident_bytes()
    service.shutdown()
    return resident


def resident_bytes() -> int:
    """Resident memory now, after giving back to the system what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run(peer: str, stream: list[Tokens], workers: int) -> tuple[Record, int]:
    """Every decision of the stream, and by how much resident memory grew. Raises ImportError without the peer."""
    record = Record(len(stream))
    if peer == "dynamo-select":
        import dynamo._core  # noqa: F401  (so that loading it is not counted as memory of the prompts)
        import uvloop  # it comes with Dynamo, and makes it faster than asyncio's own loop

        before = resident_bytes()
        uvloop.install()
        return record, asyncio.run(drive_select(stream, workers, record)) - before
    driven = DynamoRadix(workers) if peer == "dynamo-radix" else RayTree(workers)
    before = resident_bytes()
    gc.freeze()
    drive(driven, stream, record)
    return record, resident_bytes() - before


def main() -> int:
    wanted = json.loads(sys.argv[1])
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ.update(DYN_ROUTER_USE_KV_EVENTS="false", DYN_LOG="error")
    cell = {key: wanted[key] for key in ("peer", "shape", "workers", "count", "seed")}
    trace = Path(wanted.get("trace", DEFAULT_TRACE))
    stream = prompts(cell["shape"], cell["count"], seed=cell["seed"], trace=trace)
    record, grown = run(cell["peer"], stream, cell["workers"])
    environment = {
        "rss_bytes_per_prompt": grown / len(stream),
        "version": version(PACKAGES[cell["peer"]]),
        "prompts": len(stream),
        "digest": digest(stream),
    }
    print(json.dumps({**cell, **record.figures(stream, len(stream) // 4, cell["workers"]), **environment}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
