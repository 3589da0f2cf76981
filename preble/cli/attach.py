"""`preble attach`: what running SGLang and vLLM servers report, and whether Preble can follow them. Owns the questions
and how the answers are printed; the client is `http_client`, the feed `kv_event_subscriber`.

One row for each data-parallel rank. `replay` is "answers" when the batches that the engine keeps really came. With
`--watch` a router follows the servers, and a line a second says what it receives, until interrupted.
Exit codes: 0 all can be attached, 1 one cannot (stderr says why, and which flag is missing), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq.asyncio

from ..errors import InvalidInput, PrebleError
from ..router.router import Router
from ..transport.engine_servers.http_client import EngineServer
from ..transport.engine_servers.kv_event_codec import LoadReport
from ..transport.engine_servers.kv_event_subscriber import EventFeed, FeedListener
from ..transport.engine_servers.server_info import EventSource, ServerInfo, ServerOptions
from ..transport.tasks import running, within
from .console import aligned

HEADER = ("server", "engine", "model", "block", "capacity", "rank", "events", "replay", "running", "waiting")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="+", metavar="URL", help="http://host:port of a running server")
    parser.add_argument("--watch", action="store_true", help="follow their events and load until interrupted")
    add_server_options(parser)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Options of whoever attaches to servers; `server_options` reads them."""
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file whose first line is their API key")
    group = parser.add_argument_group("what a server does not say (older versions of vLLM)")
    group.add_argument("--block-size", type=int, metavar="TOKENS", help="tokens of a block of its cache")
    group.add_argument("--kv-capacity-tokens", type=int, metavar="TOKENS", help="tokens that its cache holds")
    group.add_argument("--events-endpoint", default="", metavar="ENDPOINT", help="ZeroMQ endpoint of its cache events")
    group.add_argument("--replay-endpoint", default="", metavar="ENDPOINT", help="where they can be asked for again")
    group.add_argument("--events-topic", default="", metavar="TOPIC", help="the topic of these events")


def run(args: argparse.Namespace) -> int:
    """Ask the servers, print what they reported; with --watch, follow them."""
    options = server_options(args)
    answers = asyncio.run(_ask_all(args.urls, options))
    rows = [row for answer in answers if not isinstance(answer, PrebleError) for row in answer[0]]
    if rows:
        sys.stdout.write("".join(f"{line}\n" for line in aligned([HEADER, *rows])))
    advice = {text for answer in answers if not isinstance(answer, PrebleError) for text in answer[1]}
    for text in sorted(advice):
        sys.stderr.write(f"preble attach: {text}\n")
    failures = [answer for answer in answers if isinstance(answer, PrebleError)]
    for failure in failures:
        sys.stderr.write(f"preble attach: {failure}\n")
    if args.watch and not failures:
        asyncio.run(_watch(args.urls, options))
    return 1 if failures else 0


def server_options(args: argparse.Namespace) -> ServerOptions:
    """What `add_server_options` asked for. Raises `InvalidInput`, `InvalidConfig`."""
    return ServerOptions(
        api_key=_first_line(args.api_key_file),
        block_size=args.block_size,
        kv_capacity_tokens=args.kv_capacity_tokens,
        events_endpoint=args.events_endpoint,
        replay_endpoint=args.replay_endpoint,
        events_topic=args.events_topic,
    )


def _first_line(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8").split("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--api-key-file {path} cannot be read: {type(error).__name__}") from None


# --- asking -----------------------------------------------------------------------------------------------------------

Answer = tuple[list[tuple[str, ...]], tuple[str, ...]]  # rows, advice


async def _ask_all(urls: Sequence[str], options: ServerOptions) -> list[Answer | PrebleError]:
    return list(await asyncio.gather(*(_ask(url, options) for url in urls)))


async def _ask(url: str, options: ServerOptions) -> Answer | PrebleError:
    try:
        async with EngineServer(url, options) as server:
            info = await server.info()
            loads = {load.rank: load for load in await server.load()}
        rows = [await _row(url, info, rank, loads.get(rank), options) for rank in range(info.ranks)]
    except PrebleError as error:
        return error
    return rows, info.advice


async def _row(
    url: str, info: ServerInfo, rank: int, load: LoadReport | None, options: ServerOptions
) -> tuple[str, ...]:
    source = info.events[rank] if info.events else None
    return (
        url,
        f"{info.engine} {info.version}",
        info.model,
        str(info.block_size),
        str(info.kv_capacity_tokens),
        f"{rank}/{info.ranks}",
        source.endpoint if source is not None else "none",
        await _replay_state(source, options),
        str(load.running) if load is not None else "?",
        str(load.waiting) if load is not None else "?",
    )


async def _replay_state(source: EventSource | None, options: ServerOptions) -> str:
    """Whether what the engine keeps can be had."""
    if source is None or not source.replay_endpoint:
        return "none"
    context = zmq.asyncio.Context()
    feed = EventFeed(replace(source, load_endpoint=""), _Nobody(), context=context)
    try:
        async with running(feed.run()):
            await within(options.answer_seconds, feed.caught_up())
    except asyncio.TimeoutError:
        return "no answer"
    finally:
        context.destroy(linger=0)
    return "no answer" if feed.counters.replays_unanswered else f"answers, {feed.counters.batches} batches"


class _Nobody(FeedListener):
    """Receives a feed, and only its counters matter."""

    def on_payload(self, payload: bytes) -> None:
        """Nothing."""

    def on_resync(self) -> None:
        """Nothing."""


# --- watching ---------------------------------------------------------------------------------------------------------


async def _watch(urls: Sequence[str], options: ServerOptions) -> None:
    async with Router.attach(*urls, options=options) as router:
        while True:
            await asyncio.sleep(1.0)
            sys.stdout.write("".join(f"{line}\n" for line in watch_lines(router)))
            sys.stdout.flush()


def watch_lines(router: Router) -> list[str]:
    """A line for each worker: its state, what is estimated of its cache, its events and load."""
    known = router.scheduler.stats()["workers"]
    return [_watch_line(worker, known.get(worker["worker_id"], {})) for worker in router.stats()["workers"].values()]


def _watch_line(worker: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    feed = worker["feed"]
    load = worker["load"] or {"running": "?", "waiting": "?"}
    return (
        f"{worker['worker_id'] or '?'} {worker['state']} {worker['why']}".rstrip()
        + f"  blocks {known.get('known_blocks', 0)}  batches {feed['batches']}  gaps {feed['gaps']}"
        + f"  resyncs {feed['resyncs']}  restarts {feed['restarts']}"
        + f"  running {load['running']}  waiting {load['waiting']}"
    )
