"""One router and its clients, as a process that can be killed: `chaos.py` and the fault tests start it.

Owns the traffic, the comparison of every answer with what it must be, and the examination at the end: books, event
streams, and what is estimated of each worker's cache against what the worker says when asked. It causes no faults.

Commands come as lines on stdin; each is answered by one line of JSON on stdout:

    hello      {} once the router is connected
    reference  asks every prompt once, while nothing is wrong, and writes the answers to the file of --reference
    load       starts the clients
    progress   counts so far
    stop       lets the clients finish; counts
    check      examines an idle fleet; {"findings": [...]}, empty when all is well
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import random
import secrets
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from preble import SamplingParams
from preble.errors import CapacityExceeded, NoWorkers, PrebleError
from preble.router import Router
from preble.router.fleet import FleetWorker
from preble.transport import wire
from tests.support.transport import (
    HANG_SECONDS,
    Peer,
    assert_bookings_are_even,
    expected_tokens,
    fast,
    until_others_ended,
)

GROUPS = 6
VARIANTS = 8
SHARED_TOKENS = 300
VOCABULARY = 30_000
CHECK_SECONDS = 0.5
PING_SECONDS = 0.5
TURNED_AWAY_SECONDS = 0.05  # a client that asked again at once would let nobody else run
PROBED_PROMPTS = 24
RESUME_SECONDS = 2 * HANG_SECONDS  # a request that finds no worker for so long fails
STOP_SECONDS = RESUME_SECONDS + HANG_SECONDS

Prompt = list[int]


def prompts(seed: int) -> list[Prompt]:
    """Groups that share a long beginning; each prompt is one of a few variants of it."""
    rng = random.Random(seed)
    shared = [[rng.randrange(10, VOCABULARY) for _ in range(SHARED_TOKENS)] for _ in range(GROUPS)]
    return [
        [*beginning, 10 + variant, 20 + group] for group, beginning in enumerate(shared) for variant in range(VARIANTS)
    ]


def wanted_tokens(number: int) -> int:
    """Output tokens to ask for with prompt `number`."""
    return 5 + number * 17 % 55


class Load:
    """See the module."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.prompts = prompts(args.prompt_seed)
        self.right: dict[int, list[int]] = {}
        if args.reference is not None and args.reference.exists():
            self.right = dict(enumerate(json.loads(args.reference.read_text())))
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []
        self.stopping = False
        self.clients: list[asyncio.Task[None]] = []
        config = fast(
            suspect_after_seconds=args.silent_seconds,
            give_up_seconds=args.give_up_seconds,
            forget_after_seconds=args.forget_seconds,
            max_attempts=1000,
            resume_seconds=RESUME_SECONDS,
        )
        self.router = Router(args.endpoints, config=config)

    def expected(self, number: int) -> list[int]:
        """The right answer to prompt `number`."""
        if number not in self.right:
            self.right[number] = expected_tokens(self.prompts[number], wanted_tokens(number))
        return self.right[number]

    # --- commands -----------------------------------------------------------------------------------------------------

    async def obey(self, command: str) -> dict[str, Any]:
        """The answer to a command; raises ValueError for one that does not exist."""
        if command == "reference":
            await self.reference()
        elif command == "load":
            self.clients = [asyncio.ensure_future(self.client(i)) for i in range(self.args.clients)]
            self.clients.append(asyncio.ensure_future(self.watch()))
        elif command == "stop":
            self.stopping = True
            await self.until_clients_ended()
        elif command == "check":
            await self.check()
        elif command not in ("hello", "progress"):
            raise ValueError(f"unknown command {command!r}")
        stats = self.router.stats()
        keep = ("resumed", "late_chunks", "duplicate_tokens", "token_gaps", "completed_by_router", "live_requests")
        return {"counts": self.counts, "findings": self.findings, **{name: stats[name] for name in keep}}

    async def until_clients_ended(self) -> None:
        """Wait for the clients' last requests; one that never ends is a finding."""
        ended, waiting = await asyncio.wait(self.clients, timeout=STOP_SECONDS)
        for client in ended:
            if client.exception() is not None:
                self.findings.append(f"a client ended with {client.exception()!r}")
        for client in waiting:
            where = [f"{frame.f_code.co_name}:{frame.f_lineno}" for frame in client.get_stack()]
            self.findings.append(f"a client did not end within {STOP_SECONDS:g} s, at {where}; {self.router.stats()}")
            client.cancel()

    async def reference(self) -> None:
        """Ask everything once and write it down as right."""
        answers = [await self.tokens_of(prompt, wanted_tokens(i)) for i, prompt in enumerate(self.prompts)]
        self.args.reference.write_text(json.dumps(answers))

    async def tokens_of(self, prompt: Prompt, count: int) -> list[int]:
        """A whole answer."""
        tokens: list[int] = []
        async for chunk in self.router.generate(prompt, SamplingParams(max_new_tokens=count, temperature=0.0)):
            tokens += chunk.token_ids
        return tokens

    # --- clients ------------------------------------------------------------------------------------------------------

    async def client(self, client: int) -> None:
        """One request after the other."""
        rng = random.Random(1000 * self.args.seed + client)
        while not self.stopping:
            number = rng.randrange(len(self.prompts))
            manner = rng.random()
            try:
                await self.request(number, manner)
            except (CapacityExceeded, NoWorkers):  # it never ran: nothing was promised yet
                self.counts["turned_away"] += 1
                await asyncio.sleep(TURNED_AWAY_SECONDS)
            except PrebleError as error:
                self.findings.append(f"request lost: {type(error).__name__}: {error}")
                await asyncio.sleep(TURNED_AWAY_SECONDS)

    async def request(self, number: int, manner: float) -> None:
        """One request: 12 % leave half-way, 8 % read slowly."""
        count = self.args.output_tokens or wanted_tokens(number)
        stream = self.router.generate(self.prompts[number], SamplingParams(max_new_tokens=count, temperature=0.0))
        tokens: list[int] = []
        async for chunk in stream:
            if chunk.index != len(tokens):
                self.findings.append(f"position {chunk.index} delivered where {len(tokens)} was next")
            tokens += chunk.token_ids
            if manner < 0.12:
                await stream.aclose()  # type: ignore[attr-defined]
                self.counts["left"] += 1
                return
            if manner < 0.20:
                await asyncio.sleep(0.05)
        if tokens != self.expected(number):
            self.findings.append(f"prompt {number}: {len(tokens)} of {count} tokens came, or they are wrong")
        self.counts["answered"] += 1

    async def watch(self) -> None:
        """The router's own invariants, all the way."""
        while not self.stopping:
            self.router.check()
            self.router.scheduler.check()
            self.counts["checked"] += 1
            await asyncio.sleep(CHECK_SECONDS)

    # --- the examination ----------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """An idle fleet: everybody ready, books even, workers idle, event streams at their ends, caches as
        estimated."""
        try:
            workers = list(self.router.fleet.workers.values())
            await _until(lambda: all(one.state == "ready" for one in workers), "every worker is ready")
            await until_others_ended(self.router)
            assert_bookings_are_even(self.router)
            for worker in workers:
                await self.check_worker(worker)
        except AssertionError as error:
            self.findings.append(f"at the end: {error}")

    async def check_worker(self, worker: FleetWorker) -> None:
        """Nothing runs there for anybody, and its cache holds what we expect and, once asked, what it was asked."""
        probe = Probe(worker.address)
        try:
            await asyncio.to_thread(probe.wait_until_idle)
            chosen = random.Random(self.args.seed).sample(self.prompts, PROBED_PROMPTS)
            for prompt in chosen:
                await self.caught_up(worker, probe)
                estimated = self.estimated(worker, prompt)
                cached = await asyncio.to_thread(probe.cached_tokens, prompt)
                self.counts["probed"] += 1
                self.counts["estimated_tokens"] += estimated
                if estimated > cached:
                    self.findings.append(f"{worker.worker_id} holds {cached} tokens, {estimated} are estimated cached")
        finally:
            probe.close()

    async def caught_up(self, worker: FleetWorker, probe: Probe) -> None:
        """Wait until all of the worker's events have been applied."""
        end = await asyncio.to_thread(probe.event_end)
        await _until(lambda: worker.link is not None and worker.link.next_event_seq >= end, "all events are applied")

    def estimated(self, worker: FleetWorker, prompt: Prompt) -> int:
        """Tokens of a prompt that the router expects cached there."""
        known = self.router.scheduler.match(prompt).matched_tokens.get(worker.worker_id, 0)
        return min(known, len(prompt) - 1)  # as the engine counts: it computes a last token in any case


