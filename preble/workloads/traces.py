"""Reads published traces: arrival times and lengths, without text. Owns how lengths become tokens.

A trace says which blocks are equal, not what is in them. So a block opens with two ids, its own and its file's,
followed by a filler that all blocks share: unlike blocks of a file differ at their first token, those of two files at
their second, and a trace of 10**8 tokens takes some megabytes.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator
from datetime import datetime, timedelta

import numpy as np

from ..errors import InvalidInput
from .files import Collector, Row, csv_rows, json_rows
from .formats import AZURE_COLUMNS, INPUT_COLUMNS, OUTPUT_COLUMNS, SERVEGEN_COLUMNS, TIME_COLUMNS, column
from .types import Int32Array, unwritable

MOONCAKE_BLOCK_TOKENS = 512
FILLER_IDS = 1000
FILE_IDS = 1 << 20
PROMPT_TOKENS_MAX = 1 << 22
SECOND = timedelta(seconds=1)
PROMPT_TOKENS = 1024  # of a prompt whose length a file does not say
SERVEGEN_WINDOW_SECONDS = 600.0
RATE_MAX = 10_000.0  # requests a second of a client


class Blocks:
    """Parts of a file's blocks by id. Equal ids give the same array objects."""

    def __init__(self, into: Collector) -> None:
        self._first_id = into.tokenizer.vocabulary_size
        self._file_id = self._first_id + zlib.crc32(into.stem.encode("utf-8", "surrogateescape")) % FILE_IDS
        self._heads: dict[int, Int32Array] = {}
        self._tails: dict[int, Int32Array] = {}
        self._filler = unwritable(np.arange(PROMPT_TOKENS_MAX, dtype=np.int32) % FILLER_IDS)

    def parts(self, block_id: int, tokens: int) -> tuple[Int32Array, Int32Array]:
        """The first `tokens` of a block: the two ids, then filler."""
        head = self._heads.get(block_id)
        if head is None:
            head = self._heads[block_id] = unwritable([self._first_id + block_id, self._file_id])
        if tokens <= len(head):
            return head[:tokens], self._filler[:0]
        tail = self._tails.get(tokens)
        if tail is None:
            tail = self._tails[tokens] = self._filler[: tokens - len(head)]
        return head, tail


def read_mooncake(into: Collector) -> None:
    """Mooncake's jsonl: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one for 512 tokens).

    Equal ids are equal tokens; the last block is cut to `input_length`. A line without `hash_ids` shares nothing. The
    group is the second id (the first block is the same for all of the conversation trace), so that requests of one
    conversation share it. A row earlier than the one before it is refused.
    """
    blocks = Blocks(into)
    last, own = 0.0, 2**30  # ids of prompts that share nothing: above those of blocks
    for row in into.until_full(json_rows(into.path)):
        tokens = row.integer("input_length", 1)
        at = last = row.number("timestamp", last)
        if "hash_ids" in row.values:
            ids = block_ids(row, tokens)
            group = str(ids[min(1, len(ids) - 1)])
            parts = [part for place, one in enumerate(ids) for part in blocks.parts(one, left_of(tokens, place))]
        else:
            into.notes["lines without 'hash_ids', whose prompts share nothing"] += 1
            parts = list(blocks.parts(own, checked(row, "input_length", tokens)))
            group, own = f"line {row.line}", own + 1
        output = max(1, row.integer("output_length", 0))
        name = f"{into.stem}-{row.line}"
        into.add(row, name, parts, (output, None), group=group, arrival_seconds=at / 1000.0)


def left_of(tokens: int, place: int) -> int:
    """Tokens of a prompt's block at this place."""
    return min(MOONCAKE_BLOCK_TOKENS, tokens - place * MOONCAKE_BLOCK_TOKENS)


