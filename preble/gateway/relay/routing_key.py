"""What a relayed request is routed on: token ids where they are the engine's own, else its text. Owns which of the two.

An exact key is the prompt as the engine will see it: rendered by the model's chat template with tools and all that the
template reads, and tokenised. Only cache events speak of token ids. Where no server of a model publishes any, or there
is no tokenizer, a template refuses, or an engine was seen to count other tokens (`Mismatches`), the key is the prompt's
text, which is made in a tenth of the time, in a namespace of its own: it must never meet real token ids.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import InvalidInput, QueueFull
from ...transport.namespaces import joined
from ..api.http import off_loop
from ..text.tokenizing import Piece, PromptTooLong, TextCodec
from .body import RelayedBody
from .chat_prompt import chat_of, chat_prompt
from .messages_prompt import chat_of_messages
from .responses_prompt import chat_of_responses
from .text_key import prompt_text
from .text_lengths import USUAL, TextLengths

TokenIds = npt.NDArray[np.int32]
logger = logging.getLogger("preble.gateway")

LOOP_BYTES = 128 << 10  # a key of so long a body is made on the loop; of a longer one, beside it
TEXT = "text"
PROMPTS_MAX = 1024  # of one request that are tokenised; of more the text is taken
KINDS_MAX = 1024  # of endpoints and models that mismatches are counted of
TRIED_MIN = 8  # requests of an endpoint kind and model, whose tokens are compared although their text would do
SAME_SHARE = 0.25  # of what was matched: by so much text and tokens may differ in where a cached prefix ends
_APART = frozenset({"lora_path", "cache_salt", "extra_key"})  # fields that keep prompts apart
# Endpoints whose bodies engines make a chat of.
_CHATS: dict[str, Callable[[RelayedBody, str], dict[str, Any] | None]] = {
    "messages": chat_of_messages,
    "count_tokens": chat_of_messages,
    "responses": chat_of_responses,
}


@dataclass(frozen=True, slots=True)
class RoutingKey:
    """int32 token ids, never empty, and the namespace they are compared in. `exact`: they are the engine's own.
    `token_bytes`: of a key that is text from one end to the other, the bytes that one id stands for; else 0."""

    token_ids: TokenIds
    namespace: Hashable
    exact: bool
    token_bytes: int = 0

    def cached(self, cached_tokens: int | None, prompt_tokens: int | None, matched: int) -> int | None:
        """How many ids of this key were cached, by what the engine reports; None where that is not known. `matched` of
        them were expected: of a key of text, a share of the prompt that is about that is that."""
        if self.exact or cached_tokens is None:
            return cached_tokens
        if not prompt_tokens or cached_tokens > prompt_tokens:
            return None
        count = cached_tokens * len(self.token_ids) // prompt_tokens
        return matched if abs(count - matched) <= SAME_SHARE * matched else count


@dataclass(slots=True)
class Mismatches:
    """Where engines count other prompt tokens than our keys have. After `limit` of an endpoint kind and model the exact
    keys there become text; keys of text get other lengths (`lengths`). Belongs to one asyncio loop."""

    limit: int = 3
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    tried: dict[tuple[str, str], int] = field(default_factory=dict)
    lengths: TextLengths = field(default_factory=TextLengths)

    def text_only(self, kind: str, model: str) -> bool:
        """Whether our tokens are others there than the engine's."""
        return self.counts.get((kind, model), 0) >= self.limit

    def may_try(self, kind: str, model: str) -> bool:
        """Whether too few keys of that kind and model were exact yet to know; counts one more."""
        place = (kind, model)
        count = self.tried.get(place, 0)
        if count >= TRIED_MIN or (count == 0 and len(self.tried) >= KINDS_MAX):
            return False
        self.tried[place] = count + 1
        return True

    def compare(self, kind: str, model: str, key: RoutingKey, prompt_tokens: int | None) -> bool:
        """Hold a key against what the engine reports; whether its token ids are others."""
        if prompt_tokens is None:
            return False
        if not key.exact:
            if key.token_bytes:
                self.lengths.learn(model, key.token_bytes, len(key.token_ids), prompt_tokens)
            return False
        place = (kind, model)
        if prompt_tokens == len(key.token_ids):
            return False
        if place not in self.counts and len(self.counts) >= KINDS_MAX:
            return True
        self.counts[place] = count = self.counts.get(place, 0) + 1
        if count == 1:
            logger.warning(
                "%s requests of model %r: the engine counts %d prompt tokens, this gateway %d; "
                "after %d such requests they are routed by their text",
                kind, model, prompt_tokens, len(key.token_ids), self.limit,
            )  # fmt: skip
        return True


