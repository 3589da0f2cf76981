"""Shares of keys, deadlines and classes of requests at the gateway's door, and what its router is asked with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from preble.clock import ManualClock
from preble.errors import Overloaded
from preble.gateway.access import Access
from preble.gateway.api.http import error_response
from preble.gateway.core.config import GatewayConfig
from preble.gateway.core.config_tables import KeyTable
from preble.gateway.core.gateway import Gateway
from preble.gateway.core.http_errors import ApiError
from preble.gateway.core.request_context import RequestContext
from preble.gateway.core.request_headers import urgency_of
from preble.gateway.program import _flow_config

HEAVY, LIGHT = KeyTable(key="heavy-key", name="heavy", weight=4.0), KeyTable(key="light-key")
SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "client": ("1.1.1.1", 5), "headers": []}


def admitted(config: GatewayConfig, key: str) -> RequestContext:
    """What the door notes of a request with a key."""
    context = RequestContext("id", 0.0)
    headers: Any = {"authorization": f"Bearer {key}"}
    Access(config, None, ManualClock()).admit(dict(SCOPE), headers, context)
    return context


def test_where_a_key_has_a_weight_requests_are_served_by_key() -> None:
    config = GatewayConfig(workers=["tcp://127.0.0.1:1"], keys=[HEAVY, LIGHT])
    assert admitted(config, "heavy-key").tenant == "heavy"
    assert admitted(config, "light-key").tenant == admitted(config, "light-key").key_name != ""
    assert _flow_config(config).weights == {"heavy": 4.0}


def test_where_no_key_has_one_nobody_waits_by_key() -> None:
    config = GatewayConfig(workers=["tcp://127.0.0.1:1"], keys=[LIGHT])
    assert admitted(config, "light-key").tenant is None and _flow_config(config).weights == {}


def test_deadlines_and_classes_are_read_from_headers_and_wrong_ones_refused() -> None:
    assert urgency_of({}) == (None, None)
    assert urgency_of({"x-preble-deadline-seconds": "1.5", "x-preble-priority": "batch"}) == (1.5, "batch")
    for name, value in (("deadline-seconds", "soon"), ("deadline-seconds", "-1"), ("priority", "urgent")):
        with pytest.raises(ApiError, match=f"x-preble-{name} must be") as error:
            urgency_of({f"x-preble-{name}": value})
        assert error.value.status == 400


def claim_of(**named: Any) -> dict[str, Any]:
    """What the router is asked with, two seconds after the request came."""
    gateway: Any = SimpleNamespace(_clock=lambda: 12.0)
    context = RequestContext("id", 10.0)
    for name, value in named.items():
        setattr(context, name, value)
    return Gateway.claim_of(gateway, context)


def test_the_router_is_asked_with_what_is_left_of_a_deadline_and_with_nothing_where_nothing_is_named() -> None:
    assert claim_of() == {}
    assert claim_of(tenant="heavy", priority="batch") == {"tenant": "heavy", "priority": "batch"}
    assert claim_of(deadline_seconds=5.0) == {"deadline_seconds": 3.0}
    assert claim_of(deadline_seconds=1.0) == {"deadline_seconds": 0.001}


def test_who_is_refused_hears_after_how_long_to_try_again() -> None:
    answer = error_response(Overloaded("too late", retry_after_seconds=2.4), "/v1/completions")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")


@pytest.mark.parametrize("weight", [0, -1.0, 1e9])
def test_a_weight_is_positive_and_bounded(weight: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"key": "some-long-key", "weight": weight}, KeyTable)
