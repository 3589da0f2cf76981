"""What happened lately, in the order it was noticed: workers that changed, plans that began or ended. Owns the list and
its bound, EVENTS_MAX: older ones are gone, `total` says how many there were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

EVENTS_MAX = 200
EVENTS_SHOWN = 60


class DashboardEvents:
    """The list. Not thread-safe. Times are the scheduler's."""

    def __init__(self) -> None:
        self.total = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_MAX)
        self._plans: dict[int, str] = {}  # plan -> the state it was last seen in
        self._policy = ""

    def worker(self, worker: str, before: str, after: str, why: str, now: float) -> None:
        """A worker is in another state, or the same one in another life."""
        self._add(now, "worker", worker=worker, before=before, after=after, why=why)

    def policy(self, policy: str, now: float) -> None:
        """Which policy decides; an event where it is another one than before."""
        if self._policy and policy != self._policy:
            self._add(now, "policy", before=self._policy, after=policy)
        self._policy = policy

    def plans(self, plans: Mapping[str, Any], now: float) -> None:
        """The plans of `GlobalScheduler.stats`: an event for each that began, was carried out, or ended."""
        known, self._plans = self._plans, {}
        for plan in sorted([*plans.get("ended", ()), *plans.get("active", ())], key=lambda plan: int(plan["id"])):
            before, state = known.get(plan["id"]), str(plan["state"])
            self._plans[plan["id"]] = state
            if before is None:
                self._add_plan(plan, "began", plan["made_at"])
            if state == "ended" and before != "ended":
                self._add_plan(plan, "ended", plan["ended_at"] if plan["ended_at"] is not None else now)

    def _add_plan(self, plan: Mapping[str, Any], phase: str, at: float) -> None:
        names = ("from_worker", "to_worker", "prefix_tokens", "reason", "saved_seconds")
        why = plan["why"] if phase == "ended" else None
        self._add(at, plan["kind"], plan=plan["id"], phase=phase, why=why, **{name: plan[name] for name in names})

    def _add(self, at: float, kind: str, **fields: Any) -> None:
        self.total += 1
        self._events.append({"number": self.total, "at": at, "kind": kind, **fields})

    def latest(self, now: float) -> list[dict[str, Any]]:
        """The newest, newest first, with `seconds_ago` in place of `at`."""
        newest = [dict(event) for event in list(self._events)[: -EVENTS_SHOWN - 1 : -1]]
        return [{"seconds_ago": max(now - event.pop("at"), 0.0), **event} for event in newest]
