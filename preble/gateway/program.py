"""The gateway's process: its start, its signals and its end. Owns uvicorn and reloading.

SIGTERM           `/ready` answers 503, and for `lame_duck_seconds` requests are still taken; then as SIGINT.
SIGINT            no new connections; answers that go on may end, for at most `drain_seconds`; exit code 0. Twice: now.
SIGHUP            the configuration is read again; what can change without a restart does, the rest is named in the log.
                  One that is wrong changes nothing.

When requests are answered, one line goes to stdout: `READY http://HOST:PORT`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import random
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..config import PEER_DELAY_SECONDS, SchedulerConfig
from ..errors import HandshakeRefused, MissingExtra, NoWorkers, PrebleError
from ..recording import RecordingWriter
from ..router.fleet import FleetConfig
from ..router.peer_addresses import PeerAddresses, bound_at
from ..router.router import Router, RouterConfig
from ..router.sibling_routers import REPORT_SECONDS, PeerDoor, SiblingRouters
from ..scheduler import GlobalScheduler
from ..scheduling.flow_control import FlowConfig
from ..scheduling.records import DecisionRecording
from ..transport.engine_servers.server_info import ServerOptions
from ..transport.security import load_client_keys, load_server_keys
from ..transport.tasks import end_all
from ..transport.worker_address import is_server
from .core.config import GatewayConfig, changes, is_keyless
from .core.config_sources import Loaded
from .core.config_tables import address_of, options_of
from .core.doors import PROCESS
from .core.logs import log_as_json
from .core.sibling_processes import GatewayProcesses, ProcessSlot, say_picker, say_ready
from .keys import name_of

try:
    import uvicorn

    from .api.http import start_readers
    from .app import make_app
    from .connections import BoundedProtocol, ConnectionLimits, Connections
    from .core.gateway import Gateway
    from .core.metrics import Metrics
    from .core.otlp_metrics import OtlpMetrics
    from .core.telemetry import end_senders
    from .core.tracing import Tracing
    from .dashboard.state import RECORDS_PER_SECOND
    from .discovery.discovery import Discovery
    from .listeners import BACKLOG, GatewayListener, open_listeners, open_picker_listener, say_expiry
    from .middleware import Middleware
    from .proxies import TrustedProxies
    from .shared_limits import SharedLimits
    from .text.tokenizer_files import tokenizer_directory
    from .text.tokenizing import SWITCH_SECONDS, TextCodec, first_difference
except ImportError as error:
    raise MissingExtra(f"preble serve needs {error.name}: pip install 'preble[gateway]'") from error

if TYPE_CHECKING:
    from .picker.server import PickerServer

logger = logging.getLogger("preble.gateway")

KEEP_ALIVE_SECONDS = 75  # longer than load balancers and clients keep an idle connection: they shall close it, not we
FAREWELL_SECONDS = 1.0  # of a client with TLS, until its connection is cut
DESCRIPTORS_OWN = 256  # sockets of workers, files, pipes
RECORDS_KEPT = 1024
FOUND_STEP_SECONDS = 0.05  # between two looks at whether enough servers have been found
COLLECT_AFTER_OBJECTS = 5_000  # more than there were, that may be in a cycle


def serve_until_stopped(load: Callable[[], Loaded], slot: ProcessSlot | None = None) -> int:
    """Run the gateway that `load` describes, in this thread; with a `slot` it is one of several. Main thread only, for
    the signals."""
    loaded = load()
    config = loaded.config
    # The pool's threads are as many as were asked for; the library need not start its own.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.setswitchinterval(SWITCH_SECONDS)
    log_as_json(config.log_level, {} if slot is None else {"process": slot.index})
    for remark in loaded.remarks if slot is None or slot.index == 0 else ():
        logger.info("of the other router's command line: %s", remark)
    # Connections of clients, and one to a server over HTTP for each request.
    _allow_descriptors(DESCRIPTORS_OWN + config.max_connections + config.max_live_requests)
    _run_loop(_serve(config, load, slot))
    return 0


def _collect_seldom() -> None:
    """What is here before the first request stays, so that no collection need look at it again; requests leave few
    cycles behind, and their objects are not worth a collection for every 700 of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_OBJECTS, 10, 10)


def _run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run it on uvloop, or on asyncio's own loop where uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


