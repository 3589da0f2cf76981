"""State machine: the local scheduler does exactly what the naive model does, and its KV memory never lies."""

from __future__ import annotations

import functools
import random
from collections import Counter

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from preble.clock import ManualClock
from preble.errors import InvalidInput, QueueFull
from preble.local import LocalConfig, LocalRequest, LocalScheduler
from preble.types import Claim
from tests.models.local import NaiveLocal, PretendDevice, expected_output

# Few stems, extended by few tokens: prompts share, split and extend each other all the time.
STEMS = [(1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9), (5, 5, 5, 5), (1,)]
prompts = st.builds(
    lambda stem, cut, tail: stem[:cut] + tuple(tail),
    st.sampled_from(STEMS),
    st.sampled_from([1, 2, 4, 6, 12, 12, 12]),
    st.lists(st.integers(0, 3), max_size=6),
)
configs = st.builds(
    LocalConfig,
    kv_capacity_tokens=st.integers(24, 60),
    token_budget=st.sampled_from([1, 2, 5, 9, 16, 40]),
    max_running=st.sampled_from([1, 3, 6, 8]),
    max_waiting=st.sampled_from([2, 10]),
    order=st.sampled_from(["priority", "priority", "fcfs", "longest_prefix"]),
    eviction=st.just("lru"),  # which is what the model knows
    priority_groups=st.sampled_from([1, 3, 10]),
    max_wait_seconds=st.sampled_from([0.0, 2.0, 8.0, float("inf")]),
    min_shared_tokens=st.sampled_from([0, 1, 3, 6]),
    chunked_prefill=st.sampled_from([True, True, False]),
    decodes_per_look=st.sampled_from([1, 3]),
    short_first=st.booleans(),
)


