"""`preble worker`s on a Ray cluster: placed, found again after restarts, drained and taken away. Owns which workers
there should be and which addresses a router is given; Ray owns the processes and their machines.

    async with Router([]) as router:
        fleet = RayFleet(router, RayPlan(("--engine", "vllm", "--model", "models/m"), gpus=2))
        await fleet.scale(4)                              # four actors with two GPUs each
        await fleet.scale(3)                              # the cheapest one is drained first
        await fleet.close()

Each worker is an actor in a placement group of its own: one bundle, so all its GPUs are on one node, and they stay its
own while Ray restarts it. An actor reports the address that its worker has; a restarted one reports another, and the
router changes the one for the other. What runs on a worker that is lost is resumed elsewhere by the router.

Everything about Ray that is called here goes through `Cluster`, which tests replace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..clock import Clock
from ..errors import HandshakeRefused, InvalidConfig, InvalidInput, MissingExtra, TransportError, UnknownWorker
from ..router.router import Router
from ..scheduling.autoscaling import FleetLoad
from ..transport.security import check_bind, is_loopback
from ..transport.tasks import end_all
from ..types import check_fields
from .autoscale import AutoscaleConfig, Autoscaler
from .ray_actor import NODE, ActorPlan, WorkerActor

logger = logging.getLogger("preble.ray")

WORKERS_MAX = 1024
_LOST_LOOKS = 5  # looks in a row at which Ray says that an actor is dead, before it is accepted: it may be restarting
_TURN_SECONDS = 0.05
_ROOM_SECONDS = 30.0  # after which the log says that Ray has not placed a worker yet
OURS = {"--bind", "--events-bind", "--id", "--until-stdin-closes", "--curve-keys", "--insecure"}


class ActorLost(Exception):
    """An actor does not answer; `dead` if Ray says that it never will."""

    def __init__(self, text: str, *, dead: bool) -> None:
        super().__init__(text)
        self.dead = dead


class Actor(Protocol):
    """A placed actor."""

    async def status(self) -> Mapping[str, Any]:
        """What `WorkerActor.status` says. Waits while it is not placed yet. Raises `ActorLost`."""

    async def stop(self) -> None:
        """Ask for a drain. Raises `ActorLost`."""

    def remove(self) -> None:
        """End it at once and give back what it holds. No effect the second time."""


class Cluster(Protocol):
    """Where actors can be placed."""

    def place(self, plan: ActorPlan, needs: RayPlan) -> Actor:
        """Ask for an actor; returns at once."""

    def own_node(self) -> str:
        """The address of the node that this process is on."""


@dataclass(frozen=True, slots=True)
class RayPlan:
    """What every worker of a fleet is and needs. Raises `InvalidConfig` naming the field, or `InsecureBind`.

    `arguments`: options of `preble worker` (no --bind, --id). `gpus`, `cpus`: of one worker, all on one node: with
    tensor parallelism as many GPUs as ranks. `host`: where workers bind, "node" is each node's own address.
    `max_restarts` by Ray of one actor, -1: no bound. `start_seconds`: for a worker to serve once it is placed.
    `drain_seconds`: for its requests to end before it is taken away. `name`: of the fleet, in the names of its workers.
    """

    arguments: tuple[str, ...]
    gpus: float = 0
    cpus: float = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    host: str = NODE
    curve_keys: str = ""
    insecure: bool = False
    max_restarts: int = 5
    start_seconds: float = 1800.0
    drain_seconds: float = 60.0
    look_seconds: float = 0.5
    name: str = "worker"

    def __post_init__(self) -> None:
        given = {word.partition("=")[0] for word in self.arguments} & OURS
        if given:
            raise InvalidConfig(
                f"RayPlan.arguments: {', '.join(sorted(given))} is for the plan's own fields, or set by it"
            )
        check_fields(self, "not be negative", "gpus", "cpus")
        if not any(self.bundle.values()):
            raise InvalidConfig("RayPlan.cpus: a worker must need something of Ray, and cpus, gpus and resources are 0")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise InvalidConfig(f"RayPlan.gpus must be whole above 1, got {self.gpus!r}")
        check_fields(self, "be positive", "start_seconds", "drain_seconds", "look_seconds")
        if self.max_restarts < -1:
            raise InvalidConfig(f"RayPlan.max_restarts must be at least -1, got {self.max_restarts!r}")
        # The node's address is known there only, and is never loopback but on a cluster of one machine.
        bind = "tcp://0.0.0.0:*" if self.host == NODE else f"tcp://{self.host}:*"
        check_bind(bind, has_keys=bool(self.curve_keys), insecure=self.insecure)

    @property
    def bundle(self) -> dict[str, float]:
        """What one worker takes of a node, by Ray's names."""
        needs = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in needs.items() if amount}

    def actor_plan(self, name: str) -> ActorPlan:
        """For the worker of a name."""
        safe = ["--curve-keys", self.curve_keys] if self.curve_keys else []
        safe += ["--insecure"] if self.insecure else []
        drain = ["--drain-seconds", str(self.drain_seconds)]
        return ActorPlan(name, self.host, (*self.arguments, *drain, *safe))


