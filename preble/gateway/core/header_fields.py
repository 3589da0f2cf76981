"""The header fields of one request, read by name. Owns how they are looked up; what they mean is their readers'."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

SCOPE_KEY = "preble.headers"


class HeaderFields:
    """Fields as ASGI gives them, names in small letters. They are looked over once, however many are asked for."""

    def __init__(self, fields: Iterable[tuple[bytes, bytes]]) -> None:
        self._values: dict[bytes, list[bytes]] = {}
        for name, value in fields:
            self._values.setdefault(name, []).append(value)

    def get(self, name: str, default: str = "") -> str:
        """The first value of a field."""
        values = self._values.get(name.encode())
        return default if values is None else values[0].decode("latin-1")

    def getlist(self, name: str) -> list[str]:
        """All values of a field."""
        return [value.decode("latin-1") for value in self._values.get(name.encode(), ())]

    def __getitem__(self, name: str) -> str:
        """The first value. Raises `KeyError`."""
        return self._values[name.encode()][0].decode("latin-1")

    def __contains__(self, name: str) -> bool:
        return name.encode() in self._values


def headers_of(scope: MutableMapping[str, Any]) -> HeaderFields:
    """Those of an ASGI request, looked over once for all who ask."""
    found: HeaderFields | None = scope.get(SCOPE_KEY)
    if found is None:
        found = scope[SCOPE_KEY] = HeaderFields(scope["headers"])
    return found
