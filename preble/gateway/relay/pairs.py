"""A request at two servers, of which one prefills its prompt and the other decodes: what each is sent, by their own
fields. Owns these; where the servers are, and that the request has a place at both, is the router's.

    SGLang  both are sent the request at once, with `bootstrap_host`, `bootstrap_port` and `bootstrap_room`: where the
            prefill server hands out KV, and a number by which both know the request
    vLLM    first the prefill server, for one token, with `kv_transfer_params` that say a remote server decodes; what it
            answers in that field goes with the request to the one that decodes, which pulls the KV

Where a vLLM server answers no such parameters, the other one computes the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ...errors import TransportError
from ...router.placement import PrefillPlace
from .body import RelayedBody
from .endpoints import Endpoint

ROOM_MAX = 2**63 - 1
ANSWER_BYTES_MAX = 16 << 20  # of a prefill
SAID_BYTES_MAX = 300  # of a refusal, in its error
REFUSED = frozenset({400, 413, 415, 422})  # the request is at fault, not the server
SGLANG, VLLM = "sglang", "vllm"
_KINDS = {SGLANG: frozenset({"chat", "completions", "generate"}), VLLM: frozenset({"chat", "completions"})}
_OWN = ("bootstrap_host", "bootstrap_room", "kv_transfer_params")
_REMOTE_DECODE = msgspec.json.encode(
    {
        **{"do_remote_decode": True, "do_remote_prefill": False},
        **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
    }
)


def is_separable(body: RelayedBody, endpoint: Endpoint, engine: str) -> bool:
    """Whether a request may be served in two: one prompt, one choice, at an endpoint that has these fields, and its
    client uses none of them."""
    if endpoint.kind not in _KINDS.get(engine, ()) or body.n * body.prompts != 1:
        return False
    return not any(body.given(name) for name in _OWN)


def bootstrap_fields(place: PrefillPlace, rng: random.Random) -> dict[str, bytes]:
    """What both SGLang servers are sent; `rng` draws the room."""
    fields: dict[str, Any] = {
        "bootstrap_host": urlsplit(place.url).hostname or "",
        "bootstrap_port": place.info.bootstrap_port,
        "bootstrap_room": rng.randrange(ROOM_MAX),
    }
    return {name: msgspec.json.encode(value) for name, value in fields.items()}


def prefill_fields(body: RelayedBody) -> dict[str, bytes]:
    """What a vLLM server is sent that prefills only: its answer comes whole, with one token."""
    fields = {"stream": b"false", "max_tokens": b"1", "kv_transfer_params": _REMOTE_DECODE}
    if "max_completion_tokens" in body.fields:
        fields["max_completion_tokens"] = b"1"
    if "stream_options" in body.fields:
        fields["stream_options"] = b"null"
    if "min_tokens" in body.fields:
        fields["min_tokens"] = b"0"
    return fields


class PrefillRefused(TransportError):
    """The server that prefills finds fault with the request: the one that decodes is left to answer it."""


def no_prefill(status: int, said: bytes) -> TransportError:
    """Why a server that answers with this status, and says this, has not prefilled."""
    kind = PrefillRefused if status in REFUSED else TransportError
    return kind(f"the server that prefills answers {status}: {said[:SAID_BYTES_MAX].decode(errors='replace')}")


def handed_over(answer: bytes) -> dict[str, bytes]:
    """What of a vLLM server's answer goes to the one that decodes. Raises `TransportError` for what is no answer."""
    try:
        found = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise TransportError("the server that prefills does not answer in JSON") from None
    params: Mapping[str, Any] | None = found.get("kv_transfer_params") if isinstance(found, dict) else None
    return {} if not isinstance(params, dict) else {"kv_transfer_params": msgspec.json.encode(params)}
