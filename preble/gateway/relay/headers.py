"""Which header fields of a request go on to a server, and which of its answer go back. Owns the rules.

Fields of one connection (RFC 9110, 7.6.1, and those that `Connection` names) go no further. What the gateway says
itself is not also said by others: lengths, request ids, its own fields, the trace's name, which pages may ask. A
client's key for the gateway is never shown to a server: `Authorization` goes on only where the gateway asks for no keys
and has none for the server. Bodies are asked for uncompressed, as the gateway reads them in passing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...transport.engine_servers.http_pool import Fields

_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings"}
)
_OURS = frozenset(
    {b"host", b"content-length", b"accept-encoding", b"expect", b"x-request-id", b"traceparent", b"tracestate"}
    | {b"origin"}
)
KEYS = frozenset({b"authorization", b"x-api-key", b"api-key", b"cookie"})
_DROPPED = _HOP | _OURS
_DROPPED_WITH_KEYS = _DROPPED | KEYS
_NOT_BACK = _HOP | {b"content-length", b"date", b"server", b"x-request-id"}
_OWN_PREFIXES = (b"x-preble-", b"access-control-")  # which pages may read an answer is not the server's to say
_RANK = b"x-data-parallel-rank"


def request_head(
    target: bytes,
    host: bytes,
    given: Iterable[tuple[bytes, bytes]],
    length: int | None,
    *,
    method: bytes = b"POST",
    hide_keys: bool,
    own: Sequence[tuple[bytes, bytes]],
    ranked: bool = False,
) -> bytes:
    """The head of a request that is passed on. `given` are the client's fields with small names, `own` the gateway's;
    `length` None: there is no body. `ranked`: the rank is the gateway's to choose."""
    dropped = _DROPPED_WITH_KEYS if hide_keys else _DROPPED
    parts = [method, b" ", target, b" HTTP/1.1\r\nhost: ", host, b"\r\naccept-encoding: identity\r\n"]
    named: frozenset[bytes] = frozenset()
    for name, value in given:
        if name in dropped:
            if name == b"connection" and value not in (b"keep-alive", b"close"):
                named |= _names(value)
        elif not (ranked and name == _RANK):
            parts += (name, b": ", value, b"\r\n")
    if named:
        kept = [(name, value) for name, value in given if name not in named]
        return request_head(
            target, host, [(n, v) for n, v in kept if n != b"connection"], length,
            method=method, hide_keys=hide_keys, own=own, ranked=ranked,
        )  # fmt: skip
    for name, value in own:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"\r\n" if length is None else b"content-length: %d\r\n\r\n" % length)
    return b"".join(parts)


def answer_headers(given: Fields, own: Mapping[str, str]) -> Fields:
    """The fields of an answer that go back, and the gateway's `own`; the length is said by who sends the body."""
    named: frozenset[bytes] = frozenset()
    for name, value in given:
        if name == b"connection" and value not in (b"keep-alive", b"close"):
            named |= _names(value)
    back = [
        (name, value)
        for name, value in given
        if name not in _NOT_BACK and name not in named and not name.startswith(_OWN_PREFIXES)
    ]
    back += [(name.encode(), value.encode("latin-1")) for name, value in own.items()]
    return back


def value_of(given: Fields, name: bytes) -> bytes:
    """The value of a field, b"" where it is not there."""
    for one, value in given:
        if one == name:
            return value
    return b""


def _names(value: bytes) -> frozenset[bytes]:
    return frozenset(one.strip().lower() for one in value.split(b",")) - {b"close", b"keep-alive"}
