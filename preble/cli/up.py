"""`preble up`: worker processes and a router in one command. Owns the command, and the router's part of it.

    preble up --engine simulated --workers 2 -- --time-scale 0.05

Which workers run is decided in `launch/supervisor.py`, their processes and logs are `launch/processes.py`'s. Every
worker keeps the endpoint of its first start, so that routers find it again after a restart. The router connects to each
as it gets ready; it serves `--prompts`, one JSON object a line, each answered by JSON lines as its tokens come:

    {"id": "a", "token_ids": [1, 2, 3], "sampling": {"max_new_tokens": 8}}
    {"id": "a", "index": 0, "token_ids": [17], "worker": "worker-0", "cached_tokens": 0, "finish_reason": null}
    {"id": "a", "error": "InvalidTokens: ..."}

Lines are read when there is room: at most `--concurrency` requests are live. Standard output has the workers' READY
lines, or with `--prompts` the answers alone, standard error the logs of all.

With `--serve PORT` a gateway stands before them (`up_serve`).

SIGTERM or SIGINT drains: no more prompts are read, the workers finish what runs; the second one ends them at once.
Exit codes: 0 drained, and every request answered; 1 a worker was given up or killed, or a request failed; 2 wrong
usage. When all workers are given up, it ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from .. import worker as worker_command
from ..errors import HandshakeRefused, InvalidConfig, UnknownWorker
from ..launch.processes import ChildProcess, LogBook, Place, parse_places, preble_command, ready_endpoints
from ..launch.supervisor import Happening, Slot, Supervisor, SupervisorConfig
from ..policies.base import resolve
from ..router.router import Router
from ..transport.security import ClientKeys, check_bind, load_client_keys, load_server_keys
from . import up_ray, up_serve
from .prompt_lines import PromptService, RunTasks, last_answers, log_status, request_counts

logger = logging.getLogger("preble.up")

_TURN_SECONDS = 0.1
_KILL_MARGIN_SECONDS = 20.0  # what a worker may take beyond its own drain time: the step it is in, its last frames
_OURS = ("id", "bind", "events_bind", "until_stdin_closes", "curve_keys", "insecure")


# --- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", required=True, metavar="NAME", help="the workers' engine: see preble worker --help")
    parser.add_argument("--model", metavar="DIR", help="the workers' model")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="worker processes (%(default)s)")
    parser.add_argument("--on", choices=("processes", "ray"), default="processes", help="what workers run on")
    parser.add_argument(
        "--host", metavar="ADDRESS", help="where workers bind; default 127.0.0.1, with --on ray each node's own address"
    )
    parser.add_argument(
        "--port", type=int, default=0, help="worker i binds PORT + 2 i, and the port after it for events; default: free"
    )
    parser.add_argument(
        "--devices", metavar="LIST", help="one place for each worker: cuda:0,cuda:1+2 (devices) or cpu:0,cpu:1 (cores)"
    )
    parser.add_argument(
        "--engine-arg", action="append", default=[], metavar="KEY=VALUE", help="for the engine; may be repeated"
    )
    parser.add_argument("--curve-keys", metavar="DIR", help="CURVE keys of workers and router: see preble keygen")
    parser.add_argument("--insecure", action="store_true", help="allow a non-loopback address without keys")
    parser.add_argument(
        "--policy", default="e2", metavar="NAME", help="the router's: a name, or module:Class (%(default)s)"
    )
    parser.add_argument("--prompts", metavar="FILE", help="requests to serve, JSON lines; - is standard input")
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="live requests of --prompts at a time")
    parser.add_argument("--log-dir", metavar="DIR", help="a log file for each worker, too (5 files of 10 MiB each)")
    parser.add_argument(
        "--status-seconds", type=float, default=30.0, help="between status lines (%(default)s; 0: none)"
    )
    parser.add_argument("--max-restarts", type=int, default=5, help="of a worker in a row, then it is given up")
    parser.add_argument("--start-seconds", type=float, default=1800.0, help="for a worker to get ready (%(default)s)")
    parser.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="the least serious of what is logged (%(default)s)",
    )
    up_serve.add_arguments(parser)
    up_ray.add_arguments(parser)
    parser.add_argument("worker_arguments", nargs="*", metavar="-- OPTION", help="options of every preble worker")


def run(args: argparse.Namespace) -> int:
    """`preble up`: supervise until SIGTERM or the last prompt; returns the exit code. Raises typed errors."""
    form = "[up] %(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=args.log_level.upper(), stream=sys.stderr, format=form)
    if args.on == "ray":
        up_serve.make_serve_plan(args)
        return _run_on_ray(args)
    plan = make_plan(args)
    prompts = _open_prompts(args.prompts) if args.prompts else None
    names = plan.names if plan.serve is None else (*plan.names, up_serve.NAME)
    logs = LogBook(names, plan.log_dir, stream=sys.stderr)
    try:
        with logs.including("up", logging.Formatter(form)):
            return asyncio.run(UpRun(plan, logs, prompts).run())
    finally:
        logs.close()


def _run_on_ray(args: argparse.Namespace) -> int:
    """The same on a Ray cluster, whose part says where workers bind and which keys they have."""
    _refuse_ours(args.engine, args.worker_arguments)
    open_args = argparse.Namespace(**{**vars(args), "curve_keys": None, "insecure": False})
    arguments = _worker_arguments(open_args)
    drain_seconds = _parse_worker(arguments).drain_seconds
    prompts = _open_prompts(args.prompts) if args.prompts else None
    return up_ray.run(up_ray.make_launch(args, arguments, drain_seconds, prompts), args.ray_address)


def _open_prompts(name: str) -> TextIO:
    try:
        # Not `sys.stdin` itself: its reader may still wait in a thread when the process ends.
        return open(0 if name == "-" else name, encoding="utf-8", errors="replace", closefd=name != "-")
    except OSError as error:
        raise InvalidConfig(f"--prompts {name}: {error}") from error


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UpPlan:
    """What to start: checked as far as it can be before anything runs."""

    names: tuple[str, ...]
    binds: tuple[tuple[str, str], ...]  # of each worker: for routers, and for events ("" takes a free port)
    places: tuple[Place | None, ...]
    arguments: tuple[str, ...]  # of every worker
    supervisor: SupervisorConfig
    keys: ClientKeys | None
    policy: str
    concurrency: int
    status_seconds: float
    log_dir: Path | None
    serve: up_serve.ServePlan | None

    def command(self, bind: tuple[str, str]) -> list[str]:
        """The command line of a worker at an address."""
        return [*preble_command(), "worker", *self.worker_arguments(bind)]

    def worker_arguments(self, bind: tuple[str, str]) -> list[str]:
        events = ["--events-bind", bind[1]] if bind[1] else []
        return ["--bind", bind[0], *events, "--until-stdin-closes", *self.arguments]


def make_plan(args: argparse.Namespace) -> UpPlan:
    """Check the options. Raises `InvalidConfig` or `InsecureBind`; wrong worker options end with argparse's message."""
    if args.workers < 1:
        raise InvalidConfig(f"--workers must be positive, got {args.workers}")
    if args.concurrency < 1:
        raise InvalidConfig(f"--concurrency must be positive, got {args.concurrency}")
    if not args.status_seconds >= 0.0:
        raise InvalidConfig(f"--status-seconds must not be negative, got {args.status_seconds}")
    for name, usual in up_ray.ONLY_HERE.items():
        if getattr(args, name) != usual:
            raise InvalidConfig(f"--{name.replace('_', '-')} needs --on ray")
    resolve(args.policy)  # before any worker starts
    binds = tuple(_binds(args.host or "127.0.0.1", args.port, number) for number in range(args.workers))
    for bind, _ in binds:
        check_bind(bind, has_keys=args.curve_keys is not None, insecure=args.insecure)
    plan = UpPlan(
        names=tuple(f"worker-{number}" for number in range(args.workers)),
        binds=binds,
        places=tuple(parse_places(args.devices, args.workers)) if args.devices else (None,) * args.workers,
        arguments=tuple(_worker_arguments(args)),
        supervisor=SupervisorConfig(max_restarts=args.max_restarts, start_seconds=args.start_seconds),
        keys=_keys(args.curve_keys) if args.curve_keys else None,
        policy=args.policy,
        concurrency=args.concurrency,
        status_seconds=args.status_seconds,
        log_dir=Path(args.log_dir) if args.log_dir else None,
        serve=up_serve.make_serve_plan(args),
    )
    parsed = _parse_worker(plan.worker_arguments(binds[0]))
    _refuse_ours(args.engine, args.worker_arguments)
    drain_seconds = parsed.drain_seconds + _KILL_MARGIN_SECONDS
    return replace(plan, supervisor=replace(plan.supervisor, drain_seconds=drain_seconds))


