"""What the end of a pod costs: the value, how seldom it is written, and what fails."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from preble import ManualClock
from preble.errors import TransportError
from preble.gateway.discovery.known_servers import FoundServer, PodName
from preble.gateway.discovery.pod_costs import (
    COST_MAX,
    POD_SECONDS,
    UNKNOWN_COST,
    WRITES_MAX,
    PodCosts,
    WrittenCost,
    cost_of,
    costs_to_write,
)
from tests.support.transport import asynchronous

A, B, C = (PodName("llm", name) for name in "abc")


def test_a_pod_costs_what_its_workers_would_have_to_be_computed_again_and_one_that_is_not_known_most() -> None:
    seconds = {"a": 1.0, "b": 0.0004, "c": 1e9}
    assert cost_of(["a"], seconds) == 1024 and cost_of(["a", "a"], seconds) == 2048
    assert cost_of(["b"], seconds) == 0 and cost_of(["c"], seconds) == COST_MAX
    assert cost_of(["a", "x"], seconds) == cost_of([], seconds) == UNKNOWN_COST > COST_MAX


@settings(max_examples=100, deadline=None)
@given(st.floats(0.0, 1e5), st.floats(0.0, 1e5))
def test_who_costs_more_is_never_written_as_costing_less(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 0 <= cost_of(["w"], {"w": low}) <= cost_of(["w"], {"w": high}) < UNKNOWN_COST < 2**31


def test_each_pod_is_written_on_and_a_cost_that_stays_is_not_written_again() -> None:
    pods, seconds = {A: ["a"], B: ["b"], C: ["c"]}, {"a": 0.0, "b": 1.0}
    assert costs_to_write(pods, seconds, {}, 0.0) == [(C, UNKNOWN_COST), (B, 1024), (A, 0)]
    written = {A: WrittenCost(0, 0.0), B: WrittenCost(1024, 0.0), C: WrittenCost(UNKNOWN_COST, 0.0)}
    assert costs_to_write(pods, {"a": 0.0, "b": 1.2}, written, 1e6) == [], "within its power of two"
    assert costs_to_write(pods, {"a": 0.0, "b": 9.0}, written, POD_SECONDS - 1.0) == [], "not so soon"
    assert costs_to_write(pods, {"a": 0.0, "b": 9.0}, written, POD_SECONDS) == [(B, 8192)]


def test_of_many_pods_a_few_are_written_on_at_a_time_the_furthest_from_the_mark_first() -> None:
    pods = {PodName("llm", f"p{number:03}"): [str(number)] for number in range(100)}
    seconds = {str(number): float(number) for number in range(99)}
    due = costs_to_write(pods, seconds, {}, 0.0)
    assert len(due) == WRITES_MAX and due[0] == (PodName("llm", "p099"), UNKNOWN_COST)


class Cluster:
    """Pods with what is written on them; `fails`: it cannot be written."""

    def __init__(self) -> None:
        self.costs: dict[PodName, int | None] = {A: None, B: 1024}
        self.fails = False
        self.writes: list[tuple[PodName, int]] = []

    def pods(self) -> dict[PodName, tuple[FoundServer, list[str]]]:
        """As discovery knows them."""
        return {
            pod: (FoundServer(f"http://{pod.name}:1", pod=pod, deletion_cost=cost), [pod.name])
            for pod, cost in self.costs.items()
        }

    async def write(self, pod: PodName, cost: int) -> None:
        """One write."""
        if self.fails:
            raise TransportError("forbidden")
        self.writes.append((pod, cost))
        self.costs[pod] = cost


@asynchronous
async def test_what_is_there_is_not_written_what_fails_is_tried_later_and_what_another_wrote_is_put_right() -> None:
    cluster, clock, seconds = Cluster(), ManualClock(), {"a": 0.25, "b": 1.0}
    costs = PodCosts(cluster.pods, lambda: seconds, cluster.write, clock)
    cluster.fails = True
    await costs.look()
    assert (costs.writes, costs.failures) == (0, 1), "b has its cost from before"
    cluster.fails = False
    await costs.look()
    assert not cluster.writes, "not at once again"
    clock.advance(POD_SECONDS)
    await costs.look()
    assert cluster.writes == [(A, 256)]
    cluster.costs[A] = 7
    clock.advance(POD_SECONDS)
    await costs.look()
    assert cluster.writes == [(A, 256), (A, 256)]
    del cluster.costs[A]
    await costs.look()
    assert set(costs._written) == {B}, "who is gone is forgotten"
    assert costs._written[B].at == -math.inf
