"""Measures a server that runs, from outside: timed requests over its own API. Owns what is sent and how arrivals of
tokens become samples; which server, and how long, is `server`'s.

A prefill is what passes from sending a prompt to its first token, less the way there and back. A decode iteration is
the time between tokens while every stream of a batch decodes: its prompts are sent once before, so that they are cached
and all streams begin together.

    stream 1   first ......|.........|.... last
    stream 2        first .|.........|........ last
                           |<------->|          between the latest first and the earliest last token

Prompts are random tokens, no two alike, so a cache helps only where it is meant to; what the server reports as cached
is taken off. Everything it sends has a bound that `Planned` states before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import numpy as np

from ...clock import Clock
from ...errors import EngineError, TransportError
from ...transport.engine_servers.http_client import ServerPiece
from ...transport.tasks import running, within
from ...types import SamplingParams
from .bench import Results, Sample
from .points import DECODE, PREFILL, Limits, Point, decode_batches, doubling

TOKENS_FROM, TOKENS_TO = 100, 1000  # ids that every vocabulary has, past the special ones
SHORTEST_TOKENS = 32
WINDOW_TOKENS = 6  # of a stream, while all others decode, or the batch says nothing
OUTPUT_TOKENS = (24, 96)  # of each stream; the second where the first gave no such window
ROUND_TRIPS = 5
WARM_UPS = 2


class MeasuredServer(Protocol):
    """What is asked of a server; `http_client.EngineServer` is one."""

    def generate(
        self, token_ids: Any, sampling: SamplingParams | None = None, *, request_id: str
    ) -> AsyncIterator[ServerPiece]: ...
    async def abort(self, request_id: str) -> None: ...
    async def served(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class ServerRun:
    """One timed run: seconds of a prefill of `tokens` missed ones, or of an iteration of a batch of `tokens` streams,
    ending at `context`."""

    seconds: float
    tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class Planned:
    """What a measurement sends at the most."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    concurrent: int