def _binds(host: str, port: int, number: int) -> tuple[str, str]:
    shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
    if not port:
        return f"tcp://{shown}:*", ""
    first = port + 2 * number
    if not 0 < first < 65_535:
        raise InvalidConfig(f"--port {port}: worker {number} would need ports {first} and {first + 1}")
    return f"tcp://{shown}:{first}", f"tcp://{shown}:{first + 1}"


def _keys(directory: str) -> ClientKeys:
    load_server_keys(directory)  # the workers will: now is the time to say what is wrong with them
    return load_client_keys(directory)


def _worker_arguments(args: argparse.Namespace) -> list[str]:
    passed = ["--engine", args.engine, "--log-level", args.log_level]
    passed += ["--model", args.model] if args.model else []
    passed += ["--curve-keys", args.curve_keys] if args.curve_keys else []
    passed += ["--insecure"] if args.insecure else []
    passed += [word for value in args.engine_arg for word in ("--engine-arg", value)]
    return [*passed, *args.worker_arguments]


def _parse_worker(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="preble up ... -- (options of preble worker)", allow_abbrev=False)
    worker_command.add_arguments(parser)
    return parser.parse_args(arguments)


def _refuse_ours(engine: str, given: list[str]) -> None:
    """What every worker must have for itself, or the router must know, too, has no place after `--`."""
    theirs, nothing = (_parse_worker(["--engine", engine, *words]) for words in (given, []))
    for name in _OURS:
        if getattr(theirs, name) != getattr(nothing, name):
            raise InvalidConfig(f"--{name.replace('_', '-')} is not for the options after --: preble up sets it")


