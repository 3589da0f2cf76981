"""The live page's numbers without a browser: histories, events, bounds, and what the endpoints report and refuse.

Time is a manual clock, workers are plain objects; the page itself is tested in test_page.py.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from preble import GlobalScheduler, ManualClock, PrefixEvicted
from preble.errors import TransportError
from preble.gateway.core.request_context import RequestContext
from preble.gateway.dashboard import events as events_module
from preble.gateway.dashboard import state as live_module
from preble.gateway.dashboard.events import DashboardEvents
from preble.gateway.dashboard.history import UNKNOWN, Ratio, Series, percentile
from preble.gateway.dashboard.state import HISTORY_TICKS, RECENT_TICKS, Live
from preble.router.fleet import AddressCounters
from preble.router.router import RouterCounters
from preble.scheduling.records import PRICE_TERMS, DecisionRecording
from tests.support.gateway import Client, GatewayProcess
from tests.support.transport import WorkerProcess

FACTS = {"version": "0", "models": ["m"], "record_share": 1.0, "ready": True, "draining": False, "live_choices": 0}


# --- histories --------------------------------------------------------------------------------------------------------


def test_a_series_keeps_the_latest_values_in_order() -> None:
    series = Series(4)
    assert series.last(4) == []
    for value in (1.0, UNKNOWN, 0.01642):
        series.push(value)
    first, unknown, third = series.last(9)
    assert (first, third) == (1.0, 0.0164) and unknown != unknown
    for value in range(5):
        series.push(float(value))
    assert series.last(9) == [1.0, 2.0, 3.0, 4.0], "the oldest went"
    assert series.last(2) == [3.0, 4.0] and series.last(0) == []


def test_a_ratio_is_of_the_latest_ticks() -> None:
    ratio = Ratio(2)
    assert ratio.push(0.0, 0.0) != ratio.push(0.0, 0.0), "nothing came: not a number"
    assert ratio.push(10.0, 40.0) == 0.25
    assert ratio.push(50.0, 80.0) == 50 / 80, "over both ticks"
    assert ratio.push(60.0, 90.0) == 50 / 50, "the first one is out of sight"


def test_percentiles_are_values_that_came() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([3.0], 0.5) == 3.0
    assert percentile([], 0.5) != percentile([], 0.5)


# --- events -----------------------------------------------------------------------------------------------------------


def plan(number: int, state: str, **more: Any) -> dict[str, Any]:
    """A plan as the scheduler's `stats` have it."""
    facts = {"kind": "replica", "namespace": ("salt", "secret"), "prefix_tokens": 512, "from_worker": "a"}
    facts |= {"to_worker": "b", "reason": "hot", "saved_seconds": 2.0, "made_at": 5.0, "ended_at": None, "why": None}
    return {"id": number, "state": state, **facts, **more}


def test_a_plan_is_reported_when_it_begins_and_when_it_ends_once_each() -> None:
    events = DashboardEvents()
    for _ in range(3):
        events.plans({"active": [plan(1, "active")], "ended": []}, 6.0)
    for _ in range(3):
        events.plans({"active": [], "ended": [plan(1, "ended", ended_at=9.0, why="the load fell")]}, 10.0)
    told = events.latest(11.0)
    assert [(one["phase"], one["seconds_ago"], one["why"]) for one in told] == [
        ("ended", 2.0, "the load fell"),
        ("began", 6.0, None),
    ]
    assert (told[0]["from_worker"], told[0]["to_worker"], told[0]["prefix_tokens"]) == ("a", "b", 512)
    assert "secret" not in json.dumps(told), "a namespace may be somebody's salt"


def test_a_plan_that_came_and_went_between_two_ticks_is_reported_in_full() -> None:
    events = DashboardEvents()
    events.plans({"ended": [plan(3, "ended", ended_at=7.0, why="expired")]}, 8.0)
    assert [one["phase"] for one in events.latest(8.0)] == ["ended", "began"]


