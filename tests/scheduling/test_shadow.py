"""The shadow policy and the recording of decisions change nothing, whatever happens: the same history with and without
them has the same answers and leaves the same books. What the shadow counts is held against hand-made cases."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble import BlockStored, Decision, GlobalScheduler, ManualClock, Policy, SchedulerConfig, WorkerSpec, sim
from preble._placement.request_api import RequestApi
from preble.errors import InvalidConfig, InvalidTokens, NoWorkers, PrebleError
from preble.policies.base import RequestView, WorkersView
from preble.scheduling.observer import RequestObserver
from preble.scheduling.records import DecisionRecording
from preble.scheduling.shadow import PAIRS_MAX
from tests.support.sim import PLAIN, config, tools

WORKERS = ("a", "b", "c")
OWN = ("records", "shadow", "policy_state")


class Last(Policy):
    """Always the last worker in order."""

    name = reason = "last"

    def pick(self, scores: Sequence[float], request: RequestView, workers: WorkersView) -> int:
        return len(workers) - 1


class Broken(Policy):
    """Raises, answers nonsense or leaves the fleet, by what the prompt begins with."""

    name = reason = "broken"

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        if request.token_ids[0] == 0:
            raise RuntimeError("no idea")
        return [float("nan")] * len(workers) if request.token_ids[0] == 1 else [0.0]


class Mute(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise ValueError("cannot say")


class Unprintable(Policy):
    name = reason = "unprintable"

    def pick(self, scores: Sequence[float], request: RequestView, workers: WorkersView) -> int:
        raise Mute


def scheduler(clock: ManualClock, **options: Any) -> GlobalScheduler:
    specs = [
        WorkerSpec(name, kv_capacity_tokens=300, block_size=size)
        for name, size in zip(WORKERS, (1, 16, 1), strict=True)
    ]
    config = SchedulerConfig(history_seconds=20.0, lease_seconds=30.0, live_requests_max=12)
    return GlobalScheduler(specs, clock=clock, config=config, seed=7, **options)


# --- nothing changes --------------------------------------------------------------------------------------------------

PROMPTS = st.builds(
    lambda stem, length, tail: [stem] * length + [100 + tail] * 20,
    st.integers(0, 2),
    st.sampled_from([0, 16, 90]),
    st.integers(0, 3),
)
NUMBERS = st.integers(0, 15)
STEPS = st.one_of(
    st.tuples(st.just("schedule"), PROMPTS, NUMBERS, st.sampled_from([None, 1, 50])),
    st.tuples(st.just("schedule"), PROMPTS, NUMBERS, st.sampled_from([None, 1, 50])),
    st.tuples(st.just("exclude"), PROMPTS, NUMBERS, st.sampled_from(WORKERS)),
    st.tuples(st.just("explain"), PROMPTS, NUMBERS),
    st.tuples(st.just("wrong"), st.sampled_from([[], [-1], [1.5]]), NUMBERS),
    st.tuples(st.just("first_token"), NUMBERS, st.sampled_from([None, 0, 20, 9999])),
    st.tuples(st.just("finish"), NUMBERS, st.sampled_from([None, 7])),
    st.tuples(st.just("cancel"), NUMBERS),
    st.tuples(st.just("advance"), st.sampled_from([0.1, 3.0, 40.0, -5.0])),
    st.tuples(st.just("tick")),
    st.tuples(st.just("remove"), st.sampled_from(WORKERS)),
    st.tuples(st.just("add"), st.sampled_from(WORKERS)),
    st.tuples(st.just("drain"), st.sampled_from(WORKERS)),
    st.tuples(st.just("stored"), st.sampled_from(WORKERS), st.integers(0, 2)),
)


def told(decision: Any) -> tuple[Any, ...]:
    return (decision.request_id, decision.worker, decision.matched_tokens, decision.prompt_tokens, decision.reason)


def step(sched: GlobalScheduler, clock: ManualClock, what: str, *how: Any) -> Any:
    """Take one step; returns what the caller sees."""
    if what in ("schedule", "wrong"):
        limit = how[2] if len(how) > 2 else None
        return told(sched.schedule(how[0], request_id=how[1] or None, max_new_tokens=limit))
    if what == "exclude":
        return told(sched.schedule(how[0], request_id=how[1] or None, exclude=[how[2]]))
    if what == "explain":
        decision = sched.schedule(how[0], request_id=how[1] or None, explain=True)
        return *told(decision), decision.costs
    if what == "first_token":
        return sched.first_token(how[0], cached_tokens=how[1])
    if what == "finish":
        return sched.finish(how[0], output_tokens=how[1])
    if what == "advance":
        return clock.advance(how[0])
    if what == "stored":
        return sched.apply(how[0], [BlockStored([how[1]], None, [how[1]] * 16, 16)])
    call = {"cancel": sched.cancel, "tick": sched.tick, "remove": sched.remove_worker, "add": sched.add_worker}
    return {**call, "drain": sched.drain_worker}[what](*how)


def history(steps: Sequence[tuple[Any, ...]], **options: Any) -> tuple[list[Any], dict[str, Any], Any]:
    """What the callers see of a history, the bookings it leaves, and the scheduler."""
    clock = ManualClock(1000.0)
    sched, seen = scheduler(clock, **options), []
    for what, *how in steps:
        try:
            seen.append(step(sched, clock, what, *how))
        except PrebleError as error:
            # Of two things wrong with one call, which is reported first may differ.
            seen.append("refused" if what == "wrong" else (type(error).__name__, str(error)))
        sched.check()
    stats = sched.stats()
    del stats["tree"]["bytes_used"]  # whoever weighs everybody remembers more of what eviction would cost
    held = [
        dict(sched.match([stem] * 90 + [100 + tail] * 20).matched_tokens) for stem in (0, 1, 2) for tail in range(4)
    ]
    return [*seen, held], {key: value for key, value in stats.items() if key not in OWN}, sched


@pytest.mark.parametrize("policy", ["e2", "kv_cost", "random"])
@pytest.mark.parametrize("shadow", ["e2", "kv_cost", "aibrix_preble", "e2-paper", "random", Last(), Broken(), None])
@given(steps=st.lists(STEPS, max_size=40), share=st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_shadow_and_no_record_changes_a_decision_or_a_book(
    policy: str, shadow: Any, steps: list[tuple[Any, ...]], share: float
) -> None:
    plain = history(steps, policy=policy)
    watched = history(steps, policy=policy, shadow=shadow, record=DecisionRecording(share=share, keep=8))
    assert watched[0] == plain[0]
    assert watched[1] == plain[1]


@pytest.mark.parametrize("policy", ["e2", "kv_cost"])
@pytest.mark.parametrize("shadow", ["e2", "lmetric"])
def test_a_simulated_fleet_under_a_shadow_runs_as_without(policy: str, shadow: str) -> None:
    """Deaths, lost events and full caches included: the traces agree to the last event."""
    death = sim.WorkerDeath(1.0, "w1", noticed_after_seconds=0.5)
    settings = config(workers=3, policy=policy, local={"kv_capacity_tokens": 1200}, faults=(death,), event_loss=0.3)
    plain = sim.simulate(tools(40), settings)
    watched = sim.Simulation(tools(40), settings, None)
    watched.scheduler = GlobalScheduler(
        policy=policy, cost_model=PLAIN, clock=watched.clock, record=DecisionRecording(keep=64), shadow=shadow
    )
    assert watched.run().trace_hash == plain.trace_hash
    watched.scheduler.check()
    stats = watched.scheduler.stats()
    assert stats["records"]["joined"] == stats["records"]["made"] == stats["shadow"]["decisions"] >= 40


def test_by_default_nothing_is_recorded() -> None:
    sched = scheduler(ManualClock(1.0))
    assert type(sched) is GlobalScheduler and sched.records() == ()
    assert not {"records", "shadow"} & sched.stats().keys()
    assert "schedule" not in vars(GlobalScheduler)  # it is the compiled one


class Notes(RequestObserver):
    """Writes down what it is reported."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def before_decision(self, core: Any, policy: Any, request: RequestView, now: float, explain: bool) -> object:
        return request.sequence, now

    def on_decision(self, key: Hashable, decision: Decision, before: Any, now: float) -> None:
        self.told.append(("decision", decision.request_id, before, now))

    def on_first_token(self, request_id: Hashable, now: float, cached_tokens: int | None) -> None:
        self.told.append(("first token", request_id, now, cached_tokens))

    def on_finish(self, request_id: Hashable, now: float, cached_tokens: int | None, output_tokens: int | None) -> None:
        self.told.append(("finish", request_id, now, cached_tokens, output_tokens))

    def on_cancel(self, request_id: Hashable, now: float) -> None:
        self.told.append(("cancel", request_id, now))


