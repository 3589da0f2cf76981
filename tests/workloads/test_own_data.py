"""One's own data: each format's small file, that it is taken for nothing else, what is wrong with a line, what is left
out and said, the bounds, and the two commands that read them."""

from __future__ import annotations

import gzip
import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble import sim
from preble.cli import main
from preble.errors import InvalidInput
from preble.sim.results import FINISHED
from preble.types import SessionHint
from preble.workloads import Workload, files, format_of, from_file, own, read, words
from preble.workloads.formats import guesses
from preble.workloads.readers import READERS
from tests.support import paths

DATA = paths.DATA / "workloads" / "own"
GOLDEN = {
    "prompts.txt": "text",
    "texts.jsonl": "text",
    "vllm.jsonl": "vllm",
    "token_ids.jsonl": "tokens",
    "token_lists.jsonl": "tokens",
    "token_lists.json": "tokens",
    "batch.jsonl": "chat",
    "messages.jsonl": "chat",
    "sharegpt.json": "sharegpt",
    "mooncake_lengths.jsonl": "mooncake",
    "weka.jsonl": "weka",
    "weka_published.json": "weka",
    "burstgpt.csv": "arrivals",
    "vidur.csv": "arrivals",
    "azure_2024.csv": "azure",
    "servegen.csv": "servegen",
}
encode = words().encode


def said(workload: Workload) -> list[list[int]]:
    """The prompts."""
    return [request.token_ids.tolist() for request in workload.requests]


def prompt(*texts: str) -> list[int]:
    """Texts that are tokenised one by one, after one BOS."""
    return [1, *(token for text in texts for token in encode(text).tolist())]


# --- what a file is taken for -----------------------------------------------------------------------------------------


def test_every_golden_file_is_there_and_every_format_has_one() -> None:
    assert {path.name for path in DATA.iterdir()} == set(GOLDEN)
    others = {"segments", "toolbench", "loogle", "nextqa", "alfworld", "apps"}
    assert set(GOLDEN.values()) | others == set(READERS)


@pytest.mark.parametrize(("name", "format"), GOLDEN.items())
def test_a_file_is_taken_for_its_format_and_no_other_whatever_its_name(name: str, format: str, tmp_path: Path) -> None:
    shutil.copy(DATA / name, tmp_path / "data")
    assert guesses(tmp_path / "data") == [format]
    seen, forced = read(tmp_path / "data"), read(tmp_path / "data", format=format)
    assert f"({format}," in seen.source and said(seen) == said(forced)


@pytest.mark.parametrize("name", GOLDEN)
def test_zipped_files_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    content, plain = (DATA / name).read_bytes(), read(DATA / name)
    for suffix, zipped in (("gz", gzip.compress(content)), ("xz", lzma.compress(content))):
        (tmp_path / f"{name}.{suffix}").write_bytes(zipped)
        found = read(tmp_path / f"{name}.{suffix}")
        assert said(found) == said(plain) and found.notes == plain.notes


@pytest.mark.parametrize(
    "text", ["a,b,c\n1,2,3\n", "x\ty\n1\t2\n", '{"some": "object"}\n', "[true]", "", "PK\x03\x04\x00 zip"]
)
def test_what_is_no_known_format_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_text(text)
    with pytest.raises(InvalidInput, match=r"data (is of no known format|fits)"):
        format_of(tmp_path / "data")


def test_a_table_of_unknown_columns_may_be_forced_to_be_text(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a,b\n1,2\n")
    with pytest.raises(InvalidInput, match=r"its columns 'a,b' are none that are known.*format 'text'"):
        read(tmp_path / "data")
    assert len(read(tmp_path / "data", format="text")) == 2


def test_a_file_that_two_formats_fit_is_refused_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "data").write_text('{"id": 1, "parts": [], "text": "x"}\n')
    with pytest.raises(InvalidInput, match=r"fits several formats \(segments, text\)"):
        read(tmp_path / "data")


