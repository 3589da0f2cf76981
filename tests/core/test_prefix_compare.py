"""How many leading tokens two runs share: every kernel that this machine can run, against Python. Where kernels matter
to the tree is tested with the tree."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest

from preble._radix import RadixTree, common_tokens

LENGTHS = range(201)  # more than three steps of the widest kernel, 64 tokens each
WIDTHS = ("plain", "avx2", "avx512")


def common_prefix(a: memoryview, b: memoryview) -> int:
    """What every kernel must say."""
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def test_the_widest_kernel_is_the_one_in_use() -> None:
    kernels = list(common_tokens([1], [1]))
    assert kernels == [name for name in WIDTHS if name in kernels] and kernels[0] == "plain"
    assert RadixTree().kernel() == kernels[-1]


def test_every_kernel_that_the_processor_offers_is_compared() -> None:
    """Else the tests below could pass without having run one."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text().split() if info.exists() else []
    if "flags" not in flags:
        pytest.skip("no list of what this processor can do")
    offered = ["plain", *(name for name, flag in (("avx2", "avx2"), ("avx512", "avx512f")) if flag in flags)]
    assert list(common_tokens([1], [1])) == offered


@pytest.mark.parametrize(("start", "other_start"), [(0, 0), (1, 0), (3, 5), (7, 15)])
def test_kernels_find_the_first_difference_wherever_it_is(start: int, other_start: int) -> None:
    """All lengths, all positions, runs that begin anywhere; beyond their ends the runs go on alike, which must not
    count."""
    rng = random.Random(start)
    tokens = [rng.randrange(2**31) for _ in range(max(LENGTHS) + 80)]
    one = memoryview(array("i", [0] * start + tokens))[start:]
    many = array("i", [0] * other_start + tokens)
    other = memoryview(many)[other_start:]
    for length in LENGTHS:
        assert set(common_tokens(one[:length], other[:length]).values()) == {length}
        for at in range(length):
            kept = other[at]
            other[at] ^= 1 << rng.randrange(31)  # any one bit
            said = common_tokens(one[:length], other[:length])
            assert set(said.values()) == {at}, f"{length} tokens that differ at {at}: {said}"
            other[at] = kept


def test_kernels_agree_on_runs_with_many_differences_and_of_unlike_length() -> None:
    rng = random.Random(7)
    for _ in range(3000):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(300))]
        changed = [token if rng.random() < 0.99 else 3 for token in tokens[: rng.randrange(300)]]
        one, other = memoryview(array("i", tokens)), memoryview(array("i", changed))
        assert set(common_tokens(one, other).values()) == {common_prefix(one, other)}
