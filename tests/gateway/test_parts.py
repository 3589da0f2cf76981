"""Parts of the gateway that need no process: the check of tokenizers at the start, rates, errors, merging of choices,
bounded labels. Workers are scripted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preble import GlobalScheduler, ManualClock, PrefixEvicted, SamplingParams, SchedulerConfig
from preble.errors import EngineError, HandshakeRefused, NoWorkers, Overloaded, QueueFull, TransportError, WorkerLost
from preble.gateway import keys, program
from preble.gateway.core import metric_families, metrics
from preble.gateway.core.config import GatewayConfig
from preble.gateway.core.http_errors import ApiError, api_error_of
from preble.gateway.core.logs import JsonLines
from preble.gateway.keys import Keys, RateLimiter
from preble.gateway.text.choices import Choice, ChoiceJob, TextPiece
from preble.gateway.text.generation import merged
from preble.gateway.text.tokenizing import TextCodec
from preble.gateway.text.unread import UnreadBudget, UnreadPieces
from preble.router import Router
from tests.support.gateway import make_tokenizer, swap_letters
from tests.support.paths import ROOT
from tests.support.transport import FAST, ScriptedWorker, asynchronous, until


async def no_script(worker: Any, submit: Any) -> None:
    """A worker that never answers."""


@asynchronous
async def test_workers_with_another_tokenizer_are_refused_and_named(tmp_path: Path) -> None:
    codec = TextCodec(make_tokenizer(tmp_path), threads=1)
    worker = ScriptedWorker(no_script, tokenizer_fingerprint="of-another-model")
    router = Router([worker.endpoint], config=FAST, tokenizer_fingerprint=codec.fingerprint)
    with pytest.raises(HandshakeRefused, match="of-another-model.*tokenised wrongly"):
        await program._start(router, GatewayConfig(), codec)
    codec.close()
    await worker.close()


@asynchronous
async def test_with_warn_the_first_difference_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    codec = TextCodec(make_tokenizer(tmp_path / "mine"), threads=1)
    other = swap_letters(make_tokenizer(tmp_path / "other"), "H", "I")
    for fingerprint, model, said in (
        ("another", str(other), "first difference: probe 0, position 1: the gateway has token 72, the worker 73"),
        ("another", "a-name", "first difference: not known"),
        ("", "a-name", "does not say which tokenizer it has"),
    ):
        caplog.clear()
        worker = ScriptedWorker(no_script, tokenizer_fingerprint=fingerprint, model=model)
        router = Router([worker.endpoint], config=FAST)
        with caplog.at_level(logging.WARNING, "preble.gateway"):
            await program._start(router, GatewayConfig(), codec)
        assert said in caplog.text
        await router.close()
        await worker.close()
    codec.close()


# --- rates ------------------------------------------------------------------------------------------------------------


def test_a_rate_lets_bursts_pass_and_says_how_long_to_wait() -> None:
    clock = ManualClock()
    limiter = RateLimiter(60.0, 3, clock)
    assert [limiter.wait_seconds("a") for _ in range(4)] == [0.0, 0.0, 0.0, 1.0]
    assert limiter.wait_seconds("b") == 0.0, "names do not share"
    clock.advance(0.5)
    assert limiter.wait_seconds("a") == pytest.approx(0.5), "refused requests cost nothing"
    clock.advance(0.5)
    assert limiter.wait_seconds("a") == 0.0
    clock.advance(3600.0)
    assert [limiter.wait_seconds("a") > 0 for _ in range(4)] == [False, False, False, True], "no more than a burst"


def test_of_too_many_names_the_oldest_starts_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "BUCKETS_MAX", 2)
    limiter = RateLimiter(1.0, 1, ManualClock())
    assert [limiter.wait_seconds(name) > 0 for name in "aabbc"] == [False, True, False, True, False]
    assert len(limiter._buckets) == 2
    assert [limiter.wait_seconds(name) > 0 for name in "ba"] == [True, False], "b is remembered, a is not"


def test_a_request_of_many_choices_takes_as_many_of_the_rate() -> None:
    clock = ManualClock()
    limiter = RateLimiter(60.0, 10, clock)
    assert limiter.wait_seconds("a") == 0.0
    limiter.charge("a", 63)  # the other choices of one request
    assert limiter.wait_seconds("a") == pytest.approx(55.0)
    clock.advance(55.0)
    assert [limiter.wait_seconds("a") > 0 for _ in range(2)] == [False, True]
    assert limiter.lacking_seconds("b") == limiter.lacking_seconds("b") == 0.0 and "b" not in limiter._buckets


def asked(known: Keys, key: str, address: str = "1.1.1.1") -> int:
    """The status that a request for the models with that key gets."""
    try:
        known.grant_of({"authorization": f"Bearer {key}"} if key else {}, "/v1/models", "GET", address)
    except ApiError as error:
        return error.status
    return 200


def test_a_key_stands_where_openais_or_anthropics_clients_put_it() -> None:
    known = Keys(["right-key"], [], None, ManualClock())
    for headers in ({"authorization": "Bearer right-key"}, {"x-api-key": "right-key"}):
        assert known.grant_of(headers, "/v1/messages", "POST", "1.1.1.1").name
    for headers in ({"authorization": "Basic right-key"}, {"x-api-key": "wrong"}, {"x-api-key": ""}, {}):
        with pytest.raises(ApiError):
            known.grant_of(headers, "/v1/messages", "POST", "1.1.1.1")


def test_wrong_keys_are_limited_and_right_ones_go_on() -> None:
    clock = ManualClock()
    known = Keys(["right-key", "other-key"], [], None, clock)
    assert asked(known, "right-key") == 200
    assert [asked(known, f"guess-{i}") for i in range(25)] == [401] * 20 + [429] * 5
    assert asked(known, "other-key") == 429, "what may be a guess is not looked at"
    assert asked(known, "right-key") == 200, "it was right there before"
    assert asked(known, "") == 401, "none is no guess"
    assert asked(known, "other-key", "2.2.2.2") == 200, "addresses do not share"
    clock.advance(2.0)
    assert [asked(known, "other-key"), asked(known, "guess"), asked(known, "guess")] == [200, 401, 429]


def test_of_too_many_addresses_with_right_keys_the_oldest_starts_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "BUCKETS_MAX", 2)
    known = Keys(["right-key"], [], None, ManualClock())
    assert [asked(known, "right-key", f"1.1.1.{i}") for i in range(5)] == [200] * 5
    assert len(known._right) == 2


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (Overloaded("busy", retry_after_seconds=2.1), 429, "overloaded", "3"),
        (QueueFull("full"), 503, "queue_full", "1"),
        (NoWorkers("none"), 503, "no_workers", "1"),
        (TransportError("closed"), 503, "unavailable", "1"),
        (WorkerLost("lost"), 502, "worker_lost", "1"),
        (EngineError("broken"), 500, "engine_error", None),
    ],
)
def test_errors_say_whether_trying_again_makes_sense(error: Any, status: int, code: str, retry: str | None) -> None:
    problem = api_error_of(error)
    assert (problem.status, problem.code, problem.headers().get("retry-after")) == (status, code, retry)
    assert api_error_of(problem) is problem


# --- choices ----------------------------------------------------------------------------------------------------------


def choice(index: int) -> Choice:
    """A choice of nothing in particular."""
    return Choice(ChoiceJob(index, f"r{index}", np.array([1], np.int32), SamplingParams()))


async def ticking(one: Choice, count: int, closed: list[int], error: Exception | None = None) -> Any:
    """`count` pieces, then an error or the end; says when it is closed."""
    try:
        for i in range(count):
            yield TextPiece(one, str(i))
            await asyncio.sleep(0)
        if error is not None:
            raise error
    finally:
        closed.append(one.job.index)


class Seen:
    """What the jobs have done, read or not."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ends = 0

    def came(self, piece: TextPiece) -> None:
        """A piece has come."""
        self.texts.append(piece.text)

    def ended(self) -> None:
        """A job has ended."""
        self.ends += 1


