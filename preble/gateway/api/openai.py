"""OpenAI's endpoints: chat completions, completions, models. Owns their shapes, not what happens.

A stream's status and headers are sent with its first token, so that a request that finds no worker gets a proper error
and every answer reports which worker it came from.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..core.gateway import Gateway, TokenIds, decision_headers
from ..core.request_context import RequestContext, context_of
from ..core.sessions import with_body
from ..text.choices import ChoiceJob, RequestProgress, TextPiece
from .http import DONE, EventStream, attended, body_of, json_response, off_loop, sse, token_ids_of
from .schemas import (
    ABSENT,
    ChatRequest,
    Common,
    CompletionRequest,
    decode,
    plain_messages,
    prompts_of,
    sampling_of,
    stop_strings,
)


class Shape:
    """How one answer looks: chat or text completion. Bound to one request."""

    def __init__(self, chat: bool, context: RequestContext, include_usage: bool) -> None:
        self.chat = chat
        self.context = context
        self.include_usage = include_usage
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{context.request_id}"
        self._created = int(time.time())

    def whole(self, texts: list[str], progress: RequestProgress) -> dict[str, Any]:
        """The answer in one."""
        choices = []
        for choice, text in zip(progress.choices, texts, strict=True):
            body: dict[str, Any] = {"index": choice.job.index, "finish_reason": choice.finish_reason, "logprobs": None}
            body |= {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choices.append(body)
        return {**self._envelope("chat.completion"), "choices": choices, "usage": usage(progress)}

    def opening(self, index: int) -> bytes:
        """What a chat's choice begins with."""
        return self._event(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def piece(self, piece: TextPiece) -> bytes:
        """One event of a stream."""
        body = {"delta": {"content": piece.text}} if self.chat else {"text": piece.text}
        return self._event(piece.choice.job.index, body, piece.choice.finish_reason if piece.last else None)

    def closing(self, progress: RequestProgress) -> bytes:
        """The event with the usage."""
        return sse({**self._envelope("chat.completion.chunk"), "choices": [], "usage": usage(progress)})

    def _event(self, index: int, body: dict[str, Any], finish_reason: str | None) -> bytes:
        choice = {"index": index, "finish_reason": finish_reason, "logprobs": None, **body}
        event: dict[str, Any] = {**self._envelope("chat.completion.chunk"), "choices": [choice]}
        if self.include_usage:
            event["usage"] = None
        return sse(event)

    def _envelope(self, kind: str) -> dict[str, Any]:
        kind = kind if self.chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self.context.model}


def usage(progress: RequestProgress) -> dict[str, Any]:
    """Tokens of a request; cached ones by the engine's word."""
    return {
        "prompt_tokens": progress.prompt_tokens,
        "completion_tokens": progress.output_tokens,
        "total_tokens": progress.prompt_tokens + progress.output_tokens,
        "prompt_tokens_details": {"cached_tokens": progress.cached_tokens},
    }


class OpenAI:
    """The handlers, for one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started = int(time.time())

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        async with body_of(request, self._gateway) as data:
            body = await off_loop(len(data), decode, data, ChatRequest)
            messages = await off_loop(len(data), plain_messages, body.messages)
            prompts = [await attended(request.receive, self._gateway.tokens_of_chat(messages))]
        del data, messages  # the answer may take long
        body.messages = []
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return await self._answer(request, body, prompts, asked, chat=True)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        async with body_of(request, self._gateway) as data:
            body = await off_loop(len(data), decode, data, CompletionRequest)
            found = await off_loop(len(data), prompts_of, body.prompt, "prompt", self._gateway.max_model_tokens)
            self._gateway.check_choices(len(found.given) * (body.n or 1))
            prompts = await token_ids_of(request, self._gateway, found.given, "prompt")
        del data, found  # the answer may take long
        body.prompt = ABSENT
        return await self._answer(request, body, prompts, body.max_tokens, chat=False)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return json_response({"object": "list", "data": self._gateway.models.cards(self._started)})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        return json_response(self._gateway.models.card(request.path_params["name"], self._started))

    async def _answer(
        self, request: Request, body: Common, prompts: list[TokenIds], asked: int | None, *, chat: bool
    ) -> Response:
        gateway, context = self._gateway, context_of(request)
        context.model = gateway.check_model(body.model)
        context.stream = bool(body.stream)
        context.session = with_body(context.session, prompt_cache_key=body.prompt_cache_key, user=body.user)
        limit = min(gateway.output_limit(len(prompt), asked, "max_tokens") for prompt in prompts)
        jobs = gateway.plan(
            context,
            prompts,
            sampling_of(body, limit, gateway.seed(body.seed)),
            choices=body.n or 1,
            stops=stop_strings(body.stop),
            salt=body.cache_salt,
        )
        options = body.stream_options
        shape = Shape(chat, context, include_usage=bool(options is not None and options.include_usage))
        if context.stream:
            return await self._stream(request, shape, jobs)
        return await attended(request.receive, self._whole(shape, jobs))

    async def _whole(self, shape: Shape, jobs: list[ChoiceJob]) -> Response:
        context = shape.context
        texts = [""] * len(jobs)
        async with aclosing(self._gateway.run(jobs, context)) as stream:
            async for piece in stream:
                texts[piece.choice.job.index] += piece.text
        return json_response(shape.whole(texts, context.progress), headers=decision_headers(context.progress))

    async def _stream(self, request: Request, shape: Shape, jobs: list[ChoiceJob]) -> Response:
        stream = self._gateway.run(jobs, shape.context)
        first = await attended(request.receive, first_of(stream))
        return EventStream(_events(shape, first, stream), stream, decision_headers(shape.context.progress))


async def first_of(stream: AsyncGenerator[TextPiece, None]) -> TextPiece:
    """The first piece of a stream; a stream that fails or is cancelled before it is closed."""
    try:
        return await anext(stream)
    except BaseException:
        await stream.aclose()
        raise


async def _events(
    shape: Shape, first: TextPiece, stream: AsyncGenerator[TextPiece, None]
) -> AsyncGenerator[bytes, None]:
    opened: set[int] = set()
    piece: TextPiece | None = first
    while piece is not None:
        index = piece.choice.job.index
        if shape.chat and index not in opened:
            opened.add(index)
            yield shape.opening(index)
        if piece.text or piece.last:
            yield shape.piece(piece)
        piece = await anext(stream, None)
    if shape.include_usage:
        yield shape.closing(shape.context.progress)
    yield DONE
