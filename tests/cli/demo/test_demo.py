"""The demo: its prompts, its plan, its report and picture, and a whole simulated run with real worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from preble.cli import console
from preble.cli.demo import corpus, experiment, fleet, plan, plot, program, progress, report
from preble.errors import MissingExtra
from tests.support.paths import ROOT

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

SOURCE = '''"""A module."""

def area(width, height):
    """Width times height."""
    return width * height

class Box:
    """A box."""

    def open(self):
        return self

    def _hidden(self):
        return None

async def fetch():
    return 1
'''


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_questions_ask_about_what_stands_in_the_document() -> None:
    questions = corpus.questions_about(SOURCE, last_line=len(SOURCE.split("\n")))
    assert "What does `area` return?" in questions
    assert "Which methods does the class `Box` define?" in questions
    assert "What does `Box.open` return?" in questions
    assert not any("_hidden" in question for question in questions)


def test_questions_never_ask_about_what_was_cut_off() -> None:
    questions = corpus.questions_about(SOURCE, last_line=6)
    assert questions and all("`area`" in question for question in questions)


@pytest.fixture(scope="module")
def documents() -> list[corpus.Document]:
    return corpus.load_documents(12, corpus.word_tokens, random.Random(0))


@pytest.fixture(scope="module")
def prompts(documents: list[corpus.Document]) -> list[corpus.DemoPrompt]:
    return corpus.choose_prompts(documents, 240, corpus.word_tokens, random.Random(1))


def test_documents_are_source_text_of_one_to_three_thousand_tokens(documents: list[corpus.Document]) -> None:
    low, high = corpus.DOCUMENT_TOKENS
    overhead = len(corpus.word_tokens(corpus.PREAMBLE)) + 20
    assert len({document.module for document in documents}) == len(documents)
    for document in documents:
        assert low <= document.tokens <= high + overhead
        assert len(document.questions) >= corpus.QUESTIONS_PER_DOCUMENT_MIN


def test_prompts_about_one_document_share_all_of_it(
    documents: list[corpus.Document], prompts: list[corpus.DemoPrompt]
) -> None:
    for prompt in prompts:
        document = documents[prompt.document]
        assert list(prompt.token_ids[: document.tokens]) == corpus.word_tokens(document.prefix)
        assert len(prompt.token_ids) > document.tokens


def test_the_same_seed_gives_the_same_experiment() -> None:
    def make(seed: int) -> list[corpus.DemoPrompt]:
        rng = random.Random(seed)
        made = corpus.choose_prompts(corpus.load_documents(4, corpus.word_tokens, rng), 20, corpus.word_tokens, rng)
        return corpus.with_arrivals(made, 5.0, rng)

    assert make(3) == make(3)
    assert make(3) != make(4)


def test_arrivals_are_a_poisson_process_of_the_given_rate(prompts: list[corpus.DemoPrompt]) -> None:
    timed = corpus.with_arrivals(prompts, 4.0, random.Random(0))
    moments = [prompt.arrival_seconds for prompt in timed]
    gaps = [b - a for a, b in zip([0.0, *moments], moments, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert moments == sorted(moments)
    assert mean == pytest.approx(0.25, rel=0.15)
    # An exponential's standard deviation equals its mean; a regular stream's would be near 0.
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(mean, rel=0.25)


def test_word_tokens_are_the_same_on_every_machine() -> None:
    assert corpus.word_tokens("def f(x):") == corpus.word_tokens("def f(x):")
    word, blank, again = corpus.word_tokens("ab ab")
    assert word == again != blank
    assert corpus.word_tokens("hello")[0] == 20_870


# --- plan -------------------------------------------------------------------------------------------------------------

SPEED = plan.Speed(prefill_tokens_per_second=2000.0, cached_request_seconds=0.06)


def test_a_worker_holds_its_share_of_the_documents_and_not_all(documents: list[corpus.Document]) -> None:
    working_set = sum(document.tokens for document in documents)
    assert working_set / 2 < plan.kv_capacity(documents, 2) < 0.75 * working_set


def test_round_robin_is_brought_near_saturation_and_not_beyond(
    documents: list[corpus.Document], prompts: list[corpus.DemoPrompt]
) -> None:
    for speed in (200.0, 2000.0, 20000.0):
        made = plan.make_plan(documents, prompts, plan.Speed(speed, 100 / speed), workers=2, seconds=60)
        assert 0.7 < made.round_robin_utilisation < 1.0
        assert made.e2_utilisation < 0.75 * made.round_robin_utilisation


def test_a_faster_machine_gets_more_requests_within_bounds(
    documents: list[corpus.Document], prompts: list[corpus.DemoPrompt]
) -> None:
    def requests(speed: float) -> int:
        measured = plan.Speed(speed, 0.06)
        return plan.make_plan(documents, prompts, measured, workers=2, seconds=60).requests

    assert (
        plan.REQUESTS_PER_DOCUMENT_MIN * len(documents)
        == requests(100.0)
        <= requests(1500.0)
        <= requests(1e6)
        <= len(prompts)
    )


def test_what_the_user_asks_for_is_what_is_planned(
    documents: list[corpus.Document], prompts: list[corpus.DemoPrompt]
) -> None:
    made = plan.make_plan(documents, prompts, SPEED, workers=2, seconds=60, requests=33, rate_per_second=1.5)
    assert (made.requests, made.rate_per_second) == (33, 1.5)


def test_round_robin_misses_what_the_cache_cannot_hold(documents: list[corpus.Document]) -> None:
    everything = sum(document.tokens for document in documents)
    sample = corpus.choose_prompts(documents, 200, corpus.word_tokens, random.Random(2))
    suffix = sum(plan.suffix_tokens(documents, prompt) for prompt in sample) / len(sample)
    roomy = plan.missed_tokens(documents, sample, 2, 10 * everything)
    assert roomy == pytest.approx(suffix + 2 * everything / len(sample), rel=0.02)
    assert plan.missed_tokens(documents, sample, 2, everything // 2) > 1.5 * roomy


# --- report and picture -----------------------------------------------------------------------------------------------


def phase(policy: str, ttft_seconds: float, cached_tokens: int, count: int = 40) -> report.Phase:
    """A made-up phase: every request's TTFT grows a little with its number."""
    records = [
        report.Record(
            number=i,
            document=i % 4,
            prompt_tokens=1000,
            arrival_seconds=i * 0.5,
            worker=f"worker-{i % 2}",
            cached_tokens=cached_tokens,
            output_tokens=8,
            first_token_seconds=i * 0.5 + ttft_seconds * (1 + i / 100),
            done_seconds=i * 0.5 + ttft_seconds * (1 + i / 100) + 0.2,
        )
        for i in range(count)
    ]
    return report.Phase(policy, records, ["worker-0", "worker-1"], wall_seconds=21.0)


