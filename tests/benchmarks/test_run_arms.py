"""`benchmarks.live.run_arms`: the search for the saturation, pairing, resuming, noise, and the page of what is missing.
Engines are scripted and time is reckoned, not waited for; nothing is said here of who is faster."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import os
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, web

from benchmarks.live import (
    arm_fleet,
    arm_noise,
    arm_plot,
    arm_report,
    arm_traffic,
    core_speed,
    engine_fleet,
    run_arms,
    run_audit,
)
from benchmarks.live.engine_load import Outcome, Progress, Request
from tests.support.transport import asynchronous

SERVICE_SECONDS = 1 / 7
SERVERS_ARMS = tuple(arm for arm in arm_fleet.ARMS if arm != "lru workers")
QUIET = {"stolen_share": 0.0, "others_share": 0.01, "load_1_minute_before": 0.5}
NOISY = {**QUIET, "others_share": 0.5}
DIALOGUE = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "yes", "tool_calls": [{"name": "look"}]},
    {"role": "tool", "content": "found"},
    {"role": "assistant", "content": "done"},
]

CODING = ["mend it", "mend it then look", "mend it then look and write", "w " * (arm_traffic.AGENT_TOKENS + 1), "end"]


@pytest.fixture
def sources(tmp_path: Path) -> arm_traffic.Sources:
    """Files of words, and a tokenizer for which a word is a token."""
    files = []
    for number in range(45):
        files.append(tmp_path / f"{number}.py")
        files[-1].write_text(" ".join(f"w{number}x{k}" for k in range(1510 + number)))
    with gzip.open(tmp_path / "agents.json.gz", "wt") as output:
        json.dump([{"traj": DIALOGUE}] * 3, output)
    with tarfile.open(tmp_path / "coding.tar.xz", "w:xz") as archive:
        for name, lines in [("miniswe/a", CODING), ("miniswe/b", CODING[:2]), ("taubench/c", CODING)]:
            content = "".join(json.dumps({"input": line}) + "\n" for line in lines).encode()
            member = tarfile.TarInfo(f"{name}.jsonl")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return arm_traffic.Sources(
        tuple(files),
        tmp_path / "agents.json.gz",
        tmp_path / "coding.tar.xz",
        lambda text: list(map(hash, text.split())),
    )


class ScriptedBench(run_arms.Bench):
    """A bench whose engines are one queue that serves a request in a seventh of a second, or half that by "smg"."""

    def __init__(self, args: Any, sources: arm_traffic.Sources, quiet: Any = ()) -> None:
        super().__init__(args, SimpleNamespace(engine="sglang"), sources)  # type: ignore[arg-type]
        self.asked: list[tuple[str, list[arm_traffic.Session]]] = []
        self.quiet = list(quiet)

    async def measured(self, arm: str, sessions: Any, late_seconds: float | None = None, name: str = "") -> Any:
        self.asked.append((arm, list(sessions)))
        each = SERVICE_SECONDS / 2 if arm == "smg" else SERVICE_SECONDS
        free, outcomes = 0.0, []
        for one in sessions:
            free = max(free, one.arrival_seconds) + each
            waited = free - one.arrival_seconds
            outcomes.append(Outcome(10, waited, waited, 5, "a"))
        late = late_seconds is not None and any(one.latency_seconds > late_seconds for one in outcomes)
        return None if late else outcomes, self.quiet.pop(0) if self.quiet else QUIET


def arguments(tmp_path: Path, *more: str) -> Any:
    return run_arms.parser().parse_args(
        ["--json", str(tmp_path / "kept.jsonl"), "--seconds", "15", "--repetitions", "2", *more]
    )


@pytest.fixture(autouse=True)
def peers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gateway is started here."""
    monkeypatch.setattr(arm_fleet, "peer_version", lambda python, name: "1.0")


# --- the saturation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.2, 1.0, 5.5, 12.0, 13.0, 40.0, 120.0])
@asynchronous
async def test_the_search_ends_within_an_eighth_below_what_is_kept_up_with(limit: float) -> None:
    tried = []

    async def keeps_up(rps: float) -> bool:
        tried.append(rps)
        return rps <= limit

    found = await run_arms.saturation(keeps_up)
    assert limit / run_arms.RATE_RATIO <= found <= limit
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("answer", [True, False])
@asynchronous
async def test_engines_without_a_limit_or_without_an_answer_are_an_error(answer: bool) -> None:
    async def keeps_up(rps: float) -> bool:
        return answer

    with pytest.raises(RuntimeError, match="keep up with"):
        await run_arms.saturation(keeps_up)


@asynchronous
async def test_a_queue_is_saturated_where_its_service_is_and_the_answer_is_kept(
    tmp_path: Path, sources: arm_traffic.Sources
) -> None:
    bench = ScriptedBench(arguments(tmp_path), sources)
    rps = await bench.find_saturation("documents")
    # An answer may be late by a fifth of the arrivals' time, and how many arrive is drawn.
    assert 0.8 / SERVICE_SECONDS < rps < 1.5 / SERVICE_SECONDS
    assert {arm for arm, _ in bench.asked} == {"partition"}
    again = ScriptedBench(arguments(tmp_path), sources)
    assert await again.find_saturation("documents") == pytest.approx(rps, rel=1e-5) and not again.asked


@asynchronous
async def test_a_search_that_was_stopped_goes_on_with_the_rates_it_has_tried(
    tmp_path: Path, sources: arm_traffic.Sources
) -> None:
    whole = ScriptedBench(arguments(tmp_path), sources)
    rps = await whole.find_saturation("documents")
    file = tmp_path / "kept.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    resumed = ScriptedBench(arguments(tmp_path), sources)
    assert await resumed.find_saturation("documents") == pytest.approx(rps, rel=1e-5)
    assert len(resumed.asked) == len(whole.asked) - 3


