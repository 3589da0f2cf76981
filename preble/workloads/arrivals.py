"""When the requests of a workload are sent, and which: arrival processes, popularity, samples, closed loops.

Every function returns a new `Workload` and leaves the one it was given as it is; what was drawn stands in `arrivals`.
Prompts come from readers and generators.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..errors import InvalidInput
from ..types import check_int, check_seconds
from .types import PromptRequest, Workload, unwritable

# Token ids of suffixes that make repeats unlike: above every pseudo-token a reader or generator gives out.
SUFFIX_IDS = 3 << 29
REPEATS_MAX = 1 << 29
# Gaps between arrivals in the Azure traces of 2023: (mean, median) in seconds, measured on the published files.
AZURE_GAPS = {"code": (3435.948 / 8818, 0.064), "conversation": (3501.721 / 19365, 0.118)}


def poisson(workload: Workload, rps: float, seed: int) -> Workload:
    """Requests arrive independently, `rps` a second on average, in the workload's order.

    In a closed loop a request still waits for the one it follows, and is not sent before it has arrived.
    Raises `InvalidInput` unless `rps` is positive and finite.
    """
    check_positive("rps", rps)
    gaps = generator(seed).exponential(1.0 / rps, len(workload))
    return timed(workload, np.cumsum(gaps), f"poisson {rps:g} rps, seed {seed}")


def traced(
    workload: Workload, times_seconds: Sequence[float] | npt.NDArray[np.float64], scale: float = 1.0
) -> Workload:
    """Request k arrives at `times_seconds[k]`, counted from the first of these times and multiplied by `scale`.

    `times_seconds`: shape [n], not falling, n at least the number of requests (`arrival_times` of a read trace, or
    `azure_times`); later ones are not used. A `scale` below 1 makes the load higher. Raises `InvalidInput`.
    """
    check_positive("scale", scale)
    times = np.asarray(times_seconds, dtype=np.float64)
    if times.ndim != 1 or len(times) < len(workload):
        raise InvalidInput(f"times_seconds must be {len(workload)} times or more, got an array of shape {times.shape}")
    times = times[: len(workload)]
    if not np.isfinite(times).all() or (np.diff(times) < 0.0).any():
        raise InvalidInput("times_seconds must be finite and must not fall")
    start = times[0] if len(times) else 0.0
    return timed(workload, (times - start) * scale, f"traced, times {scale:g}")


def arrival_times(workload: Workload) -> npt.NDArray[np.float64]:
    """The arrivals of a workload in seconds, shape [requests]: of a trace, to give to `traced`."""
    return np.array([request.arrival_seconds for request in workload.requests])


def azure_times(kind: str, requests: int, seed: int) -> npt.NDArray[np.float64]:
    """Arrival times in seconds, shape [requests], for where no Azure trace is at hand: first 0, then lognormal gaps.

    `kind`: "code" (mean gap 390 ms, median 64 ms: bursts and pauses) or "conversation" (181 ms, 118 ms). Mean and
    median are the published traces'; what gaps have to do with the gaps before them is not modelled.
    """
    if kind not in AZURE_GAPS:
        raise InvalidInput(f"kind must be one of {sorted(AZURE_GAPS)}, got {kind!r}")
    check_int("requests", requests, 1, 2**31 - 1, InvalidInput)
    mean, median = AZURE_GAPS[kind]
    sigma = math.sqrt(2.0 * math.log(mean / median))  # a lognormal's mean is its median times exp(sigma^2 / 2)
    gaps = generator(seed).lognormal(math.log(median), sigma, requests - 1)
    return np.concatenate(([0.0], np.cumsum(gaps)))


def zipf(workload: Workload, exponent: float, requests: int, seed: int, *, unique_suffix: bool = False) -> Workload:
    """Draw `requests` requests so that the k-th most popular group gets a share proportional to k ** -`exponent`.

    Groups are ranked by how many requests they have (ties: who comes first), as the paper's Tool experiment ranks
    tools. Within a group requests are dealt out in shuffled order, and again from the start when it is used up: the
    n-th use of request "x" is "x#n" (the first stays "x"). `unique_suffix` adds a token of its own to such repeats, so
    that none is served whole from what its twin left in a cache. Raises `InvalidInput` for a workload with closed
    loops, whose turns cannot be drawn one by one.
    """
    check_positive("exponent", exponent)
    check_int("requests", requests, 1, REPEATS_MAX, InvalidInput)
    if any(request.after is not None for request in workload.requests):
        raise InvalidInput("workload: requests that follow others (a closed loop) cannot be drawn one by one")
    rng = generator(seed)
    members = sorted(by_group(workload).values(), key=len, reverse=True)
    if not members:
        raise InvalidInput("workload has no requests to draw from")
    shares = np.arange(1, len(members) + 1, dtype=np.float64) ** -exponent
    dealt = [rng.permutation(len(group)) for group in members]
    used = [0] * len(members)
    drawn = []
    for place, rank in enumerate(rng.choice(len(members), size=requests, p=shares / shares.sum()).tolist()):
        repeat, within = divmod(used[rank], len(members[rank]))
        used[rank] += 1
        request = members[rank][dealt[rank][within]]
        drawn.append(request if repeat == 0 else repeated(request, repeat + 1, place if unique_suffix else None))
    return replace(workload, requests=drawn, source=f"{workload.source}; zipf {exponent:g} over groups, seed {seed}")


def repeated(request: PromptRequest, use: int, suffix: int | None) -> PromptRequest:
    """The request again under another id, with a token of its own at the end where `suffix` is given."""
    parts = request.parts
    if suffix is not None:
        parts = (*parts, unwritable([SUFFIX_IDS + suffix]))
    return replace(request, request_id=f"{request.request_id}#{use}", parts=parts)


def take(workload: Workload, requests: int, seed: int) -> Workload:
    """Whole groups, drawn at random until they hold at least `requests` requests; in the workload's order.

    Sharing inside a group stays as it is. The last group may take the number above `requests`. Raises `InvalidInput`
    where the workload has fewer.
    """
    check_int("requests", requests, 1, len(workload), InvalidInput)
    groups = by_group(workload)
    names, kept, count = list(groups), set(), 0
    for place in generator(seed).permutation(len(names)).tolist():
        if count >= requests:
            break
        kept.add(names[place])
        count += len(groups[names[place]])
    chosen = [request for request in workload.requests if request.group in kept]
    known = {request.request_id for request in chosen}
    if any(request.after is not None and request.after not in known for request in chosen):
        raise InvalidInput("workload: a request follows one of another group, so groups cannot be taken apart")
    source = f"{workload.source}; {len(kept)} of {len(names)} groups, seed {seed}"
    return replace(workload, requests=chosen, source=source)


def closed_loop(workload: Workload, agents: int, seed: int, *, pause_seconds: float = 0.0) -> Workload:
    """`agents` agents work at once; each sends a request `pause_seconds` after the one before has finished.

    A chain is a request without `after` and all that follow it, in the workload's order. Chains are shuffled and dealt
    to the agents in turn, and an agent starts its next chain when its last is done. All arrivals become 0: only the
    agents' first requests are sent then. With fewer chains than agents some have nothing to do.
    """
    check_int("agents", agents, 1, 2**31 - 1, InvalidInput)
    check_seconds("pause_seconds", pause_seconds, InvalidInput)
    chains = chains_of(workload)
    order = generator(seed).permutation(len(chains)).tolist()
    queues: list[list[PromptRequest]] = [[] for _ in range(min(agents, len(chains)))]
    for turn, place in enumerate(order):
        queues[turn % len(queues)].extend(chains[place])
    steps = []
    for queue in queues:
        before = None
        for step, request in enumerate(queue):
            pause = 0.0 if before is None else pause_seconds
            steps.append((step, replace(request, arrival_seconds=0.0, after=before, pause_seconds=pause)))
            before = request.request_id
    # Sorted by step and, since sorting is stable, by agent: whoever follows stands after whom it follows.
    requests = [request for _, request in sorted(steps, key=lambda pair: pair[0])]
    said = f"closed loop of {agents} agents, pause {pause_seconds:g} s, seed {seed}"
    return replace(workload, requests=requests, arrivals=said)


def chains_of(workload: Workload) -> list[list[PromptRequest]]:
    """The requests that follow each other, one list for each first one. Raises `InvalidInput` where `after` names no
    earlier request."""
    chains: list[list[PromptRequest]] = []
    place: dict[str, int] = {}
    for request in workload.requests:
        if request.after is None:
            place[request.request_id] = len(chains)
            chains.append([request])
        elif request.after in place:
            place[request.request_id] = place[request.after]
            chains[place[request.after]].append(request)
        else:
            raise InvalidInput(
                f"workload: {request.request_id!r} follows {request.after!r}, which is no earlier request"
            )
    return chains


def merged(name: str, workloads: Iterable[Workload]) -> Workload:
    """Several workloads served together, by arrival (ties: as given). Raises `InvalidInput` for an id twice."""
    given = list(workloads)
    requests = sorted((r for w in given for r in w.requests), key=lambda request: request.arrival_seconds)
    if len({request.request_id for request in requests}) < len(requests):
        raise InvalidInput("workloads: a request id is there twice")
    said = " + ".join(dict.fromkeys(w.arrivals for w in given))
    return Workload(name, requests, " + ".join(w.source for w in given), said)


def timed(workload: Workload, seconds: npt.NDArray[np.float64], said: str) -> Workload:
    """The workload with these arrivals, in their order."""
    requests = [request.at(at) for request, at in zip(workload.requests, seconds.tolist(), strict=True)]
    return replace(workload, requests=requests, arrivals=said)


def by_group(workload: Workload) -> dict[str, list[PromptRequest]]:
    """The requests of each group, groups in order of their first request."""
    groups: dict[str, list[PromptRequest]] = {}
    for request in workload.requests:
        groups.setdefault(request.group, []).append(request)
    return groups


def generator(seed: int) -> np.random.Generator:
    """The random numbers of a seed. Raises `InvalidInput` for one that is no integer of at least 0."""
    check_int("seed", seed, 0, 2**63 - 1, InvalidInput)
    return np.random.default_rng(seed)


def check_positive(name: str, value: float) -> None:
    """Raise `InvalidInput` unless `value` is positive and finite."""
    if not math.isfinite(value) or value <= 0.0:
        raise InvalidInput(f"{name} must be positive and finite, got {value!r}")
