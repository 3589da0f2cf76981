"""What callers pass to a router, checked: prompts, times, the scheduler. Owns the thread in which text becomes tokens.

Text is tokenised in one thread of the router, prompt after prompt, so that a long one holds up no stream on the loop
and a tokenizer need not be thread-safe. Who waits for that thread is bounded; beyond the bound stands `QueueFull`.
Token ids are converted where they are passed, which takes microseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np

from .._core.token_ids import prompt_words
from ..clock import Clock
from ..errors import InvalidConfig, InvalidInput, InvalidTokens, QueueFull
from ..transport.messages import PROMPT_TOKENS_MAX
from .request import TokenIds

if TYPE_CHECKING:
    from .._core import token_types
    from .._cost import CostModel
    from ..config import SchedulerConfig
    from ..policies.base import Policy
    from ..scheduler import GlobalScheduler

    Prompt: TypeAlias = str | token_types.TokenIds


NO_TOKENS: TokenIds = np.empty(0, np.int32)  # of a text, until they are known


class TextEncoder(Protocol):
    """A tokenizer as those of Hugging Face are: `encode` gives token ids, or an object with `ids`."""

    def encode(self, text: str, /) -> Any:
        """The token ids of a text."""


Tokenizer: TypeAlias = TextEncoder | Callable[[str], Any]


class PromptTokenizer:
    """Turns prompts into token ids. `texts_max`: how many texts may wait for the thread at a time, or be in it. Belongs
    to one asyncio loop."""

    def __init__(self, tokenizer: Tokenizer | None, texts_max: int) -> None:
        encode = getattr(tokenizer, "encode", tokenizer)
        if encode is not None and not callable(encode):
            raise InvalidConfig(f"tokenizer must be callable or have encode, got a {type(tokenizer).__name__}")
        self._encode = cast("Callable[[str], Any] | None", encode)
        self._texts_max = texts_max
        self._texts = 0
        self._thread: ThreadPoolExecutor | None = None

    def read(self, prompt: Prompt) -> TokenIds | str:
        """Token ids as int32, or the text, which `tokens` makes into such. Raises `InvalidInput` for text without a
        tokenizer, `InvalidTokens`."""
        if not isinstance(prompt, str):
            return _int32(prompt)
        if self._encode is None:
            raise InvalidInput("prompt is text, but the Router was given no tokenizer")
        return prompt

    async def tokens(self, prompt: Prompt) -> TokenIds:
        """The prompt's token ids, 1-D int32. Suspends for text only. Raises as `read` does, `QueueFull` where too many
        texts wait, and whatever the tokenizer raises."""
        found = self.read(prompt)
        if not isinstance(found, str):
            return found
        if self._texts >= self._texts_max:
            raise QueueFull(f"{self._texts} texts wait to be tokenised, the bound of this router")
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="preble-tokenizer")
        self._texts += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._tokenise, found)
        finally:
            self._texts -= 1

    def _tokenise(self, text: str) -> TokenIds:
        assert self._encode is not None, "read lets no text pass without a tokenizer"
        encoded = self._encode(text)
        return _int32(getattr(encoded, "ids", encoded))

    def close(self) -> None:
        """Let the thread go, once it is done with the texts that wait. Idempotent; another text starts a new one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False)


def _int32(prompt: Any) -> TokenIds:
    """Token ids in a copy of their own. Raises `InvalidTokens`."""
    if isinstance(prompt, np.ndarray) and prompt.dtype.kind in "iu" and prompt.dtype != np.int32:
        prompt = np.ascontiguousarray(prompt, np.int64)
    token_ids = np.frombuffer(prompt_words(prompt), np.int32)
    if token_ids.size > PROMPT_TOKENS_MAX:
        raise InvalidTokens(f"prompt has {token_ids.size} tokens, at most {PROMPT_TOKENS_MAX} are allowed")
    return token_ids


def scheduler_of(
    scheduler: GlobalScheduler | None,
    policy: str | Policy | type[Policy],
    cost_model: CostModel | str | None,
    config: SchedulerConfig | None,
    clock: Clock,
) -> GlobalScheduler:
    """The scheduler that was given, else one of these parts. Raises `InvalidConfig`, also where there are both."""
    from ..scheduler import GlobalScheduler

    if scheduler is None:
        return GlobalScheduler([], policy=policy, cost_model=cost_model, config=config, clock=clock)
    if not isinstance(scheduler, GlobalScheduler):
        raise InvalidConfig(f"scheduler must be a GlobalScheduler, got a {type(scheduler).__name__}")
    if policy != "e2" or cost_model is not None or config is not None:
        raise InvalidConfig("policy, cost_model and scheduler_config are the scheduler's: give them or a scheduler")
    return scheduler
