"""Lower bounds: never above what any schedule or simulated fleet does, and sometimes equal to the best of them.

Schedules of a few jobs are enumerated; fleets of real local schedulers run random prompts under random routes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble import CostModel
from preble.engines.base import GenerationRequest
from preble.engines.simulated import SimulatedEngine
from preble.errors import DuplicateRequest, InvalidConfig, InvalidInput
from preble.local import LocalConfig
from preble.sim.bounds import Flow, Prices, earliest_arrivals, first_touch, lower_bounds, on_time_most
from preble.types import SamplingParams
from preble.workloads import PromptRequest

SLACK = 1e-9  # sums are added in another order
PER_TOKEN = CostModel([(0, 0.0), (1000, 10.0)], name="10 ms a token")
# Every term counts at these lengths, and the linear part is best per token at its inner knots.
EVERY_TERM = CostModel(
    [(0, 0.02), (6, 0.02), (9, 0.05), (20, 0.06), (40, 0.2)],
    context=(12.0, 0.001, 0.0005, 0.0004),
    pair=(60.0, 0.004, 0.0002, 0.0003, 0.00005),
    name="every term",
)
# What a chunk costs before its first token, and context that is almost free at first.
CHUNKS_COST = CostModel([(0, 0.0), (64, 0.064)], pair=(0.0, 0.05, 0.0, 0.0, 1e-5), name="chunks cost")
FREE_AT_FIRST = CostModel([(0, 0.0), (64, 0.02)], context=(50.0, 0.0005, -0.04, 0.001), name="free at first")
SHORT_CHUNKS = CostModel([(0, 0.0), (10, 1.0)], pair=(4.0, -0.04, 1.0, 1e-4, 0.0), name="short chunks")
WHOLE_CHUNKS = CostModel(
    [(0, 0.0), (64, 0.01)], context=(0.0, 0.0, 0.0, 0.01), pair=(100.0, -0.2, 0.01, 0.01, 0.0), name="whole chunks"
)
BEGUN_DEARLY = CostModel([(0, 0.001), (64, 0.01)], context=(0.0, 0.0, 0.0, 0.001), start=0.07, name="begun dearly")
MADE_UP = [PER_TOKEN, EVERY_TERM, CHUNKS_COST, FREE_AT_FIRST, SHORT_CHUNKS, WHOLE_CHUNKS, BEGUN_DEARLY]
MODELS = [*MADE_UP, *(CostModel.preset(name) for name in CostModel.presets())]

jobs = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=5).map(sorted)


def flow_of(releases_and_works: list[tuple[int, int]], workers: int) -> Flow:
    """Jobs whose floor is their own work."""
    releases, works = np.array(releases_and_works, float).T
    return Flow(releases, works, works / 2, works, workers)


def best_schedule(
    releases_and_works: list[tuple[int, int]], workers: int, value_of: Callable[[int], float], join: Callable[..., Any]
) -> float:
    """The least value over every preemptive schedule: each second, each worker does one second of one job, or none.

    A job ends with flow time f at value `value_of(f)`; `join` adds up two values.
    """

    @cache
    def best(now: int, left: tuple[int, ...]) -> float:
        if not any(left):
            return 0.0
        ready = [i for i, (release, _) in enumerate(releases_and_works) if release <= now and left[i]]
        least = math.inf if ready else best(now + 1, left)
        for chosen in itertools.combinations(ready, min(workers, len(ready))):
            after = tuple(count - (i in chosen) for i, count in enumerate(left))
            value = 0.0
            for i in chosen:
                if after[i] == 0:
                    value = join(value, value_of(now + 1 - releases_and_works[i][0]))
            least = min(least, join(value, best(now + 1, after)))
        return least

    return best(0, tuple(work for _, work in releases_and_works))


def least_mean(case: list[tuple[int, int]], workers: int) -> float:
    return best_schedule(case, workers, float, lambda a, b: a + b) / len(case)


def least_longest(case: list[tuple[int, int]], workers: int) -> float:
    return best_schedule(case, workers, float, max)


def most_on_time(case: list[tuple[int, int]], workers: int, x: int) -> int:
    return len(case) - round(best_schedule(case, workers, lambda flow: float(flow > x), lambda a, b: a + b))


@settings(max_examples=150, deadline=None)
@given(case=jobs, workers=st.integers(1, 3))
def test_no_schedule_beats_the_bounds(case: list[tuple[int, int]], workers: int) -> None:
    flow = flow_of(case, workers)
    mean = least_mean(case, workers)
    assert all(bound <= mean + SLACK for bound in flow.mean_terms().values())
    assert flow.longest() <= least_longest(case, workers) + SLACK
    for x in range(8):
        assert flow.on_time(x) >= most_on_time(case, workers, x)


@settings(max_examples=100, deadline=None)
@given(case=jobs)
def test_on_one_worker_mean_and_longest_are_reached(case: list[tuple[int, int]]) -> None:
    flow = flow_of(case, 1)
    assert flow.mean_terms()["srpt"] == pytest.approx(least_mean(case, 1))
    assert flow.longest() == pytest.approx(least_longest(case, 1))


@settings(max_examples=100, deadline=None)
@given(case=jobs, workers=st.integers(1, 2))
def test_a_percentile_is_below_that_of_every_schedule_in_time(case: list[tuple[int, int]], workers: int) -> None:
    """Where fewer than are needed can be on time at x, the percentile of any schedule is above x."""
    flow = flow_of(case, workers)
    for share in (0.0, 0.5, 0.99, 1.0):
        needed = math.floor(share * (len(case) - 1)) + 1
        reached = next(x for x in itertools.count() if most_on_time(case, workers, x) >= needed)
        assert flow.percentile(share) <= reached + SLACK


def test_bounds_are_often_equal_to_the_best_schedule() -> None:
    rng = np.random.default_rng(1)
    equal = {"mean": 0, "longest": 0, "on time": 0}
    for _ in range(60):
        case = sorted((int(rng.integers(0, 6)), int(rng.integers(1, 4))) for _ in range(4))
        flow = flow_of(case, 2)
        equal["mean"] += max(flow.mean_terms().values()) >= least_mean(case, 2) - SLACK
        equal["longest"] += flow.longest() >= least_longest(case, 2) - SLACK
        equal["on time"] += flow.on_time(2) == most_on_time(case, 2, 2)
    assert equal["mean"] >= 20 and equal["longest"] >= 30 and equal["on time"] >= 45, equal


def test_a_dropped_job_never_leaves_the_clock_late() -> None:
    releases, works = np.array([0.0, 0.0, 4.0]), np.array([5.0, 1.0, 1.0])
    assert on_time_most(releases, works, 1.5) == 2  # the long one goes
    assert on_time_most(releases, works, 6.0) == 3
    assert on_time_most(np.array([0.0, 10.0]), np.array([1.0, 3.0]), 2.0) == 1  # no work is done before it comes


# --- prices -----------------------------------------------------------------------------------------------------------

batches = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 400)), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(model=st.sampled_from(MODELS), batch=batches, decodes=st.lists(st.integers(1, 400), max_size=6))
def test_prices_of_a_batch_never_sum_to_more_than_its_time(
    model: CostModel, batch: list[tuple[int, int]], decodes: list[int]
) -> None:
    chunks = [(new, before + new) for new, before in batch]
    budget = sum(new for new, _ in batch) + len(decodes)
    for token_budget in (budget, 4 * budget):
        prices = Prices(model, token_budget, 500)
        price = sum(prices.prefill[end] - prices.prefill[end - new] for new, end in chunks)
        price += sum(prices.decode[context] - prices.decode[context - 1] for context in decodes)
        assert price <= model.iteration_time(chunks, decodes) + SLACK


@settings(max_examples=300, deadline=None)
@given(
    model=st.sampled_from(MODELS),
    position=st.integers(1, 150),
    chunk=st.integers(1, 150) | st.none(),
    beyond=st.sampled_from([0, 1, 40, 400]),
    chunks=st.integers(1, 4),
    room=st.sampled_from([1, 8]),
)
def test_a_token_pays_at_most_its_share_of_any_batch(
    model: CostModel, position: int, chunk: int | None, beyond: int, chunks: int, room: int
) -> None:
    chunk = position if chunk is None else chunk
    prices = Prices(model, chunk * chunks * room, position)
    end = max(position, chunk) + beyond
    share = model.iteration_time([(chunk, end)] * chunks) / (chunk * chunks)
    assert prices.prefill[position] - prices.prefill[position - 1] <= share + SLACK


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_prices_hold_for_long_contexts_in_chunks_of_every_size(model: CostModel) -> None:
    prices = Prices(model, 512, 24_000)
    for end in (600, 1_800, 2_100, 8_192, 24_000):
        for chunk in (1, 8, 40, 44, 100, 128, 129, 256, 500, 512):
            count = max(1, 512 // chunk)  # of alike chunks in one batch
            price = count * (prices.prefill[end] - prices.prefill[end - chunk])
            assert price <= model.iteration_time([(chunk, end)] * count) + SLACK


def test_prices_of_a_prompt_are_close_to_its_time_in_full_chunks() -> None:
    model = CostModel.preset("mistral-7b/a6000")
    in_chunks = sum(model.iteration_time([(512, end)]) for end in (512, 1_024, 1_536, 2_048))
    assert 0.97 * in_chunks <= Prices(model, 512, 2_048).prefill[2_048] <= in_chunks


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_token_alone_takes_what_the_model_says(model: CostModel) -> None:
    prices = Prices(model, 512, 3_000)
    for context in (1, 12, 13, 1_024, 1_025, 3_000):
        alone = prices.one_token[context] - prices.one_token[context - 1]
        assert prices.start + alone == pytest.approx(model.iteration_time([(1, context)]))
        assert alone == pytest.approx(model.iteration_time((), [context]))


def test_a_model_with_negative_prices_leaves_only_floors() -> None:
    model = CostModel([(0, 0.0), (100, 0.1), (200, 2.0)], pair=(10_000.0, 0.1, -0.01, 0.0, 9e-5))
    prices = Prices(model, 10_000, 1_000)
    assert not prices.prefill.any() and not prices.decode.any()
    assert prices.one_token[1] == pytest.approx(0.001)


# --- first touch ------------------------------------------------------------------------------------------------------


def prompt(name: str, tokens: list[int] | np.ndarray, output: int = 1, at: float = 0.0, **more: Any) -> PromptRequest:
    return PromptRequest(name, (np.asarray(tokens, np.int32),), output, arrival_seconds=at, **more)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=12), st.randoms())
def test_first_touch_counts_prefixes_nobody_had_before(prompts: list[list[int]], random: Any) -> None:
    order = list(range(len(prompts)))
    random.shuffle(order)
    requests = [prompt(str(i), tokens) for i, tokens in enumerate(prompts)]
    owned, repeated = first_touch(requests, np.array(order))
    seen: set[tuple[int, ...]] = set()
    for i in order:
        prefixes = {tuple(prompts[i][:end]) for end in range(1, len(prompts[i]) + 1)}
        assert owned[i] == len(prefixes - seen)
        seen |= prefixes
    assert not repeated.any()


def test_known_outputs_own_tokens_of_later_prompts() -> None:
    first = prompt("first", [1, 2], 3, output_ids=np.array([7, 8, 9], np.int32))
    second = prompt("second", [1, 2, 7, 8, 9, 4], 2, at=1.0)
    owned, repeated = first_touch([first, second], np.array([0, 1]))
    assert owned.tolist() == [2, 1] and repeated.tolist() == [0, 0]
    owned, repeated = first_touch([first, second], np.array([1, 0]))
    assert owned.tolist() == [0, 6] and repeated.tolist() == [3, 0]
    assert lower_bounds([first, second], PER_TOKEN, 1).least_prefill_tokens == 3


def test_outputs_that_an_earlier_prompt_holds_are_not_counted_twice() -> None:
    prompt_first = prompt("second", [1, 2, 7, 8, 9, 4], 2)
    output_later = prompt("first", [1, 2], 3, at=1.0, output_ids=np.array([7, 8, 9], np.int32))
    bounds = lower_bounds([output_later, prompt_first], PER_TOKEN, 1)
    assert bounds.least_prefill_tokens == 3
    assert bounds.latency.works.tolist() == pytest.approx([0.07, 0.0])
    assert bounds.latency.floors.tolist() == pytest.approx([0.07, 0.03])


# --- workloads --------------------------------------------------------------------------------------------------------


def test_a_request_alone_takes_exactly_its_bounds() -> None:
    bounds = lower_bounds([prompt("a", range(100), 4)], PER_TOKEN, 2, 512)
    assert bounds.mean_ttft_seconds == bounds.p99_ttft_seconds == bounds.max_ttft_seconds == pytest.approx(1.0)
    assert bounds.mean_latency_seconds == bounds.max_latency_seconds == pytest.approx(1.03)
    assert bounds.hit_fraction_ceiling == 0.0 and bounds.least_prefill_tokens == 100
    assert bounds.goodput(0.99) == 0.0 and bounds.goodput(1.01) == 1.0


def test_shared_tokens_are_computed_once() -> None:
    shared = np.arange(100, dtype=np.int32)
    requests = [
        PromptRequest(str(i), (shared, np.array([500 + i], np.int32)), 1, arrival_seconds=0.0) for i in range(4)
    ]
    bounds = lower_bounds(requests, PER_TOKEN, 1)
    assert bounds.least_prefill_tokens == 104
    assert bounds.hit_fraction_ceiling == pytest.approx(300 / 404)
    assert bounds.max_ttft_seconds == pytest.approx(1.04)


def test_equal_prompts_compute_a_token_each() -> None:
    bounds = lower_bounds([prompt(str(i), [1, 2, 3, 4]) for i in range(5)], PER_TOKEN, 1)
    assert bounds.least_prefill_tokens == 5
    assert bounds.hit_fraction_ceiling == pytest.approx(0.75)
    assert bounds.goodput(0.02) == pytest.approx(0.8)


def test_requests_without_work_still_have_their_iteration() -> None:
    model = CostModel([(0, 0.1), (512, 0.1)])
    bounds = lower_bounds([prompt(str(i), range(256)) for i in range(4)], model, 1)
    assert bounds.ttft.works.tolist() == pytest.approx([0.05, 0.0, 0.0, 0.0])
    assert bounds.ttft.tails.tolist() == pytest.approx([0.05, 0.1, 0.1, 0.1])
    assert bounds.mean_ttft_terms["mean_busy"] == pytest.approx((0.025 + 0.05 + 0.3) / 4)
    assert bounds.mean_ttft_seconds == bounds.mean_ttft_terms["floor"] == pytest.approx(0.1)


def test_a_queue_is_seen_by_every_bound() -> None:
    requests = [prompt(str(i), np.arange(100) + 100 * i, 1, 0.0) for i in range(10)]
    bounds = lower_bounds(requests, PER_TOKEN, 2)
    assert bounds.mean_ttft_terms["floor"] == pytest.approx(1.0)
    assert bounds.mean_ttft_terms["srpt"] == pytest.approx(2.75)
    assert bounds.mean_ttft_terms["mean_busy"] == bounds.mean_ttft_seconds == pytest.approx(3.0)  # what two workers do
    assert bounds.max_ttft_seconds == pytest.approx(5.0)
    assert bounds.p99_ttft_seconds == pytest.approx(4.5)  # of nine in ten
    assert bounds.goodput(2.0) == pytest.approx(0.4)


def test_requests_of_a_warmup_own_tokens_and_are_not_counted() -> None:
    late = prompt("late", range(150), 1, 3.0)
    later = prompt("later", range(150), 1, 4.0)
    first = prompt("first", range(100), 11, 0.5)
    bounds = lower_bounds([late, later, first], PER_TOKEN, 1, warmup_requests=1)
    assert bounds.counted.tolist() == [True, True, False] and bounds.requests == 2
    assert bounds.ttft.works.tolist() == pytest.approx([0.5, 0.0])
    assert bounds.mean_ttft_seconds == pytest.approx(0.51 / 2)
    assert bounds.hit_fraction_ceiling == pytest.approx(250 / 300) and bounds.least_prefill_tokens == 50
    with pytest.raises(InvalidConfig, match="warmup_requests"):
        lower_bounds([late, later, first], PER_TOKEN, 1, warmup_requests=3)


def test_a_closed_loop_counts_with_floors_only() -> None:
    first = prompt("a", range(100), 11)
    second = prompt("b", range(150), 6, after="a", pause_seconds=2.0)
    third = prompt("c", range(200), 1, at=50.0, after="b")
    requests = [third, second, first]
    needs = np.array([0.01, 0.06, 0.11])
    assert earliest_arrivals(requests, needs).tolist() == pytest.approx([50.0, 2.11, 0.0])
    bounds = lower_bounds(requests, PER_TOKEN, 1)
    assert bounds.ttft.floors.tolist() == pytest.approx([1.0, 0.01, 0.01])
    assert bounds.mean_ttft_seconds == pytest.approx(1.02 / 3)
    assert bounds.max_latency_seconds == pytest.approx(1.1)
    assert bounds.least_prefill_tokens == 200


@pytest.mark.parametrize(
    ("requests", "workers", "budget", "error", "words"),
    [
        ([], 1, 512, InvalidInput, "empty"),
        ([prompt("a", [1])], 0, 512, InvalidConfig, "workers"),
        ([prompt("a", [1])], 1, 0, InvalidConfig, "token_budget"),
        ([prompt("a", [1]), prompt("a", [2])], 1, 512, DuplicateRequest, "'a'"),
        ([prompt("a", [1], after="b")], 1, 512, InvalidInput, "'b' is not among"),
        ([prompt("a", [1], after="b"), prompt("b", [1], after="a")], 1, 512, InvalidInput, "after itself"),
    ],
    ids=["none", "workers", "budget", "twice", "unknown", "circle"],
)
def test_bad_arguments_are_named(
    requests: list[PromptRequest], workers: int, budget: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        lower_bounds(requests, PER_TOKEN, workers, budget)


# --- fleets -----------------------------------------------------------------------------------------------------------


@dataclass
class Served:
    """What one request experienced, in seconds and tokens."""

    arrival: float
    first: float = math.nan
    last: float = math.nan
    cached: int = 0


class Fleet:
    """Workers with real local schedulers on a virtual clock; `route` says who gets a request."""

    def __init__(self, model: CostModel, workers: int, config: LocalConfig, route: Callable[[int], int]) -> None:
        self.now, self.route, self.serial = 0.0, route, itertools.count()
        self.engines = [SimulatedEngine(model, config, clock=lambda: self.now, time_scale=0.0) for _ in range(workers)]
        self.busy = [False] * workers
        self.events: list[tuple[float, int, int, PromptRequest | None]] = []
        self.served: dict[str, Served] = {}

    def run(self, requests: list[PromptRequest]) -> list[Served]:
        waiting = {request.after: request for request in requests if request.after is not None}
        for request in requests:
            if request.after is None:
                self.push(request.arrival_seconds, -1, request)
        while self.events:
            self.now, _, worker, arrived = heapq.heappop(self.events)
            if arrived is not None:
                worker = self.accept(arrived)
            else:
                self.busy[worker] = False
                for chunk in self.engines[worker].end_step():
                    follower = waiting.get(chunk.request_id) if self.book(chunk) else None
                    if follower is not None:
                        self.push(max(follower.arrival_seconds, self.now + follower.pause_seconds), -1, follower)
            if not self.busy[worker] and self.engines[worker].has_work():
                self.busy[worker] = True
                self.push(self.now + self.engines[worker].begin_step(), worker, None)
        return [self.served[request.request_id] for request in requests]

    def push(self, at: float, worker: int, request: PromptRequest | None) -> None:
        heapq.heappush(self.events, (at, next(self.serial), worker, request))

    def accept(self, request: PromptRequest) -> int:
        worker = self.route(len(self.served))
        self.served[request.request_id] = Served(self.now)
        sampling = SamplingParams(max_new_tokens=request.output_tokens, ignore_eos=True)
        self.engines[worker].submit(GenerationRequest(request.request_id, request.token_ids, sampling))
        return worker

    def book(self, chunk: Any) -> bool:
        served = self.served[chunk.request_id]
        if chunk.index == 0:
            served.first, served.cached = self.now, chunk.cached_tokens
        if chunk.finish_reason is not None:
            served.last = self.now
        return chunk.finish_reason is not None


def random_requests(rng: np.random.Generator, count: int, spread_seconds: float, closed: bool) -> list[PromptRequest]:
    """Prompts that share prefixes of all lengths, some of them equal; in a closed loop, agents of three steps."""
    bases = [rng.integers(0, 1_000, 60).astype(np.int32) for _ in range(3)]
    requests: list[PromptRequest] = []
    for i in range(count):
        tail = rng.integers(0, 1_000, int(rng.integers(0, 30))).astype(np.int32)
        parts = (bases[rng.integers(3)][: rng.integers(1, 61)], tail)
        request = PromptRequest(str(i), parts, int(rng.integers(1, 9)), arrival_seconds=rng.uniform(0, spread_seconds))
        if closed and i % 3:
            before = requests[-1]
            request = replace(request, parts=(*before.parts, tail), after=before.request_id, arrival_seconds=0.0)
        requests.append(request)
    return requests


def assert_bounded(requests: list[PromptRequest], served: list[Served], bounds: Any) -> None:
    served = [one for one, counted in zip(served, bounds.counted, strict=True) if counted]
    requests = [request for request, counted in zip(requests, bounds.counted, strict=True) if counted]
    assert len(requests) == bounds.requests
    ttft = np.array([one.first - one.arrival for one in served])
    latency = np.array([one.last - one.arrival for one in served])
    assert np.isfinite(latency).all()
    assert bounds.mean_ttft_seconds <= ttft.mean() + SLACK
    assert bounds.p99_ttft_seconds <= np.percentile(ttft, 99) + SLACK
    assert bounds.max_ttft_seconds <= ttft.max() + SLACK
    assert bounds.mean_latency_seconds <= latency.mean() + SLACK
    assert bounds.p99_latency_seconds <= np.percentile(latency, 99) + SLACK
    assert bounds.max_latency_seconds <= latency.max() + SLACK
    for x in np.percentile(ttft, [5, 30, 60, 90]):
        assert bounds.goodput(x + SLACK) >= (ttft <= x).mean()
    hits = sum(one.cached for one in served) / sum(request.prompt_tokens for request in requests)
    assert hits <= bounds.hit_fraction_ceiling + SLACK


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    model=st.sampled_from(MODELS),
    workers=st.integers(1, 3),
    budget=st.sampled_from([8, 33, 512]),
    order=st.sampled_from(["priority", "fcfs", "longest_prefix"]),
    load=st.sampled_from([0.1, 1.0, 10.0]),
    closed=st.booleans(),
    warmup=st.sampled_from([0, 1, 9, 23]),
)
def test_no_fleet_beats_the_bounds(
    seed: int, model: CostModel, workers: int, budget: int, order: str, load: float, closed: bool, warmup: int
) -> None:
    rng = np.random.default_rng(seed)
    seconds = 24 * model.iteration_time([(30, 60)]) / (workers * load)
    requests = random_requests(rng, 24, seconds, closed)
    config = LocalConfig(
        int(rng.integers(150, 1_000)), budget, 8, order=order, min_shared_tokens=int(rng.choice([0, 8]))
    )
    routes = rng.integers(0, workers, len(requests))
    served = Fleet(model, workers, config, lambda number: int(routes[number])).run(requests)
    assert_bounded(requests, served, lower_bounds(requests, model, workers, budget, warmup))


def test_a_worker_serving_in_order_reaches_the_longest_wait() -> None:
    """Prompts without a common token at 10 ms a token: first in, first out on one worker is the bound itself."""
    rng = np.random.default_rng(3)
    requests = [prompt(str(i), np.arange(50) + 100 * i, 1, at) for i, at in enumerate(np.sort(rng.uniform(0, 6, 12)))]
    served = Fleet(PER_TOKEN, 1, LocalConfig(10_000, 512, 1, order="fcfs"), lambda _: 0).run(requests)
    longest = max(one.first - one.arrival for one in served)
    assert lower_bounds(requests, PER_TOKEN, 1).max_ttft_seconds == pytest.approx(longest)