def test_a_line_longer_than_what_is_looked_at_is_known_by_its_names(tmp_path: Path) -> None:
    (tmp_path / "data").write_text(json.dumps({"prompt": "so long " * 200_000, "output_tokens": 3}))
    assert format_of(tmp_path / "data") == "vllm"
    assert read(tmp_path / "data").requests[0].output_tokens == 3


# --- formats ----------------------------------------------------------------------------------------------------------


def test_lines_of_text_are_prompts() -> None:
    found = read(DATA / "prompts.txt")
    assert said(found)[1] == prompt("Which river runs through Vienna?")
    assert [request.request_id for request in found.requests] == ["prompts-1", "prompts-2", "prompts-4"]
    assert {request.output_tokens for request in found.requests} == {128} and found.arrivals == "none"
    assert found.notes == (
        "output lengths that are not in the file, 128 tokens or the request's bound: 3", "empty prompts left out: 1",
    )  # fmt: skip
    assert {request.output_tokens for request in read(DATA / "prompts.txt", output_tokens=9).requests} == {9}


def test_a_list_of_texts_is_prompts_and_text_may_begin_with_a_bracket(tmp_path: Path) -> None:
    (tmp_path / "list").write_text('["Hello there, you.", "And you?"]')
    assert said(read(tmp_path / "list")) == [prompt("Hello there, you."), prompt("And you?")]
    (tmp_path / "lines").write_text("[INST] Hello there [/INST]\n{name}, hello\n")
    assert guesses(tmp_path / "lines") == ["text"] and len(read(tmp_path / "lines")) == 2


def test_texts_with_lengths_and_times_come_in_order_from_zero() -> None:
    found = read(DATA / "texts.jsonl")
    assert [(request.arrival_seconds, request.output_tokens) for request in found.requests] == [(0.0, 1), (2.5, 7)]
    assert found.arrivals == "of the trace" and found.notes == ("empty prompts left out: 1",)


def test_vllm_s_lines_have_lengths_where_they_say_them() -> None:
    found = read(DATA / "vllm.jsonl", output_tokens=64)
    assert [request.output_tokens for request in found.requests] == [10, 1520, 64]
    assert said(found)[0] == prompt("What is the capital of India?")


def test_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    assert said(read(DATA / "token_ids.jsonl")) == [[1, 15, 16, 17], [1, 15, 16, 2147483647]]
    lists = read(DATA / "token_lists.jsonl")
    assert said(lists) == said(read(DATA / "token_lists.json")) == [[1, 15, 16, 17], [1, 15, 99]]
    assert "empty prompts left out: 1" in lists.notes
    for dtype in (np.int32, np.int64):
        np.save(tmp_path / "ids.npy", np.array([[1, 15, 16], [7, -1, -1]], dtype))
        assert guesses(tmp_path / "ids.npy") == ["tokens"]
        assert said(read(tmp_path / "ids.npy")) == [[1, 15, 16], [7]]
    (tmp_path / "ids.gz").write_bytes(gzip.compress((tmp_path / "ids.npy").read_bytes()))
    assert said(read(tmp_path / "ids.gz")) == [[1, 15, 16], [7]]


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((2, 2)), np.array([[1, -1, 2]]), np.array([[2**31]])])
def test_an_array_that_has_no_token_ids_is_refused(array: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(InvalidInput, match=r"ids\.npy.*(must be|row 1)"):
        read(tmp_path / "ids.npy")


def test_nothing_in_an_array_is_run(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(InvalidInput, match="not a numpy array of numbers"):
        read(tmp_path / "ids.npy")


def test_batch_lines_share_their_system_prompt_and_bound_their_answers() -> None:
    found = read(DATA / "batch.jsonl")
    one, two, tools, completion, response = found.requests
    assert [request.request_id for request in found.requests] == [f"request-{n}" for n in (1, 2, 4, 5, 6)]
    helpful = "system: You are a helpful assistant.\n"
    assert one.token_ids.tolist() == prompt(helpful, "user: Hello world!\n", "assistant:")
    assert one.parts[1] is two.parts[1] and one.group == two.group == response.group != tools.group
    assert response.token_ids.tolist() == one.token_ids.tolist()
    assert [request.output_tokens for request in found.requests] == [50, 128, 128, 128, 9]
    assert completion.token_ids.tolist() == [5, 6, 7]
    call = ' [{"id":"c1","type":"function","function":{"name":"now","arguments":"{}"}}]'
    assert tools.token_ids.tolist() == prompt(
        'tools: [{"type":"function","function":{"name":"now"}}]\n', "user: What time is it?\n",
        "assistant:", call, "\n", "tool: 12:30\n", "assistant:",
    )  # fmt: skip
    assert "requests to /v1/embeddings, which generate nothing, left out: 1" in found.notes
    assert "parts of messages that are no text (images, audio, files), left out: 1" in found.notes


def test_the_last_message_of_a_line_is_its_answer_where_the_assistant_says_it() -> None:
    answered, asked = read(DATA / "messages.jsonl").requests
    brief = "system: Be brief.\n"
    assert answered.token_ids.tolist() == prompt(brief, "user: Which river runs through Vienna?\n", "assistant:")
    assert answered.output_ids is not None and answered.output_ids.tolist() == encode(" The Danube.").tolist()
    assert asked.token_ids.tolist() == prompt(brief, "user: And through Paris?\n", "assistant:")
    assert asked.output_tokens == 128 and asked.group == answered.group


def test_system_prompts_that_begin_alike_are_two_groups_and_no_group_shows_its_text(tmp_path: Path) -> None:
    """They were one, and the whole text stood in the file of requests."""
    long = "Follow the rules of the house. " * 20
    told = [
        {"messages": [{"role": "system", "content": long + end}, {"role": "user", "content": "Go."}]} for end in "ab"
    ]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (*told, told[0])))
    one, two, again = (request.group for request in read(tmp_path / "long.jsonl").requests)
    assert one == again != two and "rules" not in one and len(one) < 32