class Probe:
    """Asks a worker itself, past the router. Every question is a session of its own, and pings while it waits: between
    and within them the machine may take longer than workers keep a silent session."""

    def __init__(self, endpoint: str) -> None:
        self._peer = Peer(endpoint, pump=self._ping)
        self._peer.session = 0
        self._name = f"probe-{secrets.token_hex(8)}"
        self._pinged_at = 0.0
        self._number = 0

    def _begin(self) -> None:
        self._pinged_at = time.monotonic()
        self._peer.session += 1
        self._peer.seq = 0
        self._peer.send(wire.Hello(self._name))
        self._peer.expect(wire.Welcome)  # after what was still on its way

    def _ping(self) -> None:
        if time.monotonic() > self._pinged_at + PING_SECONDS:
            self._pinged_at = time.monotonic()
            self._peer.send(wire.Ping(0))

    def _pong(self) -> wire.Pong:
        self._begin()
        self._number += 1
        self._peer.send(wire.Ping(self._number))
        while True:
            pong = self._peer.expect(wire.Pong)
            assert isinstance(pong, wire.Pong)
            if pong.nonce == self._number:
                return pong

    def running(self) -> int:
        """Requests of anybody that are there."""
        pong = self._pong()
        return pong.running + pong.waiting

    def wait_until_idle(self) -> None:
        """Until no request of anybody is there."""
        deadline = time.monotonic() + HANG_SECONDS
        while count := self.running():
            assert time.monotonic() < deadline, f"{count} requests are there, whose?"
            time.sleep(0.02)

    def event_end(self) -> int:
        """The number of the worker's next event batch."""
        return self._pong().next_event_seq

    def cached_tokens(self, prompt: Prompt) -> int:
        """Tokens of a prompt that the engine had cached; it has all of them afterwards."""
        self._begin()
        self._number += 1
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
        self._peer.send(wire.GenerationRequest(f"probe{self._number}", np.array(prompt, np.int32), sampling))
        first = self._peer.expect(wire.OutputChunk)
        chunk = first
        while chunk.finish_reason is None:
            chunk = self._peer.expect(wire.OutputChunk)
        return int(first.cached_tokens)

    def close(self) -> None:
        """Leave."""
        self._peer.send(wire.Bye())
        self._peer.socket.close(linger=1000)


