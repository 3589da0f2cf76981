"""How long requests would wait, with a clock of the test's own: what is measured, who is refused, whose turn it is."""

from __future__ import annotations

import math
import random

import pytest

from preble.scheduling.predicted_wait import (
    ADMITTED,
    BACKLOG_MIN,
    BURST_FACTOR,
    BURST_SECONDS,
    COLD_SECONDS,
    FADE_SECONDS,
    FAIR_EXCESS,
    RUSH_RATIO,
    SPILL_SHARE,
    STARTS_MIN,
    WAITING_MIN,
    PredictedWait,
    Verdict,
)

BOUND = 3.0


class Line:
    """One fleet whose workers start a request every so often, in order; by default nothing is taken for a burst."""

    def __init__(self, *workers: str, burst_factor: float = 1.0) -> None:
        self.wait = PredictedWait(burst_factor)
        self.workers = workers
        self.now = 100.0
        self.number = 0
        self.waiting: dict[str, list[str]] = {worker: [] for worker in workers}

    def place(self, worker: str, *, client: str = "", seconds: float = 1.0, count: int = 1) -> None:
        for _ in range(count):
            self.number += 1
            name = str(self.number)
            self.wait.placed(name, worker, client, seconds, self.now)
            self.waiting[worker].append(name)

    def start(self, worker: str, every_seconds: float, count: int = 1) -> None:
        for _ in range(count):
            self.now += every_seconds
            self.wait.started(self.waiting[worker].pop(0), self.now)

    def verdict(self, client: str = "", bound: float = BOUND, own: float = math.inf) -> Verdict:
        self.wait.check()
        return self.wait.verdict(self.workers, client, bound, self.now, own)

    def seconds(self, worker: str = "a") -> float:
        return self.wait.wait_seconds(worker, self.now)

    def busy(self, worker: str, every_seconds: float) -> None:
        """A backlog of 8, whose pace has been measured."""
        self.place(worker, count=BACKLOG_MIN)
        for _ in range(40):
            self.place(worker)
            self.start(worker, every_seconds)
        self.place(worker, count=8 - BACKLOG_MIN)


def test_the_wait_is_what_waits_over_the_pace() -> None:
    line = Line("a")
    line.busy("a", 0.5)
    assert line.seconds() == pytest.approx(8 * 0.5, rel=0.05)


def test_a_few_first_tokens_say_little() -> None:
    """Caches that were cold, and the first of many questions about one document: it was thought that the others would
    wait for four times as long as they did, and they were refused."""
    line = Line("a")
    line.place("a", seconds=0.1, count=2)
    line.place("a", seconds=1.0, count=6)
    line.start("a", 1.0, 2)
    assert line.seconds() == pytest.approx(2.0, rel=0.2) and line.verdict() == ADMITTED
    line.start("a", 1.0, STARTS_MIN - 2)
    assert line.seconds() > BOUND


def test_a_bigger_request_counts_for_more_of_the_wait() -> None:
    line = Line("a")
    line.busy("a", 0.5)
    before = line.seconds()
    line.place("a", seconds=10.0)
    assert line.seconds() == pytest.approx(before + 5.0, rel=0.05)


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_errors_of_the_cost_model_cancel_out(factor: float) -> None:
    lines = Line("a"), Line("a")
    for line, seconds in zip(lines, (1.0, factor), strict=True):
        line.place("a", seconds=seconds, count=30)
        line.start("a", 0.4, 20)
    assert lines[0].seconds() == pytest.approx(lines[1].seconds())


def test_the_part_that_one_of_several_routers_sees_gives_the_same_wait() -> None:
    whole, half = Line("a"), Line("a")
    whole.place("a", count=40)
    half.place("a", count=20)
    whole.start("a", 0.2, 20)
    half.start("a", 0.4, 10)
    assert half.seconds() == pytest.approx(whole.seconds(), rel=0.1)


def test_the_pace_follows_the_worker() -> None:
    line = Line("a")
    line.busy("a", 0.1)
    for _ in range(int(6 * FADE_SECONDS)):
        line.place("a")
        line.start("a", 1.0)
    assert line.seconds() == pytest.approx(8.0, rel=0.1)


def test_time_without_a_backlog_is_not_slowness() -> None:
    line = Line("a")
    line.busy("a", 0.1)
    line.start("a", 0.1, 8)
    for _ in range(100):  # one request a minute
        line.now += 60.0
        line.place("a")
        line.start("a", 0.2)
    line.place("a", count=8)
    assert line.seconds() == pytest.approx(0.8, rel=0.1)


