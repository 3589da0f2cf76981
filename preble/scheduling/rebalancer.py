"""The plans that are being carried out. Owns which prefixes are redirected where and until when, the history of plans,
and their counts; what to plan is computed by `rebalance_planner.py`, what decisions make of a redirect is in
`_placement/e2.pyx`.

`tick` looks, proposes, and books what was proposed, each in short holds of the scheduler's lock. Decisions read one
table (`_placement/redirects.pyx`), which is empty while nothing is planned. docs/policies.md explains it to operators,
docs/experiments/rebalancing.md how plans are found.

Of several schedulers before the same workers one `leads`: it makes plans, the others `follow` them. Where the children
of a copied prefix go each works out from the requests of all, which it has booked.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, NamedTuple

from .._placement.bookings import DecisionCore
from .._placement.request_api import finite_time
from ..config import SchedulerConfig
from ..errors import InvalidInput
from .rebalance_planner import (
    GROW_LOAD,
    REBALANCE,
    REPLICA,
    SHARED_MAX,
    Group,
    Load,
    Move,
    Plan,
    Proposal,
    SharedPlan,
    by_node,
    homes_of,
    is_satisfied,
    propose_copy,
    propose_move,
    wants_fewer,
    why_grow,
)

State = tuple[tuple[str, Any], ...]  # of a snapshot: (name, plain values)
STATES = ("warming", "active", "ended")
REASONS = {REBALANCE: 3, REPLICA: 4}  # as `_placement/e2.pxd` numbers them
PLANS_MAX = 128  # active at once
HISTORY_MAX = 128  # ended ones that `stats` still lists
PLANS_A_TICK = 2  # of each kind
COPIES_MAX = 8  # workers that a prefix is redirected to, `TARGETS_MAX` of `_placement/redirects.pxd`
CHILDREN_MAX = 64  # of a copied prefix, that have a home
CHILDREN_LOOKED = 1024
REDIRECTS_MAX = 1024
SHARES, SLICE = 4096, 512  # places of the table of groups, and how many are read in one hold of the lock
LOAD_MIN = 0.02  # of a worker; lighter prefixes are not looked at
TICK_SECONDS = 0.5  # ticks that follow sooner plan nothing
LEAVE_SECONDS = 2.0  # a home that keeps requests waiting so much longer than another copy is not insisted on
SMOOTH_SECONDS = 5.0  # waits are averaged over about so long, to copy a prefix
LASTING_SECONDS = 30.0  # and so long, to move one: a queue that one long prompt made is gone by then

# Parts of the window: how long a prefix rests after it was copied once more, and after anything else was done about it.
GROW_REST, REST = 1 / 36, 1 / 6


class WarmUp(NamedTuple):
    """A prefix that a plan asks a worker to prefill: an ordinary request for one token."""

    plan: int
    worker: str
    token_ids: list[int]
    namespace: Hashable


@dataclass(slots=True)
class Work:
    """An active plan: where it leads, as indices of the core."""

    plan: Plan
    group: Group
    target: int
    asked: bool = False  # its warm-up was handed out


@dataclass(slots=True)
class ReplicatedPrefix:
    """A prefix that is served by several workers on purpose."""

    group: Group
    targets: list[int]
    homes: dict[int, int] = field(default_factory=dict)  # child -> worker
    children: dict[int, tuple[int, int]] = field(default_factory=dict)  # child -> generation, prefix tokens

    def add(self, worker: int) -> None:
        """One more worker serves it, unless it does so already or as many do as may."""
        if worker not in self.targets and len(self.targets) < COPIES_MAX:
            self.targets.append(worker)


def smoothed(known: dict[int, float], loads: Sequence[Load], passed: float, seconds: float) -> dict[int, float]:
    """Waits by worker, averaged over about `seconds`, when `passed` seconds have passed since `known`. A worker that is
    new begins with nothing that waits."""
    weight = 1.0 if passed < 0.0 else 1.0 - math.exp(-passed / seconds)
    before = {load.worker: known.get(load.worker, 0.0) for load in loads}
    return {load.worker: before[load.worker] + (load.waiting_seconds - before[load.worker]) * weight for load in loads}


def counted_groups(core: DecisionCore, now: float, load_min: float) -> list[Group]:
    """All prefix groups with at least that load. The lock is held for slices."""
    lock, rows = core.tree, core.groups.rows
    groups: list[Group] = []
    for start in range(0, SHARES, SLICE):
        with lock:
            groups += map(Group._make, rows(start, SLICE, now, load_min))
    return groups


class Rebalancer:
    """Rebalancing and prefix copies of one scheduler. Every method but `tick` comes under the writers' lock."""

    def __init__(self, core: DecisionCore, config: SchedulerConfig) -> None:
        self._core = core
        self._history_seconds = config.history_seconds
        self._ratio = config.rebalance_ratio
        self._floor_seconds = config.rebalance_floor_seconds
        self._copies_max = min(config.replicas_max, COPIES_MAX)
        self._warm_up_seconds = config.warm_up_seconds
        self._works: dict[int, Work] = {}  # plan id -> active plan
        self._copied: dict[int, ReplicatedPrefix] = {}  # node -> the workers that serve it
        self._resting: dict[int, tuple[float, float]] = {}  # node -> until when it may not grow, nor be moved or shrunk
        self._looked_at: list[str | None] = []  # who had which index when this tick's loads were read
        self._waits: dict[int, float] = {}  # worker -> smoothed seconds of prefill that wait
        self._lasting: dict[int, float] = {}
        self._ended: deque[Plan] = deque(maxlen=HISTORY_MAX)
        self._made: Counter[str] = Counter()
        self._why_ended: Counter[str] = Counter()
        self._left_out = 0  # plans and redirects that a bound left out
        self._numbers = 0
        self._ticked_at = -math.inf
        self._ticking = False
        self.leads = True  # else it carries out what another scheduler plans
        self.changes = 0  # of active plans
        core.groups.start()

    # --- once a second ------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Look, end what is over, propose and begin. The lock is held for slices only."""
        lock = self._core.tree
        with lock:
            if self._ticking or 0.0 <= now - self._ticked_at < TICK_SECONDS:
                return
            self._ticking = True
        try:
            with lock:
                loads, lasting = self._loads(now)
            groups = counted_groups(self._core, now, LOAD_MIN)
            with lock:
                changed = self._end_finished(groups, loads, now) if self.leads else self._end_forgotten(now)
            if self.leads:
                changed |= self._grow(groups, loads, now)
                changed |= self._move(groups, lasting, now)
            if changed or self._copied:
                self._settle_children(groups, {load.worker for load in loads if load.eligible}, now)
                with lock:
                    self.publish()
        finally:
            self._ticking = False

    def _loads(self, now: float) -> tuple[list[Load], list[Load]]:
        """The workers with what waits on them now and has waited for a while, or for longer."""
        self._looked_at = list(self._core.names)
        rows = [Load._make(row) for row in self._core.groups.workers(now)]
        passed, self._ticked_at = now - self._ticked_at, now
        self._waits = smoothed(self._waits, rows, passed, SMOOTH_SECONDS)
        self._lasting = smoothed(self._lasting, rows, passed, LASTING_SECONDS)
        quick, lasting = (
            [row._replace(waiting_seconds=min(row.waiting_seconds, waits[row.worker])) for row in rows]
            for waits in (self._waits, self._lasting)
        )
        return quick, lasting

    def _recompute(self, group: Group, worker: int) -> float:
        with self._core.tree:
            if self._core.names[worker] is None or not self._core.groups.lives(group.node, group.generation):
                return math.inf
            return self._core.groups.recompute_seconds(group.node, worker)

    # --- beginning ----------------------------------------------------------------------------------------------------

    def _grow(self, groups: Sequence[Group], loads: Sequence[Load], now: float) -> bool:
        """Copy the hot prefixes that want it once more."""
        if self._copies_max < 2:
            return False
        eligible = {load.worker for load in loads if load.eligible}
        begun = 0
        shares_of = by_node(groups)
        for node in sorted(shares_of, key=lambda n: (-sum(g.load for g in shares_of[n]), n)):
            shares = shares_of[node]
            holders = self._holders(node, shares) & eligible
            reason = why_grow(shares, max(len(holders), 1))
            if reason is None or len(holders) >= self._copies_max or self._rests(node, now)[0]:
                continue
            proposal = propose_copy(shares, holders, loads, self._recompute, reason)
            if proposal is not None and self._begin(proposal, now, holders):
                begun += 1
                if begun >= PLANS_A_TICK:
                    break
        return begun > 0

    def _holders(self, node: int, shares: Sequence[Group]) -> set[int]:
        """The workers that serve a prefix, on purpose or because they came to hold it, or will once they are warm."""
        found = {share.worker for share in shares}
        with self._core.tree:
            if node in self._copied:
                found |= {*self._copied[node].targets, *(work.target for work in self._replicas(node))}
        return found

    def _replicas(self, node: int) -> list[Work]:
        """The active plans that copy a prefix, oldest first."""
        return [work for work in self._works.values() if work.group.node == node and work.plan.kind == REPLICA]

    def _move(self, groups: Sequence[Group], loads: Sequence[Load], now: float) -> bool:
        """Send prefixes of heavy workers to light ones."""
        begun = 0
        while self._ratio and begun < PLANS_A_TICK:
            resting = {node for node in {g.node for g in groups} if self._rests(node, now)[1]}
            resting |= {work.group.node for work in list(self._works.values())} | self._copied.keys()
            proposal = propose_move(
                groups, loads, self._moves(now), resting, self._recompute,
                ratio=self._ratio, floor_seconds=self._floor_seconds,
            )  # fmt: skip
            if proposal is None or not self._begin(proposal, now, ()):
                break
            begun += 1
        return begun > 0

    def _moves(self, now: float) -> list[Move]:
        """What the redirects have not moved yet: all of it when they begin, nothing when a window has passed."""
        return [
            Move(work.group.worker, work.target, work.group.window_seconds * left)
            for work in list(self._works.values())  # without the lock: a worker may be removed meanwhile
            if work.plan.kind == REBALANCE and (left := 1.0 - (now - work.plan.made_at) / self._history_seconds) > 0.0
        ]

    def _rests(self, node: int, now: float) -> tuple[bool, bool]:
        """Whether a prefix may not grow yet, and may not be moved or shrunk yet."""
        grow, other = self._resting.get(node, (-math.inf, -math.inf))
        return now < grow, now < other

    def _begin(self, proposal: Proposal, now: float, holders: Any) -> bool:
        """Carry out what a tick proposes, unless an index it means is another worker's by now."""
        with self._core.tree:
            names, meant = self._core.names, self._looked_at
            for worker in (proposal.group.worker, proposal.target, *holders):
                if worker >= len(meant) or names[worker] != meant[worker]:
                    return False
            return self.begin(proposal, now, holders) is not None

    def begin(self, proposal: Proposal, now: float, holders: Any = ()) -> Plan | None:
        """Carry out a proposal, unless its prefix has gone, a worker of it has, or a bound leaves it out (counted).
        `holders`: of a copy, the workers that serve the prefix so far."""
        group, core = proposal.group, self._core
        names = (core.names[group.worker], core.names[proposal.target])
        if not core.groups.lives(group.node, group.generation) or None in names:
            return None
        if len(self._works) >= PLANS_MAX:
            self._left_out += 1
            return None
        self._numbers += 1
        plan = Plan(
            id=self._numbers,
            kind=proposal.kind,
            namespace=core.groups.namespace(group.node),
            prefix_tokens=group.prefix_tokens,
            from_worker=str(names[0]),
            to_worker=str(names[1]),
            reason=proposal.reason,
            saved_seconds=proposal.saved_seconds,
            made_at=now,
            expires_at=None if proposal.kind == REPLICA else now + self._history_seconds,
            state="warming" if self._warm_up_seconds else "active",
        )
        self._works[plan.id] = Work(plan, group, proposal.target)
        self.changes += 1
        self._made[plan.kind] += 1
        if plan.kind == REPLICA:
            served = sorted(holders) or [group.worker]
            copied = self._copied.setdefault(group.node, ReplicatedPrefix(group, served))
            if not self._warm_up_seconds:
                copied.add(proposal.target)
        self._rest(group.node, now)
        return plan

    def _rest(self, node: int, now: float) -> None:
        self._resting[node] = (now + GROW_REST * self._history_seconds, now + REST * self._history_seconds)

    # --- ending -------------------------------------------------------------------------------------------------------

    def _end_finished(self, groups: Sequence[Group], loads: Sequence[Load], now: float) -> bool:
        """End what is over, and let what has waited long enough for its warm-up go on without."""
        before = len(self._works)
        level = {load.worker: load.load_seconds for load in loads}
        eligible = {load.worker for load in loads if load.eligible}
        changed = False
        for work in list(self._works.values()):
            why = self._why_over(work, level, eligible, now)
            if why is not None:
                self._end(work, why, now)
            elif work.plan.state == "warming" and now >= work.plan.made_at + self._warm_up_seconds:
                self.warmed(work.plan.id)
                changed = True
        changed |= self._shrink(by_node(groups), now)
        self._end_unserved(now)
        self._resting = {node: until for node, until in self._resting.items() if now < max(until)}
        return changed or len(self._works) != before

    def _why_over(self, work: Work, level: dict[int, float], eligible: set[int], now: float) -> str | None:
        plan, group = work.plan, work.group
        if not self._core.groups.lives(group.node, group.generation):
            return "the prefix was forgotten"
        if work.target not in eligible:
            return "the target takes no requests"
        if plan.expires_at is not None and (now >= plan.expires_at or now < plan.made_at):
            return "expired"
        if plan.kind == REBALANCE:
            if group.worker not in eligible:
                return "the source takes no requests"
            if is_satisfied(level.get(group.worker, 0.0), level.get(work.target, 0.0)):
                return "the loads have met"
        return None

    def _shrink(self, shares_of: dict[int, list[Group]], now: float) -> bool:
        """Take the copy back that was made last, where one fewer would do."""
        shrunk = False
        for node in list(self._copied):
            shares = shares_of.get(node, ())
            if wants_fewer(sum(g.load for g in shares), len(self._holders(node, shares))):
                works = self._replicas(node)
                if works and not self._rests(node, now)[1]:
                    self._end(works[-1], "the load fell", now)
                    self._rest(node, now)
                    shrunk = True
        return shrunk

    def _end(self, work: Work, why: str, now: float) -> None:
        del self._works[work.plan.id]
        self.changes += 1
        self._ended.append(replace(work.plan, state="ended", ended_at=now, why=why))
        self._why_ended[why] += 1
        copied = self._copied.get(work.group.node)
        if work.plan.kind != REPLICA or copied is None:
            return
        if work.target in copied.targets:
            copied.targets.remove(work.target)
        if not self._replicas(work.group.node):
            del self._copied[work.group.node]

    def _end_unserved(self, now: float) -> None:
        """End the copies of prefixes whose last worker has gone while they were warming."""
        for node in [node for node, copied in self._copied.items() if not copied.targets]:
            for work in self._replicas(node):
                self._end(work, "nobody serves the prefix", now)

    def worker_left(self, index: int, now: float) -> None:
        """A worker is removed: nothing leads to it or from it any more, for its index may be given to another."""
        for work in list(self._works.values()):
            if index in (work.target, work.group.worker):
                self._end(work, "a worker was removed", now)
        for copied in self._copied.values():
            copied.targets = [target for target in copied.targets if target != index]
            copied.homes = {child: home for child, home in copied.homes.items() if home != index}
        self._end_unserved(now)
        self._waits.pop(index, None)
        self._lasting.pop(index, None)
        self.publish()

    # --- one plans, the others follow ---------------------------------------------------------------------------------

    def shared(self, now: float) -> list[SharedPlan]:
        """The active plans, oldest first, for schedulers that follow."""
        core, found = self._core, []
        for work in self._works.values():
            plan, group = work.plan, work.group
            if not core.groups.lives(group.node, group.generation):
                continue
            namespace, token_ids = core.groups.prefix(group.node)
            others = self._served_before(group.node) if plan.kind == REPLICA else []
            found.append(
                SharedPlan(
                    *(plan.kind, namespace, token_ids, plan.from_worker, plan.to_worker),
                    *(plan.reason, plan.saved_seconds, now - plan.made_at),
                    None if plan.expires_at is None else plan.expires_at - now,
                    plan.state == "active",
                    tuple(name for target in others if (name := core.names[target]) is not None),
                )
            )
        return found

    def _served_before(self, node: int) -> list[int]:
        """The workers of a copied prefix that no plan leads to."""
        copied = self._copied.get(node)
        planned = {work.target for work in self._works.values() if work.group.node == node}
        return [] if copied is None else [target for target in copied.targets if target not in planned]

    def follow(self, plans: Sequence[SharedPlan], now: float) -> None:
        """Carry out these plans, the first `SHARED_MAX` of them, and no others. One whose prefix or workers are not
        known here waits for the next call; one that is not among them any more has ended."""
        groups = [Group._make(row) for row in self._core.groups.rows(0, SHARES, now, 0.0)]
        followed = list(self._works.values())
        kept = set()
        for plan in plans[:SHARED_MAX]:
            known = (w for w in followed if (w.plan.kind, w.plan.to_worker) == (plan.kind, plan.to_worker))
            work = next((w for w in known if self._is_prefix(w.group, plan)), None) or self._take_on(plan, groups, now)
            if work is not None:
                kept.add(work.plan.id)
                if plan.is_active:
                    self.warmed(work.plan.id)
        for work in list(self._works.values()):
            if work.plan.id not in kept:
                self._end(work, "it ended where it was made", now)
        self._end_unserved(now)
        self.publish()

    def _is_prefix(self, group: Group, plan: SharedPlan) -> bool:
        """Whether a plan is about the prefix of a group."""
        if group.prefix_tokens != len(plan.token_ids) or not self._core.groups.lives(group.node, group.generation):
            return False
        namespace, token_ids = self._core.groups.prefix(group.node)
        return bool(namespace == plan.namespace and list(token_ids) == list(plan.token_ids))

    def _take_on(self, shared: SharedPlan, groups: Sequence[Group], now: float) -> Work | None:
        """Begin with a plan, if its prefix is counted here and its workers are."""
        index = {name: number for number, name in enumerate(self._core.names) if name is not None}
        source = index.get(shared.from_worker)
        if source is None or shared.to_worker not in index:
            return None
        of_node = {group.node: group for group in groups if group.prefix_tokens == len(shared.token_ids)}
        of_node |= {group.node: group for group in groups if group.node in of_node and group.worker == source}
        group = next((group for group in of_node.values() if self._is_prefix(group, shared)), None)
        if group is None:
            return None
        group = group._replace(worker=source)
        holders = [index[name] for name in shared.holders if name in index]
        proposal = Proposal(shared.kind, group, index[shared.to_worker], shared.reason, shared.saved_seconds)
        plan = self.begin(proposal, now, holders)
        if plan is None:
            return None
        work = self._works[plan.id]
        left = shared.expires_in_seconds
        work.plan = replace(plan, made_at=now - shared.age_seconds, expires_at=None if left is None else now + left)
        work.asked = True  # whoever made the plan asks for its warm-up
        return work

    def _end_forgotten(self, now: float) -> bool:
        """Of plans that are followed, end those whose prefix has gone here."""
        gone = [w for w in self._works.values() if not self._core.groups.lives(w.group.node, w.group.generation)]
        for work in gone:
            self._end(work, "the prefix was forgotten", now)
        return bool(gone)

    # --- warming up ---------------------------------------------------------------------------------------------------

    def warm_ups(self) -> list[WarmUp]:
        """Of plans that wait for it, what their workers should prefill; each is handed out once."""
        found = []
        for work in self._works.values():
            if work.plan.state == "warming" and not work.asked:
                work.asked = True
                if self._core.groups.lives(work.group.node, work.group.generation):
                    namespace, token_ids = self._core.groups.prefix(work.group.node)
                    found.append(WarmUp(work.plan.id, work.plan.to_worker, token_ids, namespace))
        return found

    def warmed(self, plan_id: int) -> bool:
        """Let the traffic of a plan move. False if it does not wait for that."""
        work = self._works.get(plan_id)
        if work is None or work.plan.state != "warming":
            return False
        work.plan = replace(work.plan, state="active")
        self.changes += 1
        if work.plan.kind == REPLICA and work.group.node in self._copied:
            self._copied[work.group.node].add(work.target)
        self.publish()
        return True

    # --- the table ----------------------------------------------------------------------------------------------------

    def _settle_children(self, groups: Sequence[Group], eligible: set[int], now: float) -> None:
        """Give the children of copied prefixes a home."""
        loads: defaultdict[int, float] = defaultdict(float)
        requests: Counter[int] = Counter()
        holders: defaultdict[int, set[int]] = defaultdict(set)
        for group in groups:
            if group.worker in eligible:
                holders[group.node].add(group.worker)
            loads[group.node] += group.load
            requests[group.node] += group.requests
        for node in list(self._copied):
            with self._core.tree:
                copied = self._copied.get(node)
                if copied is None or not self._core.groups.lives(node, copied.group.generation) or not requests[node]:
                    continue
                workers = sorted(w for w in holders[node] | set(copied.targets) if self._core.names[w] is not None)
                if not workers:
                    continue
                rows = self._core.groups.children(node, now, CHILDREN_LOOKED)
                rows = sorted(rows, key=lambda row: (-row[3], row[0]))[:CHILDREN_MAX]
                each = loads[node] / requests[node]
                copied.children = {child: (generation, tokens) for child, generation, tokens, _ in rows}
                shares = {row[0]: row[3] * each for row in rows}
                copied.homes = homes_of(shares, workers, copied.homes, GROW_LOAD / 2)

    def _redirects(self) -> Iterator[tuple[int, int, int, int | None, int, tuple[int, ...]]]:
        """All redirects, the most important of a node first."""
        for work in self._works.values():
            if work.plan.kind != REPLICA and work.plan.state == "active":
                source = work.group.worker
                yield (*work.group[:2], work.group.prefix_tokens, source, REASONS[REBALANCE], (work.target,))
        for copied in self._copied.values():
            if len(copied.targets) > 1:
                yield (*copied.group[:2], copied.group.prefix_tokens, None, REASONS[REPLICA], tuple(copied.targets))
        for copied in self._copied.values():
            if len(copied.targets) > 1:
                behind = LEAVE_SECONDS + min(self._waits.get(target, 0.0) for target in copied.targets)
                for child, home in copied.homes.items():
                    if self._waits.get(home, 0.0) <= behind:
                        yield (child, *copied.children[child], None, REASONS[REPLICA], (home,))

    def publish(self) -> None:
        """Let decisions see what is redirected now."""
        redirects: dict[int, Any] = {}
        for redirect in self._redirects():
            if len(redirects) < REDIRECTS_MAX:
                redirects.setdefault(redirect[0], redirect)
            else:
                self._left_out += 1
        wanted = sorted(redirects.values())
        if wanted != self._core.redirects.show():
            self._core.redirects.put(wanted)

    # --- as plain values, for snapshots -------------------------------------------------------------------------------

    def state(self) -> State:
        """All of it. Indices of nodes, workers and leases mean the same in a restored scheduler."""
        return (
            ("shares", tuple(self._core.groups.shares_kept())),
            ("crowded_out", self._core.groups.crowded_out),
            ("works", tuple((astuple(w.plan), tuple(w.group), w.target, w.asked) for w in self._works.values())),
            ("copied", tuple(
                (tuple(c.group), tuple(c.targets), tuple(c.homes.items()), tuple(c.children.items()))
                for c in self._copied.values()
            )),
            ("resting", tuple(self._resting.items())),
            ("waits", (tuple(self._waits.items()), tuple(self._lasting.items()))),
            ("ended", tuple(map(astuple, self._ended))),
            ("made", tuple(self._made.items())),
            ("why_ended", tuple(self._why_ended.items())),
            ("numbers", (self._left_out, self._numbers)),
            ("ticked_at", self._ticked_at),
        )  # fmt: skip

    def restore(self, state: State) -> None:
        """Go on, in a new scheduler, from what `state` said. Raises InvalidInput, TypeError, ValueError or KeyError for
        what nobody has written."""
        found = dict(state)
        core, workers = self._core, len(self._core.names)
        core.groups.keep_shares(list(found["shares"]), found["crowded_out"])
        for plan, row, target, asked in found["works"]:
            work = Work(_plan_of(plan), _group_of(row), target, bool(asked))
            _need(0 <= target < workers and core.names[target] == work.plan.to_worker, "a plan's worker")
            _need(work.plan.state != "ended", "a plan's state")
            self._works[work.plan.id] = work
        for row, targets, homes, children in found["copied"]:
            copied = ReplicatedPrefix(_group_of(row), list(targets), dict(homes), dict(children))
            _need(0 < len(set(targets)) == len(targets) <= COPIES_MAX, "the copies of a prefix")
            used = {*targets, *copied.homes.values()}
            _need(all(0 <= t < workers and core.names[t] is not None for t in used), "the workers of a prefix")
            _need(copied.homes.keys() <= copied.children.keys() and len(copied.children) <= REDIRECTS_MAX, "children")
            self._copied[copied.group.node] = copied
        self._resting.update({int(node): (_time(a), _time(b)) for node, (a, b) in found["resting"]})
        for waits, pairs in zip((self._waits, self._lasting), found["waits"], strict=True):
            waits.update({int(worker): _time(seconds) for worker, seconds in pairs})
        self._ended.extend(map(_plan_of, found["ended"]))
        self._made.update(counts_of(found["made"]))
        self._why_ended.update(counts_of(found["why_ended"]))
        self._left_out, self._numbers = map(int, found["numbers"])
        self._ticked_at = found["ticked_at"] if found["ticked_at"] == -math.inf else _time(found["ticked_at"])
        _need(len(self._works) <= PLANS_MAX and len(found["ended"]) <= HISTORY_MAX, "more plans than there may be")
        self.publish()

    # --- questions ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Plans, as plain dicts: those that are active, and the latest that have ended."""
        return {
            "active": [work.plan.as_dict() for work in self._works.values()],
            "ended": [plan.as_dict() for plan in self._ended],
            "made": dict(self._made),
            "why_ended": dict(self._why_ended),
            "left_out": self._left_out,
            "groups": self._core.groups.live,
            "crowded_out": self._core.groups.crowded_out,
            "redirects": self._core.redirects.count,
        }

    def check(self) -> None:
        """Assert that what is redirected is what the plans say, and that every bound holds."""
        core = self._core
        core.groups.check()
        core.redirects.check()
        assert len(self._works) <= PLANS_MAX
        assert len(self._ended) <= HISTORY_MAX
        assert sum(self._made.values()) == len(self._works) + sum(self._why_ended.values()), "plans were lost"
        for work in self._works.values():
            assert core.names[work.target] == work.plan.to_worker, f"plan {work.plan.id} leads to another worker"
        for node, copied in self._copied.items():
            assert 0 < len(copied.targets) <= COPIES_MAX, f"copies of {node}"
            assert len(set(copied.targets)) == len(copied.targets), f"copies of {node}: one worker twice"
            assert len(copied.homes) <= CHILDREN_MAX and copied.homes.keys() <= copied.children.keys()
        for *_, targets in core.redirects.show():
            assert all(core.names[target] is not None for target in targets), "a redirect leads to a worker that left"


# --- what a snapshot says, checked ------------------------------------------------------------------------------------


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


def counts_of(pairs: Any) -> dict[str, int]:
    """Counters by name. Raises InvalidInput, TypeError or ValueError."""
    counts = dict(pairs)
    if not all(type(name) is str and type(count) is int and count >= 0 for name, count in counts.items()):
        raise InvalidInput("a counter is no number")
    return counts


def _need(fits: bool, what: str) -> None:
    if not fits:
        raise InvalidInput(f"plans: {what}")
