"""When sessions begin: so many at once, or by a Poisson process. Owns both; turns inside a session wait for each other.

A session is a request without `after` and all that follow it, its sub-agents' included; its end is that of its own last
turn (of the longest chain that has its first turn's session name, where hints say one).
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..errors import InvalidInput
from ..types import check_int, check_seconds
from .arrivals import chains_of, check_positive, generator
from .types import PromptRequest, Workload


def session_arrivals(workload: Workload, sessions_per_second: float, seed: int) -> Workload:
    """Sessions begin independently, so many a second on average, in the workload's order; turns wait for the one before
    them. Raises `InvalidInput`."""
    check_positive("sessions_per_second", sessions_per_second)
    rng, now, requests = generator(seed), 0.0, []
    for chain in chains_of(workload):
        now += float(rng.exponential(1.0 / sessions_per_second))
        requests += [chain[0].at(now), *(request.at(0.0) for request in chain[1:])]
    return replace(workload, requests=requests, arrivals=f"poisson {sessions_per_second:g} sessions/s, seed {seed}")


def sessions_at_once(
    workload: Workload,
    live: int,
    seed: int,
    *,
    turns_min: int = 1,
    pause_max_seconds: float = math.inf,
    spread_seconds: float = 0.0,
    begun: bool = False,
) -> Workload:
    """`live` lanes, each with a session; when it has ended, the lane's next one begins. Sessions are shuffled and dealt
    in turn; those of fewer than `turns_min` requests are left out.

    `pause_max_seconds` cuts longer pauses: who is away longer is not live. The lanes' first sessions begin within
    `spread_seconds`; with `begun` they are at a turn drawn at random, as sessions are when one looks at them. Raises
    `InvalidInput`.
    """
    check_int("live", live, 1, 1_000_000, InvalidInput)
    check_int("turns_min", turns_min, 1, 1_000_000, InvalidInput)
    check_seconds("spread_seconds", spread_seconds, InvalidInput)
    chains = [chain for chain in chains_of(workload) if len(chain) >= turns_min]
    if len(chains) < live:
        raise InvalidInput(f"live: {live} sessions at once, but the workload has {len(chains)}")
    rng = generator(seed)
    order = rng.permutation(len(chains)).tolist()
    ends: list[str | None] = [None] * live
    requests: list[PromptRequest] = []
    for turn, place in enumerate(order):
        lane = turn % live
        before = ends[lane]
        chain = begun_at(chains[place], float(rng.random())) if begun and before is None else chains[place]
        first = replace(chain[0], after=before, pause_seconds=0.0)
        if before is None:
            first = first.at(float(rng.random()) * spread_seconds)
        ends[lane] = last_own_turn(chain)
        requests.append(first)
        requests += [
            replace(request, arrival_seconds=0.0, pause_seconds=min(request.pause_seconds, pause_max_seconds))
            for request in chain[1:]
        ]
    said = f"{live} sessions at once, seed {seed}"
    return replace(workload, requests=requests, arrivals=said)


def begun_at(chain: list[PromptRequest], share: float) -> list[PromptRequest]:
    """A session from one of its own turns on, without the sub-agents that earlier ones started."""
    own = [place for place, request in enumerate(chain) if session_of(request) == session_of(chain[0])]
    first = chain[own[int(share * len(own))]]
    kept, known = [first], {first.request_id}
    for request in chain:
        if request.after in known and request.request_id not in known:
            kept.append(request)
            known.add(request.request_id)
    return kept


def last_own_turn(chain: list[PromptRequest]) -> str:
    """The id of the session's last turn that is not a sub-agent's."""
    return [request.request_id for request in chain if session_of(request) == session_of(chain[0])][-1]


def session_of(request: PromptRequest) -> str:
    """The session's name as hinted; "" where nothing says one."""
    return request.hint.session if request.hint is not None else ""
