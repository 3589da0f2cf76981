"""State that some policies need kept: of live requests' blocks, of what was placed, of recent history, of sessions.
Owns them, and when they are changed; the default policy needs none.

A scheduler opens the trackers its policy names in `needs`. It reports every booking and ending to them under the
writers' lock, and asks them, before a decision, for what the policy shall know (`preble/policies/known.py`). Each
tracker holds what it holds of a worker under that worker's id and forgets it with the worker.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._core.dict_keys import find_key
from .._cost import CostModel
from .._placement.decision import Decision
from .._radix import RadixTree
from ..config import SchedulerConfig
from ..costs.thresholds import imbalance_share
from ..errors import InvalidConfig
from ..policies.base import RequestView
from ..policies.known import ActiveBlocks, PaperHistory, PromptSession, WindowCosts, hashed
from .observer import RequestObserver

BLOCK_TOKENS = 16
BLOCK_BYTES = 4 * BLOCK_TOKENS


def token_bytes(token_ids: Any) -> bytes:
    """Token ids that are known to be valid, as 4 bytes each."""
    return np.asarray(token_ids).astype("<i4", copy=False).tobytes()


@dataclass(frozen=True, slots=True)
class Question:
    """What a tracker may look at to say what a policy shall know."""

    token_ids: Any
    namespace: Hashable
    now: float
    tree: RadixTree
    window_seconds: float  # of the tree's hits

    def match(self) -> tuple[int, dict[int, int]]:
        """(tokens in the tree, {worker index: tokens cached}). Raises InvalidTokens, so it comes before the ids are
        read."""
        return self.tree.match(self.token_ids, namespace=self.namespace)


class PolicyTracker:
    """Base of the trackers: each overrides what concerns it."""

    config = SchedulerConfig()

    def opened(self, worker: str, index: int, cost: CostModel) -> None:
        """A worker has joined."""

    def closed(self, worker: str) -> None:
        """A worker has left; its requests may still end."""

    def known(self, question: Question) -> Any:
        """What the policy shall know of every worker. Changes no answer to come."""

    def booked(self, key: Hashable, decision: Decision, asked: RequestView, now: float) -> None:
        """A request has been placed."""

    def prefilled(self, key: Hashable) -> None:
        """A live request's first token is there; reported again, nothing changes."""

    def ended(self, key: Hashable, output_tokens: int | None) -> None:
        """A live request is over, with or without a first token."""

    def check(self, live: Collection[Hashable]) -> None:
        """Assert the invariants."""

    def stats(self) -> dict[str, int]:
        """Sizes and counters."""
        return {}


class PlacedRequests(PolicyTracker):
    """How many requests each worker was ever given."""

    def __init__(self) -> None:
        self._placed: dict[str, int] = {}

    def opened(self, worker: str, index: int, cost: CostModel) -> None:
        self._placed[worker] = 0

    def closed(self, worker: str) -> None:
        del self._placed[worker]

    def known(self, question: Question) -> Mapping[str, int]:
        return dict(self._placed)

    def booked(self, key: Hashable, decision: Decision, asked: RequestView, now: float) -> None:
        self._placed[decision.worker] += 1


@dataclass(slots=True, eq=False)
class _Active:
    """A worker's live requests: their prompts' whole blocks in order, how many of these differ, tokens to prefill.

    The longest beginning that a prompt shares with any other is the one it shares with a neighbour in that order, so
    the blocks that it adds, or takes along when it goes, are found without a look at the others.
    """

    prompts: dict[Hashable, list[bytes]] = field(default_factory=dict)  # by key of the namespace; none is empty
    blocks: int = 0
    prefill_tokens: int = 0

    def new_blocks(self, namespace: Hashable, prompt: bytes) -> int:
        """How many of a prompt's blocks no live request has. O(blocks + log requests)."""
        order = self.prompts.get(find_key(self.prompts, namespace), [])
        place, shared = bisect_left(order, prompt), 0
        for neighbour in order[max(place - 1, 0) : place + 1]:
            shared = common_blocks(prompt, neighbour, shared)
        return len(prompt) // BLOCK_BYTES - shared

    def add(self, space: Hashable, prompt: bytes) -> None:
        """A request in the namespace of this key is live."""
        self.blocks += self.new_blocks(space, prompt)
        insort(self.prompts.setdefault(space, []), prompt)

    def remove(self, space: Hashable, prompt: bytes) -> None:
        """A request in the namespace of this key is over."""
        order = self.prompts[space]
        del order[bisect_left(order, prompt)]
        if not order:
            del self.prompts[space]
        self.blocks -= self.new_blocks(space, prompt)


