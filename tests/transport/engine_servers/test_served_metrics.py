"""What servers' metrics say of their speed: what is read, what is refused by name, and what decisions make of it before
the first request."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble import CostModel, GlobalScheduler, ManualClock, Router, SchedulerConfig, WorkerSpec
from preble._snapshot.accounts import cost_at
from preble.errors import InvalidConfig
from preble.scheduling.calibration import NEUTRAL
from preble.scheduling.cost_factors import FACTOR_MAX, logs_of_served, scaled
from preble.transport.engine_servers.http_client import EngineServer
from preble.transport.engine_servers.served_metrics import SERVED_MIN, served_work
from preble.transport.engine_servers.server_info import ServerOptions
from preble.types import ServedWork
from tests.support.attach import FakeServer
from tests.support.served import SGLANG, VLLM
from tests.support.transport import asynchronous, until

TEXTS = {"sglang": SGLANG, "vllm": VLLM}
FIELDS = ("requests", "prefill_seconds", "missed_tokens", "prompt_tokens", "token_seconds")


def numbers(work: ServedWork | None) -> tuple[Any, ...]:
    assert work is not None
    return tuple(getattr(work, name) for name in FIELDS)


def test_means_are_read_of_both_engines() -> None:
    sglang = (163, 12.864806687 / 163, 76029 / 162, 97021 / 162, 39.899719587 / 1725)
    assert numbers(served_work("sglang", SGLANG).work) == pytest.approx(sglang)
    assert numbers(served_work("vllm", VLLM).work) == pytest.approx((80, 0.1, 500.0, 800.0, 0.02))


def test_ranks_are_taken_together() -> None:
    twice = VLLM + VLLM.replace('engine="0"', 'engine="1"').replace("seconds_sum", "seconds_sum")
    assert numbers(served_work("vllm", twice).work) == pytest.approx((160, 0.1, 500.0, 800.0, 0.02))


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_who_has_served_next_to_nothing_or_does_not_say_it_says_nothing(engine: str) -> None:
    assert served_work(engine, "") == (None, "")
    lines = TEXTS[engine].splitlines()
    few = [f"{line.rsplit(' ', 1)[0]} {SERVED_MIN - 1}" if "_count" in line else line for line in lines]
    assert served_work(engine, "\n".join(few)) == (None, "")
    for gone in ("prefill", "prompt_tokens", "computed" if engine == "vllm" else "uncached"):
        assert served_work(engine, "\n".join(line for line in lines if gone not in line)) == (None, "")
    without = served_work(engine, "\n".join(line for line in lines if "inter_token" not in line)).work
    assert without is not None and without.token_seconds is None


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("wrong", ["nan", "-1", "+Inf", "many", "1e999"])
def test_a_number_that_cannot_be_is_named_and_nothing_is_taken(engine: str, wrong: str) -> None:
    name = next(line for line in TEXTS[engine].splitlines() if "inter_token_latency_seconds_sum" in line)
    work, problem = served_work(engine, TEXTS[engine].replace(name, f"{name.rsplit(' ', 1)[0]} {wrong}"))
    assert work is None
    assert f"{engine}:inter_token_latency_seconds_sum" in problem and wrong in problem


def test_a_mean_that_cannot_be_is_named() -> None:
    work, problem = served_work(
        "vllm", VLLM.replace('seconds_sum{engine="0",model_name="tiny"} 8.0', "seconds_sum 1e9")
    )
    assert work is None and "vllm:request_prefill_time_seconds" in problem


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(VLLM.splitlines()), max_size=12), st.binary(max_size=30), st.integers(0, 900))
def test_no_text_of_metrics_does_harm(lines: list[str], noise: bytes, at: int) -> None:
    text = "\n".join(lines)
    work, problem = served_work("vllm", text[:at] + noise.decode("utf-8", "replace") + text[at:])
    assert work is None or not problem
    if work is not None:
        assert_bounded(logs_of_served(NEUTRAL, work))


def assert_bounded(logs: tuple[float, ...]) -> None:
    assert all(abs(log) <= math.log(FACTOR_MAX) + 0.05 for log in logs)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_served_work_must_be_positive(field: str, wrong: float) -> None:
    with pytest.raises(InvalidConfig, match=field):
        ServedWork(**{**dict.fromkeys(FIELDS, 20), field: wrong})  # type: ignore[arg-type]


# --- what a server says when it is asked -----------------------------------------------------------------------------


@asynchronous
async def test_a_server_is_asked_and_what_is_wrong_is_advice() -> None:
    for kind in ("sglang", "vllm"):
        server = await FakeServer(kind).start()
        try:
            async with EngineServer(server.url) as client:
                assert (await client.info()).work is None
                cache = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="12500"} 1.0\n'
                server.answers["/metrics"] = (200, (cache + TEXTS[kind]).encode())
                info = await client.info()
                assert info.work == served_work(kind, TEXTS[kind]).work is not None
                server.answers["/metrics"] = (200, (cache + TEXTS[kind] + TEXTS[kind].replace(" 9", " x")).encode())
                info = await client.info()
                assert info.work is None or kind == "vllm"
                broken = TEXTS[kind].splitlines()[-1].rsplit(" ", 1)[0] + " soon"
                server.answers["/metrics"] = (200, (cache + TEXTS[kind] + broken + "\n").encode())
                info = await client.info()
                assert info.work is None and any("'soon'" in text for text in info.advice)
        finally:
            await server.kill()


@asynchronous
async def test_the_first_request_of_a_router_finds_what_the_server_said() -> None:
    server = await FakeServer("vllm").start()
    cache = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="12500"} 1.0\n'
    server.answers["/metrics"] = (200, (cache + VLLM).encode())
    try:
        for options, expected in ((None, 0.1), (ServerOptions(cost_model="mistral-7b/a6000"), None)):
            async with Router([(server.url, options)]) as router:
                await until(lambda: len(router.scheduler.workers) == 1, "the server is there")
                found = cost_at(router.scheduler.core, 0).prefill_time(500, 800)
            given = CostModel.preset("mistral-7b/a6000").prefill_time(500, 800)
            assert found == pytest.approx(given if expected is None else expected, rel=0.05)
    finally:
        await server.kill()


@asynchronous
async def test_metrics_that_are_too_much_keep_no_server_from_being_attached() -> None:
    server = await FakeServer("sglang").start()
    server.answers["/metrics"] = (200, b"# \n" * 400_000)
    try:
        async with EngineServer(server.url, ServerOptions(max_body_bytes=1 << 20)) as client:
            info = await client.info()
    finally:
        await server.kill()
    assert info.work is None and any("/metrics" in text and "1048576 bytes" in text for text in info.advice)


# --- what decisions make of it ---------------------------------------------------------------------------------------

VLLM_LIVE = ServedWork(161, 0.15103, 479.2, 599.9, 0.03376)  # of vLLM 0.32.0 with a tiny model, after a profile
SLOW = ServedWork(100, 2.0, 1500.0, 2000.0, 0.2)  # a Mistral-7B on an A6000 takes 0.2 and 0.02


@pytest.mark.parametrize("prior", ["mistral-7b/a6000", "llama-3-70b/h100-tp4", "neutral"])
@pytest.mark.parametrize(
    "work", [SLOW, VLLM_LIVE, ServedWork(16, 0.05, 40.0, 900.0, 0.03), ServedWork(16, 0.001, 20.0, 30.0)]
)
def test_the_model_takes_as_long_for_what_was_served(prior: str, work: ServedWork) -> None:
    model = NEUTRAL if prior == "neutral" else CostModel.preset(prior)
    found = scaled(model, logs_of_served(model, work))
    seconds = found.prefill_time(int(work.missed_tokens), int(work.prompt_tokens))
    short = work.missed_tokens < 64 and work.token_seconds is not None  # as its decodes say, not as its prefills
    assert seconds == pytest.approx(work.prefill_seconds, rel=0.5 if short else 0.3)
    if work.token_seconds is not None:
        assert found.decode_time(1, int(work.prompt_tokens)) == pytest.approx(work.token_seconds, rel=0.1)
    assert_bounded(logs_of_served(model, work))


def test_hits_that_waited_for_others_prefills_do_not_make_a_cold_prompt_dear() -> None:
    """What a real vLLM said after a run in which 97 % of each prompt was cached: its cold prompts were taken to cost
    nearly five times as much as decodes said, and nothing was copied or sent on for two seconds."""
    model = CostModel.preset("mistral-7b/a6000")
    hits = ServedWork(1000, 0.12, 45.0, 1550.0, 0.028)
    found = scaled(model, logs_of_served(model, hits))
    slower = hits.token_seconds / model.decode_time(1, 1550)
    assert found.prefill_time(1550, 1550) == pytest.approx(slower * model.prefill_time(1550, 1550), rel=0.1)
    unsaid = scaled(model, logs_of_served(model, replace(hits, token_seconds=None)))
    assert unsaid.prefill_time(1550, 1550) > 3.0 * model.prefill_time(1550, 1550), "there is nothing else to go by"


def fleet(*said: ServedWork | None, clock: ManualClock | None = None, **config: Any) -> GlobalScheduler:
    config = {"calibrate": True, **config}
    scheduler = GlobalScheduler(clock=clock or ManualClock(1.0), config=SchedulerConfig(**config))
    for number, work in enumerate(said):
        scheduler.add_worker(f"w{number}", served=work)
    return scheduler


def prefill_of(scheduler: GlobalScheduler, index: int) -> float:
    return cost_at(scheduler.core, index).prefill_time(1500, 2000)


def test_the_first_decision_reckons_with_what_servers_said_and_they_stay_alike() -> None:
    scheduler = fleet(SLOW, ServedWork(50, 2.1, 1500.0, 2000.0, 0.21), None)
    assert prefill_of(scheduler, 0) == pytest.approx(2.0, rel=0.05)
    scheduler.tick()
    models = [cost_at(scheduler.core, index).coefficients() for index in range(3)]
    assert models[0] == models[1] == models[2], "who said nothing is taken for its likes"
    assert prefill_of(scheduler, 2) == pytest.approx(2.0, rel=0.1)
    scheduler.check()


@pytest.mark.parametrize("slower", [0, 1])
def test_of_two_alike_the_one_that_was_busier_is_not_taken_for_slower(slower: int) -> None:
    """Two real vLLM servers alike said after the same run that decoding takes them 0.106 and 0.056 s a token: among
    others' prefills, of which one had more. The first 16 requests, seven seconds of them, went to the other one."""
    said = [ServedWork(75, 0.44, 206.0, 1540.0, 0.056), ServedWork(75, 0.53, 227.0, 1540.0, 0.106)]
    scheduler = fleet(*(said if slower else said[::-1]))
    assert prefill_of(scheduler, 0) == prefill_of(scheduler, 1), "from the first decision on"
    scheduler.tick()
    assert prefill_of(scheduler, 0) == prefill_of(scheduler, 1), "and after the first look"
    placed = [scheduler.schedule([number, *range(1400)]).worker for number in range(8)]
    assert placed.count("w0") == placed.count("w1") == 4
    scheduler.check()


