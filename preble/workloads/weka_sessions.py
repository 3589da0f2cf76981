"""The turns of agents' sessions, a row each, from either form of the weka trace. Owns the form that is published: an
object a session with its `requests`, a file or a line each, as callanjfox/kv-cache-tester and AIPerf have it.

`requests` have `t` (s), `in` and `out` (tokens), `hash_ids` (one for 64 tokens), `think_time` and `api_time` (s),
`input_types`; one of type "subagent" has `requests` of its own. Rows are what `agents` describes: `keep` and `new`
instead of `hash_ids`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .files import Row, json_objects

PUBLISHED_BLOCK_TOKENS = 64
HASH_ID_MAX = (1 << 30) - 1
GLOBAL = "global"  # of ids that all sessions have in common
Ids = npt.NDArray[np.int64]


def session_rows(path: Path) -> Iterator[Row]:
    """The turns in a file, or in the files of a folder by name; a session's sub-agents after the turn that starts
    them. Raises `InvalidInput` naming file and line."""
    for file in sorted(path.glob("*.json*")) if path.is_dir() else [path]:
        for row in json_objects(file):
            if "requests" not in row.values:
                yield row
                continue
            session = row.text("id") if "id" in row.values else f"{file.name.split('.')[0]}-{row.line}"
            if row.integer("block_size", 1) != PUBLISHED_BLOCK_TOKENS:
                raise row.wrong(f"'block_size' must be {PUBLISHED_BLOCK_TOKENS}, got {row.values['block_size']!r:.40}")
            yield from turns_of(row, session, {})


def turns_of(row: Row, session: str, more: dict[str, Any], began: float = 0.0) -> Iterator[Row]:
    """The turns of a session or sub-agent whose `requests` an object has. `more`: what all its turns have."""
    is_global = row.values.get("hash_id_scope", more.get("ids")) == GLOBAL
    more = {**more, "ids": GLOBAL} if is_global else more
    shared = {} if is_global else {name: row.values.get(name) or 0 for name in ("tool_tokens", "system_tokens")}
    before, turn, last, ended = np.empty(0, np.int64), 0, began, began
    for number, entry in enumerate(row.items("requests"), 1):
        place = Row(row.path, number, entry if isinstance(entry, dict) else {}, f"{row.counted} {row.line}, request")
        if not isinstance(entry, dict):
            raise place.wrong(f"must be an object, got {entry!r:.80}")
        at = place.number("t", 0.0)
        at = at if at >= began else began + at  # some count a sub-agent's times from its start
        if entry.get("type") == "subagent":
            name = f"{session}/{entry.get('agent_id') or 'agent'}@{number}"
            yield from turns_of(place, name, {**more, **({"parent": [session, turn - 1]} if turn else {})}, at)
            continue
        ids = hash_ids(place)
        keep = common(before, ids)
        api = place.number("api_time", 0.0) if entry.get("api_time") is not None else 0.0
        think = place.number("think_time", 0.0) if entry.get("think_time") is not None else max(0.0, at - ended)
        values = {
            **more, **(shared if not turn else {}), "session": session, "i": turn, "t": at, "out": entry.get("out"),
            "keep": keep, "new": runs(ids[keep:]), "think": think, "api": api,
            "after_tool": "tool_result" in (entry.get("input_types") or ()),
        }  # fmt: skip
        yield Row(place.path, place.line, values, place.counted)
        before, turn, last = ids, turn + 1, at
        ended = last + api


def hash_ids(place: Row) -> Ids:
    """The ids of a request's blocks, shape [blocks]. Raises `InvalidInput`."""
    ids = place.items("hash_ids")
    if not all(type(one) is int and 0 <= one <= HASH_ID_MAX for one in ids):
        raise place.wrong(f"'hash_ids' must be integers from 0 to {HASH_ID_MAX}, got {ids!r:.80}")
    return np.array(ids, np.int64)


def common(one: Ids, other: Ids) -> int:
    """How many leading ids are equal."""
    count = min(len(one), len(other))
    unlike = np.flatnonzero(one[:count] != other[:count])
    return int(unlike[0]) if len(unlike) else count


def runs(ids: Ids) -> list[list[int]]:
    """Ids as runs [first id, length]."""
    if not len(ids):
        return []
    starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
    lengths = np.diff(starts, append=len(ids))
    return [[first, length] for first, length in zip(ids[starts].tolist(), lengths.tolist(), strict=True)]