async def _serve(config: GatewayConfig, load: Callable[[], Loaded], slot: ProcessSlot | None) -> None:
    listeners = open_listeners(config, slot)
    at_planes = open_picker_listener(config, slot)
    if slot is None or slot.index == 0:
        say_expiry(config, time.time())
    processes = None if slot is None else GatewayProcesses(slot)
    codec = tracing = otlp = None
    try:
        tracing = None if config.traces_endpoint is None else Tracing(config.traces_endpoint)
        otlp = None if config.metrics_endpoint is None else OtlpMetrics(config.metrics_endpoint)
        codec = _codec(config)
        metrics = Metrics(time.monotonic, otlp)
        running = None if processes is None else await processes.workers()
        router = _router(config, metrics, codec, running, slot)
        await _start(router, config, codec)
        _drain_like(router, running or [])
        siblings = shared = looking = discovery = None
        try:
            discovery = await _discover(router, config, slot)
            if slot is not None:
                listeners.append(GatewayListener(slot.listen(), PROCESS))
            if slot is not None or config.peer_bind is not None:
                siblings = _siblings(router, config, slot)
                shared = None if slot is None else _shared_limits(router, siblings)
                siblings.start()
                peers = PeerAddresses(config.peers, config.processes, siblings.follow)
                looking = asyncio.ensure_future(peers.run())
            token = _admin_token(config, slot)
            gateway = Gateway(
                router, codec, config, metrics,
                processes=processes, tracing=tracing, admin_token=token, discovery=discovery,
            )  # fmt: skip
            try:
                picker = None if at_planes is None else await _start_picker(gateway, at_planes, slot)
                await _run(make_app(gateway, shared=shared), gateway, listeners, load, picker)
            finally:
                gateway.close()
        finally:
            if looking is not None:
                await end_all(looking)
            if discovery is not None:
                await discovery.close()
            await router.close()
            if siblings is not None:
                await siblings.close()
            router.scheduler.close()
    finally:
        for listener in [*listeners, *([] if at_planes is None else [at_planes])]:
            listener.close()
        if codec is not None:
            codec.close()
        end_senders(sender for sender in (tracing, otlp) if sender is not None)


async def _start_picker(gateway: Gateway, listener: GatewayListener, slot: ProcessSlot | None) -> PickerServer:
    """Listen for data planes, and say where. Raises `InvalidConfig`."""
    from .picker.destinations import check_destinations
    from .picker.pick import Picker
    from .picker.server import PickerServer

    check_destinations(_endpoints(gateway.config))
    picker = PickerServer(Picker(gateway), listener)
    await picker.start()
    if slot is None:
        say_picker(listener.socket.getsockname())
    return picker


async def _run(
    app: Middleware,
    gateway: Gateway,
    listeners: list[GatewayListener],
    load: Callable[[], Loaded],
    picker: PickerServer | None = None,
) -> None:
    config = gateway.config
    limits = ConnectionLimits(config.max_connections, config.max_connections_per_address)
    trusted = TrustedProxies(config.trusted_proxies)
    connections = Connections(limits, gateway.metrics.connection_refused, trusted.trusts)
    server = _Server(
        uvicorn.Config(
            app,
            ws="none",
            proxy_headers=False,  # whoever may send them could choose an address
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ),
        listeners,
        connections,
        gateway,
    )
    reloading = Reloading(gateway, app, load, [*listeners, *([] if picker is None else [picker.listener])])
    showing = asyncio.ensure_future(gateway.live.run())
    loop = asyncio.get_running_loop()

    ending: list[asyncio.Future[None]] = []

    def drain() -> None:
        server.should_exit = gateway.draining = True
        if picker is not None and not ending:
            ending.append(asyncio.ensure_future(picker.stop(gateway.config.drain_seconds)))

    def stop(lame_duck_seconds: float) -> None:
        """Say that there will be no requests soon, then take none. Asked twice: now."""
        if gateway.leaving:
            server.force_exit = True
            drain()
        gateway.leaving = True
        if lame_duck_seconds > 0.0:
            loop.call_later(lame_duck_seconds, drain)
        else:
            drain()

    loop.add_signal_handler(signal.SIGTERM, lambda: stop(gateway.config.lame_duck_seconds))
    loop.add_signal_handler(signal.SIGINT, stop, 0.0)  # a person waits for it
    loop.add_signal_handler(signal.SIGHUP, reloading.ask)
    start_readers()
    _collect_seldom()
    await server.serve(sockets=[])
    if picker is not None:
        if not server.force_exit:
            await asyncio.gather(*ending)
        await picker.stop(0.0)
    await reloading.close()
    await end_all(showing)


