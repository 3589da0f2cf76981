"""`preble serve`: an HTTP front door to a fleet of workers, OpenAI-compatible. Owns the command's options.

program        the process: start, signals, reload, end        config          every knob, and where it comes from
processes      several of them on one port                     siblings        what they ask each other
app, middleware routes; keys, limits, errors, log               state           one request from prompt to pieces
openai_api     chat completions, completions, models           generation      choices, stop strings, merging
sglang_api     /generate                                       tokenizing      text to ids; `detokenizing` back
admin_api      health, workers, explanations                   chat_template   messages to text
schemas        request bodies                                  metrics         Prometheus
problems       errors as HTTP                                  http            bodies, SSE, clients that go away
page_api       the live page; its files are in page/           live            what it shows; `history`, `live_events`
logs           JSON lines                                      openapi         what can be asked, as a document
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
