"""The tokenizer layer: text to token ids in threads, with a cache of what was tokenised before.

Owns the tokenizer of one model directory, and the cache. Text is cut after each special token (the marks between the
messages of a chat) and, `CHUNK_CHARACTERS` after a cut, before the next end of a line that follows a letter: tokenizers
merge across neither, so a prompt's ids are those of its parts, one after the other, and the parts of a
conversation or document that came before are looked up, not tokenised again. Where a text is cut depends on what is
before the cut alone, so texts that begin alike are cut alike.

    prompt      <s> system </s> a document of many lines    .    .    question 7
    cut into    <s>|system </s>|a document of |many lines   .|   .    |question 7     looked up but for the last

Where no more than `FINE_PARTS_MAX` parts are new, those are cut again, `FINE_CHARACTERS` apart: a new question shares a
part with the end of what is known.

Whether that holds for a tokenizer is tried when it is loaded; one where it does not is given texts that are not cut
there.

At its bounds: over `queue_max` texts that wait, `QueueFull`; over `cache_bytes`, the parts used longest ago go; a text
with more tokens than the model takes is given up as soon as that shows, and what is long is tried in slices first, so
that no more than about twice the model's tokens are ever made of it.
"""

from __future__ import annotations

import json
import re
import string
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...engines.model_files import tokenizer_fingerprint
from ...errors import InvalidConfig, InvalidInput
from ...workloads.tokenizers import read_file
from .chat_template import ChatTemplate, load_chat_template
from .text_queue import TextQueue

TokenIds = npt.NDArray[np.int32]
Piece = str | array  # a text, or int32 token ids

# Words, spaces, digits, other scripts, emoji of several code points, code, marks: where tokenizers differ.
PROBES = (
    "Hello, world!",
    " leading and trailing ",
    "tabs\tand\nnew\r\nlines\n\n\nand   runs of    spaces",
    "1234567890 3.14159 0x1f 1,000,000",
    "Grüße aus Zürich, naïve café; ﬁne ligatures",
    "你好，世界。 日本語 한국어 العربية हिन्दी",
    "\U0001f469‍\U0001f4bb \U0001f1e8\U0001f1ed é",
    "def f(x):\n    return x**2  # comment\n",
    "<|user|>[INST]</s><s>{{json}}",
)
SWITCH_SECONDS = 0.0005  # for `sys.setswitchinterval`: so soon a thread that computes lets the event loop go on
MARKS_TRIED_MAX = 8  # special tokens differ by name only: some speak for all
CHUNK_CHARACTERS = 512  # of a part at least, where it is cut at the end of a line
FINE_CHARACTERS = 64  # of one that is not in the cache, where no more than so many are not:
FINE_PARTS_MAX = 2
SLICE_CHARACTERS = 32 << 10  # tokenised in one call, and of a long text tried at a time
LOOP_CHARACTERS = 16 << 10  # of a prompt that is tokenised on the loop, where no more than these are new:
LOOP_NEW_CHARACTERS = 1024
MESSAGE_CHARACTERS = 64  # what a message costs beside its text, about
ASCII_LETTERS = frozenset(string.ascii_letters)
LINE_HEADS = (*(f"{probe} x" for probe in PROBES), "word", "a B", "1st", "don't", "x.y", "CamelCase", "<tag", "é a")
LINE_TAILS = (*(f"\n{probe}" for probe in PROBES), "\n", "\n\n\n", "\n \n x", "\n\tx", "\n  x", "\n\r\n1", "\n, x")
ACROSS = re.compile("[A-Za-z][\n\u010a]")  # a letter and a line's end, which byte-level vocabularies write as U+010A
ENTRY_BYTES = 200  # what a part costs in the cache beside its text and ids, about


@dataclass(slots=True)
class TokenizerCounters:
    """How many parts of prompts were in the cache, and how many were not."""

    parts_found: int = 0
    parts_encoded: int = 0


class PromptTooLong(InvalidInput):
    """A text has more tokens than the model takes."""


class TokenLimit:
    """What stops the tokenising of one text: more than `tokens_max` tokens, or that nobody wants it any more."""

    def __init__(self, tokens_max: int, stop: threading.Event) -> None:
        self._tokens_max = tokens_max
        self._stop = stop

    def check(self, tokens: int, slack: int = 1) -> None:
        """Raise `PromptTooLong` where there are more than `slack` times the tokens that may be; `InvalidInput` where
        nobody will see it."""
        if tokens > slack * self._tokens_max:
            raise PromptTooLong(f"the model takes {self._tokens_max} tokens, the prompt has more")
        if self._stop.is_set():
            raise InvalidInput("nobody wants these tokens any more")


