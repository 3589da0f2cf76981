"""The guard of speed: what it calls a loss, a gain and a change of tools, and that its script fits today's interface.

Counting itself needs valgrind and is `make instructions`; here the script runs with a stand-in that counts nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.decision import instructions as module
from benchmarks.decision import instructions_script as script

NAME = "match: buffer"


@pytest.fixture
def instructions() -> ModuleType:
    """The module under test."""
    return module


@pytest.mark.parametrize(
    ("now", "fails", "notes"), [(1000, 0, 0), (1050, 0, 0), (1051, 1, 0), (950, 0, 0), (949, 0, 1), (2000, 1, 0)]
)
def test_five_percent_more_fails_and_five_percent_less_asks_for_a_new_baseline(
    instructions: ModuleType, now: int, fails: int, notes: int
) -> None:
    verdict = instructions.compare({NAME: 1000.0}, {NAME: float(now)})
    assert (len(verdict.failures), len(verdict.notes), len(verdict.lines)) == (fails, notes, 1)
    for said in verdict.failures + verdict.notes:
        assert NAME in said and str(now) in said and "1000" in said


def test_one_slow_operation_does_not_hide_behind_fast_ones(instructions: ModuleType) -> None:
    verdict = instructions.compare({"a": 100.0, "b": 100.0, "c": 100.0}, {"a": 10.0, "b": 106.0, "c": 10.0})
    assert [failure.partition(":")[0] for failure in verdict.failures] == ["b"]


def test_operations_that_came_or_went_fail_until_the_baseline_is_renewed(instructions: ModuleType) -> None:
    verdict = instructions.compare({"gone": 5.0, "kept": 5.0}, {"kept": 5.0, "new": 7.0})
    assert [failure.partition(":")[0] for failure in verdict.failures] == ["gone", "new"]
    assert all("renew" in failure for failure in verdict.failures)


def test_an_operation_that_cost_nothing_may_not_begin_to_cost(instructions: ModuleType) -> None:
    assert instructions.compare({NAME: 0.0}, {NAME: 3.0}).failures
    assert not instructions.compare({NAME: 0.0}, {NAME: 0.0}).failures


def test_other_tools_are_named_with_both_versions(instructions: ModuleType) -> None:
    was, now = {"python": "3.11.7", "libc": "glibc 2.36"}, {"python": "3.12.1", "libc": "glibc 2.36", "cython": "3.3"}
    said = instructions.differences(was, now)
    assert len(said) == 2
    assert "3.11.7" in said[0] and "3.12.1" in said[0]
    assert "cython" in said[1] and "none" in said[1]


def test_the_loop_is_taken_off_and_calls_that_do_many_operations_are_shared_out(instructions: ModuleType) -> None:
    sections = {"a": 5_000, "b": 6_100, "an empty loop of 10": 1_000, "an empty loop of 2": 100}
    found = instructions.per_operation(sections, {"a": 10, "b": 60}, {"a": 10, "b": 2})
    assert found == {"a": 400.0, "b": 100.0}
    with pytest.raises(instructions.CannotCount, match="b"):
        instructions.per_operation({"a": 1, "an empty loop of 1": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1})


def test_a_section_is_read_from_what_callgrind_writes(instructions: ModuleType, tmp_path: Path) -> None:
    asked, last = tmp_path / "out.1", tmp_path / "out"
    asked.write_text("version: 1\ndesc: Trigger: Client Request: tick: nothing to do\n\nevents: Ir\ntotals: 1234\n")
    last.write_text("version: 1\ndesc: Trigger: Program termination\n\nevents: Ir\ntotals: 99\n")
    assert instructions.section_of(asked) == ("tick: nothing to do", 1234)
    assert instructions.section_of(last) is None


def test_without_valgrind_it_says_how_to_get_it(
    instructions: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(instructions.shutil, "which", lambda name: None)
    assert instructions.main([]) == 2
    assert "apt-get install valgrind" in capsys.readouterr().err


def test_a_core_built_for_finding_bugs_is_not_counted(
    instructions: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(instructions.shutil, "which", lambda name: name)
    for mode in ("debug=True sanitize=\n", "debug=False sanitize=address,undefined\n"):
        monkeypatch.setattr(instructions, "build_mode", lambda mode=mode: mode)
        assert instructions.main([]) == 2
        assert mode.strip() in capsys.readouterr().err


def test_renewing_keeps_the_reason_and_demands_one(
    instructions: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    baseline = tmp_path / "instructions.json"
    monkeypatch.setattr(instructions, "BASELINE", baseline)
    monkeypatch.setattr(instructions, "counted", lambda: {NAME: 1000.4})
    assert instructions.main([]) == 1, "there is no baseline yet"
    assert instructions.main(["--renew", "  why  "]) == 1
    assert not baseline.exists()
    assert instructions.main(["--renew", "matching now looks at the namespace"]) == 0
    kept = json.loads(baseline.read_text())
    assert kept["reason"] == "matching now looks at the namespace"
    assert kept["instructions"] == {NAME: 1000}
    assert kept["toolchain"] == instructions.toolchain()
    assert instructions.main([]) == 0, "what was just counted holds"
    monkeypatch.setattr(instructions, "counted", lambda: {NAME: 1051.0})
    assert instructions.main([]) == 1


def test_the_script_does_what_the_baseline_lists(instructions: ModuleType) -> None:
    class Uncounted:
        """Stands in for the extension that talks to callgrind."""

        def __init__(self) -> None:
            self.sections: list[str] = []

        def begin(self) -> None: ...

        def end(self, name: str) -> None:
            self.sections.append(name)

        def nothing(self, _: Any) -> None: ...

    request = Uncounted()
    counted = script.Counted(request)
    for part in (script.requests, script.explorations, script.forgetting, script.events, script.tree):
        part(counted)
    baseline = json.loads(instructions.BASELINE.read_text())
    assert set(counted.done) == set(baseline["instructions"])
    assert set(counted.done) <= set(request.sections)
    assert len(baseline["reason"]) >= instructions.REASON_CHARS_MIN
    assert instructions.per_operation(dict.fromkeys(request.sections, 7), counted.done, counted.turns)
