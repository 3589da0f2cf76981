"""The bookings of requests that two workers serve: which belong together, and that none outlives the other. Owns that
table, and of a scheduler's workers who prefills or decodes only.

    schedule_pair     request_id books the decode's worker, ("prefill half", n) the prefill's
    prefill_done      ends the half on the prefill's worker
    first_token       the KV has come to the decode's worker
    finish, cancel, lease_seconds, reconcile, remove_worker + cancel
                      end request_id, and with it what is left of the other half

Looks on at requests as a policy's state does, in front of that of a policy that has one; so it costs those nothing
whose workers all do both. Bounded by the live requests.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable

from ..._core.dict_keys import key_value
from ..._cost import CostModel
from ..._placement.bookings import DecisionCore
from ..._placement.decision import Decision
from ..._placement.pairs.halves import decode_began, decode_to_begin, give_back_half
from ...lazy_typing import TYPE_CHECKING, Any
from ...types import DECODE, PREFILL, Role, WorkerSpec
from ..observer import RequestObserver
from ..pulls.link_times import LinkTimes
from .handovers import HandOvers

if TYPE_CHECKING:
    from ..policy_state import PolicyState

GUESSED_TOKEN_BYTES = 131_072  # of KV, where no worker says: Llama-3-8B, 16 bit
_MARK = "prefill half"


def is_half(request_id: Hashable) -> bool:
    """Whether a live request is the prefill half of another."""
    return type(request_id) is tuple and len(request_id) == 2 and request_id[0] == _MARK


def with_role(core: DecisionCore, state: Any, spec: WorkerSpec, now: float) -> PairHalves:
    """A policy's state (None: the policy needs none) that looks on at pairs as well, and knows a worker's role. Before
    the first such worker no pair was booked; but a scheduler that was restored has the bookings of another one's."""
    found = state if isinstance(state, PairHalves) else PairHalves(core, state)
    if found is not state:
        give_back_strays(core, now)
    found.roles[spec.id] = spec.role
    return found


def give_back_strays(core: DecisionCore, now: float) -> None:
    """Give back the prefill halves that a snapshot's bookings have: nobody knows any more which requests they are of.
    O(live requests)."""
    for key in [key for key in core.leases if is_half(key)]:
        give_back_half(core, key, now)


