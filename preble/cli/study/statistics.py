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

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import InvalidInput
from ...workloads import Workload
from .tree import PromptTree

Values = npt.NDArray[np.float64]
PERCENTILES = (1, 10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class Study:
    """One workload's values; arrays are float64, shape [requests] unless said, fractions between 0 and 1.

    `requests_per_key`: shape [key portions]; `requests_per_key_below`: the same without a key portion that all requests
    contain, None where there is no such node or nothing else. `gap_seconds`: between neighbouring arrivals, shape
    [open-loop requests - 1], None where the workload has no arrivals. `nodes`: of the radix tree.
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

    @property
    def hit_fraction(self) -> float:
        """Of all prompt tokens together, the part that an infinite prefix cache holds."""
        return float((self.shared_fraction * self.prompt_tokens).sum() / self.prompt_tokens.sum())

    @property
    def has_sharing(self) -> bool:
        """True if any two prompts begin alike. Traces of lengths without text do not say what is shared."""
        return bool(self.shared_fraction.any())


def measure(workload: Workload) -> Study:
    """Measure a workload. Takes memory for its parts and its radix tree. Raises `InvalidInput` if it is empty."""
    if not len(workload):
        raise InvalidInput(f"workload {workload.name!r} has no requests")
    tree = PromptTree()
    requests = workload.requests
    places = [tree.add(request.parts) for request in requests]
    nodes = tree.count()
    prompt = np.array([request.prompt_tokens for request in requests], float)
    output = np.array([request.output_tokens for request in requests], float)
    keys = {id(end.key): end.key for end, _ in places}
    per_key = np.array([key.requests for key in keys.values()], float)
    below = per_key[per_key < len(requests)]
    return Study(
        name=workload.name,
        source=workload.source,
        arrivals=workload.arrivals,
        requests=len(requests),
        groups=len({request.group for request in requests}),
        nodes=nodes,
        prompt_tokens=prompt,
        output_tokens=output,
        prompt_to_output=prompt / output,
        shared_fraction=np.array([shared for _, shared in places]) / prompt,
        key_fraction=np.array([end.key.tokens for end, _ in places]) / prompt,
        requests_per_key=per_key,
        requests_per_key_below=below if 0 < len(below) < len(per_key) else None,
        gap_seconds=gaps(workload),
    )


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
