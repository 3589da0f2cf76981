"""Books that some policies need kept: of live requests' blocks, of what was placed, of recent history. Owns them, and
when they are changed; the default policy needs none.

A scheduler opens the books its policy names in `needs`. It tells them of every booking and ending under the writers'
lock, and asks them, before a decision, for what the policy shall know (`preble/policies/known.py`). Each book holds
what it holds of a worker under that worker's id and forgets it with the worker.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ._answers import Decision
from ._cost import CostModel
from ._radix import RadixTree
from .errors import InvalidConfig
from .policies.known import ActiveBlocks, PaperHistory, WindowCosts
from .policy import RequestView

BLOCK_TOKENS = 16
UInt64Array = npt.NDArray[np.uint64]

_chances = np.random.default_rng(16)
_WEIGHTS = _chances.integers(1, 2**64, BLOCK_TOKENS, dtype=np.uint64) | np.uint64(1)
_STRIDE, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def block_keys(token_ids: Any, namespace: Hashable) -> list[int]:
    """A 64-bit key for each whole block of 16 tokens, which tells that block and all before it. Two prompts with a key
    in common have, but for a chance of 2**-64, all tokens up to there in common."""
    tokens = np.asarray(token_ids)
    whole = len(tokens) // BLOCK_TOKENS
    blocks = tokens[: whole * BLOCK_TOKENS].astype(np.uint64).reshape(whole, BLOCK_TOKENS) @ _WEIGHTS
    blocks += np.arange(whole, dtype=np.uint64) * _STRIDE + np.uint64(hash(namespace) % 2**64)
    blocks ^= blocks >> np.uint64(30)
    blocks *= _FIRST
    blocks ^= blocks >> np.uint64(27)
    blocks *= _SECOND
    blocks ^= blocks >> np.uint64(31)
    keys: list[int] = np.cumsum(blocks, dtype=np.uint64).tolist()
    return keys


@dataclass(frozen=True, slots=True)
class Question:
    """What a book may look at to say what a policy shall know. `matched`, `held`: tokens in the tree, the latter by
    worker index."""

    token_ids: Any
    namespace: Hashable
    now: float
    matched: int
    held: Mapping[int, int]


class Book:
    """Base of the books: whoever keeps one overrides what concerns it."""

    def __init__(self, tree: RadixTree) -> None:
        self.tree = tree

    def opened(self, worker: str, index: int, cost: CostModel) -> None:
        """A worker has joined."""

    def closed(self, worker: str) -> None:
        """A worker has left; its requests may still end."""

    def known(self, question: Question) -> Any:
        """What the policy shall know of every worker. Changes no answer to come."""

    def booked(self, decision: Decision, asked: RequestView, now: float) -> None:
        """A request has been placed."""

    def prefilled(self, request_id: Hashable) -> None:
        """A live request's first token is there; told again, nothing changes."""

    def ended(self, request_id: Hashable, output_tokens: int) -> None:
        """A live request is over, with or without a first token; `output_tokens` is -1 where nobody said."""

    def check(self, live: Collection[Hashable]) -> None:
        """Assert the invariants."""

    def stats(self) -> dict[str, int]:
        """Sizes and counters."""
        return {}


class PlacedRequests(Book):
    """How many requests each worker was ever given."""

    def __init__(self, tree: RadixTree) -> None:
        super().__init__(tree)
        self._placed: dict[str, int] = {}

    def opened(self, worker: str, index: int, cost: CostModel) -> None:
        self._placed[worker] = 0

    def closed(self, worker: str) -> None:
        del self._placed[worker]

    def known(self, question: Question) -> Mapping[str, int]:
        return self._placed

    def booked(self, decision: Decision, asked: RequestView, now: float) -> None:
        self._placed[decision.worker] += 1


@dataclass(slots=True, eq=False)
class _Active:
    """A worker's live requests: how many of them hold each block, and the tokens they have yet to prefill."""

    counts: Counter[int] = field(default_factory=Counter)
    prefill_tokens: int = 0


