"""Uploads: a body of form fields and files (multipart/form-data, RFC 7578) as it came. Owns how it is looked over:
which fields it has, where their text stands, and what of the file tells it from others.

It is read strictly, since a server must not read another model out of it than the gateway, which checks who may use
which: no part without one plain name, no field twice, nothing before the first part. Files are hashed, not kept apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

import msgspec

from ..core.http_errors import wrong
from .body import VALUE_BYTES_MAX, Fields, Once, RelayedBody
from .endpoints import Endpoint

MEDIA_TYPE = "multipart/form-data"
PARTS_MAX = 128
HEAD_BYTES_MAX = 4096  # of one part
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"\\]{1,70})"|([^\s;"]{1,70}))\s*(?:;|$)', re.IGNORECASE)
_ONE = rb'([\w-]+\*?)=(?:"((?:[^"\\\r\n]|\\[^"\r\n])*)"|([^\s";]+))'
_DISPOSITION = re.compile(
    rb"content-disposition:[ \t]*form-data((?:[ \t]*;[ \t]*" + _ONE + rb")+)[ \t]*", re.IGNORECASE
)
_PARAMETER = re.compile(_ONE)
_YES = frozenset({"true", "1", "on", "yes", "t", "y"})


@dataclass
class UploadBody(RelayedBody):
    """An upload, and what routing reads of it. `spans` is where the text of each small field stands in `data`."""

    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    digest: bytes = b""  # SHA-256 of its files
    file_bytes: int = 0

    @Once
    def stream(self) -> bool:
        """Whether the answer is to come as events."""
        return self.endpoint.streams and (self.text("stream") or "").lower() in _YES

    def edited(self, changes: Mapping[str, bytes]) -> bytes:
        """The body with other values (JSON texts) of some of its fields; of those that it has."""
        found = [(*self.spans[name], msgspec.json.decode(value, type=str)) for name, value in changes.items()]
        parts: list[bytes] = []
        at = 0
        for start, end, text in sorted(found):
            parts += (self.data[at:start], text.encode())
            at = end
        return b"".join((*parts, self.data[at:])) if parts else self.data


def read_form(data: bytes, endpoint: Endpoint, content_type: str) -> UploadBody:
    """Look over an upload. Raises `ApiError` 400 for one that is not what `content_type` says, or can be read in more
    than one way."""
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        raise wrong("the content type names no boundary")
    fields: Fields = {}
    spans: dict[str, tuple[int, int]] = {}
    hashed, size = sha256(), 0
    names: set[str] = set()
    for name, is_file, start, end in _parts(data, b"--" + (boundary[1] or boundary[2]).encode("latin-1", "replace")):
        if name in names and not name.endswith("[]"):
            raise wrong(f"the form has a field twice: {name[:64]!r}")
        names.add(name)
        if is_file:
            hashed.update(memoryview(data)[start:end])
            size += end - start
        elif end - start <= VALUE_BYTES_MAX:
            spans[name] = start, end
            text = data[start:end].decode("utf-8", "replace")
            fields[name] = msgspec.Raw(msgspec.json.encode(text))
    if "model" in names and "model" not in fields:
        raise wrong("model: must be a short text", "model")
    return UploadBody(data, endpoint, fields, spans, hashed.digest(), size)


def _parts(data: bytes, delimiter: bytes) -> Iterator[tuple[str, bool, int, int]]:
    """(name, whether it is a file, where its content begins, where it ends) of every part."""
    if not data.startswith(delimiter + b"\r\n"):
        raise wrong("the form does not begin with its boundary")
    at = len(delimiter) + 2
    line = b"\r\n" + delimiter
    for _ in range(PARTS_MAX):
        start = data.find(b"\r\n\r\n", at, at + HEAD_BYTES_MAX)
        end = -1 if start < 0 else data.find(line, start + 4)
        if start < 0 or end < 0:
            raise wrong("a part of the form has no end, or too long a head")
        yield *_name(data[at:start]), start + 4, end
        at = end + len(line)
        if data.startswith(b"--", at):
            return
        if not data.startswith(b"\r\n", at):
            raise wrong("a boundary of the form is followed by something else")
        at += 2
    raise wrong(f"the form has more than {PARTS_MAX} parts")


def _name(head: bytes) -> tuple[str, bool]:
    """A part's name, and whether it is a file."""
    lines = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-disposition")]
    found = _DISPOSITION.fullmatch(lines[0]) if len(lines) == 1 else None
    given = [] if found is None else [(name.lower(), a or b) for name, a, b in _PARAMETER.findall(found[1])]
    names = [value for name, value in given if name in (b"name", b"name*")]
    folded = b"\n" in head.replace(b"\r\n", b"") or b"\r\n " in head or b"\r\n\t" in head
    if len(names) != 1 or b"\\" in names[0] or (b"name*", names[0]) in given or folded:
        raise wrong("a part of the form does not have one plain name")
    return names[0].decode("utf-8", "replace"), any(name in (b"filename", b"filename*") for name, _ in given)
