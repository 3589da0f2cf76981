"""The rule uses the fleet where all prompts begin alike, and its page shows what was recorded."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common.paths import RESULTS
from benchmarks.paper import one_price
from preble import GlobalScheduler, ManualClock


def test_the_fleet_is_used_where_all_prompts_begin_alike() -> None:
    """A system prompt of 3,000 tokens, 60 of the user, 8 workers, none idle for long. A gate at nine tenths of the
    longest hit once left all of it where the first one went."""
    busy = {}
    for policy in ("e2", "cache_aware", "round_robin"):
        clock = ManualClock(100.0)
        sched = GlobalScheduler([f"w{i}" for i in range(8)], policy=policy, cost_model="mistral-7b/a6000", clock=clock)
        live: list[tuple[float, Any]] = []
        used: Counter[str] = Counter()
        for number in range(200):
            clock.advance(0.25)
            while live and live[0][0] <= clock():
                sched.finish(live.pop(0)[1], output_tokens=150)
            decision = sched.schedule([*range(3000), *range(10_000 * number + 10_000, 10_000 * number + 10_060)])
            sched.first_token(decision.request_id)
            used[decision.worker] += 1
            live.append((clock() + 4.0, decision.request_id))
        busy[sched.policy] = max(used.values()) / (sum(used.values()) / 8)
    assert busy["e2"] <= 1.5 and busy["round_robin"] == 1.0 and busy["cache_aware"] > 2.0


def test_the_committed_page_shows_the_committed_result(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(one_price.PAGE.read_text())
    one_price.write_docs(json.loads((RESULTS / "one_price.json").read_text()), page)
    assert page.read_text() == one_price.PAGE.read_text()
