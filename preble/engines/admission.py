"""The waiting queue before an engine that has a loop of its own. Owns who waits and who goes in next; runs nothing.

An engine such as SGLang or vLLM keeps its own waiting queue, in its own order. So it is given little more than it can
run, and who comes next is decided here, by the paper's priority groups (`batching/waiting_queue`), for as long as
possible:

    waiting here  -> by group ->  in the engine, no output yet  ->  in the engine, streaming
                                  [ prefilling | look-ahead ]

A request goes in while the engine has a place for it (`max_running` and the look-ahead on top), and those without
output leave room for it (`transport/look_ahead`): small prompts still share an iteration.

What is cached is known by a `GlobalScheduler` of the engine's data-parallel ranks, from the engine's own events or,
where it has none, from what it reports of its hits. It also decides on the rank that a request goes to, by a policy. A
policy that fails does not end the worker: its requests go to the ranks in turn, and the log has why.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal

from ..batching._batch import LiveRequest
from ..batching.requests import Int32Array, LocalConfig, LocalRequest
from ..batching.waiting_queue import WaitingQueue
from ..clock import Clock, monotonic
from ..errors import DuplicateRequest, InvalidConfig, QueueFull
from ..policies.base import Policy, resolve
from ..scheduler import GlobalScheduler
from ..transport.look_ahead import LOOK_AHEAD_SECONDS, TWICE_SECONDS, LookAhead, computes_twice, twice_share
from ..types import CacheEvent, WorkerSpec, check_int, check_seconds
from .base import EngineInfo, GenerationRequest

_TICK_SECONDS = 1.0

logger = logging.getLogger("preble.engines")


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """In which order requests go into the engine, and how far ahead. Raises `InvalidConfig` naming the field.

    `order`, `priority_groups`, `max_wait_seconds` and `max_waiting` are those of `preble.LocalConfig`. `look_ahead` is
    the number of requests without output that each rank may always hold, `look_ahead_seconds` the prefills beside the
    longest of them up to which it may hold more. `policy` chooses the data-parallel rank, as `preble.GlobalScheduler`
    takes one.
    """

    order: Literal["priority", "fcfs", "longest_prefix"] = "priority"
    priority_groups: int = 10
    max_wait_seconds: float = 30.0
    max_waiting: int = 4096
    look_ahead: int = 1
    look_ahead_seconds: float = LOOK_AHEAD_SECONDS
    policy: str | Policy | type[Policy] = "e2"

    def __post_init__(self) -> None:
        self.queue_config()
        resolve(self.policy)
        check_int("AdmissionConfig.look_ahead", self.look_ahead, 1, 100_000)
        check_seconds("AdmissionConfig.look_ahead_seconds", self.look_ahead_seconds)

    def queue_config(self) -> LocalConfig:
        """The same for the queue."""
        try:
            return LocalConfig(
                kv_capacity_tokens=1,
                order=self.order,
                priority_groups=self.priority_groups,
                max_wait_seconds=self.max_wait_seconds,
                max_waiting=self.max_waiting,
            )
        except InvalidConfig as error:
            raise InvalidConfig(str(error).replace("LocalConfig.", "AdmissionConfig.")) from None


class _Estimate:
    """What the queue asks of a cache, answered by the scheduler of the ranks."""

    def __init__(self, scheduler: GlobalScheduler) -> None:
        self.version = 0
        self._scheduler = scheduler

    def cached_tokens(self, token_ids: Int32Array, namespace: Hashable) -> int:
        """Length of the longest prefix estimated cached on any rank."""
        return self._scheduler.match(token_ids, namespace=namespace).best_tokens


class Admission:
    """See the module. Not thread-safe: its owner has a lock. Every request is waiting or inside until `ended`."""

    def __init__(
        self,
        config: AdmissionConfig,
        info: EngineInfo,
        *,
        ranks: int = 1,
        clock: Clock = monotonic,
    ) -> None:
        specs = [
            WorkerSpec(
                str(rank), kv_capacity_tokens=max(1, info.kv_capacity_tokens // ranks), block_size=info.block_size
            )
            for rank in range(ranks)
        ]
        self.config = config
        self.scheduler = GlobalScheduler(specs, policy=config.policy, clock=clock)
        self._ranks = ranks
        self._computes_twice = computes_twice(info.engine)
        self._turn = 0  # of the ranks, where the policy fails
        self._unbooked: set[str] = set()  # inside, and no policy has said where
        self._places: float = math.inf if info.max_running is None else (info.max_running + config.look_ahead) * ranks
        self._ahead = LookAhead(config.look_ahead_seconds, config.look_ahead, ranks)
        self._clock = clock
        self._estimate = _Estimate(self.scheduler)
        self._queue = WaitingQueue(config.queue_config(), self._estimate)
        self._waiting: dict[str, tuple[LiveRequest, GenerationRequest]] = {}
        self._inside: dict[str, int] = {}  # tokens to compute until the first output, 0 from then on
        self._lives: dict[str, LiveRequest] = {}  # of those inside: who pays for the output
        self._number = 0
        self._silent: set[str] = set()  # inside, without output
        self._silent_tokens = 0
        # Of `_ahead`, and of each: what was cached, and the seconds of its prefill.
        self._computing: dict[str, tuple[GenerationRequest, int, float]] = {}
        self._ticked_at = clock()

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises `QueueFull`, `DuplicateRequest` or `InvalidInput`; then nothing has changed."""
        if request.request_id in self:
            raise DuplicateRequest(f"request {request.request_id!r} is live")
        if len(self._waiting) >= self.config.max_waiting:
            raise QueueFull(f"{self.config.max_waiting} requests wait for the engine, its bound")
        left = request.sampling.max_new_tokens - request.output_offset
        local = LocalRequest(
            request.request_id, request.token_ids, max(1, left), namespace=request.namespace, claim=request.claim
        )
        live = LiveRequest(local, self._number, self._clock())
        self._queue.add(live)
        self._number += 1
        self._waiting[request.request_id] = live, request

    def next(self) -> tuple[GenerationRequest, int] | None:
        """The request to hand to the engine now, and its rank; None if nobody waits or the engine has enough."""
        now = self._clock()
        self._tick(now)
        for name in self._ahead.expire(now):
            del self._computing[name]
        if not self._waiting or len(self._inside) >= self._places or not self._ahead.has_room(0.0):
            return None
        self._queue.begin_round()
        live, cached = self._peek(now)
        seconds = 0.0 if live is None else self.scheduler.prefill_seconds("0", len(live.request.token_ids), cached)
        has_room = live is not None and self._ahead.has_room(seconds)
        if live is not None and has_room:
            self._queue.take(live)
        self._queue.end_round()
        if live is None or not has_room:
            return None
        _, request = self._waiting.pop(live.request.request_id)
        self._lives[request.request_id] = live
        rank, missed = self._placed(request, live.request.max_new_tokens)
        self._estimate.version += 1
        self._inside[request.request_id] = missed
        self._silent.add(request.request_id)
        self._silent_tokens += missed
        self._computing[request.request_id] = request, len(request.token_ids) - missed, seconds
        self._ahead.add(request.request_id, seconds, now)
        return request, rank

    def _peek(self, now: float) -> tuple[LiveRequest | None, int]:
        """The first of those that wait and go on from nothing that is still to be computed and would be twice; and how
        much of it counts as cached."""
        while (live := self._queue.peek(now)) is not None:
            tokens, space = live.request.token_ids, live.request.namespace
            cached = self._estimate.cached_tokens(tokens, space)
            if not self._computes_twice or not any(
                other.namespace == space
                and self._ahead.pace * seconds * twice_share(tokens, cached, other.token_ids, known) >= TWICE_SECONDS
                for other, known, seconds in self._computing.values()
            ):
                return live, cached
            self._queue.defer(live)
        return None, 0

    def _placed(self, request: GenerationRequest, max_new_tokens: int) -> tuple[int, int]:
        """Book a request: its rank, and the tokens to compute for it."""
        name, space = request.request_id, request.namespace
        try:
            decision = self.scheduler.schedule(
                request.token_ids, request_id=name, namespace=space, max_new_tokens=max_new_tokens
            )
        except Exception:  # a policy of the user's
            logger.exception("policy %r failed, request %r goes to a rank in turn", self.scheduler.policy, name)
            self._turn += 1
            self._unbooked.add(name)
            return self._turn % self._ranks, len(request.token_ids)
        return int(decision.worker), decision.prompt_tokens - decision.matched_tokens

    def started(self, request_id: str, cached_tokens: int | None) -> None:
        """The engine has sent the first output of a request."""
        if request_id in self._silent:
            self._ahead.begin(request_id, self._clock())
            self._leave_silence(request_id)
            self.scheduler.first_token(request_id, cached_tokens=cached_tokens)

    def ended(
        self, request_id: str, output_tokens: int, cached_tokens: int | None = None, *, ended_well: bool = True
    ) -> None:
        """The engine is done with a request after so many output tokens, for which its tenant pays; not `ended_well` if
        it failed or was aborted. Ignores unknown ids."""
        if request_id not in self._inside:
            return
        if request_id in self._silent:
            self._leave_silence(request_id)
        del self._inside[request_id]
        self._queue.charge_output(self._lives.pop(request_id), output_tokens)
        if request_id in self._unbooked:
            self._unbooked.remove(request_id)
        elif not ended_well:
            self.scheduler.cancel(request_id)
        else:
            self.scheduler.finish(request_id, output_tokens=output_tokens, cached_tokens=cached_tokens)

    def withdraw(self, request_id: str) -> bool:
        """Forget a waiting request; False if it does not wait."""
        found = self._waiting.pop(request_id, None)
        if found is None:
            return False
        self._queue.remove(found[0])
        return True

    def _leave_silence(self, request_id: str) -> None:
        self._silent.remove(request_id)
        self._ahead.remove(request_id)
        self._computing.pop(request_id, None)
        self._silent_tokens -= self._inside[request_id]
        self._inside[request_id] = 0

    # --- the cache ----------------------------------------------------------------------------------------------------

    def apply(self, rank: int, events: Iterable[CacheEvent]) -> None:
        """Cache events of one rank. Raises `InvalidInput` for events that make no sense."""
        self._estimate.version += 1
        self.scheduler.apply(str(rank), events)

    def _tick(self, now: float) -> None:
        if now - self._ticked_at >= _TICK_SECONDS:
            self._ticked_at = now
            self.scheduler.tick()

    # --- questions ----------------------------------------------------------------------------------------------------

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting or request_id in self._inside

    @property
    def waiting(self) -> int:
        """Requests that wait here."""
        return len(self._waiting)

    @property
    def silent(self) -> int:
        """Requests in the engine without output: prefilling, or in its own queue."""
        return len(self._silent)

    @property
    def inside(self) -> int:
        """Requests in the engine."""
        return len(self._inside)

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that have to be computed for requests without output, here and in the engine."""
        return self._queue.uncached_tokens + self._silent_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens estimated to be in the caches of all ranks."""
        return sum(worker["cached_tokens"] for worker in self.scheduler.stats()["workers"].values())

    def check(self) -> None:
        """Assert that queue, sets, sums and the scheduler's bookings agree."""
        self._queue.check()
        self._ahead.check()
        assert len(self._computing) == len(self._ahead) and self._computing.keys() <= self._silent, "they are computed"
        self.scheduler.check()
        assert len(self._queue) == len(self._waiting), "queue and table list different requests"
        assert self._silent <= set(self._inside), "a silent request is not inside"
        assert self._lives.keys() == self._inside.keys(), "who is inside, and who pays for that, differ"
        tokens = sum(self._inside.values())
        assert tokens == self._silent_tokens, f"{tokens} tokens are to be computed, the sum says {self._silent_tokens}"
        booked, inside = self.scheduler.stats()["live_requests"], len(self._inside) - len(self._unbooked)
        assert booked == inside, f"{booked} requests are booked, {inside} are inside"
