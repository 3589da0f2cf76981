"""What tests of the second simulator share: that simulator, which is no part of this project."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.scale import second_pairs
from tests.support.paths import SHARED

FOLDER = SHARED / "contest"


@pytest.fixture(scope="module")
def modules() -> tuple[Any, Any]:
    """The simulator and its cases; skips where it is missing."""
    if not (FOLDER / "simulator.py").exists():
        pytest.skip("the second simulator is not here")
    return second_pairs.second_simulator(FOLDER)
