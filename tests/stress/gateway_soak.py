"""Streaming clients by the hundred before a real gateway, which go away whenever they like: does anything stay behind?

    python -m tests.stress.gateway_soak                      1,000 clients for 60 s; `make soak`
    python -m tests.stress.gateway_soak --clients 100 --requests 400 --seconds 300
    python -m tests.stress.gateway_soak --servers            before servers over HTTP instead of `preble worker`s

Owns the clients, what they do (a function of the seed) and the verdict. Each client asks for a chat stream over a new
connection, and reads it to the end, or hangs up after some bytes, after some time, before the answer, or in the middle
of its own request. Every answer that is read to the end must be whole. Afterwards the gateway must hold no lease, no
generation, no choice, no connection and no more tasks than before, the workers no request, and its memory must not have
grown since a quarter of the load was done, beyond `GROWTH_SHARE`: prompts come from a bounded set, so that the index
does not grow for good. Exit code 0 when all this holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.gateway import Client, GatewayProcess, make_tokenizer
from tests.support.paths import ROOT
from tests.support.transport import HANG_SECONDS, WorkerProcess

PROMPTS = 200
ANSWER_TOKENS = 40
TIME_SCALE = 0.2
SERVER_TOKEN_SECONDS = 0.01
GROWTH_SHARE = 0.05
GROWTH_BYTES = 8 << 20  # what allocators keep back, whatever came
DESCRIPTORS_OWN = 64
READ_SECONDS = 60.0  # for a whole answer, before it counts as hung
IDLE = {"preble_leases_active": 0, "preble_choices_live": 0, "preble_generations_live": 0}
WAYS = ("whole", "after bytes", "after time", "before the answer", "in the request")


@dataclass(frozen=True)
class Plan:
    """What one request is: its body, the way it ends, and when, as a share of what would come."""

    body: bytes
    way: str
    share: float


def plan(rng: random.Random) -> Plan:
    """The next request."""
    prompt = rng.randrange(PROMPTS)
    messages = [
        {"role": "system", "content": f"You are number {prompt % 7}. " + "Be brief and exact. " * 8},
        {"role": "user", "content": f"What is {prompt}? " + "Think of it. " * (prompt % 30)},
    ]
    body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "stream": True, "n": 2 if rng.random() < 0.1 else 1}
    way = "whole" if rng.random() < 0.5 else rng.choice(WAYS[1:])
    return Plan(json.dumps(body).encode(), way, rng.random())


async def ask(address: str, request: Plan) -> str:
    """One request over a connection of its own; what became of it: "whole", "gone", or what is wrong."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n"
        data = f"{head}content-length: {len(request.body)}\r\n\r\n".encode() + request.body
        writer.write(data[: int(request.share * len(data))] if request.way == "in the request" else data)
        await writer.drain()
        if request.way in ("in the request", "before the answer"):
            await asyncio.sleep(0.02 * request.share)
            return "gone"
        if request.way == "after time":
            await asyncio.sleep(request.share)
            return "gone"
        if request.way == "after bytes":
            await reader.read(1 + int(4000 * request.share))
            return "gone"
        answer = await asyncio.wait_for(reader.read(-1), READ_SECONDS)
        return "whole" if is_whole(answer) else f"not whole: {answer[:40]!r}"
    finally:
        writer.close()


def is_whole(answer: bytes) -> bool:
    """Whether a stream was served to its end."""
    ended = answer.rstrip().endswith(b"0") and b"data: [DONE]\n\n" in answer
    return answer.startswith(b"HTTP/1.1 200") and ended and b'"error"' not in answer


class Clients:
    """All of them, in one loop. `requests` is how many they send altogether; 0: until the time is over."""

    def __init__(self, address: str, seed: int, requests: int) -> None:
        self._address = address
        self._rng = random.Random(seed)
        self._left = requests or sys.maxsize
        self._running = 0
        self.became: Counter[str] = Counter()
        self.ways: Counter[str] = Counter()

    async def run(self, clients: int, seconds: float) -> None:
        """That many at once, each one request after the other. Raises nothing that a request met."""
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._one(until) for _ in range(clients)))

    async def _one(self, until: float) -> None:
        while time.monotonic() < until and self._left:
            self._left -= 1
            request = plan(self._rng)
            self.ways[request.way] += 1
            try:
                self.became[await ask(self._address, request)] += 1
            except (OSError, asyncio.TimeoutError) as error:
                self.became[f"{request.way}: {type(error).__name__}"] += 1

    def findings(self) -> list[str]:
        """What should not have happened."""
        return [f"{count} x {what}" for what, count in self.became.items() if what not in ("whole", "gone")]


