"""`benchmarks.live.run_engines`: its load, statistics and page, and a whole comparison on fake servers and on workers.
Real engines are for who runs the benchmark; nothing is said here of who is faster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.live import engine_fleet, engine_load, engine_report, run_engines
from preble import LocalConfig, SamplingParams
from preble.engines.base import GenerationRequest
from tests.support.attach import BLOCK, FakeServer, batch
from tests.support.paths import ROOT
from tests.support.transport import FAST, asynchronous

OUTPUT = 3
DOCUMENTS = [[1000 * n + k for k in range(10 * BLOCK)] for n in range(4)]
VALUES = {"mean_ttft_seconds": 0.5, "p99_ttft_seconds": 1.0, "mean_latency_seconds": 0.7, "p99_latency_seconds": 1.5}


@pytest.fixture
def bench() -> Any:
    """The module."""
    return run_engines


@pytest.fixture
def load(bench: Any) -> Any:
    return engine_load


@pytest.fixture
def report(bench: Any) -> Any:
    return engine_report


@pytest.fixture
def processes(bench: Any) -> Any:
    return engine_fleet


class FlushableServer(FakeServer):
    """A fake SGLang that empties its cache when reported, but not at once, and knows that it is well."""

    refusals = 1
    flushed = 0

    async def _sglang_flush_cache(self, _: Any) -> Any:
        if self.refusals:
            self.refusals -= 1
            return web.Response(status=400)
        self.flushed += 1
        self.cached = [{} for _ in range(self.ranks)]
        await self.publishers[0].publish(batch(1.0, {"type": "AllBlocksCleared"}))
        return web.Response()


# --- the load ---------------------------------------------------------------------------------------------------------


def some_requests(load: Any, count: int = 12, seed: int = 0, rps: float = 400.0) -> Any:
    return load.make_requests(DOCUMENTS, lambda n: [9000 + n, 1, 2], count, rps, seed)


def test_requests_are_poisson_and_the_same_for_the_same_seed(load: Any) -> None:
    made = some_requests(load, 4000, rps=8.0)
    assert made == some_requests(load, 4000, rps=8.0) != some_requests(load, 4000, seed=1, rps=8.0)
    gaps = np.diff([0.0, *(one.arrival_seconds for one in made)])
    assert (gaps > 0).all() and abs(gaps.mean() * 8.0 - 1.0) < 0.05 and abs(gaps.std() * 8.0 - 1.0) < 0.05
    shares = np.bincount([one.document for one in made]) / len(made)
    assert len(shares) == len(DOCUMENTS) and abs(shares - 0.25).max() < 0.03
    for number, one in enumerate(made[:50]):
        assert one.token_ids == [*DOCUMENTS[one.document], 9000 + number, 1, 2]


def test_documents_are_the_first_that_fit_and_too_few_are_refused(load: Any) -> None:
    texts = [[0] * length for length in (5, 12, 30, 15, 20, 10)]
    assert [len(one) for one in load.choose_documents(texts, 3, 10, 20)] == [12, 15, 20]
    with pytest.raises(ValueError, match="4 texts of 10 to 20 tokens, 5 are needed"):
        load.choose_documents(texts, 5, 10, 20)


def test_shifted_requests_share_as_before_but_nothing_with_the_originals(load: Any) -> None:
    made = some_requests(load)
    moved = load.shifted(made, 5, 10_000)
    for one, other in zip(made, moved, strict=True):
        assert other.token_ids == [(token + 5) % 10_000 for token in one.token_ids]
        assert (one.document, one.arrival_seconds) == (other.document, other.arrival_seconds)
        assert not {tuple(one.token_ids[:BLOCK])} & {tuple(two.token_ids[:BLOCK]) for two in moved}


def test_every_arm_has_every_place_once(load: Any) -> None:
    orders = [load.order_of(load.ARMS, repetition) for repetition in range(4)]
    for place in range(4):
        assert sorted(order[place] for order in orders) == sorted(load.ARMS)


# --- statistics and page ----------------------------------------------------------------------------------------------


def test_intervals_are_students(report: Any) -> None:
    mean, half = report.interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.303 / math.sqrt(3))
    assert report.interval([2.0])[1] == math.inf
    many = [float(n % 2) for n in range(40)]
    assert report.interval(many)[1] == pytest.approx(2.228 * np.std(many, ddof=1) / math.sqrt(40))


def test_a_summary_leaves_failures_out_of_times_and_counts_them(load: Any, report: Any) -> None:
    outcomes = [load.Outcome(100, 0.1 * n, 0.2 * n, 80, f"w{n % 2}") for n in range(1, 5)]
    found = report.summary([*outcomes, load.Outcome(1000, error="QueueFull")])
    assert (found["requests"], found["failed"], found["failures"]) == (5, 1, {"QueueFull": 1})
    assert found["mean_ttft_seconds"] == pytest.approx(0.25) and found["mean_latency_seconds"] == pytest.approx(0.5)
    assert found["p99_ttft_seconds"] == pytest.approx(0.397) and found["hit_fraction"] == 0.8
    assert found["requests_by_engine"] == [2, 2] and found["ttft_seconds"] == [0.1, 0.2, 0.3, 0.4]
    assert report.summary([load.Outcome(5, error="incomplete")])["failed"] == 1


def result_of(**better: float) -> Any:
    """Two repetitions of two arms; `better` is what E2's figures are less by, hit fractions more by."""
    runs = []
    for repetition in range(2):
        for arm in ("e2", "partition"):
            run = {name: value + 0.1 * repetition for name, value in VALUES.items()} | {"hit_fraction": 0.8}
            for name, less in better.items() if arm == "e2" else ():
                run[name] += less if name == "hit_fraction" else -less
            run |= {"arm": arm, "repetition": repetition, "place": 0, "failed": 0, "requests_by_engine": [7, 9]}
            runs.append(run)
    environment = {"commit": "c0ffee", "command": "python -m benchmarks.live.run_engines", "machine": "m", "seed": 0}
    more = {"date": "2026-11-22", "fleet": "2 fakes", "settings": {"rps": 9.0}, "left_out": {"the peer": "absent"}}
    return {"facts": environment, "runs": runs, **more}


