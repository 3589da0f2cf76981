"""What a scheduler does beside its work when it keeps records or has a shadow. Owns the order of these things within a
decision; the records are `records.py`'s, the shadow's answers `shadow.py`'s, the decision is the scheduler's.

`Watched` stands before a `GlobalScheduler` in a class made of both (`scheduler.py` makes it), and nowhere else.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from .._placement.bookings import DecisionCore
from .._placement.decision import Decision
from .._placement.request_api import RequestCalls, hashable, output_limit
from .._radix import RadixTree
from ..policies.base import Policy, RequestView
from ..types import Explanation
from .records import DecisionRecord, Recording, Records
from .shadow import Shadow

_Scheduler: Any = object  # the other half, which imports this module and cannot be imported here


class Watched(_Scheduler):
    """A scheduler that keeps records or has a shadow. What it watches is one step under the writers' lock, so that a
    request's record and its booking begin and end together."""

    _core: DecisionCore
    _lock: RadixTree
    _records: Records | None
    _shadow: Shadow | None

    def _open_records(self, record: Recording | None, shadow: str | Policy | type[Policy] | None) -> None:
        self._records = None if record is None else Records(record, self._seed)
        self._shadow = None if shadow is None else Shadow(shadow)

    def schedule(
        self,
        token_ids: Any,
        *,
        request_id: Hashable = None,
        namespace: Hashable = None,
        max_new_tokens: int | None = None,
        exclude: Iterable[str] = (),
        explain: bool = False,
    ) -> Decision:
        explain = explain or self._is_early()
        if not (explain or self._shadow is not None or self._samples()):
            placed: Decision = super().schedule(
                token_ids,
                request_id=request_id,
                namespace=namespace,
                max_new_tokens=max_new_tokens,
                exclude=exclude,
            )
            return placed
        output_limit(max_new_tokens)
        hashable("namespace", namespace)
        hashable("request_id", request_id)
        weighed: Decision = self._schedule_weighed(token_ids, request_id, namespace, max_new_tokens, exclude, explain)
        return weighed

    schedule.__doc__ = RequestCalls.schedule.__doc__

    def _is_early(self) -> bool:
        if self._records is None:
            return False
        with self._lock:
            return self._records.is_early(self._now())

    def _samples(self) -> bool:
        return self._records is not None and self._records.samples(self._sequence)

    def _place(
        self,
        token_ids: Any,
        request_id: Hashable,
        namespace: Hashable,
        limit: int,
        now: float,
        asked: RequestView | None,
        explain: bool,
    ) -> Decision:
        core, shadow = self._core, self._shadow
        core.need_room(request_id)  # what is wrong with the request is found before anything looks at the books
        core.need_eligible()
        core.match(token_ids, namespace)
        core.advance(now)
        answer = None if shadow is None else shadow.ask(core, token_ids, namespace, limit, now, asked)
        records = self._records if explain or self._samples() else None
        why = None if records is None else self._why(token_ids, namespace, limit, now, asked)
        backlog = {} if why is None else self._backlog()
        decision: Decision = super()._place(token_ids, request_id, namespace, limit, now, asked, explain)
        if shadow is not None:
            shadow.compare(answer, decision)
        if records is not None and why is not None:
            choice = None if answer is None else answer.choice
            records.add(decision, why, backlog, self._sequence, now, choice)
        return decision

    def _why(
        self, token_ids: Any, namespace: Hashable, limit: int, now: float, asked: RequestView | None
    ) -> Explanation | None:
        """The decision to come, for its record; None, and counted, if the policy fails here. If it does so again when
        it decides, the caller hears of it."""
        try:
            why: Explanation = self._explained(token_ids, namespace, limit, now, asked)
            return why
        except Exception:  # noqa: BLE001  a policy may raise anything
            if self._records is not None:
                self._records.failed()
            return None

    def _backlog(self) -> dict[str, float]:
        """Prefill booked and not yet done, in seconds by worker."""
        account = self._core.book.account
        return {name: account(worker.index)["waiting_prefill_seconds"] for name, worker in self._workers.items()}

    def first_token(self, request_id: Hashable, *, cached_tokens: int | None = None) -> bool:
        with self._lock:
            now = self._now()
            told: bool = super().first_token(request_id, cached_tokens=cached_tokens)
            if told and self._records is not None:
                self._records.first_token(request_id, now, cached_tokens)
            return told

    def finish(
        self, request_id: Hashable, *, output_tokens: int | None = None, cached_tokens: int | None = None
    ) -> bool:
        with self._lock:
            now = self._now()
            told: bool = super().finish(request_id, output_tokens=output_tokens, cached_tokens=cached_tokens)
            if told and self._records is not None:
                self._records.ended(request_id, now, "finished", cached_tokens, output_tokens)
            return told

    def _give_back(self, request_id: Hashable, now: float) -> bool:
        with self._lock:
            live: bool = super()._give_back(request_id, now)
            if live and self._records is not None:
                self._records.ended(request_id, now, "cancelled", None, None)
            return live

    def records(self) -> tuple[DecisionRecord, ...]:
        with self._lock:
            return () if self._records is None else self._records.all()

    def stats(self) -> dict[str, Any]:
        with self._lock:
            shadow = {} if self._shadow is None else self._shadow.stats()
            records = {} if self._records is None else self._records.stats()
            return {**super().stats(), "records": records, "shadow": shadow}

    def check(self) -> None:
        with self._lock:
            super().check()
            if self._records is not None:
                self._records.check(self._core.leases)

    def close(self) -> None:
        """Stop the background thread and let the records' sink catch up."""
        super().close()
        if self._records is not None:
            self._records.close()