def test_conversations_are_sessions_whose_next_prompt_begins_with_all_that_was_said() -> None:
    found = read(DATA / "sharegpt.json")
    assert [request.request_id for request in found.requests] == [
        "sharegpt-1.000", "sharegpt-1.001", "sharegpt-1.002", "sharegpt-3.000",
    ]  # fmt: skip
    one, two, last, other = found.requests
    assert [request.after for request in found.requests] == [None, "sharegpt-1.000", "sharegpt-1.001", None]
    assert one.hint == two.hint == SessionHint(session="sharegpt-1") and found.has_sessions
    assert one.output_ids is not None
    begun = [*one.token_ids.tolist(), *one.output_ids.tolist()]
    assert (
        two.token_ids.tolist()[: len(begun)]
        == begun
        == prompt("user: Which river runs through Vienna?\n", "assistant:", " The Danube.")
    )
    assert last.output_tokens == 128 and last.output_ids is None
    assert other.token_ids.tolist() == prompt(
        "assistant:", " Hello, what can I do?", "\n", "user: Count to three.\n", "assistant:"
    )
    assert "conversations without a question, left out: 1" in found.notes
    assert "answers without a question, read as context: 1" in found.notes
    assert len(read(DATA / "sharegpt.json", limit=2)) == 2


def test_mooncake_s_lines_may_have_no_blocks() -> None:
    found = read(DATA / "mooncake_lengths.jsonl")
    assert [request.arrival_seconds for request in found.requests] == pytest.approx([0.0, 0.5355])
    one, two = said(found)
    assert len(one) == len(two) == 600 and one[0] != two[0]


def test_both_forms_of_agents_sessions_are_the_same_sessions() -> None:
    flat, published = read(DATA / "weka.jsonl"), read(DATA / "weka_published.json")
    assert flat.arrivals == published.arrivals == "none"
    for here, there in zip(flat.requests[:2], published.requests[:2], strict=True):
        assert here.token_ids.tolist() == there.token_ids.tolist() and here.after == there.after
        assert (here.output_tokens, here.pause_seconds, here.after_tool) == (
            there.output_tokens, there.pause_seconds, there.after_tool,
        )  # fmt: skip
    sub, other = flat.requests[3], published.requests[2]
    assert (sub.after, sub.pause_seconds) == (other.after, other.pause_seconds) == ("a.0000", 3.0)
    assert sub.prompt_tokens == other.prompt_tokens == 128