@pytest.fixture
def phases() -> list[report.Phase]:
    return [phase("round_robin", 1.0, 200), phase("e2", 0.1, 950)]


def test_the_table_says_how_much_better_and_what_each_worker_did(phases: list[report.Phase]) -> None:
    rows = {line.split("   ")[0].strip(): line for line in report.table(phases).split("\n")}
    assert rows["TTFT mean"].endswith("10.0x")
    assert "8,000 (20%)" in rows["prompt tokens reused"] and "38,000 (95%)" in rows["prompt tokens reused"]
    assert rows["prompt tokens computed"].endswith("16.0x")
    assert "16,000" in rows["worker-0: tokens computed"] and "1,000" in rows["worker-0: tokens computed"]


def test_percentiles_are_values_that_occurred() -> None:
    assert report.spread([3.0, 1.0, 2.0]) == report.Spread(2.0, 2.0, 3.0, 3.0)
    assert report.spread(range(1, 101)).p99 == 99
    assert math.isnan(report.spread([]).mean)


def test_latency_counts_from_the_planned_arrival() -> None:
    record = report.Record(0, 0, 10, arrival_seconds=2.0, first_token_seconds=5.0, done_seconds=6.0)
    assert (record.ttft_seconds, record.latency_seconds) == (3.0, 4.0)


