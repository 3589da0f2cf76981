"""Reads prompts kept as segments: `NAME.jsonl.gz` of requests beside `NAME_segments.jsonl.gz` of what they share.

A request line has `id`, `group`, `parts` (`{"seg": id}` or `{"text": s}` in prompt order), `output_tokens`,
`output_tokens_t1`, `output_kind`, `output_text`, `after`; a segment line `id` and `text` or `pseudo`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from .collecting import Collector
from .files import Row, json_rows
from .types import Int32Array


def read_segmented(into: Collector) -> None:
    """Read the requests of `into.path`. One BOS leads each prompt; each part is tokenised on its own."""
    segments = {row.text("id"): row for row in json_rows(segments_path(into.path))}
    for row in json_rows(into.path):
        if into.full:
            return
        parts = [into.bos, *(part_ids(into, row, part, segments) for part in row.items("parts"))]
        after = None if row.values.get("after") is None else row.text("after")
        into.add(row, row.text("id"), parts, output_of(into, row), group=row.text("group"), after=after)


def segments_path(path: Path) -> Path:
    """The sibling that holds the segments, zipped or not. Raises `InvalidInput` where there is none."""
    name = path.name.split(".jsonl")[0] + "_segments.jsonl"
    for candidate in (path.with_name(f"{name}.gz"), path.with_name(name)):
        if candidate.exists():
            return candidate
    raise InvalidInput(f"path: {path} needs {name}.gz or {name} beside it")


def part_ids(into: Collector, row: Row, part: Any, segments: dict[str, Row]) -> Int32Array:
    """Token ids of one part."""
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return into.encode(part["text"])
    if not isinstance(part, dict) or not isinstance(part.get("seg"), str):
        raise row.wrong(f"a part must have 'seg' or 'text', got {part!r:.80}")
    segment = segments.get(part["seg"])
    if segment is None:
        raise row.wrong(f"no segment {part['seg']!r} in {segments_path(into.path).name}")
    if "pseudo" in segment.values:
        return into.pseudo(segment, segment.text("id"), segment.integer("n_tokens", 1))
    return into.encode(segment.text("text"))


def output_of(into: Collector, row: Row) -> tuple[int, Int32Array | None]:
    """(length, ids) of the answer: of the real text where it is one, as drawn in the file where not."""
    if into.outputs == "table1":
        return row.integer("output_tokens_t1", 1), None
    if row.values.get("output_kind") == "real":
        return into.output("", row.text("id"), row.text("output_text"))
    return row.integer("output_tokens", 1), None
