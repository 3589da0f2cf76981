"""Decision records: what they hold, how they are joined with what became of the request, the ring's bound, the sink
that nobody waits for, and JSON lines. That recording changes no decision is tested in `test_shadow.py`."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble import GlobalScheduler, ManualClock, Policy, SchedulerConfig, WorkerSpec
from preble.errors import InvalidConfig, InvalidInput
from preble.policies.base import RequestView, WorkersView
from preble.scheduling.calibration import NEUTRAL
from preble.scheduling.record_sink import Sink
from preble.scheduling.records import (
    PRICE_TERMS,
    DecisionRecord,
    DecisionRecording,
    Outcome,
    ShadowChoice,
    WorkerTerms,
    from_json,
    read_lines,
    to_json,
    write_lines,
)

PATIENCE_SECONDS = 30.0  # until a test gives up on another thread; none waits for so long when all is well


def terms(worker: str, matched: int, backlog: float = 0.0, prefill: float = 1.0, prompt: int = 100) -> WorkerTerms:
    price = (2.0, prefill, 0.5, 0.25, 0.0, 0.125, -0.25)
    total = sum(price)
    return WorkerTerms(worker, matched, prompt - matched, *price, total, 6.25, backlog, total, True)


def record(*workers: WorkerTerms, outcome: Outcome | None = None, **more: Any) -> DecisionRecord:
    """A decision for the first of the workers."""
    fixed = {"request_id": "r", "sequence": 4, "decided_at": 10.0, "policy": "e2", "reason": "explore"}
    fixed |= {"prompt_tokens": 100, "worker": workers[0].worker, "runner_up": None, "margin": 0.0}
    return DecisionRecord(**{**fixed, **more}, workers=workers, outcome=outcome)


def outcome(first: float | None = None, cached: int | None = None) -> Outcome:
    return Outcome("finished", 9.0, first, cached, 5)


def scheduler(workers: int = 2, policy: Any = "e2", **recording: Any) -> tuple[GlobalScheduler, ManualClock]:
    clock = ManualClock(1000.0)
    specs = [WorkerSpec(f"w{i}", kv_capacity_tokens=10_000) for i in range(workers)]
    config = SchedulerConfig(lease_seconds=60.0)
    sched = GlobalScheduler(
        specs, policy=policy, clock=clock, config=config, seed=3, record=DecisionRecording(**recording)
    )
    return sched, clock


# --- regret, by hand --------------------------------------------------------------------------------------------------


def test_a_record_without_outcome_knows_only_what_was_estimated() -> None:
    one = record(terms("a", 20), terms("b", 60))
    assert (one.cached_error_tokens, one.late_seconds, one.regret_seconds) == (None, None, None)
    assert one.chosen.worker == "a" and one.chosen.predicted_seconds == 1.0
    assert one.lost_tokens == 40 and one.locality_regret == 0.5  # 40 of the 80 that it computes were on b


@pytest.mark.parametrize(
    ("own", "best", "told", "lost", "share"),
    [
        (0, 0, None, 0, 0.0),  # nobody had anything
        (60, 60, None, 0, 0.0),  # the best was taken
        (0, 75, None, 75, 0.75),
        (50, 75, 50, 25, 0.5),
        (50, 75, 0, 75, 0.75),  # the engine had lost it
        (0, 60, 90, 0, 0.0),  # the engine had more than anybody was estimated to have
        (0, 100, None, 100, 1.0),
        (100, 100, 100, 0, 0.0),  # nothing was computed at all
    ],
)
def test_locality_regret_is_the_share_of_the_work_that_was_avoidable(
    own: int, best: int, told: int | None, lost: int, share: float
) -> None:
    one = record(terms("a", own), terms("b", best), outcome=outcome(cached=told))
    assert (one.lost_tokens, one.locality_regret) == (lost, share)
    assert one.cached_error_tokens == (None if told is None else told - own)


def test_regret_in_seconds_is_against_the_best_prediction_for_another_worker() -> None:
    workers = terms("a", 0, backlog=2.0), terms("b", 0, backlog=0.5), terms("c", 0, backlog=7.0)
    late = record(*workers, outcome=outcome(first=4.0))
    assert (late.late_seconds, late.regret_seconds) == (1.0, 2.5)
    early = record(*workers, outcome=outcome(first=1.0))
    assert (early.late_seconds, early.regret_seconds) == (-2.0, 0.0)
    alone = record(workers[0], outcome=outcome(first=50.0))
    assert (alone.late_seconds, alone.regret_seconds) == (47.0, 0.0)
    assert record(*workers, outcome=outcome()).regret_seconds is None


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_a_record_holds_what_explain_said_and_what_became_of_the_request() -> None:
    sched, clock = scheduler(3)
    first = sched.schedule([1] * 2000 + [2] * 40, request_id="first")
    clock.advance(0.125)
    sched.first_token("first")
    assert sched.schedule([1] * 2000 + [4] * 20, request_id="waits").worker == first.worker
    clock.advance(0.125)
    why = sched.explain([1] * 2000 + [3] * 200, request_id="second", max_new_tokens=9)
    second = sched.schedule([1] * 2000 + [3] * 200, request_id="second", max_new_tokens=9)
    clock.advance(0.5)
    sched.first_token("second", cached_tokens=1990)
    clock.advance(1.25)
    sched.finish("second", output_tokens=7)
    kept = sched.records()
    assert [one.request_id for one in kept] == ["first", "waits", "second"]
    one = kept[2]
    assert (one.sequence, one.decided_at, one.policy, one.prompt_tokens) == (2, 1000.25, "e2", 2200)
    assert (one.worker, one.reason) == (second.worker, second.reason) == (first.worker, "exploit")
    assert (one.runner_up, one.margin) == (why.runner_up, why.margin)
    told = [asdict(worker) for worker in one.workers]
    assert all(worker.pop("backlog_seconds") >= 0.0 for worker in told)
    assert told == [asdict(worker) for worker in why.workers]
    cost = NEUTRAL.prefill_time(20, 2020)
    assert {w.worker: w.backlog_seconds for w in one.workers} == {
        name: pytest.approx(cost if name == first.worker else 0.0, rel=1e-6) for name in ("w0", "w1", "w2")
    }
    assert one.outcome == Outcome("finished", 1.75, 0.5, 1990, 7)
    assert kept[0].outcome is None and one.cached_error_tokens == 1990 - 2000


@pytest.mark.parametrize("policy", ["e2", "kv_cost"])
def test_the_seven_terms_of_every_worker_add_up_to_its_total(policy: str) -> None:
    """Of a fleet that has queues, decodes, and caches that are full; explained, and on record."""
    clock = ManualClock(1000.0)
    specs = [WorkerSpec(f"w{i}", kv_capacity_tokens=2000) for i in range(3)]
    sched = GlobalScheduler(specs, policy=policy, clock=clock, seed=3, record=DecisionRecording())
    used = set()
    for number in range(40):
        prompt = [number % 2] * 800 + [50 + number] * 20
        clock.advance(0.05)
        told = sched.explain(prompt, max_new_tokens=30).workers
        sched.schedule(prompt, request_id=number, max_new_tokens=30)
        if number % 2:
            sched.first_token(number)
        if number >= 5:
            sched.finish(number - 5, output_tokens=20)
        for one in (*told, *sched.records()[-1].workers):
            price = {name: getattr(one, name) for name in PRICE_TERMS}
            assert price["credit_seconds"] <= 0.0 <= min(price[name] for name in PRICE_TERMS[:-1])
            assert sum(price.values()) == pytest.approx(one.total_seconds, rel=1e-12)
            used |= {name for name, seconds in price.items() if seconds}
    none = {"credit_seconds"} if policy == "kv_cost" else set()  # kv_cost grants no credit for copies
    assert used == set(PRICE_TERMS) - none, "each of the others was more than nothing somewhere"


def test_runner_up_and_margin_are_of_the_scores_that_decided() -> None:
    sched, _ = scheduler(3)
    sched.schedule([1] * 50, request_id="busy")
    sched.schedule([2] * 500, request_id="one")
    why = sched.records()[1]
    others = sorted((w.score, w.worker) for w in why.workers if w.worker != why.worker)
    assert (why.runner_up, why.margin) == (others[0][1], others[0][0] - why.chosen.score)
    assert scheduler(1)[0].schedule([1]) is not None


def test_the_last_word_on_cached_tokens_counts_and_the_first_first_token() -> None:
    sched, clock = scheduler()
    sched.schedule([1] * 90, request_id="r")
    clock.advance(1.0)
    sched.first_token("r", cached_tokens=3)
    clock.advance(1.0)
    sched.first_token("r")
    sched.finish("r", cached_tokens=5)
    assert sched.records()[0].outcome == Outcome("finished", 2.0, 1.0, 5, None)


def test_cancelled_and_expired_requests_are_joined_too() -> None:
    sched, clock = scheduler()
    sched.schedule([1] * 90, request_id="cancelled")
    sched.schedule([1] * 90, request_id="expired")
    clock.advance(2.0)
    sched.cancel("cancelled")
    clock.advance(100.0)
    sched.tick()
    assert [one.outcome for one in sched.records()] == [
        Outcome("cancelled", 2.0, None, None, None),
        Outcome("cancelled", 102.0, None, None, None),
    ]


def test_requests_of_a_worker_that_has_gone_are_joined_when_they_end() -> None:
    sched, clock = scheduler()
    worker = sched.schedule([1] * 90, request_id="r").worker
    assert sched.remove_worker(worker) == ["r"]
    clock.advance(3.0)
    sched.finish("r", output_tokens=2)
    sched.check()
    one = sched.records()[0]
    assert one.worker == worker and one.outcome == Outcome("finished", 3.0, None, None, 2)


def test_only_a_share_is_recorded_and_whatever_is_explained() -> None:
    sched, _ = scheduler(share=0.0)
    sched.schedule([1], request_id="plain")
    sched.schedule([1], request_id="explained", explain=True)
    assert [one.request_id for one in sched.records()] == ["explained"]
    drawn = []
    for _ in range(2):
        some, _ = scheduler(share=0.3)
        for i in range(400):
            some.finish(some.schedule([1, 2, i]).request_id)
        drawn.append([one.sequence for one in some.records()])
    assert drawn[0] == drawn[1] and 80 < len(drawn[0]) < 160


def test_the_first_of_each_second_are_recorded_beside_the_share() -> None:
    clock = ManualClock(100.0)
    sched = GlobalScheduler(["a", "b"], clock=clock, record=DecisionRecording(share=0.0, per_second=2))
    for _ in range(3):
        for _ in range(5):
            sched.cancel(sched.schedule([1, 2, 3]).request_id)
        clock.advance(1.0)
    assert [one.sequence % 5 for one in sched.records()] == [0, 1] * 3
    assert len(sched.records()[0].workers) == 2


def test_a_python_policy_is_recorded_with_its_scores() -> None:
    sched, _ = scheduler(2, policy="kv_cost")
    sched.schedule([1] * 160, request_id="r")
    one = sched.records()[0]
    assert one.policy == one.reason == "kv_cost" and [w.score for w in one.workers] == [20.0, 20.0]
    assert one.shadow is None and one.margin == 0.0


def test_the_shadow_s_choice_is_in_the_record() -> None:
    sched = GlobalScheduler(["a", "b"], record=DecisionRecording(), shadow="longest_prefix")
    sched.schedule([1, 2, 3])
    choice = sched.records()[0].shadow
    assert choice is not None and (choice.policy, choice.reason) == ("longest_prefix", "longest_prefix")


class Moody(Policy):
    """Fails whenever it is asked for an odd time: each decision is weighed for the record first."""

    name = reason = "moody"
    asked = 0

    def pick(self, scores: Any, request: RequestView, workers: WorkersView) -> int:
        self.asked += 1
        if self.asked % 2:
            raise RuntimeError("not now")
        return 0


def test_a_policy_that_fails_for_the_record_alone_fails_nobody() -> None:
    sched, _ = scheduler(2, policy=Moody())
    assert sched.schedule([1]).worker == "w0"
    stats = sched.stats()["records"]
    assert (stats["errors"], stats["made"], sched.records()) == (1, 0, ())


def test_a_policy_that_changes_the_fleet_for_the_record_leaves_none() -> None:
    class Meddler(Policy):
        name = reason = "meddler"

        def pick(self, scores: Any, request: RequestView, workers: WorkersView) -> int:
            if "new" not in sched.workers:
                sched.add_worker("new")
            return len(workers) - 1

    sched, _ = scheduler(1, policy=Meddler())
    decision = sched.schedule([1])
    assert decision.worker == "new" and sched.finish(decision.request_id)
    assert (sched.stats()["records"]["errors"], sched.records()) == (1, ())
    sched.check()


def test_what_is_refused_leaves_no_record() -> None:
    sched, _ = scheduler()
    sched.schedule([1], request_id="r")
    for wrong in ({"token_ids": [-1]}, {"token_ids": [1], "request_id": "r"}, {"token_ids": [1], "request_id": []}):
        with pytest.raises(InvalidInput):
            sched.schedule(**wrong)
    for wrong in ({"max_new_tokens": 0}, {"namespace": []}):
        with pytest.raises(InvalidInput):
            sched.schedule([1], **wrong)
    with pytest.raises(InvalidInput):
        sched.finish("r", cached_tokens=2)
    assert len(sched.records()) == 1 and sched.records()[0].outcome is None
    sched.check()


@pytest.mark.parametrize(
    "wrong",
    [
        {"share": -0.1},
        {"share": 1.1},
        {"share": float("nan")},
        {"share": True},
        {"share": "all"},
        {"keep": 0},
        {"keep": 2**21},
        {"sink": 5},
        {"sink_queue": 0},
    ],
)
def test_a_recording_names_what_is_wrong(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=f"DecisionRecording.{next(iter(wrong))}"):
        DecisionRecording(**wrong)


def test_record_must_be_a_recording() -> None:
    with pytest.raises(InvalidConfig, match="record"):
        GlobalScheduler(["a"], record=0.5)  # type: ignore[arg-type]


# --- the ring ---------------------------------------------------------------------------------------------------------


def test_the_ring_pushes_out_the_oldest_and_counts() -> None:
    sent: list[DecisionRecord] = []
    sched, _ = scheduler(keep=3, sink=sent.append)
    for i in range(5):
        sched.schedule([1, i], request_id=i)
    sched.finish(0)
    sched.finish(4)
    sched.check()
    sched.close()
    assert [one.request_id for one in sched.records()] == [2, 3, 4]
    assert [(one.request_id, one.outcome is None) for one in sent] == [(0, True), (1, True), (4, False)]
    stats = sched.stats()["records"]
    assert (stats["made"], stats["pushed_out"], stats["pushed_out_live"], stats["joined"]) == (5, 2, 2, 1)
    assert (stats["kept"], stats["live"]) == (3, 2)


STEP = st.tuples(
    st.sampled_from(["schedule", "schedule", "explain", "first", "finish", "cancel", "tick", "remove"]),
    st.integers(0, 6),
)


@given(steps=st.lists(STEP, max_size=60), keep=st.integers(1, 6), share=st.sampled_from([0.0, 0.6, 1.0]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_record_is_joined_once_and_with_its_own_request(
    steps: list[tuple[str, int]], keep: int, share: float
) -> None:
    """Against a plain list: request ids come again, and each life of one has a number of its own as its output."""
    sent: list[DecisionRecord] = []
    sched, clock = scheduler(3, keep=keep, share=share, sink=sent.append)
    live: dict[int, int] = {}
    ended: dict[int, tuple[str, int | None]] = {}  # by sequence, how
    decided = 0
    for what, name in steps:
        clock.advance(0.5)
        if what in ("schedule", "explain") and name not in live and sched.workers:
            sched.schedule([name] * 8, request_id=name, explain=what == "explain")
            live[name], decided = decided, decided + 1
        elif what == "first":
            sched.first_token(name)
        elif what == "finish" and sched.finish(name, output_tokens=1000 + live.get(name, 0)):
            sequence = live.pop(name)
            ended[sequence] = "finished", 1000 + sequence
        elif what == "cancel" and sched.cancel(name):
            ended[live.pop(name)] = "cancelled", None
        elif what == "tick":
            sched.tick()
        elif what == "remove" and f"w{name}" in sched.workers:
            sched.remove_worker(f"w{name}")
        sched.check()
        assert len(sched.records()) <= keep
    sched.close()
    for one in [*sent, *sched.records()]:
        if one.outcome is not None:
            assert (one.outcome.ended, one.outcome.output_tokens) == ended[one.sequence]
    assert len({one.sequence for one in sent}) == len(sent)  # each goes to the sink once
    stats = sched.stats()["records"]
    assert [stats["joined"], stats["pushed_out_live"]] == [
        sum(one.outcome is not None for one in sent),
        sum(one.outcome is None for one in sent),
    ]
    for one in sched.records():
        assert (one.outcome is None) == (one.sequence in live.values())
    if share == 1.0:
        assert stats["made"] == decided


def test_threads_that_finish_and_reuse_ids_leave_every_record_joined() -> None:
    sched, _ = scheduler(2, keep=4096)

    def work(name: int) -> None:
        for i in range(150):
            decision = sched.schedule([name, i % 5] * 20, request_id=name if i % 2 else None)
            sched.first_token(decision.request_id)
            assert sched.finish(decision.request_id, output_tokens=i)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sched.check()
    stats = sched.stats()["records"]
    assert (stats["made"], stats["joined"], stats["live"]) == (600, 600, 0)


# --- the sink ---------------------------------------------------------------------------------------------------------


def test_a_file_gets_a_line_for_each_request_that_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    sched, clock = scheduler(sink=path)
    for i in range(3):
        sched.schedule([1, i], request_id=i)
        clock.advance(1.0)
        sched.finish(i, output_tokens=i)
    sched.schedule([1], request_id="goes on")
    sched.close()
    assert tuple(read_lines(path)) == sched.records()[:3]
    assert sched.stats()["records"]["sink"] == {"written": 3, "errors": 0, "dropped": 0, "waiting": 0}
    sched.finish("goes on")
    sched.close()  # starts anew after a close
    assert tuple(read_lines(path)) == sched.records()


def test_a_sink_that_does_not_come_back_stops_no_decision() -> None:
    inside, go_on, got = threading.Event(), threading.Event(), []

    def stuck(one: DecisionRecord) -> None:
        inside.set()
        go_on.wait(PATIENCE_SECONDS)
        got.append(one.request_id)

    sched, _ = scheduler(sink=stuck, sink_queue=2)
    sched.finish(sched.schedule([1], request_id=0).request_id)
    assert inside.wait(PATIENCE_SECONDS)
    for i in range(1, 6):
        sched.finish(sched.schedule([1], request_id=i).request_id)
    assert sched.stats()["records"]["sink"] == {"written": 0, "errors": 0, "dropped": 3, "waiting": 2}
    assert len(sched.records()) == 6
    go_on.set()
    sched.close()
    assert got == [0, 1, 2]
    assert sched.stats()["records"]["sink"] == {"written": 3, "errors": 0, "dropped": 3, "waiting": 0}


def test_a_sink_that_raises_is_counted_and_asked_again() -> None:
    def refuse(one: DecisionRecord) -> None:
        raise RuntimeError("no")

    sched, _ = scheduler(sink=refuse)
    for i in range(3):
        sched.finish(sched.schedule([1], request_id=i).request_id)
    sched.close()
    assert sched.stats()["records"]["sink"] == {"written": 0, "errors": 3, "dropped": 0, "waiting": 0}


def test_a_sink_may_close_the_scheduler() -> None:
    closed = threading.Event()

    def once(one: DecisionRecord) -> None:
        sched.close()
        closed.set()

    sched, _ = scheduler(sink=once)
    sched.finish(sched.schedule([1]).request_id)
    assert closed.wait(PATIENCE_SECONDS)


def test_a_file_that_cannot_be_written_is_refused_or_counted(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="sink"):
        scheduler(sink=tmp_path / "no" / "such" / "folder.jsonl")
    folder = tmp_path / "folder"
    folder.mkdir()
    sink = Sink(folder / "records.jsonl", str, 10)
    (folder / "records.jsonl").unlink()
    folder.rmdir()
    sink.offer("one")
    sink.close()
    assert sink.stats() == {"written": 0, "errors": 1, "dropped": 0, "waiting": 0}
    folder.mkdir()
    sink.offer("two")
    sink.close()
    assert (folder / "records.jsonl").read_text() == "two\n" and sink.stats()["written"] == 1


# --- JSON lines -------------------------------------------------------------------------------------------------------

NAMES = st.text(max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SCORES = st.floats(allow_nan=False)
TOKENS = st.integers(0, 2**31)
TERMS = st.builds(WorkerTerms, NAMES, TOKENS, TOKENS, *[FLOATS] * 10, SCORES, st.booleans())
OUTCOMES = st.builds(Outcome, NAMES, FLOATS, st.none() | FLOATS, st.none() | TOKENS, st.none() | TOKENS)


@st.composite
def records(draw: st.DrawFn) -> DecisionRecord:
    workers = tuple(draw(st.lists(TERMS, min_size=1, max_size=3)))
    return DecisionRecord(
        draw(st.integers() | st.text() | st.booleans()),
        draw(TOKENS),
        draw(FLOATS),
        draw(NAMES),
        draw(NAMES),
        draw(TOKENS),
        workers[-1].worker,
        draw(st.none() | NAMES),
        draw(SCORES),
        workers,
        draw(st.none() | st.builds(ShadowChoice, NAMES, NAMES, NAMES)),
        draw(st.none() | OUTCOMES),
    )


@given(one=records())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_line_is_the_record_again(one: DecisionRecord) -> None:
    line = to_json(one)
    assert "\n" not in line and line.isascii()
    assert from_json(line) == one
    json.loads(line, parse_constant=pytest.fail)  # strict JSON, whatever the scores are


def test_an_id_that_json_does_not_have_is_written_as_its_repr() -> None:
    one = record(terms("a", 1), request_id=("a", 1))
    assert from_json(to_json(one)) == replace(one, request_id="('a', 1)")


GOOD = json.loads(to_json(record(terms("a", 1), outcome=outcome())))
TERMS_0 = GOOD["workers"][0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 1}, 'with "format": 2 is expected, this one is of another version of Preble: 1'),
        ({"format": 3}, "of another version of Preble: 3"),
        ({"format": "2"}, '"format": 2 is expected$'),
        ({"format": True}, '"format": 2 is expected$'),
        ({"prompt_tokens": "many"}, "record.prompt_tokens must be of type int"),
        ({"prompt_tokens": True}, "record.prompt_tokens"),
        ({"extra": 1}, "record must be an object"),
        ({"worker": "b"}, "not among"),
        ({"workers": {}}, "record.workers"),
        ({"workers": [{**TERMS_0, "score": "high"}]}, r"record.workers\[0\].score"),
        ({"workers": [{**TERMS_0, "candidate": 1}]}, "candidate"),
        ({"workers": [7]}, r"record.workers\[0\] must be an object"),
        ({"workers": [{k: v for k, v in TERMS_0.items() if k != "others_seconds"}]}, "must be an object with worker,"),
        ({"outcome": {}}, "record.outcome must be an object"),
        ({"shadow": []}, "record.shadow must be an object"),
        ({"decided_at": 10**400}, "record.decided_at"),
        ({"decided_at": float("nan")}, "NaN"),
    ],
)
def test_a_damaged_record_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        from_json(json.dumps({**GOOD, **change}))


@pytest.mark.parametrize("line", ["", "7", "[]", "{", "null", "[" * 100_000, '{"format": 2}'])
def test_what_is_no_record_is_refused(line: str) -> None:
    with pytest.raises(InvalidInput):
        from_json(line)


def test_files_are_read_back_and_errors_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    assert write_lines(path, [record(terms("a", 1)), record(terms("b", 2))]) == 2
    with path.open("a") as file:
        file.write("\n{}\n")
    lines = read_lines(path)
    assert [next(lines).worker, next(lines).worker] == ["a", "b"]
    with pytest.raises(InvalidInput, match="line 4"):
        next(lines)
    with pytest.raises(InvalidInput, match="cannot be read"):
        next(read_lines(tmp_path / "none.jsonl"))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="cannot be read"):
        next(read_lines(path))
