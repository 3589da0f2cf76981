"""`preble replay`: what a recording's requests would have got under another policy, on more workers, with other knobs.
Owns its options, its progress and its table.

preble replay traffic.rec --policy round_robin,e2
preble replay traffic.rec --workers +1 --set history_seconds=60 --plot replay.png
preble replay traffic.rec.process-* --policy "e2,rules:Mine(weight=0.5)" --json found.json

Standard output is the same for the same recording and command, on every run.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import InvalidInput
from ..recording import Recording
from ..sim.engine_fit import EngineModel
from ..sim.replay import FIGURES, Estimate95, Figures, ReplayAnswer, replay
from .console import Screen, aligned, positive_int, write_json
from .simulate import names_of
from .sweeps import plot
from .sweeps.requests_file import RequestsFile, check_files
from .sweeps.settings import scheduler_config
from .sweeps.statistics import Interval

TITLES = {
    "mean_ttft_seconds": "mean TTFT, s",
    "p99_ttft_seconds": "p99 TTFT, s",
    "mean_latency_seconds": "mean latency, s",
    "p99_latency_seconds": "p99 latency, s",
    "recomputed_tokens": "tokens twice",
    "hit_fraction": "hits",
}
COSTS = {"floor": "an iteration", "token": "a token", "context": "a token of context", "pair": "a token and context",
         "request": "a request in it", "hop": "the way there"}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add = parser.add_argument
    add("recording", nargs="+", type=Path, metavar="FILE", help="of `preble serve --record`; of several processes, all")
    add("--policy", default="round_robin,least_loaded,e2", metavar="P[,P...]",
        help="names, or module:Class of yours; either with (KEY=VALUE, ...) (default: %(default)s)")  # fmt: skip
    add("--workers", metavar="+N|-N|N", help="more or fewer workers than recorded, or so many (default: as recorded)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any field of SchedulerConfig; may be repeated")
    add("--seed", type=int, default=0, metavar="N", help="of chance in policies (default: 0)")
    add("--seeds", type=positive_int, default=1, metavar="N", help="so many, from --seed on (default: 1)")
    add("--open-loop", action="store_true", help="turns of a session come when they came, whatever the one before took")
    add("--json", type=Path, metavar="FILE", help="write everything found")
    add("--requests-file", type=Path, metavar="FILE", help="a row a request of every run: .csv, or .parquet (pyarrow)")
    add("--plot", type=Path, metavar="FILE", help="a picture (PNG); needs matplotlib")


def run(args: argparse.Namespace, screen: Screen | None = None) -> int:
    """Check everything, replay, print the table. Wrong options raise before anything is simulated."""
    policies = names_of(args.policy)
    scheduler = scheduler_config(args.set)
    check_files(args)
    recording = Recording.read(*args.recording)
    workers = _workers_of(args.workers, len(recording.workers))
    seeds = range(args.seed, args.seed + args.seeds)
    with closing(_Shown(screen or Screen())) as progress:
        found = replay(
            recording, policies, workers=workers, scheduler=scheduler, seeds=seeds, closed=not args.open_loop,
            progress=progress.show,
        )  # fmt: skip
    sys.stdout.write(_text(found))
    if args.json is not None:
        about = {"preble": __version__, "seeds": list(seeds), "set": args.set, "open_loop": args.open_loop}
        write_json(args.json, {**about, **found.as_dict()})
    if args.requests_file is not None:
        with RequestsFile(args.requests_file) as into:
            for one in found.runs:
                for seed, result in zip(seeds, one.results, strict=True):
                    into.add((one.policy, one.workers, None, seed), found.workload, result)
    if args.plot is not None:
        _draw(args.plot, found)
    return 0


def _workers_of(text: str | None, recorded: int) -> int | None:
    """How many workers an option asks for. Raises `InvalidInput`."""
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        raise InvalidInput(f"--workers must be a number, or +N or -N, got {text!r}") from None
    found = recorded + number if text[:1] in "+-" else number
    if found < 1:
        raise InvalidInput(f"--workers {text} leaves {found} of {recorded} workers")
    return found


# --- progress ---------------------------------------------------------------------------------------------------------


class _ReplayProgress:
    """Progress of one simulation, or of the fit."""

    failed = 0

    def __init__(self, name: str, total: int) -> None:
        self.policy, self.total, self.done = name, total, 0
        self.virtual_seconds = 0.0
        self._started = time.monotonic()

    @property
    def text(self) -> str:
        passed = max(time.monotonic() - self._started, 1e-9)
        if not self.virtual_seconds:
            return "learning what engines cost"
        return f"{self.virtual_seconds:,.0f} virtual seconds, {self.done / passed:,.0f} requests/s"


class _Shown:
    """Progress on the screen, one line after the other."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._phase: AbstractContextManager[Callable[[], None]] | None = None
        self._now: _ReplayProgress | None = None
        self._update: Callable[[], None] = lambda: None

    def show(self, what: str, done: int, of: int, seconds: float) -> None:
        """So far `what` is."""
        now = self._now
        if now is None or now.policy != what or done < now.done:
            self.close()
            self._now = now = _ReplayProgress(what, of)
            self._phase = self._screen.phase(now)
            self._update = self._phase.__enter__()
        now.done, now.total, now.virtual_seconds = done, max(of, done), seconds
        self._update()

    def close(self) -> None:
        """The line is complete."""
        phase, self._phase, self._now = self._phase, None, None
        if phase is not None:
            phase.__exit__(None, None, None)


