"""One price in seconds of latency for every worker, without a gate. Owns that rule; `one_price` tries it."""

from __future__ import annotations

from collections.abc import Sequence

from preble.policies.base import Policy, RequestView, WorkersView

PRESSURE_MAX = 2.0  # seconds that others wait for a second of work; more keeps hot prefixes where they are for too long
BEHIND_SECONDS = 0.3  # of what is ahead, that counts twice: decoding goes on between the chunks of a prefill
INTERRUPTED_SHARE = 0.1  # of a prefill, that each request which decodes there waits for it
SLOWED_SHARE = 0.3  # of what a prompt adds to an iteration, that each request which decodes there pays
LOAD_SHARE = 0.02  # of a second of load, so that equals take turns over the window
REQUEST_SECONDS = 0.004  # by which a live request lengthens the wait for a first token
EVICTED_USES = 2.0  # of what is evicted, for each use of what is cached


class E2Latency(Policy):
    """The lowest of what a request and those beside it will wait:

        queue      Q + min(Q, 0.3 s) + 4 ms B + L / 50: prefill not seen done, live requests, the load of the window
        prefill    P (1 + kappa + 0.1 B): its own missed tokens, whom they keep waiting, whose decoding they interrupt
        decoding   o b (C + 0.3 n B): its own in that batch, and what its context adds to the others'
        eviction   2 h e P (1 + kappa): what must be computed again, if it is used as often as the rest

    B: live requests there, with C tokens of prompts. kappa: the fleet's pressure, at most 2. o: expected output tokens;
    n: prompt tokens; b: seconds an iteration takes longer for a token of context; h: the fleet's share of cached
    tokens; e: what must be evicted, as a share of what is missed. A worker that caches the prompt is kept because P is
    more elsewhere, and left as soon as waiting and decoding there cost more than that.
    """

    name = reason = "e2-latency"

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        output = sum(workers.mean_output_tokens) / len(workers)
        output = min(output, request.max_new_tokens or output)
        return [self.price(i, len(request.token_ids), output, workers) for i in range(len(workers))]

    def price(self, i: int, prompt: int, output: float, workers: WorkersView) -> float:
        """Seconds that a prompt of so many tokens costs on worker i, with so many tokens of output to come."""
        live, ahead = workers.live_requests[i], workers.waiting_prefill_seconds[i]
        missed, others = prompt - workers.matched_tokens[i], 1.0 + min(workers.pressure, PRESSURE_MAX)
        room = workers.kv_capacity_tokens[i] - workers.cached_tokens[i] - workers.live_output_tokens[i]
        evicted = min(max(missed + output - max(room, 0), 0.0) / missed, 1.0)
        uses = EVICTED_USES * workers.hit_share * evicted
        queue = ahead + min(ahead, BEHIND_SECONDS) + REQUEST_SECONDS * live + LOAD_SHARE * workers.load_seconds[i]
        prefill = workers.prefill_seconds[i] * (others + INTERRUPTED_SHARE * live + uses * others)
        contexts = workers.live_prompt_tokens[i] + SLOWED_SHARE * prompt * live
        return queue + prefill + output * workers.context_token_seconds[i] * contexts
