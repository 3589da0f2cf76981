"""What the links of one router cost: frames of events through sockets, event loop and books; idle links; and how many
links a router opens before it fails. Owns that measurement; it is part of `scale.py`.

A real server of a worker runs in another process and sends what it is asked for; all links go to it, on the loopback of
one machine. The router's side is this process, and its CPU time is what is reported.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

from preble import GlobalScheduler
from preble.errors import PrebleError
from preble.router.peer_requests import PeerRequests
from preble.transport import wire
from preble.transport.client import LinkConfig, WorkerLink
from preble.transport.server import Server, ServerConfig
from preble.types import CacheEvent, RequestEnded, RequestPlaced

PROMPT_TOKENS = 1840  # as ToolBench's
LOT = 100  # frames that are asked for at once
IDLE_SECONDS = 3.0
ROUTER, OTHER, WORKER = "r0", "r1", "w0"
PATIENT = LinkConfig(handshake_seconds=20.0, suspect_after_seconds=60.0, give_up_seconds=120.0)
MAX_SOCKETS = 65_535
LINKS_FILES = 16_384  # file descriptors, so that these are not what ends it


def serve(connection: Any) -> None:
    """A worker's server. Each request asks for LOT frames: its namespace says of what, its prompt with which number it
    begins."""
    environment = wire.Welcome(WORKER, "none", "m", "", 1, 198_516, None, 1 << 20, (), "", 0, 1)
    server = Server(ServerConfig(max_sessions=4096, session_timeout_seconds=600.0), environment, epoch=1)
    connection.send(server.endpoint)
    token_ids: Any = np.arange(PROMPT_TOKENS, dtype=np.int32)
    while not connection.poll():
        for session, request in server.poll(0.05):
            if isinstance(request, wire.Ping):
                server.send(session, wire.Pong(request.nonce, server.replay.next_seq))
            elif isinstance(request, wire.GenerationRequest):
                first = int(request.token_ids[0])
                for number in range(first, first + LOT):
                    server.publish((_event(str(request.namespace), number, token_ids),))
    server.close(linger_seconds=0.1)


def _event(what: str, number: int, token_ids: Any) -> CacheEvent:
    """The n-th request is placed, or is over."""
    if what == "ended":
        return RequestEnded(OTHER, f"toolbench-{number:06d}", 43)
    prompt = token_ids.copy()
    prompt[-200:] += number + 1  # what no other request has
    return RequestPlaced(OTHER, f"toolbench-{number:06d}", prompt, None, 43)


class Books:
    """Books what a link reports, as the fleet of a router does."""

    def __init__(self) -> None:
        self.scheduler = GlobalScheduler([WORKER])
        self.batches = self.wanted = 0
        self.come = asyncio.Event()
        self._peers = PeerRequests(ROUTER)

    def on_events(self, batch: Sequence[CacheEvent], *, past: bool) -> None:
        """Of now or of the past: both are booked, as here nothing else is reported."""
        self.scheduler.apply(WORKER, self._peers.take(batch, past=past))
        self.batches += 1
        if self.batches == self.wanted:
            self.come.set()

    def on_message(self, message: Any) -> None:
        """Nobody has requests here."""

    def on_pong(self, pong: wire.Pong) -> None:
        """Loads are not looked at."""

    def on_caught_up(self) -> None:
        """There is no past."""

    def on_resync(self) -> None:
        raise AssertionError("events were lost: the measurement is void")

    def on_suspect(self, reason: str) -> None:
        """A busy machine."""

    def on_recovered(self) -> None:
        """It speaks again."""


class Links:
    """Links of one router to one server."""

    def __init__(self, endpoint: str, max_sockets: int | None) -> None:
        self._endpoint = endpoint
        self._context = zmq.asyncio.Context()
        if max_sockets is not None:
            self._context.set(zmq.MAX_SOCKETS, max_sockets)
        self._runs: list[asyncio.Task[str]] = []
        self.books = Books()
        self.links: list[WorkerLink] = []

    @property
    def open_count(self) -> int:
        """Links that shook hands."""
        return len(self._runs)

    async def open(self) -> WorkerLink:
        """One more."""
        number = len(self.links)
        hello = wire.Hello(f"{ROUTER}-{number}")
        link = WorkerLink(self._endpoint, hello, self.books, PATIENT, session=number + 1, context=self._context)
        self.links.append(link)
        await link.open(resume_events_at=(1, 1 << 40))
        self._runs.append(asyncio.ensure_future(link.run()))
        return link

    async def close(self) -> None:
        """All of them."""
        for run in self._runs:
            run.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)
        for link in self.links:
            link.close()
        self._context.destroy(linger=100)


async def frames(links: Links, count: int) -> dict[str, float]:
    """Microseconds of CPU for a frame of a placed request, and of a request's end, with sockets and without."""
    link, found = await links.open(), {}
    for what in ("placed", "ended"):
        found[f"{what}_without_us"] = without_sockets(what, count)
        started, first = time.process_time(), links.books.batches
        for lot in range(0, count, LOT):
            links.books.wanted = links.books.batches + LOT
            links.books.come.clear()
            link.send(wire.GenerationRequest(f"{what}-{lot}", np.array([lot], np.int32), namespace=what))
            await links.books.come.wait()
        found[f"{what}_us"] = (time.process_time() - started) * 1e6 / (links.books.batches - first)
    return found


