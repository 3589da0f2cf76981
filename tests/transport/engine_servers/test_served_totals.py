"""What two readings of a server's metrics say it served between them, and what is not accepted."""

from __future__ import annotations

import pytest

from preble.transport.engine_servers.served_totals import ServedTotals, Total, served_totals
from tests.support.served import SGLANG, VLLM


def totals(engine: str, text: str) -> ServedTotals:
    found = served_totals(engine, text)
    assert found.totals is not None and not found.problems
    return found.totals


def test_totals_are_read_of_both_engines() -> None:
    found = totals("sglang", SGLANG)
    assert found.requests == 162 and found.prompt == Total(97021, 162) and found.computed == Total(76029, 162)
    assert found.prefill == Total(12.864806686999032, 163) and found.ttft.mean == pytest.approx(16.091724354 / 160)
    assert found.quantile("ttft", 0.25) == pytest.approx(0.05 * 162 / 160)
    assert found.quantile("ttft", 0.75) == pytest.approx(0.1 + 0.1 * (0.75 * 162 - 80) / 80)
    assert found.quantile("ttft", 0.999) is None, "beyond the last bound"
    found = totals("vllm", VLLM + VLLM.replace('engine="0"', 'engine="1"'))
    assert found.requests == 160 and found.computed.sum == 80_000 and found.ttft.mean is None


def test_between_two_readings_is_their_difference() -> None:
    later = VLLM.replace("40.0", "50.0").replace("64000", "70000").replace("} 80.0", "} 90.0")
    between = totals("vllm", later).since(totals("vllm", VLLM))
    assert between is not None
    assert (between.requests, between.latency.sum, between.prompt.sum, between.computed.sum) == (10, 10, 6000, 0)
    assert totals("vllm", VLLM).since(totals("vllm", later)) is None, "a total fell: it was restarted"
    both = between.plus(totals("sglang", SGLANG))
    assert both.requests == 172 and both.buckets == totals("sglang", SGLANG).buckets


@pytest.mark.parametrize("value", ["nan", "-3", "inf", "many"])
def test_a_number_that_cannot_be_is_named_and_nothing_is_taken_of_it(value: str) -> None:
    found = served_totals("sglang", SGLANG.replace("16.091724354000235", value))
    assert found.totals is not None and found.totals.ttft == Total() and "ttft" not in found.totals.buckets
    assert found.totals.prompt.sum == 97021
    assert len(found.problems) == 1 and "time_to_first_token_seconds_sum" in found.problems[0]


def test_more_computed_than_there_was_cannot_be() -> None:
    found = served_totals("sglang", SGLANG.replace("76029", "976029"))
    assert found.totals is not None and found.totals.computed == Total() and "computed" in found.problems[0]


def test_no_such_metrics_and_too_many() -> None:
    assert served_totals("sglang", VLLM) == (None, ())
    line = 'vllm:request_prompt_tokens_sum{engine="0"} 1.0\n'
    assert served_totals("vllm", line * 40_000).problems[0].startswith("/metrics has more than")
