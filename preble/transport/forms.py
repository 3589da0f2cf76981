"""What travels in another form than it is held in: texts, token ids, sampling parameters, namespaces and cache events.
Owns these forms and the limits that no annotation can say.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import isnan
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt
from msgspec import DecodeError, Meta, Raw, Struct
from msgspec.msgpack import Decoder

from .._core.token_ids import token_words, word_count, word_tuple
from ..types import (
    ALLOWED_TOKENS_MAX,
    BAD_WORD_CHARS_MAX,
    BAD_WORDS_MAX,
    GRAMMAR_BYTES_MAX,
    GRAMMAR_KINDS,
    LOGIT_BIAS_MAX,
    LOGPROBS_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    Claim,
    Grammar,
    GrammarKind,
    PrefixEvicted,
    Priority,
    RequestEnded,
    RequestPlaced,
    RequestPrefilled,
    SamplingParams,
    TokenLogprob,
)
from .messages import (
    CHUNKS_MAX,
    EVENTS_MAX,
    ID_BYTES_MAX,
    PROMPT_TOKENS_MAX,
    STOP_TOKENS_MAX,
    TEXT_BYTES_MAX,
    BlockSize,
    Count,
    FinishReason,
    Id,
    Number,
    OutputChunk,
    PairHalf,
    Positive,
    PullFrom,
    Text,
)
from .namespaces import ELEMENTS_MAX, NIL, Elements, Unfit, pack_namespace, read_namespace


class FrameForm(NamedTuple):
    """How a field travels: msgspec writes and reads `kind`, which `pack` makes of the value and `read` makes it of.
    Both may raise `Unfit`. Neither changes a value of which the expression `plain` is true."""

    kind: Any
    pack: Callable[[Any], Any]
    read: Callable[[Any], Any]
    plain: str | None = None


# --- texts ------------------------------------------------------------------------------------------------------------


_SHORT = ID_BYTES_MAX // 4  # characters, which have four bytes at most: so long may an id be that needs no look


def _check_id(text: str, where: str = "") -> str:
    if not text or (4 * len(text) > ID_BYTES_MAX and len(text.encode()) > ID_BYTES_MAX):
        raise Unfit(f"{where} must be a text of 1 to {ID_BYTES_MAX} bytes")
    return text


def _check_text(text: str | None, where: str = "") -> str | None:
    if text is not None and 4 * len(text) > TEXT_BYTES_MAX and len(text.encode()) > TEXT_BYTES_MAX:
        raise Unfit(f"{where} must be a text of 0 to {TEXT_BYTES_MAX} bytes")
    return text


def _clip(text: str | None) -> str | None:
    """Cut a text to what the wire takes; surrogates (undecodable bytes in a path) become question marks."""
    if text is None or (text.isascii() and len(text) <= TEXT_BYTES_MAX):
        return text
    return text.encode("utf-8", "replace")[:TEXT_BYTES_MAX].decode("utf-8", "ignore")


# --- token ids: raw words, which are little-endian like the machines that Preble is built for -------------------------

_INT32 = np.dtype(np.int32)
_array_of = np.frombuffer  # read-only, as bytes are


def _words(most: int) -> Meta:
    return Meta(max_length=4 * most, description=f"whole int32 words, at most {most}")


_Words = Annotated[bytes, _words(PROMPT_TOKENS_MAX)]
_StopWords = Annotated[bytes, _words(STOP_TOKENS_MAX)]


def _pack_stop(token_ids: Sequence[int], where: str = "") -> bytes:
    if len(token_ids) > STOP_TOKENS_MAX:
        raise Unfit(f"{where} has more than {STOP_TOKENS_MAX} ids")
    return token_words(token_ids)


def _count(words: bytes, where: str = "") -> int:
    """How many token ids these are, at least one."""
    count = word_count(words)
    if count < 1:
        raise Unfit(f"{where} {'must be whole int32 words, none of them negative' if words else 'is empty'}")
    return count


def _read_prompt(words: bytes) -> npt.NDArray[np.int32]:
    """A read-only array."""
    _count(words)
    return _array_of(words, _INT32)


def _read_tuple(words: bytes, where: str = "") -> tuple[int, ...]:
    ids = word_tuple(words)
    if ids is None:
        raise Unfit(f"{where} must be whole int32 words, none of them negative")
    return ids


# --- sampling ---------------------------------------------------------------------------------------------------------

_Real = Annotated[float, Meta(description="a number")]


class _Grammar(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    kind: Annotated[str, Meta(description=f"one of {', '.join(GRAMMAR_KINDS)}")]
    text: Annotated[str, Meta(max_length=GRAMMAR_BYTES_MAX, description=f"a text of 1 to {GRAMMAR_BYTES_MAX} bytes")]


_AllowedWords = Annotated[bytes, _words(ALLOWED_TOKENS_MAX)]
_BadWord = Annotated[str, Meta(max_length=BAD_WORD_CHARS_MAX, description=f"at most {BAD_WORD_CHARS_MAX} characters")]
_BadWords = Annotated[
    tuple[_BadWord, ...], Meta(max_length=BAD_WORDS_MAX, description=f"an array of at most {BAD_WORDS_MAX} texts")
]
_BiasWords = Annotated[bytes, _words(LOGIT_BIAS_MAX)]
_Biases = Annotated[list[_Real], Meta(max_length=LOGIT_BIAS_MAX, description=f"at most {LOGIT_BIAS_MAX} numbers")]


class _MoreSampling(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What few requests ask for; None where nothing of it is said. The order is that of `_MORE`."""

    top_k: int | None
    min_p: _Real | None
    min_new_tokens: int | None
    frequency_penalty: _Real | None
    presence_penalty: _Real | None
    repetition_penalty: _Real | None
    logprobs: int | None
    bias_token_ids: _BiasWords
    biases: _Biases
    grammar: _Grammar | None
    allowed_token_ids: _AllowedWords | None
    bad_words: _BadWords | None


