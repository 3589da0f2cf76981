"""The processes of `run_engines.py` and `run_routers.py`: SGLang servers, workers of Preble's torch engine, the SGLang
gateway, each with its log under build/engines. Owns their command lines, their start and their end, and the options
that both programs have; sends no request that is measured.

On a CPU each engine is pinned to a core of its own. On one card several engines divide what memory is free.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.common.paths import ROOT

LOGS = ROOT / "build" / "engines"
READY_SECONDS = 900.0
GATEWAY_SECONDS = 60.0
CARD_SHARE = 0.85  # of a card's memory, for all engines together: the rest is for activations and the driver
# What engines without a network, and SGLang without a GPU, need to know.
OFFLINE = {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
ON_CPU = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Shape:
    """What engines are started with. `metrics`: SGLang servers have /metrics."""

    model: Path
    device: str
    engines: int
    capacity_tokens: int
    max_running: int
    base_port: int
    metrics: bool = False


def options(
    purpose: str | None, *, workers: int, ports: int, requests: int, rps: float, output_tokens: int, docs: str
) -> argparse.ArgumentParser:
    """What can be said of engines, load and result; the numbers are defaults, `ports` but counted from the first."""
    made = argparse.ArgumentParser(description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--workers", type=int, default=workers)
    made.add_argument("--capacity-tokens", type=int, default=22_000, help="KV cache of each engine (%(default)s)")
    made.add_argument("--max-running", type=int, default=8, help="requests in an engine's batch (%(default)s)")
    made.add_argument("--base-port", type=int, default=24_000, help=f"the first of {ports} ports (%(default)s)")
    made.add_argument("--requests", type=int, default=requests)
    made.add_argument("--rps", type=float, default=rps, help="requests per second (%(default)s)")
    made.add_argument("--output-tokens", type=int, default=output_tokens)
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path, help="where the result is kept")
    made.add_argument("--docs", action="store_true", help=f"write the tables into {docs}")
    made.add_argument("--page", type=Path, metavar="RESULT", help="measure nothing: make the page of a kept result")
    return made


# --- command lines ----------------------------------------------------------------------------------------------------


def share_of_free(number: int, engines: int) -> float:
    """The part of the memory still free that engine `number` takes, so that all get equally much."""
    each = CARD_SHARE / engines
    return each / (1.0 - number * each)


def sglang_command(python: Path, shape: Shape, number: int) -> list[str]:
    """An SGLang server whose cache events and load can be followed."""
    events = {"publisher": "zmq", "endpoint": f"tcp://*:{events_port(shape, number)}"}
    events["replay_endpoint"] = f"tcp://*:{events_port(shape, number) + 5}"
    command = [str(python), "-m", "sglang.launch_server", "--model-path", str(shape.model), "--host", "127.0.0.1"]
    command += ["--port", str(shape.base_port + number), "--device", shape.device, "--page-size", "16"]
    command += ["--max-total-tokens", str(shape.capacity_tokens), "--max-running-requests", str(shape.max_running)]
    command += ["--context-length", "4096", "--kv-events-config", json.dumps(events)]
    command += ["--load-publish-endpoint", "auto", *(["--enable-metrics"] if shape.metrics else [])]
    if shape.device == "cpu":
        command += ["--dtype", cpu_dtype(Path("/proc/cpuinfo"))]
        command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"]
        return [*command, "--disable-overlap-schedule", "--mem-fraction-static", "0.3"]
    return [*command, "--mem-fraction-static", f"{share_of_free(number, shape.engines):.3f}"]


def cpu_dtype(environment: Path) -> str:
    """Numbers an engine computes with on this CPU: without AMX, bfloat16 is several times slower than float32."""
    return "bfloat16" if environment.exists() and "amx_bf16" in environment.read_text() else "float32"


def events_port(shape: Shape, number: int) -> int:
    """Where an SGLang server publishes cache events; its replays are five ports on."""
    return shape.base_port + 100 + 10 * number


def torch_command(shape: Shape, number: int) -> list[str]:
    """A worker with Preble's own torch engine."""
    command = [sys.executable, "-m", "preble.cli", "worker", "--engine", "torch", "--model", str(shape.model)]
    command += ["--device", shape.device, "--kv-capacity-tokens", str(shape.capacity_tokens)]
    command += ["--max-running", str(shape.max_running), "--max-model-tokens", "4096"]
    return [*command, "--bind", f"tcp://127.0.0.1:{shape.base_port + number}", "--id", f"engine-{number}"]


def gateway_command(python: Path, urls: Sequence[str], base_port: int) -> list[str]:
    """The SGLang gateway with its own defaults, but for the policy and its log."""
    command = [str(python), "-m", "sglang_router.launch_router", "--worker-urls", *urls, "--policy", "cache_aware"]
    command += ["--host", "127.0.0.1", "--port", str(base_port + 50), "--log-level", "warn"]
    return [*command, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(base_port + 51)]


