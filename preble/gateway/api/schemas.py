"""Request bodies: their fields, types and ranges, and what of them becomes sampling parameters. Owns validation; runs
nothing.

Bodies are decoded by msgspec, which names the place of what is wrong and quotes no value. Fields that cannot change an
answer (`user`, `metadata`, ...) are ignored. Fields that ask for something this gateway does not do are refused, unless
they ask for nothing (`UNSUPPORTED`): an answer that silently ignores `logit_bias` would be a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

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


class Common(msgspec.Struct, kw_only=True):
    """What completions and chat completions share."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    cache_salt: Salt | None = None
    # Refused unless they ask for nothing, see UNSUPPORTED.
    audio: Any = None
    best_of: Any = None
    echo: Any = None
    frequency_penalty: Any = None
    functions: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    include_stop_str_in_output: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    min_p: Any = None
    min_tokens: Any = None
    modalities: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    suffix: Any = None
    tools: Any = None
    top_k: Any = None
    top_logprobs: Any = None


class CompletionRequest(Common):
    """The body of /v1/completions. `prompt`: text, token ids, or a list of either."""

    prompt: str | list[Any]


class ChatRequest(Common):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None


class SglangSampling(msgspec.Struct):
    """`sampling_params` of SGLang's /generate."""

    max_new_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Choices | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    sampling_seed: Seed | None = None
    skip_special_tokens: bool | None = None
    ebnf: Any = None
    frequency_penalty: Any = None
    json_schema: Any = None
    logit_bias: Any = None
    min_new_tokens: Any = None
    min_p: Any = None
    no_stop_trim: Any = None
    presence_penalty: Any = None
    regex: Any = None
    repetition_penalty: Any = None
    stop_regex: Any = None
    structural_tag: Any = None
    top_k: Any = None


class GenerateRequest(msgspec.Struct):
    """The body of SGLang's /generate: one prompt, as text or as token ids, or a list of them."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: SglangSampling | None = None
    stream: bool | None = None
    rid: str | None = None
    return_logprob: Any = None
    image_data: Any = None
    lora_path: Any = None


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


# Field -> the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "ebnf": (None,),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "functions": (None, []),
    "guided_choice": (None, []),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "image_data": (None, []),
    "include_stop_str_in_output": (None, False),
    "json_schema": (None,),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "lora_path": (None,),
    "min_new_tokens": (None, 0),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "modalities": (None, ["text"]),
    "no_stop_trim": (None, False),
    "presence_penalty": (None, 0),
    "regex": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "return_logprob": (None, False),
    "stop_regex": (None, []),
    "structural_tag": (None,),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tools": (None, []),
    "top_k": (None, -1, 0),
    "top_logprobs": (None, 0),
}

_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {}


def decode(body: bytes, kind: type[T]) -> T:
    """The request in a body. Raises `ApiError` 400 saying what is wrong and where."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.json.Decoder(kind)
    try:
        request: T = decoder.decode(body)
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
    for name, neutral in UNSUPPORTED.items():
        if getattr(request, name, None) not in neutral or getattr(sampling, name, None) not in neutral:
            raise ApiError(400, f"{name} is not supported by this gateway", param=name, code="unsupported_parameter")


# --- parts of requests ------------------------------------------------------------------------------------------------


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """`stop` as a tuple."""
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def sampling_of(request: Common, max_new_tokens: int, seed: int) -> SamplingParams:
    """The sampling parameters of a request. OpenAI's temperature is 1 where none is given."""
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