def test_who_joins_a_group_that_is_measured_is_taken_for_its_likes_at_once() -> None:
    scheduler = fleet(SLOW, SLOW, clock=(clock := ManualClock(1.0)))
    learn(scheduler, clock, CostModel.preset("mistral-7b/a6000"))
    scheduler.add_worker("late", served=SLOW)
    assert prefill_of(scheduler, 2) == prefill_of(scheduler, 0)
    scheduler.check()


def learn(scheduler: GlobalScheduler, clock: ManualClock, truth: CostModel) -> None:
    """Eight requests one after the other, by workers that take as long as `truth` says."""
    for number in range(8):
        prompt = [number, *range(400 + 250 * number)]
        decision = scheduler.schedule(prompt)
        clock.advance(truth.prefill_time(len(prompt)))
        scheduler.first_token(decision.request_id, cached_tokens=0)
        clock.advance(truth.decode_time(20, len(prompt)))
        scheduler.finish(decision.request_id, output_tokens=21)
        scheduler.tick()


def test_what_was_said_gives_way_to_the_first_samples_and_does_not_come_back() -> None:
    scheduler = fleet(SLOW, SLOW, clock=(clock := ManualClock(1.0)))
    truth = CostModel.preset("mistral-7b/a6000")
    learn(scheduler, clock, truth)
    scheduler.add_worker("late", served=SLOW)
    scheduler.tick()
    for index in range(3):
        assert prefill_of(scheduler, index) == pytest.approx(truth.prefill_time(1500, 2000), rel=0.35)


