"""How fast the gateway tokenises, and how long it holds the event loop meanwhile: 2,000-token prompts, with 1 and 2
threads, with nothing and with all but the last message in the cache.

    python -m benchmarks.gateway.bench_tokenizing --tokenizer MODEL_DIR

The directory needs special tokens between messages (any chat model has them). "held" is the time by which a callback
that is due every millisecond came late while prompts were tokenised, the longest and the 99th percentile, less the
time for which its thread was ready and had no core; "idle" is the same with nothing to do. Eight callers ask at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.facts import environment
from preble.gateway.text.tokenizing import SWITCH_SECONDS, TextCodec

PROMPTS = 200
CALLERS = 8
TURNS = 10
MESSAGES = 8
WORDS = ("the", "of", "and", "to", "a", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with")


def conversation(codec: TextCodec, mark: str, tokens: int, rng: random.Random) -> str:
    """Messages of about `tokens` tokens together."""
    parts = []
    for _ in range(MESSAGES):
        text = mark
        while len(codec.encode_now(text, False)) < tokens // MESSAGES:
            text += " ".join(rng.choices(WORDS, k=20)) + " "
        parts.append(text)
    return "".join(parts)


def waited_seconds() -> float:
    """How long this thread has been ready to run and had no core so far: the machine's doing, not the loop's."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


async def lateness(done: asyncio.Event) -> str:
    """How late a callback came that is due every millisecond: columns of the table, in milliseconds."""
    late = []
    while not done.is_set():
        before, due = waited_seconds(), time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        late.append(1e3 * max(0.0, time.perf_counter() - due - (waited_seconds() - before)))
    late.sort()
    return f"{late[-1]:.2f} | {late[len(late) * 99 // 100]:.2f}"


async def encode_all(codec: TextCodec, waiting: Iterator[str]) -> None:
    """One caller: a prompt, the next prompt."""
    for prompt in waiting:
        await codec.encode(prompt)


async def measure(codec: TextCodec, prompts: list[str], seconds: float = 0.0) -> tuple[float, str]:
    """(prompts per second, how long the loop was held) of tokenising all prompts, or of idling."""
    done = asyncio.Event()
    watch = asyncio.ensure_future(lateness(done))
    await asyncio.sleep(0)
    started = time.perf_counter()
    if prompts:
        waiting = iter(prompts)
        await asyncio.gather(*(encode_all(codec, waiting) for _ in range(CALLERS)))
    else:
        await asyncio.sleep(seconds)
    elapsed = time.perf_counter() - started
    done.set()
    return len(prompts) / elapsed, await watch


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR")
    parser.add_argument("--mark", default="<|end|>", help="the special token between messages (%(default)s)")
    parser.add_argument("--tokens", type=int, default=2000)
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_SECONDS)  # as the gateway does
    rng = random.Random(0)
    plain = TextCodec(args.tokenizer, threads=1, cache_bytes=0)
    prompts = [conversation(plain, args.mark, args.tokens, rng) for _ in range(PROMPTS)]
    print("| threads | cache | prompts/s | held ms, longest | p99 |\n|---|---|---|---|---|")
    print(f"| - | idle | - | {asyncio.run(measure(plain, [], 1.0))[1]} |")
    for threads in (1, 2):
        for name, cache_bytes in (("none", 0), ("all but the last message", 64 << 20)):
            codec = TextCodec(args.tokenizer, threads=threads, cache_bytes=cache_bytes, queue_max=PROMPTS)
            if cache_bytes:
                for prompt in prompts:
                    codec.encode_now(prompt)
            rounds = TURNS if cache_bytes else 1  # so that each row takes about a second
            turns = [f"{p}{args.mark}and then {i}.{turn}?" for turn in range(rounds) for i, p in enumerate(prompts)]
            rate, held = asyncio.run(measure(codec, turns))
            print(f"| {threads} | {name} | {rate:.0f} | {held} |")
            codec.close()
    plain.close()
    told = environment(0)
    print(f"\n`{told['command']}`, commit {told['commit']}, {told['machine']}, Python {told['python']}")


if __name__ == "__main__":
    main()
