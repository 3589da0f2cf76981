"""`preble profile --url`: that known costs come back through a server's own interface, what is sent and announced, what
happens when it is broken off, refusals. Time is a clock that the server moves; no test waits for it.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preble import CostModel, LocalConfig, ManualClock, Router, SamplingParams
from preble.cli.profile import profile
from preble.cli.profile.points import DECODE, PREFILL, Limits, Point
from preble.cli.profile.server_bench import OUTPUT_TOKENS, ServerBench, decode_run, planned, server_points
from preble.costs.thresholds import imbalance_share
from preble.engines.base import GenerationRequest
from preble.engines.simulated import SimulatedEngine
from preble.errors import InvalidConfig
from preble.gateway.core.config_tables import ServerTable, check_servers, options_of
from preble.transport.engine_servers.http_client import ServerPiece
from preble.transport.engine_servers.server_info import ServerOptions
from tests.cli.test_attach import preble, start
from tests.support.attach import FakeServer
from tests.support.transport import asynchronous, until

ROUND_TRIP_SECONDS = 0.004
TOLERANCE = 0.03  # of what the fit makes of a server without noise, anywhere in the measured range


class ClockServer:
    """A server whose engine runs by a cost model and moves `clock`; every answer takes a round trip.

    Its next iteration begins when everybody has looked at what the one before it sent. `reports`: whether it says what
    it had cached.
    """

    def __init__(self, cost_model: CostModel, *, reports: bool = True, capacity_tokens: int = 100_000) -> None:
        self.clock = ManualClock()
        self.reports = reports
        self.sent: list[tuple[list[int], int]] = []
        self.live_most = 0
        self.aborted: list[str] = []
        local = LocalConfig(kv_capacity_tokens=capacity_tokens, token_budget=8192, order="fcfs", min_shared_tokens=0)
        self._engine = SimulatedEngine(cost_model, local, clock=self.clock)
        self._streams: dict[str, asyncio.Queue[ServerPiece]] = {}
        self._driver: asyncio.Task[None] | None = None

    async def served(self) -> tuple[()]:
        self.clock.advance(ROUND_TRIP_SECONDS)
        return ()

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def generate(
        self, token_ids: Any, sampling: SamplingParams | None = None, *, request_id: str
    ) -> AsyncIterator[ServerPiece]:
        assert sampling is not None
        self.clock.advance(ROUND_TRIP_SECONDS)
        self.sent.append(([int(token) for token in token_ids], sampling.max_new_tokens))
        stream: asyncio.Queue[ServerPiece] = asyncio.Queue()
        self._streams[request_id] = stream
        self.live_most = max(self.live_most, len(self._streams))
        self._engine.submit(GenerationRequest(request_id, np.asarray(token_ids, np.int32), sampling))
        if self._driver is None or self._driver.done():
            self._driver = asyncio.ensure_future(self._drive())
        try:
            while True:
                piece = await stream.get()
                try:
                    yield piece
                finally:
                    stream.task_done()
                if piece.finish_reason is not None:
                    return
        finally:
            del self._streams[request_id]

    async def _drive(self) -> None:
        while self._engine.has_work():
            self.clock.advance(self._engine.begin_step())
            for chunk in self._engine.end_step():
                if chunk.request_id in self._streams:
                    cached = chunk.cached_tokens if self.reports else None
                    piece = ServerPiece(tuple(chunk.token_ids), cached, chunk.finish_reason)
                    self._streams[chunk.request_id].put_nowait(piece)
            for stream in list(self._streams.values()):
                await stream.join()
            self._engine.take_events()


def bench_of(server: ClockServer, seed: int = 1) -> ServerBench:
    return ServerBench(server, np.random.default_rng(seed), block_size=16, name="test", clock=server.clock)


def profiled(server: ClockServer, limits: Limits, repeats: int = 1) -> profile.Profile:
    """The profile of a server, with as much time as it wants."""

    async def told() -> profile.Profile:
        bench = bench_of(server)
        await bench.warm_up()
        found = await bench.measure(server_points(limits, np.random.default_rng(1)), repeats, lambda: 1e6)
        assert (found.skipped, found.short, bench.unusable) == (0, 0, 0)
        return profile.fit(found.samples, [], "fitted")

    return asyncio.run(told())


# --- known costs ------------------------------------------------------------------------------------------------------

LINEAR = CostModel([(0, 0.010), (8192, 1.010)], context=(0, 0, 0, 2e-6), name="linear")
QUADRATIC = CostModel([(0, 0.3), (8192, 20.0)], context=(0, 0, 0, 4e-5), pair=(0, 0, 0, 0, 3e-7), name="quadratic")


@pytest.mark.parametrize("truth", [LINEAR, QUADRATIC], ids=lambda model: model.name)
@pytest.mark.parametrize("reports", [True, False], ids=["reports-hits", "does-not"])
def test_the_costs_that_a_server_runs_by_come_back(truth: CostModel, reports: bool) -> None:
    found = profiled(ClockServer(truth, reports=reports), Limits(2048, 16)).model
    for missed, context in [(32, 32), (100, 100), (700, 700), (2048, 2048), (64, 1000), (512, 2500)]:
        assert found.prefill_time(missed, context) == pytest.approx(truth.prefill_time(missed, context), rel=TOLERANCE)
    for batch, context in [(1, 128), (3, 300), (16, 500)]:
        real = truth.iteration_time((), [context] * batch)
        assert found.iteration_time((), [context] * batch) == pytest.approx(real, rel=TOLERANCE)
    assert imbalance_share(found) == pytest.approx(imbalance_share(truth), abs=0.05)


def test_the_round_trip_is_measured_and_taken_off() -> None:
    server = ClockServer(LINEAR)

    async def told() -> float:
        bench = bench_of(server)
        await bench.warm_up()
        run = await bench.run(Point(PREFILL, 500))
        assert run is not None and (run.tokens, run.context) == (500, 500)
        assert bench.round_trip_seconds == pytest.approx(ROUND_TRIP_SECONDS)
        return run.seconds

    assert asyncio.run(told()) == pytest.approx(LINEAR.prefill_time(500), rel=1e-9)


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeats", [1, 3])
def test_no_more_is_sent_than_was_announced_and_no_two_cold_prompts_begin_alike(repeats: int) -> None:
    server, limits = ClockServer(LINEAR), Limits(1024, 4)
    points = server_points(limits, np.random.default_rng(1))
    profiled(server, limits, repeats)
    most = planned(points, repeats)
    assert len(server.sent) <= most.requests
    assert sum(len(prompt) for prompt, _ in server.sent) <= most.prompt_tokens
    assert sum(output for _, output in server.sent) <= most.output_tokens
    assert server.live_most == most.concurrent == 4
    heads = {tuple(prompt[:16]) for prompt, _ in server.sent}
    befores = {point.before for point in points if point.kind == PREFILL} - {0}
    streams = sum(point.tokens for point in points if point.kind == DECODE)
    cold = sum(point.cold for point in points) * repeats
    assert len(heads) == cold + len(befores) + streams + 2, "each has its own beginning, but for what is meant to hit"


def test_points_come_with_the_least_work_first_and_each_once() -> None:
    points = server_points(Limits(2048, 16), np.random.default_rng(1))
    work = [p.tokens * p.before if p.kind == DECODE else p.tokens + p.before for p in points]
    assert work == sorted(work) and len(set(points)) == len(points)
    assert {(p.kind, p.held_out) for p in points} == {(k, h) for k in (PREFILL, DECODE) for h in (True, False)}


def test_when_time_is_up_the_rest_is_left_out_and_counted() -> None:
    server, points = ClockServer(LINEAR), server_points(Limits(512, 4), np.random.default_rng(1))
    left = iter([1.0] * 10 + [0.0])
    found = asyncio.run(bench_of(server).measure(points, 3, lambda: next(left)))
    assert (len(found.samples), found.skipped, found.short) == (10, len(points) - 10, 10)


# --- decoding ---------------------------------------------------------------------------------------------------------


def test_a_batch_counts_while_all_of_its_streams_decode() -> None:
    early = [0.5 + 0.1 * i for i in range(30)]  # the other's prefill makes its tokens slower up to 2.0
    late = [2.0 + 0.2 * i for i in range(20)]
    both = [*early[:15], *(2.0 + 0.2 * i for i in range(12))]
    run = decode_run(100, [both, late])
    assert run is not None and run.tokens == 2
    assert run.seconds == pytest.approx(0.2)
    assert 100 + 6 <= run.context <= 100 + 24


@pytest.mark.parametrize(
    "arrivals",
    [[[0.0, 1.0, 2.0], [5.0, 6.0, 7.0]], [[float(i) for i in range(30)], []], [[1.0] * 30]],
    ids=["apart", "nothing", "all-at-once"],
)
def test_streams_that_did_not_decode_together_say_nothing(arrivals: list[list[float]]) -> None:
    assert decode_run(100, arrivals) is None


def test_a_batch_whose_outputs_were_too_short_is_asked_for_longer_ones_and_then_given_up() -> None:
    server = ClockServer(LINEAR, capacity_tokens=400)  # one prompt at a time fits: they never decode together

    async def told() -> None:
        bench = bench_of(server)
        assert await bench.run(Point(DECODE, 2, 256)) is None
        assert bench.unusable == 1

    asyncio.run(told())
    assert {output for _, output in server.sent} == {1, *OUTPUT_TOKENS}


# --- the command ------------------------------------------------------------------------------------------------------

QUICK = ("--quick", "--repeats", "1", "--max-tokens", "128", "--max-batch", "2")


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@asynchronous
async def test_a_profile_of_a_server_becomes_a_file_that_its_table_names(kind: str, tmp_path: Path) -> None:
    server = await FakeServer(kind).start()
    server.pause_seconds = 0.001
    code, out, error = await preble("profile", "--url", server.url, *QUICK, "--out", str(tmp_path), "--model", "tiny")
    await server.kill()
    assert code == 0, error
    path = tmp_path / "cost_model.json"
    announced = out.splitlines()[1]
    assert announced.startswith("It will send at most ") and "prompt tokens" in announced
    assert "IMBALR" in out and "Th_bal" in out and "Error of the fit" in out
    assert out.endswith(f"servers:\n  - url: {server.url}\n    cost_model: {path}\n")
    model = CostModel.load(path)
    check_servers([ServerTable(url=server.url, cost_model=str(path))], [])
    kept = json.loads(path.read_text())["measured"]
    assert (kept["engine"], kept["url"], kept["model"]) == (kind, server.url, "tiny")
    assert model.name == f"tiny/{kind}"


@asynchronous
async def test_json_is_alone_on_stdout(tmp_path: Path) -> None:
    server = await FakeServer("sglang").start()
    server.pause_seconds = 0.001
    code, out, error = await preble("profile", "--url", server.url, *QUICK, "--out", str(tmp_path), "--json")
    await server.kill()
    assert code == 0 and "It will send at most" in error
    said = json.loads(out)
    assert CostModel(**said["coefficients"]).name == "tiny/sglang"
    assert any("IMBALR" in name for name in said["thresholds"]) and said["errors"] and said["samples"]


@asynchronous
async def test_interrupted_it_aborts_what_it_had_sent(tmp_path: Path) -> None:
    server = await FakeServer("sglang").start()
    server.pause_seconds = 3600.0  # no token comes after the first
    server.on_token = lambda _: b": nothing\n\n"
    process = await start("-m", "preble.cli", "profile", "--url", server.url, *QUICK, "--out", str(tmp_path))
    await until(lambda: server.running == 1, "a request is there")
    process.send_signal(signal.SIGINT)
    out, error = await process.communicate()
    await until(lambda: server.running == 0, "the connection is closed")
    name = server.bodies[0]["rid"]
    aborted, files = list(server.aborted), list(tmp_path.iterdir())
    await server.kill()
    assert process.returncode == 130 and b"Traceback" not in error
    assert aborted == [name] and files == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--url", "http://127.0.0.1:9"], "cannot be reached: connection refused, nothing listens there"),
        (["--url", "127.0.0.1:9"], "url must be http://HOST:PORT"),
        (["--url", "http://127.0.0.1:9", "--engine", "torch"], "--engine torch: a server that runs"),
        (["--url", "http://127.0.0.1:9", "--api-key-env", "NO_SUCH_VARIABLE"], "no such variable is set"),
        (["--url", "http://127.0.0.1:9", "--seconds", "0"], "--seconds must be a number above 0"),
        (["--engine", "simulated", "--json"], "--json and --api-key-env are for a server that runs"),
    ],
)
@asynchronous
async def test_what_cannot_be_is_refused_in_a_sentence(arguments: list[str], says: str) -> None:
    code, out, error = await preble("profile", *arguments)
    assert code in (1, 2) and out == "" and says in error and "Traceback" not in error


@asynchronous
async def test_a_refused_key_and_lengths_that_do_not_fit_are_said(tmp_path: Path, monkeypatch: Any) -> None:
    server = await FakeServer("sglang", api_key="right-key-of-it").start()
    monkeypatch.setenv("ITS_KEY", "wrong-key-of-it")
    code, _, error = await preble("profile", "--url", server.url, "--api-key-env", "ITS_KEY")
    assert code == 1 and "answers 401" in error and "--api-key-env NAME" in error and "wrong-key" not in error
    monkeypatch.setenv("ITS_KEY", "right-key-of-it")
    code, _, error = await preble("profile", "--url", server.url, "--api-key-env", "ITS_KEY", "--max-tokens", "4000")
    await server.kill()
    assert code == 2 and "--max-tokens 4000: half as much is cached before" in error


# --- the model of a server --------------------------------------------------------------------------------------------


def test_a_servers_cost_model_that_is_none_is_refused_with_its_table(tmp_path: Path) -> None:
    for wrong in ("no-such-preset", str(tmp_path / "missing.json")):
        with pytest.raises(InvalidConfig, match=r"servers\[0\].*(no-such-preset|missing.json)"):
            check_servers([ServerTable(url="http://h:1", cost_model=wrong)], [])


@asynchronous
async def test_a_server_is_reckoned_with_by_the_model_that_its_options_name(tmp_path: Path) -> None:
    path = tmp_path / "cost_model.json"
    LINEAR.save(path)
    server = await FakeServer("sglang").start()
    options = options_of(ServerTable(url=server.url, cost_model=str(path)))
    assert options == ServerOptions(cost_model=str(path))
    async with Router.attach(server.url, options=options) as router:
        await until(lambda: len(router.scheduler.workers) == 1, "the server is known")
        (worker,) = router.scheduler.stats()["workers"].values()
        assert worker["cost"]["name"] == "linear"
        assert worker["cost"]["knots"] == LINEAR.coefficients()["knots"]
    await server.kill()
