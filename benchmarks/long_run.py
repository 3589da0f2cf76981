"""Whether decisions stay as fast as they begin, over a long run, in a process of its own. Owns that measurement only.

Prompts of 1,500 tools are made on the fly, for ever new: nothing but the scheduler grows. Timed are `schedule`,
`finish` and `tick` alone. After one window (180 s of the manual clock) of warm-up come the requests that count; the
figure is decisions per second of the last 50,000 over that of the first 50,000. Resident memory is read after the
warm-up and at the end, beside what the tree says of itself.

    python benchmarks/long_run.py '{"requests": 1000000, "workers": 8, "seed": 0}'
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import deque
from typing import Any

from cells import IN_FLIGHT, OUTPUT_TOKENS, REQUESTS_PER_TICK, SECONDS_PER_REQUEST, pin, resident_bytes
from shapes import EndlessTools

import preble

TOOLS = 1500
BUCKET = 50_000
WARM = 10_000  # a little more than one window of 180 s


class Service:
    """One scheduler, an endless stream, and the seconds spent inside the scheduler."""

    def __init__(self, workers: int, seed: int) -> None:
        self._clock = preble.ManualClock()
        self.scheduler = preble.GlobalScheduler([f"w{i}" for i in range(workers)], clock=self._clock)
        self._prompts = EndlessTools(TOOLS, seed)
        self._live: deque[Any] = deque()

    def seconds_of(self, requests: int) -> tuple[float, float]:
        """Serve so many; returns seconds inside the scheduler, and the share of tokens found cached."""
        spent = matched = tokens = 0
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
            spent += now() - start
            live.append(decision.request_id)
            matched += decision.matched_tokens
            tokens += decision.prompt_tokens
        return spent * 1e-9, matched / tokens


def measured(requests: int, workers: int, seed: int) -> dict[str, Any]:
    """The run's figures."""
    bucket = min(BUCKET, max(requests // 2, 1))
    service = Service(workers, seed)
    started = resident_bytes()
    gc.freeze()
    warm_seconds, _ = service.seconds_of(WARM)
    warm_bytes, warm_tree = resident_bytes(), service.scheduler.stats()["tree"]["bytes_used"]
    rates, hits = [], 0.0
    for _ in range(requests // bucket):
        seconds, hits = service.seconds_of(bucket)
        rates.append(bucket / seconds)
    tree = service.scheduler.stats()["tree"]["bytes_used"]
    end_bytes = resident_bytes()
    service.scheduler.check()
    return {
        "requests": bucket * len(rates),
        "bucket": bucket,
        "warm_per_second": WARM / warm_seconds,
        "per_second": rates,
        "ratio": rates[-1] / rates[0],
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
