"""What the demo shows while it runs. Owns the screen: a live bar on a terminal, a plain line now and then elsewhere.

Uses rich where it is installed and the output is a terminal; needs nothing otherwise.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

PLAIN_SECONDS = 10.0


class Tally:
    """Running numbers of one phase, fed one finished request at a time. Not thread-safe."""

    def __init__(self, policy: str, total: int) -> None:
        self.policy, self.total = policy, total
        self.sent = self.done = self.failed = 0
        self.ttft_sum = 0.0
        self.prompt_tokens = self.reused_tokens = 0

    def add(self, ttft_seconds: float, prompt_tokens: int, reused_tokens: int) -> None:
        """Count a request that got all its tokens."""
        self.done += 1
        self.ttft_sum += ttft_seconds
        self.prompt_tokens += prompt_tokens
        self.reused_tokens += reused_tokens

    @property
    def text(self) -> str:
        """ "mean TTFT 412 ms, 87% of prompt tokens reused, 3 in flight"."""
        waiting = self.sent - self.done - self.failed
        failed = f", {self.failed} FAILED" if self.failed else ""
        if not self.done:
            return f"{waiting} in flight{failed}"
        reused = self.reused_tokens / max(1, self.prompt_tokens)
        mean = self.ttft_sum / self.done * 1000
        return f"mean TTFT {mean:6,.0f} ms, {reused:4.0%} of prompt tokens reused, {waiting:2d} in flight{failed}"


class Screen:
    """Writes to `stream`; rich only if that is a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._console = rich_console(self._stream) if self._stream.isatty() else None

    def say(self, text: str) -> None:
        """One line that stays."""
        if self._console is not None:
            self._console.print(text, highlight=False, markup=False)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    @contextmanager
    def phase(self, tally: Tally) -> Iterator[Any]:
        """Shows a tally while it grows; call the yielded function after every change."""
        if self._console is not None:
            with rich_bar(self._console, tally) as update:
                yield update
        else:
            yield self._plain(tally)
        self.say(f"  {tally.policy:<12} {tally.done}/{tally.total}  {tally.text}")

    def _plain(self, tally: Tally) -> Any:
        last = time.monotonic()

        def update() -> None:
            nonlocal last
            if time.monotonic() - last >= PLAIN_SECONDS and tally.done + tally.failed < tally.total:
                last = time.monotonic()
                self.say(f"  {tally.policy:<12} {tally.done}/{tally.total}  {tally.text}")

        return update


def rich_console(stream: TextIO) -> Any:
    """A rich console, None without rich."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream)


@contextmanager
def rich_bar(console: Any, tally: Tally) -> Iterator[Any]:
    """A live bar that disappears at the end."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    policy, text = TextColumn("  {task.fields[policy]:<12}"), TextColumn("{task.fields[text]}")
    with Progress(policy, BarColumn(30), MofNCompleteColumn(), text, console=console, transient=True) as progress:
        task = progress.add_task("", total=tally.total, policy=tally.policy, text=tally.text)

        def update() -> None:
            progress.update(task, completed=tally.done + tally.failed, text=tally.text)

        yield update
