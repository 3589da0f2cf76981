"""Request bodies: their fields, types and ranges, and what of them becomes sampling parameters. Owns validation; runs
nothing.

Bodies are decoded by msgspec, which names the place of what is wrong and quotes no value. Fields that cannot change an
answer (`user`, `metadata`, ...) are ignored. Fields that ask for something this gateway does not do are refused, unless
they ask for nothing (`neutral`): an answer that silently ignores `logit_bias` would be a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from ...transport.messages import STOP_TOKENS_MAX
from ...types import SamplingParams
from ..core.http_errors import ApiError, wrong

T = TypeVar("T")
INT31 = 2**31 - 1

TokenId = Annotated[int, Meta(ge=0, le=INT31)]
Count = Annotated[int, Meta(ge=1, le=INT31)]
Choices = Annotated[int, Meta(ge=1, le=1024)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Meta(max_length=16)]
StopIds = Annotated[list[TokenId], Meta(max_length=STOP_TOKENS_MAX)]
Salt = Annotated[str, Meta(max_length=256)]


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class Part(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One message of a chat."""

    role: Annotated[str, Meta(max_length=64)]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: Any = None


def neutral(*values: Any) -> Meta:
    """Marks a field that is refused unless it has one of these values, or none: they ask for nothing."""
    return Meta(extra={"neutral": (None, *values)})


Unsupported = Annotated[Any, neutral()]


class Sampling(msgspec.Struct, kw_only=True):
    """How to choose output tokens: what OpenAI's bodies and SGLang's `sampling_params` share."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Choices | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    frequency_penalty: Annotated[Any, neutral(0)] = None
    logit_bias: Annotated[Any, neutral({})] = None
    min_p: Annotated[Any, neutral(0)] = None
    presence_penalty: Annotated[Any, neutral(0)] = None
    repetition_penalty: Annotated[Any, neutral(1)] = None
    top_k: Annotated[Any, neutral(-1, 0)] = None


class Common(Sampling, kw_only=True):
    """What completions and chat completions share."""

    model: str | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    cache_salt: Salt | None = None
    audio: Unsupported = None
    best_of: Annotated[Any, neutral(1)] = None
    echo: Annotated[Any, neutral(False)] = None
    functions: Annotated[Any, neutral([])] = None
    guided_choice: Annotated[Any, neutral([])] = None
    guided_grammar: Unsupported = None
    guided_json: Unsupported = None
    guided_regex: Unsupported = None
    include_stop_str_in_output: Annotated[Any, neutral(False)] = None
    logprobs: Annotated[Any, neutral(False)] = None
    min_tokens: Annotated[Any, neutral(0)] = None
    modalities: Annotated[Any, neutral(["text"])] = None
    response_format: Annotated[Any, neutral({"type": "text"})] = None
    structured_outputs: Unsupported = None
    suffix: Annotated[Any, neutral("")] = None
    tools: Annotated[Any, neutral([])] = None
    top_logprobs: Annotated[Any, neutral(0)] = None


class CompletionRequest(Common):
    """The body of /v1/completions. `prompt`: text, token ids, or a list of either."""

    prompt: str | list[Any]


class ChatRequest(Common):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None


class SglangSampling(Sampling, kw_only=True):
    """`sampling_params` of SGLang's /generate."""

    max_new_tokens: Count | None = None
    sampling_seed: Seed | None = None
    skip_special_tokens: bool | None = None
    ebnf: Unsupported = None
    json_schema: Unsupported = None
    min_new_tokens: Annotated[Any, neutral(0)] = None
    no_stop_trim: Annotated[Any, neutral(False)] = None
    regex: Unsupported = None
    stop_regex: Annotated[Any, neutral([])] = None
    structural_tag: Unsupported = None


