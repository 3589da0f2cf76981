"""`preble serve --processes N`: several gateway processes that share one port. Owns their start, restarts and end.

    parent             holds the port (bound, not listening), starts the others, serves nothing
    process 0 .. N-1   each a whole gateway with a router of its own; the kernel spreads connections over them
                       (SO_REUSEPORT), the workers' events show all of them what is cached where

A process that ends unasked is started again, after half a second at first and 30 s at last, for as long as it takes;
what it was streaming breaks off. One that answers nothing for `HUNG_SECONDS` is killed, for the kernel would go on
giving it its share of the connections. One that cannot start while none has served yet ends everything: the
configuration is wrong, or the workers are not there. SIGTERM and SIGINT drain all, as each drains one
process; twice ends them now, SIGHUP goes to all. When the parent dies, of whatever, the others drain too. READY is
printed once, when all of them answer.

Run as `python -m preble.gateway.processes JSON` it is one of the processes: the parent starts them so.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..errors import InvalidConfig, PrebleError
from ..launch.processes import ChildProcess, end_with_stdin
from ..launch.supervisor import Happening, Supervisor, SupervisorConfig
from ..recording.names import KEY_BYTES
from .core.config import GatewayConfig, end_seconds, is_keyless
from .core.config_sources import load_for
from .core.logs import log_as_json
from .core.sibling_processes import ProcessSlot, say_ready

logger = logging.getLogger("preble.gateway")

TURN_SECONDS = 0.1
START_MARGIN_SECONDS = 300.0  # what a process may take to start beyond waiting for workers
RESTARTS_MAX = 2**31
HUNG_SECONDS = 10.0
PULSE_SECONDS = 1.0  # between two questions whether a process answers


def serve_processes(args: argparse.Namespace, config: GatewayConfig) -> int:
    """Keep `config.processes` gateways running until SIGTERM or SIGINT; the exit code. Main thread only."""
    log_as_json(config.log_level, {})
    with _reserved(config.host, config.port) as address, tempfile.TemporaryDirectory(prefix="preble-") as directory:
        return _Fleet(args, config, address, directory).run()


class _Fleet:
    """The processes of one port."""

    def __init__(self, args: argparse.Namespace, config: GatewayConfig, address: Any, directory: str) -> None:
        self._load = lambda: load_for(args, os.environ).config
        self._flags = {name: value for name, value in vars(args).items() if value is not None}
        self._count, self._directory = config.processes, directory
        self._address = address
        self._scheme = "http" if config.tls_certificate is None else "https"
        self._admin_token = secrets.token_urlsafe(24) if is_keyless(config) else None
        if self._admin_token is not None:
            self._slot(0).keep_token(self._admin_token)
        if config.record is not None:
            self._slot(0).keep_record_key(secrets.token_bytes(KEY_BYTES))
        self._ready: set[int] = set()  # processes that have served once
        self._failed = False
        self._hung: deque[tuple[int, ChildProcess]] = deque()  # from the threads that ask
        limits = SupervisorConfig(
            max_restarts=RESTARTS_MAX,
            start_seconds=config.connect_seconds + START_MARGIN_SECONDS,
            drain_seconds=end_seconds(config),
        )
        self._supervisor = Supervisor(self._count, self._spawn, limits, clock=time.monotonic)

    def run(self) -> int:
        """Until all have ended."""
        signals: deque[int] = deque()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda got, _: signals.append(got))
        try:
            while not self._supervisor.done:
                for happening in self._supervisor.turn():
                    self._take(happening)
                while signals:
                    self._take_signal(signals.popleft())
                while self._hung:
                    self._end_hung(*self._hung.popleft())
                time.sleep(TURN_SECONDS)
        finally:
            self._supervisor.kill()
        return 0 if self._supervisor.clean and not self._failed else 1

    def _take_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._supervisor.signal(number)
            self._reload()
        else:
            self._supervisor.drain(number)

    def _reload(self) -> None:
        """Take over how long processes may take to end. What is wrong with a configuration, they say."""
        with suppress(PrebleError):
            limits = self._supervisor.config
            self._supervisor.config = replace(limits, drain_seconds=end_seconds(self._load()))

    def _end_hung(self, number: int, child: ChildProcess) -> None:
        """Kill it; the supervisor starts another one. Not while it drains, which ends by itself."""
        slot = self._supervisor.slots[number]
        if slot.child is child and slot.state == "ready":
            fields = {"process": number}
            logger.error("process hangs: no answer in %g s", HUNG_SECONDS, extra={"fields": fields})
            child.kill()

    def _attend(self, number: int, child: ChildProcess) -> None:
        """In a thread, while it lives: ask it again and again."""
        while child.poll() is None:
            if self._slot(number).hangs(HUNG_SECONDS):
                self._hung.append((number, child))
            time.sleep(PULSE_SECONDS)

    def _take_ready(self, number: int) -> None:
        child = self._supervisor.slots[number].child
        if isinstance(child, ChildProcess):  # it may have ended since
            threading.Thread(target=self._attend, args=(number, child), daemon=True).start()
        first = len(self._ready) < self._count
        self._ready.add(number)
        if first and len(self._ready) == self._count:
            say_ready(self._address, self._admin_token, scheme=self._scheme)

    def _take(self, happening: Happening) -> None:
        happening.log(logger, "process", extra={"fields": {"process": happening.child}})
        if happening.kind == "ready":
            self._take_ready(happening.child)
        if happening.is_trouble and not self._ready and not self._supervisor.draining:
            self._failed = True
            self._supervisor.drain()

    def _spawn(self, number: int) -> ChildProcess:
        what = json.dumps({"flags": self._flags, "slot": asdict(self._slot(number))}, default=str)  # a path is its text
        argv = [sys.executable, "-m", "preble.gateway.processes", what]
        return ChildProcess(argv, on_output=lambda line: None, on_log=_pass_on)

    def _slot(self, number: int) -> ProcessSlot:
        return ProcessSlot(number, self._count, self._address[1], self._directory)


def _pass_on(line: str) -> None:
    """A line of a process's log, as it is."""
    sys.stderr.write(line + "\n")


@contextmanager
def _reserved(host: str, port: int) -> Iterator[Any]:
    """Hold the address: others of this user may listen there with SO_REUSEPORT, and nobody else may have it."""
    if not hasattr(socket, "SO_REUSEPORT"):
        raise InvalidConfig("processes: this system has no SO_REUSEPORT; start one process for each port instead")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        holder = socket.socket(family, kind, protocol)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
    except OSError as error:
        raise InvalidConfig(f"cannot listen on {host}:{port}: {error.strerror}") from error
    with holder:
        yield holder.getsockname()


def main(what: str) -> int:
    """Be one of the processes."""
    from .program import serve_until_stopped

    given = json.loads(what)
    slot = ProcessSlot(**given["slot"])
    args = argparse.Namespace(**given["flags"])
    args.config = Path(args.config) if "config" in args else None
    try:
        end_with_stdin(end_seconds(load_for(args, os.environ).config))
        return serve_until_stopped(lambda: load_for(args, os.environ), slot)
    except PrebleError as error:
        sys.stderr.write(f"preble serve: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
