"""What no policy can beat: clairvoyant lower bounds of a workload's times and an upper bound of its cache hits.

Owns the bounds and their proofs; knows no policy and runs no simulation. Everything is O(N log N) in the requests
plus one pass over their tokens (the search for a percentile repeats an O(N log N) pass some forty times).

What is assumed. Workers are alike, at most `workers` live at once. An iteration computes at most `token_budget`
tokens and takes `CostModel.iteration_time`, or longer; a batch never takes less time for containing more. KV is
reused only by the worker that computed it, in any way at all: any cache size, any eviction, any order, any router, any
preemption. A request generates exactly its `output_tokens`, and prompts contain no generated tokens but those
given in `output_ids`.

First touch. Order requests by release, a time before which a request cannot have arrived: `arrival_seconds`, or, in
a closed loop, no earlier than what `after` needs alone on an idle worker with all but one token cached. A token (with
all tokens before it) is owned by the first request in that order whose prompt, or prompt and known output, holds it.
Nobody computes it before the owner's release, for all who hold it come later; and if it is in the owner's prompt,
the worker that serves the owner has computed it by the owner's first output token. Known outputs own tokens but are
never charged for them, which can only lower the bounds.

Price of a token. An iteration of n tokens, in chunks of q tokens that end at context s, takes
L(n) + context(sum of s) + sum of pair(q, s). Divide L equally: every token pays at least min L(n)/n over 1 <= n <=
token_budget. context(C) >= C * min context(C)/C, so each chunk pays s times that, and each of its tokens s/q times. A
token at position p is in a chunk with s >= p, s >= q and 1 <= q <= token_budget; the price is the least over all
such chunks of its three shares. Prices of the tokens of an iteration therefore never sum to more than its seconds.
Where a model's pair term would make a price negative, all prices are 0 and only floors remain.

One fast machine. Charge each owned prompt token at the worker that serves its owner, when first computed there.
A real schedule becomes a preemptive one of jobs (release r_i, work w_i = the prices of the tokens i owns) on one
machine as fast as all workers together, where no job ends later than i's first token. Of all such schedules
  - the shortest remaining work first has the least mean completion (SRPT);
  - in a real one, job i is worked on by one worker, at rate 1 at most, so it ends at least w_i / 2 after the mean
    time at which its work is done, and at least half the iteration of its first output token, as work in that one
    is spread over it and all other work is before it; the sum of these mean times is least where the shortest job (by
    its whole size) goes first, as it is linear in the work done at each moment;
  - first in, first out has the least longest wait;
  - at most so many jobs end within x seconds as Moore and Hodgson's rule finds: in order of arrival, and when one is
    late, the largest taken so far is dropped. Dropping only subtracts its work from the clock, so the clock is early,
    never late: for every m, clock minus the largest (taken - m) jobs is at most the end of any m jobs all in time.
A request's own floor: the iteration with its first output token has at least one token at its full context, and its
owned tokens are all computed by one worker after its release, so TTFT >= max(that iteration, w_i).

End to end. Each further output token needs an iteration of its own with that token at its context: these sum to a
floor, and at the price of a chunk of one token to work that is added to w_i. Mean latency is also at least the bound
of the mean TTFT plus the mean floor of the rest.

Closed loop. Requests with `after` arrive when a policy lets them, so that no queueing bound of their waiting holds.
They count with their floor alone (one token for the prompt: what they own may be computed before they come), and the
fast machine is left to the others.

Pairs. Where one worker prefills a request and another decodes it, its owned prompt tokens are still computed by one
worker, before its first token, and it is worked on by one worker at a time: all of this holds. Where only some workers
prefill, their number bounds times to first token, for they alone do that work: `ttft` of `lower_bounds` with as many.

Pulls, and host memory. What a request takes over from another worker, or loads, somebody has computed before, after the
release of whom it is owned by; the time of that is added, never taken off. So all of this holds, and such a fleet may
come closer than one that computes again.

Warm-up. Where the first requests by release only warm the caches, they own tokens, and their jobs are left out, which
takes work from the machine and none from the counted: the bounds are those of the counted requests' figures. A token
that a counted request owns is held by nobody who is not counted, so it is missed by one who is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._cost import CostModel
from .._radix import RadixTree
from ..errors import DuplicateRequest, InvalidInput
from ..types import check_int
from ..workloads.types import PromptRequest

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TREE_BYTES_MAX = 1 << 40  # no limit in practice: a tree that forgets would make first touches of old tokens
ROUNDING_SECONDS = 1e-9  # sums round, and who is on time must not be called late for it
BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one workload on `workers` workers; see the module for what each assumes and why it holds.

    Times are lower bounds in seconds, `hit_fraction_ceiling` is an upper bound of cached over all prompt tokens with
    an infinite cache, `least_prefill_tokens` the prompt tokens that somebody must compute. `mean_ttft_terms` has
    the bounds of which `mean_ttft_seconds` is the largest: "floor", "srpt", "mean_busy". All are of the requests of
    which `counted`, shape [requests given], is true; `requests` is their number.
    """

    workers: int
    requests: int
    counted: npt.NDArray[np.bool_]
    mean_ttft_seconds: float
    p99_ttft_seconds: float
    max_ttft_seconds: float
    mean_latency_seconds: float
    p99_latency_seconds: float
    max_latency_seconds: float
    hit_fraction_ceiling: float
    least_prefill_tokens: int
    mean_ttft_terms: dict[str, float]
    ttft: Flow
    latency: Flow

    def goodput(self, x_seconds: float) -> float:
        """The largest share of the requests, 0 to 1, that can have a TTFT of at most `x_seconds`."""
        return self.ttft.on_time(x_seconds) / self.requests


