"""Cache events as the bytes that engines publish: recorded engines, both forms of an event, namespaces, and payloads
that are damaged or made to harm. What events do to estimates is in test_blocks.py, random histories against a model in
test_blocks_machine.py."""

from __future__ import annotations

import array
import lzma
import math
import random
import re
import struct
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble import AllBlocksCleared, BlockRemoved, BlockStored, GlobalScheduler, ManualClock, WorkerSpec
from preble.errors import InvalidInput, UnknownWorker
from preble.types import BlockKeys
from tests.support.paths import DATA

PROMPT = list(range(100, 112))  # three blocks of four tokens
SIZE = 4
FIELDS = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"]
FIELDS += ["lora_name", "extra_keys", "group_idx"]
POSITIONS = {"BlockStored": FIELDS, "BlockRemoved": ["block_hashes", "medium", "group_idx"], "AllBlocksCleared": []}
Event = dict[str, Any]
Space = tuple[Hashable, ...]
CLEARED = {"type": "AllBlocksCleared"}

# --- what engines write -----------------------------------------------------------------------------------------------


def stored(*hashes: Any, parent: Any = None, start: int = 0, **more: Any) -> Event:
    """Blocks of PROMPT from position `start` on, as a map."""
    tokens = PROMPT[start : start + SIZE * len(hashes)]
    fields = {"block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": tokens, "block_size": SIZE}
    return {"type": "BlockStored", **fields, **more}


def removed(*hashes: Any, **more: Any) -> Event:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **more}


def as_array(event: Event) -> list[Any]:
    """The same event as older engines wrote it: the tag, then the fields in order, absent ones nil."""
    names = POSITIONS[event["type"]]
    return [event["type"], *(event.get(name) for name in names)]


def as_object(event: Event, namespace: Hashable = None) -> Any:
    if event["type"] == "AllBlocksCleared":
        return AllBlocksCleared()
    if event["type"] == "BlockRemoved":
        return BlockRemoved(event["block_hashes"], event.get("medium"))
    parent, space = event["parent_block_hash"], namespace if event["parent_block_hash"] is None else None
    medium = event.get("medium")
    return BlockStored(event["block_hashes"], parent, event["token_ids"], event["block_size"], space, medium)


FORMS: dict[str, Callable[[Event], Any]] = {"map": dict, "array": as_array}
either_form = pytest.mark.parametrize("form", FORMS)


def batch(*events: Any, time: Any = 1.5, rank: Any = 0) -> bytes:
    return bytes(msgpack.packb([time, list(events), rank]))


def packed_bytes(value: Any) -> int:
    return len(msgpack.packb(value))


def scheduler(block_size: int = SIZE) -> GlobalScheduler:
    return GlobalScheduler(
        [WorkerSpec("w", kv_capacity_tokens=10**6, block_size=block_size), "other"], clock=ManualClock(10.0)
    )


def held(sched: GlobalScheduler, prompt: Iterable[int] = PROMPT, namespace: Hashable = None) -> int:
    """Tokens of a prompt that the worker is estimated to cache; `match` leaves a prompt's last token out."""
    return sched.match([*prompt, 7], namespace=namespace).matched_tokens.get("w", 0)


def of_worker(sched: GlobalScheduler, name: str) -> Any:
    return sched.stats()["workers"]["w"][name]


def refused(sched: GlobalScheduler, payload: Any, complaint: str | None = None, **more: Any) -> int | None:
    """Assert that a payload is refused and changes nothing; returns the byte that the error names."""
    before = sched.stats(), held(sched)
    with pytest.raises(InvalidInput, match=complaint) as caught:
        sched.apply_raw("w", payload, **more)
    assert (sched.stats(), held(sched)) == before
    sched.check()
    named = re.match(r"payload byte (\d+)(, event \d+)?: [a-z0]", str(caught.value))
    return int(named[1]) if named else None


# --- recorded engines -------------------------------------------------------------------------------------------------

RECORDINGS = {"vllm032_int": 32, "vllm032_bytes_evict": 32, "sglang0523_20m": 16, "sglang0523_page1_evict": 1}


def recorded_payloads(name: str) -> list[bytes]:
    records = msgpack.unpackb(lzma.decompress((DATA / f"events_{name}.msgpack.xz").read_bytes()))
    return [record["payload"] for record in records if record["kind"] == "event"]


