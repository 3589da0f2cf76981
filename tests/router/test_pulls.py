"""Pulls that the router sends requests with, before scripted workers: who is asked, what is learned, and that nothing
of them outlasts their request. With real workers they are `tests/worker/test_torch_workers`'s."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from preble import CostModel, Policy
from preble.errors import QueueFull
from preble.router import Router
from preble.transport import wire
from preble.transport.messages import PullFrom
from tests.router.test_router import PROMPT, SHORT, good
from tests.support.transport import (
    FAST,
    ScriptedWorker,
    assert_bookings_are_even,
    asynchronous,
    collect,
    expected_tokens,
    until,
)

DEAR_PREFILL = CostModel([(0, 0.1), (1000, 100.0)])
ABLE = {"kv_endpoint": "tcp://0.0.0.0:4321", "kv_layout": "x", "kv_token_bytes": 8}


class OneByName(Policy):
    """The worker that the test names."""

    name = reason = "one_by_name"

    def __init__(self) -> None:
        self.chosen = "w0"

    def score(self, request: Any, workers: Any) -> list[float]:
        return [float(worker_id != self.chosen) for worker_id in workers.ids]


class Scripted:
    """A router before two scripted workers, and what they were sent. `after_pull`: sent in place of the usual report
    when a request with a pull comes."""

    def __init__(self) -> None:
        self.policy = OneByName()
        self.router: Router
        self.workers: list[ScriptedWorker] = []
        self.sent: list[wire.GenerationRequest] = []
        self.after_pull: list[wire.PullEnded] | None = None

    async def script(self, worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        """Report the pull, and answer."""
        self.sent.append(submit)
        pull = submit.pull
        if pull is not None:
            usual = [wire.PullEnded(submit.request_id, "done", pull.tokens, pull.tokens, 8 * pull.tokens, 500, 20, 30)]
            for report in usual if self.after_pull is None else self.after_pull:
                await worker.send(report)
        await good(worker, submit)

    async def ask(self, worker: str, prompt: list[int] = PROMPT) -> PullFrom | None:
        """Send a prompt to a worker; returns with which pull it was sent."""
        self.policy.chosen = worker
        tokens, chunks = await collect(self.router.generate(prompt, SHORT))
        assert tokens == expected_tokens(prompt, SHORT.max_new_tokens) and chunks[0].worker == worker
        return self.sent[-1].pull

    def pulls(self) -> tuple[int, int, int]:
        """How many were asked for, have ended, and are under way."""
        stats = self.router.scheduler.stats()["pulls"]
        return stats["asked"], stats["ended"], len(self.router.fleet.pulls)


@contextlib.asynccontextmanager
async def scripted(*facts: dict[str, Any]) -> AsyncIterator[Scripted]:
    """Workers w0 and w1, each with what its handshake reports; the bookings are even at the end."""
    found = Scripted()
    said = facts or (ABLE, ABLE)
    found.workers = [ScriptedWorker(found.script, worker_id=f"w{i}", **one) for i, one in enumerate(said)]
    ends = [worker.endpoint for worker in found.workers]
    async with Router(ends, config=FAST, policy=found.policy, cost_model=DEAR_PREFILL) as found.router:
        yield found
        assert_bookings_are_even(found.router)
        assert len(found.router.fleet.pulls) == 0
    for worker in found.workers:
        await worker.close()


@asynchronous
async def test_a_worker_that_lacks_what_another_has_is_sent_where_to_get_it() -> None:
    async with scripted() as story:
        assert await story.ask("w0") is None
        pull = await story.ask("w1")
        assert pull == PullFrom("tcp://127.0.0.1:4321", 1000, len(PROMPT) - 1, pull.wait_us if pull else 0)
        assert pull.wait_us > 1_000_000, "as long as computing would take"
        assert story.pulls() == (1, 1, 0)
        stats = story.router.scheduler.stats()
        assert stats["pulls"]["moved_tokens"] == stats["pulls"]["wanted_tokens"] == len(PROMPT) - 1
        assert await story.ask("w1") is None and await story.ask("w0") is None, "both have it"


@asynchronous
async def test_a_fleet_of_which_only_some_can_computes_elsewhere() -> None:
    for mixed in ((ABLE, {}), ({}, ABLE), (ABLE, {**ABLE, "kv_layout": "y"}), (ABLE, {**ABLE, "kv_endpoint": ""})):
        async with scripted(*mixed) as story:
            assert await story.ask("w0") is None
            assert await story.ask("w1") is None


@asynchronous
async def test_reports_that_are_late_doubled_or_nobody_s_change_nothing() -> None:
    async with scripted() as story:
        report = wire.PullEnded("nobody", "done", 5, 5, 40, 1, 1, 1)
        story.after_pull = [report, wire.PullEnded("2", "lost", 0, 0, 0, 1, 1, 1)] * 2
        await story.ask("w0")
        assert await story.ask("w1") is not None
        assert story.sent[-1].request_id == "2"
        await story.workers[1].send(wire.PullEnded("2", "done", 79, 79, 632, 1, 1, 1))
        await story.workers[0].send(report)
        await story.ask("w0", [*PROMPT[:3], 9])
        assert story.pulls() == (1, 1, 0)


@asynchronous
async def test_a_request_that_waited_for_another_s_pull_teaches_nothing_of_the_link() -> None:
    async with scripted() as story:
        await story.ask("w0")
        second = asyncio.Event()
        usual = story.script

        async def together(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
            if submit.pull is not None:
                await second.wait()
                await usual(worker, submit)
                return
            await worker.send(wire.PullEnded(submit.request_id, "joined", 60, 0, 0, 9_000_000, 0, 0))
            await good(worker, submit)
            second.set()

        story.workers[1].script = together
        story.policy.chosen = "w1"
        answers = await asyncio.gather(
            *(collect(story.router.generate(prompt, SHORT)) for prompt in (PROMPT, [*PROMPT[:60], 9]))
        )
        assert answers[1][0] == expected_tokens([*PROMPT[:60], 9], SHORT.max_new_tokens)
        assert story.pulls() == (1, 1, 0)
        stats = story.router.scheduler.stats()["pulls"]
        assert stats["wanted_tokens"] == stats["moved_tokens"] == len(PROMPT) - 1


@asynchronous
async def test_a_pull_that_its_worker_has_not_begun_teaches_nothing_of_the_link() -> None:
    """Regression: a worker with as many pulls as may be was taken for a source that has nothing."""
    async with scripted() as story:
        for first, took_us, wanted in ((1, 0, 0), (2, 7, len(PROMPT))):
            prompt = [first, *PROMPT]
            assert await story.ask("w0", prompt) is None
            story.after_pull = [wire.PullEnded(str(len(story.sent) + 1), "refused", 0, 0, 0, took_us, 0, 0)]
            assert await story.ask("w1", prompt) is not None
            assert story.router.scheduler.stats()["pulls"]["wanted_tokens"] == wanted


@asynchronous
async def test_a_request_that_cannot_be_sent_leaves_no_pull_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted() as story:
        await story.ask("w0")
        link = story.router.fleet.worker("w1").link

        def full(message: wire.Message) -> None:
            raise QueueFull("it does not read")

        with monkeypatch.context() as patch:
            patch.setattr(link, "send", full)
            story.policy.chosen = "w1"
            _, chunks = await collect(story.router.generate(PROMPT, SHORT))
            assert chunks[0].worker == "w0"
        assert story.pulls() == (1, 0, 0)
        assert await story.ask("w1") is not None


@asynchronous
async def test_a_pull_whose_worker_is_lost_is_over_with_its_attempt() -> None:
    async with scripted() as story:
        await story.ask("w0")
        story.policy.chosen = "w1"
        story.after_pull = []
        mute = story.workers[1]
        started = story.router.generate(PROMPT, SHORT)

        async def takes_and_dies(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
            story.sent.append(submit)
            await worker.send(wire.Closed("shutdown", "gone"))

        mute.script = takes_and_dies
        tokens, chunks = await collect(started)
        assert tokens == expected_tokens(PROMPT, SHORT.max_new_tokens) and chunks[-1].worker == "w0"
        assert [one.pull is not None for one in story.sent[-2:]] == [True, False]
        assert story.pulls()[0] == 1 and story.pulls()[2] == 0


@asynchronous
async def test_a_source_that_is_away_is_not_named() -> None:
    async with scripted() as story:
        await story.ask("w0")
        await story.workers[0].send(wire.Draining())
        await until(lambda: "w0" in story.router.fleet.unusable, "it drains")
        assert await story.ask("w1") is None


@asynchronous
async def test_another_policy_knows_who_can() -> None:
    async with scripted() as story:
        await story.ask("w0")
        story.policy = OneByName()
        story.router.change_policy(story.policy)
        assert story.router.scheduler.stats()["pulls"]["workers"] == 2
        assert await story.ask("w1") is not None
