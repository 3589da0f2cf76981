"""Which child processes should run now: starts, restarts with backoff, giving up, draining. Owns these decisions only.

    waiting -> starting -> ready          an exit, a start that takes too long or cannot be made:
       ^          |          |            wait restart_min_seconds, doubled each time up to restart_max_seconds
       +----------+----------+
                  |                       more than max_restarts in a row, or exit code 2 (wrong usage, which will not
                  v                       change by itself): given up; the others go on
               gave_up
    drain: waiting -> stopped; starting, ready -> draining -> stopped (killed when it takes too long)

A child that has run for `stable_seconds` starts its count of restarts afresh. Any exit that was not asked for counts,
also one with code 0, so that a child may be restarted by sending it SIGTERM.

Knows no process, signal or socket: children are made by a function and time is a clock, both passed in. What runs may
be anything that says when it serves: workers (`preble up`, `preble demo`), gateways (`preble serve --processes`). Not
thread-safe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..clock import Clock
from ..errors import InvalidConfig
from ..types import check_fields

WRONG_USAGE_CODE = 2


class Child(Protocol):
    """A running process."""

    @property
    def ready_line(self) -> str:
        """What it said when it came to serve; "" until then."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def terminate(self) -> None:
        """Ask it to drain; the second time: to end at once. No effect once it has ended."""

    def signal(self, number: int) -> None:
        """Send it a signal. No effect once it has ended."""

    def kill(self) -> None:
        """End it, and whatever it has started, now. No effect once it has ended."""


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """Times in seconds, and the bound on restarts in a row. Raises `InvalidConfig` naming the field."""

    restart_min_seconds: float = 0.5
    restart_max_seconds: float = 30.0
    max_restarts: int = 5
    stable_seconds: float = 60.0
    start_seconds: float = 1800.0
    drain_seconds: float = 40.0
    hurry_seconds: float = 2.0

    def __post_init__(self) -> None:
        if not 0.0 < self.restart_min_seconds <= self.restart_max_seconds:
            raise InvalidConfig(
                "SupervisorConfig.restart_min_seconds must be positive and at most restart_max_seconds, "
                f"got {self.restart_min_seconds} and {self.restart_max_seconds}"
            )
        check_fields(self, "not be negative", "max_restarts")
        check_fields(self, "be positive", "stable_seconds", "start_seconds", "drain_seconds", "hurry_seconds")


@dataclass(frozen=True, slots=True)
class Happening:
    """News of one child: `kind` is started, ready, exited, killed, gave_up or stopped; `text` says more: of one that is
    ready, the line with which it said so."""

    child: int
    kind: str
    text: str

    @property
    def is_trouble(self) -> bool:
        return self.kind in ("exited", "killed", "gave_up")

    def log(self, logger: logging.Logger, name: str, **fields: Any) -> None:
        """A line about it; none of what the child says itself."""
        if self.kind != "ready":
            level = logging.ERROR if self.is_trouble else logging.INFO
            logger.log(level, "%s %s %s", name, self.kind.replace("_", " "), self.text, **fields)


@dataclass(slots=True)
class Slot:
    """One child's place. `since` is when its state began; `failures` are exits in a row, `restarts` all starts but the
    first."""

    number: int
    state: str = "waiting"
    since: float = 0.0
    start_at: float = 0.0
    child: Child | None = None
    failures: int = 0
    starts: int = 0
    served: bool = False
    exit_code: int | None = None
    killed: bool = False

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)


