"""What a running server's /metrics count since its start, so that two readings say what it served between them. Owns
which metrics those are, what is not accepted of them, and the difference of two readings.

| total                        | SGLang, with --enable-metrics       | vLLM                               |
|------------------------------|-------------------------------------|------------------------------------|
| requests that ended          | num_requests_total                  | e2e_request_latency_seconds_count  |
| their prompt tokens          | prompt_tokens_histogram             | request_prompt_tokens              |
| of these computed            | uncached_prompt_tokens_histogram    | request_prefill_kv_computed_tokens |
| their output tokens          | generation_tokens_histogram         | request_generation_tokens          |
| times to first token         | time_to_first_token_seconds         | the same                           |
| latencies                    | e2e_request_latency_seconds         | the same                           |
| waiting before a prefill     | queue_time_seconds                  | request_queue_time_seconds         |
| prefills, without the queue  | per_stage_req_latency_seconds       | request_prefill_time_seconds       |
| time between output tokens   | inter_token_latency_seconds         | the same                           |

Each is a histogram's sum and count, over all ranks; of SGLang's stages it is `prefill_forward`. A server counts a
request when it ends. Seen in SGLang 0.5.23 and vLLM 0.32.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from ...errors import ProtocolError
from .metrics_text import samples

SAMPLES_MAX = 32_768  # 256 ranks, some labels and buckets each
BUCKETS_MAX = 128  # of a histogram
WITH_BUCKETS = ("ttft", "token")
Buckets = dict[float, float]
_STAGES = ("", "prefill_forward")  # "": the metric has none

# Of each field of `ServedTotals`: the metric without "sglang:" or "vllm:".
_NAMES = {
    "sglang": {
        "prompt": "prompt_tokens_histogram",
        "computed": "uncached_prompt_tokens_histogram",
        "output": "generation_tokens_histogram",
        "ttft": "time_to_first_token_seconds",
        "latency": "e2e_request_latency_seconds",
        "queue": "queue_time_seconds",
        "prefill": "per_stage_req_latency_seconds",
        "token": "inter_token_latency_seconds",
    },
    "vllm": {
        "prompt": "request_prompt_tokens",
        "computed": "request_prefill_kv_computed_tokens",
        "output": "request_generation_tokens",
        "ttft": "time_to_first_token_seconds",
        "latency": "e2e_request_latency_seconds",
        "queue": "request_queue_time_seconds",
        "prefill": "request_prefill_time_seconds",
        "token": "inter_token_latency_seconds",
    },
}


@dataclass(frozen=True, slots=True)
class Total:
    """A histogram's sum and count."""

    sum: float = 0.0
    count: float = 0.0

    @property
    def mean(self) -> float | None:
        """None of nothing."""
        return self.sum / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class ServedTotals:
    """What a server has served since its start, or between two readings: seconds and tokens. `buckets`, of the totals
    in `WITH_BUCKETS`: how many took no longer than a bound, by the bound."""

    prompt: Total = Total()
    computed: Total = Total()
    output: Total = Total()
    ttft: Total = Total()
    latency: Total = Total()
    queue: Total = Total()
    prefill: Total = Total()
    token: Total = Total()
    buckets: dict[str, Buckets] = field(default_factory=dict)

    @property
    def requests(self) -> float:
        """How many ended."""
        return self.latency.count or self.prompt.count

    def since(self, earlier: ServedTotals) -> ServedTotals | None:
        """What was served from an earlier reading to this one; None where a total fell: the server was restarted."""
        found: dict[str, Total] = {}
        for name in TOTALS:
            now, then = getattr(self, name), getattr(earlier, name)
            if now.count < then.count or now.sum < then.sum - 1e-6 * abs(then.sum):
                return None
            found[name] = Total(max(0.0, now.sum - then.sum), now.count - then.count)
        buckets = {
            name: {le: count - earlier.buckets.get(name, {}).get(le, 0.0) for le, count in own.items()}
            for name, own in self.buckets.items()
        }
        fell = any(count < 0.0 for own in buckets.values() for count in own.values())
        return None if fell else ServedTotals(**found, buckets=buckets)

    def plus(self, other: ServedTotals) -> ServedTotals:
        """Both together."""
        found = {}
        for name in TOTALS:
            one, two = getattr(self, name), getattr(other, name)
            found[name] = Total(one.sum + two.sum, one.count + two.count)
        buckets = {name: _merged(self.buckets.get(name, {}), other.buckets.get(name, {})) for name in WITH_BUCKETS}
        return ServedTotals(**found, buckets=buckets)

    def quantile(self, name: str, share: float) -> float | None:
        """The time within which such a share was done, straight between the bounds of its bucket; None where there was
        none, or it lies beyond the last bound."""
        counts = self.buckets.get(name, {})
        total = max(counts.values(), default=0.0)
        below_bound, below = 0.0, 0.0
        for bound in sorted(counts):
            if total and counts[bound] >= share * total:
                if math.isinf(bound):
                    return None
                inside = counts[bound] - below
                return below_bound + (bound - below_bound) * ((share * total - below) / inside if inside else 1.0)
            below_bound, below = bound, counts[bound]
        return None


