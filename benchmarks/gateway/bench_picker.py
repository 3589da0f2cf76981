"""What the endpoint picker adds to a request, and what it costs: `preble epp` on one core before mock servers, a client
that speaks its protocol as an Envoy does (full duplex, two connections) on another.

    python -m benchmarks.gateway.bench_picker                       1,000 requests/s for 20 s, answers of 16 events
    python -m benchmarks.gateway.bench_picker --rate 500 --whole --json R.json

Requests come at random moments (Poisson), whether or not earlier ones are answered: chats of about 2,000 characters, a
third of which begin alike. A request waits for the picker three times before its client sees a token, and these are
what is added:

  decide   from the end of its body to the name of its server
  head     from the answer's head to its release
  part     from the answer's first part to its release

Each answer is streamed as so many events, 5 ms apart, or whole. CPU is that of the picker's process, all threads,
divided by the requests; the client's own share of its core is printed, too: near 1 its waits are its own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.facts import environment
from benchmarks.common.paths import ROOT

START_SECONDS = 60.0
CONNECTIONS = 2
EVENT_SECONDS = 0.005
ENGINE_SECONDS = 0.02
END_SECONDS = 30.0  # for what still runs
WARM_SHARE = 0.2
WORDS = ("the", "of", "and", "to", "a", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with")
PATH = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, WINDOW = 0, 1, 4, 6, 8
END_OF_STREAM = b"\x10\x01"  # how a message ends that has the last part of a body


# --- what is sent -----------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def bytes_field(number: int, value: bytes) -> bytes:
    """A field with bytes, text or a message in it."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def head(number: int, fields: Sequence[tuple[str, str]], more: bytes = b"") -> bytes:
    """The message of a head: 2 of a request, 3 of an answer."""
    listed = b"".join(
        bytes_field(1, bytes_field(1, name.encode()) + bytes_field(3, value.encode())) for name, value in fields
    )
    return bytes_field(number, bytes_field(1, listed)) + more


def part(number: int, data: bytes, end: bool) -> bytes:
    """The message of a part of a body: 4 of a request, 5 of an answer."""
    return bytes_field(number, bytes_field(1, data) + (b"\x10\x01" if end else b""))


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def message(stream: int, data: bytes, flags: int = 0) -> bytes:
    """A gRPC message in one frame."""
    return frame(DATA, flags, stream, b"\0" + struct.pack(">I", len(data)) + data)


