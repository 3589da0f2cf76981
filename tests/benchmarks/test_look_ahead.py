"""The engines of `benchmarks.scale.look_ahead` keep what they promise: else nothing follows from their figures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.scale.look_ahead import CPU, GPU, LIVE, MIXED, SHORT, Asked, Case, Engine, Kind, Run, drawn, measured

SMALL = replace(LIVE, seconds=10.0)


def asked(number: int, document: int = 0, prefix: int = 100, output: int = 2) -> Asked:
    return Asked(number, 0.0, document, prefix, 10, output)


@pytest.mark.parametrize("kind", [CPU, GPU, MIXED])
@pytest.mark.parametrize("seconds", [None, 1.0])
def test_every_request_is_answered_after_it_began_after_it_came(kind: Kind, seconds: float | None) -> None:
    requests = drawn(SMALL, kind, 0.8, 2, seed=3)
    Run(Case(kind, SMALL, 0.8), seconds).serve(requests)
    assert requests and all(one.arrived < one.first < one.ended < math.inf for one in requests)


def test_a_run_is_the_same_again_and_another_seed_is_another() -> None:
    case = Case(CPU, SMALL, 0.8)
    assert measured(case, 1.0, 1) == measured(case, 1.0, 1) != measured(case, 1.0, 2)


def test_prompts_of_a_batch_begin_together_and_share_nothing_that_it_computes() -> None:
    engine = Engine(CPU)
    for number in range(3):
        engine.take(asked(number))
    step = engine.step()
    assert step is not None
    seconds, first, ended = step
    assert len(first) == 3 and not ended
    assert seconds == pytest.approx(CPU.overhead + 330 * CPU.per_token)
    engine.take(asked(3))
    again = engine.step()
    assert again is not None and again[0] == pytest.approx(CPU.prefill(10, 100)), "what was computed is cached now"


def test_a_long_prompt_is_prefilled_in_parts_and_others_wait_for_it() -> None:
    engine = Engine(replace(MIXED, budget=60))
    engine.take(asked(0))
    engine.take(asked(1, document=1))
    begun = [len(step[1]) for step in iter(engine.step, None) if step[1]]
    assert begun == [1, 1]


def test_no_more_run_than_there_are_places() -> None:
    engine = Engine(replace(GPU, places=2))
    for number in range(5):
        engine.take(asked(number, document=number))
    first = engine.step()
    assert first is not None and len(first[1]) == 2
    second = engine.step()
    assert second is not None and not second[1], "the places are taken: it decodes"


def test_where_nothing_waits_the_queue_changes_nothing() -> None:
    case = Case(GPU, replace(SHORT, seconds=2.0), 0.05, place="least load")
    assert measured(case, 1.0, 0) == measured(case, None, 0)


@pytest.mark.parametrize("seen", [0.0, 0.1])
def test_answers_that_show_no_first_token_take_no_longer_for_costs_that_nobody_measured(seen: float) -> None:
    """They took 6.5 and 1.6 times as long: what is thought of prefills was their bound, and nothing corrected it."""
    case = Case(GPU, replace(SHORT, seconds=5.0), 2.0, place="least load", costs=10.0, streamed=seen)
    assert measured(case, 1.0, 0)[2] < 1.1 * measured(case, None, 0)[2]
