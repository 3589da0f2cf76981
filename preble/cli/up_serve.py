"""The gateway of `preble up --serve PORT`: a `preble serve` process before the workers that `up` has started. Owns its
command line, its place in the order of things, and what is shown of it.

It starts when every worker serves or was given up, is started again when it crashes, and ends before the workers do,
so that its answers can end. One that is given up ends everything.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidConfig
from ..gateway.core.config import end_seconds
from ..gateway.core.config_sources import load
from ..launch.processes import READY, ChildProcess, preble_command
from ..launch.supervisor import Happening, Supervisor, SupervisorConfig

logger = logging.getLogger("preble.up")

NAME = "gateway"
TOKEN = "ADMIN-TOKEN "  # how the line begins that is for the operator's eyes, and for no log
_START_MARGIN_SECONDS = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--serve", type=int, metavar="PORT", help="start a gateway before the workers, on this port")
    parser.add_argument(
        "--serve-config", type=Path, metavar="FILE", help="the gateway's configuration, as of preble serve --config"
    )


@dataclass(frozen=True, slots=True)
class ServePlan:
    """The gateway that is to be started; `options` are those of `preble serve` beside its workers and port."""

    port: int
    options: tuple[str, ...]
    supervisor: SupervisorConfig


def make_serve_plan(args: argparse.Namespace) -> ServePlan | None:
    """What the options ask for, checked as far as it can be before anything runs. Raises `InvalidConfig`."""
    if args.serve is None:
        if args.serve_config is not None:
            raise InvalidConfig("--serve-config is of no use without --serve PORT")
        return None
    if args.prompts or args.on == "ray":
        raise InvalidConfig("--serve goes neither with --prompts nor with --on ray")
    if not 0 <= args.serve <= 65_535:
        raise InvalidConfig(f"--serve {args.serve}: a port is at most 65535; 0 takes a free one")
    config = load(args.serve_config, os.environ, {}).config
    options = ["--config", str(args.serve_config)] if args.serve_config else []
    options += ["--curve-keys", args.curve_keys] if args.curve_keys and config.curve_keys is None else []
    options += ["--policy", args.policy] if args.policy != config.policy and args.policy != "e2" else []
    if config.tokenizer is None and args.model and (Path(args.model) / "tokenizer.json").is_file():
        options += ["--tokenizer", args.model]
    limits = SupervisorConfig(
        max_restarts=args.max_restarts,
        start_seconds=config.connect_seconds + _START_MARGIN_SECONDS,
        drain_seconds=end_seconds(config),
    )
    return ServePlan(args.serve, tuple(options), limits)


class ServedGateway:
    """The gateway's process. `turn` is called again and again; nothing waits. Not thread-safe."""

    def __init__(self, plan: ServePlan, write_log: Callable[[str], None]) -> None:
        self._plan = plan
        self._write_log = write_log
        self._port = plan.port  # once it has one, it keeps it
        self._workers: Sequence[str] = ()
        self._supervisor: Supervisor | None = None

    @property
    def done(self) -> bool:
        """Whether nothing of it runs, nor will."""
        return self._supervisor is None or self._supervisor.done

    @property
    def clean(self) -> bool:
        """Whether it served as it should."""
        return self._supervisor is not None and self._supervisor.clean

    @property
    def has_given_up(self) -> bool:
        """Whether it will not be tried again."""
        return self._supervisor is not None and any(slot.state == "gave_up" for slot in self._supervisor.slots)

    @property
    def status(self) -> str:
        """How it is, for a line."""
        state = "waiting" if self._supervisor is None else self._supervisor.slots[0].state
        return f"{NAME} {state.replace('_', ' ')}"

    def start(self, workers: Sequence[str]) -> None:
        """Serve with these; asked again, nothing."""
        if self._supervisor is None and workers:
            self._workers = list(workers)
            self._supervisor = Supervisor(1, self._spawn, self._plan.supervisor, clock=time.monotonic)

    def turn(self) -> None:
        """Look at it, and do what is due."""
        for happening in () if self._supervisor is None else self._supervisor.turn():
            self._take(happening)

    def drain(self, number: int) -> None:
        """Let its answers end, as that signal asks for it; the second time: end it at once."""
        if self._supervisor is not None:
            self._supervisor.drain(number)

    def kill(self) -> None:
        """End it now."""
        if self._supervisor is not None:
            self._supervisor.kill()

    def _take(self, happening: Happening) -> None:
        happening.log(logger, NAME)
        if happening.kind == "ready":
            self._port = int(happening.text.rpartition(":")[2])

    def _spawn(self, number: int) -> ChildProcess:
        argv = [*preble_command(), "serve", "--port", str(self._port), *self._plan.options]
        argv += ["--until-stdin-closes", "--workers", *self._workers]
        return ChildProcess(argv, on_output=_pass_on, on_log=self._write_log)


def _pass_on(line: str) -> None:
    """The two lines that a gateway says, in its order, to standard output alone."""
    if line.startswith((READY, TOKEN)):
        sys.stdout.write(line + (f" name={NAME}\n" if line.startswith(READY) else "\n"))
        sys.stdout.flush()
