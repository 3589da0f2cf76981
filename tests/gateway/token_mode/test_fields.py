"""Every field of vLLM's and SGLang's request schemas before workers of ours: what reaches an engine is what the client
said and nothing else, or the field is refused by name, or it is one that cannot change an answer.

The schemas are data (tests/data/engine_fields.json). Engines are fakes that keep what they are given.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from preble.engines.async_requests import EngineJob
from preble.engines.base import EngineInfo, check_sampling
from preble.engines.sglang import SglangBackend
from preble.engines.vllm import VllmBackend
from preble.errors import InvalidInput
from preble.gateway.api import schemas
from preble.gateway.api.fields import IGNORED
from preble.gateway.api.sampling import sampling_of_openai, sampling_of_sglang, stop_strings
from preble.gateway.core.http_errors import ApiError
from preble.transport import wire
from preble.transport.engine_servers.request_forms import FIELDS, RESUMABLE_FIELDS, server_request
from preble.transport.engine_servers.server_info import EnginePriorities
from preble.types import GRAMMAR_KINDS, SAMPLING_FIELDS, Grammar, SamplingParams
from tests.support.paths import ROOT

KNOWN = json.loads((ROOT / "tests" / "data" / "engine_fields.json").read_text())
CHAT, COMPLETIONS, GENERATE, SAMPLING = "/v1/chat/completions", "/v1/completions", "/generate", "sampling_params"
BODIES: Mapping[str, type] = {
    CHAT: schemas.ChatRequest,
    COMPLETIONS: schemas.CompletionRequest,
    GENERATE: schemas.GenerateRequest,
}
LEAST: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100},
    COMPLETIONS: {"prompt": [1, 2], "max_tokens": 100},
    GENERATE: {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 100}},
}
EVERY_FIELD = [
    (engine, place, name)
    for engine in ("sglang", "vllm")
    for place, names in [*KNOWN[engine]["fields"].items(), (SAMPLING, KNOWN[engine].get("sampling_params", []))]
    if place in BODIES or place == SAMPLING
    for name in names
]
# What the gateway itself does: prompts, places, text, shapes, names of caches and of sessions.
OURS = {
    *("messages", "prompt", "text", "input_ids", "model", "n", "stream", "stream_options", "sampling_params", "rid"),
    *("stop", "no_stop_trim", "include_stop_str_in_output", "skip_special_tokens", "return_text_in_logprobs"),
    *("cache_salt", "extra_key", "user", "prompt_cache_key", "parallel_tool_calls", "tools", "tool_choice"),
    *(
        "echo",
        "chat_template_kwargs",
        "reasoning_effort",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
    ),
}


def body_of(place: str, **said: Any) -> dict[str, Any]:
    """The smallest body that says this there."""
    if place == SAMPLING:
        return {**LEAST[GENERATE], "sampling_params": {**LEAST[GENERATE]["sampling_params"], **said}}
    return {**LEAST[place], **said}


def decode(place: str, body: dict[str, Any]) -> Any:
    """As the handler of that path does."""
    return schemas.decode(json.dumps(body).encode(), BODIES[GENERATE if place == SAMPLING else place])


def sampling_of(place: str, body: dict[str, Any]) -> SamplingParams:
    """What of a body goes to workers, after its way over the wire."""
    request = decode(place, body)
    of = sampling_of_sglang if place in (GENERATE, SAMPLING) else sampling_of_openai
    if place in (GENERATE, SAMPLING):
        asked = request.sampling_params.max_new_tokens
    else:
        asked = getattr(request, "max_completion_tokens", None) or request.max_tokens
    sent = wire.GenerationRequest("r", np.array([5, 6, 7], np.int32), of(request, asked))
    came = wire.decode(wire.encode(sent), wire.ROUTER_MESSAGES).message
    assert isinstance(came, wire.GenerationRequest)
    return came.sampling


# --- engines that keep what they are given ----------------------------------------------------------------------------


def job_of(sampling: SamplingParams, offset: int = 0) -> EngineJob:
    """A request in an engine."""
    tokens = np.array([5, 6, 7], np.int32)
    request = wire.GenerationRequest("r", tokens, sampling, None, offset)
    return EngineJob("job", request, sampling.max_new_tokens - offset, 0)


def flat(**given: Any) -> dict[str, Any]:
    """Sampling parameters beside what else is given, by dotted names; no objects, nothing that is None."""
    inner = given.pop("sampling_params", {})
    found = {**given, **{f"sampling_params.{name}": value for name, value in inner.items()}}
    return {name: value for name, value in found.items() if value is not None}


async def drained(stream: AsyncIterator[Any]) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        pass


class FakeSglang:
    """`sglang.Engine`, as far as a request goes."""

    async def async_generate(self, **given: Any) -> Any:
        """Keep it, and answer nothing."""
        self.given = flat(**given)

        async def nothing() -> AsyncIterator[Any]:
            for output in ():
                yield output

        return nothing()


def given_to_sglang(sampling: SamplingParams, offset: int = 0, **defaults: Any) -> dict[str, Any]:
    """What the embedded SGLang is asked."""
    backend: Any = object.__new__(SglangBackend)
    backend._engine, backend._eos, backend._sources, backend._defaults = FakeSglang(), (9,), [None], defaults
    asyncio.run(drained(backend.stream(job_of(sampling, offset))))
    given: dict[str, Any] = backend._engine.given
    return given


class FakeVllm:
    """`AsyncLLM`, as far as a request goes."""

    async def generate(self, prompt: Any, sampling: Any, _: str, **more: Any) -> AsyncIterator[Any]:
        """Keep it, and answer nothing."""
        self.given = {**prompt, **sampling.given, **{k: v for k, v in more.items() if v is not None}}
        for output in ():
            yield output


class Keeps:
    """A class of vLLM's that keeps what it is made with."""

    def __init__(self, **given: Any) -> None:
        self.given = {k: v.given if isinstance(v, Keeps) else v for k, v in given.items()}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `vllm` of which only the names are real."""
    module, inner = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    module.SamplingParams = Keeps  # type: ignore[attr-defined]
    inner.StructuredOutputsParams = Keeps  # type: ignore[attr-defined]
    inner.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", inner)


def given_to_vllm(sampling: SamplingParams, offset: int = 0, **defaults: Any) -> dict[str, Any]:
    """What the embedded vLLM is asked."""
    backend: Any = object.__new__(VllmBackend)
    backend._engine, backend._eos, backend._defaults = FakeVllm(), (9,), defaults
    backend._arguments = SimpleNamespace(data_parallel_size=1)
    asyncio.run(drained(backend.stream(job_of(sampling, offset))))
    given: dict[str, Any] = backend._engine.given
    return given


def given_to_server(engine: str, sampling: SamplingParams) -> dict[str, Any]:
    """What a server is asked by a worker before it."""
    info: Any = SimpleNamespace(engine=engine, model="m", priorities=EnginePriorities())
    path, _, body = server_request(info, [5, 6, 7], sampling, "r", None, "", "")
    assert path == (GENERATE if engine == "sglang" else COMPLETIONS)
    return flat(**json.loads(json.dumps(body)))


# --- the table --------------------------------------------------------------------------------------------------------

TEXT = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": json.loads(TEXT)}}
COMPACT = json.dumps(json.loads(TEXT))
ANY = '{"type": "object"}'
TAG = {"type": "structural_tag", "structures": [], "triggers": ["<f"]}
Case = tuple[str, str, Any, dict[str, Any], dict[str, Any], dict[str, Any]]


def number(name: str, value: Any, *, ours: str = "", vllm: str = "", places: tuple[str, ...] = ()) -> list[Case]:
    """A field that is the same everywhere but for its name."""
    ours = ours or name
    said = (value, {ours: value}, {f"sampling_params.{'sampling_seed' if ours == 'seed' else ours}": value})
    return [(place, name, *said, {vllm or ours: value}) for place in places or (CHAT, COMPLETIONS, SAMPLING)]


def grammar(place: str, name: str, value: Any, kind: str, text: str, vllm: Any = None) -> Case:
    """A field that asks for structured output."""
    named = {"json_schema": "json", "ebnf": "grammar"}.get(kind, kind)
    sglang = (kind, text) if kind != "choice" else ("ebnf", 'root ::= "a" | "b"')
    asked = {"structured_outputs": {named: text if vllm is None else vllm}}
    return place, name, value, {"grammar": Grammar(kind, text)}, {f"sampling_params.{sglang[0]}": sglang[1]}, asked


NOT_THERE: dict[str, Any] = {}  # an engine that does not have it, so that no request with it comes there
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
RETURN = {"return_logprob": True, "logprob_start_len": -1}
# Where, which field, what is said; how `SamplingParams`, SGLang and vLLM differ from a request that says nothing.
CASES: list[Case] = [
    *(case for name in ("temperature", "top_p", "min_p", *PENALTIES) for case in number(name, 0.5)),
    *number("temperature", 0.0),
    *number("top_k", 7),
    *number("ignore_eos", True),
    *number("seed", 12345, places=(CHAT, COMPLETIONS)),
    *number("sampling_seed", 12345, ours="seed", places=(SAMPLING,)),
    *number("min_tokens", 3, ours="min_new_tokens", vllm="min_tokens", places=(CHAT, COMPLETIONS)),
    *number("min_new_tokens", 3, vllm="min_tokens", places=(SAMPLING,)),
    *number("max_tokens", 50, ours="max_new_tokens", vllm="max_tokens", places=(CHAT, COMPLETIONS)),
    *number("max_completion_tokens", 50, ours="max_new_tokens", vllm="max_tokens", places=(CHAT,)),
    *number("max_new_tokens", 50, vllm="max_tokens", places=(SAMPLING,)),
    *(
        (place, "logit_bias", {"7": -1.5}, {"logit_bias": {7: -1.5}}, sglang, {"logit_bias": {7: -1.5}})
        for place in (CHAT, COMPLETIONS, SAMPLING)
        for sglang in ({"sampling_params.logit_bias": {"7": -1.5}},)
    ),
    *(
        (place, "allowed_token_ids", [3, 4], {"allowed_token_ids": (3, 4)}, NOT_THERE, {"allowed_token_ids": [3, 4]})
        for place in (CHAT, COMPLETIONS)
    ),
    *(
        (place, "bad_words", ["a", "b c"], {"bad_words": ("a", "b c")}, NOT_THERE, {"bad_words": ["a", "b c"]})
        for place in (CHAT, COMPLETIONS)
    ),
    *(
        (place, "stop_token_ids", [3, 4], {"stop_token_ids": (3, 4)}, sglang, {"stop_token_ids": [3, 4, 9]})
        for place in (CHAT, COMPLETIONS, SAMPLING)
        for sglang in ({"sampling_params.stop_token_ids": [3, 4, 9]},)
    ),
    (CHAT, "logprobs", True, {"logprobs": 0}, {**RETURN, "top_logprobs_num": 0}, {"logprobs": 0}),
    (COMPLETIONS, "logprobs", 3, {"logprobs": 3}, {**RETURN, "top_logprobs_num": 3}, {"logprobs": 3}),
    (GENERATE, "return_logprob", True, {"logprobs": 0}, {**RETURN, "top_logprobs_num": 0}, {"logprobs": 0}),
    *(
        grammar(place, name, value, kind, text, vllm)
        for place in (CHAT, COMPLETIONS)
        for name, value, kind, text, vllm in (
            ("response_format", SCHEMA, "json_schema", COMPACT, None),
            ("response_format", {"type": "json_object"}, "json_schema", ANY, None),
            ("response_format", TAG, "structural_tag", json.dumps(TAG), None),
            ("structured_outputs", {"json": json.loads(TEXT)}, "json_schema", COMPACT, None),
            ("structured_outputs", {"json": TEXT}, "json_schema", TEXT, None),
            ("structured_outputs", {"json_object": True}, "json_schema", ANY, None),
            ("structured_outputs", {"regex": "a+"}, "regex", "a+", None),
            ("structured_outputs", {"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"', None),
            ("structured_outputs", {"choice": ["a", "b"]}, "choice", '["a","b"]', ["a", "b"]),
            ("structured_outputs", {"structural_tag": ANY}, "structural_tag", ANY, None),
        )
    ),
    *(grammar(place, "regex", "a+", "regex", "a+") for place in (CHAT, COMPLETIONS, SAMPLING)),
    *(grammar(place, "ebnf", "x", "ebnf", "x") for place in (CHAT, COMPLETIONS, SAMPLING)),
    *(grammar(place, "json_schema", TEXT, "json_schema", TEXT) for place in (COMPLETIONS, SAMPLING)),
    grammar(SAMPLING, "structural_tag", ANY, "structural_tag", ANY),
]
NAMES = [f"{place}.{name}={json.dumps(value)[:40]}" for place, name, value, *_ in CASES]
# Said together with another field, or tried by itself below.
BESIDE = {(CHAT, "top_logprobs"), (GENERATE, "top_logprobs_num")}
FORWARDED = {(place, name) for place, name, *_ in CASES} | BESIDE


def difference(given: dict[str, Any], nothing_said: dict[str, Any]) -> dict[str, Any]:
    """What is there because of a field."""
    assert set(nothing_said) <= set(given), "a field takes none away"
    return {name: value for name, value in given.items() if name not in nothing_said or nothing_said[name] != value}


def said_of(sampling: SamplingParams) -> dict[str, Any]:
    """All fields."""
    return {one.name: getattr(sampling, one.name) for one in fields(sampling)}


@pytest.mark.parametrize(("place", "name", "value", "ours", "sglang", "vllm_fields"), CASES, ids=NAMES)
def test_what_reaches_an_engine_is_what_the_client_said(
    vllm: None,
    place: str,
    name: str,
    value: Any,
    ours: dict[str, Any],
    sglang: dict[str, Any],
    vllm_fields: dict[str, Any],
) -> None:
    plain = sampling_of(place, body_of(place))
    asked = sampling_of(place, body_of(place, **{name: value}))
    assert difference(said_of(asked), said_of(plain)) == ours
    attached = {k: [3, 4] if k.endswith("stop_token_ids") else v for k, v in sglang.items()}
    if name == "ignore_eos":  # then the model's own ends are not among the stops
        sglang, vllm_fields = {**sglang, "sampling_params.stop_token_ids": []}, {**vllm_fields, "stop_token_ids": []}
    assert difference(given_to_sglang(asked), given_to_sglang(plain)) == sglang
    assert difference(given_to_server("sglang", asked), given_to_server("sglang", plain)) == attached
    assert difference(given_to_vllm(asked), given_to_vllm(plain)) == vllm_fields
    at_server = {k: v for k, v in vllm_fields.items() if k not in ("stop_token_ids", "logit_bias")}
    at_server |= {"stop_token_ids": [3, 4]} if name == "stop_token_ids" else {}
    at_server |= {"logit_bias": {"7": -1.5}} if name == "logit_bias" else {}
    at_server |= {"return_tokens_as_token_ids": True} if "logprobs" in vllm_fields else {}
    assert difference(given_to_server("vllm", asked), given_to_server("vllm", plain)) == at_server


def test_where_nothing_is_said_nothing_is_sent(vllm: None) -> None:
    for place in (CHAT, COMPLETIONS, SAMPLING):
        plain = sampling_of(place, body_of(place))
        assert plain == SamplingParams(max_new_tokens=100, temperature=None)
        own = {"max_new_tokens": 100, "ignore_eos": False}
        assert given_to_sglang(plain) == flat(
            sampling_params={**own, "stop_token_ids": [9]}, input_ids=[5, 6, 7], stream=True, rid="job"
        )
        assert given_to_server("sglang", plain) == flat(
            sampling_params={**own, "stop_token_ids": [], "skip_special_tokens": False},
            **{"input_ids": [5, 6, 7], "stream": True, "rid": "r"},
        )
        own = {"max_tokens": 100, "ignore_eos": False}
        shape = {"detokenize": False, "output_kind": "delta"}
        assert given_to_vllm(plain) == {"prompt_token_ids": [5, 6, 7], **own, **shape, "stop_token_ids": [9]}
        shape = {"return_token_ids": True, "stream": True, "skip_special_tokens": False, "request_id": "r"}
        assert given_to_server("vllm", plain) == {
            **{**own, **shape, "stop_token_ids": [], "stream_options": {"include_usage": True}},
            **{"model": "m", "prompt": [5, 6, 7]},
        }


def test_the_models_own_way_fills_in_what_is_not_said(vllm: None) -> None:
    own = {"temperature": 0.6, "top_k": 20}
    said = SamplingParams(5, temperature=0.9, top_p=0.5)
    given = given_to_sglang(said, **own)
    assert [given[f"sampling_params.{name}"] for name in ("temperature", "top_k", "top_p")] == [0.9, 20, 0.5]
    asked = given_to_vllm(said, **own)
    assert [asked[name] for name in ("temperature", "top_k", "top_p")] == [0.9, 20, 0.5]


def test_lengths_are_those_that_are_left(vllm: None) -> None:
    asked = SamplingParams(10, min_new_tokens=5)
    for offset, least in ((0, 5), (2, 3), (7, 0)):
        given = given_to_sglang(asked, offset)
        assert given["sampling_params.max_new_tokens"] == 10 - offset
        assert given["sampling_params.min_new_tokens"] == least
        assert given_to_vllm(asked, offset)["min_tokens"] == least


class VLLMClientError(Exception):
    """Named as vLLM's."""


