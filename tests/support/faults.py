"""What fault tests share: a network between routers and a worker that loses, doubles, swaps and stalls frames; a worker
in a network namespace that can be cut off; a router in a process of its own that can be killed. No test is in here."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq

from tests.support.paths import ROOT
from tests.support.transport import HANG_SECONDS, WorkerProcess

ANSWER_SECONDS = 4 * HANG_SECONDS  # longer than `load.py` waits for any one thing
STACKS_SECONDS = 1.0  # for a process to write its stacks
PROXY_HOST = "127.0.0.2"  # the proxy has the ports of its worker on another loopback address


# --- frames -----------------------------------------------------------------------------------------------------------


@dataclass
class Lane:
    """One direction of frames. Each is lost, doubled, or swapped with the next, by seeded draws, until `budget` frames
    have been treated so. `counts` says what was done."""

    seed: int
    loss: float = 0.0
    double: float = 0.0
    swap: float = 0.0
    budget: int = 1 << 30
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._held: list[bytes] | None = None

    def faulty(self, **rates: Any) -> None:
        """Change rates and budget; the draws go on."""
        for name, value in rates.items():
            setattr(self, name, value)

    def passes(self, parts: list[bytes]) -> list[list[bytes]]:
        """What comes out when `parts` goes in; a frame to be swapped comes out after the next one."""
        draw = self._rng.random()
        what = self._what(draw)
        self.counts[what] += 1
        self.budget -= what != "passed"
        late, self._held = self._held, None
        if what == "swapped" and late is None:
            self._held = parts
            return []
        out = {"lost": [], "doubled": [parts, parts]}.get(what, [parts])
        return out if late is None else [*out, late]

    def _what(self, draw: float) -> str:
        if self.budget <= 0:
            return "passed"
        for name, rate in (("lost", self.loss), ("doubled", self.double), ("swapped", self.swap)):
            if draw < rate:
                return name
            draw -= rate
        return "passed"


class Network:
    """Stands between routers and one worker, in a thread. `up`, `down` and `events` are its lanes; while `stalled` it
    moves nothing and loses nothing. Routers connect to `endpoint`; the worker may be restarted on its ports."""

    def __init__(self, worker_endpoint: str, worker_events: str, *, seed: int = 0, host: str = PROXY_HOST) -> None:
        self.up, self.down, self.events = (Lane(3 * seed + i) for i in range(3))
        self.stalled = False
        self._target = worker_endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._socket(zmq.ROUTER)
        self._front.router_mandatory = True
        self._front.bind(worker_endpoint.replace("127.0.0.1", host))
        self._published = self._socket(zmq.PUB)
        self._published.bind(worker_events.replace("127.0.0.1", host))
        self._subscribed = self._socket(zmq.SUB)
        self._subscribed.subscribe(b"")
        self._subscribed.connect(worker_events)
        self.endpoint = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)
        self._thread.start()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 100_000
        return socket

    def lanes(self) -> list[Lane]:
        """All three."""
        return [self.up, self.down, self.events]

    def heal(self) -> None:
        """Nothing goes wrong from now on."""
        self.stalled = False
        for lane in self.lanes():
            lane.faulty(loss=0.0, double=0.0, swap=0.0)

    def close(self) -> None:
        """End the thread and free the sockets."""
        self._closing = True
        self._thread.join(HANG_SECONDS)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._closing:
            if self.stalled:
                threading.Event().wait(0.005)
                continue
            poller = zmq.Poller()
            for socket in (self._front, self._subscribed, *self._backs.values()):
                poller.register(socket, zmq.POLLIN)
            ready = {socket for socket, _ in poller.poll(5)}
            if self._front in ready:
                self._move_up()
            if self._subscribed in ready:
                for parts in self.events.passes(self._subscribed.recv_multipart()):
                    self._published.send_multipart(parts)
            for identity, back in list(self._backs.items()):
                if back in ready:
                    self._move_down(identity, back)

    def _move_up(self) -> None:
        identity, *parts = self._front.recv_multipart()
        if identity not in self._backs:
            back = self._backs[identity] = self._socket(zmq.DEALER)
            back.connect(self._target)
        for frame in self.up.passes(parts):
            self._backs[identity].send_multipart(frame)

    def _move_down(self, identity: bytes, back: zmq.Socket[bytes]) -> None:
        try:
            for frame in self.down.passes(back.recv_multipart()):
                self._front.send_multipart([identity, *frame])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._backs.pop(identity).close(linger=0)  # that router has gone


# --- packets ----------------------------------------------------------------------------------------------------------


class NamespaceDenied(Exception):
    """This machine does not let us make network namespaces; the text says what it said."""


class Island:
    """A network namespace with one cable to this one, which can be cut without either side being reported."""

    def __init__(self, number: int) -> None:
        self.name = f"preble{os.getpid()}-{number}"
        self._cable = f"pb{os.getpid() % 100_000}x{number}"
        subnet = f"10.{198 + number % 2}.{os.getpid() % 250}"
        self.host = f"{subnet}.2"
        if shutil.which("ip") is None:
            raise NamespaceDenied("there is no `ip` command (iproute2)")
        self._ip("netns", "add", self.name)
        try:
            self._ip("link", "add", self._cable, "type", "veth", "peer", "name", "cable", "netns", self.name)
            self._ip("addr", "add", f"{subnet}.1/24", "dev", self._cable)
            self._ip("link", "set", self._cable, "up")
            self._ip("-n", self.name, "addr", "add", f"{self.host}/24", "dev", "cable")
            for device in ("cable", "lo"):
                self._ip("-n", self.name, "link", "set", device, "up")
        except NamespaceDenied:
            self.close()
            raise

    @staticmethod
    def _ip(*arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
        if done.returncode:
            raise NamespaceDenied(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command to run it there."""
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """From now on every packet is lost."""
        self._ip("-n", self.name, "link", "set", "cable", "down")

    def heal(self) -> None:
        """Packets pass again."""
        self._ip("-n", self.name, "link", "set", "cable", "up")

    def close(self) -> None:
        """Remove namespace and cable."""
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)


