"""The knobs of the global scheduler: their defaults, their ranges and what each is. Owns no behaviour."""

from __future__ import annotations

from .errors import InvalidConfig
from .lazy_typing import Any, Literal, dataclass
from .types import check_int

PEER_DELAY_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Knobs of a scheduler. Raises InvalidConfig naming the field.

    history_seconds: requests of the last so many seconds count as a worker's load: the paper's window H.
    exploit_ratio: a prompt of which one worker caches more than this share is exploited, escapes or goes where it is
    redirected; any other is explored (paper: more cached than missed). Whoever drains takes what is exploited there.
    peer_delay_seconds: how late this scheduler learns what other routers place on its workers. Twenty times as much of
    the fleet's work is reckoned as placed unseen (docs/e2.md, Several routers); without other routers it says nothing.
    host_token_seconds: what it takes to bring one token's KV from host memory into the GPU's memory, until the times of
    a worker's own requests say it (docs/learning.md).
    disk_token_seconds: the same from disk.
    join_seconds: a newcomer's history is scaled up to H from at least this much observation.
    max_bytes: bound of the prefix tree, enforced at each insert.
    live_requests_max: bound of live requests; beyond it `schedule` raises QueueFull.
    lease_seconds: a request that for so long was neither finished, cancelled nor renewed (`renew`, `reconcile`) is
    cancelled by `tick`, and counted.
    handover_prefixes_max: a draining worker gives at most so many of its hot prefixes away; 0: none.
    tick_seconds: how often the background thread of `start` ticks.
    calibrate: learn from requests' times what workers really cost (docs/learning.md). "auto": where the scheduler
    was given no cost model; it then says True or False in the scheduler's `config`.
    rebalance_ratio: when the heaviest worker's load is more than this times the lightest's, prefixes move (0: never).
    rebalance_floor_seconds: prefixes move only when the heaviest worker's load is so many seconds more, too.
    replicas_max: workers that one hot prefix is spread over on purpose (1: it is not).
    imbalance_share: "e2-paper" sends what it explores to a worker that decodes more than this share of its time: the
    paper's IMBALR (0: as the worker's cost model says; 1: never).
    warm_up_seconds: traffic of a plan waits up to so long for its prefix to be prefilled, see `warm_ups` (0: it does
    not).
    """

    history_seconds: float = 180.0
    exploit_ratio: float = 0.5
    peer_delay_seconds: float = PEER_DELAY_SECONDS
    host_token_seconds: float = 1e-5
    disk_token_seconds: float = 5e-5
    join_seconds: float = 10.0
    max_bytes: int = 1 << 30
    live_requests_max: int = 1 << 20
    lease_seconds: float = 3600.0
    handover_prefixes_max: int = 64
    tick_seconds: float = 1.0
    calibrate: bool | Literal["auto"] = "auto"
    rebalance_ratio: float = 1.5
    rebalance_floor_seconds: float = 5.0
    replicas_max: int = 8
    imbalance_share: float = 0.0
    warm_up_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("history_seconds", "join_seconds", "lease_seconds", "tick_seconds"):
            if not (_is_number(getattr(self, name)) and 1e-3 <= getattr(self, name) <= 1e9):
                raise InvalidConfig(f"SchedulerConfig.{name} must be in [0.001, 1e9], got {getattr(self, name)!r}")
        for name in ("exploit_ratio", "imbalance_share"):
            if not (_is_number(getattr(self, name)) and 0.0 <= getattr(self, name) <= 1.0):
                raise InvalidConfig(f"SchedulerConfig.{name} must be in [0, 1], got {getattr(self, name)!r}")
        numbers = ("peer_delay_seconds", "rebalance_ratio", "rebalance_floor_seconds", "warm_up_seconds")
        for name in (*numbers, "host_token_seconds", "disk_token_seconds"):
            if not (_is_number(getattr(self, name)) and 0.0 <= getattr(self, name) <= 1e9):
                raise InvalidConfig(f"SchedulerConfig.{name} must be in [0, 1e9], got {getattr(self, name)!r}")
        if 0.0 < self.rebalance_ratio < 1.0:
            raise InvalidConfig(
                f"SchedulerConfig.rebalance_ratio must be 0 or at least 1, got {self.rebalance_ratio!r}"
            )
        check_int("SchedulerConfig.replicas_max", self.replicas_max, 1, 8)
        check_int("SchedulerConfig.handover_prefixes_max", self.handover_prefixes_max, 0, 4096)
        if not (isinstance(self.calibrate, bool) or self.calibrate == "auto"):
            raise InvalidConfig(f'SchedulerConfig.calibrate must be True, False or "auto", got {self.calibrate!r}')
        check_int("SchedulerConfig.max_bytes", self.max_bytes, 1 << 20, 1 << 50)
        check_int("SchedulerConfig.live_requests_max", self.live_requests_max, 1, 1 << 26)


def _is_number(value: Any) -> bool:
    """Whether it is a float or an int, of Python or numpy."""
    return hasattr(value, "__float__") and not isinstance(value, bool)