@pytest.mark.parametrize(("raised", "seen"), [(VLLMClientError("SECRET"), InvalidInput), (KeyError("x"), KeyError)])
def test_what_vllm_refuses_is_told_from_what_fails_it(
    vllm: None, monkeypatch: pytest.MonkeyPatch, raised: Exception, seen: type[Exception]
) -> None:
    async def refuses(*_: Any, **__: Any) -> AsyncIterator[Any]:
        for output in (raised,):
            raise output
        yield

    monkeypatch.setattr(FakeVllm, "generate", refuses)
    with pytest.raises(seen) as error:
        given_to_vllm(SamplingParams(5))
    assert "SECRET" not in str(error.value)


def test_a_greedy_request_needs_no_seed_in_vllm(vllm: None) -> None:
    assert "seed" not in given_to_vllm(SamplingParams(5, seed=3))
    assert given_to_vllm(SamplingParams(5, temperature=None, seed=3))["seed"] == 3


@pytest.mark.parametrize(
    ("place", "on", "name"), [(CHAT, "logprobs", "top_logprobs"), (GENERATE, "return_logprob", "top_logprobs_num")]
)
def test_alternatives_are_asked_for_beside_log_probabilities(place: str, on: str, name: str) -> None:
    assert sampling_of(place, body_of(place, **{on: True, name: 4})).logprobs == 4
    with pytest.raises(ApiError) as refused:
        decode(place, body_of(place, **{on: True, name: 21}))
    assert refused.value.param == name
    if place == CHAT:
        with pytest.raises(ApiError, match="top_logprobs needs logprobs"):
            sampling_of(place, body_of(place, **{name: 4}))


