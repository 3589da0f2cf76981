"""The router: one `GlobalScheduler` in front of worker processes, for asyncio applications. Owns the life of requests.

    async with preble.Router(["tcp://127.0.0.1:5001", "tcp://127.0.0.1:5002"]) as router:
        async for chunk in router.generate(token_ids, preble.SamplingParams(max_new_tokens=64)):
            ...                                    # chunk.token_ids, chunk.finish_reason

Life of a request
  1. `generate` asks the scheduler for a worker and sends the prompt there.
  2. Chunks come back; the first one reports the prefill, and the engine's own number of cached tokens, to the
     scheduler.
  3. If the worker is lost, hangs, or skips a token, the booking is given back and the request goes on elsewhere: prompt
     plus the output so far. Positions on every chunk keep each token delivered exactly once (`request`).
     A worker at its queue bound is passed over for this request; when all are, `QueueFull`.
     A new request that would wait longer than `refuse_wait_seconds` is refused at once: `Overloaded`.
  4. The last chunk finishes the booking. A consumer that goes away cancels it, and aborts the request at the worker.

Workers come and go in `fleet`. The scheduler never blocks, so it is called on the loop; only its background
`tick` runs in a thread. A Router belongs to one asyncio loop and is not thread-safe; its scheduler is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Hashable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from .._placement.request_api import hashable
from ..clock import Clock
from ..errors import (
    CapacityExceeded,
    DuplicateRequest,
    EngineError,
    HandshakeRefused,
    InvalidInput,
    NoWorkers,
    Overloaded,
    PrebleError,
    ProtocolError,
    QueueFull,
    TransportError,
    UnknownWorker,
    WorkerLost,
)
from ..scheduling.flow_control import FlowConfig
from ..scheduling.leases import named_request
from ..scheduling.predicted_wait import ADMITTED, PredictedWait, Verdict
from ..transport import wire
from ..transport.engine_servers.server_info import ServerOptions
from ..transport.namespaces import check_namespace
from ..transport.security import ClientKeys
from ..transport.tasks import end_all, within
from ..transport.worker_address import check_worker_address, why_silent
from ..types import INTERACTIVE, Claim, FinishReason, PairDecision, Priority, SamplingParams, SessionHint, check_fields
from . import pairs
from .arguments import NO_TOKENS, PromptTokenizer, Tokenizer, scheduler_of
from .asked import check_session, terms_of
from .counters import RouterCounters as RouterCounters
from .fleet import Fleet, FleetConfig, FleetWorker
from .placement import Placement
from .request import Attempt, PlacedRequest, RoutedRequest, Setback, StreamChunk, TokenIds
from .traffic_recorder import Record, recorder_for
from .turns import Turns
from .warm_ups import WarmUps

if TYPE_CHECKING:
    from .._cost import CostModel
    from .._placement.decision import Decision
    from ..config import SchedulerConfig
    from ..policies.base import Policy
    from ..scheduler import GlobalScheduler
    from .arguments import Prompt
    from .sibling_routers import SiblingRouters
    from .stats import RouterStats

__all__ = ["Router", "RouterConfig", "StreamChunk"]

logger = logging.getLogger("preble.router")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Times in seconds, and bounds. Raises `InvalidConfig` naming the field. `fleet`: how workers are found and lost.

    `max_live_requests` bounds `generate` calls at a time (then `QueueFull`), `max_attempts` the workers that may fail
    under one request (then `WorkerLost`). A request that has lost its worker waits up to `resume_seconds` for another
    one. A new request that would wait longer than `refuse_wait_seconds` for its first token at every worker, by what
    waits there and how fast that goes (`predicted_wait`), is refused at once with `Overloaded`; None: none is. In a
    burst, until no worker has had room for 15 s, four times as long may be waited. `flow`: how requests that name a
    tenant, a deadline or a class wait before the workers (`flow_control`). Where all workers are full a request tries
    again after `retry_full_seconds`. `start` waits up to `connect_seconds` for workers. The scheduler ticks every
    `tick_seconds`.
    """

    fleet: FleetConfig = field(default_factory=FleetConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    max_live_requests: int = 65_536
    refuse_wait_seconds: float | None = 3.0
    max_attempts: int = 4
    resume_seconds: float = 30.0
    retry_full_seconds: float = 0.1
    connect_seconds: float = 30.0
    tick_seconds: float = 0.5

    def __post_init__(self) -> None:
        unset = {"fleet", "flow"} | ({"refuse_wait_seconds"} if self.refuse_wait_seconds is None else set())
        check_fields(self, "be positive", *(name for name in self.__slots__ if name not in unset))


class Router:
    """See the module. `workers` are endpoints of `preble worker`, or servers that already run: "http://host:30000", or
    (that, `ServerOptions`). More may be added while running.

    `scheduler` None makes a `GlobalScheduler` of `policy`, `cost_model` and `scheduler_config`; one given has its own,
    and may be shared with other code of this process. `tokenizer`, needed for prompts that are text, is a callable or
    has `encode`, giving token ids (or an object with `ids`); it is called in a thread, one text at a time. `config`: a
    RouterConfig. `keys`: CURVE keys of workers that ask for them. `clock`: any callable returning seconds. `model` and
    `tokenizer_fingerprint`, when given, must be those of every worker; else the first worker decides. `record`: a file
    to write what comes to, or a `RecordingWriter`, for a replay (docs/what-if.md).
    """

    def __init__(
        self,
        workers: Iterable[str | tuple[str, ServerOptions]],
        *,
        scheduler: GlobalScheduler | None = None,
        policy: str | Policy | type[Policy] = "e2",
        cost_model: CostModel | str | None = None,
        scheduler_config: SchedulerConfig | None = None,
        tokenizer: Tokenizer | None = None,
        config: RouterConfig | None = None,
        keys: ClientKeys | None = None,
        model: str = "",
        tokenizer_fingerprint: str = "",
        record: Record = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.scheduler = scheduler_of(scheduler, policy, cost_model, scheduler_config, clock)
        self.config = config or RouterConfig()
        self.counters = RouterCounters()
        self.router_id = f"router-{secrets.token_hex(8)}"  # no other router has it, also after a restart
        self._addresses = [(one, None) if isinstance(one, str) else one for one in workers]
        for address, _ in self._addresses:
            check_worker_address(address)
        self._prompts = PromptTokenizer(tokenizer, self.config.max_live_requests)
        self._keys = keys
        self._hello = wire.Hello(self.router_id, "", model, tokenizer_fingerprint)
        self._clock = clock
        self._live: dict[Hashable, PlacedRequest] = {}
        self._running: dict[str, PlacedRequest] = {}  # by wire id of the attempt
        self._wire_ids = 0
        self._numbers = itertools.count(1)  # of requests without a name
        self._warm_ups = WarmUps(self.scheduler)
        self._predicted_wait = PredictedWait()
        self._turns = Turns(self.config.flow, self._predicted_wait, self, clock)
        self.on_decision: Callable[[float], object] | None = None  # called with the seconds each one took
        self.siblings: SiblingRouters | None = None  # those that learn of requests at servers
        self._available = asyncio.Event()
        self._fleet: Fleet | None = None
        self._recorder = recorder_for(record, self, clock)
        self._tick_task: asyncio.Task[None] | None = None

    @classmethod
    def attach(cls, *urls: str, options: ServerOptions | None = None, **router_options: Any) -> Router:
        """Returns a router before SGLang or vLLM servers that already run, at `urls`:
        `Router.attach("http://host:30000", ...)`. Raises `InvalidInput` for what is no address. O(urls).

        `options` are those of every URL (API key, and what a server does not say); where they differ, give pairs to
        the constructor. `router_options` are the constructor's. Needs the extra `attach`.
        """
        return cls([(url, options or ServerOptions()) for url in urls], **router_options)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self, *, min_workers: int = 1) -> None:
        """Connect. Comes back when every address has been tried and at least `min_workers` are ready. O(workers).

        Raises `HandshakeRefused` if a worker does not fit, `NoWorkers` if too few are ready after `connect_seconds`;
        then the router is closed.
        """
        if self._fleet is not None:
            raise InvalidInput("Router.start was called before")
        if not self._addresses and min_workers > 0:
            raise NoWorkers(f"no worker was named, and {min_workers} must be ready at the start")
        self._fleet = Fleet(
            self.scheduler, self, self.config.fleet, expect=self._hello, keys=self._keys, clock=self._clock
        )
        self._tick_task = asyncio.ensure_future(self._tick_loop())
        try:
            for address, options in self._addresses:
                self._fleet.add(address, options)
            await self._wait_for_workers(min_workers)
        except BaseException:
            await self.close()
            raise

    async def _wait_for_workers(self, min_workers: int) -> None:
        """Until all are ready, or those that may come are and the time is over. One at a host that nobody knows is not
        waited for."""
        deadline = self._clock() + self.config.connect_seconds
        while True:
            workers = list(self.fleet.workers.values())  # a server's other ranks are found when it answers
            refused = [worker.why for worker in workers if worker.state == "refused"]
            if refused:
                raise HandshakeRefused("; ".join(refused))
            ready = sum(worker.state == "ready" for worker in workers)
            hopeful = sum(not worker.is_unknown_host for worker in workers)
            if ready == len(workers) and ready >= min_workers:
                return
            left = deadline - self._clock()
            if left <= 0 or hopeful < min_workers or ready == hopeful >= min_workers:
                await self._go_on_without_missing(workers, min_workers)
                return
            await asyncio.sleep(min(left, self.config.fleet.reconnect_min_seconds))

    async def _go_on_without_missing(self, workers: list[FleetWorker], min_workers: int) -> None:
        """Say who is missing and why. Raises `NoWorkers` where too few are ready."""
        missing = [worker for worker in workers if worker.state != "ready"]
        found = await asyncio.gather(*(why_silent(worker.address) for worker in missing))
        reasons = [why or worker.why or worker.state for worker, why in zip(missing, found, strict=True)]
        text = "; ".join(f"{worker.address}: {why}" for worker, why in zip(missing, reasons, strict=True))
        ready = len(workers) - len(missing)
        if ready < min_workers:
            raise NoWorkers(f"{ready} of {len(workers)} workers are ready, {min_workers} are needed ({text})")
        logger.warning("going on without %s", text)

    async def close(self) -> None:
        """Fail what is running, leave all workers, stop the background work. Idempotent; the scheduler stays usable.
        Raises nothing. O(live requests + workers)."""
        for live in list(self._live.values()):  # or those that wait would be placed as others end
            self._turns.give_up(live, TransportError("the router was closed"))
        for live in list(self._live.values()):
            self._end_attempt(live, abort=True)
            live.fail(TransportError("the router was closed"))
        fleet, self._fleet = self._fleet, None  # nothing is placed any more
        self._available.set()
        self._prompts.close()
        if self._tick_task is not None:
            await end_all(self._tick_task)
            self._tick_task = None
        if fleet is not None:
            await fleet.close()
        await asyncio.to_thread(self._recorder.close)

    async def __aenter__(self) -> Router:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def fleet(self) -> Fleet:
        """The workers. Raises `TransportError` before `start` and after `close`."""
        if self._fleet is None:
            raise TransportError("the router is not started, or closed")
        return self._fleet

    async def add_worker(self, address: str, options: ServerOptions | None = None) -> None:
        """Connect one more worker or server at `address`, with `options` if it is a server; comes back when its first
        handshake has been tried. Raises `HandshakeRefused`, and `InvalidInput` for what is no address. O(workers)."""
        worker = self.fleet.add(address, options)
        await worker.settled.wait()
        if worker.state == "refused":
            why = worker.why
            await self.fleet.remove(address)
            raise HandshakeRefused(why)

    async def remove_worker(self, address: str) -> None:
        """Leave the worker at `address`; its requests go elsewhere. Raises `UnknownWorker`. O(its requests)."""
        await self.fleet.remove(address)

    def change_policy(self, policy: str | Policy | type[Policy]) -> None:
        """Decide by another `policy` from now on; what is booked and the estimates of caches stay.

        `scheduler` becomes another one, without records and shadow; the old one is left as it is. O(everything).
        Raises as `GlobalScheduler.snapshot` and `restore` do; then nothing has changed.
        """
        from ..scheduler import GlobalScheduler

        scheduler = GlobalScheduler.restore(self.scheduler.snapshot(), policy=policy, clock=self._clock)
        self.fleet.scheduler = self._warm_ups.scheduler = self.scheduler = scheduler

    def change_flow(self, flow: FlowConfig) -> None:
        """Let requests wait before the workers by another configuration, `flow`, from now on. Raises nothing. O(1)."""
        self.config = replace(self.config, flow=flow)
        self._turns.control.config = flow

    async def _tick_loop(self) -> None:
        while True:
            await asyncio.sleep(self.config.tick_seconds)
            try:
                await asyncio.to_thread(self.scheduler.tick)
                self.counters.ticks += 1
                self._warm_ups.send(self.fleet)
                self._predicted_wait.forget(self.scheduler.workers.keys())
                self._turns.pump()
            except Exception:
                self.counters.ticks_failed += 1
                logger.exception("the scheduler's tick failed")

    # --- requests -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        namespace: Hashable = None,
        request_id: Hashable = None,
        client: Hashable = None,
        first_token_seconds: float | None = None,
        session: SessionHint | None = None,
        tenant: str | None = None,
        deadline_seconds: float | None = None,
        priority: Priority | None = None,
        group: Hashable = None,
    ) -> AsyncGenerator[StreamChunk, None]:
        """Returns an iterator over the output tokens for a `prompt`: text (with a tokenizer, called in a thread) or
        token ids, as `GlobalScheduler.schedule` takes them. O(tokens + workers), and O(1) for each chunk.

        `sampling`: how output tokens are chosen, and how many at most. `namespace`: prefixes are shared within one.
        `request_id`: any hashable, made up when None. `client`: whose request it is; where requests are refused,
        clients that wait for less than an equal part are refused last. `first_token_seconds`: without a token by then
        the request is of no use; it is refused if it would wait longer, and given up, also at its worker, when it has.
        `session`: what the client says it belongs to; it is in the decision's record, and E2 places a
        session's next turn by it.

        With any of the next three it may wait in front of the workers (`flow_control`): `tenant`, whose share of the
        workers it is served from (`FlowConfig.weights`); `deadline_seconds`, as `first_token_seconds`, and the least
        slack goes first; `priority` "batch": it fills what "interactive" ones leave.
        `group`: what samples of one prompt that are waited for together have in common (`GlobalScheduler.schedule`).

        Raises at once `InvalidInput`, `InvalidTokens` or `DuplicateRequest`; while iterated what the tokenizer raises,
        `QueueFull` (this router, or every worker, is at its bound), `Overloaded` (it would wait, or has waited, too
        long), `NoWorkers`, `WorkerLost` (it could not be resumed) or `EngineError`. Closing the iterator or cancelling
        its task aborts the request.
        """
        read = self._prompts.read(prompt)
        token_ids, text = (NO_TOKENS, read) if isinstance(read, str) else (read, None)
        check_namespace(namespace)
        check_session(session)
        hashable("group", group)
        named = client, first_token_seconds, tenant, deadline_seconds, priority
        client, limit, claim = terms_of(self.config.flow, *named)
        asked = (self._new_id(request_id), token_ids, sampling or SamplingParams(), namespace)
        return self._generate(
            RoutedRequest(*asked, client=client, first_token_seconds=limit, session=session, claim=claim, group=group),
            text,
        )

    async def _generate(self, live: RoutedRequest, text: str | None) -> AsyncGenerator[StreamChunk, None]:
        self._admit(live)
        finished = False
        limit = live.first_token_seconds
        timer = None if limit == math.inf else asyncio.get_running_loop().call_later(limit, self._shed, live)
        try:
            if text is not None:
                live.prompt = await self._prompts.tokens(text)
            while live.finish_reason is None:
                await self._place(live)
                while (chunk := await live.next_chunk()) is not None:
                    finished = chunk.finish_reason is not None
                    yield chunk
            if not finished:
                yield live.read_chunk()
        except PrebleError as error:
            self.counters.failed += 1
            live.fail(error)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._dismiss(live)

    async def place(
        self,
        prompt: Prompt,
        *,
        namespace: Hashable = None,
        request_id: Hashable = None,
        client: Hashable = None,
        first_token_seconds: float | None = None,
        session: SessionHint | None = None,
        tenant: str | None = None,
        deadline_seconds: float | None = None,
        priority: Priority | None = None,
        group: Hashable = None,
        max_new_tokens: int | None = None,
        streamed: bool = True,
        separable: bool = False,
        in_turn: bool = False,
        exclude: Collection[str] = (),
    ) -> Placement:
        """Find a server for a request that the caller sends itself, over HTTP; see `placement`. It is booked until the
        placement ends, and moves with `Placement.failed`.

        `prompt`: as for `generate`. `max_new_tokens`: bound of the output. `exclude`: ids of workers that it must not
        go to. `streamed`: its first token will be seen when it comes, else it counts for nothing in what requests would
        wait. `separable`: it may have places at two servers (`Placement.prefill`). `in_turn`: `Placement.turn` is
        waited for before it is sent. Returns the Placement. Raises as `generate`; then nothing is booked. O(tokens).
        """
        check_session(session)
        hashable("group", group)
        token_ids = await self._prompts.tokens(prompt)
        named = client, first_token_seconds, tenant, deadline_seconds, priority
        client, limit, claim = terms_of(self.config.flow, *named)
        placement = Placement(
            self, self._new_id(request_id), token_ids, namespace, client=client, first_token_seconds=limit,
            session=session, max_new_tokens=max_new_tokens, exclude=frozenset(exclude), claim=claim, group=group,
        )  # fmt: skip
        placement.is_streamed, placement.is_separable, placement.in_turn = streamed, separable, in_turn
        self._admit(placement)
        if limit != math.inf:
            placement.timer = asyncio.get_running_loop().call_later(limit, self._shed, placement)
        await placement.start()
        return placement

    # --- asked by placements ------------------------------------------------------------------------------------------

    async def move(self, placement: Placement) -> None:
        """Start a placement's next attempt. Raises as `place`; then the placement has ended."""
        try:
            await self._place(placement)
        except PrebleError as error:
            self.counters.failed += 1
            placement.fail(error)
            self._dismiss(placement)
            raise
        except BaseException:
            self._dismiss(placement)
            raise

    def first_token_of(self, placement: Placement) -> None:
        """A placement's output has begun."""
        if placement.attempt is not None:
            self._note_first_token(placement, placement.attempt)

    def set_back(self, placement: Placement, text: str, *, full: bool = False) -> None:
        """A placement's attempt has failed."""
        if placement.attempt is not None:
            self._set_back(placement, text, abort=False, full=full)

    def end(self, placement: Placement, reason: str | None) -> None:
        """A placement is over: with a reason it has finished, else it was given up."""
        if reason is not None:
            self.counters.output_tokens += placement.output_tokens
            self._end_attempt(placement, abort=False, finished=True)
            self._finish(placement, cast(FinishReason, reason))
        self._dismiss(placement)

    def fail(self, placement: Placement) -> None:
        """A placement has ended with its error."""
        self.counters.failed += 1
        self._dismiss(placement)

    def wrong_report(self) -> None:
        """A server said something impossible of what was cached."""
        self.counters.wrong_reports += 1

    # --- the rest of a request's life ---------------------------------------------------------------------------------

    def _shed(self, live: PlacedRequest) -> None:
        """The time in which the first token was of use is over: give the request up, unless it has come."""
        if live.output_tokens or live.finish_reason is not None or live.error is not None:
            return
        self.counters.shed += 1
        self._end_attempt(live, abort=True)
        error = Overloaded(
            f"no token after {live.first_token_seconds:.3g} s, the time in which it was of use",
            retry_after_seconds=live.first_token_seconds,
        )
        live.fail(error)
        self._available.set()  # it may wait for that
        if live.claim is not None:
            self._turns.give_up(live, error)

    @contextlib.asynccontextmanager
    async def route(
        self, prompt: Prompt, *, namespace: Hashable = None, max_new_tokens: int | None = None
    ) -> AsyncIterator[Decision]:
        """Decide and book only, for applications that send the request themselves: `async with router.route(prompt)`
        gives the Decision. `prompt`, `namespace`, `max_new_tokens`: as for `place`. O(tokens + workers).

        The booking is finished when the block ends, cancelled when it raises. Inside, `scheduler.first_token` and
        `scheduler.finish` may be given more with `decision.request_id`. Raises as `schedule` does.
        """
        token_ids = await self._prompts.tokens(prompt)
        decision = self._schedule(token_ids, self._new_id(None), namespace, max_new_tokens, self.fleet.unusable)
        try:
            yield decision
        except BaseException:
            self.scheduler.cancel(decision.request_id)
            raise
        # Where the block has finished it, and reported more than we could, this does nothing.
        self.scheduler.finish(decision.request_id)

    def _new_id(self, request_id: Hashable) -> Hashable:
        if request_id is None:
            return f"{self.router_id}/{next(self._numbers)}"
        request_id = named_request(request_id)
        if request_id in self._live:
            raise DuplicateRequest(f"request_id {request_id!r} is live")
        return request_id

    def _admit(self, live: PlacedRequest) -> None:
        if len(self._live) >= self.config.max_live_requests:
            self.counters.queue_full += 1
            raise QueueFull(f"{len(self._live)} requests are live, the bound of this router")
        if live.request_id in self._live:
            raise DuplicateRequest(f"request_id {live.request_id!r} is live")
        self._live[live.request_id] = live
        self.counters.requests += 1
        self._recorder.admitted(live)

    def _dismiss(self, live: PlacedRequest) -> None:
        """The consumer is done with the request, however it ended."""
        if live.finish_reason is None and live.error is None:
            self.counters.cancelled += 1
        self._end_attempt(live, abort=True)
        del self._live[live.request_id]
        self._recorder.dismissed(live)

    # --- attempts -----------------------------------------------------------------------------------------------------

    async def _place(self, live: PlacedRequest) -> None:
        """Start the next attempt, as soon as a worker can be had.

        A request that has not run yet does not wait: nobody has waited for its output so far, and another router may
        do.
        """
        if live.error is not None:  # the router was closed, or the time is over
            raise live.error
        setback, live.setback = live.setback, None
        if live.failures >= self.config.max_attempts and setback is not None:
            raise WorkerLost(f"gave up after {live.failures} attempts, the last: {setback.text}")
        is_new = not live.failures and not live.full_workers and setback is None
        if live.claim is not None and is_new and await self._take_turn(live, live.claim):
            return
        if live.failures and live.resume_by is None:
            live.resume_by = self._clock() + self.config.resume_seconds
        deadline = self._clock() if live.resume_by is None else live.resume_by
        while not self._try_place(live):
            left = deadline - self._clock()
            if left <= 0.0:
                raise self._no_room(live, setback)
            await self._wait_for_change(live, left)
        if live.failures and setback is not None and not setback.full:
            self.counters.resumed += 1

    async def _take_turn(self, live: PlacedRequest, claim: Claim) -> bool:
        """Wait for a new request's turn; False if it is to be placed without one. Raises as `_verdict`, and `QueueFull`
        where too many wait."""
        if claim.priority == INTERACTIVE:
            self._verdict(live, {*self.fleet.unusable, *live.exclude})
        patience = self._predicted_wait.patience_seconds(self.config.refuse_wait_seconds or math.inf, self._clock())
        try:
            return await self._turns.take(live, claim, min(patience, live.first_token_seconds))
        except CapacityExceeded as error:
            if live.error is None:
                self.counters.queue_full += isinstance(error, QueueFull)
                self.counters.refused += isinstance(error, Overloaded)
            raise

    def _try_place(self, live: PlacedRequest) -> bool:
        """Schedule and send. False if no worker can take the request now; then nothing is booked."""
        if live.error is not None:
            raise live.error
        unusable = {*self.fleet.unusable, *live.full_workers, *live.exclude}
        if live.needs:
            unusable |= self._unable(live)
        verdict = self._verdict(live, unusable)
        if verdict.avoid:
            unusable |= verdict.over
        while True:
            exclude = unusable | live.failed_workers if live.failed_workers else unusable
            try:
                decision = self._schedule(
                    live.tokens_so_far(), live.request_id, live.namespace, live.tokens_left, exclude, live
                )
            except NoWorkers:
                if not live.failed_workers:
                    return False
                live.failed_workers.clear()  # better a worker that failed it once than none
                continue
            if (waits := pairs.prefilled_on(decision)) in verdict.over:
                self.scheduler.cancel(live.request_id)
                raise self._overloaded(self._predicted_wait.wait_seconds(waits, self._clock()))
            if self._send_as(live, decision):
                return True
            unusable.add(pairs.sent_first(live, decision))

    # --- asked by turns -----------------------------------------------------------------------------------------------

    def usable_workers(self) -> list[str]:
        """The workers that take requests, and compute prompts."""
        return pairs.prefilling(self.fleet, self.fleet.unusable)

    def try_worker(self, live: PlacedRequest, closed: frozenset[str], anywhere: bool) -> tuple[str, bool] | None:
        """Place a request whose turn it is; see `TurnOwner`."""
        exclude = {*self.fleet.unusable, *live.exclude}
        if live.needs:
            exclude |= self._unable(live)
        asked = live.tokens_so_far(), live.request_id, live.namespace, live.tokens_left
        try:
            decision = self._schedule(*asked, exclude | closed if anywhere else exclude, live)
        except NoWorkers:
            return None
        waits = pairs.prefilled_on(decision)
        if waits in closed:
            self.scheduler.cancel(live.request_id)
            return waits, False
        return (waits, True) if self._send_as(live, decision) else None

    def _send_as(self, live: PlacedRequest, decision: Any) -> bool:
        """Send a request to the worker that was chosen, of a pair the one that prefills; False, and nothing is booked,
        where that takes no more."""
        if not self._send(live, pairs.first_attempt(f"{self._wire_ids + 1}", live, decision)):
            self.scheduler.cancel(live.request_id)
            return False
        live.decision = live.decision or decision
        if live.session:
            self.scheduler.note_session(live.request_id, live.session)
        return True

    def _unable(self, live: PlacedRequest) -> frozenset[str]:
        """The workers whose engines lack something that a request asks for. Raises where all do."""
        resumed = live.output_tokens > 0
        missing = self.fleet.missing(live.needs, resumed=resumed)
        if missing is None:
            return self.fleet.unable(live.needs, resumed=resumed)
        if resumed:
            raise WorkerLost(f"no worker can go on with a request that has {missing}")
        raise InvalidInput(f"{missing}: no connected worker's engine has it")

    def _verdict(self, live: PlacedRequest, unusable: Collection[str]) -> Verdict:
        """Where a request may wait. Raises `Overloaded` for one that would wait too long everywhere; one that has run
        is never refused."""
        bound, own = self.config.refuse_wait_seconds or math.inf, live.first_token_seconds
        if min(bound, own) == math.inf or live.failures or self._predicted_wait.is_calm:
            return ADMITTED
        workers = pairs.prefilling(self.fleet, unusable)
        verdict = self._predicted_wait.verdict(workers, live.client, bound, self._clock(), own)
        if verdict.refuse_seconds is not None:
            raise self._overloaded(verdict.refuse_seconds)
        return verdict

    def _overloaded(self, wait_seconds: float) -> Overloaded:
        self.counters.refused += 1
        text = f"the first token would take {wait_seconds:.1f} s, longer than requests may wait here"
        return Overloaded(text, retry_after_seconds=wait_seconds)

    def _schedule(
        self,
        token_ids: TokenIds,
        request_id: Hashable,
        namespace: Hashable,
        max_new_tokens: int | None,
        exclude: Collection[str],
        live: PlacedRequest | None = None,
    ) -> Any:
        began = self._clock()
        asked: dict[str, Any] = {"request_id": request_id, "namespace": namespace, "max_new_tokens": max_new_tokens}
        if live is not None:
            asked |= {"session": live.session or None, "group": live.group}
        schedule = pairs.schedule_for(self.scheduler, self.fleet, live)
        try:
            # The scheduler's own "nobody" takes its shortest way.
            return schedule(token_ids, exclude=exclude or (), **asked)
        except UnknownWorker:
            # The application has removed a worker from the scheduler behind our back, which is its right.
            known = [worker_id for worker_id in exclude if worker_id in self.scheduler.workers]
            return schedule(token_ids, exclude=known, **asked)
        finally:
            if self.on_decision is not None:
                self.on_decision(self._clock() - began)

    def _send(self, live: PlacedRequest, attempt: Attempt) -> bool:
        """Hand the request to a worker. False if it cannot be reached or takes no more."""
        self._wire_ids += 1
        worker_id = attempt.worker_id
        try:
            live.hand_over(attempt, self.fleet)
        except QueueFull:
            live.full_workers.add(worker_id)
            return False
        except (TransportError, UnknownWorker):
            return False
        except InvalidInput:
            self.scheduler.cancel(live.request_id)
            raise
        live.attempt = attempt
        self._running[attempt.wire_id] = live
        self._recorder.sent(live, worker_id)
        waits = pairs.waits_at(live, attempt)
        if waits is not None:
            booked = self.scheduler.booked_seconds(waits[1])
            live.expected(attempt, self.fleet, booked, self._clock())
            if live.is_streamed:  # of others nobody knows how long they wait
                self._predicted_wait.placed(attempt.wire_id, waits[0], live.client, booked, self._clock())
        if self.siblings is not None:
            pairs.share_placed(self.siblings.own, live, attempt)
        return True

    def _note_first_token(self, live: PlacedRequest, attempt: Attempt) -> None:
        """The running attempt's prefill is done, if that is news."""
        if attempt.first_seen:
            return
        attempt.first_seen = True
        self._recorder.first_token(live)
        self._predicted_wait.started(attempt.wire_id, self._clock())
        self.fleet.began(attempt.worker_id, attempt.wire_id)
        pairs.report_first_token(self.scheduler, live, attempt)
        self._turns.pump()
        if self.siblings is not None:
            pairs.share_first_token(self.siblings.own, attempt)

    def _no_room(self, live: PlacedRequest, setback: Setback | None) -> PrebleError:
        if live.full_workers:
            self.counters.queue_full += 1
            return QueueFull(f"at their bound: workers {', '.join(sorted(live.full_workers))}")
        if live.failures and setback is not None:
            return WorkerLost(f"no worker to go on with after: {setback.text}")
        return NoWorkers("no connected worker may take a request")

    async def _wait_for_change(self, live: PlacedRequest, timeout_seconds: float) -> None:
        """Until a worker becomes available, or one that was full may have room again."""
        self._available.clear()
        if live.full_workers:
            timeout_seconds = min(timeout_seconds, self.config.retry_full_seconds)
            live.full_workers.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await within(timeout_seconds, self._available.wait())

    def _end_attempt(
        self, live: PlacedRequest, *, abort: bool, finished: bool = False, handed_over: bool = False
    ) -> None:
        """Settle the booking of the running attempt, if any, unless it is `handed_over`; with `abort`, send the worker
        one, if it is reachable."""
        attempt, live.attempt = live.attempt, None
        if attempt is None:
            return
        del self._running[attempt.wire_id]
        self._recorder.left(live, attempt)
        self._predicted_wait.left(attempt.wire_id, self._clock())
        output_tokens = live.output_tokens - attempt.offset if finished else None
        cached_tokens = attempt.cached_tokens if attempt.pair is None else None
        if output_tokens is not None:
            self.scheduler.finish(live.request_id, output_tokens=output_tokens, cached_tokens=cached_tokens)
        elif not handed_over:
            self.scheduler.cancel(live.request_id)
        if live.claim is not None and not handed_over:
            self._turns.ended(live, attempt.cached_tokens, output_tokens)
        self._turns.pump()
        if self.siblings is not None:
            pairs.share_ended(self.siblings.own, attempt, output_tokens)
        try:
            live.take_back(attempt, self.fleet, abort=abort)
        except (TransportError, UnknownWorker, QueueFull):
            self.counters.aborts_unsent += 1

    def _set_back(self, live: PlacedRequest, text: str, *, abort: bool, full: bool = False) -> None:
        """The attempt is over; the request goes on elsewhere, unless all its tokens have come."""
        attempt = live.attempt
        assert attempt is not None, "a setback belongs to a running attempt"
        reason = live.reason_if_complete(self.fleet.eos_token_ids)
        self._end_attempt(live, abort=abort, finished=reason is not None)
        if reason is not None:
            self.counters.completed_by_router += 1
            self._finish(live, reason)
            return
        if full:
            live.full_workers.add(attempt.worker_id)
        else:
            live.failures += 1
            live.failed_workers.add(attempt.worker_id)
            live.full_workers.clear()
            live.resume_by = None
        live.set_back(Setback(text, full))

    def _finish(self, live: PlacedRequest, reason: FinishReason) -> None:
        self.counters.finished += 1
        live.conclude(reason)

    # --- reported by the fleet ----------------------------------------------------------------------------------------

    def on_message(self, worker: FleetWorker, message: wire.OutputChunk | wire.Rejected) -> None:
        """A chunk or a refusal of one request; of an earlier attempt, it is counted and dropped."""
        if self._warm_ups.take(message, worker.worker_id):
            return
        live = self._running.get(message.request_id)
        attempt = live.attempt if live is not None else None
        if not isinstance(live, RoutedRequest) or attempt is None or attempt.worker_id != worker.worker_id:
            self.counters.late_chunks += 1
        elif isinstance(message, wire.Rejected):
            self._take_refusal(live, message)
        else:
            self._take_chunk(live, attempt, message)

    def on_unavailable(self, worker: FleetWorker, why: str) -> None:
        """Move every request that runs there."""
        self._warm_ups.lose(worker.worker_id)
        there = [live for live in self._running.values() if live.attempt and live.attempt.worker_id == worker.worker_id]
        for live in there:
            # A worker that is not lost may wake up; then it need not go on with what runs elsewhere.
            self._set_back(live, f"worker {worker.worker_id}: {why}", abort=worker.state != "lost")
        self._turns.pump()

    def on_available(self, worker: FleetWorker) -> None:
        """Let requests that wait for a worker try again; what siblings have there may be new here."""
        self._available.set()
        self._turns.pump()
        if self.siblings is not None:
            self.siblings.worker_available()

    def _take_refusal(self, live: RoutedRequest, refusal: wire.Rejected) -> None:
        if refusal.code in ("queue_full", "draining"):
            self._set_back(live, refusal.text, abort=False, full=True)
        elif refusal.code in ("invalid", "engine"):
            self._end_attempt(live, abort=False)
            live.fail(InvalidInput(refusal.text) if refusal.code == "invalid" else EngineError(refusal.text))
        else:
            self._set_back(live, refusal.text, abort=False)

    def _take_chunk(self, live: RoutedRequest, attempt: Attempt, chunk: wire.OutputChunk) -> None:
        try:
            accepted = live.accept(chunk, attempt.worker_id)
        except ProtocolError as error:
            self.counters.token_gaps += 1
            logger.warning("token gap: %s", error)
            self._set_back(live, str(error), abort=True)
            return
        self.counters.output_tokens += accepted.new
        self.counters.duplicate_tokens += accepted.duplicates
        self.counters.excess_tokens += accepted.excess
        self._take_cached(live, attempt, chunk)
        if chunk.token_ids or chunk.finish_reason in ("stop", "length"):  # else its prefill came to nothing
            self._note_first_token(live, attempt)
        if chunk.finish_reason in ("error", "invalid"):
            self._end_attempt(live, abort=False)
            kind = EngineError if chunk.finish_reason == "error" else InvalidInput
            live.fail(kind(chunk.error or "the engine gave no reason"))
        elif attempt.pair is not None and pairs.hands_over(live, attempt, chunk):
            self._hand_over(live, attempt.pair)
        elif chunk.finish_reason is not None or accepted.excess:
            self._end_attempt(live, abort=chunk.finish_reason is None, finished=chunk.finish_reason != "abort")
            self._finish(live, cast(FinishReason, chunk.finish_reason or "length"))

    def _hand_over(self, live: RoutedRequest, pair: PairDecision) -> None:
        """The prompt is prefilled: the other worker of the pair goes on or, if that takes no more, any."""
        self._end_attempt(live, abort=False, handed_over=True)
        attempt = pairs.next_attempt(f"{self._wire_ids + 1}", pair, live.output_tokens)
        if pair.worker not in self.fleet.unusable and self._send(live, attempt):
            self.counters.handed_over += 1
            return
        self.scheduler.cancel(live.request_id)
        if live.claim is not None:
            self._turns.ended(live, None, None)
        live.failures += 1
        live.set_back(Setback(f"worker {pair.worker} does not take what {pair.prefill_worker} has prefilled for it"))

    def _take_cached(self, live: RoutedRequest, attempt: Attempt, chunk: wire.OutputChunk) -> None:
        """What of the prompt was really cached comes with the first chunk or, from vLLM's server, with the last."""
        if chunk.cached_tokens is None or attempt.cached_tokens is not None or attempt.handed_over:
            return
        if chunk.cached_tokens > len(live.prompt) + attempt.offset:
            self.counters.wrong_reports += 1
            return
        attempt.cached_tokens = chunk.cached_tokens
        if attempt.offset == 0 and live.cached_tokens is None:
            live.cached_tokens = attempt.cached_tokens

    # --- questions ----------------------------------------------------------------------------------------------------

    def stats(self) -> RouterStats:
        """Returns counters of this router, of its siblings' reports and of each worker address, and the requests alive
        now. Changes nothing. Raises nothing. O(workers)."""
        workers = {} if self._fleet is None else self._fleet.stats()
        own = {**asdict(self.counters), **asdict(self._warm_ups.counters), "live_requests": len(self._live)}
        own |= {"held_requests": len(self._turns.control), "workers": workers}
        return cast("RouterStats", {**own, "siblings": {} if self.siblings is None else self.siblings.stats()})

    def check(self) -> None:
        """Assert that requests, attempts and the fleet agree. Raises AssertionError. O(live requests + workers)."""
        for wire_id, live in self._running.items():
            assert live.attempt is not None and live.attempt.wire_id == wire_id, "a running request has its attempt"
            assert self._live.get(live.request_id) is live, "a running request is live"
            assert live.finish_reason is None and live.error is None, "a running request has not ended"
        self._predicted_wait.check()
        self._turns.control.check()
        if self._fleet is not None:
            self._fleet.check()