def test_events_are_bounded_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    events = DashboardEvents()
    for number in range(events_module.EVENTS_MAX + 7):
        events.worker("a", "ready", "suspect", f"{number}", float(number))
    told = events.latest(1000.0)
    assert len(told) == events_module.EVENTS_SHOWN
    assert events.total == told[0]["number"] == events_module.EVENTS_MAX + 7
    assert len(events._events) == events_module.EVENTS_MAX


def test_another_policy_is_an_event_and_the_first_one_is_none() -> None:
    events = DashboardEvents()
    for name in ("e2", "e2", "random"):
        events.policy(name, 1.0)
    assert [(one["before"], one["after"]) for one in events.latest(1.0)] == [("e2", "random")]


# --- ticks ------------------------------------------------------------------------------------------------------------


class Stage:
    """A router with plain objects for workers, and the live state of it."""

    def __init__(self, *names: str) -> None:
        self.clock = ManualClock(1000.0)
        self.scheduler = GlobalScheduler(names, clock=self.clock, record=DecisionRecording())
        self.workers = {f"tcp://{name}": worker(name) for name in names}
        self.router = SimpleNamespace(
            fleet=SimpleNamespace(workers=self.workers), counters=RouterCounters(), scheduler=self.scheduler
        )
        self.live = Live(self.router, self.clock)

    def tick(self, seconds: float = 1.0) -> None:
        """The next tick, so much later."""
        self.clock.advance(seconds)
        asyncio.run(self.live.tick())

    def place(self, prompt: list[int], cached: int | None = None) -> Any:
        """A request from its beginning to its end."""
        decision = self.scheduler.schedule(prompt)
        choice = SimpleNamespace(
            decision=decision, worker=decision.worker, cached_tokens=cached, prompt_tokens=len(prompt)
        )
        self.live.placed(choice)
        self.router.counters.requests += 1
        self.scheduler.first_token(decision.request_id, cached_tokens=cached)
        self.scheduler.finish(decision.request_id, output_tokens=3, cached_tokens=cached)
        return decision

    def told(self, after: int | None = None) -> dict[str, Any]:
        """What the page is reported."""
        return dict(json.loads(self.live.state(after, FACTS)))


def worker(name: str, **facts: Any) -> Any:
    """A worker as the fleet has it."""
    welcome = SimpleNamespace(kv_capacity_tokens=1000, engine="torch", model="m")
    pong = SimpleNamespace(running=2, waiting=3, kv_used_tokens=250, kv_cached_tokens=100)
    base = {"worker_id": name, "state": "ready", "why": "", "epoch": 7, "welcome": welcome, "pong": pong, "waiting": 3}
    return SimpleNamespace(**{**base, "counters": AddressCounters(), **facts})


def test_a_worker_is_reported_with_its_load_queue_cache_and_hits() -> None:
    stage = Stage("a")
    stage.tick()
    stage.place(list(range(100)), cached=0)
    stage.place(list(range(100)), cached=75)
    stage.tick()
    state = stage.told(after=0)
    (card,) = state["workers"]
    assert (card["id"], card["state"], card["waiting"], card["running"], card["kv"]) == ("a", "ready", 3, 2, 0.25)
    assert card["hit"] == state["fleet"]["hit"] == 75 / 200
    booked = stage.scheduler.stats()["workers"]["a"]["load_seconds"]
    assert card["load"] == pytest.approx(booked / 10.0), "of the least time that is looked at"
    assert card["history"]["hit"] == [None, 0.375] and card["history"]["waiting"] == [3.0, 3.0]
    assert state["fleet"]["requests_per_second"] == 2.0 and state["fleet"]["waiting"] == 3.0
    assert state["tick"] == 2


def test_without_the_engines_word_a_hit_is_what_was_estimated() -> None:
    stage = Stage("a")
    stage.place(list(range(100)), cached=0)
    assert stage.place([*range(100), 7]).matched_tokens == 100
    stage.place([*range(100), 8], cached=None)
    stage.tick()
    assert stage.told()["workers"][0]["hit"] == pytest.approx(200 / 302, abs=1e-3)


