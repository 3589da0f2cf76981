"""Prompt streams shaped like the paper's workloads, as int32 arrays. Owns the generators; seeded, no files but
Mooncake's trace. Needs numpy only, so that peers make the same streams in their own environment.

toolbench200, toolbench1500, toolbench1500-zipf: 400 tokens of system prompt, ~1150 of a tool, ~285 of the request.
videoqa: ~9.8k tokens of a video and a short question. loogle: ~23.6k of a document and a question. embodied: 64
interleaved chains that grow from 1600 to 2950 tokens. mooncake: the conversation trace's 512-token blocks, if its
file is given.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.common.paths import SHARED

Tokens = npt.NDArray[np.int32]
VOCABULARY = 32_000
SHAPES = ("toolbench200", "toolbench1500", "toolbench1500-zipf", "embodied", "videoqa", "loogle", "mooncake")
LONG = ("videoqa", "loogle", "mooncake")  # a quarter of the prompts is as many tokens as the others have
DEFAULT_TRACE = SHARED / "workloads/traces/mooncake_conversation.jsonl.gz"


def prompts(shape: str, count: int, *, seed: int = 0, trace: Path | None = None) -> list[Tokens]:
    """`count` prompts of a shape (fewer when the trace ends). Raises ValueError for an unknown shape or a missing
    trace."""
    rng = np.random.default_rng([seed, SHAPES.index(shape) if shape in SHAPES else 99])
    if shape.startswith("toolbench"):
        tools = 200 if shape == "toolbench200" else 1500
        return list(_documents(rng, count, tools, 1150, 250, 285, 400, zipf=1.1 if shape.endswith("zipf") else None))
    if shape == "videoqa":
        return list(_documents(rng, count, 1000, 9770, 3000, 65, 17))
    if shape == "loogle":
        return list(_documents(rng, count, 776, 23_500, 5000, 45, 20))
    if shape == "embodied":
        return list(_chains(rng, count))
    if shape == "mooncake":
        if trace is None or not trace.exists():
            raise ValueError("the mooncake shape needs --trace PATH of conversation_trace.jsonl(.gz)")
        return list(_blocks(trace, count))
    raise ValueError(f"no shape {shape!r}; there are {', '.join(SHAPES)}")


def digest(stream: list[Tokens]) -> str:
    """Reports whether two processes, with numpy of two versions perhaps, made the same stream."""
    checksum = 0
    for tokens in stream:
        checksum = zlib.crc32(tokens.tobytes(), checksum)
    return f"{checksum:08x}"


class EndlessTools:
    """ToolBench prompts for ever, made one at a time and cheaply: one of `tools` shared documents drawn alike, and a
    question nobody shares."""

    def __init__(self, tools: int, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 77])
        system = _text(self._rng, 400)
        lengths = np.maximum(self._rng.normal(1150, 250, tools), 1150 / 4)
        self._shared = [np.concatenate([system, _text(self._rng, length)]) for length in lengths]
        self._buffer = np.empty(1 << 16, np.int32)
        self._picks: list[int] = []

    def next_prompt(self) -> Tokens:
        """A view of the one buffer that the next call overwrites: hot in the cache, as a tokenizer leaves it."""
        if not self._picks:
            self._picks = self._rng.integers(0, len(self._shared), 4096).tolist()
        shared = self._shared[self._picks.pop()]
        end = len(shared) + 285
        self._buffer[: len(shared)] = shared
        self._buffer[len(shared) : end] = self._rng.integers(0, VOCABULARY, 285, np.int32)
        return self._buffer[:end]


def _text(rng: np.random.Generator, length: float) -> Tokens:
    return rng.integers(0, VOCABULARY, max(int(length), 1)).astype(np.int32)


def _documents(
    rng: np.random.Generator,
    count: int,
    documents: int,
    mean: float,
    deviation: float,
    question: int,
    system: int,
    zipf: float | None = None,
) -> Iterator[Tokens]:
    """A system prompt, one of `documents` shared documents (popularity alike, or Zipf), a question nobody shares."""
    shared = [_text(rng, max(rng.normal(mean, deviation), mean / 4)) for _ in range(documents)]
    prompt = _text(rng, system)
    weights = np.arange(1, documents + 1, dtype=float) ** -zipf if zipf else np.ones(documents)
    for pick in rng.choice(documents, count, p=weights / weights.sum()):
        yield np.concatenate([prompt, shared[pick], _text(rng, rng.normal(question, question / 5))])


def _chains(rng: np.random.Generator, count: int) -> Iterator[Tokens]:
    """64 agents in turn; each step adds about 30 tokens to its own prompt, from 1600 until it starts anew at 2950."""
    chains = [_text(rng, 1600 + 21 * agent) for agent in range(64)]
    for step in range(count):
        agent = step % 64
        chains[agent] = np.concatenate([chains[agent], _text(rng, int(rng.integers(20, 40)))])
        if len(chains[agent]) > 2950:
            chains[agent] = np.concatenate([chains[agent][:800], _text(rng, 800)])
        yield chains[agent]


def _blocks(trace: Path, count: int) -> Iterator[Tokens]:
    """Mooncake rows: one hash id a 512-token block; equal ids are equal tokens."""
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as lines:
        for line, _ in zip(lines, range(count), strict=False):
            row = json.loads(line)
            blocks = [np.random.default_rng(block).integers(0, VOCABULARY, 512) for block in row["hash_ids"]]
            yield np.concatenate(blocks)[: max(row["input_length"], 1)].astype(np.int32)