class LocalMachine(RuleBasedStateMachine):
    """Random requests, iterations, cancellations and failed iterations, on the real scheduler and on the model."""

    @initialize(config=configs, first=st.lists(prompts, min_size=2, max_size=6), max_new=st.integers(1, 14))
    def start(self, config, first, max_new):
        self.config = config
        self.clock = ManualClock()
        self.real = LocalScheduler(config, clock=self.clock)
        self.model = NaiveLocal(config)
        self.device = PretendDevice()
        self.estimated: set = set()  # what a router would expect is cached, by the events alone
        self.outputs: dict[str, list[int]] = {}
        self.discarded = False  # was any iteration?
        self.requests: dict[str, tuple] = {}
        self.add(first, max_new, frozenset(), None)

    @rule(
        batch=st.lists(prompts, min_size=1, max_size=5),
        max_new=st.integers(1, 14),
        stops=st.sampled_from([frozenset(), frozenset({0}), frozenset({1, 2})]),
        namespace=st.sampled_from([None, None, None, "b"]),
        deadline=st.sampled_from([None, None, 1e6, 2e6]),
    )
    def add(self, batch, max_new, stops, namespace, deadline=None):
        for prompt in batch:
            self.add_one(prompt, max_new, stops, namespace, deadline)

    def add_one(self, prompt, max_new, stops, namespace, deadline):
        name = f"r{len(self.requests)}"
        waiting = len(self.model.requests) - len(self.model.running())
        try:
            claim = None if deadline is None else Claim(deadline_seconds=deadline)
            self.real.add(LocalRequest(name, prompt, max_new, stops, namespace, claim=claim))
        except QueueFull:
            assert waiting >= self.config.max_waiting
        except InvalidInput:
            assert len(prompt) + max_new - 1 > self.config.kv_capacity_tokens
        else:
            assert waiting < self.config.max_waiting
            self.model.add(name, prompt, max_new, stops, namespace, self.clock(), deadline)
            self.requests[name] = (prompt, max_new, stops)
            self.outputs[name] = []

    @rule(prompt=prompts, namespace=st.sampled_from([None, None, "b"]))
    def adopt(self, prompt, namespace):
        """KV of a prompt comes from elsewhere."""
        write = functools.partial(self.device.write, namespace, prompt)
        assert self.real.adopt(np.array(prompt, np.int32), namespace, write) == self.model.adopt(namespace, prompt)
        slots = self.real.cached_slots(np.array(prompt, np.int32), namespace)
        self.model.use(namespace, prompt)
        assert [self.device.memory[int(slot)] for slot in slots] == [
            (namespace, prompt[: i + 1]) for i in range(self.model.cache.matched(namespace, prompt))
        ]

    @rule(seconds=st.sampled_from([0.0, 1.0, 3.0, -1.0]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)

    @rule(count=st.integers(1, 6))
    def run(self, count):
        for _ in range(count):
            self.iterate(fails=False, cancelled=None)
            self.clock.advance(0.25)

    @rule(fails=st.sampled_from([False, False, True]), cancelled=st.sampled_from([None, None, 0, 1, 3]))
    def iterate(self, fails, cancelled):
        batch = self.real.next_batch()
        plan = self.model.next_batch(self.clock())
        shape = [(i.request_id, i.start, len(i.token_ids), i.samples, i.is_decode) for i in batch.items]
        assert shape == plan
        assert bool(shape) == bool(self.model.requests), "work waits, but nothing runs"
        bounded = self.config.chunked_prefill or (batch.prefill_tokens and len(batch) > 1)
        tokens = batch.decode_count + batch.prefill_tokens
        assert tokens <= self.config.token_budget or not bounded or self.resumes_discarded(batch)
        assert self.config.chunked_prefill or not (batch.decode_count and batch.prefill_tokens)
        tokens = self.device.run(batch, {r.request_id: (r.namespace, r.known) for r in self.model.requests.values()})
        self.real.check()
        if cancelled is not None and cancelled < len(plan):
            self.cancel_named(plan[cancelled][0])
        if fails:
            self.real.discard(batch)
            self.model.discard()
            self.discarded = True
        else:
            self.finish_iteration(batch, plan, tokens)

    def resumes_discarded(self, batch):
        """Without chunks, a discarded iteration is computed again as it was."""
        return not self.config.chunked_prefill and self.discarded

    def finish_iteration(self, batch, plan, tokens):
        outputs = self.real.complete(batch, tokens)
        expected = self.model.complete(plan, tokens)
        assert [(o.request_id, o.token, o.index, o.cached_tokens, o.finish_reason) for o in outputs] == expected
        for output in outputs:
            assert output.index == len(self.outputs[output.request_id])
            self.outputs[output.request_id].append(output.token)
            if output.finish_reason is not None:
                assert self.outputs[output.request_id] == expected_output(*self.requests[output.request_id])

    @rule(choice=st.integers(0, 20))
    @precondition(lambda self: self.model.requests)
    def cancel(self, choice):
        names = sorted(self.model.requests)
        self.cancel_named(names[choice % len(names)])

    def cancel_named(self, name):
        assert self.real.cancel(name)
        assert not self.real.cancel(name)
        self.model.cancel(name)

    @invariant()
    def holds_together(self):
        if not hasattr(self, "real"):
            return
        self.real.check()
        load = self.real.load()
        running = self.model.running()
        assert (load.running, load.waiting) == (len(running), len(self.model.requests) - len(running))
        assert load.kv_cached_tokens == len(self.model.cache.entries)
        assert load.kv_used_tokens == self.config.kv_capacity_tokens - self.model.available()

    @invariant()
    def events_match_the_cache(self):
        """Whoever adds what is cached and obeys the events never expects that an evicted prefix is still there."""
        if not hasattr(self, "real"):
            return
        for event in self.real.take_events():
            assert 0 <= event.kept_tokens < len(event.token_ids)
            self.estimated = {key for key in self.estimated if not ends(event, *key)}
        self.estimated |= set(self.model.cache.entries)
        assert self.estimated == set(self.model.cache.entries)

    def teardown(self):
        """Everything left runs to its end, with the output it would have had alone."""
        if not hasattr(self, "real"):
            return
        for _ in range(3000):
            if not self.model.requests:
                break
            self.iterate(fails=False, cancelled=None)
            self.clock.advance(1.0)
        assert self.real.next_batch().items == []
        assert self.real.load().kv_used_tokens == 0


def ends(event, namespace, prefix):
    """True if the event says that `prefix` is no longer cached: it runs along the event's path beyond what was kept."""
    kept = event.kept_tokens + 1
    return namespace == event.namespace and len(prefix) >= kept and prefix[:kept] == tuple(event.token_ids[:kept])


def test_the_local_scheduler_equals_the_naive_model_at_every_step():
    run_state_machine_as_test(
        LocalMachine,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],  # add Phase.shrink to study a failure: it takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


def random_config(rng):
    """Little memory for many requests, so that eviction, preemption and delays are the rule."""
    return LocalConfig(
        kv_capacity_tokens=rng.choice([26, 34, 48, 80]),
        token_budget=rng.choice([2, 5, 9, 16, 40]),
        max_running=rng.choice([2, 4, 8]),
        max_waiting=10,
        order=rng.choice(["priority", "priority", "fcfs", "longest_prefix"]),
        eviction="lru",  # which is what the model knows
        priority_groups=rng.choice([1, 3, 10]),
        max_wait_seconds=rng.choice([0.0, 4.0, 20.0, float("inf")]),
        min_shared_tokens=rng.choice([0, 1, 3, 6]),
        chunked_prefill=rng.choice([True, True, False]),
        decodes_per_look=rng.choice([1, 3]),
        short_first=rng.choice([True, False]),
    )


def random_prompts(rng):
    """A few prompts, often variations of one."""
    stems = [rng.choice(STEMS)] * 2 + [rng.choice(STEMS)]
    return [
        rng.choice(stems)[: rng.choice([2, 6, 12, 12])] + tuple(rng.randint(0, 3) for _ in range(rng.randint(0, 6)))
        for _ in range(rng.randint(1, 5))
    ]


def long_run(seed, actions):
    """The same machine under pressure, driven by a seeded generator; gives the scheduler's counters."""
    rng = random.Random(seed)
    machine = LocalMachine()
    machine.start(random_config(rng), random_prompts(rng), rng.randint(1, 14))
    for _ in range(actions):
        kind = rng.random()
        if kind < 0.25:
            stops = rng.choice([frozenset(), frozenset({0}), frozenset({1, 2})])
            namespace, deadline = rng.choice([None, None, None, "b"]), rng.choice([None, None, 1e6, 2e6])
            machine.add(random_prompts(rng), rng.randint(1, 14), stops, namespace, deadline)
        elif kind < 0.30 and machine.model.requests:
            machine.cancel(rng.randint(0, 20))
        elif kind < 0.34:
            machine.adopt(rng.choice(random_prompts(rng)), rng.choice([None, "b"]))
        else:
            machine.iterate(fails=rng.random() < 0.05, cancelled=rng.choice([0, 2] + [None] * 18))
            machine.clock.advance(rng.choice([0.0, 0.5, 1.0]))
        machine.holds_together()
        machine.events_match_the_cache()
    machine.teardown()
    return machine.real.stats()


def test_long_runs_under_memory_pressure_equal_the_model_and_reach_every_branch():
    totals = Counter()
    for seed in range(60):
        totals.update({name: n for name, n in long_run(seed, 120).items() if isinstance(n, int)})
    for name in ("finished", "cancelled", "preempted", "deferred", "evictions", "cached_tokens", "overdue_picks"):
        assert totals[name] >= 50, f"{name}: only {totals[name]} in all runs"
