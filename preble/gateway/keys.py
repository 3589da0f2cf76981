"""Keys and rates: who may ask what, and how often. Owns what is open to everybody.

At its bounds: of more than `BUCKETS_MAX` keys or client addresses, the one seen longest ago starts afresh; after
`WRONG_BURST` wrong keys of an address, and `WRONG_PER_MINUTE` later on, keys that were not right there before are not
looked at.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..clock import Clock
from .core.addresses import counted_as, is_loopback_address
from .core.config_tables import KeyTable
from .core.http_errors import ApiError
from .shared_limits import SharedLimits

BUCKETS_MAX = 10_000
WRONG_PER_MINUTE, WRONG_BURST = 30.0, 20
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/"})
OPEN_FOLDER = "/page/"  # the live page's files, which know nothing
ANTHROPIC_KEY = "x-api-key"  # where Anthropic's clients put theirs
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

    def charge(self, name: str, count: float) -> None:
        """Take so many, more than there are if need be: then the wait is longer."""
        tokens, now = self._bucket(name)
        self._buckets[name] = (tokens - count, now)
        self._buckets.move_to_end(name)
        if len(self._buckets) > BUCKETS_MAX:
            self._buckets.popitem(last=False)

    def level(self, name: str) -> float:
        """How many there are, less than none where more was taken; takes nothing."""
        return self._bucket(name)[0]

    def _bucket(self, name: str) -> tuple[float, float]:
        now = self._clock()
        tokens, at = self._buckets.get(name, (self._burst, now))
        return min(self._burst, tokens + (now - at) * self._per_second), now


@dataclass(slots=True)
class UsedTokens:
    """What one key has used of its budget; of all of its tables, one after the other, the same."""

    count: int = 0


class KeyLimits:
    """What one key has left: of its requests and tokens a minute, and of its budget. Tokens are those that were really
    used, prompt and output, counted when a request ends: one more may begin while there is any left.

    `digest` is the key's; with `shared`, what is used here is noted to the gateway's other processes."""

    def __init__(self, table: KeyTable, clock: Clock, digest: str = "", shared: SharedLimits | None = None) -> None:
        self.table = table
        self.used = UsedTokens()
        self._digest, self._shared = digest, shared
        self._requests, self._tokens = (
            None if rate is None else RateLimiter(rate, max(1, math.ceil(rate)), clock)
            for rate in (table.requests_per_minute, table.tokens_per_minute)
        )

    def take(self) -> None:
        """Begin a request. Raises `ApiError` 429 where the key has nothing left; then nothing was taken."""
        budget = self.table.token_budget
        if budget is not None and self.used.count >= budget:
            raise ApiError(
                429,
                f"the budget of this key, {budget} tokens, is used up",
                kind="insufficient_quota",
                code="insufficient_quota",
            )
        for limiter, what in ((self._tokens, "tokens"), (self._requests, "requests")):
            wait = 0.0 if limiter is None else limiter.lacking_seconds("")
            if wait > 0.0:
                raise too_many(f"this key has no {what} left for this minute", f"{what}_per_minute", wait)
        if self._requests is not None:
            self._requests.charge("", 1)
        if self._shared is not None:
            self._shared.began(self._digest)

    def spend(self, tokens: int) -> None:
        """So many tokens were used."""
        self.used_elsewhere(0, tokens, tokens)
        if self._shared is not None and tokens:
            self._shared.spent(self._digest, tokens)

    def used_elsewhere(self, requests: int, tokens: int, budget: int) -> None:
        """So much was used at another process: of the minute's requests and tokens, and of the budget."""
        self.used.count += budget
        for limiter, count in ((self._requests, requests), (self._tokens, tokens)):
            if limiter is not None and count:
                limiter.charge("", count)

    @property
    def levels(self) -> tuple[float | None, float | None]:
        """What is left of the minute's requests and tokens."""
        requests, tokens = (None if one is None else one.level("") for one in (self._requests, self._tokens))
        return requests, tokens

    def lower_to(self, levels: tuple[float | None, float | None]) -> None:
        """There is no more left than that."""
        for limiter, level in zip((self._requests, self._tokens), levels, strict=True):
            if limiter is not None and level is not None and level < limiter.level(""):
                limiter.charge("", limiter.level("") - level)


@dataclass(frozen=True, slots=True)
class KeyGrant:
    """What the key of a request allows: `models` None is any, `limits` None is without. `label`: the name that the
    configuration gives it."""

    name: str = ""
    models: frozenset[str] | None = None
    limits: KeyLimits | None = None
    label: str = ""


