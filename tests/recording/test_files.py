"""The file: what is written comes back, a cut one up to its last whole record, a damaged one not at all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble import Recording
from preble.errors import InvalidInput
from preble.recording import RecordedRequest, RecordedWorker
from preble.recording.frames import HEAD, MAGIC, frame, payloads
from preble.recording.lines import VERSION, MissingLine, RequestLine, framed, header_line

WORKERS = (RecordedWorker(id="a", kv_capacity_tokens=1000), RecordedWorker(id="b", kv_capacity_tokens=9, engine="vllm"))
NAMES = st.sampled_from(["", "00112233aabbccdd", "0102030405060708"])
SECONDS = st.none() | st.floats(0, 1e6)


def chained(prompt: list[int], block: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Names that are equal as far as prompts are, to the block."""
    ends = [*range(block, len(prompt), block), len(prompt)]
    return np.array([hash(tuple(prompt[:end])) & (2**64 - 1) for end in ends], np.uint64)


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """Some requests that share prefixes."""
    block = draw(st.integers(1, 4))
    requests = []
    for _ in range(draw(st.integers(0, 8))):
        prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
        requests.append(
            RecordedRequest(
                arrival_seconds=draw(st.floats(0, 1e6)),
                prompt_tokens=len(prompt),
                blocks=chained(prompt, block),
                output_tokens=draw(st.integers(0, 9)),
                worker=draw(st.sampled_from(["", "a", "b"])),
                sent_seconds=draw(SECONDS),
                first_token_seconds=draw(SECONDS),
                end_seconds=draw(SECONDS),
                max_new_tokens=draw(st.none() | st.integers(0, 9)),
                cached_tokens=draw(st.none() | st.integers(0, 9)),
                matched_tokens=draw(st.none() | st.integers(0, 9)),
                session=draw(NAMES),
                agent=draw(NAMES),
                parent_session=draw(NAMES),
                tenant=draw(NAMES),
                deadline_seconds=draw(SECONDS),
                priority=draw(st.sampled_from(["interactive", "batch"])),
                error=draw(st.sampled_from(["", "cancelled", "WorkerLost"])),
            )
        )
    requests.sort(key=lambda one: one.arrival_seconds)
    return Recording(
        workers=WORKERS, requests=tuple(requests), block_size=block, policy="e2", missing=draw(st.integers(0, 3))
    )


def plain(recording: Recording) -> dict[str, Any]:
    """All of it but the name, comparable."""
    found = {one.name: getattr(recording, one.name) for one in dataclasses.fields(recording) if one.name != "name"}
    requests = [
        {one.name: getattr(request, one.name) for one in dataclasses.fields(request)} for request in recording.requests
    ]
    for request in requests:
        request["blocks"] = request["blocks"].tolist()
    return {**found, "requests": requests}


def small() -> Recording:
    """Three requests, two of which share a block."""
    prompts = [[1, 2, 3], [1, 2, 4, 5], [7]]
    requests = [
        RecordedRequest(
            arrival_seconds=float(at), prompt_tokens=len(prompt), blocks=chained(prompt, 2), output_tokens=2, worker="b"
        )
        for at, prompt in enumerate(prompts)
    ]
    return Recording(workers=WORKERS, requests=tuple(requests), block_size=2)


@settings(max_examples=60, deadline=None)
@given(recordings())
def test_what_is_written_comes_back(tmp_path_factory: pytest.TempPathFactory, recording: Recording) -> None:
    file = tmp_path_factory.mktemp("files") / "r"
    recording.write(file)
    assert plain(Recording.read(file)) == plain(recording)


def test_a_cut_file_is_read_up_to_its_last_whole_record(tmp_path: Path) -> None:
    small().write(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    ends, at = [], len(MAGIC)
    while at < len(data):
        at += HEAD.size + HEAD.unpack(data[at : at + HEAD.size])[0]
        ends.append(at)
    cut = tmp_path / "cut"
    for size in range(ends[0], len(data)):
        cut.write_bytes(data[:size])
        found = Recording.read(cut)
        whole = sum(end <= size for end in ends) - 3  # the header and two workers
        assert len(found) == max(0, whole)
        assert found.is_cut is (size not in ends)
    cut.write_bytes(data + bytes(100))
    assert len(Recording.read(cut)) == 3 and Recording.read(cut).is_cut, "zeros are what a lost page leaves"


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    small().write(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    damaged = tmp_path / "damaged"
    for at in range(len(data)):
        for bit in (1, 128):
            changed = bytearray(data)
            changed[at] ^= bit
            damaged.write_bytes(changed)
            with pytest.raises(InvalidInput, match="damaged|no recording"):
                Recording.read(damaged)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no recording"),
        (b"some other file, of another kind", "is no recording"),
        (MAGIC, "is empty"),
        (MAGIC + framed(MissingLine(3)), "is of version None"),
        (MAGIC + frame(b"\x93\x00\x02\x01"), "is of version 2"),
        (MAGIC + frame(b"\xc1"), "is of version None"),
        (MAGIC + framed(header_line("r", 0, b"k", 16, 0.0, "e2")) + frame(b"\x91\x09"), "frame 1"),
    ],
)
def test_what_is_no_recording_is_refused_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(InvalidInput, match=f"file.*{said}|{said}"):
        Recording.read(file)


