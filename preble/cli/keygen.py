"""`preble keygen`: CURVE keys of a fleet, and which routers may connect. Owns the command; keys are
`transport.security`'s.

    preble keygen --into keys                        workers' pair, one router's pair: for preble up, or one router
    preble keygen --into keys --clients blue green   a pair for each of two more routers, in keys/routers/NAME
    preble keygen --into keys --remove green         shut one out again, also from workers that run

Secret keys are readable by their owner only (0600), and nothing is ever overwritten. Workers take the directory as it
is (`--curve-keys keys`); they look at keys/clients at every handshake, so no restart is needed. A router of that name
takes keys/routers/NAME, which belongs on its machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import InvalidConfig
from ..transport.security import add_clients, create_keys, remove_clients


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--into", required=True, metavar="DIR", help="key directory, made where missing")
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--clients", nargs="+", metavar="NAME", help="routers to let in, each with a pair of its own")
    change.add_argument("--remove", nargs="+", metavar="NAME", help="routers to refuse from their next handshake on")


def run(args: argparse.Namespace) -> int:
    """`preble keygen`: print what was written or removed. Raises `InvalidConfig`; then nothing has changed."""
    try:
        for path in _change(args):
            sys.stdout.write(f"{path}\n")
    except OSError as error:
        raise InvalidConfig(f"--into {args.into}: {error}") from error
    return 0


def _change(args: argparse.Namespace) -> list[Path]:
    root = Path(args.into)
    if args.remove:
        return remove_clients(root, args.remove)
    if args.clients and (root / "server.key").exists():
        return add_clients(root, args.clients)
    return [*create_keys(root), *(add_clients(root, args.clients) if args.clients else [])]
