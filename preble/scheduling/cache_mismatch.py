"""What is structurally wrong between what a worker's engine reports as cached and what was sent there, in words. Owns
the comparison and the warnings; what was received and how often it agreed is counted in `_kv_index/cache_accuracy.pyx`.

Estimates that never meet the engine's cache cost every hit and raise no error anywhere: the router templates prompts
otherwise than the engine, or salts them, or splits them into other blocks. Each tick asks which workers have gone too
long without anything in common (O(workers), nothing else while all is well), and says once per worker and cause what
differs, at which position. A mismatch is over once they have something in common again.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import CacheMismatchWarning

if TYPE_CHECKING:
    from .._kv_index.block_index import BlockIndex
    from .._kv_index.cache_accuracy import CacheAccuracy

Head = tuple[Hashable, list[int]]  # namespace and first tokens of a prompt
EXTRA_TOKENS = (1, 2)  # tokens that one side may have put in front

CAUSES = {
    "block_size": "the engine's blocks have {found} tokens, WorkerSpec.block_size says {expected}: set it to {found}",
    "namespace": "the engine stored the same first {position} tokens in namespace {stored!r}, but requests are "
    "scheduled in {scheduled!r}: schedule with the same LoRA, cache salt or namespace, or map it with namespace_of",
    "extra_token": "they are alike but for {count} token(s) in front: one side adds a BOS token or begins its chat "
    "template otherwise",
    "first_token": "they differ at once: another BOS token, another chat template, or another tokenizer",
    "first_block": "they differ inside the first block: another chat template or system prompt, or another tokenizer",
    "tokens": "they differ after {position} tokens: another chat template, or another tokenizer",
    "unknown": "the prompts have been forgotten meanwhile, so what differs cannot be said",
    "reports": "it reports cached_tokens 0 where prefixes were known to be there: reports may be switched off (SGLang: "
    "--enable-cache-report), prefix caching too, or the engine changes prompts (template, salt, tokenizer)",
}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What a worker's engine and the prompts sent there differ in.

    `cause`: a key of CAUSES. `position`: index of the first token in which what the engine stored and the nearest
    scheduled prompt differ, None where they agree or nothing reports; `scheduled_token`, `stored_token`: what stands
    there, None beyond an end.
    """

    worker: str
    cause: str
    message: str
    position: int | None = None
    scheduled_token: int | None = None
    stored_token: int | None = None


