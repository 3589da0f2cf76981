"""`preble config`: the configuration that `preble serve` would use with the same options. Owns nothing else."""

from __future__ import annotations

import argparse
import sys

from ..gateway import add_arguments as add_arguments
from ..gateway import loaded_from


def run(args: argparse.Namespace) -> int:
    """Print the configuration as YAML, each value with its source; a wrong one raises `InvalidConfig`."""
    from ..gateway.core.config import shown

    sys.stdout.write(shown(loaded_from(args)))
    return 0