async def _until(condition: Any, what: str) -> None:
    for _ in range(int(HANG_SECONDS / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"waited in vain until {what}")


def print_tasks() -> None:
    """Where every task waits, to stderr."""
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)


async def serve(args: argparse.Namespace) -> None:
    """Connect and obey until stdin ends. At SIGUSR1 all threads' and tasks' stacks are written to stderr."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print_tasks)
    faulthandler.register(signal.SIGUSR1, chain=True)
    load = Load(args)
    await load.router.start(min_workers=1)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := (await lines.readline()).decode().strip():
        sys.stdout.write(json.dumps(await load.obey(line)) + "\n")
        sys.stdout.flush()
    await load.router.close()


def load_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoints", nargs="+", help="of workers")
    parser.add_argument("--output-tokens", type=int, default=0, help="to ask for; 0: some 5 to 59, by prompt")
    parser.add_argument("--reference", type=Path, help="file of right answers; without, the simulated engine's")
    parser.add_argument("--clients", type=int, default=6, help="requests at a time (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what the clients do")
    parser.add_argument("--prompt-seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--silent-seconds", type=float, default=0.5, help="silence after which a worker is left")
    parser.add_argument("--give-up-seconds", type=float, default=4.0, help="silence after which a link is closed")
    parser.add_argument("--forget-seconds", type=float, default=30.0, help="loss after which a worker is forgotten")
    return parser


if __name__ == "__main__":
    asyncio.run(serve(load_parser().parse_args()))
