"""How hard the demo drives the workers. Owns the sizes of the experiment; measures and sends nothing.

The KV capacity of a worker is a quarter more than its share of the documents: partitioned they fit, duplicated they do
not. The arrival rate follows from the speed measured on this machine: round robin, whose hits can be predicted because
its choices are known, is brought near saturation, and not beyond, wherever the demo runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from .corpus import DemoPrompt, Document

KV_SHARES = 1.25
ROUND_ROBIN_UTILISATION = 0.8
REQUESTS_PER_DOCUMENT_MIN, REQUESTS_MAX = 3, 600


@dataclass(frozen=True, slots=True)
class Speed:
    """What calibration found, per worker and under load: prompt tokens computed per second, and the seconds that a
    request with nothing left to compute takes of the worker's time, its decoding shared with others."""

    prefill_tokens_per_second: float
    cached_request_seconds: float


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """One experiment: how many requests, how fast, and how busy each policy should keep the workers."""

    requests: int
    rate_per_second: float
    round_robin_missed_tokens: float
    round_robin_utilisation: float
    e2_utilisation: float


def kv_capacity(documents: Sequence[Document], workers: int) -> int:
    """KV tokens of one worker: `KV_SHARES` of what each has to hold when the documents are partitioned."""
    return int(KV_SHARES * sum(document.tokens for document in documents) / workers)


def make_plan(
    documents: Sequence[Document],
    prompts: Sequence[DemoPrompt],
    speed: Speed,
    *,
    workers: int,
    seconds: float,
    requests: int | None = None,
    rate_per_second: float | None = None,
) -> DemoPlan:
    """The experiment that lasts about `seconds` per policy. `prompts` are more than can be needed, in their order.

    `requests` and `rate_per_second` override what would be chosen.
    """
    capacity, count = kv_capacity(documents, workers), requests or len(prompts)
    for _ in range(3):  # fewer requests miss more, each document being new once; so the rate follows the number
        missed = missed_tokens(documents, prompts[:count], workers, capacity)
        busy = missed / speed.prefill_tokens_per_second + speed.cached_request_seconds
        rate = rate_per_second or ROUND_ROBIN_UTILISATION * workers / busy
        fitting = max(rate * seconds, REQUESTS_PER_DOCUMENT_MIN * len(documents))
        count = requests or round(min(fitting, len(prompts)))
    least = least_missed_tokens(documents, prompts[:count])
    e2_busy = least / speed.prefill_tokens_per_second + speed.cached_request_seconds
    return DemoPlan(
        requests=count,
        rate_per_second=rate,
        round_robin_missed_tokens=missed,
        round_robin_utilisation=rate * busy / workers,
        e2_utilisation=rate * e2_busy / workers,
    )


def least_missed_tokens(documents: Sequence[Document], prompts: Sequence[DemoPrompt]) -> float:
    """Mean prompt tokens to compute if every document is computed once, by one worker, and never forgotten."""
    asked = {prompt.document for prompt in prompts}
    once = sum(documents[index].tokens for index in asked)
    return (once + sum(suffix_tokens(documents, prompt) for prompt in prompts)) / len(prompts)


def missed_tokens(documents: Sequence[Document], prompts: Sequence[DemoPrompt], workers: int, capacity: int) -> float:
    """Mean prompt tokens a worker must compute under round robin, each worker caching whole documents in LRU order."""
    caches: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(workers)]
    missed = 0
    for prompt in prompts:
        cache = caches[prompt.number % workers]
        missed += suffix_tokens(documents, prompt)
        if prompt.document not in cache:
            missed += documents[prompt.document].tokens
            cache[prompt.document] = documents[prompt.document].tokens
        cache.move_to_end(prompt.document)
        while sum(cache.values()) > capacity and len(cache) > 1:
            cache.popitem(last=False)
    return missed / len(prompts)


def suffix_tokens(documents: Sequence[Document], prompt: DemoPrompt) -> int:
    """Tokens of a prompt after its document."""
    return max(1, len(prompt.token_ids) - documents[prompt.document].tokens)
