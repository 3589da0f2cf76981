"""A recording that grows: bounded, rotated, read after whatever ended its process, and never waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preble import Recording, WorkerSpec
from preble.errors import InvalidConfig
from preble.recording import EndedRequest, RecordingWriter
from preble.recording import writer as writer_module
from preble.types import Claim, SessionHint
from tests.support.paths import ROOT
from tests.support.transport import HANG_SECONDS

KEY = bytes(range(32))
A = WorkerSpec("a", kv_capacity_tokens=1000, labels={"engine": "sglang"})


def opened(path: Path, **more: Any) -> RecordingWriter:
    """A writer whose clock was 100 when it began."""
    return RecordingWriter(path, **{"now": 100.0, "started_unix_seconds": 1e9, "policy": "e2", "key": KEY, **more})


def ended(number: int, tokens: int = 40, **more: Any) -> EndedRequest:
    """A request like no other."""
    prompt = np.arange(tokens, dtype=np.int32) + 1000 * number
    values: dict[str, Any] = {"sent_at": 101.0 + number, "first_token_at": 102.0 + number, "ended_at": 103.0 + number}
    return EndedRequest(prompt, None, 100.5 + number, 7, **{**values, "worker": A, **more})


def test_all_that_is_known_of_a_request_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "r"
    writer = opened(file)
    session, claim = SessionHint("s", "p", "g"), Claim("t", 2.0, 3.0, "batch")
    more = {"max_new_tokens": 9, "cached_tokens": 16, "matched_tokens": 20, "client": "c"}
    writer.offer(ended(0, session=session, claim=claim, **more))
    writer.offer(ended(1, worker=None, error="NoWorkers", sent_at=None, first_token_at=None))
    writer.close()
    assert writer.stats() == {"written": 2, "missing": 0, "waiting": 0}
    found = Recording.read(file)
    assert (found.policy, found.started_unix_seconds, found.is_cut) == ("e2", 1e9, False)
    assert [(worker.id, worker.kv_capacity_tokens, worker.engine) for worker in found.workers] == [
        ("a", 1000, "sglang")
    ]
    one, other = found.requests
    assert (one.arrival_seconds, one.sent_seconds, one.first_token_seconds, one.end_seconds) == (0.5, 1.0, 2.0, 3.0)
    assert (one.worker, one.prompt_tokens, one.output_tokens, len(one.blocks)) == ("a", 40, 7, 3)
    assert (one.max_new_tokens, one.cached_tokens, one.matched_tokens) == (9, 16, 20)
    assert (one.priority, one.deadline_seconds, one.finished) == ("batch", 3.0, True)
    names = [one.session, one.parent_session, one.agent, one.tenant]
    assert len(set(names)) == 4 and all(len(name) == 16 for name in names)
    assert (other.worker, other.error, other.sent_seconds, other.finished) == ("", "NoWorkers", None, False)


def test_no_text_no_name_and_no_key_is_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "r"
    writer = opened(file)
    prompt = np.frombuffer(b"the secret of the client and the" * 4, np.int32)
    session, claim = SessionHint("session-of-mary"), Claim("tenant-acme", 1.0, None, "interactive")
    writer.offer(EndedRequest(prompt, ("salt", "pepper"), 101.0, 1, client="key-of-mary", session=session, claim=claim))
    writer.close()
    data = file.read_bytes()
    assert not any(word in data for word in (b"secret", b"mary", b"acme", b"pepper", KEY, KEY[:8]))


def test_a_name_that_several_conversations_may_have_is_no_session(tmp_path: Path) -> None:
    writer = opened(tmp_path / "r")
    writer.offer(ended(0, session=SessionHint("user", shared=True)))
    writer.close()
    assert Recording.read(tmp_path / "r").requests[0].session == ""


def test_files_are_bounded_rotated_and_read_together(tmp_path: Path) -> None:
    file = tmp_path / "r"
    writer = opened(file, max_bytes=3 * 4096, files=3)
    for number in range(300):
        writer.offer(ended(number))
    writer.close()
    files = sorted(tmp_path.iterdir())
    assert [one.name for one in files] == ["r", "r.1", "r.2"]
    assert all(one.stat().st_size < 4096 + 300 for one in files)
    found = Recording.read(file)
    assert 30 < len(found) < 300
    last = [one.arrival_seconds for one in found.requests]
    assert last == [0.5 + number for number in range(300 - len(found), 300)], "the oldest went"
    assert len(found.workers) == 1 and found.missing == 0
    assert len(Recording.read(files[1])) < len(found), "each can be read by itself"


def test_a_file_that_cannot_be_rotated_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the next request began it anew."""
    file, replace, calls = tmp_path / "r", os.replace, 0

    def fails_once(*names: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise PermissionError("not now")
        replace(*names)

    monkeypatch.setattr(writer_module.os, "replace", fails_once)
    writer = opened(file, files=2, max_bytes=2 * 4096)
    for number in range(50):
        writer.offer(ended(number))
    writer.close()
    found = Recording.read(file)
    assert len(found) + writer.stats()["missing"] == 50
    assert (calls, found.missing) == (2, 1), "the next request has rotated it"


def test_a_restart_keeps_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "r"
    for key in (KEY, KEY, None):
        writer = opened(file, key=key)
        writer.offer(ended(0))
        writer.close()
    assert len(Recording.read(file)) == 1, "with another key it is another recording"
    assert len(Recording.read(tmp_path / "r.1")) == 1
    together = Recording.read(tmp_path / "r.1", tmp_path / "r.2")
    assert len(together) == 2 and together.requests[0].blocks.tolist() == together.requests[1].blocks.tolist()


def test_clocks_of_several_files_become_one(tmp_path: Path) -> None:
    for name, now, unix in (("one", 100.0, 1e9), ("two", 100.0, 1e9 + 60.0)):
        writer = opened(tmp_path / name, now=now, started_unix_seconds=unix)
        writer.offer(ended(0))
        writer.close()
    found = Recording.read(tmp_path / "two", tmp_path / "one")
    assert [one.arrival_seconds for one in found.requests] == [0.5, 60.5]
    assert [one.end_seconds for one in found.requests] == [3.0, 63.0]


def test_what_cannot_be_a_recording_is_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("mine")
    with pytest.raises(InvalidConfig, match="no recording"):
        opened(file)
    assert file.read_text() == "mine"
    with pytest.raises(InvalidConfig, match="cannot be written"):
        opened(tmp_path / "no" / "folder")
    for wrong in ({"files": 0}, {"max_bytes": 10}, {"block_size": 0}, {"key": b"short"}):
        with pytest.raises(InvalidConfig):
            opened(tmp_path / "r", **wrong)


class SlowFile:
    """A disk that does nothing until it may."""

    def __init__(self, file: Any, may: threading.Event) -> None:
        self._file, self._may = file, may

    def write(self, data: bytes) -> int:
        assert self._may.wait(HANG_SECONDS)
        return int(self._file.write(data))

    def close(self) -> None:
        self._file.close()


def test_who_offers_never_waits_and_the_file_says_how_many_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "WAITING_TOKENS_MAX", 400)
    file, may = tmp_path / "r", threading.Event()
    writer = opened(file)
    writer._file = SlowFile(writer._file, may)
    for number in range(50):
        writer.offer(ended(number))  # would hang here
    assert 0 < writer.stats()["missing"] < 50
    may.set()
    writer.close()
    missing = writer.stats()["missing"]
    found = Recording.read(file)
    assert (len(found) + found.missing, found.missing) == (50, missing)
    writer.offer(ended(51))
    assert writer.stats()["missing"] == missing + 1, "it is closed"


