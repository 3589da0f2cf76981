"""What callers pass to a router: text that is tokenised in a thread while streams go on, the scheduler's parts, request
ids by whatever names them. The tokenizer waits for the test, so that the order of events is the test's, not the
machine's."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from preble import CostModel, GlobalScheduler, ManualClock, SchedulerConfig
from preble.errors import InvalidConfig, InvalidInput, InvalidTokens, NoWorkers, Overloaded, QueueFull, TransportError
from preble.router import Router
from preble.transport import wire
from tests.router.test_router import PROMPT, SHORT, fleet, good, mute
from tests.support.transport import HANG_SECONDS, asynchronous, collect, expected_tokens, fast, until


class PatientTokenizer:
    """Notes who calls it, and goes on when the test says so."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, text: str) -> Any:
        self.threads.append(threading.current_thread())
        self.begun.set()
        assert self.may_end.wait(HANG_SECONDS), "the test forgot the tokenizer"
        if text == "fails":
            raise ZeroDivisionError(text)
        return [] if text == "nothing" else PROMPT


@pytest.fixture
def patient() -> Any:
    tokenizer = PatientTokenizer()
    yield tokenizer
    tokenizer.may_end.set()


async def text_answer(router: Router, text: str = "a long text", **options: Any) -> list[int]:
    return (await collect(router.generate(text, SHORT, **options)))[0]


@asynchronous
async def tokenise_while_another_streams(tokenizer: PatientTokenizer) -> None:
    async with fleet(good, router_options={"tokenizer": tokenizer}) as (router, (worker,)):
        waits = asyncio.create_task(text_answer(router))
        await until(tokenizer.begun.is_set, "the text was taken up")
        tokens, _ = await collect(router.generate(PROMPT, SHORT))  # from its first token to its last meanwhile
        assert tokens == expected_tokens(PROMPT, 12)
        assert not waits.done() and len(worker.got(wire.GenerationRequest)) == 1
        tokenizer.may_end.set()
        assert await waits == expected_tokens(PROMPT, 12)
        assert tokenizer.threads[0] is not threading.current_thread()


def test_a_stream_runs_to_its_end_while_a_text_is_tokenised(patient: PatientTokenizer) -> None:
    tokenise_while_another_streams(patient)


@asynchronous
async def take_texts_one_by_one(tokenizer: PatientTokenizer) -> None:
    async with fleet(good, router_options={"tokenizer": tokenizer}) as (router, _):
        waits = [asyncio.create_task(text_answer(router)) for _ in range(3)]
        await until(tokenizer.begun.is_set, "a text was taken up")
        assert len(tokenizer.threads) == 1, "one at a time: a tokenizer need not be thread-safe"
        tokenizer.may_end.set()
        assert await asyncio.gather(*waits) == [expected_tokens(PROMPT, 12)] * 3
        assert len(tokenizer.threads) == 3 and len(set(tokenizer.threads)) == 1


def test_texts_are_tokenised_one_after_the_other(patient: PatientTokenizer) -> None:
    take_texts_one_by_one(patient)


@asynchronous
async def fill_the_texts(tokenizer: PatientTokenizer) -> None:
    options = {"tokenizer": tokenizer, "config": fast(max_live_requests=1)}
    async with fleet(good, router_options=options) as (router, _):
        waits = asyncio.create_task(text_answer(router))
        await until(tokenizer.begun.is_set, "the text was taken up")
        with pytest.raises(QueueFull, match="1 requests are live"):
            await text_answer(router)
        with pytest.raises(QueueFull, match="1 texts wait"):
            await router.place("another")
        with pytest.raises(QueueFull, match="1 texts wait"):
            async with router.route("another"):
                pass
        tokenizer.may_end.set()
        await waits
        assert await text_answer(router) == expected_tokens(PROMPT, 12), "there is room again"


def test_beyond_the_bound_no_text_waits(patient: PatientTokenizer) -> None:
    fill_the_texts(patient)