def test_an_old_pace_counts_for_little_beside_a_new_one() -> None:
    line = Line("a")
    line.busy("a", 2.0)
    line.start("a", 2.0, 8)
    line.now += 600.0
    line.place("a", count=60)
    line.start("a", 0.1, 40)
    assert line.seconds() < 2 * 20 * 0.1


def test_an_idle_or_fresh_fleet_refuses_nobody() -> None:
    line = Line("a")
    assert line.verdict(bound=1e-9) == ADMITTED
    line.place("a", count=1000)  # a burst, and nothing is known yet
    assert line.verdict() == ADMITTED


def test_few_requests_are_never_too_many_however_slow_the_worker_is() -> None:
    line = Line("a")
    line.busy("a", 100.0)
    line.start("a", 100.0, 8 - (WAITING_MIN - 1))
    assert line.seconds() > BOUND and line.verdict() == ADMITTED
    line.place("a")
    assert line.verdict().refuse_seconds is not None


def test_a_worker_that_starts_nothing_is_full_once_that_lasted() -> None:
    line = Line("a")
    line.place("a", count=WAITING_MIN)
    line.now += BOUND * 0.9
    assert line.verdict() == ADMITTED
    line.now += BOUND
    assert line.verdict().refuse_seconds is not None


def test_refused_is_who_would_wait_too_long_and_for_how_long_is_said() -> None:
    line = Line("a")
    line.busy("a", 0.5)
    verdict = line.verdict()
    assert verdict.refuse_seconds == pytest.approx(4.0, rel=0.05)
    assert line.verdict(bound=5.0) == ADMITTED
    line.start("a", 0.5, 3)
    assert line.verdict() == ADMITTED, "room again as soon as the line is shorter"


def test_a_full_worker_is_left_for_one_that_has_much_less() -> None:
    line = Line("a", "b")
    line.busy("a", 0.5)
    assert line.verdict() == Verdict(over=frozenset({"a"}), avoid=True)


def test_a_full_worker_is_not_left_for_one_that_is_nearly_full() -> None:
    line = Line("a", "b")
    line.busy("b", 0.2)
    line.place("a", count=9)
    line.wait.wait_seconds("a", line.now)
    line.now += BOUND * 1.2  # nothing starts at a
    assert BOUND * SPILL_SHARE < line.seconds("b") < BOUND
    assert line.verdict() == Verdict(over=frozenset({"a"}), avoid=False)


def test_a_key_below_its_part_is_let_in_where_one_above_is_refused() -> None:
    line = Line("a")
    line.place("a", client="greedy", count=30)
    line.start("a", 0.4, 22)
    assert BOUND < line.seconds() < BOUND * FAIR_EXCESS
    assert line.verdict("greedy").refuse_seconds is not None
    assert line.verdict("modest") == ADMITTED
    line.place("a", client="modest", count=1)
    assert line.verdict("modest") == ADMITTED, "1 of 9 is below a half"


def test_keys_that_are_all_below_their_part_fill_no_more_than_the_excess() -> None:
    line = Line("a")
    line.place("a", client="first", count=30)
    line.start("a", 0.5, 22)
    admitted = 0
    for number in range(100):
        if line.verdict(f"key {number}").refuse_seconds is None:
            admitted += 1
            line.place("a", client=f"key {number}")
    assert admitted > 0 and line.seconds() <= BOUND * FAIR_EXCESS + 0.5


def test_equal_keys_have_no_excess() -> None:
    line = Line("a")
    line.place("a", count=22)
    line.start("a", 0.5, 22)
    for number in range(8):
        line.place("a", client=f"key {number % 4}")
    assert line.seconds() > BOUND
    assert all(line.verdict(f"key {number}").refuse_seconds is not None for number in range(4))


def lasting(line: Line, seconds: float) -> None:
    """Time in which as many requests come to `a` as are started there, half a second each."""
    for _ in range(int(seconds / 0.5)):
        line.place("a")
        line.start("a", 0.5)
        line.verdict()


def test_in_a_burst_four_times_as_long_may_be_waited_and_no_longer() -> None:
    line = Line("a", burst_factor=BURST_FACTOR)
    line.busy("a", 0.5)
    assert line.seconds() > BOUND and line.verdict() == ADMITTED
    line.place("a", count=int(BOUND * BURST_FACTOR / 0.5))
    refused = line.verdict().refuse_seconds
    assert refused is not None and refused > BOUND * BURST_FACTOR