def test_a_rate_with_a_failure_is_not_kept_up_with() -> None:
    assert run_arms.kept_up([Outcome(1, 1.0, 6.9)])
    assert not run_arms.kept_up([Outcome(1, 1.0, 6.9), Outcome(1, error="TimeoutError")])
    assert not run_arms.kept_up(None)


@asynchronous
async def test_a_rate_that_failed_is_kept_with_what_failed(
    tmp_path: Path, sources: arm_traffic.Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = ScriptedBench(arguments(tmp_path), sources)
    failed = [Outcome(1, error=error) for error in ("TimeoutError", "ClientOSError", "TimeoutError")]

    async def measured(*_: Any) -> Any:
        return [Outcome(1, 1.0, 6.9), *failed], QUIET

    monkeypatch.setattr(bench, "measured", measured)
    assert not await bench.keeps_up("documents", 2.0)
    (probe,) = run_arms.read_lines(tmp_path / "kept.jsonl")
    assert (probe["kept_up"], probe["failures"]) == (False, {"ClientOSError": 1, "TimeoutError": 2})


@asynchronous
async def test_a_rate_is_given_up_at_its_first_late_answer_and_nothing_goes_on() -> None:
    running, ended = 0, []

    async def ask(request: Request) -> AsyncIterator[Progress]:
        nonlocal running
        running += 1
        try:
            if request.document == 1:
                await asyncio.Event().wait()
            yield Progress(2, 0, "a")
            ended.append(request.document)
        finally:
            running -= 1

    turn = arm_traffic.Turn("", [1])
    sessions = [arm_traffic.Session(0, 0.0, [turn]), arm_traffic.Session(1, 0.0, [turn])]
    later = arm_traffic.Session(2, 3600.0, [turn])
    with pytest.raises(run_arms.Late):
        await run_arms.send_all(ask, [*sessions, later], 2, 0.5)
    assert ended == [0] and running == 0


@asynchronous
async def test_a_turn_is_late_by_when_it_was_due_not_by_when_it_was_asked() -> None:
    asked = []

    async def ask(request: Request) -> AsyncIterator[Progress]:
        asked.append(request.token_ids)
        yield Progress(2, 0, "a")

    # By plan the turns are due long ago: each is answered at once, and the session is behind all the same.
    behind = arm_traffic.Session(0, -100.0, [arm_traffic.Turn("", [n]) for n in range(3)])
    with pytest.raises(run_arms.Late):
        await run_arms.send_all(ask, [behind], 2, 50.0)
    assert not asked
    outcomes = await run_arms.send_all(ask, [behind], 2, 101.0)
    assert [one.error for one in outcomes] == ["", "", ""]


# --- pairing, resuming, noise -----------------------------------------------------------------------------------------


@asynchronous
async def test_arms_of_a_repetition_meet_the_same_requests_in_an_order_of_its_own(
    tmp_path: Path, sources: arm_traffic.Sources
) -> None:
    bench = ScriptedBench(arguments(tmp_path), sources)
    await run_arms.measure_traffic(bench, "documents", 0.95)
    runs = bench.asked[-2 * len(SERVERS_ARMS) :]
    first, second = runs[: len(SERVERS_ARMS)], runs[len(SERVERS_ARMS) :]
    assert all(sessions == first[0][1] for _, sessions in first)
    assert all(sessions == second[0][1] != first[0][1] for _, sessions in second)
    orders = [[arm for arm, _ in one] for one in (first, second)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(SERVERS_ARMS) and orders[0] != orders[1]
    few = run_arms.order_of(("smg", "partition"), 0, 1)
    assert few == [arm for arm in orders[0] if arm in ("smg", "partition")]


@asynchronous
async def test_what_is_kept_is_not_measured_again_and_a_line_cut_off_is(
    tmp_path: Path, sources: arm_traffic.Sources
) -> None:
    chosen = arguments(tmp_path, "--arms", "smg", "partition")
    await run_arms.measure_traffic(ScriptedBench(chosen, sources), "documents", 0.5)
    file = tmp_path / "kept.jsonl"
    whole = file.read_text()
    idle = ScriptedBench(chosen, sources)
    await run_arms.measure_traffic(idle, "documents", 0.5)
    assert not idle.asked and file.read_text() == whole
    file.write_text(whole[:-20])
    resumed = ScriptedBench(chosen, sources)
    await run_arms.measure_traffic(resumed, "documents", 0.5)
    assert len(resumed.asked) == 1
    # Dates aside, the same run: it was given the same requests.
    last = [json.loads(text.splitlines()[-1]) for text in (whole, file.read_text())]
    assert last[0]["ttft_seconds"] == last[1]["ttft_seconds"] and last[0]["arm"] == last[1]["arm"]


@asynchronous
async def test_runs_of_other_settings_or_seeds_do_not_stand_in(tmp_path: Path, sources: arm_traffic.Sources) -> None:
    chosen = ("--arms", "smg", "--repetitions", "1")
    await run_arms.measure_traffic(ScriptedBench(arguments(tmp_path, *chosen), sources), "documents", 0.5)
    for other in (("--seed", "1"), ("--output-tokens", "3")):
        bench = ScriptedBench(arguments(tmp_path, *chosen, *other), sources)
        await run_arms.measure_traffic(bench, "documents", 0.5)
        assert [arm for arm, _ in bench.asked].count("smg") == 1 and len(bench.asked) > 1


def test_on_another_machine_all_is_measured_anew_and_only_that_counts(
    tmp_path: Path, sources: arm_traffic.Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ("--arms", "smg", "--repetitions", "1")
    args = arguments(tmp_path, *chosen)
    asyncio.run(run_arms.measure_traffic(ScriptedBench(args, sources), "documents", 0.5))
    first = len(run_arms.read_lines(args.json))

    async def measure(args: Any, engine: str, load: float, until: float) -> None:
        if engine == "sglang":
            bench = ScriptedBench(args, sources)
            await run_arms.measure_traffic(bench, "documents", load)
            asked.append([arm for arm, _ in bench.asked])

    asked: list[list[str]] = []
    monkeypatch.setattr(run_arms, "measure", measure)
    command = ["run_arms", "--json", str(args.json), "--seconds", "15", *chosen, "--load", "0.5", "0.8"]
    for more in (["--anew"], []):
        monkeypatch.setattr("sys.argv", [*command, *more])
        run_arms.main()
    assert asked[0][-1] == "smg" and "partition" in asked[0], "the saturation is found again"
    assert asked[1:] == [["smg"], [], []], "and once for all loads; a call without the option goes on from there"
    kept = run_arms.read_lines(args.json)
    runs = arm_report.counted([{**one, "commit": number} for number, one in enumerate(kept)])
    assert len(runs) == 2 and all(run["commit"] >= first for run in runs.values())


def test_what_the_newest_saturation_has_replaced_does_not_count() -> None:
    def search(**more: Any) -> dict[str, Any]:
        found = {"kind": "saturation", "engine": "sglang", "traffic": "documents", "rps": 4.0, "seed": 0}
        return {**found, "settings": {"model": "tiny"}, **more}

    old = [search(), run_of("smg", 1, 9.0), run_of("smg", 2, 9.0), run_of("smg", 1, 9.0, traffic="agents")]
    new = [search(rps=8.0), run_of("smg", 1, 2.0)]
    longer = run_of("smg", 3, 7.0, settings={"model": "tiny", "seconds": 5})
    runs = arm_report.counted([*old, *new, longer, run_of("smg", 4, 7.0, seed=1)])
    assert {place[3]: run["mean_ttft_seconds"] for place, run in runs.items() if "documents" in place[1]} == {1: 2.0}
    assert len(runs) == 2, "another traffic's runs count as before"
    assert "8.00" in arm_report.page([*old, *new]) and "4.00 |" not in arm_report.saturations([*old, *new])


def test_a_traffic_has_its_own_length_and_pace_if_none_is_named() -> None:
    own = run_arms.parser().parse_args([])
    found = {traffic: run_arms.settings_of(own, traffic) for traffic in arm_traffic.TRAFFICS}
    assert [found[traffic]["seconds"] for traffic in ("documents", "agents", "coding agents")] == [60.0, 60.0, 120.0]
    assert {name for name, settings in found.items() if "turn_seconds" in settings} == {"agents", "coding agents"}
    named = run_arms.parser().parse_args(["--seconds", "7", "--turn-seconds", "2"])
    assert run_arms.settings_of(named, "coding agents")["seconds"] == 7.0
    assert run_arms.settings_of(named, "coding agents")["turn_seconds"] == 2.0


@pytest.mark.parametrize(("noisy", "runs"), [(0, 1), (1, 2), (2, 3), (9, 3)])
@asynchronous
async def test_a_noisy_run_is_kept_and_repeated_twice_at_most(
    tmp_path: Path, sources: arm_traffic.Sources, noisy: int, runs: int
) -> None:
    chosen = arguments(tmp_path, "--arms", "smg", "--repetitions", "1")
    await ScriptedBench(chosen, sources).find_saturation("documents")
    bench = ScriptedBench(chosen, sources, [NOISY] * noisy)
    await run_arms.measure_traffic(bench, "documents", 0.5)
    kept = [one for one in run_arms.read_lines(chosen.json) if one["kind"] == "run"]
    assert [one["noisy"] for one in kept] == [number < noisy for number in range(runs)]
    assert len(bench.asked) == runs


@asynchronous
async def test_no_run_begins_when_the_time_is_over(tmp_path: Path, sources: arm_traffic.Sources) -> None:
    bench = ScriptedBench(arguments(tmp_path, "--arms", "smg"), sources)
    await run_arms.measure_traffic(bench, "documents", 0.95, until=0.0)
    assert not bench.asked


def test_what_the_bars_are_about_is_measured_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun = []

    async def measure(args: Any, engine: str, load: float, until: float) -> None:
        begun.append((load, engine, args.traffic[0]))

    monkeypatch.setattr(run_arms, "measure", measure)
    monkeypatch.setattr("sys.argv", ["run_arms", "--load", "0.5", "0.95", "--json", str(tmp_path / "none.jsonl")])
    run_arms.main()
    assert begun == [(load, engine, "documents") for load in (0.95, 0.5) for engine in ("sglang", "vllm")]


def test_noise_is_what_others_used_and_what_was_stolen() -> None:
    text = "cpu  100 20 30 800 5 1 2 7 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"
    assert arm_noise.processor_ticks(text) == (965, 7, 153)
    first, last = arm_noise.Ticks(0, 0, 0, 0), arm_noise.Ticks(1000, 10, 500, 480)
    found = arm_noise.between(first, last, 0.3)
    assert found == {"stolen_share": 0.01, "others_share": 0.02, "load_1_minute_before": 0.3}
    assert not arm_noise.is_noisy(found)
    assert arm_noise.is_noisy({**found, "stolen_share": 0.021}) and arm_noise.is_noisy({**found, "others_share": 0.06})


def test_what_a_process_started_is_its_own(tmp_path: Path) -> None:
    parents = {1: 0, 10: 1, 11: 10, 12: 11, 20: 1}
    for pid, parent in parents.items():
        (tmp_path / str(pid)).mkdir()
        fields = f"S {parent} " + "0 " * 9 + "1 2 3 4 " + "0 " * 5
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a name) with ) in it) {fields}")
    found = arm_noise.process_ticks(tmp_path)
    assert found[12] == (11, 10)
    assert arm_noise.ticks_of_family(found, 10) == 30 and arm_noise.ticks_of_family(found, 20) == 10


