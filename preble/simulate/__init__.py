"""`preble simulate`: policies on a simulated fleet, side by side. Owns the command's options; `program.py` does it.

preble simulate --workload toolbench --policy round_robin,e2 --workers 4 --rps 10
preble simulate --workload prompts.jsonl.gz --kill w0@30 --json found.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..cli.demo import positive_float, positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; each policy gets the same requests at the same moments."""
    add = parser.add_argument_group("requests").add_argument
    workload = "toolbench, videoqa, ... or a file of prompts or a trace (default: %(default)s)"
    add("--workload", default="toolbench", metavar="NAME|FILE", help=workload)
    add("--requests", type=positive_int, metavar="N", help="how many (default: 1000, or the file's)")
    add("--groups", type=positive_int, metavar="N", help="prefix groups to generate (default: requests / 10)")
    add("--rps", type=positive_float, metavar="R", help="Poisson arrivals a second (default: the trace's own, or 4)")
    add("--tokenizer", choices=("words", "mistral"), default="words", help="for files of text (default: words)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts, arrivals and chance (default: 0)")
    add = parser.add_argument_group("fleet").add_argument
    add("--policy", default="round_robin,e2", metavar="P[,P...]", help="one after the other (default: %(default)s)")
    add("--workers", type=positive_int, default=2, metavar="N", help="named w0, w1, ... (default: 2)")
    add("--cost-model", default="mistral-7b/a6000", metavar="PRESET|FILE", help="of a worker (default: %(default)s)")
    add("--kv-capacity", type=positive_int, metavar="N", help="KV tokens of a worker (default: 198516)")
    add("--token-budget", type=positive_int, metavar="N", help="tokens of an iteration (default: 512)")
    add("--order", choices=("priority", "fcfs", "longest_prefix"), help="of a worker's queue (default: priority)")
    add = parser.add_argument_group("what goes wrong").add_argument
    add("--routers", type=int, default=1, metavar="N", help="schedulers that share the requests (default: 1)")
    add("--event-delay", type=float, default=0.0, metavar="S", help="seconds until news are heard of (default: 0)")
    add("--event-loss", type=float, default=0.0, metavar="P", help="share of eviction news lost (default: 0)")
    add("--kill", action="append", default=[], metavar="W@S", help="worker W dies at S seconds; may be repeated")
    add = parser.add_argument_group("results").add_argument
    add(
        "--slo-ttft", type=positive_float, default=1.0, metavar="S", help="goodput counts TTFTs up to this (default: 1)"
    )
    add("--json", type=Path, metavar="FILE", help="write everything found")


def run(args: argparse.Namespace) -> int:
    """Simulate each policy; 0 when all have been."""
    from ..cli.simulate import run_simulate

    return run_simulate(args)
