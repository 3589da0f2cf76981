"""What `bench_ray.py` runs inside Ray: replicas with a prefix cache and a queue, and clients that send on time. Owns
both and the text they speak; no router and no statistics.

A replica is Preble's simulated engine in real time: the local scheduler decides what is computed, cached and evicted,
and a published cost model of a GPU says how long each iteration takes, which the replica sleeps. So hits and queues are
real and the computation is not, and four of them need little of two cores.

Prompts are text, as in Ray Serve LLM: a word of three letters for each token, with the blank four characters.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from ray import serve

from benchmarks.ray.times import TIMES
from preble import CostModel, LocalConfig, SamplingParams
from preble.engines.base import GenerationRequest, OutputChunk
from preble.engines.simulated import SimulatedEngine

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
VOCABULARY = 32_000  # of the generated prompts
WAITING_MAX = 100_000  # no replica refuses: routers are compared by where they make requests wait
REQUEST_SECONDS = 300.0


@dataclass(frozen=True)
class CompletionRequest:
    """The fields by which routers read a request of Ray Serve LLM."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True)
class Sent:
    """One request of the load: what is asked and when, in seconds from the start."""

    number: int
    request: CompletionRequest
    arrival_seconds: float


@dataclass(frozen=True)
class Answer:
    """What came of a request; times count from its arrival. `reach_seconds`: until a replica had it. `error`: the kind
    of failure, "" if it was answered in full."""

    number: int
    ttft_seconds: float = 0.0
    latency_seconds: float = 0.0
    reach_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    replica: str = ""
    error: str = ""


@dataclass(frozen=True)
class Shape:
    """What a replica is: its GPU's cost model, its cache, its largest batch."""

    cost_model: str
    kv_capacity_tokens: int
    token_budget: int
    max_running: int


# --- text -------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def words() -> list[str]:
    """The word of every token id."""
    found = ("".join(letters) for letters in itertools.product(LETTERS, repeat=3))
    return list(itertools.islice(found, VOCABULARY))


def text_of(token_ids: Sequence[int]) -> str:
    """A prompt as text that `write_tokenizer`'s tokenizer turns into exactly these ids."""
    named = words()
    return " ".join(named[token] for token in token_ids)


def write_tokenizer(directory: Path) -> Path:
    """A tokenizer of these words, in a model directory as engines have it; returns the directory."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words())}, unk_token=words()[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


# --- replicas ---------------------------------------------------------------------------------------------------------


class Replica:
    """A deployment's replica: an engine that sleeps. All of it runs on the replica's event loop."""

    def __init__(self, shape: Shape, tokenizer_directory: str) -> None:
        from tokenizers import Tokenizer

        self._shape = shape
        self._tokenizer = Tokenizer.from_file(str(Path(tokenizer_directory) / "tokenizer.json"))
        config = LocalConfig(
            shape.kv_capacity_tokens,
            token_budget=shape.token_budget,
            max_running=shape.max_running,
            max_waiting=WAITING_MAX,
        )
        self._engine = SimulatedEngine(CostModel.preset(shape.cost_model), config, vocab_size=VOCABULARY)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._numbers = itertools.count()
        self._outputs: dict[str, asyncio.Queue[OutputChunk]] = {}
        self._work = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    def record_replica_metadata(self) -> dict[str, Any]:
        """What Preble's router reads of a replica; Ray's own do not look."""
        return {"kv_capacity_tokens": self._shape.kv_capacity_tokens, "block_size": 1}

    async def completions(self, request: CompletionRequest) -> AsyncIterator[dict[str, Any]]:
        """Two pieces: one with the first token, one at the end."""
        arrived = time.time()
        name = f"{self._name}-{next(self._numbers)}"
        token_ids = self._tokenizer.encode(request.prompt, add_special_tokens=False).ids
        outputs = self._outputs[name] = asyncio.Queue()
        sampling = SamplingParams(max_new_tokens=request.max_tokens, ignore_eos=True)
        try:
            self._submit(GenerationRequest(name, np.array(token_ids, np.int32), sampling))
            chunk = await outputs.get()
            cached = chunk.cached_tokens
            yield {"arrived": arrived, "cached": cached, "prompt": len(token_ids), "replica": self._name}
            while chunk.finish_reason is None:
                chunk = await outputs.get()
            yield {"output": chunk.index + len(chunk.token_ids)}
        finally:
            del self._outputs[name]

    def _submit(self, request: GenerationRequest) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._run())
        self._engine.submit(request)
        self._work.set()

    async def _run(self) -> None:
        """One iteration after the other. The next one begins when the last one should have ended, so that what Python
        takes is no part of an iteration as long as it takes less than the GPU would."""
        begins = time.monotonic()
        while True:
            if not self._engine.has_work():
                self._work.clear()
                await self._work.wait()
                begins = time.monotonic()
            begins += self._engine.begin_step()
            await asyncio.sleep(max(0.0, begins - time.monotonic()))
            for chunk in self._engine.end_step():
                if chunk.index == 0 or chunk.finish_reason is not None:
                    self._outputs[chunk.request_id].put_nowait(chunk)


# --- clients ----------------------------------------------------------------------------------------------------------


class Client:
    """A process that holds a handle of the deployment, and with it a router of its own."""

    def __init__(self, app: str) -> None:
        self._handle = serve.get_deployment_handle("Replica", app).options(stream=True, method_name="completions")

    async def warm_up(self, requests: int) -> None:
        """Make the router and its connections, with prompts of two words that no other shares."""
        prompts = [text_of([number, number]) for number in range(requests)]
        sent = [Sent(0, CompletionRequest(prompt, 1), 0.0) for prompt in prompts]
        for answer in await self._all(sent, time.time()):
            if answer.error:
                raise RuntimeError(f"a replica does not answer: {answer.error}")

    async def play(self, load: Sequence[Sent], start: float) -> tuple[list[Answer], dict[str, Any]]:
        """Send each request at its time, whatever has come of earlier ones; `start` is in `time.time()` seconds. With
        the answers comes what the router took."""
        TIMES.clear()
        cpu = time.process_time()
        answers = await self._all(load, start)
        return answers, {"cpu_seconds": time.process_time() - cpu, **TIMES.told()}

    async def _all(self, load: Sequence[Sent], start: float) -> list[Answer]:
        return list(await asyncio.gather(*(self._one(sent, start + sent.arrival_seconds) for sent in load)))

    async def _one(self, sent: Sent, arrival: float) -> Answer:
        """Wait for the request's arrival, send it and read its answer. A failure is an outcome too."""
        await asyncio.sleep(max(0.0, arrival - time.time()))
        try:
            return await asyncio.wait_for(self._asked(sent, arrival), REQUEST_SECONDS)
        except Exception as error:  # noqa: BLE001  whatever a router does wrong is counted against it
            return Answer(sent.number, error=type(error).__name__)

    async def _asked(self, sent: Sent, arrival: float) -> Answer:
        pieces = self._handle.remote(sent.request)
        first = await anext(pieces)
        first_token = time.time()
        last = [piece async for piece in pieces][-1]
        return Answer(
            number=sent.number,
            ttft_seconds=first_token - arrival,
            latency_seconds=time.time() - arrival,
            reach_seconds=first["arrived"] - arrival,
            prompt_tokens=first["prompt"],
            cached_tokens=first["cached"],
            replica=first["replica"],
            error="" if last["output"] == sent.request.max_tokens else "incomplete",
        )
