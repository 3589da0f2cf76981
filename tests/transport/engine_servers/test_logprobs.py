"""Log probabilities out of SGLang's and vLLM's streams: read as they come, one for each token, refused where not."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from preble.errors import ProtocolError
from preble.transport.engine_servers.http_client import ServerPiece, _SglangStream, _VllmStream
from preble.types import TokenLogprob

SAID = [TokenLogprob(-0.5, ((5, -0.5), (8, -1.0))), TokenLogprob(-2.0, ((9, -0.25), (6, -2.0)))]


def sglang_line(count: int, end: bool, *, first: int = 0) -> bytes:
    """The tokens from `first` on of so many, with two alternatives each."""
    triples = [[[-0.5, 5, None], [-2.0, 6, None]][i] for i in range(first, count)]
    tops = [[[[-0.5, 5, None], [-1.0, 8, None]], [[-0.25, 9, None], [-2.0, 6, None]]][i] for i in range(first, count)]
    meta = {"output_token_logprobs": triples, "output_top_logprobs": tops, "cached_tokens": 1}
    meta["finish_reason"] = {"type": "length"} if end else None
    return json.dumps({"output_ids": [5, 6][first:count], "meta_info": meta}).encode()


def vllm_line(token: int, said: TokenLogprob, reason: str | None) -> bytes:
    """One token; the chosen one stands first, as vLLM has it."""
    top = {f"token_id:{token}": said.logprob, **{f"token_id:{other}": value for other, value in said.top}}
    logprobs = {"tokens": [f"token_id:{token}"], "token_logprobs": [said.logprob], "top_logprobs": [top]}
    return json.dumps({"choices": [{"token_ids": [token], "logprobs": logprobs, "finish_reason": reason}]}).encode()


def all_of(stream: Any, *lines: bytes) -> list[ServerPiece]:
    """The pieces of some lines."""
    return [piece for line in lines if (piece := stream.take(line)) is not None]


@pytest.mark.parametrize("cumulative", [True, False])
def test_sglangs_come_with_their_tokens(cumulative: bool) -> None:
    lines = sglang_line(1, False), sglang_line(2, True, first=0 if cumulative else 1)
    pieces = all_of(_SglangStream(cumulative, 2), *lines)
    assert [piece.token_ids for piece in pieces] == [(5,), (6,)]
    assert [one for piece in pieces for one in piece.logprobs] == SAID
    assert all(not piece.logprobs for piece in all_of(_SglangStream(cumulative, None), *lines))
    (piece,) = all_of(_SglangStream(cumulative, 0), lines[0])
    assert piece.logprobs == (TokenLogprob(-0.5),)


def test_vllms_come_with_their_tokens_the_last_with_the_usage() -> None:
    usage = b'{"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 4}}}'
    lines = vllm_line(5, SAID[0], None), vllm_line(6, SAID[1], "length"), usage
    pieces = all_of(_VllmStream(2), *lines)
    assert [(piece.token_ids, piece.cached_tokens) for piece in pieces] == [((5,), None), ((6,), 4)]
    assert [one for piece in pieces for one in piece.logprobs] == SAID


def test_a_chosen_token_that_is_unlikely_is_no_alternative() -> None:
    (piece,) = all_of(_VllmStream(1), vllm_line(6, SAID[1], None))
    assert piece.logprobs == (TokenLogprob(-2.0, ((9, -0.25),)),)


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"output_token_logprobs": None},
        {"output_token_logprobs": [[]], "output_top_logprobs": [[]]},
        {"output_token_logprobs": [["x", 5, None]], "output_top_logprobs": [[]]},
        {"output_token_logprobs": [[-1, 5, None]], "output_top_logprobs": []},
        {"output_token_logprobs": [[-1, 5, None]], "output_top_logprobs": [[[-1, -5, None]]]},
        {"output_token_logprobs": [[-1, 5, None]], "output_top_logprobs": [[[-1, 2**40, None]]]},
    ],
)
def test_sglangs_that_are_none_are_refused(meta: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="output_token_logprobs"):
        _SglangStream(False, 2).take(json.dumps({"output_ids": [5], "meta_info": meta}).encode())


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        [],
        {},
        {"token_logprobs": [-1], "top_logprobs": [[1]]},
        {"token_logprobs": [-1], "top_logprobs": [{"a": 1}]},
    ],
)
def test_vllms_that_are_none_are_refused(logprobs: Any) -> None:
    line = json.dumps({"choices": [{"token_ids": [5], "logprobs": logprobs, "finish_reason": None}]}).encode()
    with pytest.raises(ProtocolError, match="logprobs"):
        _VllmStream(2).take(line)


def test_what_is_no_number_is_no_probability() -> None:
    line = b'{"output_ids": [5], "meta_info": {"output_token_logprobs": [[NaN, 5, null]]}}'
    piece = _SglangStream(False, 0).take(line)
    assert piece is not None and piece.logprobs == (TokenLogprob(-math.inf),)
