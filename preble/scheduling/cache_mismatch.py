"""What is structurally wrong between what a worker's engine reports as cached and what was sent there, in words. Owns
the comparison and the warnings; what was received and how often it agreed is counted in `_kv_index/cache_accuracy.pyx`.

Estimates that never meet the engine's cache cost every hit and raise no error anywhere: the router templates prompts
otherwise than the engine, or salts them, or splits them into other blocks. Each tick asks which workers have gone too
long without reporting a single prompt to its end (O(workers), nothing else while all is well), and says once per worker
and cause what differs, at which position. A mismatch is over once a prompt is reported to its end again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from ..errors import CacheMismatchWarning
from ..lazy_typing import TYPE_CHECKING, Any, dataclass, field

if TYPE_CHECKING:
    from .._kv_index.block_index import Beyond
    from .._kv_index.cache_accuracy import CacheAccuracy

SHOWN_TOKENS = 512  # of two prompts, from where they differ
LOOKED_TOKENS = 256  # of these, for where both go on alike
ALIKE_TOKENS = 16  # so many are no chance
UNLIKE_RUNS_MIN = 32  # as many as prompts: fewer may be others', while ours are reported late

ALIKE = "prompts are not stored as they were sent: they differ {where}; {how} there, and both go on alike: "
UNLIKE = (
    "no prompt was reported as stored to its end; the nearest blocks differ {where}, and nothing alike follows within "
    "{looked} tokens, so why is not known (another tokenizer would look so, and other clients' prompts would while "
    "these are not reported)"
)
CAUSES = {
    "extra_token": ALIKE + "one side adds a BOS token or a system prompt, or begins its chat template otherwise",
    "first_token": ALIKE + "another BOS token, or a chat template that begins otherwise",
    "first_block": ALIKE + "what stands there is rendered otherwise (chat template, system prompt, date, white space)",
    "tokens": ALIKE + "what stands there is rendered otherwise (chat template, date, tool calls, white space)",
    "block_size": "the engine's blocks have {found} tokens, WorkerSpec.block_size says {expected}: set it to {found}",
    "namespace": "the engine stored the same first {position} tokens in namespace {stored}, but requests are "
    "scheduled in {scheduled}: schedule with the same LoRA, cache salt or namespace, or map it with namespace_of",
    "unknown": "no prompt was reported as stored to its end; prompts or blocks have been forgotten meanwhile, so what "
    "differs cannot be said",
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

    def as_dict(self) -> dict[str, Any]:
        """Its fields, plain values all."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class CacheMismatches:
    """Of one worker: which mismatches hold now, and which causes have been warned of."""

    holds: tuple[Mismatch, ...] = ()
    warned: set[str] = field(default_factory=set)

    def stats(self) -> dict[str, Any]:
        return {"cache_mismatches": [mismatch.as_dict() for mismatch in self.holds]}

    def state(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """All of it as plain values, for snapshots."""
        return tuple(tuple(mismatch.as_dict().values()) for mismatch in self.holds), tuple(sorted(self.warned))

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


def look(accuracy: CacheAccuracy, workers: Iterable[Any], lock: Any) -> list[Mismatch]:
    """Compare what the suspect workers stored with what was sent there; returns what is new. O(workers) where all is
    well; a suspect costs some milliseconds until what it differs in is found, and holds the lock for a part of that.

    `workers`: the scheduler's, with spec, index, blocks and cache_mismatches.
    """
    news = []
    with lock:
        suspects = set(accuracy.suspects())
        known = list(workers) if suspects else [worker for worker in workers if worker.cache_mismatches.holds]
    for worker in known:
        found = mismatches(worker, accuracy, lock) if worker.index in suspects else []
        with lock:
            news += worker.cache_mismatches.update(found)
    return news


def mismatches(worker: Any, accuracy: CacheAccuracy, lock: Any) -> list[Mismatch]:
    """What is wrong with a suspect worker, in the order in which it should be mended."""
    name, block_size, index, found = worker.spec.id, worker.spec.block_size, worker.index, []
    with lock:
        odd_size = worker.blocks.odd_size if accuracy.is_odd(index) else 0
        is_apart, runs, misses = accuracy.is_apart(index), accuracy.apart_runs(index), accuracy.misses(index)
        before = [one for one in worker.cache_mismatches.holds if one.cause not in ("block_size", "reports")]
        pairs = worker.blocks.parted(SHOWN_TOKENS) if is_apart and not before else ()
    if odd_size:
        found.append(_mismatch(name, "block_size", found=odd_size, expected=block_size))
    if is_apart:
        found += before or apart(name, pairs, odd_size or block_size, runs)
    if misses:
        found.append(_mismatch(name, "reports"))
    return found


def apart(name: str, pairs: Sequence[tuple[int, Beyond, Beyond]], block_size: int, runs: int) -> list[Mismatch]:
    """Where what an engine stored leaves the prompts that were sent to it, and what that looks like; nothing where one
    of them is stored after all, or where they may not have been reported yet.

    `pairs`: see `BlockIndex.parted`; `runs`: of blocks, since a prompt was last reported to its end.
    """
    if not pairs:
        return [_mismatch(name, "unknown")]
    here = sorted((pair for pair in pairs if pair[1][0] == pair[2][0]), key=lambda pair: -pair[0])
    if any(at >= end - end % block_size for at, (_, end, _), _ in here):
        return []
    here = [pair for pair in here if pair[2][2]]
    for at, (_, _, sent), (_, _, stored) in here:
        passed = rejoined(sent[:LOOKED_TOKENS], stored[:LOOKED_TOKENS])
        if passed is not None:
            return [_difference(name, at, sent, stored, passed, block_size)]
    for _, (space, end, sent), (other, _, stored) in pairs:
        alike = common_tokens(sent, stored)
        if space != other and alike >= min(end - end % block_size, len(sent), len(stored)):
            return [_mismatch(name, "namespace", position=alike, stored=_space(other), scheduled=_space(space))]
    if runs < UNLIKE_RUNS_MIN:
        return []
    at, (_, _, sent), (_, _, stored) = (here or pairs)[0]
    alike = common_tokens(sent, stored)
    return [_difference(name, at + alike, sent[alike:], stored[alike:], None, block_size)]


def rejoined(sent: Sequence[int], stored: Sequence[int]) -> tuple[int, int] | None:
    """How many tokens of each, which begin differently, are passed over before both go on alike, for ALIKE_TOKENS or to
    the end of one; None if they do not."""
    count = min(ALIKE_TOKENS, min(len(sent), len(stored)) // 2)
    places: dict[tuple[int, ...], int] = {}
    if count < ALIKE_TOKENS // 4:
        return None
    for j in range(len(stored) - count + 1):
        places.setdefault(tuple(stored[j : j + count]), j)
    found = ((i, places.get(tuple(sent[i : i + count]))) for i in range(len(sent) - count + 1))
    alike = ((i, j) for i, j in found if j is not None and _goes_on(sent[i:], stored[j:]))
    return min(alike, key=sum, default=None)


def _goes_on(one: Sequence[int], other: Sequence[int]) -> bool:
    return common_tokens(one, other) >= min(ALIKE_TOKENS, len(one), len(other))


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two lists begin with alike."""
    count = min(len(one), len(other))
    return next((i for i in range(count) if one[i] != other[i]), count)


def warn(news: Iterable[Mismatch]) -> None:
    """Report new mismatches as warnings. Python's registry of what was reported, which only grows, is left out of it:
    the scheduler itself reports each once."""
    for mismatch in news:
        warnings.warn_explicit(
            mismatch.message, CacheMismatchWarning, "preble.scheduling.cache_mismatch", 0, registry=None
        )


def _difference(
    name: str, at: int, sent: Sequence[int], stored: Sequence[int], passed: tuple[int, int] | None, block_size: int
) -> Mismatch:
    """Two that differ from position `at` on, and go on alike once `passed` tokens of each are passed over."""
    cause = "first_token" if at == 0 else "first_block" if at < block_size else "tokens"
    if passed is not None and at == 0 == min(passed):
        cause = "extra_token"
    what, where = CAUSES[cause] if passed is not None else UNLIKE, f"after {at} tokens" if at else "at once"
    message = what.format(where=where, how=_how(*(passed or (0, 0))), looked=LOOKED_TOKENS)
    scheduled, other = sent[0] if sent else None, stored[0] if stored else None
    message += f". First difference at token {at}: scheduled {_name(scheduled)}, stored {_name(other)}"
    return Mismatch(name, cause, f"worker {name!r}: {message}.", at, scheduled, other)


def _how(sent: int, stored: int) -> str:
    if sent == 0:
        return f"the engine has {stored} more token(s)"
    return f"the engine lacks {sent} token(s)" if stored == 0 else f"{sent} scheduled token(s) are {stored} other(s)"


def _mismatch(name: str, cause: str, **state: Any) -> Mismatch:
    return Mismatch(name, cause, f"worker {name!r}: {CAUSES[cause].format(**state)}.")


def _space(namespace: Any) -> str:
    """A namespace for logs: what kind it is of, and a LoRA's name; nothing that keeps tenants apart."""
    if namespace is None:
        return "None"
    if isinstance(namespace, tuple) and len(namespace) == 2 and namespace[0] in ("lora", "salt"):
        return repr(namespace) if namespace[0] == "lora" else "('salt', ...)"
    if isinstance(namespace, tuple) and all(isinstance(part, tuple) for part in namespace):
        return f"({', '.join(map(_space, namespace))})"
    return f"<{type(namespace).__name__}>"


def _name(token: int | None) -> str:
    return "nothing" if token is None else str(token)