def test_an_object_may_stand_in_several_lines(tmp_path: Path) -> None:
    session = json.loads((DATA / "weka_published.json").read_text())
    (tmp_path / "data").write_text(json.dumps(session, indent=1))
    assert said(read(tmp_path / "data")) == said(read(DATA / "weka_published.json"))


def test_published_sessions_lie_in_a_folder_and_ids_may_be_those_of_all(tmp_path: Path) -> None:
    session = json.loads((DATA / "weka_published.json").read_text())
    for name, scope in (("one", "global"), ("two", "global"), ("three", "local")):
        (tmp_path / f"{name}.json").write_text(json.dumps({**session, "id": name, "hash_id_scope": scope}))
    assert guesses(tmp_path) == ["weka"]
    firsts = {r.request_id: r.token_ids.tolist() for r in read(tmp_path).requests if r.request_id.endswith("0000")}
    assert firsts["one.0000"] == firsts["two.0000"] != firsts["three.0000"]


def test_tables_of_arrivals_are_known_by_their_columns() -> None:
    burst = read(DATA / "burstgpt.csv").requests
    assert [(r.arrival_seconds, r.prompt_tokens, r.output_tokens) for r in burst] == [
        (0.0, 472, 18), (40.0, 1087, 230), (113.0, 417, 1),
    ]  # fmt: skip
    vidur = read(DATA / "vidur.csv").requests
    assert [(r.arrival_seconds, r.prompt_tokens, r.output_tokens) for r in vidur] == [
        (0.0, 591, 140),
        (0.125, 547, 248),
    ]
    azure = read(DATA / "azure_2024.csv").requests
    assert [round(r.arrival_seconds, 6) for r in azure] == [0.0, 0.007405]


def test_times_may_be_milliseconds_or_dates_and_answers_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "ms").write_text("timestamp_ms,prompt_tokens\n500,10\n2000,0\n")
    found = read(tmp_path / "ms")
    assert [(r.arrival_seconds, r.prompt_tokens, r.output_tokens) for r in found.requests] == [
        (0, 10, 128),
        (1.5, 1, 128),
    ]
    (tmp_path / "dates").write_text("time,input_tokens\n2024-05-10T00:00:01Z,10\n2024-05-10T02:00:02+02:00,10\n")
    assert [r.arrival_seconds for r in read(tmp_path / "dates").requests] == [0.0, 1.0]


def test_rates_are_drawn_for_each_client_and_are_the_same_again(tmp_path: Path) -> None:
    found = read(DATA / "servegen.csv")
    assert {request.tenant for request in found.requests} == {"4", "7"}
    times = [request.arrival_seconds for request in found.requests]
    assert times[0] == 0.0 and times == sorted(times) and times[-1] <= 1200.0
    assert times == [request.arrival_seconds for request in read(DATA / "servegen.csv").requests]
    assert f"prompt lengths that are not in the file, 1024 tokens: {len(found)}" in found.notes
    (tmp_path / "steady.csv").write_text("client,window_start_s,rate_per_s,cv\na,0,5,0.3\n")
    steady = [request.arrival_seconds for request in read(tmp_path / "steady.csv").requests]
    assert len(steady) == pytest.approx(3000, rel=0.03)
    gaps = np.diff(steady)
    assert gaps.std() / gaps.mean() == pytest.approx(0.3, rel=0.1)


