"""The engine's thread in a worker process. Owns the loop that drives one engine step by step, and whose turn it is to
serve routers; knows no socket and no router.

    with the turn      pass_on(output of the last step), serve(seconds to wait) -> commands
    without it         commands -> engine.submit / engine.abort, jobs, engine.step() -> output

So between two steps the thread that computes is the one that receives and sends: a request wakes nobody else on its way
to the engine, nor a token on its way out. Another thread takes the turn while a step is long, so that heartbeats are
answered, and leaves it when the step has ended. No router stalls the engine, for `serve` and `pass_on` never wait for
one.

An exception out of the engine, other than a refusal of one request, ends the thread; `failure` keeps it.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from ..clock import Clock
from ..engines.base import Engine, EngineLoad, GenerationRequest, OutputChunk, SelfRunning
from ..errors import EngineError, InvalidInput, QueueFull
from ..types import CacheEvent

logger = logging.getLogger("preble.worker")

_LOAD_SECONDS = 0.05  # the load is read no more often: routers ask once per heartbeat
_LONG_STEP_SECONDS = 0.05
_IDLE_SECONDS = 0.1  # how soon a signal or an expired session is noticed when nothing else happens
_JOBS_PER_STEP = 2  # so that who asks for KV delays nobody's token for long
_REFUSAL_CODES = {QueueFull: "queue_full", InvalidInput: "invalid", EngineError: "engine"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """The engine did not take a request; `code` is one of `messages.REFUSAL_CODES`."""

    request_id: str
    code: str
    text: str


class Output(Struct, frozen=True):
    """What one turn of the engine's loop produced. `events` precede `chunks`: they were true before these were read."""

    chunks: Sequence[OutputChunk] = ()
    refusals: Sequence[Refusal] = ()
    events: Sequence[CacheEvent] = ()


class EngineThread:
    """Runs `engine` until `stop`, or until `serve` returns False. `wake` makes a `serve` that waits return.

    `serve` and `pass_on` are called by whoever has the turn, and only then may `submit` and `abort` be.
    """

    def __init__(
        self,
        engine: Engine,
        serve: Callable[[float], bool],
        pass_on: Callable[[Output], None],
        wake: Callable[[], None],
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self.engine = engine
        self.load = EngineLoad(0, 0, 0, 0)
        self.failure: Exception | None = None
        self._serve = serve
        self._pass_on = pass_on
        self._wake = wake
        self._clock = clock
        self._turn = threading.Lock()
        self._commands: deque[GenerationRequest | str] = deque()
        self._jobs: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._step_started: float | None = None
        self._load_read_at = -1.0
        self._self_running = engine if isinstance(engine, SelfRunning) else None
        self._thread = threading.Thread(target=self._run, name="preble-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; from now on only it touches the engine."""
        if self._self_running is not None:
            self._self_running.listen(self._wake)
        self._thread.start()

    def step_seconds(self, now: float) -> float:
        """How long the engine has been in its current step, or has said nothing; 0.0 when it has nothing to do."""
        if self._self_running is not None:
            return self._self_running.stalled_seconds()
        return self._seconds_in_step(now)

    def submit(self, request: GenerationRequest) -> None:
        """Hand a request to the engine; a refusal comes back as an output."""
        self._commands.append(request)

    def abort(self, request_id: str) -> None:
        """Ask the engine to end a request; unknown ids are ignored."""
        self._commands.append(request_id)

    def call(self, job: Callable[[], None]) -> None:
        """Have the thread do something short with the engine, few such between two steps. Any thread may call this; who
        does bounds how many wait. What a job raises ends the thread as what the engine raises does; after `stop` it is
        not done."""
        self._jobs.append(job)
        self._wake()

    def stand_in(self) -> None:
        """Serve in the thread's place whenever a step is long, until the thread has ended or `serve` returns False."""
        goes_on = True
        while goes_on and self._thread.is_alive():
            self._thread.join(_LONG_STEP_SECONDS)
            if self._seconds_in_step(self._clock()) < _LONG_STEP_SECONDS:
                continue
            with self._turn:
                while goes_on and self._step_started is not None:
                    goes_on = self._serve(_IDLE_SECONDS)

    def stop(self, timeout_seconds: float = 10.0) -> bool:
        """End the loop after the step it is in and close the engine. False if the step does not end in time; then
        the thread takes no turn any more."""
        self._stopping = True
        self._wake()
        self._thread.join(timeout_seconds)
        with self._turn:
            return not self._thread.is_alive()

    def _seconds_in_step(self, now: float) -> float:
        started = self._step_started
        return 0.0 if started is None else max(0.0, now - started)

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            output = Output()
            while self._take_turn(output):
                output = self._compute()
        except Exception as error:  # noqa: BLE001 - any error of an engine ends it, and is reported
            # Where, but not what it said: a foreign error may quote the prompt.
            where = "".join(traceback.format_tb(error.__traceback__))
            logger.error("the engine failed: %s\n%s", type(error).__name__, where)
            self.failure = error
        finally:
            self._step_started = None
            self.engine.close()

    def _take_turn(self, output: Output) -> bool:
        """Pass an output on, and serve until there is something to compute; False when it is time to stop."""
        if not self._turn.acquire(blocking=False):
            self._wake()  # whoever stands in is waiting for routers
            self._turn.acquire()
        try:
            if not self._stopping and (output.chunks or output.refusals or output.events):
                self._pass_on(output)
            wait_seconds = 0.0 if self._has_work() else self._idle_seconds()
            while not self._stopping:
                if not self._serve(wait_seconds):
                    return False
                if self._commands or self._has_work():
                    return True
                wait_seconds = self._idle_seconds()
            return False
        finally:
            self._turn.release()

    def _idle_seconds(self) -> float:
        """How long to wait for routers where the engine has nothing to do, of which it says its load."""
        if self._commands or self._jobs:
            return 0.0
        self.load = self.engine.load()
        return _IDLE_SECONDS

    def _compute(self) -> Output:
        """Obey the commands and make a step."""
        commands = list(self._commands)
        self._commands.clear()
        self._step_started = self._clock()
        for _ in range(min(len(self._jobs), _JOBS_PER_STEP)):
            self._jobs.popleft()()
        refusals = [refusal for command in commands if (refusal := self._obey(command)) is not None]
        chunks = self.engine.step() if self._engine_has_work() else []
        events = self.engine.take_events()
        now = self._clock()
        if now - self._load_read_at >= _LOAD_SECONDS:
            self.load, self._load_read_at = self.engine.load(), now
        self._step_started = None
        return Output(chunks, refusals, events)

    def _has_work(self) -> bool:
        return bool(self._jobs) or self._engine_has_work()

    def _engine_has_work(self) -> bool:
        """Whether a step is worth while: an engine that runs by itself does the rest without one."""
        return self.engine.has_work() if self._self_running is None else self._self_running.ready()

    def _obey(self, command: GenerationRequest | str) -> Refusal | None:
        if isinstance(command, str):
            self.engine.abort(command)
            return None
        try:
            self.engine.submit(command)
        except (QueueFull, InvalidInput, EngineError) as error:
            code = next(code for kind, code in _REFUSAL_CODES.items() if isinstance(error, kind))
            return Refusal(command.request_id, code, str(error))
        return None
