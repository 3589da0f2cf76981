"""Agents' sessions: read from a trace of real coding agents, or generated with its statistics; and groups of samples of
one prompt. Owns the trace's format and the statistics; when sessions are sent is in `sessions`.

The trace is that of callanjfox/kv-cache-tester (Apache-2.0; 46,000 requests of coding agents, anonymised), a request a
line: `session`, `i` (turn), `in` and `out` (tokens), `keep` (blocks of 64 tokens that are those of the turn before),
`new` (runs [first id, length] of the blocks after them; ids are the session's own, its sub-agents' included), `think`
(seconds from the answer before), `after_tool` (whether a tool's result came then), `parent` ([session, turn], of a
sub-agent). A session's first line has `tool_tokens` and `system_tokens`, which all sessions have in common. What
answers say is not in it: they are tokens that no other answer has, and a last one that says whether a tool is called.

Its statistics, which `coding_agents` draws from: 96 % of the input is the turn before; a turn adds 722 tokens at the
median and 4,100 at p90; a pause is 8 s after a tool, 68 s at p90, and 126 s at the median where a person answers, which
is before 16 % of the turns; answers have 440 tokens, 212 at the median; a session opens with 28,000 and has 44 turns.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InvalidInput
from ..types import SessionHint, check_int
from .arrivals import check_positive, generator
from .files import Collector, Row
from .tokenizers import words
from .types import Int32Array, PromptRequest, Workload, unwritable
from .weka_sessions import GLOBAL, session_rows

BLOCK_TOKENS = 64
BLOCK_IDS_MAX = 1 << 30
COMMON_BLOCKS = 1 << 12  # ids of blocks that all sessions open with
HEAD_TOKENS = 15_000  # tools and system prompt
COMPACTED_AT_TOKENS = 200_000  # where a session is summarised and goes on with its head and
SUMMARY_TOKENS = 50_000
# With what an answer ends: a model has tokens of its own for where it calls a tool, and where it waits for a person.
TOOL_CALL_END, TURN_END = 2**31 - 2, 2**31 - 3
HUMAN_SHARE = 0.16  # of the turns that come after a person
SUB_AGENT_SHARE = 0.005  # of the turns that start a sub-agent
SUB_AGENT_TURNS = (4, 16)
# Quantiles as measured; between them the logarithm goes straight.
SHARES = (0.0, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)
TOOL_PAUSES = (1.0, 4.0, 5.0, 8.0, 19.0, 68.0, 156.0, 608.0, 1800.0)
HUMAN_PAUSES = (5.0, 13.0, 39.0, 126.0, 528.0, 1749.0, 3120.0, 12567.0, 30000.0)
ADDED_TOKENS = (64.0, 192.0, 320.0, 722.0, 1664.0, 4096.0, 7984.0, 30000.0, 60000.0)
# After the head; what is longer is cut to what is not summarised at once.
OPENING_TOKENS = (500.0, 1000.0, 4000.0, 13_000.0, 95_000.0, 140_000.0, 141_000.0, 142_000.0, 144_000.0)
OUTPUT_TOKENS = (20.0, 103.0, 136.0, 212.0, 429.0, 909.0, 1546.0, 3766.0, 8000.0)
TURNS = (3.0, 7.0, 20.0, 44.0, 91.0, 144.0, 193.0, 311.0, 500.0)


# --- the trace --------------------------------------------------------------------------------------------------------


def read_sessions(
    path: str | os.PathLike[str], *, scale: int = 1, prompt_tokens_max: int | None = None, limit: int | None = None
) -> Workload:
    """The trace's sessions, each turn after the one before it, with lengths divided by `scale` (1, 2, 4, ... 64).

    A session ends before its first turn of more than `prompt_tokens_max` tokens (after scaling). `limit`: at most so
    many requests. Sub-agents are sent after the turn that started them. Raises `InvalidInput` naming the argument, or
    file and line.
    """
    place = Path(path)
    if scale not in (1, 2, 4, 8, 16, 32, 64):
        raise InvalidInput(f"scale must be a power of two up to 64, got {scale!r}")
    if prompt_tokens_max is not None:
        check_int("prompt_tokens_max", prompt_tokens_max, 1, 2**31 - 1, InvalidInput)
    into = Collector(place, words(), "recorded", limit)
    add_sessions(into, scale, prompt_tokens_max or 2**31 - 1)
    if not into.requests:
        raise InvalidInput(f"path: {place} holds no request")
    source = f"{place.name} (weka, lengths / {scale})"
    return Workload(into.stem, into.requests, source, notes=into.written_notes())


def read_weka(into: Collector) -> None:
    """The trace at its own lengths, for `read`."""
    add_sessions(into, 1, 2**31 - 1)


def add_sessions(into: Collector, scale: int, prompt_tokens_max: int) -> None:
    """Sessions first, then the sub-agents of those that are there."""
    by: dict[str, list[Row]] = {}
    for row in session_rows(into.path):
        by.setdefault(row.text("session"), []).append(row)
    bases = id_bases(by)
    turns = {name: {turn_of(row): row for row in rows} for name, rows in by.items()}
    added: set[str] = set()
    for name in sorted(by, key=lambda name: "/" in name):
        rows, parent = by[name], by[name][0].values.get("parent")
        if parent is not None and request_name(*parent_of(rows[0])) not in added:
            if not into.full:
                into.notes["turns of sub-agents whose start is not there, left out"] += len(rows)
            continue
        started = None if parent is None else turns[parent_of(rows[0])[0]][parent_of(rows[0])[1]]
        added.update(add_session(into, rows, bases[root_of(rows[0])], scale, prompt_tokens_max, started))


def add_session(
    into: Collector, rows: Sequence[Row], base: int, scale: int, prompt_tokens_max: int, started: Row | None
) -> list[str]:
    """The turns of one session or sub-agent that fit, and their request ids. `started`: its parent's turn."""
    name, run = rows[0].text("session"), BLOCK_TOKENS // scale
    parent = parent_of(rows[0])[0] if started is not None else ""
    head = common_blocks(rows[0])
    after = None if started is None else request_name(*parent_of(rows[0]))
    parts: list[Int32Array] = []
    names: list[str] = []
    for row, coming in zip(rows, [*rows[1:], None], strict=True):
        parts = first_of(parts, row.integer("keep", 0) * run)
        kept = sum(len(part) for part in parts) // run
        if kept < row.integer("keep", 0):
            raise row.wrong(f"'keep' is {row.integer('keep', 0)} blocks, but the turn before has {kept}")
        parts.append(unwritable(np.repeat(new_blocks(row, base, kept, head), run)))
        tokens = sum(len(part) for part in parts)
        if into.full:
            break
        if tokens > prompt_tokens_max:
            into.notes["turns after a prompt that is too long, left out"] += len(rows) - len(names)
            break
        if not tokens:
            raise row.wrong("the prompt is empty")
        request = PromptRequest(
            request_name(name, turn_of(row)),
            tuple(part for part in parts if len(part)),
            max(1, row.integer("out", 0) // scale),
            group=name.partition("/")[0],
            after=after,
            pause_seconds=pause_of(row, started if row is rows[0] else None) if after else 0.0,
            output_ids=answer_of(len(into.requests), max(1, row.integer("out", 0) // scale), coming),
            hint=SessionHint(session=name, parent=parent),
            after_tool=bool(row.values.get("after_tool")) or row is rows[0] and started is not None,
        )
        into.add_request(row, request)
        after = request.request_id
        names.append(after)
    return names


def answer_of(number: int, tokens: int, coming: Row | None) -> Int32Array:
    """Token ids of the answer of a file's request of that number, such as no other has, shape [tokens]. Its end says
    whether the turn after it comes after a tool."""
    ids = np.arange(tokens, dtype=np.int32) + (number * 7919) % 1_000_000_007
    return ended(ids.astype(np.int32), coming is not None and bool(coming.values.get("after_tool")))


def ended(answer: Int32Array, calls_tool: bool) -> Int32Array:
    """An answer with its last token."""
    ids = answer.copy()
    ids[-1] = TOOL_CALL_END if calls_tool else TURN_END
    return unwritable(ids)


def id_bases(by: dict[str, list[Row]]) -> dict[str, int]:
    """Where each session's block ids begin, so that no two sessions have one in common. Raises `InvalidInput`."""
    most: dict[str, int] = {}
    for rows in by.values():
        for row in rows:
            for first, count in runs_of(row):
                most[root_of(row)] = max(most.get(root_of(row), 0), first + count)
    bases, base = {}, COMMON_BLOCKS
    for root in dict.fromkeys(root_of(rows[0]) for rows in by.values()):
        bases[root] = base
        base += most.get(root, 0)
    if base >= BLOCK_IDS_MAX:
        raise next(iter(by.values()))[0].wrong(f"'new' names {base} blocks in all, more than {BLOCK_IDS_MAX}")
    return bases


def root_of(row: Row) -> str:
    """Whose block ids a turn has: its session's, or "" where they are those of all."""
    return "" if row.values.get("ids") == GLOBAL else row.text("session").partition("/")[0]


def runs_of(row: Row) -> list[tuple[int, int]]:
    """(first id, blocks) of what is new in a turn."""
    runs = row.values.get("new")
    if not isinstance(runs, list) or not all(isinstance(run, list) and len(run) == 2 for run in runs):
        raise row.wrong(f"'new' must be a list of [first id, blocks], got {runs!r:.80}")
    if not all(isinstance(number, int) and 0 <= number < BLOCK_IDS_MAX for run in runs for number in run):
        raise row.wrong(f"'new' must have numbers from 0 to {BLOCK_IDS_MAX - 1}, got {runs!r:.80}")
    return [(first, count) for first, count in runs]


def new_blocks(row: Row, base: int, kept: int, head: int) -> Int32Array:
    """Block ids of what is new in a turn after `kept` blocks, shape [blocks]; of the session's first `head` blocks
    those that all sessions have."""
    runs = [np.arange(base + first, base + first + count, dtype=np.int32) for first, count in runs_of(row)]
    ids = np.concatenate([np.empty(0, np.int32), *runs])
    common = max(0, min(head - kept, len(ids)))
    ids[:common] = np.arange(kept, kept + common, dtype=np.int32)
    return ids


def first_of(parts: Sequence[Int32Array], count: int) -> list[Int32Array]:
    """The leading `count` entries of the parts' concatenation, as parts."""
    kept: list[Int32Array] = []
    for part in parts:
        if count <= 0:
            break
        kept.append(part if len(part) <= count else part[:count])
        count -= len(part)
    return kept


def common_blocks(row: Row) -> int:
    """Blocks of tools and system prompt that a session opens with."""
    tokens = sum(int(row.values.get(name) or 0) for name in ("tool_tokens", "system_tokens"))
    return min(tokens // BLOCK_TOKENS, COMMON_BLOCKS)


def turn_of(row: Row) -> int:
    """Its number in its session."""
    return row.integer("i", 0)


def request_name(session: str, turn: int) -> str:
    """The id of a turn's request."""
    return f"{session}.{turn:04d}"


def parent_of(row: Row) -> tuple[str, int]:
    """(session, turn) that started a sub-agent."""
    parent = row.values.get("parent")
    if not isinstance(parent, list) or len(parent) != 2 or not isinstance(parent[1], int):
        raise row.wrong(f"'parent' must be [session, turn], got {parent!r:.80}")
    return str(parent[0]), parent[1]


def pause_of(row: Row, started: Row | None) -> float:
    """Seconds from the answer before it; of a sub-agent's first turn from its parent's answer."""
    if started is None:
        return max(0.0, seconds_of(row, "think"))
    return max(0.0, seconds_of(row, "t") - seconds_of(started, "t") - seconds_of(started, "api"))


def seconds_of(row: Row, name: str) -> float:
    """A number of seconds; 0 where there is none."""
    value: Any = row.values.get(name) or 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise row.wrong(f"{name!r} must be a number of seconds, got {value!r:.80}")
    return float(value)


# --- generated --------------------------------------------------------------------------------------------------------


def coding_agents(
    sessions: int, seed: int, *, scale: float = 16.0, turns_max: int = 500, name: str = "coding agents"
) -> Workload:
    """Sessions with the trace's statistics (see the module) and lengths divided by `scale`, each turn after the one
    before. All sessions open with the same tools and system prompt; a sub-agent opens with all of its parent's prompt.

    All that is sent at its own time arrives at 0: `sessions_at_once` and `session_arrivals` say when sessions begin.
    Raises `InvalidInput` naming the argument.
    """
    check_int("sessions", sessions, 1, 1_000_000, InvalidInput)
    check_int("turns_max", turns_max, 1, 100_000, InvalidInput)
    check_positive("scale", scale)
    rng = generator(seed)
    head = run_of_tokens(rng, HEAD_TOKENS / scale)
    requests = []
    for number in range(sessions):
        drawn = min(turns_max, round(quantile(TURNS, rng.random())))
        opening = (head, run_of_tokens(rng, quantile(OPENING_TOKENS, rng.random()) / scale))
        requests += session_of(rng, f"s{number:05d}", head, opening, drawn, scale)
    return Workload(name, requests, f"generated (coding agents / {scale:g}, {sessions} sessions, seed {seed})")


def session_of(
    rng: np.random.Generator, name: str, head: Int32Array, opening: tuple[Int32Array, ...], turns: int, scale: float,
    started: PromptRequest | None = None,
) -> list[PromptRequest]:  # fmt: skip
    """A session's turns, and those of the sub-agents that they start. `started`: the turn that this one is of."""
    parts, after = opening, None if started is None else started.request_id
    requests: list[PromptRequest] = []
    parent = started.hint.session if started is not None and started.hint is not None else ""
    after_tool = started is not None
    for turn in range(turns):
        pause = quantile(TOOL_PAUSES if after_tool else HUMAN_PAUSES, rng.random())
        calls_tool = turn + 1 < turns and bool(rng.random() >= HUMAN_SHARE)
        answer = ended(run_of_tokens(rng, quantile(OUTPUT_TOKENS, rng.random()) / scale), calls_tool)
        own = PromptRequest(
            request_name(name, turn), parts, len(answer), group=name.partition("/")[0], after=after,
            pause_seconds=pause if turn else 0.0, output_ids=answer, hint=SessionHint(session=name, parent=parent),
            after_tool=after_tool,
        )  # fmt: skip
        requests.append(own)
        after, after_tool = own.request_id, calls_tool
        if started is None and rng.random() < SUB_AGENT_SHARE:
            count = int(rng.integers(*SUB_AGENT_TURNS))
            task = (*parts, answer, run_of_tokens(rng, quantile(ADDED_TOKENS, rng.random()) / scale))
            requests += session_of(rng, f"{name}/a{turn}", head, task, count, scale, own)
        parts = (*parts, answer, run_of_tokens(rng, quantile(ADDED_TOKENS, rng.random()) / scale))
        if sum(len(part) for part in parts) > COMPACTED_AT_TOKENS / scale:
            parts = (head, run_of_tokens(rng, SUMMARY_TOKENS / scale))
    return requests


def quantile(values: Sequence[float], share: float) -> float:
    """The value at a share of a distribution given at `SHARES`."""
    return float(np.exp(np.interp(share, SHARES, np.log(values))))


def run_of_tokens(rng: np.random.Generator, tokens: float) -> Int32Array:
    """Random token ids, at least one."""
    return unwritable(rng.integers(3, 1 << 30, max(1, round(tokens)), dtype=np.int32))


def sample_groups(
    groups: int,
    samples: int,
    seed: int,
    *,
    prompt_tokens: int = 2000,
    output_tokens: int = 400,
    system_tokens: int = 500,
) -> Workload:
    """Groups of samples of one prompt, as reinforcement learning asks for them: all at once, group after group.

    Prompts are half to one and a half times `prompt_tokens` long after the system prompt that all have, answers
    lognormal with that mean and a deviation as large. Raises `InvalidInput` naming the argument.
    """
    check_int("groups", groups, 1, 1_000_000, InvalidInput)
    check_int("samples", samples, 1, 1_000_000, InvalidInput)
    rng = generator(seed)
    system, requests = run_of_tokens(rng, system_tokens), []
    sigma = math.sqrt(math.log(2.0))
    for group in range(groups):
        prompt = (system, run_of_tokens(rng, prompt_tokens * (0.5 + rng.random())))
        outputs = np.maximum(1, rng.lognormal(math.log(output_tokens) - sigma * sigma / 2, sigma, samples)).astype(int)
        requests += [
            PromptRequest(f"g{group:04d}.{sample:03d}", prompt, output, group=f"g{group:04d}", sampled=True)
            for sample, output in enumerate(outputs.tolist())
        ]
    return Workload("sample groups", requests, f"generated ({groups} groups of {samples}, seed {seed})")
