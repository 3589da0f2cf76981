"""What an event of the simulator's kernel costs, beside SimPy, and how many requests it simulates a second. Owns these
two measurements only.

Kernels: a number of events is always pending; each that happens plans itself again, after a delay drawn beforehand, and
counts. SimPy does it in two ways: with processes, as one writes models in it (`yield env.timeout(...)`), and with bare
callbacks on timeouts, its least. All do the same draws in the same order, in turn, `ROUNDS` times in one process; the
figure is the median. SimPy is of the peers' environment, so run it there:

    make peers && .venv-peers/bin/python -m benchmarks.scale.kernel

Without SimPy the rest is measured. Requests: ToolBench of the paper's experiment on four workers with E2, the workload
handled and simulated in one process on one core; the figures are of CPU time and of wall time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

from preble import ManualClock, sim, workloads
from preble.sim.timeline import Timeline

PENDING = (8, 256, 10_000)
EVENTS = 100_000
ROUNDS = 7
REQUESTS, GROUPS, WORKERS, RPS = 4_000, 200, 4, (10.0, 24.0)


def delays(seed: int) -> Iterator[float]:
    """Seconds between an event and the next one it plans."""
    return iter(np.random.default_rng(seed).exponential(1.0, EVENTS + max(PENDING)).tolist())


def timeline(pending: int) -> int:
    """Our kernel; returns the events that happened."""
    line, after, happened = Timeline(ManualClock()), delays(0), 0

    def again(_: object) -> None:
        nonlocal happened
        happened += 1
        if happened <= EVENTS - pending:
            line.at(line.now + next(after), again)

    for _ in range(pending):
        line.at(next(after), again)
    line.run(float("inf"))
    return happened


def simpy_processes(pending: int) -> int:
    """SimPy, a process for each pending event."""
    import simpy

    environment, after, happened = simpy.Environment(), delays(0), 0

    def process(first: float) -> Iterator[Any]:
        nonlocal happened
        yield environment.timeout(first)
        happened += 1
        while happened <= EVENTS - pending:
            yield environment.timeout(next(after))
            happened += 1

    for _ in range(pending):
        environment.process(process(next(after)))
    environment.run()
    return happened


def simpy_callbacks(pending: int) -> int:
    """SimPy, timeouts with a callback."""
    import simpy

    environment, after, happened = simpy.Environment(), delays(0), 0

    def again(_: Any) -> None:
        nonlocal happened
        happened += 1
        if happened <= EVENTS - pending:
            environment.timeout(next(after)).callbacks.append(again)

    for _ in range(pending):
        environment.timeout(next(after)).callbacks.append(again)
    environment.run()
    return happened


def events_per_second(kernels: list[Callable[[int], int]], pending: int) -> dict[str, float]:
    """Of each kernel, the median of rounds in which they take turns; in CPU time."""
    rates: dict[str, list[float]] = {kernel.__name__: [] for kernel in kernels}
    for _ in range(ROUNDS):
        for kernel in kernels:
            start = time.process_time()
            happened = kernel(pending)
            rates[kernel.__name__].append(EVENTS / (time.process_time() - start))
            assert happened == EVENTS, f"{kernel.__name__}: {happened} events instead of {EVENTS}"
    return {name: statistics.median(found) for name, found in rates.items()}


def requests_per_second(rps: float) -> tuple[float, float]:
    """Requests handled and simulated in a second of CPU and of wall time: the median of three."""
    found = []
    for _ in range(3):
        cpu, wall = time.process_time(), time.perf_counter()
        made = workloads.generate("toolbench", requests=REQUESTS, groups=GROUPS, seed=0)
        sim.simulate(workloads.poisson(made, rps, seed=0), sim.SimConfig(workers=WORKERS, policy="e2"))
        found.append((REQUESTS / (time.process_time() - cpu), REQUESTS / (time.perf_counter() - wall)))
    return statistics.median(cpu for cpu, _ in found), statistics.median(wall for _, wall in found)


def main() -> None:
    """Measure and print."""
    kernels: list[Callable[[int], int]] = [timeline]
    if find_spec("simpy") is None:
        print("SimPy is not installed here; `make peers` installs it into .venv-peers")
    else:
        import simpy

        print(f"SimPy {simpy.__version__}")
        kernels += [simpy_processes, simpy_callbacks]
    print(f"{'events pending':>15}" + "".join(f"{kernel.__name__:>18}/s" for kernel in kernels))
    for pending in PENDING:
        found = events_per_second(kernels, pending)
        ratios = "".join(f"  x{found['timeline'] / rate:.1f}" for rate in list(found.values())[1:])
        print(f"{pending:>15}" + "".join(f"{rate:>20,.0f}" for rate in found.values()) + ratios)
    for rps in RPS:
        cpu, wall = requests_per_second(rps)
        print(f"{REQUESTS} ToolBench requests, {rps:g} a second: {cpu:,.0f}/s of CPU time, {wall:,.0f}/s of wall time")


if __name__ == "__main__":
    main()
