"""Engines' cache events as objects: recorded engines against a naive replay and an independent reader, both forms,
namespaces, load frames, and bytes that are damaged. What the scheduler does with the same bytes is in
kv_index/test_apply_raw.py, sockets are in test_kv_event_subscriber.py."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preble import AllBlocksCleared, BlockRemoved, BlockStored, GlobalScheduler, ManualClock, WorkerSpec
from preble._kv_index.event_batch import EventBatch
from preble.engines.kv_event_listener import RankListener
from preble.errors import InvalidInput, ProtocolError
from preble.transport.engine_servers.kv_event_codec import decode_load
from tests.support.events import read_events
from tests.support.paths import DATA, SHARED

CAPTURES = SHARED / "engines-cpu" / "captures"
BLOCK_SIZES = {"vllm032_int": 32, "vllm032_bytes_evict": 32, "sglang0523_20m": 16, "sglang0523_page1_evict": 1}
PROMPT = list(range(100, 112))
each_recording = pytest.mark.parametrize("name", BLOCK_SIZES)


# --- recorded engines -------------------------------------------------------------------------------------------------


def payloads(name: str) -> list[bytes]:
    """The batches of a recorded engine, in order."""
    records = msgpack.unpackb(lzma.decompress((DATA / f"events_{name}.msgpack.xz").read_bytes()))
    return [record["payload"] for record in records if record["kind"] == "event"]


class NaiveCache:
    """What an engine has cached, replayed the plain way: the tokens of every block present, by its hash."""

    def __init__(self) -> None:
        self.tokens: dict[Any, tuple[int, ...]] = {}  # of every block ever stored
        self.parent: dict[Any, Any] = {}
        self.present: set[Any] = set()

    def replay(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.present.clear()
        elif isinstance(event, BlockRemoved):
            self.present -= set(event.block_hashes)
        else:
            parent = event.parent_block_hash
            for i, block_hash in enumerate(event.block_hashes):
                self.tokens[block_hash] = tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
                self.parent[block_hash] = parent
                self.present.add(block_hash)
                parent = block_hash

    def chain(self, block_hash: Any) -> Iterator[Any]:
        """The blocks of a prompt that end with this one, last first."""
        while block_hash is not None:
            yield block_hash
            block_hash = self.parent[block_hash]

    def prompt(self, block_hash: Any) -> list[int]:
        """The tokens of a prompt that end with this block."""
        return [token for block in reversed([*self.chain(block_hash)]) for token in self.tokens[block]]

    def cached_tokens(self, block_hash: Any) -> int:
        """How much of that prompt is there, from its start without a hole."""
        cached = 0
        for block in reversed([*self.chain(block_hash)]):
            if block not in self.present:
                break
            cached += len(self.tokens[block])
        return cached


@each_recording
def test_every_recorded_event_is_decoded_and_the_index_is_that_of_a_naive_replay(name: str) -> None:
    scheduler = GlobalScheduler(
        [WorkerSpec("w", kv_capacity_tokens=10**7, block_size=BLOCK_SIZES[name])], clock=ManualClock(1.0)
    )
    naive, ends, compared = NaiveCache(), dict[Any, None](), 0
    batches = payloads(name)
    for number, payload in enumerate(batches):
        written = msgpack.unpackb(payload)[1]
        decoded = EventBatch(payload)
        events = decoded.events()
        assert (events, decoded.unknown_events, decoded.keyed_blocks) == (events, 0, 0) == read_events(payload)
        assert [type(event).__name__ for event in events] == [event["type"] for event in written]
        scheduler.apply("w", events)
        for event in events:
            naive.replay(event)
            if isinstance(event, BlockStored):
                ends[event.block_hashes[-1]] = None
        if number % 25 == 24 or number >= len(batches) - 2:
            compared += len(ends)
            for end in ends:
                estimated = scheduler.match([*naive.prompt(end), 7]).matched_tokens.get("w", 0)
                assert estimated == naive.cached_tokens(end)
    assert compared > 100
    worker = scheduler.stats()["workers"]["w"]
    assert worker["orphan_blocks"] == worker["conflicting_blocks"] == worker["keyed_blocks"] == 0


@pytest.mark.parametrize("name", [name for name in BLOCK_SIZES if name.startswith("sglang")])
def test_sglang_hashes_are_a_sha256_chain_over_the_tokens(name: str) -> None:
    """Recomputed from the decoded tokens: a token lost or moved anywhere would change every hash after it."""
    digests: dict[Any, bytes] = {None: b""}
    blocks = 0
    for payload in payloads(name):
        for event in EventBatch(payload).events():
            if not isinstance(event, BlockStored):
                continue
            digest = digests[event.parent_block_hash]
            for i, block_hash in enumerate(event.block_hashes):
                tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
                digest = hashlib.sha256(digest + b"".join(token.to_bytes(4, "little") for token in tokens)).digest()
                assert int.from_bytes(digest[:8], "big", signed=True) == block_hash
                digests[block_hash] = digest
                blocks += 1
    assert blocks >= 635


@each_recording
def test_captured_frames_are_the_recorded_payloads_in_the_order_of_their_numbers(name: str) -> None:
    """The repository keeps the payloads; where the captures with all frames are at hand, the two agree."""
    path = CAPTURES / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"no captures at {CAPTURES}; set PREBLE_SHARED")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    frames = [[bytes.fromhex(part) for part in record["frames"]] for record in records if record["kind"] == "event"]
    assert [payload for _, _, payload in frames] == payloads(name)
    numbers = [int.from_bytes(number, "big") for _, number, _ in frames]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_captured_load_frames_are_read() -> None:
    path = CAPTURES / "sglang0523_load_frames.json"
    if not path.exists():
        pytest.skip(f"no captures at {CAPTURES}; set PREBLE_SHARED")
    reports = [decode_load(bytes.fromhex(payload)) for _, _, payload in json.loads(path.read_text())]
    assert {report.capacity_tokens for report in reports} == {20_000}
    assert max(report.waiting for report in reports) == 5 and max(report.running for report in reports) >= 3
    assert any(report.waiting_uncached_tokens == 2000 for report in reports)


# --- both generations -------------------------------------------------------------------------------------------------


def batch(*events: Any) -> bytes:
    return bytes(msgpack.packb([1.5, list(events), 0]))


def stored(*hashes: Any, parent: Any = None, **more: Any) -> dict[str, Any]:
    """Blocks of four tokens, as a map."""
    fields = {"block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": PROMPT[: 4 * len(hashes)]}
    return {"type": "BlockStored", **fields, "block_size": 4, **more}


ARRAYS: list[tuple[list[Any], Any]] = [
    (["BlockStored", [5], None, PROMPT[:4], 4, None], BlockStored((5,), None, tuple(PROMPT[:4]), 4)),
    (["BlockStored", [-5], 3, PROMPT[:4], 4, None, "CPU"], BlockStored((-5,), 3, tuple(PROMPT[:4]), 4, None, "CPU")),
    (
        ["BlockStored", [b"h"], None, PROMPT[:4], 4, 1, "GPU", "a", [["a"]], 2, "full_attention", None],
        BlockStored((b"h",), None, tuple(PROMPT[:4]), 4, ("lora", "a"), "GPU/2"),
    ),
    (
        ["BlockStored", [5], None, PROMPT[:4], 4, None, "GPU", {"cache_salt": "s"}],
        BlockStored((5,), None, tuple(PROMPT[:4]), 4, ("salt", "s"), "GPU"),
    ),
    (["BlockRemoved", [5, b"h"]], BlockRemoved((5, b"h"))),
    (["BlockRemoved", [5], "GPU", 2, {"more": 1}], BlockRemoved((5,), "GPU/2")),
    (["AllBlocksCleared"], AllBlocksCleared()),
]


@pytest.mark.parametrize(("written", "event"), ARRAYS)
def test_positional_arrays_of_every_length_that_engines_wrote(written: list[Any], event: Any) -> None:
    assert EventBatch(batch(written)).events() == [event] == read_events(batch(written))[0]


def test_a_map_and_an_array_may_stand_in_one_batch_and_unknown_tags_are_counted() -> None:
    decoded = EventBatch(batch(stored(1), ["BlockMoved", 3], {"type": "Else"}, ["BlockRemoved", [1], None]))
    assert decoded.events() == [BlockStored((1,), None, tuple(PROMPT[:4]), 4), BlockRemoved((1,))]
    assert decoded.unknown_events == 2 and len(decoded) == 4


HASHES = st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=40)
PARTS = st.sampled_from([None, [], ["k"], ["a"], ["a", "k"], [["image", 3], b"x"]])
MORE = {
    "lora_id": st.none() | st.integers(0, 2),
    "medium": st.sampled_from([None, "GPU", "CPU"]),
    "lora_name": st.sampled_from([None, "", "a"]),
    "extra_keys": st.none(),
    "group_idx": st.none() | st.integers(0, 2**32 - 1),
}


@st.composite
def engine_events(draw: Any) -> Any:
    """An event as an engine may write it, as a map or an array of some length."""
    hashes = draw(st.lists(HASHES, min_size=1, max_size=4))
    if draw(st.booleans()):
        fields = {"block_hashes": hashes, "medium": draw(MORE["medium"]), "group_idx": draw(MORE["group_idx"])}
        return ["BlockRemoved", *fields.values()] if draw(st.booleans()) else {"type": "BlockRemoved", **fields}
    event = stored(*hashes, parent=draw(st.none() | HASHES), token_ids=list(range(4 * len(hashes))))
    event |= {name: draw(values) for name, values in MORE.items()}
    event["extra_keys"] = draw(st.none() | st.lists(PARTS, min_size=len(hashes), max_size=len(hashes)))
    if draw(st.booleans()):
        return event | {"cache_salt": draw(st.sampled_from([None, "", "s"]))}
    return ["BlockStored", *[event[name] for name in event if name != "type"]][: draw(st.integers(6, 10))]


@given(st.lists(engine_events(), max_size=4), st.sampled_from([None, "model"]))
def test_events_are_what_an_independent_reader_makes_of_the_bytes(events: list[Any], space: Any) -> None:
    decoded = EventBatch(batch(*events))
    made = decoded.events(namespace=space)
    assert (made, decoded.unknown_events, decoded.keyed_blocks) == read_events(batch(*events), space)


# --- namespaces: objects do what the bytes do -------------------------------------------------------------------------

KEYED: list[tuple[list[dict[str, Any]], int]] = [
    ([stored(1, 2, lora_name="a")], 0),
    ([stored(1, lora_id=0), stored(2, parent=1, lora_id=0)], 0),
    ([stored(1, cache_salt="s"), stored(2, 3, parent=1, cache_salt="s")], 0),
    ([stored(1, 2, 3, extra_keys=[["k"], None, []])], 0),
    ([stored(1, 2, 3, extra_keys=[None, None, ["image"]])], 1),
    ([stored(1, 2, 3, extra_keys=[["k"], ["image"], ["k"]])], 2),
    ([stored(1, 2, 3, lora_name="a", extra_keys=[["a", "k"], ["a"], ["a"]])], 0),
    ([stored(1), stored(2, 3, parent=1, extra_keys=[None, ["image"]])], 1),
    ([stored(1), stored(2, 3, parent=1, extra_keys=[["image"], ["image"]])], 2),
]


@pytest.mark.parametrize("space", [None, "model"])
@pytest.mark.parametrize(("events", "keyed"), KEYED)
def test_blocks_distinguished_by_more_than_tokens_are_where_the_compiled_decoder_puts_them(
    events: list[dict[str, Any]], keyed: int, space: Any
) -> None:
    payload = batch(*events)
    raw, plain = (
        GlobalScheduler([WorkerSpec("w", kv_capacity_tokens=10**6, block_size=4)], clock=ManualClock(1.0))
        for _ in range(2)
    )
    raw.apply_raw("w", payload, namespace=space)
    decoded = EventBatch(payload)
    objects = decoded.events(namespace=space)
    plain.apply("w", objects)
    assert read_events(payload, space) == (objects, 0, keyed)
    assert decoded.keyed_blocks == raw.stats()["workers"]["w"]["keyed_blocks"] == keyed
    spaces = {event.namespace for event in objects if isinstance(event, BlockStored)}
    for prompt in (PROMPT[:4] * 2, PROMPT):
        for namespace in {*spaces, None, "model"}:
            assert plain.match([*prompt, 7], namespace=namespace) == raw.match([*prompt, 7], namespace=namespace)


@pytest.mark.parametrize("key", [1.5, {"a": 1}, [[[[["deep"]]]]]])
def test_keys_that_are_no_namespace_leave_their_blocks_out_and_are_counted(key: Any) -> None:
    taken: list[Any] = []
    listener = RankListener(0, lambda rank, events: taken.extend(events))
    listener.on_payload(batch(stored(1, 2, extra_keys=[[key], None]), stored(3)))
    assert taken == [BlockStored((3,), None, tuple(PROMPT[:4]), 4)]


def test_blocks_are_left_out_where_no_namespace_is_given_to_what_they_name() -> None:
    def refuse(keys: Any) -> Any:
        raise InvalidInput(str(keys))

    decoded = EventBatch(batch(stored(1, 2, lora_name="a"), stored(3)))
    assert len(decoded.events(namespace_of=refuse)) == 1 and decoded.keyed_blocks == 2
    assert len(decoded.events()) == 2 and decoded.keyed_blocks == 0


# --- damaged bytes ----------------------------------------------------------------------------------------------------


@given(st.binary(max_size=80))
def test_any_bytes_are_a_batch_or_invalid_input(payload: bytes) -> None:
    for whole in (payload, b"\x92\x00\x91" + payload, b"\x92\x00\x91\x82\xa4type\xabBlockStored" + payload):
        try:
            EventBatch(whole).events()
        except InvalidInput:
            continue


NOT_FOR_PYTHON = (b"\x91" * 5000 + b"\xc0", b"\xa2\xff\xfe", b"\xc7\x00\xff")


def test_what_python_cannot_hold_is_passed_over_or_leaves_its_blocks_out() -> None:
    event = BlockStored((1,), None, tuple(PROMPT[:4]), 4)
    whole, keyed = batch(stored(1, more=None)), batch(stored(1, extra_keys=[[None]]))
    for value in NOT_FOR_PYTHON:
        assert EventBatch(whole.replace(b"\xa4more\xc0", b"\xa4more" + value)).events() == [event]
        decoded = EventBatch(keyed.replace(b"\xaaextra_keys\x91\x91\xc0", b"\xaaextra_keys\x91\x91" + value))
        assert decoded.events() == [] and decoded.keyed_blocks == 1
    medium = batch(stored(1, medium="??")).replace(b"??", b"\xff\xfe")
    with pytest.raises(InvalidInput, match="medium is no UTF-8"):
        EventBatch(medium).events()


@given(st.binary(max_size=60) | st.lists(st.integers() | st.none() | st.text()).map(lambda v: msgpack_or(v)))
def test_any_bytes_are_a_load_report_or_a_protocol_error(payload: bytes) -> None:
    try:
        report = decode_load(payload)
    except ProtocolError:
        return
    assert min(report.running, report.waiting, report.rank) >= 0


def msgpack_or(values: list[Any]) -> bytes:
    """A load frame of these values; those too large for the format are left out."""
    fits = [value for value in values if not isinstance(value, int) or -(2**63) <= value < 2**64]
    return bytes(msgpack.packb(["LoadStat", *fits]))


@pytest.mark.parametrize(
    "values",
    [[], ["Load", 0, 0, 0, 1, 0], ["LoadStat", 0, 0, 0, 1], ["LoadStat", 0, -1, 0, 1, 0], ["LoadStat", True] + [0] * 5],
)
def test_a_load_frame_of_another_shape_is_refused(values: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="load frame"):
        decode_load(msgpack.packb(values))


def test_a_load_frame_that_is_too_large_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="at most 4096"):
        decode_load(bytes(5000))
    assert Counter(vars_of(decode_load(msgpack.packb(["LoadStat", 1, 2, 3, 4, None])))) == Counter(
        running=1, waiting=2, used_tokens=3, capacity_tokens=4
    )


def vars_of(report: Any) -> dict[str, int]:
    """The fields that are not zero."""
    return {name: getattr(report, name) for name in report.__slots__ if getattr(report, name)}
