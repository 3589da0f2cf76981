"""Who has little to compute goes before the next chunk of a long prefill, and takes nothing from it but half of the
budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from preble.clock import ManualClock
from preble.errors import InvalidConfig
from preble.local import LocalConfig, LocalRequest, LocalScheduler
from preble.types import Claim

BUDGET = 64


def scheduler_of(capacity: int = 4000, **config: Any) -> LocalScheduler:
    return LocalScheduler(LocalConfig(capacity, token_budget=BUDGET, **config), clock=ManualClock())


def add(scheduler: LocalScheduler, name: str, prompt: list[int], output: int = 2) -> None:
    planned = np.arange(output, dtype=np.int32) + 7
    scheduler.add(LocalRequest(name, np.array(prompt, np.int32), output, planned_ids=planned))


def step(scheduler: LocalScheduler) -> tuple[dict[str, int], list[str]]:
    """One iteration: (tokens computed of each prompt, who had a first token)."""
    batch = scheduler.next_batch()
    chunks = {live.request.request_id: live.scheduled for live in batch.prefills}
    firsts = [out.request_id for out in scheduler.complete(batch, {}) if out.index == 0]
    scheduler.check()
    return chunks, firsts


def with_a_long_prefill(**config: Any) -> LocalScheduler:
    """[1] * 100 is cached, and 1,000 other tokens are being computed."""
    scheduler = scheduler_of(**config)
    add(scheduler, "before", [1] * 100)
    while scheduler.load().running or scheduler.load().waiting:
        step(scheduler)
    add(scheduler, "long", [2] * 1000)
    assert step(scheduler) == ({"long": BUDGET}, [])
    return scheduler


def test_a_cached_prompt_does_not_wait_for_the_end_of_a_long_prefill() -> None:
    scheduler = with_a_long_prefill()
    add(scheduler, "short", [*[1] * 100, *[3] * 20])
    chunks, firsts = step(scheduler)
    assert firsts == ["short"] and chunks["long"] == BUDGET - chunks["short"]


def test_without_it_the_long_one_is_computed_first() -> None:
    scheduler = with_a_long_prefill(short_first=False)
    add(scheduler, "short", [*[1] * 100, *[3] * 20])
    assert step(scheduler) == ({"long": BUDGET}, [])


def test_short_ones_take_half_of_the_budget_at_most() -> None:
    scheduler = with_a_long_prefill()
    for number in range(10):
        add(scheduler, f"short {number}", [*[1] * 100, *[10 + number] * 12])
    add(scheduler, "half and one", [9] * (BUDGET // 2 + 1))
    left = 1000 - BUDGET
    while (left := left - (chunks := step(scheduler)[0])["long"]) > 0:
        assert "half and one" not in chunks
        assert chunks["long"] >= (BUDGET - 10) // 2, "ten decode at most"


def test_short_ones_leave_a_long_one_the_memory_that_it_needs() -> None:
    scheduler = with_a_long_prefill(capacity=1130)
    for number in range(8):
        add(scheduler, f"short {number}", [20 + number] * 30)
    firsts: list[str] = []
    while "long" not in firsts:
        chunks, fresh = step(scheduler)
        firsts += fresh
        assert "long" in chunks, "it went on in every iteration"
    assert firsts[0] != "long" and scheduler.stats()["preempted"] == 0


def test_no_more_run_than_an_iteration_has_tokens_for_where_prefills_are_discarded() -> None:
    scheduler = LocalScheduler(LocalConfig(4000, token_budget=4), clock=ManualClock())
    names = ["before", "long", *(f"short {number}" for number in range(10))]
    add(scheduler, "before", [1] * 10)
    firsts: list[str] = []
    while "before" not in firsts or scheduler.load().running:
        firsts += step(scheduler)[1]
    add(scheduler, "long", [2] * 100)
    step(scheduler)
    for number, name in enumerate(names[2:]):
        add(scheduler, name, [*[1] * 10, 10 + number])
    for _ in range(6):  # two more fit into half of the budget each time, and none of them is computed
        scheduler.discard(scheduler.next_batch())
        scheduler.check()
    assert scheduler.load().running == 4
    while scheduler.load().running:
        firsts += step(scheduler)[1]
    assert sorted(firsts) == sorted(names)


def test_what_is_no_switch_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"LocalConfig\.short_first"):
        scheduler_of(short_first=1)


def timed_step(scheduler: LocalScheduler, clock: ManualClock) -> tuple[dict[str, int], list[str]]:
    """As `step`; it takes half a second."""
    batch = scheduler.next_batch()
    chunks = {live.request.request_id: live.scheduled for live in batch.prefills}
    clock.advance(0.5)
    return chunks, [out.request_id for out in scheduler.complete(batch, {}) if out.index == 0]


@pytest.mark.parametrize(("deadline_seconds", "passes"), [(100.0, True), (10.0, False)])
def test_a_long_prefill_is_not_passed_where_it_would_miss_its_deadline_by_that(
    deadline_seconds: float, passes: bool
) -> None:
    clock = ManualClock()
    scheduler = LocalScheduler(LocalConfig(4000, token_budget=BUDGET), clock=clock)
    add(scheduler, "before", [1] * 100)
    while scheduler.load().running or scheduler.load().waiting:
        timed_step(scheduler, clock)
    claim = Claim(deadline_seconds=deadline_seconds)
    scheduler.add(LocalRequest("long", np.full(1000, 2, np.int32), 2, claim=claim))
    assert timed_step(scheduler, clock) == ({"long": BUDGET}, [])
    add(scheduler, "short", [*[1] * 100, *[3] * 20])
    chunks, firsts = timed_step(scheduler, clock)  # half of the budget each time would take it 15 s
    assert firsts == (["short"] if passes else [])
    assert chunks["long"] == BUDGET - chunks.get("short", 0)
    scheduler.check()