# --- traffic ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("traffic", arm_traffic.TRAFFICS)
def test_the_same_seed_makes_the_same_traffic(sources: arm_traffic.Sources, traffic: str) -> None:
    made = arm_traffic.make_sessions(traffic, sources, 5.0, 40.0, 1)
    assert made == arm_traffic.make_sessions(traffic, sources, 5.0, 40.0, 1)
    assert made != arm_traffic.make_sessions(traffic, sources, 5.0, 40.0, 2)
    assert 120 < sum(len(one.turns) for one in made) < 280
    assert all(0.0 <= one.arrival_seconds < 40.0 for one in made)


def test_an_unknown_traffic_is_an_error(sources: arm_traffic.Sources) -> None:
    with pytest.raises(ValueError, match="no traffic 'chat'"):
        arm_traffic.make_sessions("chat", sources, 5.0, 40.0, 1)


def test_one_document_is_viral_in_the_middle_third(sources: arm_traffic.Sources) -> None:
    made = arm_traffic.make_sessions("viral document", sources, 20.0, 60.0, 1)
    share = [
        [one.key == 0 for one in made if low <= one.arrival_seconds < low + 20.0].count(True) / 400
        for low in (0.0, 20.0, 40.0)
    ]
    assert share[1] > 0.7 and max(share[0], share[2]) < 0.15