def text(name: bytes, value: bytes) -> bytes:
    """A header field that nobody keeps."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


OPENING = b"\x83\x86" + text(b":path", PATH) + text(b":authority", b"epp") + text(b"content-type", b"application/grpc")
OPENING += text(b"te", b"trailers")
MODES = bytes_field(11, b"\x08\x04\x10\x04")  # full duplex, both ways
REQUEST_HEAD = head(
    2,
    [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "chat.example.com"),
        (":path", "/v1/chat/completions"),
        ("content-type", "application/json"),
        ("user-agent", "bench"),
        ("x-forwarded-proto", "http"),
        ("x-request-id", "3f6f0bb7-1d1c-4f4e-9d8a-0f6a3f6c2b11"),
    ],
    MODES,
)
STREAM_HEAD = head(3, [(":status", "200"), ("content-type", "text/event-stream"), ("server", "uvicorn")])
WHOLE_HEAD = head(3, [(":status", "200"), ("content-type", "application/json"), ("server", "uvicorn")])
USAGE = {
    "prompt_tokens": 500,
    "completion_tokens": 16,
    "total_tokens": 516,
    "prompt_tokens_details": {"cached_tokens": 100},
}


def chats(count: int, rng: random.Random) -> list[bytes]:
    """Bodies of about 2,000 characters, a third of which begin alike."""
    shared = " ".join(rng.choices(WORDS, k=250))
    found = []
    for number in range(count):
        own = " ".join(rng.choices(WORDS, k=500 if number % 3 else 250))
        content = f"{shared} {own}" if number % 3 == 0 else own
        body = {"model": "mock", "messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": 16}
        found.append(json.dumps(body).encode())
    return found


def events(count: int) -> list[bytes]:
    """The parts of a streamed answer."""
    envelope = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "mock"}

    def event(value: Any) -> bytes:
        return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"

    texts = [
        event({**envelope, "choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}]})
    ] * count
    last = event({**envelope, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return [*texts, last + event({**envelope, "choices": [], "usage": USAGE}) + b"data: [DONE]\n\n"]


# --- the client -------------------------------------------------------------------------------------------------------


@dataclass
class Waits:
    """Seconds that requests waited for the picker, by what for; and requests that were not answered as they should."""

    decide: list[float] = field(default_factory=list)
    head: list[float] = field(default_factory=list)
    part: list[float] = field(default_factory=list)
    added: list[float] = field(default_factory=list)
    wrong: int = 0


class Client(asyncio.Protocol):
    """One connection; `streams` are what is called with each answer, by their numbers."""

    def __init__(self) -> None:
        self.streams: dict[int, Any] = {}
        self.write: Any = None
        self._rest = b""
        self._next = 1
        self._used = 0

    def connection_made(self, transport: Any) -> None:
        self.write = transport.write
        window = struct.pack(">HI", 4, 1 << 20)
        self.write(PREFACE + frame(SETTINGS, 0, 0, window) + frame(WINDOW, 0, 0, struct.pack(">I", 1 << 30)))

    def begin(self, on_answer: Any) -> int:
        """Begin a stream; its number."""
        number, self._next = self._next, self._next + 2
        self.streams[number] = on_answer
        self.write(frame(HEADERS, 4, number, OPENING))
        return number

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        at = 0
        while len(data) - at >= 9:
            size = int.from_bytes(data[at : at + 3], "big")
            if len(data) - at - 9 < size:
                break
            kind, flags, number = data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9], "big")
            payload = data[at + 9 : at + 9 + size]
            at += 9 + size
            if kind == DATA:
                if number in self.streams:
                    self.streams[number](payload)
            elif kind == SETTINGS and not flags & 1:
                self.write(frame(SETTINGS, 1, 0, b""))
            elif kind == PING and not flags & 1:
                self.write(frame(PING, 1, 0, payload))
        self._rest = data[at:]


class Exchange:
    """One request from its arrival to its end."""

    def __init__(self, client: Client, body: bytes, answer: list[bytes], is_stream: bool, waits: Waits) -> None:
        self._client, self._answer, self._waits = client, answer, waits
        self._is_stream = is_stream
        self._loop = asyncio.get_running_loop()
        self.done = self._loop.create_future()
        self._clock = time.perf_counter
        self._number = client.begin(self._on_answer)
        self._step = self._part = 0
        self._seconds: list[float] = []
        self._asked = self._clock()
        client.write(message(self._number, REQUEST_HEAD) + message(self._number, part(4, body, True)))

    def _on_answer(self, payload: bytes) -> None:
        self._step += 1
        if self._step <= 3:
            self._seconds.append(self._clock() - self._asked)
        if self._step == 1:
            if b"x-gateway-destination-endpoint" not in payload:
                self._waits.wrong += 1
            self._loop.call_later(ENGINE_SECONDS, self._send_head)
        elif self._step == 2:
            self._send_part()
        elif payload.endswith(END_OF_STREAM):
            self._end()

    def _send_head(self) -> None:
        self._asked = self._clock()
        self._client.write(message(self._number, STREAM_HEAD if self._is_stream else WHOLE_HEAD))

    def _send_part(self) -> None:
        last = self._part == len(self._answer) - 1
        if self._part == 0:
            self._asked = self._clock()
        self._client.write(message(self._number, part(5, self._answer[self._part], last), 1 if last else 0))
        self._part += 1
        if not last:
            self._loop.call_later(EVENT_SECONDS, self._send_part)

    def _end(self) -> None:
        del self._client.streams[self._number]
        waits = self._waits
        for name, seconds in zip(("decide", "head", "part"), self._seconds, strict=True):
            getattr(waits, name).append(seconds)
        waits.added.append(sum(self._seconds))
        self.done.set_result(None)


async def load(port: int, rate: float, seconds: float, count: int, pid: int) -> tuple[Waits, float, int]:
    """Offer load; what was measured after the warm-up, the picker's CPU seconds and requests meanwhile."""
    loop, rng = asyncio.get_running_loop(), random.Random(7)
    clients = [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in range(CONNECTIONS)]
    bodies = chats(400, rng)
    answer = events(count) if count else [json.dumps({"id": "1", "choices": [], "usage": USAGE}).encode()]
    waits, measured = Waits(), Waits()
    running: list[Any] = []
    began = time.perf_counter()
    at, used, requests = 0.0, cpu_seconds(pid), 0
    while at < seconds * (1 + WARM_SHARE):
        at += rng.expovariate(rate)
        left = began + at - time.perf_counter()
        if left > 0:
            await asyncio.sleep(left)
        if at >= seconds * WARM_SHARE and waits is not measured:
            waits, used, requests = measured, cpu_seconds(pid), 0
        requests += 1
        running.append(Exchange(rng.choice(clients), rng.choice(bodies), answer, bool(count), waits).done)
    used = cpu_seconds(pid) - used
    _, missing = await asyncio.wait(running, timeout=END_SECONDS)
    measured.wrong += len(missing)
    return measured, used, requests


