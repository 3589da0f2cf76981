"""A plugin of pytest for a Python that msgspec has no build for: tests that reach it are skipped, and so counted, not
failed. Owns that judgement alone; with msgspec installed it does nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Generator
from typing import Any

import pytest

MISSING = importlib.util.find_spec("msgspec") is None
SAYS = "No module named 'msgspec'"
REASON = "Skipped: msgspec has no build for this Python"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file whose imports reach it."""
    report = yield
    judge(report, str(collector.path))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that does."""
    report = yield
    judge(report, str(item.path))
    return report


def judge(report: Any, path: str) -> None:
    """Make a failure a skip, if it is for want of msgspec."""
    if MISSING and report.failed and SAYS in str(report.longrepr):
        report.outcome, report.longrepr = "skipped", (path, 0, REASON)
