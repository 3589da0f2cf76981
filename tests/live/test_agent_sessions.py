"""Agents in closed loop before real engines: two SGLang or vLLM servers, two workers of our torch engine, a gateway
before either. What is compared is what engines report of each turn, tokens and answers; nothing depends on the clock.

Run by `make test-live`. Figures are printed for the record. Texts are dialogues of tau-bench where the shared data is
there, else pieces of the standard library stand for what tools answer.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from preble.engines.torch.tiny_models import stdlib_directory
from tests.live.live_fleet import model_dir
from tests.live.live_servers import BLOCK_SIZES, MODEL_NAME, Front, tools_model_dir
from tests.support.gateway import GatewayProcess
from tests.support.paths import SHARED
from tests.support.transport import WorkerProcess

SESSIONS, TURNS, NEW_TOKENS, PIECE_CHARACTERS = 6, 4, 6, 450  # either server could cache all sessions
HITS_MIN = 0.75  # a turn may be sent away from a busy server
Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    """What an engine reports of one."""

    prompt_tokens: int
    cached_tokens: int
    text: str


def dialogues() -> list[list[Message]]:
    """Of each session its messages: what it is, then a task, an answer, what a tool said, an answer, and so on. No two
    begin alike."""
    file = SHARED / "workloads" / "agents" / "taubench_gpt4o_airline.json.gz"
    found: list[list[Message]] = []
    if file.is_file():
        with gzip.open(file, "rt") as content:
            for one in json.load(content)[:SESSIONS]:
                said = [str(message.get("content") or message.get("tool_calls") or "") for message in one["traj"]]
                found.append(alternating(said))
    else:
        for path in sorted(stdlib_directory().glob("*.py"), key=lambda path: -path.stat().st_size)[:SESSIONS]:
            text = path.read_text(errors="replace")
            found.append(alternating([text[at : at + PIECE_CHARACTERS] for at in range(0, len(text), 2000)]))
    return [[{"role": "system", "content": f"{number} is you. {one[0]['content']}"}, *one[1:]]
            for number, one in enumerate(found)]  # fmt: skip


def alternating(texts: list[str]) -> list[Message]:
    """Texts as a system's, then a user's and an assistant's in turn: what tools say comes as a user's."""
    roles = ["system", *["user", "assistant"] * TURNS]
    return [
        {"role": role, "content": text[:PIECE_CHARACTERS]}
        for role, text in zip(roles, texts[: 2 * TURNS], strict=False)
    ]


def served(url: str) -> list[list[Turn]]:
    """All sessions at once, each turn after the one before, by session."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300.0)

    def one(number: int, messages: list[Message]) -> list[Turn]:
        turns = []
        for turn in range(TURNS):
            reply = client.chat.completions.create(
                model=MODEL_NAME,
                messages=messages[: 2 + 2 * turn],  # type: ignore[arg-type]
                max_tokens=NEW_TOKENS,
                temperature=0.0,
                extra_headers={"x-session-id": f"agent-{number}"},
            )
            assert reply.usage is not None
            details = reply.usage.prompt_tokens_details
            cached = 0 if details is None else details.cached_tokens or 0
            turns.append(Turn(reply.usage.prompt_tokens, cached, reply.choices[0].message.content or ""))
        return turns

    with ThreadPoolExecutor(SESSIONS) as pool:
        return list(pool.map(one, range(SESSIONS), dialogues()))


def hits(sessions: list[list[Turn]]) -> float:
    """Of the prompts of the turns before, how much is cached when a session is back."""
    pairs = [(before, turn) for turns in sessions for before, turn in zip(turns, turns[1:], strict=False)]
    return sum(turn.cached_tokens for _, turn in pairs) / sum(before.prompt_tokens for before, _ in pairs)


def show(title: str, sessions: list[list[Turn]]) -> None:
    """For the record."""
    lines = [f"{title}: {hits(sessions):.3f} of the turns before is cached"]
    lines += [" ".join(f"{turn.cached_tokens}/{turn.prompt_tokens}" for turn in turns) for turns in sessions]
    sys.stdout.write("\n".join(["", *lines, ""]))


def test_a_turn_finds_the_turn_before_at_the_server_that_had_it(front: Front) -> None:
    sessions = served(front.gateway.url)
    show(f"two {front.engine} servers", sessions)
    assert hits(sessions) > HITS_MIN
    block = BLOCK_SIZES[front.engine]
    assert any(
        turn.cached_tokens >= before.prompt_tokens - 2 * block
        for turns in sessions
        for before, turn in zip(turns, turns[1:], strict=False)
    ), "a turn before is cached but for its last block"


@contextlib.contextmanager
def torch_fleet(log: Path, capacity_tokens: int) -> Iterator[str]:
    """Two workers of our torch engine, their gateway's URL."""
    options = ["--engine", "torch", "--model", str(model_dir()), "--dtype", "float32", "--device", "cpu"]
    options += ["--threads", "1", "--kv-capacity-tokens", str(capacity_tokens), "--max-model-tokens", "4096"]
    workers = [WorkerProcess(*options, "--id", name, start_seconds=300.0) for name in ("a", "b")]
    gateway = None
    try:
        endpoints = [worker.endpoint for worker in workers]
        names = ["--tokenizer", str(tools_model_dir()), "--model-names", MODEL_NAME, "--min-workers", "2"]
        gateway = GatewayProcess("--workers", *endpoints, *names, log=log)
        yield gateway.url
    finally:
        if gateway is not None:
            gateway.stop()
        for worker in workers:
            worker.stop()


def test_torch_workers_answer_the_same_however_much_they_must_evict(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    longest = 0
    for title, capacity in (("large", 20_000), ("short", 0)):
        with torch_fleet(tmp_path / f"{title}.log", capacity or longest + 200) as url:
            found[title] = served(url)
        show(f"two torch workers, caches are {title}", found[title])
        longest = max(turn.prompt_tokens for turns in found[title] for turn in turns)
    assert hits(found["large"]) > HITS_MIN
    assert hits(found["short"]) < hits(found["large"]), "these caches hold a third of the sessions"
    for large, short in zip(found["large"], found["short"], strict=True):
        assert [turn.text for turn in large] == [turn.text for turn in short]
