"""Policies: what the built-in ones choose, what a subclass may do, and that nonsense from one books nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from preble import CostModel, GlobalScheduler, ManualClock, Policy, WorkerSpec
from preble.errors import InvalidConfig, InvalidInput
from preble.policies.base import POLICIES, RequestView, WorkersView

BUILT_IN = [name for name in POLICIES if name != "e2"]
PROMPT = list(range(100))


def scheduler(policy: Any, workers: int = 4, seed: int = 0) -> GlobalScheduler:
    """Of engines that take the same for any short prompt."""
    names, clock = [f"w{i}" for i in range(workers)], ManualClock(10.0)
    return GlobalScheduler(names, policy=policy, cost_model="mistral-7b/a6000", clock=clock, seed=seed)


def choices(sched: GlobalScheduler, count: int) -> list[str]:
    return [sched.schedule([i, i + 1, i + 2]).worker for i in range(count)]


# --- built in ---------------------------------------------------------------------------------------------------------


def test_round_robin_takes_each_worker_in_turn() -> None:
    assert choices(scheduler("round_robin", 3), 7) == ["w0", "w1", "w2", "w0", "w1", "w2", "w0"]


def test_round_robin_goes_on_over_workers_that_are_left() -> None:
    sched = scheduler("round_robin", 4)
    sched.drain_worker("w1")
    assert choices(sched, 6) == ["w0", "w2", "w3"] * 2


def test_random_is_the_same_for_the_same_seed_and_fair() -> None:
    first = choices(scheduler("random", seed=7), 2000)
    assert first == choices(scheduler("random", seed=7), 2000)
    assert first != choices(scheduler("random", seed=8), 2000)
    counts = Counter(first)
    assert all(abs(count - 500) < 100 for count in counts.values()) and len(counts) == 4


def test_least_loaded_takes_the_worker_with_the_fewest_live_requests() -> None:
    sched = scheduler("least_loaded", 3)
    decisions = [sched.schedule([i, i]) for i in range(5)]
    assert [d.worker for d in decisions] == ["w0", "w1", "w2", "w0", "w1"]
    sched.finish(decisions[1].request_id)
    sched.cancel(decisions[4].request_id)
    assert choices(sched, 3) == ["w1", "w1", "w2"]


def test_least_loaded_prefers_less_prefill_among_equals() -> None:
    sched = scheduler("least_loaded", 2)
    sched.schedule(list(range(5000)))
    sched.schedule([1, 2, 3])
    assert sched.schedule([9]).worker == "w1"


def test_longest_prefix_follows_the_cache_and_balances_the_rest() -> None:
    sched = scheduler("longest_prefix", 3)
    assert choices(sched, 3) == ["w0", "w1", "w2"]
    home = sched.schedule(PROMPT).worker
    assert {sched.schedule([*PROMPT[:60], -1 + 500 + i]).worker for i in range(20)} == {home}
    assert sched.schedule([7000]).worker != home


@pytest.mark.parametrize("name", POLICIES)
def test_explaining_is_deciding(name: str) -> None:
    """Eighty requests with shared prefixes: each is explained first, and goes where the explanation said."""
    sched = scheduler(name, seed=3)
    live = []
    for i in range(80):
        prompt = [i % 7] * (10 + i % 5) + [i]
        told = sched.explain(prompt, max_new_tokens=20)
        assert sched.explain(prompt, max_new_tokens=20) == told
        decision = sched.schedule(prompt, max_new_tokens=20, explain=True)
        assert (told.worker, told.reason, told.matched_tokens) == (
            *(decision.worker, decision.reason, decision.matched_tokens),
        )
        assert told.policy == name == sched.policy
        assert {cost.worker: cost.total_seconds for cost in told.workers} == decision.costs
        live.append(decision.request_id)
        if i % 3 == 0:
            sched.finish(live.pop(0), output_tokens=i)
    sched.check()


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_score_that_wins_is_the_lowest_shown(name: str) -> None:
    sched = scheduler(name)
    for i in range(12):
        told = sched.explain([1, 2, 3, i])
        scores = {cost.worker: cost.score for cost in told.workers}
        assert scores[told.worker] == min(scores.values())
        assert told.runner_up != told.worker and told.margin >= 0.0
        sched.schedule([1, 2, 3, i])


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_policy_gives_its_name_as_the_reason(name: str) -> None:
    sched = scheduler(name)
    assert sched.schedule(PROMPT).reason == name
    assert sched.stats()["reasons"] == {name: 1}
    assert sched.stats()["policy"] == name


def test_ties_of_e2_go_to_more_cached_then_fewer_live_then_less_stored_then_the_first() -> None:
    sched = scheduler("e2", 3)
    assert sched.explain(PROMPT).worker == "w0"  # all alike: the first
    for worker, prompt in ("w0", [1] * 50), ("w1", [2] * 40), ("w2", [3] * 45):
        others = {"w0", "w1", "w2"} - {worker}
        sched.finish(sched.schedule(prompt, exclude=others, request_id=worker).request_id, output_tokens=0)
    totals = {cost.total_seconds for cost in sched.explain([9]).workers}
    assert len(totals) == 1, "short prompts cost the same, so only the ties decide"
    assert sched.explain([9]).worker == "w1"  # the least stored
    sched.schedule([8], request_id="busy", exclude={"w0", "w2"})
    assert sched.explain([9]).worker == "w2"


# --- own policies -----------------------------------------------------------------------------------------------------


class Shortest(Policy):
    """Fewest missed tokens plus a constant, as a user would write it with numpy."""

    name = "shortest"
    reason = "least_missed"

    def score(self, request: RequestView, workers: WorkersView) -> Any:
        return len(request.token_ids) - np.asarray(workers.matched_tokens) + 0.5


class Last(Policy):
    """Only picks, and answers with numpy's integer."""

    name = reason = "last"

    def pick(self, scores: Sequence[float], request: RequestView, workers: WorkersView) -> Any:
        assert list(scores) == [0.0] * len(workers)
        return np.argmax(np.arange(len(workers)))