async def routing_key(
    body: RelayedBody,
    codec: TextCodec | None,
    *,
    model: str = "",
    engine: str = "",
    namespace: Hashable = None,
    mismatches: Mismatches | None = None,
    tokens_max: int = 2**31 - 1,
    events: bool = True,
) -> RoutingKey:
    """The key of a request. `model` is the name it is served by, `engine` what serves it ("sglang", "vllm"; "": not
    known), `namespace` the model's own. `events`: a server publishes what it caches; where none does, only the first
    requests have exact keys, to learn whether they would be. A prompt of more than `tokens_max` tokens is left to the
    engine to refuse, and routed on by its text."""
    base = namespace_of(body, namespace)
    kind = body.endpoint.kind
    if mismatches is None:
        mismatches = Mismatches()
    exact = codec if codec is not None and not mismatches.text_only(kind, model) else None
    if exact is not None and (events or mismatches.may_try(kind, model)):
        try:
            found = await _tokens(body, exact, engine, tokens_max)
        except (PromptTooLong, QueueFull, InvalidInput):  # the engine says what is wrong with it, and waits for none
            found = None
        if found is not None and len(found[0]):
            return RoutingKey(found[0], base, found[1])
    token_bytes = mismatches.lengths.token_bytes(model)
    if len(body.data) <= LOOP_BYTES:
        return _text_key(body, token_bytes, base)
    return await off_loop(len(body.data), _text_key, body, token_bytes, base)


def _text_key(body: RelayedBody, token_bytes: int, base: Hashable) -> RoutingKey:
    text = prompt_text(body, token_bytes)
    words = text.finish()
    if not len(words):
        words = np.zeros(1, np.int32)
    kind = TEXT if token_bytes == USUAL else f"{TEXT}/{token_bytes}"
    namespace = (kind,) if base is None else joined(kind, base)
    return RoutingKey(words, namespace, False, 0 if text.has_ids else token_bytes)


def namespace_of(body: RelayedBody, model: Hashable = None) -> Hashable:
    """What engines keep apart beside tokens: the model's own namespace, the adapter and the salt; None for nothing.

    A model that is named with its adapter outranks `lora_path`.
    """
    if model is None and _APART.isdisjoint(body.fields):
        return None
    named = isinstance(model, tuple) and "lora" in model[::2]
    lora = None if named or body.lora is None else ("lora", body.lora)
    return joined(model, lora, None if body.salt is None else ("salt", body.salt))


async def _tokens(body: RelayedBody, codec: TextCodec, engine: str, tokens_max: int) -> tuple[TokenIds, bool] | None:
    """The prompt's tokens, and whether they are exactly the engine's; None where they cannot be known. Raises as the
    codec does."""
    kind = body.endpoint.kind
    if kind in _CHATS or (kind == "chat" and not body.given("input_ids")):
        return await _chat(body, codec, engine, tokens_max)
    if kind == "generate" and any(body.given(f"{medium}_data") for medium in ("image", "audio", "video")):
        return None
    name = {"completions": "prompt", "chat": "input_ids", "generate": "text" if body.given("text") else "input_ids"}
    if kind not in name or body.given("truncate_prompt_tokens") or body.given("prompt_embeds"):
        return None
    special_tokens = body.small("add_special_tokens") is not False
    given = body.value(name[kind])
    if isinstance(given, list) and given and isinstance(given[0], list | str):
        ids = await _several(given, codec, special_tokens, tokens_max)
    else:
        ids = await _prompt(given, codec, special_tokens, tokens_max)
    return None if ids is None else (ids, True)


async def _chat(body: RelayedBody, codec: TextCodec, engine: str, tokens_max: int) -> tuple[TokenIds, bool] | None:
    template = codec.chat_template
    if template is None:
        return None
    media = False

    def make() -> list[Piece]:
        nonlocal media
        make_chat = _CHATS.get(body.endpoint.kind)
        chat = chat_of(body) if make_chat is None else make_chat(body, engine)
        prompt = None if chat is None else chat_prompt(chat, template, engine)
        if prompt is None:
            raise InvalidInput("messages: this chat is rendered by the engine only")
        media = bool(prompt.media)
        return prompt.pieces(template)

    ids = await codec.encode_made(len(body.data), make, tokens_max=tokens_max)
    return ids, not media


async def _several(prompts: list[Any], codec: TextCodec, special_tokens: bool, tokens_max: int) -> TokenIds | None:
    """Prompts, one after the other: the first is what is looked for, all of them are work."""
    if len(prompts) > PROMPTS_MAX:
        return None
    found = [await _prompt(one, codec, special_tokens, tokens_max) for one in prompts]
    known = [ids for ids in found if ids is not None]
    return np.concatenate(known) if len(known) == len(found) else None


async def _prompt(given: Any, codec: TextCodec, special_tokens: bool, tokens_max: int) -> TokenIds | None:
    if isinstance(given, str):
        return await codec.encode(given, special_tokens=special_tokens, tokens_max=tokens_max)
    return _ids(given) if isinstance(given, list) else None


def _ids(given: list[Any]) -> TokenIds | None:
    try:
        ids = np.frombuffer(array("i", given), dtype=np.int32)
    except (TypeError, OverflowError):
        return None
    return ids if len(ids) and int(ids.min()) >= 0 else None
