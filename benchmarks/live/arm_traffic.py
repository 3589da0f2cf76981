"""The traffic of `run_arms.py`: who asks what, and when. Owns no process and sends nothing.

A session is a client that asks its turns one after the other, each when the one before has been answered and a pause is
over (a closed loop). Where every session has one turn, requests arrive whatever becomes of those before them. Seconds
count from the start of a run; sessions begin as a Poisson process. The same seed makes the same sessions.

A closed loop slows down with what it asks, so no rate is too much for it. It is held against a plan: a turn of a
session is due `turn_seconds` after the one before was due, however long the answer took. A session has the turns that
are due within the run, and those that began before it are under way at its start: the planned rate is the same from the
first second to the last, and every arm is asked for the same turns.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import math
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.live.engine_load import Request

TRAFFICS = ("documents", "agents", "system prompt", "viral document", "coding agents")
DOCUMENTS = 18
DOCUMENT_TOKENS = (1200, 2000)
SYSTEM_TOKENS, USERS, USER_TOKENS = 1500, 40, 150
VIRAL_SHARE = 0.8  # of the requests of the middle third are about one document
AGENT_TOKENS = 3900  # of the longest turn: an engine's context is 4,096
TURN_SECONDS = 1.25  # between the turns of an agent, as planned: for an answer, and the pause before the next
PAUSE_SHARE = 0.4  # of that is the pause, in the mean
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class TextRequest(Request):
    """A request that is also known as the text its tokens were made of, which is what a gateway before vLLM reads."""

    text: str = ""


@dataclass(frozen=True)
class Turn:
    """One prompt of a session and the seconds after the answer before it, 0 for the first."""

    text: str
    token_ids: list[int]
    pause_seconds: float = 0.0


@dataclass(frozen=True)
class Session:
    """A client: what a fixed partition places it by, when it begins, and what it asks."""

    key: int
    arrival_seconds: float
    turns: Sequence[Turn]
    turn_seconds: float = TURN_SECONDS

    def due_seconds(self, number: int) -> float:
        """When a turn is to be asked by plan."""
        return self.arrival_seconds + number * self.turn_seconds


@dataclass(frozen=True)
class Sources:
    """The real texts that traffic is made of, and the model's tokenizer."""

    files: tuple[Path, ...]
    agents: Path
    coding: Path
    encode: Encode


# --- parts ------------------------------------------------------------------------------------------------------------


def arrivals(rng: np.random.Generator, per_second: float, seconds: float) -> list[float]:
    """Times of a Poisson process within `seconds`; one at 0 if there would be none."""
    times: list[float] = []
    now = float(rng.exponential(1.0 / per_second))
    while now < seconds:
        times.append(now)
        now += float(rng.exponential(1.0 / per_second))
    return times or [0.0]


@functools.lru_cache(maxsize=8)
def documents(sources: Sources, count: int, least_tokens: int, most_tokens: int) -> list[str]:
    """The first `count` texts of so many tokens. Raises ValueError if there are fewer."""
    chosen: list[str] = []
    for path in sources.files:
        text = path.read_text(errors="replace")
        if len(text) < 20 * most_tokens and least_tokens <= len(sources.encode(text)) <= most_tokens:
            chosen.append(text)
        if len(chosen) == count:
            return chosen
    raise ValueError(f"{len(chosen)} texts of {least_tokens} to {most_tokens} tokens, {count} are needed")


def question(number: int) -> str:
    """What follows a document."""
    return f"\nQuestion {number}: what does part {number} of this module do?"


def single(key: int, at: float, text: str, encode: Encode) -> Session:
    """A client with one request."""
    return Session(key, at, [Turn(text, encode(text))])


def dialogues(file: Path) -> list[list[dict[str, Any]]]:
    """The messages of each dialogue of tool, agent and user."""
    with gzip.open(file, "rt") as content:
        return [one["traj"] for one in json.load(content)]


def agent_turns(
    messages: Sequence[dict[str, Any]], encode: Encode, rng: np.random.Generator, pause_seconds: float
) -> list[Turn]:
    """What an agent sends to have each of its answers, as far as prompts fit into an engine's context."""
    turns: list[Turn] = []
    text = ""
    for message in messages:
        if message["role"] == "assistant":
            token_ids = encode(f"{text}[assistant] ")
            if len(token_ids) > AGENT_TOKENS:
                break
            pause = float(rng.exponential(pause_seconds)) if turns else 0.0
            turns.append(Turn(f"{text}[assistant] ", token_ids, pause))
        calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        text += f"[{message['role']}] {message.get('content') or ''}{calls}\n"
    return turns


def coding_sessions(archive: Path) -> list[list[str]]:
    """The prompts of each session of mini-swe-agent, in the order in which they were sent."""
    found = []
    with tarfile.open(archive) as content:
        for member in sorted(content.getmembers(), key=lambda member: member.name):
            file = content.extractfile(member) if member.name.startswith("miniswe/") else None
            if file is not None:
                found.append([json.loads(line)["input"] for line in file])
    return found


