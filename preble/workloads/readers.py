"""`read`: any known file to a `Workload`. Owns the list of readers; the formats are in `own`, `chats`, `traces`,
`agents` and `datasets`, and how they are recognised in `formats`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..errors import InvalidInput
from ..types import check_int
from . import formats
from .agents import read_weka
from .chats import read_chat, read_sharegpt
from .datasets import read_alfworld, read_apps, read_loogle, read_nextqa, read_segmented, read_toolbench
from .files import OUTPUT_TOKENS, Collector
from .own import read_text, read_tokens, read_vllm
from .tokenizers import Tokenizer, words
from .traces import read_arrivals, read_azure, read_mooncake, read_servegen
from .types import PromptRequest, Workload

READERS: dict[str, Callable[[Collector], None]] = {
    "text": read_text,
    "vllm": read_vllm,
    "tokens": read_tokens,
    "chat": read_chat,
    "sharegpt": read_sharegpt,
    "mooncake": read_mooncake,
    "weka": read_weka,
    "arrivals": read_arrivals,
    "azure": read_azure,
    "servegen": read_servegen,
    "segments": read_segmented,
    "toolbench": read_toolbench,
    "loogle": read_loogle,
    "nextqa": read_nextqa,
    "alfworld": read_alfworld,
    "apps": read_apps,
}
# Formats without text, which need no tokenizer; those that have arrivals; those whose lengths Table 1 has none for.
TEXTLESS = {"tokens", "mooncake", "weka", "arrivals", "azure", "servegen"}
TIMED = {"mooncake", "arrivals", "azure", "servegen"}
OWN_LENGTHS = TEXTLESS | {"text", "vllm", "chat", "sharegpt"}


def format_of(path: str | os.PathLike[str]) -> str:
    """The format of a file, by what is in it. Raises `InvalidInput` where none fits, or where several do."""
    return formats.format_of(Path(path))


def read(
    path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    format: str | None = None,
    limit: int | None = None,
    outputs: str = "recorded",
    output_tokens: int = OUTPUT_TOKENS,
) -> Workload:
    """Read the requests of a file (APPS, weka: or a folder), plain, gzip or xz, by arrival, else as they stand there.

    `format`: a name of `READERS`; None looks at the file. `tokenizer`: `mistral()`, `from_file(path)`, or None for
    `words()`, which needs nothing installed; formats without text use none. `limit`: at most so many requests, the
    first ones of the file. `outputs`: "recorded" for the lengths the file has (where a public data set has none they
    are drawn from Table 1), "table1" for draws from Table 1 throughout; traces and one's own data have their own
    lengths only, and `output_tokens` where they say none. A recorded length of 0 becomes 1. What was left out or put
    in is counted in `Workload.notes`. Raises `InvalidInput` naming the argument, or file, line and field.
    """
    place = Path(path)
    if outputs not in ("recorded", "table1"):
        raise InvalidInput(f'outputs must be "recorded" or "table1", got {outputs!r}')
    if limit is not None:
        check_int("limit", limit, 1, 2**31 - 1, InvalidInput)
    check_int("output_tokens", output_tokens, 1, 2**31 - 1, InvalidInput)
    name = format_of(place) if format is None else format
    if name not in READERS:
        raise InvalidInput(f"format must be one of {', '.join(READERS)}, got {name!r}")
    if name in OWN_LENGTHS and outputs == "table1":
        raise InvalidInput(f'outputs="table1" is for public data sets; a trace or own data ({name}) has lengths')
    into = Collector(place, tokenizer or words(), outputs, limit, output_tokens)
    READERS[name](into)
    if not into.requests:
        said = "".join(f"; {note}" for note in into.written_notes())
        raise InvalidInput(f"path: {place} holds no request{said}")
    is_timed = name in TIMED or bool(into.timed)
    spoken = "" if name in TEXTLESS else f", tokenizer {into.tokenizer.name}"
    return Workload(
        into.stem,
        from_zero(into.requests) if is_timed else into.requests,
        f"{place.name} ({name}{spoken}, outputs {outputs})",
        "of the trace" if is_timed else "none",
        into.written_notes(),
    )


def from_zero(requests: list[PromptRequest]) -> list[PromptRequest]:
    """Requests by arrival, the first at 0; those that wait for another stay behind it."""
    first = min(request.arrival_seconds for request in requests if request.after is None)
    times: dict[str, float] = {}
    for request in requests:
        after = times.get(request.after, 0.0) if request.after is not None else first
        times[request.request_id] = max(request.arrival_seconds, after)
    ordered = sorted(requests, key=lambda request: times[request.request_id])
    return [replace(request, arrival_seconds=max(0.0, request.arrival_seconds - first)) for request in ordered]
