"""Random histories of cache events, requests and forgetting, against a naive model: a dict of blocks with their whole
prefixes, and the set of all prefixes that the worker is estimated to cache. Events go in as objects or as bytes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from preble import AllBlocksCleared, BlockRemoved, BlockStored, PrefixEvicted
from preble._kv_index.block_index import BlockIndex
from preble._kv_index.event_batch import EventBatch
from preble._radix import RadixTree

Prompt = tuple[int, ...]
NAMESPACES = (None, "lora-a")


@dataclass
class Block:
    prefix: Prompt
    start: int
    parent: Hashable
    namespace: Hashable
    media: set[str] = field(default_factory=set)


class Model:
    """What must be known and estimated, one worker. `placed(hash)` says whether the index still knows where a block
    ends; it may have forgotten only what the tree has forgotten."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks: dict[Hashable, Block] = {}
        self.blocks_max = blocks_max
        self.estimated: set[tuple[Hashable, Prompt]] = set()
        self.counts = dict.fromkeys(("orphan_blocks", "conflicting_blocks", "unknown_blocks", "block_overflows"), 0)

    def believe(self, namespace: Hashable, prompt: Prompt) -> None:
        self.estimated |= {(namespace, prompt[:end]) for end in range(1, len(prompt) + 1)}

    def forget(self) -> None:
        self.blocks.clear()
        self.estimated.clear()

    def is_chain_known(self, key: Hashable) -> bool:
        block = self.blocks.get(key)
        while block is not None and block.start:
            above = self.blocks.get(block.parent)
            block = above if above is not None and len(above.prefix) == block.start else None
        return block is not None

    def store(self, event: BlockStored, placed: bool) -> bool:
        """Whether the blocks are known now."""
        parent, count = event.parent_block_hash, len(event.block_hashes)
        above = self.blocks.get(parent)
        if parent is not None and above is None:
            self.counts["orphan_blocks"] += count
            return False
        namespace = event.namespace if above is None else above.namespace
        if event.namespace not in (None, namespace):
            self.counts["conflicting_blocks"] += count
            return False
        prefix: Prompt = () if above is None else above.prefix
        new: dict[Hashable, Block] = {}
        key = parent
        for i, block_hash in enumerate(event.block_hashes):
            start = len(prefix)
            prefix += tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
            block = Block(prefix, start, key if start else None, namespace)
            if block_hash in new or not same_place(self.blocks.get(block_hash), block):
                self.counts["conflicting_blocks"] += count
                return False
            new[block_hash] = block
            key = block_hash
        fresh = [block_hash for block_hash in new if block_hash not in self.blocks]
        if fresh or (namespace, prefix) not in self.estimated:
            if len(self.blocks) + len(fresh) > self.blocks_max:
                self.counts["block_overflows"] += 1
                self.forget()
                return False
            estimated = above is None or (namespace, above.prefix) in self.estimated
            if not placed or not (estimated or self.is_chain_known(parent)):
                self.counts["orphan_blocks"] += count
                return False
        for block_hash, block in new.items():
            self.blocks.setdefault(block_hash, block).media.add(event.medium or "GPU")
        self.believe(namespace, prefix)
        return True

    def remove(self, block_hash: Hashable, medium: str | None, placed: bool) -> None:
        block = self.blocks.get(block_hash)
        if block is None:
            self.counts["unknown_blocks"] += 1
            return
        block.media.discard(medium or "GPU")
        if block.media:
            return
        del self.blocks[block_hash]
        if placed:
            kept = {
                (namespace, prompt)
                for namespace, prompt in self.estimated
                if namespace != block.namespace
                or not (
                    starts_with(prompt, block.prefix) or block.start < len(prompt) and starts_with(block.prefix, prompt)
                )
            }
            self.estimated.clear()
            for namespace, prompt in kept:
                self.believe(namespace, prompt)

    def evict(self, namespace: Hashable, prompt: Prompt, kept: int) -> None:
        gone = prompt[: kept + 1]
        self.estimated = {
            (other, prefix) for other, prefix in self.estimated if other != namespace or not starts_with(prefix, gone)
        }


