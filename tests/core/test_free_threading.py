"""Threads that truly run at once: on CPython built without its lock (`make test-free-threaded`) these are its named
tests; elsewhere they hold as well. Owns what two threads must not both be given, whatever their order; `stress/` has
the traffic."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import preble
from preble import GlobalScheduler, ManualClock
from preble.errors import DuplicateRequest
from tests.support.paths import ROOT

THREADS = 4
ROUNDS = 200
free_threaded = pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python is built with its lock"
)


def compiled_modules() -> list[str]:
    """Names of all compiled modules."""
    sources = sorted((ROOT / "preble").rglob("*.pyx"))
    return [".".join(source.relative_to(ROOT).with_suffix("").parts) for source in sources]


@free_threaded
def test_importing_and_deciding_leave_pythons_lock_off() -> None:
    """A module that is not declared safe turns the lock on for the whole process, with a warning only. Modules beside
    the core whose packages are not installed are left out: there is no msgspec for 3.13t."""
    script = f"""
import importlib, sys
from preble.errors import MissingExtra
assert not sys._is_gil_enabled(), "it was on from the start"
for name in {compiled_modules()!r}:
    try:
        importlib.import_module(name)
    except (MissingExtra, ModuleNotFoundError):
        assert not name.startswith("preble._"), f"{{name}} cannot be imported"
    assert not sys._is_gil_enabled(), f"{{name}} turned it on"
import preble
scheduler = preble.GlobalScheduler(["a", "b"])
decision = scheduler.schedule([1, 2, 3])
assert scheduler.finish(decision.request_id, output_tokens=4)
assert not sys._is_gil_enabled(), "a decision turned it on"
print("off")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.strip() == "off", done.stderr


def test_there_are_compiled_modules_to_ask_about() -> None:
    assert "preble._radix" in compiled_modules() and Path(preble.__file__).parent == ROOT / "preble"


def at_once(work: Callable[[int, int], Any]) -> list[list[Any]]:
    """What each thread's calls return, or the DuplicateRequest they raise: every round is begun by all together."""
    barrier = threading.Barrier(THREADS)
    answers: list[list[Any]] = [[] for _ in range(THREADS)]
    failures: list[BaseException] = []

    def run(thread: int) -> None:
        try:
            for number in range(ROUNDS):
                barrier.wait()
                try:
                    answers[thread].append(work(thread, number))
                except DuplicateRequest:
                    answers[thread].append(None)
        except BaseException as failure:  # noqa: BLE001 - raised below, in the thread that asserts
            failures.append(failure)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(THREADS)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if failures:
        raise failures[0]
    return answers


@pytest.mark.parametrize("policy", ["e2", "least_loaded"])
def test_of_several_requests_with_one_id_one_is_placed(policy: str) -> None:
    sched = GlobalScheduler(["a", "b"], policy=policy, clock=ManualClock())
    answers = at_once(lambda thread, number: sched.schedule([number, thread, 3], request_id=number))
    placed = [[one[number] for one in answers if one[number] is not None] for number in range(ROUNDS)]
    assert [len(found) for found in placed] == [1] * ROUNDS
    assert sched.stats()["live_requests"] == ROUNDS
    sched.check()


@pytest.mark.parametrize("ending", ["finish", "cancel"])
def test_of_several_endings_of_one_request_one_counts(ending: str) -> None:
    sched = GlobalScheduler(["a", "b"], clock=ManualClock())
    for number in range(ROUNDS):
        sched.schedule([number, 2, 3], request_id=number)
    answers = at_once(lambda thread, number: getattr(sched, ending)(number))
    assert [sum(one[number] for one in answers) for number in range(ROUNDS)] == [1] * ROUNDS
    stats = sched.stats()
    assert stats["live_requests"] == 0 and stats["late_calls"] == ROUNDS * (THREADS - 1)
    sched.check()


def test_ids_made_up_by_several_threads_are_all_different() -> None:
    sched = GlobalScheduler(["a", "b"], clock=ManualClock())
    answers = at_once(lambda thread, number: sched.schedule([number, thread]).request_id)
    assert len({one for answer in answers for one in answer}) == THREADS * ROUNDS
    assert sched.stats()["scheduled"] == THREADS * ROUNDS
    sched.check()


def test_several_prompts_at_once_are_placed_once_each() -> None:
    sched = GlobalScheduler(["a", "b"], clock=ManualClock())
    answers = at_once(lambda thread, number: sched.schedule_many([[number, thread], [number, thread, 5]]))
    ids = [decision.request_id for answer in answers for found in answer for decision in found]
    assert len(set(ids)) == len(ids) == 2 * THREADS * ROUNDS
    sched.check()


def test_a_match_names_no_worker_that_was_never_there() -> None:
    """Workers come and go while others ask; each asks its Match for names, too, which are made when first asked for."""
    sched = GlobalScheduler(["stays"], clock=ManualClock())
    sched.schedule(list(range(40)))
    known = {"stays", *(f"w{number}" for number in range(ROUNDS))}
    shared = [sched.match(list(range(40))) for _ in range(ROUNDS)]

    def work(thread: int, number: int) -> bool:
        if thread == 0:
            sched.add_worker(f"w{number}")
            sched.schedule(list(range(40)), exclude=["stays"])
            sched.remove_worker(f"w{number}")
            return True
        found = sched.match(list(range(40))).matched_tokens
        return set(found) <= known and found.get("stays") == 39 and shared[number].matched_tokens == {"stays": 39}

    answers = at_once(work)
    assert all(all(answer) for answer in answers)
    sched.check()


def test_threads_that_change_a_list_while_it_is_read_get_a_whole_one() -> None:
    """Tokens in a list are copied in one step: the prompt of before or that of after, never one freed beneath."""
    sched = GlobalScheduler(["a"], clock=ManualClock())
    given = [7] * 64

    def work(thread: int, number: int) -> int:
        if thread == 0:
            given.extend([7] * 64) if number % 2 == 0 else given.__delitem__(slice(64, None))
            return 64
        return sched.match(given).prompt_tokens

    answers = at_once(work)
    assert {one for answer in answers for one in answer} <= {64, 128}