def common_blocks(one: bytes, other: bytes, least: int) -> int:
    """How many whole blocks two prompts begin with alike, or `least` if that is more."""
    most = min(len(one), len(other)) // BLOCK_BYTES
    if least >= most or not other.startswith(one[: (least + 1) * BLOCK_BYTES]):
        return least
    while least < most:
        middle = (least + most + 1) // 2
        if other.startswith(one[: middle * BLOCK_BYTES]):
            least = middle
        else:
            most = middle - 1
    return least


class ActiveBlockTracker(PolicyTracker):
    """The different blocks of the prompts of each worker's live requests."""

    def __init__(self) -> None:
        self._workers: dict[str, _Active] = {}
        # Of each live request: on whom, its namespace's key there, its whole blocks (None: not counted yet), its tokens
        # that are yet to prefill.
        self._live: dict[Hashable, tuple[_Active, Hashable, bytes | None, int]] = {}

    def opened(self, worker: str, index: int, cost: CostModel) -> None:
        self._workers[worker] = _Active()

    def closed(self, worker: str) -> None:
        del self._workers[worker]

    def known(self, question: Question) -> ActiveBlocks:
        question.match()
        whole = len(question.token_ids) // BLOCK_TOKENS * BLOCK_BYTES
        prompt, workers = token_bytes(question.token_ids)[:whole], self._workers.items()
        return ActiveBlocks(
            prompt=prompt,
            prefill_tokens={name: active.prefill_tokens for name, active in workers},
            blocks={name: active.blocks for name, active in workers},
            new_blocks={name: active.new_blocks(question.namespace, prompt) for name, active in workers},
        )

    def booked(self, key: Hashable, decision: Decision, asked: RequestView, now: float) -> None:
        blocks: ActiveBlocks = asked.known["active_blocks"]
        active, missed = self._workers[decision.worker], decision.prompt_tokens - decision.matched_tokens
        self._live[key] = active, None, None, 0
        space = find_key(active.prompts, asked.namespace)  # what users' code does is done by now, perhaps this request
        if key in self._live:
            active.add(space, blocks.prompt)
            active.prefill_tokens += missed
            self._live[key] = active, space, blocks.prompt, missed

    def prefilled(self, key: Hashable) -> None:
        if key in self._live:
            active, namespace, prompt, missed = self._live[key]
            active.prefill_tokens -= missed
            self._live[key] = active, namespace, prompt, 0

    def ended(self, key: Hashable, output_tokens: int | None) -> None:
        if key in self._live:
            active, space, prompt, missed = self._live.pop(key)
            active.prefill_tokens -= missed
            if prompt is not None:
                active.remove(space, prompt)

    def check(self, live: Collection[Hashable]) -> None:
        assert self._live.keys() <= set(live), "blocks of requests that are over"
        for name, active in self._workers.items():
            own = [(one[1], one[2] or b"", one[3]) for one in self._live.values() if one[0] is active]
            ends = {(space, prompt[:end]) for space, prompt, _ in own for end in range(64, len(prompt) + 1, 64)}
            assert active.blocks == len(ends), f"worker {name!r}: {active.blocks} blocks booked, {len(ends)} there"
            assert active.prefill_tokens == sum(missed for _, _, missed in own), f"worker {name!r}: tokens to prefill"
            assert sum(map(len, active.prompts.values())) == len(own), f"worker {name!r}: prompts"

    def stats(self) -> dict[str, int]:
        return {"requests": len(self._live), "blocks": sum(active.blocks for active in self._workers.values())}


@dataclass(slots=True, eq=False)
class _Prompt:
    """One prompt within AIBrix's window: how often it came, the cost of each time, and who served it."""

    nanoseconds: int
    count: int = 0
    workers: set[str] = field(default_factory=set)


class WindowCostTracker(PolicyTracker):
    """AIBrix's histogram: prompts of the last three minutes and what they cost the workers that served them.

    Beyond `requests_max` requests within the window the oldest leave early, and are counted.
    """

    window_seconds = 180.0
    decode_nanoseconds = round(45 * 0.15e9)  # of one prompt, however often it came
    requests_max = 1 << 18

    def __init__(self) -> None:
        self._cost: dict[str, CostModel] = {}
        self._nanoseconds: dict[str, int] = {}
        self._requests: dict[str, int] = {}
        self._prompts: dict[Hashable, _Prompt] = {}  # by key of (namespace, prompt)
        self._window: deque[tuple[float, Hashable]] = deque()
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
        while self._window and self._window[0][0] <= question.now - self.window_seconds:
            self._drop_oldest()
        seconds = {name: nanoseconds * 1e-9 for name, nanoseconds in self._nanoseconds.items()}
        return WindowCosts(question.match()[0], seconds, dict(self._requests))

    def booked(self, key: Hashable, decision: Decision, asked: RequestView, now: float) -> None:
        one = find_key(self._prompts, (asked.namespace, token_bytes(asked.token_ids)))
        prompt = self._prompts.get(one)
        if prompt is None:
            prompt = self._prompts[one] = self._priced(decision, asked)
        self._charge(prompt, +1)
        if decision.worker not in prompt.workers:
            prompt.workers.add(decision.worker)
            self._nanoseconds[decision.worker] += self.decode_nanoseconds + prompt.count * prompt.nanoseconds
            self._requests[decision.worker] += prompt.count
        self._window.append((now, one))
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
    imbalance_share: float
    routed: deque[_Routed] = field(default_factory=deque)
    prefill_nanoseconds: int = 0
    finished: int = 0
    output_tokens: int = 0


