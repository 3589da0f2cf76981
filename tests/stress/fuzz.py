"""Every decoder of bytes from outside, fed with damaged inputs: no exception but its own, no hang, no growth.

    python -m tests.stress.fuzz --inputs 1000000                  all decoders, guided by atheris where it is installed
    python -m tests.stress.fuzz --target wire --mutator plain     one of them, without atheris

Owns the table of decoders (`targets`), the seeds, and how an input is damaged; `test_fuzz.py` runs a few of the
same inputs. Each decoder runs in a process of its own, which prints one line of JSON: inputs per second, resident
memory after a tenth of the inputs and at the end. An input may take `SLOW_SECONDS`; then the process is ended by a
signal. Exit code 1 when a decoder raised what it may not, hung, wanted more than INPUT_BYTES_HELD_MAX for one input, or
grew by more than GROWTH_BYTES_MAX.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import logging
import lzma
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np

from preble import CostModel, GlobalScheduler, ManualClock, SamplingParams, SchedulerConfig, WorkerSpec, workloads
from preble._kv_index.event_batch import EventBatch
from preble.errors import (
    HandshakeRefused,
    InvalidConfig,
    InvalidInput,
    PrebleError,
    ProtocolError,
    QueueFull,
    SnapshotRefused,
    TransportError,
)
from preble.gateway.api import fields, sampling, schemas
from preble.gateway.core import config_sources
from preble.gateway.core.http_errors import ApiError
from preble.scheduling.records import DecisionRecording, from_json, to_json
from preble.transport import wire
from preble.transport.engine_servers import kv_event_codec, server_info
from preble.transport.engine_servers.http_client import _SglangStream, _VllmStream
from preble.transport.messages import PullFrom
from preble.transport.security import create_keys, load_client_keys
from preble.types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    PrefixEvicted,
    RequestEnded,
    RequestPlaced,
    RequestPrefilled,
)
from tests.support.paths import DATA

ALL = wire.ROUTER_MESSAGES | wire.WORKER_MESSAGES | wire.KV_ASKS | wire.KV_ANSWERS
INPUT_BYTES_MAX = 4096
SLOW_SECONDS = 10
INPUT_BYTES_HELD_MAX = 256 << 20  # then MemoryError, which no decoder may raise; with atheris, 2 GiB of all memory
GROWTH_BYTES_MAX = 48 << 20  # atheris keeps inputs that reached something new
SNAPSHOT_HEADER_BYTES = 24
WORDS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFF, 0x10000]
TEXTS = [
    b"[" * 3000,
    b"[" * 600 + b"]" * 600,
    b"9" * 5000,
    b'"',
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b"\xff",
    b"\0",
    b"{}",
    b"[]",
    b'""',
    b"\r\n",
]


@dataclass(frozen=True)
class Target:
    """A decoder: `feed` gives it bytes and raises nothing but `may_raise`, whatever they are."""

    name: str
    seeds: list[bytes]
    feed: Callable[[bytes], object]
    may_raise: tuple[type[PrebleError], ...]

    def __call__(self, data: bytes) -> bool:
        """Feed; True if the input was accepted."""
        try:
            self.feed(data)
        except self.may_raise:
            return False
        return True


# --- the decoders -----------------------------------------------------------------------------------------------------


def targets(directory: Path) -> list[Target]:
    """All of them. Those that read files read one in `directory`."""
    made = [
        Target("wire", _frames(), _feed_wire, (ProtocolError,)),
        Target("engine_events", _payloads(), EngineEvents(), (InvalidInput,)),
        Target("event_objects", _payloads(), lambda data: EventBatch(data).events(), (InvalidInput,)),
        Target("engine_load", [LOAD_FRAME], kv_event_codec.decode_load, (ProtocolError,)),
        Target(
            "sglang_stream",
            SGLANG_LINES,
            lambda line: _SglangStream(True, 2 if b"prob" in line else None).take(line),
            STREAM_ERRORS,
        ),
        Target(
            "vllm_stream",
            VLLM_LINES,
            lambda line: _VllmStream(2 if b"prob" in line else None).take(line),
            STREAM_ERRORS,
        ),
        Target("snapshot", [_snapshot()[SNAPSHOT_HEADER_BYTES:]], Snapshots(), (SnapshotRefused, InvalidInput)),
        Target("records", [line.encode() for line in _records()], _feed_record, (InvalidInput,)),
        Target(
            "cost_model", [_cost_model(directory)], OneFile(directory / "cost.json", CostModel.load), (InvalidConfig,)
        ),
        Target("curve_keys", *_keys(directory), (InvalidConfig,)),
        Target("sglang_facts", [_json(SGLANG_FACTS)], _feed_sglang_facts, FACT_ERRORS),
        Target(
            "vllm_facts",
            [b"\0".join([_json(VLLM_MODELS), VLLM_METRICS, _json(VLLM_SOURCES)])],
            _feed_vllm_facts,
            FACT_ERRORS,
        ),
        Target("chat_body", CHAT_BODIES, _feed_chat, (ApiError,)),
        Target("completion_body", COMPLETION_BODIES, _feed_completion, (ApiError,)),
        Target("generate_body", GENERATE_BODIES, _feed_generate, (ApiError,)),
        Target("config_yaml", [CONFIG_YAML], OneFile(directory / "c.yaml", _load_config), (InvalidConfig,)),
        Target("config_toml", [CONFIG_TOML], OneFile(directory / "c.toml", _load_config), (InvalidConfig,)),
    ]
    return made + [_trace_target(directory, name) for name in TRACES]


LOAD_FRAME = msgpack.packb(["LoadStat", 2, 1, 300, 4000, 0, 77])
SGLANG_LINES = [
    b'{"output_ids": [5], "meta_info": {"output_token_logprobs": [[-1, 5, 0]], "output_top_logprobs": [[[-1, 7]]]}}',
    b'{"output_ids": [5, 6], "meta_info": {"cached_tokens": 3, "finish_reason": null}}',
    b'{"output_ids": [7], "meta_info": {"finish_reason": {"type": "stop", "status_code": 503}}}',
]
VLLM_LINES = [
    b'{"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-1], "top_logprobs": [{"token_id:5": -1.0}]}}]}',
    b'{"choices": [{"text": "", "token_ids": [5, 6], "finish_reason": null}], "usage": null}',
    b'{"choices": [{"token_ids": [7], "finish_reason": "length"}]}',
    b'{"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 16}}}',
]
STREAM_ERRORS = (ProtocolError, TransportError, InvalidInput, QueueFull, HandshakeRefused)

TRACES = {
    "tiny.jsonl": "segments",
    "mooncake.jsonl": "mooncake",
    "azure.csv": "azure",
    "toolbench.json": "toolbench",
    "loogle.jsonl": "loogle",
    "nextqa.csv": "nextqa",
    "alfworld.jsonl": "alfworld",
    "apps.jsonl": "apps",
}


FACT_ERRORS = (ProtocolError, HandshakeRefused, InvalidConfig)
EVENTS_CONFIG = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv", "endpoint": "tcp://*:5557"}
SGLANG_FACTS = {
    **{"version": "0.5.23", "served_model_name": "tiny", "page_size": 4, "context_length": 4096, "dp_size": 2},
    **{"max_total_num_tokens": 50_000, "max_running_requests": 8, "startup_time": {"scheduler": 5.0}},
    "kv_events": {
        **{"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv"},
        **{"block_size": 4, "dp_size": 2, "replay_endpoint_port_base": 5657},
    },
}
VLLM_MODELS = {"object": "list", "data": [{"id": "tiny", "max_model_len": 4096}]}
VLLM_SOURCES = {"0": EVENTS_CONFIG}
VLLM_METRICS = b"""# HELP vllm:cache_config_info facts
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",note="a\\"b\\n",num_gpu_blocks="12500"} 1.0
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
process_start_time_seconds 1.7e9
"""
CHAT_BODIES = [
    b'{"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "stream": true, "n": 2}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": []}], "stop": ["x"]}',
]
COMPLETION_BODIES = [
    b'{"model": "m", "prompt": "hello", "temperature": 0.5, "top_p": 1, "seed": 7, "stop": null, "logprobs": null}',
    b'{"prompt": [1, 2, 3], "max_tokens": 5, "stream_options": {"include_usage": true}, "user": "u"}',
    b'{"prompt": [[1, 2], "text", [3]], "cache_salt": "s", "structured_outputs": {"choice": ["a"]}}',
    b'{"prompt": "x", "logit_bias": {"7": 1}, "response_format": {"type": "json_schema", "json_schema": {"schema":1}}}',
]
GENERATE_BODIES = [
    b'{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3, "temperature": 0}, "stream": true, "rid": "r"}',
    b'{"text": ["a", "b"], "sampling_params": {"stop": "x", "regex": "a", "min_new_tokens": 1}, "stream": false}',
]
CONFIG_YAML = b"""workers: [tcp://127.0.0.1:5601, http://host:30000]
port: 8000
scheduler:
  history_seconds: 60
rate_limit_per_minute: 600  # a comment
model_names: ["a", 'b']
"""
CONFIG_TOML = b"""workers = ["tcp://127.0.0.1:5601"]
port = 8000
drain_seconds = 1.5
[scheduler]
history_seconds = 60
"""


def _json(content: object) -> bytes:
    return json.dumps(content).encode()


def _object(data: bytes) -> dict[str, Any]:
    """What an engine's body is decoded to; other things than an object end before."""
    try:
        content = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _feed_sglang_facts(data: bytes) -> None:
    server_info.sglang_info("http://host:30000", _object(data), server_info.ServerOptions())


def _feed_vllm_facts(data: bytes) -> None:
    models, metrics, sources = (data.split(b"\0") + [b""] * 3)[:3]
    text, options = metrics.decode("utf-8", "replace"), server_info.ServerOptions()
    server_info.vllm_info("http://host:8000", _object(models), text, _object(sources), "1", options)


def _feed_chat(data: bytes) -> None:
    body = schemas.decode(data, schemas.ChatRequest)
    schemas.plain_messages(body.messages)
    sampling.sampling_of_openai(body, 5)


def _feed_completion(data: bytes) -> None:
    body = schemas.decode(data, schemas.CompletionRequest)
    schemas.prompts_of(body.prompt, "prompt", 1000)
    sampling.sampling_of_openai(body, 5)


def _feed_generate(data: bytes) -> None:
    body = schemas.decode(data, schemas.GenerateRequest)
    for place in ("input_ids", "text"):
        if fields.is_given(raw := getattr(body, place)):
            schemas.prompts_of(raw, place, 1000)
    sampling.sampling_of_sglang(body, 5)


def _load_config(file: Path) -> None:
    config_sources.load(file, {}, {})


def _frames() -> list[bytes]:
    ids = np.arange(5, dtype=np.int32)
    events = (
        BlockStored((1, b"x" * 32), None, ids, 5, ("lora", 3), "GPU"),
        BlockRemoved((1,), None),
        AllBlocksCleared(),
        PrefixEvicted(ids, 3, None),
        RequestPlaced("router", "7", ids, ("a", 1), 9),
        RequestPrefilled("router", "7", 3),
        RequestEnded("router", "7", None),
    )
    messages = [
        wire.Hello("router", "w", "m", "t", 16),
        wire.GenerationRequest("r", ids, SamplingParams(stop_token_ids=(1, 2)), ("a", 1, None, b"x"), 2),
        *(wire.Abort("r"), wire.Ping(1), wire.Replay(7), wire.Bye(), wire.Refused("no"), wire.Draining()),
        wire.Welcome("w", "e", "m", "t", 1, 1000, 3, 4096, (2,), "tcp://127.0.0.1:5", 9, 1 << 20, True),
        wire.OutputChunk("r", 3, (1, 2, 3), 4, "length", "text", 12),
        wire.OutputChunks((wire.OutputChunk("r", 3, (1,)), wire.OutputChunk("s", 0, (2,), 4, "error", "text")), 12),
        *(
            wire.Rejected("r", "invalid", "why"),
            wire.Pong(1, 2, 3, 4, 5, 6, 7, 8, True),
            wire.Events(3, events, "router"),
        ),
        *(wire.ReplayEnd(1, 2, 3, 4), wire.Closed("gap", "why"), wire.Fault("what")),
        wire.GenerationRequest("r", ids, pull=PullFrom("tcp://127.0.0.1:5", 9, 3, 1000)),
        wire.PullEnded("r", "partial", 3, 2, 16, 1000, 20, 30),
        *(wire.KvAsk("layout", ids, 2, ("a", 1)), wire.KvPart(2, 3, 40), wire.KvRefused("busy", "why")),
    ]
    return [wire.encode(message, epoch=5, session=1, seq=2) for message in messages]


def _feed_wire(data: bytes) -> None:
    wire.encode(wire.decode(data, ALL).message)  # what was accepted can be said again


def _payloads() -> list[bytes]:
    seeds = []
    for file in sorted(DATA.glob("events_*.xz")):
        records = msgpack.unpackb(lzma.decompress(file.read_bytes()))
        payloads = [record["payload"] for record in records if record["kind"] == "event"]
        seeds += sorted(payloads, key=len)[:: max(1, len(payloads) // 8)][:6]
    arrays = [["BlockStored", [1, b"h"], None, [1, 2, 3, 4], 2, None, "GPU"], ["BlockRemoved", [1], None]]
    seeds.append(msgpack.packb([1.5, [*arrays, ["AllBlocksCleared"]], 0]))
    return [seed for seed in seeds if len(seed) <= INPUT_BYTES_MAX]


class EngineEvents:
    """A scheduler that takes an engine's bytes; a new one now and then, so that inputs are fed to all kinds."""

    def __init__(self) -> None:
        self._fed = 0
        self._new()

    def _new(self) -> None:
        workers = [WorkerSpec("w", kv_capacity_tokens=100_000, block_size=16)]
        self._scheduler = GlobalScheduler(workers, config=SchedulerConfig(max_bytes=1 << 22), clock=ManualClock(1.0))

    def __call__(self, data: bytes) -> None:
        self._fed += 1
        if self._fed % 1000 == 0:
            self._scheduler.check()
            self._new()
        self._scheduler.apply_raw("w", data)


def _snapshot() -> bytes:
    scheduler = GlobalScheduler(["a", "b"], clock=ManualClock(1.0))
    for i in range(12):
        namespace = ("n", 1) if i % 3 else None
        decision = scheduler.schedule([1, 2, 3, i % 4, *range(i)], request_id=f"r{i}", namespace=namespace)
        if i % 2:
            scheduler.first_token(decision.request_id, cached_tokens=0)
    scheduler.apply("a", [BlockStored((5, 6), None, tuple(range(8)), 4, None, "GPU")])
    return scheduler.snapshot()


class Snapshots:
    """Restores bodies under a header whose length and checksum fit: a liar can compute both."""

    def __init__(self) -> None:
        self._head = _snapshot()[:SNAPSHOT_HEADER_BYTES]

    def __call__(self, data: bytes) -> None:
        length = struct.pack("<Q", SNAPSHOT_HEADER_BYTES + len(data))
        check = zlib.crc32(data, zlib.crc32(length, zlib.crc32(self._head[:12])))
        whole = self._head[:12] + struct.pack("<I", check) + length + data
        GlobalScheduler.restore(whole, clock=ManualClock(2.0)).check()


def _records() -> list[str]:
    scheduler = GlobalScheduler(["a", "b"], clock=ManualClock(1.0), record=DecisionRecording())
    for i in range(4):
        decision = scheduler.schedule([1, 2, 3, i], request_id=f"r{i}")
        scheduler.first_token(decision.request_id, cached_tokens=1)
        scheduler.finish(decision.request_id, output_tokens=3)
    return [to_json(record) for record in scheduler.records()]


def _feed_record(data: bytes) -> None:
    to_json(from_json(data.decode("utf-8", "replace")))


class OneFile:
    """Writes each input to the same file and has it read."""

    def __init__(self, path: Path, read: Callable[[Path], object]) -> None:
        self._path = path
        self._read = read

    def __call__(self, data: bytes) -> None:
        self._path.write_bytes(data)
        self._read(self._path)


def _cost_model(directory: Path) -> bytes:
    CostModel.preset("mistral-7b/a6000").save(directory / "seed.json")
    return (directory / "seed.json").read_bytes()


def _keys(directory: Path) -> tuple[list[bytes], OneFile]:
    create_keys(directory / "keys")
    file = directory / "keys" / "client.key_secret"
    return [file.read_bytes()], OneFile(file, lambda _: load_client_keys(directory / "keys"))


def _trace_target(directory: Path, name: str) -> Target:
    shutil.copy(DATA / "workloads" / "tiny_segments.jsonl", directory)
    feed = OneFile(directory / name, lambda path: workloads.read(path, format=TRACES[name], limit=3))
    return Target(f"trace_{TRACES[name]}", [(DATA / "workloads" / name).read_bytes()], feed, (InvalidInput,))


# --- inputs -----------------------------------------------------------------------------------------------------------


def damaged(rng: random.Random, seeds: list[bytes]) -> bytes:
    """A seed with a few things wrong."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
        at = rng.randrange(len(data) + 1)
        what = rng.randrange(7)
        if what == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif what == 1 and at < len(data):
            data[at] = rng.randrange(256)
        elif what == 2:
            data[at : at + 4] = struct.pack(rng.choice((">I", "<I")), rng.choice(WORDS))
        elif what == 3:
            del data[at : at + rng.choice((1, 2, 4, 9, len(data)))]
        elif what == 4:
            end = rng.randrange(len(data) + 1)
            data[at:at] = data[min(at, end) : max(at, end)]
        elif what == 5:
            other = rng.choice(seeds)
            data[at:] = other[rng.randrange(len(other) + 1) :]
        else:
            data[at : at + rng.choice((0, 1, 5))] = rng.choice(TEXTS)
    return bytes(data[: 2 * INPUT_BYTES_MAX])


# --- one decoder in this process --------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Memory of this process without what malloc keeps free; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    ctypes.CDLL(None).malloc_trim(0)
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bound_memory() -> None:
    """Let this process have INPUT_BYTES_HELD_MAX more than it has now, where the system can."""
    status = Path("/proc/self/status")
    if status.exists():
        held = int(status.read_text().partition("VmData:")[2].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (held + INPUT_BYTES_HELD_MAX,) * 2)


class Meter:
    """Feeds a decoder and measures."""

    def __init__(self, target: Target, inputs: int) -> None:
        self.target = target
        self.inputs = inputs
        self.fed = self.accepted = self.early_bytes = 0
        self.began = time.monotonic()

    def __call__(self, data: bytes) -> bool:
        """Feed one input; True when all have been fed."""
        self.accepted += self.target(data)
        self.fed += 1
        if self.fed == max(1, self.inputs // 10):
            self.early_bytes = resident_bytes()
        return self.fed >= self.inputs

    def report(self) -> int:
        """One line of JSON; the exit code: 1 if memory grew."""
        seconds = time.monotonic() - self.began
        grown_bytes = resident_bytes() - self.early_bytes
        line = {
            "target": self.target.name,
            "inputs": self.fed,
            "accepted": self.accepted,
            "inputs_per_second": round(self.fed / seconds),
            "early_mib": round(self.early_bytes / 2**20, 1),
            "grown_mib": round(grown_bytes / 2**20, 1),
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        return int(grown_bytes > GROWTH_BYTES_MAX)


def fuzz_plain(target: Target, inputs: int, seed: int) -> int:
    """Seeded damage, alike on every machine. Returns the exit code."""
    rng = random.Random(seed)
    meter = Meter(target, inputs)
    for data in target.seeds:
        assert target(data), f"{target.name}: a seed is refused"
    bound_memory()
    done = False
    while not done:
        data = damaged(rng, target.seeds)
        signal.alarm(SLOW_SECONDS)
        try:
            done = meter(data)
        except BaseException:
            sys.stderr.write(f"{target.name}: input {meter.fed}: {data!r}\n")
            raise
    signal.alarm(0)
    return meter.report()


def fuzz_atheris(target: Target, inputs: int, seed: int, directory: Path) -> None:
    """Guided by the Python code that an input reaches (what is compiled guides nothing). Ends the process."""
    import atheris

    corpus = directory / "corpus"
    corpus.mkdir()
    for number, data in enumerate(target.seeds):
        (corpus / f"{number}").write_bytes(data)
    options = [f"-seed={seed}", f"-max_len={2 * INPUT_BYTES_MAX}", f"-timeout={SLOW_SECONDS}", "-verbosity=0"]
    meter = Meter(target, inputs)

    def feed(data: bytes) -> None:
        if meter(data):
            code = meter.report()
            shutil.rmtree(directory)
            os._exit(code)  # libFuzzer has no other end

    atheris.Setup([sys.argv[0], *options, str(corpus)], feed)
    atheris.Fuzz()


GUIDED = """
import sys
import atheris
with atheris.instrument_imports(include=["preble"]):
    from tests.stress import fuzz
sys.exit(fuzz.main())
"""


def run_target(name: str, args: argparse.Namespace) -> int:
    """Fuzz one decoder in a process of its own; its exit code, negative for a signal."""
    program = ["-m", "tests.stress.fuzz"]
    if args.mutator == "atheris":
        program = ["-c", GUIDED]
    options = ["--target", name, "--inputs", str(args.inputs), "--seed", str(args.seed), "--mutator", args.mutator]
    return subprocess.run([sys.executable, *program, *options, "--here"]).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", help="a decoder; may be given again; default: all")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="for each decoder (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    found = "atheris" if importlib.util.find_spec("atheris") else "plain"
    parser.add_argument("--mutator", choices=("atheris", "plain"), default=found, help="%(default)s")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.disable()
    directory = Path(tempfile.mkdtemp())
    try:
        table = {target.name: target for target in targets(directory)}
        if not args.here:
            failed = [name for name in args.target or table if run_target(name, args)]
            sys.stdout.write(f"failed: {', '.join(failed)}\n" if failed else "no findings\n")
            return 1 if failed else 0
        (target,) = (table[name] for name in args.target)
        if args.mutator == "plain":
            return fuzz_plain(target, args.inputs, args.seed)
        fuzz_atheris(target, args.inputs, args.seed, directory)
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
