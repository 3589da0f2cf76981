"""Scheduler throughput on 50,000 requests, the paper's section 5.4: how many requests a second one scheduler places.
Owns the measurement, its file and the page's section.

    python -m benchmarks.paper.throughput       # measures (a minute) and writes benchmarks/results/throughput.json

The page is made from the file, so that it does not change with the machine that makes it.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import preble
from benchmarks.common.paths import RESULTS
from benchmarks.paper import cells, published
from benchmarks.paper.page import number, prose, table
from preble.cli.console import commit, machine
from preble.workloads import generate

RESULTS = RESULTS / "throughput.json"
REQUESTS = 50_000
IN_FLIGHT = 64
SECONDS_PER_REQUEST = 0.02
STREAMS = {
    "ToolBench, 200 tools": ("toolbench", 200, published.SCHEDULER_REQUESTS_PER_SECOND["tool_use", 200]),
    "ToolBench, 1,500 tools": ("toolbench", 1500, published.SCHEDULER_REQUESTS_PER_SECOND["tool_use", 1500]),
    "Video QA, 1,000 videos": ("videoqa", 1000, published.SCHEDULER_REQUESTS_PER_SECOND["video_qa", None]),
}
ABOUT = """
    {requests:,} requests through one scheduler in one thread, each placed, reported as started and finished {in_flight}
    requests later, prompts as numpy arrays. The paper's figures are of two GPUs, with eviction, rebalancing and locks
    left out and without finished requests being reported; ours are of everything. Measured at {commit} on {machine}.
"""


def measured(generator: str, groups: int, workers: int) -> float:
    """Requests a second: all the time that the scheduler's calls take."""
    clock = preble.ManualClock()
    specs = [preble.WorkerSpec(f"w{i}", kv_capacity_tokens=198_516) for i in range(workers)]
    scheduler = preble.GlobalScheduler(specs, cost_model="mistral-7b/a6000", clock=clock)
    live: deque[Any] = deque()
    spent, now = 0, time.perf_counter_ns
    for position, request in enumerate(generate(generator, requests=REQUESTS, groups=groups, seed=0).requests):
        tokens = request.token_ids
        clock.advance(SECONDS_PER_REQUEST)
        start = now()
        decision = scheduler.schedule(tokens)
        scheduler.first_token(decision.request_id, cached_tokens=decision.matched_tokens)
        live.append(decision.request_id)
        if len(live) > IN_FLIGHT:
            scheduler.finish(live.popleft(), output_tokens=request.output_tokens)
        if position % 50 == 0:
            scheduler.tick()
        spent += now() - start
    return REQUESTS / (spent / 1e9)


def main() -> int:
    found: dict[str, Any] = {"commit": commit(), "machine": machine(), "requests": REQUESTS, "rows": {}}
    for title, (generator, groups, _) in STREAMS.items():
        for workers in (2, 64):
            found["rows"][f"{title}|{workers}"] = round(measured(generator, groups, workers))
            sys.stderr.write(f"{title}, {workers} workers: {found['rows'][f'{title}|{workers}']:,} requests a second\n")
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0


# --- as an experiment of the page -------------------------------------------------------------------------------------


def grid(quick: bool) -> Iterator[cells.Cell]:
    """No simulations."""
    return iter(())


def draw(found: cells.Found, directory: Path) -> None:
    """No picture."""


def section(found: cells.Found) -> str:
    """Markdown, from the file of the last measurement."""
    kept = json.loads(RESULTS.read_text())
    rows = []
    for title, (_, _, paper) in STREAMS.items():
        two, many = kept["rows"][f"{title}|2"], kept["rows"][f"{title}|64"]
        rows.append([title, number(paper), number(two), number(many), f"{two / paper:,.0f}x"])
    heads = ["requests a second", "paper, 2 GPUs", "Preble, 2 workers", "Preble, 64 workers", "over the paper"]
    where = f"{kept['machine']['processor']}, {kept['machine']['cores']} cores"
    text = ABOUT.format(requests=kept["requests"], in_flight=IN_FLIGHT, commit=kept["commit"], machine=where)
    return "\n".join(["## Scheduler throughput on 50,000 requests", "", prose(text), table(heads, rows), ""])


if __name__ == "__main__":
    raise SystemExit(main())
