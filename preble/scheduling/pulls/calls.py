"""What `GlobalScheduler` is asked about KV that goes from worker to worker. Owns the way in: arguments, the lock, and
what the price is asked with; whether a request pulls is `price.py`'s to say, and where it is placed the policy's.

Loads nothing of pulls before a worker can move KV.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping

from ..._placement.request_api import RequestApi, iterable
from ..._snapshot.accounts import cost_at
from ...clock import Clock
from ...errors import InvalidInput
from ...lazy_typing import TYPE_CHECKING, Any, replace
from ...types import Explanation, PullCost, SessionHint, check_int
from ..leases import named_request

if TYPE_CHECKING:
    from ..._core.token_types import TokenIds
    from ..._radix import RadixTree
    from .link_times import Transfer
    from .price import KvMoves, WorkerSide


class PullCalls(RequestApi):
    """The calls about pulls; `GlobalScheduler` has what they are made of. Thread-safe."""

    _lock: RadixTree
    _workers: dict[str, Any]
    now: Clock
    _worker: Callable[[str], Any]
    _booking: Callable[[Hashable], tuple[Hashable, Mapping[str, Any]]]
    _kv_moves: KvMoves | None = None  # where workers can move KV

    def can_move_kv(self, worker_id: str, layout: str, token_bytes: int) -> None:
        """Note that `worker_id` can take over KV from, and hand it to, the workers that have the same `layout`, a text;
        "" takes that back. It has `token_bytes` a token. Not part of a snapshot. Raises UnknownWorker, InvalidInput;
        then nothing has changed. O(1)."""
        with self._lock:
            self._worker(worker_id)
            moves = self._kv_moves
            if moves is None:
                from .price import KvMoves

                moves = KvMoves()
            moves.able(worker_id, layout, token_bytes)
            self._kv_moves = moves

    def pull_for(
        self,
        request_id: Hashable,
        token_ids: TokenIds,
        *,
        namespace: Hashable = None,
        exclude: Iterable[str] = (),
        least_tokens: int | None = None,
    ) -> PullCost | None:
        """Returns the pull with which a live request, `request_id` (an id or a Decision), of `token_ids` in `namespace`
        should be sent to the worker that it is booked on: where that can take over KV from another for less than it
        takes to compute it; or, with `least_tokens`, at any price from so many tokens on. From none of `exclude`, ids
        of workers. None where it should not. What is returned keeps both workers' links busy, until `pull_ended` or for
        as long as it should take. Raises InvalidTokens, InvalidInput. O(tokens + workers)."""
        if least_tokens is not None:
            check_int("least_tokens", least_tokens, 0, 2**31 - 1, InvalidInput)
        moves, named = self._kv_moves, named_request(request_id)
        if moves is None:
            return None
        with self._lock:
            key, lease = self._booking(named)
            worker, own = lease.get("worker"), lease.get("matched_tokens", 0)
        if worker is None:
            return None
        left_out = frozenset(iterable("exclude", exclude))
        found = self._cheapest_pull(moves, worker, own, True, token_ids, namespace, left_out)
        if found is None or not (found.pays if least_tokens is None else found.moved_tokens >= least_tokens):
            return None
        with self._lock:
            moves.begin(key, worker, found, self.now())
        return found

    def pull_ended(
        self, request_id: Hashable, cached_tokens: int, source: str = "", transfer: Transfer | None = None
    ) -> bool:
        """The pull of a live request, `request_id` (an id or a Decision), is over: its worker caches `cached_tokens` of
        its prompt and computes the rest from now on. `transfer`, a `scheduling.pulls.link_times.Transfer` from
        `source`, teaches what the next one takes; None where it waited for the pull of another request. Returns False
        if the request is not live, or has its first token already. Raises InvalidInput; then nothing has changed.
        O(1)."""
        from ..._placement.prefix_handoff import begin_after_transfer
        from .link_times import check_transfer

        check_int("cached_tokens", cached_tokens, 0, 2**31 - 1, InvalidInput)
        if transfer is not None:
            check_transfer(transfer)
        named, now = named_request(request_id), self.now()
        with self._lock:
            key, booked = self._booking(named)
            worker = booked.get("worker")
            if worker is None:
                return False
            if self._kv_moves is not None and transfer is not None:
                there = cached_tokens - booked["matched_tokens"] - transfer.moved_tokens
                self._kv_moves.end(key, source, worker, transfer, now, there)
            # What came of it may not be known; then what was estimated still holds.
            return begin_after_transfer(self.core, key, max(cached_tokens, booked["matched_tokens"]), now)

    def explain(
        self,
        token_ids: TokenIds,
        *,
        request_id: Hashable = None,
        namespace: Hashable = None,
        max_new_tokens: int | None = None,
        group: Hashable = None,
        session: SessionHint | None = None,
    ) -> Explanation:
        """Returns what `schedule` would choose now, and why: what every worker would cost, and where some can move KV
        the cheapest pull to the chosen one. Books nothing; with E2 it takes no lock, but for a pull.
        Arguments are those of `schedule`; `request_id` is for policies that look at it and need not be free. Raises
        InvalidTokens, InvalidInput, NoWorkers. O(tokens + workers)."""
        found = super().explain(
            token_ids,
            request_id=request_id,
            namespace=namespace,
            max_new_tokens=max_new_tokens,
            group=group,
            session=session,
        )
        moves = self._kv_moves
        if moves is None:
            return found
        pull = self._cheapest_pull(moves, found.worker, found.matched_tokens, False, token_ids, namespace, ())
        return replace(found, pull=pull)

    def _cheapest_pull(
        self,
        moves: KvMoves,
        worker_id: str,
        own_tokens: int,
        is_booked: bool,
        token_ids: TokenIds,
        namespace: Hashable,
        exclude: Collection[str],
    ) -> PullCost | None:
        match = self.match(token_ids, namespace=namespace)
        with self._lock:
            names = moves.sources(worker_id, own_tokens, match.matched_tokens, exclude)
            if not names or worker_id not in self._workers:
                return None
            from ..._placement.prefix_handoff import confirmed_on, pressure

            names = [name for name in names if name in self._workers]
            known = confirmed_on(self.core, token_ids, namespace, [self._workers[name].index for name in names])
            known = [self._in_blocks(name, tokens) for name, tokens in zip(names, known, strict=True)]
            cost, prompt = cost_at(self.core, self._workers[worker_id].index), match.prompt_tokens
            target = self._side(worker_id, own_tokens)
            if is_booked:
                booked = cost.prefill_time(prompt - own_tokens, prompt)
                target = target._replace(queue_seconds=max(target.queue_seconds - booked, 0.0))
            sources = [
                self._side(name, min(tokens, match.matched_tokens[name]))
                for name, tokens in zip(names, known, strict=True)
                if tokens > own_tokens
            ]
            return moves.cheapest(target, sources, prompt, cost, pressure(self.core), self.now())

    def _in_blocks(self, worker_id: str, tokens: int) -> int:
        """Of so many tokens those in whole blocks: engines hand over nothing else."""
        block_tokens: int = self._workers[worker_id].spec.block_size
        return tokens - tokens % block_tokens

    def _side(self, worker_id: str, matched_tokens: int) -> WorkerSide:
        from .price import WorkerSide

        load = self.core.loads.account(self._workers[worker_id].index)
        live, waiting = int(load["live_requests"]), int(load["waiting_requests"])
        return WorkerSide(worker_id, matched_tokens, load["waiting_prefill_seconds"], live, live - waiting)
