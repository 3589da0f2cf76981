"""What Table 1 of the paper says of a workload, and the values behind its figures. Owns the definitions, draws nothing.

Over all requests of the workload, served in its order (paper section 3):

- shared prefix: the part of the prompt that an infinite prefix cache holds when the request comes;
- key portion: in the radix tree of all prompts, the deepest node on the request's path, the leaf included, with more
  tokens than all nodes above it together; its share is that node's tokens over the prompt's;
- requests per key portion: over the nodes that are some request's key portion, how many requests contain the node.
  A system prompt that is a key portion is contained in all requests and dominates the spread, so the values without
  such a node are kept too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..._radix import RadixTree
from ...errors import InvalidInput
from ...workloads import PromptRequest, Workload

Values = npt.NDArray[np.float64]
PERCENTILES = (1, 10, 25, 50, 75, 90, 99)
NO_LIMIT_BYTES = 1 << 62  # a study forgets nothing


@dataclass(frozen=True, slots=True)
class Study:
    """One workload's values; arrays are float64, shape [requests] unless said, fractions between 0 and 1.

    `requests_per_key`: shape [key portions]; `requests_per_key_below`: the same without a key portion that all requests
    contain, None where there is no such node or nothing else. `gap_seconds`: between neighbouring arrivals, shape
    [open-loop requests - 1], None where the workload has no arrivals. `nodes`: of the radix tree. `notes`: the
    workload's.
    """

    name: str
    source: str
    arrivals: str
    requests: int
    groups: int
    nodes: int
    prompt_tokens: Values
    output_tokens: Values
    prompt_to_output: Values
    shared_fraction: Values
    key_fraction: Values
    requests_per_key: Values
    requests_per_key_below: Values | None
    gap_seconds: Values | None
    notes: tuple[str, ...] = ()

    @property
    def hit_fraction(self) -> float:
        """Of all prompt tokens together, the part that an infinite prefix cache holds."""
        return float((self.shared_fraction * self.prompt_tokens).sum() / self.prompt_tokens.sum())

    @property
    def gap_milliseconds(self) -> Values | None:
        """`gap_seconds` in another unit."""
        return None if self.gap_seconds is None else self.gap_seconds * 1000

    @property
    def has_sharing(self) -> bool:
        """True if any two prompts begin alike. Traces of lengths without text do not say what is shared."""
        return bool(self.shared_fraction.any())


def measure(workload: Workload) -> Study:
    """Measure a workload. Takes memory for the tokens of its radix tree. Raises `InvalidInput` if it is empty."""
    if not len(workload):
        raise InvalidInput(f"workload {workload.name!r} has no requests")
    requests = workload.requests
    found = sharing(requests)
    prompt = np.array([request.prompt_tokens for request in requests], float)
    output = np.array([request.output_tokens for request in requests], float)
    below = found.requests_per_key[found.requests_per_key < len(requests)]
    return Study(
        name=workload.name,
        source=workload.source,
        arrivals=workload.arrivals,
        requests=len(requests),
        groups=len({request.group for request in requests}),
        nodes=found.nodes,
        prompt_tokens=prompt,
        output_tokens=output,
        prompt_to_output=prompt / output,
        shared_fraction=found.shared_tokens / prompt,
        key_fraction=found.key_tokens / prompt,
        requests_per_key=found.requests_per_key,
        requests_per_key_below=below if 0 < len(below) < len(found.requests_per_key) else None,
        gap_seconds=gaps(workload),
        notes=workload.notes,
    )


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the radix tree of all prompts says: shape [requests], but `requests_per_key` [key portions]. `nodes` leaves
    the root out."""

    nodes: int
    shared_tokens: Values
    key_tokens: Values
    requests_per_key: Values


def sharing(requests: Sequence[PromptRequest]) -> Sharing:
    """Put all prompts into a tree in their order, at one moment, so that a node's hits are the requests with it."""
    tree = RadixTree(max_bytes=NO_LIMIT_BYTES)
    shared_tokens = [tree.insert(token_ids, 0.0) for token_ids in prompts(requests)]
    key_tokens = []
    requests_per_key: dict[tuple[int, int], float] = {}  # by a key portion's end, and the hash of a prompt up to there
    for token_ids in prompts(requests):
        start, end = key_portion(tree.path(token_ids))
        key_tokens.append(end - start)
        key = end, hash(token_ids[:end].tobytes())
        if key not in requests_per_key:
            requests_per_key[key] = tree.hits(token_ids[:end], 0.0)
    return Sharing(
        tree.node_count - 1,
        *(np.array(values, float) for values in (shared_tokens, key_tokens, list(requests_per_key.values()))),
    )


def prompts(requests: Sequence[PromptRequest]) -> Iterator[npt.NDArray[np.int32]]:
    """The prompts one after the other, in memory that the next one overwrites."""
    room = np.empty(max(request.prompt_tokens for request in requests), np.int32)
    for request in requests:
        yield np.concatenate(request.parts, out=room[: request.prompt_tokens])


def key_portion(ends: Sequence[int]) -> tuple[int, int]:
    """Where the key portion of a prompt starts and ends, given where each node of its path ends."""
    nodes = zip((0, *ends), ends, strict=False)
    return [(start, end) for start, end in nodes if end - start > start][-1]


def gaps(workload: Workload) -> Values | None:
    """Seconds between neighbouring arrivals; None without arrivals. Requests that wait for another have none."""
    if workload.arrivals == "none":
        return None
    times = np.sort([request.arrival_seconds for request in workload.requests if request.after is None])
    return np.diff(times) if len(times) > 1 else None


def summary(values: Values) -> dict[str, float]:
    """Number, mean, population standard deviation, extremes and percentiles of some values."""
    found = {"count": len(values), "mean": float(values.mean()), "std": float(values.std()), "min": float(values.min())}
    found |= {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return found | {"max": float(values.max())}
