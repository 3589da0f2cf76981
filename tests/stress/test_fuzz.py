"""Decoders of bytes from outside raise their own errors and nothing else: some damaged inputs for each, and the inputs
that once did more. Owns how many; decoders and damage are stress/fuzz.py's, a million inputs are run from there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preble import workloads
from preble.errors import InvalidConfig, InvalidInput, ProtocolError
from preble.gateway.api import schemas
from preble.gateway.core.http_errors import ApiError
from preble.transport.engine_servers.link import ServerLink
from preble.transport.engine_servers.server_info import ServerOptions, sglang_info
from preble.transport.security import create_keys, load_client_keys
from tests.stress import fuzz
from tests.stress.fuzz import Target, damaged, targets

INPUTS = 1500
SLOW_INPUTS = 150  # decoders that make a scheduler or read a file for each input
SLOW = {"snapshot", "cost_model", "curve_keys", "config_yaml", "config_toml"}
NAMES = ["wire", "engine_events", "event_objects", "engine_load", "sglang_stream", "vllm_stream"]
NAMES += ["snapshot", "records", "cost_model", "curve_keys", "sglang_facts", "vllm_facts", "chat_body"]
NAMES += ["completion_body", "generate_body", "config_yaml", "config_toml", "trace_segments", "trace_mooncake"]
NAMES += ["trace_azure", "trace_toolbench", "trace_loogle", "trace_nextqa", "trace_alfworld", "trace_apps"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    """The decoders by name."""
    return {target.name: target for target in targets(tmp_path_factory.mktemp("fuzz"))}


def test_every_decoder_is_run(table: dict[str, Target]) -> None:
    assert list(table) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_damaged_inputs_raise_the_decoders_own_error(table: dict[str, Target], name: str) -> None:
    target, rng = table[name], random.Random(11)
    assert all(target(seed) for seed in target.seeds), "the seeds are good"
    inputs = SLOW_INPUTS if name in SLOW or name.startswith("trace") else INPUTS
    refused = sum(not target(damaged(rng, target.seeds)) for _ in range(inputs))
    assert refused > inputs // 4, "and the damage is felt"


@pytest.mark.parametrize("name", NAMES)
def test_any_bytes_raise_the_decoders_own_error(table: dict[str, Target], name: str) -> None:
    target = table[name]

    @given(st.binary(max_size=300) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "replace")))
    def feed(data: bytes) -> None:
        target(data)

    feed()


def test_a_fuzzer_that_finds_something_says_so(run_python: Callable[..., Any]) -> None:
    done = run_python("-m", "tests.stress.fuzz", "--mutator", "plain", "--inputs", "50", "--target", "wire")
    assert done.returncode == 0 and done.stdout.endswith("no findings\n"), done.stderr
    assert json.loads(done.stdout.splitlines()[0])["inputs"] == 50
    planted = "from tests.stress import fuzz\n"
    planted += "fuzz.fuzz_plain(fuzz.Target('planted', [b'xx'], lambda data: data.decode(), ()), 5000, 1)"
    done = run_python("-c", planted)
    assert done.returncode == 1 and "UnicodeDecodeError" in done.stderr and "planted: input" in done.stderr


# --- what fuzzing found -----------------------------------------------------------------------------------------------


def test_a_key_file_whose_line_gives_no_key_is_named(tmp_path: Path) -> None:
    create_keys(tmp_path)
    file = tmp_path / "client.key_secret"
    file.write_text(file.read_text().replace("secret-key = ", "secret-key "))
    with pytest.raises(InvalidConfig, match=r"client\.key_secret"):
        load_client_keys(tmp_path)


@pytest.mark.parametrize("text", ["[" * 3000, '{"a":' * 3000])
@pytest.mark.parametrize("format", ["mooncake", "toolbench"])
def test_json_nested_very_deep_is_refused_with_its_line(tmp_path: Path, text: str, format: str) -> None:
    (tmp_path / "deep").write_text(text)
    with pytest.raises(InvalidInput, match=r"deep, line 1: not JSON"):
        workloads.read(tmp_path / "deep", format=format)


def test_a_number_of_thousands_of_digits_is_refused_with_its_field(tmp_path: Path) -> None:
    row = f"2023-11-16 18:17:03.9799600,{'9' * 5000},3\n"
    (tmp_path / "long.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + row)
    with pytest.raises(InvalidInput, match=r"long\.csv, line 2: 'ContextTokens' must be an integer"):
        workloads.read(tmp_path / "long.csv", format="azure")


def test_a_number_with_a_separator_that_is_no_space_to_int_is_read(tmp_path: Path) -> None:
    row = "2023-11-16 18:17:03.9799600,4\x1f,3\n"
    (tmp_path / "odd.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + row)
    assert len(workloads.read(tmp_path / "odd.csv", format="azure")) == 1


def test_an_answer_that_json_has_not_is_refused_with_its_field(tmp_path: Path) -> None:
    row = {"input": "a text", "title": "t", "qa_pairs": "[{'Q': 'q', 'A': {'a': b'x'}}]", "output": "none"}
    (tmp_path / "odd.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InvalidInput, match=r"odd\.jsonl, line 1: 'A' cannot be written as JSON"):
        workloads.read(tmp_path / "odd.jsonl", format="loogle")


@pytest.mark.parametrize("port", ["²", "9" * 5000])
def test_a_port_whose_digits_are_no_number_is_none(port: str) -> None:
    """Found beside it: `isdigit` holds for more than `int` reads."""
    config = {**fuzz.EVENTS_CONFIG, "endpoint": f"tcp://*:{port}"}
    facts = {**fuzz.SGLANG_FACTS, "kv_events": None, "kv_events_config": json.dumps(config)}
    with suppress(ProtocolError):
        sglang_info("http://host:1", facts, ServerOptions())
    with pytest.raises(InvalidInput, match="rank=1"):
        ServerLink(f"http://host:1#rank={port}", *[None] * 3, session=1, context=None, background=set())  # type: ignore


def test_a_python_literal_that_cannot_be_made_is_refused_with_its_field(tmp_path: Path) -> None:
    row = {"input": "a text", "title": "t", "qa_pairs": "[{[]: 1}]", "output": "none"}
    (tmp_path / "odd.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InvalidInput, match=r"odd\.jsonl, line 1: 'qa_pairs' is neither"):
        workloads.read(tmp_path / "odd.jsonl", format="loogle")


def test_a_number_out_of_range_in_a_field_that_changes_nothing_is_refused() -> None:
    with pytest.raises(ApiError, match="best_of is not supported"):
        schemas.decode(b'{"prompt": "x", "best_of": 1e999}', schemas.CompletionRequest)