def test_a_model_s_own_tokenizer_is_read_from_its_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "model").mkdir()
    made.save(str(tmp_path / "model" / "tokenizer.json"))
    found = from_file(tmp_path / "model")
    assert (found.name, found.vocabulary_size, found.encode("b a c").tolist()) == ("model", 3, [2, 1, 0])
    with pytest.raises(InvalidInput, match="there is no file"):
        from_file(tmp_path / "nothing")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"bad\.json cannot be read"):
        from_file(tmp_path / "bad.json")


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("texts.jsonl", '"Name three primes."', "7.5", r"line 2: 'text' must be text"),
        ("texts.jsonl", '"output_tokens": 0', '"output_tokens": -1', r"line 2: 'output_tokens' must be an integer"),
        ("texts.jsonl", '"arrival_seconds": 10', '"arrival_seconds": "soon"', r"line 2: 'arrival_seconds' must be a n"),
        ("texts.jsonl", ', "arrival_seconds": 10}', "}", r"line 2: 'arrival_seconds' must be on every line or on none"),
        ("vllm.jsonl", '"What is the capital of Iran?"', "null", r"line 2: 'prompt' must be text, got None"),
        ("vllm.jsonl", '{"prompt": "What is the capital of Iran', '{"prompt": What', r"line 2: not JSON"),
        ("vllm.jsonl", '"output_tokens": 1520', '"output_tokens": 1e9', r"line 2: 'output_tokens' must be an integer"),
        ("token_ids.jsonl", "2147483647", "2147483648", r"line 2: 'token_ids' must be a list of integers"),
        ("token_ids.jsonl", "[1, 15, 16, 2147483647]", "true", r"line 2: 'token_ids' must be a list of integers"),
        ("token_lists.jsonl", "99]", "-1]", r"line 3: 'line' must be a list of integers"),
        ("token_lists.jsonl", "99]", "99", r"line 3: not JSON"),
        ("token_lists.json", "99]", '"99"]', r"entry 2: 'entry' must be a list of integers"),
        ("batch.jsonl", '"body": {"model": "m", "tools"', '"body": 7, "was": {"tools"', r"line 4: 'body' must be an"),
        ("batch.jsonl", '"request-2"', '"request-1"', r"line 2: request id 'request-1' is there twice"),
        ("batch.jsonl", '"content": "Hello world!"', '"content": 7', r"line 1: message 2: 'content' must be text"),
        ("batch.jsonl", '"messages": [{"role": "system"', '"message": [{"role": "system"', r"line 1: a request must"),
        ("batch.jsonl", '"max_tokens": 50', '"max_tokens": 0', r"line 1: 'max_tokens' must be an integer from 1"),
        ("messages.jsonl", '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And', '["And',
         r"line 2"),
        ("messages.jsonl", '{"role": "user", "content": "And through Paris?"}', '"x"', r"line 2: 'messages', mes"),
        ("sharegpt.json", '"conversations": []', '"conversations": {}', r"entry 2: 'conversations' must be a list"),
        ("sharegpt.json", '{"from": "human", "value": "Thank', '{"value": "Thank', r"entry 1: 'conversations', turn 5"),
        ("sharegpt.json", '"value": "The Seine."', '"value": 7', r"entry 1: 'conversations', turn 4: 'content'"),
        ("sharegpt.json", '"value": "1 2 3"}', '"value": "1 2 3"', r"line \d+: not JSON"),
        ("weka.jsonl", '"keep":4', '"keep":5', r"line 2: 'keep' is 5 blocks, but the turn before has 4"),
        ("weka_published.json", '"block_size":64', '"block_size":16', r"line 1: 'block_size' must be 64, got 16"),
        ("weka_published.json", "[20,21]", '"20"', r"line 1, request 2, request 1: 'hash_ids' must be a list"),
        ("weka_published.json", '"t":9.0', '"t":null', r"line 1, request 3: 't' must be a number"),
        ("mooncake_lengths.jsonl", '"input_length": 600', '"input_length": 4194305', r"line 1: 'input_length' must"),
        ("burstgpt.csv", "1087", "many", r"line 4: 'Request tokens' must be an integer"),
        ("burstgpt.csv", "118,", "later,", r"line 3: 'Timestamp' must be a number"),
        ("burstgpt.csv", "118,", "1e300,", r"line 3: 'Timestamp' must be a number"),
        ("azure_2024.csv", "00.017335+00:00", "00.017335+99:00", r"line 3: 'TIMESTAMP' must look like"),
        ("servegen.csv", "0.02", "1e6", r"line 2: 'rate_per_s' must be at most 10000"),
        ("servegen.csv", "1.18", "wide", r"line 2: 'cv' must be a number"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path: Path, name: str, old: str, new: str, message: str) -> None:
    text = (DATA / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new, 1))
    with pytest.raises(InvalidInput, match=rf"{name}, {message}"):
        read(tmp_path / name, format=GOLDEN[name])