# --- routers ----------------------------------------------------------------------------------------------------------


class RouterProcess:
    """`stress/load.py` as a process: one router with clients. Ready when constructed, unless `wait` is false: then what
    is asked of it meanwhile is done once it is."""

    def __init__(self, *arguments: str, wait: bool = True) -> None:
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.stress.load", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._answers: queue.Queue[str] = queue.Queue()
        self._awaited = 0
        self._reader = threading.Thread(target=self._read, name="answers", daemon=True)
        self._reader.start()
        self.post("hello")
        if wait:
            self.last_answer()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")  # it has ended

    def post(self, command: str) -> None:
        """Send a command; its answer is not waited for."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        self._awaited += 1

    @property
    def answered(self) -> bool:
        """Whether answers to all commands have come."""
        return self._answers.qsize() >= self._awaited

    def last_answer(self, timeout_seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """The answer to the last command, once all have come. A router that does not answer writes the stacks of its
        threads and tasks to stderr, and AssertionError is raised."""
        line, deadline = "", time.monotonic() + timeout_seconds
        while self._awaited:
            try:
                line = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.process.send_signal(signal.SIGUSR1)
                time.sleep(STACKS_SECONDS)
                raise AssertionError(f"the router process did not answer within {timeout_seconds:g} s") from None
            assert line, f"the router process ended with exit code {self.process.wait(HANG_SECONDS)}"
            self._awaited -= 1
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command; its answer."""
        self.post(command)
        return self.last_answer()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(HANG_SECONDS)
        self._reader.join(HANG_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@contextmanager
def network(worker: WorkerProcess, **options: Any) -> Iterator[Network]:
    """A `Network` before a worker."""
    made = Network(worker.endpoint, worker.facts["events"], **options)
    try:
        yield made
    finally:
        made.close()
