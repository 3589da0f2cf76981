"""The file of a source's servers: what is in it, who may read it, and what is refused."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from preble.errors import InvalidInput, TransportError
from preble.gateway.core.config_tables import DiscoveryTable, ServerFields
from preble.gateway.discovery import kept_servers
from preble.gateway.discovery.kept_servers import AGE_SECONDS_MAX, read_kept, write_kept
from preble.gateway.discovery.known_servers import FoundServer, PodName
from preble.transport.engine_servers.server_info import ServerOptions

NAME, AT = "kubernetes:app=vllm", 1.7e9
USUAL = ServerOptions(api_key="the-key-of-all", model="m")


def table(path: Path, **fields: Any) -> DiscoveryTable:
    server = ServerFields(api_key="the-key-of-all", model="m")
    return DiscoveryTable(
        source="kubernetes", selector="app=vllm", keep=str(path / "kept.json"), server=server, **fields
    )


def test_servers_come_back_with_what_is_said_of_each_and_no_key_is_written(tmp_path: Path) -> None:
    said = ServerOptions(api_key="the-key-of-all", model="n", block_size=32, events_endpoint="tcp://10.0.0.2:5557")
    servers = [
        FoundServer("http://10.0.0.1:8000", USUAL, pod=PodName("llm", "a")),
        FoundServer("http://10.0.0.2:8000#rank=1", said),
        FoundServer("tcp://10.0.0.3:5601"),
    ]
    keyed = FoundServer("http://10.0.0.4:8000", ServerOptions(api_key="a-key-of-its-own", model="m"))
    write_kept(table(tmp_path), NAME, [*servers, keyed], AT)
    file = tmp_path / "kept.json"
    assert "key-of" not in file.read_text() and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["kept.json"]
    kept = read_kept(table(tmp_path), NAME, AT + 90.0)
    assert kept is not None and kept.servers == servers and kept.age_seconds == 90.0


def test_what_the_table_says_now_holds_for_them(tmp_path: Path) -> None:
    write_kept(table(tmp_path), NAME, [FoundServer("http://10.0.0.1:8000", USUAL)], AT)
    now = DiscoveryTable(
        source="kubernetes", selector="app=vllm", keep=str(tmp_path / "kept.json"), server=ServerFields(api_key="new")
    )
    kept = read_kept(now, NAME, AT)
    assert kept is not None and kept.servers[0].options == ServerOptions(api_key="new")


def test_no_more_are_taken_than_there_may_be(tmp_path: Path) -> None:
    servers = [FoundServer(f"http://10.0.0.{number}:8000", USUAL) for number in range(9)]
    write_kept(table(tmp_path), NAME, servers, AT)
    kept = read_kept(table(tmp_path, servers_max=4), NAME, AT - 7.0)
    assert kept is not None and kept.servers == servers[:4]
    assert kept.age_seconds == 0.0, "a clock that was set back"


def test_without_a_file_there_is_nothing(tmp_path: Path) -> None:
    assert read_kept(table(tmp_path), NAME, AT) is None


def written(**changes: Any) -> dict[str, Any]:
    """A file's content."""
    whole = {"format": "preble-servers", "version": 1, "source": NAME, "confirmed_at": AT}
    return {**whole, "servers": [{"address": "http://10.0.0.1:8000"}], **changes}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is damaged"),
        (b"{", "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (b"\xff", "is damaged"),
        (written(format="other"), "is no list of servers of version 1"),
        (written(version=2), "is no list of servers of version 1"),
        (written(source="dns:x"), "is of dns:x, not of kubernetes:app=vllm"),
        (written(confirmed_at=AT - AGE_SECONDS_MAX - 3600.0), "is 25 hours old, the limit is 24"),
        (written(confirmed_at="now"), "is damaged"),
        (written(more=1), "is damaged"),
        (written(servers=[{"address": ""}]), "is damaged"),
        (written(servers=[{"address": "10.0.0.1"}]), "kept.json: .*has no scheme"),
        (written(servers=[{"address": "http://a:1", "options": {"api_key": "x"}}]), "options that are not kept"),
        (written(servers=[{"address": "tcp://a:1", "options": {"model": "x"}}]), "options that are not kept"),
        (written(servers=[{"address": "http://a:1", "options": {"block_size": 0}}]), "is damaged.*block_size"),
        (written(servers=[{"address": "http://a:1", "options": {"model": 7}}]), "is damaged"),
        (written(servers=[{"address": "http://a:1", "pod": ["a"]}]), "is damaged"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_reason(tmp_path: Path, content: Any, complaint: str) -> None:
    (tmp_path / "kept.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(InvalidInput, match=complaint):
        read_kept(table(tmp_path), NAME, AT)


def test_a_file_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who writes it would choose where requests go, and the servers' key with them."""
    write_kept(table(tmp_path), NAME, [], AT)
    monkeypatch.setattr(kept_servers.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InvalidInput, match="kept.json belongs to another user"):
        read_kept(table(tmp_path), NAME, AT)


def test_bounds_hold_and_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kept(table(tmp_path), NAME, [FoundServer("http://10.0.0.1:8000", USUAL)], AT)
    monkeypatch.setattr(kept_servers, "FILE_BYTES_MAX", 10)
    with pytest.raises(TransportError, match="the limit is 10"):
        write_kept(table(tmp_path), NAME, [], AT)
    with pytest.raises(InvalidInput, match="has more than 10 bytes"):
        read_kept(table(tmp_path), NAME, AT)
    monkeypatch.undo()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_servers.os, "fsync", full)
    with pytest.raises(TransportError, match="cannot be written: No space left"):
        write_kept(table(tmp_path), NAME, [], AT)
    assert os.listdir(tmp_path) == ["kept.json"]
    kept = read_kept(table(tmp_path), NAME, AT)
    assert kept is not None and len(kept.servers) == 1


def test_what_an_earlier_process_of_the_same_number_left_is_no_obstacle(tmp_path: Path) -> None:
    """In a container every process has the same one."""
    (tmp_path / f".kept.json.{os.getpid()}").write_text("half")
    write_kept(table(tmp_path), NAME, [], AT)
    assert os.listdir(tmp_path) == ["kept.json"]
