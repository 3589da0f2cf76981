"""The core's operations alone, each beside the machine's limit where it has one. Owns these measurements; whole
decisions are `bench_schedule.py`'s.

match       `GlobalScheduler.match`, buffer and list; the limit compares the same prefix. Nothing is stored meanwhile.
insert      `RadixTree.insert` of prompts that share a stored document; the limit is compare and copy.
split       `RadixTree.insert` of prompts that leave a stored run in its middle, so that its node is split.
evict       `RadixTree.expire` of prompts that left the window, a node; and `insert` into a tree that is full.
lists       a list of ints given to `match` of an empty tree: the conversion and the call.
events      `GlobalScheduler.apply` of event objects and `apply_raw` of an engine's bytes, blocks of 16 tokens, chains
            of 64 blocks: a chain an event, or a block an event; 16 chains a batch.

One core; prompts hot as in `limits.py`; p50 of a call, or operations per second where calls do many.

    python -m benchmarks.decision.bench_core [--only match events] [--seed 0] [--json OUT]
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

import preble
from benchmarks.common.facts import environment
from benchmarks.decision import limits
from benchmarks.decision.cells import pin
from benchmarks.decision.shapes import VOCABULARY, Tokens, prompts
from preble._radix import RadixTree

STORED = 3000
COUNT = 3000
WORKERS = 8
BLOCK_TOKENS = 16
CHAIN_BLOCKS = 64
CHAINS = 1024
CHAINS_PER_BATCH = 16
Rows = Iterable[dict[str, Any]]
Chain = tuple[list[int], list[list[int]]]


def row(operation: str, tokens: str, limit_ns: float | None = None, **figures: float) -> dict[str, Any]:
    """One line of the table; figures are `ns_p50` or `per_second`."""
    return {"operation": operation, "tokens": tokens, "limit_ns_p50": limit_ns, **figures}


def p50(call: Callable[[Any], Any], given: list[Tokens], give: Callable[[Tokens], Any]) -> float:
    """p50 of a call, collected garbage kept out."""
    gc.collect()
    gc.freeze()
    return limits.p50_of(call, given, give)


def serving(stream: list[Tokens]) -> preble.GlobalScheduler:
    """A scheduler that has served these prompts."""
    clock = preble.ManualClock()
    scheduler = preble.GlobalScheduler([f"w{i}" for i in range(WORKERS)], clock=clock)
    for tokens in stream:
        clock.advance(0.02)
        scheduler.finish(scheduler.schedule(tokens).request_id)
    return scheduler


def bench_match(seed: int) -> Rows:
    """Reads of a warm tree."""
    stream = prompts("toolbench200", STORED + COUNT, seed=seed)
    stored, asked = stream[:STORED], stream[STORED:]
    scheduler, module = serving(stored), limits.compiled()
    known = {id(tokens): tokens[: scheduler.match(tokens).known_tokens].copy() for tokens in asked}
    floor = [p50(module.borrow, asked, limits.Fresh(asked, False).give)]
    floor.append(p50(module.convert, asked, limits.Fresh(asked, True).give))
    compare = compare_ns(module, asked, known)
    for as_list in (False, True):
        took = p50(scheduler.match, asked, limits.Fresh(asked, as_list).give)
        limit = compare if not as_list else compare - floor[0] + floor[1]
        yield row("match", "list" if as_list else "buffer", limit, ns_p50=took)


def compare_ns(module: Any, asked: list[Tokens], known: dict[int, Tokens]) -> float:
    """p50 of comparing each hot prompt with its stored prefix, from Python."""
    give, took = limits.Fresh(asked, False).give, []
    for tokens in asked:
        fresh, prefix = give(tokens), known[id(tokens)]
        start = time.perf_counter_ns()
        same = module.equal(fresh, prefix, False)
        took.append(time.perf_counter_ns() - start)
        assert same, "the stored prefix differs"
    return float(np.percentile(took, 50))


def tree_of(stream: list[Tokens], **options: Any) -> RadixTree:
    """A tree in which worker 0 has cached these prompts."""
    tree = RadixTree(**options)
    tree.add_worker(1 << 30)
    for position, tokens in enumerate(stream):
        tree.insert(tokens, position * 0.01, worker=0)
    return tree


def bench_insert(seed: int) -> Rows:
    """Writes into a warm tree: a leaf each."""
    stream = prompts("toolbench200", STORED + COUNT, seed=seed)
    tree = tree_of(stream[:STORED])
    limit = limits.limit_of(limits.compiled(), stream, STORED, False)
    give = limits.Fresh(stream, False).give
    took = p50(lambda tokens: tree.insert(tokens, 40.0, worker=0), stream[STORED:], give)
    yield row("insert", "buffer", limit.call_ns_p50, ns_p50=took)


def bench_split(seed: int) -> Rows:
    """Writes that cut a stored run of 1,024 tokens at 512: two nodes each."""
    rng = np.random.default_rng([seed, 5])
    stored = list(rng.integers(0, VOCABULARY, (COUNT, 1024), np.int32))
    tails = rng.integers(0, VOCABULARY, (COUNT, 512), np.int32)
    asked = [np.concatenate([tokens[:512], tail]) for tokens, tail in zip(stored, tails, strict=True)]
    tree = tree_of(stored)
    before = tree.node_count
    limit = limits.limit_of(limits.compiled(), [*stored, *asked], COUNT, False)
    took = p50(lambda tokens: tree.insert(tokens, 40.0, worker=0), asked, limits.Fresh(asked, False).give)
    assert tree.node_count - before == 2 * COUNT, "every insert splits a node and adds one"
    yield row("insert that splits", "buffer", limit.call_ns_p50, ns_p50=took)


def bench_evict(seed: int) -> Rows:
    """Forgetting: what left the window, and what has to make room."""
    stream = prompts("toolbench200", STORED + COUNT, seed=seed)
    tree = tree_of(stream, window_seconds=1.0)
    nodes = tree.node_count
    tree.clear_worker(0)
    tree.sweep()
    start = time.perf_counter()
    while tree.expire(1e6):
        pass
    seconds = time.perf_counter() - start
    gone = nodes - tree.node_count
    assert gone > STORED, "the prompts' nodes are dead"
    yield row("evict, a dead node", "-", per_second=gone / seconds)
    full = tree_of(stream[:STORED], max_bytes=2 << 20)
    give = limits.Fresh(stream, False).give
    took = p50(lambda tokens: full.insert(tokens, 40.0, worker=0), stream[STORED:], give)
    yield row("insert into a full tree", "buffer", ns_p50=took)


def bench_lists(seed: int) -> Rows:
    """Conversion alone."""
    stream, module, empty = prompts("toolbench200", COUNT, seed=seed), limits.compiled(), serving([])
    give = limits.Fresh(stream, True).give
    floor = p50(module.convert, stream, give)
    yield row("list conversion", "list", floor, ns_p50=p50(empty.match, stream, give))


def chains(seed: int) -> list[Chain]:
    """(hashes, tokens of each block) of each chain; nothing is shared."""
    rng = np.random.default_rng([seed, 9])
    tokens = rng.integers(0, VOCABULARY, (CHAINS, CHAIN_BLOCKS, BLOCK_TOKENS)).tolist()
    hashes = rng.integers(-(2**63), 2**63 - 1, (CHAINS, CHAIN_BLOCKS)).tolist()
    return list(zip(hashes, tokens, strict=True))


def stored_events(chain: Chain, single: bool) -> list[tuple[list[int], int | None, list[int]]]:
    """(hashes, parent, tokens) of the events that store a chain: one event, or one a block."""
    hashes, blocks = chain
    if not single:
        return [(hashes, None, [token for block in blocks for token in block])]
    parents = [None, *(parent for parent, _ in pairwise(hashes))]
    return [([name], parent, block) for name, parent, block in zip(hashes, parents, blocks, strict=True)]


def as_object(hashes: list[int], parent: int | None, tokens: list[int]) -> preble.BlockStored:
    """An event as `apply` takes it."""
    return preble.BlockStored(hashes, parent, tokens, BLOCK_TOKENS)


def as_map(hashes: list[int], parent: int | None, tokens: list[int]) -> dict[str, Any]:
    """An event as today's engines put it on the wire."""
    stored = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return {**stored, "block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU"}


