"""How a request is placed where workers have roles: on one that does both, or on a pair. Owns the comparison and what
is booked of it; prices are `price.py`'s, bookings that belong together `halves.py`'s.

E2 compares the cheapest worker that does both with the cheapest pair, under the writers' lock, and books what wins; the
one worker is then E2's own choice. Another policy knows no price of a pair. There every request has one: the policy
chooses among those that prefill only, and then among those that decode and can take over KV from the chosen one.

A deadline is kept where a prompt is prefilled: nobody prefills it who would do so too late (`tenants`), and who decodes
may have as much to do as it will. A tenant is charged for both halves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from ..._core.dict_keys import find_key
from ..._placement.decision import unit_draw
from ..._placement.pairs.halves import book_half, give_back_half, half_terms
from ..._placement.request_api import hashable, names_session, output_limit, policy_name, request_id_of
from ..._snapshot.accounts import cost_at
from ...lazy_typing import TYPE_CHECKING, Any, dataclass, replace
from ...policies.base import RequestView
from ...types import BATCH, BOTH, DECODE, PREFILL, Claim, Explanation, PairDecision, SessionHint
from ..charges import service_of
from .explaining import explained, pair_cost
from .halves import PairHalves
from .price import HalfTerms, PairChoice, Ways, room_price, transfer_price, ways_of

if TYPE_CHECKING:
    from typing import Protocol

    from ..._placement.bookings import DecisionCore
    from ..._placement.decision import Decision
    from ...policies.base import Policy
    from ..pulls.price import KvMoves
    from ..recording import Recorder
    from ..tenants import Tenants

    class PairBooking(Protocol):
        """What is asked of a scheduler, under its lock."""

        @property
        def core(self) -> DecisionCore:
            """Where it is booked."""

        @property
        def schedule(self) -> Callable[..., Decision]:
            """Choose one worker and book."""

        @property
        def explain(self) -> Callable[..., Explanation]:
            """What that would choose."""

        def now(self) -> float:
            """Seconds."""

        def _note_decision(self, reason: str) -> int:
            """Count a decision; its number."""


REASON = "pair"
NOBODY: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class AskedPair:
    """A request to be placed, its arguments checked; see `GlobalScheduler.schedule_pair`. Raises `InvalidInput`."""

    token_ids: Any
    request_id: Hashable
    namespace: Hashable
    max_new_tokens: int | None
    exclude: Sequence[str]
    session: SessionHint | None
    claim: Claim | None = None
    group: Hashable = None

    def __post_init__(self) -> None:
        hashable("namespace", self.namespace)
        hashable("group", self.group)
        hashable("request_id", self.request_id)
        output_limit(self.max_new_tokens)
        if self.session is not None:
            names_session(self.session)


@dataclass(frozen=True, slots=True)
class PairWorld:
    """What a decision is made with, beside the scheduler: who has which role, what KV can move, the policy (None: E2),
    workers that take nothing new, each worker's room for KV, who keeps records, and the accounts of tenants, made when
    they are needed."""

    pairs: PairHalves
    moves: KvMoves | None
    policy: Policy | None
    draining: Collection[str]
    kv_capacity_tokens: Mapping[str, int]
    recorder: Recorder | None
    accounts: Callable[[], Tenants]


def place_pair(scheduler: PairBooking, world: PairWorld | None, asked: AskedPair) -> PairDecision:
    """Choose and book, under the writers' lock; with no `world` all workers do both. Raises as `schedule`; then nothing
    has changed."""
    if world is None:
        return on_one(scheduler, asked)
    found = PairPlacing(scheduler, world).place(asked)
    world.pairs.placed += 1
    return found


def explain_pair(scheduler: PairBooking, world: PairWorld | None, asked: AskedPair) -> Explanation:
    """What `place_pair` would choose, and why, under the writers' lock. Raises as that, changes nothing."""
    if world is None:
        return explain_one(scheduler, asked)
    return PairPlacing(scheduler, world).explain(asked)


def on_one(scheduler: PairBooking, asked: AskedPair, *prices: float) -> PairDecision:
    """Place a request on one worker; who is late there, `schedule` finds. Raises as that."""
    claim = asked.claim
    asks: dict[str, Any] = {"exclude": [*asked.exclude]} if asked.exclude else {}
    if asked.group is not None:
        asks["group"] = asked.group
    if claim is not None:
        asks |= {"tenant": claim.tenant, "deadline_seconds": claim.deadline_seconds, "priority": claim.priority}
    decision = scheduler.schedule(
        asked.token_ids,
        request_id=asked.request_id,
        namespace=asked.namespace,
        max_new_tokens=asked.max_new_tokens,
        session=asked.session,
        **asks,
    )
    found = (decision.request_id, decision.worker, decision.prompt_tokens, decision.matched_tokens, decision.reason)
    return PairDecision(*found, None, None, 0, 0.0, *prices)


