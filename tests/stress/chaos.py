"""Faults by a seeded schedule on workers, routers and the network between them, under load throughout.

    python -m tests.stress.chaos --seconds 600 --seed 3
    python -m tests.stress.chaos --seconds 600 --worker-command "preble worker --engine sglang --model DIR"

Owns the fleet, the schedule and the verdict; traffic and the examination at the end are `load.py`'s. The schedule is a
function of seed, seconds, workers and routers alone (`--plan` prints it). What the machine makes of it differs from run
to run; the promises do not, and no verdict depends on how long something took, except that waiting ends after half a
minute. A killed router's requests are gone with it, and the workers must have ended them. Exit code 0 when every answer
was whole, all bookings are even, nothing is left running anywhere and no worker is estimated to cache what it does not.

With --worker-command the command gets --id, --bind and --events-bind added; it must be restartable on its ports. Its
answers
are compared with those that the fleet gave before the first fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.faults import Network, RouterProcess
from tests.support.transport import WorkerProcess

SIMULATED = ("--kv-capacity-tokens", "3000", "--max-requests", "8", "--session-timeout", "3")
TIME_SCALE = 0.1
FIRST_FAULT_SECONDS = 1.0
CALM_SECONDS = 2.0  # before the end, so that every fault ends under load
EVENT_FAULTS = {"loss": 0.1, "double": 0.1, "swap": 0.1}
FRAMES_PER_FAULT = 3  # a lost or swapped frame costs a session, so a spell has only so many

WORKER_FAULTS = ("kill_worker", "hang_worker", "stall_network", "lose_network", "bad_events", "doubled_frames")
WORKER_FAULTS += ("swapped_frames", "lost_frames")
ROUTER_FAULTS = ("kill_router", "hang_router", "crowd")


@dataclass(frozen=True)
class Fault:
    """What goes wrong, from when to when (seconds since the load began), and with which worker or router."""

    start: float
    kind: str
    target: int
    seconds: float


def schedule(seed: int, seconds: float, workers: int, routers: int) -> list[Fault]:
    """The faults of a run, by start. One worker at least is left alone at any time, and every kind comes in turn."""
    rng = random.Random(seed)
    plan: list[Fault] = []
    kinds: list[str] = []
    free_at = {("worker", i): 0.0 for i in range(workers)} | {("router", i): 0.0 for i in range(routers)}
    now = FIRST_FAULT_SECONDS
    while now < seconds - CALM_SECONDS:
        if not kinds:
            kinds = rng.sample(WORKER_FAULTS + ROUTER_FAULTS, len(WORKER_FAULTS + ROUTER_FAULTS))
        kind = kinds.pop()
        side = "worker" if kind in WORKER_FAULTS else "router"
        free = [i for (what, i), at in free_at.items() if what == side and at <= now]
        length = round(rng.choice((0.2, 0.6, 1.5, 4.5)) * (0.8 + 0.4 * rng.random()), 3)
        if len(free) > 1 or kind == "crowd":
            target = rng.choice(free) if free else 0
            end = min(now + length, seconds - CALM_SECONDS / 2)
            plan.append(Fault(round(now, 3), kind, target, round(end - now, 3)))
            free_at[side, target] = end + 0.5
            now += 0.3 + 0.8 * rng.random()
        else:
            kinds.append(kind)
            now += 0.1
    return plan


class Fleet:
    """Workers, each behind a network of its own, and routers with clients. `begin` and `end` of a fault act at once."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.args = args
        self.directory = directory
        self.routers_started = 0
        self.workers: list[WorkerProcess] = []
        self.networks: list[Network] = []
        self.routers: list[RouterProcess] = []
        self.crowds: list[RouterProcess] = []
        self.leaving: list[RouterProcess] = []  # crowds whose clients finish
        self.done: Counter[str] = Counter()
        self.findings: list[str] = []
        self.totals: Counter[str] = Counter()

    def start(self) -> None:
        """Everything up, clients at work."""
        for i in range(self.args.workers):
            self.workers.append(self._worker(i, "tcp://127.0.0.1:*", ""))
            worker = self.workers[i]
            self.networks.append(Network(worker.endpoint, worker.facts["events"], seed=self.args.seed * 100 + i))
        if self.args.worker_command:
            first = RouterProcess(*self._router_options(1))
            first.ask("reference")
            first.kill()
        for _ in range(self.args.routers):
            self.routers.append(self._router(self.args.clients))
        for router in self.routers:
            router.last_answer()

    def _worker(self, number: int, endpoint: str, events: str) -> WorkerProcess:
        arguments = ["--id", f"w{number}", *(("--events-bind", events) if events else ())]
        if self.args.worker_command:
            command = shlex.split(self.args.worker_command)
            return WorkerProcess(*arguments, endpoint=endpoint, command=command, start_seconds=self.args.start_seconds)
        return WorkerProcess(*SIMULATED, *arguments, endpoint=endpoint, time_scale=TIME_SCALE)

    def _router(self, clients: int) -> RouterProcess:
        router = RouterProcess(*self._router_options(clients), wait=False)
        router.post("load")  # once it has connected, which takes as long as a worker that hangs is waited for
        return router

    def _router_options(self, clients: int) -> list[str]:
        self.routers_started += 1
        options = [network.endpoint for network in self.networks]
        options += ["--clients", str(clients), "--seed", str(1000 * self.args.seed + self.routers_started)]
        options += ["--prompt-seed", str(self.args.seed)]
        if self.args.worker_command:
            options += ["--reference", str(self.directory / "answers.json")]
        return options

    # --- faults -------------------------------------------------------------------------------------------------------

    def begin(self, fault: Fault) -> None:
        """Make it go wrong."""
        self.done[fault.kind] += 1
        if fault.kind in ROUTER_FAULTS:
            self._begin_router(fault.kind, fault.target)
        elif fault.kind == "kill_worker":
            self.workers[fault.target].kill()
        elif fault.kind == "hang_worker":
            self.workers[fault.target].signal(signal.SIGSTOP)
        else:
            self._begin_network(fault.kind, self.networks[fault.target])

    def _begin_router(self, kind: str, target: int) -> None:
        if kind == "kill_router":
            if self.routers[target].answered:  # else it has not connected yet, and dies of it
                self._note(self.routers[target].ask("progress"))
            self.routers[target].kill()
        elif kind == "hang_router":
            self.routers[target].process.send_signal(signal.SIGSTOP)
        else:
            self.crowds.append(self._router(8 * self.args.clients))

    def _begin_network(self, kind: str, network: Network) -> None:
        if kind == "stall_network":
            network.stalled = True
        elif kind == "lose_network":
            for lane in network.lanes():
                lane.faulty(loss=1.0, budget=1 << 30)
        elif kind == "bad_events":
            network.events.faulty(**EVENT_FAULTS, budget=1 << 30)
        else:
            budget = 1 << 30 if kind == "doubled_frames" else FRAMES_PER_FAULT
            rate = {"doubled_frames": {"double": 0.1}, "swapped_frames": {"swap": 0.05}, "lost_frames": {"loss": 0.05}}
            for lane in (network.up, network.down):
                lane.faulty(**rate[kind], budget=budget)

    def end(self, fault: Fault) -> None:
        """Let it go right again."""
        if fault.kind == "kill_worker":
            old = self.workers[fault.target]
            self.workers[fault.target] = self._worker(fault.target, old.endpoint, old.facts["events"])
            old.stop()
        elif fault.kind == "hang_worker":
            self.workers[fault.target].signal(signal.SIGCONT)
        elif fault.kind == "kill_router":
            self.routers[fault.target] = self._router(self.args.clients)
        elif fault.kind == "hang_router":
            self.routers[fault.target].process.send_signal(signal.SIGCONT)
        elif fault.kind == "crowd":
            self.crowds[-1].post("stop")
            self.leaving.append(self.crowds.pop())
        else:
            self.networks[fault.target].heal()

    # --- the verdict --------------------------------------------------------------------------------------------------

    def let_leave(self, *, wait: bool = False) -> None:
        """Note and end the crowds that have finished; with `wait`, all of them, once they have."""
        for crowd in [crowd for crowd in self.leaving if wait or crowd.answered]:
            self._note(crowd.last_answer())
            crowd.kill()
            self.leaving.remove(crowd)

    def examine(self) -> None:
        """Stop the load, then let every router look at everything."""
        self.let_leave(wait=True)
        for router in self.routers:
            router.post("stop")
        for router in self.routers:
            router.last_answer()
        for router in self.routers:
            self._note(router.ask("check"))

    def _note(self, answer: dict[str, Any]) -> None:
        self.findings += answer["findings"]
        self.totals.update(answer["counts"])
        self.totals.update(
            {name: answer[name] for name in ("resumed", "late_chunks", "duplicate_tokens", "token_gaps")}
        )

    def stop(self) -> None:
        """End all processes."""
        for router in (*self.routers, *self.crowds, *self.leaving):
            router.kill()
        for network in self.networks:
            network.close()
        for worker in self.workers:
            with contextlib.suppress(Exception):
                worker.stop()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run; its report, with the findings."""
    plan = schedule(args.seed, args.seconds, args.workers, args.routers)
    steps = [(fault.start, 0, i, fault) for i, fault in enumerate(plan)]
    steps += [(fault.start + fault.seconds, 1, i, fault) for i, fault in enumerate(plan)]
    with tempfile.TemporaryDirectory() as directory:
        fleet = Fleet(args, Path(directory))
        try:
            fleet.start()
            began = time.monotonic()
            for at, ending, _, fault in sorted(steps, key=lambda step: step[:3]):
                time.sleep(max(0.0, began + at - time.monotonic()))
                if args.verbose:
                    sys.stderr.write(f"{at:8.3f} {'end' if ending else 'begin'} {fault.kind} {fault.target}\n")
                (fleet.end if ending else fleet.begin)(fault)
                fleet.let_leave()
            time.sleep(max(0.0, began + args.seconds - time.monotonic()))
            fleet.examine()
        finally:
            fleet.stop()
    frames = sum((lane.counts for network in fleet.networks for lane in network.lanes()), Counter())
    return {
        "seed": args.seed,
        "seconds": args.seconds,
        "faults": dict(fleet.done),
        "frames": dict(frames),
        "totals": dict(fleet.totals),
        "findings": fleet.findings,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the run (%(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="of schedule, prompts and clients (%(default)s)")
    parser.add_argument("--workers", type=int, default=3, help="at least 2 (%(default)s)")
    parser.add_argument("--routers", type=int, default=2, help="at least 2 (%(default)s)")
    parser.add_argument("--clients", type=int, default=6, help="requests at a time per router (%(default)s)")
    parser.add_argument("--worker-command", default="", help="instead of simulated workers")
    parser.add_argument(
        "--start-seconds", type=float, default=300.0, help="for a worker of --worker-command to be ready"
    )
    parser.add_argument("--plan", action="store_true", help="print the schedule and do nothing")
    parser.add_argument("--verbose", action="store_true", help="say what happens when")
    args = parser.parse_args()
    if args.plan:
        for fault in schedule(args.seed, args.seconds, args.workers, args.routers):
            sys.stdout.write(json.dumps(asdict(fault)) + "\n")
        return 0
    report = run(args)
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 1 if report["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