def note_prefixes(prefixes: dict[Any, list[int]], events: list[Event]) -> None:
    """Enter the whole prompt that each stored event ends, under its last block's hash, and those of blocks between."""
    for event in events:
        if event["type"] == "BlockStored":
            prefix, size = prefixes.get(event["parent_block_hash"], []), event["block_size"]
            for i, block_hash in enumerate(event["block_hashes"], 1):
                prefixes[block_hash] = prefix + event["token_ids"][: i * size]


@either_form
@pytest.mark.parametrize("name", RECORDINGS)
def test_recorded_bytes_do_what_the_same_events_do_as_objects(name: str, form: str) -> None:
    """Stats are compared after every batch; every tenth, and before a clearing, each prefix that ended an event too."""
    raw, plain = scheduler(RECORDINGS[name]), scheduler(RECORDINGS[name])
    prefixes: dict[Any, list[int]] = {}
    ends: dict[Any, np.ndarray] = {}
    hits = 0
    for number, payload in enumerate([*recorded_payloads(name), batch(CLEARED)]):
        time, events, rank = msgpack.unpackb(payload)
        if CLEARED in events or number % 10 == 0:
            answers = [(raw.match(end), plain.match(end)) for end in ends.values()]
            assert all(mine == theirs for mine, theirs in answers)
            hits += sum("w" in mine.matched_tokens for mine, _ in answers)
        if form == "array":
            payload = batch(*map(as_array, events), time=time, rank=rank)
        assert raw.apply_raw("w", payload) == plain.apply("w", [as_object(event) for event in events])
        assert raw.stats() == plain.stats()
        note_prefixes(prefixes, events)
        ends.update({e["block_hashes"][-1]: 0 for e in events if e["type"] == "BlockStored"})
        ends = {last: np.array([*prefixes[last], 7], np.int32) for last in ends}
    assert len(ends) >= 80 and hits > 250, (len(ends), hits)
    assert of_worker(raw, "orphan_blocks") == of_worker(raw, "conflicting_blocks") == 0
    raw.check()


EVENTS = st.one_of(
    st.builds(
        lambda hashes, parent, start, medium: stored(*hashes, parent=parent, start=start * SIZE, medium=medium),
        st.lists(st.integers(-3, 3), min_size=1, max_size=1),
        st.none() | st.integers(-3, 3),
        st.integers(0, 2),
        st.sampled_from([None, "GPU", "CPU"]),
    ),
    st.builds(lambda hashes: removed(*hashes, medium="GPU"), st.lists(st.integers(-3, 3), max_size=3)),
    st.just(CLEARED),
)


@settings(max_examples=60)
@given(st.lists(st.lists(EVENTS, max_size=4), max_size=6))
def test_maps_arrays_and_objects_are_the_same_history(history: list[list[Event]]) -> None:
    by_map, by_array, by_object = scheduler(), scheduler(), scheduler()
    for events in history:
        changed = by_object.apply("w", [as_object(event) for event in events])
        assert by_map.apply_raw("w", batch(*events)) == changed
        assert by_array.apply_raw("w", batch(*map(as_array, events))) == changed
    assert by_map.stats() == by_array.stats() == by_object.stats()
    assert held(by_map) == held(by_array) == held(by_object)
    by_map.check()


# --- what events say --------------------------------------------------------------------------------------------------


@either_form
def test_blocks_are_stored_continued_removed_and_cleared(form: str) -> None:
    sched, write = scheduler(), FORMS[form]
    assert sched.apply_raw("w", batch(write(stored(1)), write(stored(2, 3, parent=1, start=4)))) == 2
    assert held(sched) == 12
    assert sched.apply_raw("w", batch(write(removed(3)))) == 1
    assert held(sched) == 8
    assert sched.apply_raw("w", batch(write(CLEARED), write(CLEARED))) == 1
    assert held(sched) == 0 and of_worker(sched, "known_blocks") == 0
    assert sched.stats()["events"] == 5
    sched.check()


def test_an_older_engines_array_ends_with_the_last_field_that_it_knows() -> None:
    sched = scheduler()
    assert all(
        sched.apply_raw("w", batch(as_array(stored(1))[:n], as_array(removed(1))[:2])) == 2 for n in range(5, 11)
    )
    assert sched.apply_raw("w", batch([*as_array(stored(1)), "full_attention", None, {"more": [1]}])) == 1


