"""The engines and the ways to ask them of `run_arms.py`: servers, workers with the same engine, gateways. Owns their
command lines and which of two fleets runs; `engine_fleet` owns processes.

Servers and workers would share the cores, and an idle SGLang engine polls without rest: so the fleet that is not asked
is stopped (SIGSTOP). Both have one core for each engine. Every arm is given the same text and leaves the engine, or our
gateway, to make tokens of it. A gateway, ours too, is a process of its own, started for the run.

Our torch engine has no server of its own: there a `preble serve` before each worker is what a client asks directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.common.paths import ROOT
from benchmarks.live import engine_fleet
from benchmarks.live.arm_traffic import TextRequest
from benchmarks.live.engine_load import Ask, Progress, Request, new_session

ENGINES = ("sglang", "vllm", "torch")
ARMS = (
    *("round robin", "least load", "partition", "sglang-router", "smg", "preble serve", "preble workers"),
    "lru workers",  # evict what was used least recently; by itself our torch engine keeps who will be back
)
KINDS = {"preble workers": "workers", "lru workers": "lru workers"}  # of the group that an arm asks; else "servers"
GATEWAYS = {"sglang-router": "sglang_router", "smg": "smg"}
BLOCK_SIZES = {"sglang": 16, "vllm": 32}
CARD_BLOCK_SIZE = 16  # of vLLM on a GPU
CARD_CACHE_BYTES = 4 << 30  # for the KV cache of a server on a GPU: 32,768 tokens of the model of 7B's shape
CONTEXT_TOKENS = 4096
READY_SECONDS = 60.0
FLUSH_TRIES = 600

Send = Callable[[str, Request], AsyncIterator[Progress]]


@dataclass
class Group:
    """Engines of one kind, by address, and their processes, which end with `stack`."""

    stack: contextlib.ExitStack
    addresses: list[str] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def signal(self, number: signal.Signals) -> None:
        """To every process and what it started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


# --- command lines ----------------------------------------------------------------------------------------------------


def server_command(engine: str, python: Path, shape: engine_fleet.Shape, number: int) -> list[str]:
    """A server as its users start it, with cache events."""
    if engine == "sglang":
        return engine_fleet.sglang_command(python, shape, number)
    port = engine_fleet.events_port(shape, number)
    events = {"publisher": "zmq", "endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{port + 5}"}
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(shape.model)]
    command += ["--host", "127.0.0.1", "--port", str(shape.base_port + number), "--served-model-name", "model"]
    command += ["--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    command += ["--kv-events-config", json.dumps({"enable_kv_cache_events": True, **events})]
    for name, value in arguments("vllm", shape).items():
        if value is not True:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return command


def arguments(engine: str, shape: engine_fleet.Shape) -> dict[str, Any]:
    """What an engine inside a worker is told: the same as servers."""
    if engine == "vllm":
        block_size = BLOCK_SIZES["vllm"] if shape.device == "cpu" else CARD_BLOCK_SIZE
        found = {"dtype": "float32", "block_size": block_size, "max_model_len": CONTEXT_TOKENS}
        found |= {"max_num_seqs": shape.max_running, "enforce_eager": True}
        found["num_gpu_blocks_override"] = shape.capacity_tokens // block_size + 1
        if shape.device != "cpu":
            # Servers that start at once on one card must not measure each other's memory: the cache's room is given.
            found |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": CARD_CACHE_BYTES}
            found["load_format"] = "dummy"  # random weights, made where they are needed
        return found
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "page_size": BLOCK_SIZES["sglang"],
        "max_total_tokens": shape.capacity_tokens,
        "max_running_requests": shape.max_running,
        "context_length": CONTEXT_TOKENS,
        "mem_fraction_static": 0.3,
        "dtype": engine_fleet.cpu_dtype(Path("/proc/cpuinfo")),
    }


def suits(arm: str, engine: str) -> bool:
    """Whether an arm is one of an engine: gateways need servers, and which prefix goes first is our own engine's."""
    return arm not in (*GATEWAYS, "preble serve") if engine == "torch" else arm != "lru workers"


def kind_of(arm: str) -> str:
    """The group of engines that an arm asks."""
    return KINDS.get(arm, "servers")