def test_the_page_pairs_repetitions_and_says_losses(report: Any) -> None:
    result = result_of(p99_ttft_seconds=-0.25, hit_fraction=0.1, mean_ttft_seconds=0.1)
    text = report.page(result)
    # The repetitions differ by 0.1, their differences do not.
    assert "0.450 ± 0.635" in text and "-0.100 ± 0.000" in text and "+0.250 ± 0.000" in text
    assert list(report.losses(result)) == [
        "p99 TTFT, s: worse than fixed partition by document by 0.250 (its interval excludes 0)"
    ]
    for part in ("python -m benchmarks.live.run_engines", "c0ffee", "rps 9.0", "7 + 9", "Left out: the peer (absent)"):
        assert part in text
    assert "None: E2 has the best mean" in report.page(result_of(mean_ttft_seconds=0.1))


def test_a_loss_that_may_be_chance_is_said_to_be(report: Any) -> None:
    result = result_of(hit_fraction=-0.1)
    result["runs"][0]["hit_fraction"] += 0.15
    (loss,) = report.losses(result)
    assert "hit fraction: worse" in loss and "includes 0" in loss


def test_the_page_goes_between_the_markers_and_nowhere_else(report: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"# Words\n\n{report.BEGIN}\nold\n{report.END}\nmore words\n")
    report.write_docs(result_of(), file)
    text = file.read_text()
    assert text.startswith("# Words") and text.endswith("more words\n") and "old" not in text
    assert "fixed partition" in text
    with pytest.raises(ValueError, match="needs the markers"):
        file.write_text("# Words")
        report.write_docs(result_of(), file)
    report_page = report.PAGE.read_text()
    assert report_page.count(report.BEGIN) == 1 and report_page.index(report.BEGIN) < report_page.index(report.END)


