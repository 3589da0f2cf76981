"""Clients behind proxies: whose word is taken, and which of the addresses counts."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs starlette: pip install 'preble[gateway]'")
from starlette.datastructures import Headers

from preble.errors import InvalidConfig
from preble.gateway.core.config_sources import load
from preble.gateway.proxies import TrustedProxies

TRUSTED = TrustedProxies(["10.0.0.0/8", "fd00::/8", "192.168.1.1"])


def seen(peer: str | None, *forwarded: str, proto: str | None = None, door: str = "network") -> tuple[Any, str]:
    """The client and the scheme that count."""
    raw = [(b"x-forwarded-for", one.encode()) for one in forwarded]
    raw += [] if proto is None else [(b"x-forwarded-proto", proto.encode())]
    scope: dict[str, Any] = {"client": None if peer is None else (peer, 7), "scheme": "http", "preble.door": door}
    TRUSTED.look_through(scope, Headers(raw=raw))
    return scope["client"] and scope["client"][0], scope["scheme"]


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("9.9.9.9", ["1.1.1.1"], "9.9.9.9"),  # anybody can write that
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["1.1.1.1"], "1.1.1.1"),
        ("10.0.0.1", ["6.6.6.6, 1.1.1.1"], "1.1.1.1"),  # the left one is the client's own invention
        ("10.0.0.1", ["6.6.6.6", "1.1.1.1"], "1.1.1.1"),
        ("10.0.0.1", ["6.6.6.6, 1.1.1.1, 10.2.2.2 ,192.168.1.1"], "1.1.1.1"),
        ("10.0.0.1", ["10.3.3.3, 10.2.2.2"], "10.3.3.3"),
        ("10.0.0.1", ["1.1.1.1, nonsense, 10.2.2.2"], "10.2.2.2"),
        ("10.0.0.1", ["1.1.1.1, "], "10.0.0.1"),
        ("10.0.0.1", ["1.1.1.1:5000"], "1.1.1.1"),
        ("10.0.0.1", ["[2001:db8::1]:5000"], "2001:db8::1"),
        ("10.0.0.1", ["2001:db8::1"], "2001:db8::1"),
        ("fd00::1", ["1.1.1.1"], "1.1.1.1"),
        ("::ffff:10.0.0.1", ["1.1.1.1"], "1.1.1.1"),
        ("192.168.1.2", ["1.1.1.1"], "192.168.1.2"),
    ],
)
def test_the_right_most_address_that_is_no_trusted_proxy_counts(peer: str, forwarded: list[str], client: str) -> None:
    assert seen(peer, *forwarded)[0] == client


def test_the_scheme_is_taken_from_trusted_proxies_only() -> None:
    assert seen("10.0.0.1", proto="https")[1] == "https"
    assert seen("10.0.0.1", proto="gopher, HTTPS")[1] == "https"
    assert seen("10.0.0.1", proto="https, gopher")[1] == "http"
    assert seen("9.9.9.9", proto="https")[1] == "http"


def test_who_connects_to_the_unix_socket_is_believed_where_that_is_said() -> None:
    assert seen(None, "1.1.1.1", door="unix")[0] is None
    scope: dict[str, Any] = {"client": None, "scheme": "http", "preble.door": "unix"}
    TrustedProxies(["unix"]).look_through(scope, Headers({"x-forwarded-for": "1.1.1.1"}))
    assert scope["client"] == ("1.1.1.1", 0)
    scope = {"client": None, "scheme": "http", "preble.door": "process"}
    TrustedProxies(["unix"]).look_through(scope, Headers({"x-forwarded-for": "1.1.1.1"}))
    assert scope["client"] is None


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("TRUSTED_PROXIES", "10.0.0.0/33", "trusted_proxies: a proxy is an address"),
        ("TRUSTED_PROXIES", "proxy.example.com", "trusted_proxies: a proxy is an address"),
        ("TRUSTED_PROXIES", "10.0.0.1/8", "trusted_proxies: a proxy is an address"),
        ("ALLOWED_ORIGINS", "chat.example.com", "allowed_origins: an origin is like"),
        ("ALLOWED_ORIGINS", "https://chat.example.com/page", "allowed_origins: an origin is like"),
        ("ALLOWED_ORIGINS", "*", "allowed_origins: [*] needs keys"),
        ("TLS_KEY", "key.pem", "tls_certificate and tls_key belong together"),
        ("UNIX_SOCKET", "/" + "a" * 107, "unix_socket: a path has at most 107 bytes"),
    ],
)
def test_what_is_none_is_named(name: str, value: str, complaint: str) -> None:
    with pytest.raises(InvalidConfig, match=complaint):
        load(None, {f"PREBLE_{name}": value}, {})
