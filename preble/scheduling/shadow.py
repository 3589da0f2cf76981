"""A policy that decides on live traffic without effect. Owns its answers and the count of how they differ from what was
done; it books nothing and changes nothing, and what goes wrong in it stays in it.

The shadow is asked right before the decision, from the same tree, load and clock. The state that a policy
needs follows what was really done, so that each answer is the one for this moment, and not the end of a history of
its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from traceback import format_exception_only
from typing import Any

from .._placement.bookings import DecisionCore
from .._placement.decision import Decision
from .._placement.request_api import choice_to_come, output_limit
from ..policies.base import Policy, RequestView, resolve
from .records import ShadowChoice

PAIRS_MAX = 64  # pairs of reasons counted apart; the rest is counted as "other"
ERROR_CHARS_MAX = 200  # of the last error, as `stats` shows it


@dataclass(frozen=True, slots=True)
class ShadowAnswer:
    """What the shadow chose, and each worker's total in seconds, as E2 weighs it."""

    choice: ShadowChoice
    total_seconds: dict[str, float]


class Shadow:
    """One scheduler's shadow. `policy` as in `GlobalScheduler`; calls come under the writers' lock."""

    def __init__(self, policy: str | Policy | type[Policy]) -> None:
        self.policy = resolve(policy)
        self.name = "e2" if self.policy is None else self.policy.name
        self.needs: tuple[str, ...] = () if self.policy is None else tuple(self.policy.needs)
        self._counts = dict.fromkeys(("decisions", "agreements", "differences", "errors"), 0)
        self._pairs: dict[str, int] = {}
        self._saved_seconds = self._lost_seconds = 0.0
        self._last_error = ""

    def ask(self, core: DecisionCore, request: RequestView, now: float) -> ShadowAnswer | None:
        """What the shadow would do now; None, and counted, if it raised anything. E2 as a shadow sees a session where
        the tree shows it, not where a hint names it."""
        try:
            asked = request.token_ids, request.namespace, output_limit(request.max_new_tokens)
            chosen, reason, _, rows, names = choice_to_come(core, self.policy, *asked, now, request)
            totals = {names[index]: total for index, *_, total, _ in rows}
            return ShadowAnswer(ShadowChoice(self.name, names[chosen], reason), totals)
        except Exception as error:  # noqa: BLE001  it may be anybody's code, and the caller did not ask for it
            self._counts["errors"] += 1
            self._last_error = format_exception_only(error)[-1].strip()[:ERROR_CHARS_MAX]
            return None

    def compare(self, answer: ShadowAnswer | None, decision: Decision) -> None:
        """Count how the answer differs from the decision."""
        if answer is None:
            return
        if decision.worker not in answer.total_seconds:  # a policy has changed the fleet since the shadow was asked
            self._counts["errors"] += 1
            return
        self._counts["decisions"] += 1
        if answer.choice.worker == decision.worker:
            self._counts["agreements"] += 1
            return
        self._counts["differences"] += 1
        pair = f"{decision.reason} -> {answer.choice.reason}"
        if pair not in self._pairs and len(self._pairs) >= PAIRS_MAX:
            pair = "other"
        self._pairs[pair] = self._pairs.get(pair, 0) + 1
        saved = answer.total_seconds[decision.worker] - answer.total_seconds[answer.choice.worker]
        if saved > 0:
            self._saved_seconds += saved
        else:
            self._lost_seconds -= saved

    def stats(self) -> dict[str, Any]:
        """`decisions` compared, of them `agreements` and `differences`, these also by "live reason -> its reason";
        `seconds_saved` and `seconds_lost` by the different ones, had they been followed, by E2's totals."""
        return {
            "policy": self.name,
            **self._counts,
            "differences_by_reason": dict(self._pairs),
            "seconds_saved": self._saved_seconds,
            "seconds_lost": self._lost_seconds,
            "last_error": self._last_error,
        }
