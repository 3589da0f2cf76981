"""Keys and rates: who may ask what, and how often. Owns what is open to everybody.

At its bounds: of more than `BUCKETS_MAX` keys or client addresses, the one seen longest ago starts afresh; after
`WRONG_BURST` wrong keys of an address, and `WRONG_PER_MINUTE` later on, keys that were not right there before are not
looked at.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from ..clock import Clock
from .core.http_errors import ApiError

BUCKETS_MAX = 10_000
WRONG_PER_MINUTE, WRONG_BURST = 30.0, 20
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/"})
OPEN_FOLDER = "/page/"  # the live page's files, which know nothing
CHANGE_PATH = "/workers"  # with any method but GET
OPERATOR_PATHS = (CHANGE_PATH, "/v1/preble")


class RateLimiter:
    """A token bucket for each name: `per_minute` on average, `burst` at once. Not thread-safe."""

    def __init__(self, per_minute: float, burst: int, clock: Clock) -> None:
        self._per_second = per_minute / 60.0
        self._burst = float(burst)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> (tokens, at)

    def wait_seconds(self, name: str) -> float:
        """Take one; 0.0 if there was one, else how long until there is, and nothing was taken."""
        wait = self.lacking_seconds(name)
        if wait == 0.0:
            self.charge(name, 1)
        elif name in self._buckets:
            self._buckets.move_to_end(name)
        return wait

    def lacking_seconds(self, name: str) -> float:
        """How long until there is one; takes nothing."""
        tokens, _ = self._bucket(name)
        return 0.0 if tokens >= 1.0 else (1.0 - tokens) / self._per_second

    def charge(self, name: str, count: int) -> None:
        """Take so many, more than there are if need be: then the wait is longer."""
        tokens, now = self._bucket(name)
        self._buckets[name] = (tokens - count, now)
        self._buckets.move_to_end(name)
        if len(self._buckets) > BUCKETS_MAX:
            self._buckets.popitem(last=False)

    def _bucket(self, name: str) -> tuple[float, float]:
        now = self._clock()
        tokens, at = self._buckets.get(name, (self._burst, now))
        return min(self._burst, tokens + (now - at) * self._per_second), now


class Keys:
    """API keys by their digest, so that no comparison takes longer for a better guess. Where there are none, what
    changes the fleet needs `token`, and nothing else needs anything."""

    def __init__(self, keys: Iterable[str], admin_keys: Iterable[str], token: str | None, clock: Clock) -> None:
        self._admin = {_digest(key) for key in admin_keys}
        self._known = {_digest(key) for key in keys} | self._admin
        self._is_keyless = not self._known
        if self._is_keyless and token is not None:
            self._admin = self._known = {_digest(token)}
        self._guesses = RateLimiter(WRONG_PER_MINUTE, WRONG_BURST, clock)
        self._right: OrderedDict[tuple[str, str], None] = OrderedDict()  # addresses and the keys that came from there

    def name_of(self, headers: Any, path: str, method: str, address: str) -> str:
        """The name of the key in the headers, "" where none is needed. Raises `ApiError` 401, 403 or 429."""
        operator = path.startswith(OPERATOR_PATHS)
        if is_open(path) or (self._is_keyless and not (path.startswith(CHANGE_PATH) and method != "GET")):
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip()) if scheme.lower() == "bearer" else ""
        self._check_guesses(address, digest)
        if digest not in self._known:
            what = "the admin token, printed at the start," if self._is_keyless else "the API key"
            raise ApiError(401, f"{what} is missing or wrong", kind="authentication_error", code="invalid_api_key")
        if operator and digest not in self._admin:
            raise ApiError(403, "this needs one of the admin keys", kind="permission_error", code="admin_only")
        return digest[:8]

    def _check_guesses(self, address: str, digest: str) -> None:
        """Raise `ApiError` 429 where too many wrong keys came from that address, unless this one was right before:
        a key that is guessed then is not looked at, and those who have theirs go on."""
        if not digest or (address, digest) in self._right:
            return
        wait = self._guesses.lacking_seconds(address)
        if wait > 0.0:
            raise ApiError(
                429, "too many wrong keys", kind="rate_limit_error", code="wrong_keys", retry_after_seconds=wait
            )
        if digest not in self._known:
            self._guesses.charge(address, 1)
            return
        self._right[address, digest] = None
        if len(self._right) > BUCKETS_MAX:
            self._right.popitem(last=False)


def is_open(path: str) -> bool:
    """Whether nobody needs a key there."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