def samples(address: str) -> dict[str, float]:
    """The gateway's metrics, names with labels."""
    client = Client(address)
    text = client.call("GET", "/metrics")[2]
    client.close()
    return {name: float(value) for name, value in re.findall(r"^(\S+) (\S+)$", text, re.MULTILINE)}


def settled(address: str, before: dict[str, float]) -> dict[str, float]:
    """The metrics as soon as nothing goes on any more, or after a while as they are."""
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        now = samples(address)
        if not left_behind(now, before) or time.monotonic() > deadline:
            return now
        time.sleep(0.1)


def left_behind(now: dict[str, float], before: dict[str, float]) -> list[str]:
    """What an idle gateway, and its workers, should not hold."""
    found = [f"{name} is {now[name]:g}" for name in IDLE if now[name] != 0]
    found += [f"{name} is {now[name]:g}" for name in now if name.startswith("preble_worker_requests{") and now[name]]
    for name in ("preble_tasks", "process_open_fds"):
        if now[name] > before[name]:
            found.append(f"{name} went from {before[name]:g} to {now[name]:g}")
    return found


def grown(warm: dict[str, float], now: dict[str, float]) -> list[str]:
    """Memory that did not come back."""
    name = "process_resident_memory_bytes"
    limit = warm[name] * (1 + GROWTH_SHARE) + GROWTH_BYTES
    return [f"{name} went from {warm[name]:.0f} to {now[name]:.0f}"] if now[name] > limit else []


class MockServers:
    """Two servers over HTTP that stream tokens; one process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.gateway.gateway_mock", "http"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None and self._process.stdin is not None
        self.endpoints = self._process.stdout.readline().split()[1:]
        self._process.stdin.write(f"stream {SERVER_TOKEN_SECONDS}\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def stop(self) -> int:
        """End it; 0, as it knows no end of its own."""
        self._process.kill()
        self._process.communicate()
        return 0


def soak(
    clients: int, seconds: float, requests: int, seed: int, directory: Path, *, servers: bool = False
) -> list[str]:
    """Run it; what was found."""
    tokenizer = make_tokenizer(directory / "model")
    workers: list[Any]
    if servers:
        workers = [MockServers()]
        endpoints = workers[0].endpoints
    else:
        workers = [WorkerProcess("--id", name, time_scale=TIME_SCALE) for name in ("a", "b")]
        endpoints = [worker.endpoint for worker in workers]
    gateway = GatewayProcess("--workers", *endpoints, "--tokenizer", str(tokenizer), log=directory / "gateway.log")
    try:
        # Once with as many clients, so that what is made once (threads, buffers, code) is there.
        first = Clients(gateway.address, seed, clients)
        asyncio.run(first.run(clients, seconds))
        before = settled(gateway.address, dict.fromkeys(("preble_tasks", "process_open_fds"), float("inf")))
        quarter = Clients(gateway.address, seed + 1, requests // 4)
        asyncio.run(quarter.run(clients, seconds / 4))
        warm = settled(gateway.address, before)
        rest = Clients(gateway.address, seed + 2, requests - requests // 4 if requests else 0)
        asyncio.run(rest.run(clients, seconds * 3 / 4))
        now = settled(gateway.address, before)
        for name, value in sorted((first.became + quarter.became + rest.became).items()):
            say(f"{value:6d} {name}")
        for name in ("preble_tasks", "process_resident_memory_bytes"):
            say(f"{name}: {before[name]:.0f} before, {warm[name]:.0f} after a quarter, {now[name]:.0f} at the end")
        found = first.findings() + quarter.findings() + rest.findings()
        found += left_behind(now, before) + grown(warm, now)
        log = gateway.log.read_text()
        return found + [text for text in ("Traceback", "defect of the gateway") if text in log]
    finally:
        codes = [process.stop() for process in (gateway, *workers)]
        assert not any(codes), f"exit codes {codes}"


def say(line: str) -> None:
    """A line for who watches."""
    sys.stdout.write(line + "\n")


def allow_descriptors(clients: int) -> None:
    """Raise this process's limit on open files. Raises `SystemExit` where the system does not allow enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = clients + DESCRIPTORS_OWN
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise SystemExit(f"{clients} clients need {wanted} open files, the limit is {hard} (ulimit -Hn)")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=0, help="end after so many (default: when the time is over)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--servers", action="store_true", help="servers over HTTP instead of workers")
    args = parser.parse_args()
    allow_descriptors(args.clients)
    with tempfile.TemporaryDirectory() as directory:
        found = soak(args.clients, args.seconds, args.requests, args.seed, Path(directory), servers=args.servers)
    for line in found:
        say(f"FOUND {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
