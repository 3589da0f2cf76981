"""What commands share: tables, numbers, JSON, directories, and how little of it is needed without extras."""

from __future__ import annotations

import argparse
import io
import json
import math
from pathlib import Path

import pytest

from preble.cli import console
from preble.errors import InvalidInput, MissingExtra


def test_columns_line_up_and_blanks_at_the_end_go() -> None:
    rows = [["name", "tokens", ""], ["a", "1,000", "x"], ["longer {name}", "7", ""]]
    assert console.aligned(rows) == ["name           tokens", "a              1,000   x", "longer {name}  7"]
    assert console.aligned(rows, left=1, gap=" | ")[1:] == ["a             |  1,000 | x", "longer {name} |      7 |"]


def test_a_terminal_obeys_no_name() -> None:
    assert console.printable("worker-0") == "worker-0"
    assert console.printable("\x1b[2Jgone") == "'\\x1b[2Jgone'"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0123, "12.3 ms"), (0.0851, "85.1 ms"), (0.4123, "412 ms"), (1.4, "1.40 s"), (2.0, "2 s"), (12.34, "12.3 s")],
)
def test_seconds_for_a_person(seconds: float, shown: str) -> None:
    assert console.duration(seconds) == shown


def test_json_has_null_for_what_it_cannot_say(tmp_path: Path) -> None:
    path = tmp_path / "new" / "found.json"
    console.write_json(path, {"a": [math.nan, 1.5], "b": {"c": math.inf}, 3: (Path("x"),)})
    assert json.loads(path.read_text()) == {"a": [None, 1.5], "b": {"c": None}, "3": ["x"]}


def test_an_output_directory_is_made_or_named(tmp_path: Path) -> None:
    assert console.output_directory(tmp_path / "a" / "b", "--out", "profile").is_dir()
    assert console.output_directory(None, "--out", "profile").name.startswith("preble-profile-")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="--out"):
        console.output_directory(tmp_path / "file", "--out", "profile")


@pytest.mark.parametrize("text", ["0", "-1"])
def test_numbers_that_are_not_positive_are_refused(text: str) -> None:
    for check in (console.positive_int, console.positive_float):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            check(text)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console, "find_spec", lambda name: None)
    assert not console.can_draw("No figures: they need")
    assert capsys.readouterr().out == 'No figures: they need matplotlib, pip install "preble[bench]"\n'
    with pytest.raises(MissingExtra, match=r"preble\[torch,bench\]"):
        console.need_torch()


def test_a_line_is_written_over_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    screen = console.Screen(stream)
    screen.show("too soon")
    monkeypatch.setattr(console, "PLAIN_SECONDS", 0.0)
    screen.show("now and then")
    screen.clear()
    assert stream.getvalue() == "now and then\n"
