"""docs/e2.md explains the truth: its example prints what stands there."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "e2.md"


def test_the_example_prints_what_stands_there(capsys: pytest.CaptureFixture[str]) -> None:
    """After a change of behaviour that was meant: run the example and put its output there."""
    text = PAGE.read_text()
    found = re.search(r"```python\n((?:.*\n)+?)```", text)
    assert found is not None
    exec(compile(found[1], str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("explore -> a\n") and printed.count("\n") == 12
    assert f"```\n{printed}```" in text