def test_who_gives_a_model_is_taken_at_their_word() -> None:
    assert prefill_of(fleet(SLOW, calibrate=False), 0) == NEUTRAL.prefill_time(1500, 2000)
    scheduler = fleet()
    scheduler.add_worker(WorkerSpec("own", cost_model="mistral-7b/a6000"), served=SLOW)
    assert prefill_of(scheduler, 0) == CostModel.preset("mistral-7b/a6000").prefill_time(1500, 2000)


def test_a_worker_may_join_a_fleet_whose_cost_model_takes_no_time() -> None:
    """It was refused by a ZeroDivisionError."""
    free = CostModel([(0, 0.0), (1, 0.0)])
    assert logs_of_served(free, SLOW) == (0.0,) * 5
    scheduler = GlobalScheduler(["w0"], cost_model=free)
    scheduler.add_worker("late", served=SLOW)
    assert prefill_of(scheduler, 1) == 0.0
    scheduler.check()


def test_a_snapshot_keeps_what_was_said_as_what_decisions_reckon_with() -> None:
    scheduler = fleet(SLOW, SLOW)
    restored = GlobalScheduler.restore(scheduler.snapshot(), clock=ManualClock(1.0))
    restored.tick()
    assert prefill_of(restored, 0) == pytest.approx(prefill_of(scheduler, 0))
    assert json.dumps(restored.stats()["workers"]["w0"]["cost"]["cost_changes"]) == "0"
