"""The machine's limit for a stream of prompts. Owns where a perfect store would keep each prompt, and the timing; the C
is in limit.c, and nothing of preble is used.

A decision cannot do less than compare the prompt with what is stored of it and store the rest. So the limit is, in one
C call from Python: borrow the buffer (or convert the list), memcmp with the stored prefix, memcpy of the unique suffix
to the end of a growing pool. What many prompts share is stored once, as in a radix tree: 200 tools are 200 stored
documents. Finding the prefix, choosing a worker and all bookings are free here.

The prompt is copied into one hot buffer just before each call (a list is built just before it), for the limit as for
everything it stands beside: that is how a tokenizer leaves a prompt. Without this one measures how fast DRAM brings a
stream that was made beforehand. The pool's pages are touched before, so page faults are not in the limit either.

The calls are timed by the same two reads of the clock as the scheduler's; nothing is subtracted.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
import tempfile
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.decision.shapes import Tokens

STEP_TOKENS = 32  # prefixes are known at these steps; the last few shared tokens are found by comparing
HERE = Path(__file__).resolve().parent


class Fresh:
    """Hands out prompts as a tokenizer leaves them: hot in the cache, as an int32 buffer or as a list of ints."""

    def __init__(self, stream: list[Tokens], as_list: bool) -> None:
        self._buffer = np.empty(max(map(len, stream), default=1), np.int32)
        self.give: Callable[[Tokens], Any] = self._give_list if as_list else self._give_buffer

    def _give_buffer(self, tokens: Tokens) -> Tokens:
        hot = self._buffer[: len(tokens)]
        hot[:] = tokens
        return hot

    def _give_list(self, tokens: Tokens) -> list[int]:
        ids: list[int] = tokens.tolist()
        return ids


class Places:
    """Where a perfect store would keep each prompt of a stream: pieces (offset, tokens) in one pool that only grows.

    A prompt shares with the earlier prompt that has the longest prefix in common, found by hashes of prefixes at every
    STEP_TOKENS; it reuses that prompt's pieces, and only the rest gets a piece of its own.
    """

    def __init__(self, tokens_max: int) -> None:
        self.end = 0
        self._weights = np.random.default_rng(1).integers(1, 2**63, tokens_max, np.uint64) | np.uint64(1)
        self._known: dict[int, int] = {}
        self._prompts: list[Tokens] = []
        self._pieces: list[list[tuple[int, int]]] = []

    def place(self, tokens: Tokens) -> tuple[list[tuple[int, int]], int]:
        """(pieces that are stored already, tokens in them); the rest of the prompt is stored from now on."""
        products = (tokens.astype(np.uint64) + np.uint64(1)) * self._weights[: len(tokens)]
        hashes = np.cumsum(products, dtype=np.uint64)[STEP_TOKENS - 1 :: STEP_TOKENS].tolist()
        steps = self._known_steps(hashes)
        pieces, shared = self._shared(tokens, self._known[hashes[steps - 1]], steps) if steps else ([], 0)
        for known in hashes[steps:]:
            self._known[known] = len(self._prompts)
        self._prompts.append(tokens)
        self._pieces.append([*pieces, (self.end, len(tokens) - shared)])
        self.end += len(tokens) - shared
        return pieces, shared

    def _known_steps(self, hashes: list[int]) -> int:
        """How many steps are known; with a prefix all shorter ones are, so a binary search finds it."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if hashes[middle - 1] in self._known else (low, middle - 1)
        return low

    def _shared(self, tokens: Tokens, donor: int, steps: int) -> tuple[list[tuple[int, int]], int]:
        start = steps * STEP_TOKENS
        theirs = self._prompts[donor][start : start + STEP_TOKENS]
        ours = tokens[start : start + len(theirs)]
        shared = start + int(np.argmin(np.append(ours == theirs[: len(ours)], False)))
        pieces, left = [], shared
        for offset, count in self._pieces[donor]:
            if left > 0 and count > 0:
                pieces.append((offset, min(count, left)))
                left -= count
        return pieces, shared


@dataclass(frozen=True)
class Limit:
    """p50 in nanoseconds of the whole call, of compare and copy inside it, and of the call that does nothing."""

    call_ns_p50: float
    compare_and_copy_ns_p50: float
    floor_ns_p50: float
    shared_fraction: float


def compiled() -> ModuleType:
    """limit.c as a module, compiled into a temporary directory. Raises CalledProcessError if it does not compile."""
    with tempfile.TemporaryDirectory(prefix="preble-limit-") as scratch:
        out = Path(scratch) / f"limit{sysconfig.get_config_var('EXT_SUFFIX')}"
        include = f"-I{sysconfig.get_path('include')}"
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", include, str(HERE / "limit.c"), "-o", str(out)], check=True)
        spec = importlib.util.spec_from_file_location("limit", out)
        assert spec is not None and spec.loader is not None, "a file with an extension module's suffix has a loader"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def limit_of(module: ModuleType, stream: list[Tokens], warm: int, as_list: bool) -> Limit:
    """The limit for the stream after its first `warm` prompts. Raises AssertionError if a stored prefix differs."""
    give = Fresh(stream, as_list).give
    places = Places(max(map(len, stream)))
    placed = [places.place(tokens) for tokens in stream]
    shared = [count for _, count in placed]
    prepared = [(array("q", [number for piece in pieces for number in piece]), count) for pieces, count in placed]

    def run(call: Callable[[Any], Any], inside: Callable[[], int] | None) -> float:
        module.reset(places.end)
        took = np.zeros(len(stream))
        for position, tokens in enumerate(stream):
            module.prepare(*prepared[position])
            fresh = give(tokens)
            start = time.perf_counter_ns()
            equal = call(fresh)
            took[position] = time.perf_counter_ns() - start
            if inside is not None:
                took[position] = inside()
            assert equal, f"prompt {position}: the stored prefix differs"
        return float(np.percentile(took[warm:], 50))

    whole, inner = run(module.decide, None), run(module.timed, module.inner)
    floor = p50_of(module.convert if as_list else module.borrow, stream[warm:], give)
    return Limit(whole, inner, floor, sum(shared[warm:]) / sum(map(len, stream[warm:])))


def p50_of(call: Callable[[Any], Any], stream: list[Tokens], give: Callable[[Tokens], Any]) -> float:
    """p50 in nanoseconds of a call with each prompt."""
    took = np.zeros(len(stream))
    for position, tokens in enumerate(stream):
        fresh = give(tokens)
        start = time.perf_counter_ns()
        call(fresh)
        took[position] = time.perf_counter_ns() - start
    return float(np.percentile(took, 50))


def clock_ns() -> float:
    """p50 of two reads of the clock with nothing between: what every figure contains."""
    took = []
    for _ in range(10_000):
        start = time.perf_counter_ns()
        took.append(time.perf_counter_ns() - start)
    return float(np.percentile(took, 50))
