"""`FakeServer` as a process of its own, which can be stopped and killed.

python -m tests.support.server_process KIND PORT LIFE        # prints its port, ends with its stdin

SIGUSR1 hangs its engine, or lets it go on; with SIGUSR2 prefills take PREFILL_SECONDS, or no time again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from tests.support.attach import FakeServer
from tests.support.paths import ROOT
from tests.support.transport import HANG_SECONDS

PAUSE_SECONDS = 0.02
PREFILL_SECONDS = 2.0


class ServerProcess:
    """One. Ready when constructed; without `port` it takes a free one. `life` differs from start to start."""

    def __init__(self, kind: str, *, port: int = 0, life: int = 1) -> None:
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.server_process", kind, str(port), str(life)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def switch(self, number: signal.Signals) -> None:
        """Send one of the two signals, and wait until it has been taken: no request sent later comes before it."""
        self.process.send_signal(number)
        assert self.process.stdout is not None
        assert await asyncio.to_thread(self.process.stdout.readline)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(HANG_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def slow_down(server: FakeServer) -> None:
    """Or speed up again."""
    server.prefill_seconds = 0.0 if server.prefill_seconds else PREFILL_SECONDS


def freeze(server: FakeServer) -> None:
    """Or thaw."""
    if server.works.is_set():
        server.freeze()
    else:
        server.thaw()


def take(switch: Callable[[FakeServer], None], server: FakeServer) -> None:
    """A signal has come: do what it stands for and say so."""
    switch(server)
    sys.stdout.write("taken\n")
    sys.stdout.flush()


async def serve(kind: str, port: int, life: int) -> None:
    """Until stdin ends."""
    server = FakeServer(kind, events=False, port=port, life=life)
    server.pause_seconds = PAUSE_SECONDS
    await server.start()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, take, freeze, server)
    loop.add_signal_handler(signal.SIGUSR2, take, slow_down, server)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
