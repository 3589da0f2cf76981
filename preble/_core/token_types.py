"""What may be passed as token ids, for annotations and type checkers. Owns no conversion: that is `token_ids.pyx`.

A type checker accepts what `schedule` takes: a list or tuple of ints, and 1-D arrays of integers that are C-contiguous
(int32, uint32 or int64). It rejects text, bytes, lists of texts and arrays of floats. The number of dimensions, the
width of the integers and their range are looked at when the call is made, which raises `InvalidTokens`.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import numpy as np


@runtime_checkable
class TokenArray(Protocol):
    """An array of integers with `__array__`, as numpy's and torch's (on the CPU) have it. Read without a copy where it
    is int32 or uint32."""

    def __array__(self) -> np.ndarray[Any, np.dtype[np.integer[Any]]]:
        """The array as numpy's."""


if TYPE_CHECKING:
    TokenIds: TypeAlias = list[int] | tuple[int, ...] | array[int] | memoryview | TokenArray
else:
    TokenIds = list[int] | tuple[int, ...] | array | memoryview | TokenArray
