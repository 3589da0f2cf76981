"""`preble profile --url`: the profile of an SGLang or vLLM server that runs. Owns its options, what is said before
anything is sent, and where the model goes; the requests are `server_bench`'s, the fit `profile`'s.

What will be sent at the most is printed first. Interrupted, or out of time, it aborts what is under way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ...clock import Clock
from ...errors import HandshakeRefused, InvalidInput
from ...transport.engine_servers.http_client import EngineServer
from ...transport.engine_servers.server_info import ServerInfo, ServerOptions
from ...types import check_int
from ..console import Screen, output_directory, versions, without_nan
from . import profile
from .bench import Results
from .points import Limits, Point
from .server_bench import OUTPUT_TOKENS, Planned, ServerBench, planned, server_points

TOKENS_MAX, TOKENS_MAX_QUICK = 4096, 1024
BATCH_MAX, BATCH_MAX_QUICK = 16, 4
SECONDS, SECONDS_QUICK = 120.0, 20.0
REPEATS = 3


def run(args: argparse.Namespace, clock: Clock = time.monotonic) -> int:
    """Measure the server at `args.url`, fit, write, print; 0. Raises `InvalidInput`, `TransportError` (nobody answers),
    `HandshakeRefused` (no engine that we know, or the key is refused), `EngineError`."""
    options = ServerOptions(
        api_key=_key(args.api_key_env),
        model=args.model or "",
        block_size=args.block_size,
        kv_capacity_tokens=args.kv_capacity_tokens,
    )
    return asyncio.run(_profile(args, options, clock))


def _key(variable: str | None) -> str:
    if variable is None:
        return ""
    if not os.environ.get(variable):
        raise InvalidInput(f"--api-key-env {variable}: no such variable is set")
    return os.environ[variable]


async def _profile(args: argparse.Namespace, options: ServerOptions, clock: Clock) -> int:
    said = sys.stderr if args.json else sys.stdout
    seconds = (SECONDS_QUICK if args.quick else SECONDS) if args.seconds is None else args.seconds
    if not 0 < seconds < float("inf"):
        raise InvalidInput(f"--seconds must be a number above 0, got {seconds}")
    repeats = check_int("--repeats", REPEATS if args.repeats is None else args.repeats, 1, 1000, InvalidInput)
    async with EngineServer(args.url, options) as server:
        try:
            info = await server.info()
        except HandshakeRefused as error:
            hint = "; --api-key-env NAME names the variable that holds it" if "api_key" in str(error) else ""
            raise HandshakeRefused(f"{error}{hint}") from error
        limits = limits_of(args, info)
        # Never the same prompts twice: what an earlier profile sent may still be cached.
        rng = np.random.default_rng(secrets.randbits(63) if args.seed is None else args.seed)
        points = server_points(limits, rng)
        out = output_directory(args.out, "--out", "profile")
        said.write(announcement(args.url, info, planned(points, repeats), seconds))
        await _warn_if_busy(server)
        name = f"preble-profile-{secrets.token_hex(4)}"
        bench = ServerBench(server, rng, block_size=info.block_size, name=name, clock=clock)
        found = await measure(bench, points, repeats, seconds, clock, Screen())
    result = profile.fit(found.samples, [], args.name or f"{info.model or 'model'}/{info.engine}")
    about = {
        **{"engine": info.engine, "engine_version": info.version, "model": info.model, "url": args.url},
        **{"versions": versions(), "settings": {**asdict(limits), "repeats": repeats, "seconds": seconds}},
        **{"round_trip_seconds": bench.round_trip_seconds, "unusable_batches": bench.unusable},
        **{"skipped_points": found.skipped, "short_points": found.short},
    }
    path = (out / "cost_model.json").resolve()
    result.model.save(path, profile.document(result, about))
    if args.json:
        sys.stdout.write(json.dumps(without_nan(report(result, path, about)), indent=1, allow_nan=False) + "\n")
    else:
        _print(result, found, bench, args.url, path, seconds)
    return 0


def limits_of(args: argparse.Namespace, info: ServerInfo) -> Limits:
    """The longest prompt and the largest batch: as asked for, or as much as the server holds of what is usual. Raises
    `InvalidInput` naming the option."""
    longest = min(info.max_model_tokens - OUTPUT_TOKENS[-1] - 1, info.kv_capacity_tokens // 2)
    tokens = min(TOKENS_MAX_QUICK if args.quick else TOKENS_MAX, longest * 2 // 3)
    tokens = tokens if args.max_tokens is None else args.max_tokens
    if tokens + tokens // 2 > longest:
        raise InvalidInput(f"--max-tokens {tokens}: half as much is cached before, and {longest} fit into this server")
    batch = BATCH_MAX_QUICK if args.quick else BATCH_MAX
    room = max(info.kv_capacity_tokens // (tokens // 4 + OUTPUT_TOKENS[-1]) // 2, 1)
    batch = min(batch, room, info.max_running or batch) if args.max_batch is None else args.max_batch
    return Limits(tokens, batch)


def announcement(url: str, info: ServerInfo, most: Planned, seconds: float) -> str:
    """What will be sent, before anything is."""
    return (
        f"Profile of {info.model or 'the model'} on {info.engine} {info.version} at {url}\n"
        f"It will send at most {most.requests:,} requests with {most.prompt_tokens:,} prompt tokens and "
        f"{most.output_tokens:,} output tokens, {most.concurrent} at a time, in {seconds:g} s. Ctrl-C aborts them.\n"
    )


async def _warn_if_busy(server: EngineServer) -> None:
    busy = sum(load.running + load.waiting for load in await server.load())
    if busy:
        sys.stderr.write(
            f"preble profile: the server has {busy} requests of others: what it does for them is measured, too\n"
        )


async def measure(
    bench: ServerBench, points: list[Point], repeats: int, seconds: float, clock: Clock, screen: Screen
) -> Results:
    """All samples there is time for. Broken off, it asks the server to stop what it still has."""
    deadline = clock() + seconds
    try:
        await bench.warm_up()
        return await bench.measure(
            points,
            repeats,
            lambda: deadline - clock(),
            lambda done, total: screen.show(f"  measured {done} of {total} points, runs repeated"),
        )
    finally:
        screen.clear()
        await bench.abort_all()


def report(result: profile.Profile, path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """All of it for programs."""
    return {
        "file": str(path),
        "coefficients": result.model.coefficients(),
        "thresholds": dict(profile.thresholds(result.model)),
        **profile.document(result, about),
    }


def _print(result: profile.Profile, found: Results, bench: ServerBench, url: str, path: Path, seconds: float) -> None:
    lines = ["", profile.table(result), ""]
    lines.append(f"The way there and back, {profile.milliseconds(bench.round_trip_seconds)}, is taken off.")
    if found.skipped or found.short:
        lines.append(
            f"Time was up after {seconds:g} s: {found.skipped} points were not measured and {found.short} less often."
        )
    if bench.unusable:
        lines.append(f"{bench.unusable} batches never decoded together and say nothing.")
    lines.append(f"Cost model: {path}, for the configuration of `preble serve`:")
    lines += ["", "servers:", f"  - url: {url}", f"    cost_model: {path}"]
    sys.stdout.write("\n".join(lines) + "\n")