def test_failed_requests_are_counted_and_kept_out_of_the_times(phases: list[report.Phase]) -> None:
    before = phases[0].ttft()
    phases[0].records.append(report.Record(99, 0, 1000, 0.0, error="the worker is gone"))
    assert phases[0].ttft() == before
    assert "40 of 41" in report.table(phases)
    assert report.summary(phases[0])["failed"] == 1


def test_the_json_says_everything_needed_to_run_it_again(phases: list[report.Phase], tmp_path: Path) -> None:
    phases[0].records.append(report.Record(99, 0, 1000, 0.0, error="the worker is gone"))
    path = tmp_path / "deep" / "demo.json"
    console.write_json(path, report.document({"seed": 7, "odd": math.nan}, phases, "note"))
    content = json.loads(path.read_text())
    assert content["settings"] == {"seed": 7, "odd": None}
    assert content["versions"]["preble"] and content["machine"]["cores"]
    assert [one["policy"] for one in content["phases"]] == ["round_robin", "e2"]
    assert len(content["phases"][0]["requests"]) == 41
    assert content["mean_ttft_speedup"] == pytest.approx(10.0)


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    return width, height


def test_the_plot_is_a_picture(phases: list[report.Phase], tmp_path: Path) -> None:
    plot.draw(tmp_path / "out" / "demo.png", phases, "subtitle", "footnote")
    width, height = png_size(tmp_path / "out" / "demo.png")
    assert width > 1000 and height > 600


def test_the_plot_survives_a_phase_in_which_nothing_finished(phases: list[report.Phase], tmp_path: Path) -> None:
    for record in phases[1].records:
        record.error = "lost"
    plot.draw(tmp_path / "demo.png", phases, "subtitle", "footnote")
    assert png_size(tmp_path / "demo.png")
    assert "no request finished" in report.headline(phases)


def test_the_headline_admits_a_loss(phases: list[report.Phase]) -> None:
    assert "10.0 times sooner" in report.headline(phases)
    assert "10.0 times later" in report.headline(phases[::-1])


def test_in_flight_rises_at_arrival_and_falls_at_the_last_token() -> None:
    records = [
        report.Record(0, 0, 1, arrival_seconds=1.0, done_seconds=4.0),
        report.Record(1, 0, 1, arrival_seconds=2.0, done_seconds=3.0),
    ]
    assert plot.in_flight(records) == ([0.0, 1.0, 2.0, 3.0, 4.0], [0, 1, 2, 1, 0])


def test_the_tally_counts_what_is_still_in_flight() -> None:
    tally = progress.Tally("e2", 10)
    tally.sent = 5
    assert tally.text == "5 in flight"
    tally.add(0.25, 1000, 900)
    assert "250 ms" in tally.text and "90%" in tally.text and " 4 in flight" in tally.text


def test_without_a_terminal_the_screen_is_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PLAIN_SECONDS", 0.0)
    stream = io.StringIO()
    screen, tally = console.Screen(stream), progress.Tally("e2", 2)
    screen.say("5/5 e2")
    with screen.phase(tally) as update:
        for _ in range(2):
            tally.sent += 1
            tally.add(0.1, 100, 50)
            update()
    lines = stream.getvalue().split("\n")
    assert lines[0] == "5/5 e2"
    assert [line.split()[1] for line in lines[1:-1]] == ["1/2", "2/2"]


# --- processes --------------------------------------------------------------------------------------------------------


def test_a_worker_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    async def start() -> None:
        async with fleet.DemoFleet(1, ["--engine", "torch", "--model", str(tmp_path / "nowhere")], tmp_path, "broken"):
            raise AssertionError("the fleet must not get ready")

    with pytest.raises(fleet.WorkerFailed) as failure:
        asyncio.run(start())
    message = str(failure.value)
    assert "worker-0 ended with exit code 2" in message
    assert "no such directory" in message
    assert str(tmp_path / "broken-worker-0.log") in message


def test_a_log_s_tail_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    assert fleet.tail(log, 2) == "    line 98\n    line 99"
    assert "not readable" in fleet.tail(tmp_path / "missing.log")


