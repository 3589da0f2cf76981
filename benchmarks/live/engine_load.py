"""The load of `run_engines.py` and how it is sent: documents, requests with their arrivals, arms, one run. Owns no
process and no page.

An arm is a way to place requests: `e2` and `round robin` are Preble's Router, `partition` a client that always asks the
same engine about the same document, `gateway` the SGLang gateway. All meet the same engines and the same arrivals.
Times count from a request's arrival, not from when the client got round to sending it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np

from preble import Router, SamplingParams
from preble.errors import PrebleError
from preble.router import RouterConfig

ARMS = ("e2", "round robin", "partition", "gateway")
REQUEST_SECONDS = 120.0
FLUSH_SECONDS = 60.0
ROUTER_SECONDS = 60.0
IDLE_SECONDS = 2.0  # of a connection that is used again: servers close them after 5, and what is sent just then fails


@dataclass(frozen=True)
class Request:
    """One prompt, the document it begins with, and when it arrives."""

    document: int
    token_ids: list[int]
    arrival_seconds: float


@dataclass(frozen=True)
class Progress:
    """What has come of an answer: output tokens so far, and cached prompt tokens once the engine has reported them."""

    output_tokens: int
    cached_tokens: int | None = None
    engine: str = ""


@dataclass(frozen=True)
class Outcome:
    """One request in the end. `error` is the kind of failure, "" if it was answered in full."""

    prompt_tokens: int
    ttft_seconds: float = 0.0
    latency_seconds: float = 0.0
    cached_tokens: int = 0
    engine: str = ""
    error: str = ""


PATIENT = RouterConfig(refuse_wait_seconds=None)  # the other arms refuse nobody, either
Ask = Callable[[Request], AsyncIterator[Progress]]
Gateway = Callable[[], contextlib.AbstractAsyncContextManager[str]]


@dataclass(frozen=True)
class Fleet:
    """Running engines by address. `http`: they are SGLang servers, not workers of Preble. `vocabulary` bounds their
    token ids."""

    addresses: Sequence[str]
    http: bool = True
    vocabulary: int = 0
    gateway: Gateway | None = None
    config: RouterConfig = PATIENT  # of our routers

    def arms(self) -> list[str]:
        """The arms that can be measured here."""
        return [arm for arm in ARMS if arm != "gateway" or (self.http and self.gateway is not None)]


# --- the load ---------------------------------------------------------------------------------------------------------


def choose_documents(
    tokenized: Iterable[list[int]], count: int, least_tokens: int, most_tokens: int
) -> list[list[int]]:
    """The first `count` texts of `least_tokens` to `most_tokens` tokens. Raises ValueError if there are fewer."""
    fitting = (ids for ids in tokenized if least_tokens <= len(ids) <= most_tokens)
    chosen = list(itertools.islice(fitting, count))
    if len(chosen) < count:
        raise ValueError(f"{len(chosen)} texts of {least_tokens} to {most_tokens} tokens, {count} are needed")
    return chosen


def make_requests(
    documents: Sequence[list[int]], question: Callable[[int], list[int]], count: int, rps: float, seed: int
) -> list[Request]:
    """`count` questions about documents drawn at random, each its own, arriving independently `rps` a second."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0 / rps, count))
    drawn = rng.integers(len(documents), size=count)
    return [
        Request(int(document), documents[document] + question(number), float(arrivals[number]))
        for number, document in enumerate(drawn)
    ]


def shifted(requests: Sequence[Request], by: int, vocabulary: int) -> list[Request]:
    """The same requests in other tokens: what they share among each other stays, with earlier ones they share nothing.
    This stands in for emptying the caches of engines that cannot be reported to."""
    return [
        Request(one.document, [(token + by) % vocabulary for token in one.token_ids], one.arrival_seconds)
        for one in requests
    ]


def order_of(arms: Sequence[str], repetition: int) -> list[str]:
    """Arms in the order of a repetition: each has each place equally often."""
    start = repetition % len(arms)
    return [*arms[start:], *arms[:start]]


# --- the arms ---------------------------------------------------------------------------------------------------------


