"""Requests that wait for the pull of another one: they share its prefix, and would compute what is on its way. Owns who
waits for whom and how long; moves nothing.

A hot prefix comes with several requests at once. The first takes the KV over; those that follow it closely find the
prefix neither cached nor being computed here, though their router counts on it. So they wait for what they share of it,
at most as long as computing that would take, by the time that the pull itself is worth: where a request shares a few
tokens only, it waits next to no time. No socket, no clock; not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .messages import GenerationRequest, PullFrom


class Leader(NamedTuple):
    """A pull that is under way, of the first `pull.tokens` tokens of a prompt; `cached_tokens` of them are here."""

    number: int
    pull: PullFrom
    token_ids: npt.NDArray[np.int32]
    namespace: Hashable
    cached_tokens: int


@dataclass(slots=True)
class Follower:
    """A request that waits until `wanted_tokens` of its prompt are here."""

    engine_id: str
    request: GenerationRequest
    leader: int
    wanted_tokens: int
    arrived_at: float
    deadline: float


class KvFollowers:
    """See the module. At most `most` requests wait."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[str, Follower] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def due(self) -> float:
        """When the next of them has waited long enough; infinite where none waits."""
        return min((one.deadline for one in self._waiting.values()), default=math.inf)

    def join(self, engine_id: str, request: GenerationRequest, leaders: Iterable[Leader], now: float) -> bool:
        """Let a request wait for the pull that brings it most; False where none brings what it lacks. One that has a
        pull of its own waits only for what brings all of that. O(pulls x its tokens)."""
        if len(self._waiting) >= self._most:
            return False
        least = 1 if request.pull is None else _own_tokens(request)
        best: tuple[int, Leader] | None = None
        for leader in leaders:
            shared = _shared_tokens(request, leader)
            if shared >= least and shared > leader.cached_tokens and (best is None or shared > best[0]):
                best = shared, leader
        if best is None:
            return False
        shared, leader = best
        worth_seconds = leader.pull.wait_us * 1e-6 * min(shared / leader.pull.tokens, 1.0)
        if request.pull is not None:
            worth_seconds = request.pull.wait_us * 1e-6
        self._waiting[engine_id] = Follower(engine_id, request, leader.number, shared, now, now + worth_seconds)
        return True

    def progressed(self, leader: int, cached_tokens: int) -> list[Follower]:
        """Those who have what they wait for now that so many tokens are here; they wait no more."""
        return self._leave(lambda one: one.leader == leader and one.wanted_tokens <= cached_tokens)

    def ended(self, leader: int) -> list[Follower]:
        """Those who wait for a pull that is over, whatever it has brought; they wait no more."""
        return self._leave(lambda one: one.leader == leader)

    def able_alone(self, leader: int, now: float) -> list[Follower]:
        """Those who wait for a pull that is over before it has brought what it might, and have one of their own that is
        still worth while, the longest first: it brings what the others lack. They wait no more."""
        found = self._leave(lambda one: one.leader == leader and one.request.pull is not None and one.deadline > now)
        return sorted(found, key=lambda one: _own_tokens(one.request), reverse=True)

    def expired(self, now: float) -> list[Follower]:
        """Those who have waited long enough; they wait no more."""
        return self._leave(lambda one: one.deadline <= now)

    def cancelled(self, engine_id: str) -> list[Follower]:
        """The one of that id, if it waits; it waits no more."""
        return self._leave(lambda one: one.engine_id == engine_id)

    def _leave(self, goes: Callable[[Follower], bool]) -> list[Follower]:
        found = [one for one in self._waiting.values() if goes(one)]
        for one in found:
            del self._waiting[one.engine_id]
        return found


def _own_tokens(request: GenerationRequest) -> int:
    """Leading tokens that a request's own pull brings."""
    return 0 if request.pull is None else min(request.pull.tokens, len(request.token_ids) - 1)


def _shared_tokens(request: GenerationRequest, leader: Leader) -> int:
    """Leading tokens that a request shares with what a pull brings; its last token is computed in any case."""
    if request.namespace != leader.namespace:
        return 0
    count = min(len(request.token_ids) - 1, leader.pull.tokens, len(leader.token_ids))
    differ = np.nonzero(request.token_ids[:count] != leader.token_ids[:count])[0]
    return int(differ[0]) if len(differ) else count