def test_what_lasts_is_no_burst_and_ends_when_there_was_room() -> None:
    line = Line("a", burst_factor=BURST_FACTOR)
    line.busy("a", 0.5)
    lasting(line, BURST_SECONDS)
    assert line.verdict() == ADMITTED
    lasting(line, 1.0)
    assert line.verdict().refuse_seconds is not None
    line.start("a", 0.5, 3)
    assert line.seconds() < BOUND and line.verdict() == ADMITTED
    line.place("a", count=4)
    assert line.verdict().refuse_seconds is not None, "a little room does not make a new burst of it"
    line.start("a", 0.5, 7)
    assert line.seconds() < SPILL_SHARE * BOUND and line.verdict() == ADMITTED
    line.place("a", count=6)
    assert line.seconds() > BOUND and line.verdict() == ADMITTED, "much room does"


def longest_wait(line: Line, load: float, seconds: float) -> float:
    """Requests come to `a` `load` times as fast as it starts one, ten a second; returns how long one had to wait that
    was not refused."""
    longest, due = 0.0, 0.0
    for _ in range(int(seconds / 0.1)):
        due += load
        while due >= 1.0:
            due -= 1.0
            if line.verdict().refuse_seconds is None:
                line.place("a")
                longest = max(longest, line.seconds())
        line.start("a", 0.1)
    return longest


@pytest.mark.parametrize("load", [1.5, 3.0, 10.0])
def test_what_grows_too_fast_is_no_burst(load: float) -> None:
    """Three times what engines can serve: everybody waited for 12 s, and a quarter of what they can was of use."""
    line = Line("a", burst_factor=BURST_FACTOR)
    line.place("a", count=BACKLOG_MIN)
    assert longest_wait(line, 1.0, COLD_SECONDS + BURST_SECONDS) < SPILL_SHARE * BOUND
    assert BOUND < longest_wait(line, load, BURST_SECONDS) <= 1.5 * BOUND


def test_what_grows_slowly_is_a_burst() -> None:
    line = Line("a", burst_factor=BURST_FACTOR)
    line.place("a", count=BACKLOG_MIN)
    longest_wait(line, 1.0, COLD_SECONDS + BURST_SECONDS)
    line.place("a", count=25)
    assert longest_wait(line, (1.0 + RUSH_RATIO) / 2, BURST_SECONDS) > 1.5 * BOUND


def test_where_caches_are_cold_a_rush_is_a_burst() -> None:
    line = Line("a", burst_factor=BURST_FACTOR)
    line.place("a", count=BACKLOG_MIN)
    assert longest_wait(line, 3.0, BURST_SECONDS) > 0.9 * BURST_FACTOR * BOUND


def test_who_has_a_time_of_its_own_waits_no_longer_in_a_burst() -> None:
    line = Line("a", burst_factor=BURST_FACTOR)
    line.busy("a", 0.5)
    assert line.verdict(own=3.5).refuse_seconds is not None
    assert line.verdict(own=600.0) == ADMITTED


def test_in_a_burst_a_worker_over_the_bound_is_still_left_for_one_that_has_much_less() -> None:
    line = Line("a", "b", burst_factor=BURST_FACTOR)
    line.busy("a", 0.5)
    assert line.verdict() == Verdict(over=frozenset({"a"}), avoid=True)


def test_who_leaves_makes_room_and_leaves_no_trace() -> None:
    line = Line("a")
    line.busy("a", 0.5)
    for name in list(line.waiting["a"]):
        line.wait.left(name, line.now)
        line.wait.left(name, line.now)
    assert line.wait.waiting == 0 and line.seconds() == 0.0
    line.wait.forget(["b"])
    line.wait.check()
    assert not line.wait._paces and not line.wait._clients


def test_a_worker_where_somebody_waits_is_not_forgotten() -> None:
    line = Line("a")
    line.place("a", count=3)
    line.wait.forget([])
    line.start("a", 1.0)
    line.wait.check()


def test_a_clock_that_jumps_back_changes_nothing() -> None:
    line = Line("a")
    line.busy("a", 0.5)
    before = line.seconds()
    line.now -= 1e6
    assert line.seconds() == before and math.isfinite(before)


def test_any_order_of_events_keeps_the_sums() -> None:
    rng = random.Random(7)
    line = Line("a", "b", "c")
    for _ in range(3000):
        line.now += rng.expovariate(5.0)
        worker = rng.choice(line.workers)
        if rng.random() < 0.5 or not line.waiting[worker]:
            line.place(worker, client=rng.choice("xyz"), seconds=rng.uniform(0.0, 3.0))
        elif rng.random() < 0.8:
            line.start(worker, 0.0)
        else:
            line.wait.left(line.waiting[worker].pop(), line.now)
        verdict = line.verdict(rng.choice("xyz"))
        assert verdict.refuse_seconds is None or (math.isfinite(verdict.refuse_seconds) and verdict.refuse_seconds > 0)