def test_a_worker_is_reported_with_what_lies_below_its_gpus_memory() -> None:
    stage = Stage("a")
    stage.workers["tcp://a"].pong = None
    prompt = list(range(600))
    stage.place(prompt, cached=0)
    stage.tick()
    (card,) = stage.told()["workers"]
    assert (card["kv"], card["away_tokens"], card["loaded"], stage.told()["fleet"]["loaded"]) == (0.6, 0, None, None)
    stage.scheduler.apply("a", [PrefixEvicted(prompt, 300, moved_to="CPU")])
    stage.tick()
    (card,) = stage.told()["workers"]
    assert (card["kv"], card["cached_tokens"], card["away_tokens"]) == (0.3, 600, 300), "a share of what fits the GPU"
    stage.place([*prompt, 7], cached=600)
    stage.tick()
    (card,) = stage.told(after=0)["workers"]
    assert (card["away_tokens"], card["loaded"], stage.told()["fleet"]["loaded"]) == (0, 0.5, 0.5)
    assert card["host_token_seconds"] == stage.scheduler.stats()["workers"]["a"]["host_token_seconds"] > 0.0
    (decision,) = [one for one in stage.told()["decisions"] if one["prompt_tokens"] == 601]
    assert decision["chosen"]["loading_seconds"] > 0.0 and decision["chosen"]["host_tokens"] == 300


def test_what_is_loaded_is_at_most_what_was_cached() -> None:
    """An engine that had dropped what was counted on."""
    stage = Stage("a")
    prompt = list(range(600))
    stage.place(prompt, cached=0)
    stage.scheduler.apply("a", [PrefixEvicted(prompt, 0, moved_to="DISK")])
    stage.place([*prompt, 7], cached=100)
    stage.tick()
    assert stage.told()["workers"][0]["loaded"] == stage.told()["fleet"]["loaded"] == 1.0


def test_history_comes_after_the_tick_that_was_asked_for_and_is_bounded() -> None:
    stage = Stage("a")
    for _ in range(HISTORY_TICKS + 5):
        stage.tick()
    lengths = {after: len(stage.told(after)["fleet_history"]["waiting"]) for after in (None, 0, HISTORY_TICKS, 10**9)}
    assert lengths == {None: 0, 0: HISTORY_TICKS, HISTORY_TICKS: 5, 10**9: 0}
    assert len(stage.live._answers) <= live_module.ANSWERS_MAX


def test_an_answer_is_made_once_a_tick() -> None:
    stage = Stage("a")
    stage.tick()
    first = stage.live.state(0, FACTS)
    stage.place([1, 2, 3])
    assert stage.live.state(0, FACTS) is first
    for after in range(-10, 0):
        stage.live.state(after, FACTS)
    assert len(stage.live._answers) <= live_module.ANSWERS_MAX
    stage.tick()
    assert stage.live.state(0, FACTS) != first


def test_first_tokens_are_of_the_last_seconds() -> None:
    stage = Stage("a")
    for seconds in (0.1, 0.2, 0.9):
        stage.live.first_token(seconds)
    stage.tick()
    assert [stage.told()["fleet"][f"first_token_{p}"] for p in ("p50", "p99")] == [0.2, 0.9]
    stage.tick(RECENT_TICKS)
    assert stage.told()["fleet"]["first_token_p50"] is None


def ended(*seconds_per_token: float | None) -> RequestContext:
    """A request with so many choices."""
    context = RequestContext("id", 0.0)
    choices: list[Any] = [SimpleNamespace(seconds_per_token=one) for one in seconds_per_token]
    context.progress.choices = choices
    return context


