"""What the routers of this process took, for `bench_ray.py`. A module of its own: Ray sends a router's class by value
with all of its module, so what a router notes must lie in another one for the process to read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Times:
    """Milliseconds of each choice, and of what a router does once a request is placed. One process's."""

    def __init__(self) -> None:
        self.choice_ms: list[float] = []
        self.after_ms: list[float] = []
        self.stats: Callable[[], dict[str, Any]] | None = None

    def clear(self) -> None:
        """Forget the times, not the router."""
        self.choice_ms.clear()
        self.after_ms.clear()

    def told(self) -> dict[str, Any]:
        """The times, and of Preble's router what its choices rested on."""
        stats = self.stats() if self.stats else {}
        reasons = {
            key: value
            for key, value in stats.items()
            if key.startswith("choice_") or key.split("_")[0] in ("hook", "notes", "peer", "board", "bookings")
        }
        return {"choice_ms": list(self.choice_ms), "after_ms": list(self.after_ms), "reasons": reasons}


TIMES = Times()
