"""`preble serve`: an HTTP front door to a fleet of workers, OpenAI-compatible. Owns the command's options.

program, processes   the process: start, signals, reload, end; several of them on one port
connections          bounds on clients' connections
app, middleware      routes; errors, log                     keys, origins        who may ask, how often; foreign pages
shared_limits        limits of several processes together     yaml_text            YAML that others wrote
api/                 the endpoints and their bodies          text/        text to ids and back, choices, stop strings
relay/               bodies to servers that run already      migration/   other routers' command lines
picker/              servers named to other data planes (Envoy's ext_proc)
discovery/           servers found while it runs
core/                what the handlers share                 dashboard/   the live page
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidConfig
from ..launch.processes import end_with_stdin

if TYPE_CHECKING:
    from .core.config import FieldPath
    from .core.config_sources import Loaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `preble serve`."""
    parser.add_argument("--until-stdin-closes", action="store_true", help="drain and end when standard input closes")
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of the configuration that is no secret."""
    from .core.config import SECRET, flag_of
    from .core.config_sources import router_option
    from .core.config_text import sections
    from .migration.counterparts import ALL

    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration, .yaml or .toml; flags go before it")
    for router in ALL:
        text = f"a command line of {router}, whose options are taken where nothing else says more (docs/migrating.md)"
        parser.add_argument(f"--from-{router}", dest=router_option(router), metavar="COMMAND", help=text)
    for heading, paths in sections().items():
        group = parser.add_argument_group(heading)
        for path in paths:
            if path[-1] not in SECRET:
                group.add_argument(flag_of(path), dest="/".join(path), **_form(path))


def _form(path: FieldPath) -> dict[str, Any]:
    """How the option of a field is written, and what is said of it."""
    from .core.config import LISTS, GatewayConfig, value_of
    from .core.config_text import default_text, descriptions, metavar

    is_switch = isinstance(value_of(GatewayConfig(), path), bool)
    return {
        "nargs": "+" if path[-1] in LISTS else "?" if is_switch else None,
        "const": "true" if is_switch else None,
        "metavar": metavar(path),
        "help": f"{descriptions()[path]} Default: {default_text(path)}.".replace("%", "%%"),
    }


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises typed errors for a wrong configuration."""
    from .core.config import end_seconds

    config = loaded_from(args).config
    if config.min_workers and not (config.workers or config.servers or config.discovery):
        raise InvalidConfig(
            "workers: none is named. Name those to place requests on (--workers tcp://HOST:PORT ...), or set "
            "min_workers to 0 and add them over HTTP"
        )
    if args.until_stdin_closes:
        end_with_stdin(end_seconds(config))
    if config.processes > 1:
        from .processes import serve_processes

        return serve_processes(args, config)
    from .program import serve_until_stopped

    return serve_until_stopped(lambda: loaded_from(args))


def loaded_from(args: argparse.Namespace) -> Loaded:
    """The configuration that the command line, the environment and the file make together, read anew."""
    from .core.config_sources import load_for

    return load_for(args, os.environ)
