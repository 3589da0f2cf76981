"""`preble up --on ray`: workers on a Ray cluster and a router here, in one command. Owns the command's run and its
options; workers are `ray_workers.py`'s, and what all `preble up` share (prompts, worker options) is handed in by
`up.py`.

Standard output has a line `READY <address> name=...` each time that a worker serves at another address, or with
`--prompts` the answers alone. SIGTERM or SIGINT drains, the second one ends at once. Exit codes are those of `preble
up`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from ..errors import InvalidConfig, MissingExtra
from ..integrations.autoscale import AutoscaleConfig
from ..integrations.ray_actor import NODE
from ..integrations.ray_workers import Cluster, Placed, RayFleet, RayPlan
from ..policies.base import resolve
from ..router.router import Router
from ..transport.security import ClientKeys, load_client_keys
from ..transport.tasks import running
from .prompt_lines import PromptService, RunTasks, log_status, request_counts

logger = logging.getLogger("preble.up")

_NOT_HERE = {"devices": None, "port": 0, "log_dir": None}  # options that say something of this machine
ONLY_HERE = {"ray_address": "auto", "gpus_per_worker": 0.0, "cpus_per_worker": 1.0, "max_workers": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with --on ray")
    group.add_argument("--ray-address", default="auto", metavar="ADDRESS", help="of the cluster; local: start one here")
    group.add_argument("--gpus-per-worker", type=float, default=0.0, metavar="N", help="all on one node (%(default)g)")
    group.add_argument("--cpus-per-worker", type=float, default=1.0, metavar="N", help="on that node (%(default)g)")
    group.add_argument(
        "--max-workers", type=int, metavar="N", help="follow the scheduler's advice between --workers and N"
    )


@dataclass(frozen=True, slots=True)
class RayUpPlan:
    """What to run, checked."""

    plan: RayPlan
    workers: int
    autoscale: AutoscaleConfig | None
    policy: str
    keys: ClientKeys | None
    prompts: TextIO | None
    concurrency: int
    status_seconds: float


def make_launch(
    args: argparse.Namespace, arguments: Sequence[str], drain_seconds: float, prompts: TextIO | None
) -> RayUpPlan:
    """Check the options of `preble up`; `arguments` are every worker's. Raises `InvalidConfig` or `InsecureBind`."""
    for name, usual in _NOT_HERE.items():
        if getattr(args, name) != usual:
            raise InvalidConfig(f"--{name.replace('_', '-')} is not for --on ray: Ray chooses the place")
    if args.workers < 1:
        raise InvalidConfig(f"--workers must be positive, got {args.workers}")
    if args.concurrency < 1:
        raise InvalidConfig(f"--concurrency must be positive, got {args.concurrency}")
    plan = RayPlan(
        tuple(arguments),
        gpus=args.gpus_per_worker,
        cpus=args.cpus_per_worker,
        host=args.host or NODE,
        curve_keys=args.curve_keys or "",
        insecure=args.insecure,
        max_restarts=args.max_restarts,
        start_seconds=args.start_seconds,
        drain_seconds=drain_seconds,
    )
    resolve(args.policy)  # before any actor starts
    bounds = {"min_workers": args.workers, "max_workers": args.max_workers}
    return RayUpPlan(
        plan=plan,
        workers=args.workers,
        autoscale=AutoscaleConfig(**bounds) if args.max_workers is not None else None,
        policy=args.policy,
        keys=load_client_keys(args.curve_keys) if args.curve_keys else None,
        prompts=prompts,
        concurrency=args.concurrency,
        status_seconds=args.status_seconds,
    )


def run(launch: RayUpPlan, ray_address: str) -> int:
    """Connect to the cluster and serve until SIGTERM or the last prompt; the exit code."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("--on ray needs ray: pip install 'preble[ray]'") from error
    try:
        ray.init(address=ray_address, logging_level=logging.WARNING, log_to_driver=True)
    except (ConnectionError, RuntimeError) as error:
        raise InvalidConfig(f"--ray-address {ray_address}: {error}") from error
    try:
        return asyncio.run(RayUpRun(launch).run())
    finally:
        ray.shutdown()


class RayUpRun:
    """One run. Belongs to one asyncio loop, on the main thread."""

    def __init__(self, launch: RayUpPlan, cluster: Cluster | None = None, output: TextIO = sys.stdout) -> None:
        self._launch = launch
        self._output = output
        self._router = Router([], policy=launch.policy, keys=launch.keys)
        self._fleet = RayFleet(self._router, launch.plan, cluster=cluster, on_change=self._changed)
        self._service = None
        if launch.prompts is not None:
            self._service = PromptService(self._router, launch.prompts, output, launch.concurrency)
        self._ending = asyncio.Event()
        self._hurried = asyncio.Event()
        self._tasks = RunTasks(self.drain)
        self._gave_up = False

    async def run(self) -> int:
        """Until drained; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.drain)
        answers: asyncio.Task[None] | None = None
        try:
            await self._router.start(min_workers=0)
            await self._fleet.scale(self._launch.workers)
            self._tasks.keep(log_status(self._launch.status_seconds, self._status))
            if self._launch.autoscale is not None:
                self._tasks.keep(self._fleet.autoscale(self._launch.autoscale))
            if self._service is not None:
                answers = self._tasks.keep(self._answer(self._service))
            await self._ending.wait()
            await self._drained(answers)
        finally:
            await self._fleet.close()
            await self._router.close()
            await self._tasks.close(answers)
        logger.info("%s", self._status())
        answered = self._service is None or self._service.all_answered(answers)
        return 0 if answered and not self._gave_up else 1

    def drain(self) -> None:
        """Read no more prompts and end when the workers have drained; the second time: at once."""
        if self._ending.is_set():
            self._hurried.set()
        logger.info("draining %d workers", self._fleet.size)
        self._ending.set()
        if self._service is not None:
            self._service.stop()

    async def _drained(self, answers: asyncio.Task[None] | None) -> None:
        """Until live requests have ended, or somebody is in a hurry."""
        self._tasks.cancel(answers)
        async with running(self._tasks.keep(self._fleet.scale(0)), self._hurried.wait()) as either:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    async def _answer(self, service: PromptService) -> None:
        await self._fleet.wait()  # each worker gets its share from the start
        await service.run()
        if not self._ending.is_set():
            self.drain()

    def _changed(self, worker: Placed) -> None:
        """A worker has another state or address."""
        logger.info("%s %s %s", worker.name, worker.state, worker.why or worker.address)
        if worker.state == "ready" and self._service is None:
            self._output.write(f"READY {worker.address} name={worker.name}\n")
            self._output.flush()
        if worker.state == "failed":
            self._gave_up = True
            if not self._ending.is_set() and not self._fleet.size:
                logger.error("every worker was given up")
                self.drain()

    def _status(self) -> str:
        stats = self._router.stats()
        workers = [f"{name} {one['state']}, restarts {one['restarts']}" for name, one in self._fleet.stats().items()]
        return "; ".join([*workers, f"requests: {request_counts(stats)}"])
