"""SGLang's native endpoint, /generate. Owns its shape: text and token ids so far in every event, what is known of it in
`meta_info`.

With several prompts or `n` > 1 the answer is a list, and the events of a stream carry an `index`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...types import TokenLogprob
from ..core.gateway import Gateway, decision_headers
from ..core.http_errors import wrong
from ..core.request_context import RequestContext, context_of
from ..text.choices import Choice, ChoiceJob, TextPiece
from ..text.tokenizing import TextCodec
from .fields import is_given
from .http import DONE, EventStream, attended, body_of, json_response, off_loop, sse, token_ids_of
from .logprobs import of_sglang
from .openai import first_of
from .sampling import check_fields, sampling_of_sglang, stop_strings
from .schemas import (
    ABSENT,
    GenerateRequest,
    Prompts,
    SglangSampling,
    decode,
    prompts_of,
    salt_of,
)

SGLANG_MAX_NEW_TOKENS = 128  # where a request names no limit


@dataclass(slots=True)
class _Output:
    """What has come of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Sglang:
    """The handler, for one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def generate(self, request: Request) -> Response:
        """POST /generate."""
        gateway, context = self._gateway, context_of(request)
        async with body_of(request, gateway) as data:
            body = await off_loop(len(data), decode, data, GenerateRequest)
            found = await off_loop(len(data), _prompts, body, gateway.max_model_tokens)
            asked = body.sampling_params or SglangSampling()
            gateway.check_choices(len(found.given) * (asked.n or 1))
            prompts = await token_ids_of(request, gateway, found.given, "text")
        several = found.several
        del data, found  # the answer may take long
        body.text = body.input_ids = ABSENT
        wanted = (asked.max_new_tokens, "max_new_tokens", SGLANG_MAX_NEW_TOKENS)
        limit = min(gateway.output_limit(len(prompt), *wanted) for prompt in prompts)
        sampling = sampling_of_sglang(body, limit)
        check_fields(gateway, sampling, body)
        context.use_model(gateway.check_model(None))
        jobs = gateway.plan(
            context,
            prompts,
            sampling,
            choices=asked.n or 1,
            stops=stop_strings(asked.stop),
            salt=salt_of(body),
            keep_stop=bool(asked.no_stop_trim),
            skip_special_tokens=asked.skip_special_tokens is not False,
        )
        context.stream = bool(body.stream)
        name = body.rid or context.request_id
        answer = _Answer(name, len(jobs), several or len(jobs) > 1, gateway.codec, bool(body.return_text_in_logprobs))
        if not context.stream:
            return await attended(request.receive, self._whole(answer, jobs, context))
        stream = gateway.run(jobs, context)
        first = await attended(request.receive, first_of(stream))
        return EventStream(answer.events(first, stream), stream, decision_headers(context.progress))

    async def _whole(self, answer: _Answer, jobs: list[ChoiceJob], context: RequestContext) -> Response:
        async with aclosing(self._gateway.run(jobs, context)) as stream:
            async for piece in stream:
                answer.take(piece)
        bodies = [answer.body(choice, ended=True) for choice in context.progress.choices]
        return json_response(bodies if answer.several else bodies[0], headers=decision_headers(context.progress))


class _Answer:
    """Outputs of one request as they grow."""

    def __init__(self, name: str, count: int, several: bool, codec: TextCodec | None, texts_of_logprobs: bool) -> None:
        self.several = several
        self._codec = codec
        self._texts_of_logprobs = texts_of_logprobs
        self._name = name
        self._outputs = [_Output() for _ in range(count)]
        self._started = time.monotonic()

    def take(self, piece: TextPiece) -> None:
        """Add a piece."""
        output = self._outputs[piece.choice.job.index]
        output.text += piece.text
        output.token_ids += piece.token_ids
        output.logprobs += piece.logprobs

    def body(self, choice: Choice, *, ended: bool) -> dict[str, Any]:
        """All of a choice that was taken so far; of the choice itself more may be known already."""
        index = choice.job.index
        output = self._outputs[index]
        name = f"{self._name}_{index}" if self.several else self._name
        meta: dict[str, Any] = {
            "id": name,
            "finish_reason": _finish_reason(choice) if ended else None,
            "prompt_tokens": len(choice.job.token_ids),
            "completion_tokens": len(output.token_ids),
            "cached_tokens": choice.cached_tokens or 0,
        }
        wanted = choice.job.sampling.logprobs
        if wanted is not None:
            of = (self._codec, output.token_ids, output.logprobs)
            meta |= of_sglang(*of, top=wanted > 0, texts=self._texts_of_logprobs)
        if ended:
            meta["e2e_latency"] = time.monotonic() - self._started
        return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}

    async def events(self, first: TextPiece, stream: AsyncGenerator[TextPiece, None]) -> AsyncGenerator[bytes, None]:
        """One event for each piece."""
        piece: TextPiece | None = first
        while piece is not None:
            self.take(piece)
            body = self.body(piece.choice, ended=piece.last)
            yield sse({**body, "index": piece.choice.job.index} if self.several else body)
            piece = await anext(stream, None)
        yield DONE


def _prompts(body: GenerateRequest, tokens_max: int) -> Prompts:
    if is_given(body.text) == is_given(body.input_ids):
        raise wrong("exactly one of text and input_ids must be given", "text")
    if is_given(body.input_ids):
        found = prompts_of(body.input_ids, "input_ids", tokens_max)
        if any(isinstance(prompt, str) for prompt in found.given):
            raise wrong("input_ids must hold token ids", "input_ids")
        return found
    found = prompts_of(body.text, "text", tokens_max)
    if not all(isinstance(prompt, str) for prompt in found.given):
        raise wrong("text must be text, or a list of texts", "text")
    return found


def _finish_reason(choice: Choice) -> dict[str, Any] | None:
    if choice.finish_reason is None:
        return None
    if choice.finish_reason == "stop":
        return {"type": "stop", "matched": choice.stopped_by}
    if choice.finish_reason == "length":
        return {"type": "length", "length": choice.output_tokens}
    return {"type": choice.finish_reason, "message": "ended by the engine"}
