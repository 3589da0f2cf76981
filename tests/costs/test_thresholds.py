"""The paper's thresholds from a cost model: worked numbers, bounds, refusals."""

from __future__ import annotations

import pytest

from preble import CostModel
from preble.costs.thresholds import FREE_TOKENS_MAX, free_prefill_tokens, imbalance_share, rebalance_ratio
from preble.errors import InvalidInput

# 20 ms up to 100 tokens, then 0.1 ms a token.
KNEE = CostModel([(0, 0.020), (100, 0.020), (10_100, 1.020)])


def test_worked_numbers() -> None:
    # 22 ms are reached with 120 tokens, one of them decoded; 4,096 tokens take 419.6 ms, 0.10244 ms each.
    assert free_prefill_tokens(KNEE) == 119
    assert imbalance_share(KNEE) == pytest.approx(20.0 / (20.0 + 119 * 419.6 / 4096))
    # 1,000 tokens take 110 ms, the 200 that are not cached 30 ms, ten output tokens 200 ms.
    assert rebalance_ratio(KNEE, 1000, 800, 10) == pytest.approx(310.0 / 230.0)


def test_no_room_and_no_gain_are_the_bounds() -> None:
    steep = CostModel([(0, 0.001), (1000, 1.001)])  # a token costs what an iteration does: none comes along
    assert free_prefill_tokens(steep) == 0 and imbalance_share(steep) == 1.0
    flat = CostModel([(0, 0.02), (10_000, 0.02)])
    assert free_prefill_tokens(flat) == FREE_TOKENS_MAX and 0.0 < imbalance_share(flat) < 0.4
    assert rebalance_ratio(flat, 1000, 999, 1) == 1.0
    assert rebalance_ratio(KNEE, 1000, 0, 10) == 1.0


@pytest.mark.parametrize("name", CostModel.presets())
def test_presets_are_in_range_and_shares_grow_with_what_is_cached(name: str) -> None:
    cost = CostModel.preset(name)
    assert 0.4 < imbalance_share(cost) < 0.95
    ratios = [rebalance_ratio(cost, 1835, cached, 43) for cached in (0, 500, 1000, 1500, 1834)]
    assert ratios == sorted(ratios) and ratios[0] == 1.0 and 1.0 < ratios[-1] < 2.0


@pytest.mark.parametrize("tokens", [(100, 100, 1), (100, -1, 1), (100, 50, 0)])
def test_tokens_that_make_no_sense_are_refused(tokens: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidInput, match="cached_tokens"):
        rebalance_ratio(KNEE, *tokens)
