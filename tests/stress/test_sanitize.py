"""The sanitizer commands must not pass where no sanitizer is at work. Owns checks of `stress/sanitize.py` that need no
sanitizer; that planted faults are found is proven by each run of the commands themselves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.stress.sanitize import (
    CORE_TESTS,
    ROOT,
    SANITIZERS,
    NotProven,
    copy_generated,
    copy_sources,
    prove_build,
    take_reports,
)


@pytest.mark.parametrize("kind", sorted(SANITIZERS))
def test_modules_without_a_sanitizer_prove_nothing(kind: str) -> None:
    with pytest.raises(NotProven, match=f"does not call {SANITIZERS[kind].symbol}"):
        prove_build(SANITIZERS[kind], ROOT)


def test_a_copy_without_modules_proves_nothing(tmp_path: Path) -> None:
    copy_sources(tmp_path)
    with pytest.raises(NotProven, match="0 compiled"):
        prove_build(SANITIZERS["asan"], tmp_path)


def test_the_copy_follows_the_sources_and_keeps_what_was_built_there(tmp_path: Path) -> None:
    (tmp_path / "preble").mkdir()
    for name in ("gone.pyx", "gone.pyi", "_radix.so"):
        (tmp_path / "preble" / name).touch()
    copy_sources(tmp_path)
    assert {path.name for path in (ROOT / "preble").glob("*.p*")} == {
        p.name for p in (tmp_path / "preble").glob("*.p*")
    }
    assert (tmp_path / "preble" / "_radix.so").exists()
    assert (tmp_path / "tests" / "stress" / "planted.c").read_text() == (ROOT / "tests/stress/planted.c").read_text()


def test_generated_c_is_taken_over_unless_it_is_older_or_has_bounds_checks(tmp_path: Path) -> None:
    made, kept = tmp_path / "made", tmp_path / "copy" / "build" / "cython" / "preble" / "a.c"
    (made / "preble").mkdir(parents=True)
    (made / "preble" / "a.c").write_text("new")
    copy_generated(made, tmp_path / "copy")
    (made / "mode").write_text("debug=True sanitize=\n")
    copy_generated(made, tmp_path / "copy")
    assert not kept.exists(), "nobody says how it was made, or it was made otherwise"
    (made / "mode").write_text("debug=False sanitize=\n")
    copy_generated(made, tmp_path / "copy")
    assert kept.read_text() == "new" and kept.stat().st_mtime == (made / "preble" / "a.c").stat().st_mtime
    kept.write_text("made in the copy")
    os.utime(made / "preble" / "a.c", (1, 1))
    copy_generated(made, tmp_path / "copy")
    assert kept.read_text() == "made in the copy"


def test_reports_are_taken_once(tmp_path: Path) -> None:
    for process in (1, 2):
        (tmp_path / f"report.{process}").write_text(f"fault {process}\n")
    assert take_reports(tmp_path / "report") == "fault 1\nfault 2\n"
    assert take_reports(tmp_path / "report") == ""


def test_every_pattern_of_core_tests_means_a_file() -> None:
    """A renamed test file must not drop out of the sanitizer's run unseen."""
    assert len(CORE_TESTS) == 17
    assert not [name for name in CORE_TESTS if not list((ROOT / "tests").glob(f"{name}.py"))]