@either_form
@pytest.mark.parametrize("block_hash", [0, -1, -(2**63), 2**64 - 1, b"h" * 32, b""])
def test_hashes_are_what_the_engine_says_they_are(block_hash: Any, form: str) -> None:
    sched, write = scheduler(), FORMS[form]
    sched.apply_raw("w", batch(write(stored(block_hash)), write(stored(5, parent=block_hash, start=4))))
    assert held(sched) == 8
    sched.apply("w", [BlockRemoved([block_hash])])
    assert held(sched) == 0


@either_form
def test_a_store_said_twice_changes_nothing_more(form: str) -> None:
    sched, payload = scheduler(), batch(FORMS[form](stored(1, 2, 3)))
    assert sched.apply_raw("w", payload) == 1
    before = sched.stats()
    assert sched.apply_raw("w", payload) == 0
    assert sched.stats() == {**before, "events": 2}


@either_form
def test_blocks_without_a_known_parent_are_ignored_and_counted(form: str) -> None:
    sched, write = scheduler(), FORMS[form]
    assert sched.apply_raw("w", batch(write(stored(2, 3, parent=1, start=4)), write(removed(8, 9)))) == 0
    assert of_worker(sched, "orphan_blocks") == 2 and of_worker(sched, "unknown_blocks") == 2
    assert of_worker(sched, "known_blocks") == 0


@pytest.mark.parametrize("event", [["BlockMoved"], ["BlockMoved", 1, {"a": [2]}], {"type": "BlockMoved", "block": [1]}])
def test_tags_that_mean_nothing_are_ignored_and_counted(event: Any) -> None:
    sched = scheduler()
    assert sched.apply_raw("w", batch(event, stored(1), event)) == 1
    assert of_worker(sched, "unknown_events") == 2 and sched.stats()["events"] == 3
    assert held(sched) == 4


def test_fields_may_come_in_any_order_and_unknown_ones_are_passed_over() -> None:
    event = stored(1, 2, session_id="s", lookahead_token_ids=[[1], [2]], locality={"node": 3})
    for seed in range(20):
        items = list(event.items())
        random.Random(seed).shuffle(items)
        sched = scheduler()
        assert sched.apply_raw("w", batch(dict(items))) == 1
        assert held(sched) == 8


@either_form
def test_copies_in_media_and_groups_are_distinguished(form: str) -> None:
    sched, write = scheduler(), FORMS[form]
    copies: list[Event] = [{"medium": "GPU"}, {"medium": "CPU"}, {"medium": "GPU", "group_idx": 3}]
    sched.apply_raw("w", batch(*(write(stored(1, **copy)) for copy in copies)))
    for copy in copies:
        assert held(sched) == 4
        sched.apply_raw("w", batch(write(removed(1, **copy))))
    assert held(sched) == 0


@pytest.mark.parametrize("time", [math.nan, -math.inf, 0, -(2**63)])
@pytest.mark.parametrize("after", [[], [None], ["rank", {"more": 1}]])
def test_the_engines_clock_and_rank_are_not_accepted(time: Any, after: list[Any]) -> None:
    sched, plain = scheduler(), scheduler()
    assert sched.apply_raw("w", msgpack.packb([time, [stored(1)], *after])) == 1
    plain.apply("w", [as_object(stored(1))])
    assert sched.stats() == plain.stats()


def test_an_unknown_worker_is_refused_and_the_others_are_as_before() -> None:
    before = (sched := scheduler()).stats()
    names: list[Any] = ["nobody", None, []]
    for worker in names:
        with pytest.raises(UnknownWorker, match="there are w, other"):
            sched.apply_raw(worker, batch(stored(1)))
    assert sched.stats() == before


# --- namespaces -------------------------------------------------------------------------------------------------------

