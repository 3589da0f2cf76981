"""What a body says of how to choose tokens, as `SamplingParams`. Owns the translation, and that contradictions are
refused: what a body does not say stays unsaid.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from ...errors import InvalidInput
from ...types import Grammar, GrammarKind, SamplingParams
from ..core.gateway import Gateway
from ..core.http_errors import wrong
from .fields import is_given
from .schemas import (
    ChatRequest,
    Common,
    CompletionRequest,
    GenerateRequest,
    Sampling,
    SglangSampling,
    StructuredOutputs,
)

ANY_OBJECT = '{"type": "object"}'  # what `json_object` means, as both engines have it


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """`stop` as a tuple."""
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def sampling_of_openai(request: Common, max_new_tokens: int) -> SamplingParams:
    """What a chat or a completion asks for. Raises `ApiError`."""
    return _sampling(
        request,
        max_new_tokens=max_new_tokens,
        min_new_tokens=_least(request.min_tokens, max_new_tokens, "min_tokens"),
        seed=_seed(request.seed),
        logprobs=_logprobs(request),
        grammar=_only(_grammars(request)),
        allowed_token_ids=tuple(request.allowed_token_ids or ()) or None,
        bad_words=tuple(request.bad_words or ()) or None,
    )


def sampling_of_sglang(request: GenerateRequest, max_new_tokens: int) -> SamplingParams:
    """What SGLang's /generate asks for. Raises `ApiError`."""
    asked = request.sampling_params or SglangSampling()
    tag = [("structural_tag", "structural_tag", asked.structural_tag)]
    return _sampling(
        asked,
        max_new_tokens=max_new_tokens,
        min_new_tokens=_least(asked.min_new_tokens, max_new_tokens, "min_new_tokens"),
        seed=_seed(asked.sampling_seed),
        logprobs=(request.top_logprobs_num or 0) if request.return_logprob else None,
        grammar=_only([*_common_grammars(asked), *tag]),
    )


def check_fields(gateway: Gateway, sampling: SamplingParams, request: Common | GenerateRequest) -> None:
    """Raise `ApiError` naming what a request asks for that no worker's engine has."""
    missing = gateway.missing_field(sampling)
    if missing is not None:
        name = _name_in(request, missing)
        raise wrong(f"{name} is not supported by the engines of this gateway's workers", name, "unsupported_parameter")


def _name_in(request: Common | GenerateRequest, field: str) -> str:
    """What a field of `SamplingParams` is called in a body."""
    if isinstance(request, GenerateRequest):
        return "return_logprob" if field == "logprobs" else f"sampling_params.{field}"
    named = (name for name, kind, text in _grammars(request) if kind == field and text is not None)
    return "min_tokens" if field == "min_new_tokens" else next(named, field)


def _sampling(request: Sampling, **more: Any) -> SamplingParams:
    bias = request.logit_bias
    try:
        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            top_k=request.top_k,
            min_p=request.min_p,
            frequency_penalty=request.frequency_penalty,
            presence_penalty=request.presence_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias={int(token): value for token, value in bias.items()} if bias else None,
            **more,
        )
    except InvalidInput as error:
        message = str(error).removeprefix("SamplingParams.")
        raise wrong(message, message.partition(" ")[0].partition("[")[0].rstrip(":")) from error


def _seed(asked: int | None) -> int | None:
    """The seed of a request, made positive."""
    return None if asked is None else asked % 2**63


def _least(asked: int | None, max_new_tokens: int, param: str) -> int | None:
    if asked is not None and asked > max_new_tokens:
        raise wrong(f"{param}: {asked} are more than the {max_new_tokens} tokens that the answer may have", param)
    return asked


def _logprobs(request: Common) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    assert isinstance(request, ChatRequest)
    if not request.logprobs:
        if request.top_logprobs:
            raise wrong("top_logprobs needs logprobs to be true", "top_logprobs")
        return None
    return request.top_logprobs or 0


# --- structured output ------------------------------------------------------------------------------------------------

_Asked = tuple[str, str, str | None]  # the field, the kind of grammar, its text


def _common_grammars(request: Sampling) -> list[_Asked]:
    return [(kind, kind, getattr(request, kind) or None) for kind in ("json_schema", "regex", "ebnf")]


def _grammars(request: Common) -> list[_Asked]:
    found = [*_common_grammars(request), *_of_structured_outputs(request.structured_outputs)]
    if is_given(request.response_format):
        found.append(("response_format", *_of_response_format(bytes(request.response_format))))
    return found


def _of_structured_outputs(asked: StructuredOutputs | None) -> list[_Asked]:
    if asked is None:
        return []
    for name in ("disable_additional_properties", "disable_any_whitespace", "whitespace_pattern"):
        if getattr(asked, name):
            place = f"structured_outputs.{name}"
            raise wrong(f"{place} is not supported by this gateway", place, "unsupported_parameter")
    schema = _text_of_json(asked.json) if is_given(asked.json) else None
    choice = None if asked.choice is None else msgspec.json.encode(asked.choice).decode()
    parts = (
        *(("json", "json_schema", schema), ("regex", "regex", asked.regex), ("choice", "choice", choice)),
        *(("grammar", "ebnf", asked.grammar), ("structural_tag", "structural_tag", asked.structural_tag)),
        ("json_object", "json_schema", ANY_OBJECT if asked.json_object else None),
    )
    found: list[_Asked] = [(f"structured_outputs.{name}", kind, text) for name, kind, text in parts if text is not None]
    if len(found) != 1:
        raise wrong("structured_outputs must have exactly one of its fields", "structured_outputs")
    return found


def _text_of_json(schema: msgspec.Raw) -> str:
    """A schema is an object, or its text."""
    data = bytes(schema)
    try:
        return msgspec.json.decode(data, type=str) if data.startswith(b'"') else data.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise wrong("structured_outputs.json must be a schema, or its text", "structured_outputs.json") from error


class _Schema(msgspec.Struct):
    schema: msgspec.Raw
    name: str | None = None


class _Format(msgspec.Struct):
    type: str
    json_schema: _Schema | None = None


def _of_response_format(data: bytes) -> tuple[str, str | None]:
    """The kind and the text of the grammar that `response_format` asks for."""
    try:
        asked = msgspec.json.decode(data, type=_Format)
        if asked.type == "text":
            return "json_schema", None
        if asked.type == "json_object":
            return "json_schema", ANY_OBJECT
        if asked.type == "json_schema" and asked.json_schema is not None:
            return "json_schema", bytes(asked.json_schema.schema).decode()
        if asked.type == "structural_tag":
            return "structural_tag", data.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = "response_format must be an object with a type, and a json_schema where it says so"
        raise wrong(message, "response_format") from error
    raise wrong(
        "response_format.type must be text, json_object, json_schema (with json_schema) or structural_tag",
        "response_format",
    )


def _only(asked: list[_Asked]) -> Grammar | None:
    """The one grammar that is asked for. Raises `ApiError` for two, or one that is none."""
    given = [one for one in asked if one[2] is not None]
    if not given:
        return None
    if len(given) > 1:
        raise wrong(f"only one of {', '.join(name for name, _, _ in given)} may be given", given[1][0])
    name, kind, text = given[0]
    try:
        return Grammar(cast(GrammarKind, kind), text or "")
    except InvalidInput as error:
        raise wrong(f"{name}: {str(error).removeprefix('Grammar.text: ')}", name) from error