def test_kept_results_make_their_page(report: Any) -> None:
    """What is committed can be read by what is committed."""
    for file in sorted((ROOT / "benchmarks/results").glob("engines-*.json")):
        assert report.NAMES["e2"] in report.page(json.loads(file.read_text())), file.name


# --- what is started --------------------------------------------------------------------------------------------------


def test_engines_on_a_card_get_equal_shares(processes: Any) -> None:
    free, taken = 1.0, []
    for number in range(3):
        taken.append(free * processes.share_of_free(number, 3))
        free -= taken[-1]
    assert taken == pytest.approx([processes.CARD_SHARE / 3] * 3)


def test_no_two_sockets_of_a_fleet_have_the_same_port(processes: Any) -> None:
    shape = processes.Shape(Path("model"), "cpu", 4, 22_000, 8, 24_000)
    ports: list[int] = []
    for number in range(4):
        words = processes.sglang_command(Path("python"), shape, number)
        events = json.loads(words[words.index("--kv-events-config") + 1])
        ports.append(int(words[words.index("--port") + 1]))
        ports += [int(events[name].rsplit(":", 1)[1]) for name in ("endpoint", "replay_endpoint")]
    words = processes.gateway_command(Path("python"), ["http://a"], 24_000)
    ports += [int(words[words.index(name) + 1]) for name in ("--port", "--prometheus-port")]
    assert len(set(ports)) == len(ports) and 24_000 <= min(ports) <= max(ports) < 24_200


@pytest.mark.parametrize("flags, dtype", [("fpu avx512f amx_bf16", "bfloat16"), ("fpu avx512f", "float32")])
def test_without_amx_engines_on_a_cpu_compute_in_float32(
    processes: Any, tmp_path: Path, flags: str, dtype: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    assert processes.cpu_dtype(tmp_path / "cpuinfo") == dtype
    assert processes.cpu_dtype(tmp_path / "missing") == "float32"


@pytest.mark.parametrize("code, ends", [("import sys; sys.exit('no such model')", "no such model"), ("pass", "")])
def test_an_engine_that_ends_before_it_is_ready_says_why(
    processes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, ends: str
) -> None:
    monkeypatch.setattr(processes, "LOGS", tmp_path)

    async def start() -> None:
        with processes.started("broken", [sys.executable, "-c", code], 0, {}) as (process, log):
            await processes.until_ready_line(process, log, 60.0)

    with pytest.raises(RuntimeError, match=f"broken did not get ready; its log ends: {ends}"):
        asyncio.run(start())


def test_the_model_of_mistrals_shape_is_one_that_the_torch_engine_runs(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    from preble.engines.torch import TorchEngine

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"word": 0}))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(bench, "make_tiny_model", lambda _, models: models / "tiny")
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    made = bench.mistral_shaped(tmp_path, "cpu", hidden_size=64, intermediate_size=96, **heads)
    assert (made / "tokenizer.json").exists()
    engine = TorchEngine(made, local=LocalConfig(8192), device="cpu", max_model_tokens=8192)
    sampling = SamplingParams(max_new_tokens=2, ignore_eos=True)
    engine.submit(GenerationRequest("r", np.arange(4200, dtype=np.int32), sampling))
    chunks = []
    while engine.has_work():
        chunks += engine.step()
    assert chunks[-1].finish_reason == "length", "a prompt longer than Mistral's window of 4,096 tokens is answered"


# --- from end to end --------------------------------------------------------------------------------------------------


def fakes_as_fleet(load: Any, servers: list[FlushableServer]) -> Any:
    """The fakes, with the first of them in the gateway's place: it speaks the same."""

    @contextlib.asynccontextmanager
    async def gateway() -> Any:
        yield servers[0].url

    return load.Fleet([one.url for one in servers], gateway=gateway, config=FAST)


