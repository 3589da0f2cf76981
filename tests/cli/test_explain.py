"""`preble explain`: which records of a file it prints, what each table says, and how it ends when there is nothing to
print. What is in a record is tested in `scheduling/test_records.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from preble import GlobalScheduler, ManualClock, SchedulerConfig, WorkerSpec, sim, workloads
from preble.cli import main
from preble.cli.explain import RECORDS_MAX, choose, text_of
from preble.scheduling.records import (
    PRICE_TERMS,
    DecisionRecord,
    DecisionRecording,
    Outcome,
    ShadowChoice,
    WorkerTerms,
    write_lines,
)
from tests.support.paths import ROOT


def terms(name: str, matched: int, *price: float, load: float, backlog: float, candidate: bool = True) -> WorkerTerms:
    """A worker whose price has these terms, in the order in which they are shown, and no credit."""
    total, price = sum(price), (*price, 0.0)
    return WorkerTerms(name, matched, 900 - matched, *price, total, load, backlog, total, candidate)


THREE = (
    terms("gpu-0", 0, 0.25, 0.125, 0.5, 0.0, 0.75, 0.25, load=12.5, backlog=0.0),
    terms("gpu-1", 600, 0.25, 0.0625, 0.125, 0.03125, 0.0, 0.09375, load=4.6875, backlog=2.0),
    terms("gpu-2", 100, 0.0, 0.125, 0.0, 0.0, 0.0, 0.0, load=0.25, backlog=0.0, candidate=False),
)


def record(**more: Any) -> DecisionRecord:
    fixed = {"request_id": "chat-7", "sequence": 12, "decided_at": 1000.5, "policy": "e2", "reason": "exploit"}
    fixed |= {"prompt_tokens": 900, "worker": "gpu-1", "runner_up": "gpu-0", "margin": 1.3125, "workers": THREE}
    return DecisionRecord(**{**fixed, **more})


def finished(first: float | None, cached: int | None, output: int | None = 40) -> Outcome:
    return Outcome("finished", 6.5, first, cached, output)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Ten requests; number i had its first token after i seconds, the even ones only."""
    path = tmp_path / "records.jsonl"
    each = [
        record(request_id=f"r{i % 9}", sequence=i, outcome=finished(float(i) if i % 2 == 0 else None, None))
        for i in range(10)
    ]
    write_lines(path, each)
    return path


def printed(capsys: pytest.CaptureFixture[str]) -> list[int]:
    """The sequence numbers that were printed, in order."""
    lines = capsys.readouterr().out.splitlines()
    return [int(line.split("decision ")[1].split()[0]) for line in lines if line.startswith("request ")]


# --- one record -------------------------------------------------------------------------------------------------------

WHOLE = """\
request chat-7: decision 12 at 1000.5000 s, policy e2, 900 prompt tokens
chosen gpu-1 (exploit), runner-up gpu-0, margin 1.3125; shadow kv_cost: gpu-0 (kv_cost)

   worker  matched  missed   queue  prefill  others  decode  eviction  balance  credit   total        L  backlog
*  gpu-1       600     300  0.2500   0.0625  0.1250  0.0312    0.0000   0.0938  0.0000  0.5625   4.6875   2.0000
   gpu-0         0     900  0.2500   0.1250  0.5000  0.0000    0.7500   0.2500  0.0000  1.8750  12.5000   0.0000
-  gpu-2       100     800  0.0000   0.1250  0.0000  0.0000    0.0000   0.0000  0.0000  0.1250   0.2500   0.0000

finished after 6.5000 s, 40 output tokens
first token    3.1250 s, 2.0625 s expected (+1.0625)
cached tokens  500, 600 expected (-100)
regret         3.0000 s; 25.0% of what was computed (100 tokens) was cached elsewhere
"""


def test_a_record_is_printed_whole() -> None:
    shadow = ShadowChoice("kv_cost", "gpu-0", "kv_cost")
    assert text_of(record(shadow=shadow, outcome=finished(3.125, 500))) == WHOLE


def test_scores_are_shown_where_they_are_not_the_totals() -> None:
    scored = replace(THREE[1], score=20.0)
    lines = text_of(record(workers=(*THREE[:1], scored))).splitlines()
    assert lines[3].split()[-2:] == ["backlog", "score"]
    assert [line.split()[-1] for line in lines[4:6]] == ["20.0000", "1.8750"]


def test_the_columns_of_a_price_are_named_and_add_up() -> None:
    """Of a fleet that queues, decodes and evicts: each printed row, as it is read by its columns."""
    sched = GlobalScheduler(
        [WorkerSpec(name, kv_capacity_tokens=2500) for name in "abc"],
        clock=ManualClock(100.0),
        record=DecisionRecording(),
    )
    for number in range(40):
        sched.schedule([number % 2] * 800 + [100 + number] * 60, request_id=number, max_new_tokens=50)
    used = set()
    for one in sched.records():
        lines = text_of(one).splitlines()
        names = lines[3].split()
        for line in lines[4:7]:
            row = dict(zip(names, line.removeprefix("*").split(), strict=True))
            price = {name: float(row[name]) for name in names[names.index("queue") : names.index("total")]}
            assert sum(price.values()) == pytest.approx(float(row["total"]), abs=0.0004), "each is rounded"
            used |= {name for name, seconds in price.items() if seconds}
    assert used == {name.removesuffix("_seconds") for name in PRICE_TERMS}, "no column is empty in all rows"