class Supervisor:
    """Keeps `count` children running. `spawn(number)` starts one; an `OSError` out of it counts as an exit."""

    def __init__(self, count: int, spawn: Callable[[int], Child], config: SupervisorConfig, *, clock: Clock) -> None:
        if count < 1:
            raise InvalidConfig(f"Supervisor.count must be positive, got {count}")
        self.config = config
        self.slots = [Slot(number) for number in range(count)]
        self.draining = False
        self._spawn = spawn
        self._clock = clock
        self._overdue_at = 0.0
        self._news: list[Happening] = []

    # --- asked from outside -------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """True when no child runs and none will be started."""
        return all(slot.state in ("stopped", "gave_up") for slot in self.slots)

    @property
    def clean(self) -> bool:
        """True if no child was given up or killed, and every one that served to the end left with code 0."""
        return all(slot.state != "gave_up" and not slot.killed and not slot.exit_code for slot in self.slots)

    def signal(self, number: int) -> None:
        """Send a signal to every child that serves."""
        for slot in self.slots:
            if slot.child is not None and slot.state == "ready":
                slot.child.signal(number)

    def drain(self, number: int | None = None) -> None:
        """Start nothing more and ask every child to finish; the second time: to end at once. `number`: the signal that
        asks those that have served, for one that tells signals apart; the others may not know yet what it means."""
        if self.draining:
            self._overdue_at = min(self._overdue_at, self._clock() + self.config.hurry_seconds)
        else:
            self._overdue_at = self._clock() + self.config.drain_seconds
        self.draining = True
        for slot in self.slots:
            if slot.child is not None:
                if number is not None and slot.served:
                    slot.child.signal(number)
                else:
                    slot.child.terminate()
                self._turn_to(slot, "draining")
            elif slot.state == "waiting":
                self._turn_to(slot, "stopped")

    def kill(self) -> None:
        """End every child now and start nothing more: for a launcher that is about to end itself."""
        self.draining = True
        for slot in self.slots:
            if slot.child is not None:
                slot.child.kill()

    def turn(self) -> list[Happening]:
        """Look at every child once and do what is due; what happened, oldest first. Never waits."""
        for slot in self.slots:
            if slot.child is not None:
                self._look_at(slot, slot.child)
            elif slot.state == "waiting" and self._clock() >= slot.start_at:
                self._start(slot)
        news, self._news = self._news, []
        return news

    # --- one child ----------------------------------------------------------------------------------------------------

    def _turn_to(self, slot: Slot, state: str) -> None:
        slot.state, slot.since = state, self._clock()

    def _report(self, slot: Slot, kind: str, text: str) -> None:
        self._news.append(Happening(slot.number, kind, text))

    def _start(self, slot: Slot) -> None:
        slot.starts += 1
        slot.served = False
        try:
            slot.child = self._spawn(slot.number)
        except OSError as error:
            self._failed(slot, f"cannot be started: {error}")
            return
        self._turn_to(slot, "starting")
        self._report(slot, "started", "" if not slot.restarts else f"restart {slot.restarts}")

    def _look_at(self, slot: Slot, child: Child) -> None:
        if slot.state == "starting" and child.ready_line:
            slot.served = True
            self._turn_to(slot, "ready")
            self._report(slot, "ready", child.ready_line)
        code = child.poll()
        now = self._clock()
        if code is not None:
            self._ended(slot, child, code)
        elif slot.state == "draining" and now >= self._overdue_at:
            self._kill(slot, child, "did not drain in time")
        elif slot.state == "starting" and now - slot.since >= self.config.start_seconds:
            self._kill(slot, child, f"was not ready within {self.config.start_seconds:g} s")

    def _kill(self, slot: Slot, child: Child, why: str) -> None:
        child.kill()
        if not slot.killed:
            self._report(slot, "killed", why)
        slot.killed = True

    def _ended(self, slot: Slot, child: Child, code: int) -> None:
        child.kill()  # whatever the child itself had started must not outlive it
        slot.child = None
        if slot.state == "draining":
            # One that had not come to serve yet may not have known what the signal means.
            slot.exit_code = code if slot.served else 0
            self._turn_to(slot, "stopped")
            self._report(slot, "stopped", f"exit code {code}")
            return
        slot.killed = False
        if slot.state == "ready" and self._clock() - slot.since >= self.config.stable_seconds:
            slot.failures = 0
        self._failed(slot, f"ended with exit code {code}", hopeless=code == WRONG_USAGE_CODE)

    def _failed(self, slot: Slot, what: str, *, hopeless: bool = False) -> None:
        """Start it again later, or give it up."""
        config = self.config
        slot.failures += 1
        if hopeless or slot.failures > config.max_restarts:
            self._turn_to(slot, "gave_up")
            why = "wrong usage" if hopeless else f"{slot.failures} times in a row"
            self._report(slot, "gave_up", f"{what}; given up: {why}")
            return
        # The exponent is bounded, too: with many restarts allowed, 2.0 to their power would overflow.
        pause = min(config.restart_max_seconds, config.restart_min_seconds * 2.0 ** min(slot.failures - 1, 64))
        slot.start_at = self._clock() + pause
        self._turn_to(slot, "waiting")
        self._report(slot, "exited", f"{what}; starts again in {pause:g} s")