def test_a_table_that_is_forced_names_the_columns_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("when,prompt_tokens\n1,2\n")
    with pytest.raises(InvalidInput, match=r"data, line 1: the header lacks a time: one of arrival_seconds"):
        read(tmp_path / "data", format="arrivals")


@pytest.mark.parametrize("zipped", [gzip.compress, lzma.compress])
def test_a_damaged_zip_is_named(zipped, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "data").write_bytes(zipped((DATA / "sharegpt.json").read_bytes())[:-40])
    with pytest.raises(InvalidInput, match=r"data, line \d+: cannot be read"):
        read(tmp_path / "data")


def test_a_file_of_which_nothing_is_left_says_what_it_had(tmp_path: Path) -> None:
    (tmp_path / "data").write_text('[{"conversations": []}]')
    with pytest.raises(InvalidInput, match="holds no request; conversations without a question, left out: 1"):
        read(tmp_path / "data")


def test_a_timestamp_that_is_not_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "data").write_text('{"prompt": "hello there", "timestamp": 17}\n')
    assert any("a 'timestamp', which is not read" in note for note in read(tmp_path / "data").notes)


@pytest.mark.parametrize("wrong", [0, -1, 2**31])
def test_a_wrong_default_length_is_named(wrong: int) -> None:
    with pytest.raises(InvalidInput, match="output_tokens"):
        read(DATA / "vllm.jsonl", output_tokens=wrong)


def test_lines_lists_and_requests_have_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LINE_CHARS_MAX", 60)
    with pytest.raises(InvalidInput, match=r"vllm\.jsonl, line 1: longer than 60 characters"):
        read(DATA / "vllm.jsonl")
    monkeypatch.setattr(files, "DOCUMENT_CHARS_MAX", 300)
    with pytest.raises(InvalidInput, match=r"sharegpt\.json: one JSON value of more than 300 characters"):
        read(DATA / "sharegpt.json")
    with pytest.raises(InvalidInput, match=r"burstgpt\.csv, line 1: longer than 60 characters"):
        read(DATA / "burstgpt.csv", format="arrivals")
    monkeypatch.setattr(own, "DOCUMENT_CHARS_MAX", 3)
    np.save(tmp_path / "ids.npy", np.zeros((2, 2), int))
    with pytest.raises(InvalidInput, match=r"ids\.npy: more than 3 token ids in one array"):
        read(tmp_path / "ids.npy")
    monkeypatch.setattr(files, "REQUESTS_MAX", 1)
    with pytest.raises(InvalidInput, match=r"token_ids\.jsonl, line 2: more than 1 requests; set a limit"):
        read(DATA / "token_ids.jsonl")
    assert len(read(DATA / "token_ids.jsonl", limit=1)) == 1


# --- round trips ------------------------------------------------------------------------------------------------------