def merging(streams: list[Any], seen: Seen | None = None, budget: UnreadBudget | None = None) -> Any:
    """The pieces of these streams."""
    return merged(streams, UnreadPieces(budget or UnreadBudget(1 << 20), len(streams)), seen or Seen())


@asynchronous
async def test_choices_are_merged_each_in_its_own_order() -> None:
    closed: list[int] = []
    texts = ["", "", ""]
    async for piece in merging([ticking(choice(i), 5 + i, closed) for i in range(3)]):
        texts[piece.choice.job.index] += piece.text
    assert texts == ["01234", "012345", "0123456"]
    assert sorted(closed) == [0, 1, 2]


@pytest.mark.parametrize("error", [EngineError("broken"), ZeroDivisionError("a defect")])
@asynchronous
async def test_an_error_of_one_choice_ends_all(error: Exception) -> None:
    closed: list[int] = []
    streams = [
        ticking(choice(0), 1000, closed),
        ticking(choice(1), 2, closed, error),
    ]
    with pytest.raises(type(error)):
        async for _ in merging(streams):
            pass
    assert sorted(closed) == [0, 1]


@asynchronous
async def test_choices_end_though_nobody_reads_them_and_keep_what_came() -> None:
    closed: list[int] = []
    seen, budget = Seen(), UnreadBudget(1 << 20)
    stream = merging([ticking(choice(i), 100, closed) for i in range(4)], seen, budget)
    texts = {}
    first = await anext(stream)
    texts[first.choice.job.index] = first.text
    await until(lambda: seen.ends == 4, "all have ended, unread")
    assert sorted(closed) == [0, 1, 2, 3] and budget.bytes_used > 0
    async for piece in stream:
        texts[piece.choice.job.index] = texts.get(piece.choice.job.index, "") + piece.text
    assert texts == dict.fromkeys(range(4), "".join(map(str, range(100))))
    assert budget.bytes_used == 0 and not budget._holders


