"""The rule on trial: it is its formula, it uses the fleet, and its page shows what was recorded."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.paths import RESULTS
from benchmarks.paper import one_price
from benchmarks.paper.e2_latency import E2Latency
from preble import GlobalScheduler, ManualClock
from preble.policies.base import RequestView, WorkersView

seconds = st.lists(st.floats(0, 90), min_size=6, max_size=6)


def naive_latency(prompt: int, limit: int | None, w: WorkersView) -> list[float]:
    """What `E2Latency` says of itself, term by term."""
    kappa = w.pressure if w.pressure < 2.0 else 2.0
    output = min(sum(w.mean_output_tokens) / len(w), limit or float("inf"))
    prices = []
    for i in range(len(w)):
        live, q, missed = w.live_requests[i], w.waiting_prefill_seconds[i], prompt - w.matched_tokens[i]
        free = max(w.kv_capacity_tokens[i] - w.cached_tokens[i] - w.live_output_tokens[i], 0)
        queue = (2 * q if q < 0.3 else q + 0.3) + 0.004 * live + w.load_seconds[i] / 50
        prefill = w.prefill_seconds[i] * (1 + kappa + live / 10)
        decoding = output * w.context_token_seconds[i] * (w.live_prompt_tokens[i] + 0.3 * prompt * live)
        share = sorted([0.0, (missed + output - free) / missed, 1.0])[1]
        eviction = 2 * w.hit_share * share * w.prefill_seconds[i] * (1 + kappa)
        prices.append(queue + prefill + decoding + eviction)
    return prices


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.integers(1, 6),
    st.integers(1, 400),
    seconds,
    seconds,
    seconds,
    st.floats(0, 4),
    st.floats(0, 1),
    st.sampled_from([None, 7, 300]),
)
def test_e2_latency_is_its_formula(
    count: int,
    prompt: int,
    load: list[float],
    waiting: list[float],
    prefill: list[float],
    pressure: float,
    hit_share: float,
    limit: int | None,
) -> None:
    workers = WorkersView(
        ids=[f"w{i}" for i in range(count)],
        matched_tokens=[min(29 * i, prompt - 1) for i in range(count)],
        load_seconds=load[:count],
        eviction_seconds=[0.0] * count,
        prefill_seconds=prefill[:count],
        live_requests=list(range(count)),
        waiting_requests=[0] * count,
        waiting_prefill_seconds=[wait / 90 for wait in waiting[:count]],
        live_output_tokens=[40] * count,
        live_prompt_tokens=[1000 * live for live in range(count)],
        mean_output_tokens=list(range(100, 100 + count)),
        context_token_seconds=[2e-7] * count,
        cached_tokens=list(range(700, 700 + 60 * count, 60)),
        kv_capacity_tokens=[1000] * count,
        hit_share=hit_share,
        pressure=pressure,
    )
    request = RequestView(range(prompt), None, limit, 0, 0.0)
    assert E2Latency().score(request, workers) == pytest.approx(naive_latency(prompt, limit, workers))


def test_e2_latency_uses_the_fleet_where_all_prompts_begin_alike() -> None:
    """A system prompt of 3,000 tokens, 60 of the user, 8 workers, none idle for long: "e2" leaves all of it where the
    first one went, since that one holds nine tenths of every prompt."""
    busy = {}
    for policy in ("e2", E2Latency(), "round_robin"):
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
    assert busy["e2"] == 8.0 and busy["e2-latency"] <= 2.0 and busy["round_robin"] == 1.0


def test_the_committed_page_shows_the_committed_result(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(one_price.PAGE.read_text())
    one_price.write_docs(json.loads((RESULTS / "one_price.json").read_text()), page)
    assert page.read_text() == one_price.PAGE.read_text()


def test_generated_traffic_is_as_its_name_says() -> None:
    prompts = [one_price.generated(one_price.Case(name, 1.0, 2, 0)).requests for name in one_price.GENERATED]
    shared = [len({request.parts[0].tobytes() for request in requests}) for requests in prompts]
    assert shared[0] == 1 and 10 < shared[1] < 100 and shared[2] == len(prompts[2]) == 200
