"""Gathers the requests of one file: texts encoded once, ids of their own for what has no text. Knows no format."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from .files import Row
from .table1 import drawn_output_tokens
from .tokenizers import Tokenizer
from .types import Int32Array, PromptRequest

# Ids for pseudo-tokens: above the vocabulary, a range of 2**16 for each file name, all below 2**30 plus a vocabulary.
PSEUDO_IDS_PER_FILE = 1 << 16
PSEUDO_RANGES = 1 << 14


def constant(token_id: int, tokens: int) -> Int32Array:
    """A run of one token id, shape [tokens], int32, not writable."""
    run = np.full(tokens, token_id, dtype=np.int32)
    run.setflags(write=False)
    return run


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
        if request_id in self._ids:
            raise row.wrong(f"request id {request_id!r} is there twice")
        if after is not None and after not in self._ids:
            raise row.wrong(f"'after' names {after!r}, which is no earlier request")
        kept = tuple(part for part in parts if len(part))
        if not kept:
            raise row.wrong("the prompt is empty")
        self._ids.add(request_id)
        tokens, ids = output
        self.requests.append(PromptRequest(request_id, kept, tokens, group, arrival_seconds, after, output_ids=ids))