def worker_command(
    engine: str, python: Path, shape: engine_fleet.Shape, number: int, kind: str = "workers"
) -> list[str]:
    """A worker of Preble with the engine inside, on ZeroMQ."""
    if engine == "torch":
        command = engine_fleet.torch_command(replace(shape, base_port=shape.base_port + 20), number)
        command += ["--threads", "1", "--dtype", engine_fleet.cpu_dtype(Path("/proc/cpuinfo"))]
        return [*command, "--eviction", "lru" if kind == "lru workers" else "returns"]
    command = [str(python), "-m", "preble.cli", "worker", "--engine", engine, "--model", str(shape.model)]
    command += ["--bind", f"tcp://127.0.0.1:{shape.base_port + 20 + number}", "--id", f"worker-{number}"]
    for name, value in arguments(engine, shape).items():
        command += ["--engine-arg", f"{name}={json.dumps(value) if isinstance(value, bool) else value}"]
    return command


def gateway_command(name: str, python: Path, urls: Sequence[str], base_port: int) -> list[str]:
    """A gateway with its command line's defaults and the cache-aware policy, which is sglang-router's default."""
    command = [str(python), "-m", f"{GATEWAYS[name]}.launch_router", "--worker-urls", *urls]
    command += ["--host", "127.0.0.1", "--port", str(base_port + 50), "--policy", "cache_aware"]
    return [*command, "--log-level", "warn", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(base_port + 51)]


def serve_command(
    addresses: Sequence[str], shape: engine_fleet.Shape, more: Sequence[str] = (), port: int | None = None
) -> list[str]:
    """Preble's gateway with its defaults, but that it refuses nobody, as the other arms refuse nobody; it makes tokens
    with the engines' tokenizer. On the 50th port if no other is named. Without addresses a variable names the engines
    (`servers_variable`)."""
    workers = ["--workers", *addresses] if addresses else []
    command = [sys.executable, "-m", "preble.cli", "serve", *workers, "--tokenizer", str(shape.model)]
    command += ["--port", str(shape.base_port + 50 if port is None else port)]
    command += ["--min-workers", str(len(addresses) or shape.engines)]
    command += ["--model-names", "model", "--refuse-wait-seconds", "null"]
    return [*command, "--log-level", "warning", "--lame-duck-seconds", "0", *more]


def servers_variable(engine: str, shape: engine_fleet.Shape, urls: Sequence[str]) -> dict[str, str]:
    """The servers, each with where it publishes cache events, in the variable that the gateway reads: a vLLM older than
    0.32 does not report that itself."""
    if engine != "vllm" or not all(url.startswith("http") for url in urls):
        return {}
    tables = []
    for number, url in enumerate(urls):
        port = engine_fleet.events_port(shape, number)
        places = {"events_endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": f"tcp://127.0.0.1:{port + 5}"}
        tables.append({"url": url, **places})
    return {"PREBLE_SERVERS": json.dumps(tables)}


