"""How a request is placed where workers have roles: on one that does both, or on a pair. Owns the comparison and what
is booked of it; prices are `price.py`'s, bookings that belong together `halves.py`'s.

E2 compares the cheapest worker that does both with the cheapest pair, under the writers' lock, and books what wins; the
one worker is then E2's own choice. Another policy knows no price of a pair. There every request has one: the policy
chooses among those that prefill only, and then among those that decode.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence

from ..._core.dict_keys import find_key
from ..._placement.decision import unit_draw
from ..._placement.pairs.halves import book_half, give_back_half, half_terms
from ..._placement.request_api import hashable, names_session, output_limit, request_id_of
from ...lazy_typing import TYPE_CHECKING, Any, dataclass
from ...policies.base import RequestView
from ...types import BOTH, DECODE, PREFILL, PairDecision, SessionHint
from .halves import PairHalves
from .price import (
    HalfTerms,
    PairChoice,
    cheapest_pair,
    decode_price,
    prefill_price,
    pressure,
    transfer_price,
    whole_price,
)

if TYPE_CHECKING:
    from typing import Protocol

    from ..._placement.bookings import DecisionCore
    from ..._placement.decision import Decision
    from ...policies.base import Policy
    from ..pulls.price import KvMoves

    class PairBooking(Protocol):
        """What is asked of a scheduler, under its lock."""

        @property
        def core(self) -> DecisionCore:
            """Where it is booked."""

        @property
        def schedule(self) -> Callable[..., Decision]:
            """Choose one worker and book."""

        def now(self) -> float:
            """Seconds."""


REASON = "pair"


@dataclass(frozen=True, slots=True)
class AskedPair:
    """A request to be placed, its arguments checked; see `GlobalScheduler.schedule_pair`. Raises `InvalidInput`."""

    token_ids: Any
    request_id: Hashable
    namespace: Hashable
    max_new_tokens: int | None
    exclude: Sequence[str]
    session: SessionHint | None

    def __post_init__(self) -> None:
        hashable("namespace", self.namespace)
        hashable("request_id", self.request_id)
        output_limit(self.max_new_tokens)
        if self.session is not None:
            names_session(self.session)


def place_pair(
    scheduler: PairBooking,
    pairs: PairHalves | None,
    moves: KvMoves | None,
    policy: Policy | None,
    draining: Collection[str],
    asked: AskedPair,
) -> PairDecision:
    """Choose and book, under the writers' lock; with no `pairs` all workers do both. `draining`: ids of workers that
    take nothing new. Raises as `schedule`; then nothing has changed."""
    if pairs is None:
        return on_one(scheduler, asked)
    found = PairPlacing(scheduler, pairs, moves, draining).place(asked, policy)
    pairs.placed += 1
    return found


def on_one(scheduler: PairBooking, asked: AskedPair, *prices: float) -> PairDecision:
    """Place a request on one worker. Raises as `schedule`."""
    decision = scheduler.schedule(
        asked.token_ids,
        request_id=asked.request_id,
        namespace=asked.namespace,
        max_new_tokens=asked.max_new_tokens,
        session=asked.session,
        **({"exclude": asked.exclude} if asked.exclude else {}),
    )
    found = (decision.request_id, decision.worker, decision.prompt_tokens, decision.matched_tokens, decision.reason)
    return PairDecision(*found, None, None, 0, 0.0, *prices)


class PairPlacing:
    """One decision; see the module and `place_pair`."""

    def __init__(
        self, scheduler: PairBooking, pairs: PairHalves, moves: KvMoves | None, draining: Collection[str]
    ) -> None:
        self._scheduler = scheduler
        self._core = scheduler.core
        self._pairs = pairs
        self._moves = moves
        self._draining = draining
        self._now = scheduler.now()

    def place(self, asked: AskedPair, policy: Policy | None) -> PairDecision:
        """Choose and book. Raises as `schedule`; then nothing has changed."""
        left_out = set(asked.exclude)
        for name in left_out:
            self._core.index_of(name)  # UnknownWorker
        left_out.update(self._draining)
        there = [i for i, name in enumerate(self._core.names) if name is not None and name not in left_out]
        roles = [self._pairs.roles.get(str(self._core.names[i]), BOTH) for i in there]
        if policy is not None:
            return self._by_policy(policy, asked, there, roles)
        prompt, observed, terms = self._terms(asked, there)
        priced = list(zip(terms, roles, strict=True))
        kappa = {role: pressure([of.load for of, own in priced if own == role], observed) for role in set(roles)}
        one = min((whole_price(of, kappa[role]) for of, role in priced if role == BOTH), default=float("inf"))
        pair = cheapest_pair(
            [(prefill_price(of, kappa[role], decodes=role == BOTH), of) for of, role in priced if role != DECODE],
            [(decode_price(of), of) for of, role in priced if role != PREFILL],
            prompt,
            self._transfer,
        )
        if pair is None or one <= pair.seconds:
            return on_one(self._scheduler, asked, one, float("inf") if pair is None else pair.seconds)
        return self._book(asked, pair, one)

    def _terms(self, asked: AskedPair, indices: list[int]) -> tuple[int, float, list[HalfTerms]]:
        limit = output_limit(asked.max_new_tokens)
        of_session = asked.session is not None and names_session(asked.session)
        prompt, observed, rows = half_terms(
            self._core, asked.token_ids, asked.namespace, limit, indices, self._now, of_session
        )
        return prompt, observed, [HalfTerms(*row) for row in rows]

    def _transfer(self, one: HalfTerms, other: HalfTerms, moved_tokens: int) -> float:
        source, target = str(self._core.names[one.row]), str(self._core.names[other.row])
        if self._moves is not None and not self._moves.are_alike(source, target):
            return float("inf")
        links = self._pairs.links if self._moves is None else self._moves.links
        token_bytes = 0 if self._moves is None else self._moves.token_bytes(target)
        moved_bytes = float(moved_tokens * (token_bytes or self._pairs.guessed_token_bytes))
        return transfer_price(moved_bytes, links.estimate(source, target, self._now), one, other)

    def _by_policy(self, policy: Policy, asked: AskedPair, there: list[int], roles: list[str]) -> PairDecision:
        """The pair that a policy chooses; where nobody has a role that it needs, one worker."""
        prefills = [at for at, role in enumerate(roles) if role == PREFILL]
        decodes = [at for at, role in enumerate(roles) if role != PREFILL]
        if not prefills or not decodes:
            return on_one(self._scheduler, asked)
        prompt, _, terms = self._terms(asked, there)
        known = self._pairs.known(asked.token_ids, asked.namespace, self._now)
        turn, limit = self._pairs.separated, asked.max_new_tokens
        views = [
            RequestView(asked.token_ids, asked.namespace, limit, turn, unit_draw(n, turn), asked.request_id, known)
            for n in (0, 1)
        ]
        one, other = (
            terms[half[policy.decide(view, self._core.view([terms[at].row for at in half]))]]
            for view, half in zip(views, (prefills, decodes), strict=True)
        )
        chosen = PairChoice(one, other, prompt - other.usable_tokens, 0.0, float("inf"))
        return self._book(asked, chosen, float("inf"), views[1])

    def _book(
        self, asked: AskedPair, pair: PairChoice, one_seconds: float, seen: RequestView | None = None
    ) -> PairDecision:
        """Book both halves, or none. `seen`: what a policy was given of the request."""
        core, pairs, half = self._core, self._pairs, self._pairs.new_id()
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
        pairs.booked(key, half)
        for name, decision in ((key, second), (half, first)):
            pairs.on_decision(name, decision, seen, now)
        if self._moves is not None:
            self._moves.asked += 1
        return PairDecision(
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
            one_seconds,
        )
