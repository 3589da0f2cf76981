"""Prefix groups and plans as plain values for a snapshot, and back. Owns what of them is kept and what is checked; the
envelope is `snapshot.py`'s. Indices of nodes, workers and leases mean the same in a restored scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple
from typing import Any

from ._placement.request_api import finite_time
from .errors import InvalidInput
from .scheduling.rebalance_planner import Group, Plan
from .scheduling.rebalancer import COPIES_MAX, HISTORY_MAX, PLANS_MAX, REASONS, STEERS_MAX, Shifts, Steered, Work

State = tuple[tuple[str, Any], ...]
STATES = ("warming", "active", "ended")


def taken(shifts: Shifts | None) -> State | None:
    """All of it, None where there are no plans to be made. Under the lock."""
    if shifts is None:
        return None
    return (
        ("shares", tuple(shifts._core.groups.shares_kept())),
        ("crowded_out", shifts._core.groups.crowded_out),
        ("works", tuple((_plain(w.plan), tuple(w.group), w.target, w.asked) for w in shifts._works.values())),
        ("copied", tuple(
            (tuple(c.group), tuple(c.targets), _pairs(c.homes), _pairs(c.children)) for c in shifts._copied.values()
        )),
        ("resting", _pairs(shifts._resting)),
        ("waits", (_pairs(shifts._waits), _pairs(shifts._lasting))),
        ("ended", tuple(map(_plain, shifts._ended))),
        ("made", _pairs(shifts._made)),
        ("why_ended", _pairs(shifts._why_ended)),
        ("numbers", (shifts._left_out, shifts._numbers)),
        ("ticked_at", shifts._ticked_at),
    )  # fmt: skip


def _plain(plan: Plan) -> tuple[Any, ...]:
    return astuple(plan)


def _pairs(mapping: Mapping[Any, Any]) -> tuple[tuple[Any, Any], ...]:
    return tuple(mapping.items())


def give(shifts: Shifts | None, state: State | None) -> None:
    """Let a new scheduler's plans go on from `state`. Raises InvalidInput, TypeError, ValueError or KeyError for what
    nobody has written."""
    if shifts is None or state is None:
        return
    facts = dict(state)
    core, workers = shifts._core, len(shifts._core.names)
    shifts._core.groups.keep_shares(list(facts["shares"]), facts["crowded_out"])
    for plan, row, target, asked in facts["works"]:
        work = Work(_plan_of(plan), _group_of(row), target, bool(asked))
        _need(0 <= target < workers and core.names[target] == work.plan.to_worker, "a plan's worker")
        _need(work.plan.state != "ended", "a plan's state")
        shifts._works[work.plan.id] = work
    for row, targets, homes, children in facts["copied"]:
        copied = Steered(_group_of(row), list(targets), dict(homes), dict(children))
        _need(0 < len(set(targets)) == len(targets) <= COPIES_MAX, "the copies of a prefix")
        used = {*targets, *copied.homes.values()}
        _need(all(0 <= t < workers and core.names[t] is not None for t in used), "the workers of a prefix")
        _need(copied.homes.keys() <= copied.children.keys() and len(copied.children) <= STEERS_MAX, "children")
        shifts._copied[copied.group.node] = copied
    shifts._resting.update({int(node): (_time(a), _time(b)) for node, (a, b) in facts["resting"]})
    for waits, pairs in zip((shifts._waits, shifts._lasting), facts["waits"], strict=True):
        waits.update({int(worker): _time(seconds) for worker, seconds in pairs})
    shifts._ended.extend(map(_plan_of, facts["ended"]))
    shifts._made.update(_counts_of(facts["made"]))
    shifts._why_ended.update(_counts_of(facts["why_ended"]))
    shifts._left_out, shifts._numbers = map(int, facts["numbers"])
    shifts._ticked_at = facts["ticked_at"] if facts["ticked_at"] == float("-inf") else _time(facts["ticked_at"])
    _need(len(shifts._works) <= PLANS_MAX and len(facts["ended"]) <= HISTORY_MAX, "more plans than there may be")
    shifts.publish()


def _plan_of(values: Iterable[Any]) -> Plan:
    plan = Plan(*values)
    _need(plan.kind in REASONS and plan.state in STATES and type(plan.id) is int, "a plan")
    for seconds in (plan.saved_seconds, plan.made_at, plan.expires_at, plan.ended_at):
        if seconds is not None:
            _time(seconds)
    return plan


def _group_of(values: Iterable[Any]) -> Group:
    group = Group._make(values)
    _need(all(type(number) is int and 0 <= number < 2**32 for number in group[:5]), "a prefix group")
    for number in group[5:]:
        _time(number)
    return group


def _time(seconds: Any) -> float:
    return finite_time("a plan's number", seconds)


def _counts_of(pairs: Any) -> dict[str, int]:
    counts = dict(pairs)
    _need(all(type(name) is str and type(count) is int and count >= 0 for name, count in counts.items()), "a counter")
    return counts


def _need(fits: bool, what: str) -> None:
    if not fits:
        raise InvalidInput(f"plans: {what}")
