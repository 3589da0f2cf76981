"""The experiments' ingredients by name: systems (policy and engine), fleets, workloads. Owns their parameters.

Parameters are those of the published experiments' configuration (WukLab/preble at 8e7906a, read, not copied) where
there is one; where the paper compared its scheduler with chunked prefill to a baseline without, both are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.paper.published import AZURE_MIX
from preble import LocalConfig, Policy
from preble.policies.oracle import OraclePartition
from preble.workloads import Workload, arrival_times, generate, merged, poisson, read, traced

DATA = Path(__file__).resolve().parent / "data"
AZURE_MIX_CONTEXT = 4096  # of that experiment: videos are cut to it
# Whose times tools and videos have: as the paper says; and as the length of the authors' log has it.
AZURE_TIMES = {"azure-mix": ("code", "conv"), "azure-mix-conv": ("conv", "conv")}
OVER = 10**6  # waiting requests: no simulated engine refuses one for a full queue


@dataclass(frozen=True)
class Fleet:
    """Equal workers. `kv_tokens` each; `chunk` is the token budget with chunked prefill, `batch` that of whole prompts
    without it (SGLang: the larger of the context length and a sixth of the KV capacity). `step_seconds` and
    `step_seconds_per_request` are what an iteration takes beside the model."""

    title: str
    workers: int
    cost_model: str
    kv_tokens: int
    chunk: int = 512
    batch: int = 33_086
    step_seconds: float = 0.0
    step_seconds_per_request: float = 0.0


# What the host of an engine of spring 2024 added to each iteration, once and for each request in the batch. Fitted to
# one published table (Programming on two GPUs, Preble's rows: time per output token 37, 47, 102 and 167 ms at 0.5, 1, 2
# and 2.5 requests a second; with these figures 46, 55, 95 and 162) and used for all experiments with those engines.
HOST_2024 = {"step_seconds": 0.010, "step_seconds_per_request": 0.002}

FLEETS: Mapping[str, Fleet] = {
    "2xa6000": Fleet("2 x A6000, Mistral-7B", 2, "mistral-7b/a6000", 198_516, **HOST_2024),
    "4xa6000": Fleet("4 x A6000, Mistral-7B", 4, "mistral-7b/a6000", 198_516, **HOST_2024),
    "2xa6000-nohost": Fleet("2 x A6000, Mistral-7B, no host time", 2, "mistral-7b/a6000", 198_516),
    "2xh100-tp4": Fleet(
        "2 x (4 H100, TP4), Llama-3-70B", 2, "llama-3-70b/h100-tp4", 390_000, batch=65_000, **HOST_2024
    ),
    "2xa6000-vllm": Fleet("2 x A6000, 7B on vLLM", 2, "llama-2-7b/a6000-vllm", 198_516, batch=32_768, **HOST_2024),
}


@dataclass(frozen=True)
class System:
    """A policy over engines of one kind. `policy` "oracle_partition" is built from the workload's groups."""

    title: str
    policy: str
    engine: str = "ours"
    local: Mapping[str, Any] = field(default_factory=dict)


ENGINES: Mapping[str, Mapping[str, Any]] = {
    # Chunked prefill, the paper's priority groups.
    "ours": {},
    # SGLang in spring 2024: longest prefix first, prompts whole and before all decoding, ten decodes in a row.
    "sglang": {
        "chunked_prefill": False, "order": "longest_prefix", "decodes_per_look": 10, "min_shared_tokens": 0,
        "max_wait_seconds": float("inf"),
    },
    # vLLM with prefix caching in spring 2024: first come, first served, no chunks.
    "vllm": {
        "chunked_prefill": False, "order": "fcfs", "min_shared_tokens": 0, "max_wait_seconds": float("inf"),
    },
}  # fmt: skip

SYSTEMS: Mapping[str, System] = {
    "sglang_rr": System("round robin, SGLang engine", "round_robin", "sglang"),
    "rr": System("round robin, our engine", "round_robin"),
    "sglang_oracle": System("oracle partition, SGLang engine", "oracle_partition", "sglang"),
    "oracle": System("oracle partition, our engine", "oracle_partition"),
    "e2-paper": System("the paper's system (e2-paper), our engine", "e2-paper"),
    "e2": System("Preble (E2), our engine", "e2"),
    "vllm_rr": System("round robin, vLLM engine", "round_robin", "vllm"),
    "vllm_oracle": System("oracle partition, vLLM engine", "oracle_partition", "vllm"),
    "vllm_e2-paper": System("the paper's system (e2-paper), vLLM engine", "e2-paper", "vllm"),
    "vllm_e2": System("Preble (E2), vLLM engine", "e2", "vllm"),
    "e2-fcfs": System("E2, first come first served", "e2", "ours", {"order": "fcfs"}),
    "e2-lpm": System("E2, longest prefix first", "e2", "ours", {"order": "longest_prefix"}),
    "e2-nobound": System("E2, priority groups, no age bound", "e2", "ours", {"max_wait_seconds": float("inf")}),
}


