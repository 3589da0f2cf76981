"""Requests of `preble up` as lines: read from a file or a pipe, answered on another. Owns their format and bounds, and
the tasks of a run (`RunTasks`), which both kinds of `preble up` have.

Reading and writing happen in two threads of their own: whoever writes prompts or reads answers slowly delays only this,
never the router. Prompts are read when there is room for one more request; an answer waits while `WAITING_LINES_MAX`
are not written yet. When the reader of the answers is gone, no more prompts are read; lines that could not be written
count as failed. Prompts are never quoted in errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TextIO

from ..errors import InvalidInput, PrebleError
from ..router.router import Router
from ..transport.tasks import end_all, first_of
from ..types import Grammar, SamplingParams

logger = logging.getLogger("preble.up")

LINE_CHARS_MAX = 32 << 20
WAITING_LINES_MAX = 1024
ANSWER_FIELDS = ("index", "token_ids", "worker", "cached_tokens", "finish_reason")  # of a chunk
_FULL_POLL_SECONDS = 0.01
_LAST_LINES_SECONDS = 3.0
_LAST_ANSWERS_SECONDS = 5.0  # for answers that are complete, but not written, when the last worker ends


class RunTasks:
    """What one run of `preble up` does at the same time. `on_failure` is called when a task fails. One loop's."""

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start something and remember it until it ends."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def cancel(self, *others_than: asyncio.Task[Any] | None) -> None:
        """Cancel all, or all but some."""
        for task in self._tasks.difference(others_than):
            task.cancel()

    async def close(self, answers: asyncio.Task[None] | None) -> None:
        """Give the last answers a moment, then end everything."""
        await last_answers(answers)
        await end_all(*self._tasks)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of the launcher failed", exc_info=task.exception())
            self._on_failure()


async def last_answers(answers: asyncio.Task[None] | None) -> None:
    """Wait for answers that are complete, but not written."""
    if answers is not None:
        await asyncio.wait([answers], timeout=_LAST_ANSWERS_SECONDS)


async def log_status(seconds: float, status: Callable[[], str]) -> None:
    """A line now and then, for good; none for 0 seconds."""
    while seconds:
        await asyncio.sleep(seconds)
        logger.info("%s", status())


def request_counts(stats: Mapping[str, Any]) -> str:
    """What a router says of its requests, as a status line ends."""
    return ", ".join(f"{name} {stats[name]}" for name in ("live_requests", "finished", "failed", "resumed"))


