"""Requests that two workers serve, before scripted workers: what each is sent, when the client has its first token, and
what becomes of it when either is lost. With real workers they are `tests/worker/test_torch_workers`'s."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from preble import CostModel, ManualClock, SamplingParams
from preble.errors import InvalidConfig, NoWorkers, WorkerLost
from preble.router import Router, pairs
from preble.router.placement import Placement
from preble.router.shared_bookings import SharedBookings
from preble.transport import wire
from preble.transport.messages import PullFrom
from preble.transport.server import ServerConfig
from preble.types import PairDecision, RequestPrefilled, Role
from preble.worker.process import WorkerConfig
from tests.router.test_placement import other_prompt, routed
from tests.router.test_router import PROMPT, SHORT, good, mute, rejecting, stops_halfway
from tests.support.relay import ScriptedServer
from tests.support.transport import (
    FAST,
    ScriptedWorker,
    assert_bookings_are_even,
    asynchronous,
    collect,
    expected_tokens,
    fast,
    until,
)

DEAR_PREFILL = CostModel([(0, 0.1), (1000, 100.0)])
ABLE = {"kv_layout": "x", "kv_token_bytes": 8}
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
Script = Callable[[ScriptedWorker, wire.GenerationRequest], Awaitable[None]]


class Fleet:
    """A router before scripted workers by name, each with its role and script, and what they were sent."""

    def __init__(self) -> None:
        self.router: Router
        self.workers: dict[str, ScriptedWorker] = {}
        self.sent: list[tuple[str, wire.GenerationRequest]] = []

    def scripted(self, name: str, script: Script) -> Script:
        async def noted(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
            self.sent.append((name, submit))
            if submit.pull is not None:
                n = submit.pull.tokens
                await worker.send(wire.PullEnded(submit.request_id, "done", n, n, 8 * n, 500, 20, 30))
            await script(worker, submit)

        return noted


@contextlib.asynccontextmanager
async def fleet(config: Any = FAST, **workers: tuple[str, Script]) -> AsyncIterator[Fleet]:
    """The bookings are even at the end."""
    found = Fleet()
    for number, (name, (role, script)) in enumerate(workers.items()):
        said = {**ABLE, "kv_endpoint": f"tcp://0.0.0.0:{4321 + number}", "role": role}
        found.workers[name] = ScriptedWorker(found.scripted(name, script), worker_id=name, **said)
    ends = [worker.endpoint for worker in found.workers.values()]
    async with Router(ends, config=config, cost_model=DEAR_PREFILL) as found.router:
        yield found
        assert_bookings_are_even(found.router)
        assert len(found.router.fleet.pulls) == 0
    for worker in found.workers.values():
        await worker.close()


@asynchronous
async def test_one_is_asked_for_one_token_and_the_other_for_the_rest_with_the_way_to_the_kv() -> None:
    async with fleet(p=("prefill", good), d=("decode", good)) as story:
        tokens, chunks = await collect(story.router.generate(PROMPT, SHORT))
        assert tokens == expected_tokens(PROMPT, SHORT.max_new_tokens)
        assert [chunk.worker for chunk in chunks][:1] == ["p"] and chunks[-1].worker == "d"
        assert chunks[0].cached_tokens == 7, "where it was prefilled"
        (first, asked), (second, rest) = story.sent
        assert (first, asked.sampling.max_new_tokens, asked.output_offset, asked.pull) == ("p", 1, 0, None)
        assert (asked.half, rest.half) == ("prefill", "decode")
        assert (second, rest.sampling.max_new_tokens, rest.output_offset) == ("d", SHORT.max_new_tokens, 1)
        assert rest.token_ids.tolist() == [*PROMPT, tokens[0]]
        assert rest.pull == PullFrom("tcp://127.0.0.1:4321", 1000, len(PROMPT), rest.pull.wait_us if rest.pull else 0)
        stats = story.router.stats()
        assert (stats["handed_over"], stats["resumed"], stats["finished"]) == (1, 0, 1)
        pulls = story.router.scheduler.stats()["pulls"]
        assert (pulls["asked"], pulls["ended"], pulls["moved_tokens"]) == (1, 1, len(PROMPT))


@asynchronous
async def test_an_answer_that_ends_with_its_first_token_is_never_handed_over() -> None:
    async def stops(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        await worker.send(wire.OutputChunk(submit.request_id, 0, (5,), 0, "stop"))

    async with fleet(p=("prefill", stops), d=("decode", mute)) as story:
        assert (await collect(story.router.generate(PROMPT, SHORT)))[0] == [5]
    async with fleet(p=("prefill", good), d=("decode", mute)) as story:
        one = SamplingParams(max_new_tokens=1)
        assert (await collect(story.router.generate(PROMPT, one)))[0] == expected_tokens(PROMPT, 1)
        assert story.router.stats()["handed_over"] == 0 and story.router.stats()["finished"] == 1


@asynchronous
async def test_where_nothing_waits_one_that_does_both_serves_all_of_it() -> None:
    async with fleet(p=("prefill", good), b=("both", good)) as story:
        await collect(story.router.generate(PROMPT, SHORT))
        assert [(name, asked.half) for name, asked in story.sent] == [("b", None)]
        assert story.router.stats()["handed_over"] == 0


@asynchronous
async def test_one_that_decodes_and_is_silent_is_left_and_the_request_goes_on_from_its_tokens() -> None:
    config = fast(heartbeat_seconds=0.05, suspect_after_seconds=0.4, hung_after_seconds=0.4, give_up_seconds=1.0)
    async with fleet(config, p=("prefill", good), d=("decode", stops_halfway), b=("both", good)) as story:
        for busy in range(3):  # so that the pair is cheaper than b
            story.router.scheduler.schedule([busy, *PROMPT], exclude=[])
        running = asyncio.ensure_future(collect(story.router.generate(PROMPT, SHORT)))
        await until(lambda: any(name == "d" for name, _ in story.sent), "it is decoded")
        story.workers["d"].silent = True
        tokens, _ = await running
        assert tokens == expected_tokens(PROMPT, SHORT.max_new_tokens)
        assert story.router.stats()["resumed"] == 1
        for live in list(story.router.scheduler.core.leases):
            story.router.scheduler.cancel(live)


@asynchronous
async def test_one_that_does_not_take_what_was_prefilled_for_it_costs_a_new_place() -> None:
    async with fleet(p=("prefill", good), d=("decode", rejecting("queue_full")), e=("decode", good)) as story:
        for _ in range(4):
            tokens, chunks = await collect(story.router.generate(PROMPT, SHORT))
            assert tokens == expected_tokens(PROMPT, SHORT.max_new_tokens) and chunks[-1].worker == "e"


@asynchronous
async def test_what_could_not_be_handed_over_is_on_no_tenant_s_account_any_more() -> None:
    """Regression: the charge and the place at the worker stayed, one with each."""
    asked = asyncio.Event()

    async def when_asked(worker: ScriptedWorker, submit: wire.GenerationRequest) -> None:
        await asked.wait()
        await good(worker, submit)

    async with fleet(fast(resume_seconds=0.2), p=("prefill", when_asked), d=("decode", mute)) as story:
        turns = story.router._turns
        running = asyncio.ensure_future(collect(story.router.generate(PROMPT, SHORT, tenant="t")))
        await until(lambda: story.sent, "it is prefilled")
        assert len(turns._charges) == 1
        story.router.fleet.withhold(story.workers["d"].endpoint, True)
        asked.set()
        with pytest.raises(WorkerLost):
            await running
        assert len(turns._charges) == 0 and turns.control._places._all == {}


@asynchronous
async def test_a_client_that_goes_away_in_either_half_frees_both() -> None:
    for script, halves, last in ((mute, 1, "p"), (good, 2, "d")):
        async with fleet(p=("prefill", script), d=("decode", mute)) as story:
            sent, worker = story.sent, story.workers[last]
            running = asyncio.ensure_future(collect(story.router.generate(PROMPT, SHORT)))
            while len(sent) < halves:
                await asyncio.sleep(0.005)
            assert story.router.scheduler.stats()["live_requests"] == 3 - halves
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            while not worker.got(wire.Abort):
                await asyncio.sleep(0.005)


@asynchronous
async def test_samples_of_a_set_stay_whole_where_somebody_does_both() -> None:
    async with fleet(p=("prefill", good), b=("both", good)) as story:
        for busy in range(3):  # so that a pair is cheaper than b
            story.router.scheduler.schedule([busy, *PROMPT])
        await collect(story.router.generate(PROMPT, SHORT, group="set"))
        assert [name for name, _ in story.sent] == ["b"]
        for live in list(story.router.scheduler.core.leases):
            story.router.scheduler.cancel(live)
    async with fleet(p=("prefill", good), d=("decode", good)) as story:
        await collect(story.router.generate(PROMPT, SHORT, group="set"))
        assert [name for name, _ in story.sent] == ["p", "d"]


@asynchronous
async def test_who_decodes_only_has_no_place_in_what_a_request_would_wait() -> None:
    async with fleet(p=("prefill", good), d=("decode", good), b=("both", good)) as story:
        assert sorted(story.router.usable_workers()) == ["b", "p"]
        await collect(story.router.generate(PROMPT, SHORT, tenant="t"))
        assert story.router.stats()["finished"] == 1


def test_other_routers_are_reported_both_halves_at_servers_that_do_not_report_themselves() -> None:
    found: list[tuple[str, str, int | None]] = []
    own = SharedBookings("A", lambda _: True, lambda _: None, Counter())
    live = Placement(None, "r", np.array(PROMPT, np.int32), None, max_new_tokens=9)  # type: ignore[arg-type]
    pair = PairDecision("r", "d", len(PROMPT), 0, "pair", "p", ("prefill half", 1))
    for end in ("finishes", "fails"):
        attempt = pairs.first_attempt(end, live, pair)
        pairs.share_placed(own, live, attempt)
        news = own.take_news()
        placed = {name: (getattr(one, "max_new_tokens", 0), getattr(one, "half", "")) for name, (one,) in news.items()}
        assert placed == {"d": (9, "decode"), "p": (1, "prefill")}
        if end == "finishes":
            pairs.share_first_token(own, attempt)
            pairs.share_ended(own, attempt, 5)
        else:
            pairs.share_ended(own, attempt, None)
        for name, reports in own.take_news().items():
            found += [(name, type(one).__name__, getattr(one, "output_tokens", None)) for one in reports]
        assert len(own) == 0
    assert sorted(found, key=str) == [
        ("d", "RequestEnded", 5),
        ("d", "RequestEnded", None),
        ("d", "RequestPrefilled", None),
        ("p", "RequestEnded", 1),
        ("p", "RequestEnded", None),
    ]


@asynchronous
async def test_what_a_server_has_cached_that_decodes_is_reported_to_no_other_router() -> None:
    """Regression: they took the hit for its own, and booked there the whole prefill that it was handed."""
    first, second = ScriptedServer(role="prefill"), ScriptedServer(role="decode")
    async with routed(first, second) as router:
        own = SharedBookings(router.router_id, lambda _: True, lambda _: None, Counter())
        router.siblings = SimpleNamespace(own=own)  # type: ignore[assignment]
        placement = await router.place(other_prompt(0), max_new_tokens=9, separable=True)
        assert placement.prefill is not None and placement.worker == second.worker
        placement.first_token(0)
        found = [one for one in own.take_news()[second.worker] if isinstance(one, RequestPrefilled)]
        assert [one.cached_tokens for one in found] == [None]
        placement.finish(5)
        router.siblings = None


@asynchronous
async def test_another_policy_knows_which_servers_make_a_pair() -> None:
    """Regression: after `change_policy` one that does both was to hand SGLang's decoding server its KV."""
    first, second, both = [ScriptedServer(role=role, more={"max_total_num_tokens": 1 << 20}) for role in ROLES]
    async with routed(first, second, both, clock=ManualClock(0.0)) as router:
        router.change_policy("e2")
        scheduler = router.scheduler
        assert scheduler._kv_moves is not None
        assert scheduler._kv_moves.are_alike(first.worker, second.worker)
        assert not scheduler._kv_moves.are_alike(both.worker, second.worker)
        found = [scheduler.schedule_pair(np.arange(i, i + 20_000), max_new_tokens=200) for i in range(12)]
        assert {one.prefill_worker for one in found} == {first.worker, None}
        for live in list(scheduler.core.leases):
            scheduler.cancel(live)


@asynchronous
async def test_a_fleet_that_only_prefills_serves_nobody() -> None:
    async with fleet(p=("prefill", good)) as story:
        with pytest.raises(NoWorkers):
            await collect(story.router.generate(PROMPT, SHORT))


def test_a_worker_s_role_is_checked() -> None:
    with pytest.raises(InvalidConfig, match="WorkerConfig.role must be one of both, prefill, decode"):
        WorkerConfig(ServerConfig(), role="prefil")  # type: ignore[arg-type]