@dataclass(frozen=True, slots=True)
class Flow:
    """Jobs on one machine that does `speed` seconds of work a second, and requests that count with a floor alone.

    `releases`, `works`: shape [jobs], in order of release; `tails`: shape [jobs], the least time from when a job's work
    is done on average (its release, where it has none) to its end; `floors`: shape [requests], those of the jobs
    first, in their order. All in seconds.
    """

    releases: Floats
    works: Floats
    tails: Floats
    floors: Floats
    speed: int

    def mean_terms(self) -> dict[str, float]:
        """Lower bounds of the mean flow time, by name; those of the machine count the others with their floors."""
        others = float(self.floors[len(self.works) :].sum())
        ended, _ = shortest_first(self.releases, self.works / self.speed, by_remaining=True)
        _, busy = shortest_first(self.releases, self.works / self.speed, by_remaining=False)
        flows = {
            "floor": float(self.floors[: len(self.works)].sum()),
            "srpt": float((ended - self.releases).sum()),
            "mean_busy": float((busy - self.releases + self.tails).sum()),
        }
        return {name: (flow + others) / len(self.floors) for name, flow in flows.items()}

    def longest(self) -> float:
        """Lower bound of the longest flow time."""
        queued = first_in_first_out(self.releases, self.works / self.speed)
        return float(max(self.floors.max(), (queued - self.releases).max(initial=0.0)))

    def on_time(self, x_seconds: float) -> int:
        """At most so many requests can have a flow time of `x_seconds` or less."""
        jobs, within = len(self.works), x_seconds + ROUNDING_SECONDS
        able = self.floors[:jobs] <= within
        others = int((self.floors[jobs:] <= within).sum())
        return others + on_time_most(self.releases[able], self.works[able] / self.speed, within)

    def percentile(self, share: float) -> float:
        """Lower bound of the flow time at `share` (0 to 1) of the requests, as `numpy.percentile` interpolates.

        That is at least the flow time of the request at the rank below, and so many must be on time by then. Every x
        for which `on_time` finds too few is below it; the search only ever answers with such an x, or with a floor.
        """
        needed = math.floor(share * (len(self.floors) - 1)) + 1
        low = float(np.partition(self.floors, needed - 1)[needed - 1])
        high = self.longest()
        if self.on_time(low) >= needed:
            return low
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if self.on_time(middle) < needed:
                low = middle
            else:
                high = middle
        return low