@functools.lru_cache(maxsize=2)
def coding_prompts(sources: Sources) -> list[list[str]]:
    """Those of each session that come before the first that does not fit into an engine's context."""
    fits = [
        list(itertools.takewhile(lambda text: len(sources.encode(text)) <= AGENT_TOKENS, texts))
        for texts in coding_sessions(sources.coding)
    ]
    return [texts for texts in fits if texts]


# --- the traffics -----------------------------------------------------------------------------------------------------


def make_sessions(
    traffic: str, sources: Sources, rps: float, seconds: float, seed: int, turn_seconds: float = TURN_SECONDS
) -> list[Session]:
    """The sessions of a run with about `rps` requests a second, agents' turns `turn_seconds` apart. Raises ValueError
    for an unknown traffic."""
    rng = np.random.default_rng([seed, TRAFFICS.index(traffic)] if traffic in TRAFFICS else seed)
    if traffic in ("documents", "viral document"):
        return about_documents(sources, arrivals(rng, rps, seconds), rng, seconds, traffic == "viral document")
    if traffic == "system prompt":
        return users_of_one_prompt(sources, arrivals(rng, rps, seconds), rng)
    if traffic == "agents":
        return agents(sources, rps, seconds, rng, turn_seconds)
    if traffic == "coding agents":
        return coding_agents(sources, rps, seconds, rng, turn_seconds)
    raise ValueError(f"no traffic {traffic!r}; there are {', '.join(TRAFFICS)}")


def about_documents(
    sources: Sources, times: Sequence[float], rng: np.random.Generator, seconds: float, viral: bool
) -> list[Session]:
    """Questions about documents that do not all fit; `viral`: in the middle third most are about one of them."""
    texts = documents(sources, DOCUMENTS, *DOCUMENT_TOKENS)
    made = []
    for number, at in enumerate(times):
        key = int(rng.integers(DOCUMENTS))
        is_viral = rng.random() < VIRAL_SHARE and seconds / 3 <= at < 2 * seconds / 3
        key = 0 if viral and is_viral else key
        made.append(single(key, at, texts[key] + question(number), sources.encode))
    return made


def users_of_one_prompt(sources: Sources, times: Sequence[float], rng: np.random.Generator) -> list[Session]:
    """One system prompt before what belongs to a user, before a question."""
    parts = documents(sources, USERS + 1, SYSTEM_TOKENS, 10 * SYSTEM_TOKENS)
    head = parts[0][: len(parts[0]) * SYSTEM_TOKENS // len(sources.encode(parts[0]))]
    users = [text[: 4 * USER_TOKENS] for text in parts[1:]]
    made = []
    for number, at in enumerate(times):
        key = int(rng.integers(USERS))
        made.append(single(key, at, f"{head}\n[user {key}] {users[key]}{question(number)}", sources.encode))
    return made


def agents(
    sources: Sources, rps: float, seconds: float, rng: np.random.Generator, turn_seconds: float
) -> list[Session]:
    """Real dialogues, each an agent's; so many begin that `rps` turns are due each second."""
    found = [agent_turns(one, sources.encode, rng, PAUSE_SHARE * turn_seconds) for one in dialogues(sources.agents)]
    found = [turns for turns in found if turns]
    return [
        session
        for key, start, number in begun(list(map(len, found)), rps, seconds, rng, turn_seconds)
        if (session := within(key, start, found[number], seconds, turn_seconds)).turns
    ]


def coding_agents(
    sources: Sources, rps: float, seconds: float, rng: np.random.Generator, turn_seconds: float
) -> list[Session]:
    """The same of sessions that have no prefix in common: prompts of each that begins open with a line of its own."""
    found = coding_prompts(sources)
    made = []
    for key, start, number in begun(list(map(len, found)), rps, seconds, rng, turn_seconds):
        pauses = [0.0, *map(float, rng.exponential(PAUSE_SHARE * turn_seconds, len(found[number]) - 1))]
        texts = [f"[session {key}]\n{text}" for text in found[number]]
        turns = [Turn(text, [], pause) for text, pause in zip(texts, pauses, strict=True)]
        session = within(key, start, turns, seconds, turn_seconds)
        session = replace(session, turns=[replace(one, token_ids=sources.encode(one.text)) for one in session.turns])
        made.append(session)
    return [session for session in made if session.turns]


def begun(
    turns: Sequence[int], rps: float, seconds: float, rng: np.random.Generator, turn_seconds: float
) -> Iterator[tuple[int, float, int]]:
    """(key, when its first turn is due, which it is) of dialogues with so many turns each, those that began before the
    run with them."""
    lead = turn_seconds * max(turns)
    order = rng.permutation(len(turns))
    times = arrivals(rng, rps * len(turns) / sum(turns), lead + seconds)
    for key, at in enumerate(times):
        yield key, at - lead, int(order[key % len(turns)])


def within(key: int, start: float, turns: Sequence[Turn], seconds: float, turn_seconds: float) -> Session:
    """The part of a dialogue that is due in [0, seconds) if its first turn is due at `start`, which may be before 0."""
    first = max(0, math.ceil(-start / turn_seconds))
    arrival = start + first * turn_seconds
    kept = turns[first : first + max(0, math.ceil((seconds - arrival) / turn_seconds))]
    return Session(key, arrival, kept, turn_seconds)
