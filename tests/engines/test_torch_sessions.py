"""Sessions in closed loop on two torch engines, placed by E2, in the time of a clock set by hand: what each turn finds
cached, as the engines report it, where caches hold all sessions and where they do not."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from preble import GlobalScheduler, LocalConfig, WorkerSpec
from preble.clock import ManualClock
from preble.engines.base import GenerationRequest
from preble.engines.torch import TorchEngine
from preble.types import SessionHint
from tests.support.torch_fixtures import Tokens, greedy, joined, prompt

pytest_plugins = ["tests.support.torch_fixtures"]

TOOL_END, TURN_END = 7, 8  # with which answers end: a tool's call, and what is for a person
FIRST_TOKENS, TURN_TOKENS, NEW_TOKENS = 200, 20, 2


@dataclass
class Session:
    """An agent: how its answers end, and how long it then pauses."""

    name: str
    ending: int
    pause_seconds: float
    prompt: Tokens
    turns: int = 0


@dataclass
class Turn:
    """What became of one."""

    session: Session
    at_seconds: float
    prompt_tokens: int
    known_tokens: int  # computed in the turns before: all but the last token of each answer
    cached_tokens: int
    answer: list[int]
    worker: str


@dataclass
class Fleet:
    """Two engines and their scheduler, in one time."""

    model_dir: Path
    capacity: int
    eviction: str
    clock: ManualClock = field(default_factory=ManualClock)
    engines: dict[str, TorchEngine] = field(default_factory=dict)

    def __post_init__(self) -> None:
        local: Any = LocalConfig(self.capacity, eviction=self.eviction, token_budget=512)
        for name in ("a", "b"):
            self.engines[name] = TorchEngine(
                self.model_dir, local=local, dtype="float32", device="cpu", clock=self.clock
            )
        specs = [WorkerSpec(name, kv_capacity_tokens=self.capacity) for name in self.engines]
        self.scheduler = GlobalScheduler(specs, cost_model="mistral-7b/a6000", clock=self.clock)

    def serve(self, session: Session) -> Turn:
        """A session's next turn, from its place to the end of its answer."""
        name, known = f"{session.name}.{session.turns}", len(session.prompt) - TURN_TOKENS - 1 if session.turns else 0
        self.scheduler.tick()
        worker = self.scheduler.schedule(
            session.prompt, request_id=name, max_new_tokens=NEW_TOKENS, session=SessionHint(session=session.name)
        ).worker
        engine = self.engines[worker]
        sampling = greedy(NEW_TOKENS, allowed_token_ids=(session.ending,))
        engine.submit(GenerationRequest(name, session.prompt, sampling))
        answer: list[int] = []
        cached = -1
        while engine.has_work():
            for chunk in engine.step():
                assert chunk.error is None, chunk.error
                answer += chunk.token_ids
                cached = cached if chunk.cached_tokens is None else chunk.cached_tokens
        self.scheduler.first_token(name, cached_tokens=cached)
        self.scheduler.finish(name, output_tokens=len(answer), cached_tokens=cached)
        self.scheduler.apply(worker, engine.take_events())
        return Turn(session, self.clock(), len(session.prompt), known, cached, answer, worker)

    def run(self, sessions: list[Session], seconds: float) -> list[Turn]:
        """All turns of the sessions, which begin one after the other."""
        due = [(number / len(sessions) * one.pause_seconds, number) for number, one in enumerate(sessions)]
        heapq.heapify(due)
        turns = []
        while due[0][0] < seconds:
            at, number = heapq.heappop(due)
            self.clock.set(at)
            session = sessions[number]
            turns.append(self.serve(session))
            session.turns += 1
            own = prompt(1000 * number + session.turns, TURN_TOKENS)
            session.prompt = joined(session.prompt, np.array(turns[-1].answer, np.int32), own)
            heapq.heappush(due, (at + session.pause_seconds, number))
        return turns


@pytest.fixture
def fleets(tiny_model_dir: Path) -> Iterator[Any]:
    """Make fleets; their engines are closed after the test."""
    made: list[Fleet] = []

    def make(capacity: int, eviction: str = "returns") -> Fleet:
        made.append(Fleet(tiny_model_dir, capacity, eviction))
        return made[-1]

    yield make
    for engine in (engine for fleet in made for engine in fleet.engines.values()):
        engine.close()


def agents(count: int, ending: int, pause_seconds: float, seed: int) -> list[Session]:
    """Sessions that share nothing."""
    return [
        Session(f"{ending}.{number}", ending, pause_seconds, prompt(100 * seed + number, FIRST_TOKENS))
        for number in range(count)
    ]


def hits(turns: list[Turn], ending: int, since_seconds: float) -> float:
    """Of what the turns of one kind have computed before, how much they find."""
    later = [turn for turn in turns if turn.session.ending == ending and turn.known_tokens]
    later = [turn for turn in later if turn.at_seconds >= since_seconds]
    return sum(turn.cached_tokens for turn in later) / sum(turn.known_tokens for turn in later)


def test_every_turn_finds_all_of_the_turn_before_where_caches_hold_all(fleets: Any) -> None:
    fleet = fleets(4000)
    turns = fleet.run(agents(6, TOOL_END, 5.0, 1), 20.0)
    assert len(turns) >= 18
    for turn in turns:
        assert turn.cached_tokens == turn.known_tokens
    assert len({turn.worker for turn in turns}) == 2, "both engines work"


def test_where_caches_are_short_who_is_back_soon_is_kept(fleets: Any) -> None:
    found, answers = {}, {}
    for eviction in ("returns", "lru"):
        sessions = [*agents(6, TOOL_END, 5.0, 1), *agents(60, TURN_END, 40.0, 2)]
        turns = fleets(1600, eviction).run(sessions, 40.0)
        found[eviction] = hits(turns, TOOL_END, 20.0)
        answers[eviction] = [(turn.session.name, turn.answer) for turn in turns]
    assert found["returns"] > 0.9
    assert found["returns"] > found["lru"] + 0.2
    assert answers["returns"] == answers["lru"]