def lower_bounds(
    requests: Sequence[PromptRequest],
    cost_model: CostModel,
    workers: int,
    token_budget: int = 512,
    warmup_requests: int = 0,
) -> Bounds:
    """Bounds that hold for every policy on `workers` workers whose iterations have at most `token_budget` tokens.

    The first `warmup_requests` by release, fewer than there are, are not counted: see the module.

    Raises `InvalidInput` for no requests or an `after` that names none or itself in the end, `DuplicateRequest` for
    an id twice, `InvalidConfig` for `workers` or `token_budget` below 1, or `warmup_requests` that leave nobody.
    """
    check_int("workers", workers, 1, 1_000_000)
    check_int("token_budget", token_budget, 1, 2**31 - 1)
    if not requests:
        raise InvalidInput("requests are empty")
    check_int("warmup_requests", warmup_requests, 0, len(requests) - 1)
    prompts = np.array([request.prompt_tokens for request in requests], np.int64)
    outputs = np.array([request.output_tokens for request in requests], np.int64)
    prices = Prices(cost_model, token_budget, int((prompts + outputs).max()))
    decode_floors = prices.one_token[prompts + outputs - 1] - prices.one_token[prompts]
    one_token = prices.start + np.diff(prices.one_token)[prompts - 1]
    releases = earliest_arrivals(requests, one_token + decode_floors)
    order = np.argsort(releases, kind="stable")
    owned, repeated = first_touch(requests, order)

    works = prices.prefill[prompts] - prices.prefill[prompts - owned]
    first_decoded = np.minimum(prompts + repeated, prompts + outputs - 1)
    decode_works = prices.decode[prompts + outputs - 1] - prices.decode[first_decoded]
    is_open = np.array([request.after is None for request in requests])
    floors = np.maximum(one_token, np.where(is_open, works, 0.0))
    late = order[warmup_requests:]
    opened, closed = late[is_open[late]], late[~is_open[late]]
    both = np.concatenate([opened, closed])
    tails = np.where(works > 0.0, floors / 2, floors)
    ttft = Flow(releases[opened], works[opened], tails[opened], floors[both], workers)
    sizes = (works + decode_works)[opened]
    latency = Flow(releases[opened], sizes, sizes / 2, (floors + decode_floors)[both], workers)

    terms = ttft.mean_terms()
    mean_ttft = max(terms.values())
    least_tokens = max(len(late), int(owned[late].sum() - repeated.sum()))
    counted = np.zeros(len(requests), np.bool_)
    counted[late] = True
    return Bounds(
        workers=workers,
        requests=len(late),
        counted=counted,
        mean_ttft_seconds=mean_ttft,
        p99_ttft_seconds=ttft.percentile(0.99),
        max_ttft_seconds=ttft.longest(),
        mean_latency_seconds=max(mean_ttft + float(decode_floors[late].mean()), *latency.mean_terms().values()),
        p99_latency_seconds=latency.percentile(0.99),
        max_latency_seconds=latency.longest(),
        hit_fraction_ceiling=1.0 - least_tokens / int(prompts[late].sum()),
        least_prefill_tokens=least_tokens,
        mean_ttft_terms=terms,
        ttft=ttft,
        latency=latency,
    )


# --- requests ---------------------------------------------------------------------------------------------------------


def earliest_arrivals(requests: Sequence[PromptRequest], least_seconds: Floats) -> Floats:
    """When each request can arrive at the earliest, shape [requests]: `least_seconds` is what each needs alone.

    Raises `DuplicateRequest` and `InvalidInput`.
    """
    places: dict[str, int] = {}
    for place, request in enumerate(requests):
        if places.setdefault(request.request_id, place) != place:
            raise DuplicateRequest(f"two requests have the id {request.request_id!r}")
    releases = np.full(len(requests), np.nan)
    for request in requests:
        chain: list[int] = []
        known = places[request.request_id]
        while math.isnan(releases[known]):
            chain.append(known)
            after = requests[known].after
            if after is None:
                break
            if after not in places or len(chain) > len(requests):
                why = "is not among the requests" if after not in places else "comes after itself"
                raise InvalidInput(f"PromptRequest.after of {requests[known].request_id!r}: {after!r} {why}")
            known = places[after]
        for place in reversed(chain):
            own = requests[place]
            releases[place] = own.arrival_seconds
            if own.after is not None:
                before = places[own.after]
                earliest = releases[before] + least_seconds[before] + own.pause_seconds
                releases[place] = max(own.arrival_seconds, earliest)
    return releases


