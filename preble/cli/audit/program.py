"""`preble audit`: the command. Owns its options, Ctrl-C, and where the results go.

Nothing is routed and nothing is changed: servers are asked what they are, for /metrics and for their event streams.
Exit codes: 0 the report was printed, 1 no server answered or a file could not be written, 2 wrong usage. Ctrl-C ends
the listening and prints what there is; a second one ends the command.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from pathlib import Path

from ...errors import InvalidInput
from ...transport.engine_servers.server_info import ServerOptions
from ...workloads.tokenizers import read_file
from ..attach import add_server_options, server_options
from ..console import Screen, can_draw, commit, duration, positive_float, versions, without_nan
from .findings import AuditFindings, find
from .listening import Received, listen
from .report import Decode, lines, tokens

PICTURE = Path("preble-audit.png")
MINUTES_MAX = 24 * 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="+", metavar="URL", help="http://host:port of a running SGLang or vLLM server")
    parser.add_argument(
        "--minutes", type=positive_float, default=10.0, help="how long to listen (%(default)g); Ctrl-C ends it sooner"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there; - is standard output")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", default=PICTURE, help="where the PNG goes (%(default)s)"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="show prefixes as text, by the tokenizer.json there"
    )
    add_server_options(parser)


def run(args: argparse.Namespace) -> int:
    """Listen, then print the report and write the picture."""
    if args.minutes > MINUTES_MAX:
        raise InvalidInput(f"--minutes: at most {MINUTES_MAX}, got {args.minutes:g}")
    for number, url in enumerate(args.urls):
        if url.rstrip("/") in (other.rstrip("/") for other in args.urls[:number]):
            raise InvalidInput(f"{url} is named twice")
    decode = decoder(args.tokenizer) if args.tokenizer is not None else None
    screen = Screen()
    received = asyncio.run(_listen(args.urls, server_options(args), 60.0 * args.minutes, screen))
    screen.clear()
    found = find(received, on_step=screen.show)
    screen.clear()
    if args.json is not None and str(args.json) == "-":
        sys.stdout.write(document(found))
        return 0
    sys.stdout.write("".join(f"{line}\n" for line in lines(found, decode)))
    return 0 if _write(args, found) else 1


def _write(args: argparse.Namespace, found: AuditFindings) -> bool:
    """The files that were asked for, and the picture."""
    try:
        if args.json is not None:
            args.json.write_text(document(found), encoding="utf-8")
        if can_draw("for the picture:"):
            from .plot import draw

            draw(args.picture, found)
            sys.stdout.write(f"{'Picture':<10}{args.picture}\n")
    except OSError as error:
        sys.stderr.write(f"preble audit: {error}\n")
        return False
    return True


def document(found: AuditFindings) -> str:
    """All figures as JSON."""
    content = {"versions": versions(), "commit": commit(), **found.as_dict()}
    return json.dumps(without_nan(content), indent=1, allow_nan=False, default=str) + "\n"


async def _listen(urls: list[str], options: ServerOptions, seconds: float, screen: Screen) -> Received:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)  # a second one ends the command

    def on_poll(received: Received) -> None:
        if received.seconds:
            screen.show(progress(received, seconds))
        else:
            screen.say(f"listening to {len(urls)} servers for {duration(seconds)}; Ctrl-C reports at once")

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        return await listen(urls, options, seconds, clock=time.monotonic, stop=stop, on_poll=on_poll)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def progress(received: Received, seconds: float) -> str:
    """A line while it listens."""
    stored = received.ledger.stored()
    requests = sum(server.served.requests for server in received.servers if server.served is not None)
    return (
        f"listening: {duration(min(received.seconds, seconds))} of {duration(seconds)}, {requests:,.0f} requests, "
        f"{tokens(stored.computed)} tokens computed, {tokens(stored.twice)} of them twice"
    )


def decoder(directory: Path) -> Decode:
    """Token ids to text. Raises `MissingExtra`, `InvalidInput` naming the file."""
    made = read_file(directory, "gateway")
    return lambda ids: str(made.decode(list(ids), skip_special_tokens=False))
