"""The examples and the README's embedding example run as they stand, in a process of their own, and print what they
promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.support.paths import ROOT


def run(code_or_path: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *code_or_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_embed_sends_each_document_to_one_worker_and_both_workers_work() -> None:
    lines = run(["examples/embed.py"]).splitlines()
    homes = {(line.split(":")[0], line.split()[1]) for line in lines}
    assert len(lines) == 8
    assert homes == {("manual", "worker-a"), ("novel", "worker-b")}
    assert sum("exploit, 2000 of 2040" in line for line in lines) == 6


def test_a_custom_policy_spreads_once_the_queue_outweighs_the_cache() -> None:
    output = run(["examples/custom_policy.py"])
    chosen = re.findall(r"-> (worker-\w)", output)
    assert chosen[:4] == ["worker-a"] * 4
    assert set(chosen) == {"worker-a", "worker-b", "worker-c"}


def test_the_asyncio_service_gives_every_booking_back() -> None:
    output = run(["examples/asyncio_service.py"])
    assert "served 54, cancelled 6, still booked 0" in output
    assert re.search(r"worker-a: \d+ requests", output) and re.search(r"worker-b: \d+ requests", output)


def test_the_readme_embedding_example_runs_and_is_at_most_fifteen_lines() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"<!-- example: embed -->\n```python\n(.*?)```", readme, re.DOTALL)
    assert example is not None
    assert len(example.group(1).strip().splitlines()) <= 15
    output = run(["-c", example.group(1)])
    assert output.count("exploit") >= 2