def server_points(limits: Limits, rng: np.random.Generator) -> list[Point]:
    """What is measured, the least work first: a server that turns out slow is asked for no more than there is time
    for."""
    longest = limits.tokens_max
    lengths = doubling(SHORTEST_TOKENS, longest)
    found = [Point(PREFILL, length) for length in lengths]
    found += [
        Point(PREFILL, int(rng.integers(low + 1, high)), 0, True)
        for low, high in zip(lengths, lengths[1:], strict=False)
        if high > low + 1
    ]
    found += [Point(PREFILL, longest // part, longest // 2) for part in (16, 4)]
    found += [Point(PREFILL, longest // 8, longest // 4), Point(PREFILL, longest // 8, longest // 2, True)]
    batches = decode_batches(limits)
    found += [Point(DECODE, batch, longest // part) for batch in batches for part in (16, 4)]
    found += [Point(DECODE, (batch + 1) // 2, longest // 8, True) for batch in batches[1:]]
    return sorted(dict.fromkeys(found), key=lambda point: (_prompt_tokens(point), point.tokens))


def planned(points: Sequence[Point], repeats: int) -> Planned:
    """What measuring these points sends at the most."""
    decodes = [point.tokens for point in points if point.kind == DECODE]
    prefills, prefixes = len(points) - len(decodes), {point.before for point in points if point.kind == PREFILL} - {0}
    outputs = sum(decodes) * (repeats * sum(OUTPUT_TOKENS) + 1)
    prompts = sum(_prompt_tokens(point) * (1 if point.kind == PREFILL else 2) * repeats for point in points)
    return Planned(
        repeats * (prefills + 2 * sum(decodes)) + sum(decodes) + len(prefixes) + WARM_UPS,
        prompts + sum(_prompt_tokens(point) for point in points if point.kind == DECODE) + sum(prefixes),
        outputs + repeats * prefills + len(prefixes) + WARM_UPS,
        max([1, *decodes]),
    )


def _prompt_tokens(point: Point) -> int:
    return point.tokens * point.before if point.kind == DECODE else point.tokens + point.before


class ServerBench:
    """Runs points on one server. `block_size`: tokens of its cache's blocks; `name` begins the ids of requests."""

    def __init__(
        self, server: MeasuredServer, rng: np.random.Generator, *, block_size: int, name: str, clock: Clock
    ) -> None:
        self.round_trip_seconds = 0.0
        self.unusable = 0  # batches that never decoded together
        self._server = server
        self._rng = rng
        self._block_size = block_size
        self._name = name
        self._clock = clock
        self._sent = 0
        self._live: set[str] = set()
        self._prefixes: dict[int, np.ndarray] = {}
        self._batches: dict[Point, list[np.ndarray]] = {}

    async def warm_up(self) -> None:
        """Take the time of the way there and back, and let the server compute what it computes once only."""
        trips = []
        for _ in range(ROUND_TRIPS):
            began = self._clock()
            await self._server.served()
            trips.append(self._clock() - began)
        self.round_trip_seconds = max(min(trips), 0.0)
        for _ in range(WARM_UPS):
            await self._first_token(self._tokens(SHORTEST_TOKENS))

    async def measure(
        self,
        points: Sequence[Point],
        repeats: int,
        seconds_left: Callable[[], float],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Results:
        """Every point once, in order, and then again in random order, up to `repeats` times or until time is up.

        What is under way when time is up is aborted. Raises what the server's client raises.
        """
        runs: dict[Point, list[ServerRun]] = {point: [] for point in points}
        order = [*points, *(points[i] for _ in range(repeats - 1) for i in self._rng.permutation(len(points)))]
        for done, point in enumerate(order):
            left = seconds_left()
            if left <= 0.0:
                break
            try:
                run = await within(left, self.run(point))
            except asyncio.TimeoutError:
                break
            if run is not None:
                runs[point].append(run)
            progress(done + 1, len(order))
        results = Results()
        for point, found in runs.items():
            results.skipped += not found
            results.short += 0 < len(found) < repeats
            if found:
                results.samples.append(_sample(point, found))
        return results

    async def run(self, point: Point) -> ServerRun | None:
        """One run of a point; None where the streams of a batch never decoded together."""
        return await (self._decode(point) if point.kind == DECODE else self._prefill(point))

    async def abort_all(self) -> None:
        """Ask the server to stop what it has of us: called when a measurement is broken off."""
        for request_id in list(self._live):
            try:
                await self._server.abort(request_id)
            except TransportError:
                return

    # --- prefill ------------------------------------------------------------------------------------------------------

    async def _prefill(self, point: Point) -> ServerRun:
        prompt, expected = self._tokens(point.tokens), 0
        if point.before:
            if point.before not in self._prefixes:
                self._prefixes[point.before] = self._tokens(point.before)
                await self._first_token(self._prefixes[point.before])
            prompt = np.concatenate((self._prefixes[point.before], prompt))
            expected = point.before - point.before % self._block_size
        seconds, reported = await self._first_token(prompt)
        missed = len(prompt) - min(expected if reported is None else reported, len(prompt) - 1)
        return ServerRun(max(seconds - self.round_trip_seconds, 0.5 * seconds), missed, len(prompt))

    async def _first_token(self, prompt: np.ndarray) -> tuple[float, int | None]:
        """(seconds until the first token, cached tokens that the server reported) of a request for one token."""
        began, first, cached = self._clock(), None, None
        async for piece in self._generate(prompt, 1):
            first = self._clock() if first is None and piece.token_ids else first
            cached = piece.cached_tokens if piece.cached_tokens is not None else cached
        if first is None:
            raise EngineError(f"the server sent no token for a prompt of {len(prompt)}")
        return first - began, cached

    # --- decode -------------------------------------------------------------------------------------------------------

    async def _decode(self, point: Point) -> ServerRun | None:
        if point not in self._batches:
            self._batches[point] = [self._tokens(point.before) for _ in range(point.tokens)]
            for prompt in self._batches[point]:
                await self._first_token(prompt)
        for output_tokens in OUTPUT_TOKENS:
            run = decode_run(point.before, await self._together(self._batches[point], output_tokens))
            if run is not None:
                return run
        self.unusable += 1
        return None

    async def _together(self, prompts: Sequence[np.ndarray], output_tokens: int) -> list[list[float]]:
        """When each token of each stream came."""
        async with running(*(self._arrivals(prompt, output_tokens) for prompt in prompts)) as streams:
            return list(await asyncio.gather(*streams))

    async def _arrivals(self, prompt: np.ndarray, output_tokens: int) -> list[float]:
        times: list[float] = []
        async for piece in self._generate(prompt, output_tokens):
            times += [self._clock()] * len(piece.token_ids)
        return times

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _generate(self, prompt: np.ndarray, output_tokens: int) -> AsyncIterator[ServerPiece]:
        self._sent += 1
        request_id = f"{self._name}-{self._sent}"
        sampling = SamplingParams(max_new_tokens=output_tokens, ignore_eos=True)
        self._live.add(request_id)
        async for piece in self._server.generate(prompt, sampling, request_id=request_id):
            yield piece
        self._live.discard(request_id)

    def _tokens(self, length: int) -> np.ndarray:
        return self._rng.integers(TOKENS_FROM, TOKENS_TO, length, dtype=np.int32)


def decode_run(prompt_tokens: int, arrivals: Sequence[Sequence[float]]) -> ServerRun | None:
    """The iteration of a batch whose tokens came at these times, one list a stream; None where its streams did not
    decode together for `WINDOW_TOKENS` tokens."""
    if not all(arrivals):
        return None
    begin, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    seconds, places = [], []
    for times in arrivals:
        inside = [i for i, at in enumerate(times) if begin <= at <= end]
        if len(inside) <= WINDOW_TOKENS or times[inside[-1]] <= times[inside[0]]:
            return None
        seconds.append((times[inside[-1]] - times[inside[0]]) / (inside[-1] - inside[0]))
        places.append((inside[0] + inside[-1] + 1) / 2)
    return ServerRun(median(seconds), len(arrivals), prompt_tokens + round(median(places)))


def _sample(point: Point, runs: Sequence[ServerRun]) -> Sample:
    """The middle run, of two the quicker one: what disturbs a server makes it slower."""
    ordered = sorted(runs, key=lambda run: run.seconds)
    middle = ordered[(len(ordered) - 1) // 2]
    return Sample(point, middle.tokens, middle.context, max(middle.seconds, 1e-9), tuple(run.seconds for run in runs))
