"""The routers of a simulation: one global scheduler each, over the same workers. Owns which of them a request comes to,
and what each learns: of its own requests as by the workers' answers, of the others' as by their events.

    request --> one of the routers, by chance --> worker
                      all of them  <-- event_delay_seconds -- placed, prefilled, ended; evictions

Before attached servers, which report evictions only, the routers report to each other, `peer_delay_seconds` later than
they know themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from ..clock import ManualClock
from ..errors import UnknownWorker
from ..scheduler import GlobalScheduler
from ..types import CacheEvent, RequestEnded, RequestPlaced, RequestPrefilled, Role
from .config import SimConfig

News = tuple[int, str, "int | None", "int | None"]  # router, request; cached tokens, or at its end its output tokens


class SimRouters:
    """`config.routers` schedulers on one clock, all of which learn of workers and evictions."""

    def __init__(self, config: SimConfig, clock: ManualClock) -> None:
        self.schedulers = [
            GlobalScheduler(
                policy=config.policy,
                cost_model=config.cost_model,
                config=config.scheduler,
                clock=clock,
                seed=config.seed + number,
            )
            for number in range(config.routers)
        ]
        self._rng = np.random.default_rng([config.seed, 2])

    def pick(self) -> int:
        """The router that the next request comes to."""
        return int(self._rng.integers(len(self.schedulers))) if len(self.schedulers) > 1 else 0

    def report_placed(self, placed: tuple[str, int, str, Any, int, Role | None]) -> None:
        """All but its own router learn that a worker has a request: (worker, router, request, token ids, limit, half of
        a pair's)."""
        worker, router, request_id, token_ids, limit, half = placed
        self._report_to_others(worker, router, RequestPlaced(str(router), request_id, token_ids, None, limit, half))

    def report(self, worker: str, news: Iterable[News]) -> None:
        """Tokens have come from a worker: each router learns of all, of its own requests by their answers."""
        if len(self.schedulers) == 1:
            self.report_own(news)
            return
        for item in news:
            self.report_own((item,))
            self.report_others((worker, (item,)))

    def report_own(self, news: Iterable[News]) -> None:
        """Each router learns of its own requests."""
        for router, request_id, cached_tokens, output_tokens in news:
            if output_tokens is not None:
                self.schedulers[router].finish(request_id, output_tokens=output_tokens)
            else:
                self.schedulers[router].first_token(request_id, cached_tokens=cached_tokens)

    def report_others(self, reported: tuple[str, Iterable[News]]) -> None:
        """And of the others', by the worker they are on."""
        worker, news = reported
        for router, request_id, cached_tokens, output_tokens in news:
            if output_tokens is not None:
                self._report_to_others(worker, router, RequestEnded(str(router), request_id, output_tokens))
            else:
                self._report_to_others(worker, router, RequestPrefilled(str(router), request_id, cached_tokens))

    def report_aborted(self, aborted: tuple[str, int, str]) -> None:
        """A worker goes on with a request no more, and its own router knows: (worker, router, request)."""
        worker, router, request_id = aborted
        self._report_to_others(worker, router, RequestEnded(str(router), request_id, None))

    def _report_to_others(self, worker: str, router: int, event: CacheEvent) -> None:
        """What became of a worker that is gone meanwhile is not reported."""
        for number, scheduler in enumerate(self.schedulers):
            if number != router:
                with suppress(UnknownWorker):
                    scheduler.apply(worker, (event,))
