"""Request bodies: what is in them, and the prompts taken out of them. Owns decoding; runs nothing.

Bodies are decoded by msgspec, which names the place of what is wrong and quotes no value. A field that is in no list is
refused with its name. Fields of engines that this gateway does not do are `fields`'; what becomes of those that it does
is `sampling`'s.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from ..core.http_errors import ApiError, wrong
from . import fields
from .fields import (
    ABSENT,
    IGNORED,
    INT31,
    NOTHING,
    AllowedIds,
    Alternatives,
    BadWords,
    Choices,
    Count,
    GrammarChoice,
    GrammarText,
    LogitBias,
    MinP,
    Others,
    Penalty,
    RepetitionPenalty,
    Salt,
    Seed,
    Stop,
    StopIds,
    Stops,
    Temperature,
    TokenId,
    TopK,
    TopP,
    Whole,
    is_given,
    is_one_of,
)

T = TypeVar("T")
TokenIds = npt.NDArray[np.int32]

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
PROMPTS_MAX = 1024  # in one body
MESSAGES_MAX = 16_384  # of one chat
TEXT_CHARS_MAX = 500  # of an error, which may name a field of the body


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding; no answer changes
    continuous_usage_stats: bool | None = None


class Part(msgspec.Struct):
    """One part of a message's content; other types than text have other fields."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a chat; what answers have and clients send back is there, too."""

    role: Annotated[str, Meta(max_length=64)]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: msgspec.Raw = NOTHING
    tool_call_id: msgspec.Raw = NOTHING
    annotations: msgspec.Raw = NOTHING
    audio: msgspec.Raw = NOTHING
    function_call: msgspec.Raw = NOTHING
    reasoning: msgspec.Raw = NOTHING
    reasoning_content: msgspec.Raw = NOTHING
    refusal: msgspec.Raw = NOTHING


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)]


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to choose output tokens: what OpenAI's bodies and SGLang's `sampling_params` share."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    n: Choices | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: StopIds | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
    json_schema: GrammarText | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: one of its fields."""

    json: msgspec.Raw = NOTHING
    regex: GrammarText | None = None
    choice: GrammarChoice | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    structural_tag: GrammarText | None = None
    disable_additional_properties: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class Common(Sampling, kw_only=True):
    """What completions and chat completions share."""

    model: str | None = None
    max_tokens: Count | None = None
    min_tokens: Whole | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    allowed_token_ids: AllowedIds | None = None
    bad_words: BadWords | None = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None
    include_stop_str_in_output: bool | None = None
    response_format: msgspec.Raw = NOTHING
    structured_outputs: StructuredOutputs | None = None
    prompt_cache_key: Any = None
    user: Any = None


class CompletionRequest(Common):
    """The body of /v1/completions. `prompt`: text, token ids, or a list of either."""

    prompt: RawPrompts
    logprobs: Alternatives | None = None
    echo: bool | None = None


class ChatRequest(Common):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: msgspec.Raw = NOTHING
    tool_choice: msgspec.Raw = NOTHING
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: msgspec.Raw = NOTHING
    reasoning_effort: msgspec.Raw = NOTHING
    documents: msgspec.Raw = NOTHING
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class SglangSampling(Sampling, kw_only=True):
    """`sampling_params` of SGLang's /generate."""

    max_new_tokens: Count | None = None
    min_new_tokens: Whole | None = None
    sampling_seed: Seed | None = None
    structural_tag: GrammarText | None = None


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of SGLang's /generate: one prompt, as text or as token ids, or a list of them."""

    text: RawTexts = NOTHING
    input_ids: RawPrompts = NOTHING
    sampling_params: SglangSampling | None = None
    stream: bool | None = None
    rid: str | None = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Alternatives | None = None
    return_text_in_logprobs: bool | None = None


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


_UNKNOWN = re.compile(r"Object contains unknown field `(.{1,64})`")
_TEXT = msgspec.json.Decoder(str)
_IDS = msgspec.json.Decoder(list[TokenId])
_FIRST = re.compile(rb"\[\s*(.)", re.DOTALL)
_ELEMENT = re.compile(rb'\s*("[^"\\]*(?:\\.[^"\\]*)*"|\[[^\["]*\])\s*([,\]])', re.DOTALL)


