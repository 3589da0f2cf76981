"""Many tenants' requests: rates of production clients, and floods. Owns the rates' format (ServeGen's, Apache-2.0: the
requests a second of each client in windows of ten minutes) and a stand-in where no such file is at hand."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..errors import InvalidInput
from ..types import check_int, check_seconds
from .arrivals import by_group, check_positive, generator
from .files import csv_rows
from .types import PromptRequest, Workload

RATE_SIGMA = 1.9  # of the logarithms of clients' mean rates in ServeGen's m-large


@dataclass(frozen=True, slots=True)
class Flood:
    """A tenant sends `factor` times as much from `begin_seconds` to `end_seconds`. Raises `InvalidInput`."""

    tenant: str
    factor: float
    begin_seconds: float
    end_seconds: float

    def __post_init__(self) -> None:
        check_positive("Flood.factor", self.factor)
        check_seconds("Flood.begin_seconds", self.begin_seconds, InvalidInput)
        if not self.begin_seconds < self.end_seconds < math.inf:
            raise InvalidInput(f"Flood.end_seconds must be after begin_seconds, got {self.end_seconds!r}")


def read_tenant_rates(path: str | os.PathLike[str], clients: int) -> dict[str, float]:
    """Requests a second of the busiest clients of a ServeGen file, mean over the windows in which they sent anything.

    Raises `InvalidInput` naming the argument, or file and line.
    """
    check_int("clients", clients, 1, 1_000_000, InvalidInput)
    sums: dict[str, list[float]] = {}
    for row in csv_rows(Path(path), ("client", "window_start_s", "rate_per_s")):
        try:
            rate = float(row.text("rate_per_s"))
        except ValueError:
            rate = -1.0
        if not 0.0 <= rate < math.inf:
            raise row.wrong("'rate_per_s' must be a rate")
        sums.setdefault(row.text("client"), []).append(rate)
    means = {client: float(np.mean(rates)) for client, rates in sums.items()}
    busiest = sorted(means, key=lambda client: (-means[client], client))[:clients]
    if len(busiest) < clients:
        raise InvalidInput(f"clients: {path} has {len(busiest)}, asked for {clients}")
    return {client: means[client] for client in busiest}


def tenant_rates(tenants: int, rps: float, seed: int, *, sigma: float = RATE_SIGMA) -> dict[str, float]:
    """Rates that sum to `rps`, spread like those of production clients: lognormal, with this deviation of the
    logarithms (0: all alike). Raises `InvalidInput`."""
    check_int("tenants", tenants, 1, 1_000_000, InvalidInput)
    check_positive("rps", rps)
    check_seconds("sigma", sigma, InvalidInput)
    shares = np.exp(sigma * generator(seed).standard_normal(tenants))
    return {f"t{number:05d}": float(rate) for number, rate in enumerate(rps * shares / shares.sum())}


def tenant_arrivals(
    workload: Workload, rates_rps: Mapping[str, float], seconds: float, seed: int, floods: Sequence[Flood] = ()
) -> Workload:
    """For `seconds` each tenant sends requests of its own groups, independently, at its rate.

    Groups are dealt to the tenants in turn; a tenant's requests are dealt in order, and again from the start under
    another id. What floods add comes on top: without floods the others send the same at the same times. Raises
    `InvalidInput` for fewer groups than tenants, or a flood by a tenant who is not there.
    """
    check_positive("seconds", seconds)
    groups = list(by_group(workload).values())
    if len(groups) < len(rates_rps) or not rates_rps:
        raise InvalidInput(f"rates_rps: {len(rates_rps)} tenants, but the workload has {len(groups)} groups")
    strange = [flood.tenant for flood in floods if flood.tenant not in rates_rps]
    if strange:
        raise InvalidInput(f"floods: {strange[0]!r} is none of the tenants")
    requests: list[PromptRequest] = []
    for number, (tenant, rate) in enumerate(rates_rps.items()):
        own = [request for group in groups[number :: len(rates_rps)] for request in group]
        times = poisson_times(rate, 0.0, seconds, [seed, number, 0])
        for place, flood in enumerate(floods):
            if flood.tenant == tenant:
                end = min(flood.end_seconds, seconds)
                times += poisson_times(rate * (flood.factor - 1.0), flood.begin_seconds, end, [seed, number, 1 + place])
        for place, at in enumerate(times):
            made = own[place % len(own)]
            name = f"{tenant}.{place:06d}.{made.request_id}"
            requests.append(replace(made, request_id=name, arrival_seconds=at, tenant=tenant, after=None))
    requests.sort(key=lambda request: request.arrival_seconds)
    said = f"{len(rates_rps)} tenants, {sum(rates_rps.values()):g} rps" + (", flooded" if floods else "")
    return replace(workload, requests=requests, arrivals=f"{said}, seed {seed}")


def poisson_times(rate: float, begin: float, end: float, seed: list[int]) -> list[float]:
    """Moments of a Poisson process; none where the rate is 0 or less."""
    if rate <= 0.0 or end <= begin:
        return []
    rng = np.random.default_rng(seed)
    count = int(rng.poisson(rate * (end - begin)))
    return sorted((begin + rng.random(count) * (end - begin)).tolist())
