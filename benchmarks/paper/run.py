"""The paper's evaluation from one command: simulate what is not known yet, draw, write the page. Owns the order.

    python -m benchmarks.paper.run              # all of it: docs/results.md and docs/figures/
    python -m benchmarks.paper.run --quick      # a tenth of the requests and fewer rates: build/paper-quick/
    python -m benchmarks.paper.run --only figure8

Interrupted, it goes on where it was: every simulation is kept in build/paper-cells/ under a digest of its definition
and of the sources. The page has no dates and no timings in it: the same sources make the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import ModuleType

from benchmarks.common.facts import commit
from benchmarks.common.paths import RESULTS, ROOT
from benchmarks.paper import (
    cells,
    contest,
    fairness,
    figure7,
    figure8,
    figure9,
    figure10,
    fleets,
    measured,
    terms,
    throughput,
)
from benchmarks.paper.page import prose

EXPERIMENTS: dict[str, ModuleType] = {
    "contest": contest,
    "fleets": fleets,
    "figure7": figure7,
    "terms": terms,
    "figure8": figure8,
    "figure9": figure9,
    "figure10": figure10,
    "fairness": fairness,
    "throughput": throughput,
}
INTRODUCTION = """
    What E2 is worth in simulation, and where it loses: a contest with the rules of other routers, and the paper's
    experiments. Made by `make paper`{how}, commit {commit}; its tables and pictures are made by it from the
    simulations, only the explanations are written. The simulator runs the real schedulers
    ([simulator.md](simulator.md)); the engines' times are the paper authors' regressions of real GPUs. Simulations
    say how policies compare on these engines; they are not measurements of GPUs. Crosses in the figures and what is
    called "published" are the authors' own measurements, read off their pictures (`benchmarks/paper/published.py`).

    Seed 0 where nothing else is said. `python -m benchmarks.paper.run --only figure8` repeats one experiment, `make
    paper` all of them, some hours on two cores. How long a decision takes stands in [benchmarks.md](benchmarks.md).
"""


def main(arguments: list[str]) -> int:
    """Everything asked for; the exit code."""
    args = parsed(arguments)
    started = time.monotonic()
    out = Path(args.out) if args.out else ROOT / ("build/paper-quick" if args.quick else "docs")
    wanted = args.only or list(EXPERIMENTS)
    found = {name: gathered(name, args.quick, Path(args.store)) for name in wanted}
    how = " (here: `make paper-quick`, a tenth of the requests)" if args.quick else ""
    parts = ["# Results", "", prose(INTRODUCTION.format(how=how, commit=commit()))]
    for name in wanted:
        EXPERIMENTS[name].draw(found[name], out / "figures")
        parts.append(EXPERIMENTS[name].section(found[name]))
    (out / "results.md").write_text("\n".join(parts))
    if not (args.quick or args.out):
        measured.update()
    if not (args.quick or args.out or args.only):
        (RESULTS / "paper.json").write_text(json.dumps({"commit": commit(), "seeds": contest.SEEDS}) + "\n")
    sys.stderr.write(f"wrote {out / 'results.md'} after {time.monotonic() - started:.0f} s\n")
    return 0


def gathered(name: str, quick: bool, store: Path) -> cells.Found:
    """An experiment's figures, with those of the experiments that it looks at too: what is kept, the rest simulated."""
    module = EXPERIMENTS[name]
    run = getattr(module, "run_place", cells.run_place)
    found = cells.run_all(module.grid(quick), store, name, run)
    for other in getattr(module, "LOOKS_AT", ()):
        found.update(gathered(other, quick, store))
    return found


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests, fewer rates")
    parser.add_argument("--only", action="append", choices=list(EXPERIMENTS), help="this experiment; may be repeated")
    parser.add_argument("--store", default=str(ROOT / "build/paper-cells"), help="where simulations are kept")
    parser.add_argument("--out", help="where results.md and figures/ go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
