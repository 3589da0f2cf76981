"""`preble worker --engine torch` as real processes: the answers of the model itself, also across a `kill -9`, and with
KV that one has taken over from the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from preble import CostModel, LocalConfig, Policy, SamplingParams
from preble.engines.base import GenerationRequest
from preble.engines.torch import TorchEngine
from preble.errors import PrebleError
from preble.router import Router
from preble.transport import wire
from preble.transport.messages import PullFrom
from tests.support.kv import PART_TOKENS, KvRelay, small_parts_command
from tests.support.transport import (
    FAST,
    HANG_SECONDS,
    FirstByName,
    Peer,
    WorkerProcess,
    assert_bookings_are_even,
    asynchronous,
    collect,
    until,
)

pytest_plugins = ["tests.support.torch_fixtures"]

SAMPLING = SamplingParams(max_new_tokens=480, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=12, ignore_eos=True)
TOKEN_BYTES = 1536
# Computing is never worth while beside a transfer, however long that takes here.
DEAR_PREFILL = CostModel([(0, 0.1), (1000, 100.0)])


def prompt(number: int) -> list[int]:
    """Prompts that share their first 60 tokens."""
    return [*range(20, 80), 5 + number, 11]


def torch_options(model: Path) -> list[str]:
    """Of a worker of a tiny model."""
    options = ["--model", str(model), "--dtype", "float32", "--device", "cpu", "--threads", "1"]
    options += ["--kv-capacity-tokens", "4000", "--token-budget", "64", "--max-model-tokens", "600"]
    return [*options, "--engine", "torch"]


@pytest.fixture(scope="module")
def workers(tiny_model_dir: Path) -> Iterator[list[WorkerProcess]]:
    """Two worker processes of one model."""
    command = small_parts_command(TOKEN_BYTES)
    started = [WorkerProcess(*torch_options(tiny_model_dir), "--id", name, command=command) for name in ("a", "b")]
    yield started
    for one in started:
        one.stop()


def answered(engine: TorchEngine, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
    """What an undisturbed engine says to each prompt."""
    for number, token_ids in enumerate(prompts):
        engine.submit(GenerationRequest(str(number), np.array(token_ids, np.int32), sampling))
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work():
        for chunk in engine.step():
            tokens[int(chunk.request_id)] += chunk.token_ids
    return tokens


@pytest.fixture(scope="module")
def undisturbed(tiny_model_dir: Path) -> Iterator[TorchEngine]:
    """An engine in this process that nobody disturbs."""
    engine = TorchEngine(tiny_model_dir, local=LocalConfig(4000), dtype="float32", device="cpu")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def answers(undisturbed: TorchEngine) -> list[list[int]]:
    """What the model says to each prompt."""
    return answered(undisturbed, [prompt(number) for number in range(4)], SAMPLING)


def long_prompt(seed: int) -> list[int]:
    """A prompt of 8 parts and some tokens, which shares nothing with others."""
    return np.random.default_rng(seed).integers(3, 2048, 8 * PART_TOKENS + 9).tolist()


class OneByName(Policy):
    """The worker that the test names."""

    name = reason = "one_by_name"
    chosen = "a"

    def score(self, request: Any, workers: Any) -> list[float]:
        return [float(worker_id != OneByName.chosen) for worker_id in workers.ids]


class Asker:
    """A raw router of one worker, which asks one thing at a time."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.peer = Peer(worker.endpoint)
        self.welcome = self.peer.hello(f"asks-{worker.facts['id']}")
        self._asked = 0

    def send(self, token_ids: list[int], pull: PullFrom | None = None, **fields: Any) -> str:
        """Ask, without waiting; returns the request's id."""
        self._asked += 1
        fields = {"sampling": SHORT, **fields}
        request = wire.GenerationRequest(f"r{self._asked}", np.array(token_ids, np.int32), pull=pull, **fields)
        self.peer.send(request)
        return request.request_id

    def read(self) -> tuple[list[int], int | None, wire.PullEnded | None, str]:
        """The answer: tokens, how many of the prompt were cached, what came of the pull, how it ended."""
        tokens: list[int] = []
        cached, ended = None, None
        while True:
            message = self.peer.receive()
            assert message is not None, "no answer came"
            if isinstance(message, wire.PullEnded):
                ended = message
            for chunk in message.chunks if isinstance(message, wire.OutputChunks) else [message]:
                if isinstance(chunk, wire.OutputChunk):
                    cached = chunk.cached_tokens if cached is None else cached
                    tokens += chunk.token_ids
                    if chunk.finish_reason is not None:
                        return tokens, cached, ended, chunk.finish_reason

    def ask(self, token_ids: list[int], pull: PullFrom | None = None, **fields: Any) -> Any:
        """Ask, and read the answer."""
        self.send(token_ids, pull, **fields)
        return self.read()

    def source(self, token_ids: list[int], **fields: Any) -> PullFrom:
        """How another worker pulls a prompt from this one."""
        fields = {"endpoint": self.welcome.kv_endpoint, "epoch": self.peer.epoch, **fields}
        return PullFrom(**{"tokens": len(token_ids) - 1, "wait_us": int(HANG_SECONDS * 1e6), **fields})

    def close(self) -> None:
        """Leave."""
        self.peer.send(wire.Bye())
        self.peer.close()


