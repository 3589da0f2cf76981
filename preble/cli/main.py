"""The `preble` command. Owns top-level argument parsing and exit codes; what a sub-command does is its module's.

A sub-command is a module with `add_arguments(parser)` and `run(args) -> int | None`. Only the one asked for is
imported, so `preble --version` and `preble --help` answer at once and work in the base install.

Exit codes: 0 done, 1 failed (one line on stderr says why), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..errors import InvalidInput, MissingExtra, PrebleError

COMMANDS = {
    "demo": ("preble.cli.demo.program", "serve real prompts with two workers: round robin against E2"),
    "study": (
        "preble.cli.study.program",
        "lengths, sharing and key portions of prompts: the paper's Table 1, Figures 4 and 5",
    ),
    "simulate": ("preble.cli.simulate", "compare policies on a simulated fleet, reproducibly"),
    "replay": ("preble.cli.replay", "what recorded requests would have got under another policy or on more workers"),
    "explain": ("preble.cli.explain", "why requests went where they went, from a file of decision records"),
    "profile": ("preble.cli.profile.program", "measure an engine and fit its cost model"),
    "serve": ("preble.gateway", "serve an OpenAI-compatible HTTP API in front of workers"),
    "epp": ("preble.cli.epp", "choose servers for an Envoy gateway: an endpoint picker of the Inference Extension"),
    "config": ("preble.cli.config", "print the configuration that `preble serve` would use"),
    "top": ("preble.cli.top", "the fleet behind a gateway, live in the terminal"),
    "attach": ("preble.cli.attach", "what running SGLang and vLLM servers report, and whether they can be followed"),
    "audit": ("preble.cli.audit.program", "what running servers compute twice, and what E2 would have saved"),
    "worker": ("preble.worker", "serve one engine to routers, as a process"),
    "up": ("preble.cli.up", "start workers and a router together, restart what crashes, drain on SIGTERM"),
    "tiny-model": (
        "preble.cli.tiny_model",
        "make a small model with random weights, to try workers without a download",
    ),
    "keygen": ("preble.cli.keygen", "make the CURVE keys of a fleet, and let routers in or shut them out"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `preble ARGV...` and return the exit code. `argv` None means the process's own arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # where `--policy module:Class` finds a user's own module; nothing is hidden by it
    try:
        parser = build_parser(arguments)
    except MissingExtra as error:  # options that are those of an optional part
        sys.stderr.write(f"preble: {error}\n")
        return 1
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return import_module(COMMANDS[args.command][0]).run(args) or 0
    except KeyboardInterrupt:
        return 130
    except PrebleError as error:
        sys.stderr.write(f"preble {args.command}: {error}\n")
        return 2 if isinstance(error, InvalidInput) else 1


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for these arguments: every sub-command by name, and the options of the one that they name."""
    parser = argparse.ArgumentParser(
        prog="preble",
        description="Schedules LLM requests over a fleet of inference engines so that prompts reuse cached prefixes.",
        epilog="`preble COMMAND --help` lists a command's options.",
        allow_abbrev=False,  # a new option must not change what a command line means
    )
    parser.add_argument("--version", action="version", version=f"preble {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    named = next((word for word in arguments if not word.startswith("-")), None)
    for name, (module, summary) in COMMANDS.items():
        described = summary[0].upper() + summary[1:] + "."
        command = commands.add_parser(name, help=summary, description=described, allow_abbrev=False)
        if name == named:
            import_module(module).add_arguments(command)
    return parser
