"""A placement rule of your own: score the workers, lower is better. The scheduler books; a policy only computes.

This one prefers cached prefixes like "longest_prefix", but lets a queue outweigh them: each request in flight
counts as much as `tokens_per_request` cached tokens. `explain` shows the scores without booking anything.
"""

from collections.abc import Sequence

import preble
from preble.policies.base import RequestView, WorkersView


class QueueAware(preble.Policy):
    """Cached tokens minus a price for each request in flight."""

    name = reason = "queue_aware"

    def __init__(self, tokens_per_request: int) -> None:
        self.tokens_per_request = tokens_per_request

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        return [
            self.tokens_per_request * live - matched
            for live, matched in zip(workers.live_requests, workers.matched_tokens, strict=True)
        ]


def main() -> None:
    scheduler = preble.GlobalScheduler(["worker-a", "worker-b", "worker-c"], policy=QueueAware(tokens_per_request=300))
    document = list(range(1000))
    for question in range(10):
        prompt = [*document, 2000 + question]
        why = scheduler.explain(prompt)
        decision = scheduler.schedule(prompt)
        scores = ", ".join(f"{cost.worker} {cost.score:+.0f}" for cost in why.workers)
        print(f"request {question} -> {decision.worker}   scores: {scores}")


if __name__ == "__main__":
    main()
