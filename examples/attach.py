"""Preble before servers that already run: python examples/attach.py http://host:30000 http://host:30001

Sends questions about two documents and prints where each went and how much of it was cached there. Needs the extra
`attach`; what the servers must be started with is in docs/engines.md.
"""

from __future__ import annotations

import asyncio
import random
import sys

import preble


async def main(urls: list[str]) -> None:
    """Ask about each document in turn."""
    rng = random.Random(0)
    documents = {name: [rng.randrange(100, 5000) for _ in range(600)] for name in ("manual", "novel")}
    async with preble.Router.attach(*urls) as router:
        for number in range(4):
            for name, document in documents.items():
                question = [rng.randrange(100, 5000) for _ in range(20)]
                tokens, worker, cached = 0, "", None
                async for chunk in router.generate(document + question, preble.SamplingParams(max_new_tokens=8)):
                    tokens += len(chunk.token_ids)
                    worker = chunk.worker
                    cached = chunk.cached_tokens if chunk.cached_tokens is not None else cached
                print(f"{name} {number}: {worker}, {cached} of {len(document + question)} cached, {tokens} tokens")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