@dataclass(slots=True)
class Placed:
    """One worker. `state`: placing (waits for room, or starts), ready, restarting, draining, failed
    (given up), gone."""

    name: str
    actor: Actor
    placed_at: float
    state: str = "placing"
    address: str = ""
    restarts: int = 0
    looks_failed: int = 0  # by an error that nobody expects
    why: str = ""
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Seen:
    """What the looks at one worker have come to: dead ones in a row, and since when it answers."""

    dead_looks: int = 0
    since: float | None = None


class RayFleet:
    """The workers of one router. Belongs to the router's asyncio loop.

    `cluster` None is the Ray cluster that this process is connected to (`ray.init`). `on_change(worker)` is called when
    a worker has another state or address, so that other routers can be given it. At its bound, 1,024 workers, `scale`
    raises.
    """

    def __init__(
        self,
        router: Router,
        plan: RayPlan,
        *,
        cluster: Cluster | None = None,
        clock: Clock = time.monotonic,
        on_change: Callable[[Placed], object] | None = None,
    ) -> None:
        self.plan = plan
        self.workers: dict[str, Placed] = {}  # by name
        self._router = router
        self._cluster = cluster if cluster is not None else RayCluster()
        self._clock = clock
        self._on_change = on_change
        self._numbers = 0
        self._changes = asyncio.Lock()  # one change of size at a time

    # --- asked --------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Workers that are there to stay: neither draining nor given up."""
        return sum(worker.state not in ("draining", "failed") for worker in self.workers.values())

    @property
    def ready(self) -> int:
        """Workers that serve."""
        return sum(worker.state == "ready" for worker in self.workers.values())

    async def scale(self, count: int) -> None:
        """Have so many workers. Returns when new ones are asked for, and those that are too many have gone; `wait`
        until new ones serve. The workers to go are those that serve nobody yet, then the cheapest to drain. Given up
        ones are forgotten, and made up for. Raises `InvalidInput`."""
        if not isinstance(count, int) or not 0 <= count <= WORKERS_MAX:
            raise InvalidInput(f"count must be an int in [0, {WORKERS_MAX}], got {count!r}")
        async with self._changes:
            for worker in [worker for worker in self.workers.values() if worker.state == "failed"]:
                await self._forget(worker)
            for _ in range(count - self.size):
                self._place()
            leavers = [self.workers[name] for name in self._leavers(self.size - count)]
            await asyncio.gather(*(self._drain(worker) for worker in leavers))

    async def wait(self, count: int | None = None) -> None:
        """Until so many workers serve (None: all of them), or are given up: then some are fewer."""
        while True:
            hopeful = sum(worker.state in ("placing", "restarting") for worker in self.workers.values())
            if not hopeful or (count is not None and self.ready >= count):
                return
            await asyncio.sleep(_TURN_SECONDS)

    async def autoscale(self, config: AutoscaleConfig, load: Callable[[], FleetLoad] | None = None) -> None:
        """Follow the scheduler's advice until cancelled. `load` is asked for what the fleet has to do; None is what
        this router sees, which is all only where it is the only one."""
        seen = load or (lambda: FleetLoad.from_stats(self._router.scheduler.stats()["scaling"]))
        scaler = Autoscaler(config)
        while True:
            wanted = scaler.decide(seen(), self.size, self._clock())
            if wanted != self.size:
                logger.info("%s: from %d to %d workers", self.plan.name, self.size, wanted)
                await self.scale(wanted)
            await asyncio.sleep(config.look_seconds)

    async def close(self) -> None:
        """Take all workers away at once, with what runs on them; `scale(0)` first drains them."""
        async with self._changes:
            for worker in list(self.workers.values()):
                await self._forget(worker)

    def stats(self) -> dict[str, Any]:
        """State, address and restarts by worker."""
        return {
            name: {"state": one.state, "address": one.address, "restarts": one.restarts, "why": one.why}
            for name, one in self.workers.items()
        }

    # --- more and fewer -----------------------------------------------------------------------------------------------

    def _place(self) -> None:
        name = f"{self.plan.name}-{self._numbers}"
        self._numbers += 1
        worker = Placed(name, self._cluster.place(self.plan.actor_plan(name), self.plan), self._clock())
        self.workers[name] = worker
        worker.task = asyncio.ensure_future(self._follow(worker))
        worker.task.add_done_callback(_log_failure)
        self._notify(worker)

    def _leavers(self, count: int) -> list[str]:
        """Who goes first, so many."""
        costs = self._router.scheduler.stats()["scaling"]["drain_seconds"]
        staying = [worker for worker in self.workers.values() if worker.state not in ("draining", "failed")]
        # Those that the advice does not name are busier than those that it does. Without advice the youngest goes.
        staying.sort(key=lambda one: (one.state == "ready", costs.get(one.name, math.inf), -one.placed_at))
        return [worker.name for worker in staying[: max(count, 0)]]

    async def _drain(self, worker: Placed) -> None:
        """Let a worker finish: first the scheduler sends it nothing, then it reports that to all routers itself."""
        self._turn(worker, "draining")
        with contextlib.suppress(UnknownWorker):
            self._router.scheduler.drain_worker(worker.name)
        if worker.address:
            with contextlib.suppress(ActorLost, asyncio.TimeoutError):
                await asyncio.wait_for(_drained(worker.actor), self.plan.drain_seconds)
        await self._forget(worker)

    async def _forget(self, worker: Placed) -> None:
        """Take a worker away; what still runs on it goes elsewhere."""
        self.workers.pop(worker.name, None)
        if worker.task is not None:
            await end_all(worker.task)
        await self._leave(worker)
        worker.actor.remove()
        worker.state = "gone"
        self._notify(worker)

    # --- one worker ---------------------------------------------------------------------------------------------------

    async def _follow(self, worker: Placed) -> None:
        """Look at a worker again and again, and give its address to the router."""
        seen = _Seen()
        while worker.state != "failed":
            try:
                await self._look(worker, seen)
            except Exception:
                worker.looks_failed += 1
                logger.exception("a look at %s failed", worker.name)
            await asyncio.sleep(self.plan.look_seconds)

    async def _look(self, worker: Placed, seen: _Seen) -> None:
        try:
            status = await self._status(worker)
        except ActorLost as error:
            seen.dead_looks = seen.dead_looks + 1 if error.dead else 0
            seen.since = None
            await self._lost(worker, str(error), gone=seen.dead_looks >= _LOST_LOOKS)
        else:
            seen.dead_looks = 0
            seen.since = self._clock() if seen.since is None else seen.since
            await self._found(worker, status, seen.since)

    async def _status(self, worker: Placed) -> Mapping[str, Any]:
        """What the actor says; logs, once, that one is long in coming to be."""
        asked = asyncio.ensure_future(worker.actor.status())
        try:
            if not (await asyncio.wait([asked], timeout=_ROOM_SECONDS))[0] and not worker.why:
                needs = ", ".join(f"{name} {amount:g}" for name, amount in self.plan.bundle.items())
                served = worker.state in ("ready", "draining")
                worker.why = "does not answer" if served else f"waits for a node with room: {needs}"
                logger.warning("%s %s", worker.name, worker.why)
                self._notify(worker)
            status = await asked
            worker.why = ""
            return status
        finally:
            asked.cancel()

    async def _lost(self, worker: Placed, why: str, *, gone: bool) -> None:
        if worker.state == "ready":
            worker.restarts += 1
            logger.warning("%s is lost: %s", worker.name, why)
            self._turn(worker, "restarting")
        await self._leave(worker)
        if gone:
            self._give_up(worker, f"Ray does not restart it again: {why}")

    async def _found(self, worker: Placed, status: Mapping[str, Any], since: float) -> None:
        """What an actor says of itself."""
        address = status["address"]
        if status["failed"]:
            await self._leave(worker)
            self._give_up(worker, status["failed"])
        elif address and is_loopback(address) and status["node"] != self._cluster.own_node():
            self._give_up(worker, f"it binds {address} on {status['node']}, where this router cannot reach it")
        elif address != worker.address:
            if worker.state == "ready":  # it was restarted between two looks
                worker.restarts += 1
            await self._leave(worker)
            if address:
                await self._join(worker, address)
            elif worker.state == "ready":
                self._turn(worker, "restarting")
        elif not address and self._clock() - since > self.plan.start_seconds:
            self._give_up(worker, f"it did not serve within {self.plan.start_seconds:g} s")

    async def _join(self, worker: Placed, address: str) -> None:
        worker.address = address
        try:
            await self._router.add_worker(address)
        except HandshakeRefused as error:
            worker.address = ""
            self._give_up(worker, str(error))
            return
        if worker.state != "draining":
            self._turn(worker, "ready")

    async def _leave(self, worker: Placed) -> None:
        """The router forgets an address, if it knows one."""
        address, worker.address = worker.address, ""
        if address:
            # Somebody else may have removed it from the router, or closed the router.
            with contextlib.suppress(UnknownWorker, TransportError):
                await self._router.remove_worker(address)

    def _give_up(self, worker: Placed, why: str) -> None:
        worker.why = why
        logger.error("%s is given up: %s", worker.name, why)
        worker.actor.remove()
        self._turn(worker, "failed")

    def _turn(self, worker: Placed, state: str) -> None:
        if worker.state == "draining" and state != "failed":
            return
        worker.state = state
        self._notify(worker)

    def _notify(self, worker: Placed) -> None:
        if self._on_change is not None:
            self._on_change(worker)


