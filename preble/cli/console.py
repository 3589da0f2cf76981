"""What commands have in common where they meet a person: options, progress, tables, numbers, JSON, figures, and what a
result was made with. Owns no command, and imports none.

rich and matplotlib are optional: without rich everything is plain text, without matplotlib there are no figures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO

from .. import __version__
from ..errors import InvalidInput, MissingExtra

PLAIN_SECONDS = 10.0  # between lines of progress where the output is no terminal
GREY = "#555555"
TITLE: dict[str, Any] = {"fontsize": 10.5, "loc": "left", "color": "#222222"}  # of a set of axes


# --- options ----------------------------------------------------------------------------------------------------------


def positive_int(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def positive_float(text: str) -> float:
    """An argument that is a finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def output_directory(path: Path | None, option: str, command: str) -> Path:
    """The directory for results, made where missing; a new temporary one for None. Raises `InvalidInput`."""
    if path is None:
        return Path(tempfile.mkdtemp(prefix=f"preble-{command}-"))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"{option} {path}: {error}") from error
    return path


def need_torch() -> None:
    """Raise `MissingExtra` where a torch engine cannot run."""
    if not all(map(find_spec, ("torch", "transformers", "tokenizers"))):
        raise MissingExtra('it needs torch: pip install "preble[torch,bench]", or run it with --engine simulated')


# --- progress ---------------------------------------------------------------------------------------------------------


class PhaseProgress(Protocol):
    """How far one policy's requests are; `text` says more."""

    policy: str
    total: int
    done: int
    failed: int

    @property
    def text(self) -> str: ...


class Screen:
    """Where progress is shown: `stream`, standard error if None. Uses rich only on a terminal. Not thread-safe."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._console = rich_console(self._stream) if self._terminal else None
        self._shown_at = time.monotonic()

    def say(self, text: str) -> None:
        """One line that stays."""
        if self._console is not None:
            self._console.print(text, highlight=False, markup=False)
        else:
            self._write(text + "\n")

    def show(self, text: str) -> None:
        """One line that is written over on a terminal; elsewhere a line now and then."""
        if self._terminal:
            self._write(f"\r\x1b[K{text}")
        elif time.monotonic() - self._shown_at >= PLAIN_SECONDS:
            self._shown_at = time.monotonic()
            self._write(text + "\n")

    def clear(self) -> None:
        """Take the last line of `show` off a terminal."""
        if self._terminal:
            self._write("\r\x1b[K")

    @contextmanager
    def phase(self, progress: PhaseProgress) -> Iterator[Callable[[], None]]:
        """Show numbers while they grow, and at the end; call the yielded function after every change."""
        if self._console is not None:
            with rich_bar(self._console, progress) as update:
                yield update
        else:
            self._shown_at = time.monotonic()
            yield lambda: self._show_phase(progress)
            self.clear()
        self.say(_line(progress))

    def _show_phase(self, progress: PhaseProgress) -> None:
        if progress.done + progress.failed < progress.total:
            self.show(_line(progress))

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _line(progress: PhaseProgress) -> str:
    return f"  {progress.policy:<12} {progress.done}/{progress.total}  {progress.text}"


def rich_console(stream: TextIO) -> Any:
    """A rich console, None without rich."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream)


@contextmanager
def rich_bar(console: Any, progress: PhaseProgress) -> Iterator[Callable[[], None]]:
    """A live bar that disappears at the end."""
    from rich import progress as rich

    policy, text = rich.TextColumn("  {task.fields[policy]:<12}"), rich.TextColumn("{task.fields[text]}")
    columns = (policy, rich.BarColumn(30), rich.MofNCompleteColumn(), text)
    with rich.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=progress.total, policy=progress.policy, text=progress.text)
        yield lambda: bar.update(task, completed=progress.done + progress.failed, text=progress.text)


# --- tables and numbers -----------------------------------------------------------------------------------------------


def aligned(rows: Sequence[Sequence[str]], *, left: int | None = None, gap: str = "  ") -> list[str]:
    """Rows as lines with straight columns: the first `left` to the left (None: all), the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    split = len(widths) if left is None else left
    places = [f"{{:{'<' if number < split else '>'}{width}}}" for number, width in enumerate(widths)]
    return [gap.join(places).format(*row).rstrip() for row in rows]


def printable(name: object) -> str:
    """A name from somewhere else, with nothing in it that a terminal obeys."""
    text = str(name)
    return text if text.isprintable() else ascii(text)


def duration(seconds: float) -> str:
    """Seconds for a person: "85 ms", "1.4 s"."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.3g} s" if seconds == round(seconds) or seconds >= 9.995 else f"{seconds:.2f} s"


# --- JSON -------------------------------------------------------------------------------------------------------------


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write strict JSON, its directory made where missing; a NaN becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(without_nan(content), indent=1, allow_nan=False, default=str)
    path.write_text(text + "\n", encoding="utf-8")


def without_nan(value: Any) -> Any:
    """The same data with None for every NaN or infinity, which JSON cannot say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value


# --- figures ----------------------------------------------------------------------------------------------------------


def can_draw(otherwise: str) -> bool:
    """Whether matplotlib is here; if not, says so on standard output, after the words `otherwise`."""
    if find_spec("matplotlib") is None:
        sys.stdout.write(f'{otherwise} matplotlib, pip install "preble[bench]"\n')
        return False
    return True


def need_matplotlib() -> None:
    """Raise `MissingExtra` without matplotlib."""
    if find_spec("matplotlib") is None:
        raise MissingExtra('figures need matplotlib: pip install "preble[bench]"')


def new_figure(size: tuple[float, float], rect: tuple[float, float, float, float], h_pad: float = 0.10) -> Any:
    """A white figure of `size` inches whose axes keep inside `rect`. Raises `MissingExtra` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra('figures need matplotlib: pip install "preble[bench]"') from error
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(rect=rect, w_pad=0.12, h_pad=h_pad)
    return figure


def caption(figure: Any, y: float, text: str, *, size: float = 8.5, title: bool = False) -> None:
    """A line of text at the left edge: the figure's title in bold, notes in grey."""
    style = {"fontweight": "bold"} if title else {"color": GREY}
    figure.text(0.02, y, text, fontsize=size, va="center", **style)


def save_figure(figure: Any, path: Path) -> None:
    """Write a PNG, its directory made where missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def tidy(axes: Any, grid: str = "both") -> None:
    """Fewer lines, paler ones."""
    axes.grid(True, axis=grid, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#bbbbbb")
    axes.tick_params(colors=GREY)


# --- what a result was made with --------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Versions of Preble, Python and what matters for timing; packages that are not installed are left out."""
    found = {"preble": __version__, "python": platform.python_version()}
    for name in ("numpy", "pyzmq", "msgpack", "torch", "transformers", "tokenizers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the checkout this runs from, "-dirty" with changes; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def machine() -> dict[str, Any]:
    """Processor, cores and memory of this machine."""
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": memory_gib(),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n")
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def memory_gib() -> float | None:
    """Physical memory, None where the system does not say."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None