def bench_events(seed: int) -> Rows:
    """Stored blocks a second, as objects and as bytes; and removed ones."""
    known = chains(seed)
    for single in (False, True):
        batches = [
            [event for chain in known[i : i + CHAINS_PER_BATCH] for event in stored_events(chain, single)]
            for i in range(0, CHAINS, CHAINS_PER_BATCH)
        ]
        style = "a block an event" if single else f"{CHAIN_BLOCKS} blocks an event"
        objects = [[as_object(*event) for event in batch] for batch in batches]
        scheduler, rate = applied("apply", objects)
        yield row(f"events as objects, {style}", "list", per_second=rate)
        removed = [[preble.BlockRemoved(event.block_hashes) for event in batch] for batch in objects]
        yield row(f"removals as objects, {style}", "-", per_second=applied("apply", removed, scheduler)[1])
        if not hasattr(preble.GlobalScheduler, "apply_raw"):
            print("events as bytes left out: this preble has no GlobalScheduler.apply_raw", file=sys.stderr)
            continue
        raw = [msgpack.packb([0.0, [as_map(*event) for event in batch], 0]) for batch in batches]
        yield row(f"events as bytes, {style}", "msgpack", per_second=applied("apply_raw", raw)[1])


def applied(
    method: str, batches: list[Any], scheduler: preble.GlobalScheduler | None = None
) -> tuple[preble.GlobalScheduler, float]:
    """Blocks a second through a method, on a new scheduler unless given; each batch goes to the next worker."""
    if scheduler is None:
        workers = [preble.WorkerSpec(f"w{i}", block_size=BLOCK_TOKENS) for i in range(WORKERS)]
        scheduler = preble.GlobalScheduler(workers, clock=preble.ManualClock())
    apply = getattr(scheduler, method)
    names = [f"w{i * WORKERS // len(batches)}" for i in range(len(batches))]
    gc.collect()
    gc.freeze()
    start = time.perf_counter()
    for name, batch in zip(names, batches, strict=True):
        apply(name, batch)
    seconds = time.perf_counter() - start
    known = sum(worker["known_blocks"] for worker in scheduler.stats()["workers"].values())
    removing = method == "apply" and isinstance(batches[0][0], preble.BlockRemoved)
    assert known == (0 if removing else CHAINS * CHAIN_BLOCKS), f"{known} blocks are known after {method}"
    return scheduler, CHAINS * CHAIN_BLOCKS / seconds


BENCHES: dict[str, Callable[[int], Rows]] = {
    "match": bench_match,
    "insert": bench_insert,
    "split": bench_split,
    "evict": bench_evict,
    "lists": bench_lists,
    "events": bench_events,
}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| operation | tokens as | p50 us | limit us | x limit | M/s |", "|---|---|---|---|---|---|"]
    for one in rows:
        took, limit, rate = one.get("ns_p50"), one["limit_ns_p50"], one.get("per_second")
        cells = [one["operation"], one["tokens"], f"{took / 1e3:.2f}" if took else "-"]
        cells += [f"{limit / 1e3:.2f}" if limit else "-", f"{took / limit:.1f}" if took and limit else "-"]
        lines.append(f"| {' | '.join([*cells, f'{rate / 1e6:.2f}' if rate else '-'])} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    pin()
    rows = [found for name in args.only for found in BENCHES[name](args.seed)]
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"facts": environment(args.seed), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