def served(api: RequestApi, name: str) -> None:
    """A request that is served, one that is late, one that is cancelled."""
    api.schedule([1, 2, 3], request_id=name)
    assert api.first_token(name, cached_tokens=2)
    assert api.finish(name, output_tokens=5)
    assert not api.finish(name)
    api.schedule([1, 2, 3], request_id=name)
    assert api.cancel(name)


def test_an_observer_comes_and_goes_and_is_reported_of_what_happens_meanwhile() -> None:
    sched, notes = scheduler(ManualClock(1.0)), Notes()
    served(sched, "before")
    sched._observer = notes
    served(sched, "seen")
    sched._observer = None
    served(sched, "after")
    sched.check()
    assert notes.told == [
        ("decision", "seen", (2, 1.0), 1.0),
        ("first token", "seen", 1.0, 2),
        ("finish", "seen", 1.0, None, 5),
        ("decision", "seen", (3, 1.0), 1.0),
        ("cancel", "seen", 1.0),
    ]


def test_the_request_api_is_complete_without_a_scheduler() -> None:
    whole = scheduler(ManualClock(1.0))
    plain, notes = RequestApi(whole.core, lambda: 7.0, 0), Notes()
    served(plain, "one")
    assert plain.schedule([9], request_id="two", exclude=WORKERS[:2], explain=True).worker == WORKERS[2]
    assert plain.explain([9]).worker == WORKERS[1], "the first one has worked before, the last one does"
    assert plain.match([9, 9]).best_tokens == 1
    assert plain.renew("two") and plain.cancel("two") and plain.now() == 7.0
    watched = RequestApi(whole.core, lambda: 8.0, 0, policy=Last(), observer=notes)
    served(watched, "three")
    assert [one[0] for one in notes.told] == ["decision", "first token", "finish", "decision", "cancel"]
    whole.check()


