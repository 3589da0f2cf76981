"""When to follow the scheduler's advice on how many workers there should be. Owns bounds, patience and pauses; the
advice is `preble/scheduling/autoscaling.py`'s, and workers are started and drained by whoever asks, such as `RayFleet`.

Up when the advice has been higher for `up_seconds` without a break, to the least that it was in that time; down when it
has been lower for `down_seconds`, one worker at a time, for each takes a cache along. After each change nothing is
changed for `pause_seconds`. To go down, fewer workers must do at a lower utilisation than the target, so that the
target is not missed the moment they are fewer.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from ..errors import InvalidConfig
from ..scheduling.autoscaling import TARGET_UTILISATION, WORKERS_MAX, FleetLoad, desired_workers
from ..types import check_fields

ADVICES_MAX = 4096  # kept; times that would need more are refused


@dataclass(frozen=True, slots=True)
class AutoscaleConfig:
    """Bounds and times of following the advice. Raises `InvalidConfig` naming the field.

    `down_ratio`: workers go only if the others would then be below this share of `target_utilisation`. `look_seconds`
    between two looks; `min_observed_seconds`: a fleet observed for less is left alone.
    """

    min_workers: int = 1
    max_workers: int = 1
    target_utilisation: float = TARGET_UTILISATION
    target_ttft_seconds: float = math.inf
    up_seconds: float = 15.0
    down_seconds: float = 300.0
    pause_seconds: float = 60.0
    down_ratio: float = 0.8
    look_seconds: float = 5.0
    min_observed_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers <= WORKERS_MAX:
            raise InvalidConfig(
                "AutoscaleConfig.min_workers must be at least 1 and at most max_workers, "
                f"got {self.min_workers!r} and {self.max_workers!r}"
            )
        check_fields(self, "be in (0, 1]", "target_utilisation", "down_ratio")
        check_fields(self, "be positive", "target_ttft_seconds", "look_seconds")
        times = ("up_seconds", "down_seconds", "pause_seconds", "min_observed_seconds")
        check_fields(self, "be finite and not negative", *times)
        looks = max(self.up_seconds, self.down_seconds) / self.look_seconds
        if looks > ADVICES_MAX // 2:
            raise InvalidConfig(f"AutoscaleConfig.look_seconds must be longer: {looks:.0f} looks would have to be kept")


class Autoscaler:
    """Decides from one load after another. Not thread-safe; time is an argument."""

    def __init__(self, config: AutoscaleConfig) -> None:
        self.config = config
        self._advices: deque[tuple[float, int, int]] = deque(maxlen=ADVICES_MAX)  # (when, to go up, to go down)
        self._free_at = -math.inf

    def decide(self, load: FleetLoad, workers: int, now: float) -> int:
        """How many workers there should be, given how many there are; `workers` itself for no change."""
        config = self.config
        if load.observed_seconds < config.min_observed_seconds:
            return self._within(workers)
        up = desired_workers(
            load, target_utilisation=config.target_utilisation, target_ttft_seconds=config.target_ttft_seconds
        )
        down = desired_workers(
            load,
            target_utilisation=config.target_utilisation * config.down_ratio,
            target_ttft_seconds=config.target_ttft_seconds,
        )
        self._advices.append((now, up, down))
        while len(self._advices) > 1 and self._advices[1][0] <= now - max(config.up_seconds, config.down_seconds):
            self._advices.popleft()  # the oldest that is kept is from before the longer time, or from its start
        wanted = self._within(self._wanted(workers, now))
        if wanted != workers:
            if now < self._free_at:
                return self._within(workers)
            self._free_at = now + config.pause_seconds
            self._advices.clear()  # what was advised for another number of workers is no reason to change this one
        return wanted

    def _wanted(self, workers: int, now: float) -> int:
        lately = self._since(now - self.config.up_seconds)
        if lately and min(up for _, up, _ in lately) > workers:
            return min(up for _, up, _ in lately)
        long_since = self._since(now - self.config.down_seconds)
        if long_since and max(down for _, _, down in long_since) < workers:
            return workers - 1
        return workers

    def _since(self, then: float) -> list[tuple[float, int, int]]:
        """What was advised since then; nothing where advice does not go back so far."""
        if self._advices[0][0] > then:
            return []
        return [advice for advice in self._advices if advice[0] >= then]

    def _within(self, workers: int) -> int:
        return min(max(workers, self.config.min_workers), self.config.max_workers)
