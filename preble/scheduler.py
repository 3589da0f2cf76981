"""The global scheduler. Owns the tree, the bookings, the workers and their caches' events; the only place where they
are changed.

The calls of a request's life are compiled, complete in themselves, and extended here (`_placement/request_api.pyx`).
Every other method that changes something is one step, or a few short ones, under the same writers' lock
(`with self._lock`). Policies compute, only a scheduler books. Nothing here opens a socket or blocks on I/O, so all of
it may be called from any thread and from asyncio. Paper sections 4.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping

from ._cost import CostModel, LoadTracker
from ._kv_index.block_index import BlockIndex
from ._kv_index.event_batch import EventBatch
from ._placement.bookings import DecisionCore
from ._placement.request_api import finite_time, iterable, names_session, policy_name
from ._radix import RadixTree
from ._snapshot.accounts import cost_at
from .clock import Clock, monotonic
from .config import SchedulerConfig as SchedulerConfig
from .errors import CacheMismatchWarning, DuplicateWorker, InvalidConfig, InvalidInput, InvalidTime, UnknownWorker
from .lazy_typing import TYPE_CHECKING, Any, cast, dataclass, field, replace
from .policies.base import Policy, resolve
from .scheduling import peer_bookings
from .scheduling.cache_mismatch import CacheMismatches, look, warn
from .scheduling.calibration import NEUTRAL, Calibrator
from .scheduling.charges import service_of
from .scheduling.cost_factors import logs_of_served, scaled
from .scheduling.leases import Drift, Lease, Reconciliation, give_back, named_request, reconcile, request_ids_in
from .scheduling.membership import Handover, Membership
from .scheduling.pairs.calls import PairCalls
from .scheduling.pulls.calls import PullCalls
from .types import (
    BOTH,
    AllBlocksCleared,
    BlockKeys,
    CacheEvent,
    Claim,
    Priority,
    ServedWork,
    SessionHint,
    WorkerSpec,
    check_int,
)

if TYPE_CHECKING:
    import threading

    from ._core.token_types import TokenIds
    from ._placement.decision import Decision
    from .scheduling.cost_factors import Logs
    from .scheduling.pairs.halves import PairHalves
    from .scheduling.policy_state import PolicyState
    from .scheduling.rebalance_planner import SharedPlan
    from .scheduling.rebalancer import Rebalancer, WarmUp
    from .scheduling.recording import Recorder
    from .scheduling.records import DecisionRecord, DecisionRecording
    from .scheduling.snapshot import Parts, Snapshot
    from .scheduling.stats import SchedulerStats, WorkerStats

COUNTED = (
    *("events", "expired_leases", "expired_nodes", "failed_ticks", "reconciled_leases", "unknown_requests"),
    *peer_bookings.COUNTED,
)


@dataclass(slots=True)
class _Worker:
    """What the scheduler keeps of a worker beside its row in the core."""

    spec: WorkerSpec
    index: int
    blocks: BlockIndex
    draining: bool = False
    drift: Drift = field(default_factory=Drift)
    cache_mismatches: CacheMismatches = field(default_factory=CacheMismatches)


class GlobalScheduler(PairCalls, PullCalls):
    """Chooses a worker for each request so that cached prefixes are reused and load is shared. Thread-safe.

    `workers`: WorkerSpecs or ids. `policy`: "e2", another built-in name, or a `Policy`. `cost_model`: a `CostModel` or
    preset name, "neutral", or a file (*.json), for workers that bring none; None: "neutral", and learned. `config`:
    its knobs, a SchedulerConfig. `clock`: any callable returning seconds. `seed`: makes random choices repeatable.
    `record`: which decisions are kept, a `DecisionRecording`. `shadow`: a policy, as `policy`, that is asked
    what it would do, without effect.
    """

    _policy_state: PolicyState | PairHalves | None

    def __init__(
        self,
        workers: Iterable[WorkerSpec | str] = (),
        *,
        policy: str | Policy | type[Policy] = "e2",
        cost_model: CostModel | str | None = None,
        config: SchedulerConfig | None = None,
        clock: Clock | None = None,
        seed: int = 0,
        record: DecisionRecording | None = None,
        shadow: str | Policy | type[Policy] | None = None,
    ) -> None:
        self.config = config if config is not None else SchedulerConfig()
        if not isinstance(self.config, SchedulerConfig):
            raise InvalidConfig(f"config must be a SchedulerConfig, got {config!r}")
        if clock is not None and not callable(clock):
            raise InvalidConfig(f"clock must be callable, got {clock!r}")
        check_int("seed", seed, 0, 2**63 - 1)
        self._cost_model = _cost_model(cost_model, "cost_model") or NEUTRAL
        rule = resolve(policy)
        if self.config.calibrate == "auto":
            self.config = replace(self.config, calibrate=cost_model is None)
        core = DecisionCore(
            RadixTree(max_bytes=self.config.max_bytes, window_seconds=self.config.history_seconds),
            LoadTracker(self.config.history_seconds, self.config.join_seconds),
            exploit_ratio=self.config.exploit_ratio,
            peer_delay_seconds=self.config.peer_delay_seconds,
            host_token_seconds=self.config.host_token_seconds,
            disk_token_seconds=self.config.disk_token_seconds,
            live_max=self.config.live_requests_max,
            calibrate=bool(self.config.calibrate),
        )
        self._recorder = _open_recorder(record, shadow, seed)
        super().__init__(
            core,
            monotonic if clock is None else clock,
            seed,
            policy=rule,
            policy_state=_open_policy_state(rule, self._recorder, core.tree, self.config),
            observer=self._recorder,
        )
        self._calibrator = Calibrator(core, self.config.history_seconds) if self.config.calibrate else None
        self._rebalancer = _open_rebalancer(core, self.config, rule)
        self._workers: dict[str, _Worker] = {}
        self._membership = Membership(core, self.config, gives=rule is None)
        self._lock = core.tree  # the writers' lock: recursive, and let go of Python's while it waits
        self._counts_here = dict.fromkeys(COUNTED, 0)
        self._thread: threading.Thread | None = None
        self._stop: threading.Event | None = None
        self._ahead_seconds = 0.0  # of the caller's clock; not 0 once restored where another clock counts
        for worker in iterable("workers", workers, InvalidConfig):
            self.add_worker(worker)

    # --- a request's life ---------------------------------------------------------------------------------------------

    def lease(
        self,
        token_ids: TokenIds,
        *,
        request_id: Hashable = None,
        namespace: Hashable = None,
        max_new_tokens: int | None = None,
        exclude: Iterable[str] = (),
        explain: bool = False,
        group: Hashable = None,
        tenant: str | None = None,
        deadline_seconds: float | None = None,
        priority: Priority | None = None,
    ) -> Lease:
        """A booking for the length of a block, which cannot leak: `with scheduler.lease(token_ids) as lease`, or
        `async with`. Arguments are those of `schedule`, which runs when the block is entered, and raises there. Returns
        a Lease. Raises InvalidInput for an `exclude` that is no iterable. O(1); entering costs what `schedule` does."""
        asked = {"namespace": namespace, "max_new_tokens": max_new_tokens, "explain": explain, "group": group}
        asked |= {"tenant": tenant, "deadline_seconds": deadline_seconds, "priority": priority}
        return Lease(self, token_ids, exclude, {"request_id": request_id, **asked})

    def reconcile(
        self, worker_id: str, live_request_ids: Iterable[Hashable], *, grace_seconds: float = 5.0
    ) -> Reconciliation:
        """Take the engine's word of `worker_id` on which requests it has: `live_request_ids`, by the ids they were
        scheduled under. Returns a Reconciliation.

        A booking on this worker that the engine does not have is given back and counted (`reconciled_leases`), unless
        it was made or renewed within `grace_seconds`: its request, or the report of its end, may be on its way. What
        the engine has is renewed. What it has and nobody booked there is returned and counted (`unknown_requests`).
        Raises UnknownWorker, InvalidInput, InvalidTime; then nothing has changed. O(live requests + ids).
        """
        reported, now = request_ids_in("live_request_ids", live_request_ids), self.now()
        grace = finite_time("grace_seconds", grace_seconds)
        if grace < 0.0:
            raise InvalidInput(f"grace_seconds must not be negative, got {grace_seconds!r}")
        found = reconcile(self.core, self._give_back, self._worker(worker_id).spec.id, reported, now - grace, now)
        self._count("reconciled_leases", len(found.given_back))
        self._count("unknown_requests", len(found.unknown))
        return found

    def reconcile_counts(self, worker_id: str, *, running: int, waiting: int) -> int:
        """Where the engine of `worker_id` reports only how many requests it has `running` and `waiting`: returns how
        many more those are than are booked on it, and keeps that for `stats` (`drift_requests`, and `drift_seconds`,
        for how long it has been on the same side of zero). Changes no booking, for nobody knows which is wrong.

        A difference that goes away is a message on its way. One that lasts is, below zero, bookings that leak, above,
        requests of others, or lost ones that still run. Raises UnknownWorker, InvalidInput. O(1).
        """
        engine_requests = sum(
            check_int(name, value, 0, 2**31 - 1, InvalidInput)
            for name, value in (("running", running), ("waiting", waiting))
        )
        with self._lock:
            worker = self._worker(worker_id)
            booked = int(self.core.loads.account(worker.index)["live_requests"])
            return worker.drift.update(engine_requests, booked, self.now())

    def note_session(self, request_id: Hashable, session: SessionHint) -> None:
        """What a live request belongs to by its client's word. `session` is kept in the decision record of
        `request_id` (an id or a Decision), where there is one, and moves no request. Of a request that has ended
        nothing is kept. Raises InvalidInput. O(1)."""
        named = named_request(request_id)
        if names_session(session) and self._recorder is not None:
            with self._lock:
                self._recorder.on_session(self.core.live_key(named), session)

    # --- questions ----------------------------------------------------------------------------------------------------

    def booked_seconds(self, request_id: Hashable) -> float:
        """Returns the seconds of its worker that a live request is booked for: the prefill of what is not estimated
        cached, and its expected output's part of a busy batch. 0.0 where `request_id` (an id or a Decision) is not
        booked. Changes nothing. Raises InvalidInput. O(1)."""
        named = named_request(request_id)
        with self._lock:
            key, booked = self._booking(named)
            if booked.get("worker") is None:
                return 0.0
            cost = cost_at(self.core, self._worker(booked["worker"]).index)
            half = None if self._pairs is None else self._pairs.half_of(key)
            matched = (booked if half is None else self.core.lease(half))["matched_tokens"]
        return service_of(cost, booked["prompt_tokens"], matched, booked["expected_output_tokens"])

    def prefill_seconds(self, worker_id: str, prompt_tokens: int, cached_tokens: int) -> float:
        """Returns the seconds that `worker_id` takes for the prefill of a prompt of `prompt_tokens`, of which
        `cached_tokens` are cached, by its cost model and without any waiting; 0.0 for a worker that is none. Changes
        nothing. Raises InvalidInput. O(1)."""
        cost = self._cost_of(worker_id, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        return 0.0 if cost is None else float(cost.prefill_time(max(prompt_tokens - cached_tokens, 0), prompt_tokens))

    def service_seconds(self, worker_id: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """Returns the seconds of `worker_id` that a request took, by its cost model: its prefill, as `prefill_seconds`
        of `prompt_tokens` and `cached_tokens`, and the part of a busy batch that `output_tokens` are; 0.0 for a worker
        that is none. Changes nothing. Raises InvalidInput. O(1)."""
        counts = {"prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens, "output_tokens": output_tokens}
        cost = self._cost_of(worker_id, **counts)
        return 0.0 if cost is None else service_of(cost, prompt_tokens, cached_tokens, output_tokens)

    def tenant_seconds(self) -> dict[str, float]:
        """Returns the seconds of worker time that tenants have had so far, by name (`schedule(tenant=...)`): as booked,
        and as it really was once a request has ended. Empty while no request has named a tenant, a deadline or a class;
        at most 100,000 tenants beside those with live requests. Not part of a snapshot. A copy. Raises nothing.
        O(tenants)."""
        with self._lock:
            return {} if self._tenants is None else self._tenants.seconds()

    def stats(self) -> SchedulerStats:
        """Returns counters since the start, sizes now, and per worker its bookings and cache: a plain dict, safe to
        keep. Raises nothing. O(workers + prefix plans)."""
        with self._lock:
            found = {
                "policy": self.policy,
                **self._counts(),
                **self._counts_here,
                "live_requests": len(self.core.leases),
                "peer_bookings": sum(map(peer_bookings.is_peer, list(self.core.leases))),  # which changes meanwhile
                "reasons": self._reason_counts(),
                "tree": self.core.tree.stats(),
                "policy_state": {} if self._policy_state is None else self._policy_state.stats(),
                "plans": {} if self._rebalancer is None else self._rebalancer.stats(),
                "membership": self._membership.stats(),
                "scaling": self._membership.advice(),
                "workers": {name: self._worker_stats(worker) for name, worker in self._workers.items()},
                "tenants": {} if self._tenants is None else self._tenants.stats(),
                "pulls": {} if self._kv_moves is None else self._kv_moves.stats(),
                **({} if self._recorder is None else self._recorder.stats()),
            }
        return cast("SchedulerStats", found)

    def check(self) -> None:
        """Assert every invariant of tree, bookings and workers; for tests and doubt. Raises AssertionError.
        O(everything)."""
        with self._lock:
            self.core.check()
            known = {name: worker.index for name, worker in self._workers.items()}
            rows = {name: i for i, name in enumerate(self.core.names) if name is not None}
            assert known == rows, f"workers {known} and core rows {rows} differ"
            for worker in self._workers.values():
                worker.blocks.check()
            for one in (self._policy_state, self._recorder, self._tenants):
                if one is not None:
                    one.check(self.core.leases)
            if self._rebalancer is not None:
                self._rebalancer.check()

    def records(self) -> tuple[DecisionRecord, ...]:
        """Returns the decision records that are kept, oldest first; empty without `record`. Raises nothing.
        O(records)."""
        with self._lock:
            return () if self._recorder is None else self._recorder.records()

    @property
    def policy(self) -> str:
        """The policy's name."""
        return policy_name(self._policy)

    # --- workers ------------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> Mapping[str, WorkerSpec]:
        """Specs by id, draining ones included; a copy."""
        with self._lock:
            return {name: worker.spec for name, worker in self._workers.items()}

    def add_worker(self, spec: WorkerSpec | str, *, served: ServedWork | None = None) -> WorkerSpec:
        """Let a worker take requests. `spec`: a WorkerSpec, or an id alone. `served`: what it says of its speed, which
        counts for it and its likes until their times are known; only where costs are learned and the spec has none.
        Returns the spec. Raises DuplicateWorker, InvalidConfig; then nothing has changed. O(workers)."""
        if isinstance(spec, str):
            spec = WorkerSpec(spec)
        if not isinstance(spec, WorkerSpec):
            raise InvalidConfig(f"workers must be WorkerSpec or str, got {spec!r}")
        cost = _cost_model(spec.cost_model, f"cost_model of worker {spec.id!r}") or self._cost_model
        with self._lock:
            if spec.id in self._workers:
                raise DuplicateWorker(f"worker {spec.id!r} exists already")
            said = None
            if served is not None and spec.cost_model is None and self._calibrator is not None:
                said = logs_of_served(cost, served)
                cost = scaled(cost, self._calibrator.first_logs(cost, said))
            index = self.core.open_worker(
                *(spec.id, spec.kv_capacity_tokens, spec.block_size, cost, self.now()),
                cached_first=spec.cached_first,
                places=spec.max_running or 0,
            )
            try:
                if spec.below_capacity_tokens:
                    self.core.tree.set_below(index, spec.below_capacity_tokens)
                self._adopt(spec, index, False, cost, said)
            except BaseException:
                self._workers.pop(spec.id, None)
                if self._calibrator is not None:
                    self._calibrator.closed(spec.id)
                if self._pairs is not None:
                    self._pairs.roles.pop(spec.id, None)
                self.core.close_worker(index)
                raise
        return spec

    def _adopt(
        self, spec: WorkerSpec, index: int, draining: bool, cost: CostModel, said: Logs | None = None
    ) -> _Worker:
        """Keep what belongs to a worker that the core knows."""
        blocks_max = 1024 + 4 * ((spec.kv_capacity_tokens + spec.below_capacity_tokens) // spec.block_size)
        worker = _Worker(spec, index, BlockIndex(self.core.tree, index, blocks_max), draining)
        worker.blocks.watch(self.core.accuracy, spec.block_size)
        self._workers[spec.id] = worker
        self.core.set_eligible(index, not draining and spec.role == BOTH)
        if spec.role != BOTH:
            from .scheduling.pairs.halves import with_role

            self._pairs = self._policy_state = with_role(self.core, self._policy_state, spec, self.now())
        if self._calibrator is not None:
            prior = _cost_model(spec.cost_model, "cost_model") or self._cost_model
            self._calibrator.opened(spec.id, index, prior, cost, said)
        if self._policy_state is not None:
            self._policy_state.opened(spec.id, index, cost)
        return worker

    def drain_worker(self, worker_id: str, *, handover_seconds: float = 0.0) -> Handover:
        """Give `worker_id` no more requests; those it has go on. Its hot prefixes are given to others: at once, or in
        the course of `handover_seconds`, in which it still takes requests for what it has not given away. Idempotent;
        a later call may shorten the time. Returns what goes where. Raises UnknownWorker, InvalidInput.
        O(workers + its prefixes)."""
        seconds, now = finite_time("handover_seconds", handover_seconds), self.now()
        if seconds < 0.0:
            raise InvalidInput(f"handover_seconds must not be negative, got {handover_seconds!r}")
        with self._lock:
            worker = self._worker(worker_id)
            worker.draining = True
            self.core.set_eligible(worker.index, False)
            seconds = seconds if worker.spec.role == BOTH else 0.0
        return self._membership.leave(
            *(worker_id, worker.index, now, seconds), lambda: self._workers.get(worker_id) is worker
        )

    def remove_worker(self, worker_id: str) -> list[Hashable]:
        """Forget `worker_id` and what it cached; returns its live requests' ids, which stay live until finished or
        cancelled. Those of other routers are forgotten with it. Raises UnknownWorker. O(live requests)."""
        with self._lock:
            worker, now = self._worker(worker_id), self.now()
            orphans = self.core.close_worker(worker.index)
            worker.blocks.close()
            if self._rebalancer is not None:
                self._rebalancer.worker_left(worker.index, now)
            del self._workers[worker_id]
            self._membership.removed(worker_id)
            if self._kv_moves is not None:
                self._kv_moves.left(worker_id)
            if self._calibrator is not None:
                self._calibrator.closed(worker_id)
            if self._policy_state is not None:
                self._policy_state.closed(worker_id)
            left = peer_bookings.forget(self._give_back, orphans, now)
            return left if self._pairs is None else self._pairs.owners_of(left)

    def clear_worker(self, worker_id: str) -> int:
        """The cache of `worker_id` is empty: its engine was restarted or its cache reset. Forgets what it cached; its
        bookings stay. Returns the tokens that were estimated cached. Raises UnknownWorker. O(its known blocks), marks
        are swept by `tick`."""
        with self._lock:
            worker = self._worker(worker_id)
            dropped: int = self.core.tree.worker_tokens(worker.index)
            worker.blocks.apply((AllBlocksCleared(),), self.now())
            return dropped

    def apply(self, worker_id: str, events: Iterable[CacheEvent]) -> int:
        """Take the word of `worker_id` on its cache and on other routers' requests: `events`, oldest first. Returns how
        many were news. O(their tokens).

        Unknown hashes and parents are ignored and counted. A block with a parent is in its parent's namespace; an event
        that names another one is ignored, and counted as a conflict. Raises UnknownWorker, InvalidInput (an event that
        is none, or does not fit together; the events before it have been applied).
        """
        changed = 0
        with self._lock:
            worker, now = self._worker(worker_id), self.now()
            for reported, run in peer_bookings.runs_of(iterable("events", events)):
                if reported:
                    peers = self._bookings_of_peers()
                    changed += sum(peers.take(worker_id, worker.index, event, now) for event in run)
                    continue
                try:
                    changed += worker.blocks.apply(run, now)
                finally:
                    self._counts_here["events"] += worker.blocks.taken
        return changed

    def forget_peer_bookings(self, worker_id: str) -> int:
        """Give back what is booked on `worker_id` for other routers, where its events were lost for good; returns how
        many bookings that were. Raises UnknownWorker. O(live requests)."""
        with self._lock:
            live = self.core.live_on(self._worker(worker_id).index)
            return len(live) - len(peer_bookings.forget(self._give_back, live, self.now()))

    def _bookings_of_peers(self) -> peer_bookings.PeerBookings:
        """Made anew each time: one that was kept would keep its scheduler alive. What a subclass makes of the calls is
        for its own requests."""
        return peer_bookings.PeerBookings(
            self.core, self._book_on, super().first_token, self._end, self._give_back, self._count, self._pairs
        )

    def apply_raw(
        self,
        worker_id: str,
        payload: Any,
        *,
        namespace: Hashable = None,
        namespace_of: Callable[[BlockKeys], Hashable] | None = None,
    ) -> int:
        """Take a batch of cache events as the engine of `worker_id` publishes it, MessagePack `[time, events, rank]`;
        returns how many events changed an estimate. O(its bytes).

        `payload`: bytes-like, of SGLang or vLLM, events as arrays or as maps. Each data-parallel rank is a worker of
        its own; the rank in the batch is not looked at. Unknown tags, hashes and parents are ignored and counted
        (`stats`).

        `namespace`: that of blocks distinguished by their tokens only. Blocks with a LoRA, a salt or extra keys are
        never among them: theirs is `namespace_of(BlockKeys)`, asked once for each distinct keys and remembered (up to
        4096), or else `BlockKeys.namespace`: ("lora", name), ("salt", salt), ("extra", keys). Schedule their requests
        with the same. A block with a parent is in its parent's namespace. Keys that begin in the middle of a prompt (an
        image) have none: such blocks and what follows them are ignored, and counted as "keyed_blocks".

        Raises UnknownWorker, and InvalidInput saying what is wrong at which byte; then nothing of the batch has been
        applied. After a MemoryError the events before it have been.
        """
        if payload is None:
            raise InvalidInput("payload must be bytes-like, got a NoneType")
        if namespace_of is not None and not callable(namespace_of):
            raise InvalidInput(f"namespace_of must be callable or None, got {namespace_of!r}")
        batch = EventBatch(payload)
        with self._lock:
            blocks = self._worker(worker_id).blocks
            blocks.resolve(batch, namespace, namespace_of)
            if self._worker(worker_id).blocks is not blocks:
                raise UnknownWorker(f"worker {worker_id!r} was removed and added again by namespace_of")
            changed = blocks.apply_batch(batch, self.now(), namespace)
            self._counts_here["events"] += len(batch)
            return changed

    # --- all of it as bytes -------------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Returns the whole scheduler as bytes, for `restore`: settings, workers, tree, load, requests, blocks, counts.

        Namespaces and request ids must be None, bool, int, float, str, bytes or tuples of these. Raises InvalidInput
        naming one that is not, and a policy whose state is not kept. Records and shadow are left out, as is a request
        whose `schedule` has not returned. Other threads' decisions wait while memory is copied, `match` does not.
        O(everything). See docs/fleet.md.
        """
        from .scheduling.snapshot import take

        return take(self._lock, self._parts)

    @classmethod
    def restore(
        cls,
        data: bytes,
        *,
        policy: str | Policy | type[Policy] | None = None,
        clock: Clock | None = None,
        elapsed_seconds: float = 0.0,
    ) -> GlobalScheduler:
        """Returns a scheduler that decides as the one `data` is a snapshot of would have. It does not tick by itself,
        keeps no records and has no shadow. O(everything).

        `policy`: in place of the snapshot's; must be given for one that is not built in. `clock`: may have any origin:
        ages are kept, as if `elapsed_seconds` had passed since the snapshot. Raises SnapshotRefused for bytes that are
        no snapshot, damaged, or of another version, InvalidInput, InvalidConfig, InvalidTime.
        """
        from .scheduling.snapshot import Snapshot

        snapshot = Snapshot(data, elapsed_seconds)
        restored = snapshot.empty(cls, SchedulerConfig, policy, clock)
        restored._go_on(snapshot)
        return restored

    def _parts(self) -> Parts:
        """What a snapshot is made of. Under the lock."""
        from .scheduling.snapshot import Parts

        return Parts(
            api=self,
            config=self.config,
            seed=self._seed,
            policy=self._policy,
            cost_model=self._cost_model,
            workers=self._workers,
            rebalancer=self._rebalancer,
            counts=self._counts_here,
            reasons=self._reason_counts(beyond=True),
        )

    def _go_on(self, snapshot: Snapshot) -> None:
        """Become what a snapshot is of; this scheduler has no workers yet."""
        with self._lock:
            self._clock, self._ahead_seconds = snapshot.clock_of(self._clock)  # first: `_adopt` gives halves back
            snapshot.fill(self._parts(), self._adopt)
            if self._pairs is None:  # as `_adopt` does, where workers have roles
                from .scheduling.pairs.halves import give_back_strays

                give_back_strays(self.core, self.now())
            self._counts_here.update(snapshot.counts)
            self._reasons.update(snapshot.reasons)

    # --- background ---------------------------------------------------------------------------------------------------

    def tick(self, now: float | None = None) -> None:
        """Background work: forget dead prefixes and old load, cancel leases that were never ended. Call about once a
        second. `now`: seconds by the scheduler's clock, which is read when None. Raises InvalidTime. O(what has
        expired + workers), in slices, so that a decision never waits for more than one of them."""
        at = self.now() if now is None else finite_time("now", now) + self._ahead_seconds
        with self._lock:
            self.core.advance(at)
        self._count("expired_nodes", self.core.tree.expire(at))
        self._membership.tick(at)
        before = at - self.config.lease_seconds
        unseen = self.core.unseen_since(before, at)
        if unseen:
            self._count("expired_leases", give_back(self.core, self._give_back, unseen, before, at))
        with self._lock:
            self.core.accuracy.fade(at)
            workers = list(self._workers.values())
        warn(look(self.core.accuracy, workers, self._lock))
        if self._rebalancer is not None:
            self._rebalancer.tick(at)
        if self._calibrator is not None:
            self._calibrator.tick(at)

    def shared_plans(self) -> list[SharedPlan]:
        """Returns the active plans for other schedulers of the same workers (`follow_plans`); none where its policy
        takes none. Changes nothing. Raises nothing. O(plans x their tokens)."""
        with self._lock:
            return [] if self._rebalancer is None else self._rebalancer.shared(self.now())

    def follow_plans(self, plans: Iterable[SharedPlan] | None) -> None:
        """Carry out `plans`, which another scheduler of the same workers has made and reported, and make none; None:
        make plans here again, going on with those that are active. Raises nothing. O(prefix groups + plans x their
        tokens)."""
        if self._rebalancer is None:
            return
        with self._lock:
            self._rebalancer.leads = plans is None
            if plans is not None:
                self._rebalancer.follow(list(plans), self.now())

    @property
    def plan_changes(self) -> int | None:
        """Another number whenever an active plan has begun, ended or moved on; None where its policy takes none.
        O(1)."""
        return None if self._rebalancer is None else self._rebalancer.changes

    def warm_ups(self) -> list[WarmUp]:
        """Returns what plans ask workers to prefill before traffic moves (`SchedulerConfig.warm_up_seconds`): send each
        as an ordinary request for one token to that very worker, then call `warmed`. Each is handed out once. Raises
        nothing. O(warm-ups)."""
        with self._lock:
            return [] if self._rebalancer is None else self._rebalancer.warm_ups()

    def warmed(self, plan: int) -> bool:
        """The worker of `plan`, a number, has prefilled its prefix: let the traffic move. Returns False if the plan
        does not wait. Raises nothing. O(1)."""
        with self._lock:
            return self._rebalancer is not None and self._rebalancer.warmed(plan)

    def start(self) -> None:
        """Tick in a background thread until `close`. Idempotent. Raises nothing. O(1)."""
        import threading

        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._tick_until, args=(self._stop,), name="preble-tick", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Stop the background thread, and let the records' sink catch up. Idempotent; the scheduler stays usable.
        Raises nothing. Waits for a tick under way."""
        import threading

        with self._lock:
            thread, self._thread = self._thread, None
            if self._stop is not None:
                self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if self._recorder is not None:
            self._recorder.close()

    def __enter__(self) -> GlobalScheduler:
        self.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _place_claimed(
        self, claim: Claim, token_ids: TokenIds, exclude: Iterable[str], asked: dict[str, Any]
    ) -> Decision:
        """`schedule` for a request with a claim: workers at which it would come too late are left out, and what it is
        booked for is charged."""
        from .scheduling.tenants import place_claimed

        with self._lock:
            return place_claimed(self, self._accounts(), claim, token_ids, list(iterable("exclude", exclude)), asked)

    def _booking(self, named: Hashable) -> tuple[Hashable, Mapping[str, Any]]:
        """The key and the booking of a request by its id; (None, {}) where it is not live. Under the lock. What hash
        and equality of the id do comes first."""
        key = self.core.live_key(named)
        return key, {} if key is None else self.core.lease(key)

    def _count(self, what: str, times: int) -> None:
        if times:
            with self._lock:
                self._counts_here[what] += times

    def _worker(self, worker_id: str) -> _Worker:
        try:
            return self._workers[worker_id]
        except (KeyError, TypeError):
            raise UnknownWorker(f"no worker {worker_id!r}; there are {', '.join(self._workers) or 'none'}") from None

    def _cost_of(self, worker_id: str, **tokens: int) -> CostModel | None:
        """What decisions reckon with for a worker, None for one that is none; of so many tokens, which are checked."""
        for name, value in tokens.items():
            if type(value) is not int or value < 0:
                check_int(name, value, 0, 2**31 - 1, InvalidInput)
        with self._lock:
            worker = self._workers.get(worker_id) if isinstance(worker_id, str) else None
            return None if worker is None else cost_at(self.core, worker.index)

    def _worker_stats(self, worker: _Worker) -> WorkerStats:
        host_seconds, disk_seconds = self.core.load_rates(worker.index)
        host_loaded, disk_loaded = self.core.loaded_tokens(worker.index)
        found = {
            **self.core.loads.account(worker.index),
            "cached_tokens": self.core.tree.worker_tokens(worker.index),
            "away_tokens": self.core.tree.away_tokens(worker.index),
            "host_token_seconds": host_seconds,
            "disk_token_seconds": disk_seconds,
            "host_loaded_tokens": host_loaded,
            "disk_loaded_tokens": disk_loaded,
            "kv_capacity_tokens": worker.spec.kv_capacity_tokens,
            "draining": worker.draining,
            **worker.blocks.stats(),
            **worker.drift.stats(),
            **self.core.accuracy.stats(worker.index),
            **worker.cache_mismatches.stats(),
            "cost": {} if self._calibrator is None else self._calibrator.stats(worker.spec.id),
        }
        return cast("WorkerStats", found)

    def _tick_until(self, stop: threading.Event) -> None:
        while not stop.wait(self.config.tick_seconds):
            try:
                self.tick()
            except (InvalidTime, CacheMismatchWarning):  # the clock's fault, for once perhaps; warnings made errors
                with self._lock:
                    self._counts_here["failed_ticks"] += 1