def test_users_share_the_system_prompt_and_then_their_own(sources: arm_traffic.Sources) -> None:
    made = arm_traffic.make_sessions("system prompt", sources, 20.0, 60.0, 1)
    texts = [one.turns[0].text for one in made]
    assert len({text.partition("\n[user")[0] for text in texts}) == 1
    assert len({text.partition("\nQuestion")[0] for text in texts}) == len({one.key for one in made}) == 40


def test_an_agents_turn_goes_on_from_the_one_before(sources: arm_traffic.Sources) -> None:
    first, second = arm_traffic.agent_turns(DIALOGUE, sources.encode, np.random.default_rng(1), 0.5)
    assert first.text == "[system] be brief\n[user] hello\n[assistant] " and first.pause_seconds == 0.0
    assert second.text == first.text + 'yes[{"name": "look"}]\n[tool] found\n[assistant] ' and second.pause_seconds > 0


def test_coding_sessions_end_before_the_first_prompt_that_does_not_fit_and_have_no_line_in_common(
    sources: arm_traffic.Sources,
) -> None:
    assert arm_traffic.coding_prompts(sources) == [CODING[:3], CODING[:2]]
    made = arm_traffic.make_sessions("coding agents", sources, 5.0, 40.0, 1)
    firsts = [one.turns[0].text.partition("\n")[0] for one in made]
    assert firsts == [f"[session {one.key}]" for one in made] and len(set(firsts)) == len(firsts)
    whole = next(one for one in made if len(one.turns) == 3)
    assert [turn.text.partition("\n")[2] for turn in whole.turns] == CODING[:3]
    assert whole.turns[2].token_ids == sources.encode(whole.turns[2].text) and whole.turns[1].pause_seconds > 0.0


def test_a_dialogue_has_the_turns_that_are_due_within_the_run() -> None:
    turns = [arm_traffic.Turn(str(n), [n]) for n in range(5)]
    step = arm_traffic.TURN_SECONDS
    before = arm_traffic.within(1, -1.5 * step, turns, 100.0, step)
    assert before.turns == turns[2:] and before.arrival_seconds == pytest.approx(0.5 * step)
    after = arm_traffic.within(1, 10.0, turns, 10.0 + 1.5 * step, step)
    assert after.turns == turns[:2] and after.due_seconds(1) == pytest.approx(10.0 + step)
    assert not arm_traffic.within(1, -100.0, turns, 100.0, step).turns


def test_agents_that_take_longer_between_turns_are_more_at_once(sources: arm_traffic.Sources) -> None:
    def at_once(turn_seconds: float) -> tuple[int, list[float]]:
        made = arm_traffic.make_sessions("agents", sources, 20.0, 60.0, 1, turn_seconds)
        due = [one.due_seconds(number) for one in made for number in range(len(one.turns))]
        return sum(one.arrival_seconds < turn_seconds for one in made), due

    (few, quick), (many, slow) = at_once(1.25), at_once(6.0)
    assert many > 3 * few
    assert all(900 < sum(0.0 <= at < 60.0 for at in due) < 1500 for due in (quick, slow)), "as many in all"


def test_as_many_turns_are_due_in_each_part_of_a_run(sources: arm_traffic.Sources) -> None:
    made = arm_traffic.make_sessions("agents", sources, 20.0, 60.0, 1)
    due = [one.due_seconds(number) for one in made for number in range(len(one.turns))]
    counts = [sum(low <= at < low + 20.0 for at in due) for low in (0.0, 20.0, 40.0)]
    assert all(320 < count < 480 for count in counts) and sum(counts) == len(due)