def test_at_the_queue_bound_requests_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "WAITING_MAX", 5)
    may = threading.Event()
    writer = opened(tmp_path / "r")
    writer._file = SlowFile(writer._file, may)
    for number in range(20):
        writer.offer(ended(number))
    assert writer.stats()["missing"] >= 14
    may.set()
    writer.close()
    found = Recording.read(tmp_path / "r")
    assert len(found) + found.missing == 20


class FullFile:
    """A disk that takes the first half of some writes, by their number, and is full."""

    def __init__(self, file: Any, full_at: set[int]) -> None:
        self._file, self._full_at, self._writes = file, full_at, 0

    def write(self, data: bytes) -> int:
        is_full = self._writes in self._full_at
        self._writes += 1
        return int(self._file.write(data[: len(data) // 2] if is_full else data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


# Writes: the worker, request 0, request 1, ...; after one that failed, how many are missing comes first.
@pytest.mark.parametrize(("full_at", "kept"), [({0, 1, 2}, [2, 2]), ({2}, [0, 2, 2, 2]), ({1}, [1, 2, 2, 2])])
def test_after_a_full_disk_the_file_is_whole_and_goes_on(tmp_path: Path, full_at: set[int], kept: list[int]) -> None:
    file = tmp_path / "r"
    writer = opened(file)
    writer._file = FullFile(writer._file, full_at)
    for number in (0, 1, 2, 2, 2):
        writer.offer(ended(number))
    writer.close()
    found = Recording.read(file)
    assert not found.is_cut
    assert found.missing + len(found) == 5
    assert [one.arrival_seconds - 0.5 for one in found.requests][-len(kept) :] == kept[-len(found) :]
    assert found.requests[-1].blocks.tolist() == found.requests[-2].blocks.tolist(), "none refers to what was lost"


WRITE_FOR_EVER = """
import sys
from tests.recording.test_writer import ended, opened
from pathlib import Path
writer = opened(Path(sys.argv[1]), max_bytes=1 << 20)
number = 0
while True:
    writer.offer(ended(number))
    number += 1
    if number == 50:
        print("going", flush=True)
"""


def test_a_process_killed_in_the_middle_leaves_all_whole_records(tmp_path: Path) -> None:
    file = tmp_path / "r"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WRITE_FOR_EVER, str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"going\n"
        while file.stat().st_size < 20_000:
            assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(HANG_SECONDS)
    found = Recording.read(file)
    assert len(found) > 50 or found.missing
    assert found.workers[0].id == "a"
