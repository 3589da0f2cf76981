"""The example of docs/ray.md, as it stands there, in a Ray cluster of its own. Skipped without ray."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytest.importorskip("ray.serve", reason="the example is run where ray is: pip install 'preble[ray]'")

PAGE = ROOT / "docs" / "ray.md"


def example() -> str:
    """The page's program."""
    (found,) = re.findall(r"^```python\n(# documents\.py\n.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return str(found)


@pytest.mark.timeout(240)
def test_the_pages_example_runs_and_every_document_finds_its_replica_again(tmp_path: Path) -> None:
    program = tmp_path / "documents.py"
    program.write_text(example())
    with tempfile.TemporaryDirectory(prefix="preble-ray-") as folder:  # short: sockets lie in it
        environment = {
            **os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder, "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, str(program)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall(r"document (\d), question (\d): \{'replica': (\d+), 'cached': (\w+)\}", done.stdout)
    assert len(lines) == 12
    assert [cached for _, question, _, cached in lines if question != "0"] == ["True"] * 8
    homes = {document: {replica for other, _, replica, _ in lines if other == document} for document in "0123"}
    assert [len(home) for home in homes.values()] == [1] * 4
    assert len(set.union(*homes.values())) > 1, "one replica was given everything"