def test_what_is_not_known_is_said() -> None:
    text = text_of(record(runner_up=None, margin=0.0, shadow=ShadowChoice("last", "gpu-1", "last")))
    assert "chosen gpu-1 (exploit), the only candidate; shadow last: the same (last)\n" in text
    assert text.endswith("no outcome: the request had not ended when this was written\n")
    text = text_of(record(outcome=finished(None, None, None)))
    assert "finished after 6.5000 s, an unknown number of output tokens\n" in text
    assert "first token    not reported, 2.0625 s expected\n" in text
    assert "cached tokens  not reported, 600 expected\n" in text
    assert text.endswith("regret         not known; nothing was computed in vain\n")


def test_scores_without_end_and_names_that_a_terminal_obeys_are_printed_safely() -> None:
    odd = replace(THREE[0], worker="evil\x1b[2J", score=float("inf"))
    text = text_of(record(request_id="a\nb", worker=odd.worker, reason="\x07", workers=(odd,)))
    assert "\x1b" not in text and "\x07" not in text and r"a\nb" in text
    assert " inf\n" in text


# --- which ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sequences"),
    [
        ([], [9]),
        (["--last", "3"], [7, 8, 9]),
        (["--last", "1000"], list(range(10))),
        (["--id", "r4"], [4]),
        (["--id", "r0"], [0, 9]),  # an id that came twice
        (["--worst-regret", "2"], [8, 6]),
        (["--worst-regret", "100"], [8, 6, 4, 2, 0]),  # those without a first token have none
    ],
)
def test_options_choose(
    file: Path, capsys: pytest.CaptureFixture[str], options: list[str], sequences: list[int]
) -> None:
    assert main(["explain", str(file), *options]) == 0
    assert printed(capsys) == sequences


def test_the_legend_ends_the_output_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", str(file), "--last", "2"])
    out = capsys.readouterr().out
    assert out.count("* chosen, - no candidate") == 1 and out.endswith(".\n")


def test_an_id_that_never_ends_is_bounded() -> None:
    class Asked:
        id, last, worst_regret = "r", None, None

    many = (record(request_id="r", sequence=i) for i in range(RECORDS_MAX + 5))
    chosen = choose(many, Asked())  # type: ignore[arg-type]
    assert len(chosen) == RECORDS_MAX and chosen[0].sequence == 5


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        ("", [], "has no record"),
        ("\n\n", ["--last", "2"], "has no record"),
        ("{}\n", [], "line 1"),
        (None, [], "cannot be read"),
    ],
)
def test_a_file_without_records_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, options: list[str], says: str
) -> None:
    path = tmp_path / "file.jsonl"
    if content is not None:
        path.write_text(content)
    assert main(["explain", str(path), *options]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_what_was_not_found_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(file), "--id", "nobody"]) == 2
    assert "no record of request 'nobody'" in capsys.readouterr().err
    write_lines(file, [record()])
    assert main(["explain", str(file), "--worst-regret", "1"]) == 2
    assert "no record with a time to first token" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--last", "0"], ["--last", "x"], ["--last", str(RECORDS_MAX + 1)], ["--last", "1", "--id", "r"]]
)
def test_wrong_usage_is_refused(file: Path, options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(file), *options])
    assert ended.value.code == 2


def test_a_scheduler_s_own_file_can_be_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, clock = tmp_path / "live.jsonl", ManualClock(100.0)
    sched = GlobalScheduler(["a", "b"], clock=clock, record=DecisionRecording(sink=path), shadow="least_loaded")
    for name in ("first", "second"):
        sched.schedule([1] * 300, request_id=name)
        clock.advance(1.0)
        sched.first_token(name, cached_tokens=0)
        sched.finish(name, output_tokens=3)
    sched.close()
    assert main(["explain", str(path), "--id", "second"]) == 0
    out = capsys.readouterr().out
    assert "chosen a (exploit), runner-up b, margin 0." in out
    assert "; shadow least_loaded: the same (least_loaded)\n" in out
    assert "cached tokens  0, 299 expected (-299)" in out


def test_the_page_s_tables_are_what_is_printed() -> None:
    """The run that docs/explain.md explains of, made again."""
    page = (ROOT / "docs" / "explain.md").read_text()
    tools = workloads.generate("toolbench", requests=600, groups=40, seed=0, zipf=1.1)
    run = sim.Simulation(workloads.poisson(tools, rps=14.0, seed=0), sim.SimConfig(workers=4), None)
    run.scheduler = GlobalScheduler(
        cost_model="mistral-7b/a6000",
        config=SchedulerConfig(calibrate=True),
        clock=run.clock,
        record=DecisionRecording(),
        shadow="kv_cost",
    )
    run.run()
    worst = sorted(run.scheduler.records(), key=lambda one: one.regret_seconds or 0.0)[-1]
    assert text_of(worst) in page
    shadow = run.scheduler.stats()["shadow"]
    words = " ".join(page.split())
    assert f"{shadow['agreements']} of {shadow['decisions']} decisions agreed" in words
    assert f"{shadow['seconds_saved']:.1f} s saved and {shadow['seconds_lost']:.1f} s lost" in words
