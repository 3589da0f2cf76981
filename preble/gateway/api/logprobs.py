"""Log probabilities in answers, in the shapes of OpenAI's chat, of its completions, and of SGLang. Owns the shapes and
what a single token is called; where there is no tokenizer its name is "token_id:N".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...types import TokenLogprob
from ..text.tokenizing import TextCodec

LEAST = -9999.0  # in place of minus infinity, which JSON has not


def _text(codec: TextCodec | None, token: int) -> str:
    return f"token_id:{token}" if codec is None else codec.decode([token], skip_special_tokens=False)


def of_chat(codec: TextCodec | None, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    return {
        "content": [
            {**_entry(codec, token, one.logprob), "top_logprobs": [_entry(codec, *other) for other in one.top]}
            for token, one in zip(tokens, logprobs, strict=True)
        ]
    }


def _entry(codec: TextCodec | None, token: int, logprob: float) -> dict[str, Any]:
    text = _text(codec, token)
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(text.encode("utf-8", "replace"))}


def of_completion(
    codec: TextCodec | None, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], offset: int
) -> tuple[dict[str, Any], int]:
    """`logprobs` of a completion's choice whose text so far has `offset` characters; and how many it has then."""
    texts = [_text(codec, token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    found = {
        "text_offset": offsets,
        "token_logprobs": [max(one.logprob, LEAST) for one in logprobs],
        "tokens": texts,
        "top_logprobs": [
            {text: max(one.logprob, LEAST), **{_text(codec, other): max(value, LEAST) for other, value in one.top}}
            for text, one in zip(texts, logprobs, strict=True)
        ],
    }
    return found, offset


def of_sglang(
    codec: TextCodec | None, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], *, top: bool, texts: bool
) -> dict[str, Any]:
    """The fields of SGLang's `meta_info`, output only: triples of log probability, token id and, if wanted, text."""

    def triple(token: int, logprob: float) -> tuple[float, int, str | None]:
        return max(logprob, LEAST), token, _text(codec, token) if texts else None

    pairs = list(zip(tokens, logprobs, strict=True))
    found: dict[str, Any] = {
        "input_token_logprobs": [],
        "output_token_logprobs": [triple(token, one.logprob) for token, one in pairs],
    }
    if top:
        found |= {"input_top_logprobs": [], "output_top_logprobs": [[triple(*x) for x in one.top] for _, one in pairs]}
    return found
