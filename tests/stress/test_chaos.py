"""A minute of the chaos run, and that it would see what it looks for. Owns the length only; `stress/chaos.py` owns the
faults and the verdict, `stress/load.py` the traffic and the examination."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from preble.errors import CapacityExceeded, Overloaded, PrebleError, QueueFull, WorkerLost
from tests.stress.chaos import ROUTER_FAULTS, WORKER_FAULTS, schedule
from tests.stress.load import GROUPS, VARIANTS, Load, load_parser, wanted_tokens
from tests.support.faults import RouterProcess
from tests.support.transport import WorkerProcess

SECONDS = 60
SLOWER = 4  # so many times longer it may take where the machine is busy; less than any test may


def test_a_minute_of_faults_loses_no_token_and_leaves_the_bookings_even(
    run_python: Callable[..., Any],
) -> None:
    ended = run_python("-m", "tests.stress.chaos", "--seconds", str(SECONDS), timeout_seconds=SLOWER * SECONDS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert set(report["faults"]) == {*WORKER_FAULTS, *ROUTER_FAULTS} and report["findings"] == []
    assert all(report["totals"][name] > 0 for name in ("answered", "left", "resumed", "probed", "estimated_tokens"))
    assert report["totals"]["token_gaps"] == 0


def test_the_schedule_is_the_seeds_alone_and_never_takes_the_last_worker_or_router() -> None:
    plan = schedule(7, 600.0, 3, 2)
    assert plan == schedule(7, 600.0, 3, 2) != schedule(8, 600.0, 3, 2)
    kinds = Counter(fault.kind for fault in plan)
    assert set(kinds) == {*WORKER_FAULTS, *ROUTER_FAULTS} and min(kinds.values()) > 10
    for kinds_of_side, count in ((WORKER_FAULTS, 3), (ROUTER_FAULTS[:2], 2)):
        mine = [fault for fault in plan if fault.kind in kinds_of_side]
        for fault in mine:
            ill = [one.target for one in mine if one.start <= fault.start < one.start + one.seconds]
            assert len(ill) == len(set(ill)) < count


def test_a_router_that_does_not_answer_says_where_it_waits(capfd: pytest.CaptureFixture[str]) -> None:
    worker = WorkerProcess(time_scale=0.0)
    with contextlib.ExitStack() as stack:
        stack.callback(worker.stop)
        router = RouterProcess(worker.endpoint, "--silent-seconds", "600", "--give-up-seconds", "600")
        stack.callback(router.kill)
        worker.signal(signal.SIGSTOP)
        router.ask("load")
        router.post("stop")
        with pytest.raises(AssertionError, match=r"did not answer within 0\.2 s"):
            router.last_answer(timeout_seconds=0.2)
        assert not router.answered
    errors = capfd.readouterr().err
    assert "Current thread" in errors and "await self.request(number, manner)" in errors


def test_a_client_that_never_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def stop() -> list[str]:
        load = Load(load_parser().parse_args(["tcp://127.0.0.1:1"]))
        load.clients = [asyncio.ensure_future(never())]
        findings = (await load.obey("stop"))["findings"]
        await load.router.close()
        return findings

    monkeypatch.setattr("tests.stress.load.STOP_SECONDS", 0.01)
    (finding,) = asyncio.run(stop())
    assert "a client did not end" in finding and "never" in finding


@pytest.mark.parametrize(
    "error", [Overloaded("too long", retry_after_seconds=1.0), WorkerLost("gone"), QueueFull("full")]
)
def test_a_client_that_is_turned_away_lets_others_run(error: PrebleError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: one that was refused for its wait asked again at once, and its router never ran again."""
    asked = 0

    async def refused(*_: object) -> AsyncIterator[None]:
        nonlocal asked
        asked += 1
        assert asked < 1000, "nobody else has run"
        raise error
        yield

    async def clients() -> Load:
        load = Load(load_parser().parse_args(["tcp://127.0.0.1:1"]))
        monkeypatch.setattr(load.router, "generate", refused)
        load.clients = [asyncio.ensure_future(load.client(0))]
        await asyncio.sleep(0.0)
        await load.obey("stop")
        await load.router.close()
        return load

    load = asyncio.run(clients())
    assert asked == 1 and load.counts["turned_away"] == isinstance(error, CapacityExceeded)
    assert len(load.findings) == (not isinstance(error, CapacityExceeded))


def test_wrong_answers_are_found(tmp_path: Path) -> None:
    answers = [[1] * wanted_tokens(number) for number in range(GROUPS * VARIANTS)]
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    worker = WorkerProcess(time_scale=0.0)
    with contextlib.ExitStack() as stack:
        stack.callback(worker.stop)
        router = RouterProcess(worker.endpoint, "--reference", str(tmp_path / "answers.json"))
        stack.callback(router.kill)
        router.ask("load")
        while not router.ask("progress")["counts"].get("answered"):
            continue
        assert any("they are wrong" in finding for finding in router.ask("stop")["findings"])
