"""The cost rules of NVIDIA Dynamo's KV router: prefill still to do plus blocks held, as a sum or as a product. Owns
both formulas; the blocks of live requests are counted by the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidConfig
from .base import Policy, RequestView, WorkersView
from .known import ActiveBlocks, drawn_least

BLOCK_TOKENS = 16


class KvCost(Policy):
    """The lowest `prefill_load_scale * max(active prefill + prompt - cached, 0) + blocks + new blocks`, all in blocks
    of 16 tokens; equals are drawn among, which is what temperature 0 does.

    `active prefill`: uncached tokens of the worker's requests before their first token. `blocks`: different blocks of
    the prompts of its live requests; `new blocks`: what this request would add to them.
    """

    name = reason = "kv_cost"
    needs = ("active_blocks",)

    def __init__(self, prefill_load_scale: float = 1.0) -> None:
        if not prefill_load_scale >= 0.0:
            raise InvalidConfig(f"KvCost.prefill_load_scale must be at least 0, got {prefill_load_scale!r}")
        self.prefill_load_scale = prefill_load_scale

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        active: ActiveBlocks = request.known["active_blocks"]
        prompt = len(request.token_ids)
        return [
            self.cost(
                max(active.prefill_tokens[name] + prompt - matched, 0) / BLOCK_TOKENS,
                active.blocks[name] + active.new_blocks[name],
            )
            for name, matched in zip(workers.ids, workers.matched_tokens, strict=True)
        ]

    def cost(self, prefill_blocks: float, held_blocks: int) -> float:
        """What a worker with so much to prefill and to hold, this request included, costs."""
        return self.prefill_load_scale * prefill_blocks + held_blocks

    def pick(self, scores: Sequence[float], request: RequestView, workers: WorkersView) -> int:
        return drawn_least(scores, request.draw)


class LMetric(KvCost):
    """The lowest product of blocks to prefill and blocks held plus one."""

    name = reason = "lmetric"

    def __init__(self) -> None:
        super().__init__()

    def cost(self, prefill_blocks: float, held_blocks: int) -> float:
        return prefill_blocks * (held_blocks + 1)
