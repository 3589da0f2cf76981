"""What runs on a Ray node for each worker: an actor that keeps one `preble worker` as its child. Owns the child, and
what it reports; who places actors, and what routers do, is `ray_workers.py`'s.

The worker is a process of its own, not a thread of the actor: an engine that crashes, or is killed for its memory,
takes nobody along, its signals and its main thread are its own, and its loop shares no interpreter lock with Ray. When
it ends unasked, the actor ends, too, and is restarted by Ray within its `max_restarts`; when the actor ends in whatever
way, the worker does (`ray_watchdog.py`). Imports no Ray but to ask for the node's address.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..launch.processes import ChildProcess, preble_command, ready_endpoints
from ..launch.supervisor import WRONG_USAGE_CODE

logger = logging.getLogger("preble.ray")

NODE = "node"  # as a host: the address by which Ray knows the node
WATCHDOG_GRACE_SECONDS = 2.0
_LOG_LINES_KEPT = 20
# With `-m`, Python would look in the current directory first, and might find sources that are not compiled.
_WATCHDOG = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; "
    "from preble.integrations.ray_watchdog import main; sys.exit(main())"
)
_TURN_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """What an actor starts: `preble worker ARGUMENTS...` bound to a free port of `host`, under a name."""

    name: str
    host: str
    arguments: tuple[str, ...]

    def command(self, host: str) -> list[str]:
        """The worker's command line on a node of that address."""
        shown = f"[{host}]" if ":" in host else host
        own = ["--bind", f"tcp://{shown}:*", "--id", self.name, "--until-stdin-closes"]
        return [*preble_command(), "worker", *self.arguments, *own]


class WorkerActor:
    """The actor's class; Ray makes it an actor. Its calls answer at once."""

    def __init__(self, plan: ActorPlan, crash: Callable[[], None] | None = None) -> None:
        self._plan = plan
        self._crash = _crash if crash is None else crash
        self._failed = ""
        self._stopping = False
        self._last_lines: list[str] = []
        self._node = _node_address()
        host = self._node if plan.host == NODE else plan.host
        command = [sys.executable, "-c", _WATCHDOG, str(WATCHDOG_GRACE_SECONDS), *plan.command(host)]
        self._worker = ChildProcess(command, on_output=self._take_line, on_log=self._take_line)
        threading.Thread(target=self._watch, name="preble-worker-watch", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """`address` for routers ("" until it serves), `node` address, `pid` of this actor, `failed`: why no restart
        will help, `ended`: it has stopped as it was asked to."""
        return {
            "address": self._address(),
            "node": self._node,
            "pid": os.getpid(),
            "failed": self._failed,
            "ended": self._stopping and self._worker.poll() is not None,
        }

    def stop(self) -> None:
        """Let the worker drain; the second time: end it at once. Ask `status` whether it has ended."""
        self._stopping = True
        self._worker.terminate()

    def _address(self) -> str:
        line = self._worker.ready_line
        return ready_endpoints(line)[0] if line and (self._stopping or self._worker.poll() is None) else ""

    def _take_line(self, line: str) -> None:
        """To the actor's own output, which Ray keeps and shows; the last lines also report why a worker will not
        start."""
        self._last_lines = [*self._last_lines[1 - _LOG_LINES_KEPT :], line]
        sys.stderr.write(f"[{self._plan.name}] {line}\n")

    def _watch(self) -> None:
        while (code := self._worker.poll()) is None:
            time.sleep(_TURN_SECONDS)
        self._worker.kill()  # waits for its last words
        if self._stopping:
            return
        if code == WRONG_USAGE_CODE:  # it would not start the next time either
            self._failed = self._last_lines[-1] if self._last_lines else "wrong usage"
            return
        logger.error("%s ended with exit code %d; this actor ends with it", self._plan.name, code)
        self._crash()


def _crash() -> None:
    """End this process in a way that Ray takes for a crash, so that it restarts the actor."""
    sys.stderr.flush()
    os._exit(1)


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
