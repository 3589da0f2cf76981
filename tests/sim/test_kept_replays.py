"""Replays that are kept: whatever makes them faster, every request still runs where and when it did, to the
nanosecond."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest

from preble import LocalConfig, Recording
from preble.recording import RecordedRequest, RecordedWorker
from preble.recording.replaying import BlockNumbers, workload_of
from preble.sim.engine_fit import EngineCosts, EngineModel
from preble.sim.replay import replay, seen_before

COSTS = EngineCosts(0.02, 1e-4, 1e-7, 1e-10, 1e-4, 0.002, 48.0)
LRU: dict[str, Any] = {"eviction": "lru", "order": "fcfs"}

# Local scheduler's configuration, policy -> trace hash. Where a change of the rules moves requests, they are made anew.
KEPT = {
    ("queues", "e2"): "8ab58185e87c8154",
    ("queues", "round_robin"): "b61ef3edd3d085eb",
    ("evicts", "e2"): "6ad9777d6a71ead0",
    ("evicts", "least_loaded"): "873730ba07c5f3ce",
    ("whole prompts", "e2"): "dce9f3bc7120a963",
    ("few places", "cache_aware"): "d6391dcb9d484041",
}
ENGINES: dict[str, dict[str, Any]] = {
    "queues": {"kv_capacity_tokens": 100_000},
    "evicts": {"kv_capacity_tokens": 9_000},
    "whole prompts": {"kv_capacity_tokens": 20_000, "chunked_prefill": False, "token_budget": 8192, **LRU},
    "few places": {"kv_capacity_tokens": 20_000, "max_running": 4, "token_budget": 2048, **LRU},
}


def made(requests: int = 150, seed: int = 5) -> Recording:
    """Prompts that share documents, half of them turns of sessions, with partial last blocks."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(1, 2**62, int(rng.integers(20, 90)), np.uint64) for _ in range(12)]
    arrival, rows, turns = 0.0, list[RecordedRequest](), dict[str, Any]()
    for number in range(requests):
        arrival += float(rng.exponential(0.06))
        own = rng.integers(1, 2**62, int(rng.integers(1, 12)), np.uint64)
        session = f"s{int(rng.integers(12))}" if number % 2 else ""
        before = turns.get(session, documents[int(12 * rng.random() ** 2)])
        blocks = np.concatenate([before, own]) if len(before) < 150 else own
        if session:
            turns[session] = blocks[:-1]
        output = int(rng.integers(1, 60))
        rows.append(
            RecordedRequest(
                arrival_seconds=arrival,
                sent_seconds=arrival,
                end_seconds=arrival + 0.02 * output,
                worker=f"w{number % 3}",
                prompt_tokens=16 * len(blocks) - int(rng.integers(16)),
                blocks=blocks,
                output_tokens=output,
                session=session,
            )
        )
    workers = tuple(RecordedWorker(id=f"w{number}", kv_capacity_tokens=1) for number in range(3))
    return Recording(workers=workers, requests=tuple(rows))


@pytest.mark.parametrize("kept", KEPT)
def test_a_kept_replay_is_the_same(kept: tuple[str, str]) -> None:
    kind, policy = kept
    local = LocalConfig(**{"max_waiting": 10**6, "max_running": 256, **ENGINES[kind]})
    recording = made()
    workers = [dataclasses.replace(one, kv_capacity_tokens=local.kv_capacity_tokens) for one in recording.workers]
    recording = dataclasses.replace(recording, workers=tuple(workers))
    said = replay(recording, [policy], engines=EngineModel(COSTS, local))
    assert said.runs[0].results[0].trace_hash == KEPT[kept]


def test_token_ids_of_a_kept_recording() -> None:
    digest = hashlib.sha256()
    for request in workload_of(made()).requests:
        digest.update(request.token_ids.astype("<i4").tobytes())
        digest.update(b"" if request.output_ids is None else request.output_ids.astype("<i4").tobytes())
    assert digest.hexdigest()[:16] == "ef400fc62df32548"


def test_block_numbers_are_those_of_counting() -> None:
    recording = made(60)
    requests = [recording.requests[row] for row in range(0, 60, 2)]
    blocks, known = BlockNumbers(requests, 16), dict[int, int]()
    seen = set[int]()
    for place, one in enumerate(requests):
        names = one.blocks.tolist()
        expected = [known.setdefault(name, len(known)) for name in names]
        assert blocks.of(place).tolist() == expected
        assert [int(blocks.first[number]) < place for number in expected] == [name in seen for name in names]
        shared = next((at for at, name in enumerate(names) if name not in seen), len(names))
        assert seen_before(recording, range(0, 60, 2))[place] == max(0, min(16 * shared, one.prompt_tokens - 1))
        seen.update(names)