def without_sockets(what: str, count: int) -> float:
    """The same frames, decoded and booked by plain calls."""
    books, token_ids = Books(), np.arange(PROMPT_TOKENS, dtype=np.int32)
    sent = [wire.encode(wire.Events(n, (_event(what, n, token_ids),)), epoch=1) for n in range(count)]
    started = time.process_time()
    for frame in sent:
        message: Any = wire.decode(frame, frozenset({wire.Events})).message
        books.on_events(message.events, past=False)
    return (time.process_time() - started) * 1e6 / count


async def idle(links: Links, seconds: float) -> float:
    """Microseconds of CPU a second for a link on which nothing but heartbeats passes."""
    started, cpu = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu) * 1e6 / (time.monotonic() - started) / links.open_count


async def most(links: Links, limit: int) -> dict[str, Any]:
    """Open links until one fails, or there are `limit`; and the file descriptors of each."""
    ended_by = f"nothing: {limit:,} were asked for"
    files = _files()
    while len(links.links) < limit:
        try:
            await links.open()
        except (PrebleError, zmq.ZMQError, OSError) as error:
            ended_by = f"{type(error).__name__}: {error}"
            break
    return {"links": links.open_count, "ended_by": ended_by, "files_per_link": (_files() - files) / links.open_count}


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def measured(frames_count: int, links_max: int) -> dict[str, Any]:
    """All of it. `links_max` links are asked for twice: with ZeroMQ's default of sockets, and with more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(LINKS_FILES, hard) if hard > 0 else LINKS_FILES, hard))

    async def costs(links: Links) -> dict[str, Any]:
        return {"frames": frames_count, **await frames(links, frames_count)}

    async def many(links: Links) -> dict[str, Any]:
        found = await most(links, links_max)
        return {**found, "idle_us_per_second": await idle(links, IDLE_SECONDS)}

    return {
        **_with_links(costs, None),
        "default": _with_links(lambda links: most(links, links_max), None),
        "raised": _with_links(many, MAX_SOCKETS),
    }


def _with_links(work: Callable[[Links], Awaitable[dict[str, Any]]], max_sockets: int | None) -> dict[str, Any]:
    """What `work` finds with the links of a new router to a new server."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=serve, args=(theirs,))
    server.start()

    async def run() -> dict[str, Any]:
        links = Links(ours.recv(), max_sockets)
        try:
            return await work(links)
        finally:
            await links.close()

    try:
        return asyncio.run(run())
    finally:
        ours.send("stop")
        server.join()
