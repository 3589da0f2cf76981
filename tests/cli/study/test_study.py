"""The study of prompts: the radix tree against prefixes counted one by one, Table 1's columns, table, JSON and figures.

The shared workload files, where they are, must give the figures of their own README to the last digit.
"""

from __future__ import annotations

import io
import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble import cli, workloads
from preble.cli import own_data
from preble.cli.study import plot, program, report
from preble.cli.study.statistics import Study, key_portion, measure, summary
from preble.errors import InvalidInput, MissingExtra
from preble.workloads import PromptRequest, Workload
from tests.support import paths

SHARED = paths.SHARED / "workloads"


def array(*tokens: int) -> np.ndarray:
    """Tokens as a part."""
    return np.array(tokens, np.int32)


def workload(prompts: Sequence[Sequence[np.ndarray]], arrivals: str = "none", name: str = "made") -> Workload:
    """Prompts, given as their parts, one second apart; every one of two output tokens."""
    requests = [
        PromptRequest(str(i), tuple(parts), 2, group=str(i % 2), arrival_seconds=float(i))
        for i, parts in enumerate(prompts)
    ]
    return Workload(name, requests, arrivals=arrivals)


SYSTEM, TOOL_A, TOOL_B = np.arange(4, dtype=np.int32), np.arange(10, 16, dtype=np.int32), array(20, 21)
# Two tools after one system prompt: (4 + 6 + 1 tokens) three times, (4 + 2 + 1) twice.
TOOLS = [
    [SYSTEM, TOOL_A, array(30)],
    [SYSTEM, TOOL_A, array(31)],
    [SYSTEM, TOOL_B, array(30)],
    [SYSTEM, TOOL_A, array(32)],
    [SYSTEM, TOOL_B, array(31)],
]


# --- the radix tree ---------------------------------------------------------------------------------------------------


def test_a_prompt_shares_what_came_before_it_even_inside_a_node_and_across_parts() -> None:
    study = measure(
        workload(
            [
                [array(1, 2, 3, 4)],
                [array(1), array(2, 3), array(5)],
                [array(1, 2)],
                [array(), array(1, 2, 3), array(), array(4, 6)],
                [array(7)],
            ]
        )
    )
    assert (study.shared_fraction * study.prompt_tokens).tolist() == pytest.approx([0, 3, 2, 4, 0])
    assert study.nodes == 6  # 1 2 | 3 | 4 | 6 | 5 | 7


def test_a_prompt_that_ends_inside_a_node_cuts_it() -> None:
    study = measure(workload([[array(1, 2, 3, 4)], [array(1, 2, 3)]]))
    assert study.nodes == 2 and study.requests_per_key.tolist() == [2]
    assert (study.key_fraction * study.prompt_tokens).tolist() == pytest.approx([3, 3])


def test_the_key_portion_is_the_deepest_node_longer_than_all_before_it() -> None:
    assert key_portion([3]) == (0, 3)
    assert key_portion([2, 4, 9]) == (4, 9)
    assert key_portion([2, 5, 9]) == (2, 5)


def counted_one_by_one(prompts: Sequence[tuple[int, ...]]) -> tuple[list[int], list[int], list[int]]:
    """(shared tokens, key portion's tokens) of every prompt and the requests of every key portion, by brute force.

    A node ends where a prompt ends or where two different tokens follow.
    """
    follow: dict[tuple[int, ...], set[int]] = {}
    shared, keys = [], []
    for prompt in prompts:
        shared.append(next((n for n in range(len(prompt), 0, -1) if prompt[:n] in follow), 0))
        for n in range(len(prompt)):
            follow.setdefault(prompt[:n], set()).add(prompt[n])
        follow.setdefault(prompt, set())
    ends = set(prompts)
    for prompt in prompts:
        start, key = 0, ((), 0)
        for n in range(1, len(prompt) + 1):
            if prompt[:n] in ends or len(follow[prompt[:n]]) > 1:
                key = (prompt[:n], n - start) if n - start > start else key
                start = n
        keys.append(key)
    per_key = [sum(prompt[: len(path)] == path for prompt in prompts) for path, _ in set(keys)]
    return shared, [tokens for _, tokens in keys], per_key


