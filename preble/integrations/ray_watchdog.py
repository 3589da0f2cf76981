"""What stands between a Ray actor and its `preble worker`: a process that ends the worker, and all that it has started,
soon after the actor is gone. Owns that one promise.

    python -c "from preble.integrations.ray_watchdog import main; main()" GRACE_SECONDS COMMAND...

A worker that is left alone would finish its requests first, for as long as `--drain-seconds` says. Ray, however, gives
an actor's GPUs to others the moment it is dead, and to the restarted actor first: an engine that still holds their
memory would make that one fail. So when standard input closes, the worker gets SIGTERM and `GRACE_SECONDS`, then
SIGKILL, and with it its process group. SIGTERM is passed on. The exit code is the worker's, 128 + N where a signal N
ended it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from ..launch.processes import ChildProcess

_TURN_SECONDS = 0.05


def run(grace_seconds: float, command: list[str]) -> int:
    """Run a command until it ends, or until standard input closes and the grace is over; its exit code."""
    worker = ChildProcess(command, on_output=_pass_on, on_log=_log)
    signal.signal(signal.SIGTERM, lambda *_: worker.terminate())
    closed = threading.Event()
    threading.Thread(target=_wait_for_end, args=(closed,), name="preble-watchdog-stdin", daemon=True).start()
    kill_at = float("inf")
    while (code := worker.poll()) is None:
        if closed.is_set() and kill_at == float("inf"):
            worker.terminate()
            kill_at = time.monotonic() + grace_seconds
        if time.monotonic() >= kill_at:
            worker.kill()
        time.sleep(_TURN_SECONDS)
    worker.kill()  # whatever it had started
    return code if code >= 0 else 128 - code


def _wait_for_end(closed: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    closed.set()


def _pass_on(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main() -> int:
    """The command line; the exit code."""
    return run(float(sys.argv[1]), sys.argv[2:])
