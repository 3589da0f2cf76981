"""Decisions on record: keeps records of them, and asks a shadow what it would do. Owns the order of these things around
a decision; the records are `records.py`'s, the shadow's answers `shadow.py`'s, the decision is the scheduler's.

A `Recorder` looks on (`RequestObserver`): a scheduler without one asks each call only whether there is one.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from .._placement.bookings import DecisionCore
from .._placement.decision import Decision
from .._placement.request_api import explanation, output_limit
from ..policies.base import Policy, RequestView
from ..types import Explanation, PairDecision, SessionHint
from .observer import RequestObserver
from .records import DecisionRecord, DecisionRecording, Records, record_of
from .shadow import Shadow, ShadowAnswer


@dataclass(frozen=True, slots=True)
class _Before:
    """What was known before a decision. `why` is None where it goes unrecorded; `backlog`: seconds by worker."""

    sequence: int
    answer: ShadowAnswer | None
    why: Explanation | None
    backlog: Mapping[str, float]


class Recorder(RequestObserver):
    """The records and the shadow of one scheduler. A request's record and its booking begin and end together. Raises
    InvalidConfig."""

    def __init__(self, record: DecisionRecording | None, shadow: str | Policy | type[Policy] | None, seed: int) -> None:
        self._records = None if record is None else Records(record, seed)
        self._shadow = None if shadow is None else Shadow(shadow)

    @property
    def needs(self) -> tuple[str, ...]:
        """What the shadow policy must know."""
        return () if self._shadow is None else self._shadow.needs

    def explains(self, now: float) -> bool:
        return self._records is not None and self._records.is_early(now)

    def watches(self, sequence: int) -> bool:
        return self._shadow is not None or (self._records is not None and self._records.samples(sequence))

    def before_decision(
        self, core: DecisionCore, policy: Policy | None, request: RequestView, now: float, explain: bool
    ) -> _Before:
        answer = None if self._shadow is None else self._shadow.ask(core, request, now)
        why = None
        if self._records is not None and (explain or self._records.samples(request.sequence)):
            why = self._why(self._records, core, policy, request, now)
        return _Before(request.sequence, answer, why, {} if why is None else _backlog(core))

    def _why(
        self, records: Records, core: DecisionCore, policy: Policy | None, request: RequestView, now: float
    ) -> Explanation | None:
        """The decision to come, for its record; None, and counted, if the policy fails here. If it does so again when
        it decides, the caller learns of it."""
        limit = output_limit(request.max_new_tokens)
        try:
            return explanation(core, policy, request.token_ids, request.namespace, limit, now, request)
        except Exception:  # noqa: BLE001  a policy may raise anything
            records.failed()
            return None

    def on_decision(self, key: Hashable, decision: Decision, before: _Before | None, now: float) -> None:
        if before is None:  # made before anybody looked on
            return
        if self._shadow is not None:
            self._shadow.compare(before.answer, decision)
        if self._records is not None and before.why is not None:
            choice = None if before.answer is None else before.answer.choice
            record = record_of(decision, before.why, before.backlog, before.sequence, now, choice)
            if record is None:
                self._records.failed()
            else:
                self._records.add(key, record)

    # --- pairs --------------------------------------------------------------------------------------------------------

    def takes(self, sequence: int, now: float) -> bool:
        """Whether the decision of this number, for a pair, is to be recorded. A shadow, which places on one worker, is
        not asked about it."""
        return self._records is not None and (self._records.is_early(now) or self._records.samples(sequence))

    def on_pair(
        self,
        key: Hashable,
        decision: PairDecision,
        why: Explanation,
        core: DecisionCore,
        booked_seconds: float,
        sequence: int,
        now: float,
    ) -> None:
        """A request was placed on a pair, its prefill booked for so many seconds."""
        if self._records is None:
            return
        backlog = _backlog(core)
        backlog[why.worker] = max(backlog[why.worker] - booked_seconds, 0.0)
        record = record_of(decision, why, backlog, sequence, now, None)
        if record is not None:
            self._records.add(key, record)

    def on_session(self, key: Hashable, session: SessionHint) -> None:
        """What a live request belongs to."""
        if self._records is not None:
            self._records.session(key, session)

    def on_first_token(self, key: Hashable, now: float, cached_tokens: int | None) -> None:
        if self._records is not None:
            self._records.first_token(key, now, cached_tokens)

    def on_finish(self, key: Hashable, now: float, cached_tokens: int | None, output_tokens: int | None) -> None:
        if self._records is not None:
            self._records.ended(key, now, "finished", cached_tokens, output_tokens)

    def on_cancel(self, key: Hashable, now: float) -> None:
        if self._records is not None:
            self._records.ended(key, now, "cancelled", None, None)

    def records(self) -> tuple[DecisionRecord, ...]:
        """Those kept, oldest first."""
        return () if self._records is None else self._records.all()

    def stats(self) -> dict[str, Any]:
        """For `GlobalScheduler.stats`."""
        return {
            "records": {} if self._records is None else self._records.stats(),
            "shadow": {} if self._shadow is None else self._shadow.stats(),
        }

    def check(self, live: Collection[Hashable]) -> None:
        """Assert the invariants; `live` has the ids of all live requests."""
        if self._records is not None:
            self._records.check(live)

    def close(self) -> None:
        """Let the records' sink catch up; not under the lock."""
        if self._records is not None:
            self._records.close()


def _backlog(core: DecisionCore) -> dict[str, float]:
    """Prefill booked and not yet done, in seconds by worker."""
    account = core.loads.account
    return {name: account(i)["waiting_prefill_seconds"] for i, name in enumerate(core.names) if name is not None}
