"""`--policy module:Class` of `preble serve`, `preble up` and `preble worker`: a rule of one's own decides, and a wrong
one gets a sentence, never a traceback, before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from preble import cli
from tests.support.gateway import Client, GatewayProcess
from tests.support.paths import ROOT
from tests.support.transport import WorkerProcess

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

WRONG = {
    "nothing:Here": "module 'nothing' cannot be imported: ModuleNotFoundError",
    "tests.support.sticky:Stick": "has no 'Stick'; did you mean 'Sticky'?",
    "tests.support.paths:ROOT": "not a class that is a preble.Policy",
    "tests.support.paths:Path": "is no preble.Policy: its class must inherit from it",
    "tests.support.sticky:Sticky(weight=2)": "unexpected keyword argument 'weight'",
    "tests.support.sticky:Sticky(": "write NAME(KEY=VALUE, ...)",
    "round_robbin": "did you mean 'round_robin'?",
}
COMMANDS = {
    "serve": ["serve", "--workers", "tcp://127.0.0.1:1"],
    "up": ["up", "--engine", "simulated"],
    "worker": ["worker", "--engine", "attached", "--url", "http://127.0.0.1:1"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("policy", WRONG)
def test_a_wrong_policy_gets_a_sentence(policy: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*COMMANDS[command], "--policy", policy]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"preble {command}: ") and WRONG[policy] in said
    assert len(said.splitlines()) == 1


RULE = """
import sys
import preble

class Mine(preble.Policy):
    name = reason = "mine"

    def score(self, request, workers):
        print("SCORED", *workers.ids, file=sys.stderr, flush=True)
        return list(range(len(workers)))
"""


def test_up_decides_by_a_rule_of_one_s_own(run_python: RunPython, tmp_path: Path) -> None:
    (tmp_path / "own_rule.py").write_text(RULE)
    (tmp_path / "prompts").write_text(json.dumps({"token_ids": [1, 2, 3], "sampling": {"max_new_tokens": 2}}))
    options = ["--engine", "simulated", "--workers", "1", "--policy", "own_rule:Mine", "--prompts", "prompts"]
    done = run_python("-m", "preble.cli", "up", *options, "--", "--time-scale", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "SCORED" in done.stderr


def test_serve_decides_by_a_rule_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "own_rule.py").write_text(RULE)
    worker = WorkerProcess(time_scale=0.0)
    options = ["--workers", worker.endpoint, "--policy", "own_rule:Mine"]
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    gateway = GatewayProcess(*options, log=tmp_path / "log", environment=path)
    client = Client(gateway.address)
    try:
        assert client.call("POST", "/v1/completions", {"prompt": [1, 2], "max_tokens": 2})[0] == 200
        assert 'policy="mine"' in client.call("GET", "/metrics")[2]
    finally:
        client.close()
        assert [gateway.stop(), worker.stop()] == [0, 0]
    assert "SCORED" in (tmp_path / "log").read_text()