# --- processes --------------------------------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    """What a process has computed, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def started(command: list[str], core: int, wanted: Sequence[str]) -> tuple[subprocess.Popen[str], dict[str, list[str]]]:
    """A process on one core, and the words of the lines on its stdout that begin with each of `wanted`."""
    process = subprocess.Popen(
        ["taskset", "-c", str(core), sys.executable, "-m", *command],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    found: dict[str, list[str]] = {}
    deadline = time.monotonic() + START_SECONDS
    assert process.stdout is not None
    while len(found) < len(wanted) and time.monotonic() < deadline:
        line = process.stdout.readline().split()
        if not line:
            break
        if line[0] in wanted:
            found[line[0]] = line[1:]
    if len(found) < len(wanted):
        process.kill()
        raise SystemExit(f"{command[0]} did not start")
    return process, found


def run(rate: float, seconds: float, count: int) -> dict[str, Any]:
    """One measurement."""
    cores = sorted(os.sched_getaffinity(0))
    own, other = cores[0], cores[-1]
    os.sched_setaffinity(0, {other})
    mock, said = started(["benchmarks.gateway.gateway_mock", "http"], other, ["READY"])
    workers = [one if one.startswith("http") else f"http://{one}" for one in said["READY"]]
    picker = None
    try:
        command = ["preble.cli", "epp", "--workers", *workers, "--port", "0", "--picker-port", "0"]
        picker, said = started([*command, "--log-level", "warning"], own, ["PICKER", "READY"])
        port = int(said["PICKER"][0].rpartition(":")[2])
        gc.freeze()
        ours = time.process_time()
        waits, used, requests = asyncio.run(load(port, rate, seconds, count, picker.pid))
        ours = (time.process_time() - ours) / (seconds * (1 + WARM_SHARE))
    finally:
        for process in (picker, mock):
            if process is not None:
                process.kill()
                process.wait()
    found: dict[str, Any] = {"rate": rate, "events": count, "requests": requests, "wrong": waits.wrong}
    for name in ("decide", "head", "part", "added"):
        values = np.array(getattr(waits, name)) * 1e3
        found[name] = {f"p{q}_ms": round(float(np.percentile(values, q)), 3) for q in (50, 90, 99)}
    return {**found, "cpu_us_per_request": round(used / requests * 1e6, 1), "client_core_share": round(ours, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured, after a fifth of that to warm up")
    parser.add_argument("--events", type=int, default=16, help="events of each answer")
    parser.add_argument("--whole", action="store_true", help="answers that are no streams")
    parser.add_argument("--json", type=Path, help="where to keep the result")
    args = parser.parse_args()
    result = run(args.rate, args.seconds, 0 if args.whole else args.events)
    print(f"{result['requests']} requests at {args.rate:g}/s, {result['wrong']} wrong")
    for name in ("decide", "head", "part", "added"):
        print(
            f"  {name:7}"
            + "  ".join(f"{key.removesuffix('_ms')} {value:.3f} ms" for key, value in result[name].items())
        )
    print(
        f"  CPU {result['cpu_us_per_request']} µs a request; the client's core is used to {result['client_core_share']}"
    )
    if args.json is not None:
        args.json.write_text(json.dumps({**environment(seed=7), "picker": result}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
