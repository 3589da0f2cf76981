"""How fast a core computes while a benchmark runs: a fixed matrix product from time to time, in seconds of CPU.

    python -m benchmarks.live.core_speed CORE     a line for each product until it is ended; one process for each core

A virtual machine's speed changes by more than half within minutes though nothing is stolen (`arm_noise`). Time that the
core spends on engines is not counted, so a busy core is no slow one. A product takes some 2 ms every half second.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks.common.paths import ROOT

SIZE = 384
EVERY_SECONDS = 0.5
WARM_UP = 3  # products that are not counted


class CoreSpeed:
    """Measures the cores from its start to `stop`; its processes end with `stack`."""

    def __init__(self, cores: Sequence[int], stack: ExitStack) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        variables = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        for core in cores:
            command = [sys.executable, "-m", "benchmarks.live.core_speed", str(core)]
            process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.kill)
            self._processes.append(process)

    def stop(self) -> dict[str, float]:
        """`product_seconds`: their mean over cores and time; nothing where there was none. Call it once."""
        found: list[float] = []
        for process in self._processes:
            process.kill()
            lines = process.communicate()[0].decode().split("\n")[:-1]
            found += [float(line) for line in lines[WARM_UP:]]
        return {"product_seconds": statistics.fmean(found)} if found else {}


def main() -> None:
    """Report products until this process is ended."""
    import numpy as np

    os.sched_setaffinity(0, {int(sys.argv[1])})
    parent, matrix = os.getppid(), np.random.default_rng(0).random((SIZE, SIZE), np.float32)
    while os.getppid() == parent:
        before = time.thread_time()
        matrix @ matrix
        print(f"{time.thread_time() - before:.6f}", flush=True)
        time.sleep(EVERY_SECONDS)


if __name__ == "__main__":
    main()
