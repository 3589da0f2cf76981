"""How E2 places samples of one prompt (`schedule(..., group=...)`): for the end of the whole set, not for each sample's
own wait. Owns that rule.

    total = work + 2 P + move

    work   seconds that what is live on the worker will still take: prefill booked and not seen done, and each request's
           expected output at what its context adds to an iteration, but at least 4 ms a request
    P      seconds to prefill what the worker lacks of the prompt; twice, since a copy also takes room
    move   the fleet's mean work, where another worker holds the prompt and this one does not

A sample that waits delays nobody's reader, so what counts is how much work each worker has when all are sent. The
first sample goes where least is outstanding. Its siblings follow it, until its worker has more work than another by a
second prefill and by the fleet's mean: on a busy fleet groups stay whole, and one that comes alone to an idle fleet is
split. How long each answer will be is not known, and so nothing is placed by it: see docs/agents.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Policy, RequestView, WorkersView

HOLDER_SHARE_MIN = 0.9  # of the longest cached prefix: who holds as much is a holder
KNOWN_SHARE_MIN = 0.5  # of the prompt: where nobody holds more, the group has no holder
MISSED_USES = 2.0
REQUEST_SECONDS = 0.004


class SampleGroups(Policy):
    """The rule for samples of one prompt; see the module. Not chosen by name: E2 asks it for requests with a group."""

    name = "e2"
    reason = "group"

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        work = [work_seconds(workers, i) for i in range(len(workers))]
        mean = sum(work) / len(work)
        best = max(workers.matched_tokens)
        held = HOLDER_SHARE_MIN * best if best > KNOWN_SHARE_MIN * len(request.token_ids) else 0.0
        return [
            seconds + MISSED_USES * missed + (mean if tokens < held else 0.0)
            for seconds, missed, tokens in zip(work, workers.prefill_seconds, workers.matched_tokens, strict=True)
        ]


def work_seconds(workers: WorkersView, i: int) -> float:
    """Seconds that what is live on worker `i` will still take it."""
    context = workers.live_prompt_tokens[i] + workers.live_output_tokens[i] / 2
    decode = workers.mean_output_tokens[i] * workers.context_token_seconds[i] * context
    return workers.waiting_prefill_seconds[i] + max(decode, REQUEST_SECONDS * workers.live_requests[i])


SAMPLE_GROUPS = SampleGroups()  # it keeps no state
