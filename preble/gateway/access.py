"""The order of the checks at the door: who a client is, what its browser says of the page that asks, its key, its rate.
Owns the order and the operators' door; the checks are `origins`', `proxies`' and `keys`'.

A request for an operator's paths needs one of: an admin key; the Unix socket, which only the gateway's own user can
open; where there are no keys, the token that was printed at the start, from this machine. It is never one of a page of
another site, and its body is JSON, whatever else is allowed.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import partial
from typing import Any

from ..clock import Clock
from .core.addresses import counted_as
from .core.config import GatewayConfig, is_keyless
from .core.doors import UNIX, door_of
from .core.header_fields import HeaderFields
from .core.http_errors import ApiError
from .core.request_context import RequestContext
from .keys import Keys, RateLimiter, is_open, is_operators, too_many
from .origins import AllowedOrigins, Origins
from .proxies import TrustedProxies, is_forwarded
from .shared_limits import SharedLimits

PROBED_PATHS = frozenset({"/health", "/ready"})  # by whatever name; they know nothing
UNLIMITED_PATHS = frozenset({"/v1/preble/state"})  # asked for every second, and answered from memory
JSON = "application/json"

Scope = MutableMapping[str, Any]


def is_unlogged(path: str) -> bool:
    """Whether it is answered from memory, too often for the log and for rates."""
    return is_open(path) or path in UNLIMITED_PATHS


class Access:
    """Who may come in. `before` is the one that this one takes the place of: what keys have used stays. With `shared`,
    limits hold for all processes of the gateway together."""

    def __init__(
        self,
        config: GatewayConfig,
        token: str | None,
        clock: Clock,
        before: Access | None = None,
        *,
        shared: SharedLimits | None = None,
    ) -> None:
        used = None if before is None else before._keys
        self._keys: Keys = Keys(
            config.api_keys, config.admin_keys, token, clock, tables=config.keys, before=used, shared=shared
        )
        self._limits = self._keys.limits
        self._shared = shared
        self._is_keyless = is_keyless(config)
        self._has_shares = any(table.weight is not None for table in config.keys)
        self._origins = Origins([*config.host_names, config.host])
        self._allowed = AllowedOrigins(config.allowed_origins)
        self._proxies = TrustedProxies(config.trusted_proxies)
        self._limiter = None
        if config.rate_limit_per_minute is not None:
            self._limiter = RateLimiter(config.rate_limit_per_minute, config.rate_limit_burst, clock)
        if shared is not None:
            shared.follow(self)

    def admit(self, scope: Scope, headers: HeaderFields, context: RequestContext) -> None:
        """Let a request in, and note in its context what its key may do. Raises `ApiError`."""
        self._proxies.look_through(scope, headers)
        path, client = scope["path"], (scope.get("client") or ("unknown",))[0]
        is_local = door_of(scope) == UNIX and not is_forwarded(headers)
        if not is_local and path not in PROBED_PATHS:
            self._check_page(path, headers)
        if is_operators(path) and scope["method"] not in ("GET", "HEAD"):
            _check_type(headers)
        if not is_local:
            grant = self._keys.grant_of(headers, path, scope["method"], client)
            context.key_name, context.models = grant.name, grant.models
            context.tenant = grant.name if self._has_shares else None
            if grant.limits is not None and scope["method"] == "POST" and not is_operators(path):
                context.key_label = grant.label
                grant.limits.take()
                context.spend = grant.limits.spend
        if self._limiter is not None and not is_unlogged(path):
            name = context.key_name or counted_as(client)
            context.charge = partial(self._charge, name)
            wait = self._limiter.wait_seconds(name)
            if wait > 0.0:
                raise too_many("too many requests", "rate_limit", wait)
            if self._shared is not None:
                self._shared.charged(name, 1)

    def _charge(self, name: str, count: int) -> None:
        if self._limiter is not None and count:
            self._limiter.charge(name, count)
            if self._shared is not None:
                self._shared.charged(name, count)

    # --- what other processes of this gateway say ---------------------------------------------------------------------

    def used_elsewhere(self, rates: dict[str, int], keys: dict[str, tuple[int, int]], budgets: dict[str, int]) -> None:
        """So much was used there: of the general rate by name; of keys' own limits, by digest."""
        if self._limiter is not None:
            for name, count in rates.items():
                self._limiter.charge(name, count)
        for digest in keys.keys() | budgets.keys():
            if (limits := self._limits.get(digest)) is not None:
                limits.used_elsewhere(*keys.get(digest, (0, 0)), budgets.get(digest, 0))

    def levels(self) -> dict[str, tuple[float | None, float | None]]:
        """What is left of each key's minute."""
        return {digest: limits.levels for digest, limits in self._limits.items()}

    def lower_to(self, levels: dict[str, tuple[float | None, float | None]]) -> None:
        """No key has more left than that."""
        for digest, level in levels.items():
            if (limits := self._limits.get(digest)) is not None:
                limits.lower_to(level)

    def _check_page(self, path: str, headers: HeaderFields) -> None:
        """Refuse what a page of another site has caused: a key stands in a header that no page can send, so where there
        are keys, only operators' paths are looked at."""
        if self._is_keyless:
            self._origins.check_host(headers)
        if (self._is_keyless or is_operators(path)) and not self._allows(path, headers):
            self._origins.check_page(headers)

    def _allows(self, path: str, headers: HeaderFields) -> bool:
        return not is_operators(path) and self._allowed.allows(headers)

    def cors_headers(self, path: str, headers: HeaderFields) -> list[tuple[bytes, bytes]]:
        """What lets the browser show the answer to the page that asked; nothing where it may not."""
        return self._allowed.answer_headers(headers) if self._allows(path, headers) else []

    def is_preflight(self, scope: Scope, headers: HeaderFields) -> bool:
        """Whether a browser asks beforehand if a page may ask, and it may."""
        asks = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        return asks and self._allows(scope["path"], headers)


def _check_type(headers: HeaderFields) -> None:
    """Forms are what any page may send: a change that comes with a body is JSON."""
    media_type = headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if media_type != JSON:
        raise ApiError(415, f"the body must be {JSON}", code="unsupported_media_type")