def test_a_scheduler_of_one_s_own_can_be_recorded() -> None:
    class Mine(GlobalScheduler):
        def greeting(self) -> str:
            return "hello"

    sched = Mine(["a"], shadow=Last)
    assert type(sched) is Mine and type(GlobalScheduler(["a"], shadow=Last)) is GlobalScheduler
    assert sched.greeting() == "hello" and sched.schedule([1, 2]).worker == "a"


@pytest.mark.parametrize("shadow", ["no such policy", 5, Policy()])
def test_a_shadow_that_is_no_policy_is_refused(shadow: Any) -> None:
    with pytest.raises(InvalidConfig):
        GlobalScheduler(["a"], shadow=shadow)


def test_a_shadow_with_needs_nobody_knows_is_refused() -> None:
    class Greedy(Last):
        needs = ("everything",)

    with pytest.raises(InvalidConfig, match="everything"):
        GlobalScheduler(["a"], shadow=Greedy)


# --- what is counted --------------------------------------------------------------------------------------------------


def test_differences_are_counted_by_reason_with_the_seconds_they_are_worth() -> None:
    clock = ManualClock(1000.0)
    sched = GlobalScheduler(["a", "b"], clock=clock, shadow=Last())
    first = sched.schedule([7] * 400, explain=True)  # explored; both cost the same, the first in order takes it
    assert first.worker == "a"
    sched.first_token(first.request_id)
    sched.finish(first.request_id, output_tokens=1)
    why = sched.explain([7] * 400 + [1])
    second = sched.schedule([7] * 400 + [1])  # exploited
    assert (second.worker, second.reason) == ("a", "exploit")
    totals = {cost.worker: cost.total_seconds for cost in why.workers}
    third = sched.schedule([9] * 400)  # explored, on the other one
    assert third.worker == "b"
    stats = sched.stats()["shadow"]
    assert (stats["policy"], stats["decisions"], stats["agreements"], stats["differences"]) == ("last", 3, 1, 2)
    assert stats["differences_by_reason"] == {"explore -> last": 1, "exploit -> last": 1}
    saved = totals["a"] - totals["b"]
    assert stats["seconds_saved"] == pytest.approx(max(saved, 0.0)) and stats["errors"] == 0
    assert stats["seconds_lost"] == pytest.approx(max(-saved, 0.0)) and saved != 0


