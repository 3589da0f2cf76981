"""The local scheduler, story by story: queue order, chunks, sharing, memory, cancellation, events, refusals."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from preble.batching._batch import LiveRequest
from preble.batching.kv_cache import KvCache, SlotPool
from preble.batching.waiting_queue import WaitingQueue
from preble.clock import ManualClock
from preble.errors import DuplicateRequest, InvalidConfig, InvalidInput, InvalidTime, InvalidTokens, QueueFull
from preble.local import LocalConfig, LocalRequest, LocalScheduler
from preble.types import AllBlocksCleared, PrefixEvicted
from tests.models.local import PretendDevice, expected_output


class Worker:
    """A scheduler, a pretend device whose KV memory refuses misuse, and a clock that moves a second per iteration."""

    def __init__(self, capacity=1000, **config):
        self.clock = ManualClock()
        self.scheduler = LocalScheduler(LocalConfig(capacity, **config), clock=self.clock)
        self.device = PretendDevice()
        self.sequences = {}
        self.prompts = {}
        self.outputs = {}
        self.reasons = {}
        self.cached = {}

    def add(self, name, tokens, max_new=4, stops=(), namespace=None):
        tokens = tuple(int(token) for token in tokens)
        self.scheduler.add(LocalRequest(name, np.array(tokens, np.int32), max_new, frozenset(stops), namespace))
        self.sequences[name] = (namespace, tokens)
        self.prompts[name] = (tokens, max_new, frozenset(stops))
        self.outputs[name] = []

    def iterate(self):
        """One iteration; gives {request id: (start, tokens computed)} in order."""
        batch = self.scheduler.next_batch()
        self.finish(batch)
        return {item.request_id: (item.start, len(item.token_ids)) for item in batch.items}

    def finish(self, batch):
        self.scheduler.check()
        tokens = self.device.run(batch, self.sequences)
        for output in self.scheduler.complete(batch, tokens):
            namespace, sequence = self.sequences[output.request_id]
            self.sequences[output.request_id] = (namespace, (*sequence, output.token))
            self.outputs[output.request_id].append(output.token)
            self.reasons[output.request_id] = output.finish_reason
            self.cached[output.request_id] = output.cached_tokens
        self.scheduler.check()
        self.clock.advance(1.0)

    def run(self):
        """Iterate until nothing is live; gives the plan of every iteration."""
        plans = []
        while plan := self.iterate():
            plans.append(plan)
        for name, (prompt, max_new, stops) in self.prompts.items():
            if self.reasons.get(name) is not None:
                assert self.outputs[name] == expected_output(prompt, max_new, stops)
        return plans

    def warm(self, tokens, namespace=None):
        """Put a prefix into the cache."""
        self.add(f"warm{len(self.prompts)}", tokens, max_new=1, namespace=namespace)
        self.run()

    def stats(self):
        return self.scheduler.stats()


def numbers(start, count):
    return list(range(start, start + count))


# --- the waiting queue: groups and turns ------------------------------------------------------------------------------


class FixedCache:
    """A cache whose answers a test sets: first token of a prompt -> cached tokens."""

    def __init__(self, **cached):
        self.version = 0
        self.cached = {}
        self.asked = []

    def set(self, first_token, cached):
        self.cached[first_token] = cached
        self.version += 1

    def cached_tokens(self, token_ids, namespace):
        self.asked.append(int(token_ids[0]))
        return self.cached.get(int(token_ids[0]), 0)


def make_queue(cache, rebin_per_round=1000, **config):
    return WaitingQueue(LocalConfig(100_000, **config), cache, rebin_per_round=rebin_per_round)


def waiting(queue, number, length=100, first=None, arrival=0.0):
    tokens = np.full(length, number if first is None else first, np.int32)
    live = LiveRequest(LocalRequest(str(number), tokens, 1), number, arrival)
    queue.add(live)
    return live


def picks(queue, count, now=0.0):
    """Take `count` requests in one round; gives their numbers."""
    taken = []
    queue.begin_round()
    while len(taken) < count and (live := queue.peek(now)) is not None:
        queue.take(live)
        taken.append(live.number)
    queue.end_round()
    queue.check()
    return taken


@pytest.mark.parametrize(
    ("cached", "length", "groups", "group"),
    [(63, 100, 10, 6), (0, 100, 10, 0), (9, 100, 10, 0), (10, 100, 10, 1), (99, 100, 10, 9), (100, 100, 10, 10),
     (1, 3, 3, 1), (2, 3, 10, 6), (1, 1, 10, 10), (50, 100, 1, 0), (100, 100, 1, 1)],
)  # fmt: skip
def test_the_group_is_the_floor_of_p_times_the_cached_share(cached, length, groups, group):
    cache = FixedCache()
    cache.set(7, cached)
    queue = make_queue(cache, priority_groups=groups)
    waiting(queue, 0, length, first=7)
    assert [g for g, size in enumerate(queue.group_sizes()) if size] == [group]


def full_groups(members):
    """A queue with `members` requests in each of the groups 0..10; number = 1000 x group + k."""
    cache = FixedCache()
    for group in range(11):
        cache.set(group, group * 10)
    queue = make_queue(cache)
    for k in range(members):
        for group in range(11):
            waiting(queue, group * 1000 + k, first=group)
    return queue


def test_all_groups_get_their_share_of_one_large_round():
    shares = Counter(number // 1000 for number in picks(full_groups(20), 56))
    assert shares == {10: 10, 9: 9, 8: 8, 7: 7, 6: 6, 5: 5, 4: 4, 3: 3, 2: 2, 1: 1, 0: 1}


def test_small_rounds_give_the_same_shares_in_the_same_order():
    large = picks(full_groups(20), 56)
    queue = full_groups(20)
    assert [number for _ in range(28) for number in picks(queue, 2)] == large


def test_the_highest_group_goes_first_and_every_group_goes_oldest_first():
    order = picks(full_groups(5), 55)
    assert order[0] == 10_000
    for group in range(11):
        members = [number for number in order if number // 1000 == group]
        assert members == sorted(members)


def test_turns_are_spread_not_bunched():
    order = [number // 1000 for number in picks(full_groups(20), 56)]
    gaps = np.diff([place for place, group in enumerate(order) if group == 10])
    assert gaps.max() <= 8


def test_an_empty_group_gives_its_turns_to_the_others_and_saves_none_up():
    cache = FixedCache()
    cache.set(9, 90)
    queue = make_queue(cache)
    for k in range(40):
        waiting(queue, k)
    picks(queue, 20)
    for k in range(100, 140):
        waiting(queue, k, first=9)
    order = [number >= 100 for number in picks(queue, 20)]
    assert sum(order) == 18  # weights 9 and 1, from the first pick on


def test_requests_move_to_another_group_when_the_cache_changes():
    cache = FixedCache()
    queue = make_queue(cache)
    for k in range(3):
        waiting(queue, k, first=k)
    assert queue.group_sizes()[0] == 3
    cache.set(1, 95)
    cache.set(2, 40)
    assert picks(queue, 1) == [1]
    assert [g for g, size in enumerate(queue.group_sizes()) if size] == [0, 4]


def test_nothing_is_looked_up_again_while_the_cache_stays_as_it_is():
    cache = FixedCache()
    queue = make_queue(cache)
    for k in range(50):
        waiting(queue, k)
    looks = len(cache.asked)
    for _ in range(10):
        picks(queue, 1)
    assert looks == 50 == len(cache.asked) == queue.cache_looks


def test_a_long_queue_is_looked_up_in_turn_within_the_bound_of_a_round():
    cache = FixedCache()
    queue = make_queue(cache, rebin_per_round=10)
    for k in range(95):
        waiting(queue, k, first=k)
    del cache.asked[:]
    cache.set(94, 100)
    for rounds in range(1, 11):
        picks(queue, 0)
        assert len(cache.asked) <= rounds * 10
    assert sorted(cache.asked) == list(range(95)), "each once, none twice"
    assert queue.group_sizes()[10] == 1
    assert picks(queue, 1) == [94]


def test_beyond_the_bound_the_request_about_to_be_picked_is_still_looked_up():
    cache = FixedCache()
    for k in range(40):
        cache.set(k, 100)
    queue = make_queue(cache, rebin_per_round=20)
    for k in range(40):
        waiting(queue, k, first=k)
    cache.cached = {39: 100}
    cache.version += 1
    assert picks(queue, 1) == [20], "the sweep of this round came to 19; then 20 is found stale, and the bound is spent"
    assert picks(queue, 1) == [39]


def test_every_eighth_pick_is_the_oldest_that_waited_too_long():
    cache = FixedCache()
    cache.set(5, 100)
    queue = make_queue(cache, max_wait_seconds=30.0)
    for k in range(3):
        waiting(queue, k, arrival=float(k))
    for k in range(10, 30):
        waiting(queue, k, first=5, arrival=3.0)
    assert picks(queue, 2, now=30.0) == [10, 11]
    assert picks(queue, 10, now=32.5) == [0, 12, 13, 14, 1, 15, 16, 17, 2, 18], "1 is picked by its group's turn"
    assert queue.overdue_picks == 2


def test_an_overloaded_worker_goes_on_serving_what_is_cached():
    """Everybody is overdue: served oldest first, nothing would be cached any more when its turn comes."""
    worker = Worker(capacity=100, token_budget=100, max_running=1, max_wait_seconds=5.0, min_shared_tokens=0)
    for k in range(24):
        worker.add(f"{k}", [*numbers(1000 * (k % 3), 60), 7000 + k], max_new=1)
    worker.clock.advance(100.0)
    worker.run()
    assert worker.stats()["cached_tokens"] >= 24 // 2 * 60, "in order of arrival no prefix would be met again in time"
    assert worker.stats()["overdue_picks"] >= 3


def test_longest_prefix_takes_the_most_cached_tokens_and_then_the_oldest():
    cache = FixedCache()
    for first, cached in [(1, 10), (2, 80), (3, 80), (4, 50)]:
        cache.set(first, cached)
    queue = make_queue(cache, order="longest_prefix")
    for k in [1, 2, 3, 4]:
        waiting(queue, k, length=100 * k, first=k)
    cache.set(1, 60)
    assert picks(queue, 4) == [2, 3, 1, 4]


def test_fcfs_ignores_the_cache():
    cache = FixedCache()
    queue = make_queue(cache, order="fcfs")
    for k in range(5):
        cache.set(k, 20 * k)
        waiting(queue, k, first=k)
    assert picks(queue, 5) == [0, 1, 2, 3, 4]


def test_a_deferred_request_keeps_its_place_and_the_group_its_turn():
    queue = full_groups(20)
    queue.begin_round()
    first = queue.peek(0.0)
    queue.defer(first)
    second = queue.peek(0.0)
    assert (first.number, second.number) == (10_000, 10_001)
    queue.take(second)
    queue.end_round()
    queue.check()
    rest = picks(queue, 55)
    assert rest[0] == 9_000, "group 10 had its turn"
    assert [number for number in rest if number >= 10_000][:2] == [10_000, 10_002]
    assert Counter(number // 1000 for number in rest)[10] == 9


def test_preempted_requests_come_before_everybody_the_longest_serving_first():
    queue = make_queue(FixedCache(), max_wait_seconds=1.0)
    waiting(queue, 0)
    for number in (5, 4):
        live = LiveRequest(LocalRequest(str(number), [1, 2], 1), number, 0.0)
        live.prefill_end = 2
        queue.put_back(live)
    assert picks(queue, 3, now=100.0) == [4, 5, 0]


def test_deferred_requests_that_were_preempted_keep_their_order():
    queue = make_queue(FixedCache())
    for number in (6, 5, 4):
        live = LiveRequest(LocalRequest(str(number), [1, 2], 1), number, 0.0)
        live.prefill_end = 2
        queue.put_back(live)
    queue.begin_round()
    queue.defer(queue.peek(0.0))
    queue.defer(queue.peek(0.0))
    queue.end_round()
    assert picks(queue, 3) == [4, 5, 6]


# --- chunked prefill --------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_and_samples_after_the_last():
    worker = Worker(token_budget=32)
    worker.add("a", numbers(0, 100), max_new=2)
    plans = worker.run()
    assert plans == [{"a": (0, 32)}, {"a": (32, 32)}, {"a": (64, 32)}, {"a": (96, 4)}, {"a": (100, 1)}]


def test_decodes_go_first_and_prefill_takes_what_is_left_of_the_budget():
    worker = Worker(token_budget=10)
    worker.add("a", numbers(0, 5), max_new=20)
    worker.add("b", numbers(100, 5), max_new=20)
    worker.iterate()
    worker.add("c", numbers(200, 18), max_new=2)
    plans = [worker.iterate() for _ in range(3)]
    assert [list(plan.items()) for plan in plans] == [
        [("a", (5, 1)), ("b", (5, 1)), ("c", (0, 8))],
        [("a", (6, 1)), ("b", (6, 1)), ("c", (8, 8))],
        [("a", (7, 1)), ("b", (7, 1)), ("c", (16, 2))],
    ]


def test_several_requests_prefill_at_once_the_oldest_with_the_larger_chunk():
    worker = Worker(token_budget=30)
    worker.add("a", numbers(0, 50))
    worker.add("b", numbers(100, 50))
    assert worker.iterate() == {"a": (0, 30)}
    assert worker.iterate() == {"a": (30, 20), "b": (0, 10)}


def test_a_batch_counts_its_tokens():
    worker = Worker(token_budget=10)
    worker.add("a", numbers(0, 5))
    worker.iterate()
    worker.add("b", numbers(100, 50))
    batch = worker.scheduler.next_batch()
    assert (batch.decode_count, batch.prefill_tokens, batch.step) == (1, 9, 1)
    assert [(item.samples, item.is_decode) for item in batch.items] == [(True, True), (False, False)]
    worker.finish(batch)


def test_no_more_requests_run_than_the_budget_has_tokens_so_every_decode_runs_every_time():
    worker = Worker(token_budget=3)
    for k in range(5):
        worker.add(f"r{k}", [10 * k, 1], max_new=6)
    plans = worker.run()
    assert all(sum(count for _, count in plan.values()) <= 3 for plan in plans)
    for name in worker.outputs:
        steps = [i for i, plan in enumerate(plans) if name in plan]
        assert steps == list(range(steps[0], steps[-1] + 1)), "no gap once it runs"
    assert set(worker.reasons.values()) == {"length"}


def test_max_running_bounds_the_running_requests():
    worker = Worker(max_running=2)
    for k in range(4):
        worker.add(f"r{k}", [10 * k, 1], max_new=3)
    assert max(len(plan) for plan in worker.run()) == 2


# --- sharing ----------------------------------------------------------------------------------------------------------


def test_a_cached_prefix_is_reused_but_the_last_token_is_computed_always():
    worker = Worker()
    worker.warm(numbers(0, 50))
    worker.add("same", numbers(0, 50))
    worker.add("longer", numbers(0, 60))
    worker.add("other", [1, *numbers(1, 49)])
    plan = worker.iterate()
    assert plan == {"same": (49, 1), "longer": (50, 10), "other": (0, 50)}
    worker.run()
    assert (worker.cached["same"], worker.cached["longer"], worker.cached["other"]) == (49, 50, 0)


def test_output_tokens_are_cached_too_all_but_the_last():
    worker = Worker()
    worker.add("turn1", numbers(0, 20), max_new=10)
    worker.run()
    worker.add("turn2", [*numbers(0, 20), *worker.outputs["turn1"], 77, 78], max_new=2)
    assert worker.iterate() == {"turn2": (29, 3)}


# --- without chunked prefill ------------------------------------------------------------------------------------------


def test_without_chunks_whole_prompts_go_before_all_decoding():
    worker = Worker(token_budget=50, min_shared_tokens=0, chunked_prefill=False)
    worker.add("a", numbers(0, 30), max_new=3)
    assert worker.iterate() == {"a": (0, 30)}
    worker.add("long", numbers(100, 80), max_new=2)  # over the budget: alone
    worker.add("b", numbers(200, 30), max_new=2)
    worker.add("c", numbers(300, 20), max_new=2)
    assert worker.iterate() == {"long": (0, 80)}
    assert worker.iterate() == {"b": (0, 30), "c": (0, 20)}
    assert worker.iterate() == {"a": (30, 1), "long": (80, 1), "b": (30, 1), "c": (20, 1)}
    worker.run()


def test_without_chunks_newcomers_wait_for_the_agreed_number_of_decodes():
    worker = Worker(token_budget=50, min_shared_tokens=0, chunked_prefill=False, decodes_per_look=3)
    worker.add("a", numbers(0, 30), max_new=9)
    assert [worker.iterate(), worker.iterate()] == [{"a": (0, 30)}, {"a": (30, 1)}]
    worker.add("b", numbers(100, 30), max_new=1)
    plans = [worker.iterate() for _ in range(3)]
    assert plans == [{"a": (31, 1)}, {"a": (32, 1)}, {"b": (0, 30)}]
    worker.run()


def test_a_planned_answer_needs_no_sampling_and_survives_preemption():
    scheduler = LocalScheduler(LocalConfig(60, token_budget=40, min_shared_tokens=0), clock=ManualClock())
    plans = {name: np.arange(first, first + 20, dtype=np.int32) for name, first in (("a", 100), ("b", 200))}
    for name, plan in plans.items():
        scheduler.add(LocalRequest(name, numbers(len(name) * 500 + int(plan[0]), 20), 20, planned_ids=plan))
    said = {"a": [], "b": []}
    while batch := scheduler.next_batch():
        assert batch.sampling() == []
        for output in scheduler.complete(batch, {}):
            said[output.request_id].append(output.token)
        scheduler.check()
    assert said == {name: plan.tolist() for name, plan in plans.items()}
    assert scheduler.stats()["preempted"] > 0, "the two outgrow 60 tokens together"


# --- sharing what is being computed -----------------------------------------------------------------------------------


def test_a_prefix_is_shared_while_its_owner_still_prefills():
    worker = Worker(token_budget=40, min_shared_tokens=0)
    worker.add("a", numbers(0, 100))
    worker.iterate()
    worker.add("b", [*numbers(0, 40), 500, 501])
    assert worker.iterate() == {"a": (40, 38), "b": (40, 2)}


def test_a_request_waits_for_the_one_that_computes_its_prefix():
    worker = Worker(token_budget=100, min_shared_tokens=32)
    worker.add("a", numbers(0, 80))
    worker.add("b", [*numbers(0, 70), 500, 501, 502])
    worker.add("unrelated", [*numbers(900, 20)])
    assert worker.iterate() == {"a": (0, 80), "unrelated": (0, 20)}
    plan = worker.iterate()
    assert plan["b"] == (70, 3)
    assert worker.stats()["deferred"] == 1


def test_it_waits_only_for_as_much_as_it_shares():
    worker = Worker(token_budget=60, min_shared_tokens=32)
    worker.add("a", numbers(0, 200))
    worker.add("b", [*numbers(0, 50), 500, 501])
    assert worker.iterate() == {"a": (0, 60)}
    worker.scheduler.cancel("a")
    assert worker.iterate() == {"b": (50, 2)}


@pytest.mark.parametrize(("shared", "deferred"), [(31, 0), (32, 1)])
def test_a_short_shared_prefix_is_computed_twice_rather_than_waited_for(shared, deferred):
    worker = Worker(token_budget=1000, min_shared_tokens=32)
    worker.add("a", numbers(0, 80))
    worker.add("b", [*numbers(0, shared), *numbers(500, 20)])
    worker.iterate()
    assert worker.stats()["deferred"] == deferred
    worker.run()


def test_a_round_passes_over_a_bounded_number_of_requests():
    worker = Worker(capacity=5000, token_budget=200)
    worker.add("a", numbers(0, 80))
    for k in range(70):
        worker.add(f"r{k}", [*numbers(0, 80), 500 + k])
    worker.add("unrelated", numbers(900, 10))
    assert worker.iterate() == {"a": (0, 80)}
    assert worker.stats()["deferred"] == 64
    worker.run()
    assert set(worker.reasons.values()) == {"length"}


def test_two_that_compute_the_same_tokens_end_up_with_one_copy():
    worker = Worker(token_budget=1000, min_shared_tokens=0)
    worker.add("a", numbers(0, 40), max_new=3)
    worker.add("b", numbers(0, 40), max_new=3)
    worker.iterate()
    assert worker.scheduler.load().kv_used_tokens == 40
    worker.run()
    assert worker.outputs["a"] == worker.outputs["b"]


def test_a_delay_ends_with_its_cause_when_that_is_preempted_or_cancelled():
    worker = Worker(token_budget=20, min_shared_tokens=8)
    worker.add("a", numbers(0, 100))
    worker.iterate()
    worker.add("b", numbers(0, 90))
    assert list(worker.iterate()) == ["a"]
    worker.scheduler.cancel("a")
    assert list(worker.iterate()) == ["b"]


def test_namespaces_share_nothing():
    worker = Worker()
    worker.warm(numbers(0, 40), namespace="x")
    worker.add("other", numbers(0, 40), namespace="y")
    worker.add("same", numbers(0, 40), namespace="x")
    assert worker.iterate() == {"same": (39, 1), "other": (0, 40)}


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_full_cache_gives_up_its_least_recently_used_prefix_and_only_as_much_as_needed():
    worker = Worker(capacity=100)
    worker.warm(numbers(0, 40))
    worker.warm(numbers(100, 40))
    worker.add("again", numbers(0, 40), max_new=1)  # now 100.. is the older one
    worker.run()
    worker.warm(numbers(200, 30))
    (event,) = worker.scheduler.take_events()
    assert (list(event.token_ids), event.kept_tokens, event.namespace) == (numbers(100, 40), 30, None)
    assert worker.stats()["evicted_tokens"] == 10
    worker.add("rest", numbers(100, 40), max_new=1)
    assert worker.iterate() == {"rest": (30, 10)}


def test_what_a_running_request_holds_is_never_evicted():
    worker = Worker(capacity=100, token_budget=100)
    worker.warm(numbers(0, 40))
    worker.add("holder", [*numbers(0, 40), 1], max_new=15)
    worker.iterate()
    for k in range(3):
        worker.add(f"r{k}", numbers(100 * k + 100, 40), max_new=1)
    worker.run()
    assert worker.cached["holder"] == 40
    assert all(list(event.token_ids)[:1] != [0] for event in worker.scheduler.take_events())


def test_a_request_that_does_not_fit_waits_and_nobody_passes_it():
    worker = Worker(capacity=100, token_budget=100)
    worker.add("large", numbers(0, 60), max_new=5)
    worker.iterate()
    worker.add("second", numbers(100, 60), max_new=5)
    worker.add("small", numbers(200, 5), max_new=5)
    plans = worker.run()
    first = {name: next(i for i, plan in enumerate(plans) if name in plan) for name in ("second", "small")}
    assert first == {"second": 4, "small": 4}, "both as soon as the large one has ended, and not before"


def test_out_of_memory_preempts_the_newest_and_its_output_is_unharmed():
    worker = Worker(capacity=40, token_budget=40)
    for name, start in (("old", 0), ("mid", 100), ("new", 200)):
        worker.add(name, numbers(start, 10), max_new=18)
    plans = worker.run()
    assert worker.stats()["preempted"] > 0
    decoding = [list(plan) for plan in plans]
    assert ["old", "mid", "new"] in decoding and ["old", "mid"] in decoding
    ends = {name: max(i for i, plan in enumerate(decoding) if name in plan) for name in ("old", "mid", "new")}
    assert ends["old"] < ends["mid"] < ends["new"]
    assert all(len(worker.outputs[name]) == 18 for name in ends)


def test_a_preempted_request_resumes_with_what_is_left_of_its_cache():
    worker = Worker(capacity=32, token_budget=32)
    worker.add("old", numbers(0, 10), max_new=12)
    worker.add("new", numbers(100, 10), max_new=12)
    plans = worker.run()
    resumed = [plan["new"] for plan in plans if "new" in plan and plan["new"][1] > 1]
    assert resumed[0] == (0, 10)
    start, count = resumed[1]
    assert start >= 10 and start + count > 15, "its prompt and most of its output were still cached"


def test_a_round_that_preempts_admits_nobody():
    worker = Worker(capacity=24, token_budget=24)
    worker.add("old", numbers(0, 10), max_new=14)
    worker.add("new", numbers(100, 10), max_new=14)
    while not worker.stats()["preempted"]:
        worker.iterate()
    assert worker.scheduler.load().waiting == 1
    worker.run()


def test_two_prefills_that_fill_the_memory_end_one_after_the_other():
    worker = Worker(capacity=40, token_budget=7, min_shared_tokens=0)
    for k in range(6):
        worker.add(f"r{k}", numbers(100 * k, 30), max_new=10)
    worker.run()
    assert all(len(output) == 10 for output in worker.outputs.values())


def test_the_largest_request_that_fits_runs_to_its_end_in_a_cache_full_of_others():
    worker = Worker(capacity=30, token_budget=8)
    worker.warm(numbers(0, 25))
    worker.add("full", numbers(100, 20), max_new=11)
    worker.run()
    assert len(worker.outputs["full"]) == 11
    assert worker.scheduler.load().kv_cached_tokens == 30


def test_nothing_starves_under_a_stream_of_fully_cached_requests():
    worker = Worker(max_running=1, max_wait_seconds=20.0)
    worker.warm(numbers(0, 50))
    worker.add("cold", numbers(500, 10), max_new=1)
    for k in range(60):
        worker.add(f"hot{k}", numbers(0, 50), max_new=1)
        if worker.iterate().get("cold"):
            break
    assert worker.reasons["cold"] == "length"
    assert worker.clock() <= 24.0


# --- slots ------------------------------------------------------------------------------------------------------------


def test_the_pool_gives_each_slot_once_and_takes_it_back():
    pool = SlotPool(10)
    taken = pool.take(7)
    assert sorted([*taken, *pool.free_slots]) == list(range(10))
    pool.give(taken[:3])
    assert pool.free_count == 6
    with pytest.raises(AssertionError):
        pool.take(7)
    with pytest.raises(AssertionError):
        pool.give(np.arange(5))


def test_check_notices_a_slot_with_two_owners_and_one_with_none():
    worker = Worker()
    worker.add("a", numbers(0, 10))
    worker.iterate()
    cache = worker.scheduler._cache
    lost = cache.take(1, 0.0)
    with pytest.raises(AssertionError, match="unowned"):
        worker.scheduler.check()
    cache.give(lost)
    worker.scheduler.check()
    cache.give(worker.scheduler._running[0].slots[:1])
    with pytest.raises(AssertionError):
        worker.scheduler.check()


def test_context_slots_of_decodes_are_views_not_copies():
    worker = Worker()
    worker.add("a", numbers(0, 100), max_new=5)
    worker.iterate()
    batch = worker.scheduler.next_batch()
    (item,) = batch.items
    assert np.shares_memory(item.context_slots, worker.scheduler._running[0].slots)
    assert item.context_slots.dtype == item.write_slots.dtype == item.token_ids.dtype == np.int32
    worker.finish(batch)


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_output_and_is_part_of_it():
    prompt = numbers(0, 5)
    stop = expected_output(tuple(prompt), 10, frozenset())[3]
    worker = Worker()
    worker.add("a", prompt, max_new=10, stops={stop})
    worker.run()
    assert worker.reasons["a"] == "stop"
    assert worker.outputs["a"][-1] == stop and stop not in worker.outputs["a"][:-1]


def test_a_stop_token_at_the_full_length_counts_as_a_stop():
    prompt = numbers(0, 5)
    last = expected_output(tuple(prompt), 1, frozenset())[0]
    worker = Worker()
    worker.add("a", prompt, max_new=1, stops={last})
    worker.run()
    assert worker.reasons["a"] == "stop"


def test_indices_count_from_zero_and_cached_tokens_stay_those_of_the_first_admission():
    worker = Worker(capacity=32, token_budget=32)
    worker.warm(numbers(100, 6))
    worker.add("old", numbers(0, 10), max_new=12)
    worker.add("new", numbers(100, 10), max_new=12)
    outputs = []
    while (batch := worker.scheduler.next_batch()).items:
        tokens = worker.device.run(batch, worker.sequences)
        for output in worker.scheduler.complete(batch, tokens):
            outputs.append(output)
            namespace, sequence = worker.sequences[output.request_id]
            worker.sequences[output.request_id] = (namespace, (*sequence, output.token))
    assert worker.stats()["preempted"] > 0
    mine = [output for output in outputs if output.request_id == "new"]
    assert [output.index for output in mine] == list(range(12))
    assert {output.cached_tokens for output in mine} == {6}
    assert [output.finish_reason for output in mine] == [None] * 11 + ["length"]


# --- cancellation and failed batches ----------------------------------------------------------------------------------


def test_cancelling_frees_everything_in_every_state():
    worker = Worker(token_budget=20, max_running=2)
    worker.add("waiting", numbers(0, 10))
    assert worker.scheduler.cancel("waiting")
    worker.add("prefilling", numbers(0, 50))
    worker.add("decoding", numbers(100, 5), max_new=50)
    worker.iterate()
    worker.iterate()
    worker.iterate()
    worker.iterate()
    assert worker.scheduler.cancel("prefilling") and worker.scheduler.cancel("decoding")
    worker.scheduler.check()
    assert worker.scheduler.load()[:3] == (0, 0, 0)
    assert not worker.scheduler.cancel("decoding")
    assert worker.scheduler.next_batch().items == []
    assert worker.stats()["cancelled"] == 3


def test_what_a_cancelled_request_computed_stays_cached():
    worker = Worker(token_budget=30)
    worker.add("a", numbers(0, 100))
    worker.iterate()
    worker.scheduler.cancel("a")
    worker.add("b", numbers(0, 100))
    assert worker.iterate() == {"b": (30, 30)}


def test_a_preempted_request_can_be_cancelled_while_it_waits():
    worker = Worker(capacity=24, token_budget=24)
    worker.add("old", numbers(0, 10), max_new=14)
    worker.add("new", numbers(100, 10), max_new=14)
    while not worker.stats()["preempted"]:
        worker.iterate()
    assert worker.scheduler.cancel("new")
    worker.scheduler.check()
    worker.run()
    assert "old" in worker.reasons and worker.reasons["new"] is None


def test_a_request_cancelled_in_flight_gets_no_token_and_its_slots_are_free_again():
    worker = Worker()
    worker.add("a", numbers(0, 10))
    worker.add("b", numbers(100, 10))
    batch = worker.scheduler.next_batch()
    worker.scheduler.cancel("a")
    worker.scheduler.check()
    outputs = worker.scheduler.complete(batch, {"a": 1, "b": 2})
    assert [(output.request_id, output.token) for output in outputs] == [("b", 2)]
    worker.scheduler.check()
    assert worker.scheduler.load().kv_used_tokens == worker.scheduler.load().kv_cached_tokens == 10


def test_an_id_can_be_used_again_at_once_even_with_the_old_one_in_flight():
    worker = Worker()
    worker.add("a", numbers(0, 10))
    batch = worker.scheduler.next_batch()
    worker.scheduler.cancel("a")
    worker.add("a", numbers(100, 10))
    assert worker.scheduler.complete(batch, {"a": 1}) == []
    worker.run()
    assert worker.reasons["a"] == "length"


def test_a_batch_that_failed_is_computed_again():
    worker = Worker(token_budget=16)
    worker.add("a", numbers(0, 40), max_new=3)
    worker.iterate()
    failed = worker.scheduler.next_batch()
    assert failed.items[0].start == 16
    worker.scheduler.discard(failed)
    worker.scheduler.check()
    assert worker.iterate() == {"a": (16, 16)}
    worker.run()


def test_batches_come_one_at_a_time_and_each_is_completed_once():
    worker = Worker()
    worker.add("a", numbers(0, 10))
    batch = worker.scheduler.next_batch()
    with pytest.raises(InvalidInput, match="in flight"):
        worker.scheduler.next_batch()
    worker.finish(batch)
    with pytest.raises(InvalidInput, match="not the one in flight"):
        worker.scheduler.complete(batch, {"a": 1})
    with pytest.raises(InvalidInput, match="not the one in flight"):
        worker.scheduler.discard(batch)


def test_an_empty_batch_needs_nothing():
    worker = Worker()
    batch = worker.scheduler.next_batch()
    assert batch.items == [] and batch.decode_count == batch.prefill_tokens == 0
    assert worker.scheduler.next_batch().items == []
    assert worker.scheduler.complete(batch, {}) == []
    worker.scheduler.discard(batch)


@pytest.mark.parametrize("token", [-1, 2**31, 1.5, "x", None])
def test_a_token_that_is_none_is_refused_and_the_batch_stays_in_flight(token):
    worker = Worker()
    worker.add("a", numbers(0, 10))
    worker.add("b", numbers(100, 10))
    batch = worker.scheduler.next_batch()
    with pytest.raises(InvalidInput, match="b"):
        worker.scheduler.complete(batch, {"a": 1, "b": token})
    with pytest.raises(InvalidInput, match="'b'"):
        worker.scheduler.complete(batch, {"a": 1})
    worker.scheduler.check()
    assert len(worker.scheduler.complete(batch, {"a": np.int64(1), "b": 2})) == 2


# --- events -----------------------------------------------------------------------------------------------------------


def churn(cache, prefixes, length=10):
    """Cache and let go of prefixes one after the other, in a cache too small for two of them."""
    for k in range(prefixes):
        tokens = np.arange(100 * k, 100 * k + length, dtype=np.int32)
        hold = cache.hold(tokens, "n", length - 1, 0.0)
        slots = np.concatenate([cache.slots_of(hold), cache.take(length - hold.matched_tokens, 0.0)])
        cache.publish(hold, tokens, slots, 0.0)
        cache.release(hold, 0.0)


def test_events_nobody_takes_collapse_into_one_that_promises_nothing():
    cache = KvCache(10, events_max=3)
    churn(cache, 4)
    assert [type(event) for event in cache.take_events()] == [PrefixEvicted] * 3
    churn(cache, 10)
    events = cache.take_events()
    assert isinstance(events[0], AllBlocksCleared) and len(events) <= 4
    assert all(isinstance(event, PrefixEvicted) for event in events[1:])
    assert cache.collapsed_events >= 4
    assert cache.take_events() == []


def test_events_are_bounded_in_tokens_too():
    cache = KvCache(10, events_max=1000, event_tokens_max=35)
    churn(cache, 4)
    assert len(cache.take_events()) == 3
    churn(cache, 6)
    assert isinstance(cache.take_events()[0], AllBlocksCleared)


def test_a_full_cache_evicts_in_portions_not_token_by_token():
    worker = Worker(capacity=2560, token_budget=2560)
    for k in range(8):
        worker.warm(numbers(1000 * k, 320))
    worker.add("a", numbers(20_000, 10), max_new=60)
    worker.run()
    stats = worker.stats()
    assert stats["evicted_tokens"] <= 80
    assert stats["evictions"] <= 8


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_request_that_could_never_fit_is_refused_with_the_numbers():
    worker = Worker(capacity=50)
    with pytest.raises(InvalidInput, match=r"51 KV tokens.*50"):
        worker.add("a", numbers(0, 40), max_new=12)
    worker.add("a", numbers(0, 40), max_new=11)
    assert len(worker.run()) > 0


def test_a_full_queue_and_a_live_id_are_refused():
    worker = Worker(max_waiting=2)
    worker.add("a", [1])
    worker.add("b", [2])
    with pytest.raises(QueueFull, match="max_waiting is 2"):
        worker.add("c", [3])
    with pytest.raises(DuplicateRequest, match="'a'"):
        worker.add("a", [4])
    assert sorted(worker.iterate()) == ["a", "b"]
    assert worker.stats()["arrived"] == 2


@pytest.mark.parametrize(
    "tokens", [[], [[1, 2]], [[1], [2, 3]], [1.5], [True], [-1], [2**31], [2**70], "ab", 7, None], ids=repr
)
def test_tokens_that_are_none_are_refused(tokens):
    with pytest.raises(InvalidTokens, match="token_ids"):
        LocalRequest("a", tokens, 1)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_tokens_are_copied_whatever_their_type(dtype):
    tokens = np.array([1, 2, 3], dtype)
    request = LocalRequest("a", tokens, 1)
    tokens[0] = 9
    assert request.token_ids.tolist() == [1, 2, 3] and request.token_ids.dtype == np.int32
    with pytest.raises(ValueError):
        request.token_ids[0] = 5


@pytest.mark.parametrize(("name", "max_new"), [("", 1), (7, 1), ("a", 0), ("a", 1.5), ("a", True)])
def test_requests_with_wrong_fields_are_refused(name, max_new):
    with pytest.raises(InvalidInput, match="LocalRequest"):
        LocalRequest(name, [1], max_new)


@pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf])
def test_times_that_are_none_change_nothing(now):
    worker = Worker()
    worker.add("a", [1, 2, 3])
    with pytest.raises(InvalidTime):
        worker.scheduler.next_batch(now)
    with pytest.raises(InvalidTime):
        worker.scheduler.add(LocalRequest("b", [1], 1), now)
    with pytest.raises(InvalidTime):
        worker.scheduler.cancel("a", now)
    batch = worker.scheduler.next_batch()
    with pytest.raises(InvalidTime):
        worker.scheduler.complete(batch, {"a": 1}, now)
    worker.finish(batch)


def test_a_clock_that_jumps_back_harms_nothing():
    worker = Worker(max_wait_seconds=5.0)
    worker.clock.set(100.0)
    worker.add("a", [1, 2, 3])
    worker.clock.set(-50.0)
    worker.add("b", [4, 5, 6])
    worker.run()
    assert set(worker.reasons.values()) == {"length"}


@pytest.mark.parametrize(
    "options",
    [{"kv_capacity_tokens": 0}, {"token_budget": 0}, {"max_running": 0}, {"max_waiting": 0}, {"order": "lifo"},
     {"priority_groups": 0}, {"max_wait_seconds": -1.0}, {"max_wait_seconds": math.nan}, {"max_wait_seconds": "1"},
     {"min_shared_tokens": -1}, {"chunked_prefill": 1}, {"decodes_per_look": 0},
     {"token_budget": 1.5}, {"max_running": True}],
)  # fmt: skip
def test_configurations_out_of_range_are_refused_by_name(options):
    (name,) = options
    with pytest.raises(InvalidConfig, match=name):
        LocalConfig(**{"kv_capacity_tokens": 100, **options})


# --- reports ----------------------------------------------------------------------------------------------------------


def test_load_and_stats_add_up():
    worker = Worker(token_budget=64, max_running=1)
    worker.warm(numbers(0, 30))
    arrival = worker.clock()
    worker.add("a", [*numbers(0, 30), 1, 2], max_new=10)
    worker.add("b", numbers(0, 40), max_new=10)
    worker.iterate()
    worker.iterate()
    load = worker.scheduler.load()
    assert (load.running, load.waiting) == (1, 1)
    assert (load.kv_used_tokens, load.kv_cached_tokens) == (33, 32)
    assert load.waiting_uncached_tokens == 10
    stats = worker.stats()
    assert (stats["prompt_tokens"], stats["cached_tokens"], stats["computed_tokens"]) == (62, 30, 33)
    assert stats["free_tokens"] == 1000 - 33
    assert stats["oldest_arrival_seconds"] == arrival
    assert stats["group_sizes"] == [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]


def test_show_draws_requests_and_tree():
    worker = Worker(token_budget=8, max_running=2)
    worker.add("first", numbers(0, 4))
    worker.add("second", numbers(100, 40))
    worker.add("third", numbers(200, 40))
    worker.iterate()
    text = worker.scheduler.show()
    assert "first: decode 4/5 computed, 1 output" in text
    assert "second: prefill 4/40 computed, 0 output" in text
    assert "waiting 1" in text


def test_the_same_requests_give_the_same_batches_every_time():
    def plans():
        rng = np.random.default_rng(11)
        worker = Worker(capacity=120, token_budget=24, max_running=6)
        for k in range(40):
            stem = numbers(int(rng.integers(0, 3)) * 100, int(rng.integers(5, 40)))
            worker.add(f"r{k}", [*stem, *rng.integers(500, 600, 8)], max_new=int(rng.integers(1, 20)))
        return [list(plan.items()) for plan in worker.run()]

    assert plans() == plans()


@pytest.mark.parametrize("planned", [[1, 2], [1, 2, 3, 4], [1, -2, 3], [1.0, 2.0, 3.0], []])
def test_a_plan_that_is_not_the_whole_answer_is_refused(planned):
    with pytest.raises(InvalidTokens, match="planned_ids"):
        LocalRequest("a", [1, 2], 3, planned_ids=planned)
