"""`benchmarks.live.run_routers`: its load, its clients on routers that are gone, and its page. The whole run is for who
has an idle machine; nothing is said here of how fast anything is."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from benchmarks.live import run_routers
from tests.support.paths import ROOT
from tests.support.transport import asynchronous

RESULT = ROOT / "benchmarks/results/routers-live.json"


@pytest.fixture
def bench() -> Any:
    """The module."""
    return run_routers


def test_the_same_seed_gives_the_same_requests_in_the_models_vocabulary(bench: Any) -> None:
    args = bench.parser().parse_args(["--requests", "50", "--groups", "5"])
    made = bench.make_requests(args, 2048, 3)
    assert made == bench.make_requests(args, 2048, 3) != bench.make_requests(args, 2048, 4)
    assert len(made) == 50 and {one.document for one in made} == set(range(5))
    assert all(0 <= token < 2048 for one in made for token in one.token_ids)
    assert [one.arrival_seconds for one in made] == sorted(one.arrival_seconds for one in made)


async def server(broken: bool) -> tuple[web.AppRunner, str]:
    """A router that answers in two pieces, or breaks off after the first."""

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for count in (1, 2):
            environment = {"completion_tokens": count, "cached_tokens": 7}
            await response.write(b"data: " + json.dumps({"meta_info": environment}).encode() + b"\n\n")
            if broken:
                assert request.transport is not None
                request.transport.abort()
                return response
        return response

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def test_a_client_goes_on_with_the_next_router_and_counts_it(bench: Any) -> None:
    @asynchronous
    async def story() -> None:
        (bad, broken), (good, works) = await server(True), await server(False)
        fronts = bench.Fronts(urls=["http://127.0.0.1:9", broken, works])
        request = bench.Request(0, [1, 2, 3], 0.0)
        async with aiohttp.ClientSession() as session:
            pieces = [piece async for piece in fronts.ask(session, 2, request)]
        assert (pieces[-1].output_tokens, pieces[-1].cached_tokens, pieces[-1].engine) == (2, 7, works)
        assert fronts.retries == 2
        async with aiohttp.ClientSession() as session:
            with pytest.raises(OSError, match="did not answer"):
                async for _ in bench.Fronts(urls=["http://127.0.0.1:9"]).ask(session, 2, request):
                    continue
        for runner in (bad, good):
            await runner.cleanup()

    story()


def outcome(bench: Any, cached: int, engine: str = "", error: str = "") -> Any:
    """One of a hundred prompt tokens."""
    return bench.Outcome(100, 0.5, 1.0, cached, engine, error)


def test_an_arm_is_summed_up_over_what_was_answered(bench: Any) -> None:
    found = bench.summary([outcome(bench, 50), outcome(bench, 100), outcome(bench, 0, error="OSError")])
    assert (found["requests"], found["lost"], found["errors"]) == (3, 1, ["OSError"])
    assert found["hit_fraction"] == 0.75 and found["mean_ttft_seconds"] == found["p99_ttft_seconds"] == 0.5


def test_hits_since_the_join_are_distinguished_by_router(bench: Any) -> None:
    requests = [bench.Request(0, [1], float(second)) for second in range(4)]
    outcomes = [outcome(bench, cached, engine) for cached, engine in ((0, "a"), (90, "late"), (70, "a"), (30, "late"))]
    found = bench.since_join(requests, outcomes, "late", 1.0)
    assert found == {"late_requests": 2, "late_hit_fraction": 0.6, "others_hit_fraction": 0.7}


def test_the_page_is_that_of_the_kept_result(bench: Any) -> None:
    result = json.loads(RESULT.read_text())
    assert {run["arm"] for run in result["runs"]} == set(bench.ARMS)
    text = bench.PAGE.read_text()
    assert text.split(bench.BEGIN)[1].split(bench.END)[0].strip() == bench.page(result)
