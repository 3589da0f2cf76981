"""Which format a file has, by what is in it. Owns the signatures, and no reader.

Of JSON the first object is looked at, of a table its header, of anything else the first lines; a file's name is not. No
two signatures fit one file: what fits none, or more, is refused.
"""

from __future__ import annotations

import csv
import json
import re
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InvalidInput
from .datasets import ROOM
from .files import HEAD_CHARS, head_of, numbered_lines, open_bytes

NPY_MAGIC = b"\x93NUMPY"
TABLE_LINES = 20  # of a text that are looked at: is it a table?
SEPARATORS = ",;\t|"
# How JSON begins; "[INST] Hello" and "{name}, hello" are text.
OBJECT, LIST = re.compile(r'\{\s*["}]'), re.compile(r'\[\s*(\{|\[|\]|"|-?\d|true|false|null)')


class Signature(NamedTuple):
    """The names that an object has, and those that it has not."""

    names: frozenset[str]
    others: frozenset[str] = frozenset()

    def fits(self, found: set[str]) -> bool:
        """Whether an object with these names is one."""
        return self.names <= found and not self.others & found


def having(names: str, but: str = "") -> Signature:
    """A signature of names with blanks between them."""
    return Signature(frozenset(names.split()), frozenset(but.split()))


CONVERSATIONS = "conversations messages body"
OBJECTS = [
    ("segments", having("id parts")),
    ("mooncake", having("timestamp input_length")),
    ("weka", having("session i keep new")),
    ("weka", having("requests block_size")),
    ("alfworld", having("traj", but="task_id")),
    ("toolbench", having("query api_list")),
    ("loogle", having("input qa_pairs")),
    ("loogle", having("context question answer")),
    ("apps", having("question solutions")),
    ("chat", having("messages", but="conversations")),
    ("chat", having("custom_id body")),
    ("sharegpt", having("conversations")),
    ("tokens", having("token_ids", but=CONVERSATIONS)),
    ("tokens", having("prompt_token_ids", but=f"token_ids {CONVERSATIONS}")),
    ("tokens", having("input_ids", but=f"token_ids prompt_token_ids {CONVERSATIONS}")),
    ("vllm", having("prompt", but=f"token_ids prompt_token_ids input_ids {CONVERSATIONS}")),
    ("text", having("text", but=f"prompt token_ids prompt_token_ids input_ids {CONVERSATIONS}")),
]
# Of tables, in small letters and with _ for a blank. The first that is there counts.
TIME_COLUMNS = ("arrival_seconds", "arrived_at", "arrival_time", "timestamp", "time", "timestamp_ms", "arrival_ms")
INPUT_COLUMNS = (
    *("contexttokens", "request_tokens", "num_prefill_tokens", "prompt_tokens", "input_tokens", "input_length"),
)
OUTPUT_COLUMNS = (
    *("generatedtokens", "response_tokens", "num_decode_tokens", "output_tokens", "completion_tokens", "output_length"),
)
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
SERVEGEN_COLUMNS = ("client", "window_start_s", "rate_per_s")


def format_of(path: Path) -> str:
    """The format of a file by what is in it. Raises `InvalidInput` where none fits, or where several do."""
    found = guesses(path)
    if len(found) != 1:
        said = f"fits several formats ({', '.join(found)})" if found else "is of no known format"
        raise InvalidInput(f"path: {path} {said}{'' if path.is_dir() else why_not(path)}")
    return found[0]


def why_not(path: Path) -> str:
    """What an error adds for a file that was not recognised."""
    first = first_line(path)
    if looks_like_a_table(path):
        return f": its columns {first[:80]!r} are none that are known; lines of text may be read by format 'text'"
    return f" ({', '.join(FORMATS)}); it begins with {first[:60]!r}"