# --- what is printed --------------------------------------------------------------------------------------------------


def _text(found: ReplayAnswer) -> str:
    """All of it."""
    rows = [["", "workers", *TITLES.values()]]
    recorded = len(found.recording.workers)
    if found.measured is not None:
        rows.append(["measured", str(recorded), *_cells(found.measured)])
    if found.recorded is not None:
        rows.append(["as placed, simulated", str(recorded), *_cells(found.recorded)])
        error = found.model_error
        rows.append(["  the model's error", "", *(_signed(error.get(name)) for name in FIGURES)])
    for one in found.runs:
        rows.append([one.policy, str(one.workers), *_cells(one.figures)])
    lines = [*_opening(found), "", *aligned(rows, left=1)]
    missed = [f"{one.policy}: {one.not_finished} requests got no answer" for one in found.runs if one.not_finished]
    return "\n".join([*lines, *missed]) + "\n"


def _opening(found: ReplayAnswer) -> list[str]:
    """What was recorded, and what is taken for its engines."""
    recording = found.recording
    engines = ", ".join(sorted({worker.engine or "engine unknown" for worker in recording.workers}))
    text = f"{recording.name}: {len(recording)} requests in {recording.seconds:.0f} s, {len(recording.workers)} workers"
    lines = [f"{text} ({engines})" + (f", placed by {recording.policy}" if recording.policy else "")]
    gone = []
    if recording.missing:
        gone.append(f"{recording.missing} requests are missing: the disk did not keep up")
    if recording.is_cut:
        gone.append("a file ends within a record")
    if found.left_out:
        gone.append(f"{found.left_out} requests never ran, and are left out")
    if gone:
        lines.append("; ".join(gone))
    return [*lines, _engine_line(found.engines)]


def _engine_line(engines: EngineModel) -> str:
    costs = ", ".join(f"{_seconds(getattr(engines.costs, name))} {text}" for name, text in COSTS.items())
    line = f"engines: {costs}; {engines.costs.free:.0f} tokens free; fitted to {engines.requests} requests"
    if engines.slowness:
        factors = ", ".join(f"{name} {factor:.2f}" for name, factor in engines.slowness.items())
        line += f"\nspeeds: {factors} times these"
    if engines.error:
        kept = ", ".join(
            f"{TITLES[name].removesuffix(', s')} {_signed(value)}" for name, value in engines.error.items()
        )
        line += f"\nwhere nothing was fitted the model is off by: {kept}"
    return line


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def _cells(figures: Figures) -> list[str]:
    return [_cell(name, getattr(figures, name)) for name in FIGURES]


def _cell(name: str, value: Estimate95) -> str:
    """ "0.512 (0.480-0.551)"."""
    if math.isnan(value.value):
        return "-"
    form = {"recomputed_tokens": "{:,.0f}", "hit_fraction": "{:.1%}"}.get(name, "{:.3f}").format
    if math.isnan(value.low):
        return form(value.value)
    return f"{form(value.value)} ({form(value.low)}-{form(value.high)})"


def _signed(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:+.1%}"


def _draw(path: Path, found: ReplayAnswer) -> None:
    """The picture, and where it lies."""
    import numpy as np

    def drawn(policy: str, workers: int, times: dict[str, Any], figures: Figures) -> plot.Drawn:
        values = {name: getattr(figures, name) for name, _ in plot.PANELS}
        intervals = {name: Interval(one.value, one.low, one.high) for name, one in values.items()}
        return plot.Drawn(policy, workers, None, intervals, times)

    lines: list[plot.Drawn] = []
    if found.measured is not None:
        requests: Sequence[Any] = [one for one in found.recording.requests if one.finished]
        times = {name: np.array([getattr(one, name) for one in requests]) for name, _ in plot.SAMPLES}
        lines.append(drawn("measured", len(found.recording.workers), times, found.measured))
    for one in found.runs:
        times = {name: np.concatenate([getattr(result, name) for result in one.results]) for name, _ in plot.SAMPLES}
        lines.append(drawn(f"{one.policy}, simulated", len(found.recording.workers), times, one.figures))
    workers = f", {found.runs[0].workers} workers simulated" if found.runs else ""
    title = f"{found.recording.name}: {len(found.recording)} requests{workers}"
    error = found.model_error.get("mean_ttft_seconds")
    note = "" if error is None else f"; the model's mean TTFT is off by {error:+.1%} where it can be compared"
    plot.draw(path, lines, title, f"preble {__version__} replay{note}")
    sys.stdout.write(f"plot: {path}\n")
