"""Which engine the options of `preble worker` ask for, every refusal, and a worker before a running server."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from preble import ManualClock
from preble.engines.async_engine import StreamingEngine
from preble.engines.attached import AttachedBackend
from preble.engines.model_files import eos_token_ids, model_name
from preble.errors import EngineError, InvalidConfig, MissingExtra, TransportError
from preble.worker import engine_options
from tests.engines.test_async_engine import drive, request, tokens_of, until
from tests.support.attach import FakeServer
from tests.support.transport import asynchronous, expected_tokens


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    engine_options.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("-1", -1),
        ("0.85", 0.85),
        ("1e3", 1000.0),
        ("true", True),
        ("False", False),
        ("null", None),
        ("torch_native", "torch_native"),
        ('{"a": [1, 2]}', {"a": [1, 2]}),
        ("[1, 2]", [1, 2]),
        ('"4"', "4"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_engine_arguments_are_typed_by_their_look(text: str, value: Any) -> None:
    found = engine_options.parse_engine_args([f"--some-key={text}"])
    assert found == {"some_key": value}
    assert type(found["some_key"]) is type(value)


@pytest.mark.parametrize(("words", "eviction"), [([], "returns"), (["--eviction", "lru"], "lru")])
def test_workers_of_ours_evict_by_returns_unless_told_otherwise(words: list[str], eviction: str) -> None:
    engine = engine_options.make_engine(options("--engine", "simulated", *words))
    assert engine.scheduler.config.eviction == eviction  # type: ignore[attr-defined]
    with pytest.raises(InvalidConfig, match="--eviction is not for --engine attached"):
        engine_options.make_engine(options("--engine", "attached", "--url", "http://x:1", "--eviction", "lru"))


@pytest.mark.parametrize("words", [["tp_size"], ["=4"], ["a b=4"], ["a={"], ["a=1", "a=2"]])
def test_engine_arguments_that_are_none_are_refused(words: list[str]) -> None:
    with pytest.raises(InvalidConfig, match="--engine-arg"):
        engine_options.parse_engine_args(words)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--engine", "sglang"], "--model"),
        (["--engine", "vllm", "--model", "m", "--max-running", "4"], "--max-running"),
        (["--engine", "sglang", "--model", "m", "--look-ahead", "0"], "look_ahead"),
        (["--engine", "vllm", "--model", "m", "--engine-arg", "kv_events_config={}"], "kv_events_config"),
        (["--engine", "sglang", "--model", "m", "--engine-arg", "skip_tokenizer_init=false"], "skip_tokenizer_init"),
        (["--engine", "simulated", "--engine-arg", "tp_size=4"], "--engine-arg"),
        (["--engine", "simulated", "--look-ahead", "4"], "--look-ahead"),
        (["--engine", "simulated", "--policy", "e2"], "--policy"),
        (["--engine", "sglang", "--model", "m", "--policy", "best"], "policy must be one of"),
        (["--engine", "vllm", "--model", "m", "--policy", "nothing:Here"], "module 'nothing' cannot be imported"),
        (["--engine", "attached", "--url", "http://x:1", "--policy", "tests.support.paths:Path"], "no preble.Policy"),
        (["--engine", "simulated", "--url", "http://127.0.0.1:1"], "--url"),
        (["--engine", "attached"], "--url"),
        (["--engine", "attached", "--url", "http://127.0.0.1:1", "--model", "m"], "--model"),
        (["--engine", "attached", "--url", "http://127.0.0.1:1", "--token-budget", "4"], "--token-budget"),
        (["--engine", "vllm", "--model", "m", "--dtype", "bfloat16"], "--dtype is for --engine torch"),
        (["--engine", "attached", "--url", "http://127.0.0.1:1", "--device", "cpu"], "--device is for --engine torch"),
        (["--engine", "sglang", "--model", "m", "--threads", "1"], "--threads is for --engine torch"),
        (["--engine", "simulated", "--max-model-tokens", "64"], "--max-model-tokens is for --engine torch"),
        (["--engine", "torch", "--model", "m", "--time-scale", "0"], "--time-scale is for --engine simulated"),
        (["--engine", "vllm", "--model", "m", "--cost-model", "x"], "--cost-model is for --engine simulated"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(words: list[str], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        engine_options.make_engine(options(*words))


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_engine_that_is_not_installed_is_named_with_its_command(engine: str) -> None:
    if importlib.util.find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed here")
    with pytest.raises(MissingExtra, match=rf"pip install 'preble\[{engine}\]'"):
        engine_options.make_engine(options("--engine", engine, "--model", "m"))


def test_a_models_end_tokens_and_name_are_read_from_its_files(tmp_path: Path) -> None:
    assert model_name("org/model") == "org/model"
    assert model_name(str(tmp_path)) == tmp_path.name
    assert eos_token_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert eos_token_ids(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert eos_token_ids(tmp_path) == (2, 7)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(InvalidConfig, match="generation_config.json"):
        eos_token_ids(tmp_path)


# --- a worker before a running server ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@asynchronous
async def test_a_running_servers_answers_come_through(kind: str) -> None:
    server = await FakeServer(kind).start()
    engine = await asyncio.to_thread(StreamingEngine, AttachedBackend(server.url))
    try:
        assert engine.info.engine == kind
        prompt = list(range(100, 140))
        await asyncio.to_thread(engine.submit, request(tokens=prompt, new=6))
        found = await asyncio.to_thread(drive, engine)
        assert tokens_of(found["r"]) == expected_tokens(prompt, 6)
        assert found["r"][-1].finish_reason == "length"
        engine.admission.check()
    finally:
        await asyncio.to_thread(engine.close)
        await server.kill()


@asynchronous
async def test_a_server_that_dies_in_the_middle_hands_its_requests_back() -> None:
    server = await FakeServer("sglang").start()
    engine = await asyncio.to_thread(StreamingEngine, AttachedBackend(server.url))

    def die(token_number: int) -> None:
        if token_number == 3:
            server.answers["/v1/loads"] = (503, b"")
            raise ConnectionResetError

    server.on_token = die
    try:
        await asyncio.to_thread(engine.submit, request(tokens=list(range(100, 140)), new=9))
        reasons = set()
        with pytest.raises(EngineError, match="broke off and does not answer"):
            while True:
                await asyncio.to_thread(until, engine.ready, "something comes")
                reasons |= {chunk.finish_reason for chunk in engine.step()}
                engine.take_events()
        assert reasons <= {None}, "no request is failed for it"
    finally:
        await asyncio.to_thread(engine.close)
        await server.kill()


@asynchronous
async def test_no_server_is_an_error_and_one_that_went_away_fails_the_engine() -> None:
    with pytest.raises(TransportError):
        await asyncio.to_thread(StreamingEngine, AttachedBackend("http://127.0.0.1:21999"))
    server, clock = await FakeServer("sglang").start(), ManualClock()
    engine = await asyncio.to_thread(StreamingEngine, AttachedBackend(server.url, gone_seconds=30.0, clock=clock))

    def is_missed() -> bool:
        """Time goes on, since an answer may have come just before the end and be noted after it."""
        clock.advance(31.0)
        return engine.ready()

    try:
        await server.kill()
        await asyncio.to_thread(until, is_missed, "it is missed")
        with pytest.raises(EngineError, match="has not answered for 30.0 s"):
            engine.step()
    finally:
        await asyncio.to_thread(engine.close)