@dataclass(slots=True)
class CacheMismatches:
    """Of one worker: which mismatches hold now, and which causes have been warned of."""

    holds: tuple[Mismatch, ...] = ()
    warned: set[str] = field(default_factory=set)

    def stats(self) -> dict[str, Any]:
        return {"cache_mismatches": [asdict(mismatch) for mismatch in self.holds]}

    def state(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """All of it as plain values, for snapshots."""
        return tuple(tuple(asdict(mismatch).values()) for mismatch in self.holds), tuple(sorted(self.warned))

    @classmethod
    def restored(cls, state: Any) -> CacheMismatches:
        """What `state` said. Raises ValueError or TypeError."""
        holds, warned = state
        if not set(warned) <= set(CAUSES):
            raise ValueError(f"causes {warned} are unknown")
        return cls(tuple(Mismatch(*values) for values in holds), set(warned))

    def update(self, found: Sequence[Mismatch]) -> list[Mismatch]:
        """Keep what holds now; returns what has not been warned of."""
        self.holds = tuple(found)
        news = [mismatch for mismatch in found if mismatch.cause not in self.warned]
        self.warned.update(mismatch.cause for mismatch in news)
        return news


def look(accuracy: CacheAccuracy, workers: Iterable[Any], lock: Any, scheduled: Any) -> list[Mismatch]:
    """Compare what the suspect workers stored with what was sent there; returns what is new. O(workers) where all is
    well; a suspect costs some milliseconds, once per cause, and holds the lock for a part of that.

    `workers`: the scheduler's, with spec, index, blocks and cache_mismatches. `scheduled`: reads prompts, given an
    index.
    """
    news = []
    with lock:
        suspects = set(accuracy.suspects())
        known = list(workers) if suspects else [worker for worker in workers if worker.cache_mismatches.holds]
    for worker in known:
        found = []
        with lock:
            if worker.index in suspects:
                found = mismatches(worker, accuracy, scheduled)
            news += worker.cache_mismatches.update(found)
    return news


def mismatches(worker: Any, accuracy: CacheAccuracy, scheduled: Any) -> list[Mismatch]:
    """What is wrong with a suspect worker, in the order in which it should be mended."""
    name, found = worker.spec.id, []
    odd = accuracy.is_odd(worker.index)
    if odd:
        found.append(_mismatch(name, "block_size", None, found=worker.blocks.odd_size, expected=worker.spec.block_size))
    if accuracy.is_apart(worker.index):
        before = [
            mismatch for mismatch in worker.cache_mismatches.holds if mismatch.cause not in ("block_size", "reports")
        ]
        found += before or [apart(name, worker.blocks, scheduled(worker.index), worker.spec.block_size)]
    if accuracy.misses(worker.index):
        found.append(_mismatch(name, "reports", None))
    return found


def apart(name: str, blocks: BlockIndex, prompts: Sequence[Head], block_size: int) -> Mismatch:
    """Where what an engine stored leaves the nearest prompt that was sent to it, and why probably."""
    nearest = nearest_pair(prompts, blocks.odd_prompts())
    if nearest is None:
        return _mismatch(name, "unknown", None)
    (space, sent), (other, stored), common = nearest
    if space != other and (common >= block_size or common == min(len(sent), len(stored))):
        return _mismatch(name, "namespace", None, position=common, stored=other, scheduled=space)
    at = (common, _at(sent, common), _at(stored, common))
    extra = extra_tokens(sent, stored) if common == 0 else 0
    if extra:
        return _mismatch(name, "extra_token", at, count=extra)
    cause = "first_token" if common == 0 else "first_block" if common < block_size else "tokens"
    return _mismatch(name, cause, at, position=common)


def nearest_pair(prompts: Sequence[Head], stored: Sequence[Head]) -> tuple[Head, Head, int] | None:
    """The prompt and the stored one with the longest common beginning, those that agree but for a few tokens in front
    before those that do not; None if there are none of either."""

    def closeness(pair: tuple[Head, Head, int]) -> tuple[int, bool, bool]:
        one, other, common = pair
        return common, not common and extra_tokens(one[1], other[1]) > 0, one[0] == other[0]

    pairs = ((one, other, common_tokens(one[1], other[1])) for one in prompts for other in stored)
    return max(pairs, key=closeness, default=None)


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two lists begin with alike."""
    count = min(len(one), len(other))
    return next((i for i in range(count) if one[i] != other[i]), count)


def extra_tokens(sent: Sequence[int], stored: Sequence[int]) -> int:
    """How many tokens one of them has in front of what both have then; 0 if that does not make them alike."""
    for extra in EXTRA_TOKENS:
        for one, other in ((sent[extra:], stored), (sent, stored[extra:])):
            least = min(len(one), len(other))
            if least >= 4 and common_tokens(one, other) >= min(least, 16):
                return extra
    return 0


def warn(news: Iterable[Mismatch]) -> None:
    """Report new mismatches as warnings. Python's registry of what was reported, which only grows, is left out of it:
    the scheduler itself reports each once."""
    for mismatch in news:
        warnings.warn_explicit(
            mismatch.message, CacheMismatchWarning, "preble.scheduling.cache_mismatch", 0, registry=None
        )


def _mismatch(name: str, cause: str, at: tuple[int, int | None, int | None] | None, **state: Any) -> Mismatch:
    head, where = f"worker {name!r}: ", ""
    if cause not in ("block_size", "reports"):
        head += "nothing that its engine stored begins like what was sent there; "
    if at is not None:
        where = f" First difference at token {at[0]}: scheduled {_name(at[1])}, stored {_name(at[2])}."
    message = head + CAUSES[cause].format(**state) + "." + where
    return Mismatch(name, cause, message, *(at or (None, None, None)))


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _name(token: int | None) -> str:
    return "nothing" if token is None else str(token)
