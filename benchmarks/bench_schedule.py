"""How long a decision takes: `GlobalScheduler.schedule` with E2 and everything on, beside the machine's limit for the
same prompts.

The limit compares each prompt with the part of it that was seen before and copies the rest, in C, over the same
working set. Times are nanoseconds of one call; the ratio to the limit is what carries over to other machines.
Placement (hit fraction, load spread) is printed with the speed, because speed bought with bad placement does not count.

    python benchmarks/bench_schedule.py [--shapes toolbench200 loogle] [--workers 8 64 512] [--json OUT]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from shapes import SHAPES, Tokens, prompts

import preble

HERE = Path(__file__).resolve().parent
DEFAULT_TRACE = HERE.parent.parent / "shared/workloads/traces/mooncake_conversation.jsonl.gz"
IN_FLIGHT = 64


@dataclass(frozen=True)
class Row:
    """One cell: a shape at a number of workers, tokens given as a buffer or a list."""

    shape: str
    workers: int
    tokens_as: str
    schedule_ns_p50: float
    schedule_ns_p99: float
    finish_ns_p50: float
    limit_ns_p50: float
    ratio_to_limit: float
    hit_fraction: float
    load_spread: float
    tree_bytes_per_prompt: float


def compiled_limit() -> ctypes.CDLL:
    """limit.c, compiled into a temporary directory that lives as long as the process."""
    out = Path(tempfile.mkdtemp(prefix="preble-bench-")) / "limit.so"
    subprocess.run(["cc", "-O3", "-shared", "-fPIC", str(HERE / "limit.c"), "-o", str(out)], check=True)
    library = ctypes.CDLL(str(out))
    library.compare_and_copy.restype = ctypes.c_int64
    return library


def limit_ns(library: ctypes.CDLL, stream: list[Tokens], matched: list[int]) -> float:
    """p50 of compare + copy for these prompts and the lengths the scheduler matched."""
    stored = [np.array(tokens) for tokens in stream]
    out = np.empty(max(map(len, stream)), np.int32)
    took = np.zeros(len(stream))
    pointers = ctypes.c_void_p * len(stream)
    lengths = np.array([len(tokens) for tokens in stream], np.int64)
    library.compare_and_copy(
        pointers(*[tokens.ctypes.data for tokens in stream]),
        pointers(*[tokens.ctypes.data for tokens in stored]),
        np.array(matched, np.int64).ctypes.data_as(ctypes.c_void_p),
        lengths.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(len(stream)),
        out.ctypes.data_as(ctypes.c_void_p),
        took.ctypes.data_as(ctypes.c_void_p),
    )
    return float(np.percentile(took, 50))


def measure(library: ctypes.CDLL, shape: str, stream: list[Tokens], workers: int, as_list: bool, warm: int) -> Row:
    """Schedule the whole stream, finishing each request IN_FLIGHT later; the first `warm` are not counted."""
    clock = preble.ManualClock()
    scheduler = preble.GlobalScheduler([f"w{i}" for i in range(workers)], clock=clock)
    inputs = [tokens.tolist() for tokens in stream] if as_list else stream
    schedule_ns, finish_ns, matched, chosen, live = [], [], [], [], []
    for position, tokens in enumerate(inputs):
        clock.advance(0.02)
        start = time.perf_counter_ns()
        decision = scheduler.schedule(tokens)
        schedule_ns.append(time.perf_counter_ns() - start)
        matched.append(decision.matched_tokens)
        chosen.append(decision.worker)
        live.append(decision.request_id)
        if len(live) > IN_FLIGHT:
            ended = live.pop(0)
            start = time.perf_counter_ns()
            scheduler.finish(ended, output_tokens=43)
            finish_ns.append(time.perf_counter_ns() - start)
        if position % 50 == 0:
            scheduler.tick()
    scheduler.check()
    counts = np.bincount(np.unique(chosen[warm:], return_inverse=True)[1], minlength=workers)
    limit = limit_ns(library, stream[warm:], matched[warm:])
    p50 = float(np.percentile(schedule_ns[warm:], 50))
    return Row(
        shape=shape,
        workers=workers,
        tokens_as="list" if as_list else "int32 buffer",
        schedule_ns_p50=p50,
        schedule_ns_p99=float(np.percentile(schedule_ns[warm:], 99)),
        finish_ns_p50=float(np.percentile(finish_ns, 50)),
        limit_ns_p50=limit,
        ratio_to_limit=p50 / limit,
        hit_fraction=sum(matched[warm:]) / sum(map(len, stream[warm:])),
        load_spread=float(counts.max() / max(counts.mean(), 1e-9)),
        tree_bytes_per_prompt=scheduler.stats()["tree"]["bytes_used"] / len(stream),
    )


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def table(rows: list[Row]) -> str:
    names = ["shape", "workers", "tokens", "p50 us", "p99 us", "finish us", "limit us", "x limit", "hits"]
    names += ["max/mean load", "bytes/prompt"]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        lines.append(
            f"| {row.shape} | {row.workers} | {row.tokens_as} | {row.schedule_ns_p50 / 1e3:.2f} "
            f"| {row.schedule_ns_p99 / 1e3:.2f} | {row.finish_ns_p50 / 1e3:.2f} | {row.limit_ns_p50 / 1e3:.2f} "
            f"| {row.ratio_to_limit:.1f} | {row.hit_fraction:.3f} | {row.load_spread:.2f} "
            f"| {row.tree_bytes_per_prompt:.0f} |"
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = ["toolbench200", "toolbench1500-zipf", "embodied"]
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=usual)
    parser.add_argument("--workers", nargs="+", type=int, default=[8])
    parser.add_argument("--count", type=int, default=6000, help="prompts of each shape (long shapes take a quarter)")
    parser.add_argument("--lists", action="store_true", help="also give the tokens as lists of ints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE, help="Mooncake's conversation trace")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    library = compiled_limit()
    rows = []
    for shape in args.shapes:
        if shape == "mooncake" and not args.trace.exists():
            print(f"mooncake left out: no trace at {args.trace}", file=sys.stderr)
            continue
        count = args.count if shape.startswith(("tool", "embodied")) else args.count // 4
        stream = prompts(shape, count, seed=args.seed, trace=args.trace)
        for workers in args.workers:
            for as_list in (False, True) if args.lists else (False,):
                rows.append(measure(library, shape, stream, workers, as_list, len(stream) // 4))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    print("\n" + table(rows))
    facts = {"commit": commit(), "machine": cpu(), "python": platform.python_version(), "seed": args.seed}
    print("\n" + ", ".join(f"{name} {value}" for name, value in facts.items()))
    if args.json:
        report = {**facts, "command": sys.argv, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