TOTALS = tuple(field.name for field in fields(ServedTotals) if field.name != "buckets")


def _merged(one: Buckets, other: Buckets) -> Buckets:
    """Both; a bound that only one has counts the other's up to the bound before."""
    return {le: _below(one, le) + _below(other, le) for le in sorted({*one, *other})}


def _below(buckets: Buckets, bound: float) -> float:
    """How many are known to lie under a bound."""
    return max((count for le, count in buckets.items() if le <= bound), default=0.0)


class ReadTotals(NamedTuple):
    """What was read, None where the server has no such metrics. `problems`: metrics that cannot be right; their total
    is 0 of 0."""

    totals: ServedTotals | None
    problems: tuple[str, ...] = ()


def served_totals(engine: str, text: str) -> ReadTotals:
    """The totals in the text of /metrics of an "sglang" or "vllm" server. Raises nothing: what cannot be right is
    named, and nothing is taken from it. O(length of the text)."""
    parts = {
        f"{engine}:{name}_{part}": (key, part) for key, name in _NAMES[engine].items() for part in ("sum", "count")
    }
    parts |= {f"{engine}:{_NAMES[engine][key]}_bucket": (key, "bucket") for key in WITH_BUCKETS}
    sums = dict.fromkeys(parts, 0.0)
    wrong: dict[str, str] = {}
    buckets: dict[str, Buckets] = {key: {} for key in WITH_BUCKETS}
    seen = False
    try:
        for name, labels, value in samples(text, parts, SAMPLES_MAX):
            key, part = parts[name]
            number = _number(value)
            if number is None:
                wrong[key] = f"/metrics: {name} is {value[:40]!r}, which cannot be"
            elif part == "bucket":
                _add_bucket(buckets[key], labels.get("le", ""), number)
            elif labels.get("stage", "") in _STAGES:
                sums[name] += number
            seen = True
    except ProtocolError as error:
        return ReadTotals(None, (str(error),))
    if not seen:
        return ReadTotals(None)
    found: dict[str, Total] = {}
    for key, name in _NAMES[engine].items():
        total = Total(sums[f"{engine}:{name}_sum"], sums[f"{engine}:{name}_count"])
        found[key] = Total() if key in wrong else total
    if found["computed"].sum > found["prompt"].sum > 0.0:
        wrong["computed"] = "/metrics: more prompt tokens computed than there were"
        found["computed"] = Total()
    right = {key: own for key, own in buckets.items() if key not in wrong}
    return ReadTotals(ServedTotals(**found, buckets=right), tuple(wrong.values()))


def _add_bucket(buckets: Buckets, bound: str, count: float) -> None:
    try:
        le = float(bound)
    except ValueError:
        return
    if le > 0.0 and (le in buckets or len(buckets) < BUCKETS_MAX):
        buckets[le] = buckets.get(le, 0.0) + count


def _number(value: str) -> float | None:
    """A finite number from 0 on; None for anything else."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if 0.0 <= number < math.inf else None
