"""The worker's eviction by returns, through `LocalScheduler`: who stays when the cache is too small, and that whatever
goes is reported and nothing else breaks. Sessions here are prompts that each extend the one before and its answer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from preble.clock import ManualClock
from preble.local import LocalConfig, LocalRequest, LocalScheduler
from preble.types import PrefixEvicted

TOOL_END, TURN_END = 1_000_001, 1_000_002


@dataclass
class Served:
    """A scheduler whose every answer is given beforehand, and what routers would expect it to cache."""

    scheduler: LocalScheduler
    clock: ManualClock
    cached: dict[str, int] = field(default_factory=dict)
    evicted: list[PrefixEvicted] = field(default_factory=list)

    @classmethod
    def of(cls, capacity: int, **config: object) -> Served:
        clock = ManualClock()
        return cls(LocalScheduler(LocalConfig(capacity, **config), clock=clock), clock)  # type: ignore[arg-type]

    def add(self, name: str, prompt: list[int], answer: list[int]) -> None:
        ids = np.array(answer, np.int32)
        self.scheduler.add(LocalRequest(name, np.array(prompt, np.int32), len(answer), planned_ids=ids))

    def cached_now(self, prompt: list[int]) -> int:
        """How much of a prompt is cached."""
        return self.scheduler._cache.cached_tokens(np.array(prompt, np.int32), None)

    def step(self) -> bool:
        batch = self.scheduler.next_batch()
        for output in self.scheduler.complete(batch, {}):
            self.cached[output.request_id] = output.cached_tokens
        self.evicted += [event for event in self.scheduler.take_events() if isinstance(event, PrefixEvicted)]
        self.clock.advance(0.05)
        return bool(batch)

    def serve(self, name: str, prompt: list[int], answer: list[int]) -> int:
        """One request from beginning to end; returns how many of its tokens were cached."""
        self.add(name, prompt, answer)
        while self.step():
            pass
        return self.cached[name]


def pauses_seen(served: Served, tool_seconds: float = 5.0, person_seconds: float = 400.0) -> None:
    """Let it see sessions of one turn and its next, after tools and after people."""
    for number in range(60):
        for end, seconds in ((TOOL_END, tool_seconds), (TURN_END, person_seconds)):
            prompt, answer = [number, end, *range(8)], [1, 2, end]
            served.serve(f"{end}.{number}", prompt, answer)
            served.clock.advance(seconds)
            served.serve(f"{end}.{number}+", [*prompt, *answer, 7, 7], [3, end])


@pytest.mark.parametrize(("eviction", "stays"), [("returns", "tool"), ("lru", "person")])
def test_who_will_be_back_soon_stays(eviction: str, stays: str) -> None:
    served = Served.of(100, eviction=eviction)
    pauses_seen(served)
    served.serve("tool", [11] * 40, [1, TOOL_END])
    served.clock.advance(1.0)
    served.serve("person", [22] * 40, [1, TURN_END])
    served.clock.advance(1.0)
    served.serve("other", [33] * 50, [1, TURN_END])
    cached = {name: served.cached_now([token] * 40) for name, token in (("tool", 11), ("person", 22))}
    assert [name for name, tokens in cached.items() if tokens == 40] == [stays]
    served.scheduler.check()


def test_who_waits_keeps_its_prefix_from_who_is_admitted_before() -> None:
    served = Served.of(120, max_running=1, order="fcfs", min_shared_tokens=0)
    served.serve("first", [11] * 50, [1, TURN_END])
    served.clock.advance(1.0)
    served.serve("second", [22] * 50, [1, TURN_END])
    served.add("other", [33] * 60, [1, TURN_END])
    served.add("first again", [*[11] * 50, 1, TURN_END, 5], [9, TURN_END])
    while served.step():
        pass
    assert served.cached["first again"] == 51, "the second's was used later, and nobody waits for it"
    served.scheduler.check()


def test_nothing_is_kept_for_good() -> None:
    served = Served.of(60)
    pauses_seen(served)
    served.serve("tool", [11] * 40, [1, TOOL_END])
    for number in range(3):
        served.serve(f"person {number}", [100 + number] * 55, [1, TURN_END])
    assert served.cached_now([11] * 40) < 10


def test_an_answer_that_its_session_does_not_go_on_with_is_the_first_to_go() -> None:
    served = Served.of(200)
    served.serve("turn", [11] * 20, [*[4] * 30, TOOL_END])
    served.clock.advance(1.0)
    served.serve("next", [*[11] * 20, *[5] * 20], [6, TOOL_END])
    served.serve("other", [33] * 130, [1, TURN_END])
    assert served.evicted and served.evicted[0].token_ids[20] == 4
    assert served.serve("third", [*[11] * 20, *[5] * 20, 6], [6, TOOL_END]) == 40


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_slots_and_reports_are_right(seed: int) -> None:
    rng = random.Random(seed)
    served = Served.of(
        rng.choice([40, 60, 90]), max_running=rng.choice([2, 4]), token_budget=rng.choice([5, 16]), max_waiting=8
    )
    sessions: list[list[int]] = []
    known: set[tuple[int, ...]] = set()
    live: dict[str, tuple[list[int], list[int]]] = {}
    for number in range(300):
        if len(live) < 6:
            if sessions and rng.random() < 0.6:
                prompt = [*rng.choice(sessions), rng.randint(0, 9)][:30]
            else:
                prompt = [rng.randint(0, 3) for _ in range(rng.randint(2, 18))]
            answer = [*[rng.randint(0, 5) for _ in range(rng.randint(0, 6))], rng.choice([TOOL_END, TURN_END])]
            served.add(f"r{number}", prompt, answer)
            live[f"r{number}"] = prompt, answer
        if rng.random() < 0.1:
            gone = rng.choice(sorted(live))
            assert served.scheduler.cancel(gone)
            del live[gone]
        served.step()
        served.clock.advance(rng.choice([0.0, 1.0, 30.0]))
        for name in [name for name in live if name not in served.scheduler._live]:
            prompt, answer = live.pop(name)
            sessions.append([*prompt, *answer])
            known.add((*prompt, *answer[:-1]))
        for event in served.evicted:
            gone_tokens = tuple(event.token_ids[: event.kept_tokens + 1])
            known = {tokens for tokens in known if tokens[: event.kept_tokens + 1] != gone_tokens}
        served.evicted.clear()
        served.scheduler.check()
        for tokens in known:
            assert served.cached_now(list(tokens)) == len(tokens), "it went without a report"
    assert served.scheduler.stats()["evicted_tokens"] > 100 and served.scheduler.stats()["preempted"] >= 0


def test_ends_are_bounded_by_what_is_cached() -> None:
    served = Served.of(300)
    for number in range(400):
        served.serve(f"r{number}", [number] * 6, [number, TURN_END])
    retention = served.scheduler._cache._retention
    assert retention is not None and len(retention) <= 300 // 6