def explain_one(scheduler: PairBooking, asked: AskedPair) -> Explanation:
    """What `schedule` would choose. Raises as that."""
    core = scheduler.core
    left_out = core.leave_out([*asked.exclude]) if asked.exclude else []
    try:
        return scheduler.explain(
            asked.token_ids,
            request_id=asked.request_id,
            namespace=asked.namespace,
            max_new_tokens=asked.max_new_tokens,
            session=asked.session,
        )
    finally:
        core.take_back(left_out)


class PairPlacing:
    """One decision; see the module and `place_pair`."""

    def __init__(self, scheduler: PairBooking, world: PairWorld) -> None:
        self._scheduler = scheduler
        self._core = scheduler.core
        self._world = world
        self._pairs = world.pairs
        self._moves = world.moves
        self._now = scheduler.now()
        self._waits: dict[int, float] = {}  # of those that may prefill, by row: until a first token, where it matters

    def place(self, asked: AskedPair) -> PairDecision:
        """Choose and book. Raises as `schedule`; then nothing has changed."""
        if asked.group is not None and BOTH in self._roles(asked).values():
            return on_one(self._scheduler, asked)
        priced = self._priced(asked)
        if priced is None:
            return on_one(self._scheduler, asked)
        late = NOBODY if asked.claim is None else self._late(asked.claim, priced[2])
        ways = ways_of(*priced, late, self._transfer)
        if self._world.policy is not None:
            return self._by_policy(self._world.policy, asked, ways)
        if ways.pair is None or ways.one_seconds <= ways.pair.seconds:
            prices = ways.one_seconds, float("inf") if ways.pair is None else ways.pair.seconds
            return on_one(self._scheduler, asked, *prices)
        return self._book(asked, ways, ways.pair)

    def explain(self, asked: AskedPair) -> Explanation:
        """What `place` would choose; of deadlines it knows nothing. Changes nothing."""
        priced = self._priced(asked)
        if priced is None:
            return explain_one(self._scheduler, asked)
        policy, ways = self._world.policy, ways_of(*priced, NOBODY, self._transfer)
        if policy is not None:
            pair: PairChoice | None = self._chosen_by(policy, asked, ways)[0]
        else:
            pair = ways.pair
        if pair is None or (policy is None and ways.one_seconds <= pair.seconds):
            found = explain_one(self._scheduler, asked)
            return found if pair is None else replace(found, pair=pair_cost(pair, ways.one_seconds, self._name))
        return explained(ways, pair, policy_name(policy), REASON, self._name, self._transfer)

    def _priced(self, asked: AskedPair) -> tuple[int, float, list[tuple[HalfTerms, str]]] | None:
        """(prompt tokens, seconds observed, terms and role of each worker that is there); None where no pair is
        possible for a policy that is not E2. Raises UnknownWorker, InvalidTokens."""
        roles = self._roles(asked)
        found = set(roles.values())
        if self._world.policy is not None and (PREFILL not in found or found == {PREFILL}):
            return None
        limit = output_limit(asked.max_new_tokens)
        of_session = asked.session is not None and names_session(asked.session)
        prompt, observed, rows = half_terms(
            self._core, asked.token_ids, asked.namespace, limit, [*roles], self._now, of_session
        )
        return prompt, observed, [(HalfTerms(*row), role) for row, role in zip(rows, roles.values(), strict=True)]

    def _roles(self, asked: AskedPair) -> dict[int, str]:
        """The role of each worker that may be chosen, by index. Raises UnknownWorker."""
        left_out = {self._core.index_of(name) for name in asked.exclude}
        names, draining = enumerate(self._core.names), self._world.draining
        there = {i: name for i, name in names if name is not None and name not in draining and i not in left_out}
        return {i: self._pairs.roles.get(str(name), BOTH) for i, name in there.items()}

    def _late(self, claim: Claim, priced: Sequence[tuple[HalfTerms, str]]) -> frozenset[int]:
        """Who would prefill it too late. Raises `Overloaded` where that is everybody."""
        if claim.deadline_seconds is None and claim.priority != BATCH:
            return NOBODY
        account, able = self._core.loads.account, [of for of, role in priced if role != DECODE]
        if not able:
            return NOBODY
        booked = {self._name(of): account(of.row)["waiting_prefill_seconds"] for of in able}
        own = {self._name(of): of.prefill + of.loading for of in able}
        late = self._world.accounts().admit(claim, booked, own)
        if claim.deadline_seconds is not None:
            self._waits = {of.row: booked[self._name(of)] + own[self._name(of)] for of in able}
        return frozenset(of.row for of in able if self._name(of) in late)

    def _name(self, of: HalfTerms) -> str:
        return str(self._core.names[of.row])

    def _can_move(self, one: HalfTerms, other: HalfTerms) -> bool:
        """Whether one worker can hand KV to another, as far as they say."""
        return self._moves is None or self._moves.are_alike(self._name(one), self._name(other))

    def _transfer(self, one: HalfTerms, other: HalfTerms, moved_tokens: int) -> float:
        """Seconds of a transfer, and for how long its KV waits for room; at least as many as somebody has been waiting
        for who was handed over before."""
        source, target, of = self._name(one), self._name(other), self._pairs.hand_overs
        if not self._can_move(one, other):
            return float("inf")
        links = self._pairs.links if self._moves is None else self._moves.links
        token_bytes = 0 if self._moves is None else self._moves.token_bytes(target)
        moved_bytes = float(moved_tokens * (token_bytes or self._pairs.guessed_token_bytes))
        price = transfer_price(moved_bytes, links.estimate(source, target, self._now, is_fast=True), one, other)
        if self._pairs.roles.get(source, BOTH) == BOTH:
            coming_tokens = of.coming_tokens(target) + moved_tokens
            price += room_price(other, coming_tokens, self._world.kv_capacity_tokens[target])
        return max(price, of.waiting_seconds(target, self._now))

    def _by_policy(self, policy: Policy, asked: AskedPair, ways: Ways) -> PairDecision:
        """The pair that a policy chooses; where those that prefill only are late, as if there were none."""
        chosen, seen = self._chosen_by(policy, asked, ways)
        return on_one(self._scheduler, asked) if chosen is None else self._book(asked, ways, chosen, seen)

    def _chosen_by(self, policy: Policy, asked: AskedPair, ways: Ways) -> tuple[PairChoice | None, RequestView]:
        """The pair that a policy chooses, None where nobody prefills only, or none that decodes can take over KV
        from the one that it chooses; and what it was given of the request."""
        views = self._views(asked)
        prefills = [of for of, role in ways.prefills if role == PREFILL]
        if not prefills:
            return None, views[1]
        one = prefills[policy.decide(views[0], self._core.view([of.row for of in prefills]))]
        decodes = [of for of in ways.decodes if self._can_move(one, of)]
        if not decodes:
            return None, views[1]
        other = decodes[policy.decide(views[1], self._core.view([of.row for of in decodes]))]
        return PairChoice(one, other, ways.prompt_tokens - other.usable_tokens, 0.0, float("inf")), views[1]

    def _views(self, asked: AskedPair) -> list[RequestView]:
        """A request as a policy sees it, for the half that prefills and for the one that decodes."""
        known = self._pairs.known(asked.token_ids, asked.namespace, self._now)
        turn, limit = self._pairs.separated, asked.max_new_tokens
        return [
            RequestView(asked.token_ids, asked.namespace, limit, turn, unit_draw(n, turn), asked.request_id, known)
            for n in (0, 1)
        ]

    def _book(self, asked: AskedPair, ways: Ways, pair: PairChoice, seen: RequestView | None = None) -> PairDecision:
        """Book both halves, or none. `seen`: what a policy was given of the request; E2 is given nothing, and the state
        of a shadow's policy needs it."""
        core, pairs, half = self._core, self._pairs, self._pairs.new_id()
        if seen is None and pairs.state is not None:
            seen = self._views(asked)[1]
        request_id = pairs.new_request_id() if asked.request_id is None else request_id_of(asked.request_id)
        limit, tokens, space = output_limit(asked.max_new_tokens), asked.token_ids, asked.namespace
        index, now = pair.decodes.row, self._now
        second = book_half(core, index, tokens, request_id, space, limit, now, decodes=True, reason=REASON)
        key = find_key(core.leases, request_id)
        try:
            first = book_half(core, pair.prefills.row, tokens, half, space, 1, now, decodes=False, reason=REASON)
        except BaseException:
            give_back_half(core, key, now)
            raise
        pairs.booked(key, half, second.worker, pair.moved_tokens)
        for name, decision in ((key, second), (half, first)):
            pairs.on_decision(name, decision, seen, now)
        if self._moves is not None:
            self._moves.asked += 1
        found = PairDecision(
            request_id,
            second.worker,
            second.prompt_tokens,
            first.matched_tokens,
            REASON,
            first.worker,
            half,
            pair.moved_tokens,
            pair.transfer_seconds,
            pair.seconds,
            ways.one_seconds,
        )
        self._note(asked, ways, pair, key, found)
        return found

    def _note(self, asked: AskedPair, ways: Ways, pair: PairChoice, key: Hashable, found: PairDecision) -> None:
        """Count a pair, record it, and charge who has asked for it."""
        number, recorder = self._scheduler._note_decision(REASON), self._world.recorder
        if asked.claim is not None:
            output = int(self._core.lease(key)["expected_output_tokens"])
            cost = cost_at(self._core, pair.decodes.row)
            seconds = service_of(cost, found.prompt_tokens, found.matched_tokens, output)
            charged = (key, asked.claim, found.worker, found.prompt_tokens, seconds)
            self._world.accounts().placed(*charged, self._waits.get(pair.prefills.row), self._now)
        if recorder is None or not recorder.takes(number, self._now):
            return
        why = explained(ways, pair, policy_name(self._world.policy), REASON, self._name, self._transfer)
        recorder.on_pair(key, found, why, self._core, pair.prefills.prefill, number, self._now)
