"""What to do about load that moves: which prefix to move, which to copy. Pure functions from rows to plans; the only
place where the thresholds of rebalancing and of prefix autoscaling are compared. Paper section 4.2, "Post assignment
load adjustment" and "Prefill-decode balancing" before it; docs/experiments/rebalancing.md says it in words.

Nothing here books or redirects anything: `rebalancer.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

REBALANCE, REPLICA = "rebalance", "replica"
SATISFIED_RATIO = 1.2  # a rebalancing ends when the heavier has no more than this times the lighter's load
RECOMPUTE_PAID = 2.0  # times a move pays the recompute
GAIN_SECONDS_MIN = 1.0  # that the next request must wait less, its recompute paid, for anything to be done
MOVE_GAIN_SECONDS_MIN = 2.0  # the same for a move, which helps less and later
UNEVEN = 2.0  # times the lighter's, that the heavier's waits must be: near saturation all wait, and moves cost most
REQUESTS_MIN = 4  # within the window; a prefix that is hardly asked for is not worth a plan
CANDIDATES = 8  # prefixes looked at for one move, and workers from the heaviest on
GROW_LOAD = 0.8  # of a worker, for each that serves a prefix: above it wants one more
SHRINK_LOAD = 0.5  # what each of one fewer may have at most
DOUBLED = 2.0  # waits of this half of the window over the half before
WAIT_SECONDS_MIN = 0.5  # shorter ones may double as they like
OVERFULL = 1.5  # times its part of the children's load, beyond which a worker gives some away
UNDERFULL = 0.5  # times its part, below which it is given some
SHARED_MAX = 128  # plans that are carried out for another scheduler
WAIT_LOAD = 1 / 3  # of its worker, that a prefix whose waits have doubled must take to be the reason


class Group(NamedTuple):
    """A prefix on a worker, as `_placement/prefix_groups.pyx` counts it."""

    node: int
    generation: int
    worker: int
    prefix_tokens: int
    requests: int
    load: float  # share of the worker's time
    window_seconds: float  # work within the window
    wait_before: float  # mean seconds, of the earlier half of the window; -1.0: no first token came
    wait_now: float


class Load(NamedTuple):
    """A worker: L, and the seconds of prefill that wait on it."""

    worker: int
    eligible: bool
    load_seconds: float
    waiting_seconds: float


class Move(NamedTuple):
    """Work on its way from one worker to another: seconds within the window that have not moved yet."""

    source: int
    target: int
    seconds: float


class Proposal(NamedTuple):
    """A prefix that had better be served by `target`, too, or instead of `group.worker`."""

    kind: str
    group: Group
    target: int
    reason: str
    saved_seconds: float  # what the next request waits less there, its recompute paid


Recompute = Callable[[Group, int], float]  # seconds a worker takes to prefill what it lacks of a prefix


@dataclass(frozen=True, slots=True)
class Plan:
    """One thing that was done about a prefix. `state` is "warming", "active" or "ended"; times are the scheduler's.

    `saved_seconds` is what the next request was expected to wait less when the plan was made. `expires_at` is None for
    a replica, which ends when its load does. `why` says how it ended, None before.
    """

    id: int
    kind: str
    namespace: Hashable
    prefix_tokens: int
    from_worker: str
    to_worker: str
    reason: str
    saved_seconds: float
    made_at: float
    expires_at: float | None
    state: str = "active"
    ended_at: float | None = None
    why: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Its fields. The namespace is the user's own object and is not copied, as `dataclasses.asdict` would."""
        return {name: getattr(self, name) for name in self.__slots__}


class SharedPlan(NamedTuple):
    """An active plan as schedulers of the same workers report it to each other: one makes it, all carry it out. The
    prefix by its tokens, times as ages, for nodes and clocks are each scheduler's own. `holders`: of a copy, the
    workers that served the prefix before it. `expires_in_seconds`: None for a copy."""

    kind: str
    namespace: Hashable
    token_ids: Sequence[int]
    from_worker: str
    to_worker: str
    reason: str
    saved_seconds: float
    age_seconds: float
    expires_in_seconds: float | None
    is_active: bool
    holders: tuple[str, ...] = ()


# --- rebalancing ------------------------------------------------------------------------------------------------------


def propose_move(
    groups: Sequence[Group],
    loads: Sequence[Load],
    moves: Iterable[Move],
    resting: Collection[int],
    recompute: Recompute,
    *,
    ratio: float,
    floor_seconds: float,
) -> Proposal | None:
    """The prefix of a heavy worker that had better go to the lightest, if any. `resting`: nodes to leave alone.

    Load is L, the work of the window, with what is already on its way counted where it goes. Of a worker that has more
    than `ratio` times the lightest's, and `floor_seconds` more, the prefix whose work is nearest half the difference;
    only if a request that moves waits MOVE_GAIN_SECONDS_MIN less there, the computing again paid twice:
    who moves waits for it, and who is behind that one.
    """
    expected = _expected(loads, moves)
    if len(expected) < 2:
        return None
    waiting = {load.worker: load.waiting_seconds for load in loads}
    light = min(expected, key=lambda worker: (expected[worker], worker))
    for heavy in sorted(expected, key=lambda worker: (-expected[worker], worker))[:CANDIDATES]:
        gap = expected[heavy] - expected[light]
        if gap <= floor_seconds or expected[heavy] <= ratio * expected[light]:
            return None
        if waiting[heavy] > UNEVEN * waiting[light]:
            found = _nearest_half(groups, heavy, gap, resting)
            for group in found[:CANDIDATES]:
                saved = waiting[heavy] - waiting[light] - RECOMPUTE_PAID * recompute(group, light)
                if saved > MOVE_GAIN_SECONDS_MIN:
                    why = f"{expected[heavy]:.1f} s of work in the window against {expected[light]:.1f} s"
                    return Proposal(REBALANCE, group, light, why, saved)
    return None