@pytest.fixture
def askers(workers: list[WorkerProcess]) -> Iterator[list[Asker]]:
    """One for each worker."""
    found = [Asker(one) for one in workers]
    yield found
    for one in found:
        one.close()


# --- KV that moves ----------------------------------------------------------------------------------------------------


@asynchronous
async def test_a_request_that_goes_elsewhere_takes_its_prefix_along(
    workers: list[WorkerProcess], undisturbed: TorchEngine
) -> None:
    token_ids = long_prompt(1)
    expected = answered(undisturbed, [token_ids], SHORT)[0]
    ends = [one.endpoint for one in workers]
    async with Router(ends, config=FAST, policy=OneByName(), cost_model=DEAR_PREFILL) as router:
        OneByName.chosen = "a"
        assert (await collect(router.generate(token_ids, SHORT)))[0] == expected
        assert router.scheduler.explain(token_ids).pull is None, "it is there"
        OneByName.chosen = "b"
        pull = router.scheduler.explain(token_ids).pull
        assert pull is not None and (pull.source, pull.moved_tokens) == ("a", len(token_ids) - 1)
        assert pull.saved_seconds > 0.0
        tokens, chunks = await collect(router.generate(token_ids, SHORT))
        assert tokens == expected and chunks[0].worker == "b"
        assert chunks[0].cached_tokens == len(token_ids) - 1
        stats = router.scheduler.stats()
        assert stats["pulls"]["asked"] == stats["pulls"]["ended"] == 1
        assert stats["pulls"]["moved_tokens"] == len(token_ids) - 1
        OneByName.chosen = "a"
        await collect(router.generate([*token_ids[:300], 7], SHORT))
        assert router.scheduler.stats()["pulls"]["asked"] == 1, "what it has it does not pull"
        assert_bookings_are_even(router)


def test_whatever_becomes_of_a_pull_the_answer_is_the_model_s(askers: list[Asker], undisturbed: TorchEngine) -> None:
    holder, puller = askers
    half = len(long_prompt(0)) // 2

    def judge(faulty: Any) -> Any:
        return lambda n, parts: faulty(parts) if n == 3 else [parts]

    cases: list[tuple[str, Any, dict[str, Any], int, str, int]] = [
        # name, what the network does, fields of the pull, tokens that the source caches, end, parts that came
        ("whole", None, {}, -1, "done", 9),
        ("lost", judge(lambda parts: []), {}, -1, "lost", 3),
        ("doubled", judge(lambda parts: [parts, parts]), {}, -1, "done", 9),
        ("cut", judge(lambda parts: [[parts[0], parts[1][:-7]]]), {}, -1, "lost", 3),
        ("silent", lambda n, parts: [], {"wait_us": 200_000}, -1, "late", 0),
        ("older", None, {"epoch": holder.peer.epoch - 1}, -1, "refused", 0),
        ("partial", None, {}, half, "partial", 5),
        ("nobody there", None, {"endpoint": "tcp://127.0.0.1:1"}, 0, "lost", 0),
    ]
    prompts = [long_prompt(10 + number) for number in range(len(cases))]
    expected = answered(undisturbed, prompts, SHORT)
    for (name, faulty, fields, cached, end, parts), token_ids, answer in zip(cases, prompts, expected, strict=True):
        if cached:
            holder.ask(token_ids if cached < 0 else token_ids[:cached])
        with KvRelay(holder.welcome.kv_endpoint, *([] if faulty is None else [faulty])) as relay:
            fields = {"endpoint": relay.endpoint, **fields}
            tokens, hit, ended, _ = puller.ask(token_ids, holder.source(token_ids, **fields))
        assert tokens == answer, name
        assert ended is not None and ended.end == end, (name, ended)
        assert min(PART_TOKENS * parts, len(token_ids) - 1) - PART_TOKENS < ended.moved_tokens <= PART_TOKENS * parts
        assert hit is not None and hit >= ended.moved_tokens == ended.cached_tokens, name
        assert ended.moved_bytes == ended.moved_tokens * TOKEN_BYTES


def test_what_one_has_prefilled_another_decodes(askers: list[Asker], undisturbed: TorchEngine) -> None:
    """A prompt prefilled at one worker goes on at another from its first token, with its KV handed over."""
    prefills, decodes = askers
    token_ids = long_prompt(50)
    expected = answered(undisturbed, [token_ids], SHORT)[0]
    first, *_ = prefills.ask(token_ids, sampling=SamplingParams(max_new_tokens=1, ignore_eos=True))
    pull = prefills.source([*token_ids, *first])
    rest, hit, ended, _ = decodes.ask([*token_ids, *first], pull, output_offset=1)
    assert [*first, *rest] == expected
    assert (ended.end, hit) == ("done", len(token_ids)), "only the first token itself is computed"


