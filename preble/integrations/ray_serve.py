"""Ray Serve's request router with Preble's scheduler inside: `PrebleRequestRouter`. Owns what Ray calls and what it
expects in return; decisions and bookings are `replica_scheduler`'s, reading prompts `prompt_extractors`'.

Ray makes one router for each process that holds a handle of the deployment, on an event loop of its own. Each learns
from the requests that it routes itself, from what the others report of theirs (`booking_exchange`), and from the cache
events of all replicas where these publish them.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import InvalidConfig, MissingExtra, NoWorkers, PrebleError, QueueFull
from ..types import BlockKeys
from .booking_exchange import BookingExchange, ExchangeCalls, ExchangeClient, Note, ReceivedNotes
from .prompt_extractors import PromptReader, ReaderConfig, Tokens
from .replica_events import ReplicaEvents
from .replica_scheduler import (
    UNREPORTED_SECONDS,
    ReplicaMetadata,
    ReplicaScheduler,
    Ticket,
    metadata_of,
    scheduler_config,
)

try:
    from ray.serve.request_router import (
        LocalityMixin,
        MultiplexMixin,
        PendingRequest,
        ReplicaID,
        RequestRouter,
        RunningReplica,
    )
    from ray.util.metrics import Counter as RayCounter
except ImportError as error:
    raise MissingExtra("the request router for Ray Serve needs ray: pip install 'preble[ray]'") from error

logger = logging.getLogger("preble.integrations")

# Where a pending request carries what belongs to it, so that it goes when the request does.
TICKET = "_preble_ticket"
FOLLOWED = "_preble_followed"
SENT = "_preble_sent"
EXCHANGES = "preble"  # Ray's namespace of the actors by which routers learn of each other
# Why the scheduler chose nothing: what the error is, first of all.
WHY_NOT: tuple[tuple[type[Exception], str], ...] = (
    *((QueueFull, "queue_full"), (asyncio.TimeoutError, "slow_prompt"), (NoWorkers, "no_replica_known")),
    *((PrebleError, "refused"), (Exception, "failed")),
)


class PrebleRequestRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Routes each request to the replica where its prompt costs least, cache and load together.

    Named in a deployment's `RequestRouterConfig` by `request_router_class="preble.integrations.ray_serve:"
    "PrebleRequestRouter"`; its options, all JSON, are the arguments of `initialize_state`. A request without token ids,
    or for which anything fails, goes where the power of two choices sends it; `stats` counts why.

    Ray's FIFO mixin is left out: with it a replica chosen for one request may be given to another one.
    """

    def initialize_state(
        self,
        *,
        policy: str = "e2",
        cost_model: str | None = None,
        config: Mapping[str, Any] | None = None,
        kv_capacity_tokens: int = 200_000,
        block_size: int = 1,
        seed: int = 0,
        share: bool = True,
        **reader: Any,
    ) -> None:
        """Called by Ray with `request_router_kwargs`.

        `share`: report each booking to the deployment's other routers and learn of theirs, through an actor.
        `config`: fields of `SchedulerConfig`. `kv_capacity_tokens`, `block_size`: of a replica that reports none.
        `reader`: fields of `ReaderConfig` (extractor, tokenizer, threads, queue_max, read_seconds).
        Raises `InvalidConfig` naming the argument, `MissingExtra` for a tokenizer without its library.
        """
        try:
            reader_config = ReaderConfig(**reader)
        except TypeError as error:
            raise InvalidConfig(f"request_router_kwargs: {error}") from error
        self._scheduler = ReplicaScheduler(
            policy=policy,
            cost_model=cost_model,
            config=scheduler_config(config),
            kv_capacity_tokens=kv_capacity_tokens,
            block_size=block_size,
            seed=seed,
            publish=self._publish,
        )
        self._exchange = (
            ExchangeClient(self._connect, self._scheduler.peer, self._scheduler.counters) if share else None
        )
        self._reader = PromptReader(reader_config)
        self._events = ReplicaEvents(self._scheduler.scheduler, self._scheduler.counters)
        self._draws = random.Random(seed)
        self._routing: WeakKeyDictionary[asyncio.Task[Any], PendingRequest] = WeakKeyDictionary()
        self._choices = RayCounter(
            "preble_router_choices",
            description="Choices of a replica, by what they rest on: the scheduler, or why not.",
            tag_keys=("deployment", "choice"),
        )

    # --- choosing -----------------------------------------------------------------------------------------------------

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica to try first, then two at random should it be full; of two, Ray takes the shorter queue."""
        self._note_routing(pending_request)
        if self._scheduler.tick_due():
            self._reader.run(lambda: self._shielded(self._scheduler.tick))
        allowed = self._with_model(candidate_replicas, pending_request)
        chosen, why = await self._choose(allowed, pending_request)
        self._count(why)
        if chosen is None:
            return [self._two_of(self._nearby(allowed, pending_request))]
        return [[chosen], self._two_of([one for one in allowed if one is not chosen])]

    async def _choose(
        self, candidates: Sequence[RunningReplica], pending: PendingRequest | None
    ) -> tuple[RunningReplica | None, str]:
        """The scheduler's choice, or None and why there is none."""
        if pending is None:
            return None, "no_request"
        try:
            ticket = await self._ticket(pending)
            if ticket is None:
                return None, "no_tokens"
            if pending.future.done():  # placed by Ray or given up meanwhile: nobody would end a booking
                return None, "too_late"
            by_name = {_name(one.replica_id): one for one in self._not_full(candidates)}
            chosen = by_name[self._scheduler.place(ticket, by_name)]
            self._watch(pending, ticket)
            return chosen, "scheduled"
        except Exception as error:  # noqa: BLE001  extractors are anybody's code, and it must go somewhere
            # The kind of error only: its text may be the user's, and hold a prompt.
            logger.debug("no choice by cache: %s", type(error).__name__)
            return None, next(why for kind, why in WHY_NOT if isinstance(error, kind))

    async def _ticket(self, pending: PendingRequest) -> Ticket | None:
        """The request's ticket, made when it is first asked for; None where the request has no tokens."""
        if not hasattr(pending, TICKET):
            tokens = await self._reader.read(pending.args, pending.kwargs)
            if tokens is not None:
                tokens = _in_namespace(tokens, pending.metadata.multiplexed_model_id)
            ticket = None if tokens is None else Ticket(pending.metadata.internal_request_id, tokens)
            if ticket is not None and not hasattr(pending, SENT):
                ticket.silent_seconds = UNREPORTED_SECONDS
            setattr(pending, TICKET, ticket)
        found: Ticket | None = getattr(pending, TICKET)
        return found

    def _note_routing(self, pending: PendingRequest | None) -> None:
        """Remember for which request the task chooses that is running now."""
        task = asyncio.current_task()
        if task is not None and pending is not None:
            self._routing[task] = pending

    def _get_pending_request_matching_internal_request_id(self, request_metadata: Any = None) -> PendingRequest | None:
        """The request that a replica was chosen for: the one that this task routes.

        Ray asks its index by internal request id. Calls that are made in the course of one request share that id, and
        of those that wait at once Ray 2.60 puts only the first into the index; the others would wait for ever.
        """
        task = asyncio.current_task()
        pending = self._routing.get(task) if task is not None else None
        if pending is not None and pending.metadata is request_metadata:
            return None if pending.future.done() else pending
        return super()._get_pending_request_matching_internal_request_id(request_metadata)

    async def _choose_replica_for_request(self, pending_request: PendingRequest, **rest: Any) -> RunningReplica:
        """Ray calls this for all requests that it sends itself, and reports their end. It does not for those of which
        only the place is asked (Ray Serve LLM's direct streaming, where HAProxy sends them)."""
        setattr(pending_request, SENT, True)
        return await super()._choose_replica_for_request(pending_request, **rest)

    def _watch(self, pending: PendingRequest, ticket: Ticket) -> None:
        """Give the booking back if the caller goes away before a replica is asked: Ray then completes nothing."""
        future = pending.future
        if getattr(pending, FOLLOWED, None) is future:
            return
        setattr(pending, FOLLOWED, future)
        future.add_done_callback(lambda done: self._scheduler.cancel(ticket) if done.cancelled() else None)

    def _with_model(
        self, candidates: Sequence[RunningReplica], pending: PendingRequest | None
    ) -> Sequence[RunningReplica]:
        """Those with the request's model, by Ray's own rule, where it names one. Else all of them: a cached prefix is
        worth more than a short way. A request that finds no room then waits before the next round."""
        if pending is None or not pending.metadata.multiplexed_model_id:
            if pending is not None:
                pending.routing_context.should_backoff = True
            return candidates
        ids = self.apply_multiplex_routing(pending_request=pending)
        return [one for one in candidates if one.replica_id in ids]

    def _nearby(self, candidates: Sequence[RunningReplica], pending: PendingRequest | None) -> Sequence[RunningReplica]:
        """Those that Ray's power of two would draw from."""
        if pending is not None and pending.metadata.multiplexed_model_id:
            return candidates
        ids = self.apply_locality_routing(pending_request=pending)
        return [one for one in candidates if one.replica_id in ids]

    def _not_full(self, candidates: Sequence[RunningReplica]) -> Sequence[RunningReplica]:
        return self.select_available_replicas(list(candidates)) or candidates

    def _two_of(self, candidates: Sequence[RunningReplica]) -> list[RunningReplica]:
        return self._draws.sample(list(candidates), min(2, len(candidates)))

    def _count(self, choice: str) -> None:
        self._scheduler.counters[f"choice_{choice}"] += 1
        self._choices.inc(tags={"deployment": self._deployment_id.name, "choice": choice})

    # --- what Ray reports ---------------------------------------------------------------------------------------------

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica took the request: the booking is there from now on."""
        ticket = getattr(pending_request, TICKET, None)
        if ticket is not None:
            self._shielded(self._scheduler.routed, ticket, _name(replica_id))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request is over, or was refused. May come from any thread."""
        self._shielded(self._scheduler.completed, _name(replica_id), internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget the replica, its cache and its bookings."""
        super().on_replica_actor_died(replica_id)
        self._events.remove(_name(replica_id))
        self._shielded(self._scheduler.remove, _name(replica_id))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas came, left, or reported something new."""
        super().update_replicas(replicas)
        metadata = {_name(one.replica_id): self._metadata(one) for one in replicas}
        self._shielded(self._scheduler.update, metadata)
        self._shielded(self._events.update, metadata)
        if self._exchange is not None:  # without replicas the deployment may be gone, while this process stays
            self._shielded(self._exchange.start if replicas else self._exchange.close)

    def _metadata(self, replica: RunningReplica) -> ReplicaMetadata:
        try:
            return metadata_of(replica.replica_metadata or {}, replica.routing_stats or {})
        except PrebleError as error:
            self._scheduler.counters["metadata_refused"] += 1
            logger.warning("what replica %s reports is not used: %s", _name(replica.replica_id), error)
            return ReplicaMetadata()

    def _shielded(self, function: Any, *args: Any) -> None:
        """Call into the bookings. Ray's router must go on whatever happens there; it is counted."""
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001  it would end a request that had no part in it
            self._scheduler.counters["hook_failed"] += 1
            logger.error("%s failed: %s", function.__name__, type(error).__name__)

    # --- other routers of the deployment ------------------------------------------------------------------------------

    def _publish(self, note: Note) -> None:
        if self._exchange is not None:
            self._exchange.publish(note)

    async def _connect(self) -> ExchangeCalls:
        """The deployment's booking exchange; the first router makes it, and it goes with the process that made it."""
        name = f"preble-booking-exchange:{self._deployment_id.app_name}:{self._deployment_id.name}"
        return _ActorExchange(await asyncio.to_thread(_exchange_actor, name))

    # --- for whoever looks --------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Choices by reason, bookings, event batches, and the scheduler's `stats`. Safe to keep."""
        return {**self._scheduler.stats(), "events_of": sorted(self._events.followed)}


class _ActorExchange:
    """An exchange in an actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def publish(self, router: str, notes: Sequence[Note]) -> None:
        await self._actor.publish.remote(router, notes)

    async def poll(self, router: str, epoch: str, after: int, wait_seconds: float) -> ReceivedNotes:
        received: ReceivedNotes = await self._actor.poll.remote(router, epoch, after, wait_seconds)
        return received


def _exchange_actor(name: str) -> Any:
    """The actor of that name, made where there is none. Waits for Ray: not for an event loop."""
    import ray

    made = ray.remote(BookingExchange).options(name=name, namespace=EXCHANGES, get_if_exists=True, num_cpus=0)
    return made.remote()


def _name(replica_id: ReplicaID) -> str:
    name: str = replica_id.to_full_id_str()
    return name


def _in_namespace(tokens: Tokens, model_id: str) -> Tokens:
    """The same tokens where the request names one of several models (a LoRA): their caches are apart."""
    if not model_id:
        return tokens
    rest = tokens.namespace if isinstance(tokens.namespace, tuple) else (tokens.namespace,)
    lora = BlockKeys(model_id, None, None, ()).namespace()
    return replace(tokens, namespace=lora if tokens.namespace is None else (*lora, *rest))