def starts_with(prompt: Prompt, prefix: Prompt) -> bool:
    return prompt[: len(prefix)] == prefix


def same_place(known: Block | None, block: Block) -> bool:
    if known is None:
        return True
    own, other = known.prefix[known.start :], block.prefix[block.start :]
    return (known.start, known.parent, known.namespace, own) == (block.start, block.parent, block.namespace, other)


def as_wire(event: Any, form: str) -> Any:
    """An event as an engine packs it."""
    if isinstance(event, BlockStored):
        names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
        lora = event.namespace[-1] if isinstance(event.namespace, tuple) else None
        values: Sequence[Any] = (
            *(event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size),
            *(None, event.medium, lora),
        )
    elif isinstance(event, BlockRemoved):
        names, values = ("block_hashes", "medium"), (event.block_hashes, event.medium)
    else:
        names, values = (), ()
    tag = type(event).__name__
    return [tag, *values] if form == "array" else {"type": tag, **dict(zip(names, values, strict=True))}


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
forms = st.sampled_from(["object", "map", "array"])
media = st.sampled_from([None, None, None, "GPU", "CPU"])


class BlocksMachine(RuleBasedStateMachine):
    """Hashes are what a hash chain would give, save for a few that lie."""

    @initialize(blocks_max=st.sampled_from([6, 25, 10_000]), kind=st.sampled_from(["int", "bytes"]))
    def begin(self, blocks_max: int, kind: str) -> None:
        self.tree = RadixTree(window_seconds=10.0)
        self.index = BlockIndex(self.tree, self.tree.add_worker(10**6), blocks_max)
        self.other = self.tree.add_worker(10**6)
        self.model = Model(blocks_max)
        self.kind, self.now, self.prompts = kind, 1.0, {(None, (0,))}

    def hash_of(self, namespace: Hashable, prefix: Prompt, size: int) -> int | bytes:
        number = hash((namespace == "lora-a", prefix, size)) % 2**63 - 2**62
        return number if self.kind == "int" else number.to_bytes(32, "big", signed=True)

    def is_placed(self, block_hash: Hashable) -> bool:
        """Whether the index knows where a block ends; if not, the tree has forgotten it, or the way there."""
        block = self.model.blocks.get(block_hash)
        prefix = self.index.prefix(block_hash)
        if block is None or prefix is not None:
            assert prefix is None or tuple(prefix) == block.prefix
            return True
        known = self.tree.match(block.prefix, namespace=block.namespace)[0]
        assert known < len(block.prefix) or not self.model.is_chain_known(block_hash)
        return False

    def apply(self, events: list[Any], form: str) -> None:
        before = set(self.model.estimated)
        if form == "object":
            changed = self.index.apply(events, self.now)
        else:
            payload = msgpack.packb([self.now, [as_wire(event, form) for event in events], 0])
            batch = EventBatch(payload)
            self.index.resolve(batch, None, lambda keys: keys.lora_name)
            changed = self.index.apply_batch(batch, self.now)
        assert (changed > 0) >= (before != self.model.estimated) or len(events) > 1

    @rule(
        prompt=prompts,
        size=st.integers(1, 3),
        first=st.integers(0, 8),
        namespace=st.sampled_from(NAMESPACES),
        medium=media,
        form=forms,
        lie=st.integers(0, 12),
        chopped=st.booleans(),
    )
    def store(
        self,
        prompt: Prompt,
        size: int,
        first: int,
        namespace: Hashable,
        medium: str | None,
        form: str,
        lie: int,
        chopped: bool,
    ) -> None:
        """Blocks of a prompt from some block on, as one event or as one for each block."""
        prompt = prompt[: len(prompt) - len(prompt) % size]
        hashes = [self.hash_of(namespace, prompt[: end + size], size) for end in range(0, len(prompt), size)]
        if lie == 0 and len(hashes) > 1:
            hashes[-1] = self.hash_of(namespace, (lie,), 1)
        first = min(first, len(hashes))
        parent = hashes[first - 1] if first else None
        self.prompts.add((namespace, prompt or (0,)))
        steps = [(i, i + 1) for i in range(first, len(hashes))] if chopped else [(first, len(hashes))]
        events = []
        for start, end in steps:
            own = None if start and lie % 2 else namespace
            name = own if form == "object" or own is None else ("lora", own)
            tokens = list(prompt[start * size : end * size])
            event = BlockStored(hashes[start:end], parent, tokens, size, name, medium)
            if len(event.block_hashes):
                events.append(event)
                parent = hashes[end - 1]
        just_stored: set[Hashable] = {None}
        for event in events:
            placed = event.parent_block_hash in just_stored or self.is_placed(event.parent_block_hash)
            name = event.namespace[-1] if isinstance(event.namespace, tuple) else event.namespace
            parent = event.parent_block_hash
            if self.model.store(BlockStored(event.block_hashes, parent, event.token_ids, size, name, medium), placed):
                just_stored.update(event.block_hashes)
        self.apply(events, form)

    @rule(data=st.data(), medium=media, form=forms)
    def remove(self, data: st.DataObject, medium: str | None, form: str) -> None:
        known = sorted(self.model.blocks, key=repr)
        some = st.sampled_from(known) if known else st.nothing()
        hashes = data.draw(st.lists(some | st.just(self.hash_of(None, (9,), 1)), min_size=1, max_size=4))
        for block_hash in hashes:
            self.model.remove(block_hash, medium, self.is_placed(block_hash))
            self.apply([BlockRemoved([block_hash], medium)], form)

    @rule(data=st.data(), form=forms)
    def remove_at_once(self, data: st.DataObject, form: str) -> None:
        known = sorted(self.model.blocks, key=repr)
        if known:
            hashes = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=6, unique=True))
            if all(self.is_placed(block_hash) for block_hash in hashes):
                for block_hash in hashes:
                    self.model.remove(block_hash, None, True)
                self.apply([BlockRemoved(hashes)], form)

    @rule(form=forms)
    def clear(self, form: str) -> None:
        self.model.forget()
        self.apply([AllBlocksCleared()], form)

    @rule(prompt=prompts, namespace=st.sampled_from(NAMESPACES), mine=st.booleans())
    def request(self, prompt: Prompt, namespace: Hashable, mine: bool) -> None:
        self.prompts.add((namespace, prompt))
        self.tree.insert(list(prompt), self.now, worker=0 if mine else self.other, namespace=namespace)
        if mine:
            self.model.believe(namespace, prompt)

    @rule(prompt=prompts, namespace=st.sampled_from(NAMESPACES), kept=st.integers(0, 8))
    def evict(self, prompt: Prompt, namespace: Hashable, kept: int) -> None:
        if kept < len(prompt):
            self.model.evict(namespace, prompt, kept)
            self.index.apply([PrefixEvicted(list(prompt), kept, namespace)], self.now)

    @rule(seconds=st.sampled_from([1.0, 15.0, 60.0]))
    def forget(self, seconds: float) -> None:
        """Prefixes that nobody caches are forgotten; the other worker's go with it, so that some are."""
        self.now += seconds
        self.tree.clear_worker(self.other)
        self.tree.expire(self.now)

    @invariant()
    def estimated_as_the_model_says(self) -> None:
        self.index.check()
        self.tree.check()
        for namespace, prompt in self.prompts:
            expected = max(
                (len(p) for n, p in self.model.estimated if n == namespace and starts_with(prompt, p)), default=0
            )
            assert self.tree.matched(list(prompt), namespace=namespace) == expected
        stats = self.index.stats()
        assert {name: stats[name] for name in self.model.counts} == self.model.counts
        assert len(self.index) == len(self.model.blocks)
        for block_hash, block in self.model.blocks.items():
            assert self.index.span(block_hash) == (block.start, len(block.prefix))


TestBlocksMachine = BlocksMachine.TestCase
TestBlocksMachine.settings = settings(stateful_step_count=40, max_examples=100)