def block_ids(row: Row, tokens: int) -> list[int]:
    """The `hash_ids` of a line, one for each block of its tokens."""
    ids = row.items("hash_ids")
    if len(ids) != -(-tokens // MOONCAKE_BLOCK_TOKENS):
        raise row.wrong(f"{tokens} tokens need {-(-tokens // MOONCAKE_BLOCK_TOKENS)} hash_ids, got {len(ids)}")
    if not all(isinstance(i, int) and 0 <= i < 2**30 for i in ids):
        raise row.wrong("'hash_ids' must be integers from 0 to 2**30 - 1")
    return ids


def checked(row: Row, name: str, tokens: int) -> int:
    """A prompt's length, if it is not too long."""
    if tokens > PROMPT_TOKENS_MAX:
        raise row.wrong(f"{name!r} must be at most {PROMPT_TOKENS_MAX}")
    return tokens


def read_azure(into: Collector) -> None:
    """Azure's csv: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`. What prompts share is not known: nothing here.

    Arrivals count from the first row; a row earlier than the one before it is refused.
    """
    blocks = Blocks(into)
    first = last = None
    for row in into.until_full(csv_rows(into.path, AZURE_COLUMNS)):
        at = timestamp(row)
        first = first or at
        if last is not None and at < last:
            raise row.wrong("'TIMESTAMP' is earlier than the row before")
        last = at
        tokens = checked(row, "ContextTokens", row.integer("ContextTokens", 1))
        number = len(into.requests)
        into.add(
            row,
            f"{into.stem}-{row.line}",
            list(blocks.parts(number, tokens)),
            (max(1, row.integer("GeneratedTokens", 0)), None),
            group=str(number),
            arrival_seconds=(at - first) / SECOND,
        )


def timestamp(row: Row, name: str = "TIMESTAMP") -> datetime:
    """A time of day with its date, such as Azure's. Of a second's decimals the first six count, as Python does; a time
    without a zone is UTC."""
    text = row.text(name).strip()
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?", text)
    try:
        if found is None:
            raise ValueError(text)
        zone = "+00:00" if found[4] in (None, "Z") else found[4]
        return datetime.strptime(f"{found[1]} {found[2]}.{(found[3] or '0')[:6]}{zone}", "%Y-%m-%d %H:%M:%S.%f%z")
    except ValueError as error:
        raise row.wrong(f"{name!r} must look like 2023-11-16 18:17:03.9799600, got {text!r:.40}") from error


# --- other tables -----------------------------------------------------------------------------------------------------


def read_arrivals(into: Collector) -> None:
    """A csv with a time, the tokens of prompts and, where it has them, of answers, named as BurstGPT, Vidur or Azure
    name them (`formats` has the names). Times are seconds, milliseconds where the column ends in `_ms`, or dates.

    What prompts share is not known: nothing here. Lengths of 0 are 1. Rows may stand in any order.
    """
    blocks = Blocks(into)
    at_name = tokens_name = ""
    output_name: str | None = None
    for number, row in enumerate(into.until_full(csv_rows(into.path, ()))):
        if not number:
            at_name, tokens_name, output_name = columns_of(row)
        tokens = checked(row, tokens_name, max(1, row.integer(tokens_name, 0)))
        output = into.length(row) if output_name is None else (max(1, row.integer(output_name, 0)), None)
        name, parts = f"{into.stem}-{row.line}", list(blocks.parts(number, tokens))
        into.add(row, name, parts, output, group=str(number), arrival_seconds=seconds_of(row, at_name))


def columns_of(row: Row) -> tuple[str, str, str | None]:
    """The columns of time, prompt and answer. Raises `InvalidInput` where one of the first two is not there."""
    names = [str(name) for name in row.values]
    at, tokens = column(names, TIME_COLUMNS), column(names, INPUT_COLUMNS)
    if at is None or tokens is None:
        missing, known = ("a time", TIME_COLUMNS) if at is None else ("a prompt's tokens", INPUT_COLUMNS)
        raise InvalidInput(f"{row.path}, line 1: the header lacks {missing}: one of {', '.join(known)}")
    return at, tokens, column(names, OUTPUT_COLUMNS)


def seconds_of(row: Row, name: str) -> float:
    """A time in seconds since 1970, or since whatever the column counts from."""
    if re.match(r"\s*\d{4}-\d\d-", row.text(name)):
        return timestamp(row, name).timestamp()
    return row.number(name, 0.0) / (1000.0 if name.strip().lower().endswith("_ms") else 1.0)


def read_servegen(into: Collector) -> None:
    """ServeGen's rates (`client`, `window_start_s`, `rate_per_s`, `cv`): each client is a tenant that sends at its rate
    in windows of ten minutes, with gaps from a gamma distribution of that coefficient of variation (1 without one).

    The file has no lengths: prompts of 1,024 tokens that share nothing, and answers of the default length. The draws
    depend on client and window only.
    """
    blocks = Blocks(into)
    windows: dict[float, list[tuple[str, Row]]] = {}
    for row in csv_rows(into.path, SERVEGEN_COLUMNS):
        windows.setdefault(row.number("window_start_s", 0.0), []).append((row.text("client"), row))
    for start, clients in sorted(windows.items()):
        arrivals = sorted((at, client, row.line, row) for client, row in clients for at in arrivals_of(row, start))
        for at, client, _, row in into.until_full(arrivals):
            number = len(into.requests)
            into.notes[f"prompt lengths that are not in the file, {PROMPT_TOKENS} tokens"] += 1
            name, parts = f"{into.stem}-{number}", list(blocks.parts(number, PROMPT_TOKENS))
            into.add(row, name, parts, into.length(row), group=str(number), arrival_seconds=at, tenant=client)


def arrivals_of(row: Row, start: float) -> Iterator[float]:
    """When a client sends in a window. Raises `InvalidInput` for a rate that is none."""
    rate = row.number("rate_per_s", 0.0)
    cv = row.number("cv", 0.0) if row.values.get("cv") else 1.0
    if rate > RATE_MAX:
        raise row.wrong(f"'rate_per_s' must be at most {RATE_MAX:g}")
    shape = 1.0 / max(cv, 0.01) ** 2
    rng = np.random.default_rng([zlib.crc32(row.text("client").encode("utf-8", "surrogatepass")), int(start)])
    passed = float(rng.gamma(shape, 1.0 / (rate * shape))) * float(rng.random()) if rate else math.inf
    while passed < SERVEGEN_WINDOW_SECONDS:
        yield round(start + passed, 6)  # as clocks do; a gamma law of much variation has gaps of nothing
        passed += float(rng.gamma(shape, 1.0 / (rate * shape)))
