"""What a cached prefix saves on a real engine on the CPU, what requests share that are prefilled together, and what a
step of decoding takes. Owns the requests and the table; `arm_fleet` owns the server.

    python -m benchmarks.live.hit_worth            SGLang and vLLM, five minutes; engines by tests/live/install.py

A rule can save no more than an engine saves: where a hit takes a third of a miss, the best placement is at most three
times the worst. Each figure is the median of so many tries, in seconds, until the last of the requests has its answer
of one token; all have a prefix of their own kind, then 20 or 200 tokens that nothing caches.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from benchmarks.common import facts
from benchmarks.common.paths import ROOT
from benchmarks.common.tables import markdown
from benchmarks.live import arm_fleet, engine_fleet
from benchmarks.live.run_arms import model_of

ENGINES = ("sglang", "vllm")
PREFIX_TOKENS = (512, 1024, 2048)
REST_TOKENS, LONG_REST_TOKENS = 20, 200
TOGETHER = (1, 2, 4, 8)
COLD_TOGETHER = 4  # that share a prefix which nothing caches yet
DECODE_STEPS = 20
VOCABULARY = (3, 500)  # token ids that every model here has
HEADERS = (
    *("engine", "prefix, tokens", "miss", f"hit and {REST_TOKENS}", "over a miss"),
    *(f"{count} such together" for count in TOGETHER[1:]),
    f"hit and {LONG_REST_TOKENS}",
    *("a step of 1", "of 8"),
    f"{COLD_TOGETHER} cold ones alike",
)


class Asker:
    """Asks one server for completions of token ids, all at once. `tries`: times that each figure is taken."""

    def __init__(self, session: aiohttp.ClientSession, url: str, tries: int) -> None:
        self.session, self.url, self.tries = session, url, tries
        self.chance = random.Random(0)

    def some(self, count: int) -> list[int]:
        """So many token ids that no prompt began with before."""
        return [self.chance.randrange(*VOCABULARY) for _ in range(count)]

    async def asked(self, prompts: Sequence[Sequence[int]], output_tokens: int = 1) -> float:
        """Seconds until all prompts have their answers."""
        body = {"model": "model", "max_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True}
        began = time.perf_counter()
        async with self.session.post(
            f"{self.url}/v1/completions", json={**body, "prompt": prompts}, raise_for_status=True
        ) as response:
            await response.read()
        return time.perf_counter() - began

    async def seconds(
        self, prefix: Sequence[int], rest: int, together: int = 1, output_tokens: int = 1, *, cold_tokens: int = 0
    ) -> float:
        """The median time of so many prompts that begin with a prefix, or with a new one of `cold_tokens` each time,
        and go on with a rest of their own."""
        took = []
        for _ in range(self.tries):
            prefix = self.some(cold_tokens) if cold_tokens else prefix
            took.append(await self.asked([[*prefix, *self.some(rest)] for _ in range(together)], output_tokens))
        return statistics.median(took)


async def row(engine: str, ask: Asker, tokens: int) -> list[str]:
    """The figures of one length of prefix."""
    miss = await ask.seconds([], tokens + REST_TOKENS)
    prefix = ask.some(tokens)
    await ask.asked([prefix])
    hits = [await ask.seconds(prefix, REST_TOKENS, together) for together in TOGETHER]
    long_hit = await ask.seconds(prefix, LONG_REST_TOKENS)
    steps = []
    for together, hit in ((TOGETHER[0], hits[0]), (TOGETHER[-1], hits[-1])):
        whole = await ask.seconds(prefix, REST_TOKENS, together, 1 + DECODE_STEPS)
        steps.append((whole - hit) / DECODE_STEPS)
    alike = await ask.seconds([], REST_TOKENS, COLD_TOGETHER, cold_tokens=tokens)
    took = [f"{seconds:.3f}" for seconds in (*hits[1:], long_hit, *steps, alike)]
    return [engine, str(tokens), f"{miss:.3f}", f"{hits[0]:.3f}", f"{hits[0] / miss:.2f}", *took]


async def rows_of(engine: str, args: argparse.Namespace) -> list[list[str]]:
    """Start one server and measure it."""
    python = args.engines / engine / "bin" / "python"
    shape = engine_fleet.Shape(model_of(args), "cpu", 1, 22_000, TOGETHER[-1], args.base_port)
    with contextlib.ExitStack() as stack:
        (url,) = (await arm_fleet.EngineFleet(engine, python, shape, stack).group("servers")).addresses
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120.0)) as session:
            ask = Asker(session, url, args.tries)
            await ask.seconds([], 100)  # what a server does once
            return [await row(engine, ask, tokens) for tokens in PREFIX_TOKENS]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--model", default="llama-20m")
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--base-port", type=int, default=24_600)
    parser.add_argument("--engines", type=Path, default=ROOT / ".engines", help="environments of tests/live/install.py")
    args = parser.parse_args(argv)
    found = [asyncio.run(rows_of(engine, args)) for engine in args.engine]
    print(markdown(list(HEADERS), list(itertools.chain(*found))))
    made = facts.environment(0)
    print(f"\n`{made['command']}`, commit {made['commit']}, {args.model}, seconds, {made['machine']}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