@pytest.mark.parametrize("policy", [Shortest, Shortest()], ids=["class", "object"])
def test_a_subclass_that_scores_is_used_and_named(policy: Any) -> None:
    sched = scheduler(policy)
    home = sched.schedule(PROMPT).worker
    decision = sched.schedule([*PROMPT, 1])
    assert (decision.worker, decision.reason, decision.matched_tokens) == (home, "least_missed", 100)
    told = sched.explain([*PROMPT, 1])
    assert {cost.worker: cost.score for cost in told.workers}[home] == 1.5
    assert told.margin == 100.0


def test_a_subclass_that_only_picks_is_used() -> None:
    sched = scheduler(Last)
    assert choices(sched, 3) == ["w3", "w3", "w3"]
    sched.drain_worker("w3")
    assert sched.schedule([1]).worker == "w2"


def test_a_policy_sees_the_request_and_true_columns_of_the_eligible_workers() -> None:
    seen: list[tuple[RequestView, WorkersView]] = []

    class Spy(Last):
        def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
            seen.append((request, workers))
            return super().score(request, workers)

    model = CostModel.preset("mistral-7b/a6000")
    given: list[WorkerSpec | str] = [
        WorkerSpec("a", kv_capacity_tokens=500),
        WorkerSpec("b", kv_capacity_tokens=900),
        "c",
    ]
    sched = GlobalScheduler(given, policy=Spy, cost_model=model)
    sched.schedule(PROMPT, exclude=["c"], max_new_tokens=7)
    sched.schedule(PROMPT, exclude=["c"], max_new_tokens=7, namespace="tenant")
    request, workers = seen[-1]
    assert (request.token_ids, request.namespace, request.max_new_tokens, request.sequence) == (PROMPT, "tenant", 7, 1)
    assert 0.0 <= request.draw < 1.0 and request.draw != seen[0][0].draw
    assert (workers.ids, workers.matched_tokens) == (["a", "b"], [0, 0])
    assert (workers.live_requests, workers.waiting_requests, workers.live_output_tokens) == ([0, 1], [0, 1], [0, 7])
    assert (workers.live_prompt_tokens, workers.mean_output_tokens) == ([0, len(PROMPT)], [128, 128])
    assert workers.context_token_seconds == [model.coefficients()["context"][3]] * 2
    assert (workers.cached_tokens, workers.kv_capacity_tokens) == ([0, 100], [500, 900])
    assert workers.waiting_prefill_seconds[1] == workers.prefill_seconds[1] > 0.0
    assert workers.load_seconds[1] > 0.0 and workers.eviction_seconds == [0.0, 0.0]


