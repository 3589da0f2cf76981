"""A minute of the chaos run, and that it would see what it looks for. Owns the length only; `stress/chaos.py` owns the
faults and the verdict, `stress/load.py` the traffic and the examination."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.stress.chaos import ROUTER_FAULTS, WORKER_FAULTS, schedule
from tests.stress.load import GROUPS, VARIANTS, wanted_tokens
from tests.support.faults import RouterProcess
from tests.support.transport import WorkerProcess

SECONDS = 60
SLOWER = 15  # so many times longer it may take where the machine is busy


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