def peer_version(python: Path, name: str) -> str:
    """The version of a gateway in an environment, "" if it is not there."""
    if not python.exists():
        return ""
    asked = [str(python), "-c", f"from importlib.metadata import version; print(version({name!r}))"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


# --- engines ----------------------------------------------------------------------------------------------------------


class EngineFleet:
    """Servers and workers of one engine, started when first asked, kept until the end or until they are to be new; one
    group runs at a time."""

    def __init__(self, engine: str, python: Path, shape: engine_fleet.Shape, stack: contextlib.ExitStack) -> None:
        self.engine, self.python, self.shape = engine, python, shape
        self._stack = stack
        self._groups: dict[str, Group] = {}

    async def group(self, kind: str) -> Group:
        """The group of a kind (`kind_of`), running; the others are stopped."""
        for other, group in self._groups.items():
            if other != kind:
                group.signal(signal.SIGSTOP)
        if kind not in self._groups:
            self._groups[kind] = await self._started(kind)
        self._groups[kind].signal(signal.SIGCONT)
        return self._groups[kind]

    def cores(self) -> list[int]:
        """Those that engines compute on; none where they share a GPU."""
        numbers = range(self.shape.engines)
        return sorted({core for number in numbers if (core := engine_fleet.core_of(self.shape, number)) is not None})

    def begins_anew(self, kind: str) -> bool:
        """Whether a group must be started anew to have empty caches."""
        return kind != "servers" or self.engine == "torch"

    def end(self, kind: str) -> None:
        """End a group, if it runs; the next who asks for it has a new one."""
        if kind in self._groups:
            self._groups.pop(kind).stack.close()

    async def _started(self, kind: str) -> Group:
        variables = {**engine_fleet.OFFLINE, "PYTHONPATH": str(ROOT)}
        variables |= engine_fleet.ON_CPU if self.shape.device == "cpu" else {}
        variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
        group, waiting = Group(self._stack.enter_context(contextlib.ExitStack())), []

        def start(name: str, command: Sequence[str], core: int | None) -> tuple[subprocess.Popen[bytes], Path]:
            name = f"{self.engine}-{name.replace(' ', '-')}"
            process, log = group.stack.enter_context(engine_fleet.started(name, command, core, variables))
            group.processes.append(process)
            group.stack.callback(group.signal, signal.SIGCONT)  # a stopped process would not end
            return process, log

        for number in range(self.shape.engines):
            core = engine_fleet.core_of(self.shape, number)
            url = f"http://127.0.0.1:{self.shape.base_port + number}"
            worker_url = f"tcp://127.0.0.1:{self.shape.base_port + 20 + number}"
            if kind != "servers" or self.engine == "torch":
                command = worker_command(self.engine, self.python, self.shape, number, kind)
                waiting.append(
                    engine_fleet.until_ready_line(*start(f"{kind}-{number}", command, core), engine_fleet.READY_SECONDS)
                )
            else:
                command = server_command(self.engine, self.python, self.shape, number)
                started = start(f"{kind}-{number}", command, core)
                waiting.append(engine_fleet.until_answers(*started, f"{url}/health", engine_fleet.READY_SECONDS))
            if kind == "servers" and self.engine == "torch":
                command = serve_command([worker_url], self.shape, port=self.shape.base_port + number)
                started = start(f"face-{number}", command, None)
                waiting.append(engine_fleet.until_answers(*started, f"{url}/ready", engine_fleet.READY_SECONDS))
            group.addresses.append(url if kind == "servers" else worker_url)
        await asyncio.gather(*waiting)
        return group


async def emptied(engine: str, urls: Sequence[str]) -> None:
    """Empty the caches of idle servers. Raises RuntimeError if one refuses for a minute.

    vLLM publishes that its cache was emptied with its next iteration only: who replays its events before that finds all
    that was cached in the run before. So each is asked for one token.
    """
    path = "flush_cache" if engine == "sglang" else "reset_prefix_cache"
    async with aiohttp.ClientSession() as session:
        for url in urls:
            for _ in range(FLUSH_TRIES):
                async with session.post(f"{url}/{path}") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.1)
            else:
                raise RuntimeError(f"{url}/{path} is still refused after {FLUSH_TRIES // 10} s")
            if engine == "vllm":
                body = {"model": "model", "prompt": "empty", "max_tokens": 1}
                async with session.post(f"{url}/v1/completions", json=body, raise_for_status=True) as response:
                    await response.read()


# --- the ways to ask --------------------------------------------------------------------------------------------------


def sender(engine: str, session: aiohttp.ClientSession, output_tokens: int) -> Send:
    """How a client of the engine asks a URL."""
    ask = completed if engine == "vllm" else generated
    return lambda url, request: ask(session, url, request, output_tokens)


