"""One API request as one or more generations: prompts times choices, through the router, as pieces of text. Owns stop
strings, what counts as output text, and the running of choices beside each other; shapes no HTTP.

A choice ends when its engine says so, or when a stop string is complete: then the generation is closed, which aborts it
at the engine. Closing the iterator of `pieces`, or cancelling its task, does the same for every choice.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from ...router.request import StreamChunk
from ...router.router import Router
from ...transport.tasks import running
from .choices import Choice, ChoiceJob, RequestProgress, TextPiece
from .detokenizing import Detokenizer, StopStrings
from .tokenizing import TextCodec
from .unread import UnreadPieces


class Watcher(Protocol):
    """Receives at once what the jobs do, whenever it is read."""

    def came(self, piece: TextPiece) -> None:
        """A piece has come."""

    def ended(self) -> None:
        """One job has ended, in whatever way."""


class _ChoiceWriter:
    """Turns the chunks of one choice into pieces."""

    def __init__(self, choice: Choice, codec: TextCodec | None, eos_token_ids: tuple[int, ...]) -> None:
        self._choice = choice
        job = choice.job
        self._ends = {*job.sampling.stop_token_ids, *(() if job.sampling.ignore_eos else eos_token_ids)}
        self._stops = StopStrings(job.stops, keep=job.keep_stop)
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
        return TextPiece(choice, text, chunk.token_ids, choice.finish_reason is not None, chunk.logprobs)

    def _decoded(self, token_ids: Sequence[int], ended: bool) -> str:
        if self._text is None:
            return ""
        text = self._text.add(token_ids)
        return text + self._text.flush() if ended else text


async def pieces(
    router: Router,
    codec: TextCodec | None,
    jobs: Sequence[ChoiceJob],
    into: RequestProgress,
    unread: UnreadPieces,
    watcher: Watcher,
) -> AsyncGenerator[TextPiece, None]:
    """Run the jobs and yield their pieces as they come; `into` is kept up to date. Raises what the router raises.

    The jobs do not wait for who reads the pieces: those of a choice merge in `unread`.
    """
    into.choices = [Choice(job) for job in jobs]
    streams = [_choice_pieces(router, codec, choice) for choice in into.choices]
    async with aclosing(merged(streams, unread, watcher)) as found:
        async for piece in found:
            yield piece


async def _choice_pieces(router: Router, codec: TextCodec | None, choice: Choice) -> AsyncGenerator[TextPiece, None]:
    job = choice.job
    writer = _ChoiceWriter(choice, codec, router.fleet.eos_token_ids)
    stream: Any = router.generate(
        job.token_ids,
        job.sampling,
        namespace=job.namespace,
        request_id=job.request_id,
        client=job.client,
        first_token_seconds=job.first_token_seconds,
        session=job.session,
        group=job.group,
        **job.claim,
    )
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            piece = writer.take(chunk)
            if piece.text or piece.token_ids or piece.last:
                yield piece
            if piece.last:
                return


async def merged(
    streams: Sequence[AsyncGenerator[TextPiece, None]], unread: UnreadPieces, watcher: Watcher
) -> AsyncGenerator[TextPiece, None]:
    """Pieces of several streams in the order they come; the first error of one ends all."""

    async def pump(stream: AsyncGenerator[TextPiece, None]) -> None:
        try:
            async with aclosing(stream) as one:
                async for piece in one:
                    watcher.came(piece)
                    unread.add(piece)
        except Exception as error:
            unread.fail(error)
            raise
        finally:
            watcher.ended()
            unread.end()

    try:
        async with running(*map(pump, streams)):
            while (piece := await unread.next()) is not None:
                yield piece
    finally:
        unread.drop()
