"""What E2 would have done with the requests of an audit. Owns which replays are run and what may be claimed of them; a
replay is `preble.sim.replay`'s: the real scheduler before engines whose cost is fitted to the times measured.

A claim is a ratio of two replays, placed as it was and placed by E2, times what was measured. How far the first of them
is from what was measured is the model's own error; where a saving is not larger than that, nothing is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...recording import Recording
from ...sim.engine_fit import REQUESTS_MIN, EngineModel, fit_engines, local_config
from ...sim.replay import Estimate95, ReplayAnswer, replay
from ...transport.engine_servers.served_totals import ServedTotals
from .traffic import AuditedTraffic, EngineSpeed, ServerTraffic, speed_of, traffic_of

STRETCHES_MIN = 8  # of time whose first tokens were counted; of fewer, nothing can be learned
OnStep = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """E2 against what was. `ttft_seconds`, `ttft_p99_seconds`: of what was, replayed; ratios: E2's replay over that.

    `error`, `p99_error`: the replay of what was over what was measured, less 1; `error_apart`: the same of stretches of
    time while nothing was fitted to them. None where nothing was measured. `workers_enough`: the fewest servers with
    which E2 is no slower than what was, by more than the error; None where nothing can be claimed. `fitted_to`
    requests, 0 where engines are taken as the metrics have them; `replayed` requests.
    """

    replayed: int
    fitted_to: int
    ttft_seconds: float
    ttft_p99_seconds: float
    error: float | None
    error_apart: float | None
    p99_error: float | None
    ttft_ratio: Estimate95
    p99_ratio: Estimate95
    computed_ratio: Estimate95
    workers: int
    workers_enough: int | None

    @property
    def uncertainty(self) -> float | None:
        """The larger of the model's two errors of the mean; None where nothing was measured."""
        known = [abs(one) for one in (self.error, self.error_apart) if one is not None]
        return max(known) if known and self.error is not None else None

    @property
    def claims_ttft(self) -> bool:
        """Whether the model can discern E2's mean from what was: its error is smaller than the change."""
        return self.uncertainty is not None and self.uncertainty < abs(1.0 - self.ttft_ratio.value)

    @property
    def claims_p99(self) -> bool:
        """The same of the 99th percentile."""
        return self.claims_ttft and self.p99_error is not None and abs(self.p99_error) < abs(1.0 - self.p99_ratio.value)


def what_if(servers: Sequence[ServerTraffic], unit_tokens: int, seconds: float, on_step: OnStep) -> WhatIf | None:
    """Replay the requests of the servers, seen for so many `seconds`, as they were placed and by E2. Without times
    measured engines are as fast as the metrics or a preset say, and nothing is claimed. None where there is no request.
    Deterministic."""
    served = _sum_of(servers)
    traffic = traffic_of(servers, unit_tokens)
    if traffic is None:
        return None
    on_step("learning what the engines cost")
    is_measured = served.ttft.count > 0 and served.latency.count > 0
    ranks = len(traffic.recording.workers)
    if is_measured and len(traffic.together) >= STRETCHES_MIN and _finished(traffic.recording) >= REQUESTS_MIN:
        traffic, engines = _fitted(servers, unit_tokens, traffic)
    else:
        costs = speed_of(served, seconds * ranks).costs()
        engines = EngineModel(costs, local_config(traffic.recording.workers))
    on_step("replaying what was, and E2")
    found = replay(traffic.recording, ["e2"], engines=engines)
    (run,), was = found.runs, found.recorded
    assert was is not None, "all of them have times"
    known = WhatIf(
        replayed=_finished(traffic.recording),
        fitted_to=engines.requests,
        ttft_seconds=was.mean_ttft_seconds.value,
        ttft_p99_seconds=was.p99_ttft_seconds.value,
        error=_error(found, served) if is_measured else None,
        error_apart=engines.error.get("mean_ttft_seconds"),
        p99_error=_p99_error(found, served) if is_measured else None,
        ttft_ratio=run.ratios["mean_ttft_seconds"],
        p99_ratio=run.ratios["p99_ttft_seconds"],
        computed_ratio=run.ratios["computed_tokens"],
        workers=ranks,
        workers_enough=None,
    )
    return known if not known.claims_ttft else _with_fewer(known, traffic.recording, engines, on_step)


def _fitted(
    servers: Sequence[ServerTraffic], unit_tokens: int, traffic: AuditedTraffic
) -> tuple[AuditedTraffic, EngineModel]:
    """Engines fitted to what was measured; once more where they cost other than was guessed: it says when requests must
    have come."""
    engines = fit_engines(traffic.recording, together=traffic.together)
    speeds = [EngineSpeed.of(engines.costs, engines.slowness.get(server.ranks[0].worker.id, 1.0)) for server in servers]
    if any(not found.is_like(server.speed) for found, server in zip(speeds, servers, strict=True)):
        for found, server in zip(speeds, servers, strict=True):
            server.speed = found
        traffic = traffic_of(servers, unit_tokens) or traffic
        engines = fit_engines(traffic.recording, together=traffic.together)
    return traffic, engines


def _finished(recording: Recording) -> int:
    return sum(one.finished for one in recording.requests)


def _sum_of(servers: Sequence[ServerTraffic]) -> ServedTotals:
    """What all of them counted."""
    found = ServedTotals()
    for server in servers:
        found = found if server.served is None else found.plus(server.served)
    return found


def _error(found: ReplayAnswer, served: ServedTotals) -> float | None:
    """Of the replay's mean time to first token: over the same requests' in the recording, and that over the servers'
    own."""
    error, measured = found.model_error.get("mean_ttft_seconds"), served.ttft.mean
    if error is None or not measured:
        return None
    ours = np.array([one.ttft_seconds for one in found.recording.requests if one.finished])
    return (1.0 + error) * float(ours.mean()) / measured - 1.0


def _p99_error(found: ReplayAnswer, served: ServedTotals) -> float | None:
    """Of the replay of what was, both read off the same buckets; None where the metrics have none."""
    ours = found.recorded_ttft_seconds
    ours = np.sort(ours[~np.isnan(ours)])
    bounds = sorted(served.buckets.get("ttft", {}))
    counts = {bound: float(np.searchsorted(ours, bound, "right")) for bound in bounds}
    simulated = ServedTotals(buckets={"ttft": counts}).quantile("ttft", 0.99)
    measured = served.quantile("ttft", 0.99)
    return simulated / measured - 1.0 if simulated and measured else None


def _with_fewer(known: WhatIf, recording: Recording, engines: EngineModel, on_step: OnStep) -> WhatIf:
    """With how few servers E2's replay is still faster than that of what was by the model's error, mean and p99."""
    margin = 1.0 - (known.uncertainty or 0.0)

    def is_enough(workers: int) -> bool:
        on_step(f"replaying E2 with {workers} of {known.workers} servers")
        (run,) = replay(recording, ["e2"], workers=workers, engines=engines).runs
        ratios = (run.ratios["mean_ttft_seconds"].value, run.ratios["p99_ttft_seconds"].value)
        return not run.not_finished and all(math.isfinite(one) and one <= margin for one in ratios)

    few, enough = 0, known.workers
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if is_enough(middle) else (middle, enough)
    return replace(known, workers_enough=enough)
