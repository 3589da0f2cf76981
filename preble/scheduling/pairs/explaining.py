"""Why a request goes to a pair: what it costs with each worker that may prefill it, in the terms of a decision for one.
Owns how the halves are added up; the prices are `price.py`'s.

    does both  its own terms; what lengthens its decode (`between_prefills`) is among the others' wait
    prefills   queue, prefill, others and loading of its half; of the half that decodes its share of the queue
               (`wait_for_prefills`), whom it slows, what lengthens it, and decode, with the transfer; eviction and
               balance of both
"""

from __future__ import annotations

from collections.abc import Callable

from ...lazy_typing import Any
from ...types import BOTH, Explanation, PairCost, WorkerCost
from .price import (
    INTERRUPTED_SHARE,
    REQUEST_SECONDS,
    HalfTerms,
    PairChoice,
    Ways,
    between_prefills,
    cheapest_pair,
    decode_price,
    wait_for_prefills,
)

Transfer = Callable[[HalfTerms, HalfTerms, int], float]
NameOf = Callable[[HalfTerms], str]


def explained(
    ways: Ways, chosen: PairChoice, policy: str, reason: str, name_of: NameOf, transfer: Transfer
) -> Explanation:
    """A decision for a pair; of a policy that is not E2 the scores are E2's all the same. O(workers log workers) for
    each worker that may prefill."""
    costs = []
    for one, role in ways.prefills:
        pair = chosen if one.row == chosen.prefills.row else _cheapest_with(one, role, ways, transfer)
        costs.append(_cheaper(one, role, pair, ways, name_of, is_chosen=pair is chosen))
    own = next(cost for cost in costs if cost.worker == name_of(chosen.prefills))
    others = sorted((cost.score, cost.worker) for cost in costs if cost is not own and cost.candidate)
    return Explanation(
        worker=own.worker,
        runner_up=others[0][1] if others else None,
        margin=others[0][0] - own.score if others else 0.0,
        reason=reason,
        policy=policy,
        prompt_tokens=ways.prompt_tokens,
        matched_tokens=own.matched_tokens,
        workers=tuple(costs),
        pair=pair_cost(chosen, ways.one_seconds, name_of),
    )


def pair_cost(pair: PairChoice, one_seconds: float, name_of: NameOf) -> PairCost:
    """A pair, for an explanation."""
    names = name_of(pair.prefills), name_of(pair.decodes)
    return PairCost(*names, pair.moved_tokens, pair.transfer_seconds, pair.seconds, one_seconds)


def _cheapest_with(one: HalfTerms, role: str, ways: Ways, transfer: Transfer) -> PairChoice | None:
    decodes = [(decode_price(of), of) for of in ways.decodes]
    return cheapest_pair([(0.0, one, role)], decodes, ways.prompt_tokens, transfer)


def _cheaper(
    one: HalfTerms, role: str, pair: PairChoice | None, ways: Ways, name_of: NameOf, *, is_chosen: bool
) -> WorkerCost:
    """A worker's cost in the cheaper way, or in the chosen one."""
    costs = []
    if role == BOTH and not is_chosen:
        costs.append(_cost(one, one, 0.0, ways, role, name_of))
    if pair is not None:
        costs.append(_cost(one, pair.decodes, pair.transfer_seconds, ways, role, name_of))
    if not costs:  # it may prefill, and nobody else decodes
        return _cost(one, one, float("inf"), ways, role, name_of)
    return min(costs, key=lambda cost: cost.score)


def _cost(
    one: HalfTerms, other: HalfTerms, transfer_seconds: float, ways: Ways, role: str, name_of: NameOf
) -> WorkerCost:
    """What a request costs that `one` prefills and `other` decodes, who may be the same."""
    in_two = other.row != one.row
    beside = INTERRUPTED_SHARE * one.live_requests if role == BOTH else 0.0
    waits = REQUEST_SECONDS * other.live_requests
    if role == BOTH:
        waits += wait_for_prefills(one, other, transfer_seconds)
    terms: dict[str, Any] = {
        "prefill_seconds": one.prefill,
        "queue_seconds": one.queue + (waits if in_two else 0.0),
        "others_seconds": one.prefill * (ways.kappa[role] + beside) + other.slowed + between_prefills(other),
        "decode_seconds": other.decode + transfer_seconds,
        "eviction_seconds": one.eviction + (other.eviction if in_two else 0.0),
        "balance_seconds": one.balance + (other.balance if in_two else 0.0),
        "credit_seconds": 0.0,
        "loading_seconds": one.loading,
    }
    total = float(sum(terms.values()))
    return WorkerCost(
        worker=name_of(one),
        matched_tokens=one.usable_tokens,
        missed_tokens=ways.prompt_tokens - one.usable_tokens,
        load_seconds=one.load,
        total_seconds=total,
        score=total,
        candidate=total < float("inf"),
        **terms,
    )
