"""What the headers of a request say to the gateway itself: its id, its client's patience, its deadline, its class, its
set of samples. Owns their names and how they are checked; a request's id is made here where none is given."""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Mapping

from ...types import NAME_CHARS_MAX, PRIORITIES, is_session_name
from .header_fields import HeaderFields
from .http_errors import wrong

Headers = HeaderFields | Mapping[str, str]

# In how many seconds a client gives up that gets nothing; OpenAI's own clients send the second.
TIMEOUT_HEADERS = ("x-request-timeout", "x-stainless-read-timeout")
TIMEOUT_SECONDS_MAX = 1e6
DEADLINE_HEADER, PRIORITY_HEADER = "x-preble-deadline-seconds", "x-preble-priority"
GROUP_HEADER = "x-preble-group"  # names the set of samples, all of which are waited for
# All that says something to the gateway beside the id.
OWN_HEADERS = frozenset(one.encode() for one in (*TIMEOUT_HEADERS, DEADLINE_HEADER, PRIORITY_HEADER, GROUP_HEADER))
_RANDOM = random.Random(secrets.randbits(128))  # of ids, which need to differ and may be guessed
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


def request_id_of(headers: Headers) -> str:
    """The id that the headers name, else one of our own."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"{_RANDOM.getrandbits(96):024x}"


def timeout_of(headers: Headers) -> float | None:
    """The time that the headers name, None if none or one that is no time."""
    given = next((value for name in TIMEOUT_HEADERS if (value := headers.get(name))), "")
    if not given:
        return None
    try:
        seconds = float(given)
    except ValueError:
        return None
    return seconds if 0.0 < seconds <= TIMEOUT_SECONDS_MAX else None


def urgency_of(headers: Headers) -> tuple[float | None, str | None]:
    """Deadline and class that the headers name. Raises `ApiError` 400 for what is none."""
    priority, given = headers.get(PRIORITY_HEADER) or None, headers.get(DEADLINE_HEADER)
    if priority is not None and priority not in PRIORITIES:
        raise wrong(f"{PRIORITY_HEADER} must be one of {', '.join(PRIORITIES)}", PRIORITY_HEADER)
    if not given:
        return None, priority
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= TIMEOUT_SECONDS_MAX:
        raise wrong(f"{DEADLINE_HEADER} must be a positive number of seconds", DEADLINE_HEADER)
    return seconds, priority


def group_of(headers: Headers) -> str | None:
    """The set of samples that the headers name. Raises `ApiError` 400 for what is no name."""
    given: str | None = headers.get(GROUP_HEADER) or None
    if given is not None and not is_session_name(given):
        raise wrong(f"{GROUP_HEADER} must be visible ASCII, at most {NAME_CHARS_MAX} characters", GROUP_HEADER)
    return given
