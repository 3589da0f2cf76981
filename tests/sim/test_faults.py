"""Workers that die, join and drain during a simulation: what becomes of their requests, and which faults make no sense.

Runs without faults are in `test_simulation.py`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from preble import CostModel, WorkerSpec, sim
from preble.errors import DuplicateWorker, InvalidConfig, NoWorkers, UnknownWorker
from preble.sim import WorkerDeath, WorkerDrain, WorkerJoin
from preble.sim.results import FINISHED, REFUSED, UNFINISHED
from preble.sim.worker import SimWorker
from tests.support.sim import PLAIN, asked, config, run, tokens, tools, workload

Sent = list[tuple[float, str, str, list[int], list[int]]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """(moment, worker, request, prompt, planned answer) of every submission to a worker."""
    seen: Sent = []
    submit = SimWorker.submit

    def watched(self: SimWorker, request_id: str, token_ids: Any, planned_ids: Any, *rest: Any) -> bool:
        seen.append((self.engine.scheduler._clock(), self.name, request_id, token_ids.tolist(), planned_ids.tolist()))
        return submit(self, request_id, token_ids, planned_ids, *rest)

    monkeypatch.setattr(SimWorker, "submit", watched)
    return seen


# --- death ------------------------------------------------------------------------------------------------------------


def test_a_request_goes_on_elsewhere_with_what_it_has(sent: Sent) -> None:
    answer = tokens(50, first=500)
    requests = [asked("a", 0.0, tokens(100), out=50, output_ids=answer), asked("b", 0.0, 10, out=1)]
    death = WorkerDeath(0.200, "w0", noticed_after_seconds=1.0)
    result, simulation = run(requests, config(workers=2, policy="round_robin", faults=(death,)))
    # A's first token at 110 ms, then one every 11 ms: 9 by 200 ms. Noticed at 1.2 s; then 109 tokens are computed by
    # the other worker, which gives the 10th, and 40 more follow.
    assert sent[2] == (1.2, "w1", "a", tokens(100).tolist() + answer[:9].tolist(), answer[9:].tolist())
    assert result.first_token_seconds[0] == pytest.approx(0.110)
    assert result.finish_seconds[0] == pytest.approx(1.2 + 0.119 + 40 * 0.011)
    assert result.output_tokens.tolist() == [50, 1]
    assert result.worker.tolist() == [1, 1]
    assert result.busy_seconds == pytest.approx([0.200, 0.020 + 0.119 + 40 * 0.011])  # dead workers are not busy
    assert (result.counts["resumed"], result.counts["faults"]) == (1, 1)
    assert list(simulation.scheduler.workers) == ["w1"]


def test_the_death_of_a_worker_without_requests() -> None:
    result, simulation = run([asked("a", 0.0, 100)], config(workers=2, faults=(WorkerDeath(0.01, "w1"),)))
    assert result.counts["resumed"] == 0
    assert list(simulation.scheduler.workers) == ["w0"]


def test_requests_sent_to_a_dead_worker_wait_until_it_is_noticed(sent: Sent) -> None:
    requests = [asked("a", 0.0, 10, out=1), asked("b", 0.5, 10, out=1), asked("c", 0.6, 10, out=1)]
    faults = (WorkerDeath(0.4, "w1", noticed_after_seconds=2.0),)
    result, _ = run(requests, config(workers=2, policy="round_robin", faults=faults))
    assert [(moment, worker, name) for moment, worker, name, _, _ in sent] == [
        (0.0, "w0", "a"), (0.5, "w1", "b"), (0.6, "w0", "c"), (2.4, "w0", "b"),
    ]  # fmt: skip
    assert result.finish_seconds[1] == pytest.approx(2.4 + 0.020)
    assert result.latency_seconds[1] == pytest.approx(1.9 + 0.020)


def test_a_request_on_its_way_to_a_dying_worker_arrives_once(sent: Sent) -> None:
    """It is placed anew while the first message is under way, and that one must not count."""
    faults = (WorkerDeath(0.1, "w0", noticed_after_seconds=0.1),)
    result, _ = run(
        [asked("a", 0.0, 10, out=1), asked("b", 0.15, 10)],
        config(workers=2, policy="round_robin", network_seconds=0.5, faults=faults),
    )
    assert [(moment, worker, name) for moment, worker, name, _, _ in sent] == [(0.65, "w1", "b"), (0.7, "w1", "a")]
    assert result.outcome.tolist() == [FINISHED, FINISHED]


def test_late_news_of_a_dead_worker_do_no_harm() -> None:
    """The first token is reported after the request was placed elsewhere; its end after the worker was forgotten."""
    requests = [asked("a", 0.0, 100, out=50), asked("b", 0.0, 20, out=1), asked("c", 0.001, 30, out=1)]
    faults = (WorkerDeath(0.25, "w0", noticed_after_seconds=0.05),)
    result, simulation = run(requests, config(workers=2, policy="round_robin", event_delay_seconds=0.4, faults=faults))
    assert result.output_tokens.tolist() == [50, 1, 1]
    assert result.finish_seconds[2] < 0.25  # on the worker that died
    assert simulation.scheduler.stats()["late_calls"] == 0


def test_a_late_first_token_of_a_dead_worker_is_not_taken_for_one_of_the_next() -> None:
    """It came on w0 at 0.11 s and is reported at 0.51 s; since 0.3 s the request is w1's, whose first token is to be
    reported at 0.82 s."""
    faults = (WorkerDeath(0.25, "w0", noticed_after_seconds=0.05),)
    for until, waiting in ((0.7, 1), (0.9, 0)):
        settings = config(workers=2, policy="round_robin", event_delay_seconds=0.4, faults=faults, until_seconds=until)
        _, simulation = run([asked("a", 0.0, 100, out=150)], settings)
        assert simulation.scheduler.stats()["workers"]["w1"]["waiting_requests"] == waiting


def test_evictions_of_a_forgotten_worker_are_counted() -> None:
    requests = [asked("a", 0.0, 90, out=1), asked("b", 0.2, 90, out=1), asked("c", 1.0, 90, out=1)]
    workers = (WorkerSpec("w0", 100), WorkerSpec("w1", 100))
    faults = (WorkerDrain(0.0, "w1"), WorkerJoin(0.5, WorkerSpec("w2", 100)), WorkerDeath(0.5, "w0", 0.1))
    result, _ = run(requests, config(workers=workers, event_delay_seconds=0.6, faults=faults))
    assert result.counts["event_batches"] == result.counts["late_event_batches"] == 1


def test_two_deaths_of_one_request(sent: Sent) -> None:
    faults = (WorkerDeath(0.2, "w0", 0.1), WorkerDeath(0.5, "w2", 0.1))
    result, _ = run([asked("a", 0.0, 100, out=60)], config(workers=3, policy="round_robin", faults=faults))
    prompt, answer = sent[0][3], sent[0][4]
    for _, _, _, resumed, rest in sent[1:]:
        assert resumed + rest == prompt + answer
    assert [len(submission[4]) for submission in sent] == [60, 60 - 9, 60 - 9 - 8]
    assert result.first_token_seconds[0] == pytest.approx(0.110)
    assert result.output_tokens.tolist() == [60]
    assert result.counts["resumed"] == 2


def test_a_request_too_long_for_those_who_are_left() -> None:
    """It had its first token in time, and is refused all the same: it is no good answer."""
    workers = (WorkerSpec("big"), WorkerSpec("small", 50))
    death = WorkerDeath(0.15, "big", 0.1)
    result, _ = run([asked("a", 0.0, 100, out=9)], config(workers=workers, policy="round_robin", faults=(death,)))
    assert result.outcome.tolist() == [REFUSED]
    assert result.ttft_seconds[0] == pytest.approx(0.110)
    assert result.output_tokens.tolist() == [4]
    assert result.goodput(1.0) == 0.0


# --- joins and drains -------------------------------------------------------------------------------------------------


def test_a_joined_worker_is_used_and_has_its_own_speed() -> None:
    fast = WorkerSpec("new", 5000, cost_model=CostModel([(0, 0.001), (1000, 0.101)]))
    requests = [asked(f"r{i}", 0.5 * i, 100, out=1) for i in range(6)]
    result, simulation = run(requests, config(policy="round_robin", faults=(WorkerJoin(0.9, fast),)))
    assert result.workers == ("w0", "new")
    assert result.worker.tolist() == [0, 0, 0, 1, 0, 1]
    assert result.latency_seconds == pytest.approx([0.110, 0.110, 0.110, 0.011, 0.110, 0.011])
    assert simulation.workers[1].engine.info.kv_capacity_tokens == 5000


def test_a_dead_worker_comes_back_empty_under_its_name() -> None:
    faults = (WorkerDeath(1.0, "w0", 0.5), WorkerJoin(1.6, WorkerSpec("w0")), WorkerDeath(2.5, "w1", 0.1))
    requests = [asked("a", 0.0, tokens(100), out=1), asked("b", 3.0, tokens(100), 5, out=1)]
    result, _ = run(requests, config(workers=2, faults=faults))
    assert result.workers == ("w0", "w1", "w0")
    assert result.worker.tolist() == [0, 2]
    assert result.placed_tokens.tolist() == result.cached_tokens.tolist() == [0, 0]


def test_a_drained_worker_ends_what_it_has() -> None:
    requests = [asked("a", 0.0, 100, out=30), asked("b", 0.3, 10), asked("c", 0.4, 10), asked("d", 0.5, 10)]
    result, _ = run(requests, config(workers=2, policy="round_robin", faults=(WorkerDrain(0.2, "w0"),)))
    assert result.worker.tolist() == [0, 1, 1, 1]
    assert (result.outcome == FINISHED).all()
    assert result.finish_seconds[0] == pytest.approx(0.110 + 29 * 0.011)


def test_requests_with_every_worker_draining_are_an_error() -> None:
    with pytest.raises(NoWorkers):
        sim.simulate(workload(asked("a", 1.0, 10)), config(faults=(WorkerDrain(0.5, "w0"),)))


def test_nothing_happens_to_workers_after_the_last_request() -> None:
    faults = (WorkerJoin(50.0, WorkerSpec("late")), WorkerDrain(60.0, "w0"))
    result, _ = run([asked("a", 0.0, 100)], config(faults=faults))
    assert result.workers == ("w0",)  # a worker that never could work would make the load look uneven
    assert result.summary().load_spread == pytest.approx(1.0)
    assert result.counts["faults"] == 0


def test_faults_that_come_after_the_end_of_the_run_are_left_out() -> None:
    result, simulation = run(
        [asked("a", 0.0, 500, out=50)], config(workers=2, faults=(WorkerDeath(0.6, "w0"),), until_seconds=0.5)
    )
    assert result.outcome.tolist() == [UNFINISHED]
    assert result.counts["faults"] == 0
    assert result.busy_seconds == pytest.approx([0.5, 0.0])


# --- many -------------------------------------------------------------------------------------------------------------


def test_a_bad_day_loses_no_request() -> None:
    faults = (
        WorkerDeath(1.0, "w0", 0.7),
        WorkerJoin(1.2, WorkerSpec("new", 2000)),
        WorkerDrain(2.0, "w1"),
        WorkerJoin(3.0, WorkerSpec("w0", 2000)),
        WorkerDeath(4.0, "w2", 0.2),
    )
    requests = tools(200)
    settings = config(workers=3, local={"kv_capacity_tokens": 2000}, faults=faults, event_delay_seconds=0.3,
                      event_loss=0.2, network_seconds=0.01)  # fmt: skip
    result, _ = run(requests, settings)
    assert (result.outcome == FINISHED).all()
    assert result.output_tokens.tolist() == [request.output_tokens for request in requests.requests]
    assert result.counts["resumed"] > 0
    assert result.counts["faults"] == 5
    assert np.isfinite(result.ttft_seconds).all()


# --- faults that make no sense ----------------------------------------------------------------------------------------

TWICE = (WorkerDeath(1.0, "w0", 1.0), WorkerDeath(5.0, "w0"))
SOON = (WorkerDeath(1.0, "w0", 1.0), WorkerDeath(1.5, "w0"))


@pytest.mark.parametrize(
    ("faults", "error", "said"),
    [
        ((WorkerDeath(1.0, "w7"),), UnknownWorker, "'w7' is not there"),
        ((WorkerDrain(1.0, "w7"),), UnknownWorker, "'w7' is not there"),
        (TWICE, UnknownWorker, "at 5.0 s worker 'w0' is not there"),
        (SOON, UnknownWorker, "at 1.5 s worker 'w0' is dead"),
        ((WorkerDrain(9.0, "w0"), WorkerDeath(1.0, "w0")), UnknownWorker, "at 9.0 s worker 'w0' is not there"),
        ((WorkerDrain(2.0, "w0"), WorkerDeath(1.0, "w0")), UnknownWorker, "at 2.0 s worker 'w0' is dead"),
        ((WorkerDrain(1.0, "new"), WorkerJoin(1.0, WorkerSpec("new"))), UnknownWorker, "'new'"),
        ((WorkerJoin(1.0, WorkerSpec("w1")),), DuplicateWorker, "'w1' is there"),
        ((WorkerDeath(1.0, "w0", 1.0), WorkerJoin(1.5, WorkerSpec("w0"))), DuplicateWorker, "'w0' is there"),
        ((WorkerDeath(1.0, "w0", 1.0), WorkerJoin(2.0, WorkerSpec("w0"))), DuplicateWorker, "'w0' is there"),
        ((WorkerDeath(1.0, "w0"), WorkerDeath(1.0, "w1")), InvalidConfig, "the last worker"),
        ((WorkerDeath(-1.0, "w0"),), InvalidConfig, "at_seconds"),
        ((WorkerDeath(math.nan, "w0"),), InvalidConfig, "at_seconds"),
        ((WorkerDeath("soon", "w0"),), InvalidConfig, "at_seconds"),
        ((WorkerDrain(math.inf, "w0"),), InvalidConfig, "at_seconds"),
        ((WorkerDeath(1.0, "w0", -1.0),), InvalidConfig, "noticed_after_seconds"),
        ((WorkerDeath(1.0, "w0", math.nan),), InvalidConfig, "noticed_after_seconds"),
        ((WorkerDeath(1.0, 0),), InvalidConfig, "WorkerDeath.worker"),
        ((WorkerDrain(1.0, None),), InvalidConfig, "WorkerDrain.worker"),
        ((WorkerDrain(1.0, "w0", -1.0),), InvalidConfig, "WorkerDrain.handover_seconds"),
        ((WorkerJoin(1.0, "w9"),), InvalidConfig, "WorkerJoin.spec"),
        ((WorkerJoin(1.0, WorkerSpec("w9", cost_model="none such")),), InvalidConfig, "none such"),
        (("w0@30",), InvalidConfig, "w0@30"),
        (WorkerDeath(1.0, "w0"), InvalidConfig, "tuple"),
        (None, InvalidConfig, "tuple"),
    ],
)
def test_faults_that_make_no_sense(faults: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        config(workers=2, faults=faults)


def test_faults_that_make_sense() -> None:
    back = WorkerJoin(2.0, WorkerSpec("w0", cost_model=PLAIN))
    for faults in ((WorkerDeath(1.0, "w0", 0.5), back, WorkerDeath(3.0, "w0")), (), (WorkerDrain(1.0, "w1"),) * 2):
        assert config(workers=2, faults=faults).faults == faults


def test_everybody_is_dead_for_a_while_and_nobody_knows() -> None:
    """W1's request goes to w0, which is dead as well, and from there to the newcomer."""
    faults = (WorkerDeath(0.05, "w0", 3.0), WorkerDeath(0.05, "w1", 1.0), WorkerJoin(2.0, WorkerSpec("new")))
    requests = [asked("a", 0.0, 100, out=2), asked("b", 0.0, 100, out=2)]
    result, _ = run(requests, config(workers=2, policy="round_robin", faults=faults))
    assert result.worker.tolist() == [2, 2]
    assert result.first_token_seconds == pytest.approx([3.05 + 0.110, 3.05 + 0.110 + 0.111])
    assert result.counts["resumed"] == 3