@pytest.mark.parametrize(
    "answer",
    [None, 3.0, [], [1.0], [1.0, 2.0, 3.0, 4.0, 5.0], [0, 0, 0, float("nan")], ["x"] * 4, [None] * 4],
)
def test_scores_that_are_none_are_refused_and_nothing_is_booked(answer: Any) -> None:
    class Wrong(Policy):
        name = "wrong"

        def score(self, request: RequestView, workers: WorkersView) -> Any:
            return answer

    assert_refused(scheduler(Wrong), InvalidInput, "policy 'wrong'")


@pytest.mark.parametrize("answer", [None, -1, 4, 1.0, "w0", True, np.int64(4)])
def test_a_pick_that_is_no_position_is_refused_and_nothing_is_booked(answer: Any) -> None:
    class Wrong(Policy):
        name = "wrong"

        def pick(self, scores: Sequence[float], request: RequestView, workers: WorkersView) -> Any:
            return answer

    assert_refused(scheduler(Wrong), InvalidInput, "policy 'wrong' picked .* 0..3")


def test_an_error_inside_a_policy_reaches_the_caller_and_nothing_is_booked() -> None:
    class Broken(Policy):
        def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
            raise ZeroDivisionError("mine")

    assert_refused(scheduler(Broken), ZeroDivisionError, "mine")


def test_an_error_while_naming_the_reason_books_nothing() -> None:
    class Shy(Last):
        @property
        def reason(self) -> str:  # type: ignore[override]
            raise RuntimeError("no reason")

    assert_refused(scheduler(Shy), RuntimeError, "no reason")


def assert_refused(sched: GlobalScheduler, error: type[Exception], message: str) -> None:
    """Scheduling and explaining raise, and leave everything as it was, a namespace never seen included."""
    before = sched.stats()
    for call in sched.schedule, sched.explain:
        with pytest.raises(error, match=message):
            call(PROMPT, namespace="new")
    assert sched.stats() == before
    sched.check()


def test_a_reason_that_is_no_text_becomes_text() -> None:
    class Numbered(Last):
        reason = 7  # type: ignore[assignment]

    sched = scheduler(Numbered)
    assert sched.explain(PROMPT).reason == sched.schedule(PROMPT).reason == "7"
    assert sched.stats()["reasons"] == {"7": 1}


def test_reasons_that_a_policy_makes_up_are_counted_apart_up_to_a_bound() -> None:
    class Poet(Last):
        @property
        def reason(self) -> str:  # type: ignore[override]
            return f"verse {sched.stats()['scheduled']}"

    sched = scheduler(Poet)
    for i in range(100):
        assert sched.schedule([i]).reason == f"verse {i}"
    reasons = sched.stats()["reasons"]
    assert len(reasons) == 65 and reasons["verse 63"] == 1 and reasons["other"] == 36


def test_a_policy_that_schedules_while_it_decides_does_no_harm() -> None:
    """It must not, says the docstring; if it does, the outer decision counts with what the inner one has changed."""

    class Meddler(Last):
        deep = False

        def pick(self, scores: Sequence[float], request: RequestView, workers: WorkersView) -> int:
            if not self.deep:
                self.deep = True
                sched.schedule(PROMPT, request_id="inner")
                sched.apply("w3", [])
                self.deep = False
            return 3

    sched = scheduler(Meddler())
    outer = sched.schedule([*PROMPT, 1, 2], request_id="outer")
    assert (outer.worker, outer.matched_tokens) == ("w3", 100)
    sched.check()
    with pytest.raises(InvalidInput, match="inner"):
        sched.schedule(PROMPT, request_id="third")
    sched.finish("inner")
    with pytest.raises(InvalidInput, match="outer"):
        sched.schedule(PROMPT, request_id="outer")
    sched.check()


def test_a_policy_that_drains_the_worker_it_picks_is_refused() -> None:
    class Saboteur(Last):
        def pick(self, scores: Sequence[float], request: RequestView, workers: WorkersView) -> int:
            sched.drain_worker("w1")
            return 1

    sched = scheduler(Saboteur())
    with pytest.raises(InvalidInput, match="out of service"):
        sched.schedule(PROMPT)
    assert sched.stats()["live_requests"] == 0
    sched.check()


@pytest.mark.parametrize("policy", ["fastest", 5, None, object, Policy, Policy()])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(InvalidConfig, match="policy"):
        scheduler(policy)
