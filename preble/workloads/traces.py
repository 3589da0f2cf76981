"""Reads published traces: arrival times and lengths, without text. Owns how lengths become tokens.

A trace says which blocks are equal, not what is in them. So a block opens with two ids, its own and its file's,
followed by a filler that all blocks share: unlike blocks of a file differ at their first token, those of two files at
their second, and a trace of 10**8 tokens takes some megabytes.
"""

from __future__ import annotations

import zlib
from datetime import datetime, timedelta

import numpy as np

from .files import Collector, Row, csv_rows, json_rows
from .types import Int32Array, unwritable

MOONCAKE_BLOCK_TOKENS = 512
FILLER_IDS = 1000
FILE_IDS = 1 << 20
PROMPT_TOKENS_MAX = 1 << 22
SECOND = timedelta(seconds=1)


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

    Equal ids are equal tokens; the last block is cut to `input_length`. The group is the second id (the first block is
    the same for all of the conversation trace), so that requests of one conversation share it. A row earlier than the
    one before it is refused.
    """
    blocks = Blocks(into)
    last = 0
    for row in into.until_full(json_rows(into.path)):
        tokens, ids = row.integer("input_length", 1), row.items("hash_ids")
        if len(ids) != -(-tokens // MOONCAKE_BLOCK_TOKENS):
            raise row.wrong(f"{tokens} tokens need {-(-tokens // MOONCAKE_BLOCK_TOKENS)} hash_ids, got {len(ids)}")
        if not all(isinstance(i, int) and 0 <= i < 2**30 for i in ids):
            raise row.wrong("'hash_ids' must be integers from 0 to 2**30 - 1")
        at = row.integer("timestamp", last)
        last = at
        parts: list[Int32Array] = []
        for place, block_id in enumerate(ids):
            parts += blocks.parts(block_id, min(MOONCAKE_BLOCK_TOKENS, tokens - place * MOONCAKE_BLOCK_TOKENS))
        into.add(
            row,
            f"{into.stem}-{row.line}",
            parts,
            (max(1, row.integer("output_length", 0)), None),
            group=str(ids[min(1, len(ids) - 1)]),
            arrival_seconds=at / 1000.0,
        )


def read_azure(into: Collector) -> None:
    """Azure's csv: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`. What prompts share is not known: nothing here.

    Arrivals count from the first row; a row earlier than the one before it is refused.
    """
    blocks = Blocks(into)
    first = last = None
    for row in into.until_full(csv_rows(into.path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))):
        at = timestamp(row)
        first = first or at
        if last is not None and at < last:
            raise row.wrong("'TIMESTAMP' is earlier than the row before")
        last = at
        tokens = row.integer("ContextTokens", 1)
        if tokens > PROMPT_TOKENS_MAX:
            raise row.wrong(f"'ContextTokens' must be at most {PROMPT_TOKENS_MAX}")
        number = len(into.requests)
        into.add(
            row,
            f"{into.stem}-{row.line}",
            list(blocks.parts(number, tokens)),
            (max(1, row.integer("GeneratedTokens", 0)), None),
            group=str(number),
            arrival_seconds=(at - first) / SECOND,
        )


def timestamp(row: Row) -> datetime:
    """The time of an Azure row. Its seventh decimal (100 ns) is dropped: Python counts microseconds."""
    text = row.text("TIMESTAMP")
    whole, _, fraction = text.partition(".")
    try:
        return datetime.strptime(f"{whole}.{fraction[:6] or '0'}", "%Y-%m-%d %H:%M:%S.%f")
    except ValueError as error:
        raise row.wrong(f"'TIMESTAMP' must look like 2023-11-16 18:17:03.9799600, got {text!r:.40}") from error
