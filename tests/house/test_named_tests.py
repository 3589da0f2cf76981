"""Pages that promise something name the tests that hold it: those tests exist."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

PAGES = ("faults.md", "security.md")
NAMED = re.compile(r"`((?:[a-z_]+/)+test_\w+)`: ((?:`\w+`(?:, | and )?)+)")


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = NAMED.findall((ROOT / "docs" / page).read_text())
    assert len(named) > 10
    missing = []
    for file, parts in named:
        path = ROOT / "tests" / f"{file}.py"
        tests = re.findall(r"def (test_\w+)", path.read_text()) if path.exists() else []
        missing += [f"{file}: {part}" for part in re.findall(r"`(\w+)`", parts) if not any(part in t for t in tests)]
    assert not missing
