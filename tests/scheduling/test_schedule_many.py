"""Several prompts placed by one call: the decisions of single calls in order, and errors that change nothing."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble import Decision, GlobalScheduler, ManualClock, Policy, SchedulerConfig, WorkerSpec
from preble.errors import DuplicateRequest, InvalidInput, InvalidTokens, NoWorkers, QueueFull
from preble.policies.base import RequestView, WorkersView
from preble.scheduling.records import DecisionRecording

# Few segments, put together and cut: prompts share, split and extend each other.
SEGMENTS = [tuple(range(100 * i, 100 * i + size)) for i, size in enumerate([10, 16, 33, 5, 20])]
prompts = st.builds(
    lambda parts, cut: sum((SEGMENTS[part] for part in parts), ())[:cut],
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.sampled_from([1, 9, 16, 17, 40, 99, 99, 99]),
)
batches = st.lists(
    st.tuples(st.lists(prompts, max_size=70), st.sampled_from([None, "tenant"]), st.integers(0, 40)), max_size=5
)


def scheduler(*names: str, **more: Any) -> GlobalScheduler:
    """Small workers, whose caches soon evict, and a clock that stands still."""
    workers = [WorkerSpec(name, kv_capacity_tokens=200, block_size=4) for name in names or ("a", "b", "c")]
    return GlobalScheduler(workers, clock=ManualClock(100.0), **more)


def said(decision: Decision) -> tuple[Any, ...]:
    return (
        decision.worker,
        decision.request_id,
        decision.reason,
        decision.matched_tokens,
        decision.prompt_tokens,
    )


def state(sched: GlobalScheduler) -> Any:
    """All that a decision may change."""
    return sched.stats(), sched.core.tree.show(10**6), list(sched.core.leases)


@settings(max_examples=150, deadline=None)
@given(batches, st.sampled_from(["e2", "e2", "least_loaded", "round_robin", "e2-paper"]), st.booleans())
def test_decisions_and_all_they_leave_are_those_of_single_calls(
    rounds: list[tuple[list[tuple[int, ...]], Any, int]], policy: str, recorded: bool
) -> None:
    many, one = (scheduler(policy=policy, record=DecisionRecording() if recorded else None) for _ in range(2))
    for asked, namespace, finished in rounds:
        more = {"namespace": namespace, "max_new_tokens": finished + 1}
        together = many.schedule_many(asked, **more)
        single = [one.schedule(tokens, **more) for tokens in asked]
        assert list(map(said, together)) == list(map(said, single))
        for decision in single[:finished]:
            assert many.finish(decision.request_id, output_tokens=3)
            assert one.finish(decision.request_id, output_tokens=3)
        for sched in (many, one):
            sched._clock.advance(0.5)
        assert state(many) == state(one)
        many.check()


def test_prompts_may_be_of_every_kind_and_ids_of_ones_own() -> None:
    sched = scheduler()
    kinds = [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.int32), np.array([1, 2, 3]), array("i", [1, 2, 3])]
    decisions = sched.schedule_many(iter(kinds), request_ids=["x", None, 7, (1, "y"), b"z"])
    assert [decision.request_id for decision in decisions] == ["x", "request-1", 7, (1, "y"), b"z"]
    assert [decision.prompt_tokens for decision in decisions] == [3] * 5
    assert sched.schedule_many(np.arange(12, dtype=np.int32).reshape(3, 4))[2].prompt_tokens == 4
    assert sched.schedule_many([]) == []
    assert sched.stats()["scheduled"] == 8


@pytest.mark.parametrize("policy", ["e2", "least_loaded"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prompts": [[1], [], [3]]}, InvalidTokens, r"prompts\[1\]: .*empty"),
        ({"prompts": [[1], [2], np.array([5, -3], np.int32)]}, InvalidTokens, r"prompts\[2\]: token_ids\[1\]"),
        ({"prompts": [[1], [2], ["three"]]}, InvalidTokens, r"prompts\[2\]: token_ids\[0\] is a str"),
        ({"prompts": [[1], "text", [3]]}, InvalidTokens, r"prompts\[1\]"),
        ({"prompts": "text"}, InvalidInput, "prompts must be an iterable"),
        ({"prompts": 7}, InvalidInput, "prompts must be an iterable"),
        ({"request_ids": ["x", "live", "y"]}, DuplicateRequest, r"request_ids\[1\]: .*'live' is live"),
        ({"request_ids": ["x", "y", "x"]}, DuplicateRequest, r"request_ids\[2\]: .*'x' is live"),
        ({"request_ids": ["x", "y", []]}, InvalidInput, r"request_ids\[2\]: .*hashable"),
        ({"request_ids": ["x"]}, InvalidInput, "request_ids are 1 for 3 prompts"),
        ({"groups": ["x", "y", []]}, InvalidInput, r"groups\[2\] must be hashable"),
        ({"groups": ["x"]}, InvalidInput, "groups are 1 for 3 prompts"),
        ({"namespace": []}, InvalidInput, "namespace must be hashable"),
        ({"namespace": "new", "prompts": [[1], [-1]]}, InvalidTokens, r"prompts\[1\]"),
        ({"max_new_tokens": 0}, InvalidInput, "max_new_tokens"),
        ({"prompts": [[1]] * 8}, QueueFull, "8 more requests than the 1 live"),
    ],
)
def test_one_bad_prompt_changes_nothing_and_is_named(
    policy: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    sched = scheduler(policy=policy, config=SchedulerConfig(live_requests_max=8))
    sched.schedule([1, 2, 3, 4, 5], request_id="live")
    before = state(sched)
    with pytest.raises(error, match=message):
        sched.schedule_many(**{"prompts": [[1, 2], [3, 4], [5, 6]], **change})
    assert state(sched) == before
    sched.check()


def test_without_workers_nothing_is_placed() -> None:
    sched = scheduler()
    for name in "abc":
        sched.drain_worker(name)
    before = state(sched)
    with pytest.raises(NoWorkers):
        sched.schedule_many([[1], [2]])
    assert state(sched) == before


def test_what_was_placed_before_memory_ran_out_is_cancelled() -> None:
    sched = scheduler()
    sched.schedule_many([[100 * i + j for j in range(40)] for i in range(3)])
    failed = 0
    for nth in range(1, 200):
        live, account = list(sched.core.leases), sched.stats()["workers"]
        sched.core.tree.fail_allocation(nth)
        try:
            done = sched.schedule_many([[10_000 * nth + 100 * i + j for j in range(60)] for i in range(50)])
        except MemoryError:
            failed += 1
            assert list(sched.core.leases) == live
            for name, worker in sched.stats()["workers"].items():
                for what in ("live_requests", "live_prompt_tokens", "load_seconds", "waiting_requests"):
                    assert worker.get(what) == account[name].get(what)
        else:
            for decision in done:
                sched.cancel(decision.request_id)
        sched.core.tree.fail_allocation(0)
        sched.check()
    assert failed >= 50


def test_a_policy_that_fails_in_the_midst_leaves_nothing_booked() -> None:
    class Fails(Policy):
        name = reason = "fails"

        def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
            if request.sequence == 2:
                raise RuntimeError("its own")
            return [0.0] * len(workers)

    sched = scheduler(policy=Fails())
    with pytest.raises(RuntimeError, match="its own"):
        sched.schedule_many([[1], [2], [3], [4]])
    assert not sched.core.leases and sched.stats()["cancelled"] == 2
    sched.check()


def test_a_namespace_that_finds_no_room_is_placed_all_the_same() -> None:
    sched = scheduler(config=SchedulerConfig(max_bytes=1 << 20))
    decisions = sched.schedule_many([[1, 2], [1, 2, 3]], namespace="x" * (2 << 20))
    assert [decision.prompt_tokens for decision in decisions] == [2, 3]
    assert sched.stats()["tree"]["namespaces"] == 0 and sched.stats()["live_requests"] == 2
    sched.check()


def test_calls_of_several_threads_place_every_prompt_once() -> None:
    sched = scheduler()
    found: list[Decision] = []

    def place(start: int) -> None:
        for _turn in range(20):
            found.extend(sched.schedule_many([list(range(start + i, start + i + 30)) for i in range(40)]))
            for decision in found[-10:]:
                sched.finish(decision.request_id)

    threads = [threading.Thread(target=place, args=(10_000 * number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({decision.request_id for decision in found}) == len(found) == 2400
    assert sched.stats()["scheduled"] == 2400
    sched.check()
