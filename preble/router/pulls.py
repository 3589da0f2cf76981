"""Pulls that requests are sent with: which worker each takes over KV from. Owns those that are under way; whether one
is worth while is the scheduler's to say (`scheduling/pulls/price.py`), moving is the workers'.

Workers reach each other at the host by which this router reaches them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..errors import UnknownWorker
from ..scheduling.pulls.link_times import Transfer
from ..transport import wire
from ..transport.client import reached_at
from ..transport.messages import PullFrom
from ..types import PairDecision

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..scheduler import GlobalScheduler


class PullWorker(Protocol):
    """A worker of the fleet, as far as pulls see it."""

    address: str
    worker_id: str
    epoch: int
    welcome: wire.Welcome | None


class PullFleet(Protocol):
    """The fleet, as far as pulls see it."""

    unusable: frozenset[str]

    @property
    def scheduler(self) -> GlobalScheduler:
        """Who decides."""

    def worker(self, worker_id: str) -> PullWorker:
        """The worker of that id. Raises `UnknownWorker`."""


class PullAttempt(Protocol):
    """One try at one worker, as far as pulls see it."""

    wire_id: str
    worker_id: str
    pair: PairDecision | None
    handed_over: bool


class PullRequest(Protocol):
    """A request, as far as pulls see it."""

    request_id: Hashable
    namespace: Hashable

    def tokens_so_far(self) -> npt.NDArray[np.int32]:
        """Prompt and output."""


@dataclass(frozen=True, slots=True)
class _AskedPull:
    """`source` "": the request names no pull, and its worker may let it wait for another's."""

    request_id: Hashable
    worker_id: str
    source: str = ""
    moved_tokens: int = 0


class Pulls:
    """See the module. Bounded by the router's live requests. Belongs to its asyncio loop."""

    def __init__(self, fleet: PullFleet) -> None:
        self._fleet = fleet
        self._asked: dict[str, _AskedPull] = {}  # by wire id
        self._pulling: Counter[str] = Counter()  # pulls under way, by the worker that takes over

    def introduce(self, said: wire.Welcome) -> None:
        """Report to the scheduler whether a worker, which it knows, can move KV."""
        if said.kv_endpoint and said.kv_layout and said.kv_token_bytes:
            self._fleet.scheduler.can_move_kv(said.worker_id, said.kv_layout, said.kv_token_bytes)

    def asked_for(self, attempt: PullAttempt, live: PullRequest) -> PullFrom | None:
        """What the request's worker shall take over, before it is sent; None where it shall compute all it lacks."""
        if attempt.pair is not None:
            return self._of_pair(attempt, live, attempt.pair) if attempt.handed_over else None
        found = self._named(attempt, live)
        if found is None and self._pulling[attempt.worker_id]:
            self._asked[attempt.wire_id] = _AskedPull(live.request_id, attempt.worker_id)
        return found

    def _named(self, attempt: PullAttempt, live: PullRequest) -> PullFrom | None:
        scheduler, fleet = self._fleet.scheduler, self._fleet
        try:
            found = scheduler.pull_for(
                live.request_id, live.tokens_so_far(), namespace=live.namespace, exclude=fleet.unusable
            )
            source = None if found is None else fleet.worker(found.source)
        except UnknownWorker:  # of another router's scheduler, or just lost
            return None
        if found is None or source is None or source.welcome is None or not source.welcome.kv_endpoint:
            return None
        endpoint = reached_at(source.address, source.welcome.kv_endpoint)
        self._asked[attempt.wire_id] = _AskedPull(live.request_id, attempt.worker_id, found.source, found.moved_tokens)
        self._pulling[attempt.worker_id] += 1
        return PullFrom(endpoint, source.epoch, found.tokens, max(1, int(found.worth_seconds * 1e6)))

    def _of_pair(self, attempt: PullAttempt, live: PullRequest, pair: PairDecision) -> PullFrom | None:
        """All of a prompt from the worker that has prefilled it. It is waited for as long as was reckoned with, and as
        long as computing would take."""
        try:
            source = self._fleet.worker(str(pair.prefill_worker))
        except UnknownWorker:
            return None
        if source.welcome is None or not source.welcome.kv_endpoint:
            return None
        endpoint = reached_at(source.address, source.welcome.kv_endpoint)
        asked = _AskedPull(live.request_id, attempt.worker_id, source.worker_id, pair.moved_tokens)
        self._asked[attempt.wire_id] = asked
        self._pulling[attempt.worker_id] += 1
        computed = self._fleet.scheduler.prefill_seconds(attempt.worker_id, pair.prompt_tokens, 0)
        wait_us = max(1, int((computed + pair.transfer_seconds) * 1e6))
        return PullFrom(endpoint, source.epoch, pair.prompt_tokens, wait_us)

    def ended(self, worker: PullWorker, message: wire.PullEnded) -> None:
        """A pull is over; of one that is not under way it is nothing new."""
        asked = self._asked.get(message.request_id)
        if asked is None or asked.worker_id != worker.worker_id:
            return
        self.forget(message.request_id)
        transfer = Transfer(
            asked.moved_tokens,
            message.moved_tokens,
            message.moved_bytes,
            message.took_us * 1e-6,
            message.source_us * 1e-6,
            message.target_us * 1e-6,
        )
        is_declined = message.end == "refused" and not message.took_us
        measured = transfer if asked.source and message.end != "joined" and not is_declined else None
        self._fleet.scheduler.pull_ended(asked.request_id, message.cached_tokens, asked.source, measured)

    def forget(self, wire_id: str) -> None:
        """The attempt is over; most had no pull."""
        asked = self._asked.pop(wire_id, None)
        if asked is not None and asked.source:
            self._pulling[asked.worker_id] -= 1
            if not self._pulling[asked.worker_id]:
                del self._pulling[asked.worker_id]

    def __len__(self) -> int:
        """Pulls under way."""
        return len(self._asked)
