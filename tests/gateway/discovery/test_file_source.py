"""Discovery from a file: what it may hold, and a file that is changed, half written, or gone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from preble.errors import TransportError
from preble.gateway.core.config_tables import DiscoveryTable, ServerFields
from preble.gateway.discovery.file_source import FILE_BYTES_MAX, FileSource, servers_of
from preble.transport.engine_servers.server_info import ServerOptions
from tests.support.discovery import asked
from tests.support.transport import asynchronous, until


def table(path: Path | str = "servers.yaml", **fields: Any) -> DiscoveryTable:
    return DiscoveryTable(source="file", path=str(path), look_seconds=0.05, **fields)


def read(text: str, name: str = "servers.yaml", **fields: Any) -> dict[str, Any]:
    """Options by address."""
    found = servers_of(text.encode(), Path(name), table(**fields), {"KEY_OF_B": "the-key-of-b"})
    return {address: one.options for address, one in found.servers.items()}


def test_a_list_of_tables_and_addresses_as_the_configuration_has_them() -> None:
    text = "[http://a:1, {url: http://b:2, rank: 1, api_key_variable: KEY_OF_B}, tcp://c:3]"
    found = read(text, server=ServerFields(api_key="the-key-of-all", model="m"))
    assert found == {
        "http://a:1": ServerOptions(api_key="the-key-of-all", model="m"),
        "http://b:2#rank=1": ServerOptions(api_key="the-key-of-b", model="m"),
        "tcp://c:3": None,
    }
    assert read(json.dumps(["http://a:1"]), "servers.json") == {"http://a:1": ServerOptions()}
    assert read("[]") == {}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{url: http://a:1}", "must hold a list"),
        ("", "must hold a list"),
        ("[http://a:1, b:2]", "entry 1: .*write tcp://b:2"),
        ("[{url: http://a:1, modle: m}]", "entry 0: .*modle"),
        ("[{url: tcp://a:1}]", "entry 0: .*url must be http"),
        ("[{url: http://a:1, api_key_variable: NOT_SET}]", "entry 0: .*no variable NOT_SET"),
        ("[http://a:1, http://a:1]", "entry 1: http://a:1 is named twice"),
        ("[http://a:1, 7]", "entry 1"),
        ("[http://a:1", "servers.yaml: "),
        ("[" * 100_000, "servers.yaml: line 1, column 33: lists and tables are nested more than 32 deep"),
    ],
)
def test_a_file_that_is_wrong_anywhere_is_not_taken(text: str, complaint: str) -> None:
    with pytest.raises(TransportError, match=complaint):
        read(text)


def test_a_file_has_a_bound() -> None:
    with pytest.raises(TransportError, match="has more than"):
        read("#" * (FILE_BYTES_MAX + 1))


@asynchronous
async def test_a_file_that_changes_is_followed_and_one_that_is_gone_or_half_written_is_not(tmp_path: Path) -> None:
    file = tmp_path / "servers.yaml"
    file.write_text("[http://a:1]")
    async with asked(FileSource(table(file), time.monotonic, lambda: None)) as followed:
        source, failures = followed.source, followed.failures
        await until(lambda: followed.addresses == ["http://a:1"], "not read")
        new = tmp_path / "new"
        new.write_text("[http://a:1, http://b:2]")
        os.replace(new, file)
        await until(lambda: len(followed.addresses) == 2, "not read again")
        file.write_text("[http://a:1, http://")
        await until(lambda: failures, "no failure")
        file.unlink()
        await until(lambda: "cannot be read" in failures[-1], "it is gone")
        assert len(followed.addresses) == 2, "nobody is lost"
        file.write_text("[http://c:3]")
        await until(lambda: followed.addresses == ["http://c:3"], "it is back")
        version, confirmed_at = source.version, source.confirmed_at
        await until(lambda: source.confirmed_at != confirmed_at, "it does not look again")
        assert source.version == version
