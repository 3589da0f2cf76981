"""Memory that runs out anywhere: for every operation and every n, the n-th allocation fails. Owns how that is run, and
how often allocations must at least have failed; `stress/allocation.py` owns operations, worlds and what must hold."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.paths import ROOT

STRESS = ROOT / "tests" / "stress"
GROWN = 3  # worlds at which some table or slab grows, at least
# Freeing must not need memory. What else allocates nothing is free to begin to.
NEVER_FAIL = {"apply-cleared", "apply-removed", "cancel", "clear-worker", "expire", "release", "remove-worker", "tick"}
# These must fail, or the failing allocator has missed what they do.
MUST_FAIL = {
    "schedule-new",
    "schedule-split",
    "schedule-namespace",
    "schedule-many-marks",
    "insert-split",
    "add-worker",
}
MUST_FAIL |= {
    "apply-stored",
    "apply-stored-new",
    "apply-stored-many",
    "hold-split",
    "extend-branch",
    "new-scheduler",
    "new-radix-tree",
}


def operations() -> list[str]:
    """The names in `OPERATIONS`, read rather than imported: without the failing allocator the script is of no use."""
    tree = ast.parse((STRESS / "allocation.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "OPERATIONS":
            return [ast.literal_eval(key) for key in node.value.keys]
    raise AssertionError("stress/allocation.py has no OPERATIONS")


RunFailing = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_failing(tmp_path_factory: pytest.TempPathFactory, run_python: RunFailing) -> RunFailing:
    """Runs Python with the failing allocator before all others, a sanitizer's included."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the failing allocator is preloaded, and finds the core in /proc/self/maps")
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    if not shutil.which(compiler[0]):
        pytest.skip("no C compiler for the failing allocator")
    library = tmp_path_factory.mktemp("failing") / "failing_malloc.so"
    bare = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    subprocess.run(
        [*compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(STRESS / "failing_malloc.c"), "-ldl"],
        env=bare,
        check=True,
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LD_PRELOAD", f"{library} {os.environ.get('LD_PRELOAD', '')}".strip())
            # With "malloc" the interpreter jumps to malloc at the end of a function, as if the core had called it.
            patch.setenv("PYTHONMALLOC", "pymalloc")
            if "ASAN_OPTIONS" in os.environ:
                patch.setenv("ASAN_OPTIONS", f"{os.environ['ASAN_OPTIONS']}:verify_asan_link_order=0")
            return run_python(*arguments, timeout_seconds=800)

    return run


@pytest.fixture(scope="session")
def said(run_failing: RunFailing) -> dict[str, dict[str, Any]]:
    """What the script says of each operation."""
    ended = run_failing("-m", "tests.stress.allocation")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return {line["operation"]: line for line in map(json.loads, ended.stdout.splitlines())}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("operation", operations())
def test_whichever_allocation_fails_nothing_has_changed(operation: str, said: dict[str, dict[str, Any]]) -> None:
    line = said[operation]
    assert "wrong" not in line, line["wrong"]
    assert line["raised"] <= line["failures"]
    assert operation not in NEVER_FAIL or line["failures"] == 0, "it frees, and must not need memory for it"
    assert operation not in MUST_FAIL or line["raised"] >= len(line["worlds"])


def test_worlds_are_found_at_which_tables_grow(said: dict[str, dict[str, Any]]) -> None:
    for operation in ("schedule-new", "insert-new", "hold"):
        assert len(said[operation]["worlds"]) > GROWN, "make GROWN_MAX larger: nothing grew up to there"


def test_the_failing_allocator_lets_only_the_core_fail(run_failing: RunFailing) -> None:
    """The n-th allocation is the core's n-th: the interpreter's own before it do not count."""
    program = (
        "from tests.stress.allocation import FailingMalloc, RadixTree\n"
        "failing, tree = FailingMalloc(), RadixTree()\n"
        "failing.fail_nth(1)\n"
        "before = failing.counted\n"
        "strings = ['x' * n for n in range(600, 9000)]\n"
        "try:\n"
        "    tree.add_worker(5)\n"
        "except MemoryError:\n"
        "    print('failed', failing.counted - before)\n"
    )
    ended = run_failing("-c", program)
    assert ended.stdout == "failed 1\n", ended.stdout + ended.stderr
