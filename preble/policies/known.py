"""What rules share: the types of what some must know beyond a request and the workers' columns, how an order becomes
scores, how chance breaks ties, and hashing. The scheduler's bookings fill the types in
(`preble/scheduling/policy_state.py`), for policies that name them in `needs`. Owns no rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any


@dataclass(frozen=True, slots=True)
class ActiveBlocks:
    """Need "active_blocks": blocks of the prompts of live requests; those that several share count once a worker.

    `prompt`: the request's whole blocks, 4 bytes a token. By worker id: `prefill_tokens`, uncached tokens of requests
    before their first token; `blocks`, different blocks; `new_blocks`, those that this request would add.
    """

    prompt: bytes
    prefill_tokens: Mapping[str, int]
    blocks: Mapping[str, int]
    new_blocks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WindowCosts:
    """Need "window_costs": what AIBrix's rule counts of a worker's last three minutes, by worker id, and how much of
    the prompt is in the tree."""

    known_tokens: int
    seconds: Mapping[str, float]
    requests: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PaperHistory:
    """Need "paper_history": what the paper's Algorithms 1 and 2 read.

    `known_tokens`: how much of the prompt is in the tree. `holders`: ids of workers that cache the longest node on that
    path. By worker id: `prefill_seconds` and `decode_seconds` of the last H requests; `output_seconds`, the decode time
    of a request of their mean length; `imbalance_shares`, IMBALR in [0, 1]; `eviction_seconds(id)` is M.
    """

    known_tokens: int
    holders: frozenset[str]
    prefill_seconds: Mapping[str, float]
    decode_seconds: Mapping[str, float]
    output_seconds: Mapping[str, float]
    imbalance_shares: Mapping[str, float]
    eviction_seconds: Callable[[str], float]


@dataclass(frozen=True, slots=True)
class PromptSession:
    """Need "session": which session a request is of, as its prompt shows it; no session id reaches a scheduler.

    A beginning of a prompt is common where more requests of the window than one worker's fair share, and one more, had
    it and then went on differently: a system prompt, a document that everybody asks about. `key` is a hash of the
    prompt up to the end of its longest common beginning and the 64 tokens after that, the same in every process that
    has seen the same requests. What goes on from there is one session: turns of a conversation, an agent's calls,
    questions about one of many documents. It is another one once the end of what is common has moved.

    `home`: the id of the worker that took the session's latest request; None where none is remembered.
    """

    key: int
    home: str | None


def hashed(content: bytes) -> int:
    """64 bits, the same in every process."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def by_rendezvous(key: int, ids: Sequence[str]) -> list[int]:
    """The positions of the workers in the order in which they get what has this key: by a hash of both. Where a worker
    leaves, those behind it move up, and no others."""
    return sorted(range(len(ids)), key=lambda i: hashed(f"{key}:{ids[i]}".encode()))


def ranks(keys: Sequence[Any]) -> list[float]:
    """One score a worker from one sort key a worker: 0 for the smallest key, equal for equal keys."""
    order = {key: float(rank) for rank, key in enumerate(sorted(set(keys)))}
    return [order[key] for key in keys]


def drawn_least(scores: Sequence[float], draw: float) -> int:
    """The position of the lowest score; `draw`, in [0, 1), decides among equals."""
    least = min(scores)
    equal = [i for i, score in enumerate(scores) if score == least]
    return equal[int(draw * len(equal))]