def local_config(fleet: Fleet, system: System) -> LocalConfig:
    """The local scheduler of every worker."""
    settings: dict[str, Any] = {**ENGINES[system.engine], **system.local}
    budget = fleet.chunk if settings.get("chunked_prefill", True) else fleet.batch
    base = LocalConfig(
        fleet.kv_tokens, token_budget=budget, max_running=512, max_waiting=OVER, eviction="lru", short_first=False
    )
    return replace(base, **settings)


def policy_of(system: System, workload: Workload) -> str | Policy:
    """The policy as `SimConfig` takes it."""
    if system.policy == "oracle_partition":
        return OraclePartition({request.request_id: request.group for request in workload.requests})
    return system.policy


@dataclass(frozen=True)
class Source:
    """One of the paper's workloads: requests for `seconds` x rps, over `groups` for two GPUs (scaled with more)."""

    title: str
    generator: str
    groups: int
    seconds: float = 300.0
    zipf: float | None = None


SOURCES: Mapping[str, Source] = {
    "toolbench": Source("ToolBench", "toolbench", 200),
    "embodied": Source("Embodied agent", "embodied", 200, seconds=180.0),  # longer, prompts would outgrow 4,096 tokens
    "programming": Source("Programming", "programming", 100, seconds=625.0),
    # The published configurations name 240, 150 and 100 videos, and 24 and 30 documents, not which picture had which.
    "videoqa": Source("Video QA", "videoqa", 150),
    "videoqa-100": Source("Video QA, 100 videos", "videoqa", 100),
    "videoqa-240": Source("Video QA, 240 videos", "videoqa", 240),
    "loogle": Source("LooGLE", "loogle", 48, seconds=561.0),
    "loogle-24": Source("LooGLE, 24 documents", "loogle", 24, seconds=561.0),
    "loogle-30": Source("LooGLE, 30 documents", "loogle", 30, seconds=561.0),
    "toolbench-zipf": Source("ToolBench, Zipf 1.1", "toolbench", 320, zipf=1.1),
}


@lru_cache(maxsize=2)
def workload_of(name: str, fleet: str, rps: float, seed: int, share: float) -> Workload:
    """Requests of a source with Poisson arrivals; `share` of the experiment's length."""
    if name in AZURE_TIMES:
        return azure_mix(name, seed, share)
    source = SOURCES[name]
    groups = round(source.groups * FLEETS[fleet].workers / 2)
    requests = max(round(source.seconds * rps * share), 8)
    made = generate(
        source.generator, requests=requests, groups=min(groups, requests), seed=seed, zipf=source.zipf
    )  # fmt: skip
    return poisson(made, rps, seed + 1)


def cropped(workload: Workload, context_tokens: int) -> Workload:
    """The same requests, the longest part of each prompt that is too long cut to all but 256 tokens of the context."""
    cut: dict[int, Any] = {}  # by identity, so that what is cut stays shared
    made = []
    for request in workload.requests:
        over = request.prompt_tokens + request.output_tokens - context_tokens
        if over > 0:
            longest = max(range(len(request.parts)), key=lambda i: len(request.parts[i]))
            part = request.parts[longest]
            kept = cut.setdefault(id(part), part[: context_tokens - 256])
            parts = (*request.parts[:longest], kept, *request.parts[longest + 1 :])
            request = replace(request, parts=parts)
        made.append(request)
    return replace(workload, requests=made)


def azure_mix(name: str, seed: int, share: float) -> Workload:
    """Figure 8: as many tools and videos as in the authors' log, at the times of Azure's traces, 0.7 times as long."""
    made = []
    for kind, part, trace in zip(("toolbench", "videoqa"), ("tools", "videos"), AZURE_TIMES[name], strict=True):
        requests = round(AZURE_MIX[part] * share)
        groups = min(int(AZURE_MIX["groups"]), requests)
        source = cropped(generate(kind, requests=requests, groups=groups, seed=seed), AZURE_MIX_CONTEXT)
        made.append(traced(source, arrival_times(read(DATA / f"azure_{trace}.csv.gz")), AZURE_MIX["scale"]))
    return merged(name, made)
