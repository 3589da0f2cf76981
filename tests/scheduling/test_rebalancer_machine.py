"""State machine: prefix groups count what plain dicts count, redirects lead where a plain search says, and plans keep
their invariants under random requests, answers, workers, redirects and clocks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from preble import CostModel, Decision, GlobalScheduler, ManualClock, SchedulerConfig, WorkerSpec
from preble.scheduling.rebalance_planner import REBALANCE, Group, Proposal
from preble.types import Explanation
from tests.support.sticky import Sticky

NAMES = [f"w{i}" for i in range(4)]
HISTORY_SECONDS = 36.0
BUCKETS, HALF_BUCKETS = 36, 18
COST = CostModel([(0, 0.01), (1000, 1.01)], name="plain")
SEGMENTS = [tuple(range(100 * i, 100 * i + size)) for i, size in enumerate([40, 16, 33, 8, 20])]
prompts = st.builds(
    lambda parts, cut: sum((SEGMENTS[part] for part in parts), ())[:cut],
    st.lists(st.integers(0, 4), min_size=1, max_size=4), st.sampled_from([9, 30, 41, 60, 99, 99, 99]),
)  # fmt: skip
Prefix = tuple[int, ...]
configs = st.builds(
    SchedulerConfig,
    history_seconds=st.just(HISTORY_SECONDS),
    join_seconds=st.just(1.0),
    rebalance_ratio=st.sampled_from([1.5, 1.0, 0.0]),
    rebalance_floor_seconds=st.just(0.01),
    replicas_max=st.sampled_from([1, 2, 8]),
    warm_up_seconds=st.sampled_from([0.0, 0.0, 3.0, 5.0, 30.0]),
).filter(lambda config: config.rebalance_ratio or config.replicas_max > 1)


@dataclass
class Booked:
    """A request that was counted in a group."""

    key: tuple[Prefix, str, int]
    half: int
    booked_at: float
    prefill_ns: int
    output_tokens: int
    prompt_tokens: int
    prefilled: bool = False


def key_prefix(tokens: Prefix, ends: list[int], usable: int) -> Prefix | None:
    """The prefix up to the deepest node that is longer than all before it, within the first `usable` tokens."""
    for start, end in reversed(list(zip([0, *ends], ends, strict=False))):
        if min(end, usable) > 2 * start:
            return tokens[:end]
    return None


class RebalancerMachine(RuleBasedStateMachine):
    """One scheduler, and what its groups should be, as dicts from (prefix, worker, its incarnation) to five sums a
    half."""

    @initialize(config=configs, workers=st.integers(2, 4))
    def start(self, config: SchedulerConfig, workers: int) -> None:
        self.clock = ManualClock(1000.0)
        self.real = GlobalScheduler([], policy=Sticky(), config=config, cost_model=COST, clock=self.clock)
        self.incarnations: dict[str, int] = {}
        self.sums: dict[Any, dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0] * 5))
        self.live: dict[str, Booked | None] = {}
        self.bucket = -1
        self.number = 0
        for name in NAMES[:workers]:
            self.join(name)

    def half(self) -> int:
        """The half of the window that is now, for a clock that only goes forward."""
        self.bucket = max(self.bucket, int(self.clock() / (HISTORY_SECONDS / BUCKETS)))
        return self.bucket // HALF_BUCKETS

    def path(self, node: int) -> Prefix:
        return tuple(self.real.core.groups.prefix(node)[1])

    # --- requests ---

    def explained(self, tokens: Prefix) -> tuple[Explanation, Explanation]:
        """As it would be decided without redirects, and with them."""
        core = self.real.core
        kept = core.redirects.show()
        with self.real._lock:
            core.redirects.put([])
            plain = self.real.explain(list(tokens))
            core.redirects.put(kept)
            return plain, self.real.explain(list(tokens))

    def redirected(self, tokens: Prefix, plain: Explanation) -> set[str]:
        """Where the deepest redirect on the prompt's path may lead, by a plain search; empty without one."""
        core, eligible = self.real.core, {cost.worker for cost in plain.workers}
        matched = self.real.match(list(tokens)).known_tokens
        exploits = plain.matched_tokens > self.real.config.exploit_ratio * len(tokens)
        if not exploits and not matched > self.real.config.exploit_ratio * len(tokens):
            return set()
        on_path = []
        for node, generation, length, source, _, targets in core.redirects.show():
            if not core.groups.lives(node, generation) or length > matched:
                continue
            known = self.path(node)
            if known == tokens[: len(known)] and (source is None or core.names[source] == plain.worker):
                on_path.append((len(known), source, [str(core.names[target]) for target in targets]))
        if not on_path:
            return set()
        _, source, names = max(on_path, key=lambda found: found[0])
        if source is not None and not exploits:
            return set()
        total = {cost.worker: cost.total_seconds for cost in plain.workers}
        if len(names) > 1:
            names.append(plain.worker)
        names = [name for name in names if name in eligible]
        least = min((total[name] for name in names), default=0.0)
        return {name for name in names if total[name] == least}

    @rule(tokens=prompts, times=st.integers(1, 4))
    def schedule(self, tokens: Prefix, times: int) -> None:
        for _ in range(times):
            if not any(not worker.draining for worker in self.real._workers.values()):
                return
            plain, told = self.explained(tokens)
            targets = self.redirected(tokens, plain)
            decision = self.real.schedule(list(tokens), request_id=f"r{self.number}", max_new_tokens=20)
            self.number += 1
            assert (decision.worker, decision.reason) == (told.worker, told.reason)
            assert decision.worker in targets if targets else decision.worker == plain.worker
            assert (decision.reason == "sticky") == (decision.worker == plain.worker)
            self.count(tokens, decision)

    def count(self, tokens: Prefix, decision: Decision) -> None:
        self.live[str(decision.request_id)] = None
        exploits = decision.matched_tokens > self.real.config.exploit_ratio * len(tokens)
        if decision.reason == "sticky" and not exploits:
            return
        ends = self.real.core.tree.path(list(tokens))
        prefix = key_prefix(tokens, ends, decision.matched_tokens)
        if prefix is None:
            return
        name = decision.worker
        output = int(self.real.core.lease(decision.request_id)["expected_output_tokens"])
        missed = len(tokens) - decision.matched_tokens
        seconds = COST.prefill_time(missed, len(tokens))
        key = (prefix, name, self.incarnations[name])
        booked = Booked(key, self.half(), self.clock(), int(seconds * 1e9), output, len(tokens))
        self.live[str(decision.request_id)] = booked
        self.add(booked, [1, booked.prefill_ns, output, 0, 0])

    def add(self, booked: Booked, change: list[int], half: int | None = None) -> None:
        if booked.key in self.sums or change[0] == 1:
            sums = self.sums[booked.key][booked.half if half is None else half]
            sums[:] = [a + b for a, b in zip(sums, change, strict=True)]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), cached=st.sampled_from([None, None, 0, 5]))
    def first_token(self, data: st.DataObject, cached: int | None) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.real.first_token(request_id, cached_tokens=cached)
        self.half()
        self.prefilled(self.live[request_id], cached)

    def prefilled(self, booked: Booked | None, cached: int | None) -> None:
        if booked is None or not self.is_there(booked):
            return
        if cached is not None:
            seconds = COST.prefill_time(booked.prompt_tokens - cached, booked.prompt_tokens)
            self.add(booked, [0, int(seconds * 1e9) - booked.prefill_ns, 0, 0, 0])
            booked.prefill_ns = int(seconds * 1e9)
        if not booked.prefilled and booked.half >= self.half() - 1:
            waited = self.clock() - booked.booked_at - booked.prefill_ns * 1e-9
            self.add(booked, [0, 0, 0, 1, int(min(max(waited, 0.0), 1e6) * 1e9)], self.half())
        booked.prefilled = True

    def is_there(self, booked: Booked) -> bool:
        """Whether the request's worker is still the one it was booked on."""
        return self.incarnations[booked.key[1]] == booked.key[2] and booked.key[1] in self.real.workers

    @precondition(lambda self: self.live)
    @rule(data=st.data(), output=st.sampled_from([None, 1, 50]))
    def finish(self, data: st.DataObject, output: int | None) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.real.finish(request_id, output_tokens=output)
        booked = self.live.pop(request_id)
        self.half()
        if booked is not None:
            self.prefilled(booked, None)
            if output is not None:
                self.add(booked, [0, 0, output - booked.output_tokens, 0, 0])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        booked = self.live.pop(request_id)
        self.real.cancel(request_id)
        self.half()
        if booked is not None:
            done = 0 if booked.prefilled else booked.prefill_ns
            self.add(booked, [-1, -done, -booked.output_tokens, 0, 0])

    # --- workers, plans, time ---

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        if name not in self.real.workers:
            self.real.add_worker(WorkerSpec(name, block_size=1, kv_capacity_tokens=100_000))
            self.incarnations[name] = self.incarnations.get(name, 0) + 1
            self.half()

    @rule(name=st.sampled_from(NAMES), drain=st.booleans())
    def leave(self, name: str, drain: bool) -> None:
        if name in self.real.workers and len(self.real.workers) > 1:
            (self.real.drain_worker if drain else self.real.remove_worker)(name)

    @rule(data=st.data(), to=st.integers(0, 3))
    def move(self, data: st.DataObject, to: int) -> None:
        core = self.real.core
        rows = [Group._make(row) for row in core.groups.rows(0, 4096, self.clock(), 0.0)]
        rows = [row for row in rows if row.worker != to]
        if rows and to < len(core.names):
            row = data.draw(st.sampled_from(rows))
            with self.real._lock:
                plans = self.real._rebalancer
                busy = row.node in plans._copied or row.node in {work.group.node for work in plans._works.values()}
                begun = self.real._rebalancer.begin(Proposal(REBALANCE, row, to, "test", 1.0), self.clock())
                self.real._rebalancer.publish()
            assert bool(begun) == (core.names[to] is not None) or busy

    @rule(times=st.integers(1, 3))
    def tick(self, times: int) -> None:
        for _ in range(times):
            self.clock.advance(1.0)
            self.half()
            self.real.tick()

    @rule()
    def warm(self) -> None:
        for asked in self.real.warm_ups():
            assert asked.worker in self.real.workers
            assert self.real.warmed(asked.plan)

    @rule(seconds=st.sampled_from([0.3, 5.0, 19.0, 40.0, 90.0, -30.0]))
    def jump(self, seconds: float) -> None:
        self.clock.advance(seconds) if seconds > 0 else self.clock.set(self.clock() + seconds)

    # --- what must hold ---

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "real"):
            self.real.check()

    @invariant()
    def groups_are_as_counted(self) -> None:
        if not hasattr(self, "real"):
            return
        core, half = self.real.core, self.bucket // HALF_BUCKETS
        prefixes = set()
        found = {}
        for at, share in zip(places(core), core.groups.show(), strict=True):
            if not core.groups.lives(share["node"], share["generation"]) or not core.groups.is_on_worker(at):
                continue
            name = core.names[share["worker"]]
            now, before = share["now"], share["before"]
            if share["half"] < half:
                now, before = (0,) * 5, now if share["half"] == half - 1 else (0,) * 5
            prefixes.add(self.path(share["node"]))
            if now[0] or before[0]:
                found[(self.path(share["node"]), name, self.incarnations[name])] = (before, now)
        wanted = {}
        for (prefix, name, incarnation), halves in list(self.sums.items()):
            ends = core.tree.path(list(prefix))
            gone = not ends or ends[-1] != len(prefix) or name not in self.real.workers
            if gone or self.incarnations[name] != incarnation:
                del self.sums[(prefix, name, incarnation)]
                continue
            before, now = tuple(halves.get(half - 1, [0] * 5)), tuple(halves.get(half, [0] * 5))
            if now[0] or before[0]:
                wanted[(prefix, name, incarnation)] = (before, now)
        assert found.keys() == wanted.keys()
        for key, sums in wanted.items():
            rounded = 1 + sums[0][0] + sums[1][0]  # nanoseconds: each request's may be rounded otherwise
            np.testing.assert_allclose(found[key], sums, atol=rounded)


def places(core: Any) -> list[int]:
    return [row[0] for row in core.groups.shares_kept()]


RebalancerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_rebalancer = RebalancerMachine.TestCase