def _expected(loads: Iterable[Load], moves: Iterable[Move]) -> dict[int, float]:
    """L of the workers that may take requests, once all that moves has moved."""
    expected = {load.worker: load.load_seconds for load in loads if load.eligible}
    for move in moves:
        for worker, seconds in ((move.source, -move.seconds), (move.target, move.seconds)):
            if worker in expected:
                expected[worker] += seconds
    return expected


def _nearest_half(groups: Iterable[Group], worker: int, gap: float, resting: Collection[int]) -> list[Group]:
    """A worker's prefixes that would not turn the gap round, nearest half of it first."""
    own = [g for g in groups if g.worker == worker and g.node not in resting and g.requests >= REQUESTS_MIN]
    own = [g for g in own if 0.0 < g.window_seconds < gap]
    return sorted(own, key=lambda g: (abs(g.window_seconds - gap / 2), g.node))


def is_satisfied(source: float, target: float) -> bool:
    """Whether a rebalancing from a worker with that L to another has done what it was for."""
    return source <= SATISFIED_RATIO * target


# --- copies -----------------------------------------------------------------------------------------------------------


def by_node(groups: Iterable[Group]) -> dict[int, list[Group]]:
    """Groups by prefix, the most loaded share of each first."""
    found: dict[int, list[Group]] = {}
    for group in groups:
        found.setdefault(group.node, []).append(group)
    for shares in found.values():
        shares.sort(key=lambda g: (-g.load, g.worker))
    return found


def why_grow(shares: Sequence[Group], copies: int) -> str | None:
    """Why a prefix wants one more worker than the `copies` that serve it; None if it does not."""
    load = sum(share.load for share in shares)
    if load > GROW_LOAD * copies:
        return f"load of {load:.2f} workers on {copies}"
    for share in shares:
        if (
            share.load > WAIT_LOAD
            and share.wait_before >= 0.0
            and share.wait_now >= max(WAIT_SECONDS_MIN, DOUBLED * share.wait_before)
        ):
            return f"waits rose from {share.wait_before:.2f} s to {share.wait_now:.2f} s"
    return None


def wants_fewer(load: float, copies: int) -> bool:
    """Whether one worker fewer would do for a prefix of that load."""
    return copies > 1 and load < SHRINK_LOAD * (copies - 1)


def propose_copy(
    shares: Sequence[Group], holders: Collection[int], loads: Sequence[Load], recompute: Recompute, reason: str
) -> Proposal | None:
    """The worker that gains most from serving a prefix, too, if any gains: where a request waits least, the computing
    of the prefix included, and less than on any of the `holders`."""
    waits = {load.worker: load.waiting_seconds for load in loads if load.eligible}
    now = min((waits[worker] for worker in holders if worker in waits), default=None)
    if now is None:
        return None
    least, _, target = min(
        ((load.waiting_seconds + recompute(shares[0], load.worker), load.load_seconds, load.worker)
         for load in loads if load.eligible and load.worker not in holders and load.waiting_seconds < now),
        default=(now, 0.0, -1),
    )  # fmt: skip
    return Proposal(REPLICA, shares[0], target, reason, now - least) if now - least > GAIN_SECONDS_MIN else None


def homes_of(
    children: Mapping[int, float], workers: Sequence[int], homes: Mapping[int, int], most: float
) -> dict[int, int]:
    """Who serves which child of a prefix that several workers serve: child -> worker.

    `children`: load by child; one of more than `most`, or twice that if it has a home, is left out, for it had better
    be spread. Children keep the home they have, except that a worker with much more than its part gives some away, and
    one with much less is given some; those without go to the least loaded worker, longest first.
    """
    loads = dict.fromkeys(workers, 0.0)
    placed: dict[int, int] = {}
    fit = {child: load for child, load in children.items() if load <= (2 * most if child in homes else most)}
    fair = sum(fit.values()) / max(len(workers), 1)
    longest_first = sorted(fit, key=lambda child: (-fit[child], child))
    for child in longest_first:
        home = homes.get(child)
        if home in loads and loads[home] + fit[child] <= OVERFULL * max(fair, fit[child]):
            placed[child] = home
            loads[home] += fit[child]
    for child in longest_first:
        if child not in placed:
            home = min(workers, key=lambda worker: (loads[worker], worker))
            placed[child] = home
            loads[home] += fit[child]
    for child in longest_first:  # a newcomer gets its part, and nobody else gets more than it gave
        home, least = placed[child], min(workers, key=lambda worker: (loads[worker], worker))
        if loads[least] < UNDERFULL * fair and loads[least] + fit[child] < loads[home]:
            placed[child] = least
            loads[home] -= fit[child]
            loads[least] += fit[child]
    return placed
