"""What a running server's own /metrics say of its speed, from requests that it served before anybody here sent it one.
Owns which metrics are read and what is not accepted of them.

| mean of                       | SGLang, with --enable-metrics    | vLLM                               |
|-------------------------------|----------------------------------|------------------------------------|
| a prefill, without the queue  | per_stage_req_latency_seconds    | request_prefill_time_seconds       |
| its tokens that missed        | uncached_prompt_tokens_histogram | request_prefill_kv_computed_tokens |
| its prompt's tokens           | prompt_tokens_histogram          | request_prompt_tokens              |
| time between output tokens    | inter_token_latency_seconds      | inter_token_latency_seconds        |

Each is a histogram's sum over its count, over all ranks; of SGLang's stages it is `prefill_forward`. Seen in SGLang
0.5.23 and vLLM 0.32.0; a server without one of them says nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...errors import ProtocolError
from ...types import ServedWork
from .metrics_text import samples

SERVED_MIN = 16  # requests, before their mean is one: the first ones pay for what is computed once only
SAMPLES_MAX = 16_384  # 256 ranks, some labels and stages each
SECONDS_MAX, TOKENS_MAX = 3600.0, 2.0**31

_PREFILL, _MISSED, _PROMPT, _TOKEN = range(4)
_NAMES = {
    "sglang": (
        "sglang:per_stage_req_latency_seconds",
        "sglang:uncached_prompt_tokens_histogram",
        "sglang:prompt_tokens_histogram",
        "sglang:inter_token_latency_seconds",
    ),
    "vllm": (
        "vllm:request_prefill_time_seconds",
        "vllm:request_prefill_kv_computed_tokens",
        "vllm:request_prompt_tokens",
        "vllm:inter_token_latency_seconds",
    ),
}
_STAGES = ("", "prefill_forward")  # "": the metric has none


class ReadMetrics(NamedTuple):
    """What was read. `work`: None where too little was served, or the server does not report it. `problem`: a metric
    that cannot be right, "" if there is none."""

    work: ServedWork | None
    problem: str = ""


def served_work(engine: str, text: str) -> ReadMetrics:
    """What the text of /metrics says of the requests that an "sglang" or "vllm" server has served. Raises nothing: what
    cannot be right is named, and nothing is taken from it. O(length of the text)."""
    names = _NAMES[engine]
    wanted = {f"{name}_{part}" for name in names for part in ("sum", "count")}
    sums = dict.fromkeys(wanted, 0.0)
    try:
        for name, labels, value in samples(text, wanted, SAMPLES_MAX):
            number = _number(value)
            if number is None:
                return ReadMetrics(None, f"/metrics: {name} is {value[:40]!r}, which cannot be")
            if labels.get("stage", "") in _STAGES:
                sums[name] += number
    except ProtocolError as error:
        return ReadMetrics(None, str(error))
    counts = [sums[f"{name}_count"] for name in names]
    if min(counts[:_TOKEN]) < SERVED_MIN:
        return ReadMetrics(None)
    means = [sums[f"{name}_sum"] / count if count else 0.0 for name, count in zip(names, counts, strict=True)]
    for place, (least, most) in enumerate(((1e-6, SECONDS_MAX), (1.0, TOKENS_MAX), (1.0, TOKENS_MAX))):
        if not least <= means[place] <= most:
            return ReadMetrics(None, f"/metrics: the mean of {names[place]} is {means[place]:g}, which cannot be")
    token = means[_TOKEN] if counts[_TOKEN] >= SERVED_MIN and 1e-6 <= means[_TOKEN] <= SECONDS_MAX else None
    missed = min(means[_MISSED], means[_PROMPT])
    return ReadMetrics(ServedWork(int(counts[_PREFILL]), means[_PREFILL], missed, means[_PROMPT], token))


def _number(value: str) -> float | None:
    """A finite number from 0 on; None for anything else."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if 0.0 <= number < math.inf else None
