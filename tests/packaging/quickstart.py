"""Types the commands of docs/quickstart.md into a shell, in order and as they stand. Owns how they are found and run.

    python tests/packaging/quickstart.py DIRECTORY     all of them, the installation too, in a new copy of the sources

The commands are the page's blocks of language `bash`. What they ought to show is checked here as well, so that
`tests/house/test_quickstart.py` (without the installation) and the program above ask for the same.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "quickstart.md"
ANSWER = re.compile(r"^(\w+): [^\n]*\n  (\d+) pieces from (\S+), (\d+) of (\d+) prompt tokens cached$", re.M)


def command_blocks(page: str) -> list[str]:
    """The blocks to type, in order."""
    return re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S)


def run_in_shell(commands: str, directory: Path, environment: Mapping[str, str], *, timeout_seconds: float) -> str:
    """Run the commands in one shell and return what they print; whatever happens, nothing of them is left running.

    The first command that fails ends the shell with its exit code, which raises `CalledProcessError`.
    """
    with tempfile.TemporaryFile("w+") as printed:  # not a pipe: what runs in the background would hold it open
        shell = subprocess.Popen(
            ["bash", "-e", "-u", "-c", commands],
            cwd=directory,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            shell.wait(timeout_seconds)
        finally:
            left = end_group(shell.pid)
            shell.wait()
            printed.seek(0)
            output = printed.read()
    if shell.returncode:
        raise subprocess.CalledProcessError(shell.returncode, "the page's commands", output)
    assert not left, "the page's last step left processes running"
    return output


def end_group(group: int) -> bool:
    """Ask the processes of a group to end; true if there was one. `preble up` takes its workers along."""
    try:
        os.killpg(group, signal.SIGTERM)
    except ProcessLookupError:
        return False
    return True


def check_answers(output: str) -> None:
    """Each document must have been computed by a worker of its own, found there again, and answered in pieces."""
    answers = ANSWER.findall(output)
    names = [name for name, *_ in answers]
    assert sorted(names[:2]) == sorted(names[2:]) == ["crane", "ferry"], output
    homes = {name: {worker for one, _, worker, *_ in answers if one == name} for name in names}
    assert all(len(workers) == 1 for workers in homes.values()) and homes["ferry"] != homes["crane"], output
    # A random model may end an answer at its first token, but not all four.
    assert sum(int(pieces) for _, pieces, *_ in answers) > len(answers), output
    for number, (*_, cached, prompt) in enumerate(answers):
        assert int(cached) < 100 if number < 2 else int(cached) > int(prompt) // 2, output


def logs_of(directory: Path) -> str:
    """The ends of the logs that the commands write."""
    return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(directory.glob("build/*.log")))


def copy_sources(directory: Path) -> None:
    """What git has at HEAD, as somebody who cloned it would have it."""
    archive = subprocess.Popen(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE)
    with tarfile.open(fileobj=archive.stdout, mode="r|") as tar:
        for member in tar:
            tar.extract(member, directory)
    if archive.wait():
        raise subprocess.CalledProcessError(archive.returncode, "git archive")


def main() -> int:
    parser = argparse.ArgumentParser(description="Type all commands of docs/quickstart.md, in a new directory.")
    parser.add_argument("directory", type=Path, help="where to; it must not exist")
    directory = parser.parse_args().directory.resolve()
    directory.mkdir(parents=True)
    try:
        copy_sources(directory)
        # As on a fresh machine: this Python's own environment must not help.
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        output = run_in_shell("\n".join(command_blocks(PAGE.read_text())), directory, kept, timeout_seconds=3600)
        sys.stdout.write(output)
        check_answers(output)
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{error.output or ''}\n{logs_of(directory)}\nexit code {error.returncode}\n")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