async def generated(
    session: aiohttp.ClientSession, url: str, request: Request, output_tokens: int
) -> AsyncIterator[Progress]:
    """Ask SGLang, or a gateway before it, to go on with the request's text."""
    assert isinstance(request, TextRequest)
    sampling = {"max_new_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"rid": secrets.token_hex(8), "text": request.text, "sampling_params": sampling, "stream": True}
    async with session.post(f"{url}/generate", json=body, raise_for_status=True) as response:
        engine = answerer(response, url)
        async for told in events(response):
            meta = told["meta_info"]
            yield Progress(meta["completion_tokens"], meta["cached_tokens"], engine)


async def completed(
    session: aiohttp.ClientSession, url: str, request: Request, output_tokens: int
) -> AsyncIterator[Progress]:
    """Ask vLLM, or a gateway before it, for a completion of the request's text."""
    assert isinstance(request, TextRequest)
    body = {"model": "model", "prompt": request.text, "max_tokens": output_tokens, "temperature": 0.0, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    pieces = 0
    async with session.post(f"{url}/v1/completions", json=body, raise_for_status=True) as response:
        engine = answerer(response, url)
        async for told in events(response):
            if told.get("usage"):
                details = told["usage"].get("prompt_tokens_details") or {}
                yield Progress(told["usage"]["completion_tokens"], details.get("cached_tokens") or 0, engine)
            elif told.get("choices"):
                pieces += 1
                yield Progress(pieces, None, engine)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, as they come."""
    async for line in response.content:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


def answerer(response: aiohttp.ClientResponse, url: str) -> str:
    """The engine that answers, where the URL is its own or the gateway names it."""
    return response.headers.get("x-preble-worker", url)


def least_loaded(urls: Sequence[str], send: Send) -> Ask:
    """A client that sends to the server with the fewest of its own requests; the first of equals."""
    outstanding = dict.fromkeys(urls, 0)

    async def ask(request: Request) -> AsyncIterator[Progress]:
        url = min(urls, key=outstanding.__getitem__)
        outstanding[url] += 1
        try:
            async for piece in send(url, request):
                yield piece
        finally:
            outstanding[url] -= 1

    return ask


@contextlib.asynccontextmanager
async def asked(
    arm: str, fleet: EngineFleet, peers: Path, output_tokens: int, decisions: Path | None = None
) -> AsyncIterator[Ask]:
    """The way to ask in an arm, knowing nothing yet, before servers with empty caches, or workers as they are. Raises
    ValueError for an unknown arm."""
    group = await fleet.group(kind_of(arm))
    urls = group.addresses
    if not fleet.begins_anew(kind_of(arm)):
        await emptied(fleet.engine, urls)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(new_session())
        send = sender(fleet.engine, session, output_tokens)
        turns = itertools.count()
        if arm in GATEWAYS:
            command = gateway_command(arm, peers, urls, fleet.shape.base_port)
            url = await stack.enter_async_context(engine_fleet.gateway_of(command, urls, fleet.shape.base_port))
            yield lambda request: send(url, request)
        elif arm.startswith("preble") or arm == "lru workers":
            url = await stack.enter_async_context(served(urls, fleet, session, decisions))
            yield lambda request: send(url, request)
        elif arm == "round robin":
            yield lambda request: send(urls[next(turns) % len(urls)], request)
        elif arm == "least load":
            yield least_loaded(urls, send)
        elif arm == "partition":
            yield lambda request: send(urls[request.document % len(urls)], request)
        else:
            raise ValueError(f"no arm {arm!r}; there are {', '.join(ARMS)}")


@contextlib.asynccontextmanager
async def served(
    addresses: Sequence[str], fleet: EngineFleet, session: aiohttp.ClientSession, decisions: Path | None
) -> AsyncIterator[str]:
    """Start `preble serve` before the engines; yields its URL once it has found each of them. With `decisions` every
    decision is recorded, and what is kept of them is put there in the end."""
    named = servers_variable(fleet.engine, fleet.shape, addresses)
    command = serve_command([] if named else addresses, fleet.shape, ("--record-share", "1") if decisions else ())
    variables = {**engine_fleet.OFFLINE, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **named}
    with engine_fleet.started("preble-serve", command, None, variables) as (process, log):
        url = f"http://127.0.0.1:{fleet.shape.base_port + 50}"
        await engine_fleet.until_answers(process, log, f"{url}/ready", READY_SECONDS)
        yield url
        if decisions:
            await keep_decisions(session, url, decisions)


async def keep_decisions(session: aiohttp.ClientSession, url: str, file: Path) -> None:
    """The gateway's state and its last decisions, a line of JSON for each."""
    async with session.get(f"{url}/v1/preble/state?after=0") as response:
        lines = [await response.text()]
    for sequence in itertools.count():
        async with session.get(f"{url}/v1/preble/decisions/{sequence}") as response:
            if response.status == 200:
                lines.append(await response.text())
            elif sequence > 2048:
                break
    async with session.get(f"{url}/metrics") as response:
        file.with_suffix(".metrics").write_text(await response.text())
    file.write_text("\n".join(line.replace("\n", " ") for line in lines) + "\n")