class _Server(uvicorn.Server):
    """uvicorn, which says when it is ready and leaves the signals to us."""

    def __init__(
        self, config: uvicorn.Config, listeners: list[GatewayListener], connections: Connections, gateway: Gateway
    ) -> None:
        super().__init__(config)
        self._listeners = listeners
        self._connections = connections
        self._gateway = gateway

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the program's."""
        yield

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """End, within what the configuration gives answers now."""
        self.config.timeout_graceful_shutdown = max(1, round(self._gateway.config.drain_seconds))
        await super().shutdown(sockets)

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Start to listen at every door, and report that."""
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            door = partial(
                BoundedProtocol,
                self._connections,
                listener.door,
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            )
            times: dict[str, Any] = {} if listener.tls is None else _tls_times(loop, self._connections.limits)
            server = await loop.create_server(door, sock=listener.socket, ssl=listener.tls, backlog=BACKLOG, **times)
            self.servers.append(server)
        first = self._listeners[0]
        scheme = "http" if first.tls is None else "https"
        say_ready(first.socket.getsockname(), self._gateway.admin_token, scheme=scheme)


def _tls_times(loop: asyncio.AbstractEventLoop, limits: ConnectionLimits) -> dict[str, Any]:
    """How long a client may take to agree on keys, and to say farewell: one that is idle says nothing."""
    times = {"ssl_handshake_timeout": limits.head_seconds}
    if sys.version_info >= (3, 11) or not isinstance(loop, asyncio.BaseEventLoop):  # uvloop has it everywhere
        times["ssl_shutdown_timeout"] = FAREWELL_SECONDS
    return times


def _admin_token(config: GatewayConfig, slot: ProcessSlot | None) -> str | None:
    """What changes of the fleet need where there are no keys; of several processes it is the same."""
    if slot is not None:
        return slot.token()
    return secrets.token_urlsafe(24) if is_keyless(config) else None


def _allow_descriptors(wanted: int) -> None:
    """Raise this process's limit on open files towards `wanted`, and say so where the system allows less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning(
            "this process may open %d files, max_connections and max_live_requests need %d: raise it (ulimit -Hn)",
            allowed,
            wanted,
        )


# --- making the parts -------------------------------------------------------------------------------------------------


def _codec(config: GatewayConfig) -> TextCodec | None:
    if config.tokenizer is None:
        return None
    return TextCodec(
        tokenizer_directory(config.tokenizer),
        threads=config.tokenizer_threads,
        queue_max=config.tokenizer_queue,
        cache_bytes=config.tokenizer_cache_bytes,
    )


def _router(
    config: GatewayConfig,
    metrics: Metrics,
    codec: TextCodec | None,
    running: list[dict[str, Any]] | None = None,
    slot: ProcessSlot | None = None,
) -> Router:
    """A router for the workers of the configuration, or for those that the other processes have now."""
    recording = DecisionRecording(
        share=config.record_share, keep=RECORDS_KEPT, sink=metrics.record, per_second=RECORDS_PER_SECOND
    )
    scheduler = GlobalScheduler([], policy=config.policy, config=_scheduler_config(config), record=recording)
    strict = codec is not None and config.tokenizer_mismatch == "refuse"
    known = _endpoints(config)
    # A server's further ranks are found when it answers.
    found = known if running is None else [card["address"] for card in running if "#" not in card["address"]]
    return Router(
        [address if (options := known.get(address)) is None else (address, options) for address in found],
        scheduler=scheduler,
        config=RouterConfig(
            FleetConfig(several_models=True, look_ahead_seconds=config.look_ahead_seconds),
            connect_seconds=config.connect_seconds,
            refuse_wait_seconds=config.refuse_wait_seconds,
            flow=_flow_config(config),
        ),
        keys=None if config.curve_keys is None else load_client_keys(config.curve_keys),
        tokenizer_fingerprint=codec.fingerprint if codec is not None and strict else "",
        record=_recording(config, slot),
    )


