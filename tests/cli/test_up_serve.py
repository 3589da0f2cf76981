"""`preble up --serve`: workers and a gateway by one command, as real processes; and names of tokenizers at a hub."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preble import cli
from preble.cli.up_serve import make_serve_plan
from preble.errors import InvalidConfig
from preble.gateway.text.tokenizer_files import FILES, tokenizer_directory
from tests.cli.test_up import Up, linux
from tests.support.gateway import Client
from tests.support.transport import HANG_SECONDS


@pytest.fixture
def up() -> Iterator[Up]:
    """Two workers and a gateway."""
    process = Up("--serve", "0", time_scale=0.2)
    yield process
    process.close()


def lines_until_gateway(up: Up) -> tuple[list[str], str, str]:
    """The workers' READY lines, where the gateway is, and the operator's token."""
    lines = [up.line()]
    while " http://" not in lines[-1]:
        lines.append(up.line())
    word, url, name = lines[-1].split()
    token = up.line()
    assert (word, name) == ("READY", "name=gateway") and token.startswith("ADMIN-TOKEN ")
    return lines[:-1], url.removeprefix("http://"), token.split()[1]


def test_one_command_starts_workers_and_gateway_and_ends_them_in_order(up: Up) -> None:
    workers, address, token = lines_until_gateway(up)
    assert sorted(line.split()[-1] for line in workers) == ["name=worker-0", "name=worker-1"]
    client = Client(address, token)
    cards = client.call("GET", "/workers")[2]["workers"]
    assert [card["state"] for card in cards] == ["ready", "ready"]
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 30, "stream": True})
    client.connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = client.connection.getresponse()  # it streams now
    up.process.send_signal(signal.SIGTERM)
    assert answer.read().endswith(b"data: [DONE]\n\n"), "the workers wait for the gateway's answers"
    assert up.process.wait(HANG_SECONDS) == 0
    assert not any(token in line for line in up.log)


@linux
def test_a_gateway_that_crashes_is_started_again_at_its_port(up: Up) -> None:
    _, address, _ = lines_until_gateway(up)
    children = Path(f"/proc/{up.process.pid}/task/{up.process.pid}/children").read_text().split()
    (gateway,) = [
        pid for pid in map(int, children) if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]
    os.kill(gateway, signal.SIGKILL)
    _, again, _ = lines_until_gateway_only(up)
    assert again == address
    client = Client(address)
    assert client.call("POST", "/v1/completions", {"prompt": [1, 2], "max_tokens": 2})[0] == 200
    client.close()
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(HANG_SECONDS) == 0


def lines_until_gateway_only(up: Up) -> tuple[list[str], str, str]:
    """The gateway's lines alone."""
    found = lines_until_gateway(up)
    assert found[0] == []
    return found


def test_a_gateway_that_cannot_start_ends_all_of_it(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("tls_certificate: /none.pem\ntls_key: /none.key\n")
    up = Up("--serve", "0", "--serve-config", str(file), "--max-restarts", "0", workers=1)
    try:
        assert up.process.wait(HANG_SECONDS) == 1
        assert any("tls_certificate /none.pem" in line for line in up.log)
    finally:
        up.close()


def plan(*words: str) -> Any:
    """The plan of a command line."""
    line = ["up", "--engine", "simulated", *words]
    return make_serve_plan(cli.build_parser(line).parse_args(line))


def test_what_is_wrong_is_said_before_anything_runs(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("polici: e2")
    for words, complaint in (
        (["--serve-config", "a.yaml"], "of no use without --serve"),
        (["--serve", "1", "--prompts", "-"], "--serve goes neither with"),
        (["--serve", "1", "--on", "ray"], "--serve goes neither with"),
        (["--serve", "70000"], "a port is at most 65535"),
        (["--serve", "1", "--serve-config", str(wrong)], "no such key polici"),
    ):
        with pytest.raises(InvalidConfig, match=complaint):
            plan(*words)
    assert plan() is None


def test_the_workers_model_is_the_tokenizer_unless_another_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--tokenizer" not in plan("--serve", "1", "--model", str(tmp_path)).options
    (tmp_path / "tokenizer.json").write_text("{}")
    assert plan("--serve", "1", "--model", str(tmp_path)).options[-2:] == ("--tokenizer", str(tmp_path))
    monkeypatch.setenv("PREBLE_TOKENIZER", "elsewhere")
    assert "--tokenizer" not in plan("--serve", "1", "--model", str(tmp_path)).options
    assert isinstance(cli.build_parser(["up"]), argparse.ArgumentParser)


# --- a hub's names ----------------------------------------------------------------------------------------------------


def hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[Any]:
    """In place of huggingface_hub, with what was asked of it."""
    asked: list[Any] = []

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return asked


def test_a_hubs_name_is_fetched_and_a_directory_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(monkeypatch, tmp_path)
    assert tokenizer_directory("org/Model-7B.v1") == str(tmp_path)
    assert asked == [("org/Model-7B.v1", list(FILES))] and not any("safetensors" in one for one in FILES)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    for name in ("org/here", "/models/llama", "./org/none", "model", "a/b/c", "../org", "org/..", "https://hub/x"):
        assert tokenizer_directory(name) == name
    assert len(asked) == 1


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("gated"), RuntimeError("of an HTTP client")])
def test_where_the_hub_does_not_give_it_the_message_says_what_to_do(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(monkeypatch, error)
    with pytest.raises(InvalidConfig, match="copy the model's tokenizer.json") as refused:
        tokenizer_directory("org/model")
    assert type(error).__name__ in str(refused.value)