# --- arguments --------------------------------------------------------------------------------------------------------


def _open_recorder(record: DecisionRecording | None, shadow: Any, seed: int) -> Recorder | None:
    """Who keeps records and asks a shadow; None, and nothing is loaded for it, where neither is wanted."""
    if record is None and shadow is None:
        return None
    from .scheduling.recording import Recorder

    return Recorder(record, shadow, seed)


def _open_policy_state(
    policy: Policy | None, recorder: Recorder | None, tree: RadixTree, config: SchedulerConfig
) -> PolicyState | None:
    """The state that policy and shadow need; None for those that need none, which load nothing for it."""
    needs = (() if policy is None else tuple(policy.needs)) + (() if recorder is None else recorder.needs)
    if not needs:
        return None
    from .scheduling.policy_state import PolicyState

    return PolicyState(needs, tree, config)


def _open_rebalancer(core: DecisionCore, config: SchedulerConfig, policy: Policy | None) -> Rebalancer | None:
    """Rebalancing and copies of hot prefixes; None, and nothing is loaded or counted for it, where both are off or the
    policy takes no plans."""
    if policy is None or not policy.takes_plans or (not config.rebalance_ratio and config.replicas_max < 2):
        return None
    from .scheduling.rebalancer import Rebalancer

    return Rebalancer(core, config)


def _cost_model(model: CostModel | str | None, name: str) -> CostModel | None:
    if isinstance(model, str):
        return NEUTRAL if model == NEUTRAL.name else CostModel.preset(model)
    if model is not None and not isinstance(model, CostModel):
        raise InvalidConfig(f"{name} must be a CostModel, a preset name or a .json file, got {model!r}")
    return model
