"""How many bytes of text a model's engines make one token of. Owns what is learned of that from the prompt tokens that
they report.

Keys of text have 4 bytes a token, about what tokenizers make of prose and code in most languages. Where an engine
counts clearly otherwise (by bytes, or whole words), keys of its model take 1, 2 or 8, so that what a prompt costs and
how much a cache holds stay right to about half. Only then: such a key meets none of the old ones, nor those of other
processes until they have learned the same.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

logger = logging.getLogger("preble.gateway")

TOKEN_BYTES = (1, 2, 4, 8)
USUAL = 4
CLEARLY = 1.5  # times off, either way
TOKENS_MIN = 256  # of a prompt that says something: in shorter ones the marks between messages count as much
PROMPTS_MIN = 16  # for a change; for the next one four times as many
MODELS_MAX = 1024


@dataclass(slots=True)
class _Counted:
    token_bytes: int = USUAL
    wanted: int = PROMPTS_MIN
    prompts: int = 0
    text_bytes: int = 0
    tokens: int = 0


@dataclass(slots=True)
class TextLengths:
    """Of all models of one gateway. Belongs to its loop."""

    _models: dict[str, _Counted] = field(default_factory=dict)

    def token_bytes(self, model: str) -> int:
        """Bytes of a token of this model's keys, one of `TOKEN_BYTES`."""
        found = self._models.get(model)
        return USUAL if found is None else found.token_bytes

    def learn(self, model: str, token_bytes: int, key_tokens: int, prompt_tokens: int) -> None:
        """A key with `key_tokens` of so many bytes was of a prompt of which an engine counts `prompt_tokens`."""
        if key_tokens < TOKENS_MIN or prompt_tokens <= 0:
            return
        found = self._models.get(model)
        if found is None:
            if len(self._models) >= MODELS_MAX:
                return
            found = self._models[model] = _Counted()
        if token_bytes != found.token_bytes:
            return
        found.prompts += 1
        found.text_bytes += key_tokens * token_bytes
        found.tokens += prompt_tokens
        if found.prompts >= found.wanted:
            self._judge(model, found)

    def _judge(self, model: str, found: _Counted) -> None:
        seen = found.text_bytes / found.tokens
        found.prompts = found.text_bytes = found.tokens = 0
        if 1.0 / CLEARLY < seen / found.token_bytes < CLEARLY:
            return
        nearest = min(TOKEN_BYTES, key=lambda size: abs(math.log(size / seen)))
        if nearest != found.token_bytes:
            found.token_bytes = nearest
            found.wanted *= 4
            logger.info("model %r: %.1f bytes of text a token; keys of text take %d", model, seen, nearest)
