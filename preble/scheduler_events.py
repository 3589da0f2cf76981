"""Cache events as the scheduler takes them: which go to the index of blocks, which to the tree. Applies none itself."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from .types import PrefixStored


def runs_of(events: Iterable[Any]) -> Iterable[tuple[bool, Iterable[Any]]]:
    """Cut events where those about stored prefixes begin and end; the usual lot has none and stays whole."""
    if type(events) in (list, tuple) and PrefixStored not in map(type, events):
        return ((False, events),)
    return groupby(events, _is_prefix_stored)


def _is_prefix_stored(event: object) -> bool:
    return isinstance(event, PrefixStored)
