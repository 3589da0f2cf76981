"""Lines, rows and documents of a data file, plain or gzip, each knowing where it stands. Owns no format.

What is wrong with a file is raised as `InvalidInput` naming the file and the line.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..errors import InvalidInput

INTEGER_DIGITS_MAX = 20
GZIP_MAGIC = b"\x1f\x8b"
UNREADABLE = (OSError, EOFError, UnicodeDecodeError, zlib.error)


@dataclass(frozen=True, slots=True)
class Row:
    """The named values of one line. The getters raise `InvalidInput` naming file, line and field."""

    path: Path
    line: int
    values: Mapping[str, Any]
    counted: str = "line"

    def wrong(self, what: str) -> InvalidInput:
        """The error that says what is wrong here."""
        return InvalidInput(f"{self.path}, {self.counted} {self.line}: {what}")

    def text(self, name: str) -> str:
        """A text; an integer is taken as its digits (ids come either way)."""
        value = self.values.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise self.wrong(f"{name!r} must be text, got {value!r:.80}")
        return value

    def integer(self, name: str, low: int) -> int:
        """An integer of at least `low`, below 2**31; CSV gives it as digits."""
        value = self.values.get(name)
        # Longer ones are out of range, and Python refuses to convert very long ones.
        if isinstance(value, str) and value.strip().isdecimal() and len(value.strip()) <= INTEGER_DIGITS_MAX:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**31:
            raise self.wrong(f"{name!r} must be an integer from {low} to 2**31 - 1, got {value!r:.80}")
        return value

    def items(self, name: str) -> list[Any]:
        """A list, not empty."""
        value = self.values.get(name)
        if not isinstance(value, list) or not value:
            raise self.wrong(f"{name!r} must be a list with something in it, got {value!r:.80}")
        return value


def open_text(path: Path) -> TextIO:
    """Open a file as UTF-8 text, through gzip where its first bytes say so."""
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == GZIP_MAGIC
        # Line ends are kept as they are: csv wants that, and the others strip them.
        opened = gzip.open if zipped else open
        return opened(path, "rt", encoding="utf-8-sig", newline="")
    except OSError as error:
        raise InvalidInput(f"path: cannot open {path}: {error.strerror}") from error


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line without its end) of every line."""
    number = 0
    with open_text(path) as file:
        try:
            for number, line in enumerate(file, 1):
                yield number, line.rstrip("\r\n")
        except UNREADABLE as error:
            raise InvalidInput(f"{path}, line {number + 1}: cannot be read: {error}") from error


def json_rows(path: Path) -> Iterator[Row]:
    """One object a line. Empty lines are passed over."""
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(values, dict):
            raise InvalidInput(f"{path}, line {number}: must be a JSON object, got {line:.80}")
        yield Row(path, number, values)


def json_list(path: Path) -> Iterator[Row]:
    """The objects of a file that is one JSON list. Their `line` is their place in the list, from 1."""
    text = "\n".join(line for _, line in numbered_lines(path))
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise InvalidInput(f"{path}, line {line}: not JSON: {error}") from error
    if not isinstance(values, list):
        raise InvalidInput(f"{path}, line 1: must be a JSON list")
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise InvalidInput(f"{path}, entry {number}: must be a JSON object, got {value!r:.80}")
        yield Row(path, number, value, "entry")


def csv_rows(path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    """The rows under a header that names at least `columns`."""
    with open_text(path) as file:
        # The reader counts lines itself, since a quoted field may hold line ends.
        reader = csv.DictReader(file, strict=True)
        try:
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise InvalidInput(f"{path}, line 1: the header lacks {missing}")
            for values in reader:
                row = Row(path, reader.line_num, values)
                if None in values or None in values.values():
                    raise row.wrong(f"must have {len(reader.fieldnames or ())} fields")
                yield row
        except (*UNREADABLE, csv.Error) as error:
            raise InvalidInput(f"{path}, line {reader.line_num + 1}: cannot be read: {error}") from error