class Keys:
    """API keys by their digest, so that no comparison takes longer for a better guess. Where there are none, what
    changes the fleet needs `token`, from this machine, and nothing else needs anything. `tables` are keys with limits
    of their own; what those have used is taken over from `before`."""

    def __init__(
        self,
        keys: Iterable[str],
        admin_keys: Iterable[str],
        token: str | None,
        clock: Clock,
        *,
        tables: Iterable[KeyTable] = (),
        before: Keys | None = None,
        shared: SharedLimits | None = None,
    ) -> None:
        self._admin = {_digest(key) for key in admin_keys}
        plain = {_digest(key) for key in keys} | self._admin
        self._grants = {digest: KeyGrant(digest[:8]) for digest in plain}
        for table in tables:
            digest = _digest(table.key or "")
            earlier = None if before is None else before._grants.get(digest)
            self._grants[digest] = _granted(table, KeyLimits(table, clock, digest, shared), digest, earlier)
        self._is_keyless = not self._grants
        if self._is_keyless and token is not None:
            self._admin = {_digest(token)}
            self._grants = {digest: KeyGrant(digest[:8]) for digest in self._admin}
        self._guesses = RateLimiter(WRONG_PER_MINUTE, WRONG_BURST, clock)
        self._right: OrderedDict[tuple[str, str], None] = OrderedDict()  # addresses and the keys that came from there

    def grant_of(self, headers: Any, path: str, method: str, client: str) -> KeyGrant:
        """What the key in the headers allows; one without a name where none is needed. Raises `ApiError` 401, 403 or
        429."""
        if is_open(path) or (self._is_keyless and not (path.startswith(CHANGE_PATH) and method != "GET")):
            return NO_KEY
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get(ANTHROPIC_KEY, "")
        digest = _digest(key.strip()) if key else ""
        self._check_guesses(counted_as(client), digest)
        grant = self._grants.get(digest)
        if grant is None:
            what = "the admin token, printed at the start," if self._is_keyless else "the API key"
            raise ApiError(401, f"{what} is missing or wrong", kind="authentication_error", code="invalid_api_key")
        if self._is_keyless and not is_loopback_address(client):
            message = "the admin token is for this machine; from elsewhere, use one of admin_keys"
            raise ApiError(403, message, kind="permission_error", code="admin_only")
        if is_operators(path) and digest not in self._admin:
            raise ApiError(403, "this needs one of the admin keys", kind="permission_error", code="admin_only")
        return grant

    @property
    def limits(self) -> dict[str, KeyLimits]:
        """Of the keys that have limits of their own, by digest."""
        return {digest: grant.limits for digest, grant in self._grants.items() if grant.limits is not None}

    def _check_guesses(self, address: str, digest: str) -> None:
        """Raise `ApiError` 429 where too many wrong keys came from that address, unless this one was right before:
        a key that is guessed then is not looked at, and those who have theirs go on."""
        if not digest or (address, digest) in self._right:
            return
        wait = self._guesses.lacking_seconds(address)
        if wait > 0.0:
            raise too_many("too many wrong keys", "wrong_keys", wait)
        if digest not in self._grants:
            self._guesses.charge(address, 1)
            return
        self._right[address, digest] = None
        if len(self._right) > BUCKETS_MAX:
            self._right.popitem(last=False)


def _granted(table: KeyTable, limits: KeyLimits, digest: str, before: KeyGrant | None) -> KeyGrant:
    """What a table grants; where it is as it was, what is left of it stays, and a budget is used up but once."""
    earlier = None if before is None else before.limits
    if earlier is not None:
        limits.used = earlier.used  # to which requests that run now will add
        limits = earlier if earlier.table == table else limits
    models = frozenset(table.models) if table.models else None
    return KeyGrant(name_of(table), models, limits, table.name or "")


def name_of(table: KeyTable) -> str:
    """What log, metrics and shares call a key."""
    return table.name or _digest(table.key or "")[:8]


def too_many(message: str, code: str, wait_seconds: float) -> ApiError:
    """429, with the time after which there is one again."""
    return ApiError(429, message, kind="rate_limit_error", code=code, retry_after_seconds=wait_seconds)


def is_operators(path: str) -> bool:
    """Whether it changes or shows the fleet."""
    return path.startswith(OPERATOR_PATHS)


def is_open(path: str) -> bool:
    """Whether nobody needs a key there."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


NO_KEY = KeyGrant()


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
