"""What a request costs on one worker, and on a pair of workers of which one prefills its prompt and the other decodes
its output. Owns these sums; their terms are E2's (`_placement/e2.pyx`), booking is `placing.py`'s.

    one    queue + P (1 + kappa) + loading + 0.1 B P      as E2, but that kappa is that of workers of this role,
           + slowed + decode + eviction + balance
           + 0.1 D u / (1 - u)                            and decoding goes on between the prefills of others
    pair   on the one that prefills:
           queue + P (1 + kappa) + loading + eviction + balance, + 0.1 B P where others decode there
           between them:
           transfer, and who has requests at either end waits while its engine copies
           where the one that prefills could decode it as well, D T / (K (1 - u)) for room
           all this is at least what the oldest has waited that was handed over there and still waits
           where the one that prefills could decode it as well, max(Q - (1 - u) t, 0)
                                                          what is left there of others' prefills, which go before
           on the one that decodes:
           4 ms B + slowed + decode + eviction + balance + 0.1 D u / (1 - u)

    D      seconds of the whole decode by the cost model, beside the requests that decode there now
    u      share of that worker's time that prefills have had within the window, 0.9 at most
    Q      its queue, without the 4 ms B; t: until the KV comes, queue, loading, P and transfer. Prefills go on coming
    T      tokens of KV that are to come there, these among them; K: the room that it has for KV. Where it was prefilled
           its KV has a place, and so the pair's is a second one, while D lasts
    kappa  rho / (1 - rho), 2 at most; rho: the mean load of the workers of that role, of the time observed

A decode that lasts D alone meets D u / (1 - u) seconds of others' prefills, and waits for a tenth of these, as E2
counts for those that decode beside a prefill: iterations that prefill bring it tokens as well.

No threshold: a short prompt, or one that is cached, has little P; then a transfer and a second queue cost more than
what the decode saves. Nor one for load: where little is prefilled u is small.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from ...types import BOTH, DECODE, PREFILL
from ..pulls.link_times import LinkEstimate

PRESSURE_MAX = 2.0
PREFILL_SHARE_MAX = 0.9
REQUEST_SECONDS, INTERRUPTED_SHARE = 0.004, 0.1  # as in E2
COMPARED = 4  # of either half, the cheapest, whose links are looked at


class HalfTerms(NamedTuple):
    """One worker's terms (`_placement/pairs/halves.half_terms`): the seconds of either half, and what the whole needs.
    `row`: its index in the core."""

    row: int
    live_requests: int
    usable_tokens: int
    load: float
    prefill: float
    loading: float
    queue: float
    eviction: float
    balance: float
    slowed: float
    decode: float
    whole_decode: float
    prefill_share: float


class PairChoice(NamedTuple):
    """The cheapest pair: terms of both, tokens whose KV goes from one to the other, seconds of that, and the price."""

    prefills: HalfTerms
    decodes: HalfTerms
    moved_tokens: int
    transfer_seconds: float
    seconds: float


class Ways(NamedTuple):
    """All ways of a request: tokens of its prompt; who may prefill it, with their roles, and who may decode it; kappa
    by role; seconds on the cheapest worker that does both, infinity where there is none; the cheapest pair."""

    prompt_tokens: int
    prefills: list[tuple[HalfTerms, str]]
    decodes: list[HalfTerms]
    kappa: dict[str, float]
    one_seconds: float
    pair: PairChoice | None


def pressure(loads: Sequence[float], observed_seconds: float) -> float:
    """kappa of workers with these loads, seconds within the time observed."""
    if not loads or observed_seconds <= 0.0:
        return 0.0
    rho = max(sum(loads) / (observed_seconds * len(loads)), 0.0)
    return min(PRESSURE_MAX, rho / (1.0 - min(rho, 0.9)))


def between_prefills(terms: HalfTerms) -> float:
    """By how much the prefills of others lengthen a decode on this worker."""
    share = min(terms.prefill_share, PREFILL_SHARE_MAX)
    return INTERRUPTED_SHARE * terms.whole_decode * share / (1.0 - share)


def prefill_price(terms: HalfTerms, kappa: float, *, decodes: bool) -> float:
    """Seconds of the prefill half; `decodes`: whether others decode on that worker."""
    interrupted = INTERRUPTED_SHARE * terms.live_requests if decodes else 0.0
    waits = terms.queue + terms.loading + terms.prefill * (1.0 + kappa + interrupted)
    return waits + terms.eviction + terms.balance


def decode_price(terms: HalfTerms) -> float:
    """Seconds of the decode half, once nobody's prefill is ahead of it."""
    requests = REQUEST_SECONDS * terms.live_requests
    return requests + terms.slowed + terms.decode + terms.eviction + terms.balance + between_prefills(terms)


