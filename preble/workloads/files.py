"""Lines, rows and documents of a data file, plain, gzip or xz, each knowing where it stands, and the requests gathered
from them: texts encoded once, ids of their own for what has no text. Owns the bounds, and no format.

What is wrong with a file is raised as `InvalidInput` naming the file and the line; what is left out is counted in
`Collector.notes`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, TextIO, TypeVar, cast

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
NUMBER_MAX = 1e18  # nanoseconds since 1970
GZIP_MAGIC, XZ_MAGIC = b"\x1f\x8b", b"\xfd7zXZ\x00"
UNREADABLE = (OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError)
# What is longer is refused, since it would be held in memory at once: a line, a JSON list, the requests of a file.
LINE_CHARS_MAX = 1 << 26
DOCUMENT_CHARS_MAX = 1 << 30
REQUESTS_MAX = 10_000_000
HEAD_CHARS = 1 << 20  # of a file, that are looked at to know what it is
OUTPUT_TOKENS = 128  # of an answer whose length a file does not say; what the scheduler expects where it knows nothing


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

    def number(self, name: str, low: float) -> float:
        """A finite number of at least `low`; CSV gives it as digits."""
        value = self.values.get(name)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                value = None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= NUMBER_MAX:
            given = self.values.get(name)
            raise self.wrong(f"{name!r} must be a number from {low:g} to {NUMBER_MAX:g}, got {given!r:.80}")
        return float(value)

    def items(self, name: str) -> list[Any]:
        """A list, not empty."""
        value = self.values.get(name)
        if not isinstance(value, list) or not value:
            raise self.wrong(f"{name!r} must be a list with something in it, got {value!r:.80}")
        return value


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file, through gzip or xz where its first bytes say so."""
    try:
        with open(path, "rb") as raw:
            first = raw.read(len(XZ_MAGIC))
        if first.startswith(GZIP_MAGIC):
            return cast(IO[bytes], gzip.open(path, "rb"))
        return lzma.open(path, "rb") if first == XZ_MAGIC else open(path, "rb")
    except OSError as error:
        raise InvalidInput(f"path: cannot open {path}: {error.strerror}") from error


def open_text(path: Path) -> TextIO:
    """The same as UTF-8 text. Line ends are kept as they are: csv wants that, and the others strip them."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="")


def head_of(path: Path, count: int) -> str:
    """The first `count` characters."""
    with open_text(path) as file:
        try:
            return file.read(count)
        except UNREADABLE as error:
            raise InvalidInput(f"{path}, line 1: cannot be read: {error}") from error


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line without its end) of every line. A line longer than `LINE_CHARS_MAX` is refused."""
    number = 0
    with open_text(path) as file:
        try:
            for number, line in enumerate(bounded_lines(path, file), 1):
                yield number, line.rstrip("\r\n")
        except UNREADABLE as error:
            raise InvalidInput(f"{path}, line {number + 1}: cannot be read: {error}") from error


def bounded_lines(path: Path, file: TextIO) -> Iterator[str]:
    """The lines of an open file with their ends, up to one that is too long, which raises `InvalidInput`."""
    number = 0
    while line := file.readline(LINE_CHARS_MAX + 1):
        number += 1
        if len(line) > LINE_CHARS_MAX:
            raise InvalidInput(f"{path}, line {number}: longer than {LINE_CHARS_MAX} characters")
        yield line


def json_objects(path: Path) -> Iterator[Row]:
    """The objects of a file that has one a line, is one JSON list, or is one object in several lines."""
    head = head_of(path, HEAD_CHARS).lstrip()
    if head.startswith("["):
        return json_list(path)
    return json_rows(path) if not spans_lines(head) else iter([Row(path, 1, json_document(path))])


def spans_lines(head: str) -> bool:
    """Whether the object that a text begins with goes on after its line's end."""
    try:
        end = json.JSONDecoder().raw_decode(head)[1]
    except (ValueError, RecursionError):
        return False
    return "\n" in head[:end]


def json_document(path: Path) -> Any:
    """A file that is one JSON value. Raises `InvalidInput`, also for more than `DOCUMENT_CHARS_MAX` characters."""
    text = head_of(path, DOCUMENT_CHARS_MAX + 1)
    if len(text) > DOCUMENT_CHARS_MAX:
        raise InvalidInput(f"{path}: one JSON value of more than {DOCUMENT_CHARS_MAX} characters; write one a line")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}, line {getattr(error, 'lineno', 1)}: not JSON: {error}") from error


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
    values = json_document(path)
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
        reader = csv.DictReader(bounded_lines(path, file), strict=True)
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
    """The requests read so far from `path`. `limit` None is all; `outputs` is "recorded" or "table1"; `output_tokens`
    are those of an answer whose length is not known. `notes` counts what was left out or put in, by what it was."""

    def __init__(
        self, path: Path, tokenizer: Tokenizer, outputs: str, limit: int | None, output_tokens: int = OUTPUT_TOKENS
    ) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.outputs = outputs
        self.limit = limit
        self.output_tokens = output_tokens
        self.requests: list[PromptRequest] = []
        self.notes: Counter[str] = Counter()
        self.timed: bool | None = None  # whether the file has arrivals; None before its first request
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

    def written_notes(self) -> tuple[str, ...]:
        """The notes with their counts, as `Workload` has them."""
        return tuple(f"{what}: {count}" for what, count in self.notes.items())

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

    def length(self, row: Row, most: int | None = None) -> tuple[int, Int32Array | None]:
        """The length of an answer that is not there: `output_tokens` of the row (0 is 1), else the default, at most
        `most`."""
        if row.values.get("output_tokens") is not None:
            return max(1, row.integer("output_tokens", 0)), None
        self.notes[f"output lengths that are not in the file, {self.output_tokens} tokens or the request's bound"] += 1
        return min(self.output_tokens, most or self.output_tokens), None

    def arrival(self, row: Row, name: str = "arrival_seconds") -> float:
        """When a request arrives. All lines have it, or none (0)."""
        timed = row.values.get(name) is not None
        if not timed and "timestamp" in row.values:
            self.notes["lines with a 'timestamp', which is not read (times are 'arrival_seconds')"] += 1
        if self.timed is None:
            self.timed = timed
        if timed is not self.timed:
            raise row.wrong(f"{name!r} must be on every line or on none")
        return row.number(name, 0.0) if timed else 0.0

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
        tenant: str = "",
    ) -> None:
        """Append a request; parts without tokens are left out. Raises `InvalidInput` for an id twice, an `after`
        that did not come before."""
        kept = tuple(part for part in parts if len(part))
        if not kept:
            raise row.wrong("the prompt is empty")
        tokens, ids = output
        made = PromptRequest(request_id, kept, tokens, group, arrival_seconds, after, output_ids=ids, tenant=tenant)
        self.add_request(row, made)

    def add_request(self, row: Row, request: PromptRequest) -> None:
        """Append a request that is made. Raises `InvalidInput` as `add` does."""
        if request.request_id in self._ids:
            raise row.wrong(f"request id {request.request_id!r} is there twice")
        if request.after is not None and request.after not in self._ids:
            raise row.wrong(f"'after' names {request.after!r}, which is no earlier request")
        if len(self.requests) == REQUESTS_MAX:
            raise row.wrong(f"more than {REQUESTS_MAX} requests; set a limit")
        self._ids.add(request.request_id)
        self.requests.append(request)
