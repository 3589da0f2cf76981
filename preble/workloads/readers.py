"""`read`: any known file to a `Workload`. Owns recognising the format; the formats are in `traces` and `datasets`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import InvalidInput
from ..types import check_int
from .agents import read_weka
from .datasets import ROOM, read_alfworld, read_apps, read_loogle, read_nextqa, read_segmented, read_toolbench
from .files import Collector, Row, json_list, json_rows, numbered_lines
from .tokenizers import Tokenizer, words
from .traces import read_azure, read_mooncake
from .types import Workload

READERS: dict[str, Callable[[Collector], None]] = {
    "segments": read_segmented,
    "mooncake": read_mooncake,
    "azure": read_azure,
    "toolbench": read_toolbench,
    "loogle": read_loogle,
    "nextqa": read_nextqa,
    "alfworld": read_alfworld,
    "apps": read_apps,
    "weka": read_weka,
}
TRACES = {"mooncake", "azure", "weka"}
# The fields by which a JSON object is known, in the order they are tried.
FIELDS = [
    ("segments", {"id", "parts"}),
    ("mooncake", {"timestamp", "hash_ids"}),
    ("weka", {"session", "i", "keep", "new"}),
    ("alfworld", {"traj"}),
    ("toolbench", {"query", "api_list"}),
    ("loogle", {"input", "qa_pairs"}),
    ("loogle", {"context", "question", "answer"}),
    ("apps", {"question", "solutions"}),
]
COLUMNS = [("azure", {"TIMESTAMP", "ContextTokens"}), ("nextqa", {"video", "frame_count"})]


def read(
    path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    format: str | None = None,
    limit: int | None = None,
    outputs: str = "recorded",
) -> Workload:
    """Read the requests of a file (APPS: of a folder), plain or gzip, in the order they stand there.

    `format`: one of "segments", "mooncake", "azure", "toolbench", "loogle", "nextqa", "alfworld", "apps", "weka"; None
    looks at the file. `tokenizer`: `mistral()`, or None for `words()`, which needs nothing installed. `limit`: at most
    so many requests, the first ones. `outputs`: "recorded" for the lengths the file has (where it has none they are
    drawn from Table 1), "table1" for draws from Table 1 throughout; traces have their own lengths only. A recorded
    length of 0 becomes 1. Raises `InvalidInput` naming the argument, or file and line.
    """
    place = Path(path)
    if outputs not in ("recorded", "table1"):
        raise InvalidInput(f'outputs must be "recorded" or "table1", got {outputs!r}')
    if limit is not None:
        check_int("limit", limit, 1, 2**31 - 1, InvalidInput)
    name = recognised(place) if format is None else format
    if name not in READERS:
        raise InvalidInput(f"format must be one of {sorted(READERS)}, got {name!r}")
    if name in TRACES and outputs == "table1":
        raise InvalidInput(f'outputs="table1" is for prompts; a trace ({name}) has lengths of its own')
    into = Collector(place, tokenizer or words(), outputs, limit)
    READERS[name](into)
    if not into.requests:
        raise InvalidInput(f"path: {place} holds no request")
    source = f"{place.name} ({name}, tokenizer {into.tokenizer.name}, outputs {outputs})"
    arrivals = "of the trace" if name in TRACES else "none"
    return Workload(into.stem, into.requests, source, arrivals)


def recognised(path: Path) -> str:
    """The format of a file by its header or first object. Raises `InvalidInput` where none fits."""
    if path.is_dir():
        return "apps"
    first = next((line for _, line in numbered_lines(path) if line.strip()), "").lstrip()
    if first.startswith(("{", "[")):
        rows = json_rows(path) if first.startswith("{") else json_list(path)
        names = set(next(rows, Row(path, 1, {})).values)
        found = next((name for name, fields in FIELDS if fields <= names), None)
    else:
        names = set(first.split(","))
        found = next((name for name, columns in COLUMNS if columns <= names), None)
        if found is None and any(line.startswith(ROOM) for _, line in numbered_lines(path)):
            found = "alfworld"
    if found is None:
        raise InvalidInput(f"path: {path} is of no known format ({sorted(READERS)}); first line {first[:60]!r}")
    return found
