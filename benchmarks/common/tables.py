"""Markdown tables, and results in as many digits as are known."""

from __future__ import annotations

from typing import Any


def markdown(names: list[str], lines: list[list[str]]) -> str:
    """A table, or nothing if it has no lines."""
    if not lines:
        return ""
    rows = [names, ["---"] * len(names), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def rounded(value: Any) -> Any:
    """The same with floats of 6 digits: no more is known of them."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value
