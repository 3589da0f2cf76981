"""`preble epp`: the gateway as an endpoint picker of the Gateway API Inference Extension, for a data plane that sends
requests itself (docs/endpoint-picker.md). Owns the port that it takes where none is named.

It is `preble serve` with `picker_port`: the same options, metrics, health checks and changes of workers over HTTP.
"""

from __future__ import annotations

import argparse

from .. import gateway

PORT = 9002  # where charts of the Inference Extension expect one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    gateway.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Raises as `preble serve`."""
    if gateway.loaded_from(args).config.picker_port is None:
        args.picker_port = str(PORT)
    return gateway.run(args)