class PromptService:
    """Answers each line of `prompts` on `answers`, at most `concurrency` at a time. Belongs to one asyncio loop."""

    def __init__(self, router: Router, prompts: TextIO, answers: TextIO, concurrency: int) -> None:
        self.failed = 0
        self._router = router
        self._prompts = prompts
        self._concurrency = concurrency
        self._writer = _LineWriter(answers)
        self._stopping = asyncio.Event()

    def all_answered(self, answers: asyncio.Task[None] | None) -> bool:
        """Whether every line got its answer, given the task of `run`; says what is missing."""
        if answers is None or not answers.done() or answers.cancelled() or answers.exception() is not None:
            logger.error("not every answer could be written")
            return False
        if self.failed:
            logger.error("%d requests failed, or their answers could not be written", self.failed)
        return not self.failed

    def stop(self) -> None:
        """Read no more prompts; `run` ends when the live ones have."""
        self._stopping.set()

    async def run(self) -> None:
        """Until the prompts end or `stop`, and every live request is answered and written."""
        live: set[asyncio.Future[None]] = set()
        try:
            async for number, line in self._lines():
                live.add(asyncio.ensure_future(self._answer(number, line)))
                if len(live) >= self._concurrency:
                    _, live = await asyncio.wait(live, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.gather(*live)
        finally:
            await end_all(*live)
            self.failed += await self._writer.close()

    async def _lines(self) -> AsyncIterator[tuple[int, str]]:
        """Numbered lines, empty ones left out."""
        lines: asyncio.Queue[str] = asyncio.Queue(1)
        loop = asyncio.get_running_loop()
        threading.Thread(target=_read, args=(self._prompts, lines, loop), name="preble-prompts", daemon=True).start()
        number = 0
        while not self._writer.broken and (line := await self._next_line(lines)):
            number += 1
            if line.strip():
                yield number, line

    async def _next_line(self, lines: asyncio.Queue[str]) -> str:
        """The next line; "" at the end or when stopped, whichever is first."""
        line = await first_of(lines.get(), self._stopping.wait())
        return "" if self._stopping.is_set() else str(line)

    async def _answer(self, number: int, line: str) -> None:
        name: Any = number
        try:
            request = parse_request(line)
            name = request.get("id", number)
            sampling = parse_sampling(request.get("sampling", {}))
            async for chunk in self._router.generate(request["token_ids"], sampling):
                answer = {"id": name, **{field: getattr(chunk, field) for field in ANSWER_FIELDS}}
                if chunk.logprobs:
                    answer["logprobs"] = [
                        {"logprob": max(one.logprob, -9999.0), "top": one.top} for one in chunk.logprobs
                    ]
                await self._writer.write(answer)
        except PrebleError as error:
            self.failed += 1
            await self._writer.write({"id": name, "error": f"{type(error).__name__}: {error}"})


def parse_request(line: str) -> dict[str, Any]:
    """One line's object with its `token_ids`, a list of ints. Raises `InvalidInput`."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the line is not JSON: {type(error).__name__}") from error
    if not isinstance(request, dict) or not set(request) <= {"id", "token_ids", "sampling"}:
        raise InvalidInput("the line must be an object of token_ids and, where wanted, id and sampling")
    token_ids = request.get("token_ids")
    if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):
        raise InvalidInput("token_ids must be a list of ints")
    return request


def parse_sampling(fields: Any) -> SamplingParams:
    """`SamplingParams` from its fields. Raises `InvalidInput`."""
    names = set(SamplingParams.__dataclass_fields__)
    if not isinstance(fields, dict) or not set(fields) <= names:
        raise InvalidInput(f"sampling must be an object with some of {', '.join(sorted(names))}")
    given = dict(fields)
    try:
        if "stop_token_ids" in given:
            given["stop_token_ids"] = tuple(int(token) for token in given["stop_token_ids"])
        for name in ("allowed_token_ids", "bad_words"):
            if isinstance(given.get(name), list):
                given[name] = tuple(given[name])
        if isinstance(given.get("logit_bias"), dict):  # in JSON every key is a text
            given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
        if isinstance(given.get("grammar"), dict):
            given["grammar"] = Grammar(**given["grammar"])
        return SamplingParams(**given)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"sampling: {error}") from error


def _read(prompts: TextIO, lines: asyncio.Queue[str], loop: asyncio.AbstractEventLoop) -> None:
    """In a thread: hand each line on when the one before is taken; "" ends."""
    line = "\n"
    with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody takes lines any more
        while line:
            line = prompts.readline(LINE_CHARS_MAX)
            asyncio.run_coroutine_threadsafe(lines.put(line), loop).result()


class _LineWriter:
    """Writes objects as JSON lines, in a thread."""

    def __init__(self, output: TextIO) -> None:
        self.broken = False
        self._output = output
        self._unwritten = 0
        self._waiting: queue.Queue[str | None] = queue.Queue(WAITING_LINES_MAX)
        self._thread = threading.Thread(target=self._run, name="preble-answers", daemon=True)
        self._thread.start()

    async def write(self, answer: dict[str, Any]) -> None:
        """Queue one line; waits while there is no room."""
        await self._put(json.dumps(answer) + "\n")

    async def close(self) -> int:
        """Give the last lines a moment; how many were not written."""
        await self._put(None)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._until_ended(), _LAST_LINES_SECONDS)
        return self._unwritten + self._waiting.qsize()

    async def _until_ended(self) -> None:
        while self._thread.is_alive():
            await asyncio.sleep(_FULL_POLL_SECONDS)

    async def _put(self, line: str | None) -> None:
        while True:
            try:
                self._waiting.put_nowait(line)
                return
            except queue.Full:
                await asyncio.sleep(_FULL_POLL_SECONDS)

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                if not self.broken:
                    self._output.write(line)
                    self._output.flush()
                    continue
            except (OSError, ValueError):
                self.broken = True
            self._unwritten += 1
