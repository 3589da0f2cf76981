"""The workers of `bench_gateway.py`: they answer after a time that they are informed, without computing anything.

    python -m benchmarks.gateway.gateway_mock http    two HTTP servers on free ports: SGLang's /generate, OpenAI's chat
    python -m benchmarks.gateway.gateway_mock zmq     two `preble worker`s in one process

The first line on stdout is `READY ADDRESS ADDRESS`. Each line on stdin sets the pace of what is submitted from then on:
`whole SECONDS` (all tokens at once after that time) or `stream SECONDS` (one token after another, so far apart). Both
kinds wait with microseconds' precision, so that what is measured on top of it is the gateway's.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import re
import selectors
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from preble.engines.base import EngineInfo, EngineLoad, GenerationRequest, OutputChunk
from preble.transport.server import ServerConfig
from preble.worker import Worker, WorkerConfig

TOKENS = 16
TOKEN_IDS = tuple(range(300, 300 + TOKENS))
CAPACITY_TOKENS = 1 << 20
MODEL = "mock"


class Pace:
    """How answers come now."""

    whole = True
    seconds = 0.01

    def take(self, line: str) -> None:
        """A line of stdin."""
        kind, seconds = line.split()
        self.whole, self.seconds = kind == "whole", float(seconds)


# --- over HTTP --------------------------------------------------------------------------------------------------------

ENVIRONMENT = {
    **{"version": "0.5.23", "served_model_name": MODEL, "model_path": MODEL, "page_size": 1, "context_length": 32768},
    **{"max_total_num_tokens": CAPACITY_TOKENS, "max_running_requests": 4096, "dp_size": 1, "is_generation": True},
    **{"startup_time": {"start": 1.0}, "tp_size": 1, "weight_version": "1", "incremental_streaming_output": True},
}
LOAD = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0, "dp_rank": 0}
GETS: dict[str, Any] = {
    **dict.fromkeys(("/server_info", "/get_server_info", "/model_info", "/get_model_info"), ENVIRONMENT),
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "mock"}]},
    "/v1/loads": {"loads": [{**LOAD, "max_total_num_tokens": CAPACITY_TOKENS}]},
    **dict.fromkeys(("/health", "/health_generate"), {}),
}


def answer(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    """A whole HTTP answer."""
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def chunked(body: bytes) -> bytes:
    """One chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(body), body)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"
ENVELOPE = {"id": "chatcmpl-mock", "created": 1, "model": MODEL}
USAGE = {"prompt_tokens": 100_000, "completion_tokens": TOKENS, "total_tokens": 100_000 + TOKENS}
REPORTED = b'"prompt_tokens": 100000'  # what whole answers say in its place is what the request says that it has
GIVEN = re.compile(rb'"prompt_tokens": ?"(\d{1,6})"')


