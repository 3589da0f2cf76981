"""How many requests a replay simulates in a second of CPU: a made-up recording, one policy after the other.

    python -m benchmarks.replay.speed [--requests 20000] [--workers 8] [--policies e2] [--profile]

Reading the file and fitting the engines are timed apart. `--profile` prints where the time went.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
import time
from pathlib import Path

import numpy as np

from preble import LocalConfig, Recording
from preble.recording import RecordedRequest, RecordedWorker
from preble.sim.engine_fit import EngineCosts, EngineModel
from preble.sim.replay import replay

ENGINES = EngineModel(
    EngineCosts(0.02, 1e-4, 1e-7, 0.0, 1e-4, 0.0), LocalConfig(200_000, max_running=256, max_waiting=10**6)
)


def made_up(requests: int, workers: int, rps: float, output_tokens: int, seed: int = 0) -> Recording:
    """Prompts of 1,000 to 3,000 tokens, of which some 80 % are one of 200 documents."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(1, 2**62, size=int(rng.integers(60, 160)), dtype=np.uint64) for _ in range(200)]
    arrivals = np.cumsum(rng.exponential(1.0 / rps, size=requests))
    rows = []
    for at in arrivals.tolist():
        own = rng.integers(1, 2**62, size=int(rng.integers(5, 30)), dtype=np.uint64)
        blocks = np.concatenate([documents[int(rng.zipf(1.3)) % 200], own])
        output = int(rng.integers(1, 2 * output_tokens))
        rows.append(
            RecordedRequest(arrival_seconds=at, prompt_tokens=16 * len(blocks), blocks=blocks, output_tokens=output)
        )
    fleet = tuple(RecordedWorker(id=f"w{number}", kv_capacity_tokens=200_000) for number in range(workers))
    return Recording(workers=fleet, requests=tuple(rows))


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rps", type=float, default=40.0)
    parser.add_argument("--output-tokens", type=int, default=100, help="mean")
    parser.add_argument("--policies", nargs="+", default=["e2", "round_robin"])
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    recording = made_up(args.requests, args.workers, args.rps, args.output_tokens)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "r"
        recording.write(file)
        size, began = file.stat().st_size, time.process_time()
        recording = Recording.read(file)
        rate = args.requests / (time.process_time() - began)
        print(f"read: {rate:,.0f} requests/s, {size / args.requests:.0f} bytes each")
    for policy in args.policies:
        profile = cProfile.Profile()
        began = time.process_time()
        if args.profile:
            profile.enable()
        found = replay(recording, [policy], engines=ENGINES)
        profile.disable()
        seconds = time.process_time() - began
        iterations = found.runs[0].results[0].counts["iterations"]
        print(f"{policy}: {args.requests / seconds:,.0f} requests/s of CPU, {iterations / seconds:,.0f} iterations/s")
        if args.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