@st.composite
def prompts_in_parts(draw: st.DrawFn) -> list[list[np.ndarray]]:
    """Prompts from a few parts of a few tokens: some share parts by identity, some only by content."""
    part = st.lists(st.integers(0, 2), min_size=0, max_size=5)
    pool = [np.array(tokens, np.int32) for tokens in draw(st.lists(part, min_size=1, max_size=6))]
    pick = st.tuples(st.integers(0, len(pool) - 1), st.booleans())
    drawn = draw(st.lists(st.lists(pick, min_size=1, max_size=5), min_size=1, max_size=12))
    made = [[pool[i].copy() if copied else pool[i] for i, copied in picks] for picks in drawn]
    return [parts for parts in made if any(map(len, parts))]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(prompts_in_parts())
def test_the_tree_finds_what_counting_prefixes_finds(prompts: list[list[np.ndarray]]) -> None:
    if not prompts:
        return
    whole = [tuple(np.concatenate(parts).tolist()) for parts in prompts]
    shared, key_tokens, per_key = counted_one_by_one(whole)
    found = measure(workload(prompts))
    lengths = np.array([len(prompt) for prompt in whole])
    assert np.rint(found.shared_fraction * lengths).tolist() == shared
    assert np.rint(found.key_fraction * lengths).tolist() == key_tokens
    assert sorted(found.requests_per_key) == sorted(per_key)


# --- Table 1's columns ------------------------------------------------------------------------------------------------


def test_the_columns_of_two_tools() -> None:
    study = measure(workload(TOOLS))
    assert (study.requests, study.groups, study.nodes) == (5, 2, 8)
    assert study.prompt_tokens.tolist() == [11, 11, 7, 11, 7]
    assert study.prompt_to_output.tolist() == [5.5, 5.5, 3.5, 5.5, 3.5]
    assert (study.shared_fraction * study.prompt_tokens).tolist() == pytest.approx([0, 10, 4, 10, 6])
    assert study.hit_fraction == pytest.approx(30 / 47)
    # Tool A has more tokens than the system prompt, tool B fewer: there the system prompt is the key portion.
    assert (study.key_fraction * study.prompt_tokens).tolist() == pytest.approx([6, 6, 4, 6, 4])
    assert sorted(study.requests_per_key) == [3, 5]
    assert study.requests_per_key_below is not None and study.requests_per_key_below.tolist() == [3]


def test_a_key_portion_of_all_requests_is_no_exception_where_it_is_the_only_one() -> None:
    study = measure(workload([[SYSTEM, array(30)], [SYSTEM, array(31)]]))
    assert study.requests_per_key.tolist() == [2]
    assert study.requests_per_key_below is None


def test_gaps_are_those_of_open_loop_arrivals() -> None:
    assert measure(workload(TOOLS)).gap_seconds is None
    traced = workload(TOOLS, arrivals="traced")
    gaps = measure(traced).gap_seconds
    assert gaps is not None and gaps.tolist() == [1, 1, 1, 1]
    waiting = [PromptRequest("w", (SYSTEM,), 1, arrival_seconds=0.5, after="0")]
    closed = measure(Workload("closed", [*traced.requests[:2], *waiting], arrivals="traced")).gap_seconds
    assert closed is not None and closed.tolist() == [1]
    assert measure(Workload("one", traced.requests[:1], arrivals="traced")).gap_seconds is None


def test_an_empty_workload_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'empty' has no requests"):
        measure(Workload("empty", []))


def test_summaries_use_the_population_deviation() -> None:
    found = summary(np.array([1.0, 3.0]))
    assert (found["count"], found["mean"], found["std"], found["min"], found["max"], found["p50"]) == (2, 2, 1, 1, 3, 2)