def sglang_events(whole: bool) -> list[bytes]:
    """What /generate streams: new ids, and how it ended."""
    lots = [TOKEN_IDS] if whole else [(token,) for token in TOKEN_IDS]
    events = []
    for number, ids in enumerate(lots):
        reason = {"type": "length", "length": TOKENS} if number == len(lots) - 1 else None
        meta = {"id": "r", "finish_reason": reason, "prompt_tokens": 600, "cached_tokens": 0}
        events.append(b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n")
    events[-1] += b"data: [DONE]\n\n"
    return events


def chat_events() -> list[bytes]:
    """What a chat streams: an event a token; the first comes with the role, the last with the end."""
    events = []
    for number in range(TOKENS):
        delta = {"content": " word"} if number else {"role": "assistant", "content": " word"}
        reason = "length" if number == TOKENS - 1 else None
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        event = {**ENVELOPE, "object": "chat.completion.chunk", "choices": [choice]}
        events.append(b"data: " + json.dumps(event).encode() + b"\n\n")
    events[-1] += b"data: [DONE]\n\n"
    return events


CHAT_MESSAGE = {"role": "assistant", "content": " word" * TOKENS}
CHAT_CHOICE = {"index": 0, "message": CHAT_MESSAGE, "finish_reason": "length"}
CHAT_ANSWER = answer(
    json.dumps({**ENVELOPE, "object": "chat.completion", "choices": [CHAT_CHOICE], "usage": USAGE}).encode()
)
CHAT_EVENTS = [chunked(event) for event in chat_events()]
GENERATE_EVENTS = {whole: [chunked(event) for event in sglang_events(whole)] for whole in (True, False)}


class Connection(asyncio.Protocol):
    """One client. Reads as much HTTP as the gateways write: a head, a body of a reported length."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._data = b""
        self._transport: Any = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            _, found, rest = head.partition(b"\r\ncontent-length:")
            length = int(rest.partition(b"\r\n")[0]) if found else 0
            if len(self._data) < end + 4 + length:
                if b"100-continue" in head:
                    self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                return
            method, path = self._data[:end].split(b" ", 2)[:2]
            body, self._data = self._data[end + 4 : end + 4 + length], self._data[end + 4 + length :]
            self._take(method.decode(), path.decode().partition("?")[0], body)

    def _take(self, method: str, path: str, body: bytes) -> None:
        pace = self._pace
        if method == "POST" and path == "/generate":
            self._stream(GENERATE_EVENTS[pace.whole], pace.seconds)
        elif method == "POST" and path == "/v1/chat/completions":
            if b'"stream":true' in body.replace(b" ", b""):
                self._stream(CHAT_EVENTS, pace.seconds)
            else:
                given = GIVEN.search(body)
                count = b'"prompt_tokens": %6d' % int(given[1]) if given else REPORTED
                self._later(pace.seconds, CHAT_ANSWER.replace(REPORTED, count))
        elif method == "POST":
            self._transport.write(answer(b"{}"))
        elif path in GETS:
            self._transport.write(answer(json.dumps(GETS[path]).encode()))
        else:
            self._transport.write(answer(b"{}", "404 Not Found"))

    def _later(self, seconds: float, data: bytes) -> None:
        self._loop.call_later(seconds, self._write, data)

    def _stream(self, events: list[bytes], seconds: float) -> None:
        """The head comes with the first event, as engines do it that check a request first."""
        started = self._loop.time()
        for number, event in enumerate(events):
            data = (b"" if number else STREAM_HEAD) + event + (STREAM_END if number == len(events) - 1 else b"")
            self._loop.call_at(started + (number + 1) * seconds, self._write, data)

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


async def serve_http(pace: Pace) -> None:
    """Two servers, until stdin closes."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    servers = [await loop.create_server(lambda: Connection(pace), "127.0.0.1", 0, backlog=1024) for _ in range(2)]
    listen_to_stdin(pace, lambda: loop.call_soon_threadsafe(ended.set))
    ready([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers])
    await ended.wait()


# --- over ZeroMQ ------------------------------------------------------------------------------------------------------


class MockEngine:
    """Implements `Engine`: the same tokens at the same times, for `preble worker`'s transport."""

    info = EngineInfo("mock", MODEL, CAPACITY_TOKENS)

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._due: list[tuple[float, int, str, int, int]] = []  # when, a number, whose, first token, tokens
        self._live: set[str] = set()
        self._count = 0

    def submit(self, request: GenerationRequest) -> None:
        """Plan all its chunks."""
        self._live.add(request.request_id)
        size = TOKENS if self._pace.whole else 1
        now = time.monotonic()
        for number, first in enumerate(range(0, TOKENS, size)):
            self._count += 1
            due = now + (number + 1) * self._pace.seconds
            heapq.heappush(self._due, (due, self._count, request.request_id, first, size))

    def abort(self, request_id: str) -> bool:
        """Forget a request; its chunks are skipped when they are due."""
        known = request_id in self._live
        self._live.discard(request_id)
        return known

    def step(self) -> list[OutputChunk]:
        """What is due; sleeps a little if nothing is, so that what was submitted meanwhile is received soon."""
        if self._due:
            time.sleep(min(max(0.0, self._due[0][0] - time.monotonic()), 0.0005))
        chunks, now = [], time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, _, request_id, first, size = heapq.heappop(self._due)
            if request_id in self._live:
                ended = first + size == TOKENS
                ids = TOKEN_IDS[first : first + size]
                chunks.append(
                    OutputChunk(request_id, first, ids, 0 if first == 0 else None, "length" if ended else None)
                )
                if ended:
                    self._live.discard(request_id)
        return chunks

    def has_work(self) -> bool:
        """True while a request is live."""
        return bool(self._live)

    def take_events(self) -> list[Any]:
        """There is no cache."""
        return []

    def load(self) -> EngineLoad:
        """Requests that are live."""
        return EngineLoad(len(self._live), 0, 0, 0)

    def close(self) -> None:
        """Nothing to free."""


def serve_zmq(pace: Pace) -> None:
    """Two workers, until stdin closes."""
    workers = [
        Worker(MockEngine(pace), WorkerConfig(ServerConfig("tcp://127.0.0.1:*")), epoch=time.time_ns() + number)
        for number in range(2)
    ]

    def end() -> None:
        for worker in workers:
            worker.drain()

    listen_to_stdin(pace, end)
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    ready([worker.server.endpoint for worker in workers])
    for thread in threads:
        thread.join()


# --- both -------------------------------------------------------------------------------------------------------------


def listen_to_stdin(pace: Pace, end: Callable[[], object]) -> None:
    """Take the pace from stdin, in a thread; `end` when it closes."""

    def read() -> None:
        for line in sys.stdin:
            pace.take(line)
            ready([])
        end()

    threading.Thread(target=read, daemon=True).start()


def ready(addresses: list[str]) -> None:
    """Say so."""
    sys.stdout.write(" ".join(["READY", *addresses]) + "\n")
    sys.stdout.flush()


def main(kind: str) -> None:
    """Serve as one kind or the other."""
    if kind == "zmq":
        serve_zmq(Pace())
        return
    # select() waits with microseconds' precision, epoll with milliseconds'.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    loop.run_until_complete(serve_http(Pace()))


if __name__ == "__main__":
    main(sys.argv[1])
