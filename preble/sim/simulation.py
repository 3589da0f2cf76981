"""The simulation: a workload through the real global scheduler to simulated workers. Owns every request's life.

What happens to a request
  1. It arrives: at its time, or in a closed loop when the one before it has finished. The scheduler of a router places
     it; there may be several (`routers.py`).
  2. `network_seconds` later its worker queues it; the worker's engine runs iteration after iteration (`worker.py`).
  3. Its first token and its end are reported to the scheduler `event_delay_seconds` after they happened, as are the
     evictions, of which some batches may be lost.
  4. If its worker dies, it is placed again once that is noticed: prompt and emitted tokens go to another worker, as
     `Router` does it, and only the tokens still missing are generated.
A request that an engine refuses (too long for it, queue full), or the scheduler (its bounds), is counted, and so are
those that wait for it and are never sent. An answer that would outgrow the engine's KV capacity ends there, counted as
truncated. Each request ends once: `Result.outcome`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..clock import ManualClock
from ..errors import CapacityExceeded, InvalidInput, PrebleError
from ..local import StepOutput
from ..scheduler import GlobalScheduler
from ..scheduling.admission import AdmissionQueue
from ..types import BATCH, INTERACTIVE, CacheEvent, Claim, PairDecision, Priority, WorkerSpec
from ..workloads.types import Int32Array, PromptRequest, Workload
from .config import Fault, SimConfig, WorkerDrain, WorkerJoin, WorkerSlowdown
from .flight import Flight
from .kv_links import SimLinks
from .pairs import SimPairs
from .results import CUT_OFF, FINISHED, REFUSED, UNFINISHED, Result
from .routers import News, SimRouters
from .timeline import Timeline
from .worker import SimWorker

if TYPE_CHECKING:
    from .._placement.decision import Decision

TICK_SECONDS = 1.0
COUNTERS = ("resumed", "truncated", "faults", "event_batches", "lost_event_batches", "late_event_batches")
Progress = Callable[[int, int, float], None]


def simulate(workload: Workload, config: SimConfig | None = None, *, progress: Progress | None = None) -> Result:
    """Run a workload to its end, or to `config.until_seconds`. The same arguments give the same result, everywhere.

    `progress(ended, requests, virtual_seconds)` is called about once a virtual second and at the end. Raises
    `InvalidInput` for a workload that is empty, names a request twice, waits for one it does not have or for itself, or
    has an `output_ids` of the wrong length; `NoWorkers` where a request comes and every worker drains; and what the
    scheduler raises.
    """
    return Simulation(workload, config or SimConfig(), progress).run()


class Simulation:
    """One run; see the module. `simulate` is its face; `scheduler` and `workers` are there to be looked at."""

    def __init__(self, workload: Workload, config: SimConfig, progress: Progress | None) -> None:
        self._config = config
        self._requests = workload.requests
        self._rows = _rows_of(self._requests)
        self._after = self._successors()
        self._progress = progress
        self._clock = ManualClock()
        self._timeline = Timeline(self._clock)
        self.routers = SimRouters(config, self._clock)
        self._queues: list[AdmissionQueue] = []  # in front of each router's workers, where the configuration has any
        self._rng = np.random.default_rng([config.seed, 1])  # for lost events
        self._workers: dict[str, SimWorker] = {}
        self.workers: list[SimWorker] = []  # all there ever were
        self._links = None if config.kv_link is None else SimLinks(config.kv_link, self._timeline, self._workers)
        self._pairs: SimPairs | None = None  # where workers have roles
        self._flights: dict[str, Flight] = {}
        self._ended = 0
        self._counts = dict.fromkeys(COUNTERS, 0)
        count = len(self._requests)
        self._outcome = np.full(count, UNFINISHED, np.int8)
        self._emitted = np.zeros(count, np.int64)
        self._arrival, self._first, self._second, self._finish = (np.full(count, np.nan) for _ in range(4))
        self._worker, self._placed, self._cached = (np.full(count, -1, np.int64) for _ in range(3))

    @property
    def clock(self) -> ManualClock:
        """Its time; it alone moves it."""
        return self._clock

    @property
    def scheduler(self) -> GlobalScheduler:
        """The first router's; before `run` it may be replaced by another one on the same clock."""
        return self.routers.schedulers[0]

    @scheduler.setter
    def scheduler(self, scheduler: GlobalScheduler) -> None:
        self.routers.schedulers[0] = scheduler

    def run(self) -> Result:
        """Everything, in order."""
        if self._config.has_roles:
            assert self._config.kv_link is not None, "SimConfig saw to that"
            link = self._config.kv_link
            self._pairs = SimPairs(link, self.routers.schedulers, self._timeline, self._workers, self._go_on)
        for spec in self._config.specs():
            self._add_worker(spec)
        if self._config.flow is not None:
            self._queues = [
                AdmissionQueue(
                    scheduler,
                    self._take_turn,
                    self._turn_away,
                    config=self._config.flow,
                    workers_yield=True,
                    pairs=self._pairs is not None,
                )
                for scheduler in self.routers.schedulers
            ]
        for fault in self._config.faults:
            self._timeline.at(fault.at_seconds, self._fault, fault)
        for request in self._requests:
            if request.after is None:
                self._timeline.at(request.arrival_seconds, self._arrive, request)
        self._timeline.at(TICK_SECONDS, self._tick)
        self._timeline.run(self._config.until_seconds)
        for worker in self.workers:
            worker.settle(self._config.until_seconds)
        if self._progress is not None:
            self._progress(self._ended, len(self._requests), self._timeline.now)
        return self._result()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _arrive(self, request: PromptRequest) -> None:
        row = self._rows[request.request_id]
        self._arrival[row] = self._timeline.now
        flight = Flight(request, row, request.token_ids, _answer(request, row), self.routers.pick())
        self._flights[request.request_id] = flight
        if self._queues and _claim_of(request) is not None:
            if request.deadline_seconds is not None:
                self._timeline.at(self._timeline.now + request.deadline_seconds, self._give_up, flight)
            self._offer(flight)
        else:
            self._place(flight)

    def _offer(self, flight: Flight) -> None:
        """Let a request wait for its turn."""
        request = flight.request
        asked = self._asked(flight)
        asked |= {"deadline_seconds": request.deadline_seconds, "priority": request.priority}
        try:
            self._queues[flight.router].offer(flight.tokens_so_far(), tenant=request.tenant, **asked)
        except CapacityExceeded:
            self._refuse(flight)

    def _take_turn(self, request_id: Hashable, decision: Decision | PairDecision) -> None:
        flight = self._flights[str(request_id)]
        if isinstance(decision, PairDecision):
            self._send_pair(flight, decision, flight.tokens_so_far())
        else:
            self._send(flight, decision, flight.tokens_so_far())

    def _turn_away(self, request_id: Hashable, _: PrebleError) -> None:
        self._refuse(self._flights[str(request_id)])

    def _asked(self, flight: Flight) -> dict[str, Any]:
        """What a scheduler is asked with a prompt."""
        request = flight.request
        return {
            "request_id": request.request_id,
            "max_new_tokens": len(flight.planned_ids) - flight.emitted,
            "group": request.group if request.sampled else None,
            "session": request.hint,
        }

    def _place(self, flight: Flight) -> None:
        """Let the scheduler choose a worker and send the request there, with what is emitted of its answer."""
        scheduler, token_ids, asked = (
            self.routers.schedulers[flight.router],
            flight.tokens_so_far(),
            self._asked(flight),
        )
        try:
            if self._pairs is not None:
                self._send_pair(flight, scheduler.schedule_pair(token_ids, **asked), token_ids)
                return
            decision = scheduler.schedule(token_ids, **asked)
        except CapacityExceeded:
            self._refuse(flight)
            return
        self._send(flight, decision, token_ids)

    def _send_pair(self, flight: Flight, decision: PairDecision, token_ids: Int32Array) -> None:
        """As `_send`; to a pair, for one token, to the worker that prefills."""
        flight.handed_over = False
        if decision.prefill_worker is None or self._pairs is None:
            self._send(flight, decision, token_ids)
            return
        worker = self._pairs.begin(flight, decision)
        self._note_sent(flight, worker, decision.matched_tokens)
        one = flight.planned_ids[flight.emitted :][:1]
        self._later(self._config.network_seconds, self._submit, (flight, flight.placement, worker, token_ids, one))

    def _go_on(self, flight: Flight, worker: SimWorker) -> None:
        """Send a request whose first token came from another worker to the one that decodes it."""
        self._note_sent(flight, worker, 0)
        left = flight.planned_ids[flight.emitted :]
        sent = (flight, flight.placement, worker, flight.tokens_so_far(), left)
        self._later(self._config.network_seconds, self._submit, sent)

    def _drop_placement(self, flight: Flight, aborted: SimWorker | None = None) -> None:
        """A request is placed anew, or over: what is under way to a worker is not queued there; of a pair the one that
        prefills it stops. `aborted`: the worker that has stopped already."""
        flight.placement += 1
        prefills = None if self._pairs is None else self._pairs.drop(flight)
        worker = aborted if prefills is None else prefills
        if worker is not None:
            self._report_to_peers(self.routers.report_aborted, (worker.name, flight.router, flight.request.request_id))

    def _note_sent(self, flight: Flight, worker: SimWorker, matched_tokens: int) -> None:
        row = flight.row
        flight.worker = worker
        flight.emitted_before = flight.emitted
        if self._placed[row] < 0:
            self._placed[row] = matched_tokens
        self._worker[row] = worker.number

    def _send(self, flight: Flight, decision: Decision | PairDecision, token_ids: Int32Array) -> None:
        """Send a request to its worker."""
        left = flight.planned_ids[flight.emitted :] if flight.emitted else flight.planned_ids
        worker = self._workers[decision.worker]
        self._note_sent(flight, worker, decision.matched_tokens)
        sent, network_seconds = (flight, flight.placement, worker, token_ids, left), self._config.network_seconds
        if self._links is not None and self._links.holds(
            self.routers.schedulers[flight.router],
            flight.request.request_id,
            token_ids,
            worker,
            lambda: self._later(network_seconds, self._submit, sent),
        ):
            return
        self._later(network_seconds, self._submit, sent)

    def _submit(self, sent: tuple[Flight, int, SimWorker, Int32Array, Int32Array]) -> None:
        flight, placement, worker, token_ids, left = sent
        if flight.placement != placement:
            return
        claim = self._claim_at_worker(flight)
        if not worker.submit(flight.request.request_id, token_ids, left, claim):
            self.routers.schedulers[flight.router].cancel(flight.request.request_id)
            if self._queues:
                self._queues[flight.router].ended(flight.request.request_id)
            self._drop_placement(flight)
            self._refuse(flight)
        elif len(self.routers.schedulers) > 1:
            half = None if self._pairs is None else self._pairs.half_of(flight, worker)
            placed = (worker.name, flight.router, flight.request.request_id, token_ids, len(left), half)
            self._report_to_peers(self.routers.report_placed, placed)

    def _claim_at_worker(self, flight: Flight) -> Claim | None:
        """What its worker is given of a request's claim."""
        claim = None if self._config.flow is None else _claim_of(flight.request)
        if claim is None or self._queues[flight.router].priority(flight.request.request_id) == claim.priority:
            return claim
        return replace(claim, priority=BATCH)

    def _give_up(self, flight: Flight) -> None:
        """A request's deadline is over: without a first token it is given up, also at its worker, as by `Router`."""
        request_id, worker = flight.request.request_id, flight.worker
        if self._flights.get(request_id) is not flight or flight.emitted:
            return
        if worker is not None:
            flight.worker = None
            worker.abort(request_id)
            self._drop_placement(flight, worker)
            self.routers.schedulers[flight.router].cancel(request_id)
        self._queues[flight.router].ended(request_id)
        self._refuse(flight)
        self._queues[flight.router].pump()

    def _refuse(self, flight: Flight) -> None:
        """A request ends without an answer, or with half of one, and with it all that wait for it, unsent."""
        del self._flights[flight.request.request_id]
        self._end(flight.row, REFUSED, flight.emitted)
        hopeless = list(self._after.pop(flight.request.request_id, ()))
        while hopeless:
            request = hopeless.pop()
            row = self._rows[request.request_id]
            self._arrival[row] = self._timeline.now
            self._end(row, CUT_OFF, 0)
            hopeless.extend(self._after.pop(request.request_id, ()))

    def _end(self, row: int, outcome: int, emitted: int) -> None:
        """A request has its outcome, once."""
        assert self._outcome[row] == UNFINISHED, f"request {self._requests[row].request_id!r} ends twice"
        self._outcome[row] = outcome
        self._emitted[row] = emitted
        self._ended += 1

    def _deliver(self, worker: SimWorker, outputs: Sequence[StepOutput], events: Sequence[CacheEvent]) -> None:
        """An iteration has ended: note first and last tokens, and report them to the scheduler."""
        flights = self._flights
        news: list[News] = []
        for output in outputs:
            if output.index and output.finish_reason is None:
                continue  # it is not reported
            request_id = output.request_id
            flight = flights[request_id]
            flight.emitted = flight.emitted_before + output.index + 1
            if self._pairs is not None and self._pairs.prefills(request_id, worker):
                self._end_prefill(self._pairs, flight, output)
                continue
            if output.index == 0:
                news.append((flight.router, request_id, None if flight.handed_over else output.cached_tokens, None))
                if flight.emitted == 1:
                    self._first[flight.row] = self._timeline.now
                    self._cached[flight.row] = output.cached_tokens
                elif flight.handed_over:
                    self._second[flight.row] = self._timeline.now
            if output.finish_reason is not None:
                news.append((flight.router, request_id, None, flight.emitted))
                self._finish_flight(flight)
        if events:
            self._counts["event_batches"] += 1
            if self._config.event_loss and self._rng.random() < self._config.event_loss:
                self._counts["lost_event_batches"] += 1
                events = ()
        if news or events:
            self._later(self._config.event_delay_seconds, self._report, (worker, news, events))

    def _end_prefill(self, pairs: SimPairs, flight: Flight, output: StepOutput) -> None:
        """The worker that prefills has done it, and brings the first token."""
        if flight.emitted == 1:
            self._first[flight.row] = self._timeline.now
            self._cached[flight.row] = output.cached_tokens
        prefilled_on = "" if flight.worker is None else flight.worker.name
        pairs.prefilled(flight, output)
        is_over = flight.emitted >= len(flight.planned_ids)
        news = (flight, flight.worker, prefilled_on, output.cached_tokens, flight.emitted if is_over else None)
        self._later(self._config.event_delay_seconds, self._report_prefill, news)
        if is_over:
            self._finish_flight(flight)

    def _report_prefill(self, news: tuple[Flight, SimWorker | None, str, int, int | None]) -> None:
        """The scheduler learns of it, unless the request was placed anew meanwhile."""
        flight, worker, prefilled_on, cached_tokens, output_tokens = news
        request_id, scheduler = flight.request.request_id, self.routers.schedulers[flight.router]
        seen = (flight.router, request_id, cached_tokens, None), (flight.router, request_id, None, 1)
        self._later(self._config.peer_delay_seconds or 0.0, self.routers.report_others, (prefilled_on, seen))
        if flight.worker is not worker:
            return
        scheduler.prefill_done(request_id, cached_tokens=cached_tokens)
        if output_tokens is not None:
            scheduler.finish(request_id, output_tokens=output_tokens)
        if self._queues:
            self._report_to_queues([(flight.router, request_id, cached_tokens, output_tokens)])

    def _report_to_peers(self, report: Callable[[Any], None], subject: object) -> None:
        """The other routers, if any, learn of what its own router and worker have just done."""
        if len(self.routers.schedulers) > 1:
            peers = self._config.peer_delay_seconds
            self._later(self._config.event_delay_seconds if peers is None else peers, report, subject)

    def _later(self, seconds: float, action: Callable[[Any], None], subject: object) -> None:
        """Do it once the report has arrived; at once where that takes no time."""
        if seconds:
            self._timeline.at(self._timeline.now + seconds, action, subject)
        else:
            action(subject)

    def _finish_flight(self, flight: Flight) -> None:
        now = self._timeline.now
        self._finish[flight.row] = now
        self._end(flight.row, FINISHED, flight.emitted)
        self._counts["truncated"] += flight.emitted < len(flight.planned_ids)
        del self._flights[flight.request.request_id]
        for successor in self._after.pop(flight.request.request_id, ()):
            self._timeline.at(max(successor.arrival_seconds, now + successor.pause_seconds), self._arrive, successor)

    def _report(self, reported: tuple[SimWorker, list[News], Sequence[CacheEvent]]) -> None:
        """The scheduler learns of tokens and evictions; of a worker that is gone meanwhile, of the tokens only."""
        worker, news, events = reported
        true = news if not self._counts["resumed"] else [item for item in news if self._is_true(item, worker)]
        if self._config.peer_delay_seconds is None:
            self.routers.report(worker.name, true)
        else:
            self.routers.report_own(true)
            self._later(self._config.peer_delay_seconds, self.routers.report_others, (worker.name, true))
        if events and self._workers.get(worker.name) is worker:
            for scheduler in self.routers.schedulers:
                scheduler.apply(worker.name, events)
        elif events:
            self._counts["late_event_batches"] += 1
        if self._queues:
            self._report_to_queues(true)

    def _report_to_queues(self, news: Sequence[News]) -> None:
        """First tokens and ends make room."""
        for router, request_id, cached_tokens, output_tokens in news:
            queue = self._queues[router]
            if output_tokens is None:
                queue.started(request_id, cached_tokens)
            else:
                queue.ended(request_id, output_tokens)
        for queue in self._queues:
            queue.pump()

    def _is_true(self, news: News, worker: SimWorker) -> bool:
        """Not so of a first token whose request was placed anew since; as long as none was, that is true of all."""
        flight = self._flights.get(news[1])
        return news[3] is not None or flight is None or flight.worker is worker

    # --- workers ------------------------------------------------------------------------------------------------------

    def _add_worker(self, spec: WorkerSpec) -> None:
        worker = SimWorker(spec, len(self.workers), self._config, self._timeline, self._deliver)
        spec = replace(spec, cached_first=worker.engine.info.cached_first)
        for scheduler in self.routers.schedulers:
            scheduler.add_worker(self._config.stated(spec))
            if self._links is not None:
                self._links.introduce(scheduler, spec.id)
        self._workers[spec.id] = worker
        self.workers.append(worker)

    def _fault(self, fault: Fault) -> None:
        """Something happens to a worker that is there: `check_faults` saw to that. After the last request nothing is
        of interest any more."""
        if self._ended == len(self._requests):
            return
        self._counts["faults"] += 1
        if isinstance(fault, WorkerJoin):
            self._add_worker(fault.spec)
        elif isinstance(fault, WorkerDrain):
            for scheduler in self.routers.schedulers:
                scheduler.drain_worker(fault.worker, handover_seconds=fault.handover_seconds)
        elif isinstance(fault, WorkerSlowdown):
            self._workers[fault.worker].slow_down(fault.factor)
        else:
            worker = self._workers[fault.worker]
            worker.die()
            if self._pairs is not None:
                self._pairs.died(worker)
            self._timeline.at(self._timeline.now + fault.noticed_after_seconds, self._notice_death, worker)

    def _notice_death(self, worker: SimWorker) -> None:
        """Forget a dead worker; its requests go elsewhere, in the order in which they arrived."""
        del self._workers[worker.name]
        if self._links is not None:
            self._links.forget(worker.name)
        for scheduler in self.routers.schedulers:
            scheduler.remove_worker(worker.name)
        self._count_emitted(worker)
        waiting = [] if self._pairs is None else self._pairs.on(worker)
        for flight in [one for one in self._flights.values() if one.worker is worker or one in waiting]:
            self._drop_placement(flight)
            self.routers.schedulers[flight.router].cancel(flight.request.request_id)
            if self._queues:
                self._queues[flight.router].ended(flight.request.request_id)
            self._counts["resumed"] += 1
            self._place(flight)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _tick(self, _: object) -> None:
        for scheduler in self.routers.schedulers:
            scheduler.tick()
        for queue in self._queues:
            queue.pump()
        if self._progress is not None:
            self._progress(self._ended, len(self._requests), self._timeline.now)
        if self._ended < len(self._requests):
            self._timeline.at(self._timeline.now + TICK_SECONDS, self._tick)

    # --- before and after ---------------------------------------------------------------------------------------------

    def _successors(self) -> dict[str, list[PromptRequest]]:
        """Request id -> the requests that wait for it."""
        found: dict[str, list[PromptRequest]] = defaultdict(list)
        for request in self._requests:
            if request.after is not None:
                if request.after not in self._rows:
                    raise InvalidInput(f"request {request.request_id!r} is after {request.after!r}, which is not there")
                found[request.after].append(request)
        _check_order(self._requests, found)
        return dict(found)

    def _count_emitted(self, worker: SimWorker) -> None:
        """What each request at a worker has got so far."""
        for request_id, count in worker.output_counts().items():
            flight = self._flights.get(request_id)
            if flight is not None and flight.worker is worker:
                flight.emitted = flight.emitted_before + count

    def _result(self) -> Result:
        requests = self._requests
        for worker in self.workers:
            self._count_emitted(worker)
        for flight in self._flights.values():
            self._emitted[flight.row] = flight.emitted
        until = self._config.until_seconds
        return Result(
            request_ids=tuple(request.request_id for request in requests),
            workers=tuple(worker.name for worker in self.workers),
            arrival_seconds=self._arrival,
            first_token_seconds=self._first,
            second_token_seconds=self._second,
            finish_seconds=self._finish,
            outcome=self._outcome,
            worker=self._worker,
            prompt_tokens=np.array([request.prompt_tokens for request in requests], np.int64),
            output_tokens=self._emitted,
            placed_tokens=self._placed,
            cached_tokens=self._cached,
            busy_seconds=np.array([worker.busy_seconds(until) for worker in self.workers]),
            counts={**self._counts, "iterations": sum(worker.iterations for worker in self.workers)},
            scheduler_stats=self.scheduler.stats(),
        )