KEYED: list[tuple[Event, BlockKeys, Space]] = [
    ({"lora_name": "a"}, BlockKeys("a", None, None, ()), ("lora", "a")),
    ({"lora_id": 0}, BlockKeys(None, 0, None, ()), ("lora", 0)),
    ({"lora_id": "x"}, BlockKeys(None, "x", None, ()), ("lora", "x")),
    ({"lora_id": 3, "lora_name": "a"}, BlockKeys("a", 3, None, ()), ("lora", "a")),
    ({"cache_salt": "s"}, BlockKeys(None, None, "s", ()), ("salt", "s")),
    ({"metadata": {"x": [1], "cache_salt": "s"}}, BlockKeys(None, None, "s", ()), ("salt", "s")),
    ({"extra_keys": [["k"], ["k"], ["k"]]}, BlockKeys(None, None, None, ("k",)), ("extra", ("k",))),
    ({"extra_keys": [["k"], None, []]}, BlockKeys(None, None, None, ("k",)), ("extra", ("k",))),
    (
        {"extra_keys": [[["i", 3], b"j"]] * 3},
        BlockKeys(None, None, None, (("i", 3), b"j")),
        ("extra", (("i", 3), b"j")),
    ),
    ({"lora_name": "a", "extra_keys": [["a"]] * 3}, BlockKeys("a", None, None, ()), ("lora", "a")),
    (
        {"lora_name": "a", "extra_keys": [["a", "k"], ["a"], ["a"]]},
        BlockKeys("a", None, None, ("k",)),
        ("lora", "a", "extra", ("k",)),
    ),
    (
        {"lora_name": "a", "cache_salt": "s", "extra_keys": [["k"]] * 3},
        BlockKeys("a", None, "s", ("k",)),
        ("lora", "a", "salt", "s", "extra", ("k",)),
    ),
]
each_keyed = pytest.mark.parametrize(("fields", "keys", "namespace"), KEYED)


@each_keyed
def test_blocks_distinguished_by_more_than_tokens_have_a_namespace(
    fields: Event, keys: BlockKeys, namespace: Space
) -> None:
    sched, plain = scheduler(), scheduler()
    assert keys.namespace() == namespace
    assert sched.apply_raw("w", batch(stored(1, 2, 3, **fields))) == 1
    plain.apply("w", [as_object(stored(1, 2, 3), namespace)])
    assert held(sched) == 0 and held(sched, namespace=namespace) == 12
    assert sched.stats() == plain.stats()
    sched.check()


@each_keyed
def test_the_callers_namespaces_come_before_the_keys(fields: Event, keys: BlockKeys, namespace: Space) -> None:
    sched = scheduler()
    sched.apply_raw("w", batch(stored(1, 2, 3), stored(4, 5, 6, **fields)), namespace="model")
    assert held(sched, namespace="model") == held(sched, namespace=("model", *namespace)) == 12
    assert held(sched) == held(sched, namespace=namespace) == 0


@each_keyed
def test_namespace_of_is_asked_once_for_each_distinct_keys(fields: Event, keys: BlockKeys, namespace: Space) -> None:
    sched, asked = scheduler(), []

    def namespace_of(names: BlockKeys) -> Hashable:
        asked.append(names)
        return "theirs"

    for hashes in ((1, 2, 3), (4, 5, 6)):
        payload = batch(stored(*hashes, **fields), stored(7, 8, 9), removed(*hashes), stored(*hashes, **fields))
        sched.apply_raw("w", payload, namespace_of=namespace_of)
        assert asked == [keys]
    assert held(sched, namespace="theirs") == held(sched) == 12
    assert held(sched, namespace=namespace) == 0
    sched.apply_raw("w", payload, namespace_of=lambda names: "others")
    sched.apply_raw("w", batch(stored(1, 2, 3, lora_name="new")), namespace_of=namespace_of)
    assert asked == [keys, BlockKeys("new", None, None, ())]


def test_answers_of_namespace_of_are_remembered_up_to_4096() -> None:
    sched, asked = scheduler(), []

    def namespace_of(names: BlockKeys) -> Hashable:
        asked.append(names.lora_id)
        return "all"

    for lora in (*range(4096), 0, 4095):
        sched.apply_raw("w", batch(stored(1, lora_id=lora)), namespace_of=namespace_of)
    assert asked == list(range(4096))
    for lora in (4096, 0):
        sched.apply_raw("w", batch(stored(1, lora_id=lora)), namespace_of=namespace_of)
    assert asked == [*range(4097), 0]


def test_a_namespace_of_that_raises_changes_nothing_and_is_asked_again() -> None:
    sched, payload = scheduler(), batch(stored(1, 2), stored(3, lora_name="a"))
    for event in (stored(1), stored(1, lora_name="a"), CLEARED):
        refused(sched, batch(event), "namespace must be hashable", namespace=[])
    for answer in ([], {}):
        refused(sched, payload, "what namespace_of returns must be hashable", namespace_of=lambda names, _=answer: _)
    refused(sched, payload, "namespace_of must be callable or None", namespace_of="lora")
    before = sched.stats()
    answers: list[Any] = [LookupError("no such LoRA"), KeyboardInterrupt(), "found"]

    def namespace_of(names: BlockKeys) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    for error in (LookupError, KeyboardInterrupt):
        with pytest.raises(error):
            sched.apply_raw("w", payload, namespace_of=namespace_of)
        assert sched.stats() == before and held(sched) == 0
        sched.check()
    assert sched.apply_raw("w", payload, namespace_of=namespace_of) == 2
    assert held(sched) == 8 and held(sched, namespace="found") == 4


