"""Requests that ask for what not every engine has: they go to a worker that has it, are refused by name where none has,
and go on elsewhere only where that can be right. Log probabilities come once for each token, whoever sent them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from preble import SamplingParams
from preble.errors import EngineError, InvalidInput, PrebleError, WorkerLost
from preble.router import Router
from preble.transport import wire
from preble.types import Grammar, TokenLogprob
from tests.support.transport import (
    FAST,
    FirstByName,
    ScriptedWorker,
    assert_bookings_are_even,
    asynchronous,
    expected_tokens,
)

PROMPT = list(range(100, 150))
COUNT = 6
BOTH = ("top_k", "logprobs", "regex", "frequency_penalty")


def logprob_at(position: int) -> TokenLogprob:
    """What a worker says of the token there."""
    return TokenLogprob(-float(position), ((position, -float(position)),))


async def good(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
    """All tokens, one by one, with their log probabilities."""
    start = submit.output_offset
    tokens = expected_tokens(submit.token_ids.tolist(), COUNT - start)
    for i, token in enumerate(tokens):
        reason = "length" if i == len(tokens) - 1 else None
        logprobs = (logprob_at(start + i),) if submit.sampling.logprobs is not None else ()
        await worker.send(wire.OutputChunk(submit.request_id, start + i, (token,), 0, reason, logprobs=logprobs))


async def dies_halfway(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
    """Half of them, and then it is lost to another's fault."""
    tokens = expected_tokens(submit.token_ids.tolist(), COUNT)[: COUNT // 2]
    logprobs = tuple(map(logprob_at, range(len(tokens)))) if submit.sampling.logprobs is not None else ()
    await worker.send(wire.OutputChunk(submit.request_id, 0, tuple(tokens), 0, logprobs=logprobs))
    await worker.send(wire.Rejected(submit.request_id, "engine_failed", "gone"))


async def dies_at_once(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
    """Nothing comes of it here."""
    await worker.send(wire.Rejected(submit.request_id, "engine_failed", "gone"))


@contextlib.asynccontextmanager
async def fleet(*scripts: tuple[Any, tuple[str, ...], tuple[str, ...]]) -> AsyncIterator[Any]:
    """(router, workers): each with a script, the fields its engine has, and those of them that it can go on with."""
    workers = [
        ScriptedWorker(script, worker_id=f"w{i}", sampling_fields=fields, resumable_fields=resumable)
        for i, (script, fields, resumable) in enumerate(scripts)
    ]
    router = Router([worker.endpoint for worker in workers], config=FAST, policy=FirstByName())
    try:
        await router.start()
        yield router, workers
        assert_bookings_are_even(router)
        router.check()
    finally:
        await router.close()
        for worker in workers:
            await worker.close()


async def ask(router: Router, **fields: Any) -> tuple[list[int], list[TokenLogprob], str]:
    """Tokens, log probabilities, and the worker of the last chunk."""
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    worker = ""
    async for chunk in router.generate(PROMPT, SamplingParams(COUNT, **fields)):
        tokens += chunk.token_ids
        logprobs += chunk.logprobs
        worker = chunk.worker
    return tokens, logprobs, worker


@asynchronous
async def test_a_request_goes_to_a_worker_whose_engine_has_what_it_asks_for() -> None:
    async with fleet((good, (), ()), (good, ("top_k",), ()), (good, BOTH, ())) as (router, _):
        assert (await ask(router))[2] == "w0"
        assert (await ask(router, top_k=-1))[2] == "w0", "it asks for nothing"
        assert (await ask(router, top_k=5))[2] == "w1"
        assert (await ask(router, top_k=5, grammar=Grammar("regex", "a")))[2] == "w2"


@asynchronous
async def test_what_no_engine_has_is_refused_by_name_and_nothing_is_sent() -> None:
    async with fleet((good, ("top_k",), ()), (good, ("logprobs",), ())) as (router, workers):
        for fields, name in (
            ({"min_p": 0.5, "top_k": 5}, "min_p"),
            ({"grammar": Grammar("ebnf", "x")}, "ebnf"),
            ({"top_k": 5, "logprobs": 1}, "top_k, logprobs"),  # each has one of them
        ):
            with pytest.raises(InvalidInput, match=f"^{name}: no connected worker's engine has it"):
                await ask(router, **fields)
        assert not any(worker.got(wire.GenerationRequest) for worker in workers)


@asynchronous
async def test_a_request_that_has_not_begun_goes_elsewhere_whatever_it_asks_for() -> None:
    async with fleet((dies_at_once, BOTH, ()), (good, BOTH, ())) as (router, _):
        tokens, _, worker = await ask(router, frequency_penalty=1.0)
        assert (tokens, worker) == (expected_tokens(PROMPT, COUNT), "w1")


@asynchronous
async def test_one_that_has_begun_goes_on_only_where_that_is_right() -> None:
    async with fleet((dies_halfway, BOTH, BOTH), (good, BOTH, ()), (good, BOTH, ("frequency_penalty",))) as (router, _):
        tokens, _, worker = await ask(router, frequency_penalty=1.0)
        assert (tokens, worker) == (expected_tokens(PROMPT, COUNT), "w2")
    async with fleet((dies_halfway, BOTH, ()), (good, BOTH, ())) as (router, (_, other)):
        with pytest.raises(WorkerLost, match="no worker can go on with a request that has frequency_penalty"):
            await ask(router, frequency_penalty=1.0)
        assert not other.got(wire.GenerationRequest)
        assert (await ask(router))[0] == expected_tokens(PROMPT, COUNT), "plain requests go on as ever"


@asynchronous
async def test_log_probabilities_come_once_for_each_token_over_a_loss() -> None:
    async with fleet((dies_halfway, BOTH, BOTH), (good, BOTH, BOTH)) as (router, _):
        tokens, logprobs, _ = await ask(router, logprobs=1)
        assert tokens == expected_tokens(PROMPT, COUNT)
        assert logprobs == [logprob_at(position) for position in range(COUNT)]
        assert (await ask(router))[1] == [], "who asks for none gets none"


@asynchronous
async def test_a_worker_that_leaves_log_probabilities_out_is_left() -> None:
    async def forgets(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        await worker.send(wire.OutputChunk(submit.request_id, 0, (5, 6), 0, logprobs=(logprob_at(0),)))

    async with fleet((forgets, BOTH, BOTH), (good, BOTH, BOTH)) as (router, _):
        tokens, logprobs, worker = await ask(router, logprobs=1)
        assert (tokens, worker) == (expected_tokens(PROMPT, COUNT), "w1") and len(logprobs) == COUNT
        assert router.stats()["token_gaps"] == 1


@pytest.mark.parametrize(("reason", "kind"), [("invalid", InvalidInput), ("error", EngineError)])
@asynchronous
async def test_an_engine_that_refuses_is_told_from_one_that_fails(reason: str, kind: type[PrebleError]) -> None:
    async def refuses(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        await worker.send(wire.OutputChunk(submit.request_id, 0, (), None, reason, "the engine says no"))

    async with fleet((refuses, BOTH, BOTH), (good, BOTH, BOTH)) as (router, (_, other)):
        with pytest.raises(kind, match="the engine says no"):
            await ask(router)
        await asyncio.sleep(0)
        assert not other.got(wire.GenerationRequest), "another would say the same"


@pytest.mark.parametrize("reason", ["invalid", "error", "abort"])
@asynchronous
async def test_an_answer_that_ends_in_vain_before_its_first_token_leaves_nothing_that_counts_as_cached(
    reason: str,
) -> None:
    """Regression: its prefill counted as done."""

    async def refuses(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        await worker.send(wire.OutputChunk(submit.request_id, 0, (), None, reason))

    async with fleet((refuses, BOTH, BOTH)) as (router, _):
        with contextlib.suppress(EngineError, InvalidInput):
            await ask(router)
        assert router.scheduler.match(PROMPT).best_tokens == 0