@asynchronous
async def end_while_tokenising(tokenizer: PatientTokenizer) -> None:
    async with fleet(good, router_options={"tokenizer": tokenizer}) as (router, (worker,)):
        gone = asyncio.create_task(text_answer(router))
        await until(tokenizer.begun.is_set, "the text was taken up")
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert router.stats()["live_requests"] == 0 and router.stats()["cancelled"] == 1
        late = asyncio.create_task(text_answer(router, first_token_seconds=0.01))
        await until(lambda: router.stats()["shed"], "its time was over")
        closed = asyncio.create_task(text_answer(router))
        await until(lambda: router.stats()["live_requests"] == 2, "another text waits")
        await router.close()
        tokenizer.may_end.set()
        with pytest.raises(Overloaded, match="no token after"):
            await late
        with pytest.raises(TransportError, match="closed"):
            await closed
        assert not worker.got(wire.GenerationRequest)


def test_who_goes_while_its_text_is_tokenised_is_never_placed(patient: PatientTokenizer) -> None:
    end_while_tokenising(patient)


@asynchronous
async def say_what_the_tokenizer_raises(tokenizer: PatientTokenizer) -> None:
    tokenizer.may_end.set()
    async with fleet(good, router_options={"tokenizer": tokenizer}) as (router, _):
        with pytest.raises(ZeroDivisionError, match="fails"):
            await text_answer(router, "fails")
        with pytest.raises(InvalidTokens, match="empty"):
            await text_answer(router, "nothing")
        with pytest.raises(NoWorkers):  # none here takes requests over HTTP
            await router.place("a text", max_new_tokens=3)
        async with router.route("a text") as decision:
            assert decision.prompt_tokens == len(PROMPT)


def test_what_a_tokenizer_raises_reaches_who_reads_the_stream(patient: PatientTokenizer) -> None:
    say_what_the_tokenizer_raises(patient)


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="tokenizer must be callable"):
        Router([], tokenizer=3)  # type: ignore[arg-type]


# --- the scheduler ----------------------------------------------------------------------------------------------------


def test_a_router_s_own_scheduler_has_its_parts() -> None:
    cost, config = CostModel.preset("llama-3-70b/h100-tp4"), SchedulerConfig(lease_seconds=7.0)
    router = Router([], policy="round_robin", cost_model=cost, scheduler_config=config, clock=ManualClock())
    assert router.scheduler.policy == "round_robin" and router.scheduler.config.lease_seconds == 7.0
    router.scheduler.add_worker("a")
    assert router.scheduler.prefill_seconds("a", 1000, 0) == cost.prefill_time(1000)


@pytest.mark.parametrize(
    "part", [{"policy": "random"}, {"cost_model": "mistral-7b/a6000"}, {"scheduler_config": SchedulerConfig()}]
)
def test_parts_beside_a_scheduler_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="are the scheduler's"):
        Router([], scheduler=GlobalScheduler(["a"]), **part)


def test_what_is_no_scheduler_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="must be a GlobalScheduler"):
        Router([], scheduler="e2")  # type: ignore[arg-type]


# --- request ids ------------------------------------------------------------------------------------------------------


@asynchronous
async def test_a_decision_stands_for_its_request_s_id() -> None:
    async with fleet(good) as (router, _):
        _, chunks = await collect(router.generate(PROMPT, SHORT))
        _, again = await collect(router.generate(PROMPT, SHORT, request_id=chunks[0].decision))
        assert again[0].request_id == chunks[0].request_id


@asynchronous
async def test_what_can_be_no_id_is_refused_at_once() -> None:
    async with fleet(mute) as (router, _):
        with pytest.raises(InvalidInput, match="hashable"):
            router.generate(PROMPT, SHORT, request_id=[])
        with pytest.raises(InvalidInput, match="hashable"):
            await router.place(PROMPT, request_id={})
        assert router.stats()["requests"] == 0
