"""A study as a table and as JSON. Owns the wording and the digits shown; measures and draws nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import numpy as np

from ... import __version__
from ..console import commit, machine, processor, rich_console, versions
from .statistics import Study, Values, summary

# Each column's name and cell; those of sharing, only where a workload says what is shared.
COLUMNS: dict[str, Callable[[Study], str]] = {
    "workload": lambda study: study.name,
    "requests": lambda study: str(study.requests),
    "groups": lambda study: str(study.groups),
    "prompt tokens": lambda study: mean_and_std(study.prompt_tokens, digits=0),
    "output tokens": lambda study: mean_and_std(study.output_tokens),
    "median prompt/output": lambda study: f"{summary(study.prompt_to_output)['p50']:.1f}",
    "shared prefix %": lambda study: mean_and_std(study.shared_fraction * 100),
    "tokens hit %": lambda study: f"{study.hit_fraction * 100:.1f}",
    "key portion %": lambda study: mean_and_std(study.key_fraction * 100),
    "requests per key portion": lambda study: per_key_portion(study),
    "median gap ms": lambda study: (
        "-" if study.gap_seconds is None else f"{summary(study.gap_seconds)['p50'] * 1000:.0f}"
    ),
}
HEADER = tuple(COLUMNS)
SHARING = {"shared prefix %", "tokens hit %", "key portion %", "requests per key portion"}


def table_row(study: Study) -> list[str]:
    """The cells of one workload, in the order of `HEADER`; "-" where it has no such value."""
    return [cell(study) if study.has_sharing or name not in SHARING else "-" for name, cell in COLUMNS.items()]


def per_key_portion(study: Study) -> str:
    """Requests per key portion, then in brackets without one that all requests contain."""
    below = study.requests_per_key_below
    return mean_and_std(study.requests_per_key) + (f" ({mean_and_std(below)})" if below is not None else "")


def mean_and_std(values: Values, digits: int = 1) -> str:
    """ "85.4 ± 13.8"."""
    return f"{values.mean():.{digits}f} ± {values.std():.{digits}f}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows, the header first, as a Markdown table whose columns also line up as plain text."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows]
    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([lines[0], rule, *lines[1:]])


def write_table(studies: Sequence[Study], stream: TextIO) -> None:
    """Write the table: with rich where it is installed and `stream` is a terminal, in Markdown otherwise."""
    rows = [list(HEADER), *map(table_row, studies)]
    if not (stream.isatty() and write_rich(rows, stream)):
        stream.write(markdown(rows) + "\n")


def write_rich(rows: Sequence[Sequence[str]], stream: TextIO) -> bool:
    """Write the rows as rich tables no wider than the terminal; False without rich."""
    console = rich_console(stream)
    if console is None:
        return False
    from rich.table import Table

    for block in fitted(rows, console.width):
        table = Table(*block[0])
        for column in table.columns[1:]:
            column.justify = "right"
        for row in block[1:]:
            table.add_row(*row)
        console.print(table)
    return True


def fitted(rows: Sequence[Sequence[str]], width: int) -> list[list[Sequence[str]]]:
    """Rows as one table if it fits into `width` characters, else turned, with as many workloads side by side as fit."""
    if table_width(rows) <= width:
        return [list(rows)]
    blocks: list[list[Sequence[str]]] = []
    for row in rows[1:]:
        if blocks and table_width(turned([rows[0], *blocks[-1], row])) <= width:
            blocks[-1].append(row)
        else:
            blocks.append([row])
    return [turned([rows[0], *block]) for block in blocks]


def turned(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    return list(zip(*rows, strict=True))


def table_width(rows: Sequence[Sequence[str]]) -> int:
    """Characters of the table's lines, rules and blanks between columns included."""
    return 1 + sum(max(map(len, column)) + 3 for column in turned(rows))


def made_by() -> str:
    """One line: which Preble, from which commit, on which machine."""
    return f"preble {__version__}, commit {commit() or 'unknown'}, {processor()}, {os.cpu_count()} cores"


def document(studies: Sequence[Study], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything measured, each column with its percentiles, and what it was measured with and on."""
    return {
        "settings": settings,
        "versions": versions(),
        "commit": commit(),
        "machine": machine(),
        "workloads": [as_json(study) for study in studies],
    }


def as_json(study: Study) -> dict[str, Any]:
    """One workload as JSON; columns it does not have are null."""
    named = ("name", "source", "notes", "arrivals", "requests", "groups", "nodes", "hit_fraction")
    lengths = ("prompt_tokens", "output_tokens", "prompt_to_output")
    rest = ("shared_fraction", "key_fraction", "requests_per_key", "requests_per_key_below", "gap_seconds")
    found = {name: getattr(study, name) for name in (*named, *lengths, *rest)}
    return {name: summary(value) if isinstance(value, np.ndarray) else value for name, value in found.items()}