@pytest.mark.parametrize("fields", [{}, {"lora_name": "a"}])
def test_a_block_with_a_parent_is_in_its_parents_namespace(fields: Event) -> None:
    sched = scheduler()
    sched.apply_raw("w", batch(stored(1, lora_name="a")))
    sched.apply_raw("w", batch(stored(2, 3, parent=1, start=4, **fields)), namespace="ignored")
    assert held(sched, namespace=("lora", "a")) == 12
    assert of_worker(sched, "keyed_blocks") == 0


@pytest.mark.parametrize(
    "fields", [{"lora_name": "b"}, {"lora_id": 3}, {"cache_salt": "s"}, {"extra_keys": [["k"]] * 2}]
)
@pytest.mark.parametrize("first", [{}, {"lora_name": "a"}])
def test_blocks_that_name_other_keys_than_their_parent_are_ignored_and_counted(fields: Event, first: Event) -> None:
    sched = scheduler()
    sched.apply_raw("w", batch(stored(1, **first)))
    assert sched.apply_raw("w", batch(stored(2, 3, parent=1, start=4, **fields))) == 0
    assert of_worker(sched, "keyed_blocks") == 2 and of_worker(sched, "known_blocks") == 1
    sched.check()


MIDDLE: list[tuple[list[Any], int]] = [([None, None, ["image"]], 2), ([None, ["image"], ["image"]], 1)]
MIDDLE += [([[], ["image"], None], 1), ([["k"], ["image"], ["k"]], 1), ([["k"], ["k"], ["k", "image"]], 2)]


@either_form
@pytest.mark.parametrize(("extra", "kept"), MIDDLE)
def test_keys_that_begin_in_the_middle_of_a_prompt_are_counted_and_what_follows_is_ignored(
    extra: list[Any], kept: int, form: str
) -> None:
    sched, write = scheduler(), FORMS[form]
    namespace = ("extra", ("k",)) if extra[0] else None
    assert sched.apply_raw("w", batch(write(stored(1, 2, 3, extra_keys=extra)))) == 1
    assert held(sched, namespace=namespace) == kept * SIZE
    assert of_worker(sched, "keyed_blocks") == 3 - kept and of_worker(sched, "known_blocks") == kept
    sched.apply_raw("w", batch(write(stored(4, parent=3, start=8))))
    assert of_worker(sched, "orphan_blocks") == 1
    sched.check()


@pytest.mark.parametrize(
    "empty", [{"lora_name": ""}, {"cache_salt": ""}, {"extra_keys": []}, {"extra_keys": [[], None, []]}]
)
def test_empty_names_and_keys_are_none(empty: Event) -> None:
    sched = scheduler()
    sched.apply_raw("w", batch(stored(1, 2, 3, **empty)))
    assert held(sched) == 12


@pytest.mark.parametrize(
    "key",
    [
        b"\x81\xa1a\x01",  # a map is no dict key
        b"\xa2\xff\xfe",  # no UTF-8
        b"\x91" * 5000 + b"\xc0",  # nested deeper than the unpacker goes
        b"\xc7\x00\xff",  # a timestamp of no bytes
        b"\xd4\x85\x00",  # an extension of a reserved kind
        b"\x81\x91\xc0\x01",  # a map with a list for a key
    ],
)
def test_keys_that_python_cannot_hold_still_have_a_namespace_of_their_own(key: bytes) -> None:
    sched, asked = scheduler(), dict[BlockKeys, str]()
    event = msgpack.packb(stored(1))
    event = bytes([event[0] + 1]) + event[1:] + msgpack.packb("extra_keys") + b"\x91\x91" + key
    sched.apply_raw("w", b"\x92\x00\x91" + event, namespace_of=lambda names: asked.setdefault(names, "theirs"))
    assert held(sched) == 0 and held(sched, namespace="theirs") == 4
    assert [bool(names.extra_keys) for names in asked] == [True]


# --- damaged bytes ----------------------------------------------------------------------------------------------------

