"""How hard the demo drives the workers. Owns the sizes of the experiment; measures and sends nothing.

The KV capacity of a worker is a fixed fraction of the working set: enough for its half of the documents, too little for
all of them. The arrival rate follows from the speed measured on this machine: round robin, whose hits can be predicted
because its choices are known, is brought near saturation, and not beyond, wherever the demo runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from .corpus import Document, Prompt

KV_FRACTION = 0.62
ROUND_ROBIN_UTILISATION = 0.85
REQUESTS_PER_DOCUMENT_MIN, REQUESTS_MAX = 3, 600


@dataclass(frozen=True, slots=True)
class Speed:
    """What calibration found, per worker: prompt tokens computed per second, and seconds a decoded token costs in a
    batch, as under load."""

    prefill_tokens_per_second: float
    decode_token_seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """One experiment: how many requests, how fast, and how busy each policy should keep the workers."""

    requests: int
    rate_per_second: float
    round_robin_missed_tokens: float
    round_robin_utilisation: float
    e2_utilisation: float


def kv_capacity(documents: Sequence[Document]) -> int:
    """KV tokens of one worker: `KV_FRACTION` of the working set, which fits two workers partitioned, not duplicated."""
    return int(KV_FRACTION * sum(document.tokens for document in documents))


def make_plan(
    documents: Sequence[Document],
    prompts: Sequence[Prompt],
    speed: Speed,
    *,
    workers: int,
    output_tokens: int,
    seconds: float,
    requests: int | None = None,
    rate_per_second: float | None = None,
) -> Plan:
    """The experiment that lasts about `seconds` per policy. `prompts` are more than can be needed, in their order.

    `requests` and `rate_per_second` override what would be chosen.
    """
    missed = missed_tokens(documents, prompts, workers, kv_capacity(documents))
    decode = output_tokens * speed.decode_token_seconds
    busy = missed / speed.prefill_tokens_per_second + decode
    rate = rate_per_second or ROUND_ROBIN_UTILISATION * workers / busy
    fitting = round(min(max(rate * seconds, REQUESTS_PER_DOCUMENT_MIN * len(documents)), len(prompts)))
    question = sum(suffix_tokens(documents, prompt) for prompt in prompts) / len(prompts)
    cold = sum(document.tokens for document in documents) / len(prompts)
    e2_busy = (question + cold) / speed.prefill_tokens_per_second + decode
    return Plan(
        requests=requests or fitting,
        rate_per_second=rate,
        round_robin_missed_tokens=missed,
        round_robin_utilisation=rate * busy / workers,
        e2_utilisation=rate * e2_busy / workers,
    )


def missed_tokens(documents: Sequence[Document], prompts: Sequence[Prompt], workers: int, capacity: int) -> float:
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


def suffix_tokens(documents: Sequence[Document], prompt: Prompt) -> int:
    """Tokens of a prompt after its document."""
    return max(1, len(prompt.token_ids) - documents[prompt.document].tokens)