@asynchronous
async def test_a_turn_is_asked_once_the_one_before_is_answered_and_not_after_a_failure() -> None:
    running, asked = 0, []

    async def ask(request: Request) -> AsyncIterator[Progress]:
        nonlocal running
        assert running == 0, "the turn before has not been answered"
        running += 1
        asked.append(request.token_ids)
        await asyncio.sleep(0)
        running -= 1
        if request.token_ids == [3]:
            raise OSError
        yield Progress(2, 0, "a")

    turns = [arm_traffic.Turn(str(n), [n]) for n in range(6)]
    outcomes = await run_arms.send_all(ask, [arm_traffic.Session(0, 0.0, turns)], 2)
    assert asked == [[0], [1], [2], [3]]
    assert [one.error for one in outcomes] == ["", "", "", "OSError", "not asked", "not asked"]
    assert run_arms.summary(outcomes)["failures"] == {"OSError": 1, "not asked": 2}


# --- ways to ask ------------------------------------------------------------------------------------------------------


@asynchronous
async def test_the_least_loaded_server_is_the_one_with_the_fewest_requests() -> None:
    ends = {name: asyncio.Event() for name in "abc"}
    sent: list[tuple[int, str]] = []

    async def send(url: str, request: Request) -> AsyncIterator[Progress]:
        sent.append((request.document, url))
        await ends["abc"[request.document]].wait() if request.document < 3 else None
        yield Progress(1)

    ask = arm_fleet.least_loaded(["x", "y"], send)

    async def whole(number: int) -> None:
        async for _ in ask(Request(number, [1], 0.0)):
            pass

    tasks = []
    for number in range(3):
        tasks.append(asyncio.ensure_future(whole(number)))
        await asyncio.sleep(0)
    ends["a"].set()
    ends["c"].set()
    await asyncio.gather(tasks[0], tasks[2])
    await whole(3)
    assert sent == [(0, "x"), (1, "y"), (2, "x"), (3, "x")]
    ends["b"].set()
    await tasks[1]


def test_a_gateway_of_ours_is_started_before_the_engines_as_others_are() -> None:
    shape = engine_fleet.Shape(Path("model"), "cpu", 2, 22_000, 8, 24_000)
    command = arm_fleet.serve_command(["http://a:1", "http://b:2"], shape)
    assert command[1:4] == ["-m", "preble.cli", "serve"]
    assert command[command.index("--workers") + 1 :][:2] == ["http://a:1", "http://b:2"]
    assert command[command.index("--min-workers") + 1] == "2" and command[command.index("--port") + 1] == "24050"
    assert command[command.index("--tokenizer") + 1] == "model" and "--record-share" not in command
    named = arm_fleet.serve_command([], shape)
    assert "--workers" not in named and named[named.index("--min-workers") + 1] == "2"


def test_a_gateway_of_ours_is_named_where_vllm_publishes_its_events() -> None:
    shape = engine_fleet.Shape(Path("model"), "cpu", 2, 22_000, 8, 24_000)
    tables = json.loads(arm_fleet.servers_variable("vllm", shape, ["http://a:1", "http://b:2"])["PREBLE_SERVERS"])
    assert [one["url"] for one in tables] == ["http://a:1", "http://b:2"]
    for number, one in enumerate(tables):
        published = json.loads(
            said_after(arm_fleet.server_command("vllm", Path("p"), shape, number), "kv-events-config")
        )
        assert one["events_endpoint"].rpartition(":")[2] == published["endpoint"].rpartition(":")[2]
        assert one["replay_endpoint"].rpartition(":")[2] == published["replay_endpoint"].rpartition(":")[2]
    assert arm_fleet.servers_variable("sglang", shape, ["http://a:1"]) == {}, "these report it themselves"
    assert arm_fleet.servers_variable("vllm", shape, ["tcp://a:1"]) == {}, "workers, too"


def said_after(command: list[str], name: str) -> str:
    return command[command.index(f"--{name}") + 1]


@asynchronous
async def test_a_vllm_that_was_emptied_is_asked_for_a_token_so_that_it_publishes_that() -> None:
    asked = []

    async def note(request: web.Request) -> web.Response:
        asked.append((request.path, (await request.json())["max_tokens"] if request.can_read_body else None))
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.post("/reset_prefix_cache", note), web.post("/v1/completions", note)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await arm_fleet.emptied("vllm", [f"http://127.0.0.1:{runner.addresses[0][1]}"])
    finally:
        await runner.cleanup()
    assert asked == [("/reset_prefix_cache", None), ("/v1/completions", 1)]


def test_a_warm_up_caches_nothing_of_what_a_run_asks() -> None:
    asked = arm_traffic.Session(3, 0.5, (arm_traffic.Turn("same a", [1]), arm_traffic.Turn("same b", [2], 1.0)))
    other = run_arms.of_other_text(asked, "warm-up")
    assert [turn.text for turn in other.turns] == ["warm-up\nsame a", "warm-up\nsame b"]
    assert (other.key, other.arrival_seconds, other.turns[1].pause_seconds) == (3, 0.5, 1.0)


@asynchronous
async def test_a_group_that_ended_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = "import time; time.sleep(60)"
    monkeypatch.setattr(arm_fleet, "worker_command", lambda *_: [sys.executable, "-c", ready])
    monkeypatch.setattr(engine_fleet, "until_ready_line", answered)
    with contextlib.ExitStack() as stack:
        fleet = arm_fleet.EngineFleet(
            "sglang", Path(sys.executable), engine_fleet.Shape(Path("m"), "cpu", 1, 1, 1, 24_000), stack
        )
        first = (await fleet.group("workers")).processes[0]
        assert (await fleet.group("workers")).processes[0] is first
        fleet.end("workers")
        fleet.end("servers")  # was never started
        assert first.poll() is not None
        second = (await fleet.group("workers")).processes[0]
        assert second is not first and second.poll() is None
    assert second.poll() is not None