@dataclass(slots=True)
class KnownParts:
    """The parts of a text, with the ids of those that are in the cache."""

    parts: Sequence[str]
    ids: Sequence[array[int] | None]

    @property
    def new_characters(self) -> int:
        """How many there are in parts without ids."""
        return sum(len(part) for part, ids in zip(self.parts, self.ids, strict=True) if ids is None)


UNLIMITED = TokenLimit(2**31 - 1, threading.Event())


class PartCache:
    """Token ids by text, the most recent in at most `bytes_max` bytes. Any thread may call anything."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_used = 0
        self.evicted = 0
        self._parts: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str) -> array[int] | None:
        """The ids of a text, which becomes the most recent; None if it is not there."""
        with self._lock:
            ids = self._parts.get(text)
            if ids is not None:
                self._parts.move_to_end(text)
            return ids

    def put(self, text: str, ids: array[int]) -> None:
        """Remember a text, unless it alone would be more than a quarter of the cache."""
        cost = _cost(text, ids)
        with self._lock:
            if cost > self.bytes_max // 4 or text in self._parts:
                return
            self._parts[text] = ids
            self.bytes_used += cost
            while self.bytes_used > self.bytes_max:
                old, old_ids = self._parts.popitem(last=False)
                self.bytes_used -= _cost(old, old_ids)
                self.evicted += 1

    def check(self) -> None:
        """Assert that the sum is that of the parts, and within its bound."""
        with self._lock:
            assert self.bytes_used == sum(_cost(text, ids) for text, ids in self._parts.items()) <= self.bytes_max


def _chunks(part: str, least_characters: int = CHUNK_CHARACTERS) -> list[str]:
    """A part cut at the ends of lines, so many characters or more apart."""
    chunks, start = [], 0
    while len(part) - start > least_characters and (end := _line_end(part, start + least_characters)):
        chunks.append(part[start:end])
        start = end
    return [*chunks, part[start:]]


def _line_end(text: str, start: int) -> int:
    """Where the next line ends whose last character is a letter at `start` or behind it; 0 if none does."""
    end = start
    while (end := text.find("\n", end + 1)) > 0:  # an expression takes several times as long
        if text[end - 1] in ASCII_LETTERS:
            return end
    return 0


def _finer(parts: Sequence[str], found: Sequence[array[int] | None]) -> list[str]:
    """The parts, those that were not found cut again, `FINE_CHARACTERS` apart."""
    pairs = zip(parts, found, strict=True)
    return [piece for part, ids in pairs for piece in (_chunks(part, FINE_CHARACTERS) if ids is None else (part,))]


def _some(ids: array[int]) -> TokenIds:
    if not ids:
        raise InvalidInput("the prompt has no tokens")
    return np.frombuffer(ids, dtype=np.int32)


def _size_of(content: Any) -> int:
    """About how many characters a message's content has: a text, or a list of parts."""
    if isinstance(content, list):
        return sum(_size_of(part.get("text")) for part in content if isinstance(part, Mapping))
    return len(content) if isinstance(content, str) else 0


def _batches(parts: Sequence[str]) -> Iterator[list[str]]:
    """Parts that are tokenised in one call: few enough characters, or one part alone."""
    batch: list[str] = []
    characters = 0
    for part in parts:
        if batch and characters + len(part) > SLICE_CHARACTERS:
            yield batch
            batch, characters = [], 0
        batch.append(part)
        characters += len(part)
    if batch:
        yield batch


def _cost(text: str, ids: array[int]) -> int:
    return ENTRY_BYTES + 4 * len(text) + 4 * len(ids)  # a str has up to 4 bytes a character