class PaperHistoryTracker(PolicyTracker):
    """The history H of the paper's Algorithm 2, counted in requests of each worker, and its M, from the tree."""

    requests_max = 500  # H: the paper gives no number
    unknown_output_tokens = 45.0

    def __init__(self) -> None:
        self._workers: dict[str, _History] = {}
        self._live: dict[Hashable, _Routed] = {}

    def opened(self, worker: str, index: int, cost: CostModel) -> None:
        self._workers[worker] = _History(index, cost, self.config.imbalance_share or imbalance_share(cost))

    def closed(self, worker: str) -> None:
        del self._workers[worker]

    def known(self, question: Question) -> PaperHistory:
        workers = self._workers
        matched, held = question.match()
        end = longest_node_end(question.tree.path(question.token_ids, namespace=question.namespace)) if matched else 0
        fleet = self._mean_output(workers.values(), self.unknown_output_tokens)
        output = {name: one.cost.decode_time(self._mean_output((one,), fleet)) for name, one in workers.items()}
        return PaperHistory(
            known_tokens=matched,
            holders=frozenset(name for name, one in workers.items() if end and held.get(one.index, 0) >= end),
            prefill_seconds={name: one.prefill_nanoseconds * 1e-9 for name, one in workers.items()},
            output_seconds=output,
            decode_seconds={name: len(one.routed) * output[name] for name, one in workers.items()},
            imbalance_shares={name: one.imbalance_share for name, one in workers.items()},
            eviction_seconds=self._eviction_of(question),
        )

    def _mean_output(self, workers: Iterable[_History], unknown: float) -> float:
        finished = output = 0
        for one in workers:
            finished += one.finished
            output += one.output_tokens
        return output / finished if finished else unknown

    def _eviction_of(self, question: Question) -> Callable[[str], float]:
        """M, asked for only where it counts: PT_j * N_j of what the worker would evict for the prompt's length."""

        prompt_tokens = len(question.token_ids)

        def eviction_seconds(worker: str) -> float:
            one = self._workers[worker]
            return sum(
                hits * one.cost.prefill_time(tokens, before + tokens)
                for tokens, before, hits in question.tree.victims(one.index, prompt_tokens, question.now)
            )

        return eviction_seconds

    def booked(self, key: Hashable, decision: Decision, asked: RequestView, now: float) -> None:
        one = self._workers[decision.worker]
        missed = decision.prompt_tokens - decision.matched_tokens
        routed = _Routed(round(one.cost.prefill_time(missed, decision.prompt_tokens) * 1e9), one)
        one.routed.append(routed)
        one.prefill_nanoseconds += routed.prefill_nanoseconds
        self._live[key] = routed
        if len(one.routed) > self.requests_max:
            oldest = one.routed.popleft()
            oldest.in_history = False
            one.prefill_nanoseconds -= oldest.prefill_nanoseconds
            if oldest.output_tokens >= 0:
                one.finished -= 1
                one.output_tokens -= oldest.output_tokens

    def ended(self, key: Hashable, output_tokens: int | None) -> None:
        routed = self._live.pop(key, None)
        if routed is not None and routed.in_history and output_tokens is not None:
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


