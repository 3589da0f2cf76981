"""The header fields of one request, read by name. Owns how they are looked up; what they mean is their readers'."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

SCOPE_KEY = "preble.headers"


class HeaderFields:
    """Fields as ASGI gives them, names in small letters. They are looked over once, however many are asked for."""

    def __init__(self, fields: Iterable[tuple[bytes, bytes]]) -> None:
        self._fields = list(fields)
        self._first = dict(reversed(self._fields))

    def get(self, name: str, default: str = "") -> str:
        """The first value of a field."""
        value = self._first.get(name.encode())
        return default if value is None else value.decode("latin-1")

    def getlist(self, name: str) -> list[str]:
        """All values of a field."""
        wanted = name.encode()
        if wanted not in self._first:
            return []
        return [value.decode("latin-1") for one, value in self._fields if one == wanted]

    def __getitem__(self, name: str) -> str:
        """The first value. Raises `KeyError`."""
        return self._first[name.encode()].decode("latin-1")

    def has_any(self, names: frozenset[bytes]) -> bool:
        """Whether one of these is there."""
        return not names.isdisjoint(self._first)

    def __contains__(self, name: str) -> bool:
        return name.encode() in self._first


def headers_of(scope: MutableMapping[str, Any]) -> HeaderFields:
    """Those of an ASGI request, looked over once for all who ask."""
    found: HeaderFields | None = scope.get(SCOPE_KEY)
    if found is None:
        found = scope[SCOPE_KEY] = HeaderFields(scope["headers"])
    return found
