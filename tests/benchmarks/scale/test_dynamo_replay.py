"""Preble's rules led through another's simulator: nothing is known before it happens, prompts keep what they share,
and round robin led so is that simulator's own. The last needs the peers' environment (`make peers`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.common.paths import ROOT
from benchmarks.scale import dynamo_pairs, dynamo_replay
from benchmarks.scale.dynamo_replay import BLOCK_TOKENS, Asked, Led, Replay, Served, at_load, figures_of, ratio, tables

PYTHON = ROOT / ".venv-peers" / "bin" / "python"


class OneByOne:
    """A worker that computes one prompt after the other, a millisecond a token that it has not seen, and lets each go
    on for a second: what is placed later changes nothing before it, unless `forgetful`."""

    def __init__(self, asked: Asked, *, forgetful: bool = False) -> None:
        self._asked = asked
        self._forgetful = forgetful
        self.host_tokens = 0
        self.asked_for: list[list[int]] = []

    def run(self, numbers: Sequence[int], **options: Any) -> list[Served]:
        """As `Replay.run` of one worker."""
        assert options == {"num_workers": 1}
        self.asked_for.append(list(numbers))
        free, seen, served = 0.0, set[bytes](), []
        for number in numbers:
            tokens, arrival = self._asked.prompts[number], float(self._asked.arrival_seconds[number])
            begins = [tokens[: i + BLOCK_TOKENS].tobytes() for i in range(0, len(tokens), BLOCK_TOKENS)]
            cached = BLOCK_TOKENS * sum(begin in seen for begin in begins)
            seen.update(begins)
            free = max(free, arrival) + (len(tokens) - min(cached, len(tokens) - 1)) / 1000
            late = 0.1 * len(numbers) if self._forgetful else 0.0
            served.append(Served(free - arrival + late, free - arrival + 1.0, min(cached, len(tokens) - 1), 0))
        return served


def asked(count: int = 12, gap_seconds: float = 0.5) -> Asked:
    """Questions about three documents, in turn."""
    documents = [np.arange(1000 * n, 1000 * n + 4 * BLOCK_TOKENS, dtype=np.int32) for n in range(3)]
    prompts = [np.concatenate([documents[n % 3], np.array([10**6 + n], np.int32)]) for n in range(count)]
    return Asked(prompts, [8] * count, np.arange(count) * gap_seconds)


def led(found: Asked, engine: OneByOne, policy: str, workers: int) -> list[Served]:
    """All requests, placed by a policy."""
    return Led(cast(Replay, engine), found, workers, policy, None).run()


def test_each_placement_asks_one_worker_s_replay_with_one_request_more() -> None:
    found = asked()
    engine = OneByOne(found)
    served = led(found, engine, "round_robin", 3)
    assert [one.worker for one in served] == [n % 3 for n in range(12)]
    assert engine.asked_for[:4] == [[0], [1], [2], [0, 3]] and len(engine.asked_for) == 12
    assert [one.cached_tokens for one in served] == [0] * 3 + [4 * BLOCK_TOKENS] * 9


def test_e2_finds_the_documents_again_and_round_robin_on_two_workers_does_not() -> None:
    found = asked(24)
    hits = {
        policy: sum(one.cached_tokens for one in led(found, OneByOne(found), policy, 2))
        for policy in ("e2", "round_robin")
    }
    assert hits["e2"] == 21 * 4 * BLOCK_TOKENS > hits["round_robin"]


def test_what_was_seen_may_not_change() -> None:
    found = asked()
    with pytest.raises(AssertionError, match="what was seen has changed"):
        led(found, OneByOne(found, forgetful=True), "round_robin", 2)


def test_prompts_share_as_many_blocks_as_they_begin_alike() -> None:
    alike = np.arange(3 * BLOCK_TOKENS, dtype=np.int32)
    other = alike.copy()
    other[BLOCK_TOKENS] += 1
    lines = [json.loads(line) for line in Asked([alike, other, alike[:-1]], [1, 1, 1], np.arange(3.0)).lines()]
    first, second, third = (line["hash_ids"] for line in lines)
    assert [len(line["hash_ids"]) for line in lines] == [3, 3, 3] and lines[2]["input_length"] == len(alike) - 1
    assert first[:1] == second[:1] and not set(first[1:]) & set(second[1:])
    assert first[:2] == third[:2] and first[2] != third[2]


def test_a_load_is_a_share_of_a_rate() -> None:
    found = at_load(asked(11, gap_seconds=7.0), rps=2.0, load=0.5)
    assert found.arrival_seconds[-1] == pytest.approx(10.0)


def test_figures_leave_out_what_warms_the_caches() -> None:
    warm = dynamo_replay.warm_requests(10)
    served = [Served(100.0, 200.0, 0, 0)] * warm + [Served(1.0, 2.0, 4 * BLOCK_TOKENS, 0)] * (10 - warm)
    figures = figures_of(served, asked(10))
    assert warm and figures["mean_ttft"] == 1.0 and figures["p99_latency"] == 2.0
    assert figures["hit"] == pytest.approx(4 * BLOCK_TOKENS / (4 * BLOCK_TOKENS + 1))


def test_tables_compare_seed_by_seed() -> None:
    rows = []
    for arm, seconds in (
        ("kv router", [2.0, 4.0]),
        ("its round robin", [4.0, 8.0]),
        ("e2", [1.0, 2.0]),
        (dynamo_replay.UNKNOWN, [2.0, 2.0]),
    ):
        figures = {key: float(np.mean(seconds)) for key in dynamo_replay.FIGURES}
        by_seed = {f"{key}_by_seed": seconds for key in dynamo_replay.FIGURES}
        rows.append({"workload": "loogle", "workers": 4, "load": 0.9, "arm": arm, "hit": 0.5, **figures, **by_seed})
    assert ratio(rows[2], rows[0], "mean_ttft") == "0.50±0.00"
    assert ratio(rows[3], rows[0], "mean_ttft") == "0.71±0.35"
    over, seconds = (lines.splitlines()[2:] for lines in tables(rows).split("\n\n"))
    assert over[0] == f"| loogle, 4, 0.9 | e2 |{' 0.50±0.00 |' * 4} 0.50, 0.50 | 0.25±0.00 |"
    assert len(over) == 2 and seconds == ["| loogle, 4, 0.9 | 3 / 3 / 3 | 6 / 6 / 6 | 1.5 / 1.5 / 1.5 | 2 / 2 / 2 |"]


@pytest.mark.parametrize("command", [dynamo_replay.main, dynamo_pairs.main])
def test_without_the_peers_it_says_so(
    command: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["it", "--peers-env", str(tmp_path / "none")])
    command()
    assert capsys.readouterr().out == "left out: no environment none; `make peers` installs it\n"


@pytest.mark.skipif(not PYTHON.exists(), reason="`make peers` installs that simulator")
def test_round_robin_led_is_that_simulator_s_own() -> None:
    found = asked(40, gap_seconds=0.01)
    with Replay(PYTHON, found) as replay:
        own = replay.run(range(40), num_workers=3, router_mode="round_robin")
        there = Led(replay, found, 3, "round_robin", None).run()
    assert len({one.worker for one in own}) == 3
    for one, other in zip(own, there, strict=True):
        assert one.ttft_seconds == pytest.approx(other.ttft_seconds, abs=1e-9)
        assert one.latency_seconds == pytest.approx(other.latency_seconds, abs=1e-9)
        assert (one.cached_tokens, one.worker) == (other.cached_tokens, other.worker)


@pytest.mark.skipif(not PYTHON.exists(), reason="`make peers` installs that simulator")
def test_there_what_leaves_the_gpu_s_memory_is_found_in_host_memory() -> None:
    """Three documents of which two and a half fit, in turn: host memory keeps what leaves."""
    length = int(0.4 * dynamo_replay.FLEET.kv_tokens)
    documents = [np.arange(10**6 * n, 10**6 * n + length, dtype=np.int32) for n in range(3)]
    found = Asked([documents[n % 3] for n in range(9)], [4] * 9, np.arange(9.0) * 60)
    hits = []
    for times in (0.0, 4.0):
        with Replay(PYTHON, found, times) as replay:
            assert replay.host_tokens == int(times * dynamo_replay.FLEET.kv_tokens)
            hits.append(sum(one.cached_tokens for one in Led(replay, found, 1, "e2", None).run()))
    assert hits[0] < 0.6 * hits[1] and hits[1] > 5.9 * length