class ActiveBlockBook(Book):
    """The different blocks of the prompts of each worker's live requests. O(blocks of the prompt) an event."""

    def __init__(self, tree: RadixTree) -> None:
        super().__init__(tree)
        self._workers: dict[str, _Active] = {}
        self._live: dict[Hashable, tuple[_Active, list[int], int]] = {}  # whose, its blocks, tokens to prefill

    def opened(self, worker: str, index: int, cost: CostModel) -> None:
        self._workers[worker] = _Active()

    def closed(self, worker: str) -> None:
        del self._workers[worker]

    def known(self, question: Question) -> ActiveBlocks:
        keys = block_keys(question.token_ids, question.namespace)
        return ActiveBlocks(
            keys=keys,
            prefill_tokens={name: active.prefill_tokens for name, active in self._workers.items()},
            blocks={name: len(active.counts) for name, active in self._workers.items()},
            new_blocks={name: len(keys) - leading(keys, active.counts) for name, active in self._workers.items()},
        )

    def booked(self, decision: Decision, asked: RequestView, now: float) -> None:
        active, keys = self._workers[decision.worker], asked.known["active_blocks"].keys
        missed = decision.prompt_tokens - decision.matched_tokens
        active.counts.update(keys)
        active.prefill_tokens += missed
        self._live[decision.request_id] = active, keys, missed

    def prefilled(self, request_id: Hashable) -> None:
        if request_id in self._live:
            active, keys, missed = self._live[request_id]
            active.prefill_tokens -= missed
            self._live[request_id] = active, keys, 0

    def ended(self, request_id: Hashable, output_tokens: int) -> None:
        if request_id not in self._live:
            return
        active, keys, missed = self._live.pop(request_id)
        active.prefill_tokens -= missed
        counts = active.counts
        for key in keys:
            if counts[key] == 1:
                del counts[key]
            else:
                counts[key] -= 1

    def check(self, live: Collection[Hashable]) -> None:
        assert self._live.keys() <= set(live), "blocks of requests that are over"
        for name, active in self._workers.items():
            own = [(keys, missed) for whose, keys, missed in self._live.values() if whose is active]
            counts = Counter(key for keys, _ in own for key in keys)
            assert active.counts == counts, f"worker {name!r}: blocks are miscounted"
            assert active.prefill_tokens == sum(missed for _, missed in own), f"worker {name!r}: tokens to prefill"

    def stats(self) -> dict[str, int]:
        return {"requests": len(self._live), "blocks": sum(len(active.counts) for active in self._workers.values())}


def leading(keys: list[int], among: Mapping[int, int]) -> int:
    """How many of the first keys are `among` those given. A key is only there if all before it are."""
    return bisect_left(keys, True, key=lambda key: key not in among)


@dataclass(slots=True, eq=False)
class _Prompt:
    """One prompt within AIBrix's window: how often it came, the cost of each time, and who served it."""

    nanoseconds: int
    count: int = 0
    workers: set[str] = field(default_factory=set)


