"""`preble serve`: an HTTP front door to a fleet of workers, OpenAI-compatible. Owns the command's options.

program, processes   the process: start, signals, reload, end; several of them on one port
connections          bounds on clients' connections
app, middleware      routes; errors, log                     keys, origins        who may ask, how often; foreign pages
api/                 the endpoints and their bodies          text/        text to ids and back, choices, stop strings
core/                what the handlers share                 dashboard/   the live page
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core.config import Loaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `preble serve`: one for each field of the configuration that is no secret."""
    from .core.config import FIELDS, LISTS, SECRET, GatewayConfig, flag_of, value_of

    defaults = GatewayConfig()
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration, .yaml or .toml")
    for path in FIELDS:
        if path[-1] in SECRET:
            continue
        default = value_of(defaults, path)
        several = path[-1] in LISTS
        parser.add_argument(
            flag_of(path),
            dest="/".join(path),
            nargs="+" if several else "?" if isinstance(default, bool) else None,
            const="true" if isinstance(default, bool) else None,
            metavar=path[-1].rpartition("_")[2].upper(),
            help=f"default: {default}" if default not in (None, []) else None,
        )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises typed errors for a wrong configuration."""
    config = loaded_from(args).config
    if config.processes > 1:
        from .processes import serve_processes

        return serve_processes(args, config)
    from .program import serve_until_stopped

    return serve_until_stopped(lambda: loaded_from(args))


def loaded_from(args: argparse.Namespace) -> Loaded:
    """The configuration that the command line, the environment and the file make together, read anew."""
    from .core.config import load_for

    return load_for(args, os.environ)