class _Sampling(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """`SamplingParams`, which judges numbers itself."""

    max_new_tokens: Positive
    temperature: _Real | None
    top_p: _Real | None
    stop_token_ids: _StopWords
    ignore_eos: bool
    seed: Number | None
    more: _MoreSampling | None


_MORE = _MoreSampling.__struct_fields__[:7]
_more_of = attrgetter(*_MORE, "logit_bias", "grammar", "allowed_token_ids", "bad_words")
_NOTHING_MORE = (None,) * (len(_MORE) + 4)


def _pack_sampling(value: SamplingParams) -> tuple[Any, ...]:
    stop = _pack_stop(value.stop_token_ids, ".stop_token_ids")
    more = _more_of(value)
    packed = None if more == _NOTHING_MORE else _pack_more(*more)
    return value.max_new_tokens, value.temperature, value.top_p, stop, value.ignore_eos, value.seed, packed


def _pack_more(*more: Any) -> tuple[Any, ...]:
    *plain, bias, grammar, allowed, bad_words = more
    bias = bias or {}
    packed = None if grammar is None else (grammar.kind, grammar.text)
    ids = None if allowed is None else token_words(allowed)
    return *plain, token_words(list(bias)), list(bias.values()), packed, ids, bad_words


_SAMPLINGS_KEPT = 256
_plain_sampling = lru_cache(_SAMPLINGS_KEPT)(SamplingParams)  # applications ask for few kinds, which never change


def _read_sampling(value: _Sampling) -> SamplingParams:
    stop = _read_tuple(value.stop_token_ids, ".stop_token_ids")
    plain = value.max_new_tokens, value.temperature, value.top_p, stop, value.ignore_eos, value.seed
    more = value.more
    if more is None:
        return _plain_sampling(*plain) if value.seed is None else SamplingParams(*plain)
    tokens = _read_tuple(more.bias_token_ids, ".more.bias_token_ids")
    bias = dict(zip(tokens, more.biases, strict=False)) or None
    if not len(tokens) == len(more.biases) == len(bias or ()):
        raise Unfit(".more.biases must be as many as bias_token_ids, and each id be there once")
    numbers = {name: getattr(more, name) for name in _MORE}
    grammar = None if more.grammar is None else Grammar(cast(GrammarKind, more.grammar.kind), more.grammar.text)
    allowed = None
    if more.allowed_token_ids is not None:
        allowed = _read_tuple(more.allowed_token_ids, ".more.allowed_token_ids")
    said = (bias, grammar, allowed, more.bad_words, *numbers.values())
    if all(value is None for value in said):
        raise Unfit(".more must say something")
    return SamplingParams(
        *plain, **numbers, logit_bias=bias, grammar=grammar, allowed_token_ids=allowed, bad_words=more.bad_words
    )


# --- whose a request is -----------------------------------------------------------------------------------------------


class _Claim(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """`Claim`, which judges its fields itself."""

    tenant: Text
    weight: _Real
    deadline_seconds: _Real | None
    priority: Text


def _pack_claim(claim: Claim) -> tuple[Any, ...]:
    return claim.tenant, claim.weight, claim.deadline_seconds, claim.priority


def _read_claim(found: _Claim | None) -> Claim | None:
    if found is None:
        return None
    return Claim(found.tenant, found.weight, found.deadline_seconds, cast(Priority, found.priority))


# --- where KV may be had ----------------------------------------------------------------------------------------------


class _PullFrom(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    endpoint: Text
    epoch: Number
    tokens: Positive
    wait_us: Number


def _pack_pull(pull: PullFrom) -> tuple[Any, ...]:
    return _check_text(pull.endpoint, ".endpoint"), pull.epoch, pull.tokens, pull.wait_us


def _read_pull(found: _PullFrom | None) -> PullFrom | None:
    if found is None:
        return None
    _check_text(found.endpoint, ".endpoint")
    return PullFrom(found.endpoint, found.epoch, found.tokens, found.wait_us)


# --- log probabilities ------------------------------------------------------------------------------------------------

_Alternatives = Annotated[
    tuple[tuple[Count, _Real], ...], Meta(max_length=LOGPROBS_MAX, description=f"at most {LOGPROBS_MAX} alternatives")
]


class _Logprob(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    logprob: _Real
    top: _Alternatives


_LOGPROBS_META = Meta(max_length=PROMPT_TOKENS_MAX, description="an array of log probabilities")
_Logprobs = Annotated[tuple[_Logprob, ...], _LOGPROBS_META]


def _pack_logprobs(logprobs: Sequence[TokenLogprob]) -> tuple[Any, ...]:
    return tuple((one.logprob, one.top) for one in logprobs)


def _read_logprobs(found: tuple[_Logprob, ...]) -> tuple[TokenLogprob, ...]:
    for one in found:
        if isnan(one.logprob) or any(isnan(logprob) for _, logprob in one.top):
            raise Unfit(" must be numbers")
    return tuple(TokenLogprob(one.logprob, one.top) for one in found)


# --- what a step made for several requests ----------------------------------------------------------------------------


class _Chunk(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """`OutputChunk`, without the number that is that of all."""

    request_id: Id
    index: Count
    token_ids: _Words
    cached_tokens: Count | None
    finish_reason: FinishReason | None
    error: Text | None
    logprobs: _Logprobs


def _pack_chunks(chunks: Sequence[OutputChunk]) -> list[tuple[Any, ...]]:
    if len(chunks) > CHUNKS_MAX:
        raise Unfit(f": {len(chunks)} chunks do not fit one frame (at most {CHUNKS_MAX})")
    packed: list[tuple[Any, ...]] = []
    for one in chunks:
        if not 0 < len(one.request_id) <= _SHORT:
            _check_id(one.request_id, f"[{len(packed)}].request_id")
        error, logprobs = one.error and _clip(one.error), one.logprobs and _pack_logprobs(one.logprobs)
        words = token_words(one.token_ids)
        packed.append((one.request_id, one.index, words, one.cached_tokens, one.finish_reason, error, logprobs))
    return packed


def _read_chunks(found: list[_Chunk]) -> tuple[OutputChunk, ...]:
    chunks: list[OutputChunk] = []
    for one in found:
        ids = word_tuple(one.token_ids)
        if ids is None or one.error is not None or len(one.request_id) > _SHORT:
            _check_chunk(one, f"[{len(chunks)}]")
        logprobs = _read_logprobs(one.logprobs) if one.logprobs else ()
        rest = one.cached_tokens, one.finish_reason, one.error, 0, logprobs
        chunks.append(OutputChunk(one.request_id, one.index, ids, *rest))  # type: ignore[arg-type]
    return tuple(chunks)


def _check_chunk(chunk: _Chunk, where: str) -> None:
    _check_id(chunk.request_id, f"{where}.request_id")
    _read_tuple(chunk.token_ids, f"{where}.token_ids")
    _check_text(chunk.error, f"{where}.error")


# --- cache events: a letter and its fields ----------------------------------------------------------------------------

_HASH_META = Meta(description="a 64-bit int or 1 to 64 bytes")
_Hash = Annotated[int | Annotated[bytes, Meta(min_length=1, max_length=64)], _HASH_META]
_HASHES: Decoder[tuple[int | bytes, ...]] = Decoder(Annotated[tuple[_Hash, ...], Meta(max_length=ELEMENTS_MAX)])


def _read_hashes(raw: Raw, elements: Elements) -> tuple[int | bytes, ...]:
    try:
        hashes = _HASHES.decode(raw)
    except DecodeError as error:
        raise Unfit(f".block_hashes must be an array, each {_HASH_META.description}") from error
    elements.take(len(hashes))
    return hashes


def _read_namespace(raw: Raw, elements: Elements) -> Hashable:
    try:
        return None if raw == NIL else read_namespace(raw, elements)
    except Unfit as error:
        raise Unfit(f".namespace{error}") from error


def _pack_namespace(namespace: Hashable) -> Any:
    try:
        return None if namespace is None else pack_namespace(namespace)
    except Unfit as error:
        raise Unfit(f".namespace{error}") from error


def _check_names(event: Any) -> tuple[str, str]:
    return _check_id(event.router, ".router"), _check_id(event.request_id, ".request_id")


class _Event(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What is typed `Raw` is read only while the frame's `Elements` are counted; when packed it is the value itself."""

    def event(self, elements: Elements) -> CacheEvent:
        raise NotImplementedError


class _Evicted(_Event, frozen=True, tag="E"):
    token_ids: _Words
    kept_tokens: Count
    namespace: Raw

    def event(self, elements: Elements) -> PrefixEvicted:
        count = _count(self.token_ids, ".token_ids")
        if self.kept_tokens > count:
            raise Unfit(f".kept_tokens must be an int in [0, {count}]")
        token_ids: Any = _array_of(self.token_ids, _INT32)
        return PrefixEvicted(token_ids, self.kept_tokens, _read_namespace(self.namespace, elements))


class _Moved(_Evicted, frozen=True, tag="M"):
    moved_to: Text

    def event(self, elements: Elements) -> PrefixEvicted:
        return replace(super().event(elements), moved_to=_check_text(self.moved_to, ".moved_to"))


class _Stored(_Event, frozen=True, tag="S"):
    block_hashes: Raw
    parent_block_hash: _Hash | None
    token_ids: _Words
    block_size: BlockSize
    namespace: Raw
    medium: Text | None

    def event(self, elements: Elements) -> BlockStored:
        if self.token_ids:
            _count(self.token_ids, ".token_ids")
        token_ids: Any = _array_of(self.token_ids, _INT32)
        return BlockStored(
            _read_hashes(self.block_hashes, elements),
            self.parent_block_hash,
            token_ids,
            self.block_size,
            _read_namespace(self.namespace, elements),
            _check_text(self.medium, ".medium"),
        )


class _Removed(_Event, frozen=True, tag="R"):
    block_hashes: Raw
    medium: Text | None

    def event(self, elements: Elements) -> BlockRemoved:
        return BlockRemoved(_read_hashes(self.block_hashes, elements), _check_text(self.medium, ".medium"))


class _Cleared(_Event, frozen=True, tag="C"):
    def event(self, elements: Elements) -> AllBlocksCleared:
        return AllBlocksCleared()


class _RequestEvent(_Event, frozen=True):
    router: Id
    request_id: Id


class _Placed(_RequestEvent, frozen=True, tag="Q"):
    token_ids: _Words
    namespace: Raw
    max_new_tokens: Positive | None
    half: PairHalf | None

    def event(self, elements: Elements) -> RequestPlaced:
        if len(self.router) + len(self.request_id) > _SHORT:
            _check_names(self)
        _count(self.token_ids, ".token_ids")
        token_ids: Any = _array_of(self.token_ids, _INT32)
        namespace = _read_namespace(self.namespace, elements)
        return RequestPlaced(self.router, self.request_id, token_ids, namespace, self.max_new_tokens, self.half)


class _Prefilled(_RequestEvent, frozen=True, tag="F"):
    cached_tokens: Count | None

    def event(self, elements: Elements) -> RequestPrefilled:
        if len(self.router) + len(self.request_id) > _SHORT:
            _check_names(self)
        return RequestPrefilled(self.router, self.request_id, self.cached_tokens)


class _Ended(_RequestEvent, frozen=True, tag="X"):
    output_tokens: Count | None

    def event(self, elements: Elements) -> RequestEnded:
        if len(self.router) + len(self.request_id) > _SHORT:
            _check_names(self)
        return RequestEnded(self.router, self.request_id, self.output_tokens)


_AnyEvent = _Evicted | _Moved | _Stored | _Removed | _Cleared | _Placed | _Prefilled | _Ended
EVENT_KINDS: Mapping[str, type[Struct]] = {str(cls.__struct_config__.tag): cls for cls in get_args(_AnyEvent)}
_PACKS: Mapping[type, Callable[[Any], _Event]] = {
    PrefixEvicted: lambda e: _pack_evicted(e),
    BlockStored: lambda e: _Stored(
        list(e.block_hashes),  # type: ignore[arg-type]
        e.parent_block_hash,
        token_words(e.token_ids),
        e.block_size,
        _pack_namespace(e.namespace),
        _clip(e.medium),
    ),
    BlockRemoved: lambda e: _Removed(list(e.block_hashes), _clip(e.medium)),  # type: ignore[arg-type]
    AllBlocksCleared: lambda e: _Cleared(),
    RequestPlaced: lambda e: _Placed(
        *_check_names(e), token_words(e.token_ids), _pack_namespace(e.namespace), e.max_new_tokens, e.half
    ),
    RequestPrefilled: lambda e: _Prefilled(*_check_names(e), e.cached_tokens),
    RequestEnded: lambda e: _Ended(*_check_names(e), e.output_tokens),
}


def _pack_evicted(event: PrefixEvicted) -> _Event:
    fields = token_words(event.token_ids), event.kept_tokens, _pack_namespace(event.namespace)
    return _Evicted(*fields) if event.moved_to is None else _Moved(*fields, _clip(event.moved_to) or "")


def _pack_events(events: Sequence[CacheEvent]) -> list[_Event]:
    if len(events) > EVENTS_MAX:
        raise Unfit(f": {len(events)} events do not fit one frame (at most {EVENTS_MAX})")
    packed: list[_Event] = []
    try:
        for event in events:
            packed.append(_PACKS[type(event)](event))
    except KeyError as error:
        raise Unfit(f": events of {error} do not travel") from error
    except Unfit as error:
        raise Unfit(f"[{len(packed)}]{error}") from error
    return packed


def _read_events(events: list[_Event]) -> tuple[CacheEvent, ...]:
    found: list[CacheEvent] = []
    elements = Elements()
    try:
        for event in events:
            found.append(event.event(elements))
    except Unfit as error:
        raise Unfit(f"[{len(found)}]{error}") from error
    return tuple(found)


# --- by annotation ----------------------------------------------------------------------------------------------------

_CHUNKS_META = Meta(max_length=CHUNKS_MAX, description=f"an array of at most {CHUNKS_MAX} output chunks")
_EVENTS_META = Meta(max_length=EVENTS_MAX, description=f"an array of at most {EVENTS_MAX} events")


FORMS: Mapping[Any, FrameForm] = {
    Id: FrameForm(Id, _check_id, _check_id, f"0 < len({{}}) <= {_SHORT}"),
    Text: FrameForm(Text, _clip, _check_text),
    Text | None: FrameForm(Text | None, _clip, _check_text, "{} is None"),
    npt.NDArray[np.int32]: FrameForm(_Words, token_words, _read_prompt),
    Sequence[int]: FrameForm(_Words, token_words, _read_tuple),
    tuple[int, ...]: FrameForm(_StopWords, _pack_stop, _read_tuple),
    SamplingParams: FrameForm(_Sampling, _pack_sampling, _read_sampling),
    Claim | None: FrameForm(_Claim | None, _pack_claim, _read_claim, "{} is None"),
    PullFrom | None: FrameForm(_PullFrom | None, _pack_pull, _read_pull, "{} is None"),
    tuple[TokenLogprob, ...]: FrameForm(_Logprobs, _pack_logprobs, _read_logprobs, "not {}"),
    tuple[OutputChunk, ...]: FrameForm(Annotated[list[_Chunk], _CHUNKS_META], _pack_chunks, _read_chunks),
    Hashable: FrameForm(Raw, pack_namespace, read_namespace, "{} is None"),
    tuple[CacheEvent, ...]: FrameForm(Annotated[list[_AnyEvent], _EVENTS_META], _pack_events, _read_events),
}
