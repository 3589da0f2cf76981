"""Rules of one idea each: in turn, at random, by live requests, by cached prefix. Owns nothing else; what they see and
must answer is said in `preble/policies/base.py`."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Policy, RequestView, WorkersView


class RoundRobin(Policy):
    """Each worker in turn."""

    name = reason = "round_robin"

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        turn = request.sequence % len(workers)
        return [0.0 if i == turn else 1.0 for i in range(len(workers))]


class Random(Policy):
    """Any worker, all alike."""

    name = reason = "random"

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        chosen = int(request.draw * len(workers))
        return [0.0 if i == chosen else 1.0 for i in range(len(workers))]


class LeastLoaded(Policy):
    """The fewest live requests; among equals the least prefill outstanding."""

    name = reason = "least_loaded"

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        return [float(live) for live in workers.live_requests]

    def pick(self, scores: Sequence[float], request: RequestView, workers: WorkersView) -> int:
        waiting = workers.waiting_prefill_seconds
        return min(range(len(scores)), key=lambda i: (scores[i], waiting[i], i))


class PowerOfTwo(Policy):
    """Of two different workers drawn at random, the one with fewer live requests; the first drawn if they have equally
    many. Mitzenmacher 2001; also SGLang's gateway."""

    name = reason = "power_of_two"

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        count = len(workers)
        if count == 1:
            return [0.0]
        # One draw makes both: an ordered pair of different workers out of count * (count - 1).
        one, other = divmod(int(request.draw * count * (count - 1)), count - 1)
        other += other >= one
        live = workers.live_requests
        winner, loser = (one, other) if live[one] <= live[other] else (other, one)
        scores = [2.0] * count
        scores[winner], scores[loser] = 0.0, 1.0
        return scores


class LongestPrefix(Policy):
    """The longest cached prefix; among equals the fewest live requests."""

    name = reason = "longest_prefix"

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        return [-float(matched) for matched in workers.matched_tokens]