def test_seconds_saved_and_lost_are_what_the_plain_scheduler_explains() -> None:
    """E2 beside a policy that takes turns: it would have saved what the totals differ by."""
    clock, saved, lost, same = ManualClock(1000.0), 0.0, 0.0, 0
    sched = GlobalScheduler(WORKERS, clock=clock, policy="round_robin", shadow="e2")
    beside = GlobalScheduler(WORKERS, clock=clock, policy="round_robin")
    e2 = GlobalScheduler(WORKERS, clock=clock)
    for i in range(30):
        prompt = [i % 4] * 300 + [50 + i] * (1 + 7 * i)
        totals = {cost.worker: cost.total_seconds for cost in beside.explain(prompt).workers}
        wish, done = e2.explain(prompt).worker, beside.schedule(prompt).worker
        assert sched.schedule(prompt).worker == done
        e2.schedule(prompt, exclude=[name for name in WORKERS if name != done])
        gain = totals[done] - totals[wish]
        same, saved, lost = same + (wish == done), saved + max(gain, 0.0), lost + max(-gain, 0.0)
        clock.advance(0.5)
    stats = sched.stats()["shadow"]
    assert stats["agreements"] == same and stats["differences"] == 30 - same > 0
    assert (stats["seconds_saved"], stats["seconds_lost"]) == (pytest.approx(saved), pytest.approx(lost))
    assert saved > 0


def test_a_policy_that_is_its_own_shadow_always_agrees() -> None:
    for policy in ("e2", "kv_cost", "random", "aibrix_preble", "e2-paper"):
        clock = ManualClock(1000.0)
        sched = scheduler(clock, policy=policy, shadow=policy)
        for i in range(12):
            sched.schedule([i % 3] * 80 + [i] * 9)
            clock.advance(1.0)
        stats = sched.stats()["shadow"]
        assert (stats["agreements"], stats["errors"]) == (12, 0), policy


def test_a_shadow_s_books_are_of_what_was_done() -> None:
    """The same requests under kv_cost itself would have been placed elsewhere; the book has them where E2 put them."""
    sched = GlobalScheduler(["a", "b"], clock=ManualClock(1000.0), shadow="kv_cost")
    ids = []
    for number in range(3):
        ids.append(sched.schedule([5] * 1600, max_new_tokens=1).request_id)
        sched.first_token(ids[number])
    assert sched.stats()["policy_state"]["active_blocks"] == {"requests": 3, "blocks": 100}
    sched.finish(ids[0])
    sched.cancel(ids[1])
    assert sched.stats()["policy_state"]["active_blocks"] == {"requests": 1, "blocks": 100}
    sched.finish(ids[2])
    assert sched.stats()["policy_state"]["active_blocks"] == {"requests": 0, "blocks": 0}