WHOLE = batch(
    stored(1, b"two", lora_name="a", extra_keys=[["a", 5], None], session_id=None),
    as_array(stored(-3, 2**40, 2**64 - 1, medium="CPU")),
    removed(9, b"two", medium="GPU"),
    {"type": "Else", "more": [1.5, True, b"x"]},
    as_array(stored(12, parent=b"two", start=8)),
    ["BlockRemoved", [1], None],
    stored(20, metadata={"cache_salt": "s"}),
    ["AllBlocksCleared"],
    stored(4, 5),
)


def kept() -> GlobalScheduler:
    """A scheduler that knows blocks which the damaged batches speak of."""
    sched = scheduler()
    sched.apply_raw("w", batch(stored(9, 10, 11)))
    return sched


def test_a_batch_cut_anywhere_is_refused_and_changes_nothing() -> None:
    sched = kept()
    for length in range(len(WHOLE)):
        byte = refused(sched, WHOLE[:length])
        assert byte is not None and byte <= length
    assert sched.apply_raw("w", WHOLE) >= 5
    assert held(sched) == 8 and of_worker(sched, "unknown_events") == 1


def test_a_damaged_byte_is_named_or_makes_another_batch() -> None:
    """Each byte in turn: one bit of it flipped, and four other values, most of them heads of other kinds of value."""
    sched, fine, wrong, rng = kept(), 0, 0, random.Random(7)
    heads = (0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xBF, *range(0xC0, 0xE0), 0xFF)
    for at, old in enumerate(WHOLE):
        for new in {old ^ 1 << rng.randrange(8), rng.randrange(256), *rng.sample(heads, 3)} - {old}:
            payload = WHOLE[:at] + bytes([new]) + WHOLE[at + 1 :]
            before = sched.stats()
            try:
                sched.apply_raw("w", payload)
            except InvalidInput as error:
                named = re.match(r"payload byte (\d+)", str(error))
                assert named and int(named[1]) <= len(payload)
                assert sched.stats() == before
                wrong += 1
            else:
                sched.check()
                sched = kept()
                fine += 1
    sched.check()
    assert fine > 300 and wrong > 1000


@given(st.binary(max_size=60))
def test_bytes_that_are_no_batch_are_refused(payload: bytes) -> None:
    assert refused(kept(), b"\xc0" + payload, "batch must be a list") == 0
    assert refused(kept(), WHOLE + b"\x00" + payload, "bytes are left after the batch") == len(WHOLE)


LENGTHS = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
LENGTHS += [b"\xc9\xff\xff\xff\xff\x01", b"\xdc\xff\xff", b"\xde\xff\xff", b"\xdd\x00\x01\x00\x00"]


BEFORE = [b"", b"\x92", b"\x92\x00", b"\x92\x00\x91", b"\x93\x00\x90", b"\x92\x00\x91\x92" + msgpack.packb("Else")]
BEFORE += [b"\x92\x00\x91\x95" + msgpack.packb("BlockStored") + rest for rest in (b"", b"\x91\x01\xc0")]
BEFORE += [b"\x92\x00\x91\x82" + msgpack.packb(name) for name in ("type", "more")]


@pytest.mark.parametrize("claim", LENGTHS)
@pytest.mark.parametrize("before", BEFORE)
def test_a_length_that_is_not_there_is_not_accepted(before: bytes, claim: bytes) -> None:
    payload = before + claim + bytes(64)
    byte = refused(kept(), payload)
    assert byte is not None and byte >= len(before) - 2
    assert refused(kept(), before + b"\xc1" + bytes(64), "0xc1 is no MessagePack") == len(before)


@pytest.mark.parametrize("inner", [b"\x91", b"\x81\x00", b"\xdd\x00\x00\x00\x01"])
def test_values_nested_very_deep_are_passed_over(inner: bytes) -> None:
    deep = inner * 100_000 + b"\xc0"
    event = msgpack.packb(stored(1))
    event = bytes([event[0] + 1]) + event[1:] + msgpack.packb("more") + deep
    sched = scheduler()
    assert sched.apply_raw("w", b"\x93\x00\x92\x92" + msgpack.packb("Else") + deep + event + deep) == 1
    assert of_worker(sched, "unknown_events") == 1
    assert refused(sched, b"\x92\x00" + deep) is not None and refused(sched, deep) is not None
    assert refused(sched, b"\x93\x00\x91" + event + deep[:-1]) is not None


