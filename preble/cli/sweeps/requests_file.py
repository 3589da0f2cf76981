"""A row a request of every run, as CSV or Parquet, written as runs end. Owns the columns, and what may be written."""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import InvalidInput, MissingExtra
from ...sim import Result
from ...sim.results import OUTCOMES
from ...workloads import Workload
from ..console import need_matplotlib

RUN_COLUMNS = ("policy", "workers", "rps", "seed")
COLUMNS = (
    *RUN_COLUMNS, "request_id", "group", "outcome", "worker", "arrival_seconds", "first_token_seconds",
    "finish_seconds", "ttft_seconds", "latency_seconds", "prompt_tokens", "cached_tokens", "output_tokens",
)  # fmt: skip
Cell = str | int | float | None


class RequestsFile:
    """An open file; a context manager. Its folder must be there. `path` ends in .csv or .parquet. Raises `InvalidInput`
    for another name or a place that cannot be written, `MissingExtra` for Parquet without pyarrow."""

    def __init__(self, path: Path) -> None:
        check_path(path)
        self._path = path
        self._file: Any = None
        self._parquet: Any = None
        self._csv: Any = None

    def __enter__(self) -> RequestsFile:
        if self._path.suffix == ".parquet":
            import pyarrow
            import pyarrow.parquet

            kinds = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
            self._schema = pyarrow.schema([(name, kinds[kind_of(name)]) for name in COLUMNS])
            self._parquet = pyarrow.parquet.ParquetWriter(str(self._path), self._schema)
        else:
            self._file = self._path.open("w", newline="", encoding="utf-8")
            self._csv = csv.writer(self._file, lineterminator="\n")
            self._csv.writerow(COLUMNS)
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._parquet, self._file):
            if one is not None:
                one.close()

    def add(self, run: tuple[str, int, float | None, int], workload: Workload, result: Result) -> None:
        """All requests of a run: (policy, workers, requests a second, seed)."""
        found = rows(run, workload, result)
        if self._parquet is None:
            self._csv.writerows(["" if value is None else value for value in row] for row in found)
            return
        import pyarrow

        columns = list(zip(*found, strict=True))
        arrays = [pyarrow.array(column, kind) for column, kind in zip(columns, self._schema.types, strict=True)]
        self._parquet.write_table(pyarrow.Table.from_arrays(arrays, schema=self._schema))


def check_files(args: argparse.Namespace) -> None:
    """Raise for a file of `--json`, `--plot` or `--requests-file` that cannot be written."""
    for option in ("json", "plot"):
        path = getattr(args, option)
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InvalidInput(f"--{option}: there is no such file to write: {path}")
    if args.plot is not None:
        if args.plot.suffix != ".png":
            raise InvalidInput(f"--plot: must end in .png, got {args.plot}")
        need_matplotlib()
    if args.requests_file is not None:
        check_path(args.requests_file)


def check_path(path: Path) -> None:
    """Raise for a file that cannot be written."""
    if path.suffix not in (".csv", ".parquet"):
        raise InvalidInput(f"--requests-file: must end in .csv or .parquet, got {path}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidInput(f"--requests-file: there is no such file to write: {path}")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise MissingExtra("Parquet needs pyarrow: pip install pyarrow, or name a .csv file") from error


def kind_of(column: str) -> type[Any]:
    """What a column holds."""
    if column == "rps" or column.endswith("_seconds"):
        return float
    return int if column in ("workers", "seed") or column.endswith("_tokens") else str


def rows(run: tuple[str, int, float | None, int], workload: Workload, result: Result) -> Iterator[tuple[Cell, ...]]:
    """A row a request, None for what it does not have."""
    seconds = (result.arrival_seconds, result.first_token_seconds, result.finish_seconds, result.ttft_seconds,
               result.latency_seconds)  # fmt: skip
    for at, request in enumerate(workload.requests):
        placed, cached = int(result.worker[at]), int(result.cached_tokens[at])
        yield (
            *run,
            request.request_id,
            request.group,
            OUTCOMES[result.outcome[at]],
            result.workers[placed] if placed >= 0 else None,
            *(None if math.isnan(column[at]) else float(column[at]) for column in seconds),
            int(result.prompt_tokens[at]),
            cached if cached >= 0 else None,
            int(result.output_tokens[at]),
        )
