"""Requests that two simulated workers serve: one prefills the prompt, the other decodes. Owns which of them is where,
and the hand-over of their KV; who serves what is the scheduler's to say (`GlobalScheduler.schedule_pair`).

    placed -> the prompt, for one token, at the worker that prefills -> its first token -> its KV on its way, once both
    links are free -> taken over between two iterations -> the rest of the output at the worker that decodes

A worker's link carries one of these at a time; pulls (`kv_links.py`) have links of their own. Where the worker that has
prefilled dies before the KV has arrived, the one that decodes computes it again. Where that one dies, the request is
placed anew once that is noticed, with what has been emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..local import StepOutput
from ..scheduler import GlobalScheduler
from ..scheduling.pulls.link_times import Transfer
from ..types import DECODE, PREFILL, PairDecision, Role
from ..workloads.types import Int32Array
from .config import KvLink
from .flight import Flight
from .timeline import Timeline
from .worker import SimWorker


@dataclass(slots=True, eq=False)
class _Pair:
    """A request on two workers. `begun_at`: when its transfer was asked for; None as long as its prompt is being
    prefilled."""

    flight: Flight
    decision: PairDecision
    prefills: SimWorker
    decodes: SimWorker
    begun_at: float | None = None
    tokens: Int32Array | None = None  # that are handed over


class SimPairs:
    """See the module. `schedulers`: of the routers, in their order; `workers`: those that are there, by name.
    `submit(flight, worker)` sends a request with what it has emitted."""

    def __init__(
        self,
        link: KvLink,
        schedulers: Sequence[GlobalScheduler],
        timeline: Timeline,
        workers: Mapping[str, SimWorker],
        submit: Callable[[Flight, SimWorker], None],
    ) -> None:
        self._link = link
        self._schedulers = schedulers
        self._timeline = timeline
        self._workers = workers
        self._submit = submit
        self._pairs: dict[str, _Pair] = {}  # by request, until its decode is at its worker
        self._free_at: dict[str, float] = {}  # when a worker's link is
        self._dead: set[SimWorker] = set()
        self.handed_over = 0
        self.lost = 0  # of these, where nothing came

    def begin(self, flight: Flight, decision: PairDecision) -> SimWorker:
        """A request was placed on two workers; returns the one it is to be sent to now, for one token."""
        prefills, decodes = self._workers[str(decision.prefill_worker)], self._workers[decision.worker]
        self._pairs[flight.request.request_id] = _Pair(flight, decision, prefills, decodes)
        return prefills

    def died(self, worker: SimWorker) -> None:
        """A worker has stopped; it hands over nothing more."""
        self._dead.add(worker)

    def prefills(self, request_id: str, worker: SimWorker) -> bool:
        """Whether a worker is to prefill a request, and no more."""
        pair = self._pairs.get(request_id)
        return pair is not None and pair.begun_at is None and pair.prefills is worker

    def half_of(self, flight: Flight, worker: SimWorker) -> Role | None:
        """Which half of a request a worker is sent; None for all of it."""
        if flight.handed_over:
            return DECODE
        return PREFILL if self.prefills(flight.request.request_id, worker) else None

    def on(self, worker: SimWorker) -> list[Flight]:
        """The requests that are yet to be decoded on a worker."""
        return [pair.flight for pair in self._pairs.values() if pair.decodes is worker]

    def drop(self, flight: Flight) -> SimWorker | None:
        """A request is placed anew, or over: what is prefilled of it is of no use. Returns the worker that prefills it
        no more."""
        pair = self._pairs.pop(flight.request.request_id, None)
        if pair is None or pair.begun_at is not None or pair.prefills in self._dead:
            return None
        pair.prefills.abort(flight.request.request_id)
        return pair.prefills

    def prefilled(self, flight: Flight, output: StepOutput) -> None:
        """A request's first token came: its KV goes to the worker that decodes, if there is more to come."""
        now, pair = self._timeline.now, self._pairs[flight.request.request_id]
        if flight.emitted >= len(flight.planned_ids):
            del self._pairs[flight.request.request_id]
            return
        pair.begun_at, pair.tokens = now, flight.tokens_so_far()[:-1]
        flight.worker, flight.handed_over = pair.decodes, True
        begin = max(now, *(self._free_at.get(one.name, 0.0) for one in (pair.prefills, pair.decodes)))
        missing = max(len(pair.tokens) - pair.decodes.cached_tokens(pair.tokens), 0)
        seconds = missing * self._link.token_bytes / self._link.bytes_per_second
        for one in (pair.prefills, pair.decodes):
            self._free_at[one.name] = begin + seconds
        self._timeline.at(begin + self._link.latency_seconds + seconds, self._arrive, (pair, missing))

    def _arrive(self, moved: tuple[_Pair, int]) -> None:
        """The KV has come, unless its source is gone."""
        pair, missing = moved
        if self._pairs.get(pair.flight.request.request_id) is not pair or pair.decodes in self._dead:
            return  # placed anew, or about to be
        assert pair.tokens is not None and pair.begun_at is not None
        if pair.prefills in self._dead:
            self.lost += 1
            self._go_on(pair)
            return
        token_seconds = self._link.token_bytes * self._link.copy_byte_seconds
        copied = missing * token_seconds
        pair.prefills.hold_up(copied)
        pair.decodes.take_over(
            pair.tokens, token_seconds, lambda known, cached: self._took(pair, missing, cached - known, copied)
        )

    def _took(self, pair: _Pair, wanted: int, moved: int, copied: float) -> None:
        assert pair.begun_at is not None
        seconds = self._timeline.now - pair.begun_at
        transfer = Transfer(wanted, moved, moved * self._link.token_bytes, seconds, copied, copied)
        request_id, source = pair.flight.request.request_id, str(pair.decision.prefill_worker)
        self._schedulers[pair.flight.router].pull_ended(request_id, 0, source, transfer)
        self.handed_over += 1
        self._timeline.at(self._timeline.now, self._go_on, pair)

    def _go_on(self, pair: _Pair) -> None:
        """The rest is decoded."""
        request_id = pair.flight.request.request_id
        if self._pairs.get(request_id) is pair:
            del self._pairs[request_id]
            self._submit(pair.flight, pair.decodes)