@asynchronous
async def test_at_the_bound_whoever_leaves_most_unread_fails_and_others_go_on() -> None:
    closed: list[int] = []
    lazy, eager, budget = Seen(), Seen(), UnreadBudget(20_000)
    unread = merging([ticking(choice(0), 10_000, closed)], lazy, budget)
    await anext(unread)
    read = ""
    async for piece in merging([ticking(choice(1), 300, closed)], eager, budget):
        read += piece.text
        assert budget.bytes_used <= 20_000
    assert read == "".join(map(str, range(300)))
    assert closed == [0, 1] and len(lazy.texts) < 300
    with pytest.raises(QueueFull, match="unread"):
        await anext(unread)
    assert budget.bytes_used == 0 and not budget._holders


@asynchronous
async def test_who_stops_reading_gives_everything_back() -> None:
    closed: list[int] = []
    budget = UnreadBudget(1 << 20)
    stream = merging([ticking(choice(i), 1000, closed) for i in range(2)], Seen(), budget)
    await anext(stream)
    await stream.aclose()
    assert sorted(closed) == [0, 1] and budget.bytes_used == 0


# --- the log ----------------------------------------------------------------------------------------------------------


def test_warnings_and_failures_of_threads_are_lines_of_json_too() -> None:
    program = (
        "import threading, warnings\n"
        "from preble.gateway.core.logs import log_as_json\n"
        "log_as_json('info', {'process': 1})\n"
        "warnings.warn('two\\nlines')\n"
        "thread = threading.Thread(target=lambda: 1 / 0, name='worker')\n"
        "thread.start(), thread.join()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    first, second = map(json.loads, ended.stderr.splitlines())
    assert "two\nlines" in first["message"] and first["process"] == 1
    assert second["message"].startswith("worker failed") and "ZeroDivisionError" in second["traceback"]


def test_whatever_is_logged_is_a_line_of_json_with_its_time_in_utc() -> None:
    fields = {"path": "caf\udce9", "what": object}
    record = logging.LogRecord("preble", logging.INFO, "file", 1, "cannot read %s", ("caf\udce9",), None)
    record.__dict__ |= {"created": 86_400.25, "stack_info": "Stack:\n  here", "fields": fields}
    line = JsonLines({"process": 1}).format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert found["time"] == "1970-01-02T00:00:00.250+00:00"
    assert found["message"] == "cannot read caf\udce9" and found["process"] == 1
    assert found["what"] == repr(object) and found["stack"].startswith("Stack")


# --- metrics ----------------------------------------------------------------------------------------------------------


GATEWAY = {"live_choices": 0, "ready": True, "tasks": 0}


def test_worker_labels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_families, "WORKER_LABELS_MAX", 2)
    scheduler = GlobalScheduler([f"w{i}" for i in range(5)])
    workers = {f"tcp://{i}": {"worker_id": f"w{i}", "state": "ready", "epoch": 1, "losses": i} for i in range(5)}
    names = ("finished", "failed", "cancelled", "resumed", "queue_full", "refused", "shed", "live_requests")
    router = {**dict.fromkeys(names, 0), "siblings": {}, "workers": workers}
    text = metrics.Metrics(ManualClock()).render(scheduler, router, GATEWAY).decode()
    losses = [line for line in text.splitlines() if line.startswith("preble_worker_losses_total")]
    assert losses == [
        'preble_worker_losses_total{worker="w0"} 0.0',
        'preble_worker_losses_total{worker="w1"} 1.0',
        'preble_worker_losses_total{worker="other"} 9.0',
    ]


