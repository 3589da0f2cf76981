"""A recording's file as frames. Owns where one begins and ends, and the difference between a file that was cut and one
that is damaged; what is in a frame is `lines.py`'s.

    file    MAGIC, then frames
    frame   length of the payload (4 bytes), CRC-32 of the payload (4), CRC-32 of these eight bytes (4), the payload;
            little-endian

A process that is killed leaves a frame's beginning at most, and a machine that loses its power may leave zeros: both
are a cut, and all before it counts. Whatever else does not fit is damage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from struct import Struct
from typing import BinaryIO
from zlib import crc32

from ..errors import InvalidInput

MAGIC = b"preble-recording\n"
FRAME_BYTES_MAX = 64 << 20
HEAD = Struct("<III")


class FileCut(Exception):
    """The file ends within a frame."""


def frame(payload: bytes) -> bytes:
    """A payload with its head."""
    return _head(len(payload), crc32(payload)) + payload


def _head(length: int, checksum: int) -> bytes:
    return HEAD.pack(length, checksum, crc32(HEAD.pack(length, checksum, 0)[:8]))


def is_recording(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as recordings do; an empty one does not. Raises OSError."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def payloads(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The payloads of a file, one after the other. Raises `InvalidInput` naming the place, or `FileCut` after the last
    whole one."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise InvalidInput(f"{name} is no recording")
            at = len(MAGIC)
            while head := file.read(HEAD.size):
                if len(head) < HEAD.size or (not any(head) and _is_zero(file)):
                    raise FileCut
                length, checksum, _ = HEAD.unpack(head)
                if head != _head(length, checksum) or length > FRAME_BYTES_MAX:
                    raise InvalidInput(f"{name} is damaged at byte {at}: there is no frame")
                payload = file.read(length)
                if len(payload) < length:
                    raise FileCut
                if crc32(payload) != checksum:
                    raise InvalidInput(f"{name} is damaged at byte {at}: a frame's checksum is wrong")
                yield payload
                at += HEAD.size + length
    except OSError as error:
        raise InvalidInput(f"{name} cannot be read: {error.strerror or error}") from None


def _is_zero(file: BinaryIO) -> bool:
    """Whether the rest of a file is nothing but zeros."""
    return all(not any(part) for part in iter(lambda: file.read(1 << 20), b""))
