"""Keys with limits of their own: models, requests and tokens a minute, budgets; counted for what was really used."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preble.clock import ManualClock
from preble.errors import InvalidConfig
from preble.gateway.core.config_sources import load
from preble.gateway.core.config_tables import KeyTable
from preble.gateway.core.http_errors import ApiError
from preble.gateway.core.request_context import RequestContext
from preble.gateway.keys import KeyGrant, KeyLimits, Keys
from tests.support.gateway import Client, GatewayProcess
from tests.support.transport import WorkerProcess

LIMITED = KeyTable(key="limited-key", name="team", requests_per_minute=2, tokens_per_minute=100, token_budget=250)


def refused(limits: KeyLimits) -> tuple[str, float | None] | None:
    """Why a request may not begin, and after how long it may; None if it may."""
    try:
        limits.take()
    except ApiError as error:
        assert error.status == 429
        return str(error.code), error.retry_after_seconds
    return None


def test_requests_and_tokens_of_a_minute_come_back_and_a_budget_does_not() -> None:
    clock = ManualClock()
    limits = KeyLimits(LIMITED, clock)
    assert [refused(limits), refused(limits)] == [None, None]
    assert refused(limits) == ("requests_per_minute", pytest.approx(30.0))
    limits.spend(160)  # more than there was: it had begun before
    clock.advance(30.0)
    assert refused(limits) == ("tokens_per_minute", pytest.approx((1 + 60 - 50) / 100 * 60))
    clock.advance(30.0)
    assert refused(limits) is None
    limits.spend(90)
    clock.advance(3600.0)
    assert refused(limits) == ("insufficient_quota", None)


def test_a_request_that_is_refused_takes_nothing() -> None:
    clock = ManualClock()
    limits = KeyLimits(KeyTable(key="limited-key", requests_per_minute=60, tokens_per_minute=60), clock)
    limits.spend(100)
    assert [refused(limits) is None for _ in range(100)] == [False] * 100
    clock.advance(41.0 + 1e-6)
    assert [refused(limits) is None for _ in range(61)] == [True] * 60 + [False]


def grants(known: Keys, key: str) -> KeyGrant:
    """What a key may do."""
    return known.grant_of({"authorization": f"Bearer {key}"}, "/v1/completions", "POST", "1.1.1.1")


def test_what_a_key_has_used_outlives_a_reload_also_of_its_table() -> None:
    clock = ManualClock()
    first = Keys([], [], None, clock, tables=[LIMITED])
    spent = grants(first, "limited-key").limits
    assert spent is not None
    spent.spend(200)
    same = grants(Keys([], [], None, clock, tables=[LIMITED], before=first), "limited-key")
    assert same.limits is spent and same.name == "team"
    other = KeyTable(key="limited-key", token_budget=300, models=["m"])
    changed = grants(Keys([], [], None, clock, tables=[other], before=first), "limited-key")
    assert changed.limits is not None and changed.limits.used.count == 200 and changed.models == {"m"}
    assert grants(Keys(["limited-key"], [], None, clock, before=first), "limited-key").limits is None


def test_a_request_that_runs_through_a_reload_uses_up_the_budget_of_the_new_table() -> None:
    clock = ManualClock()
    first = Keys([], [], None, clock, tables=[LIMITED])
    running = grants(first, "limited-key").limits
    other = KeyTable(key="limited-key", token_budget=300)
    second = Keys([], [], None, clock, tables=[other], before=first)
    third = Keys([], [], None, clock, tables=[LIMITED], before=second)
    assert running is not None
    running.take()
    running.spend(200)
    for known, why in ((second, None), (third, None)):
        now = grants(known, "limited-key").limits
        assert now is not None and now.used.count == 200 and refused(now) is why
    running.spend(100)
    now = grants(second, "limited-key").limits
    assert now is not None and refused(now) == ("insufficient_quota", None)


def test_a_key_without_limits_may_use_every_model_and_one_with_models_only_those() -> None:
    context = RequestContext("id", 0.0)
    context.use_model("any")
    assert context.model == "any"
    context.models = frozenset({"a", "b"})
    context.use_model("a")
    for model in ("c", "", "A"):
        with pytest.raises(ApiError, match="may use a, b") as error:
            context.use_model(model)
        assert (error.value.status, error.value.code, context.model) == (403, "model_not_allowed", "a")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("keys: [{name: a}]", r"keys\[0\]: one of key and key_variable must be given"),
        ("keys: [{key: long-enough, key_variable: A}]", r"keys\[0\]: one of key and key_variable"),
        ("keys: [{key_variable: NONE}]", r"keys\[0\].key_variable: the variable NONE must be set"),
        ("keys: [{key: short}]", "keys: Expected `str` of length >= 8"),
        ("keys: [{key: long-enough}, {key: long-enough}]", r"keys\[1\]: the same key stands in two tables"),
        ("keys: [{key: long-enough, token_budget: 0}]", "keys: Expected `int` >= 1"),
        ("keys: [{key: long-enough, tokens: 1}]", "keys: Object contains unknown field `tokens`"),
    ],
)
def test_what_is_wrong_in_a_table_of_a_key_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InvalidConfig, match=complaint) as error:
        load(tmp_path / "c.yaml", {}, {})
    assert "long-enough" not in str(error.value)


def call(gateway: GatewayProcess, key: str) -> Callable[..., tuple[int, dict[str, str], Any]]:
    """Asks with that key."""
    return Client(gateway.address, key).call


def test_keys_are_limited_by_what_was_used_over_http(tmp_path: Path) -> None:
    worker = WorkerProcess("--id", "a", time_scale=0.0)
    tables = [
        {"key": "budget-key", "name": "team-a", "token_budget": 15},
        {"key_variable": "KEY_OF_B", "models": ["served"]},
        {"key": "elsewhere-key", "models": ["another"]},
        {"key": "seldom-key", "requests_per_minute": 1},
    ]
    file = tmp_path / "gateway.yaml"
    file.write_text(json.dumps({"workers": [worker.endpoint], "model_names": ["served", "second"], "keys": tables}))
    environment = {"KEY_OF_B": "key-in-a-variable"}
    gateway = GatewayProcess("--config", str(file), log=tmp_path / "log", environment=environment)
    try:
        body = {"prompt": [1, 2, 3, 4], "max_tokens": 6}
        budget = call(gateway, "budget-key")
        assert budget("POST", "/v1/completions", body)[0] == 200  # 10 tokens
        assert budget("POST", "/v1/completions", {**body, "stream": True})[0] == 200  # 20
        gateway.signal(signal.SIGHUP)
        status, headers, answer = budget("POST", "/generate", {"input_ids": [1]})
        assert (status, answer["error"]["code"]) == (429, "insufficient_quota") and "retry-after" not in headers
        assert budget("GET", "/v1/models")[0] == 200, "what uses no tokens is no request"

        of_model = call(gateway, "key-in-a-variable")
        assert of_model("POST", "/v1/completions", {**body, "model": "served"})[0] == 200
        status, _, answer = of_model("POST", "/v1/completions", {**body, "model": "second"})
        assert status == 403 and "'second'" in answer["error"]["message"]
        assert [card["id"] for card in of_model("GET", "/v1/models")[2]["data"]] == ["served"]
        elsewhere = call(gateway, "elsewhere-key")
        assert elsewhere("POST", "/v1/completions", body)[0] == 403, "also without a name"
        assert elsewhere("POST", "/generate", {"input_ids": [1]})[0] == 403

        seldom = call(gateway, "seldom-key")
        assert seldom("POST", "/v1/completions", body)[0] == 200
        status, headers, answer = seldom("POST", "/v1/completions", body)
        assert (status, answer["error"]["code"]) == (429, "requests_per_minute") and 0 < int(
            headers["retry-after"]
        ) <= 60
        assert seldom("GET", "/workers")[0] == 403
    finally:
        gateway.stop()
        worker.stop()
    log = gateway.log.read_text()
    assert '"team-a"' in log and not any(key in log for key in ("budget-key", "key-in-a-variable", "seldom-key"))
