"""What a caller of the router may say of a request. Owns these checks."""

from __future__ import annotations

import math
from collections.abc import Hashable

from .._placement.request_api import finite_time, hashable
from ..errors import InvalidInput
from ..scheduling.flow_control import FlowConfig
from ..types import INTERACTIVE, Claim, Priority, SessionHint


def check_session(session: SessionHint | None) -> None:
    """Raise `InvalidInput` for what is no hint."""
    if session is not None and not isinstance(session, SessionHint):
        raise InvalidInput(f"session must be a SessionHint, got {type(session).__name__}")


def first_token_limit(client: Hashable, first_token_seconds: float | None) -> float:
    """The time in which a first token is of use, infinite for None. Raises `InvalidInput` for what is none, and for a
    client that cannot be counted."""
    if client is not None:
        hashable("client", client)
    limit = math.inf if first_token_seconds is None else finite_time("first_token_seconds", first_token_seconds)
    if limit <= 0.0:
        raise InvalidInput(f"first_token_seconds must be positive, got {first_token_seconds!r}")
    return limit


def terms_of(
    flow: FlowConfig,
    client: Hashable,
    first_token_seconds: float | None,
    tenant: str | None,
    deadline_seconds: float | None,
    priority: Priority | None,
) -> tuple[Hashable, float, Claim | None]:
    """Whose request it is, the time in which its first token is of use, infinite where none is named, and what it names
    of the last three; None for nothing. Raises `InvalidInput`."""
    limit = first_token_limit(client, first_token_seconds)
    if tenant is None and deadline_seconds is None and priority is None:
        return client, limit, None
    name = tenant or ""
    claim = Claim(name, flow.weights.get(name, 1.0), deadline_seconds, priority or INTERACTIVE)
    return name if client is None else client, min(limit, deadline_seconds or math.inf), claim
