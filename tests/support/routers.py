"""A router as a process that tests can ask, look into and kill: the process itself, and its end in the test.

Lines of JSON go both ways: {"n": 1, "do": "ask", ...} is answered by {"n": 1, ...} once it is done, so many requests
may be under way. Owns no story; see router/test_several_routers.

    ask      prompt, tokens, id     the whole answer of one request
    match    prompts                tokens of each that are estimated cached, by worker
    state                           bookings, own and of a peer, and what the links have seen
    check                           asserts every invariant
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

from preble import SamplingParams
from preble.errors import PrebleError
from preble.router import Router
from tests.support.paths import ROOT
from tests.support.transport import fast

LINE_BYTES_MAX = 16 << 20


class RouterGone(Exception):
    """The process ended before it answered."""


class RemoteRouter:
    """The test's end. `start` returns when the router is connected to all `endpoints`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._numbers = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, *endpoints: str, **options: Any) -> RemoteRouter:
        """`options` are fields of the router's configuration, see `support.transport.fast`."""
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.routers", json.dumps([endpoints, options])),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            limit=LINE_BYTES_MAX,
        )
        router = cls(process)
        await router.do("state")
        return router

    async def do(self, what: str, **details: Any) -> dict[str, Any]:
        """Its answer. Raises RouterGone."""
        self._numbers += 1
        answer = self._waiting[self._numbers] = asyncio.get_running_loop().create_future()
        assert self.process.stdin is not None
        if self._reader.done():
            raise RouterGone
        self.process.stdin.write(json.dumps({"n": self._numbers, "do": what, **details}).encode() + b"\n")
        return await answer

    async def ask(self, prompt: list[int], tokens: int, request_id: str | None = None) -> dict[str, Any]:
        """One request: {"tokens", "worker", "cached"}, or {"error"}."""
        return await self.do("ask", prompt=prompt, tokens=tokens, id=request_id)

    async def matches(self, prompts: list[list[int]]) -> list[dict[str, int]]:
        """Tokens of each prompt estimated cached, by worker."""
        found: list[dict[str, int]] = (await self.do("match", prompts=prompts))["matches"]
        return found

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            answer = json.loads(line)
            self._waiting.pop(answer["n"]).set_result(answer)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RouterGone())

    async def kill(self) -> None:
        """SIGKILL; what was under way raises RouterGone."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self._reader


# --- the process ------------------------------------------------------------------------------------------------------


class Program:
    """Obeys the lines."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Until stdin ends."""
        lines = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            task = asyncio.ensure_future(self._obey(json.loads(line)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _obey(self, command: dict[str, Any]) -> None:
        answer = await {"ask": self._ask, "match": self._match, "state": self._state, "check": self._check}[
            command["do"]
        ](command)
        sys.stdout.write(json.dumps({"n": command["n"], **answer}) + "\n")
        sys.stdout.flush()

    async def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        tokens: list[int] = []
        cached, worker = None, ""
        sampling = SamplingParams(max_new_tokens=command["tokens"])
        try:
            async for chunk in self._router.generate(command["prompt"], sampling, request_id=command["id"]):
                tokens += chunk.token_ids
                cached = chunk.cached_tokens if cached is None else cached
                worker = worker or chunk.worker
        except PrebleError as error:
            return {"error": type(error).__name__}
        return {"tokens": tokens, "worker": worker, "cached": cached}

    async def _match(self, command: dict[str, Any]) -> dict[str, Any]:
        scheduler = self._router.scheduler
        return {"matches": [scheduler.match(prompt).matched_tokens for prompt in command["prompts"]]}

    async def _state(self, command: dict[str, Any]) -> dict[str, Any]:
        stats, links = self._router.scheduler.stats(), self._router.stats()["workers"].values()
        names = ("replays", "resyncs", "events_partial", "peer_requests", "peer_requests_past", "events_refused")
        return {
            "mirrored": stats["peer_bookings"],
            "own": stats["live_requests"] - stats["peer_bookings"],
            "by_worker": {name: worker["live_requests"] for name, worker in stats["workers"].items()},
            "drift": {name: worker["drift_requests"] for name, worker in stats["workers"].items()},
            **{name: sum(link[name] for link in links) for name in names},
        }

    async def _check(self, command: dict[str, Any]) -> dict[str, Any]:
        self._router.check()
        self._router.scheduler.check()
        return {}


async def main() -> None:
    """The router that the first argument describes."""
    endpoints, options = json.loads(sys.argv[1])
    async with Router(endpoints, config=fast(**options)) as router:
        await Program(router).serve()


if __name__ == "__main__":
    asyncio.run(main())
