"""Requests guessed from chains: prompts, chunks, output and turns, at the pace of each engine; and those nobody saw."""

from __future__ import annotations

import numpy as np
import pytest

from preble.cli.audit.ledger import Chain, Segment, Unit
from preble.cli.audit.requests import Counted, Pace, SeenRequest, requests_of, unseen_requests

SGLANG = Pace(1e-4, 0.02, 64.0, at_once=True)
VLLM = Pace(1e-4, 0.02, 64.0, at_once=False)


def chain(*grown: tuple[float, int, int], start: int = 0) -> Chain:
    """(seconds, tokens, blocks) one after the other."""
    made, end = Chain(0, start), start
    for seconds, tokens, blocks in grown:
        end += tokens
        made.segments.append(Segment(seconds, tokens, blocks, None, end))
    return made


def told(found: list[SeenRequest]) -> list[tuple[int, int, int]]:
    return [(one.prompt_tokens, one.computed_tokens, one.output_tokens) for one in found]


def test_a_chain_of_sglang_is_a_prompt_its_output_and_the_next_turn() -> None:
    grown = chain((1.0, 320, 20), (2.4, 64, 4), (9.0, 160, 10), (10.3, 64, 4), start=160)
    assert told(requests_of(grown, SGLANG)) == [(480, 320, 64), (704, 160, 64)]


def test_chunks_of_a_prompt_are_one_request() -> None:
    grown = chain((1.0, 2048, 128), (1.25, 2048, 128), (1.4, 1024, 64), (2.7, 64, 4))
    (one,) = requests_of(grown, SGLANG)
    assert told([one]) == [(5120, 5120, 64)] and one.seconds == 1.4


def test_a_chain_of_vllm_grows_by_a_block_of_output_at_a_time() -> None:
    blocks = [(1.0 + 0.32 * number, 16, 1) for number in range(1, 5)]
    grown = chain((1.0, 320, 20), *blocks, (9.0, 160, 10), (9.4, 16, 1))
    assert told(requests_of(grown, VLLM)) == [(320, 320, 64), (544, 160, 16)]


def test_a_block_long_after_is_the_next_turn() -> None:
    assert told(requests_of(chain((1.0, 320, 20), (60.0, 16, 1)), VLLM)) == [(320, 320, 0), (336, 16, 0)]


@pytest.mark.parametrize("running", [0, 2])
def test_what_metrics_count_beyond_what_was_seen_was_unseen(running: int) -> None:
    unit = Unit(1, None, 160, b"")
    seen = [SeenRequest(0, at, unit, 160, 160) for at in (1.0, 11.0)]
    counted = [Counted(0.0, 10.0, 4.0), Counted(10.0, 20.0, 3.0)]
    found = unseen_requests(0, seen, counted, 800.0, 32, (), -running, np.random.default_rng(0))
    assert len(found) == 5 - running
    assert all(not one.is_seen and one.unit is unit and one.computed_tokens == 0 for one in found)
    assert all(0.0 <= one.seconds <= 20.0 and one.output_tokens == 32 for one in found)
    again = unseen_requests(0, seen, counted, 800.0, 32, (), -running, np.random.default_rng(0))
    assert [one.seconds for one in again] == [one.seconds for one in found]


def test_unseen_requests_get_prompts_of_about_their_length() -> None:
    units = [Unit(number, None, end, b"") for number, end in enumerate((100, 1000, 5000))]
    found = unseen_requests(0, [], [Counted(0.0, 10.0, 50.0)], 50 * 1000.0, 8, units, 0, np.random.default_rng(1))
    assert sum(one.prompt_tokens == 1000 for one in found) > 25
    (lone,) = unseen_requests(0, [], [Counted(0.0, 10.0, 1.0)], 300.0, 8, (), 0, np.random.default_rng(1))
    assert lone.unit is None and lone.prompt_tokens == 300, "nothing is known of it but its length"
