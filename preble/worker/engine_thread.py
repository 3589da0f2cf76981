"""The engine's thread in a worker process. Owns the loop that drives one engine step by step; knows no socket and no
router.

    loop's thread                                engine's thread
      submit, abort  -> commands (bounded by       take commands -> engine.submit / engine.abort
                        the worker's live bound)   engine.step() -> chunks, events
      take           <- outputs (bounded: at the   put outputs, notify
                        bound the engine waits)

Only the worker's loop can make the engine wait, and that loop never waits for a router: so no router stalls the engine.
An exception out of the engine, other than a refusal of one request, ends the thread; `failure` keeps it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..clock import Clock
from ..engines.base import Engine, EngineLoad, GenerationRequest, OutputChunk, SelfRunning
from ..errors import EngineError, InvalidInput, QueueFull
from ..types import CacheEvent

logger = logging.getLogger("preble.worker")

_LOAD_SECONDS = 0.05  # the load is read no more often: routers ask once per heartbeat
_STOP_POLL_SECONDS = 0.05
_REFUSAL_CODES = {QueueFull: "queue_full", InvalidInput: "invalid", EngineError: "engine"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """The engine did not take a request; `code` is one of `messages.REFUSAL_CODES`."""

    request_id: str
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Output:
    """What one turn of the engine's loop produced. `events` precede `chunks`: they were true before these were read."""

    chunks: Sequence[OutputChunk] = ()
    refusals: Sequence[Refusal] = ()
    events: Sequence[CacheEvent] = field(default_factory=tuple)


class EngineThread:
    """Runs `engine` until `stop`. Its thread calls `notify` after each output, and when it ends.

    `submit`, `abort`, `take` and `stop` belong to the loop's thread. `max_outputs` turns may wait there.
    """

    def __init__(
        self,
        engine: Engine,
        notify: Callable[[], None],
        *,
        max_outputs: int = 256,
        clock: Clock = time.monotonic,
    ) -> None:
        self.engine = engine
        self.load = EngineLoad(0, 0, 0, 0)
        self.failure: Exception | None = None
        self._notify = notify
        self._clock = clock
        self._commands: deque[GenerationRequest | str] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._outputs: queue.Queue[Output] = queue.Queue(max_outputs)
        self._step_started: float | None = None
        self._load_read_at = -1.0
        self._self_running = engine if isinstance(engine, SelfRunning) else None
        self._thread = threading.Thread(target=self._run, name="preble-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; from now on only it touches the engine."""
        if self._self_running is not None:
            self._self_running.listen(self._engine_spoke)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False once the thread has ended."""
        return self._thread.is_alive()

    def step_seconds(self, now: float) -> float:
        """How long the engine has been in its current step, or has said nothing; 0.0 when it has nothing to do."""
        if self._self_running is not None:
            return self._self_running.stalled_seconds()
        started = self._step_started
        return 0.0 if started is None else max(0.0, now - started)

    def submit(self, request: GenerationRequest) -> None:
        """Hand a request to the engine; a refusal comes back as an output."""
        self._command(request)

    def abort(self, request_id: str) -> None:
        """Ask the engine to end a request; unknown ids are ignored."""
        self._command(request_id)

    def take(self) -> list[Output]:
        """All outputs so far, oldest first; [] when there are none."""
        return [self._outputs.get_nowait() for _ in range(self._outputs.qsize())]  # nobody else takes any

    def stop(self, timeout_seconds: float = 10.0) -> bool:
        """End the loop after the step it is in and close the engine. False if the step does not end in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        deadline = self._clock() + timeout_seconds
        while self._thread.is_alive() and self._clock() < deadline:
            self.take()  # the thread may be waiting for room
            self._thread.join(_STOP_POLL_SECONDS)
        return not self._thread.is_alive()

    def _command(self, command: GenerationRequest | str) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _engine_spoke(self) -> None:
        with self._wake:
            self._wake.notify()

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # noqa: BLE001 - any error of an engine ends it, and is reported
            # Where, but not what it said: a foreign error may quote the prompt.
            where = "".join(traceback.format_tb(error.__traceback__))
            logger.error("the engine failed: %s\n%s", type(error).__name__, where)
            self.failure = error
        finally:
            self.engine.close()
            self._notify()

    def _turn(self) -> bool:
        """One round of commands, step and outputs; False when it is time to stop."""
        commands = self._next_commands()
        if commands is None:
            return False
        refusals = [refusal for command in commands if (refusal := self._obey(command)) is not None]
        self._step_started = self._clock()
        chunks = self.engine.step() if self._engine_has_work() else []
        self._step_started = None
        self._put(Output(chunks, refusals, self.engine.take_events()))
        return True

    def _next_commands(self) -> list[GenerationRequest | str] | None:
        """Commands that wait, without waiting where the engine has work; None to stop."""
        if not self._engine_has_work():
            self.load = self.engine.load()
        with self._wake:
            while not (self._commands or self._stopping or self._engine_has_work()):
                self._wake.wait()
            commands = list(self._commands)
            self._commands.clear()
            return None if self._stopping else commands

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

    def _put(self, output: Output) -> None:
        now = self._clock()
        if now - self._load_read_at >= _LOAD_SECONDS or self._load_read_at < 0.0:
            self.load = self.engine.load()
            self._load_read_at = now
        if not (output.chunks or output.refusals or output.events):
            return
        while not self._stopping:
            try:
                self._outputs.put(output, timeout=_STOP_POLL_SECONDS)
            except queue.Full:
                continue
            self._notify()
            return