class TextCodec:
    """One model's tokenizer and chat template, from its directory. Raises `InvalidConfig` or `MissingExtra`.

    `encode` and `encode_chat` belong to an asyncio loop; `encode_now` and `decode` may be called from any thread.
    """

    def __init__(
        self, directory: str | Path, *, threads: int = 2, queue_max: int = 1024, cache_bytes: int = 64 << 20
    ) -> None:
        self.directory = Path(directory)
        self._tokenizer = load_tokenizer(self.directory)
        config = _read_config(self.directory)
        self.chat_template: ChatTemplate | None = load_chat_template(self.directory, config)
        self.fingerprint = tokenizer_fingerprint(self.directory)  # as workers report theirs
        self.counters = TokenizerCounters()
        self.cache = PartCache(cache_bytes)
        self._before, self._after = _framing(self._tokenizer)
        marks = _special_texts(self._tokenizer)
        self._parts_after = _pattern(marks)
        self._cuts_lines = False
        if not self._parts_are_independent(marks):
            self._parts_after = None
        self._cuts_lines = _lines_are_independent(self._tokenizer)
        self._queue = TextQueue(threads, queue_max)

    # --- on the loop --------------------------------------------------------------------------------------------------

    async def encode(self, text: str, *, special_tokens: bool = True, tokens_max: int = 2**31 - 1) -> TokenIds:
        """The ids of a text; `special_tokens` adds those that the tokenizer puts around a prompt. What is short, and
        little of it new, is done on the loop.

        Raises `QueueFull`, `PromptTooLong`, and `InvalidInput` for a text without tokens. Cancelled, it is given up.
        """

        if len(text) <= LOOP_CHARACTERS:
            known = self._known(text)
            if known.new_characters <= LOOP_NEW_CHARACTERS:
                return self._encode_framed(known, special_tokens, TokenLimit(tokens_max, threading.Event()))

        def work(stop: threading.Event) -> TokenIds:  # what came before it may be known by now
            return self._encode_framed(self._known(text), special_tokens, TokenLimit(tokens_max, stop))

        return await self._queue.run(len(text), work)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tokens_max: int = 2**31 - 1,
    ) -> TokenIds:
        """The ids of a chat, ready for the assistant's answer; see `ChatTemplate.render`. Raises as `encode` does."""

        def make() -> list[Piece]:
            if self.chat_template is None:
                raise InvalidInput("messages: this model has no chat template")
            text = self.chat_template.render(
                messages,
                tools=tools,
                variables=variables,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            return [text]

        size = sum(_size_of(message.get("content")) + MESSAGE_CHARACTERS for message in messages)
        return await self.encode_made(size, make, tokens_max=tokens_max)

    async def encode_made(
        self, size: int, make: Callable[[], Sequence[Piece]], *, tokens_max: int = 2**31 - 1
    ) -> TokenIds:
        """The ids of what `make` returns, texts and ids one after the other, without special tokens around them.

        `size` says about how many characters it makes. What is short, and little of it new, is done on the loop: a
        thread would cost more than it. The rest runs in a thread. Raises as `encode` does, or as `make`.
        """
        pieces: Sequence[Piece] | None = None
        if size <= LOOP_CHARACTERS:
            pieces = make()
            known = [self._known(piece) if isinstance(piece, str) else piece for piece in pieces]
            if sum(one.new_characters for one in known if isinstance(one, KnownParts)) <= LOOP_NEW_CHARACTERS:
                return self._encode_pieces(known, TokenLimit(tokens_max, threading.Event()))

        def work(stop: threading.Event) -> TokenIds:
            return self._encode_pieces(make() if pieces is None else pieces, TokenLimit(tokens_max, stop))

        return await self._queue.run(size, work)

    # --- in any thread ------------------------------------------------------------------------------------------------

    def encode_now(self, text: str, special_tokens: bool = True, limit: TokenLimit = UNLIMITED) -> TokenIds:
        """`encode` in this thread."""
        return self._encode_framed(self._known(text), special_tokens, limit)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens; unknown ids are left out."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def close(self) -> None:
        """End the threads; texts that wait are not tokenised. Idempotent."""
        self._queue.close()

    def _known(self, text: str) -> KnownParts:
        """The parts of a text, looked up; where few are missing, these cut finer."""
        parts = self._parts(text)
        found = [self.cache.get(part) for part in parts]
        if self._cuts_lines and 0 < found.count(None) <= FINE_PARTS_MAX:
            parts = _finer(parts, found)
            found = [self.cache.get(part) for part in parts]
        return KnownParts(parts, found)

    def _encode_framed(self, known: KnownParts, special_tokens: bool, limit: TokenLimit) -> TokenIds:
        ids = array("i", self._before if special_tokens else ())
        for part in self._encode_parts(known, limit):
            ids.extend(part)
        if special_tokens:
            ids.extend(self._after)
        return _some(ids)

    def _encode_pieces(self, pieces: Iterable[Piece | KnownParts], limit: TokenLimit) -> TokenIds:
        ids: array[int] = array("i")
        for piece in pieces:
            known = self._known(piece) if isinstance(piece, str) else piece
            if isinstance(known, KnownParts):
                for part in self._encode_parts(known, limit):
                    ids.extend(part)
            else:
                ids.extend(known)
            limit.check(len(ids))
        return _some(ids)

    def _parts(self, text: str) -> list[str]:
        """The text cut after each special token, and at the ends of lines."""
        parts = [text]
        if self._parts_after is not None:
            ends = [match.end() for match in self._parts_after.finditer(text)]
            cuts = [0, *ends, len(text)]
            parts = [text[start:end] for start, end in zip(cuts, cuts[1:], strict=False) if start < end]
        return [chunk for part in parts for chunk in _chunks(part)] if self._cuts_lines else parts

    def _encode_parts(self, known: KnownParts, limit: TokenLimit) -> list[array[int]]:
        """The ids of each part, those found or tokenised."""
        parts, found = known.parts, known.ids
        missing = [part for part, ids in zip(parts, found, strict=True) if ids is None]
        tokens = sum(len(ids) for ids in found if ids is not None)
        fresh: list[array[int]] = []
        for batch in _batches(missing):
            limit.check(tokens)
            if len(batch[0]) > SLICE_CHARACTERS:
                self._try_slices(batch[0], limit)
            fresh += self._encode_batch(batch)
            tokens += sum(map(len, fresh[-len(batch) :]))
        limit.check(tokens)
        for part, ids in zip(missing, fresh, strict=True):
            self.cache.put(part, ids)
        self.counters.parts_found += len(parts) - len(missing)
        self.counters.parts_encoded += len(missing)
        new = iter(fresh)
        return [next(new) if ids is None else ids for ids in found]

    def _encode_batch(self, texts: Sequence[str]) -> list[array[int]]:
        # Of the library's calls those for many texts let other threads run meanwhile, not the one for a single text.
        return [array("i", one.ids) for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _try_slices(self, text: str, limit: TokenLimit) -> None:
        """Give up a long part before it is tokenised whole, which takes memory for each of its tokens. Cutting changes
        tokens near the cuts only: twice too many will not become few enough."""
        tokens = 0
        for start in range(0, len(text), SLICE_CHARACTERS):
            tokens += len(self._encode_batch([text[start : start + SLICE_CHARACTERS]])[0])
            limit.check(tokens, slack=2)

    def _parts_are_independent(self, marks: Sequence[str]) -> bool:
        """Whether cutting after special tokens leaves the ids as they are, tried on texts that are hard to cut."""
        for mark in marks[:MARKS_TRIED_MAX]:
            text = mark.join(PROBES) + mark
            whole = self._tokenizer.encode(text, add_special_tokens=False).ids
            parts = [self._tokenizer.encode(part, add_special_tokens=False).ids for part in self._parts(text)]
            if [token for ids in parts for token in ids] != whole:
                return False
        return True


# --- loading ----------------------------------------------------------------------------------------------------------


def load_tokenizer(directory: Path) -> Any:
    """The `tokenizers.Tokenizer` of a model directory. Raises `InvalidConfig` or `MissingExtra`."""
    try:
        return read_file(directory / "tokenizer.json", "gateway")
    except InvalidInput as error:
        raise InvalidConfig(str(error)) from error


def first_difference(mine: Path, theirs: Path) -> str:
    """Where two tokenizers part, on `PROBES`, for an operator to read; "" if they never do."""
    ours, others = load_tokenizer(mine), load_tokenizer(theirs)
    for number, probe in enumerate(PROBES):
        here, there = ours.encode(probe).ids, others.encode(probe).ids
        if here != there:
            place = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), None)
            place = min(len(here), len(there)) if place is None else place
            got = [ids[place] if place < len(ids) else "none" for ids in (here, there)]
            return f"probe {number}, position {place}: the gateway has token {got[0]}, the worker {got[1]}"
    return ""


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidConfig(f"tokenizer: {file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidConfig(f"tokenizer: {file} must hold an object")
    return config


def _framing(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a prompt."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a", add_special_tokens=True).ids
    extra = len(framed) - len(plain)
    before = next((i for i in range(extra + 1) if framed[i : i + len(plain)] == plain), None)
    if before is None:
        raise InvalidConfig("tokenizer: it changes a prompt's tokens where it adds special ones")
    return framed[:before], framed[before + len(plain) :]


def _special_texts(tokenizer: Any) -> list[str]:
    """Special tokens that are found wherever they stand, and take nothing of what is around them along."""
    added = tokenizer.get_added_tokens_decoder().values()
    plain = (one for one in added if not (one.single_word or one.lstrip or one.rstrip or one.normalized))
    return sorted(one.content for one in plain if one.special and one.content)


def _lines_are_independent(tokenizer: Any) -> bool:
    """Whether cutting between a letter and the end of a line leaves the ids as they are: no token has both, no special
    one takes along what follows it, and so it is in texts that are hard to cut."""
    if any(map(ACROSS.search, tokenizer.get_vocab(with_added_tokens=True))):
        return False
    if any(one.rstrip and one.content[-1:].isalpha() for one in tokenizer.get_added_tokens_decoder().values()):
        return False

    def ids_of(texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    heads, tails = ids_of(LINE_HEADS), ids_of(LINE_TAILS)
    wholes = ids_of([head + tail for head in LINE_HEADS for tail in LINE_TAILS])
    return wholes == [head + tail for head in heads for tail in tails]


def _pattern(texts: Sequence[str]) -> re.Pattern[str] | None:
    """Matches any of the texts; None where there is none. Longer ones first, as the tokenizer finds them."""
    if not texts:
        return None
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))