def _recording(config: GatewayConfig, slot: ProcessSlot | None) -> RecordingWriter | None:
    """Who writes requests down. Several processes make names with one key, so that their files are one recording."""
    if config.record is None:
        return None
    return RecordingWriter(
        config.record if slot is None else f"{config.record}.process-{slot.index}",
        now=time.monotonic(),
        started_unix_seconds=time.time(),
        policy=config.policy,
        max_bytes=config.record_max_bytes // (1 if slot is None else slot.count),
        files=config.record_files,
        key=None if slot is None else slot.record_key(),
    )


def _flow_config(config: GatewayConfig) -> FlowConfig:
    """Keys' shares by the names that the gateway has for them."""
    return FlowConfig(weights={name_of(table): table.weight for table in config.keys if table.weight is not None})


def _scheduler_config(config: GatewayConfig) -> SchedulerConfig:
    """The operator's. Where nothing is said of the peers' delay, it is what processes before servers take."""
    scheduler = config.scheduler
    servers_only = bool(config.servers) or any(is_server(address) for address in config.workers)
    servers_only = servers_only or any(one.scheme != "tcp" for one in config.discovery)
    near = config.processes > 1 and config.peer_bind is None
    if not near or not servers_only or scheduler.peer_delay_seconds != PEER_DELAY_SECONDS:
        return scheduler
    return dataclasses.replace(scheduler, peer_delay_seconds=REPORT_SECONDS)


def _endpoints(config: GatewayConfig) -> dict[str, ServerOptions | None]:
    """Where the workers of the configuration are, and what the operator says of those that are servers."""
    plain: dict[str, ServerOptions | None] = dict.fromkeys(config.workers)
    return plain | {address_of(server): options_of(server) for server in config.servers}


async def _start(router: Router, config: GatewayConfig, codec: TextCodec | None) -> None:
    """Connect to the workers, and compare their tokenizers with ours. Raises as `Router.start` does."""
    try:
        await router.start(min_workers=0 if config.discovery else config.min_workers)
    except HandshakeRefused as error:
        if codec is None or "tokenizer_fingerprint" not in str(error):
            raise
        raise HandshakeRefused(
            f"{error}: prompts would be tokenised wrongly. Point `tokenizer` at the workers' model, "
            "or set `tokenizer_mismatch: warn` if the tokens are known to be the same"
        ) from error
    if codec is not None:
        for worker in router.fleet.workers.values():
            _compare_tokenizers(codec, worker.welcome)


async def _discover(router: Router, config: GatewayConfig, slot: ProcessSlot | None) -> Discovery:
    """Look for servers, and wait until there are as many as are asked for. Raises `NoWorkers`; then it is closed."""
    clocks: dict[str, Any] = {"clock": time.monotonic, "unix_clock": time.time}
    discovery = Discovery(config.discovery, router, _endpoints(config), rng=random.Random(), **clocks)
    discovery.start(is_first=slot is None or slot.index == 0)
    deadline = time.monotonic() + config.connect_seconds
    workers = router.fleet.workers
    wanted = config.min_workers if config.discovery else 0  # else they were waited for already
    while (ready := sum(worker.state == "ready" for worker in workers.values())) < wanted:
        if time.monotonic() >= deadline:
            found = "; ".join(f"{one['source']}: {one['failing'] or one['found']}" for one in discovery.stats())
            whys = "; ".join(f"{worker.address}: {worker.why or worker.state}" for worker in workers.values())
            await discovery.close()
            raise NoWorkers(f"{ready} workers are ready, {config.min_workers} are needed ({found}; {whys})")
        await asyncio.sleep(FOUND_STEP_SECONDS)
    return discovery


def _siblings(router: Router, config: GatewayConfig, slot: ProcessSlot | None) -> SiblingRouters:
    """The routers of the other processes and of peers, which share load before servers. Raises `InvalidConfig` for
    keys that cannot be read."""
    ends = [] if slot is None else [slot.bookings_endpoint(index) for index in range(slot.count)]
    own = "" if slot is None else ends.pop(slot.index)
    door = None
    if config.peer_bind is not None:
        endpoint, keys = bound_at(config.peer_bind, 0 if slot is None else slot.index), config.peer_keys
        door = PeerDoor(endpoint)
        if keys is not None:
            door = PeerDoor(endpoint, load_server_keys(keys), load_client_keys(keys))
    return SiblingRouters(router, own, ends, door=door)


