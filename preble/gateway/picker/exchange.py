"""One exchange with a data plane: what it says of a request and its answer, message by message, and what each is
answered. Owns the order of messages, by the modes in which bodies are sent; what they mean for the request is `pick`'s.

    request body       decided when                          the answer that names the server
    full duplex        its end is here                       to the headers; the body follows, then the trailers
    buffered           it is here                            to the body
    streamed, none     the headers are here: by load alone   to the headers

    answer's body      observed    changed
    full duplex        yes         the event with the usage is taken out, where only the picker asked for it
    streamed, buffered yes         no
    none               no          no: the booking ends with the answer's headers

A data plane that does not say which modes it uses is taken to use full duplex, as the protocol wants.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec
from google.protobuf.message import DecodeError

from ...errors import PrebleError
from ..core.http_errors import ApiError, api_error_of
from .messages import (
    BUFFERED,
    BUFFERED_PARTIAL,
    FULL_DUPLEX,
    NONE,
    REQUEST_BODY,
    REQUEST_HEADERS,
    REQUEST_TRAILERS,
    RESPONSE_BODY,
    RESPONSE_HEADERS,
    RESPONSE_TRAILERS,
    ProcessingResponse,
    body_parts,
    go_on,
    immediate,
    metadata_of,
    said_in,
    set_field,
)
from .parts import PlainParts, Said, read_said
from .pick import Pick, Picker

logger = logging.getLogger("preble.gateway")

Answers: TypeAlias = list[bytes] | Coroutine[Any, Any, list[bytes]]  # at once, or when they are known

DESTINATION = "x-gateway-destination-endpoint"
NAMESPACE = "envoy.lb"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET, SUBSET_NAMESPACE = "x-gateway-destination-endpoint-subset", "envoy.lb.subset_hint"
_WAITING = frozenset({BUFFERED, BUFFERED_PARTIAL})
_SEEN = _WAITING | {FULL_DUPLEX}  # the body, before it is decided where it goes
_GO_ON = {
    kind: go_on(kind)
    for kind in (
        *("request_headers", "request_body", "request_trailers"),
        *("response_headers", "response_body", "response_trailers"),
    )
}


class PickExchange:
    """One stream of messages, taken one after the other. `is_over`: nothing more is to be said. `plain` answers those
    parts of a stream that need not be taken."""

    def __init__(self, picker: Picker) -> None:
        self.is_over = False
        self.plain = PlainParts()
        self._picker = picker
        self._pick: Pick | None = None
        self._request_mode = self._response_mode = FULL_DUPLEX
        self._is_placed = False
        self._parts: list[bytes] = []
        self._total = 0
        self._allowed: Any = None

    def take(self, message: bytes) -> Answers:
        """The answers to a `ProcessingRequest`, all encoded. Raises `DecodeError` for what is none; what is awaited may
        raise anything, see `failed`."""
        said = read_said(message) or said_in(message)
        if said.modes is not None:
            self._request_mode, self._response_mode = said.modes
            self.plain.is_open = self._response_mode == FULL_DUPLEX
        handler = _HANDLERS.get(said.kind)
        if handler is None or said.is_observed:  # it wants no answer, and asks nothing
            return []
        try:
            return handler(self, said)
        except DecodeError:
            raise
        except Exception as error:  # noqa: BLE001  one request must not end those of others
            return self.failed(error)

    def close(self) -> None:
        """The data plane has ended it, or has gone. Idempotent."""
        self.is_over = True
        if self._pick is not None:
            self._pick.close(observed=self._response_mode != NONE)

    def failed(self, error: BaseException) -> list[bytes]:
        """The answer to what was met with an error: its client is refused, and the exchange is over."""
        self.is_over = True
        if not isinstance(error, PrebleError):
            logger.error("a request failed, which is a defect of the picker", exc_info=error)
            error = ApiError(500, "internal error", kind="server_error", code="internal_error")
        answer = api_error_of(error) if self._pick is None else self._pick.refuse(error)
        headers = {"content-type": "application/json", **answer.headers()}
        text = msgspec.json.encode(answer.body())
        return [immediate(answer.status, text, headers, f"preble_{answer.code or 'error'}")]

    # --- the request --------------------------------------------------------------------------------------------------

    def _request_headers(self, said: Said) -> Answers:
        pick = self._pick = Pick(self._picker, said.fields or [], self.plain)
        self._allowed = metadata_of(said, SUBSET_NAMESPACE, SUBSET)
        if not said.end:
            if self._request_mode == FULL_DUPLEX:
                return []
            if self._request_mode in _WAITING:
                return [_GO_ON["request_headers"]]
        return self._place_at(pick, "request_headers", b"" if said.end else None)

    def _request_body(self, said: Said) -> Answers:
        body, pick = said.body, self._pick
        if pick is None or self._request_mode not in _SEEN:
            return [_GO_ON["request_body"]]
        if self._is_placed:  # behind the part that a data plane buffers
            return self._passed("request_body", self._request_mode, body, said.end)
        self._total += len(body)
        pick.hold(self._total)
        self._parts.append(body)
        if self._request_mode == FULL_DUPLEX:
            return self._place_in_full(pick, end=True) if said.end else []
        is_whole = said.end or self._request_mode == BUFFERED
        return self._place_at(pick, "request_body", self._whole() if is_whole else None)

    def _request_trailers(self, said: Said) -> Answers:
        pick = self._pick
        if pick is None or self._request_mode != FULL_DUPLEX or self._is_placed:
            return [_GO_ON["request_trailers"]]
        return self._place_in_full(pick, end=False)

    def _whole(self) -> bytes:
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _place(self, pick: Pick, data: bytes | None) -> None:
        self._is_placed = True
        may_edit = self._request_mode in (FULL_DUPLEX, BUFFERED)
        may_remove = may_edit and self._response_mode == FULL_DUPLEX
        await pick.place(data, self._allowed, may_edit=may_edit, may_remove=may_remove)

    async def _place_at(self, pick: Pick, kind: str, data: bytes | None) -> list[bytes]:
        """The answer of this kind, when it is known where the request goes."""
        await self._place(pick, data)
        answer = self._named(pick, kind)
        pick.sent_on()
        return [answer]

    async def _place_in_full(self, pick: Pick, *, end: bool) -> list[bytes]:
        """The answers that were kept back until the body was whole; without `end` it is trailers that ended it."""
        await self._place(pick, self._whole())
        answers = [self._named(pick, "request_headers")]
        if pick.body or end:
            answers += body_parts("request_body", pick.body, end=end)
        pick.sent_on()
        return answers if end else [*answers, _GO_ON["request_trailers"]]

    def _named(self, pick: Pick, kind: str) -> bytes:
        """The answer that names the server."""
        value = ",".join([pick.destination, *pick.further])
        body = pick.body if kind == "request_body" and pick.is_edited else None
        if body is None and not pick.headers and not pick.removed:
            return _naming_alone(kind, value)
        return _naming(kind, value, pick.headers, pick.removed, body)

    # --- the answer ---------------------------------------------------------------------------------------------------

    def _response_headers(self, said: Said) -> Answers:
        pick = self._pick
        if pick is None:
            return [_GO_ON["response_headers"]]
        served_by = metadata_of(said, NAMESPACE, SERVED)
        if isinstance(served_by, str) and pick.is_elsewhere(served_by):
            return self._follow(pick, served_by, said)
        return self._answered(pick, said)

    async def _follow(self, pick: Pick, destination: str, said: Said) -> list[bytes]:
        await pick.follow(destination)
        return self._answered(pick, said)

    def _answered(self, pick: Pick, said: Said) -> list[bytes]:
        pick.answered(said.fields or [])
        if said.end:
            pick.whole()
        return [_GO_ON["response_headers"]]

    def _response_body(self, said: Said) -> list[bytes]:
        pick, part = self._pick, said.body
        if pick is not None:
            part = pick.saw(part)
            if said.end:
                part += pick.whole()
        return self._passed("response_body", self._response_mode, part, said.end)

    def _response_trailers(self, said: Said) -> list[bytes]:
        rest = b"" if self._pick is None else self._pick.whole()
        answers = [_GO_ON["response_trailers"]]
        if rest and self._response_mode == FULL_DUPLEX:
            return [*body_parts("response_body", rest, end=False), *answers]
        return answers

    def _passed(self, kind: str, mode: int, part: bytes, end: bool) -> list[bytes]:
        """The answer to a part of a body; in full duplex, of which nothing goes on, there is none."""
        if mode != FULL_DUPLEX:
            return [_GO_ON[kind]]
        return body_parts(kind, part, end=end) if part or end else []


def _naming(kind: str, value: str, headers: Mapping[str, str], removed: Iterable[str], body: bytes | None) -> bytes:
    """An answer of this kind that names servers, sets and removes headers, and puts another body in place of what
    came."""
    answer = ProcessingResponse()
    common = getattr(answer, kind).response
    common.clear_route_cache = True
    set_field(common.header_mutation, DESTINATION, value)
    for name, text in headers.items():
        set_field(common.header_mutation, name, text)
    common.header_mutation.remove_headers.extend(removed)
    if body is not None:
        common.body_mutation.body = body
        set_field(common.header_mutation, "content-length", str(len(body)))
    fields = answer.dynamic_metadata.fields[NAMESPACE].struct_value.fields
    fields[DESTINATION].string_value = value
    return bytes(answer.SerializeToString())


@lru_cache(1024)
def _naming_alone(kind: str, value: str) -> bytes:
    """One that does nothing else, of which there are as many as servers."""
    return _naming(kind, value, {}, (), None)


_HANDLERS: dict[int, Callable[[PickExchange, Said], Answers]] = {
    REQUEST_HEADERS: PickExchange._request_headers,
    REQUEST_BODY: PickExchange._request_body,
    REQUEST_TRAILERS: PickExchange._request_trailers,
    RESPONSE_HEADERS: PickExchange._response_headers,
    RESPONSE_BODY: PickExchange._response_body,
    RESPONSE_TRAILERS: PickExchange._response_trailers,
}