def test_a_request_that_is_given_up_in_its_pull_ends_and_leaves_nothing(askers: list[Asker]) -> None:
    holder, puller = askers
    token_ids = long_prompt(30)
    holder.ask(token_ids)
    asked = threading.Event()

    def judge(number: int, parts: list[bytes]) -> list[list[bytes]]:
        asked.set()
        return []

    with KvRelay(holder.welcome.kv_endpoint, judge) as relay:
        request_id = puller.send(token_ids, holder.source(token_ids, endpoint=relay.endpoint))
        assert asked.wait(HANG_SECONDS)
        puller.peer.send(wire.Abort(request_id))
        tokens, _, ended, reason = puller.read()
    assert (tokens, reason) == ([], "abort") and ended is not None and ended.end == "cancelled"
    assert puller.ask(token_ids, holder.source(token_ids))[2].end == "done"


@asynchronous
async def test_a_pair_answers_as_the_model_and_a_kill_of_the_one_that_decodes_changes_no_token(
    tiny_model_dir: Path, workers: list[WorkerProcess], undisturbed: TorchEngine
) -> None:
    """KV that was really handed over; after the kill a third one goes on that does both."""
    prompts = [long_prompt(60 + number) for number in range(4)]
    more, shorter = SamplingParams(max_new_tokens=300, ignore_eos=True), [prompt(number) for number in range(4)]
    expected, longer = answered(undisturbed, prompts, SHORT), answered(undisturbed, shorter, more)
    pair = [WorkerProcess(*torch_options(tiny_model_dir), "--id", one, "--role", one) for one in ("prefill", "decode")]
    try:
        async with Router([one.endpoint for one in pair], config=FAST, cost_model=DEAR_PREFILL) as router:
            done = await asyncio.gather(*(collect(router.generate(one, SHORT)) for one in prompts))
            assert [tokens for tokens, _ in done] == expected
            assert {chunks[0].worker for _, chunks in done} == {"prefill"}
            assert {chunks[-1].worker for _, chunks in done} == {"decode"}
            pulls = router.scheduler.stats()["pulls"]
            assert (pulls["asked"], pulls["ended"]) == (4, 4)
            assert pulls["moved_tokens"] == sum(map(len, prompts)), "no token of them was computed twice"
            assert router.stats()["handed_over"] == 4
            running = [asyncio.ensure_future(collect(router.generate(one, more))) for one in shorter]
            before = router.stats()["output_tokens"]
            await until(lambda: router.stats()["output_tokens"] > before + 20, "they are under way")
            await router.add_worker(workers[1].endpoint)
            pair[1].kill()
            assert [tokens for tokens, _ in await asyncio.gather(*running)] == longer
            assert router.stats()["resumed"] == 4, "who decoded them was killed"
            assert_bookings_are_even(router)
    finally:
        for one in pair:
            one.stop()


# --- a kill -----------------------------------------------------------------------------------------------------------


@asynchronous
async def test_the_model_answers_through_the_wire_and_a_kill_changes_no_token(
    workers: list[WorkerProcess], answers: list[list[int]], askers: list[Asker], undisturbed: TorchEngine
) -> None:
    """Also the answer of a request that was just taking its prefix over from who is killed."""
    holder, puller = askers
    token_ids = long_prompt(40)
    holder.ask(token_ids)
    in_mid_transfer = threading.Event()

    def judge(number: int, parts: list[bytes]) -> list[list[bytes]]:
        if number == 3:
            in_mid_transfer.set()
        return [parts] if number < 3 else []

    relay = KvRelay(holder.welcome.kv_endpoint, judge)
    puller.send(token_ids, holder.source(token_ids, endpoint=relay.endpoint))
    assert await asyncio.to_thread(in_mid_transfer.wait, HANG_SECONDS)
    async with Router([one.endpoint for one in workers], config=FAST, policy=FirstByName()) as router:
        running = [asyncio.ensure_future(collect(router.generate(prompt(i), SAMPLING))) for i in range(4)]
        await until(lambda: router.stats()["output_tokens"] > 60, "all are under way")
        workers[0].kill()
        relay.break_off()
        tokens, _, ended, _ = await asyncio.to_thread(puller.read)
        assert tokens == answered(undisturbed, [token_ids], SHORT)[0]
        assert ended is not None and (ended.end, ended.moved_tokens) == ("lost", 3 * PART_TOKENS)
        done = await asyncio.gather(*running)
        assert [tokens for tokens, _ in done] == answers
        assert router.stats()["resumed"] == 4 and {chunks[-1].worker for _, chunks in done} == {"b"}
        _, chunks = await collect(router.generate(prompt(9), SAMPLING))
        assert chunks[0].cached_tokens is not None and chunks[0].cached_tokens >= 60, "prefixes are reused"
        assert_bookings_are_even(router)


@asynchronous
async def test_a_worker_refuses_a_request_beyond_its_max_model_tokens(workers: list[WorkerProcess]) -> None:
    async with Router([workers[1].endpoint], config=FAST) as router:
        with pytest.raises(PrebleError, match="600"):
            await collect(router.generate(list(range(5, 605)), SAMPLING))
        assert_bookings_are_even(router)
