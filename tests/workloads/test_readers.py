"""Readers of prompts and traces: each format's small file, the shared files' statistics, and what is wrong with a line.

Arrivals and generators have files of their own.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from preble.errors import InvalidConfig, InvalidInput
from preble.workloads import Workload, mistral, read, words
from preble.workloads.files import PSEUDO_IDS_PER_FILE, Collector, Row
from tests.support import paths

DATA = paths.DATA / "workloads"
SHARED = paths.SHARED / "workloads"
HAS_MISTRAL = all(importlib.util.find_spec(name) for name in ("mistral_common", "sentencepiece"))
needs_mistral = pytest.mark.skipif(not HAS_MISTRAL, reason='needs pip install "preble[mistral]"')
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared workload files are not here (PREBLE_SHARED)")
FORMATS = {
    "tiny.jsonl": "segments",
    "mooncake.jsonl": "mooncake",
    "azure.csv": "azure",
    "toolbench.json": "toolbench",
    "loogle.jsonl": "loogle",
    "loogle_rows.jsonl": "loogle",
    "nextqa.csv": "nextqa",
    "alfworld.jsonl": "alfworld",
    "alfworld.txt": "alfworld",
    "apps.jsonl": "apps",
    "apps": "apps",
}


def starts_alike(workload: Workload, a: int, b: int) -> int:
    """How many tokens the prompts of two requests have in common from the start."""
    one, two = workload.requests[a].token_ids, workload.requests[b].token_ids
    differ = np.flatnonzero(one[: len(two)] != two[: len(one)])
    return int(differ[0]) if len(differ) else min(len(one), len(two))


# --- tokenizers -------------------------------------------------------------------------------------------------------


def test_words_gives_equal_text_equal_ids_that_other_machines_give_too() -> None:
    ids = words().encode("The mill by the river.")
    assert ids.dtype == np.int32 and not ids.flags.writeable
    assert ids.tolist() == [2511, 16069, 18634, 10276, 22291, 23909]
    assert words().encode("The mill by the river.").tolist() == ids.tolist()
    assert words(seed=1).encode("The mill by the river.").tolist() != ids.tolist()
    assert len(words().encode("")) == 0


def test_words_loses_no_character_and_stays_in_its_vocabulary() -> None:
    tokenizer = words()
    text = 'naïve\t\tcafé 東京 {"a": [1, 2]}\n\n_x \ud800 end'
    ids = tokenizer.encode(text)
    assert ids.min() >= 3 and ids.max() < tokenizer.vocabulary_size
    for i, sign in enumerate(text):
        changed = text[:i] + ("q" if sign != "q" else "z") + text[i + 1 :]
        assert tokenizer.encode(changed).tolist() != ids.tolist(), f"character {i} ({sign!r}) does not count"


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5])
def test_words_names_a_seed_out_of_range(seed: int) -> None:
    with pytest.raises(InvalidConfig, match=r"words\.seed"):
        words(seed)


@needs_mistral
def test_mistral_is_the_tokenizer_of_mistral_7b() -> None:
    tokenizer = mistral()
    assert (tokenizer.vocabulary_size, tokenizer.bos_id) == (32_000, 1)
    assert tokenizer.encode("Hello world").tolist() == [22557, 1526]


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "format"), FORMATS.items())
def test_a_format_is_recognised_and_read_alike_when_named(name: str, format: str) -> None:
    seen, named = read(DATA / name), read(DATA / name, format=format)
    assert f"({format}," in seen.source
    assert [r.request_id for r in seen.requests] == [r.request_id for r in named.requests]
    for one, two in zip(seen.requests, named.requests, strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist() and one.token_ids.dtype == np.int32
        assert (one.output_tokens, one.group, one.after) == (two.output_tokens, two.group, two.after)


@pytest.mark.parametrize("name", FORMATS)
def test_a_limit_gives_the_first_requests(name: str) -> None:
    whole, first = read(DATA / name), read(DATA / name, limit=1)
    assert len(whole) > 1 and len(first) == 1
    assert first.requests[0].token_ids.tolist() == whole.requests[0].token_ids.tolist()


def test_segments_are_shared_arrays_and_pseudo_tokens_have_ids_of_their_own() -> None:
    a, b, c = read(DATA / "tiny.jsonl").requests
    assert [r.request_id for r in (a, b, c)] == ["a", "b", "c"]
    assert [r.group for r in (a, b, c)] == ["1", "1", "2"]
    bos, system, video, question = a.parts
    assert bos.tolist() == [1] and b.parts[0] is bos
    assert b.parts[1] is system and c.parts[1] is system and c.parts[3] is question
    assert b.parts[2] is video and len(video) == 40
    own, other = set(video.tolist()), set(c.parts[2].tolist())
    assert len(own) == len(other) == 1 and own.isdisjoint(other)
    assert min(own | other) >= words().vocabulary_size
    assert (a.after, b.after, c.after) == (None, "a", None)


def test_recorded_outputs_are_the_real_text_or_the_files_draw_and_table1_is_the_other_column() -> None:
    a, b, c = read(DATA / "tiny.jsonl").requests
    assert a.output_ids is not None and a.output_ids.tolist() == words().encode("a red dog").tolist()
    assert [a.output_tokens, b.output_tokens, c.output_tokens] == [len(a.output_ids), 5, 6]
    assert b.output_ids is None
    drawn = read(DATA / "tiny.jsonl", outputs="table1").requests
    assert [r.output_tokens for r in drawn] == [9, 8, 7] and all(r.output_ids is None for r in drawn)


def test_mooncake_blocks_are_equal_where_their_ids_are() -> None:
    trace = read(DATA / "mooncake.jsonl")
    assert [r.prompt_tokens for r in trace.requests] == [1100, 1536, 513]
    assert starts_alike(trace, 0, 1) == 1024
    assert starts_alike(trace, 0, 2) == 512
    assert [r.output_tokens for r in trace.requests] == [20, 1, 7]
    assert [r.arrival_seconds for r in trace.requests] == [0.0, 0.25, 1.5]
    assert [r.group for r in trace.requests] == ["1", "1", "4"]
    assert trace.arrivals == "of the trace"


def test_azure_prompts_share_nothing() -> None:
    trace = read(DATA / "azure.csv")
    assert [r.prompt_tokens for r in trace.requests] == [48, 31, 1]
    assert [r.output_tokens for r in trace.requests] == [10, 8, 1]
    assert [r.arrival_seconds for r in trace.requests] == [0.0, 0.052, 2.000472]
    assert [starts_alike(trace, a, b) for a, b in ((0, 1), (0, 2), (1, 2))] == [0, 0, 0]


def test_traces_of_two_files_share_one_token_at_most(tmp_path: Path) -> None:
    shutil.copy(DATA / "azure.csv", tmp_path / "other.csv")
    here, there = read(DATA / "azure.csv").requests, read(tmp_path / "other.csv").requests
    blocks = read(DATA / "mooncake.jsonl").requests
    for one, two in [*zip(here, there, strict=True), *zip(here, blocks, strict=True)]:
        assert starts_alike(Workload("two", [one, two]), 0, 1) <= 1


def test_toolbench_shares_the_tools_and_draws_outputs() -> None:
    one, two = read(DATA / "toolbench.json").requests
    assert (one.request_id, one.group) == ("11", "Rain Radar")
    assert all(a is b for a, b in zip(one.parts[:3], two.parts[:3], strict=True)) and one.parts[3] is not two.parts[3]
    assert one.output_ids is None and one.output_tokens >= 1
    assert one.output_tokens == read(DATA / "toolbench.json", limit=1).requests[0].output_tokens


def test_loogle_asks_all_questions_of_a_document() -> None:
    requests = read(DATA / "loogle.jsonl").requests
    assert [(r.request_id, r.group) for r in requests] == [
        ("1.0", "The mill"), ("1.1", "The mill"), ("2.0", "Lamps"), ("3.0", "Island"),
    ]  # fmt: skip
    assert requests[0].parts[2] is requests[1].parts[2]
    for request, answer in zip(requests, ["1804", "twice", "It is about lamps.", '{"<mask-0>": "Ada"}'], strict=True):
        assert request.output_ids is not None and request.output_ids.tolist() == words().encode(answer).tolist()
    rows = read(DATA / "loogle_rows.jsonl").requests
    assert rows[0].parts[2] is rows[1].parts[2] and rows[0].group == "The mill"


def test_nextqa_videos_are_256_pseudo_tokens_a_second() -> None:
    one, two, three = read(DATA / "nextqa.csv").requests
    assert [len(r.parts[2]) for r in (one, two, three)] == [2560, 2560, 59 * 256 // 30]
    assert one.parts[2] is two.parts[2] and one.parts[2][0] != three.parts[2][0]
    assert one.output_ids is not None and one.output_ids.tolist() == words().encode("run out").tolist()
    assert one.group == "7001"


@pytest.mark.parametrize(
    ("name", "turns", "actions"),
    [
        ("alfworld.jsonl", [3, 1], [" Think: First I find a cup.", " go to drawer 1", " take cup 1 from drawer 1"]),
        ("alfworld.txt", [2, 2], [" go to desk 1", " take bowl 1 from desk 1"]),
    ],
)
def test_alfworld_turns_follow_each_other_and_extend_the_prompt(
    name: str, turns: list[int], actions: list[str]
) -> None:
    requests = read(DATA / name).requests
    assert [sum(r.group == g for r in requests) for g in ("t0000", "t0001")] == turns
    chain = [r for r in requests if r.group == "t0000"]
    for request, action in zip(chain, actions, strict=True):
        assert request.output_ids is not None and request.output_ids.tolist() == words().encode(action).tolist()
    assert [r.after for r in chain] == [None, *(r.request_id for r in chain[:-1])]
    for one, two in zip(chain, chain[1:], strict=False):
        assert all(a is b for a, b in zip(one.parts, two.parts, strict=False)) and len(two.parts) == len(one.parts) + 1
    first_of_second = next(r for r in requests if r.group == "t0001")
    assert first_of_second.after is None


@pytest.mark.parametrize("name", ["alfworld.jsonl", "alfworld.txt"])
def test_an_alfworld_step_is_the_action_and_what_was_seen(name: str) -> None:
    texts = {
        "alfworld.jsonl": " take cup 1 from drawer 1\nYou pick up the cup 1 from the drawer 1.\n>",
        "alfworld.txt": " open fridge 1\nYou open the fridge 1.\nIn it, you see an apple 1.\n>",
    }
    steps = {tuple(part.tolist()) for request in read(DATA / name).requests for part in request.parts[2:]}
    seen = {
        "alfworld.jsonl": " go to drawer 1\nThe drawer 1 is open. In it, you see a cup 1.\n>",
        "alfworld.txt": " go to desk 1\nOn the desk 1, you see a bowl 1.\n>",
    }
    assert tuple(words().encode(seen[name]).tolist()) in steps
    last = tuple(words().encode(texts[name]).tolist())
    assert (last in steps) == (name == "alfworld.txt"), "what the last action led to is in no prompt"


def test_apps_gives_the_first_solution_or_draws_a_length() -> None:
    with_solution, without = read(DATA / "apps.jsonl").requests
    code = "a, b = map(int, input().split())\nprint(a + b)"
    assert with_solution.output_ids is not None and with_solution.output_ids.tolist() == words().encode(code).tolist()
    assert without.output_ids is None and [with_solution.group, without.group] == ["3", "4"]
    folders = read(DATA / "apps").requests
    assert [r.request_id for r in folders] == ["train/0000", "train/0001"]
    assert folders[0].output_ids is not None and folders[1].output_ids is None


def test_a_file_may_be_zipped(tmp_path: Path) -> None:
    for name in ("tiny.jsonl", "tiny_segments.jsonl", "azure.csv"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((DATA / name).read_bytes()))
    for name in ("tiny.jsonl", "azure.csv"):
        plain, zipped = read(DATA / name), read(tmp_path / f"{name}.gz")
        assert [r.token_ids.tolist() for r in plain.requests] == [r.token_ids.tolist() for r in zipped.requests]


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("tiny.jsonl", '{"id": "b"', '{"id": "b",,', r"tiny\.jsonl, line 2: not JSON"),
        ("tiny.jsonl", '{"id": "b"', '{"id": "a"', r"tiny\.jsonl, line 2: request id 'a' is there twice"),
        ("tiny.jsonl", '"after": "a"', '"after": "c"', r"tiny\.jsonl, line 2: 'after' names 'c'"),
        ("tiny.jsonl", '{"seg": "v2"}', '{"seg": "v9"}', r"tiny\.jsonl, line 3: no segment 'v9' in tiny_segments"),
        ("tiny.jsonl", '{"seg": "v2"}', "7", r"tiny\.jsonl, line 3: a part must have"),
        ("tiny.jsonl", '"output_tokens": 5', '"output_tokens": 0', r"tiny\.jsonl, line 2: 'output_tokens' must be"),
        ("tiny.jsonl", '"group": "2"', '"group": null', r"tiny\.jsonl, line 3: 'group' must be text"),
        ("mooncake.jsonl", "[0, 1, 3]", "[0, 1]", r"mooncake\.jsonl, line 2: 1536 tokens need 3 hash_ids, got 2"),
        ("mooncake.jsonl", "[0, 1, 3]", "[0, 1, -3]", r"mooncake\.jsonl, line 2: 'hash_ids' must be"),
        ("mooncake.jsonl", '"timestamp": 250', '"timestamp": "x"', r"mooncake\.jsonl, line 2: 'timestamp' must be"),
        ("mooncake.jsonl", '"timestamp": 1500', '"timestamp": 249', r"mooncake\.jsonl, line 3: 'timestamp' must be"),
        ("azure.csv", "04.0319600", "04:0319600", r"azure\.csv, line 3: 'TIMESTAMP' must look like"),
        ("azure.csv", "18:17:04", "18:16:04", r"azure\.csv, line 3: 'TIMESTAMP' is earlier"),
        ("azure.csv", ",31,8", ",31", r"azure\.csv, line 3: must have 3 fields"),
        ("azure.csv", ",31,8", ",0,8", r"azure\.csv, line 3: 'ContextTokens' must be"),
        ("azure.csv", ",31,8", ",4194305,8", r"azure\.csv, line 3: 'ContextTokens' must be at most"),
        ("toolbench.json", '"query": "Take', '"question": "Take', r"toolbench\.json, entry 2: 'query' must be text"),
        ("toolbench.json", '"tool_name": "Rain Radar", ', "", r"toolbench\.json, entry 1: an entry of 'api_list'"),
        ("loogle.jsonl", "\"[{'Q'", "\"[{Q'", r"loogle\.jsonl, line 3: 'qa_pairs' is neither"),
        ("loogle.jsonl", '"A": "twice"', '"B": "twice"', r"loogle\.jsonl, line 1: 'A' must be text"),
        ("nextqa.csv", "where is the cat,1", "where is the cat,5", r"nextqa\.csv, line 3: 'answer' must be 0 to 4"),
        ("nextqa.csv", "7002,59", "7001,59", r"nextqa\.csv, line 4: '7001' has 503 tokens here and 2560 before"),
        ("alfworld.jsonl", "> go to shelf 2", "go to shelf 2", r"alfworld\.jsonl, line 2: the log has no action"),
        ("apps.jsonl", '"solutions": ""', '"solutions": "7"', r"apps\.jsonl, line 2: 'solutions' must be a list"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, name: str, old: str, new: str, message: str) -> None:
    text = (DATA / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new, 1))
    shutil.copy(DATA / "tiny_segments.jsonl", tmp_path)
    with pytest.raises(InvalidInput, match=message):
        read(tmp_path / name)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot open .*nowhere"):
        read(tmp_path / "nowhere.jsonl")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress((DATA / "azure.csv").read_bytes())[:60])
    with pytest.raises(InvalidInput, match=r"cut\.csv\.gz, line \d+: cannot be read"):
        read(tmp_path / "cut.csv.gz")
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "\xe9", "parts": []}')
    with pytest.raises(InvalidInput, match=r"latin\.jsonl, line 1: cannot be read"):
        read(tmp_path / "latin.jsonl")


@pytest.mark.parametrize("text", ["", '{"some": "object"}\n', "[]"])
def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path: Path, text: str) -> None:
    (tmp_path / "what").write_text(text)
    with pytest.raises(InvalidInput, match="is of no known format .*azure.*toolbench.*vllm"):
        read(tmp_path / "what")


def test_a_file_without_requests_and_one_without_segments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(InvalidInput, match=r"empty\.csv holds no request"):
        read(tmp_path / "empty.csv")
    shutil.copy(DATA / "tiny.jsonl", tmp_path)
    with pytest.raises(InvalidInput, match=r"tiny_segments\.jsonl\.gz or tiny_segments\.jsonl beside it"):
        read(tmp_path / "tiny.jsonl")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outputs": "some"}, "outputs must be"),
        ({"outputs": "table1"}, "a trace"),
        ({"format": "csv"}, "format must be"),
        ({"limit": 0}, "limit"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read(DATA / "azure.csv", **arguments)


def test_pseudo_segments_are_bounded() -> None:
    into = Collector(Path("many.jsonl"), words(), "recorded", None)
    row = Row(Path("many.jsonl"), 7, {})
    for key in range(PSEUDO_IDS_PER_FILE):
        into.pseudo(row, str(key), 1)
    with pytest.raises(InvalidInput, match="line 7: more than 65536 segments"):
        into.pseudo(row, "one more", 1)
    assert into.pseudo(row, "0", 1)[0] < 2**31 - PSEUDO_IDS_PER_FILE


# --- the shared files -------------------------------------------------------------------------------------------------


def published() -> dict[str, tuple[str, ...]]:
    """workload -> (requests, groups, "mean ± std" of prompt and of output tokens) of each «this folder» row."""
    text = (SHARED / "README.md").read_text() if SHARED.is_dir() else ""
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines() if "this folder |" in line
    ]
    return {row[0]: tuple(row[2:6]) for row in rows}


@needs_shared
@needs_mistral
@pytest.mark.parametrize("name", sorted(published()))
def test_shared_prompts_have_the_published_lengths(name: str) -> None:
    workload = read(SHARED / "prompts" / f"{name}.jsonl.gz", tokenizer=mistral())
    prompts = np.array([r.prompt_tokens for r in workload.requests])
    outputs = np.array([r.output_tokens for r in workload.requests])
    requests, groups, prompt_text, output_text = published()[name]
    assert (str(len(workload)), str(len({r.group for r in workload.requests}))) == (requests, groups)
    assert f"{prompts.mean():.0f} ± {prompts.std():.0f}" == prompt_text
    assert f"{outputs.mean():.1f} ± {outputs.std():.1f}" == output_text


@needs_shared
def test_shared_traces_have_the_published_lengths() -> None:
    figures = {
        "azure_code_2023.csv.gz": (8819, 3436, 2048, 1974, 28, 60),
        "azure_conv_2023.csv.gz": (19366, 3502, 1155, 1109, 211, 163),
        "mooncake_conversation.jsonl.gz": (5606, None, 12935, 16805, 346, 251),
        "mooncake_synthetic.jsonl.gz": (3993, None, 15325, 18380, 149, 178),
    }
    for name, (count, seconds, *lengths) in figures.items():
        requests = read(SHARED / "traces" / name).requests
        prompts = np.array([r.prompt_tokens for r in requests])
        outputs = np.array([r.output_tokens for r in requests])
        assert len(requests) == count
        assert [round(float(x)) for x in (prompts.mean(), prompts.std(), outputs.mean(), outputs.std())] == lengths
        assert seconds is None or round(requests[-1].arrival_seconds) == seconds


@needs_shared
@pytest.mark.parametrize(("name", "hit_percent"), [("mooncake_conversation", 34.7), ("mooncake_synthetic", 65.1)])
def test_an_infinite_cache_of_blocks_hits_as_published(name: str, hit_percent: float) -> None:
    seen: set[int] = set()
    hit = total = 0
    for request in read(SHARED / "traces" / f"{name}.jsonl.gz").requests:
        tokens = request.token_ids
        heads = tokens[::512].tolist()  # ids name whole prefixes, so equal ids have equal blocks before them
        known = sum(head in seen for head in heads)
        hit += min(known * 512, len(tokens))
        total += len(tokens)
        seen.update(heads)
    assert round(100 * hit / total, 1) == hit_percent


@needs_shared
def test_segments_say_how_many_tokens_they_have_and_the_reader_agrees() -> None:
    workload = read(SHARED / "prompts" / "video_qa.jsonl.gz", limit=200)
    with gzip.open(SHARED / "prompts" / "video_qa_segments.jsonl.gz", "rt") as file:
        tokens = {row["id"]: row["n_tokens"] for row in map(json.loads, file)}
    assert all(len(r.parts[2]) == tokens[f"v{r.group}"] for r in workload.requests)