def _rows_of(requests: Sequence[PromptRequest]) -> dict[str, int]:
    """Request id -> its row."""
    rows = {request.request_id: row for row, request in enumerate(requests)}
    if not rows:
        raise InvalidInput("workload: it has no requests")
    if len(rows) < len(requests):
        raise InvalidInput(f"workload: {len(requests) - len(rows)} request ids occur more than once")
    for request in requests:
        if request.output_ids is not None and len(request.output_ids) != request.output_tokens:
            raise InvalidInput(
                f"request {request.request_id!r} has {len(request.output_ids)} output_ids and an output_tokens of "
                f"{request.output_tokens}"
            )
    return rows


def _check_order(requests: Sequence[PromptRequest], after: Mapping[str, Sequence[PromptRequest]]) -> None:
    """Raise `InvalidInput` where requests wait for each other in a circle: they would never be sent."""
    sent = [request.request_id for request in requests if request.after is None]
    for request_id in sent:  # it grows meanwhile
        sent.extend(successor.request_id for successor in after.get(request_id, ()))
    if len(sent) < len(requests):
        first = min({request.request_id for request in requests} - set(sent))
        raise InvalidInput(f"workload: {len(requests) - len(sent)} requests wait for themselves, {first!r} among them")


def _claim_of(request: PromptRequest) -> Claim | None:
    """What its client asks for of tenants, deadlines and classes; None for nothing."""
    if not request.tenant and request.deadline_seconds is None and request.priority == INTERACTIVE:
        return None
    return Claim(request.tenant, 1.0, request.deadline_seconds, cast(Priority, request.priority))


def _answer(request: PromptRequest, row: int) -> Int32Array:
    """The tokens a request is answered with: its own, or such as no other request has."""
    if request.output_ids is not None:
        return request.output_ids
    start = (row * 7919) % 1_000_000_007
    return np.arange(start, start + request.output_tokens, dtype=np.int32)
