"""What `GlobalScheduler` is asked about prompts and outputs apart. Owns the way in: arguments, the lock, and what a
decision is made with; which pair it is, and what is booked, is `placing.py`'s.

Loads nothing of pairs before it is asked about one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ..._placement.request_api import RequestApi, iterable
from ...lazy_typing import TYPE_CHECKING, Any
from ...types import Explanation, PairDecision, Priority, SessionHint, claim_of
from ..leases import named_request

if TYPE_CHECKING:
    from ..._core.token_types import TokenIds
    from ..._radix import RadixTree
    from ..pulls.price import KvMoves
    from ..recording import Recorder
    from ..tenants import Tenants
    from .halves import PairHalves
    from .placing import PairWorld


class PairCalls(RequestApi):
    """The calls about pairs; `GlobalScheduler` has what they are made of. Thread-safe."""

    _lock: RadixTree
    _workers: dict[str, Any]
    _recorder: Recorder | None
    _tenants: Tenants | None
    _kv_moves: KvMoves | None = None
    _pairs: PairHalves | None = None  # where some workers do not do both

    def schedule_pair(
        self,
        token_ids: TokenIds,
        *,
        request_id: Hashable = None,
        namespace: Hashable = None,
        max_new_tokens: int | None = None,
        exclude: Iterable[str] = (),
        session: SessionHint | None = None,
        tenant: str | None = None,
        deadline_seconds: float | None = None,
        priority: Priority | None = None,
        group: Hashable = None,
    ) -> PairDecision:
        """As `schedule`, also on workers whose `WorkerSpec.role` is not "both", which `schedule` gives nothing: on one
        worker that does both, or its prefill on one and its decode on another, whichever costs less, transfer included.
        Returns what is booked; `finish` or `cancel` of the request's id ends both halves, `prefill_done` that of the
        prefill, and `first_token` says that the KV has come. A deadline, and batch work, are about who prefills.
        Samples of a `group` stay whole: they are `schedule`'s, unless nobody does both. Raises as `schedule`.
        O(tokens + workers)."""
        from .placing import AskedPair, place_pair

        claim = None
        if tenant is not None or deadline_seconds is not None or priority is not None:
            claim = claim_of(tenant, deadline_seconds, priority)
        left_out = [*iterable("exclude", exclude)]
        asked = AskedPair(token_ids, request_id, namespace, max_new_tokens, left_out, session, claim, group)
        with self._lock:
            return place_pair(self, self._pair_world(), asked)

    def explain_pair(
        self,
        token_ids: TokenIds,
        *,
        namespace: Hashable = None,
        max_new_tokens: int | None = None,
        exclude: Iterable[str] = (),
        session: SessionHint | None = None,
    ) -> Explanation:
        """Returns the decision that `schedule_pair` would make now. Arguments are those of `schedule_pair`. For one
        worker it is that of `explain`, and `pair` is what costs more. For a pair `worker` is the one that prefills, and
        `workers` are those that may: what a request costs with each, in its cheaper way, the transfer among
        `decode_seconds`. Books nothing. Raises as `schedule_pair`. O(tokens + workers^2)."""
        from .placing import AskedPair, explain_pair

        asked = AskedPair(token_ids, None, namespace, max_new_tokens, [*iterable("exclude", exclude)], session)
        with self._lock:
            return explain_pair(self, self._pair_world(), asked)

    def prefill_done(self, request_id: Hashable, *, cached_tokens: int | None = None) -> bool:
        """The prefill of a pair's request, `request_id`, is done, and its booking ends; `cached_tokens`: as for
        `first_token`. Returns False if none is booked. Raises InvalidInput; then nothing has changed. O(1)."""
        named = named_request(request_id)
        with self._lock:
            key = None if self._pairs is None else self.core.live_key(named)
            half = None if self._pairs is None else self._pairs.half_of(key)
            if half is None or not super().first_token(half, cached_tokens=cached_tokens):
                return False
            for one in (self._recorder, self._tenants):  # its first token is this one
                if one is not None:
                    one.on_first_token(key, self.now(), cached_tokens)
            return self._end(half, None)

    def renew(self, request_id: Hashable) -> bool:
        """The request is still wanted: its time to live (`SchedulerConfig.lease_seconds`) begins anew. `request_id`:
        the request's, or its Decision. Returns False, and counts it, if it is not live. Nothing else renews it but
        `reconcile`. Raises InvalidInput. O(1)."""
        if not super().renew(request_id):
            return False
        if self._pairs is not None:
            named = named_request(request_id)
            with self._lock:
                half = self._pairs.half_of(self.core.live_key(named))
                if half is not None:
                    self.core.renew(half, self.now())
        return True

    def _pair_world(self) -> PairWorld | None:
        """What a decision is made with; None where all workers do both. Under the lock."""
        if self._pairs is None:
            return None
        from .placing import PairWorld

        draining = [name for name, worker in self._workers.items() if worker.draining]
        room = {name: worker.spec.kv_capacity_tokens for name, worker in self._workers.items()}
        return PairWorld(self._pairs, self._kv_moves, self._policy, draining, room, self._recorder, self._accounts)

    def _accounts(self) -> Tenants:
        """Of tenants, made when they are first needed. Under the lock."""
        if self._tenants is None:
            from ..charges import service_in
            from ..tenants import Tenants

            self._tenants = Tenants(service_in(self.core))  # it holds the core, and not this scheduler
        return self._tenants
