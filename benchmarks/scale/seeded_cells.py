"""Simulated cells of several seeds: how they are run in processes, their means shown and their table printed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from benchmarks.common import facts

Means = dict[str, list[float]]  # by rule


def means_of_places(run: Callable[[Any], Means], cells: Sequence[Any], seeds: int) -> list[Means]:
    """Run the cells, of which so many in a row are one place with other seeds; each place's means, by rule."""
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(run, cells))
    places = [found[at : at + seeds] for at in range(0, len(found), seeds)]
    return [{rule: np.mean([one[rule] for one in own], axis=0).tolist() for rule in own[0]} for own in places]


def shown(means: Means) -> list[str]:
    """Each rule's seconds as a cell of a table."""
    return [" / ".join(f"{seconds:.3g}" for seconds in own) for own in means.values()]


def print_table(description: str | None, table: Callable[[int], str], seeds: int) -> None:
    """The command line: the table of as many seeds as it says, with how it was made."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds)
    args = parser.parse_args()
    print(table(args.seeds))
    made = facts.environment(0)
    print(f"\n`{made['command']}`, commit {made['commit']}, seeds 0 to {args.seeds - 1}, {made['machine']}.")
