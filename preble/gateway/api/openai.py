"""OpenAI's endpoints: chat completions, completions, models. Owns their shapes, not what happens.

A stream's status and headers are sent with its first token, so that a request that finds no worker gets a proper error
and every answer reports which worker it came from.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...types import TokenLogprob
from ..core.gateway import Gateway, TokenIds, decision_headers
from ..core.http_errors import wrong
from ..core.request_context import RequestContext, context_of
from ..core.sessions import with_body
from ..text.chat_template import ChatTemplate
from ..text.choices import Choice, ChoiceJob, RequestProgress, TextPiece
from ..text.tokenizing import TextCodec
from ..text.tool_calls import ToolCallReader
from .http import DONE, EventStream, attended, body_of, json_response, off_loop, sse, token_ids_of
from .logprobs import of_chat, of_completion
from .sampling import check_fields, sampling_of_openai, stop_strings
from .schemas import (
    ABSENT,
    ChatRequest,
    Common,
    CompletionRequest,
    check_messages,
    decode,
    plain_messages,
    prompts_of,
    salt_of,
)
from .tools import ToolUse, is_plain, prompt_maker, tool_use, with_tools

COMPLETION_MAX_TOKENS = 16  # where a completion names no limit, as in OpenAI's API and in both engines


@dataclass(slots=True)
class _Collected:
    """What has come of one choice of an answer in one."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, piece: TextPiece) -> None:
        """Add a piece; tokens are kept only where something is said of each."""
        self.text += piece.text
        if piece.logprobs:
            self.token_ids += piece.token_ids
            self.logprobs += piece.logprobs