@asynchronous
async def test_our_torch_engine_is_asked_directly_through_a_gateway_before_each_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[list[str]] = []

    @contextlib.contextmanager
    def started(name: str, command: list[str], *_: object) -> Any:
        begun.append([name, *command])
        yield SimpleNamespace(pid=0), Path("log")

    monkeypatch.setattr(engine_fleet, "started", started)
    monkeypatch.setattr(engine_fleet, "until_ready_line", answered)
    monkeypatch.setattr(engine_fleet, "until_answers", answered)
    monkeypatch.setattr(arm_fleet.Group, "signal", lambda *_: None)
    shape = engine_fleet.Shape(Path("m"), "cpu", 2, 1000, 8, 24_000)
    with contextlib.ExitStack() as stack:
        fleet = arm_fleet.EngineFleet("torch", Path(sys.executable), shape, stack)
        assert (await fleet.group("servers")).addresses == ["http://127.0.0.1:24000", "http://127.0.0.1:24001"]
        assert [one[0] for one in begun] == ["torch-servers-0", "torch-face-0", "torch-servers-1", "torch-face-1"]
        assert begun[3][5:7] == ["--workers", "tcp://127.0.0.1:24021"] and "24001" in begun[3]
        assert "tcp://127.0.0.1:24021" in begun[2]
        fleet.end("servers")
        assert (await fleet.group("lru workers")).addresses == ["tcp://127.0.0.1:24020", "tcp://127.0.0.1:24021"]
    assert [one[one.index("--eviction") + 1] for one in begun if "--eviction" in one] == ["returns"] * 2 + ["lru"] * 2


def test_a_run_of_our_torch_engine_has_the_arms_that_it_has() -> None:
    arms = [arm for arm in arm_fleet.ARMS if arm_fleet.suits(arm, "torch")]
    assert arms == ["round robin", "least load", "partition", "preble workers", "lru workers"]
    kept = [run_of("preble workers", n, 1.0, engine="torch") for n in (1, 2, 3)]
    kept += [run_of("lru workers", n, 2.0, engine="torch") for n in (1, 2, 3)]
    page = arm_report.page(kept)
    assert "| lru workers | 2.000 | 2.000 | 2.000 | 2.000 | 0.800 | 2.00 (2.00 to 2.00) |" in page
    assert "| preble serve |" not in page.partition("### torch")[2]


async def answered(*_: object) -> None:
    """At once."""


