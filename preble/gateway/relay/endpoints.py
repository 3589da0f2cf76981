"""The endpoints of SGLang and vLLM that are relayed. Owns their table; reads no body.

An endpoint's `kind` says what its bodies and answers look like; several paths may have one kind. Of "other" ones
nothing is known but that their bodies are JSON.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path of an engine's. `generates`: it makes output tokens; `streams`: as events, where the body asks for them.

    `usage_option`: a stream says its usage only where `stream_options.include_usage` asks for it. `engines`: who has
    it; a worker of another engine answers 404 itself. `by_id`: the path ends in the id of an answer that one server
    keeps (`{id}`), and only that server can be asked. `takes_form`: its bodies are uploads, forms with a file.
    """

    path: str
    kind: str
    generates: bool = False
    streams: bool = False
    usage_option: bool = False
    engines: tuple[str, ...] = ("sglang", "vllm")
    method: str = "POST"
    by_id: bool = False
    takes_form: bool = False


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("/v1/chat/completions", "chat", generates=True, streams=True, usage_option=True),
    Endpoint("/v1/completions", "completions", generates=True, streams=True, usage_option=True),
    Endpoint("/v1/responses", "responses", generates=True, streams=True),
    Endpoint("/v1/responses/{id}", "response", method="GET", by_id=True),
    Endpoint("/v1/responses/{id}/cancel", "response", by_id=True),
    Endpoint("/v1/messages", "messages", generates=True, streams=True),
    Endpoint("/v1/messages/count_tokens", "count_tokens"),
    Endpoint("/generate", "generate", generates=True, streams=True, engines=("sglang",)),
    Endpoint("/v1/embeddings", "embeddings"),
    Endpoint("/v1/rerank", "rerank"),
    Endpoint("/rerank", "rerank", engines=("vllm",)),
    Endpoint("/v2/rerank", "rerank", engines=("vllm",)),
    Endpoint("/v1/score", "score"),
    Endpoint("/score", "score", engines=("vllm",)),
    Endpoint("/v1/classify", "classify", engines=("sglang",)),
    Endpoint("/classify", "classify"),
    Endpoint("/pooling", "pooling", engines=("vllm",)),
    Endpoint("/encode", "generate", engines=("sglang",)),
    Endpoint("/v1/tokenize", "tokenize", engines=("sglang",)),
    Endpoint("/tokenize", "tokenize"),
    Endpoint("/v1/detokenize", "detokenize", engines=("sglang",)),
    Endpoint("/detokenize", "detokenize"),
    Endpoint("/v1/decisions", "other", engines=("sglang",)),
    Endpoint("/v1/systemone", "other"),
    Endpoint("/v1/chat/completions/batch", "other", generates=True, engines=("vllm",)),
    Endpoint("/inference/v1/generate", "other", generates=True, streams=True, engines=("vllm",)),
    Endpoint("/generative_scoring", "other", engines=("vllm",)),
    Endpoint("/v2/embed", "other", engines=("vllm",)),
    Endpoint("/v1/audio/transcriptions", "audio", streams=True, takes_form=True),
    Endpoint("/v1/audio/translations", "audio", streams=True, engines=("vllm",), takes_form=True),
    Endpoint("/v1/chat/completions/render", "other", engines=("vllm",)),
    Endpoint("/v1/completions/render", "other", engines=("vllm",)),
    Endpoint("/v1/messages/render", "other", engines=("vllm",)),
    Endpoint("/v1/responses/render", "other", engines=("vllm",)),
)
# Those that are called by a body: by their whole path.
POSTS: dict[str, Endpoint] = {one.path: one for one in ENDPOINTS if one.method == "POST" and not one.by_id}
