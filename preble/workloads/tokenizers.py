"""Text to token ids: Mistral's real tokenizer, a model's own from its file, and one without dependencies. Owns them;
chat templates are not its.

A `Tokenizer` encodes a piece of text on its own: no token is added before or after, and equal text gives equal ids.
Ids are below `vocabulary_size`, so that whatever needs ids of its own (pseudo-tokens of a video) takes them above.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, MissingExtra
from ..types import check_int
from .types import Int32Array, unwritable

RESERVED_IDS = 3  # unknown, beginning, end: as in Mistral's vocabulary
BOS_ID = 1
WORDS_VOCABULARY = 32_000
# A word or signs with the blank before them, long ones in pieces. On tool descriptions, documents, action logs and code
# this gives 3.9, 4.1, 3.3 and 3.7 characters a token; Mistral's tokenizer 4.1, 3.6, 2.7 and 3.4.
PIECE = re.compile(r"\s?\w{1,6}|\s?[^\w\s]{1,3}|\s+")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A vocabulary and the function that encodes with it. `bos_id` leads a prompt; `encode` never adds it."""

    name: str
    vocabulary_size: int
    bos_id: int
    encode_ids: Callable[[str], Sequence[int]]

    def encode(self, text: str) -> Int32Array:
        """Token ids of `text`, shape [tokens], int32, not writable. Empty for the empty text."""
        return unwritable(self.encode_ids(text))


def mistral() -> Tokenizer:
    """Mistral 7B v0.1's tokenizer (32,000 entries), from the file that mistral-common carries; nothing is downloaded.

    Raises `MissingExtra` without mistral-common or sentencepiece.
    """
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise MissingExtra('Mistral\'s tokenizer needs sentencepiece: pip install "preble[mistral]"') from error
    # The package is only looked up: importing it would load pydantic and an HTTP client for one data file.
    found = find_spec("mistral_common")
    folders = (found.submodule_search_locations or []) if found else []
    model = next((p for p in (Path(f) / "data" / "tokenizer.model.v1" for f in folders) if p.exists()), None)
    if model is None:
        raise MissingExtra('Mistral\'s tokenizer lies in mistral-common: pip install "preble[mistral]"')
    processor = SentencePieceProcessor(model_file=str(model))
    return Tokenizer("mistral-v1", processor.vocab_size(), processor.bos_id(), processor.encode)


def read_file(path: str | Path, extra: str) -> Any:
    """The `tokenizers.Tokenizer` of a `tokenizer.json`, or of the folder with it, that cuts and pads nothing.

    Raises `InvalidInput` naming the file, `MissingExtra` naming `extra` without the package tokenizers.
    """
    place = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    try:
        from tokenizers import Tokenizer as FileTokenizer
    except ImportError as error:
        raise MissingExtra(f'{place} needs the package tokenizers: pip install "preble[{extra}]"') from error
    if not place.is_file():
        raise InvalidInput(f"tokenizer: there is no file {place}")
    try:
        found = FileTokenizer.from_file(str(place))
    except Exception as error:  # the library raises nothing narrower
        raise InvalidInput(f"tokenizer: {place} cannot be read: {error}") from error
    found.no_truncation()
    found.no_padding()
    return found


def from_file(path: str | Path) -> Tokenizer:
    """The tokenizer of a model: its `tokenizer.json`, or the folder with it, of the transformers format.

    Raises `InvalidInput` naming the file, `MissingExtra` without the package tokenizers.
    """
    found = read_file(path, "torch")
    leading = found.encode("").ids
    size = max(found.get_vocab(with_added_tokens=True).values(), default=0) + 1

    def encode_ids(text: str) -> Sequence[int]:
        ids: Sequence[int] = found.encode(text, add_special_tokens=False).ids
        return ids

    place = Path(path)
    name = place.name if place.is_dir() else place.parent.name or place.name
    return Tokenizer(name, size, leading[0] if leading else 0, encode_ids)


def words(seed: int = 0) -> Tokenizer:
    """A tokenizer without files or dependencies: pieces of words, each hashed (CRC-32) to an id.

    Lengths are near a real tokenizer's on English text, ids are alike on every machine; unlike pieces may rarely share
    an id, and ids cannot be decoded. `seed` gives another numbering. Raises `InvalidConfig` for a seed out of range.
    """
    check_int("words.seed", seed, 0, 2**32 - 1)
    span = WORDS_VOCABULARY - RESERVED_IDS

    def encode_ids(text: str) -> list[int]:
        return [
            RESERVED_IDS + zlib.crc32(piece.encode("utf-8", "surrogatepass"), seed) % span
            for piece in PIECE.findall(text)
        ]

    return Tokenizer("words", WORDS_VOCABULARY, BOS_ID, encode_ids)
