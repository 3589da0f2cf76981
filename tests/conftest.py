"""What every test shares: deterministic hypothesis, the repository's place, and running Python in a fresh process."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.support.paths import ROOT

# The same examples on every run and machine. PREBLE_HYPOTHESIS=long looks for new ones, ten times as many.
settings.register_profile(
    "preble", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", settings.get_profile("preble"), derandomize=False, max_examples=1000)
settings.load_profile("long" if os.environ.get("PREBLE_HYPOTHESIS") == "long" else "preble")
if settings.get_current_profile_name() == "preble" and hasattr(providers, "_get_local_constants"):
    # Else it draws constants of whatever modules of ours are loaded by then: other examples beside other tests.
    providers._get_local_constants = lambda: providers._local_constants  # which is empty at first


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No collection of garbage meanwhile: what a test finds freed did not wait for one."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def ray_environment() -> Iterator[None]:
    """What Ray reads from the environment. One token for all clusters of this process, which keeps the first it reads;
    without one, Ray leaves a token in the home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python ARGS...` in a fresh process that sees this checkout's `preble`; its output is text.

    At the time limit it is killed with every process it has started.
    """

    def run(*args: str, cwd: Path = ROOT, timeout_seconds: float = 240) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
        process = subprocess.Popen(
            [sys.executable, *args],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=timeout_seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            sys.stderr.write(f"it had written:\n{output}\n{errors}\n")
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    return run
