"""Limits that hold for several processes of one gateway together: what is noted, added up, lost, and its bounds.
Two sides in one process; real processes are in test_processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from preble.clock import ManualClock
from preble.gateway import shared_limits
from preble.gateway.access import Access
from preble.gateway.core.config import GatewayConfig
from preble.gateway.core.config_tables import KeyTable
from preble.gateway.core.header_fields import headers_of
from preble.gateway.core.http_errors import ApiError
from preble.gateway.core.request_context import RequestContext
from preble.gateway.shared_limits import SharedLimits

KEY = "key-of-a-team"


class Network:
    """Processes whose notes go to all others when the time has come; `lose` drops them."""

    def __init__(self, clock: ManualClock, config: GatewayConfig) -> None:
        self.clock, self.config = clock, config
        self.sides: list[ProcessSide] = []
        self.due: list[Callable[[], None]] = []
        self.lose = False
        self.notes = self.lives = 0

    def join(self) -> ProcessSide:
        """One process more; the others see it come."""
        self.lives += 1
        side = ProcessSide(self, f"router-{self.lives}")
        self.sides.append(side)
        for other in self.sides:
            if other is not side:
                other.shared.came()
        return side

    def deliver(self) -> None:
        """The time after which all is known."""
        due, self.due = self.due, []
        for what in due:
            what()


class ProcessSide:
    """One of them."""

    def __init__(self, network: Network, name: str) -> None:
        self._network = network
        self.shared = SharedLimits(name, self._send, lambda seconds, what: network.due.append(what))
        self.access = Access(network.config, None, network.clock, shared=self.shared)

    def _send(self, data: bytes) -> None:
        self._network.notes += 1
        for side in self._network.sides:
            if side is not self and not self._network.lose:
                side.shared.take(data)

    def ask(self, tokens: int = 0, key: str = KEY) -> str | None:
        """A request that uses so many tokens; why it was refused."""
        scope: Any = {"type": "http", "path": "/v1/completions", "method": "POST", "client": ("127.0.0.1", 1)}
        scope["headers"] = [(b"authorization", f"Bearer {key}".encode()), (b"host", b"localhost")]
        context = RequestContext("id", 0.0)
        try:
            self.access.admit(scope, headers_of(scope), context)
        except ApiError as error:
            return str(error.code)
        if context.spend is not None:
            context.spend(tokens)
        return None


def network(**limits: Any) -> Network:
    """Processes that have one key."""
    return Network(ManualClock(), GatewayConfig(keys=[KeyTable(key=KEY, name="team", **limits)]))


def test_requests_a_minute_are_of_all_processes_together() -> None:
    net = network(requests_per_minute=60)
    sides = [net.join() for _ in range(4)]
    let_in = 0
    for number in range(400):
        let_in += sides[number % 4].ask() is None
        net.deliver()
    assert let_in == 60
    net.clock.advance(60.0)
    assert [side.ask() for side in sides] == [None] * 4


def test_what_comes_before_a_note_is_let_in_and_counts_nevertheless() -> None:
    net = network(requests_per_minute=10)
    first, second = net.join(), net.join()
    assert [first.ask() for _ in range(10)] == [second.ask() for _ in range(10)] == [None] * 10
    net.deliver()
    net.clock.advance(60.0)
    assert first.ask() == second.ask() == "requests_per_minute", "ten were taken too early"
    net.clock.advance(6.0 + 1e-6)
    assert first.ask() is None


def test_tokens_of_a_minute_and_budgets_are_of_all_together() -> None:
    net = network(tokens_per_minute=100, token_budget=250)
    first, second = net.join(), net.join()
    assert first.ask(150) is None
    net.deliver()
    assert second.ask() == "tokens_per_minute"
    net.clock.advance(60.0)
    assert second.ask(110) is None
    net.deliver()
    net.clock.advance(600.0)
    assert first.ask() == second.ask() == "insufficient_quota"


def test_a_budgets_lost_note_is_mended_by_the_next() -> None:
    net = network(token_budget=100)
    first, second = net.join(), net.join()
    net.lose = True
    first.ask(60)
    net.deliver()
    net.lose = False
    first.ask(50)
    net.deliver()
    assert second.ask() == "insufficient_quota"


def test_a_process_that_begins_later_knows_what_was_used_also_of_one_that_is_gone() -> None:
    net = network(token_budget=100, requests_per_minute=2)
    first, second = net.join(), net.join()
    first.ask(50)
    second.ask(49)
    net.deliver()
    net.sides.remove(first)
    third = net.join()
    assert third.ask() == "requests_per_minute"
    net.clock.advance(60.0)
    assert third.ask(1) is None
    net.deliver()
    assert third.ask() == second.ask() == "insufficient_quota"


def test_the_rate_of_everybody_is_of_all_together() -> None:
    net = Network(ManualClock(), GatewayConfig(rate_limit_per_minute=60, rate_limit_burst=5, api_keys=[KEY, "another"]))
    first, second = net.join(), net.join()
    let_in = 0
    for number in range(20):
        let_in += (first, second)[number % 2].ask() is None
        net.deliver()
    assert let_in == 5 and second.ask(key="another") is None


def test_a_reload_goes_on_with_what_others_have_used() -> None:
    net = network(token_budget=100)
    first, second = net.join(), net.join()
    second.access = Access(net.config, None, net.clock, second.access, shared=second.shared)
    first.ask(100)
    net.deliver()
    assert second.ask() == "insufficient_quota"


def test_many_uses_are_one_note_and_none_are_none() -> None:
    net = network(token_budget=10_000)
    first, _ = net.join(), net.join()
    net.notes = 0
    for _ in range(50):
        first.ask(1)
    net.deliver()
    assert net.notes == 1
    net.deliver()
    assert net.notes == 1


def test_notes_of_many_names_and_sums_of_many_processes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_limits, "PENDING_MAX", 3)
    monkeypatch.setattr(shared_limits, "PROCESSES_MAX", 4)
    sent: list[bytes] = []
    shared = SharedLimits("own", sent.append, lambda seconds, what: None)
    for number in range(4):
        shared.charged(f"address-{number}", 1)
    assert len(sent) == 1
    for number in range(10):
        note = shared_limits.UsageNote(sums={f"router-{number}": {"digest": 5}})
        shared.take(shared_limits._encode(note))
    assert list(shared._sums) == ["own", "router-7", "router-8", "router-9"]


def test_nonsense_and_unknown_names_change_nothing() -> None:
    net = network(token_budget=10, requests_per_minute=1)
    side = net.join()
    side.shared.take(b"\xc1nonsense")
    side.shared.take(shared_limits._encode([1, {"a": -5}, {}, {}, {}]))
    side.shared.take(shared_limits._encode(shared_limits.UsageNote(rates={"x": 1}, keys={"unknown": (9, 9)})))
    assert side.ask() is None
