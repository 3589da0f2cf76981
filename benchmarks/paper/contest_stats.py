"""What the contest's figures say: values over seeds, intervals, ratios paired by seed, who is best.

Owns the arithmetic; knows no page and no picture.

Ratios are geometric means over seeds of one policy's figure over another's on the same requests; their intervals are
Student's t of the logarithms. The best rival of a cell is the one with the lowest geometric mean, picked with hindsight
in each cell: no policy that could be deployed does as well as the best rivals of all cells together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.paper.contest_cells import ORACLE, ContestCell

OURS = "e2"
POOLED, BOUND = "pooled reference", "lower bound"
Found = Mapping[ContestCell, Mapping[str, Any]]
Floats = npt.NDArray[np.float64]
# 97.5 % points of Student's t for 1, 2, ... degrees of freedom; the last also serves for more, where it is too wide.
T_POINTS = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Ratio:
    """A policy's figure over another's, with the 95 % interval over seeds. `rival` is the other."""

    workload: str
    load: float
    rival: str
    value: float
    low: float
    high: float


def workloads(found: Found) -> list[str]:
    """Their names, in the order of the cells."""
    return list(dict.fromkeys(cell.workload for cell in found))


def loads(found: Found) -> list[float]:
    """Ascending."""
    return sorted({cell.load for cell in found})


def policies(found: Found) -> list[str]:
    """All that ran, in the order of the cells."""
    return list(dict.fromkeys(name for cell in found for name in cell.policies))


def deployable(found: Found) -> list[str]:
    """All but the oracle, which knows the groups of requests."""
    return [name for name in policies(found) if name != ORACLE]


def rivals(found: Found) -> list[str]:
    """The deployable but ours."""
    return [name for name in deployable(found) if name != OURS]


def values(found: Found, workload: str, load: float, policy: str, metric: str) -> Floats:
    """A figure by seed, shape [seeds]; NaN where the bounds have none of that name."""
    cells = sorted((cell for cell in found if (cell.workload, cell.load) == (workload, load)), key=lambda c: c.seed)
    if policy in (POOLED, BOUND):
        part = "pooled" if policy == POOLED else "bounds"
        return np.array([found[cell][part].get(metric, math.nan) for cell in cells])
    return np.array([found[cell]["runs"][policy][metric] for cell in cells])


def half_width(sample: Floats) -> float:
    """Of the 95 % interval of the mean; NaN for fewer than two values."""
    count = len(sample)
    if count < 2:
        return math.nan
    point = T_POINTS[min(count - 2, len(T_POINTS) - 1)]
    return point * float(np.std(sample, ddof=1)) / math.sqrt(count)


def ratio(found: Found, workload: str, load: float, metric: str, policy: str, rival: str) -> Ratio:
    """`policy` over `rival`, paired by seed."""
    ours, theirs = (values(found, workload, load, name, metric) for name in (policy, rival))
    logs = np.log(ours / theirs)
    middle, half = float(np.mean(logs)), half_width(logs)
    return Ratio(workload, load, rival, *(math.exp(x) for x in (middle, middle - half, middle + half)))


def best(found: Found, workload: str, load: float, metric: str, names: Iterable[str]) -> str:
    """Who of `names` has the lowest geometric mean over seeds; the first of equals."""
    return min(names, key=lambda name: geometric(values(found, workload, load, name, metric)))


def against_best(found: Found, metric: str) -> list[Ratio]:
    """Ours over the best rival, in every cell."""
    return [
        ratio(found, workload, load, metric, OURS, best(found, workload, load, metric, rivals(found)))
        for workload in workloads(found)
        for load in loads(found)
    ]


def losses(found: Found, metric: str) -> list[Ratio]:
    """Where ours is worse than the best rival beyond the interval, the worst first."""
    lost = [cell for cell in against_best(found, metric) if cell.low > 1.0]
    return sorted(lost, key=lambda cell: -cell.value)


def to_best(found: Found, metric: str, policy: str) -> list[Ratio]:
    """A policy over the best deployable one, itself included, in every cell."""
    return [
        ratio(found, workload, load, metric, policy, best(found, workload, load, metric, deployable(found)))
        for workload in workloads(found)
        for load in loads(found)
    ]


def geometric(sample: Iterable[float] | Floats) -> float:
    """Geometric mean."""
    return math.exp(float(np.mean(np.log(np.asarray(list(sample))))))