@asynchronous
async def test_sglang_is_asked_for_text_and_a_gateway_names_the_engine() -> None:
    bodies = []

    async def generate(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        response = web.StreamResponse(headers={"x-preble-worker": "http://a:1"})
        await response.prepare(request)
        for tokens in (1, 2):
            meta = {"completion_tokens": tokens, "cached_tokens": 16}
            await response.write(b"data: " + json.dumps({"meta_info": meta}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async with server("/generate", generate) as url, ClientSession() as session:
        request = arm_traffic.TextRequest(0, [1], 0.0, "some text")
        found = [one async for one in arm_fleet.generated(session, url, request, 2)]
    assert found == [Progress(1, 16, "http://a:1"), Progress(2, 16, "http://a:1")]
    assert bodies[0]["text"] == "some text" and "input_ids" not in bodies[0]


@contextlib.asynccontextmanager
async def server(path: str, handler: Any) -> AsyncIterator[str]:
    """A server with one endpoint; yields its URL."""
    app = web.Application()
    app.router.add_post(path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_servers_that_share_a_card_are_given_their_room_and_draw_their_weights(tmp_path: Path) -> None:
    def command(device: str) -> list[str]:
        shape = engine_fleet.Shape(tmp_path, device, 4, 11_000, 8, 24_000)
        return arm_fleet.server_command("vllm", Path("python"), shape, 1)

    def said(words: list[str], name: str) -> str | None:
        return words[words.index(name) + 1] if name in words else None

    card, cpu = command("cuda"), command("cpu")
    assert said(card, "--load-format") == "dummy" and said(cpu, "--load-format") is None
    assert said(card, "--dtype") == "bfloat16" and said(cpu, "--dtype") == "float32"
    assert said(card, "--num-gpu-blocks-override") == "688" and said(card, "--block-size") == "16"
    assert "--kv-cache-memory-bytes" in card and "--kv-cache-memory-bytes" not in cpu
    worker = arm_fleet.worker_command(
        "vllm", Path("python"), engine_fleet.Shape(tmp_path, "cuda", 4, 11_000, 8, 24_000), 1
    )
    assert "load_format=dummy" in worker, "as servers draw theirs"


@asynchronous
async def test_a_completion_of_vllm_is_read_with_its_hit() -> None:
    bodies = []

    async def completions(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        usage = {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}}
        pieces = [{"choices": [{"text": "a"}]}, {"choices": [{"text": ""}]}, {"choices": [], "usage": usage}]
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async with server("/v1/completions", completions) as url, ClientSession() as session:
        request = arm_traffic.TextRequest(0, [1], 0.0, "some text")
        found = [one async for one in arm_fleet.completed(session, url, request, 2)]
    assert found == [Progress(1, None, url), Progress(2, None, url), Progress(2, 32, url)]
    assert bodies[0]["prompt"] == "some text" and bodies[0]["max_tokens"] == 2


# --- the page ---------------------------------------------------------------------------------------------------------


def run_of(arm: str, repetition: int, ttft: float, **more: Any) -> dict[str, Any]:
    names = ("mean_ttft_seconds", "p99_ttft_seconds", "mean_latency_seconds", "p99_latency_seconds")
    found = {"kind": "run", "engine": "sglang", "traffic": "documents", "load": 0.95, "repetition": repetition}
    found |= {"arm": arm, "rps": 4.0, "requests": 100, "failed": 0, "hit_fraction": 0.8, "noisy": False, **QUIET}
    found |= {"commit": "abc", "machine": "m", "date": "d", "seed": 0, "settings": {"model": "tiny"}}
    return {**found, **dict.fromkeys(names, ttft), **more}


def test_losses_come_first_and_what_lacks_is_told() -> None:
    kept = [run_of("preble serve", n, 1.0) for n in (1, 2, 3)]
    kept += [run_of("round robin", n, 2.0 + n / 10) for n in (1, 2, 3)]
    kept += [run_of("smg", n, 0.5) for n in (1, 2, 3)] + [run_of("partition", 1, 1.0)]
    page = arm_report.page(kept)
    losses = page[: page.index("**In all.**")]
    assert "preble serve against round robin: short of 2.5 times: its mean TTFT is 2.20 (2.10 to 2.30)" in losses
    assert "preble serve against smg: behind, for certain: its mean TTFT is 0.50 (0.50 to 0.50)" in losses
    assert "partition" not in losses.replace("fixed partition", "") and page.startswith("**Losses.**")
    assert "| sglang-router | missing |" in page and "| preble workers | missing |" in page
    assert "- sglang, documents, at 0.8, 0.5" in page and "- vllm, agents, at 0.95, 0.8, 0.5" in page


def test_losses_of_latency_stand_beside_those_of_ttft_and_are_counted() -> None:
    kept = [run_of("preble serve", 1, 1.0, mean_latency_seconds=3.0)]
    kept += [run_of("partition", 1, 2.0, mean_latency_seconds=2.0), run_of("smg", 1, 4.0, mean_latency_seconds=2.5)]
    page = arm_report.page(kept)
    late = page[page.index("**Losses of mean latency**") : page.index("**In all.**")]
    assert "documents with tiny at 0.95: preble serve against partition, of 1 repetition: 0.67 times ours" in late
    assert "smg" not in late
    runs = arm_report.counted(kept)
    assert arm_report.behind(runs, "preble serve", arm_report.LATENCY) == (1, 1)
    assert arm_report.behind(runs, "preble serve", arm_report.TTFT) == (0, 1)
    assert arm_report.behind(runs, "preble workers", arm_report.TTFT) == (0, 0)


def test_how_often_ours_are_ahead_is_counted_over_all_places() -> None:
    kept = [run_of("preble serve", 1, 1.0), run_of("smg", 1, 4.0), run_of("partition", 1, 0.9)]
    kept += [run_of(arm, 1, ttft, load=0.8) for arm, ttft in (("preble serve", 1.0), ("smg", 1.0))]
    runs = arm_report.counted(kept)
    assert arm_report.tally_of(runs, "preble serve", "smg", arm_report.TTFT) == ("1, 1, 0", "2.00")
    assert arm_report.tally_of(runs, "preble serve", "partition", arm_report.TTFT) == ("0, 0, 1", "0.90")
    assert arm_report.tally_of(runs, "preble serve", arm_report.BEST, arm_report.TTFT) == ("0, 1, 1", "0.95")
    assert arm_report.tally_of(runs, "preble workers", "smg", arm_report.TTFT) == ("missing", "missing")
    page = arm_report.page(kept)
    assert "| smg | 1, 1, 0 | 2.00 | missing | missing | 1, 1, 0 | 2.00 | missing | missing |" in page
    assert "| round robin |" not in page[page.index("**In all.**") : page.index("**What is asked.**")], "not run"


def test_how_often_an_audit_s_claim_was_missed_is_counted() -> None:
    run = {"claimed_low": 0.4, "claimed_high": 0.6, "claimed_computed_ratio": 0.2, "seen_computed_ratio": 0.3}
    text = run_audit.missed([{**run, "seen_ratio": ratio} for ratio in (0.3, 0.5, 0.7, 0.8)])
    assert "outside the interval in 3 of 4 runs, better in 1 and worse in 2**" in text.replace("\n", " ")


def test_where_none_of_ours_was_run_no_loss_is_claimed_or_denied() -> None:
    page = arm_report.page([run_of("smg", 1, 2.0), run_of("partition", 1, 1.0)], "cuda")
    assert page.startswith("**Losses.**\n\nNot known: no arm of ours was run.")
    assert "(../figures/live-arms-gpu.png)" in page


def test_a_bar_is_met_by_the_best_gateway_or_missed_by_it() -> None:
    kept = [run_of("preble serve", n, 1.0) for n in (1, 2, 3)] + [run_of("round robin", n, 2.6) for n in (1, 2, 3)]
    kept += [run_of("smg", n, 1.1) for n in (1, 2, 3)] + [run_of("sglang-router", n, 3.0) for n in (1, 2, 3)]
    rows = list(arm_report.bars(arm_report.counted(kept)))
    assert [row[2:] for row in rows] == [
        ["round robin", "2.50", "2.60 (2.60 to 2.60)", "3", "met"],
        ["the best gateway, smg", "1.20", "1.10 (1.10 to 1.10)", "3", "**missed**"],
        ["the best of all others, smg", "0.95", "1.10 (1.10 to 1.10)", "3", "met"],
    ]


def test_a_bar_counts_the_repetitions_that_both_have() -> None:
    kept = [run_of("preble serve", n, 1.0) for n in (1, 2, 3)] + [run_of("round robin", 1, 2.6)]
    rows = list(arm_report.bars(arm_report.counted(kept)))
    assert rows[0][2:] == ["round robin", "2.50", "2.60", "1", "met"]


def test_the_picture_is_drawn_of_what_there_is(tmp_path: Path) -> None:
    arm_plot.draw([], file=tmp_path / "live.png")
    assert not (tmp_path / "live.png").exists()
    arm_plot.draw([run_of("smg", 1, 2.0, noisy=True), run_of("preble serve", 1, 1.0)], file=tmp_path / "live.png")
    assert (tmp_path / "live.png").read_bytes().startswith(b"\x89PNG")


def test_a_quiet_run_counts_before_a_noisy_one_and_arms_are_paired_by_repetition() -> None:
    kept = [run_of("smg", 1, 9.0, noisy=True), run_of("smg", 1, 2.0), run_of("smg", 2, 8.0)]
    runs = arm_report.counted([*kept, run_of("preble serve", 1, 1.0), run_of("preble serve", 3, 1.0)])
    place = ("sglang", "documents with tiny", 0.95)
    others, own = (arm_report.runs_of(runs, *place, arm) for arm in ("smg", "preble serve"))
    assert arm_report.ratios(others, own) == [2.0]


def test_figures_of_two_models_are_not_mixed() -> None:
    other = {"settings": {"model": "larger"}}
    kept = [run_of("preble serve", 1, 1.0), run_of("smg", 1, 2.0, **other), run_of("preble serve", 1, 4.0, **other)]
    page = arm_report.page(kept)
    assert "documents with larger at 0.95 | preble serve | the best of all others, smg | 0.95 | 0.50 | 1 |" in page
    assert "documents with tiny at 0.95: preble serve against" not in page, "no other was run with it"
    assert page.index("### sglang, documents with larger, 0.95") < page.index("### sglang, documents with tiny, 0.95")


def test_an_interval_needs_three_repetitions() -> None:
    assert arm_report.shown(arm_report.bootstrapped([2.0, 8.0])) == "4.00"
    middle, low, high = arm_report.bootstrapped([2.0, 4.0, 8.0])
    assert low < middle == pytest.approx(4.0) and middle < high


def test_a_run_that_nobody_answered_is_no_figure() -> None:
    dead = {name: value for name, value in run_of("smg", 1, 1.0).items() if "_ttft" not in name}
    page = arm_report.page([run_of("preble serve", 1, 1.0), {**dead, "failed": 100}])
    assert "| smg | missing |" in page


def test_the_page_is_put_between_its_marks(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"before\n{arm_report.BEGIN}\nold\n{arm_report.END}\nafter\n")
    arm_report.write_docs([], file=file)
    assert file.read_text() == f"before\n{arm_report.BEGIN}\n\nNo run is kept.\n\n{arm_report.END}\nafter\n"
    file.write_text("no marks")
    with pytest.raises(ValueError, match="needs the markers"):
        arm_report.write_docs([], file=file)
    assert all(arm_report.BEGIN in page.read_text() for page in arm_report.PAGES.values())


# --- how fast the machine was -----------------------------------------------------------------------------------------


def test_a_run_on_a_slower_machine_than_the_repetition_s_others_is_noisy() -> None:
    others = [{"product_seconds": seconds} for seconds in (0.0020, 0.0021, 0.0019)]
    assert not arm_noise.is_noisy({**QUIET, "product_seconds": 0.0021}, others)
    assert arm_noise.is_noisy({**QUIET, "product_seconds": 0.0024}, others), "slower"
    assert arm_noise.is_noisy({**QUIET, "product_seconds": 0.0016}, others), "faster"
    assert not arm_noise.is_noisy({**QUIET, "product_seconds": 0.9}), "the first of a repetition"
    assert not arm_noise.is_noisy({**QUIET, "product_seconds": 0.9}, [QUIET]), "older runs do not say"
    assert not arm_noise.is_noisy(QUIET, others)


@asynchronous
async def test_a_run_is_held_against_quiet_runs_of_its_own_repetition_only(
    tmp_path: Path, sources: arm_traffic.Sources
) -> None:
    chosen = arguments(tmp_path, "--arms", "smg", "partition", "--repetitions", "2")
    await ScriptedBench(chosen, sources).find_saturation("documents")
    quick, slow = {**QUIET, "product_seconds": 0.002}, {**QUIET, "product_seconds": 0.004}
    bench = ScriptedBench(chosen, sources, [quick, slow, quick, slow, slow])
    await run_arms.measure_traffic(bench, "documents", 0.5)
    kept = [one for one in run_arms.read_lines(chosen.json) if one["kind"] == "run"]
    assert [(one["repetition"], one["noisy"]) for one in kept] == [
        (1, False), (1, True), (1, False), (2, False), (2, False),
    ]  # fmt: skip


def test_the_page_says_how_fast_the_machine_was() -> None:
    runs = [run_of("smg", 1, 2.0), run_of("smg", 2, 2.0)]
    assert "matrix product" not in arm_report.page(runs)
    runs[0]["product_seconds"] = 0.002
    assert "a fixed matrix product took 2.00 to 2.00 ms of their cores (1 of 2 runs)" in arm_report.page(runs)


def test_the_speed_of_a_core_is_measured_until_it_is_stopped() -> None:
    core = min(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        measured = core_speed.CoreSpeed([core], stack)
        process = measured._processes[0]
        assert process.stdout is not None
        read = [process.stdout.readline() for _ in range(core_speed.WARM_UP + 1)]
        found = measured.stop()
        assert process.returncode is not None
        assert float(read[-1]) > 0.0 and all(seconds > 0.0 for seconds in found.values())
    with contextlib.ExitStack() as stack:
        assert core_speed.CoreSpeed([], stack).stop() == {}, "engines on a GPU"
