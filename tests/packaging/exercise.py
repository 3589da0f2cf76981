"""Uses an installed Preble as a stranger would: run it by a Python that has the wheel, from outside the sources.

Takes only what the base install has. Ends with a line `exercised preble VERSION`, or with an exception. Also what
cibuildwheel runs on every wheel.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import preble


def run(*command: str, code: int = 0) -> str:
    """The output of a command in an empty directory; it must end with `code`."""
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def example() -> str:
    """The README's embedding example; the README is the description in the wheel's metadata."""
    readme = importlib.metadata.metadata("preble").get_payload()
    found = re.search(r"<!-- example: embed -->\n```python\n(.*?)```", str(readme), re.S)
    assert found is not None, "the wheel's description has no example"
    return found[1]


def main() -> int:
    here = Path(preble.__file__).resolve()
    assert "site-packages" in here.parts, f"{here} is not an installed copy"
    version = importlib.metadata.version("preble")
    assert version == preble.__version__
    licenses = [str(path) for path in importlib.metadata.files("preble") or [] if path.name == "LICENSE"]
    assert licenses and files("preble").joinpath("py.typed").is_file()

    lines = run(sys.executable, "-c", example()).splitlines()
    assert len(lines) == 8 and sum("exploit, 2000 of 2040" in line for line in lines) == 6, lines

    program = str(Path(sys.executable).parent / "preble")  # the console script that the wheel brings
    assert f"preble {version}" in run(program, "--version")
    assert "COMMAND" in run(program, "--help")
    # Two worker processes, a router, and 20 requests under each of two policies.
    table = run(program, "demo", "--engine", "simulated", "--quick", "--requests", "20", "--workdir", "demo")
    assert table.count("20 of 20") == 2, table
    sys.stdout.write(f"exercised preble {version} in {here.parent}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