def test_errors_are_a_share_of_the_answers_of_the_last_seconds() -> None:
    stage = Stage("a")
    stage.tick()
    assert stage.told()["fleet"]["errors"] is None, "nothing was answered"
    for status in (200, 200, 404, 499, 429, 500, 503, 200):
        stage.live.answered(status, ended())
    stage.tick()
    told = stage.told()
    assert told["fleet"]["errors"] == 3 / 8
    assert [told["totals"][name] for name in ("answers", "failed_answers", "refused_answers")] == [8, 2, 1]
    for _ in range(RECENT_TICKS):
        stage.tick()
    assert stage.told()["fleet"]["errors"] is None and stage.told()["totals"]["failed_answers"] == 2


def test_throughput_and_the_time_per_token_are_of_the_last_seconds() -> None:
    stage = Stage("a")
    stage.tick()
    stage.live.answered(200, ended(0.01642, None, 0.03))
    stage.live.answered(200, ended(0.02))
    stage.router.counters.output_tokens += 300
    stage.tick(2.0)
    fleet = stage.told(after=0)["fleet"]
    assert [fleet[f"seconds_per_token_{name}"] for name in ("p50", "p99")] == [0.02, 0.03]
    assert fleet["output_tokens_per_second"] == 150.0
    stage.tick(RECENT_TICKS + 1)
    assert stage.told()["fleet"]["seconds_per_token_p50"] is None


def test_times_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "TIMES_MAX", 3)
    stage = Stage("a")
    for number in range(9):
        stage.live.answered(200, ended(float(number)))
        stage.live.first_token(float(number))
    stage.tick()
    fleet = stage.told()["fleet"]
    assert fleet["seconds_per_token_p50"] == fleet["first_token_p50"] == 7.0


def test_a_lost_worker_holds_no_hot_prefix() -> None:
    stage = Stage("a", "b")
    prompt = list(range(600))
    first = stage.place([*prompt, 1]).worker
    for number in range(4):
        stage.place([*prompt, 1000 + number])
    stage.tick()
    holders = {one["worker"] for one in stage.told()["prefixes"][0]["holders"]}
    assert first in holders
    stage.workers[f"tcp://{first}"].state = "lost"
    stage.tick()
    (prefix,) = stage.told()["prefixes"][:1]
    assert first not in {one["worker"] for one in prefix["holders"]} and prefix["holders_count"] == len(holders) - 1
    stage.workers[f"tcp://{first}"].state = "suspect"
    stage.tick()
    assert first in {one["worker"] for one in stage.told()["prefixes"][0]["holders"]}, "it may wake up with its cache"


def test_what_becomes_of_workers_is_reported_as_events() -> None:
    stage = Stage("a", "b", "c")
    stage.tick()
    lost = stage.workers["tcp://a"]
    lost.state, lost.why = "lost", "connection lost"
    stage.scheduler.drain_worker("b")
    stage.workers["tcp://c"].epoch = 8
    stage.tick()
    cards = {card["id"]: card for card in stage.told()["workers"]}
    assert (cards["a"]["state"], cards["a"]["why"], cards["a"]["load"]) == ("lost", "connection lost", 0.0)
    assert cards["b"]["state"] == "draining"
    del stage.workers["tcp://a"]
    stage.tick()
    told = [(one["worker"], one["before"], one["after"], one["why"]) for one in stage.told()["events"]]
    assert told == [
        ("a", "lost", "removed", ""),
        ("c", "ready", "ready", "it was restarted"),
        ("b", "ready", "draining", ""),
        ("a", "ready", "lost", "connection lost"),
    ]


def test_workers_beyond_the_bound_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "WORKERS_MAX", 2)
    stage = Stage("a", "b", "c", "d", "e")
    stage.tick()
    state = stage.told()
    assert len(state["workers"]) == 2 and state["workers_left_out"] == 3


def test_counts_of_workers_that_left_are_dropped() -> None:
    stage = Stage("a", "b")
    placed = stage.place([1, 2, 3]).worker
    assert set(stage.live._tallies) == {placed}
    del stage.workers[f"tcp://{placed}"]
    stage.tick()
    assert stage.live._tallies == {}


