"""KV that simulated workers take over from each other. Owns the links, which transfer is on which, and the requests
that wait for one; whether a request pulls is the scheduler's to say, as for real workers (`scheduling/pulls`).

    placed -> pull_for -> the link is free -> the source's KV of that moment on its way -> taken over between two
    iterations -> pull_ended -> the request is queued

A worker's link carries one transfer at a time, in the order in which they were asked for. Engines stand still while
they copy. A request waits no longer than its pull is worth, and takes what has come by then. Those that share its
prefix wait with it (`transport/kv_followers.py`). Who dies hands over nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..scheduler import GlobalScheduler
from ..scheduling.pulls.link_times import Transfer
from ..transport.kv_followers import Follower, KvFollowers, Leader
from ..transport.messages import GenerationRequest, PullFrom
from ..types import PullCost
from ..workloads.types import Int32Array
from .config import KvLink
from .timeline import Timeline
from .worker import SimWorker

LAYOUT = "simulated"
FOLLOWERS_MAX = 1 << 20


@dataclass(slots=True, eq=False)
class _Held:
    """A request that waits for a pull, its own or another's."""

    scheduler: GlobalScheduler
    request: GenerationRequest
    target: SimWorker
    asked_at: float
    submit: Callable[[], None]


@dataclass(slots=True, eq=False)
class _Moving:
    """A transfer, from when it was asked for."""

    held: _Held
    cost: PullCost
    source: SimWorker
    deadline: float
    number: int
    tokens: int = 0  # what has come, from the prompt's start


