"""Whether decisions stay as fast as they begin, over a long run, in a process of its own. Owns that measurement only.

Prompts of 1,500 tools are made on the fly, for ever new: nothing but the scheduler grows. Timed are `schedule`,
`finish` and `tick` alone, after one window (180 s of the manual clock) of warm-up.

The last 50,000 requests are compared with the first 50,000 in two ways. `ratio_in_time`: the rate at the end over the
rate at the beginning. Minutes lie between, in which a shared machine gets faster or slower by more than what is looked
for. So `ratio`: when the run is over, a new scheduler is warmed alike and serves its own first 50,000, in turn with the
old one's next 50,000, PAIR requests each; the figure is the median of the pairs' ratios. Resident memory is read after
the warm-up and at the end of the run, beside what the tree says of itself.

    python -m benchmarks.decision.long_run '{"requests": 1000000, "workers": 8, "seed": 0}'
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections import deque
from typing import Any

import numpy as np

import preble
from benchmarks.decision.cells import (
    IN_FLIGHT,
    OUTPUT_TOKENS,
    REQUESTS_PER_TICK,
    SECONDS_PER_REQUEST,
    pin,
    resident_bytes,
)
from benchmarks.decision.shapes import EndlessTools

TOOLS = 1500
BUCKET = 50_000
PAIR = 1_000
WARM = 10_000  # a little more than one window of 180 s


class Service:
    """One scheduler, an endless stream, and the seconds spent inside the scheduler."""

    def __init__(self, workers: int, seed: int) -> None:
        self._clock = preble.ManualClock()
        self.scheduler = preble.GlobalScheduler([f"w{i}" for i in range(workers)], clock=self._clock)
        self._prompts = EndlessTools(TOOLS, seed)
        self._live: deque[Any] = deque()
        self._took_ns = np.zeros(BUCKET)

    def serve(self, requests: int) -> tuple[float, float, float]:
        """Serve at most BUCKET; returns seconds inside the scheduler, their p50 in ns, and the share of tokens found
        cached."""
        matched = tokens = 0
        now, scheduler, live = time.perf_counter_ns, self.scheduler, self._live
        for position in range(requests):
            self._clock.advance(SECONDS_PER_REQUEST)
            prompt = self._prompts.next_prompt()
            start = now()
            decision = scheduler.schedule(prompt)
            if len(live) >= IN_FLIGHT:
                scheduler.finish(live.popleft(), output_tokens=OUTPUT_TOKENS)
            if position % REQUESTS_PER_TICK == 0:
                scheduler.tick()
            self._took_ns[position] = now() - start
            live.append(decision.request_id)
            matched += decision.matched_tokens
            tokens += decision.prompt_tokens
        took = self._took_ns[:requests]
        return float(took.sum()) * 1e-9, float(np.percentile(took, 50)), matched / tokens


def paired_ratio(old: Service, requests: int, workers: int, seed: int) -> float:
    """The old scheduler's rate over that of a new one, in turn; the median over pairs."""
    new = Service(workers, seed)
    new.serve(WARM)
    ratios = []
    for number in range(max(requests // PAIR, 1)):
        first, second = (old, new) if number % 2 else (new, old)
        seconds = {first: first.serve(PAIR)[0], second: second.serve(PAIR)[0]}
        ratios.append(seconds[new] / seconds[old])
    new.scheduler.check()
    return statistics.median(ratios)


def measured(requests: int, workers: int, seed: int) -> dict[str, Any]:
    """The run's figures."""
    bucket = min(BUCKET, max(requests // 2, 1))
    service = Service(workers, seed)
    started = resident_bytes()
    gc.freeze()
    warm_seconds, _, _ = service.serve(WARM)
    warm_bytes, warm_tree = resident_bytes(), service.scheduler.stats()["tree"]["bytes_used"]
    rates, p50s, hits = [], [], 0.0
    for _ in range(requests // bucket):
        seconds, p50, hits = service.serve(bucket)
        rates.append(bucket / seconds)
        p50s.append(p50)
    tree = service.scheduler.stats()["tree"]["bytes_used"]
    end_bytes = resident_bytes()
    service.scheduler.check()
    gc.freeze()
    return {
        "requests": bucket * len(rates),
        "bucket": bucket,
        "warm_per_second": WARM / warm_seconds,
        "per_second": rates,
        "p50_ns": p50s,
        "ratio": paired_ratio(service, bucket, workers, seed),
        "ratio_in_time": rates[-1] / rates[0],
        "hit_fraction": hits,
        "rss_grown_warm_bytes": warm_bytes - started,
        "rss_grown_end_bytes": end_bytes - started,
        "tree_warm_bytes": warm_tree,
        "tree_end_bytes": tree,
    }


def main() -> int:
    wanted = json.loads(sys.argv[1])
    pin()
    found = measured(wanted["requests"], wanted["workers"], wanted["seed"])
    print(json.dumps({**{key: wanted[key] for key in ("workers", "seed")}, **found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
