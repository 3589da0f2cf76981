"""Request bodies: their fields, types and ranges, and what of them becomes sampling parameters. Owns validation; runs
nothing.

Bodies are decoded by msgspec, which names the place of what is wrong and quotes no value. Fields that cannot change an
answer (`user`, `metadata`, ...) are ignored. Fields that ask for something this gateway does not do are refused, unless
they ask for nothing (`neutral`): an answer that silently ignores `logit_bias` would be a wrong answer.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from ...transport.messages import STOP_TOKENS_MAX
from ...types import SamplingParams
from ..core.http_errors import ApiError, wrong

T = TypeVar("T")
INT31 = 2**31 - 1
TokenIds = npt.NDArray[np.int32]

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
ABSENT = msgspec.Raw()
# Taken apart by `prompts_of` and `ids_of`; what they take, for the document.
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT31}, "minItems": 1}
_PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, _IDS_SCHEMA]}
_PROMPTS_SCHEMA = {
    "anyOf": [{"type": "string"}, _IDS_SCHEMA, {"type": "array", "items": _PROMPT_SCHEMA, "minItems": 1}]
}
_TEXTS_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
RawIds = Annotated[msgspec.Raw, Meta(extra_json_schema=_IDS_SCHEMA)]
RawPrompts = Annotated[msgspec.Raw, Meta(extra_json_schema=_PROMPTS_SCHEMA)]
RawTexts = Annotated[msgspec.Raw, Meta(extra_json_schema=_TEXTS_SCHEMA)]
NOTHING: Any = msgspec.field(default_factory=lambda: ABSENT)
PROMPTS_MAX = 1024  # in one body
MESSAGES_MAX = 16_384  # of one chat
NEUTRAL_BYTES_MAX = 256  # of what asks for nothing


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
    tool_calls: msgspec.Raw = NOTHING


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)]


def neutral(*values: Any) -> Meta:
    """Marks a field that is refused unless it has one of these values, or none: they ask for nothing."""
    return Meta(extra={"neutral": (None, *values)})


Unsupported = Annotated[msgspec.Raw, neutral()]


class Sampling(msgspec.Struct, kw_only=True):
    """How to choose output tokens: what OpenAI's bodies and SGLang's `sampling_params` share."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Choices | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    frequency_penalty: Annotated[msgspec.Raw, neutral(0)] = NOTHING
    logit_bias: Annotated[msgspec.Raw, neutral({})] = NOTHING
    min_p: Annotated[msgspec.Raw, neutral(0)] = NOTHING
    presence_penalty: Annotated[msgspec.Raw, neutral(0)] = NOTHING
    repetition_penalty: Annotated[msgspec.Raw, neutral(1)] = NOTHING
    top_k: Annotated[msgspec.Raw, neutral(-1, 0)] = NOTHING


class Common(Sampling, kw_only=True):
    """What completions and chat completions share."""

    model: str | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    cache_salt: Salt | None = None
    prompt_cache_key: Any = None
    user: Any = None
    audio: Unsupported = NOTHING
    best_of: Annotated[msgspec.Raw, neutral(1)] = NOTHING
    echo: Annotated[msgspec.Raw, neutral(False)] = NOTHING
    functions: Annotated[msgspec.Raw, neutral([])] = NOTHING
    guided_choice: Annotated[msgspec.Raw, neutral([])] = NOTHING
    guided_grammar: Unsupported = NOTHING
    guided_json: Unsupported = NOTHING
    guided_regex: Unsupported = NOTHING
    include_stop_str_in_output: Annotated[msgspec.Raw, neutral(False)] = NOTHING
    logprobs: Annotated[msgspec.Raw, neutral(False)] = NOTHING
    min_tokens: Annotated[msgspec.Raw, neutral(0)] = NOTHING
    modalities: Annotated[msgspec.Raw, neutral(["text"])] = NOTHING
    response_format: Annotated[msgspec.Raw, neutral({"type": "text"})] = NOTHING
    structured_outputs: Unsupported = NOTHING
    suffix: Annotated[msgspec.Raw, neutral("")] = NOTHING
    tools: Annotated[msgspec.Raw, neutral([])] = NOTHING
    top_logprobs: Annotated[msgspec.Raw, neutral(0)] = NOTHING


class CompletionRequest(Common):
    """The body of /v1/completions. `prompt`: text, token ids, or a list of either."""

    prompt: RawPrompts


class ChatRequest(Common):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None


class SglangSampling(Sampling, kw_only=True):
    """`sampling_params` of SGLang's /generate."""

    max_new_tokens: Count | None = None
    sampling_seed: Seed | None = None
    skip_special_tokens: bool | None = None
    ebnf: Unsupported = NOTHING
    json_schema: Unsupported = NOTHING
    min_new_tokens: Annotated[msgspec.Raw, neutral(0)] = NOTHING
    no_stop_trim: Annotated[msgspec.Raw, neutral(False)] = NOTHING
    regex: Unsupported = NOTHING
    stop_regex: Annotated[msgspec.Raw, neutral([])] = NOTHING
    structural_tag: Unsupported = NOTHING