# --- table and JSON ---------------------------------------------------------------------------------------------------


def test_the_table_is_markdown_that_lines_up() -> None:
    stream = io.StringIO()
    report.write_table([measure(workload(TOOLS)), measure(workload(TOOLS, "traced", "timed"))], stream)
    header, rule, first, second = stream.getvalue().splitlines()
    assert len({len(header), len(rule), len(first), len(second)}) == 1
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert cells == [
        *("made", "5", "2", "9 ± 2", "2.0 ± 0.0", "5.5", "64.9 ± 34.8", "63.8", "55.6 ± 1.3"),
        *("4.0 ± 1.0 (3.0 ± 0.0)", "-"),
    ]
    assert second.strip("| ").endswith("| 1000")


def test_a_trace_without_text_says_nothing_of_sharing() -> None:
    requests = [PromptRequest(str(i), (array(i, 7, 7),), 1, arrival_seconds=i * 0.25) for i in range(3)]
    study = measure(Workload("lengths", requests, arrivals="traced"))
    assert not study.has_sharing
    assert report.table_row(study) == ["lengths", "3", "1", "3 ± 0", "1.0 ± 0.0", "3.0", *["-"] * 4, "250"]
    assert [panel.shown(study) is None for panel in plot.FIGURE_4] == [False, False, False, True, True, True]


def test_a_table_too_wide_for_the_terminal_is_turned_and_cut() -> None:
    rows = [["name", "tokens"], ["a", "11"], ["b", "22"], ["c", "33"]]
    assert report.table_width(rows) == 1 + 7 + 9
    assert report.fitted(rows, 17) == [rows]
    assert report.fitted(rows, 16) == [
        [("name", "a"), ("tokens", "11")],
        [("name", "b"), ("tokens", "22")],
        [("name", "c"), ("tokens", "33")],
    ]
    wide = [["name", "some tokens", "other tokens"], *rows_of_three("a", "b", "c")]
    assert report.fitted(wide, 26) == [report.turned(wide[:3]), report.turned([wide[0], wide[3]])]


def rows_of_three(*names: str) -> list[list[str]]:
    """A row of one-letter cells for each name."""
    return [[name, "1", "2"] for name in names]


def test_a_terminal_gets_the_same_cells_from_rich() -> None:
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    report.write_table([measure(workload(TOOLS))], stream)
    assert "made" in stream.getvalue() and "|---" not in stream.getvalue()


def test_the_terminal_gets_markdown_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    report.write_table([measure(workload(TOOLS))], stream)
    assert stream.getvalue().startswith("| workload")


def test_the_json_has_every_column_or_null() -> None:
    content = report.document([measure(workload(TOOLS))], {"limit": None})
    found = json.loads(json.dumps(content, allow_nan=False))["workloads"][0]
    assert found["prompt_tokens"]["p50"] == 11 and found["hit_fraction"] == pytest.approx(30 / 47)
    assert found["gap_seconds"] is None and found["requests_per_key_below"]["count"] == 1


# --- figures ----------------------------------------------------------------------------------------------------------