@pytest.mark.parametrize(
    ("value", "byte", "complaint"),
    [
        ([1.5], 0, "batch must be a list of at least time and events"),
        (None, 0, "batch must be"),
        ([None, []], 1, "time must be a number"),
        ([True, []], 1, "time must be a number"),
        ([1, None], 2, "event 0: events must be a list"),
        ([1, ["BlockStored"]], 3, "event 0: events must be a list"),
        ([1, [["X"], 3]], 6, "event 1: events must be a list"),
        ([1, [[]]], 3, "event tag is missing"),
        ([1, [{}]], 3, "event tag is missing"),
        ([1, [{"a": 1}]], 3, "event tag is missing"),
        ([1, [[3]]], 4, "event tag must be a string"),
        ([1, [[b"BlockStored"]]], 4, "event tag must be a string"),
        ([1, [{"type": 3}]], 9, "event tag must be a string"),
        ([1, [{3: "type"}]], 4, "event tag must be a string"),
    ],
)
def test_a_batch_of_another_shape_is_refused_at_its_byte(value: Any, byte: int, complaint: str) -> None:
    assert refused(kept(), msgpack.packb(value), complaint) == byte


WRONG: dict[str, tuple[str, list[Any]]] = {
    "block_hashes": ("a list of ints or bytes", [None, 1, "ab", b"ab", {}, 1.5]),
    "parent_block_hash": ("an int, bytes or nil", ["1", 1.5, [], True]),
    "token_ids": ("a list of ints in", [None, b"\x01\x00\x00\x00", 3, {}]),
    "block_size": ("an int in .1, 2147483647.", [0, -4, 2**31, 4.0, None]),
    "lora_id": ("an int, a string or nil", [1.5, b"a", [], True]),
    "medium": ("a string or nil", [1, b"GPU", []]),
    "lora_name": ("a string or nil", [1, b"a", []]),
    "extra_keys": ("a list with an element per block, or nil", [1, "k", {}, [["k"]]]),
    "group_idx": ("an int in .0, 4294967295. or nil", [-1, 2**32, "0"]),
    "cache_salt": ("a string or nil", [1, b"s", ["s"]]),
    "metadata": ("a map or nil", [1, "s", ["cache_salt"]]),
}


@pytest.mark.parametrize(("field", "wrong"), [(name, wrong) for name in WRONG for wrong in WRONG[name][1]])
def test_a_field_of_the_wrong_type_is_refused_at_its_byte(field: str, wrong: Any) -> None:
    """As the last field of a map, and at its place in an array; the event before it is not applied either."""
    event, complaint = stored(2, 3), f"event 1: {field} must be {WRONG[field][0]}"
    event.pop(field, None)
    payload = batch(stored(1), {**event, field: wrong})
    byte = len(payload) - packed_bytes(wrong) - 1
    assert refused(kept(), payload, complaint) == byte
    if field in FIELDS:
        values = as_array({**event, field: wrong})
        payload = batch(as_array(stored(1)), values)
        rest = values[1 + FIELDS.index(field) :]
        assert refused(kept(), payload, complaint) == len(payload) - sum(map(packed_bytes, rest)) - 1


@pytest.mark.parametrize("field", ["block_hashes", "token_ids"])
@pytest.mark.parametrize("wrong", [None, "1", 1.5, True, [], {}])
def test_an_element_of_the_wrong_type_is_refused_at_its_byte(field: str, wrong: Any) -> None:
    event = stored(1, 2, 3)
    values = event.pop(field)
    payload = batch({**event, field: [*values[:-1], wrong]})
    assert refused(kept(), payload, f"event 0: {field} must be") == len(payload) - packed_bytes(wrong) - 1


