"""The global scheduler. Owns the tree, the books, the workers and their caches' events; the only place where they are
changed.

The four calls of a request's life are compiled and inherited (`_placement/request_api.pyx`). Every other method that changes something is
one step, or a few short ones, under the same writers' lock (`with self._lock`); questions take none. Policies compute,
only a scheduler books. Nothing here opens a socket or blocks on I/O, so all of it may be called from any thread and
from asyncio. Paper sections 4.1 and 4.2.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ._cost import CostModel, LoadBook
from ._kv_index.block_index import BlockIndex
from ._kv_index.event_batch import EventBatch
from ._placement.bookings import DecisionCore
from ._placement.decision import Decision, Match, unit_draw
from ._placement.request_api import RequestCalls, finite_time, hashable, output_limit
from ._radix import RadixTree
from .clock import Clock, monotonic
from .config import SchedulerConfig as SchedulerConfig
from .errors import (
    CacheMismatchWarning,
    DuplicateWorker,
    InvalidConfig,
    InvalidInput,
    InvalidTime,
    NoWorkers,
    UnknownWorker,
)
from .policies.base import Policy, RequestView, resolve
from .scheduling import peer_bookings
from .scheduling.cache_mismatch import Truth, look, warn
from .scheduling.calibration import NEUTRAL, Calibrator
from .scheduling.leases import Drift, Lease, Reconciliation, give_back, reconcile, request_ids_in
from .scheduling.membership import ANY_REQUEST, Handover, Membership
from .types import (
    AllBlocksCleared,
    BlockKeys,
    CacheEvent,
    Explanation,
    WorkerCost,
    WorkerSpec,
    check_int,
)

if TYPE_CHECKING:
    from .scheduling.policy_state import PolicyBooks
    from .scheduling.rebalancer import Shifts, WarmUp
    from .scheduling.records import DecisionRecord, Recording
    from .scheduling.shadow import Shadow

TokenIds = Any
DEFAULT_COST_MODEL = "mistral-7b/a6000"
COUNTED = (
    *("events", "expired_leases", "expired_nodes", "failed_ticks", "reconciled_leases", "unknown_requests"),
    *peer_bookings.COUNTED,
)
REASONS_MAX = 64  # reasons counted apart; a policy that makes up more has the rest counted as "other"


@dataclass(slots=True)
class _Worker:
    """What the scheduler keeps of a worker beside its row in the core."""

    spec: WorkerSpec
    index: int
    blocks: BlockIndex
    draining: bool = False
    drift: Drift = field(default_factory=Drift)
    truth: Truth = field(default_factory=Truth)


class GlobalScheduler(RequestCalls):
    """Chooses a worker for each request so that cached prefixes are reused and no worker is overloaded. Thread-safe.

    `workers`: WorkerSpecs or ids. `policy`: "e2", another built-in name, or a `Policy`. `cost_model`: a `CostModel`
    or preset name, "neutral", or a file (*.json), for workers that bring none. `clock`: any callable returning
    seconds. `seed`: makes random choices repeatable. `record`: keep records of decisions, a `Recording` says of which.
    `shadow`: a policy, as `policy`, that is asked what it would do, without effect.
    """

    def __new__(cls, *_: Any, record: Any = None, shadow: Any = None, **__: Any) -> GlobalScheduler:
        """Whoever keeps records or has a shadow is of a subclass with longer calls; nobody else pays for it."""
        return super().__new__(cls if record is None and shadow is None else _watched(cls))

    def __init__(
        self,
        workers: Iterable[WorkerSpec | str] = (),
        *,
        policy: str | Policy | type[Policy] = "e2",
        cost_model: CostModel | str | None = None,
        config: SchedulerConfig | None = None,
        clock: Clock | None = None,
        seed: int = 0,
        record: Recording | None = None,
        shadow: str | Policy | type[Policy] | None = None,
    ) -> None:
        self.config = config if config is not None else SchedulerConfig()
        if not isinstance(self.config, SchedulerConfig):
            raise InvalidConfig(f"config must be a SchedulerConfig, got {config!r}")
        self._clock = clock if clock is not None else monotonic
        if not callable(self._clock):
            raise InvalidConfig(f"clock must be callable, got {clock!r}")
        self._seed = check_int("seed", seed, 0, 2**63 - 1)
        self._cost_model = _cost_model(cost_model, "cost_model") or CostModel.preset(DEFAULT_COST_MODEL)
        self._policy = resolve(policy)
        if self.config.calibrate == "auto":
            self.config = replace(self.config, calibrate=cost_model is None)
        self._core = DecisionCore(
            RadixTree(max_bytes=self.config.max_bytes, window_seconds=self.config.history_seconds),
            LoadBook(self.config.history_seconds, self.config.join_seconds),
            exploit_ratio=self.config.exploit_ratio,
            escape_seconds=self.config.escape_seconds,
            decode_ratio=self.config.decode_ratio,
            victims_max=self.config.victims_max,
            live_max=self.config.live_requests_max,
            calibrate=bool(self.config.calibrate),
        )
        self._calibrator = Calibrator(self._core, self.config.history_seconds) if self.config.calibrate else None
        self._open_records(record, shadow)
        self._asks = self._policy is not None or (self._shadow is not None and self._shadow.policy is not None)
        self._books = _open_books(self._policy, self._shadow, self._core.tree)
        self._shifts = _open_shifts(self._core, self.config) if self._policy is None else None
        self._workers: dict[str, _Worker] = {}
        self._membership = Membership(self._core, self.config, gives=self._policy is None)
        self._lock = self._core.tree  # the writers' lock: recursive, and let go of Python's while it waits
        self._counts_here = dict.fromkeys(COUNTED, 0)
        self._reasons: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._ahead_seconds = 0.0  # of the caller's clock; not 0 once restored where another clock counts
        for worker in _all_of("workers", workers, InvalidConfig):
            self.add_worker(worker)

    # --- a request's life ---------------------------------------------------------------------------------------------

    def _schedule_weighed(
        self,
        token_ids: TokenIds,
        request_id: Hashable,
        namespace: Hashable,
        max_new_tokens: int | None,
        exclude: Iterable[str],
        explain: bool,
    ) -> Decision:
        """`schedule` where every worker is weighed, or some are left out: under both locks."""
        with self._lock:
            now = self._now()
            if request_id is None:
                request_id = self._new_id()
            asked = self._asked(token_ids, namespace, max_new_tokens, request_id, now)
            with _Excluding(self, exclude):
                limit = output_limit(max_new_tokens)
                decision = self._place(token_ids, request_id, namespace, limit, now, asked, explain)
            self._booked()
            self._count_reason(decision.reason)
            if self._books is not None and asked is not None:
                self._books.booked(decision, asked, now)
            return decision

    def _place(
        self,
        token_ids: TokenIds,
        request_id: Hashable,
        namespace: Hashable,
        limit: int,
        now: float,
        asked: RequestView | None,
        explain: bool,
    ) -> Decision:
        return self._core.schedule(token_ids, request_id, namespace, limit, now, self._policy, asked, explain)

    def _tell_books(self, request_id: Hashable, ended: bool, output_tokens: int) -> None:
        """A live request has its first token or is over; called by the calls of its life."""
        with self._lock:
            if self._books is not None:
                self._books.told(request_id, ended, output_tokens)

    def lease(
        self,
        token_ids: TokenIds,
        *,
        request_id: Hashable = None,
        namespace: Hashable = None,
        max_new_tokens: int | None = None,
        exclude: Iterable[str] = (),
        explain: bool = False,
    ) -> Lease:
        """A booking for the length of a block, which cannot leak: `with scheduler.lease(token_ids) as lease`, or
        `async with`. Arguments are those of `schedule`, which runs when the block is entered."""
        asked = {"namespace": namespace, "max_new_tokens": max_new_tokens, "explain": explain}
        return Lease(self, token_ids, exclude, {"request_id": request_id, **asked})

    def reconcile(
        self, worker_id: str, live_request_ids: Iterable[Hashable], *, grace_seconds: float = 5.0
    ) -> Reconciliation:
        """Take an engine's word on which requests it has, by the ids they were scheduled under.

        A booking on this worker that the engine does not have is given back and counted (`reconciled_leases`), unless
        it was made or renewed within the grace: its request, or the report of its end, may be on its way. What the
        engine has is renewed. What it has and nobody booked there is returned and counted (`unknown_requests`).
        Raises UnknownWorker, InvalidInput, InvalidTime; then nothing has changed. O(live requests + ids).
        """
        told, now = request_ids_in("live_request_ids", live_request_ids), self._now()
        grace = finite_time("grace_seconds", grace_seconds)
        if grace < 0.0:
            raise InvalidInput(f"grace_seconds must not be negative, got {grace_seconds!r}")
        found = reconcile(self, self._worker(worker_id).spec.id, told, now - grace, now)
        self._count("reconciled_leases", len(found.given_back))
        self._count("unknown_requests", len(found.unknown))
        return found

    def reconcile_counts(self, worker_id: str, *, running: int, waiting: int) -> int:
        """Where an engine tells only how many requests it runs and keeps waiting: returns how many more it has than are
        booked on it, and keeps that for `stats` (`drift_requests`, and `drift_seconds`, for how long it has been on the
        same side of zero). Changes no booking, for nobody knows which is wrong.

        A difference that goes away is a message on its way. One that lasts is, below zero, bookings that leak, above,
        requests of others, or lost ones that still run. Raises UnknownWorker, InvalidInput.
        """
        engine_requests = sum(
            check_int(name, value, 0, 2**31 - 1, InvalidInput)
            for name, value in (("running", running), ("waiting", waiting))
        )
        with self._lock:
            worker = self._worker(worker_id)
            booked = int(self._core.book.account(worker.index)["live_requests"])
            return worker.drift.told(engine_requests, booked, self._now())

    # --- questions ----------------------------------------------------------------------------------------------------

    def match(self, token_ids: TokenIds, *, namespace: Hashable = None) -> Match:
        """How much of a prompt each worker is believed to cache. Changes nothing, takes no lock."""
        hashable("namespace", namespace)
        return self._core.match(token_ids, namespace)

    def explain(
        self,
        token_ids: TokenIds,
        *,
        request_id: Hashable = None,
        namespace: Hashable = None,
        max_new_tokens: int | None = None,
    ) -> Explanation:
        """The decision `schedule` would make now, with every worker's terms. Books nothing; with E2 it takes no
        lock. `request_id` is for policies that look at it; it need not be free."""
        limit = output_limit(max_new_tokens)
        hashable("namespace", namespace)
        hashable("request_id", request_id)
        with self._lock if self._asks else nullcontext():  # a Python policy's scores are of these very books
            now = self._now()
            asked = self._asked(token_ids, namespace, max_new_tokens, request_id, now)
            return self._explained(token_ids, namespace, limit, now, asked)

    def _explained(
        self, token_ids: TokenIds, namespace: Hashable, limit: int, now: float, asked: RequestView | None
    ) -> Explanation:
        chosen, reason, prompt, rows, names = self._core.explain(token_ids, namespace, limit, now, self._policy, asked)
        scores = self._scores(asked, rows)
        costs = tuple(
            WorkerCost(names[i], usable, prompt - usable, load, eviction, prefill, queue, total, score, candidate)
            for (i, usable, load, eviction, prefill, queue, total, candidate), score in zip(rows, scores, strict=True)
        )
        winner = next(cost for cost in costs if cost.worker == names[chosen])
        others = sorted((c.score, c.worker) for c in costs if c.candidate and c.worker != winner.worker)
        return Explanation(
            worker=winner.worker,
            runner_up=others[0][1] if others else None,
            margin=others[0][0] - winner.score if others else 0.0,
            reason=reason,
            policy=self.policy,
            prompt_tokens=prompt,
            matched_tokens=winner.matched_tokens,
            workers=costs,
        )

    def stats(self) -> dict[str, Any]:
        """Counters since the start, sizes now, and per worker its books and cache. A plain dict, safe to keep."""
        with self._lock:
            return {
                "policy": self.policy,
                **self._counts(),
                **self._counts_here,
                "live_requests": len(self._core.leases),
                "mirrored_live": sum(
                    map(peer_bookings.is_mirrored, list(self._core.leases))
                ),  # which changes meanwhile
                "reasons": dict(Counter(self._e2_reasons()) + Counter(self._reasons)),
                "tree": self._core.tree.stats(),
                "policy_books": {} if self._books is None else self._books.stats(),
                "plans": {} if self._shifts is None else self._shifts.stats(),
                "membership": self._membership.stats(),
                "scaling": self._membership.advice(),
                "workers": {name: self._worker_stats(worker) for name, worker in self._workers.items()},
            }

    def check(self) -> None:
        """Assert every invariant of tree, books and workers. O(everything); for tests and doubt."""
        with self._lock:
            self._core.check()
            known = {name: worker.index for name, worker in self._workers.items()}
            rows = {name: i for i, name in enumerate(self._core.names) if name is not None}
            assert known == rows, f"workers {known} and core rows {rows} differ"
            for worker in self._workers.values():
                worker.blocks.check()
            if self._books is not None:
                self._books.check(self._core.leases)
            if self._shifts is not None:
                self._shifts.check()

    def records(self) -> tuple[DecisionRecord, ...]:
        """The decision records that are kept, oldest first; empty without `record`."""
        return ()

    @property
    def policy(self) -> str:
        """The policy's name."""
        return "e2" if self._policy is None else self._policy.name

    # --- workers ------------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> Mapping[str, WorkerSpec]:
        """Specs by id, draining ones included; a copy."""
        with self._lock:
            return {name: worker.spec for name, worker in self._workers.items()}

    def add_worker(self, spec: WorkerSpec | str) -> WorkerSpec:
        """Let a worker take requests. Raises DuplicateWorker, InvalidConfig."""
        if isinstance(spec, str):
            spec = WorkerSpec(spec)
        if not isinstance(spec, WorkerSpec):
            raise InvalidConfig(f"workers must be WorkerSpec or str, got {spec!r}")
        cost = _cost_model(spec.cost_model, f"cost_model of worker {spec.id!r}") or self._cost_model
        with self._lock:
            if spec.id in self._workers:
                raise DuplicateWorker(f"worker {spec.id!r} exists already")
            index = self._core.open_worker(spec.id, spec.kv_capacity_tokens, spec.block_size, cost, self._now())
            self._adopt(spec, index, False, cost)
        return spec

    def _adopt(self, spec: WorkerSpec, index: int, draining: bool, cost: CostModel) -> _Worker:
        """Keep what belongs to a worker that the core knows."""
        blocks_max = 1024 + 4 * (spec.kv_capacity_tokens // spec.block_size)
        worker = _Worker(spec, index, BlockIndex(self._core.tree, index, blocks_max), draining)
        worker.blocks.watch(self._core.trust, spec.block_size)
        self._workers[spec.id] = worker
        self._core.set_eligible(index, not draining)
        if not draining:
            self._membership.joined(spec.id, index)
        if self._calibrator is not None:
            prior = _cost_model(spec.cost_model, "cost_model") or self._cost_model
            self._calibrator.opened(spec.id, index, prior, cost)
        if self._books is not None:
            self._books.opened(spec.id, index, cost)
        return worker

    def drain_worker(self, worker_id: str, *, handover_seconds: float = 0.0) -> Handover:
        """Give a worker no more requests; those it has go on. Its hottest prefixes are given to others: at once, or in
        the course of `handover_seconds`, in which it still takes requests for what it has not given away. Idempotent;
        a later call may shorten the time. Returns what goes where. Raises UnknownWorker, InvalidInput."""
        seconds, now = finite_time("handover_seconds", handover_seconds), self._now()
        if seconds < 0.0:
            raise InvalidInput(f"handover_seconds must not be negative, got {handover_seconds!r}")
        with self._lock:
            worker = self._worker(worker_id)
            worker.draining = True
            self._core.set_eligible(worker.index, False)
        return self._membership.leave(worker_id, worker.index, now, seconds)

    def remove_worker(self, worker_id: str) -> list[Hashable]:
        """Forget a worker and what it cached; returns its live requests' ids, which stay live until finished or
        cancelled. Those of other routers are forgotten with it."""
        with self._lock:
            worker, now = self._worker(worker_id), self._now()
            orphans = self._core.close_worker(worker.index)
            if self._shifts is not None:
                self._shifts.worker_left(worker.index, now)
            del self._workers[worker_id]
            self._membership.removed(worker_id)
            if self._calibrator is not None:
                self._calibrator.closed(worker_id)
            if self._books is not None:
                self._books.closed(worker_id)
            return peer_bookings.forget(self, orphans, now)

    def clear_worker(self, worker_id: str) -> int:
        """A worker's cache is empty: its engine was restarted or its cache reset. Forgets what it cached; its bookings
        stay. Returns the tokens that were believed cached. O(its known blocks), marks are swept by `tick`."""
        with self._lock:
            worker = self._worker(worker_id)
            believed: int = self._core.tree.worker_tokens(worker.index)
            worker.blocks.apply((AllBlocksCleared(),), self._now())
            return believed

    def apply(self, worker_id: str, events: Iterable[CacheEvent]) -> int:
        """Take a worker's word on its cache and on other routers' requests; returns how many events were news.

        Unknown hashes and parents are ignored and counted. A block with a parent is in its parent's namespace; an event
        that names another one is ignored, and counted as a conflict. Raises UnknownWorker, InvalidInput (an event that
        is none, or does not fit together; the events before it have been applied).
        """
        changed = 0
        with self._lock:
            worker, now = self._worker(worker_id), self._now()
            for told, run in peer_bookings.runs_of(_all_of("events", events, InvalidInput)):
                if told:
                    books = peer_bookings.Mirror(self, self._asked, self._count)
                    changed += sum(books.take(worker_id, worker.index, event, now) for event in run)
                    continue
                try:
                    changed += worker.blocks.apply(run, now)
                finally:
                    self._counts_here["events"] += worker.blocks.taken
        return changed

    def forget_mirrored(self, worker_id: str) -> int:
        """Give back what is booked on a worker for other routers, where its events were lost for good; returns how many
        bookings that were. Raises UnknownWorker."""
        with self._lock:
            live = self._core.live_on(self._worker(worker_id).index)
            return len(live) - len(peer_bookings.forget(self, live, self._now()))

    def apply_raw(
        self,
        worker_id: str,
        payload: Any,
        *,
        namespace: Hashable = None,
        namespace_of: Callable[[BlockKeys], Hashable] | None = None,
    ) -> int:
        """Take a batch of cache events as an engine publishes it, MessagePack `[time, events, rank]`; returns how many
        events changed a belief.

        `payload`: bytes-like, of SGLang or vLLM, events as arrays or as maps. Each data-parallel rank is a worker of
        its own; the rank in the batch is not looked at. Unknown tags, hashes and parents are ignored and counted
        (`stats`).

        `namespace`: that of blocks told apart by their tokens only. Blocks with a LoRA, a salt or extra keys are never
        among them: theirs is `namespace_of(BlockKeys)`, asked once for each distinct keys and remembered (up to 4096),
        or else `BlockKeys.namespace`: ("lora", name), ("salt", salt), ("extra", keys). Schedule their requests with the
        same. A block with a parent is in its parent's namespace. Keys that begin in the middle of a prompt (an image)
        have none: such blocks and what follows them are ignored, and counted as "keyed_blocks".

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
            changed = blocks.apply_batch(batch, self._now(), namespace)
            self._counts_here["events"] += len(batch)
            return changed

    # --- all of it as bytes -------------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """The whole scheduler as bytes, for `restore`: settings, workers, tree, load, live requests, blocks, counters.

        Namespaces and request ids must be None, bool, int, float, str, bytes or tuples of these; InvalidInput names one
        that is not, and a policy whose books are not kept. Records and shadow are left out, as is a request whose
        `schedule` has not returned. Other threads' decisions wait while memory is copied, `match` does not.
        O(everything). See docs/snapshot.md.
        """
        from .scheduling.snapshot import take

        return take(self)

    @classmethod
    def restore(
        cls,
        data: bytes,
        *,
        policy: str | Policy | type[Policy] | None = None,
        clock: Clock | None = None,
        elapsed_seconds: float = 0.0,
    ) -> GlobalScheduler:
        """A scheduler that decides as the one `data` is a snapshot of would have. It does not tick by itself, keeps no
        records and has no shadow.

        `policy`: in place of the snapshot's; must be given for one that is not built in. `clock`: may have any origin:
        ages are kept, as if `elapsed_seconds` had passed since the snapshot. Raises SnapshotRefused for bytes that are
        no snapshot, damaged, or of another version, InvalidInput, InvalidConfig, InvalidTime.
        """
        from .scheduling.snapshot import load

        kind = vars(cls).get("_unwatched", cls)
        restored: GlobalScheduler = load(kind, SchedulerConfig, data, policy, clock, elapsed_seconds)
        return restored

    # --- background ---------------------------------------------------------------------------------------------------

    def tick(self, now: float | None = None) -> None:
        """Background work: forget dead prefixes and old load, cancel leases that were never ended. Call about once a
        second. Raises InvalidTime. Works in slices, so that a decision never waits for more than one of them."""
        at = self._now() if now is None else finite_time("now", now) + self._ahead_seconds
        with self._lock:
            self._core.advance(at)
        self._count("expired_nodes", self._core.tree.expire(at))
        self._membership.tick(at)
        before = at - self.config.lease_seconds
        unseen = self._core.unseen_since(before)
        if unseen:
            self._count("expired_leases", give_back(self, unseen, before, at))
        with self._lock:
            self._core.trust.fade(at)
            workers = list(self._workers.values())
        warn(look(self._core.trust, workers, self._lock, self._core.scheduled_heads))
        if self._shifts is not None:
            self._shifts.tick(at)
        if self._calibrator is not None:
            self._calibrator.tick(at)

    def warm_ups(self) -> list[WarmUp]:
        """What plans ask workers to prefill before traffic moves (`SchedulerConfig.warm_up_seconds`): send each as an
        ordinary request for one token to that very worker, then call `warmed`. Each is handed out once."""
        with self._lock:
            return [] if self._shifts is None else self._shifts.warm_ups()

    def warmed(self, plan: int) -> bool:
        """The worker of a plan has prefilled its prefix: let the traffic move. False if the plan does not wait."""
        with self._lock:
            return self._shifts is not None and self._shifts.warmed(plan)

    def start(self) -> None:
        """Tick in a background thread until `close`. Idempotent."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._tick_until, args=(self._stop,), name="preble-tick", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Stop the background thread. Idempotent; the scheduler stays usable."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def __enter__(self) -> GlobalScheduler:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _open_records(self, record: Recording | None, shadow: str | Policy | type[Policy] | None) -> None:
        self._shadow: Shadow | None = None

    def _now(self) -> float:
        return finite_time("what the clock returned", self._clock())

    def _asked(
        self, token_ids: TokenIds, namespace: Hashable, max_new_tokens: int | None, request_id: Hashable, now: float
    ) -> RequestView | None:
        """The request as a Python policy sees it; E2 needs none."""
        if not self._asks:
            return None
        draw = unit_draw(self._seed, self._sequence)
        known = {} if self._books is None else self._books.known(token_ids, namespace, now)
        return RequestView(token_ids, namespace, max_new_tokens, self._sequence, draw, request_id, known)

    def _scores(self, asked: RequestView | None, rows: Sequence[tuple[Any, ...]]) -> Sequence[float]:
        if self._policy is None or asked is None:
            return [row[6] for row in rows]
        return self._policy.checked_scores(asked, self._core.view([row[0] for row in rows]))

    def _count(self, what: str, times: int) -> None:
        if times:
            with self._lock:
                self._counts_here[what] += times

    def _count_reason(self, reason: str) -> None:
        if reason not in self._reasons and len(self._reasons) >= REASONS_MAX:
            reason = "other"
        self._reasons[reason] = self._reasons.get(reason, 0) + 1

    def _worker(self, worker_id: str) -> _Worker:
        try:
            return self._workers[worker_id]
        except (KeyError, TypeError):
            raise UnknownWorker(f"no worker {worker_id!r}; there are {', '.join(self._workers) or 'none'}") from None

    def _takes(self, worker: _Worker) -> int:
        """Which requests a worker takes, as the core has it."""
        return self._membership.takes(worker.spec.id) if worker.draining else ANY_REQUEST

    def _worker_stats(self, worker: _Worker) -> dict[str, Any]:
        return {
            **self._core.book.account(worker.index),
            "cached_tokens": self._core.tree.worker_tokens(worker.index),
            "kv_capacity_tokens": worker.spec.kv_capacity_tokens,
            "draining": worker.draining,
            **worker.blocks.stats(),
            **worker.drift.stats(),
            **self._core.trust.stats(worker.index),
            **worker.truth.stats(),
            "cost": {} if self._calibrator is None else self._calibrator.stats(worker.spec.id),
        }

    def _tick_until(self, stop: threading.Event) -> None:
        while not stop.wait(self.config.tick_seconds):
            try:
                self.tick()
            except (InvalidTime, CacheMismatchWarning):  # the clock's fault, for once perhaps; warnings made errors
                with self._lock:
                    self._counts_here["failed_ticks"] += 1


class _Excluding:
    """Takes workers out of one decision. Raises UnknownWorker, and NoWorkers when there are none at all."""

    def __init__(self, scheduler: GlobalScheduler, exclude: Iterable[str]) -> None:
        self._scheduler, self._core = scheduler, scheduler._core
        self._taken = [scheduler._worker(worker_id) for worker_id in _all_of("exclude", exclude, InvalidInput)]

    def __enter__(self) -> None:
        if not self._scheduler._workers:
            raise NoWorkers("the scheduler has no workers; add_worker first")
        self._core.leaves_out = bool(self._taken)
        for worker in self._taken:
            self._core.set_eligible(worker.index, False)

    def __exit__(self, *_: object) -> None:
        for worker in self._taken:
            self._core.set_eligible(worker.index, self._scheduler._takes(worker))
        self._core.leaves_out = False


def _watched(cls: type[GlobalScheduler]) -> type[GlobalScheduler]:
    """The class of a scheduler that is watched, of the same name as its own."""
    from .scheduling.recording import Watched

    if issubclass(cls, Watched):
        return cls
    return type(cls.__name__, (Watched, cls), {"_unwatched": cls})


# --- arguments --------------------------------------------------------------------------------------------------------


def _all_of(name: str, values: Any, error: type[InvalidInput]) -> Iterable[Any]:
    """`values` if one can iterate over it; a lone string is taken for the mistake it is."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise error(f"{name} must be an iterable, such as a list, got {values!r}")
    return values


def _open_books(policy: Policy | None, shadow: Shadow | None, tree: RadixTree) -> PolicyBooks | None:
    """The books that policy and shadow need; None for those that need none, which load nothing for it."""
    needs = (() if policy is None else tuple(policy.needs)) + (() if shadow is None else shadow.needs)
    if not needs:
        return None
    from .scheduling.policy_state import PolicyBooks

    return PolicyBooks(needs, tree)


def _open_shifts(core: DecisionCore, config: SchedulerConfig) -> Shifts | None:
    """Rebalancing and copies of hot prefixes; None, and nothing is loaded or counted for it, where both are off."""
    if not config.rebalance_ratio and config.replicas_max < 2:
        return None
    from .scheduling.rebalancer import Shifts

    return Shifts(
        core,
        history_seconds=config.history_seconds,
        rebalance_ratio=config.rebalance_ratio,
        rebalance_floor_seconds=config.rebalance_floor_seconds,
        replicas_max=config.replicas_max,
        warm_up_seconds=config.warm_up_seconds,
    )


def _cost_model(model: CostModel | str | None, name: str) -> CostModel | None:
    if isinstance(model, str):
        return NEUTRAL if model == NEUTRAL.name else CostModel.preset(model)
    if model is not None and not isinstance(model, CostModel):
        raise InvalidConfig(f"{name} must be a CostModel, a preset name or a .json file, got {model!r}")
    return model
