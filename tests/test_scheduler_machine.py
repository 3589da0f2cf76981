"""State machine: the global scheduler decides, books and expects exactly what the naive model does."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import preble
from preble import AllBlocksCleared, BlockRemoved, BlockStored, ManualClock, PrefixEvicted, SchedulerConfig, WorkerSpec
from preble.errors import DuplicateRequest, InvalidInput, NoWorkers, QueueFull
from preble.scheduling.peer_bookings import is_peer, peer_id
from preble.types import RequestEnded, RequestPlaced, RequestPrefilled
from tests.models.scheduler import SAME_TO, Choice, NaiveScheduler, Path

pytestmark = pytest.mark.timeout(900)  # a minute alone; several beside others, on a busy machine
NAMESPACES = (None, "tenant", 7)
NAMES = [f"w{i}" for i in range(5)]
# Few segments, put together and cut: prompts share, split and extend each other, around the borders of 16-token blocks.
SEGMENTS = [tuple(range(100 * i, 100 * i + size)) for i, size in enumerate([10, 16, 33, 5, 20])]
COSTS = [
    preble.CostModel.preset("mistral-7b/a6000"),
    preble.CostModel(
        [(0, 0.01), (16, 0.01), (64, 0.2)],
        context=(20, 0.001, 0.001, 1e-4),
        pair=(100, 0.0, 1e-4, 1e-4, 1e-5),
        start=0.05,
    ),
    preble.CostModel([(0, 0.02), (100, 3.02)], context=(0, 0.0, 0.001, 1e-5)),  # so slow that the fleet is busy
]
prompts = st.builds(
    lambda parts, cut: sum((SEGMENTS[part] for part in parts), ())[:cut],
    st.lists(st.integers(0, 4), min_size=1, max_size=3), st.sampled_from([1, 2, 9, 16, 17, 32, 40, 99, 99, 99, 99]),
)  # fmt: skip
paths = st.tuples(st.sampled_from([*NAMESPACES, None, None]), prompts)
limits = st.sampled_from([None, None, 1, 30])
specs = st.builds(
    WorkerSpec,
    st.sampled_from(NAMES),
    kv_capacity_tokens=st.sampled_from([30, 64, 100, 1000]),
    block_size=st.sampled_from([1, 1, 16]),
    cost_model=st.sampled_from(COSTS),
    cached_first=st.sampled_from([True, True, False]),
    below_capacity_tokens=st.sampled_from([0, 0, 50, 200]),
    max_running=st.sampled_from([None, None, 1, 3]),
)
media = st.sampled_from([None, "GPU", "CPU", "CPU_PINNED", "DISK"])
# What a total is the sum of.
TERMS = ("queue", "prefill", "loading", "others", "decode", "eviction", "balance", "credit")
configs = st.builds(
    SchedulerConfig,
    history_seconds=st.just(36.0),
    join_seconds=st.just(5.0),
    exploit_ratio=st.sampled_from([0.5, 0.5, 0.5, 0.2]),
    peer_delay_seconds=st.sampled_from([0.05, 0.05, 0.005, 0.001]),
    live_requests_max=st.just(9),
    host_token_seconds=st.sampled_from([1e-5, 1e-3, 0.02]),
    disk_token_seconds=st.sampled_from([1e-4, 5e-3]),
    lease_seconds=st.just(150.0),
    rebalance_ratio=st.just(0.0),  # load that shifts has its own machine, scheduling/test_rebalancer_machine.py
    replicas_max=st.just(1),
    handover_prefixes_max=st.just(0),  # prefixes that change hands: `scheduling/test_fleet_machine.py`
    calibrate=st.just(False),  # costs that change: `scheduling/test_calibration.py`
)


def shown_tree(scheduler: preble.GlobalScheduler) -> dict[Path, dict[str, int]]:
    """Nodes by whole prefix, each with its marks, read from the drawing of the tree."""
    names = scheduler.core.names
    nodes: dict[Path, dict[str, int]] = {}
    space, way = None, []
    for line in scheduler.core.tree.show(10**6).split("\n"):
        if line.startswith("("):
            space = next(known for known in (7, "tenant", None) if known is None or repr(known) == line[1:-1])
        elif line:
            run, _, marks = line.strip()[1:].partition("]")
            depth = (len(line) - len(line.lstrip())) // 2
            way = [*way[: depth - 1], tuple(int(token) for token in run.split())]
            found = [mark.split(":") for mark in marks.split()]
            nodes[(space, sum(way, ()))] = {names[int(worker)]: int(tokens) for worker, tokens in found}
    return nodes


def block_hash(worker: str, path: Path) -> int | bytes:
    """A stable name of the block that ends a prefix; workers disagree, and some use bytes."""
    return repr((worker, path)).encode() if worker in NAMES[:2] else int.from_bytes(repr(path).encode(), "big")


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, answers, cache events, workers coming and going, and a clock that jumps both ways."""

    @initialize(config=configs, first=st.lists(specs, min_size=2, max_size=4, unique_by=lambda spec: spec.id))
    def start(self, config: SchedulerConfig, first: list[WorkerSpec]) -> None:
        self.clock = ManualClock(1000.0)
        self.real = preble.GlobalScheduler([], config=config, clock=self.clock)
        self.model = NaiveScheduler(config)
        self.number = 0
        self.asked: list[Path] = []
        for spec in first:
            self.add_worker(spec)

    # --- requests ---

    @rule(chosen=st.lists(paths, min_size=1, max_size=4), limit=limits)
    def schedule(self, chosen: list[Path], limit: int | None) -> None:
        for path in chosen:
            self.schedule_one(path, limit, frozenset())

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 99), more=st.sampled_from([(), (), (1, 2, 3), SEGMENTS[1]]), limit=limits)
    def schedule_again(self, which: int, more: tuple[int, ...], limit: int | None) -> None:
        space, tokens = self.asked[which % len(self.asked)]
        self.schedule_one((space, tokens + more), limit, frozenset())

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 99), limit=limits)
    def schedule_elsewhere(self, which: int, limit: int | None) -> None:
        """A prompt goes to a worker that lacks it, as after a failure; now several cache it."""
        path = self.asked[which % len(self.asked)]
        holders = [name for name in self.model.accounts if self.model.tree.held(path, name)]
        self.schedule_one(path, limit, frozenset(holders[:2]))

    @rule(chosen=st.lists(paths, min_size=1, max_size=3), share=st.sampled_from([None, 0.0, 0.5, 1.0]))
    def serve(self, chosen: list[Path], share: float | None) -> None:
        """Whole lives: from now on the prompts are known to be cached, or the engine lies about it."""
        for path in [*chosen, *self.asked[-2:]]:
            before = self.number
            self.schedule_one(path, None, frozenset())
            if self.number > before:
                self.first_token(len(self.model.live) - 1, share)
                self.finish(len(self.model.live) - 1, share, 20)

    def schedule_one(self, path: Path, limit: int | None, excluded: frozenset[str]) -> None:
        space, tokens = path
        asked = {"namespace": space, "max_new_tokens": limit}
        open_workers = [n for n, a in self.model.accounts.items() if a.eligible and n not in excluded]
        if len(self.model.live) >= self.real.config.live_requests_max or not open_workers:
            try:
                self.real.schedule(tokens, exclude=excluded, **asked)
                raise AssertionError("a request was taken that has no place")
            except (QueueFull, NoWorkers):
                return
        self.number += 1
        self.asked.append(path)
        explained = self.real.explain(tokens, **asked) if not excluded else None
        decision = self.real.schedule(tokens, request_id=self.number, exclude=excluded, explain=True, **asked)
        choice = self.model.decide(path, limit, self.clock(), excluded)
        choice = self.agrees(decision, choice)
        if explained is not None:
            self.explains(explained, decision, choice)
        self.model.book(self.number, path, decision.worker, limit, self.clock(), credited=choice.credited)

    def agrees(self, decision: preble.Decision, choice: Choice) -> Choice:
        """The same decision, and each worker's cost to the last few bits; which of two it was where these decide."""
        if decision.reason != choice.reason and choice.or_else is not None:
            choice = choice.or_else
        assert decision.reason == choice.reason
        assert set(decision.costs) == {row.worker for row in choice.rows}
        for row in choice.rows:
            assert math.isclose(decision.costs[row.worker], row.total, rel_tol=1e-9, abs_tol=1e-12), row
        if decision.worker != choice.worker:
            mine, real = choice.total(choice.worker), choice.total(decision.worker)
            assert math.isclose(mine, real, rel_tol=SAME_TO)
            assert mine != real or decision.costs[choice.worker] != decision.costs[decision.worker]
        assert decision.matched_tokens == next(r.matched for r in choice.rows if r.worker == decision.worker)
        return choice

    def explains(self, told: preble.types.Explanation, decision: preble.Decision, choice: Choice) -> None:
        """What `explain` said is what `schedule` then did, term by term."""
        assert (told.worker, told.reason, told.matched_tokens, told.prompt_tokens) == (
            *(decision.worker, decision.reason, decision.matched_tokens, decision.prompt_tokens),
        )
        assert {cost.worker: cost.total_seconds for cost in told.workers} == decision.costs
        for cost, row in zip(told.workers, choice.rows, strict=True):
            assert (cost.worker, cost.matched_tokens, cost.candidate) == (row.worker, row.matched, True)
            assert (cost.host_tokens, cost.disk_tokens) == row.loaded
            for term in ("load", *TERMS):
                mine, real = getattr(row, term), getattr(cost, f"{term}_seconds")
                assert math.isclose(mine, real, rel_tol=1e-9, abs_tol=1e-12), (term, row, cost)
            assert math.isclose(cost.total_seconds, sum(getattr(cost, f"{term}_seconds") for term in TERMS))
        others = [cost for cost in told.workers if cost.candidate and cost.worker != told.worker]
        assert (told.runner_up is None) == (not others)
        assert told.margin >= 0.0 or self.model.others > 0.0

    @precondition(lambda self: self.model.accounts)
    @rule(which=st.integers(0, 99), path=paths, limit=limits, times=st.integers(1, 3))
    def placed_elsewhere(self, which: int, path: Path, limit: int | None, times: int) -> None:
        """Other routers place requests; this one is reported."""
        for _ in range(times):
            self.number += 1
            name, told = self.worker(which), RequestPlaced("other", str(self.number), path[1], path[0], limit)
            full = len(self.model.live) >= self.real.config.live_requests_max
            assert self.real.apply(name, [told]) == (not full)
            if not full:
                self.asked.append(path)
                own_id = peer_id(name, "other", str(self.number))
                self.model.book(own_id, path, name, limit, self.clock(), from_peer=True)

    @precondition(lambda self: self.model.live)
    @rule(which=st.integers(0, 99), share=st.sampled_from([None, 0.0, 0.5, 1.0]))
    def first_token(self, which: int, share: float | None) -> None:
        request_id, cached = self.pick(which, share)
        if is_peer(request_id):
            assert self.real.apply(request_id[1], [RequestPrefilled(*request_id[2:], cached)]) == 1
        else:
            assert self.real.first_token(request_id, cached_tokens=cached)
        assert self.model.first_token(request_id, cached, self.clock())

    @precondition(lambda self: self.model.live)
    @rule(
        which=st.integers(0, 99),
        share=st.sampled_from([None, None, 0.0, 1.0]),
        output=st.sampled_from([None, 0, 3, 60]),
    )
    def finish(self, which: int, share: float | None, output: int | None) -> None:
        request_id, cached = self.pick(which, share)
        if is_peer(request_id):
            self.end_elsewhere(request_id, output)
            return
        assert self.real.finish(request_id, output_tokens=output, cached_tokens=cached)
        assert self.model.finish(request_id, output, cached, self.clock())

    def end_elsewhere(self, request_id: tuple[str, ...], output: int | None) -> None:
        """A request of another router is over, with or without a result."""
        assert self.real.apply(request_id[1], [RequestEnded(*request_id[2:], output)]) == 1
        if output is None:
            assert self.model.cancel(request_id, self.clock())
        else:
            assert self.model.finish(request_id, output, None, self.clock())

    @precondition(lambda self: self.model.live)
    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        request_id, _ = self.pick(which, None)
        if is_peer(request_id):
            self.end_elsewhere(request_id, None)
            return
        assert self.real.cancel(request_id)
        assert self.model.cancel(request_id, self.clock())

    @precondition(lambda self: self.model.live)
    @rule(which=st.integers(0, 99))
    def renew(self, which: int) -> None:
        request_id, _ = self.pick(which, None)
        assert self.real.renew(request_id)
        self.model.renew(request_id, self.clock())

    @precondition(lambda self: self.model.live and self.model.accounts)
    @rule(which=st.integers(0, 99), told=st.sets(st.integers(0, 9)), grace=st.sampled_from([0.0, 5.0, 20.0]))
    def reconcile(self, which: int, told: set[int], grace: float) -> None:
        """An engine reports which requests it has; estimates and load are those of so many cancellations."""
        name = self.worker(which)
        has = [request_id for place, request_id in enumerate(self.model.live) if place in told]
        named = [request_id[3] if is_peer(request_id) else request_id for request_id in has]
        found = self.real.reconcile(name, named, grace_seconds=grace)
        assert list(found.given_back) == self.model.reconcile(name, has, grace, self.clock())

    def pick(self, which: int, share: float | None) -> tuple[int, int | None]:
        """A live request, and what its engine says it reused: nothing, all that was estimated, or a lie."""
        request_id = list(self.model.live)[which % len(self.model.live)]
        matched = self.model.live[request_id].matched
        return request_id, None if share is None else int(share * matched)

    @rule(path=paths)
    def talk_about_nobody(self, path: Path) -> None:
        late = self.real.stats()["late_calls"]
        assert not self.real.first_token("nobody") and not self.real.finish("nobody") and not self.real.cancel("nobody")
        assert self.real.stats()["late_calls"] == late + 3
        if self.model.live:
            request_id, _ = self.pick(0, None)
            for bad in (lambda: self.real.finish(request_id, cached_tokens=1000), lambda: self.again(request_id, path)):
                try:
                    bad()
                    raise AssertionError("nonsense was accepted")
                except (InvalidInput, QueueFull):
                    pass

    def again(self, request_id: int, path: Path) -> None:
        try:
            self.real.schedule(path[1], request_id=request_id)
        except (DuplicateRequest, NoWorkers) as error:
            raise InvalidInput("as it should") from error

    # --- workers ---

    @rule(spec=specs)
    def add_worker(self, spec: WorkerSpec) -> None:
        if spec.id not in self.model.accounts:
            self.real.add_worker(spec)
            self.model.add_worker(spec, self.clock())

    @precondition(lambda self: len(self.model.accounts) > 2)
    @rule(which=st.integers(0, 99), dice=st.integers(0, 5))
    def drain_worker(self, which: int, dice: int) -> None:
        if dice:
            return
        name = self.worker(which)
        self.real.drain_worker(name)
        if self.model.accounts[name].eligible:
            self.model.advance(self.clock())  # who is least loaded is asked; not by a second drain
        self.model.accounts[name].eligible = False

    @precondition(lambda self: len(self.model.accounts) > 1)
    @rule(which=st.integers(0, 99), dice=st.integers(0, 5))
    def remove_worker(self, which: int, dice: int) -> None:
        if dice:
            return
        name = self.worker(which)
        assert self.real.remove_worker(name) == self.model.remove_worker(name, self.clock())

    def worker(self, which: int) -> str:
        return list(self.model.accounts)[which % len(self.model.accounts)]

    # --- cache events ---

    @precondition(lambda self: self.model.accounts)
    @rule(which=st.integers(0, 99), path=paths, start=st.integers(0, 3), medium=media)
    def blocks_stored(self, which: int, path: Path, start: int, medium: str | None) -> None:
        name, size = self.worker(which), 8
        space, tokens = path
        ends = range((start + 1) * size, len(tokens) + 1, size)
        parent = block_hash(name, (space, tokens[: start * size])) if start else None
        hashes = [block_hash(name, (space, tokens[:end])) for end in ends]
        inside = tokens[start * size : start * size + len(hashes) * size]
        self.apply(name, BlockStored(hashes, parent, inside, size, space, medium))

    @precondition(lambda self: any(account.blocks for account in self.model.accounts.values()))
    @rule(chosen=st.lists(st.integers(0, 99), min_size=1, max_size=4), medium=media)
    def blocks_removed(self, chosen: list[int], medium: str | None) -> None:
        name = next(name for name, account in self.model.accounts.items() if account.blocks)
        account = self.model.accounts[name]
        known = list(account.blocks)
        hashes = [known[i % len(known)] for i in chosen]
        orphans = [key for key in hashes if not self.model.is_whole(account, key)]
        self.model.placed = {key for key in orphans if self.real._workers[name].blocks.prefix(key) is not None}
        self.apply(name, BlockRemoved([*hashes, 12345], medium))

    @precondition(lambda self: self.model.accounts)
    @rule(
        which=st.integers(0, 99),
        path=paths,
        kept=st.sampled_from([0, 1, 9, 16, 20, 200]),
        moved_to=st.sampled_from([None, None, "CPU", "DISK"]),
    )
    def prefix_evicted(self, which: int, path: Path, kept: int, moved_to: str | None) -> None:
        self.apply(self.worker(which), PrefixEvicted(path[1], kept, path[0], moved_to))

    @precondition(lambda self: self.model.accounts)
    @rule(which=st.integers(0, 99), dice=st.integers(0, 5))
    def cleared(self, which: int, dice: int) -> None:
        if not dice:
            self.apply(self.worker(which), AllBlocksCleared())

    def apply(self, name: str, event: object) -> None:
        """The same event to both. What it returns is whether an estimate changed; at its limit it may count a change
        that its own eviction undid."""
        before, limit = self.beliefs(name), self.model.tree.limit(name)  # the first report of its kind raises the limit
        changed = self.real.apply(name, [event])
        self.model.apply(name, event, self.clock())
        is_full = self.model.tree.cached(name) in (limit, self.model.tree.limit(name))
        assert changed == (self.beliefs(name) != before) or (changed and is_full)
        assert len(self.real._workers[name].blocks) == len(self.model.accounts[name].blocks)

    def beliefs(self, name: str) -> set[tuple[Path, bool, bool]]:
        """Every prefix that a worker is estimated to cache, and where its last token is, whatever nodes the tree has:
        in the GPU's memory or not, and not even in the host's."""
        tree, found = self.model.tree, set()
        for space, tokens in tree.recency[name]:
            start = tree.start((space, tokens))
            mark = tree.nodes[space, tokens].marks[name]
            for end in range(start + 1, start + mark.tokens + 1):
                is_here = end <= start + mark.here
                found.add(((space, tokens[:end]), is_here, mark.far and not is_here))
        return found

    # --- time ---

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0, 4.0, 20.0, 36.0, 160.0, -30.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def tick(self) -> None:
        now, before = self.clock(), self.real.stats()
        self.real.tick()
        self.model.advance(now)
        self.model.fade(now)
        gone = self.model.tree.nodes.keys() - shown_tree(self.real).keys()
        assert all(self.model.tree.may_go(path, now) for path in gone)
        for path in gone:
            del self.model.tree.nodes[path]
        after = self.real.stats()
        assert after["expired_nodes"] - before["expired_nodes"] == len(gone)
        assert after["expired_leases"] - before["expired_leases"] == self.model.expire_leases(now)

    # --- what always holds ---

    @invariant()
    def invariants_hold(self) -> None:
        self.real.check()

    @invariant()
    def tree_is_the_models(self) -> None:
        mine = {p: {w: m.tokens for w, m in node.marks.items()} for p, node in self.model.tree.nodes.items()}
        assert shown_tree(self.real) == mine

    @invariant()
    def bookings_are_the_models(self) -> None:
        stats = self.real.stats()
        assert stats["live_requests"] == len(self.model.live)
        assert list(stats["workers"]) == list(self.model.accounts)
        for name, account in self.model.accounts.items():
            for key, value in self.model.sums(account).items():
                assert math.isclose(stats["workers"][name][key], value, rel_tol=1e-9, abs_tol=1e-12), (name, key)
            told = account.accuracy.stats()
            assert {key: stats["workers"][name][key] for key in told} == told

    @invariant()
    def what_is_away_is_the_models(self) -> None:
        tree, core = self.model.tree, self.real.core
        for name, account in self.model.accounts.items():
            index = self.model.places.index(name)
            assert core.tree.away_tokens(index) == tree.away(name)
            assert core.load_rates(index) == pytest.approx(account.rates(), rel=1e-9)
            for path in self.asked[-3:]:
                mine = tree.on_gpu(path, name, tree.held(path, name))
                assert core.tree.on_gpu(path[1], index, namespace=path[0]) == mine, (name, path)

    @invariant()
    def eviction_order_is_the_models(self) -> None:
        tree = self.model.tree
        for name in self.model.accounts:
            index = self.model.places.index(name)
            marks = [(tree.nodes[path].marks[name], tree.start(path)) for path in tree.recency[name]]
            mine = [(mark.tokens, start, mark.hits.estimate(self.clock())) for mark, start in marks]
            assert self.real.core.tree.victims(index, 10**9, self.clock()) == mine

    def teardown(self) -> None:
        """Once everything has ended nothing is left: no live request, no load, no estimate, no node."""
        if not hasattr(self, "real"):
            return
        for request_id in list(self.model.live):
            self.real.finish(request_id)
        for account in self.real.stats()["workers"].values():
            assert (account["live_requests"], account["waiting_requests"], account["live_output_tokens"]) == (0, 0, 0)
            assert account["waiting_prefill_seconds"] == 0.0
        for name in list(self.model.accounts):
            self.real.apply(name, [AllBlocksCleared()])
        for _ in range(12):
            self.clock.set(max(self.clock(), 36.0 * (self.model.slice // 36)) + 40.0)
            self.real.tick()
        stats = self.real.stats()
        assert (stats["tree"]["nodes"], stats["tree"]["marks"], stats["live_requests"]) == (0, 0, 0)
        for account in stats["workers"].values():
            assert (account["window_requests"], account["window_prefill_seconds"], account["load_seconds"]) == (0, 0, 0)
        self.real.check()


SchedulerMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=50, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
test_the_scheduler_does_what_the_naive_model_does = SchedulerMachine.TestCase