def _with_others(kind: type, others: Others, **inner: Any) -> type:
    """A body with the fields that are not done as well; `inner`: fields of another type."""
    more = [(name, typed | None, None) for name, typed in inner.items()]
    return msgspec.defstruct(kind.__name__, [*more, *((name, msgspec.Raw, NOTHING) for name in others)], bases=(kind,))


_SglangSampling = _with_others(SglangSampling, fields.SAMPLING)
# What bodies are decoded to, and documented as.
BODIES: Mapping[type, type] = {
    ChatRequest: _with_others(ChatRequest, fields.CHAT),
    CompletionRequest: _with_others(CompletionRequest, fields.COMPLETIONS),
    GenerateRequest: _with_others(GenerateRequest, fields.GENERATE, sampling_params=_SglangSampling),
    ExplainRequest: ExplainRequest,
    WorkerRequest: WorkerRequest,
}
OTHERS: Mapping[type, Others] = {
    BODIES[ChatRequest]: fields.CHAT,
    BODIES[CompletionRequest]: fields.COMPLETIONS,
    BODIES[GenerateRequest]: fields.GENERATE,
    _SglangSampling: fields.SAMPLING,
}
_DECODERS: Mapping[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(body) for kind, body in BODIES.items()
}


def decode(body: bytes, kind: type[T]) -> T:
    """The request in a body. Raises `ApiError` 400 saying what is wrong and where."""
    try:
        request: T = _DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        raise wrong(str(error)[:TEXT_CHARS_MAX], _place(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise wrong(f"the body is not JSON: {error}") from error
    except RecursionError:
        raise wrong("the body is nested too deep") from None
    _refuse_others(request)
    _refuse_others(getattr(request, "sampling_params", None), "sampling_params.")
    return request


def _place(message: str) -> str | None:
    """The field that msgspec's message names: "... - at `$.messages[0].role`", or an unknown one there."""
    said, _, place = message.partition(" - at `$")
    place = place.rstrip("`").removeprefix(".")
    unknown = _UNKNOWN.match(said)
    if unknown is not None:
        return f"{place}.{unknown[1]}" if place else unknown[1]
    return place or None


def _refuse_others(request: object, before: str = "") -> None:
    """Raise `ApiError` for what is not done; what is not used is dropped, for it would keep the whole body."""
    for name, values in OTHERS.get(type(request), {}).items():
        raw = getattr(request, name)
        if raw is ABSENT:
            continue
        if values is not IGNORED and is_given(raw) and not is_one_of(raw, values):
            message = f"{before}{name} is not supported by this gateway"
            raise ApiError(400, message, param=before + name, code="unsupported_parameter")
        setattr(request, name, ABSENT)


# --- parts of requests ------------------------------------------------------------------------------------------------


def salt_of(request: Common | GenerateRequest) -> str | None:
    """What sets a request's cache apart: its salt and SGLang's `extra_key`, each if given."""
    if request.extra_key is None:
        return request.cache_salt
    if request.cache_salt is None:
        return request.extra_key
    return f"{len(request.extra_key)}:{request.extra_key}{request.cache_salt}"


# What a template is not given, and so must say nothing; of what answers hold beside their content.
NEVER_SHOWN = ("annotations", "audio", "function_call", "refusal")
_NOT_SHOWN = (*NEVER_SHOWN, "tool_calls", "tool_call_id", "reasoning", "reasoning_content")


def check_messages(messages: Sequence[Message], silent: Sequence[str] = NEVER_SHOWN) -> None:
    """Raise `ApiError` for what no template is given here: fields, some of these, that say something."""
    for i, message in enumerate(messages):
        for name in silent:
            raw = getattr(message, name)
            if raw is not ABSENT and is_given(raw) and not is_one_of(raw, ([], {}, "", 0)):
                place = f"messages[{i}].{name}"
                raise ApiError(400, f"{place}: not supported by this gateway", param=place, code="unsupported_content")


def plain_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as chat templates expect them: each content one text. Raises `ApiError` for other than text."""
    check_messages(messages, _NOT_SHOWN)
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