def test_errors_in_the_shadow_stay_there() -> None:
    sched = GlobalScheduler(["a", "b"], clock=ManualClock(1000.0), shadow=Broken())
    for first in (0, 1, 2):
        assert sched.schedule([first, 5, 6]).worker in ("a", "b")
        stats = sched.stats()["shadow"]
        assert (stats["errors"], stats["decisions"]) == (first + 1, 0)
    assert "scored 1 of 2" in stats["last_error"]
    silent = GlobalScheduler(["a"], shadow=Unprintable())
    silent.schedule([1])
    assert silent.stats()["shadow"]["errors"] == 1 and "Mute" in silent.stats()["shadow"]["last_error"]


def test_errors_of_the_caller_are_not_the_shadow_s() -> None:
    sched = GlobalScheduler(["a"], shadow="kv_cost")
    with pytest.raises(InvalidTokens):
        sched.schedule([-1])
    sched.drain_worker("a")
    with pytest.raises(NoWorkers):
        sched.schedule([1])
    assert sched.stats()["shadow"]["errors"] == sched.stats()["shadow"]["decisions"] == 0


def test_reasons_are_counted_apart_up_to_a_bound() -> None:
    class Chatty(Last):
        @property
        def reason(self) -> str:  # type: ignore[override]
            self.said = getattr(self, "said", 0) + 1
            return f"because {self.said}"

    sched = GlobalScheduler(["a", "b"], clock=ManualClock(1000.0), policy=Fixed(), shadow=Chatty())
    for _ in range(PAIRS_MAX + 5):
        sched.schedule([1, 2])
    pairs = sched.stats()["shadow"]["differences_by_reason"]
    assert len(pairs) == PAIRS_MAX + 1 and pairs["other"] == 5


class Fixed(Policy):
    """Always the first worker in order."""

    name = reason = "fixed"

    def pick(self, scores: Sequence[float], request: RequestView, workers: WorkersView) -> int:
        return 0


def test_explain_says_the_same_beside_a_shadow_with_books() -> None:
    clock = ManualClock(1000.0)
    plain, watched = scheduler(clock), scheduler(clock, shadow="kv_cost")
    for i in range(6):
        prompt = [i % 2] * 90 + [i] * 9
        assert watched.explain(prompt) == plain.explain(prompt)
        assert told(watched.schedule(prompt)) == told(plain.schedule(prompt))
    assert watched.stats()["shadow"]["decisions"] == 6  # explaining is no decision


def test_a_shadow_that_changes_the_fleet_is_counted_as_in_error() -> None:
    class Meddler(Fixed):
        def pick(self, scores: Sequence[float], request: RequestView, workers: WorkersView) -> int:
            if "new" not in sched.workers:
                sched.add_worker("new")
            return 0

    sched = GlobalScheduler(["old"], clock=ManualClock(1000.0), policy=Last(), shadow=Meddler())
    assert sched.schedule([1]).worker == "new"  # which the shadow's answer knows nothing of
    stats = sched.stats()["shadow"]
    assert (stats["errors"], stats["agreements"], stats["differences"]) == (1, 0, 0)


def test_the_class_of_a_recording_scheduler_makes_recorded_and_plain_ones():
    kind = type(GlobalScheduler(["a"], shadow="kv_cost"))
    for watched in ({"shadow": "kv_cost"}, {"record": DecisionRecording()}, {}):
        scheduler = kind(["a", "b"], **watched)
        decision = scheduler.schedule([1, 2, 3])
        scheduler.finish(decision.request_id, output_tokens=1)
        scheduler.check()
        assert scheduler.stats()["live_requests"] == 0