def whole_price(terms: HalfTerms, kappa: float) -> float:
    """Seconds where one worker does both."""
    return prefill_price(terms, kappa, decodes=True) + terms.slowed + terms.decode + between_prefills(terms)


def transfer_price(moved_bytes: float, link: LinkEstimate, one: HalfTerms, other: HalfTerms) -> float:
    """Seconds that a transfer takes, and that others wait for it at either end."""
    copied = link.source_byte_seconds * one.live_requests + link.target_byte_seconds * other.live_requests
    return link.seconds(moved_bytes) + copied * moved_bytes


def room_price(terms: HalfTerms, coming_tokens: int, kv_capacity_tokens: int) -> float:
    """Seconds that KV which is to come waits for room: it stays while it is decoded, and the worker goes on filling its
    memory with prefills of its own."""
    share = min(terms.prefill_share, PREFILL_SHARE_MAX)
    return terms.whole_decode * coming_tokens / (kv_capacity_tokens * (1.0 - share))


def wait_for_prefills(one: HalfTerms, other: HalfTerms, transfer_seconds: float) -> float:
    """Seconds that a request waits where it is decoded, `other`, for the prefills that are ahead there when its KV has
    come: a worker goes on with those before it takes a new request, also one that lacks nothing. No part of the price
    where `one` cannot decode: it keeps a prefill out of that queue, for all that come later."""
    ahead = other.queue - REQUEST_SECONDS * other.live_requests
    given = one.queue + one.loading + one.prefill + transfer_seconds
    return max(ahead - (1.0 - min(other.prefill_share, PREFILL_SHARE_MAX)) * given, 0.0)


def cheapest_pair(
    prefills: Iterable[tuple[float, HalfTerms, str]],
    decodes: Iterable[tuple[float, HalfTerms]],
    prompt_tokens: int,
    transfer: Callable[[HalfTerms, HalfTerms, int], float],
) -> PairChoice | None:
    """Of workers with the price of their half, the pair that costs least; None where there are no two. Of those that
    prefill their roles, too. `transfer(one, other, tokens)`: seconds. O(workers log workers), and `COMPARED` times as
    many links."""
    best: PairChoice | None = None
    nearest = sorted(decodes, key=_by_price_and_queue)[:COMPARED]
    for first, one, role in sorted(prefills, key=_by_price)[:COMPARED]:
        for second, other in nearest:
            if one.row == other.row:
                continue
            moved = max(prompt_tokens - other.usable_tokens, 0)
            seconds = transfer(one, other, moved)
            waits = wait_for_prefills(one, other, seconds) if role == BOTH else 0.0
            price = first + second + seconds + waits
            if best is None or price < best.seconds:
                best = PairChoice(one, other, moved, seconds, price)
    return best


def _by_price(priced: tuple[float, HalfTerms, str]) -> tuple[float, int]:
    return priced[0], priced[1].row


def _by_price_and_queue(priced: tuple[float, HalfTerms]) -> tuple[float, int]:
    return priced[0] + priced[1].queue, priced[1].row


def ways_of(
    prompt_tokens: int,
    observed_seconds: float,
    priced: Sequence[tuple[HalfTerms, str]],
    late: Collection[int],
    transfer: Callable[[HalfTerms, HalfTerms, int], float],
) -> Ways:
    """All ways of a request on these workers, terms and role of each; of `late`, rows, none prefills it."""
    roles = {role for _, role in priced}
    kappa = {role: pressure([of.load for of, own in priced if own == role], observed_seconds) for role in roles}
    prefills = [(of, role) for of, role in priced if role != DECODE and of.row not in late]
    decodes = [of for of, role in priced if role != PREFILL]
    pair = cheapest_pair(
        [(prefill_price(of, kappa[role], decodes=role == BOTH), of, role) for of, role in prefills],
        [(decode_price(of), of) for of in decodes],
        prompt_tokens,
        transfer,
    )
    one = min((whole_price(of, kappa[role]) for of, role in prefills if role == BOTH), default=float("inf"))
    return Ways(prompt_tokens, prefills, decodes, kappa, one, pair)
