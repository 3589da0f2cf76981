"""The quick start's commands, typed as they stand, all but the installation: `preble` is the one under test.

`python tests/packaging/quickstart.py DIRECTORY` types the installation, too.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
PORTS = (5601, 5602, 5603, 5604, 8000)


def load_typist() -> ModuleType:
    """`tests/packaging/quickstart.py`, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "tests" / "packaging" / "quickstart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


typist = load_typist()


def free_ports(count: int) -> list[int]:
    """Consecutive ports that are free now."""
    for first in range(20000 + os.getpid() % 5000, 30000):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for number, one in enumerate(sockets):
                one.bind(("127.0.0.1", first + number))
            return [first + number for number in range(count)]
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no free ports")


def on_ports(commands: str, ports: list[int]) -> str:
    """The commands with other ports, since those of the page may be taken on the machine of the test."""
    for old, new in zip(PORTS, ports, strict=True):
        commands = re.sub(rf"\b{old}\b", str(new), commands)
    return commands.replace("openai_client.py", f"openai_client.py http://127.0.0.1:{ports[-1]}")


def environment_with(directory: Path) -> dict[str, str]:
    """An environment in which `preble` and `python` are those under test."""
    directory.mkdir()
    for name, words in {"preble": "-m preble.cli ", "python": ""}.items():
        (directory / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
        (directory / name).chmod(0o755)
    return {**os.environ, "PATH": f"{directory}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def test_the_commands_serve_a_streaming_client_through_two_workers_and_leave_nothing(tmp_path: Path) -> None:
    for needed in ("torch", "transformers", "openai", "uvicorn"):
        pytest.importorskip(needed)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    install, *blocks = typist.command_blocks(PAGE)
    assert "pip install" in install and len(blocks) == 5
    ports = free_ports(len(PORTS))
    commands = on_ports("\n".join(blocks), ports)
    try:
        output = typist.run_in_shell(commands, tmp_path, environment_with(tmp_path / "bin"), timeout_seconds=280)
    except (subprocess.SubprocessError, AssertionError) as error:
        raise AssertionError(f"{getattr(error, 'output', error)}\n{typist.logs_of(tmp_path)}") from error
    typist.check_answers(output)
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, f"something still listens at {port}"


def test_the_page_shows_the_client_as_it_is() -> None:
    shown = re.search(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    client = (ROOT / "examples" / "openai_client.py").read_text(encoding="utf-8")
    lines = [line.strip() for line in client.splitlines()]
    assert shown is not None
    for line in shown[1].splitlines():
        assert line.strip() in lines, f"the example has no line {line!r}"


def test_what_the_page_says_it_shows_would_pass_the_check() -> None:
    outputs = re.findall(r"^```text\n(.*?)^```$", PAGE, re.M | re.S)
    typist.check_answers("".join(outputs))
    with pytest.raises(AssertionError):
        typist.check_answers("".join(outputs).replace("5603", "5601"))


def test_a_failing_command_ends_the_shell_and_what_it_has_started(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failure:
        typist.run_in_shell("echo begun\nsleep 60 &\nfalse\necho never", tmp_path, os.environ, timeout_seconds=20)
    assert failure.value.output == "begun\n"


def test_a_page_that_forgets_to_end_its_servers_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="left processes running"):
        typist.run_in_shell("sleep 60 > log 2>&1 &", tmp_path, os.environ, timeout_seconds=20)
