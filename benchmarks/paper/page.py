"""Markdown for the page of results: tables, numbers, ratios. Owns their form."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def number(value: float) -> str:
    """Three significant digits; "-" for what was not measured."""
    if math.isnan(value):
        return "-"
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def ratio(value: float) -> str:
    """How many times better; below 1 is worse."""
    return "-" if math.isnan(value) else f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


def prose(text: str) -> str:
    """Paragraphs and lists wrapped for the page; a blank line in `text` begins a new one, "- " at its start an item."""
    wrapped = []
    for block in textwrap.dedent(text).strip().split("\n\n"):
        for item in block.split("\n- "):
            words = " ".join(item.split())
            is_item = item is not block.split("\n- ")[0] or words.startswith("- ")
            words = words.removeprefix("- ")
            lead = "- " if is_item else ""
            wrapped.append(textwrap.fill(words, 120, initial_indent=lead, subsequent_indent=" " * len(lead)))
        wrapped.append("")
    return "\n".join(wrapped)