class PairHalves(RequestObserver):
    """See the module. Called under the writers' lock; each call O(1) but for those about workers."""

    def __init__(self, core: DecisionCore, state: PolicyState | None) -> None:
        self.core = core
        self.state = state
        self.roles: dict[str, str] = {}  # of those that do not do both
        self.hand_overs = HandOvers()  # of our pairs
        self.links = LinkTimes()  # where no worker says what it can move, and nothing is measured
        self.guessed_token_bytes = GUESSED_TOKEN_BYTES
        self.placed = 0
        self.separated = 0  # of these
        self._halves: dict[Hashable, Hashable] = {}  # key of a live request -> id of its prefill half, which is live
        self._owners: dict[Hashable, Hashable] = {}
        self._begins: set[Hashable] = set()  # keys of those whose decode has not begun
        self._only_prefilled: set[Hashable] = set()  # keys of other routers' prefill halves
        self._numbers = 0

    # --- halves -------------------------------------------------------------------------------------------------------

    def new_id(self) -> tuple[str, int]:
        """The id of a prefill half that is to be booked."""
        self._numbers += 1
        return (_MARK, self._numbers)

    def new_request_id(self) -> str:
        """For a request without an id."""
        while self.core.live_key(made := f"pair-{self._numbers}") is not None:
            self._numbers += 1
        return made

    def booked(self, key: Hashable, half: Hashable, worker: str, moved_tokens: int) -> None:
        """Both halves of a request are booked, that of the decode on `worker`, which is to get so much KV."""
        self._halves[key] = half
        self._owners[half] = key
        self._begins.add(key)
        self.hand_overs.booked(key, worker, moved_tokens)
        self.separated += 1

    def placed_by_peer(self, key: Hashable, worker: str, half: Role | None, now: float) -> None:
        """Another router's request is booked, all of it or a `half`: where it is only decoded none of it waits to be
        prefilled. What a worker with one role has is a half."""
        done_there = self.roles.get(worker, half)
        if done_there == DECODE:
            decode_to_begin(self.core, key, now)
            self._begins.add(key)
        elif done_there == PREFILL:
            self._only_prefilled.add(key)

    def is_only_prefilled(self, key: Hashable) -> bool:
        """Whether a live request of another router's is a prefill half, whose one token is no answer's length."""
        return key in self._only_prefilled

    def half_of(self, key: Hashable) -> Hashable | None:
        """The id of a live request's prefill half, if that is live."""
        return self._halves.get(key)

    def owners_of(self, request_ids: Iterable[Hashable]) -> list[Hashable]:
        """Live requests, each once and in order: instead of a prefill half the request it is of."""
        return list(dict.fromkeys(key_value(self._owners.get(one, one)) for one in request_ids))

    def _ended(self, key: Hashable, now: float) -> None:
        self._begins.discard(key)
        self.hand_overs.ended(key)
        self._only_prefilled.discard(key)
        half = self._halves.pop(key, None)
        if half is not None:
            del self._owners[half]
            if give_back_half(self.core, half, now) and self.state is not None:
                self.state.on_cancel(half, now)
            return
        owner = self._owners.pop(key, None)
        if owner is not None:
            del self._halves[owner]
            self.hand_overs.prefilled(owner, now)

    # --- what it looks on at ------------------------------------------------------------------------------------------

    def on_decision(self, key: Hashable, decision: Decision, before: Any, now: float) -> None:
        if self.state is not None:
            self.state.on_decision(key, decision, before, now)

    def on_first_token(self, key: Hashable, now: float, cached_tokens: int | None) -> None:
        if key in self._begins:
            self._begins.discard(key)
            self.hand_overs.ended(key)
            decode_began(self.core, key, now)
        if self.state is not None:
            self.state.on_first_token(key, now, cached_tokens)

    def on_finish(self, key: Hashable, now: float, cached_tokens: int | None, output_tokens: int | None) -> None:
        self._ended(key, now)
        if self.state is not None:
            self.state.on_finish(key, now, cached_tokens, output_tokens)

    def on_cancel(self, key: Hashable, now: float) -> None:
        self._ended(key, now)
        if self.state is not None:
            self.state.on_cancel(key, now)

    # --- as a policy's state ------------------------------------------------------------------------------------------

    def opened(self, worker: str, index: int, cost: CostModel) -> None:
        """A worker has joined."""
        if self.state is not None:
            self.state.opened(worker, index, cost)

    def closed(self, worker: str) -> None:
        """A worker has left."""
        self.roles.pop(worker, None)
        self.hand_overs.closed(worker)
        if self.state is not None:
            self.state.closed(worker)

    def known(self, token_ids: Any, namespace: Hashable, now: float) -> dict[str, Any]:
        """What a policy shall know of a request."""
        return {} if self.state is None else self.state.known(token_ids, namespace, now)

    def check(self, live: Collection[Hashable]) -> None:
        """Assert that every half is live, and its request as well. O(halves)."""
        assert len(self._halves) == len(self._owners), "a prefill half has no request, or two"
        for key, half in self._halves.items():
            assert self._owners[half] == key, f"the prefill half {half} is of another request"
            assert key in live, f"the prefill half {half} has outlived its request"
            assert half in live, f"the prefill half {half} is over, and is kept"
        assert self._begins <= set(live), "a decode is to begin whose request is over"
        self.hand_overs.check(self._begins)
        assert self._only_prefilled <= set(live), "another router's prefill half is over, and is kept"
        strays = [key for key in live if is_half(key) and key not in self._owners]
        assert not strays, f"prefill halves of nobody: {strays}"
        if self.state is not None:
            self.state.check(live)

    def stats(self) -> dict[str, Any]:
        """Sizes and counts, beside those of a policy's state."""
        found: dict[str, Any] = {} if self.state is None else dict(self.state.stats())
        found["pairs"] = {"live": len(self._halves), "placed": self.placed, "separated": self.separated}
        return found
