"""Token ids of a request that another framework routes. Owns the extractors, and the bounded pool in which they and the
tokenizer run, so that no event loop waits for them. Does not choose replicas and knows no framework.

An extractor is a function `(args, kwargs) -> Prompt | None` of a call's arguments. It runs in a thread of the pool.
Token ids and text stay here: no error and no log repeats them.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidConfig, InvalidInput, QueueFull
from ..types import BlockKeys, check_int

if TYPE_CHECKING:
    from ..gateway.text.tokenizing import TextCodec

TOKEN_FIELDS = ("token_ids", "prompt_token_ids", "input_ids")
LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an extractor found: one of `token_ids` (1-D, of ints), `text`, or `messages` (a chat's, as OpenAI writes
    them, and in `template` what else its template reads: `tools`, `documents`, `add_generation_prompt`, a model's own).
    `namespace` keeps caches apart (LoRA, salt); `max_new_tokens` is the client's limit, None if it set none."""

    token_ids: Any = field(default=None, repr=False)
    text: str | None = field(default=None, repr=False)
    messages: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    template: Mapping[str, Any] = field(default_factory=dict, repr=False)
    namespace: Hashable = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt ready to be scheduled. `token_ids` has shape [tokens] and is int32."""

    token_ids: npt.NDArray[np.int32] = field(repr=False)
    namespace: Hashable = None
    max_new_tokens: int | None = None


Extractor = Callable[[Sequence[Any], Mapping[str, Any]], "Prompt | None"]


# --- extractors -------------------------------------------------------------------------------------------------------


def openai(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prompt | None:
    """The prompt of the first argument that has one: an OpenAI chat or completions body as a mapping, as an object with
    those attributes (Ray Serve LLM's), or as JSON bytes. Token ids, where a body carries them, come before text. A
    completions body with several prompts has none, one with a list of one has that one."""
    for value in (*args, *kwargs.values(), kwargs):
        found = _body_prompt(value)
        if found is not None:
            return found
    return None


def text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prompt | None:
    """The first argument that is a str."""
    found = next((value for value in (*args, *kwargs.values()) if isinstance(value, str) and value), None)
    return None if found is None else Prompt(text=found)


def token_ids(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prompt | None:
    """A keyword argument named as in `TOKEN_FIELDS`, else the first argument that is a sequence of ints or an array."""
    named = next((kwargs[name] for name in TOKEN_FIELDS if kwargs.get(name) is not None), None)
    if named is None:
        named = next((value for value in args if _are_token_ids(value)), None)
    return None if named is None else Prompt(token_ids=named)


BUILT_IN: dict[str, Extractor] = {"openai": openai, "text": text, "token_ids": token_ids}


def extractor_named(name: Any) -> Extractor:
    """A built-in one, or the function at "package.module:function". Raises `InvalidConfig` naming the argument."""
    if not isinstance(name, str):
        raise InvalidConfig(f"extractor must be a name or an import path, got {name!r}")
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise InvalidConfig(f"extractor must be one of {sorted(BUILT_IN)} or 'module:function', got {name!r}")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InvalidConfig(f"extractor {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise InvalidConfig(f"extractor {name!r} is not callable")
    return found  # type: ignore[no-any-return]


def _body_prompt(body: Any) -> Prompt | None:
    """The prompt of one argument, None if it is no body."""
    read = _reader(body)
    if read is None:
        return None
    limit = next((read(name) for name in LIMIT_FIELDS if isinstance(read(name), int)), None)
    salt = read("cache_salt")
    keys = BlockKeys(None, None, salt if isinstance(salt, str) else None, ())
    rest: dict[str, Any] = {"namespace": keys.namespace() or None, "max_new_tokens": limit if limit else None}
    ids = next((read(name) for name in TOKEN_FIELDS if _are_token_ids(read(name))), None)
    prompt, messages = _only(read("prompt")), read("messages")
    if ids is not None or _are_token_ids(prompt):
        return Prompt(token_ids=prompt if ids is None else ids, **rest)
    if isinstance(messages, list | tuple) and messages:
        plain = [_plain(one) for one in messages]
        return Prompt(messages=plain, template=_template(read), **rest) if all(map(_is_read, plain)) else None
    return Prompt(text=prompt, **rest) if isinstance(prompt, str) and prompt else None


def _only(prompt: Any) -> Any:
    """The prompt of a list of one; a list of token ids is a prompt itself."""
    one_of_list = isinstance(prompt, list | tuple) and len(prompt) == 1 and not _are_token_ids(prompt)
    return prompt[0] if one_of_list else prompt


def _template(read: Callable[[str], Any]) -> dict[str, Any]:
    """What a chat's template is rendered with beside its messages, as vLLM and SGLang do."""
    own = read("chat_template_kwargs")
    options: dict[str, Any] = dict(own) if isinstance(own, Mapping) else {}
    for name in ("tools", "documents"):
        values = read(name)
        if isinstance(values, list | tuple) and values:
            options[name] = [one.model_dump() if hasattr(one, "model_dump") else one for one in values]
    if isinstance(read("add_generation_prompt"), bool):
        options["add_generation_prompt"] = read("add_generation_prompt")
    return options


def _is_read(message: Any) -> bool:
    """Whether a message can be read twice. Pydantic leaves some contents as iterators: the replica needs them, too."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(message, Mapping) and (content is None or isinstance(content, str | list | tuple))


def _reader(body: Any) -> Callable[[str], Any] | None:
    """How a body's fields are read; None for what is no body."""
    if isinstance(body, bytes | bytearray):
        try:
            body = json.loads(body)
        except ValueError:
            return None
    if isinstance(body, Mapping):
        return body.get
    if hasattr(body, "messages") or hasattr(body, "prompt"):
        return lambda name: getattr(body, name, None)
    return None


def _plain(message: Any) -> Any:
    """A chat message as a mapping; pydantic models of it are dumped."""
    return message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else message


def _are_token_ids(value: Any) -> bool:
    """Whether a value looks like token ids; every id is checked where they are made an array."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.size > 0
    if not isinstance(value, list | tuple) or not value:
        return False
    return isinstance(value[0], int) and not isinstance(value[0], bool)


# --- the pool ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    """`extractor`: a built-in one's name or "module:function". `tokenizer`: a model directory, "" where requests bring
    token ids. At most `queue_max` requests are being read at once, one more is refused; reading ends to be waited for
    after `read_seconds`. Raises `InvalidConfig` naming the field."""

    extractor: str = "openai"
    tokenizer: str = ""
    threads: int = 2
    queue_max: int = 256
    read_seconds: float = 1.0

    def __post_init__(self) -> None:
        check_int("threads", self.threads, 1, 64)
        check_int("queue_max", self.queue_max, 1, 1 << 16)
        if not isinstance(self.read_seconds, int | float) or not 0.0 < self.read_seconds <= 60.0:
            raise InvalidConfig(f"read_seconds must be in (0, 60], got {self.read_seconds!r}")
        if not isinstance(self.tokenizer, str):
            raise InvalidConfig(f"tokenizer must be a directory's path, got {self.tokenizer!r}")


class PromptReader:
    """Reads prompts in a bounded pool of threads. `read` belongs to an asyncio loop, `read_now` to any thread.

    Raises `InvalidConfig` for an extractor or tokenizer that cannot be loaded, `MissingExtra` without tokenizers.
    """

    def __init__(self, config: ReaderConfig) -> None:
        self._config = config
        self._extract = extractor_named(config.extractor)
        self._codec: TextCodec | None = None
        if config.tokenizer:
            from ..gateway.text.tokenizing import TextCodec

            self._codec = TextCodec(config.tokenizer, threads=1)
        self._waiting = 0
        self._pool = ThreadPoolExecutor(config.threads, thread_name_prefix="preble-prompts")

    async def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tokens | None:
        """A call's tokens; None where the extractor finds no prompt.

        Raises `QueueFull` at `queue_max`, `asyncio.TimeoutError` after `read_seconds`, and what `read_now` raises.
        A read that is no longer waited for keeps its place in the queue until its thread is done with it.
        """
        if self._waiting >= self._config.queue_max:
            raise QueueFull(f"{self._waiting} prompts are being read, the bound of queue_max")
        self._waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, self.read_now, args, kwargs)
        future.add_done_callback(self._done)
        return await asyncio.wait_for(asyncio.shield(future), self._config.read_seconds)

    def read_now(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tokens | None:
        """`read` in this thread. Raises `InvalidInput` for a prompt that cannot be made tokens, and whatever the
        extractor raises."""
        prompt = self._extract(args, kwargs)
        if prompt is None:
            return None
        if not isinstance(prompt, Prompt):
            raise InvalidInput(f"extractor must return a Prompt or None, got a {type(prompt).__name__}")
        return Tokens(self._tokens_of(prompt), prompt.namespace, prompt.max_new_tokens)

    def run(self, function: Callable[[], object]) -> None:
        """Run other work of the router in the pool, without waiting for it."""
        self._pool.submit(function)

    def close(self) -> None:
        """End the threads; what waits is not read. Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._codec is not None:
            self._codec.close()

    def _done(self, future: asyncio.Future[Tokens | None]) -> None:
        self._waiting -= 1
        if not future.cancelled():
            future.exception()  # somebody who stopped waiting does not ask for it

    def _tokens_of(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        if prompt.token_ids is not None:
            return _as_array(prompt.token_ids)
        if self._codec is None:
            raise InvalidInput("the request has text and the router no tokenizer: set the tokenizer argument")
        if prompt.messages is None:
            return self._codec.encode_now(prompt.text or "")
        if self._codec.chat_template is None:
            raise InvalidInput("messages: this model has no chat template")
        rendered = self._codec.chat_template.render(prompt.messages, variables=prompt.template)
        return self._codec.encode_now(rendered, special_tokens=False)


def _as_array(ids: Any) -> npt.NDArray[np.int32]:
    """Token ids as int32, shape [tokens]. Raises `InvalidInput` for what is none."""
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"token_ids cannot be made an array ({type(error).__name__})") from None
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise InvalidInput(f"token_ids must be 1-D integers, got shape {array.shape} of {array.dtype}")
    if int(array.min()) < 0 or int(array.max()) > 2**31 - 1:
        raise InvalidInput("token_ids must be in [0, 2**31 - 1]")
    return np.ascontiguousarray(array, dtype=np.int32)
