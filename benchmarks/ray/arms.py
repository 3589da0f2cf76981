"""The routers that `bench_ray.py` compares, each with a watch on it. Owns the watch; the routers are Ray's and
Preble's, unchanged."""

from __future__ import annotations

import time
from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

from benchmarks.ray import times as ray_times  # the module, not what is in it: that would be sent along, a copy
from preble.integrations.ray_serve import PrebleRequestRouter


class RecordingScheduler:
    """Notes how long a choice takes, waiting included, and what follows once the request is placed."""

    async def choose_replicas(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return await super().choose_replicas(*args, **kwargs)  # type: ignore[misc]
        finally:
            ray_times.TIMES.choice_ms.append(1e3 * (time.perf_counter() - started))

    def on_request_routed(self, *args: Any, **kwargs: Any) -> None:
        started = time.perf_counter()
        super().on_request_routed(*args, **kwargs)  # type: ignore[misc]
        ray_times.TIMES.after_ms.append(1e3 * (time.perf_counter() - started))


class PowerOfTwo(RecordingScheduler, PowerOfTwoChoicesRequestRouter):
    """Ray Serve's default."""


class PrefixAffinity(RecordingScheduler, PrefixCacheAffinityRouter):
    """Ray Serve LLM's. The public name, `ray.serve.llm.request_router.PrefixCacheAffinityRouter`, is an empty subclass
    whose module loads pyarrow and vLLM or SGLang; this one loads with ray[serve] alone."""


class Preble(RecordingScheduler, PrebleRequestRouter):
    """Preble's, which reports what its choices rest on."""

    def initialize_state(self, **options: Any) -> None:
        super().initialize_state(**options)
        ray_times.TIMES.stats = self.stats