def png_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_figures_of_many_workloads(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    studies = [measure(workload(TOOLS, "traced" if i % 2 else "none", f"w{i}")) for i in range(9)]
    plot.draw_figure_4(tmp_path / "deep" / "figure4.png", studies, "note")
    plot.draw_figure_5(tmp_path / "figure5.png", studies, "note")
    assert min(png_size(tmp_path / "deep" / "figure4.png")) > 800
    assert min(png_size(tmp_path / "figure5.png")) > 800


def test_every_workload_has_its_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    styles: list[tuple[object, object]] = []  # a drawn line calls every dash pattern "--"
    monkeypatch.setattr(axes, "step", lambda *_, color, linestyle, **__: styles.append((color, linestyle)))
    plot.draw_panel(axes, plot.PROMPT, [measure(workload(TOOLS, name=f"w{i}")) for i in range(plot.LINES_MAX)])
    assert len(styles) == len(set(styles)) == plot.LINES_MAX


def test_the_legend_takes_as_many_rows_as_long_names_need() -> None:
    assert plot.rows_of_legend(["a"] * 10, 13.8) == 1
    assert plot.rows_of_legend(["mooncake_conversation"] * 10, 13.8) == 3
    assert plot.rows_of_legend(["x" * 500] * 2, 13.8) == 2


def test_arrivals_at_one_moment_are_drawn_on_the_left_edge() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    requests = [PromptRequest(str(i), (SYSTEM,), 1) for i in range(3)]
    axes = figure.subplots()
    plot.draw_panel(axes, plot.FIGURE_5[0], [measure(Workload("burst", requests, arrivals="traced"))])
    assert axes.get_xscale() == "log" and 0 < axes.get_xlim()[0] < axes.get_xlim()[1]


def test_a_distribution_starts_at_0_and_ends_at_1() -> None:
    x, share = plot.distribution(np.array([0.0, 5.0, 5.0, 9.0]), 0.5)
    assert x.tolist() == [0.5, 0.5, 5, 9]
    assert share.tolist() == [0, 0.25, 0.75, 1]


def test_the_axis_of_nines() -> None:
    assert plot.nines(np.array([0.0, 0.9, 0.99, 1.0])).tolist() == pytest.approx([0, 1, 2, 3])
    assert [plot.short(value) for value in (0.1, 10.0, 1000.0, 25000.0)] == ["0.1", "10", "1k", "25k"]


def test_figures_without_matplotlib_name_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"preble\[bench\]"):
        plot.draw_figure_4(tmp_path / "figure4.png", [measure(workload(TOOLS))], "")


# --- the command ------------------------------------------------------------------------------------------------------