def gateway_version(python: Path) -> str:
    """The version of sglang-router in an environment, "" if it is not there."""
    if not python.exists():
        return ""
    asked = [str(python), "-c", "from importlib.metadata import version; print(version('sglang-router'))"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


# --- processes --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]):
    """At the end, the process and all that it has started are gone."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def started(name: str, command: Sequence[str], core: int | None, variables: dict[str, str]):
    """A process with a log, in a group of its own; yields (process, log)."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{name}.log"
    pinned = ["taskset", "-c", str(core), *command] if core is not None and shutil.which("taskset") else [*command]
    with open(log, "w") as output:
        process = subprocess.Popen(
            pinned, stdout=output, stderr=output, env={**os.environ, **variables}, start_new_session=True
        )
    with _ended(process):
        yield process, log


async def until_answers(process: subprocess.Popen[bytes], log: Path, url: str, seconds: float) -> None:
    """Until GET of the URL is answered with 200. Raises RuntimeError if the process ends, or after `seconds`."""
    deadline = time.monotonic() + seconds
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise RuntimeError(f"{log.stem} did not get ready; its log ends: {log.read_text()[-2000:]}")


async def until_ready_line(process: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
    """Until a worker of Preble says READY. Raises RuntimeError as `until_answers` does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if any(line.startswith("READY ") for line in log.read_text().splitlines()):
            return
        await asyncio.sleep(0.2)
    raise RuntimeError(f"{log.stem} did not get ready; its log ends: {log.read_text()[-2000:]}")


@contextlib.asynccontextmanager
async def sglang_servers(python: Path, shape: Shape) -> AsyncIterator[list[str]]:
    """Start the servers; yields their URLs. On a card one after the other: each takes its share of what is free."""
    variables = {**OFFLINE, **(ON_CPU if shape.device == "cpu" else {})}
    urls = [f"http://127.0.0.1:{shape.base_port + number}" for number in range(shape.engines)]
    with contextlib.ExitStack() as stack:
        waiting = []
        for number, url in enumerate(urls):
            command = sglang_command(python, shape, number)
            process, log = stack.enter_context(started(f"sglang-{number}", command, core_of(shape, number), variables))
            waiting.append(until_answers(process, log, f"{url}/health", READY_SECONDS))
            if shape.device != "cpu":
                await waiting.pop()
        await asyncio.gather(*waiting)
        yield urls


@contextlib.asynccontextmanager
async def torch_workers(shape: Shape) -> AsyncIterator[list[str]]:
    """Start workers with Preble's torch engine; yields their endpoints."""
    endpoints = [f"tcp://127.0.0.1:{shape.base_port + number}" for number in range(shape.engines)]
    variables = {**OFFLINE, "PYTHONPATH": str(ROOT), **({"OMP_NUM_THREADS": "1"} if shape.device == "cpu" else {})}
    with contextlib.ExitStack() as stack:
        waiting = []
        for number in range(shape.engines):
            command = torch_command(shape, number)
            process, log = stack.enter_context(started(f"torch-{number}", command, core_of(shape, number), variables))
            waiting.append(until_ready_line(process, log, READY_SECONDS))
            if shape.device != "cpu":
                await waiting.pop()
        await asyncio.gather(*waiting)
        yield endpoints


def core_of(shape: Shape, number: int) -> int | None:
    """The core of an engine on the CPU."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[number % len(cores)] if shape.device == "cpu" else None


@contextlib.asynccontextmanager
async def gateway(python: Path, urls: Sequence[str], base_port: int) -> AsyncIterator[str]:
    """Start a gateway that knows nothing yet; yields its URL once it has found every engine."""
    async with gateway_of(gateway_command(python, urls, base_port), urls, base_port) as url:
        yield url


@contextlib.asynccontextmanager
async def gateway_of(command: Sequence[str], urls: Sequence[str], base_port: int) -> AsyncIterator[str]:
    """Start any gateway on the 50th port; yields its URL once it has found every engine."""
    with started("gateway", command, None, OFFLINE) as (process, log):
        url = f"http://127.0.0.1:{base_port + 50}"
        await until_answers(process, log, f"{url}/readiness", GATEWAY_SECONDS)
        await _until_it_knows(url, len(urls))
        yield url


async def _until_it_knows(url: str, engines: int) -> None:
    """Raises RuntimeError if the gateway has not found its engines after a minute."""
    deadline = time.monotonic() + GATEWAY_SECONDS
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            async with session.get(f"{url}/workers") as response:
                workers = (await response.json())["workers"] if response.status == 200 else []
            if sum(bool(one.get("is_healthy")) for one in workers) == engines:
                return
            await asyncio.sleep(0.2)
    raise RuntimeError(f"the gateway found {len(workers)} of {engines} engines")
