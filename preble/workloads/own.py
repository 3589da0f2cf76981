"""Reads prompts as people keep them: lines of text, vLLM's custom data sets, token ids. Owns these three formats.

A line may have `output_tokens` and `arrival_seconds`, too. What prompts have in common shows in their tokens, so each
request is a group of its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import InvalidInput
from .files import (
    DOCUMENT_CHARS_MAX,
    UNREADABLE,
    Collector,
    Row,
    head_of,
    json_document,
    json_objects,
    numbered_lines,
    open_bytes,
)
from .formats import NPY_MAGIC, OBJECT
from .types import Int32Array, unwritable

TOKEN_FIELDS = ("token_ids", "prompt_token_ids", "input_ids")
TOKEN_ID_MAX = 2**31 - 1


def read_text(into: Collector) -> None:
    """A prompt a line, a JSON list of texts, or objects with a `text`. Empty ones are left out and counted."""
    head = head_of(into.path, 1 << 10).lstrip()
    if re.match(r'\[\s*"', head):
        for number, text in into.until_full(enumerate(json_document(into.path), 1)):
            row = Row(into.path, number, {"text": text}, "entry")
            add_text(into, row, row.text("text"))
        return
    if OBJECT.match(head) or re.match(r"\[\s*\{", head):
        read_prompts(into, "text")
        return
    for number, line in into.until_full(numbered_lines(into.path)):
        add_text(into, Row(into.path, number, {}), line)


def read_vllm(into: Collector) -> None:
    """The lines that vLLM's `custom` data set takes: `prompt`, and `output_tokens` where it is known."""
    read_prompts(into, "prompt")


def read_prompts(into: Collector, field: str) -> None:
    """Objects with a text in `field`."""
    for row in into.until_full(json_objects(into.path)):
        add_text(into, row, row.text(field))


def add_text(into: Collector, row: Row, text: str) -> None:
    """A request with this prompt, after one BOS."""
    if not text.strip():
        into.notes["empty prompts left out"] += 1
        return
    add_own(into, row, [into.bos, into.encode(text)])


def add_own(into: Collector, row: Row, parts: list[Int32Array]) -> None:
    """A request with what its line says of its answer and its arrival."""
    name = f"{into.stem}-{row.line}"
    into.add(row, name, parts, into.length(row), group=name, arrival_seconds=into.arrival(row))


# --- token ids --------------------------------------------------------------------------------------------------------


def read_tokens(into: Collector) -> None:
    """Token ids: a list a line, objects with `token_ids` (`prompt_token_ids`, `input_ids`), a JSON list of lists, or a
    numpy array of a row a prompt, where ids below 0 at a row's end fill it up. Nothing is added."""
    for row, ids in into.until_full(token_rows(into)):
        if len(ids):
            add_own(into, row, [ids])
        else:
            into.notes["empty prompts left out"] += 1


def token_rows(into: Collector) -> Iterator[tuple[Row, Int32Array]]:
    """Each line with its ids."""
    with open_bytes(into.path) as file:
        if file.read(len(NPY_MAGIC)) == NPY_MAGIC:
            yield from array_rows(into)
            return
    head = head_of(into.path, 1 << 10).lstrip()
    if head.startswith("{") or head[1:].lstrip().startswith("{"):
        for row in json_objects(into.path):
            field = next((name for name in TOKEN_FIELDS if name in row.values), TOKEN_FIELDS[0])
            yield row, ids_of(row, row.values.get(field), field)
    else:
        for row, value in list_rows(into, head):
            yield row, ids_of(row, value, "line" if row.counted == "line" else "entry")


def list_rows(into: Collector, head: str) -> Iterator[tuple[Row, Any]]:
    """Lists without names: one a line, or all in one list."""
    if head[1:].lstrip().startswith("["):
        for number, value in enumerate(json_document(into.path), 1):
            yield Row(into.path, number, {}, "entry"), value
        return
    for number, line in numbered_lines(into.path):
        if line.strip():
            row = Row(into.path, number, {})
            yield row, parsed(row, line)


def parsed(row: Row, text: str) -> Any:
    """JSON. Raises `InvalidInput`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise row.wrong(f"not JSON: {error}") from error


def ids_of(row: Row, value: Any, field: str) -> Int32Array:
    """A list of token ids as an array, shape [tokens]. Raises `InvalidInput` for what is none."""
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one <= TOKEN_ID_MAX for one in value):
        raise row.wrong(f"{field!r} must be a list of integers from 0 to 2**31 - 1, got {value!r:.80}")
    return unwritable(value)


def array_rows(into: Collector) -> Iterator[tuple[Row, Int32Array]]:
    """The rows of a numpy file. Nothing in it is run (no pickle)."""
    try:
        with open_bytes(into.path) as file:
            is_first = np.lib.format.read_magic(file) == (1, 0)
            head = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
            shape, _, dtype = head(file)
        if len(shape) != 2 or dtype.kind not in "iu":
            raise InvalidInput(f"{into.path}: must be integers of shape [prompts, tokens], got {dtype} {shape}")
        if math.prod(shape) > DOCUMENT_CHARS_MAX:
            raise InvalidInput(f"{into.path}: more than {DOCUMENT_CHARS_MAX} token ids in one array")
        with open_bytes(into.path) as file:
            found = np.load(file, allow_pickle=False)
    except (*UNREADABLE, ValueError) as error:
        raise InvalidInput(f"{into.path}: not a numpy array of numbers: {error}") from error
    for number, ids in enumerate(found, 1):
        row = Row(into.path, number, {}, "row")
        padding = np.flatnonzero(ids < 0)
        ids = ids[: padding[0]] if len(padding) else ids
        if len(ids) and (int(ids.max()) > TOKEN_ID_MAX or bool((found[number - 1][len(ids) :] >= 0).any())):
            raise row.wrong("token ids must be from 0 to 2**31 - 1, and below 0 only at the end")
        yield row, unwritable(ids)
