"""Hypothesis draws the same examples on every run: also beside other tests, which load other modules."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest

DRAWN = """
import tests.conftest
from hypothesis import given
from hypothesis import strategies as st

@given(st.integers(), st.floats(), st.text(max_size=5))
def draw(number, real, text):
    print(number, real, ascii(text))

draw()
"""


@pytest.mark.skipif(os.environ.get("PREBLE_HYPOTHESIS") == "long", reason="looks for new examples")
@pytest.mark.parametrize("loaded", ["preble", "preble.router", "preble.sim"])
def test_the_same_is_drawn_whatever_is_loaded(
    loaded: str, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """The same commit passed in one checkout and failed in another: a failure was found by what else a process ran."""
    alone, beside = run_python("-c", DRAWN), run_python("-c", f"import {loaded}\n{DRAWN}")
    assert len(alone.stdout.splitlines()) >= 100, alone.stderr
    assert alone.stdout == beside.stdout
