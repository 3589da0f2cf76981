"""Session affinity: a session's requests go where its others went. Owns the two forms of it; what a session is, is
said at `known.PromptSession`, and the scheduler remembers where it was."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Policy, RequestView, WorkersView
from .known import PromptSession, by_rendezvous


class SessionHash(Policy):
    """Every session has a worker by rendezvous hashing, whatever the loads: LiteLLM's affinity between pods, and that
    of many load balancers (as of 2026).

    Left out: their session ids, for which `known.PromptSession` stands, and bindings that expire.
    """

    name = reason = "session_hash"
    needs = ("session",)

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        session: PromptSession = request.known["session"]
        order = by_rendezvous(session.key, workers.ids)
        return [float(order.index(i)) for i in range(len(workers))]


class SessionLeast(Policy):
    """A session's first request goes to the worker with the fewest live requests, by order among equals; the rest go
    where the one before went. NVIDIA Dynamo's hard affinity, with another rule for first requests (as of 2026).

    A session whose worker may not take requests begins anew. Left out: session ids, for which `known.PromptSession`
    stands, Dynamo's grouping of an agent's helpers with it, and its soft form.
    """

    name = reason = "session_least"
    needs = ("session",)

    def score(self, request: RequestView, workers: WorkersView) -> Sequence[float]:
        session: PromptSession = request.known["session"]
        return [float(name != session.home) for name in workers.ids]  # of equals the fewest live requests are picked
