"""`preble config`: the configuration that `preble serve` would use with the same options. Owns nothing else."""

from __future__ import annotations

import argparse
import json
import sys

from .. import gateway


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of the file, for editors")
    gateway.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the configuration as YAML, each value with its source; a wrong one raises `InvalidConfig`."""
    from ..gateway.core.config_text import schema, shown

    if args.schema:
        sys.stdout.write(json.dumps(schema(), indent=2) + "\n")
    else:
        sys.stdout.write(shown(gateway.loaded_from(args)))
    return 0
