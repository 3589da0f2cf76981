"""E2 as the paper's tech report has it, Algorithms 1 and 2 without later repairs. Owns that rule, to compare "e2" with;
the history it reads is kept by the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ..errors import InvalidConfig
from .base import Policy, RequestView, WorkersView
from .known import PaperHistory


class E2Paper(Policy):
    """Algorithms 1 and 2 of the tech report. Our readings, and what "e2" does otherwise:

    Exploit. As printed, Algorithm 1 exploits if `missed < prompt`: whenever one token matches. The text (sections 1,
    4.2) says more tokens matched than missed. The text is the default; "e2-paper:printed" (`exploit_share=0`) is the
    line as printed. What matches is what the *tree* knows, cached somewhere or not ("e2": what one worker caches).

    Candidates are the workers that cache the node with the most tokens on the matched path ("e2": the key portion, the
    deepest node longer than all before it). If nobody does, the request is explored; the paper is silent.

    L is over the last H *requests* of each worker, each with the prefill time of what it missed when it was placed and
    the decode time of the mean output length in H. H is not given; 500. Decode time is that of a request alone. L
    therefore stops growing once H requests are in, and a worker that gets none keeps its L ("e2": a window in time,
    decode seconds as a share of the batch, corrections by what engines report, newcomers scaled up). Before any
    request of a worker has finished, the fleet's mean is used, else 45 tokens, the released code's constant.

    M is computed as if every worker were full ("we expect this cost always to occur"): the least recently used nodes
    that free the *prompt's* length, each PT_j * N_j ("e2": only what is short, with the expected output, sparing the
    request's own path). N_j is the number of the worker's requests on the node in the window W.

    P is the prefill time of what is missed on the worker, as in "e2".

    DECODERATIO and IMBALR have no formula in the paper. The ratio is of what a worker is about to do ("current batch
    composition", section 5.4): the decode time of a request of mean length, which goes on in every iteration, as a
    share of it and of the prefill that waits. Who has none waiting has 1, and L + M + P chooses among equals. IMBALR is
    the worker's cost model's (`preble.costs.thresholds`), or `SchedulerConfig.imbalance_share`; 1 switches this off.

    Ties go by order. Rebalancing and autoscaling (section 4.2, "post-assignment") are the scheduler's plans;
    docs/policies.md has the knob of each stage, and how to switch it off.
    """

    name = reason = "e2-paper"
    needs = ("paper_history",)
    takes_plans = True

    def __init__(self, exploit_share: float = 0.5, name: str = "e2-paper") -> None:
        if not 0.0 <= exploit_share <= 1.0:
            raise InvalidConfig(f"E2Paper.exploit_share must be in [0, 1], got {exploit_share!r}")
        self.exploit_share = exploit_share
        self.name = self.reason = name

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        history: PaperHistory = request.known["paper_history"]
        holders = [name in history.holders for name in workers.ids]
        if history.known_tokens > self.exploit_share * len(request.token_ids) and any(holders):
            return self.costs(history, workers, holders)
        beyond = [
            decode_share(history.output_seconds[name], prefill) - history.imbalance_shares[name]
            for name, prefill in zip(workers.ids, workers.waiting_prefill_seconds, strict=True)
        ]
        most = max(beyond)
        if most > 0.0:
            return self.costs(history, workers, [share == most for share in beyond])
        return self.costs(history, workers, [True] * len(workers))

    def costs(self, history: PaperHistory, workers: WorkersView, wanted: Sequence[bool]) -> list[float]:
        """LOADCOST, L + M + P in seconds, of the wanted workers; infinity for the others."""
        return [
            history.prefill_seconds[name] + history.decode_seconds[name] + history.eviction_seconds(name) + prefill
            if want
            else inf
            for name, prefill, want in zip(workers.ids, workers.prefill_seconds, wanted, strict=True)
        ]

    def pick(self, scores: Sequence[float], request: RequestView, workers: WorkersView) -> int:
        return min(range(len(scores)), key=scores.__getitem__)


def decode_share(decode_seconds: float, prefill_seconds: float) -> float:
    """DECODERATIO, in [0, 1]: 1 where no prefill waits."""
    return decode_seconds / (decode_seconds + prefill_seconds) if prefill_seconds > 0.0 else 1.0