def write_files(folder: Path) -> list[str]:
    """A file of prompts with its segments, and a trace of lengths; returns their names."""
    segments = [{"id": "sys", "text": "one two three four"}, {"id": "v", "pseudo": {"n_tokens": 9}, "n_tokens": 9}]
    prompts = [
        {"id": str(i), "group": "v", "parts": [{"seg": "sys"}, {"seg": "v"}, {"text": text}], "output_tokens": 3}
        | {"output_kind": "synthetic", "output_tokens_t1": 5}
        for i, text in enumerate(["five", "six", "five"])
    ]
    for name, rows in (("mine", prompts), ("mine_segments", segments)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    times = ["2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.0319600,3180,8"]
    (folder / "azure.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *times]) + "\n")
    return [str(folder / "mine.jsonl"), str(folder / "azure.csv")]


def test_the_command_writes_table_json_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = write_files(tmp_path)
    assert cli.main(["study", *files, "--tokenizer", "words", "--output", str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert [line.split()[1] for line in told.out.splitlines()[2:4]] == ["mine", "azure"]
    assert "tokenizer words" in told.out and "mine: 3 requests" in told.err
    found = json.loads((tmp_path / "out" / "study.json").read_text())
    assert [one["requests"] for one in found["workloads"]] == [3, 2]
    # Of three prompts of 1 + n + 9 + 1 tokens, the second lacks one token in the cache and the third none.
    tokens = found["workloads"][0]["prompt_tokens"]["mean"]
    assert found["workloads"][0]["shared_fraction"]["mean"] == pytest.approx(((tokens - 1) / tokens + 1) / 3)
    assert found["workloads"][1]["gap_seconds"]["p50"] == pytest.approx(0.052)
    assert min(png_size(tmp_path / "out" / "figure4.png")) > 800
    assert min(png_size(tmp_path / "out" / "figure5.png")) > 800


def test_the_command_says_what_it_does_not_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    command = ["study", write_files(tmp_path)[0], "--tokenizer", "words", "--limit", "2", "--output", str(tmp_path)]
    assert cli.main([*command, "--json", str(tmp_path / "else" / "where.json")]) == 0
    assert "No figure 5: none of these workloads has arrivals" in capsys.readouterr().out
    assert json.loads((tmp_path / "else" / "where.json").read_text())["workloads"][0]["requests"] == 2
    monkeypatch.setattr("preble.cli.console.find_spec", lambda name: None)
    assert cli.main(command) == 0
    assert "No figures: they need matplotlib" in capsys.readouterr().out


def test_the_command_refuses_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["study", str(tmp_path / "none.jsonl"), "--tokenizer", "words"]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    assert cli.main(["study", *[str(tmp_path / "none.jsonl")] * (plot.LINES_MAX + 1), "--tokenizer", "words"]) == 2
    assert "FILE: at most 21" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["study", str(tmp_path), "--limit", "0"])


def test_without_mistral_s_tokenizer_the_other_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> workloads.Tokenizer:
        raise MissingExtra("pip install it")

    monkeypatch.setattr(workloads, "mistral", missing)
    with pytest.raises(MissingExtra, match="pip install it; or choose --tokenizer words"):
        own_data.named("mistral")
    assert program.default_tokenizer().name == "words"


# --- the shared files -------------------------------------------------------------------------------------------------


def shared_file(name: str) -> Path:
    """A file of the shared workloads; skips the test where they are not."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs the shared workload files: {path} is missing")
    return path


def readme_row(name: str) -> list[str]:
    """The cells of the row of "this folder" in the shared README: what the study must print."""
    lines = shared_file("README.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith(f"| {name} |")]
    cells = next(row for row in rows if row[1] == "this folder")
    return [cells[0], *cells[2:-1], cells[-1].replace(" without the system-prompt node", "")]


PROMPT_FILES = ["tool_use", "embodied_agent", "programming", "programming_synth", "video_qa", "document_qa"]


@pytest.mark.parametrize("name", PROMPT_FILES)
def test_shared_prompts_have_the_statistics_of_their_readme(name: str) -> None:
    path, expected = shared_file(f"prompts/{name}.jsonl.gz"), readme_row(name)
    try:
        tokenizer = workloads.mistral()
    except MissingExtra as error:
        pytest.skip(str(error))
    cells = dict(zip(report.HEADER, report.table_row(measure(workloads.read(path, tokenizer=tokenizer))), strict=True))
    columns = ("workload", "requests", "groups", "prompt tokens", "output tokens", "shared prefix %", "key portion %")
    assert [cells[column] for column in (*columns, "requests per key portion")] == expected


# Requests, prompt tokens, output tokens, and what the section "Traces" of the README says besides.
TRACES: dict[str, list[str]] = {
    "azure_code_2023.csv.gz": ["8819", "2048 ± 1974", "28 ± 60", "median gap 64 ms"],
    "azure_conv_2023.csv.gz": ["19366", "1155 ± 1109", "211 ± 163", "median gap 118 ms"],
    "mooncake_conversation.jsonl.gz": ["5606", "12935 ± 16805", "346 ± 251", "34.7 % hit"],
    "mooncake_synthetic.jsonl.gz": ["3993", "15325 ± 18380", "149 ± 178", "65.1 % hit"],
}


@pytest.mark.parametrize("name", TRACES)
def test_shared_traces_have_the_figures_of_their_readme(name: str) -> None:
    study = measure(workloads.read(shared_file(f"traces/{name}")))
    lengths = [report.mean_and_std(values, digits=0) for values in (study.prompt_tokens, study.output_tokens)]
    assert study.gap_seconds is not None
    said = f"{study.hit_fraction * 100:.1f} % hit" if study.has_sharing else f"median gap {median_ms(study):.0f} ms"
    assert [str(study.requests), *lengths, said] == TRACES[name]


def median_ms(study: Study) -> float:
    """Median time between arrivals."""
    assert study.gap_seconds is not None
    return float(np.median(study.gap_seconds)) * 1000
