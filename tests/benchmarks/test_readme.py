"""The README's figures are those of the results that are kept."""

from __future__ import annotations

import pytest

from benchmarks.common import readme
from tests.support.paths import ROOT


def test_the_readme_shows_what_is_kept() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert readme.written(text) == text, "run: python -m benchmarks.common.readme"


def test_a_part_needs_its_marks() -> None:
    with pytest.raises(ValueError, match="begin numbers"):
        readme.put("no marks", "numbers", "text")


def test_a_demo_is_kept_without_its_requests() -> None:
    spread = {"mean": 0.1234567891, "p50": 0.1, "p90": 0.2, "p99": 0.3}
    share = {"requests": 3, "reused_tokens": 10, "computed_tokens": 5, "output_tokens": 1}
    phase = {
        "ttft_seconds": spread,
        "latency_seconds": spread,
        "reused_fraction": 0.5,
        "workers": {"a": share, "b": share},
        "requests": [{"number": 0}],
    }
    content = {
        "commit": "0123456789",
        "machine": {"cores": 2, "processor": "some CPU"},
        "settings": {"seed": 0, "model": "tiny"},
        "phases": [{"policy": "round_robin", **phase}, {"policy": "e2", **phase}],
    }
    found = readme.keep_demo(content)
    assert found["phases"][0]["reused_tokens"] == 20 and "workers" not in found["phases"][0]
    assert found["phases"][0]["ttft_seconds"]["mean"] == 0.123457
    shown = readme.demo(found)
    assert "| TTFT mean | 123 ms | 123 ms | 1.0x |" in shown
    assert "6 prompts, 2 workers" in shown and "commit 0123456789, 2 x some CPU, seed 0" in shown


def test_the_contest_is_read_off_the_page_of_results() -> None:
    page = (
        "- p99 TTFT: of 40 cells E2 is worse than the best rival in 5, better than all in 0, and\n"
        "- mean TTFT: of 40 cells E2 is worse than the best rival in 7, better than all in 6, and\n"
        "### Ranking\n"
        "| *pooled reference* | 0.48 | 1.1: A, 90% | 0.52 | 1: B, 9% | 2 |\n"
        "| **`e2`** | 1.00 | 2.0: A, 30% | 1.00 | 1.1: B, 1% | 5 |\n"
        "| `oracle_partition`\\* | 1.01 | 2.0: A, 30% | 1.90 | 1.1: B, 1% | 5 |\n"
        "| `llmd_sticky` | 1.10 | 2.0: A, 30% | 1.20 | 1.1: B, 1% | 5 |\n"
        "| `round_robin` | 5.00 | 2.0: A, 30% | 6.00 | 1.1: B, 1% | 5 |\n"
        "### Another table\n"
        "| `round_robin` | 9.00 | 2.0: A, 30% | 9.00 | 1.1: B, 1% | 5 |\n"
    )
    assert readme.contest(page) == {
        "rivals": 2, "round_robin": 6.0, "rival": 1.2, "cells": 40, "worse": 7, "better": 6,
        "worse_p99": 5, "better_p99": 0,
    }  # fmt: skip


def test_a_link_is_not_broken_where_a_line_ends() -> None:
    words = "x" * (readme.BULLETS.width - len("- ([live](docs/results- "))
    assert (
        readme.BULLETS.fill(f"{words} ([live](docs/results-live.md)).")
        == f"- {words}\n  ([live](docs/results-live.md))."
    )