# --- running it -------------------------------------------------------------------------------------------------------


class UpRun:
    """One run of `preble up`. Belongs to one asyncio loop, on the main thread."""

    def __init__(self, plan: UpPlan, logs: LogBook, prompts: TextIO | None) -> None:
        self._plan = plan
        self._logs = logs
        self._binds = list(plan.binds)
        self._router = Router([], policy=plan.policy, keys=plan.keys)
        self._supervisor = Supervisor(len(plan.names), self._spawn, plan.supervisor, clock=time.monotonic)
        self._service = None if prompts is None else PromptService(self._router, prompts, sys.stdout, plan.concurrency)
        self._gateway = None if plan.serve is None else up_serve.ServedGateway(plan.serve, self._write_gateway)
        self._addresses: dict[int, str] = {}  # of workers, from their first start on
        self._introduced: set[int] = set()  # workers that the router has met
        self._settled = asyncio.Event()  # every worker serves or was given up
        self._draining = self._hurried = False  # asked to end, and a second time
        self._tasks = RunTasks(self._supervisor.drain)

    async def run(self) -> int:
        """Until drained; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._drain, number)
        answers: asyncio.Task[None] | None = None
        try:
            await self._router.start(min_workers=0)
            self._tasks.keep(log_status(self._plan.status_seconds, self._status))
            if self._service is not None:
                answers = self._tasks.keep(self._serve_prompts(self._service))
            await self._supervise()
            logger.info("%s", self._status())
            if not self._hurried:
                await last_answers(answers)
        finally:
            if self._gateway is not None:
                self._gateway.kill()
            self._supervisor.kill()
            await self._router.close()  # what is still live fails now, and its lines say so
            await self._tasks.close(answers)
        answered = self._service is None or self._service.all_answered(answers)
        served = self._gateway is None or self._gateway.clean
        return 0 if self._supervisor.clean and answered and served else 1

    def _drain(self, number: int = signal.SIGTERM) -> None:
        """The gateway first, so that its answers can end; the second time, all at once."""
        self._hurried = self._draining
        self._draining = True
        if self._gateway is not None:
            self._gateway.drain(number)
        if self._hurried and not self._supervisor.draining:
            self._supervisor.drain()  # so that the next word is the second
        if self._gateway is None or self._gateway.done or self._hurried:
            self._drain_workers()

    def _drain_workers(self) -> None:
        logger.info("draining %d workers", len(self._plan.names))
        self._supervisor.drain()
        self._end_prompts()

    def _end_prompts(self) -> None:
        if self._service is not None:
            self._service.stop()
        self._settled.set()

    # --- workers ------------------------------------------------------------------------------------------------------

    def _spawn(self, number: int) -> ChildProcess:
        write = partial(self._logs.write, self._plan.names[number])
        argv = self._plan.command(self._binds[number])
        return ChildProcess(argv, self._plan.places[number], on_output=write, on_log=write)

    def _take_ready(self, number: int, line: str) -> None:
        self._binds[number] = ready_endpoints(line)
        if self._service is None:
            sys.stdout.write(f"{line} name={self._plan.names[number]}\n")
            sys.stdout.flush()
        if number not in self._addresses:
            self._addresses[number] = reachable(self._binds[number][0])
            self._tasks.keep(self._connect(number))

    async def _connect(self, number: int) -> None:
        """Once for each worker: after a restart the router finds it again by itself."""
        try:
            await self._router.add_worker(self._addresses[number])
        except HandshakeRefused as error:
            logger.error("%s and the router do not fit: %s", self._plan.names[number], error)
        self._introduced.add(number)
        self._look_settled()

    async def _supervise(self) -> None:
        while True:
            for happening in self._supervisor.turn():
                await self._take_news(happening)
            self._look_at_gateway()
            if self._supervisor.done and (self._gateway is None or self._gateway.done):
                self._end_prompts()
                return
            await asyncio.sleep(_TURN_SECONDS)

    def _look_at_gateway(self) -> None:
        gateway = self._gateway
        if gateway is None:
            return
        gateway.turn()
        if self._settled.is_set() and not self._draining:
            gateway.start(list(self._addresses.values()))
        if (gateway.has_given_up or self._supervisor.done) and not self._draining:
            self._drain()
        if self._draining and gateway.done and not self._supervisor.draining:
            self._drain_workers()

    def _write_gateway(self, line: str) -> None:
        self._logs.write(up_serve.NAME, line)

    async def _take_news(self, news: Happening) -> None:
        news.log(logger, self._plan.names[news.child])
        if news.kind == "ready":
            self._take_ready(news.child, news.text)
        if news.kind == "gave_up":
            with contextlib.suppress(UnknownWorker):  # the router had refused it
                await self._router.remove_worker(self._addresses.pop(news.child, ""))
            self._look_settled()

    def _look_settled(self) -> None:
        """Prompts wait until every worker may get its share."""
        slots = self._supervisor.slots
        if all(slot.state == "gave_up" or slot.number in self._introduced for slot in slots):
            self._settled.set()

    # --- status and prompts -------------------------------------------------------------------------------------------

    def _status(self) -> str:
        stats = self._router.stats()
        workers = [
            f"{self._plan.names[slot.number]} {self._worker_status(slot, stats)}" for slot in self._supervisor.slots
        ]
        workers += [] if self._gateway is None else [self._gateway.status]
        return f"{'; '.join(workers)}; requests: {request_counts(stats)}"

    def _worker_status(self, slot: Slot, stats: Mapping[str, Any]) -> str:
        """The launcher's word for a worker, the router's where that says more, and the load it last reported."""
        seen = stats["workers"].get(self._addresses.get(slot.number, ""), {})
        words = [slot.state.replace("_", " ")]
        if slot.state == "ready" and seen.get("state") != "ready":
            words[0] += f" (router: {seen.get('state', 'unknown')})"
        if slot.state == "ready" and seen.get("load"):
            words.append("running {running}, waiting {waiting}".format(**seen["load"]))
        return ", ".join([*words, f"restarts {slot.restarts}"])

    async def _serve_prompts(self, service: PromptService) -> None:
        """Serve every line; then drain."""
        await self._settled.wait()
        await service.run()
        if not self._supervisor.draining:
            self._drain()


def reachable(endpoint: str) -> str:
    """Where this machine finds what was bound to a wildcard."""
    for wildcard, loopback in (("tcp://0.0.0.0:", "tcp://127.0.0.1:"), ("tcp://[::]:", "tcp://[::1]:")):
        if endpoint.startswith(wildcard):
            return loopback + endpoint[len(wildcard) :]
    return endpoint