class WindowCostBook(Book):
    """AIBrix's histogram: prompts of the last three minutes and what they cost the workers that served them.

    Beyond `requests_max` requests within the window the oldest leave early, and are counted.
    """

    window_seconds = 180.0
    decode_nanoseconds = round(45 * 0.15e9)  # of one prompt, however often it came
    requests_max = 1 << 18

    def __init__(self, tree: RadixTree) -> None:
        super().__init__(tree)
        self._cost: dict[str, CostModel] = {}
        self._nanoseconds: dict[str, int] = {}
        self._requests: dict[str, int] = {}
        self._prompts: dict[tuple[Hashable, bytes], _Prompt] = {}
        self._window: deque[tuple[float, tuple[Hashable, bytes]]] = deque()
        self.dropped = 0

    def opened(self, worker: str, index: int, cost: CostModel) -> None:
        self._cost[worker] = cost
        self._nanoseconds[worker] = self._requests[worker] = 0

    def closed(self, worker: str) -> None:
        for column in (self._cost, self._nanoseconds, self._requests):
            del column[worker]
        for prompt in self._prompts.values():
            prompt.workers.discard(worker)

    def known(self, question: Question) -> WindowCosts:
        self._forget(question.now - self.window_seconds)
        seconds = {name: nanoseconds * 1e-9 for name, nanoseconds in self._nanoseconds.items()}
        return WindowCosts(question.matched, seconds, dict(self._requests))

    def booked(self, decision: Decision, asked: RequestView, now: float) -> None:
        key = (asked.namespace, np.asarray(asked.token_ids).astype("<i4", copy=False).tobytes())
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = self._priced(decision, asked)
        self._charge(prompt, +1)
        if decision.worker not in prompt.workers:
            prompt.workers.add(decision.worker)
            self._nanoseconds[decision.worker] += self.decode_nanoseconds + prompt.count * prompt.nanoseconds
            self._requests[decision.worker] += prompt.count
        self._window.append((now, key))
        if len(self._window) > self.requests_max:
            self._drop_oldest()
            self.dropped += 1

    def _priced(self, decision: Decision, asked: RequestView) -> _Prompt:
        """A new prompt. Its own tokens, at least one, are those that the tree did not know; they are what it misses."""
        own = max(decision.prompt_tokens - asked.known["window_costs"].known_tokens, 1)
        seconds = self._cost[decision.worker].prefill_time(own, decision.prompt_tokens)
        return _Prompt(round(own / decision.prompt_tokens * seconds * 1e9))

    def _charge(self, prompt: _Prompt, times: int) -> None:
        """The prompt came once more, or once less, for all that served it."""
        prompt.count += times
        for worker in prompt.workers:
            self._nanoseconds[worker] += times * prompt.nanoseconds
            self._requests[worker] += times

    def _forget(self, before: float) -> None:
        while self._window and self._window[0][0] <= before:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, key = self._window.popleft()
        prompt = self._prompts[key]
        self._charge(prompt, -1)
        if prompt.count == 0:
            for worker in prompt.workers:
                self._nanoseconds[worker] -= self.decode_nanoseconds
            del self._prompts[key]

    def check(self, live: Collection[Hashable]) -> None:
        assert sum(prompt.count for prompt in self._prompts.values()) == len(self._window)
        for name in self._cost:
            own = [prompt for prompt in self._prompts.values() if name in prompt.workers]
            cost = sum(prompt.count * prompt.nanoseconds + self.decode_nanoseconds for prompt in own)
            assert self._nanoseconds[name] == cost, f"worker {name!r}: costs of the window"
            assert self._requests[name] == sum(prompt.count for prompt in own), f"worker {name!r}: requests"

    def stats(self) -> dict[str, int]:
        return {"requests": len(self._window), "prompts": len(self._prompts), "dropped": self.dropped}


@dataclass(slots=True, eq=False)
class _Routed:
    """One request in a worker's history; `output_tokens` is -1 until it has finished."""

    prefill_nanoseconds: int
    whose: _History
    output_tokens: int = -1
    in_history: bool = True


@dataclass(slots=True, eq=False)
class _History:
    """The last H requests routed to a worker, and their sums."""

    index: int
    cost: CostModel
    routed: deque[_Routed] = field(default_factory=deque)
    prefill_nanoseconds: int = 0
    finished: int = 0
    output_tokens: int = 0