# --- every field ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "place", "name"), EVERY_FIELD)
def test_every_field_of_the_engines_is_forwarded_or_ours_or_refused_or_changes_nothing(
    engine: str, place: str, name: str
) -> None:
    inner = place == SAMPLING
    body = schemas.BODIES[BODIES[GENERATE if inner else place]]
    others = schemas.OTHERS[schemas._SglangSampling if inner else body]
    if name not in others:
        assert (place, name) in FORWARDED or name in OURS, f"{engine}'s {name} is neither"
        return
    values = others[name]
    if values is IGNORED:
        for value in ({"any": 1}, "x", 5, None):
            assert decode(place, body_of(place, **{name: value})) is not None
        return
    with pytest.raises(ApiError) as refused:
        decode(place, body_of(place, **{name: {"any": 1}}))
    assert (refused.value.status, refused.value.code) == (400, "unsupported_parameter")
    assert refused.value.param == (f"sampling_params.{name}" if inner else name)
    for nothing in (None, *values):
        assert decode(place, body_of(place, **{name: nothing})) is not None


@pytest.mark.parametrize("place", [CHAT, COMPLETIONS, GENERATE, SAMPLING])
def test_a_field_that_nobody_knows_is_refused_with_its_name(place: str) -> None:
    with pytest.raises(ApiError) as refused:
        decode(place, body_of(place, topk=None))
    assert refused.value.status == 400
    assert refused.value.param == ("sampling_params.topk" if place == SAMPLING else "topk")


