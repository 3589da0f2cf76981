"""What engines send on their event sockets, frame by frame. Owns sequence numbers, replays and SGLang's load frames;
sockets are `kv_event_subscriber`'s, and the events in a payload are decoded by `preble._kv_index.decode`.

    SUB     [topic, number, payload]           numbers count from 0 in each life of the publisher
    DEALER  ["", number] -> ["", topic, number, payload] ... ["", "", -1, ""]       (older engines leave the topic out)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec

from ...errors import ProtocolError

PAYLOAD_MAX_BYTES = 1 << 24  # what the decoder takes
_LOAD_BYTES_MAX = 4096
_END = b"\xff" * 8
_TWO_OR_MORE_AND_DOUBLE = struct.Struct(">BBd")


def published(parts: list[bytes]) -> tuple[int, bytes]:
    """(number, payload) of a published message. Raises `ProtocolError` for what is none."""
    if len(parts) != 3 or len(parts[1]) != 8 or len(parts[2]) > PAYLOAD_MAX_BYTES or parts[1] == _END:
        raise ProtocolError("a published batch must be a topic, a number and a payload")
    return int.from_bytes(parts[1], "big"), parts[2]


def replay_request(first: int) -> list[bytes]:
    """The question for the batch of a number and all after it."""
    return [b"", first.to_bytes(8, "big")]


def replayed(parts: list[bytes]) -> tuple[int, bytes] | None:
    """(number, payload) of a replayed message, None at the replay's end. Raises `ProtocolError` for what is neither."""
    if len(parts) not in (3, 4) or parts[0] or len(parts[-2]) != 8 or len(parts[-1]) > PAYLOAD_MAX_BYTES:
        raise ProtocolError("a replayed batch must be an empty frame, perhaps a topic, a number and a payload")
    return None if parts[-2] == _END else (int.from_bytes(parts[-2], "big"), parts[-1])


def time_of(payload: bytes) -> float:
    """When the engine made a batch; long ago if it does not say."""
    if len(payload) < _TWO_OR_MORE_AND_DOUBLE.size:
        return float("-inf")
    head, kind, seconds = _TWO_OR_MORE_AND_DOUBLE.unpack_from(payload)
    is_time = 0x92 <= head <= 0x9F and kind == 0xCB and seconds == seconds
    return float(seconds) if is_time else float("-inf")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One frame of SGLang's load feed: requests, and tokens of the KV cache, of one data-parallel rank.

    `used_tokens` are those that running requests hold, `waiting_uncached_tokens` what waiting ones will prefill,
    `done_tokens` what was computed since the engine's start; 0 where it is not said.
    """

    running: int
    waiting: int
    used_tokens: int
    capacity_tokens: int
    rank: int
    waiting_uncached_tokens: int = 0
    done_tokens: int = 0


def decode_load(payload: bytes) -> LoadReport:
    """One load frame, `["LoadStat", running, waiting, tokens, max tokens, rank, waiting uncached, ...]`.

    Raises `ProtocolError` naming what is wrong.
    """
    if len(payload) > _LOAD_BYTES_MAX:
        raise ProtocolError(f"load frame has {len(payload)} bytes, at most {_LOAD_BYTES_MAX} are allowed")
    try:
        values = msgspec.msgpack.decode(payload)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"load frame is no MessagePack: {type(error).__name__}") from None
    if not isinstance(values, list) or len(values) < 6 or values[0] != "LoadStat":
        raise ProtocolError("load frame must be a list that starts with LoadStat and five numbers")
    numbers = [0 if value is None else value for value in values[1:7]]
    if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
        raise ProtocolError("load frame: requests and tokens must be ints that are not negative")
    return LoadReport(*numbers)