class SimLinks:
    """See the module. `workers`: those that are there, by name."""

    def __init__(self, link: KvLink, timeline: Timeline, workers: Mapping[str, SimWorker]) -> None:
        self._link = link
        self._timeline = timeline
        self._workers = workers
        self._free_at: dict[str, float] = {}  # when a worker's link is
        self._leaders: dict[str, dict[int, Leader]] = {}  # by worker that takes over
        self._followers: dict[str, KvFollowers] = {}
        self._held: dict[str, _Held] = {}
        self._numbers = 0

    def introduce(self, scheduler: GlobalScheduler, worker: str) -> None:
        """Report that a worker can move KV."""
        scheduler.can_move_kv(worker, LAYOUT, self._link.token_bytes)

    def holds(
        self,
        scheduler: GlobalScheduler,
        request_id: str,
        token_ids: Int32Array,
        target: SimWorker,
        submit: Callable[[], None],
    ) -> bool:
        """Whether a request that was just placed waits for KV; then `submit` is called when it need not any more."""
        cost, now = self._pull_of(scheduler, request_id, token_ids), self._timeline.now
        leaders = self._leaders.get(target.name)
        if cost is None and not leaders:
            return False
        worth_seconds = 0.0
        pull = None
        if cost is not None:
            worth_seconds = cost.worth_seconds
            pull = PullFrom("", 0, cost.tokens, max(1, int(worth_seconds * 1e6)))
        held = _Held(scheduler, GenerationRequest(request_id, token_ids, pull=pull), target, now, submit)
        followers = self._followers.setdefault(target.name, KvFollowers(FOLLOWERS_MAX))
        if leaders and followers.join(request_id, held.request, leaders.values(), now):
            self._held[request_id] = held
            self._look_again(target.name)
            return True
        source = None if cost is None else self._workers.get(cost.source)
        if cost is None or source is None:
            return False
        self._held[request_id] = held
        self._start(_Moving(held, cost, source, now + worth_seconds, self._numbers))
        self._numbers += 1
        return True

    def _pull_of(self, scheduler: GlobalScheduler, request_id: str, token_ids: Int32Array) -> PullCost | None:
        return scheduler.pull_for(request_id, token_ids, least_tokens=self._link.least_tokens)

    # --- a transfer ---------------------------------------------------------------------------------------------------

    def _start(self, moving: _Moving) -> None:
        """It begins when both links are free, and not after it is of no use."""
        now, target = self._timeline.now, moving.held.target.name
        begin = max(now, *(self._free_at.get(name, 0.0) for name in (moving.source.name, target)))
        pull = moving.held.request.pull
        assert pull is not None
        leader = Leader(moving.number, pull, moving.held.request.token_ids, None, 0)
        self._leaders.setdefault(target, {})[moving.number] = leader
        if begin >= moving.deadline:
            self._timeline.at(moving.deadline, self._arrive, moving)
            return
        for name in (moving.source.name, target):
            self._free_at[name] = begin + moving.cost.moved_bytes / self._link.bytes_per_second
        self._timeline.at(begin, self._send, moving)

    def _send(self, moving: _Moving) -> None:
        """The source hands over what it caches now."""
        link, now, tokens = self._link, self._timeline.now, moving.held.request.token_ids[: moving.cost.tokens]
        own = moving.held.target.cached_tokens(tokens)
        missing = max(moving.source.cached_tokens(tokens) - own, 0)
        seconds = missing * link.token_bytes / link.bytes_per_second
        left = moving.deadline - now - link.latency_seconds
        come = missing if not missing or seconds <= left else int(missing * max(left, 0.0) / seconds)
        moving.tokens = own + come
        moving.source.hold_up(come * link.token_bytes * link.copy_byte_seconds)
        self._timeline.at(min(now + link.latency_seconds + seconds, moving.deadline), self._arrive, moving)

    def _arrive(self, moving: _Moving) -> None:
        """What has come is taken over between two iterations."""
        if not moving.tokens:
            self._end(moving, 0, 0)
            return
        target, tokens = moving.held.target, moving.held.request.token_ids[: moving.tokens]
        token_seconds = self._link.token_bytes * self._link.copy_byte_seconds
        target.take_over(tokens, token_seconds, lambda known, cached: self._end(moving, known, cached))

    def _end(self, moving: _Moving, known_tokens: int, cached_tokens: int) -> None:
        """It is over: `cached_tokens` are there, `known_tokens` of which were before."""
        held, cost = moving.held, moving.cost
        self._leaders.get(held.target.name, {}).pop(moving.number, None)  # forgotten, if its worker has died
        if self._held.get(held.request.request_id) is held:
            del self._held[held.request.request_id]
            moved = max(cached_tokens - known_tokens, 0)
            copied = moved * self._link.token_bytes * self._link.copy_byte_seconds
            seconds = self._timeline.now - held.asked_at
            transfer = Transfer(cost.moved_tokens, moved, moved * self._link.token_bytes, seconds, copied, copied)
            held.scheduler.pull_ended(held.request.request_id, cached_tokens, cost.source, transfer)
            self._timeline.at(self._timeline.now, _call, held.submit)
        if (followers := self._followers.get(held.target.name)) is not None:
            self._let_go(followers.ended(moving.number), cached_tokens)

    def forget(self, worker: str) -> None:
        """A worker's death is noticed: nobody waits there any more. Whoever did is placed anew by others."""
        self._leaders.pop(worker, None)
        self._followers.pop(worker, None)
        for request_id in [name for name, held in self._held.items() if held.target.name == worker]:
            del self._held[request_id]

    def _expire(self, worker: str) -> None:
        if (followers := self._followers.get(worker)) is not None:
            self._let_go(followers.expired(self._timeline.now), 0)
            self._look_again(worker)

    def _look_again(self, worker: str) -> None:
        """When the next of those who wait has waited long enough."""
        due = self._followers[worker].due
        if due < math.inf:
            self._timeline.at(max(self._timeline.now, due), self._expire, worker)

    def _let_go(self, followers: list[Follower], cached_tokens: int) -> None:
        for one in followers:
            held = self._held.pop(one.engine_id, None)
            if held is not None:
                held.scheduler.pull_ended(one.engine_id, min(cached_tokens, one.wanted_tokens))
                self._timeline.at(self._timeline.now, _call, held.submit)


def _call(action: Callable[[], None]) -> None:
    action()