@asynchronous
async def compared(bench: Any, load: Any, report: Any) -> None:
    servers = [FlushableServer("sglang") for _ in range(2)]
    for server in servers:
        await server.start()
    try:
        loads = [some_requests(load, seed=seed) for seed in range(2)]
        runs = await bench.compare(fakes_as_fleet(load, servers), loads, OUTPUT)
    finally:
        for server in servers:
            await server.kill()
    assert [run["arm"] for run in runs] == [*load.ARMS, *load.ARMS[1:], load.ARMS[0]]
    assert {run["failed"] for run in runs} == {0}
    assert {server.flushed for server in servers} == {len(runs) + 1}
    expected = [hits_if_at_home(requests) for requests in loads]
    for run in runs:
        if run["arm"] in ("partition", "gateway"):  # what is shared meets what was stored, if nothing of it is kept
            assert run["hit_fraction"] == pytest.approx(expected[run["repetition"]]), run["arm"]
        if run["arm"] == "partition":
            homes = [one.document % 2 for one in loads[run["repetition"]]]
            assert sorted(run["requests_by_engine"]) == sorted([homes.count(0), homes.count(1)])
        assert 0.0 < run["mean_ttft_seconds"] <= run["mean_latency_seconds"]
        assert sum(run["requests_by_engine"]) == (0 if run["arm"] == "gateway" else 12)
    assert all(run["hit_fraction"] <= expected[run["repetition"]] + 1e-9 for run in runs), "caches were emptied"
    text = report.page(result_of() | {"runs": runs})
    assert all(name in text for name in report.NAMES.values())


def hits_if_at_home(requests: Any) -> float:
    """All but the first request for a document find it."""
    seen: set[int] = set()
    hits = 0
    for one in requests:
        hits += len(DOCUMENTS[0]) * (one.document in seen)
        seen.add(one.document)
    return hits / sum(len(one.token_ids) for one in requests)


def test_all_arms_meet_the_same_engines_with_empty_caches(bench: Any, load: Any, report: Any) -> None:
    compared(bench, load, report)


@asynchronous
async def failed_requests(load: Any, report: Any) -> None:
    server = FlushableServer("sglang")
    await server.start()
    try:
        server.on_token = lambda position: b"data: nonsense\n\n" if position == 1 else None
        outcomes = await load.run_arm("partition", load.Fleet([server.url]), some_requests(load, 3), OUTPUT)
        server.on_token = lambda position: b": nothing\n\n" if position == OUTPUT - 1 else None
        short = await load.run_arm("partition", load.Fleet([server.url]), some_requests(load, 1), OUTPUT)
        server.on_token = None
        well = await load.run_arm("partition", load.Fleet([server.url]), some_requests(load, 1), OUTPUT)
        server.answers["/generate"] = (503, b"")
        refused = await load.run_arm("partition", load.Fleet([server.url]), some_requests(load, 1), OUTPUT)
    finally:
        await server.kill()
    assert [one.error for one in outcomes] == ["JSONDecodeError"] * 3
    assert [one.error for one in short + well + refused] == ["incomplete", "", "ClientResponseError"]


def test_failures_are_outcomes(load: Any, report: Any) -> None:
    failed_requests(load, report)


@asynchronous
async def test_a_connection_that_was_idle_is_not_used_again() -> None:
    """Regression: servers close it after five seconds, and what was sent just then failed, which nothing but the client
    was to blame for; a search for the saturation stopped at less than half of it."""
    peers: set[Any] = set()

    async def answer(request: web.Request) -> web.Response:
        peers.add(request.transport.get_extra_info("peername"))
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/", answer)
    async with TestServer(app) as server:
        for idle_seconds, connections in ((60.0, 1), (0.0, 2)):
            peers.clear()
            async with engine_load.new_session(idle_seconds) as session:
                for _ in range(2):
                    async with session.get(server.make_url("/")) as response:
                        await response.text()
                    await asyncio.sleep(0.001)
            assert len(peers) == connections
    async with engine_load.new_session() as session:
        assert session.connector is not None
        assert session.connector._keepalive_timeout == engine_load.IDLE_SECONDS < 5.0
