"""The command of a benchmark whose cases are drawn by seeds and that only prints its table. Owns no case."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks.common import facts


def print_table(purpose: str | None, table: Callable[[int], str], seeds: int) -> None:
    """Print the table of so many seeds, by default `seeds`, and what it is of. `purpose`: what the command says of
    itself."""
    parser = argparse.ArgumentParser(description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds, help="runs of each row (%(default)s)")
    args = parser.parse_args()
    print(table(args.seeds))
    made = facts.environment(0)
    print(f"\n`{made['command']}`, commit {made['commit']}, seeds 0 to {args.seeds - 1}, {made['machine']}.")