def test_calibration_prompts_share_no_prefix() -> None:
    tokens = list(range(1000))
    prompts = [experiment.rotated(tokens, turn, 1500) for turn in range(12)]
    assert {len(prompt) for prompt in prompts} == {1500}
    assert len({prompt[0] for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize(("number", "ending"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_ends_the_demo_where_it_waits_and_not_between_two_steps(
    number: signal.Signals, ending: type[BaseException]
) -> None:
    """Else it could come right after a socket was made, and closing the router would wait for that socket forever."""
    done: list[str] = []

    async def work() -> None:
        try:
            signal.raise_signal(number)
            done.append("socket made")
            await asyncio.Event().wait()
        finally:
            signal.raise_signal(number)  # somebody is impatient
            for _ in range(10):
                await asyncio.sleep(0)
            done.append("socket closed")

    with pytest.raises(ending) as ended:
        asyncio.run(program.until_asked_to_end(work()))
    assert done == ["socket made", "socket closed"]
    assert ending is KeyboardInterrupt or ended.value.args == (128 + number,)


def test_work_that_cancels_itself_is_not_taken_for_a_signal() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(program.until_asked_to_end(work()))


# --- the whole --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulated(run_python: RunPython, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A quick simulated run with real worker processes: its directory and what it printed."""
    directory = tmp_path_factory.mktemp("demo")
    command = ["-m", "preble.cli", "demo", "--engine", "simulated", "--quick", "--requests", "60"]
    result = run_python(*command, "--workdir", str(directory), timeout_seconds=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return directory, result.stdout


def test_the_simulated_demo_serves_every_prompt_under_both_policies(simulated: tuple[Path, str]) -> None:
    directory, printed = simulated
    content = json.loads((directory / "demo.json").read_text())
    assert [one["policy"] for one in content["phases"]] == ["round_robin", "e2"]
    for one in content["phases"]:
        assert (one["finished"], one["failed"]) == (60, 0)
        assert all(r["output_tokens"] == content["settings"]["output_tokens"] for r in one["requests"])
        assert {r["worker"] for r in one["requests"]} == {"worker-0", "worker-1"}
    assert "TTFT mean" in printed and "simulated" in printed


def test_e2_reuses_more_than_round_robin_in_the_simulated_demo(simulated: tuple[Path, str]) -> None:
    content = json.loads((simulated[0] / "demo.json").read_text())
    round_robin, e2 = (one["reused_fraction"] for one in content["phases"])
    assert e2 > round_robin + 0.1
    assert e2 > 0.7


def test_the_same_prompts_arrive_at_the_same_times_under_both_policies(simulated: tuple[Path, str]) -> None:
    content = json.loads((simulated[0] / "demo.json").read_text())
    first, second = (
        [(r["number"], r["document"], r["prompt_tokens"], r["arrival_seconds"]) for r in one["requests"]]
        for one in content["phases"]
    )
    assert first == second


def test_the_simulated_demo_draws_its_picture(simulated: tuple[Path, str]) -> None:
    assert png_size(simulated[0] / "demo.png")[0] > 1000


def test_wrong_options_are_refused(run_python: RunPython) -> None:
    result = run_python("-m", "preble.cli", "demo", "--workers", "0")
    assert result.returncode == 2
    assert "--workers" in result.stderr and "at least 1" in result.stderr


def test_without_torch_the_demo_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "find_spec", lambda name: None)
    settings = program.Settings("torch", 2, 12, 12, 10.0, 0, None, None, 1.0)
    with pytest.raises(MissingExtra, match=r"preble\[torch,bench\].*--engine simulated"):
        program.check_extras(settings, plot_wanted=False)


def test_a_demo_that_is_asked_to_end_takes_its_workers_along(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "preble.cli", "demo", "--engine", "simulated", "--workdir", str(tmp_path)]
    demo = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert demo.stderr is not None
        while not demo.stderr.readline().startswith("4/5"):
            assert demo.poll() is None
        log = tmp_path / "logs" / "round_robin-worker-1.log"
        while not (log.exists() and "READY " in log.read_text()):
            assert demo.poll() is None
            time.sleep(0.05)
        demo.terminate()
        assert demo.wait(60) == 128 + signal.SIGTERM
        assert "drained" in log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(demo.pid, signal.SIGKILL)
        demo.communicate()
