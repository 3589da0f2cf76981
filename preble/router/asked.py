"""What a caller of the router may say of a request. Owns these checks."""

from __future__ import annotations

import math
from collections.abc import Hashable

from .._placement.request_api import finite_time, hashable
from ..errors import InvalidInput
from ..types import SessionHint


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
