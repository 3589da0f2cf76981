"""Engines as the profiler sees them: something to step, which says how long the step took. Owns the clocks.

The simulated engine runs on a clock that is moved by hand, so a profile of it takes no time. The torch engine is timed
on the wall, and on CUDA no step counts as done before the device is; on one CPU thread it is timed by that thread's own
CPU time, which is the same on an idle machine and does not count what other processes take on a busy one.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..._cost import CostModel
from ...clock import Clock, ManualClock
from ...engines.base import Engine, OutputChunk
from ...engines.simulated import SimulatedEngine
from ...errors import InvalidInput
from ...local import LocalConfig
from .points import Limits

if TYPE_CHECKING:
    import torch

# Prompts that stay cached between runs take room beside the largest batch, so that nothing is evicted while measuring.
SPARE_PROMPTS = 8


class Target(Protocol):
    """An engine to measure. `vocab_size` bounds the tokens of prompts; `model`, `device` and `clock_name` name it."""

    engine: Engine
    model: str
    device: str
    clock_name: str
    vocab_size: int

    def step(self) -> tuple[float, list[OutputChunk]]:
        """Run one iteration: the seconds it took, and its chunks."""


def local_config(limits: Limits, decode_steps: int) -> LocalConfig:
    """Batches as the measurements need them: a prompt, or a whole batch of prompts, is one iteration."""
    batch_tokens = limits.batch_max * (limits.decode_context_max + decode_steps + 2)
    most = max(2 * limits.tokens_max, batch_tokens)
    return LocalConfig(
        kv_capacity_tokens=most + SPARE_PROMPTS * limits.tokens_max,
        token_budget=most,
        max_running=max(64, limits.batch_max),
        order="fcfs",
        min_shared_tokens=0,
    )


class SimulatedTarget:
    """A simulated engine that runs by `cost_model`."""

    def __init__(self, cost_model: CostModel, config: LocalConfig) -> None:
        self._clock = ManualClock()
        engine = SimulatedEngine(cost_model, config, clock=self._clock)
        self.engine: Engine = engine
        self._simulated = engine
        self.model, self.device, self.clock_name = cost_model.name, "simulated", "simulated"
        self.vocab_size = 32_000

    def step(self) -> tuple[float, list[OutputChunk]]:
        """Run one iteration; its seconds pass at once."""
        seconds = self._simulated.begin_step()
        self._clock.advance(seconds)
        return seconds, self._simulated.end_step()


class TorchTarget:
    """A torch engine over the model in `model_dir`. Raises what `TorchEngine` raises."""

    def __init__(
        self,
        model_dir: Path,
        config: LocalConfig,
        *,
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
    ) -> None:
        from ...engines.torch import TorchEngine
        from ...engines.torch.loading import check_directory, choose_device

        self.engine: Engine = TorchEngine(model_dir, local=config, device=device, dtype=dtype, threads=threads)
        self.torch_device: torch.device = choose_device(device)
        self.model = self.engine.info.model
        self.device = device_name(self.torch_device)
        self.clock = clock_of(self.torch_device)
        self.clock_name = "thread CPU time" if self.clock is time.thread_time else "wall"
        self.vocab_size = int(check_directory(model_dir)["vocab_size"])

    def step(self) -> tuple[float, list[OutputChunk]]:
        """Run one iteration and wait for the device."""
        start = self.clock()
        chunks = self.engine.step()
        synchronise(self.torch_device)
        return self.clock() - start, chunks


def clock_of(device: torch.device) -> Clock:
    """What times work on a device, called from the thread that does it."""
    import torch

    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all it was given; a CPU has when the call returned."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """ "cpu", or what the GPU calls itself."""
    import torch

    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type


def check_fits(target: Target, limits: Limits) -> None:
    """Raise `InvalidInput` where the engine takes no prompts as long as will be measured."""
    longest = target.engine.info.max_model_tokens
    if limits.tokens_max + 2 > longest:
        raise InvalidInput(f"--max-tokens {limits.tokens_max}: this engine takes {longest - 2} tokens at most")