class SessionTracker(PolicyTracker):
    """Which session a prompt is of (`known.PromptSession`), and where that was last.

    Beyond `sessions_max` sessions the one that was silent longest is forgotten. Beyond `requests_max` requests within
    the window more beginnings count as common.
    """

    own_tokens = 64  # after the common beginning
    sessions_max = 1 << 16
    requests_max = 1 << 18

    def __init__(self) -> None:
        self._homes: OrderedDict[int, str] = OrderedDict()  # in the order in which they were last used
        self._workers: set[str] = set()
        self._times: deque[float] = deque(maxlen=self.requests_max)  # of the window's bookings

    def opened(self, worker: str, index: int, cost: CostModel) -> None:
        self._workers.add(worker)

    def closed(self, worker: str) -> None:
        self._workers.remove(worker)
        for key in [key for key, home in self._homes.items() if home == worker]:
            del self._homes[key]

    def known(self, question: Question) -> PromptSession:
        common = self._common_tokens(question, question.tree.path(question.token_ids, namespace=question.namespace))
        beginning = token_bytes(question.token_ids[: common + self.own_tokens])
        key = hashed(repr(question.namespace).encode() + beginning)
        return PromptSession(key, self._homes.get(key))

    def _common_tokens(self, question: Question, ends: list[int]) -> int:
        """Where the longest common beginning ends, of nodes on the prompt's path. O(tokens) for each node that as many
        requests had."""
        while self._times and self._times[0] <= question.now - question.window_seconds:
            self._times.popleft()
        enough = 1 + len(self._times) / max(len(self._workers), 1)
        common, end, hits = 0, 0, 0.0
        for below in ends:
            hits_below = question.tree.hits(question.token_ids[:below], question.now, namespace=question.namespace)
            if hits - hits_below > enough:
                common = end
            end, hits = below, hits_below
            if hits <= enough:
                return common
        return end

    def booked(self, key: Hashable, decision: Decision, asked: RequestView, now: float) -> None:
        session = asked.known["session"].key
        self._times.append(now)
        self._homes[session] = decision.worker
        self._homes.move_to_end(session)
        if len(self._homes) > self.sessions_max:
            self._homes.popitem(last=False)

    def check(self, live: Collection[Hashable]) -> None:
        strange = set(self._homes.values()) - self._workers
        assert not strange, f"sessions on workers that have left: {strange}"
        assert len(self._homes) <= self.sessions_max

    def stats(self) -> dict[str, int]:
        return {"sessions": len(self._homes), "requests": len(self._times)}


def longest_node_end(ends: list[int]) -> int:
    """Of nodes that lie one after the other and end there: where the longest ends, the deepest of equals."""
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return max(zip(lengths, ends, strict=True))[1]


TRACKERS: Mapping[str, type[PolicyTracker]] = {
    "active_blocks": ActiveBlockTracker,
    "placed_requests": PlacedRequests,
    "paper_history": PaperHistoryTracker,
    "session": SessionTracker,
    "window_costs": WindowCostTracker,
}


class PolicyState(RequestObserver):
    """The trackers of one scheduler. All calls come under its writers' lock. Raises InvalidConfig for an
    unknown need."""

    def __init__(self, needs: Iterable[str], tree: RadixTree, config: SchedulerConfig) -> None:
        strange = [need for need in needs if need not in TRACKERS]
        if strange:
            raise InvalidConfig(f"policy needs must be of {', '.join(TRACKERS)}, got {', '.join(map(repr, strange))}")
        self._tree, self._window_seconds = tree, config.history_seconds
        self._trackers = {need: TRACKERS[need]() for need in needs}
        for tracker in self._trackers.values():
            tracker.config = config

    def opened(self, worker: str, index: int, cost: CostModel) -> None:
        """A worker has joined."""
        for tracker in self._trackers.values():
            tracker.opened(worker, index, cost)

    def closed(self, worker: str) -> None:
        """A worker has left."""
        for tracker in self._trackers.values():
            tracker.closed(worker)

    def known(self, token_ids: Any, namespace: Hashable, now: float) -> dict[str, Any]:
        """What the trackers say to this request, by need. Raises InvalidTokens, InvalidInput."""
        question = Question(token_ids, namespace, now, self._tree, self._window_seconds)
        return {need: tracker.known(question) for need, tracker in self._trackers.items()}

    def on_decision(self, key: Hashable, decision: Decision, before: RequestView, now: float) -> None:
        for tracker in self._trackers.values():
            tracker.booked(key, decision, before, now)

    def on_first_token(self, key: Hashable, now: float, cached_tokens: int | None) -> None:
        for tracker in self._trackers.values():
            tracker.prefilled(key)

    def on_finish(self, key: Hashable, now: float, cached_tokens: int | None, output_tokens: int | None) -> None:
        for tracker in self._trackers.values():
            tracker.ended(key, output_tokens)

    def on_cancel(self, key: Hashable, now: float) -> None:
        for tracker in self._trackers.values():
            tracker.ended(key, None)

    def check(self, live: Collection[Hashable]) -> None:
        """Assert the invariants of all; `live` has the ids of all live requests."""
        for tracker in self._trackers.values():
            tracker.check(live)

    def stats(self) -> dict[str, dict[str, int]]:
        """Sizes and counters of each tracker."""
        return {need: tracker.stats() for need, tracker in self._trackers.items()}
