"""Host memory behind a local scheduler's GPU memory: what is evicted goes there and comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import preble
from preble import CostModel, ManualClock, PrefixEvicted
from preble.batching.kv_cache import HostMemory
from preble.engines.simulated import SimulatedEngine
from preble.errors import InvalidConfig
from preble.local import LocalConfig, LocalRequest, LocalScheduler

CAPACITY = 1000


def scheduler_of(host: HostMemory | None, capacity: int = CAPACITY, **config: Any) -> LocalScheduler:
    settled: dict[str, Any] = {"token_budget": 256, "eviction": "lru", **config}
    return LocalScheduler(LocalConfig(capacity, **settled), clock=ManualClock(), host=host)


def serve(scheduler: LocalScheduler, name: str, prompt: list[int]) -> int:
    """A request from its arrival to its end; returns how many of its tokens were cached at its admission."""
    planned = np.array([7, 8], np.int32)
    scheduler.add(LocalRequest(name, np.array(prompt, np.int32), 2, planned_ids=planned))
    cached = -1
    while scheduler.load().running or scheduler.load().waiting:
        for output in scheduler.complete(scheduler.next_batch(), {}):
            cached = output.cached_tokens or 0
        scheduler.check()
    return cached


def prompt_of(number: int, tokens: int = 400) -> list[int]:
    return list(range(number * 10_000, number * 10_000 + tokens))


def test_what_is_evicted_is_loaded_again() -> None:
    host = HostMemory(10_000, 1e-5)
    scheduler, without = scheduler_of(host), scheduler_of(None)
    for number in (0, 1, 2, 0):
        cached = serve(scheduler, f"r{number}", prompt_of(number)), serve(without, f"r{number}", prompt_of(number))
    assert cached[0] == 399 and cached[1] < 399
    assert 0 < host.loaded_tokens <= 399
    assert host.take_seconds() == pytest.approx(host.loaded_tokens * 1e-5) and host.take_seconds() == 0.0


def test_evictions_say_where_the_tokens_went() -> None:
    scheduler = scheduler_of(HostMemory(10_000, 1e-5))
    for number in range(3):
        serve(scheduler, f"r{number}", prompt_of(number))
    events = scheduler.take_events()
    assert events and all(isinstance(one, PrefixEvicted) and one.moved_to == "CPU" for one in events)


def test_what_host_memory_has_no_room_for_is_gone() -> None:
    scheduler = scheduler_of(HostMemory(500, 1e-5))
    for number in range(6):
        serve(scheduler, f"r{number}", prompt_of(number))
    events = [one for one in scheduler.take_events() if isinstance(one, PrefixEvicted)]
    gone = {one.token_ids[0] // 10_000 for one in events if one.moved_to is None}
    moved = {one.token_ids[0] // 10_000 for one in events if one.moved_to == "CPU"}
    assert gone and gone < moved, "each went to host memory first"
    assert serve(scheduler, "again", prompt_of(0)) == 0


def test_a_prefix_that_does_not_fit_into_host_memory_is_gone_at_once() -> None:
    scheduler = scheduler_of(HostMemory(100, 1e-5))
    for number in range(3):
        serve(scheduler, f"r{number}", prompt_of(number))
    assert all(isinstance(one, PrefixEvicted) and one.moved_to is None for one in scheduler.take_events())


def test_nothing_is_loaded_that_is_quicker_to_compute() -> None:
    host = HostMemory(10_000, 1e-5, lambda here, found, prompt_tokens: False)
    scheduler = scheduler_of(host)
    for number in (0, 1, 2, 0):
        serve(scheduler, f"r{number}", prompt_of(number))
    assert host.loaded_tokens == 0


def test_an_engine_loads_where_that_is_quicker_and_takes_its_time() -> None:
    model = CostModel.preset("mistral-7b/a6000")

    def first_token(token_seconds: float) -> float:
        """Seconds of the iterations until the third prompt's second coming has its first token."""
        host = HostMemory(100_000, token_seconds)
        engine = SimulatedEngine(model, LocalConfig(10_000, eviction="lru"), time_scale=0.0, host=host)
        for number in (0, 1, 2, 0):
            seconds = 0.0
            engine.submit_planned(f"r{number}", np.array(prompt_of(number, 4000), np.int32), np.array([7], np.int32))
            while engine.has_work():
                seconds += engine.begin_step()
                engine.end_batch()
        return seconds

    loaded, computed = first_token(1e-5), first_token(1.0)
    assert computed == pytest.approx(first_token(10.0)), "nothing is loaded that takes longer"
    assert loaded < 0.3 * computed
    assert first_token(8e-5) >= 8e-5 * 1900, "it waits for the link"


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="capacity_tokens"):
        HostMemory(0, 1e-5)
    with pytest.raises(InvalidConfig, match="token_seconds"):
        HostMemory(10, -1.0)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([20, 90, 150])), min_size=1, max_size=25),
    st.sampled_from([60, 200, 1000]),
    st.booleans(),
)
def test_events_say_what_is_cached_where(asked: list[tuple[int, int]], capacity: int, pays: bool) -> None:
    """Whoever follows the events knows of each prompt how much is left, and how much of that is on the GPU: never more
    than there is."""
    host = HostMemory(capacity, 1e-5, lambda here, found, prompt_tokens: pays)
    local = scheduler_of(host, 200)
    spec = preble.WorkerSpec("a", kv_capacity_tokens=200, below_capacity_tokens=capacity)
    follower = preble.GlobalScheduler([spec], cost_model="mistral-7b/a6000", clock=ManualClock())
    for at, (number, tokens) in enumerate(asked):
        prompt = prompt_of(number, tokens)
        decision = follower.schedule(prompt)
        cached = serve(local, f"r{at}", prompt)
        follower.first_token(decision.request_id, cached_tokens=cached)
        follower.finish(decision.request_id, output_tokens=2)
        follower.apply("a", local.take_events())
        follower.check()
        host._cache.check([])
        for known in range(6):
            whole = np.array(prompt_of(known, 150), np.int32)
            here = local._cache.cached_tokens(whole, None)
            there = max(here, host.found(whole, None))
            assert follower.core.tree.match(whole)[1].get(0, 0) <= there
            assert follower.core.tree.on_gpu(whole, 0)[0] <= here