def test_stops_are_the_gateways_own() -> None:
    assert stop_strings(decode(CHAT, body_of(CHAT, stop="a")).stop) == ("a",)
    assert stop_strings(decode(SAMPLING, body_of(SAMPLING, stop=["a", "b"])).sampling_params.stop) == ("a", "b")


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "verse"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"min_tokens": 101}, "min_tokens"),
        ({"logit_bias": {"9999999999": 1}}, "logit_bias"),
    ],
)
def test_contradictions_are_refused_with_the_field(said: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        sampling_of(COMPLETIONS, body_of(COMPLETIONS, **said))
    assert (refused.value.status, refused.value.param) == (400, param)


# --- what engines have ------------------------------------------------------------------------------------------------

LOADED: list[tuple[str, SamplingParams]] = [
    ("top_k", SamplingParams(top_k=5)),
    ("min_p", SamplingParams(min_p=0.1)),
    ("min_new_tokens", SamplingParams(min_new_tokens=1)),
    ("frequency_penalty", SamplingParams(frequency_penalty=0.1)),
    ("presence_penalty", SamplingParams(presence_penalty=-0.1)),
    ("repetition_penalty", SamplingParams(repetition_penalty=1.1)),
    ("logprobs", SamplingParams(logprobs=0)),
    ("logit_bias", SamplingParams(logit_bias={1: 1.0})),
    ("allowed_token_ids", SamplingParams(allowed_token_ids=(1,))),
    ("bad_words", SamplingParams(bad_words=("a",))),
    *((kind, SamplingParams(grammar=Grammar(kind, '["a"]'))) for kind in GRAMMAR_KINDS),
]


def test_every_field_that_an_engine_may_lack_can_be_asked_for() -> None:
    assert [name for name, _ in LOADED] == list(SAMPLING_FIELDS)
    nothing = SamplingParams(
        top_k=-1, min_p=0.0, min_new_tokens=0, frequency_penalty=0, repetition_penalty=1.0, logit_bias={}
    )
    assert nothing.needs() == ()


@pytest.mark.parametrize(("name", "sampling"), LOADED)
def test_what_an_engine_lacks_is_refused_by_name(name: str, sampling: SamplingParams) -> None:
    assert sampling.needs() == (name,)
    fresh = wire.GenerationRequest("r", np.array([1, 2], np.int32), sampling)
    begun = wire.GenerationRequest("r", np.array([1, 2], np.int32), sampling, None, 1)
    bare = EngineInfo("bare", "m", 100)
    for request in (fresh, begun):
        with pytest.raises(InvalidInput, match=f"^{name}: the engine bare"):
            check_sampling(request, bare)
    for engine in ("sglang", "vllm"):
        info = EngineInfo(engine, "m", 100, sampling_fields=FIELDS[engine], resumable_fields=RESUMABLE_FIELDS[engine])
        if engine == "sglang" and name in ("allowed_token_ids", "bad_words"):
            with pytest.raises(InvalidInput, match=f"^{name}: the engine sglang does not have it"):
                check_sampling(fresh, info)
            continue
        check_sampling(fresh, info)
        counts_afresh = name in GRAMMAR_KINDS or name in ("frequency_penalty", "presence_penalty", "bad_words")
        if counts_afresh or (engine, name) == ("sglang", "repetition_penalty"):
            with pytest.raises(InvalidInput, match=f"^{name}: the engine {engine} cannot go on"):
                check_sampling(begun, info)
        else:
            check_sampling(begun, info)