def new_session(idle_seconds: float = IDLE_SECONDS) -> aiohttp.ClientSession:
    """With as many connections as requests need, none used again after it was idle for longer than this."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=idle_seconds))


@contextlib.asynccontextmanager
async def opened(arm: str, fleet: Fleet, output_tokens: int) -> AsyncIterator[Ask]:
    """The way to ask in an arm. Raises ValueError for an unknown one."""
    if arm == "gateway" and fleet.gateway is not None:
        async with fleet.gateway() as url, new_session() as session:
            yield lambda request: posted(session, url, request, output_tokens)
    elif arm == "partition" and fleet.http:
        async with new_session() as session:
            yield lambda one: posted(session, home := home_of(one, fleet), one, output_tokens, home)
    elif arm == "partition":
        async with contextlib.AsyncExitStack() as stack:
            routers = {one: Router([one], config=fleet.config) for one in fleet.addresses}
            for router in routers.values():
                await stack.enter_async_context(router)
            yield lambda one: routed(routers[home_of(one, fleet)], one, output_tokens)
    elif arm in ("e2", "round robin"):
        router = Router(fleet.addresses, policy=arm.replace(" ", "_"), config=fleet.config)
        async with router:
            await asyncio.wait_for(everyone_ready(router, len(fleet.addresses)), ROUTER_SECONDS)
            yield lambda request: routed(router, request, output_tokens)
    else:
        raise ValueError(f"no arm {arm!r} here; there are {', '.join(fleet.arms())}")


def home_of(request: Request, fleet: Fleet) -> str:
    """The engine of a request's document in a fixed partition."""
    return fleet.addresses[request.document % len(fleet.addresses)]


async def everyone_ready(router: Router, workers: int) -> None:
    """Return once no worker is missing: an arm with one engine fewer would be another experiment."""
    while len(router.scheduler.workers) < workers or router.fleet.unusable:
        await asyncio.sleep(0.05)


async def routed(router: Router, request: Request, output_tokens: int) -> AsyncIterator[Progress]:
    """Ask through Preble."""
    sampling = SamplingParams(max_new_tokens=output_tokens, ignore_eos=True)
    async for chunk in router.generate(request.token_ids, sampling):
        yield Progress(chunk.index + len(chunk.token_ids), chunk.cached_tokens, chunk.worker)


async def posted(
    session: aiohttp.ClientSession, url: str, request: Request, output_tokens: int, engine: str = ""
) -> AsyncIterator[Progress]:
    """Ask a server, or a gateway, as its own client would. `engine` is who answers, where that is known."""
    sampling = {"max_new_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"rid": secrets.token_hex(8), "input_ids": request.token_ids, "sampling_params": sampling, "stream": True}
    async with session.post(f"{url}/generate", json=body, raise_for_status=True) as response:
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                told = json.loads(data)["meta_info"]
                yield Progress(told["completion_tokens"], told["cached_tokens"], engine)


# --- a run ------------------------------------------------------------------------------------------------------------


async def outcome_of(ask: Ask, request: Request, output_tokens: int, start: float) -> Outcome:
    """Wait for the request's arrival, send it and read its answer. A failure is an outcome too."""
    arrival = start + request.arrival_seconds
    await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
    try:
        first, end, last = await asyncio.wait_for(_answer(ask, request), REQUEST_SECONDS)
    except (PrebleError, aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError, KeyError) as error:
        return Outcome(len(request.token_ids), error=type(error).__name__)
    if last.output_tokens != output_tokens or last.cached_tokens is None:
        return Outcome(len(request.token_ids), error="incomplete")
    return Outcome(len(request.token_ids), first - arrival, end - arrival, last.cached_tokens, last.engine)


async def _answer(ask: Ask, request: Request) -> tuple[float, float, Progress]:
    """(time of the first token, of the end, what had come by then)."""
    first, last = 0.0, Progress(0)
    async with contextlib.aclosing(ask(request)) as pieces:
        async for piece in pieces:
            if piece.output_tokens and not first:
                first = time.perf_counter()
            cached = last.cached_tokens if piece.cached_tokens is None else piece.cached_tokens
            last = Progress(piece.output_tokens, cached, piece.engine)
    return first, time.perf_counter(), last


async def run_arm(arm: str, fleet: Fleet, requests: Sequence[Request], output_tokens: int) -> list[Outcome]:
    """Empty the engines' caches, send everything as it arrives, and wait for all answers."""
    if fleet.http:
        await flush(fleet.addresses)
    async with opened(arm, fleet, output_tokens) as ask:
        start = time.perf_counter()
        return list(await asyncio.gather(*(outcome_of(ask, one, output_tokens, start) for one in requests)))


async def flush(urls: Sequence[str]) -> None:
    """Empty the caches of idle servers. Raises TimeoutError if one refuses for a minute."""
    async with aiohttp.ClientSession() as session:
        for url in urls:
            await asyncio.wait_for(_flush_one(session, url), FLUSH_SECONDS)


async def _flush_one(session: aiohttp.ClientSession, url: str) -> None:
    """A server refuses while it still ends a request."""
    while True:
        async with session.post(f"{url}/flush_cache") as response:
            if response.status == 200:
                return
        await asyncio.sleep(0.1)
