"""Readers' slots and the queue of what writers have unlinked, at their bounds. Owns those alone: that threads together
read and write what is right is in test_threads.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from preble import BlockRemoved, BlockStored
from preble._kv_index.block_index import BlockIndex
from preble._radix import RadixTree
from preble.types import CacheEvent

READERS_MAX = 128
QUEUE_MAX = 4096


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a call; the list has its answer once there is one."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    return thread, answers


# --- readers' slots ---------------------------------------------------------------------------------------------------


def test_as_many_may_read_at_once_as_there_are_slots() -> None:
    tree = RadixTree()
    slots = [tree.begin_read() for _ in range(READERS_MAX)]
    assert sorted(slots) == list(range(READERS_MAX))
    for slot in slots:
        tree.end_read(slot)


def test_a_reader_that_finds_no_slot_gets_the_first_that_is_given_back() -> None:
    tree = RadixTree()
    slots = [tree.begin_read() for _ in range(READERS_MAX)]
    thread, answers = in_thread(tree.begin_read)
    for slot in slots[5], slots[77]:
        thread.join(0.05)
        assert thread.is_alive() and not answers, "a slot was taken twice"
        tree.end_read(slot)
        thread.join()
        assert answers == [slot]
        thread, answers = in_thread(tree.begin_read)
    tree.end_read(slots[0])
    thread.join()


def test_a_match_waits_for_a_slot_and_lets_others_run() -> None:
    tree = RadixTree()
    worker = tree.add_worker(100)
    tree.insert([1, 2, 3], 0.0, worker=worker)
    slots = [tree.begin_read() for _ in range(READERS_MAX)]
    threads = [in_thread(lambda: tree.match([1, 2, 3, 4])) for _ in range(3)]
    tree.insert([1, 2, 9], 0.0, worker=worker)  # writers need no slot
    for thread, answers in threads:
        thread.join(0.05)
        assert thread.is_alive() and not answers, "it read without a slot"
    for slot in slots:
        tree.end_read(slot)
    for thread, answers in threads:
        thread.join()
        assert answers == [(3, {worker: 3})]
    tree.check()


# --- what is retired --------------------------------------------------------------------------------------------------


def test_without_readers_nothing_stays_retired() -> None:
    tree = RadixTree()
    worker = tree.add_worker(100)
    for token in range(50):
        tree.insert([1, token], 0.0, worker=worker)
        assert tree.retired_things == 0


def test_what_a_reader_may_look_at_is_kept_and_only_that() -> None:
    tree = RadixTree()
    worker = tree.add_worker(100)
    tree.insert([1, 2, 3, 4], 0.0, worker=worker)
    old = tree.begin_read()
    tree.insert([1, 2, 5], 0.0, worker=worker)  # splits: the reader may be at the tokens as they were
    kept = tree.retired_things
    assert kept > 0
    young = tree.begin_read()
    tree.insert([1, 2, 5, 6], 0.0, worker=worker)
    tree.insert([1, 7], 0.0, worker=worker)
    more = tree.retired_things
    assert more > kept
    tree.end_read(old)
    tree.insert([8], 0.0, worker=worker)
    assert tree.retired_things <= more - kept, "what was unlinked before the younger reader began is free"
    tree.end_read(young)
    tree.insert([9], 0.0, worker=worker)
    assert tree.retired_things == 0
    tree.check()


def passing_blocks(count: int) -> list[CacheEvent]:
    """Events that store a block of one token and remove it again, so many times."""
    made: list[CacheEvent] = []
    for i in range(count):
        made += [BlockStored([i], None, [i], 1), BlockRemoved([i])]
    return made


def test_at_its_bound_the_queue_lets_the_writer_wait_for_the_reader_and_loses_nothing() -> None:
    tree = RadixTree()
    worker = tree.add_worker(10**6)
    blocks = BlockIndex(tree, worker, 10**6)
    events = passing_blocks(3 * QUEUE_MAX)
    slot = tree.begin_read()
    thread, answers = in_thread(lambda: blocks.apply(events, 1.0))
    while tree.retired_things < QUEUE_MAX and thread.is_alive():
        pass
    assert tree.retired_things == QUEUE_MAX and thread.is_alive(), "the writer went on without room in the queue"
    tree.end_read(slot)
    thread.join()
    assert (answers, tree.retired_things, len(blocks)) == ([len(events)], 0, 0)
    assert (tree.matched([0], worker), tree.stats()["marks"]) == (0, 0)
    blocks.check()
    tree.check()