def test_what_workers_keep_below_the_gpus_memory_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_families, "WORKER_LABELS_MAX", 1)
    scheduler, prompt = GlobalScheduler(["w0", "w1", "w2"]), list(range(4000))
    for name in ("w0", "w1", "w2"):
        others = [other for other in scheduler.workers if other != name]
        scheduler.finish(scheduler.schedule(prompt, exclude=others).request_id, cached_tokens=0)
        scheduler.apply(name, [PrefixEvicted(prompt, 1000, moved_to="DISK" if name == "w1" else "CPU")])
        scheduler.schedule([*prompt, 7], exclude=others)
    workers = {f"tcp://{i}": {"worker_id": f"w{i}", "state": "ready", "epoch": 1} for i in range(3)}
    stats = scheduler.stats()["workers"]
    families = {family.name: family for family in metric_families._worker_families(stats, workers)}
    away = {tuple(one.labels.values()): one.value for one in families["preble_worker_away_tokens"].samples}
    assert away == {("w0",): 3000.0, ("other",): 6000.0}
    loaded = {tuple(one.labels.values()): one.value for one in families["preble_worker_loaded_tokens"].samples}
    ours, others = {("w0", "host"): 3000.0, ("w0", "disk"): 0.0}, {("other", "host"): 3000.0, ("other", "disk"): 3000.0}
    assert loaded == ours | others


@pytest.mark.parametrize(
    ("options", "delay_seconds"),
    [
        ({"workers": ["http://one:8000"], "processes": 4}, 0.005),
        ({"workers": ["http://one:8000"]}, 0.05),
        ({"workers": ["tcp://one:5555"], "processes": 4}, 0.05),
        ({"workers": ["http://one:8000"], "processes": 4, "scheduler": SchedulerConfig(peer_delay_seconds=0.2)}, 0.2),
    ],
)
def test_processes_before_servers_reckon_with_their_own_delay(options: dict[str, Any], delay_seconds: float) -> None:
    assert program._scheduler_config(GatewayConfig(**options)).peer_delay_seconds == delay_seconds