class GenerateRequest(msgspec.Struct):
    """The body of SGLang's /generate: one prompt, as text or as token ids, or a list of them."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: SglangSampling | None = None
    stream: bool | None = None
    rid: str | None = None
    return_logprob: Annotated[Any, neutral(False)] = None
    image_data: Annotated[Any, neutral([])] = None
    lora_path: Unsupported = None


class ExplainRequest(msgspec.Struct):
    """The body of /v1/preble/explain: a prompt in any of the forms that the other calls take."""

    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    prompt: str | None = None
    token_ids: list[TokenId] | None = None
    max_tokens: Count | None = None
    cache_salt: Salt | None = None


class WorkerRequest(msgspec.Struct):
    """The body of POST /workers."""

    address: Annotated[str, Meta(min_length=1, max_length=1024)]


_NEUTRAL = {
    name: mark.extra["neutral"]
    for kind in (Common, GenerateRequest, SglangSampling)
    for name, hint in get_type_hints(kind, include_extras=True).items()
    for mark in getattr(hint, "__metadata__", ())
    if mark.extra is not None
}
UNSUPPORTED: dict[str, tuple[Any, ...]] = dict(sorted(_NEUTRAL.items()))
_KINDS = (ChatRequest, CompletionRequest, GenerateRequest, ExplainRequest, WorkerRequest)
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {kind: msgspec.json.Decoder(kind) for kind in _KINDS}


def decode(body: bytes, kind: type[T]) -> T:
    """The request in a body. Raises `ApiError` 400 saying what is wrong and where."""
    try:
        request: T = _DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        raise wrong(str(error), _place(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise wrong(f"the body is not JSON: {error}") from error
    except RecursionError:
        raise wrong("the body is nested too deep") from None
    _refuse_unsupported(request)
    return request


def _place(message: str) -> str | None:
    """The field that msgspec's message names: "... - at `$.messages[0].role`"."""
    _, found, place = message.rpartition("`$.")
    return place.rstrip("`") if found else None


def _refuse_unsupported(request: object) -> None:
    sampling = getattr(request, "sampling_params", None)
    for name, values in UNSUPPORTED.items():
        if getattr(request, name, None) not in values or getattr(sampling, name, None) not in values:
            raise ApiError(400, f"{name} is not supported by this gateway", param=name, code="unsupported_parameter")


# --- parts of requests ------------------------------------------------------------------------------------------------


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """`stop` as a tuple."""
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def sampling_of(request: Sampling, max_new_tokens: int, seed: int) -> SamplingParams:
    """The sampling parameters of a request. The temperature is 1 where none is given."""
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        seed=seed,
    )


def plain_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as chat templates expect them: each content one text. Raises `ApiError` for other than text."""
    for i, message in enumerate(messages):
        if message.tool_calls:
            place = f"messages[{i}].tool_calls"
            raise ApiError(400, f"{place}: not supported by this gateway", param=place, code="unsupported_content")
    return [
        {
            "role": message.role,
            "content": _text_of(message.content, f"messages[{i}].content"),
            **({} if message.name is None else {"name": message.name}),
        }
        for i, message in enumerate(messages)
    ]


def _text_of(content: str | list[Part] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise ApiError(
                400, f"{place}[{i}]: only parts of type text are supported", param=place, code="unsupported_content"
            )
    return "\n".join(part.text or "" for part in content)


def prompts_of(prompt: str | list[Any], place: str) -> list[str | list[int]]:
    """One or more prompts, each text or token ids. Raises `ApiError`."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise wrong(f"{place} is empty", place)
    if all(type(item) is int for item in prompt):
        return [_ids(prompt, place)]
    many: list[str | list[int]] = []
    for i, item in enumerate(prompt):
        if isinstance(item, str):
            many.append(item)
        elif isinstance(item, list) and item and all(type(token) is int for token in item):
            many.append(_ids(item, f"{place}[{i}]"))
        else:
            raise wrong(f"{place}[{i}] must be text or a list of token ids", place)
    return many


def _ids(ids: list[int], place: str) -> list[int]:
    if min(ids) < 0 or max(ids) > INT31:
        raise wrong(f"{place}: token ids must be in [0, {INT31}]", place)
    return ids
