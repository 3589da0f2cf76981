"""Lines, rows and documents of a data file, plain or gzip, each knowing where it stands, and the requests gathered from
them: texts encoded once, ids of their own for what has no text. Owns no format.

What is wrong with a file is raised as `InvalidInput` naming the file and the line.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np

from ..errors import InvalidInput
from .lengths import drawn_output_tokens
from .tokenizers import Tokenizer
from .types import Int32Array, PromptRequest, unwritable

# Ids for pseudo-tokens: above the vocabulary, a range of 2**16 for each file name, all below 2**30 plus a vocabulary.
PSEUDO_IDS_PER_FILE = 1 << 16
PSEUDO_RANGES = 1 << 14
T = TypeVar("T")
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
        # What `strip` takes off is more than `int` lets pass.
        if isinstance(value, str) and (text := value.strip()).isdecimal() and len(text) <= INTEGER_DIGITS_MAX:
            value = int(text)
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


# --- requests ---------------------------------------------------------------------------------------------------------


def constant(token_id: int, tokens: int) -> Int32Array:
    """A run of one token id, shape [tokens], int32, not writable."""
    return unwritable(np.full(tokens, token_id, dtype=np.int32))


class Collector:
    """The requests read so far from `path`. `limit` None is all; `outputs` is "recorded" or "table1"."""

    def __init__(self, path: Path, tokenizer: Tokenizer, outputs: str, limit: int | None) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.outputs = outputs
        self.limit = limit
        self.requests: list[PromptRequest] = []
        self.bos = constant(tokenizer.bos_id, 1)
        self._ids: set[str] = set()
        self._encoded: dict[str, Int32Array] = {}
        self._pseudo: dict[str, Int32Array] = {}
        self.stem = path.name.split(".")[0]
        range_of_file = zlib.crc32(self.stem.encode("utf-8", "surrogateescape")) % PSEUDO_RANGES
        self._pseudo_base = tokenizer.vocabulary_size + range_of_file * PSEUDO_IDS_PER_FILE

    @property
    def full(self) -> bool:
        """True once `limit` requests are there."""
        return self.limit is not None and len(self.requests) >= self.limit

    def until_full(self, rows: Iterable[T]) -> Iterator[T]:
        """Rows for as long as there is room for a request."""
        return takewhile(lambda _: not self.full, rows)

    def encode(self, text: str) -> Int32Array:
        """Token ids of a part. Equal texts are the same array object."""
        ids = self._encoded.get(text)
        if ids is None:
            ids = self._encoded[text] = self.tokenizer.encode(text)
        return ids

    def pseudo(self, row: Row, key: str, tokens: int) -> Int32Array:
        """`tokens` times the token id that is `key`'s own. Equal keys are the same array object.

        Raises `InvalidInput` at more than 65,536 keys, or where a key comes with another length.
        """
        run = self._pseudo.get(key)
        if run is None:
            if len(self._pseudo) == PSEUDO_IDS_PER_FILE:
                raise row.wrong(f"more than {PSEUDO_IDS_PER_FILE} segments of pseudo-tokens")
            run = self._pseudo[key] = constant(self._pseudo_base + len(self._pseudo), tokens)
        if len(run) != tokens:
            raise row.wrong(f"{key!r} has {tokens} tokens here and {len(run)} before")
        return run

    def output(self, workload: str, request_id: str, text: str | None) -> tuple[int, Int32Array | None]:
        """(length, ids) of an answer: of `text` where it is recorded and wanted, else a draw from Table 1 and None."""
        if text is None or self.outputs == "table1":
            return drawn_output_tokens(workload, request_id), None
        ids = self.tokenizer.encode(text)
        return (len(ids), ids) if len(ids) else (1, None)  # an empty answer is one end-of-sequence token

    def add(
        self,
        row: Row,
        request_id: str,
        parts: list[Int32Array],
        output: tuple[int, Int32Array | None],
        *,
        group: str,
        arrival_seconds: float = 0.0,
        after: str | None = None,
    ) -> None:
        """Append a request; parts without tokens are left out. Raises `InvalidInput` for an id twice, an `after`
        that did not come before."""
        kept = tuple(part for part in parts if len(part))
        if not kept:
            raise row.wrong("the prompt is empty")
        tokens, ids = output
        self.add_request(row, PromptRequest(request_id, kept, tokens, group, arrival_seconds, after, output_ids=ids))

    def add_request(self, row: Row, request: PromptRequest) -> None:
        """Append a request that is made. Raises `InvalidInput` as `add` does."""
        if request.request_id in self._ids:
            raise row.wrong(f"request id {request.request_id!r} is there twice")
        if request.after is not None and request.after not in self._ids:
            raise row.wrong(f"'after' names {request.after!r}, which is no earlier request")
        self._ids.add(request.request_id)
        self.requests.append(request)