def line(**changed: Any) -> RequestLine:
    """A line of a request of two blocks."""
    values: dict[str, Any] = dict.fromkeys(RequestLine.__struct_fields__)
    values |= {"arrival_seconds": 1.0, "worker": -1, "prompt_tokens": 32, "output_tokens": 1, "parent": -1, "shared": 0}
    values |= {"names": bytes(16), "session": b"", "parent_session": b"", "agent": b"", "tenant": b""}
    return RequestLine(**{**values, "priority": "interactive", "error": "", **changed})


@pytest.mark.parametrize(
    "wrong",
    [
        {"worker": 0},
        {"worker": -2},
        {"names": bytes(15)},
        {"names": bytes(8)},
        {"parent": 0, "shared": 1},
        {"parent": -1, "shared": 1},
        {"prompt_tokens": 0},
        {"output_tokens": -1},
        {"arrival_seconds": float("nan")},
        {"end_seconds": -1.0},
        {"priority": "urgent"},
    ],
)
def test_lines_that_cannot_be_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    file = tmp_path / "file"
    head = MAGIC + framed(header_line("r", 0, b"k", 16, 0.0, "e2"))
    file.write_bytes(head + framed(line()))
    assert len(Recording.read(file)) == 1
    file.write_bytes(head + framed(line(**wrong)))
    with pytest.raises(InvalidInput):
        Recording.read(file)


def test_further_fields_of_a_line_are_passed_over(tmp_path: Path) -> None:
    head, own = framed(header_line("r", 0, b"k", 16, 0.0, "e2")), framed(line())
    file = tmp_path / "file"
    payload = own[HEAD.size :]
    assert payload[:3] == b"\xdc\x00\x15", "an array of 21 elements: the tag and 20 fields"
    file.write_bytes(MAGIC + head + frame(b"\xdc\x00\x16" + payload[3:] + b"\x01"))
    assert len(Recording.read(file)) == 1


def test_golden_bytes_of_version_1_are_read_for_ever(tmp_path: Path) -> None:
    assert VERSION == 1
    file = tmp_path / "golden"
    file.write_bytes(bytes.fromhex(GOLDEN))
    found = Recording.read(file)
    assert (found.policy, found.block_size, found.missing, found.started_unix_seconds) == ("e2", 2, 5, 1000.5)
    assert found.workers == (RecordedWorker(id="a", kv_capacity_tokens=99, block_size=4, max_running=7, engine="vllm"),)
    one, other = found.requests
    assert one.blocks.tolist() == [1, 2] and other.blocks.tolist() == [1, 3, 4]
    assert (other.worker, other.prompt_tokens, other.cached_tokens, other.session) == ("a", 5, 2, "aabb")
    assert (other.sent_seconds, other.first_token_seconds, other.end_seconds) == (1.5, 2.0, None)
    assert (other.error, other.priority, other.deadline_seconds) == ("WorkerLost", "batch", 9.0)
    assert b"".join(map(bytes, payloads(file)))


GOLDEN = (
    "707265626c652d7265636f7264696e670a35000000fce253431c319ab09a0001a2727200c4086b6b6b6b6b6b6b6b02cb408f440000000000"
    "a26532a5302e312e3091af6172726976616c5f7365636f6e64730c000000b4b460f3268d83239601a161630407a4766c6c6d580000009a7e"
    "daba8704103fdc001502cb3ff0000000000000cb3ff4000000000000cb3ff8000000000000cb4008000000000000ff0403c0c0c0ff00c410"
    "01000000000000000200000000000000c400c400c400c400c0ab696e746572616374697665a003000000c012915a2342a6619203055e0000"
    "00a67762e543199b9bdc001502cb3ff4000000000000cb3ff8000000000000cb4000000000000000c00005000a02040001c4100300000000"
    "0000000400000000000000c402aabbc400c400c400cb4022000000000000a56261746368aa576f726b65724c6f7374"
)


def test_files_of_other_recordings_are_not_mixed(tmp_path: Path) -> None:
    small().write(tmp_path / "one")
    dataclasses.replace(small(), requests=()).write(tmp_path / "other")
    with pytest.raises(InvalidInput, match="not of the same recording"):
        Recording.read(tmp_path / "one", tmp_path / "other")
    with pytest.raises(InvalidInput, match="cannot be read"):
        Recording.read(tmp_path / "none")
    with pytest.raises(InvalidInput, match="cannot be written"):
        small().write(tmp_path / "no" / "folder")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_size": 3}, "blocks"),
        ({"block_size": 0}, "block_size"),
        ({"missing": -1}, "missing"),
        ({"workers": WORKERS * 2}, "twice"),
        ({"workers": WORKERS[:1]}, "'b' is not among"),
        ({"requests": small().requests[::-1]}, "before"),
    ],
)
def test_a_recording_that_cannot_be_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        dataclasses.replace(small(), **change)