def _shared_limits(router: Router, siblings: SiblingRouters) -> SharedLimits:
    """What all processes use of limits."""
    shared = SharedLimits(router.router_id, siblings.send_note, asyncio.get_running_loop().call_later)
    siblings.on_note, siblings.on_reader = shared.take, shared.came
    return shared


def _drain_like(router: Router, cards: list[dict[str, Any]]) -> None:
    """Drain the workers that the other processes are draining."""
    for card in cards:
        if card["state"] == "draining" and card["id"] in router.scheduler.workers:
            router.scheduler.drain_worker(card["id"])


def _compare_tokenizers(codec: TextCodec, welcome: Any) -> None:
    """Say loudly what is not known to be the same."""
    if welcome is None or welcome.tokenizer_fingerprint == codec.fingerprint:
        return
    if not welcome.tokenizer_fingerprint:
        logger.warning("worker %s does not say which tokenizer it has", welcome.worker_id)
        return
    theirs = Path(welcome.model)
    difference = first_difference(codec.directory, theirs) if (theirs / "tokenizer.json").is_file() else "not known"
    logger.warning(
        "worker %s has another tokenizer.json than this gateway; first difference: %s",
        welcome.worker_id,
        difference or "none found",
    )


# --- reloading --------------------------------------------------------------------------------------------------------


class Reloading:
    """Reads the configuration again, one time after the other. Belongs to the loop."""

    def __init__(
        self, gateway: Gateway, app: Middleware, load: Callable[[], Loaded], listeners: Sequence[GatewayListener]
    ) -> None:
        self._listeners = listeners
        self._gateway = gateway
        self._app = app
        self._load = load
        self._task: asyncio.Task[None] | None = None
        self._again = False

    def ask(self) -> None:
        """Reload soon; asked while one goes on, once more after it."""
        self._again = True
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._reload_until_settled())

    async def close(self) -> None:
        """Wait for the one that goes on."""
        if self._task is not None:
            await end_all(self._task)

    async def _reload_until_settled(self) -> None:
        while self._again:
            self._again = False
            try:
                await self._reload(self._load().config)
            except PrebleError as error:
                logger.error("the configuration was not reloaded: %s", error)
            except Exception:
                logger.exception("the configuration was not reloaded")

    async def _reload(self, new: GatewayConfig) -> None:
        gateway, discovery = self._gateway, self._gateway.discovery
        sources = None if discovery is None else discovery.prepare(new.discovery)
        for listener in self._listeners:
            listener.read_certificate(new)
        say_expiry(new, time.time())
        taken, left = changes(gateway.config, new)
        if "policy" in taken:
            before = gateway.router.scheduler
            gateway.router.change_policy(new.policy)
            before.close()
        # What needs a restart keeps its old value, so that what is shown is what is done.
        kept = {name: getattr(gateway.config, name) for name in {name.partition(".")[0] for name in left}}
        old = gateway.config
        gateway.configure(msgspec.structs.replace(new, **kept))
        self._app.configure(gateway.config)
        router = gateway.router
        router.config = dataclasses.replace(router.config, refuse_wait_seconds=gateway.config.refuse_wait_seconds)
        router.change_flow(_flow_config(gateway.config))
        named, named_now = _endpoints(old), _endpoints(new)
        if discovery is not None and sources is not None:
            await discovery.change(
                sources, {**named, **named_now}
            )  # who is about to leave is not to be found just then
        await self._change_workers(named, named_now)
        if discovery is not None:
            discovery.static = named_now
        if left:
            logger.warning("these need a restart: %s", ", ".join(sorted(left)))
        logger.info("reloaded: %s", ", ".join(sorted(taken)) or "nothing has changed")

    async def _change_workers(self, old: dict[str, ServerOptions | None], new: dict[str, ServerOptions | None]) -> None:
        """Join the workers that are new, leave those that are gone; those added over HTTP stay. A server of which
        something else is said now is left, and joined anew."""
        router = self._gateway.router
        for address, options in old.items():
            is_same = address in new and new[address] == options
            if not is_same and address in router.fleet.workers:
                await router.remove_worker(address)
        for address, options in new.items():
            if address not in router.fleet.workers:
                try:
                    await router.add_worker(address, options)
                except PrebleError as error:
                    logger.error("the worker at %s was not added: %s", address, error)
