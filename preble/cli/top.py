"""`preble top`: the live page's numbers in a terminal. Owns the command, and the asking; frames are `top_screen`'s.

A gateway that stops answering stays on the screen, with the age of what is shown, until it answers again.
Exit codes: 0 one frame was printed (--once), 1 the gateway does not answer, or wants a key, 130 interrupted.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from ..clock import Clock
from ..errors import InvalidInput, TransportError

KEY_VARIABLE = "PREBLE_ADMIN_KEY"
ANSWER_SECONDS = 10.0
ANSWER_BYTES_MAX = 64 << 20
HISTORY_TICKS = 40  # that are asked for, and as many columns at the most

State = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the gateway (%(default)s)")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", help=f"file whose first line is an admin key; else ${KEY_VARIABLE}"
    )


def run(args: argparse.Namespace) -> int:
    """Show frames until interrupted, or one. Raises `InvalidInput`, `MissingExtra`, and `TransportError` where there is
    no first answer."""
    from .top_screen import TopScreen

    gateway = Asking(args.url, _key(args.key_file))
    state = gateway.state()
    if args.once:
        TopScreen(sys.stdout).print(state)
        return 0
    _show_for_good(gateway, state, TopScreen(sys.stdout), time.monotonic)
    return 0


def _show_for_good(gateway: Asking, state: State, screen: Any, clock: Clock) -> None:
    asked_at = clock()
    with screen:
        while True:
            trouble = ""
            try:
                state, asked_at = gateway.state(), clock()
            except TransportError as error:
                trouble = f"{error} (what is shown is {clock() - asked_at:.0f} s old)"
            screen.show(state, trouble)
            time.sleep(float(state["tick_seconds"]))


def _key(file: Path | None) -> str:
    """The key, "" without one. Raises `InvalidInput` for a file that cannot be read."""
    if file is None:
        return os.environ.get(KEY_VARIABLE, "")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--key-file: {file} cannot be read: {error}") from error
    return lines[0].strip() if lines else ""


class Asking:
    """A gateway that is asked for its state. Raises `InvalidInput` for a URL that is none."""

    def __init__(self, url: str, key: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInput(f"--url must be like http://127.0.0.1:8000, got {url!r}")
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._tick: int | None = None

    def state(self) -> State:
        """How everything stands, with a short history. Raises `TransportError`."""
        if self._tick is None:
            self._tick = int(self._answer("")["tick"])
        state = self._answer(f"?after={max(0, self._tick - HISTORY_TICKS)}")
        self._tick = int(state["tick"])
        return state

    def _answer(self, query: str) -> State:
        request = urllib.request.Request(f"{self._url}/v1/preble/state{query}", headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                state: State = json.loads(answer.read(ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            raise TransportError(f"{self._url} answers {error.code}: {_hint(error.code)}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise TransportError(f"{self._url} does not answer: {getattr(error, 'reason', error)}") from error
        if not isinstance(state, dict) or "tick" not in state:
            raise TransportError(f"{self._url} is no gateway of Preble")
        return state


def _hint(status: int) -> str:
    if status in (401, 403):
        return f"it wants an admin key, in --key-file or ${KEY_VARIABLE}"
    return "is it a gateway of Preble?" if status == 404 else "see its log"