async def _drained(actor: Actor) -> None:
    await actor.stop()
    while not (await actor.status())["ended"]:
        await asyncio.sleep(_TURN_SECONDS)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a worker on Ray is not looked after any more", exc_info=task.exception())


# --- Ray itself -------------------------------------------------------------------------------------------------------


class RayCluster:
    """The cluster that this process is connected to. Raises `MissingExtra`, or `InvalidConfig` before `ray.init`."""

    def __init__(self) -> None:
        try:
            import ray
            import ray.util.scheduling_strategies
        except ImportError as error:
            raise MissingExtra("workers on a Ray cluster need ray: pip install 'preble[ray]'") from error
        if not ray.is_initialized():
            raise InvalidConfig("cluster: this process is not connected to Ray; call ray.init() first")
        self._ray = ray

    def place(self, plan: ActorPlan, needs: RayPlan) -> Actor:
        """An actor in a placement group of its own."""
        ray = self._ray
        group = ray.util.placement_group([needs.bundle], "STRICT_PACK")
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=0
        )
        actor = ray.remote(WorkerActor).options(
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            resources=dict(needs.resources),
            max_restarts=needs.max_restarts,
            max_task_retries=0,
            scheduling_strategy=strategy,
        )
        return _RayActor(ray, group, actor.remote(plan))

    def own_node(self) -> str:
        """As Ray knows it."""
        return str(self._ray.util.get_node_ip_address())


@dataclass(slots=True, eq=False)
class _RayActor:
    """An actor and its placement group."""

    _ray: Any
    _group: Any
    _handle: Any

    async def status(self) -> Mapping[str, Any]:
        """See `Actor`."""
        status: Mapping[str, Any] = await self._answer(self._handle.status.remote())
        return status

    async def stop(self) -> None:
        """See `Actor`."""
        await self._answer(self._handle.stop.remote())

    async def _answer(self, asked: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return await asked
        except errors.ActorDiedError as error:
            raise ActorLost(_first_line(error), dead=True) from error
        except errors.RayError as error:
            raise ActorLost(_first_line(error), dead=False) from error

    def remove(self) -> None:
        """See `Actor`."""
        group, self._group = self._group, None
        if group is not None:
            self._ray.kill(self._handle, no_restart=True)
            self._ray.util.remove_placement_group(group)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