class Shape:
    """How one answer looks: chat or text completion. Bound to one request."""

    def __init__(
        self,
        chat: bool,
        context: RequestContext,
        include_usage: bool,
        codec: TextCodec | None,
        tools: ToolUse | None = None,
        echoes: Sequence[str] = (),
    ) -> None:
        self.chat = chat
        self.context = context
        self.include_usage = include_usage
        self._codec = codec
        self._tools = tools
        self._readers: dict[int, ToolCallReader] = {}  # by choice
        self._echoes = dict(enumerate(echoes))  # by choice: the prompt that its text begins with, until it was said
        self._offsets: dict[int, int] = {}  # by choice: characters of a completion's tokens so far
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{context.request_id}"
        self._created = int(time.time())

    def whole(self, collected: list[_Collected], progress: RequestProgress) -> dict[str, Any]:
        """The answer in one."""
        choices = []
        for choice, found in zip(progress.choices, collected, strict=True):
            message = self._read_calls(choice.job.index, found.text, last=True)
            for call in message.get("tool_calls", ()):
                del call["index"]  # which deltas have
            body: dict[str, Any] = {
                "index": choice.job.index,
                "finish_reason": self._reason(choice),
                "logprobs": self._logprobs(choice, found.token_ids, found.logprobs),
            }
            if self.chat:
                body["message"] = {"role": "assistant", "content": None if "tool_calls" in message else "", **message}
            else:
                body["text"] = self._echoes.pop(choice.job.index, "") + found.text
            choices.append(body)
        return {**self._envelope("chat.completion"), "choices": choices, "usage": usage(progress)}

    def opening(self, index: int) -> bytes:
        """What a chat's choice begins with."""
        return self._event(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def piece(self, piece: TextPiece) -> bytes | None:
        """One event of a stream; None where there is nothing to say yet."""
        index = piece.choice.job.index
        logprobs = self._logprobs(piece.choice, piece.token_ids, piece.logprobs) if piece.token_ids else None
        if not self.chat:
            body: dict[str, Any] = {"text": self._echoes.pop(index, "") + piece.text}
        elif self._tools is None:
            body = {"delta": {"content": piece.text}}
        else:
            body = {"delta": self._read_calls(index, piece.text, last=piece.last)}
            if not (body["delta"] or piece.last or logprobs):
                return None
        return self._event(index, body, self._reason(piece.choice) if piece.last else None, logprobs)

    def _read_calls(self, index: int, text: str, *, last: bool) -> dict[str, Any]:
        """Text and calls of a choice's next text, as a message or a delta has them."""
        if self._tools is None:
            return {"content": text}
        reader = self._readers.setdefault(index, self._tools.reader())
        said: dict[str, Any] = {}
        for found in (reader.add(text), reader.flush()) if last else (reader.add(text),):
            if found.text:
                said["content"] = said.get("content", "") + found.text
            first = reader.count - len(found.calls)
            for number, call in enumerate(found.calls, first):
                said.setdefault("tool_calls", []).append(self._tools.shown(number, call))
        return said

    def _reason(self, choice: Choice) -> str | None:
        """How a choice ended; a function that was named is what was to come, so that is a stop."""
        reader = self._readers.get(choice.job.index)
        called = reader is not None and reader.count and self._tools is not None and not self._tools.function
        return "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason

    def _logprobs(
        self, choice: Choice, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any] | None:
        if choice.job.sampling.logprobs is None:
            return None
        if self.chat:
            return of_chat(self._codec, tokens, logprobs)
        index = choice.job.index
        found, self._offsets[index] = of_completion(self._codec, tokens, logprobs, self._offsets.get(index, 0))
        return found

    def closing(self, progress: RequestProgress) -> bytes:
        """The event with the usage."""
        return sse({**self._envelope("chat.completion.chunk"), "choices": [], "usage": usage(progress)})

    def _event(
        self, index: int, body: dict[str, Any], finish_reason: str | None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": index, "finish_reason": finish_reason, "logprobs": logprobs, **body}
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
            tools = await off_loop(len(data), tool_use, body, self._template)
            prompts = [await attended(request.receive, self._chat_tokens(data, body))]
        del data  # the answer may take long
        body.messages = []
        body.tools = body.documents = body.chat_template_kwargs = ABSENT
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return await self._answer(request, body, prompts, asked, chat=True, tools=tools)

    def _template(self) -> ChatTemplate | None:
        return None if self._gateway.codec is None else self._gateway.codec.chat_template

    async def _chat_tokens(self, data: bytes, body: ChatRequest) -> TokenIds:
        template = None if is_plain(body) else self._template()
        if template is None:
            messages = await off_loop(len(data), plain_messages, body.messages)
            return await self._gateway.tokens_of_chat(messages)
        check_messages(body.messages)
        return await self._gateway.tokens_of_made(len(data), prompt_maker(data, template, self._gateway.engine))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        async with body_of(request, self._gateway) as data:
            body = await off_loop(len(data), decode, data, CompletionRequest)
            found = await off_loop(len(data), prompts_of, body.prompt, "prompt", self._gateway.max_model_tokens)
            self._gateway.check_choices(len(found.given) * (body.n or 1))
            prompts = await token_ids_of(request, self._gateway, found.given, "prompt")
            echoes = await self._echoes_of(body, found.given) if body.echo else []
        del data, found  # the answer may take long
        body.prompt = ABSENT
        return await self._answer(request, body, prompts, body.max_tokens, chat=False, echoes=echoes)

    async def _echoes_of(self, body: CompletionRequest, prompts: Sequence[str | TokenIds]) -> list[str]:
        """The prompts as text, one for each choice. Raises `ApiError`."""
        if body.logprobs is not None:
            message = "echo: log probabilities of prompts are not computed by this gateway"
            raise wrong(message, "echo", "unsupported_parameter")
        texts: list[str] = []
        for prompt in prompts:
            if not isinstance(prompt, str):
                codec = self._gateway.text_codec("echo")
                prompt = await off_loop(prompt.nbytes, codec.decode, prompt.tolist())
            texts += [prompt] * (body.n or 1)
        return texts

    async def models(self, request: Request) -> Response:
        """GET /v1/models: those that the key may use."""
        may_use = context_of(request).may_use
        cards = [card for card in self._gateway.models.cards(self._started) if may_use(card["id"])]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        card = self._gateway.models.card(request.path_params["name"], self._started)
        context_of(request).use_model(card["id"])
        return json_response(card)

    async def _answer(
        self,
        request: Request,
        body: Common,
        prompts: list[TokenIds],
        asked: int | None,
        *,
        chat: bool,
        tools: ToolUse | None = None,
        echoes: Sequence[str] = (),
    ) -> Response:
        gateway, context = self._gateway, context_of(request)
        context.use_model(gateway.check_model(body.model))
        context.stream = bool(body.stream)
        context.session = with_body(context.session, prompt_cache_key=body.prompt_cache_key, user=body.user)
        default = None if chat else COMPLETION_MAX_TOKENS
        limit = min(gateway.output_limit(len(prompt), asked, "max_tokens", default) for prompt in prompts)
        options = body.stream_options
        if options is not None and options.continuous_usage_stats:
            place = "stream_options.continuous_usage_stats"
            raise wrong(f"{place} is not supported by this gateway", place, "unsupported_parameter")
        sampling = sampling_of_openai(body, limit)
        if tools is not None:
            sampling = with_tools(gateway, sampling, tools)
        check_fields(gateway, sampling, body)
        jobs = gateway.plan(
            context,
            prompts,
            sampling,
            choices=body.n or 1,
            stops=stop_strings(body.stop),
            salt=salt_of(body),
            skip_special_tokens=body.skip_special_tokens is not False and not (tools and tools.shows_special_tokens),
            keep_stop=bool(body.include_stop_str_in_output or body.no_stop_trim),
        )
        usage_wanted = bool(options is not None and options.include_usage)
        shape = Shape(chat, context, usage_wanted, gateway.codec, tools, echoes)
        if context.stream:
            return await self._stream(request, shape, jobs)
        return await attended(request.receive, self._whole(shape, jobs))

    async def _whole(self, shape: Shape, jobs: list[ChoiceJob]) -> Response:
        context = shape.context
        collected = [_Collected() for _ in jobs]
        async with aclosing(self._gateway.run(jobs, context)) as stream:
            async for piece in stream:
                collected[piece.choice.job.index].add(piece)
        return json_response(shape.whole(collected, context.progress), headers=decision_headers(context.progress))

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
        event = shape.piece(piece) if piece.text or piece.last or piece.logprobs else None
        if event is not None:
            yield event
        piece = await anext(stream, None)
    if shape.include_usage:
        yield shape.closing(shape.context.progress)
    yield DONE