def guesses(path: Path) -> list[str]:
    """Every format that a file's content fits, in the order of the signatures."""
    if path.is_dir():
        return ["apps"] if any(path.rglob("question.txt")) else ["weka"] if any(path.glob("*.json*")) else []
    with open_bytes(path) as file:
        if file.read(len(NPY_MAGIC)) == NPY_MAGIC:
            return ["tokens"]
    head = head_of(path, HEAD_CHARS)
    cut, head = len(head) == HEAD_CHARS, head.lstrip()
    if OBJECT.match(head):
        return fitting(first_object(path, head, 0, cut))
    if LIST.match(head):
        return of_list(path, head, cut)
    names = header_of(head)
    found = [name for name, fits in TABLES if fits(names)]
    if found or not head or "\0" in head:
        return found
    if any(line.startswith(ROOM) for _, line in numbered_lines(path)):
        return ["alfworld"]
    return [] if looks_like_a_table(path) else ["text"]


def fitting(value: Any) -> list[str]:
    """The formats whose signature an object fits."""
    names = set(value) if isinstance(value, dict) else set()
    return list(dict.fromkeys(name for name, signature in OBJECTS if signature.fits(names)))


def of_list(path: Path, head: str, cut: bool) -> list[str]:
    """The formats of a file that begins as a list: of objects, or of token ids."""
    start = len(head) - len(head[1:].lstrip())
    if head[start : start + 1] == "{":
        return fitting(first_object(path, head, start, cut))
    return ["text"] if head[start : start + 1] == '"' else ["tokens"] if re.match(r"[-\d\[]", head[start:]) else []


def first_object(path: Path, head: str, start: int, cut: bool) -> Any:
    """The object that begins there; where `head` is `cut` inside it, its names. Raises `InvalidInput` for no object."""
    try:
        return json.JSONDecoder().raw_decode(head, start)[0]
    except RecursionError as error:
        raise InvalidInput(f"{path}, line 1: not JSON: {error}") from error
    except ValueError as error:
        if not cut:
            raise InvalidInput(f"{path}, line {getattr(error, 'lineno', 1)}: not JSON: {error}") from error
    return dict.fromkeys(re.findall(r'"(\w+)"\s*:', head[start : start + HEAD_CHARS]))


def header_of(head: str) -> set[str]:
    """The columns of a table's first line."""
    try:
        return set(next(csv.reader([head.split("\n", 1)[0].rstrip("\r")])))
    except (csv.Error, StopIteration):
        return set()


def column(names: set[str] | list[str], known: tuple[str, ...]) -> str | None:
    """The name of a header that is one of `known`, as the header writes it."""
    written = {name.strip().lower().replace(" ", "_"): name for name in names}
    return next((written[one] for one in known if one in written), None)


def is_arrivals(names: set[str]) -> bool:
    """Whether a header has arrivals and lengths, in another's words than Azure's."""
    return bool(column(names, TIME_COLUMNS) and column(names, INPUT_COLUMNS)) and not names >= set(AZURE_COLUMNS)


TABLES = [
    ("azure", set(AZURE_COLUMNS).issubset),
    ("nextqa", {"video", "frame_count"}.issubset),
    ("servegen", set(SERVEGEN_COLUMNS).issubset),
    ("arrivals", is_arrivals),
]


FORMATS = sorted({name for name, _ in (*OBJECTS, *TABLES)})


def first_line(path: Path) -> str:
    """The first line that is not empty."""
    return next((line for _, line in numbered_lines(path) if line.strip()), "").lstrip()


def looks_like_a_table(path: Path) -> bool:
    """Whether all of the first lines have one and the same number of separators, and the first no sentence."""
    lines = [line for _, line in islice(numbered_lines(path), TABLE_LINES)]
    for sign in SEPARATORS:
        counts = {line.count(sign) for line in lines if line.strip()}
        if len(counts) == 1 and counts != {0} and not re.search(r"[.?!:]\s|\w \w+ \w", lines[0]):
            return True
    return False