def first_touch(requests: Sequence[PromptRequest], order: Ints) -> tuple[Ints, Ints]:
    """(prompt tokens each request owns, tokens of its known output that an earlier one holds), shapes [requests].

    `order` are the requests' places by release. One pass over the tokens, in a radix tree of all that came before.
    """
    owned = np.zeros(len(requests), np.int64)
    repeated = np.zeros(len(requests), np.int64)
    tree = RadixTree(max_bytes=TREE_BYTES_MAX)
    for place in order.tolist():
        request = requests[place]
        prompt = request.prompt_tokens
        tokens = request.token_ids
        if request.output_ids is not None:
            tokens = np.concatenate([tokens, request.output_ids])
        known = tree.insert(tokens, 0.0, is_hit=False)
        owned[place] = max(0, prompt - known)
        repeated[place] = max(0, known - prompt)
    stats = tree.stats()
    assert stats["shed_nodes"] == stats["refused_tokens"] == 0, "the tree of all prompts forgot some"
    return owned, repeated


# --- prices -----------------------------------------------------------------------------------------------------------


class Prices:
    """Least seconds of tokens by their position, as running sums, shape [tokens_max + 1], so that the tokens from
    position a to b cost sums[b] - sums[a]: of a `prefill` token and of a `decode` token in the best batch, and of an
    iteration with that `one_token` alone, without `start`, which one with a prefill in it takes longer."""

    def __init__(self, cost_model: CostModel, token_budget: int, tokens_max: int) -> None:
        self._terms = CostTerms(cost_model)
        self.start = self._terms.start
        context = np.arange(1, tokens_max + 1).astype(np.float64)
        token_rate = self._token_rate(token_budget)
        single = self._terms.pair_seconds(1.0, context)
        prefill = token_rate + self.start / token_budget + self._attention_price(context, token_budget)
        decode = token_rate + self._context_rate() * context + single
        if min(prefill.min(), decode.min()) < 0.0:
            prefill, decode = np.zeros(tokens_max), np.zeros(tokens_max)
        self.prefill = _running_sums(prefill)
        self.decode = _running_sums(decode)
        self.one_token = _running_sums(self._terms.linear(1.0) + self._terms.context_seconds(context) + single)

    def _token_rate(self, token_budget: int) -> float:
        """Least L(n) / n. Between knots that is a / n + b, so its least value is at a knot or an end."""
        inner = [at for at in self._terms.at.tolist() if 1.0 < at < token_budget]
        sizes = np.array([1.0, *inner, float(token_budget)])
        return float((self._terms.linear(sizes) / sizes).min())

    def _context_rate(self) -> float:
        """Least context(C) / C: at the end of the flat part, or at infinity, for beyond it the model does not fall."""
        start, flat, _, slope = self._terms.context
        return slope if start <= 0.0 else min(flat / start, slope)

    def _attention_price(self, position: Floats, token_budget: int) -> Floats:
        """Least of (context + pair) / q over chunks of q tokens that end at s >= max(position, q).

        Both parts grow with s, and s / q is at least max(position / q, 1). Without the pair term q is best as large as
        it can be. Chunks no longer than that, or than `root`, the shortest prompt that meets the term, are no better
        with it, as it is not negative where it begins. Beyond, what is left is a / q + b on either side of
        q = position, so its least value is at an end of either.
        """
        start, base, q, s, qs = self._terms.pair
        rate = self._context_rate()
        free, root = start / position, max(0.0, start) ** 0.5  # `free`: the largest chunk without the pair term
        best = np.where(free >= 1.0, rate * np.maximum(position / np.clip(free, 1.0, token_budget), 1.0), np.inf)
        ends = (np.clip(free, 1.0, token_budget), np.clip(position, root, token_budget), float(token_budget))
        for chunk in ends:
            per_token = base / chunk + q + (s + rate) * np.maximum(position / chunk, 1.0) + qs * position
            best = np.minimum(best, per_token)
        return best