class PaperHistoryBook(Book):
    """The history H of the paper's Algorithm 2, counted in requests of each worker, and its M, from the tree."""

    requests_max = 500  # H: the paper gives no number
    unknown_output_tokens = 45.0

    def __init__(self, tree: RadixTree) -> None:
        super().__init__(tree)
        self._workers: dict[str, _History] = {}
        self._live: dict[Hashable, _Routed] = {}

    def opened(self, worker: str, index: int, cost: CostModel) -> None:
        self._workers[worker] = _History(index, cost)

    def closed(self, worker: str) -> None:
        del self._workers[worker]

    def known(self, question: Question) -> PaperHistory:
        workers = self._workers
        end = self._longest_node_end(question)
        fleet = self._mean_output(workers.values(), self.unknown_output_tokens)
        return PaperHistory(
            known_tokens=question.matched,
            holders=frozenset(name for name, one in workers.items() if end and question.held.get(one.index, 0) >= end),
            prefill_seconds={name: one.prefill_nanoseconds * 1e-9 for name, one in workers.items()},
            decode_seconds={
                name: len(one.routed) * one.cost.decode_time(self._mean_output((one,), fleet)) if one.routed else 0.0
                for name, one in workers.items()
            },
            eviction_seconds=self._eviction_of(len(question.token_ids), question.now),
        )

    def _longest_node_end(self, question: Question) -> int:
        """Where the node with the most tokens on the known path ends, the deepest of equals; 0 if nothing is known."""
        ends = self.tree.path(question.token_ids, namespace=question.namespace) if question.matched else []
        lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return max(zip(lengths, ends, strict=True), default=(0, 0))[1]

    def _mean_output(self, workers: Iterable[_History], unknown: float) -> float:
        finished = output = 0
        for one in workers:
            finished += one.finished
            output += one.output_tokens
        return output / finished if finished else unknown

    def _eviction_of(self, prompt_tokens: int, now: float) -> Callable[[str], float]:
        """M, asked for only where it counts: PT_j * N_j of what the worker would evict for the prompt's length."""

        def eviction_seconds(worker: str) -> float:
            one = self._workers[worker]
            return sum(
                hits * one.cost.prefill_time(tokens, before + tokens)
                for tokens, before, hits in self.tree.victims(one.index, prompt_tokens, now)
            )

        return eviction_seconds

    def booked(self, decision: Decision, asked: RequestView, now: float) -> None:
        one = self._workers[decision.worker]
        missed = decision.prompt_tokens - decision.matched_tokens
        routed = _Routed(round(one.cost.prefill_time(missed, decision.prompt_tokens) * 1e9), one)
        one.routed.append(routed)
        one.prefill_nanoseconds += routed.prefill_nanoseconds
        self._live[decision.request_id] = routed
        if len(one.routed) > self.requests_max:
            oldest = one.routed.popleft()
            oldest.in_history = False
            one.prefill_nanoseconds -= oldest.prefill_nanoseconds
            if oldest.output_tokens >= 0:
                one.finished -= 1
                one.output_tokens -= oldest.output_tokens

    def ended(self, request_id: Hashable, output_tokens: int) -> None:
        routed = self._live.pop(request_id, None)
        if routed is not None and routed.in_history and output_tokens >= 0:
            routed.output_tokens = output_tokens
            routed.whose.finished += 1
            routed.whose.output_tokens += output_tokens

    def check(self, live: Collection[Hashable]) -> None:
        assert self._live.keys() <= set(live), "histories of requests that are over"
        for name, one in self._workers.items():
            ended = [routed.output_tokens for routed in one.routed if routed.output_tokens >= 0]
            assert (one.finished, one.output_tokens) == (len(ended), sum(ended)), f"worker {name!r}: outputs"
            assert one.prefill_nanoseconds == sum(routed.prefill_nanoseconds for routed in one.routed)
            assert len(one.routed) <= self.requests_max

    def stats(self) -> dict[str, int]:
        return {"requests": len(self._live), "routed": sum(len(one.routed) for one in self._workers.values())}


BOOKS: Mapping[str, type[Book]] = {
    "active_blocks": ActiveBlockBook,
    "placed_requests": PlacedRequests,
    "paper_history": PaperHistoryBook,
    "window_costs": WindowCostBook,
}


class PolicyBooks:
    """The books of one scheduler. All calls come under its writers' lock. Raises InvalidConfig for an unknown need."""

    def __init__(self, needs: Iterable[str], tree: RadixTree) -> None:
        strange = [need for need in needs if need not in BOOKS]
        if strange:
            raise InvalidConfig(f"policy needs must be of {', '.join(BOOKS)}, got {', '.join(map(repr, strange))}")
        self._tree = tree
        self._books = {need: BOOKS[need](tree) for need in needs}

    def opened(self, worker: str, index: int, cost: CostModel) -> None:
        """A worker has joined."""
        for book in self._books.values():
            book.opened(worker, index, cost)

    def closed(self, worker: str) -> None:
        """A worker has left."""
        for book in self._books.values():
            book.closed(worker)

    def known(self, token_ids: Any, namespace: Hashable, now: float) -> dict[str, Any]:
        """What the books say to this request, by need. Raises InvalidTokens, InvalidInput."""
        question = Question(token_ids, namespace, now, *self._tree.match(token_ids, namespace=namespace))
        return {need: book.known(question) for need, book in self._books.items()}

    def booked(self, decision: Decision, asked: RequestView, now: float) -> None:
        """A request has been placed."""
        for book in self._books.values():
            book.booked(decision, asked, now)

    def told(self, request_id: Hashable, ended: bool, output_tokens: int) -> None:
        """A live request has its first token, or is over."""
        for book in self._books.values():
            if ended:
                book.ended(request_id, output_tokens)
            else:
                book.prefilled(request_id)

    def check(self, live: Collection[Hashable]) -> None:
        """Assert the invariants of all; `live` has the ids of all live requests."""
        for book in self._books.values():
            book.check(live)

    def stats(self) -> dict[str, dict[str, int]]:
        """Sizes and counters of each book."""
        return {need: book.stats() for need, book in self._books.items()}
