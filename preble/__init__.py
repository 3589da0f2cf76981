"""Preble schedules LLM requests over inference engines: prompts reuse cached prefixes, load is shared.

Owns the public names and nothing else. Each is imported when first asked for, so `import preble` costs next to
nothing and loads no third-party package. Errors are in `preble.errors`, all derived from `preble.errors.PrebleError`.

    import preble
    scheduler = preble.GlobalScheduler(["a", "b"])
    decision = scheduler.schedule(token_ids)      # -> decision.worker, decision.matched_tokens
    scheduler.finish(decision.request_id, output_tokens=64)
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # what type checkers know as true; importing typing would cost more than all the rest
if TYPE_CHECKING:
    from . import errors as errors
    from ._core.token_types import TokenIds as TokenIds
    from ._cost import CostModel as CostModel
    from ._placement.decision import Decision as Decision
    from ._placement.decision import Match as Match
    from .batching.stats import LocalStats as LocalStats
    from .clock import ManualClock as ManualClock
    from .config import SchedulerConfig as SchedulerConfig
    from .local import LocalConfig as LocalConfig
    from .local import LocalRequest as LocalRequest
    from .local import LocalScheduler as LocalScheduler
    from .policies.base import Policy as Policy
    from .recording import Recording as Recording
    from .router import Router as Router
    from .router import RouterConfig as RouterConfig
    from .router.request import StreamChunk as StreamChunk
    from .router.stats import RouterStats as RouterStats
    from .scheduler import GlobalScheduler as GlobalScheduler
    from .scheduling.leases import Lease as Lease
    from .scheduling.stats import SchedulerStats as SchedulerStats
    from .types import AllBlocksCleared as AllBlocksCleared
    from .types import BlockRemoved as BlockRemoved
    from .types import BlockStored as BlockStored
    from .types import Explanation as Explanation
    from .types import PrefixEvicted as PrefixEvicted
    from .types import SamplingParams as SamplingParams
    from .types import SessionHint as SessionHint
    from .types import WorkerCost as WorkerCost
    from .types import WorkerSpec as WorkerSpec

__version__ = "0.1.0"

# Public name -> the module that owns it.
_HOMES = {
    "AllBlocksCleared": "types",
    "BlockRemoved": "types",
    "BlockStored": "types",
    "CostModel": "_cost",
    "Decision": "_placement.decision",
    "Explanation": "types",
    "GlobalScheduler": "scheduler",
    "Lease": "scheduling.leases",
    "LocalConfig": "local",
    "LocalRequest": "local",
    "LocalScheduler": "local",
    "LocalStats": "batching.stats",
    "ManualClock": "clock",
    "Match": "_placement.decision",
    "Policy": "policies.base",
    "PrefixEvicted": "types",
    "Recording": "recording",
    "Router": "router",
    "RouterConfig": "router",
    "RouterStats": "router.stats",
    "SamplingParams": "types",
    "SchedulerConfig": "config",
    "SchedulerStats": "scheduling.stats",
    "SessionHint": "types",
    "StreamChunk": "router.request",
    "TokenIds": "_core.token_types",
    "WorkerCost": "types",
    "WorkerSpec": "types",
}

__all__ = list(_HOMES)


if not TYPE_CHECKING:  # a type checker must not take every name for one that exists

    def __getattr__(name: str) -> object:
        if name == "errors":
            return import_module(".errors", __name__)
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'preble' has no attribute {name!r}")
        value = getattr(import_module(f".{home}", __name__), name)
        globals()[name] = value  # the next access is a plain attribute
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, "errors"])