TEXTS = st.text(max_size=40)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8), min_size=1, max_size=6))
def test_token_ids_come_back(tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]) -> None:
    place = tmp_path_factory.mktemp("own") / "data"
    for text in ("".join(f"{ids}\n" for ids in prompts), json.dumps(prompts),
                 "".join(json.dumps({"token_ids": ids}) + "\n" for ids in prompts)):  # fmt: skip
        place.write_text(text)
        assert guesses(place) == ["tokens"] and said(read(place)) == prompts


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(TEXTS, st.integers(1, 99)), min_size=1, max_size=6))
def test_prompts_come_back_with_their_lengths(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, int]]
) -> None:
    place = tmp_path_factory.mktemp("own") / "data"
    place.write_text("".join(json.dumps({"prompt": text, "output_tokens": tokens}) + "\n" for text, tokens in lines))
    kept = [(prompt(text), tokens) for text, tokens in lines if text.strip()]
    assert guesses(place) == ["vllm"]
    if not kept:
        with pytest.raises(InvalidInput, match="holds no request"):
            read(place)
        return
    assert [(r.token_ids.tolist(), r.output_tokens) for r in read(place).requests] == kept


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["human", "gpt", "system"]), TEXTS), max_size=8))
def test_a_conversation_s_turns_each_begin_with_the_turn_before(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, str]]
) -> None:
    place = tmp_path_factory.mktemp("own") / "data"
    conversation = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    place.write_text(json.dumps([conversation, {"conversations": [{"from": "human", "value": "x"}]}]))
    *chain, _ = read(place).requests
    assert len(chain) <= sum(role == "human" for role, _ in turns)
    for before, request in zip(chain, chain[1:], strict=False):
        answer = before.output_ids.tolist() if before.output_ids is not None else []
        begun = [*before.token_ids.tolist(), *answer]
        assert request.token_ids.tolist()[: len(begun)] == begun and request.after == before.request_id


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in GOLDEN if name != "burstgpt.csv"])
def test_every_golden_file_is_simulated_to_its_end(name: str) -> None:
    found = sim.simulate(read(DATA / name), sim.SimConfig(workers=2))
    assert (found.outcome == FINISHED).all()


def test_a_file_is_simulated_and_what_was_done_with_it_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place, picture = tmp_path / "found.json", tmp_path / "plot.png"
    options = ["--policy", "round_robin,e2", "--output-tokens", "20", "--json", str(place)]
    drawn = ["--plot", str(picture)] if pytest.importorskip("matplotlib") else []
    assert main(["simulate", str(DATA / "sharegpt.json"), *options, *drawn]) == 0
    out = capsys.readouterr().out
    assert "sharegpt.json (sharegpt, tokenizer words," in out and "sessions/s, seed 0" in out
    assert "note: conversations without a question, left out: 1\n" in out
    assert "note: output lengths that are not in the file, 20 tokens or the request's bound: 1\n" in out
    found = json.loads(place.read_text())
    assert found["workload"]["requests"] == 4 and len(found["workload"]["notes"]) == 3
    assert picture.stat().st_size > 10_000
    assert main(["simulate", str(DATA / "sharegpt.json"), "--sessions", "2", "--policy", "e2"]) == 0
    assert "arrivals: 2 sessions at once, seed 0" in capsys.readouterr().out
    assert main(["simulate", "--workload", str(DATA / "vidur.csv"), "--format", "arrivals", "--policy", "e2"]) == 0
    assert "arrivals: of the trace" in capsys.readouterr().out


def test_files_are_studied_and_those_without_text_need_no_tokenizer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preble.workloads.mistral", lambda: pytest.fail("no tokenizer is needed"))
    monkeypatch.setattr("preble.cli.console.find_spec", lambda name: None)  # no figures, which take seconds
    files = [str(DATA / name) for name in ("weka.jsonl", "token_ids.jsonl", "vidur.csv")]
    assert main(["study", *files, "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "weka.jsonl (weka, outputs recorded)" in out and "vidur.csv (arrivals, outputs recorded)" in out
    assert main(["study", str(DATA / "batch.jsonl"), "--tokenizer", "words", "--output", str(tmp_path)]) == 0
    assert "note: requests to /v1/embeddings, which generate nothing, left out: 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["prompts.txt", "--workload", "toolbench"], "FILE and --workload"),
        (["sharegpt.json", "--sessions", "1", "--rps", "2"], "--sessions and --rps"),
        (["vllm.jsonl", "--sessions", "1"], "--sessions: vllm has no sessions"),
        (["sharegpt.json", "--sessions", "9"], "--sessions: 9 at once, but sharegpt has 2"),
        (["prompts.txt", "--tokenizer", "nowhere"], "--tokenizer must be words, mistral, or a folder"),
        (["prompts.txt", "--format", "vllm"], "line 1: not JSON"),
    ],
)
def test_wrong_options_are_reported(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(DATA / options[0]), *options[1:]]) == 2
    assert message in capsys.readouterr().err


def test_options_of_files_are_not_for_generated_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--format", "vllm", "--requests", "3"]) == 2
    assert "--format and --tokenizer are for files" in capsys.readouterr().err
