"""A faked engine server in a process of its own: `tests.support.attach.FakeServer` that counts what it serves, as the
/metrics of SGLang or vLLM do. Run as a program it prints its URL and obeys lines on stdin, each answered with "ok".

    hang, wake       answer nobody, and answer again
    restart          another life: empty cache, counters from 0, its events numbered from 0, the same addresses
    lose             publish no batch from now on, nor keep it for a replay
    lie              report numbers that cannot be
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from tests.support.attach import FakePublisher, FakeServer
from tests.support.paths import ROOT

PREFILL_SECONDS = 0.001  # a token, as its metrics say
TOKEN_SECONDS = 1.0  # long: blocks that come apart are one prompt, however busy the machine is
NAMES = {
    "sglang": ("prompt_tokens_histogram", "uncached_prompt_tokens_histogram", "generation_tokens_histogram",
               "per_stage_req_latency_seconds", "queue_time_seconds"),
    "vllm": ("request_prompt_tokens", "request_prefill_kv_computed_tokens", "request_generation_tokens",
             "request_prefill_time_seconds", "request_queue_time_seconds"),
}  # fmt: skip


class MeteredServer(FakeServer):
    """Counts prompt, computed and output tokens; a prefill takes `PREFILL_SECONDS` a computed token, by its metrics."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__(kind, **options)
        self.count = self.prompt = self.computed = self.output = 0
        self.lies = self.loses = False

    async def _stream(
        self, request: web.Request, body: Any, prompt: list[int], count: int, rank: int, line: Any
    ) -> Any:
        # At once, not at the end: a client that has its answer closes the connection, which ends this.
        self.count += 1
        self.prompt += len(prompt)
        self.computed += len(prompt) - self.hit(prompt, rank)
        self.output += count
        return await super()._stream(request, body, prompt, count, rank, line)

    async def _store(self, prompt: Sequence[int], rank: int) -> None:
        if not self.loses:
            await super()._store(prompt, rank)

    def text(self) -> str:
        """Its own metrics."""
        names = NAMES[self.kind]
        prefill = PREFILL_SECONDS * self.computed
        sums = {
            **dict(zip(names, (self.prompt, self.computed, self.output, prefill, 0.0), strict=True)),
            "time_to_first_token_seconds": -1.0 if self.lies else prefill,
            "e2e_request_latency_seconds": prefill + TOKEN_SECONDS * self.output,
            "inter_token_latency_seconds": TOKEN_SECONDS * self.output,
        }
        lines = []
        for name, value in sums.items():
            labels = '{stage="prefill_forward"}' if name == "per_stage_req_latency_seconds" else ""
            count = self.output if name == "inter_token_latency_seconds" else self.count
            lines += [f"{self.kind}:{name}_sum{labels} {value}", f"{self.kind}:{name}_count{labels} {count}.0"]
        lines += [f'{self.kind}:time_to_first_token_seconds_bucket{{le="{le}"}} {self.count}' for le in ("1.0", "+Inf")]
        return "\n".join(lines) + "\n"

    async def _sglang_metrics(self, _: web.Request) -> Any:
        return web.Response(text=self.text())

    async def _vllm_metrics(self, request: web.Request) -> Any:
        info = await super()._vllm_metrics(request)
        return web.Response(text=info.text + self.text())


async def serve(kind: str, events: bool) -> None:
    """Until stdin ends."""
    server = await MeteredServer(kind, events=events).start()
    loop = asyncio.get_running_loop()
    sys.stdout.write(f"{server.url}\n")
    sys.stdout.flush()
    while command := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        if command == "hang":
            server.awake.clear()
        elif command == "wake":
            server.awake.set()
        elif command == "lie":
            server.lies = True
        elif command == "lose":
            server.loses = True
        elif command == "restart":
            port, ports, life = server.port, [one.ports for one in server.publishers], server.life + 1
            await server.kill()
            publishers = [FakePublisher(ports=(first, second)) for first, second in ports]
            server = await MeteredServer(kind, events=events, port=port, publishers=publishers, life=life).start()
        sys.stdout.write("ok\n")
        sys.stdout.flush()
    await server.kill()


class ServerProcess:
    """One such process; a context manager."""

    def __init__(self, kind: str, *, events: bool = True) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, kind, str(int(events))], cwd=ROOT, stdin=pipe, stdout=pipe, text=True
        )
        self.url = self._line()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def obey(self, command: str) -> None:
        """Send a line and wait until it is done."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        assert self._line() == "ok"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2] == "1"))
