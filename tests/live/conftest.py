"""Keeps the live tests out of `make test`: they need engines of several gigabytes. `make test-live` runs them. Owns the
servers that several modules share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

collect_ignore_glob = [] if os.environ.get("PREBLE_LIVE_TESTS") == "1" else ["test_*.py"]


@pytest.fixture(scope="session", params=["sglang", "vllm"])
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two servers of an engine and the gateway before them, a `Front`, for all tests that ask for it."""
    from tests.live.live_fleet import ENGINES_DIR, python_of
    from tests.live.live_servers import front_of

    engine = request.param
    if not python_of(engine).exists():
        pytest.skip(f"no {engine} in {ENGINES_DIR}: run tests/live/install.py --engine {engine}")
    with front_of(engine, tmp_path_factory.mktemp(engine) / "gateway.log") as found:
        yield found
