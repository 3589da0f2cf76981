"""Addresses of workers: what is one, what is said of what is none, and why nobody answers."""

from __future__ import annotations

import re
import socket

import pytest

from preble.errors import InvalidInput
from preble.transport.worker_address import UnknownHost, check_worker_address, find_host, why_silent
from tests.support.transport import asynchronous


@pytest.mark.parametrize(
    "address",
    ["tcp://10.0.0.5:5601", "tcp://[::1]:5601", "tcp://worker-0.fleet:65535", "ipc:///run/preble/a", "inproc://a"]
    + ["http://host", "http://host:30000/", "https://engines.example.com", "http://[fd00::1]:8000/engine/1"]
    + ["http://host:30000#rank=1", "http://v1.example.com", "http://host/v1beta"],
)
def test_an_address_of_every_kind_is_taken(address: str) -> None:
    check_worker_address(address)
    with pytest.raises(InvalidInput, match="has blanks"):
        check_worker_address(f"{address} ")


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("127.0.0.1:5601", "write tcp://127.0.0.1:5601 for a `preble worker`, http://127.0.0.1:5601 for a server"),
        ("[::1]:5601", "write tcp://[::1]:5601 for"),
        ("tcp://a:1,tcp://b:2", "write several addresses apart, such as tcp://a:1 tcp://b:2"),
        ("a,b", "write several addresses apart, such as a b"),
        ("http://host/v1", "write http://host"),
        ("http://host:30000/engine/v1/", "write http://host:30000/engine"),
        ("http://host/v1/chat/completions", "write http://host"),
        ("https://host/generate", "write https://host"),
        ("http://host?model=a", "write http://host"),
        ("http://host#top", "write http://host"),
        ("http://user:word@host", "the `api_key` of its table in `servers`"),
        ("http://host:0", "a port from 1 to 65535"),
        ("http://host:many", "a port from 1 to 65535"),
        ("http:///path", "must be like http://HOST:PORT"),
        ("tcp://host", "write tcp://host:PORT"),
        ("tcp://[::1]", "write tcp://[::1]:PORT"),
        ("tcp://::1:5601", "write tcp://[::1]:5601"),
        ("tcp://*:5601", "write tcp://HOST:5601"),
        ("tcp://:5601", "names no host"),
        ("tcp://a/b:5601", "names no host"),
        ("tcp://host:99999", "a port from 1 to 65535"),
        ("tcp://host:5601/", "nothing after it"),
        ("tcp://a b:1", "has blanks"),
        ("udp://host:1", "which workers do not speak"),
        ("host", "an address is tcp://HOST:PORT"),
        ("ipc://", "names nothing"),
        ("", "must be tcp://HOST:PORT"),
        ("http://" + "a" * 5000 + ":x", "a port"),
    ],
)
def test_what_is_none_is_refused_with_what_to_write_instead(address: str, advice: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(advice)) as refused:
        check_worker_address(address)
    assert len(str(refused.value)) < 400 and "word@" not in str(refused.value)


@asynchronous
async def test_why_nobody_answers_is_found_out() -> None:
    for unknown in ("tcp://no-such-host.invalid:1", "http://no-such-host.invalid", f"tcp://{'a' * 70}.invalid:1"):
        with pytest.raises(UnknownHost, match="unknown host"):
            await find_host(unknown)
        assert "unknown host" in await why_silent(unknown)
    for known in ("tcp://127.0.0.1:1", "tcp://[::1]:1", "ipc:///nowhere", "inproc://a", "http://localhost"):
        await find_host(known)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        assert "connection refused" in await why_silent(address)
        listener.listen()
        assert await why_silent(address) == ""
    assert await why_silent("ipc:///nowhere") == ""