class GenerateRequest(msgspec.Struct):
    """The body of SGLang's /generate: one prompt, as text or as token ids, or a list of them."""

    text: RawTexts = NOTHING
    input_ids: RawPrompts = NOTHING
    sampling_params: SglangSampling | None = None
    stream: bool | None = None
    rid: str | None = None
    return_logprob: Annotated[msgspec.Raw, neutral(False)] = NOTHING
    image_data: Annotated[msgspec.Raw, neutral([])] = NOTHING
    lora_path: Unsupported = NOTHING


class ExplainRequest(msgspec.Struct):
    """The body of /v1/preble/explain: a prompt in any of the forms that the other calls take."""

    messages: Messages | None = None
    prompt: str | None = None
    token_ids: RawIds = NOTHING
    max_tokens: Count | None = None
    cache_salt: Salt | None = None


class WorkerRequest(msgspec.Struct):
    """The body of POST /workers."""

    address: Annotated[str, Meta(min_length=1, max_length=1024)]


_TEXT = msgspec.json.Decoder(str)
_IDS = msgspec.json.Decoder(list[TokenId])
_FIRST = re.compile(rb"\[\s*(.)", re.DOTALL)
_ELEMENT = re.compile(rb'\s*("[^"\\]*(?:\\.[^"\\]*)*"|\[[^\["]*\])\s*([,\]])', re.DOTALL)
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
    for place in (request, sampling):
        for name, values in UNSUPPORTED.items():
            raw = getattr(place, name, ABSENT)
            if is_given(raw) and not _is_one_of(raw, values):
                message = f"{name} is not supported by this gateway"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
            if raw is not ABSENT:
                setattr(place, name, ABSENT)  # it would keep the whole body


def _is_one_of(raw: msgspec.Raw, values: tuple[Any, ...]) -> bool:
    """Whether a small value is one of these; large ones ask for something."""
    try:
        return memoryview(raw).nbytes <= NEUTRAL_BYTES_MAX and msgspec.json.decode(raw) in values
    except msgspec.DecodeError:  # a number out of range: JSON was only looked over so far
        return False


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
        if is_given(message.tool_calls) and not _is_one_of(message.tool_calls, ([], {}, "", 0)):
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


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a body, each text or token ids; `several` if they came as a list of prompts."""

    given: list[str | TokenIds]
    several: bool


def is_given(raw: msgspec.Raw) -> bool:
    """Whether a field is there and is not null."""
    return bytes(memoryview(raw)[:5]) not in (b"", b"null")


def prompts_of(raw: msgspec.Raw, place: str, tokens_max: int) -> Prompts:
    """One or more prompts: text, token ids, or a list of either. Raises `ApiError`.

    Each is decoded by itself, and only when there are not too many, and not too many tokens in it: a body of a few
    bytes for each of a million lists would hold all threads while it is taken apart.
    """
    data = bytes(raw)
    if data.startswith(b'"'):
        return Prompts([_text(data)], several=False)
    first = _FIRST.match(data)
    if first is None:
        raise wrong(f"{place} must be text, token ids, or a list of either", place)
    if first[1] == b"]":
        raise wrong(f"{place} is empty", place)
    if first[1] in b"-0123456789":
        return Prompts([ids_of(data, place, tokens_max)], several=False)
    return Prompts([_prompt(one, f"{place}[{i}]", tokens_max) for i, one in enumerate(_elements(data, place))], True)


def _elements(data: bytes, place: str) -> list[bytes]:
    """The elements of a JSON list of texts and of lists of numbers."""
    found: list[bytes] = []
    end = 1
    while True:
        element = _ELEMENT.match(data, end)
        if element is None:
            raise wrong(f"{place}[{len(found)}] must be text or a list of token ids", place)
        if len(found) == PROMPTS_MAX:
            raise wrong(f"{place} has more than {PROMPTS_MAX} prompts", place)
        found.append(element[1])
        if element[2] == b"]":
            return found
        end = element.end()


def _prompt(data: bytes, place: str, tokens_max: int) -> str | TokenIds:
    return _text(data) if data.startswith(b'"') else ids_of(data, place, tokens_max)


def _text(data: bytes) -> str:
    try:
        return _TEXT.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise wrong(f"the body is not JSON: {error}") from error


def ids_of(data: bytes, place: str, tokens_max: int) -> TokenIds:
    """Token ids out of a JSON list. Raises `ApiError`."""
    name = place.partition("[")[0]
    if data.count(b",") >= tokens_max:
        message = f"{place}: the model takes {tokens_max} tokens, the prompt has more"
        raise wrong(message, name, "context_length_exceeded")
    try:
        ids = array("i", _IDS.decode(data))
    except msgspec.DecodeError as error:
        raise wrong(f"{place}: token ids must be whole numbers in [0, {INT31}]", name) from error
    if not ids:
        raise wrong(f"{place} is empty", name)
    return np.frombuffer(ids, dtype=np.int32)