def _running_sums(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


# --- one machine ------------------------------------------------------------------------------------------------------


def shortest_first(releases: Floats, sizes: Floats, *, by_remaining: bool) -> tuple[Floats, Floats]:
    """(end of each job, mean time at which its work is done) where the shortest job always runs, preemptively.

    `releases` ascend. Shortest is what remains, or the whole size. A job of no size is done at its release.
    """
    ended, busy = releases.copy(), releases.copy()
    size_of, release_of = sizes.tolist(), releases.tolist()
    remaining = list(size_of)
    heap: list[tuple[float, int]] = []
    now, place = 0.0, 0
    worked = [0.0] * len(size_of)  # integral of time over work done
    while heap or place < len(size_of):
        if not heap:
            now = max(now, release_of[place])
        while place < len(size_of) and release_of[place] <= now:
            if size_of[place] > 0.0:
                heapq.heappush(heap, (size_of[place], place))
            place += 1
        if not heap:
            continue
        key, job = heap[0]
        until = release_of[place] if place < len(size_of) else math.inf
        span = min(remaining[job], until - now)
        worked[job] += span * (now + span / 2)
        remaining[job] -= span
        if remaining[job] > 0.0:
            now = until
            if by_remaining:
                heapq.heapreplace(heap, (remaining[job], job))
            continue
        now += span
        heapq.heappop(heap)
        ended[job] = now
        busy[job] = worked[job] / size_of[job]
    return ended, busy


def first_in_first_out(releases: Floats, sizes: Floats) -> Floats:
    """End of each job in order of release: the last moment the machine caught up, plus all work since."""
    done = np.cumsum(sizes)
    return np.maximum.accumulate(releases - (done - sizes)) + done


def on_time_most(releases: Floats, sizes: Floats, x_seconds: float) -> int:
    """At most so many jobs can end within `x_seconds` of their release. `releases` ascend."""
    taken: list[float] = []  # sizes, negated: the largest first
    clock = 0.0
    for release, size in zip(releases.tolist(), sizes.tolist(), strict=True):
        clock = max(clock, release) + size
        heapq.heappush(taken, -size)
        if clock > release + x_seconds:
            clock += heapq.heappop(taken)
    return len(taken)


class CostTerms:
    """The terms of a cost model, for arrays."""

    def __init__(self, model: CostModel) -> None:
        found: dict[str, Any] = model.coefficients()
        self.at = np.array([tokens for tokens, _ in found["knots"]])
        self.seconds = np.array([seconds for _, seconds in found["knots"]])
        self.context: tuple[float, ...] = found["context"]
        self.pair: tuple[float, ...] = found["pair"]
        self.start: float = found["start"]

    def linear(self, tokens: Any) -> Floats:
        """Seconds of the layers that see tokens only; beyond the last knot as between the last two."""
        inside = np.interp(tokens, self.at, self.seconds)
        if len(self.at) == 1:
            return np.asarray(inside)
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.at[-1] - self.at[-2])
        return np.asarray(inside + slope * np.maximum(np.asarray(tokens) - self.at[-1], 0.0))

    def context_seconds(self, context: Floats) -> Floats:
        """Seconds of attention over contexts that sum up to so many tokens."""
        start, flat, base, slope = self.context
        return np.where(context <= start, flat, base + slope * context)

    def pair_seconds(self, chunk: float | Floats, last: Floats) -> Floats:
        """Seconds of attention of chunks that end at so many tokens; of an empty one none."""
        start, base, q, s, qs = self.pair
        return np.where(chunk * last > max(start, 0.0), base + q * chunk + s * last + qs * chunk * last, 0.0)