@pytest.mark.parametrize("count", [4, 8, 40])
@pytest.mark.parametrize("token", [-1, 2**31, 2**32, 2**63, -(2**63)])
def test_a_token_out_of_range_is_refused_wherever_it_stands(token: int, count: int) -> None:
    for at in range(count):
        for others in (5, 300, 70_000):
            tokens = [others] * count
            tokens[at] = token
            payload = batch({**stored(*range(count // SIZE)), "token_ids": tokens})
            assert refused(kept(), payload, "token_ids must be ints in") == payload.index(msgpack.packb(token))


@pytest.mark.parametrize("field", ["block_hashes", "parent_block_hash", "token_ids", "block_size"])
def test_a_field_that_an_event_cannot_do_without_is_missed(field: str) -> None:
    event = stored(1)
    del event[field]
    first = len(batch(stored(2))) - 1
    assert refused(kept(), batch(stored(2), event), f"event 1: {field} is missing") == first
    short = as_array(stored(1))[: 1 + FIELDS.index(field)]
    assert refused(kept(), batch(stored(2), short), f"event 1: {field} is missing") == first
    for empty in ({"type": "BlockRemoved"}, ["BlockRemoved"]):
        assert refused(kept(), batch(stored(2), empty), "event 1: block_hashes is missing") == first


@pytest.mark.parametrize("field", [name for name in FIELDS if name != "extra_keys"])
def test_a_field_named_twice_is_refused(field: str) -> None:
    event = {"medium": None, "lora_id": None, "lora_name": None, "group_idx": None, **stored(1)}
    packed = msgpack.packb(event)
    packed = bytes([packed[0] + 1]) + packed[1:] + msgpack.packb(field)
    payload = b"\x92\x00\x91" + packed + msgpack.packb(event[field])
    assert refused(kept(), payload, f"{field} is named twice") == len(payload) - packed_bytes(event[field]) - len(field)


@either_form
@pytest.mark.parametrize(
    "changes", [{"token_ids": PROMPT[:7]}, {"block_size": 5}, {"block_hashes": [1]}, {"block_size": 2**31 - 1}]
)
def test_blocks_and_tokens_that_do_not_fit_are_refused(changes: Event, form: str) -> None:
    write = FORMS[form]
    payload = batch(write(stored(3)), write({**stored(1, 2), **changes}))
    byte = refused(kept(), payload, "event 1: token_ids does not fit: block_size times the number")
    assert byte == len(batch(write(stored(3)))) - 1


def test_a_hash_may_have_as_many_bytes_as_any_digest_and_no_more() -> None:
    sched = scheduler()
    assert sched.apply_raw("w", batch(stored(b"h" * 1024))) == 1
    assert refused(sched, batch(stored(b"h" * 1025)), "a block hash has more than") is not None


# --- payloads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [bytes, bytearray, memoryview, lambda raw: array.array("B", raw), lambda raw: np.frombuffer(raw, np.uint8)],
    ids=["bytes", "bytearray", "memoryview", "array", "numpy"],
)
def test_any_contiguous_buffer_is_a_payload_and_is_let_go_of(wrap: Callable[[bytes], Any]) -> None:
    sched = scheduler()
    payload, wrong = wrap(batch(stored(1, 2))), wrap(WHOLE[:-1])
    assert sched.apply_raw("w", payload) == 1
    refused(sched, wrong)
    for buffer in (payload, wrong):
        if isinstance(buffer, bytearray | array.array):
            buffer.append(0)  # a buffer still borrowed could not grow
    assert held(sched) == 8


def test_a_part_of_a_larger_buffer_is_read_to_its_end_and_not_beyond() -> None:
    sched, payload = scheduler(), batch(stored(1))
    around = memoryview(b"\xc1" * 3 + payload + payload)
    assert sched.apply_raw("w", around[3 : 3 + len(payload)]) == 1
    assert refused(sched, around[3 : 2 + len(payload)], "ends inside a value") is not None


@pytest.mark.parametrize("payload", ["text", 3, [1.5, [], 0], object(), {}, None])
def test_what_is_no_buffer_is_refused(payload: Any) -> None:
    refused(kept(), payload, f"payload must be bytes-like, got a {type(payload).__name__}")


def test_a_buffer_with_gaps_and_one_that_is_too_large_are_refused() -> None:
    refused(kept(), memoryview(WHOLE)[::2], "payload is not contiguous")
    refused(kept(), np.zeros((8, 8), np.uint8).T[1:, 1:], "payload is not contiguous")
    (released := memoryview(WHOLE)).release()
    refused(kept(), released, "not readable: operation forbidden on released memoryview")
    refused(kept(), bytes(2**24 + 1), "payload has 16777217 bytes, at most 16777216")
    assert refused(kept(), b"\x92\x00" + b"\xdd" + struct.pack(">I", 2**24 - 7) + bytes(2**24 - 7), "events must") == 7


def test_an_empty_payload_is_no_batch_and_a_batch_without_events_is_one() -> None:
    sched = kept()
    before = sched.stats()
    assert refused(sched, b"", "batch the payload ends inside a value") == 0
    assert sched.apply_raw("w", batch()) == 0
    assert sched.stats() == before
