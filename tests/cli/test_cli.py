"""The `preble` command's top level: version, help, wrong usage, exit codes, sub-commands loaded only when named."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import types
from collections.abc import Callable

import pytest

import preble
from preble import cli
from preble.errors import EngineError, InvalidConfig, MissingExtra

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A sub-command `echo` whose `run` the test replaces."""
    module = types.ModuleType("echo_command")
    module.add_arguments = lambda parser: parser.add_argument("--word", default="hello")
    module.run = lambda args: 0
    monkeypatch.setitem(sys.modules, "echo_command", module)
    monkeypatch.setitem(cli.COMMANDS, "echo", ("echo_command", "say a word"))
    return module


def test_version_is_the_package_s(run_python: RunPython) -> None:
    result = run_python("-m", "preble.cli", "--version")
    assert (result.returncode, result.stdout.strip()) == (0, f"preble {preble.__version__}")


def test_help_names_every_command_and_loads_none(run_python: RunPython) -> None:
    code = "import sys; from preble.cli import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    for name in cli.COMMANDS:
        assert re.search(rf"^    {name}\s", result.stdout, re.M)
    assert not {"numpy", "zmq", "torch"} & set(result.stdout.split())


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_option_of_every_command_says_what_it_is(name: str) -> None:
    commands = next(one for one in cli.build_parser([name])._actions if isinstance(one, argparse._SubParsersAction))
    actions = commands.choices[name]._actions
    assert actions and [one.dest for one in actions if not one.help] == []


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: preble {name}" in capsys.readouterr().out


BASE_INSTALL_LACKS = (
    *("aiohttp", "httptools", "jinja2", "matplotlib", "opentelemetry", "prometheus_client", "ray", "rich"),
    *("starlette", "tokenizers", "torch", "transformers", "uvicorn", "uvloop", "yaml"),
)


def test_every_command_explains_itself_in_the_base_install(run_python: RunPython) -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys({BASE_INSTALL_LACKS!r}))
from preble import cli
for name in cli.COMMANDS:
    try:
        print(name, cli.main([name, "--help"]))
    except SystemExit as stop:
        print("exit", name, stop.code)
"""
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    assert re.findall(r"^exit (\S+) 0$", result.stdout, re.M) == list(cli.COMMANDS), result.stdout[-500:]


@pytest.mark.parametrize(
    "line",
    [["serve", "--worker", "tcp://a:1"], ["config", "--drain", "1"], ["up", "--engin", "simulated"], ["--vers"]]
    + [["attach", "--wat", "http://a"], ["simulate", "--req", "3"]],
)
def test_an_option_is_written_out(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(line)
    assert stop.value.code == 2
    assert "preble" in capsys.readouterr().err


def test_no_command_prints_help_and_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "demo" in capsys.readouterr().err


def test_an_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["dmeo"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "dmeo" in message and "demo" in message and "worker" in message


def test_arguments_reach_the_command(command: types.ModuleType) -> None:
    seen: list[argparse.Namespace] = []
    command.run = seen.append
    assert cli.main(["echo", "--word", "bye"]) == 0
    assert seen[0].word == "bye"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("the device is gone"), 1),
        (InvalidConfig("kv_capacity_tokens must be positive"), 2),
        (MissingExtra("pip install preble[torch]"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    command.run = fail
    assert cli.main(["echo"]) == code
    message = capsys.readouterr().err
    assert str(error) in message
    assert message.count("\n") <= 1


def test_a_bug_keeps_its_traceback(command: types.ModuleType) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    command.run = fail
    with pytest.raises(ZeroDivisionError):
        cli.main(["echo"])


def test_a_command_s_own_exit_code_is_passed_on(command: types.ModuleType) -> None:
    command.run = lambda args: 7
    assert cli.main(["echo"]) == 7
