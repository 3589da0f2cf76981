"""One API request as one or more generations: prompts times choices, through the router, as pieces of text. Owns stop
strings, what counts as output text, and the merging of choices; shapes no HTTP.

A choice ends when its engine says so, or when a stop string is complete: then the generation is closed, which aborts it
at the engine. Closing the iterator of `pieces`, or cancelling its task, does the same for every choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...router.request import StreamChunk
from ...router.router import Router
from ...transport.tasks import running
from ...types import SamplingParams
from .detokenizing import Detokenizer, StopStrings
from .tokenizing import TextCodec

if TYPE_CHECKING:
    from ..._placement.decision import Decision

PIECES_QUEUED_MAX = 4  # by choice; beyond that tokens merge in the router until the client has read


@dataclass(frozen=True, slots=True)
class ChoiceJob:
    """What one choice is to be. `stops` are strings; `skip_special_tokens` leaves special tokens out of the text."""

    index: int
    request_id: str
    token_ids: npt.NDArray[np.int32]
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    namespace: Hashable = None
    skip_special_tokens: bool = True


@dataclass(slots=True)
class Choice:
    """What became of a job so far. `finish_reason` "stop" comes with what stopped it, a string or a token id."""

    job: ChoiceJob
    output_tokens: int = 0
    cached_tokens: int | None = None
    decision: Decision | None = None
    worker: str = ""
    finish_reason: str | None = None
    stopped_by: str | int | None = None


@dataclass(frozen=True, slots=True)
class TextPiece:
    """News of a choice: text that may be shown, and the tokens that came. `last` when the choice has ended."""

    choice: Choice
    text: str
    token_ids: tuple[int, ...] = ()
    last: bool = False


@dataclass(slots=True)
class RequestProgress:
    """All choices of one request, for usage and logs. `first` is set by the first piece of any choice."""

    choices: list[Choice] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens, each prompt counted once."""
        return sum({id(one.job.token_ids): len(one.job.token_ids) for one in self.choices}.values())

    @property
    def output_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(one.output_tokens for one in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were cached, each prompt counted once: as its first choice found it."""
        first: dict[int, int] = {}
        for one in self.choices:
            first.setdefault(id(one.job.token_ids), one.cached_tokens or 0)
        return sum(first.values())


class _ChoiceWriter:
    """Turns the chunks of one choice into pieces."""

    def __init__(self, choice: Choice, codec: TextCodec | None, eos_token_ids: tuple[int, ...]) -> None:
        self._choice = choice
        job = choice.job
        self._ends = {*job.sampling.stop_token_ids, *(() if job.sampling.ignore_eos else eos_token_ids)}
        self._stops = StopStrings(job.stops)
        self._text: Detokenizer | None = None
        if codec is not None:
            skip = job.skip_special_tokens
            self._text = Detokenizer(lambda ids: codec.decode(ids, skip_special_tokens=skip))

    def take(self, chunk: StreamChunk) -> TextPiece:
        """Book a chunk; the piece that may be shown."""
        choice = self._choice
        choice.output_tokens += len(chunk.token_ids)
        choice.worker = chunk.worker or choice.worker
        if chunk.index == 0 and chunk.decision is not None:
            choice.decision, choice.cached_tokens = chunk.decision, chunk.cached_tokens
        ended = chunk.finish_reason is not None
        visible: Sequence[int] = chunk.token_ids
        if chunk.finish_reason == "stop" and visible and visible[-1] in self._ends:
            choice.stopped_by = int(visible[-1])
            visible = visible[:-1]
        text = self._stops.add(self._decoded(visible, ended))
        if self._stops.matched is not None:
            choice.finish_reason, choice.stopped_by = "stop", self._stops.matched
        elif ended:
            text += self._stops.flush()
            choice.finish_reason = chunk.finish_reason
        return TextPiece(choice, text, chunk.token_ids, choice.finish_reason is not None)

    def _decoded(self, token_ids: Sequence[int], ended: bool) -> str:
        if self._text is None:
            return ""
        text = self._text.add(token_ids)
        return text + self._text.flush() if ended else text


async def pieces(
    router: Router, codec: TextCodec | None, jobs: Sequence[ChoiceJob], into: RequestProgress
) -> AsyncGenerator[TextPiece, None]:
    """Run the jobs and yield their pieces as they come; `into` is kept up to date. Raises what the router raises."""
    into.choices = [Choice(job) for job in jobs]
    streams = [_choice_pieces(router, codec, choice) for choice in into.choices]
    async with aclosing(streams[0] if len(streams) == 1 else _merged(streams)) as merged:
        async for piece in merged:
            yield piece


async def _choice_pieces(router: Router, codec: TextCodec | None, choice: Choice) -> AsyncGenerator[TextPiece, None]:
    job = choice.job
    writer = _ChoiceWriter(choice, codec, router.fleet.eos_token_ids)
    stream: Any = router.generate(job.token_ids, job.sampling, namespace=job.namespace, request_id=job.request_id)
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            piece = writer.take(chunk)
            if piece.text or piece.token_ids or piece.last:
                yield piece
            if piece.last:
                return


async def _merged(streams: Sequence[AsyncGenerator[TextPiece, None]]) -> AsyncGenerator[TextPiece, None]:
    """Pieces of several streams in the order they come; the first error of one ends all."""
    queue: asyncio.Queue[TextPiece | Exception | None] = asyncio.Queue(PIECES_QUEUED_MAX * len(streams))

    async def pump(stream: AsyncGenerator[TextPiece, None]) -> None:
        try:
            async with aclosing(stream) as one:
                async for piece in one:
                    await queue.put(piece)
        except Exception as error:
            await queue.put(error)
            raise
        await queue.put(None)

    async with running(*map(pump, streams)) as tasks:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item


def jobs_for(prompts: Sequence[npt.NDArray[np.int32]], template: ChoiceJob, choices: int) -> list[ChoiceJob]:
    """`choices` jobs for each prompt, like `template`; each with a seed and a request id of its own."""
    return [
        replace(
            template,
            index=index,
            request_id=f"{template.request_id}/{index}",
            token_ids=prompts[index // choices],
            sampling=replace(template.sampling, seed=(template.sampling.seed + index % choices) % 2**63),
        )
        for index in range(len(prompts) * choices)
    ]
