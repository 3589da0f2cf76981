"""Requests for output in the words of SGLang and vLLM, and log probabilities out of theirs. Owns how each field of
`SamplingParams` is called there, which of them each engine has, and which it gets right in a request that has begun
elsewhere; the engines inside a worker and the servers over HTTP share it.

What a request does not say is not sent: then the engine's own default counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ProtocolError
from ...types import LOGPROBS_MAX, SAMPLING_FIELDS, Claim, Grammar, SamplingParams, TokenLogprob
from .server_info import ServerInfo

TokenIds = Sequence[int] | npt.NDArray[np.int32]

_GRAMMARS = ("json_schema", "regex", "ebnf", "choice", "structural_tag")
# Both count the output's tokens, of which a request that goes on brings none along: its output so far is prompt there.
_COUNTED = ("frequency_penalty", "presence_penalty")
_VLLMS = ("allowed_token_ids", "bad_words")  # SGLang has none of these
FIELDS: Mapping[str, tuple[str, ...]] = {
    "sglang": tuple(name for name in SAMPLING_FIELDS if name not in _VLLMS),
    "vllm": SAMPLING_FIELDS,
}
RESUMABLE_FIELDS: Mapping[str, tuple[str, ...]] = {
    # SGLang's repetition penalty counts the output's tokens, vLLM's those of the prompt as well.
    "sglang": tuple(name for name in FIELDS["sglang"] if name not in (*_GRAMMARS, *_COUNTED, "repetition_penalty")),
    # Bad words are looked for in the output; one may begin before a loss and end after it.
    "vllm": tuple(name for name in SAMPLING_FIELDS if name not in (*_GRAMMARS, *_COUNTED, "bad_words")),
}
_SHARED = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
_INT31 = 2**31 - 1
_TOKEN_PREFIX = "token_id:"  # how vLLM names a token by its id


def shared_fields(sampling: SamplingParams) -> dict[str, Any]:
    """What both engines call as we do, where it is said."""
    return {name: value for name in _SHARED if (value := getattr(sampling, name)) is not None}


def sglang_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """SGLang's `sampling_params`. The lengths, `ignore_eos` and stop tokens are said in any case."""
    found = {
        "max_new_tokens": sampling.max_new_tokens,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
        **shared_fields(sampling),
    }
    if sampling.seed is not None:
        found["sampling_seed"] = sampling.seed
    if sampling.min_new_tokens is not None:
        found["min_new_tokens"] = sampling.min_new_tokens
    if sampling.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.grammar is not None:
        found |= _sglang_grammar(sampling.grammar)
    return found


def _sglang_grammar(grammar: Grammar) -> dict[str, str]:
    if grammar.kind != "choice":
        return {grammar.kind: grammar.text}
    texts = json.loads(grammar.text)
    return {"ebnf": "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)}


def sglang_logprobs(sampling: SamplingParams) -> dict[str, Any]:
    """The fields beside `sampling_params` that ask for log probabilities; {} where none are wanted."""
    if sampling.logprobs is None:
        return {}
    return {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": sampling.logprobs}


def vllm_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """What vLLM's completions and its `SamplingParams` call alike; `structured_outputs` as its fields."""
    found = {
        "max_tokens": sampling.max_new_tokens,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
        **shared_fields(sampling),
    }
    for name, value in (
        ("seed", sampling.seed),
        ("min_tokens", sampling.min_new_tokens),
        ("logprobs", sampling.logprobs),
        ("structured_outputs", None if sampling.grammar is None else _vllm_grammar(sampling.grammar)),
    ):
        if value is not None:
            found[name] = value
    if sampling.logit_bias:
        found["logit_bias"] = dict(sampling.logit_bias)
    for name in _VLLMS:
        if getattr(sampling, name):
            found[name] = list(getattr(sampling, name))
    return found


def _vllm_grammar(grammar: Grammar) -> dict[str, Any]:
    name = {"json_schema": "json", "ebnf": "grammar"}.get(grammar.kind, grammar.kind)
    return {name: json.loads(grammar.text) if grammar.kind == "choice" else grammar.text}


def server_request(
    info: ServerInfo,
    token_ids: TokenIds,
    sampling: SamplingParams,
    request_id: str,
    rank: int | None,
    salt: str,
    lora: str,
    claim: Claim | None = None,
) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Path, headers and body of the request for output to a server."""
    prompt = token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
    extra: dict[str, Any] = {"cache_salt": salt or None, "priority": info.priorities.of(claim)}
    headers: dict[str, str] = {}
    if info.engine == "sglang":
        path = "/generate"
        body: dict[str, Any] = {
            "rid": request_id,
            "input_ids": prompt,
            "sampling_params": {**sglang_sampling(sampling), "skip_special_tokens": False},
            "stream": True,
            **sglang_logprobs(sampling),
        }
        extra |= {"routed_dp_rank": rank, "lora_path": lora or None}
    else:
        path = "/v1/completions"
        body = {
            "request_id": request_id,
            "model": lora or info.model,
            "prompt": prompt,
            **vllm_sampling(sampling),
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if sampling.logprobs is not None:
            body["return_tokens_as_token_ids"] = True
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    body.update({name: value for name, value in extra.items() if value is not None})
    return path, headers, body


# --- log probabilities ------------------------------------------------------------------------------------------------


def number(value: Any) -> float:
    """A log probability; what is no number is none at all."""
    found = float(value)
    return -math.inf if math.isnan(found) else found


def _token(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _INT31:
        raise ValueError("no token id")
    return value


def read_sglang_logprobs(meta: Mapping[str, Any], start: int, wanted: int | None) -> tuple[TokenLogprob, ...]:
    """Those of `meta_info`, from the list's place `start` on, with at most `wanted` alternatives each.

    Raises `ProtocolError` where they are not what was asked for.
    """
    if wanted is None:
        return ()
    try:
        tokens = meta["output_token_logprobs"][start:]
        tops = meta["output_top_logprobs"][start:] if wanted else [()] * len(tokens)
        return tuple(
            TokenLogprob(number(token[0]), tuple((_token(one[1]), number(one[0])) for one in (top or ())[:wanted]))
            for token, top in zip(tokens, tops, strict=True)
        )
    except (KeyError, IndexError, OverflowError, TypeError, ValueError) as error:
        raise ProtocolError("stream: output_token_logprobs are not as they were asked for") from error


def read_vllm_logprobs(answer: Any, wanted: int | None) -> tuple[TokenLogprob, ...]:
    """Those of a completion's `logprobs`, whose tokens are ids. Raises `ProtocolError` where there are none."""
    if wanted is None:
        return ()
    try:
        tops = answer["top_logprobs"] if wanted else [{}] * len(answer["tokens"])
        return tuple(
            TokenLogprob(number(logprob), _likeliest(top or {}, wanted))
            for logprob, top in zip(answer["token_logprobs"], tops, strict=True)
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ProtocolError("stream: logprobs are not as they were asked for") from error


def _likeliest(top: Mapping[str, float], wanted: int) -> tuple[tuple[int, float], ...]:
    """The chosen token comes along, likely or not."""
    found = [(_token(int(name.removeprefix(_TOKEN_PREFIX))), number(value)) for name, value in top.items()]
    return tuple(sorted(found, key=lambda one: -one[1])[: min(wanted, LOGPROBS_MAX)])
