"""Type checkers agree with what the calls do: mypy --strict and pyright accept the examples and the right uses of
`typed_uses.py`, and find each wrong one. Each test is skipped where its checker is not installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.paths import ROOT

USES = ROOT / "tests" / "house" / "typed_uses.py"
# What an example imports beside Preble, and is left out without.
NEEDS = {"openai_client.py": "openai", "fastapi_service.py": "fastapi"}
EXAMPLES = [
    path for path in sorted((ROOT / "examples").glob("*.py")) if find_spec(NEEDS.get(path.name, "sys")) is not None
]
FILES = [*EXAMPLES, USES]
CACHE = ROOT / "build" / "mypy-strict"  # the first run takes a minute, for what the examples import

Found = dict[Path, dict[int, str]]  # errors by file and line


def by_mypy() -> Found:
    """What mypy --strict says. Of preble itself it says nothing here: `make check` does."""
    options = ["--strict", "--follow-imports=silent", "--python-version=3.11", "--config-file=", "--no-error-summary"]
    command = [sys.executable, "-m", "mypy", *options, "--cache-dir", str(CACHE), *map(str, FILES)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode in (0, 1), said.stderr or said.stdout
    found: Found = {path: {} for path in FILES}
    for line in said.stdout.splitlines():
        error = re.match(r"(.+?):(\d+): error: (.+)", line)
        if error is not None:
            found[(ROOT / error[1]).resolve()].setdefault(int(error[2]), error[3])
    return found


def by_pyright(folder: Path) -> Found:
    """What pyright says in its strictest mode, but for what others' packages leave unsaid."""
    unsaid = ("MemberType", "ArgumentType", "VariableType", "ParameterType", "LambdaType")
    quiet = {f"reportUnknown{what}": "none" for what in unsaid} | {"reportMissingTypeStubs": "none"}
    quiet |= dict.fromkeys(("reportUnusedExpression", "reportUnusedFunction", "reportUnusedClass"), "none")
    settings = {
        "include": [os.path.relpath(path, folder) for path in FILES],
        "extraPaths": [str(ROOT)],
        "pythonVersion": "3.11",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps({**settings, "typeCheckingMode": "strict", **quiet}))
    command = [pyright(), "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    said = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout)
    found: Found = {path: {} for path in FILES}
    for one in said["generalDiagnostics"]:
        if one["severity"] == "error":
            found[Path(one["file"])].setdefault(one["range"]["start"]["line"] + 1, one["message"])
    return found


def pyright() -> str:
    """The command; the test is skipped where there is none."""
    command = shutil.which("pyright", path=str(Path(sys.executable).parent)) or shutil.which("pyright")
    if command is None:
        pytest.skip("pyright is not installed")
    return command


def assert_as_marked(found: Found) -> None:
    """No errors but those that are marked, and all of these."""
    for path in EXAMPLES:
        assert not found[path], f"{path.name}: {found[path]}"
    lines = USES.read_text(encoding="utf-8").splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(wrong) > 30
    missed, strange = wrong - found[USES].keys(), found[USES].keys() - wrong
    assert not missed, f"accepted, though wrong: {[lines[number - 1] for number in sorted(missed)]}"
    assert not strange, {lines[number - 1]: found[USES][number] for number in sorted(strange)}


def test_mypy_strict_sees_what_is_wrong() -> None:
    pytest.importorskip("mypy")
    assert_as_marked(by_mypy())


def test_pyright_sees_what_is_wrong(tmp_path: Path) -> None:
    assert_as_marked(by_pyright(tmp_path))