def test_decisions_are_reported_latest_first_and_one_with_all_its_terms() -> None:
    stage = Stage("a", "b")
    for number in range(live_module.DECISIONS_SHOWN + 3):
        stage.place([number, 1, 2, 3], cached=0)
    stage.tick()
    decisions = stage.told()["decisions"]
    sequences = [one["sequence"] for one in decisions]
    assert len(sequences) == live_module.DECISIONS_SHOWN and sequences == sorted(sequences, reverse=True)
    assert decisions[0]["seconds_ago"] == 1.0 and decisions[0]["outcome"]["ended"] == "finished"
    told = stage.live.decision(sequences[0])
    assert told is not None and {terms.worker for terms in told["terms"]} == {"a", "b"}
    assert told["chosen"] in told["terms"]
    sent = json.loads(msgspec.json.encode(told))
    for terms in (sent["chosen"], *sent["terms"]):
        assert sum(terms[name] for name in PRICE_TERMS) == pytest.approx(terms["total_seconds"], rel=1e-12)
    assert stage.live.decision(10**9) is None


def test_a_tick_that_fails_is_missed_and_the_next_one_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage("a")
    monkeypatch.setattr(live_module, "TICK_SECONDS", 0.0)
    fleet, stage.router.fleet = stage.router.fleet, None

    class Closed:
        @property
        def workers(self) -> Any:
            stage.router.fleet = fleet
            raise TransportError("the router is not started, or closed")

    stage.router.fleet = Closed()

    async def story() -> None:
        running = asyncio.ensure_future(stage.live.run())
        while stage.live._tick < 2:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(story())
    assert "misses a tick" in caplog.text


# --- endpoints --------------------------------------------------------------------------------------------------------


def test_of_several_processes_all_reports_what_the_first_one_has(tmp_path: Path) -> None:
    process = WorkerProcess("--id", "a", time_scale=0.01)
    gateway = GatewayProcess("--workers", process.endpoint, "--processes", "2", log=tmp_path / "log")
    try:
        ages = []
        for _ in range(16):  # the kernel spreads connections; all of them on one process: once in 30,000 runs
            client = Client(gateway.address)
            status, _, state = client.call("GET", "/v1/preble/state?after=0")
            assert status == 200
            assert client.call("GET", "/v1/preble/decisions/99999")[0] == 404
            client.close()
            ages.append((state["tick"], state["uptime_seconds"]))
        assert ages == sorted(ages), "one history, not two in turn"
    finally:
        gateway.stop()
        process.stop()


def test_endpoints_reports_and_refuse(tmp_path: Path) -> None:
    process = WorkerProcess("--id", "a", time_scale=0.01)
    gateway = GatewayProcess("--workers", process.endpoint, log=tmp_path / "log")
    client = Client(gateway.address)
    try:
        for query in ("?after=x", "?after=-1", "?after=1.5", f"?after={'9' * 16}", "?after=%D9%A3"):
            assert client.call("GET", f"/v1/preble/state{query}")[0] == 400
        for path, status in (("decisions/99999999", 404), ("decisions/x", 400), ("decisions/", 404)):
            assert client.call("GET", f"/v1/preble/{path}")[0] == status
        for path in ("/page/nothing.js", "/page/..%2Fconfig.py", "/page/", "/page/../app.py"):
            assert client.call("GET", path)[0] == 404
        for path, kind in (("/", "text/html"), ("/page/page.js", "text/javascript"), ("/page/page.css", "text/css")):
            status, headers, _ = client.call("GET", path)
            assert status == 200 and headers["content-type"].startswith(kind)
            assert "default-src 'none'" in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
        assert client.call("GET", "/v1/preble/state")[1]["cache-control"] == "no-store"
    finally:
        client.close()
        gateway.stop()
        process.stop()
