"""One simulation of the evaluation, and many of them: run on all cores, kept, and not run again. Owns the store.

A cell is kept under a digest of its definition and of the sources that decide its result, so an interrupted evaluation
goes on where it was, and a changed scheduler makes new cells.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import preble
from benchmarks.paper import setups
from preble import sim

HERE = Path(__file__).resolve().parent
DIGITS = 6  # significant, of what is kept: a page made from it is the same page
Measure = Callable[["Cell", Any, sim.Result], dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """A workload through a system on a fleet. `share` is how much of the experiment's length is run."""

    experiment: str
    workload: str
    fleet: str
    system: str
    rps: float
    seed: int = 0
    share: float = 1.0

    @property
    def place(self) -> tuple[Any, ...]:
        """What cells with the same requests have in common."""
        return self.experiment, self.workload, self.fleet, self.rps, self.seed, self.share

    @property
    def cost(self) -> float:
        """Cells of a higher cost are begun first."""
        return self.rps


Found = dict[Cell, dict[str, Any]]


def run_cell(cell: Cell) -> dict[str, Any]:
    """Simulate a cell; its figures, rounded."""
    system, fleet = setups.SYSTEMS[cell.system], setups.FLEETS[cell.fleet]
    workload = setups.workload_of(cell.workload, cell.fleet, cell.rps, cell.seed, cell.share)
    config = sim.SimConfig(
        workers=fleet.workers,
        policy=setups.policy_of(system, workload),
        cost_model=fleet.cost_model,
        local=setups.local_config(fleet, system),
        seed=cell.seed,
        step_seconds=fleet.step_seconds,
        step_seconds_per_request=fleet.step_seconds_per_request,
    )
    result = sim.simulate(workload, config)
    return {**rounded(result.summary().as_dict()), "trace_hash": result.trace_hash}


def rounded(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures to `DIGITS` significant digits."""
    return {k: float(f"{v:.{DIGITS}g}") if isinstance(v, float) else v for k, v in figures.items()}


@lru_cache(maxsize=8)
def sources_digest(module: str) -> str:
    """Of everything that a result depends on beside the cell, whose class is in `module`."""
    digest = hashlib.sha256()
    package = Path(preble.__file__).parent
    paths = [path for kind in ("*.py", "*.pyx", "*.pxd") for path in package.rglob(kind)]
    shared = {HERE / f"{name}.py" for name in ("setups", "cells", "contest_cells")}
    for path in sorted({*paths, *shared, Path(str(sys.modules[module].__file__))}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Store:
    """Results of cells, one file each. Files of other versions of the sources are never read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def get(self, cell: Any) -> dict[str, Any] | None:
        """What is known of a cell."""
        path = self._path(cell)
        return json.loads(path.read_text()) if path.exists() else None

    def put(self, cell: Any, figures: dict[str, Any]) -> None:
        """Keep a cell; whole or not at all."""
        path = self._path(cell)
        half = path.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps(figures))
        half.replace(path)

    def _path(self, cell: Any) -> Path:
        text = json.dumps([type(cell).__name__, asdict(cell), sources_digest(type(cell).__module__)], sort_keys=True)
        return self._directory / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def run_place(cells: Sequence[Cell], directory: Path) -> Found:
    """Cells with the same requests, in one process."""
    store, found = Store(directory), {}
    for cell in cells:
        found[cell] = run_cell(cell)
        store.put(cell, found[cell])
    return found


def run_all(
    cells: Iterable[Any], directory: Path, title: str, run: Callable[[Sequence[Any], Path], dict[Any, Any]] = run_place
) -> dict[Any, dict[str, Any]]:
    """Run what is not known, on all cores, the longest first; gives everything asked for. Says how far it is."""
    cells, store = list(cells), Store(directory)
    known = {cell: figures for cell in cells if (figures := store.get(cell)) is not None}
    left = [cell for cell in cells if cell not in known]
    places = [list(group) for _, group in groupby(left, key=lambda cell: cell.place)]
    places.sort(key=lambda group: -group[0].cost)
    said = time.monotonic()
    started = said
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for done in as_completed([pool.submit(run, place, directory) for place in places]):
            known.update(done.result())
            if time.monotonic() - said > 5.0 or len(known) == len(cells):
                said = time.monotonic()
                sys.stderr.write(f"{title}: {len(known)} of {len(cells)} cells, {said - started:.0f} s\n")
    return {cell: known[cell] for cell in cells}
