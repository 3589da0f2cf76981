"""Token ids for what is not text. Owns the one rule that turns an image, audio clip or video into a run of token ids.

The scheduler compares prompts token by token, so a multimodal part must look like tokens: equal content, equal run, and
otherwise different from the first token on. The ids lie above every real vocabulary.
"""

from __future__ import annotations

from array import array
from hashlib import shake_128

from .types import check_int

FIRST_CONTENT_ID = 1 << 30


def content_token_ids(content: bytes, count: int) -> array[int]:
    """`count` int32 token ids in [2**30, 2**31) that depend on every byte of `content` (or of its hash).

    Use the number of tokens that the model spends on the part, so that lengths, and thereby costs, are right.
    Raises TypeError if `content` is not bytes-like, InvalidConfig if `count` is not a positive int.
    """
    check_int("count", count, 1, 1 << 24)
    digest = array("I", shake_128(content).digest(4 * count))
    return array("i", [FIRST_CONTENT_ID | (word & (FIRST_CONTENT_ID - 1)) for word in digest])
