"""How long KV takes from worker to worker, learned from the transfers there were. Owns the estimates; asks nobody.

A transfer of so many bytes takes `latency + bytes x seconds per byte`: a straight line through what was measured lately
between two workers, by least squares. What was measured fades with time, and beside it stand what all links together
have shown and a network as machines have it today, each weighing as little as one transfer. So a first transfer is
tried on a guess that one measurement replaces, and a link that was slow is tried again when its slowness is long ago;
what such a trial may cost is bounded by its request (`messages.PullFrom`).

Measured are whole transfers, from the request's arrival until its worker's engine has the KV: a source that is busy, a
network that is full and an engine in a long step all show in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import InvalidInput

HALF_LIFE_SECONDS = 60.0
GUESSED_LATENCY_SECONDS = 0.002
GUESSED_BYTE_SECONDS = 1.0 / 1.25e9  # a network of 10 Gbit/s
GUESSED_COPY_SECONDS = 1.0 / 4e9  # a byte, in an engine that copies it
GUESSED_BYTES = float(1 << 23)  # between 0 and which the guess lies
FAST_BYTE_SECONDS = 1.0 / 12.5e9  # a network of 100 Gbit/s, as fleets have that prefill and decode apart
LINKS_MAX = 4096  # over which the longest unused is forgotten


class LinkEstimate(NamedTuple):
    """What a transfer between two workers takes. `source_byte_seconds` and `target_byte_seconds`: how long their
    engines are held up for a byte. `got_share`: of what was asked for, what came."""

    latency_seconds: float
    byte_seconds: float
    source_byte_seconds: float
    target_byte_seconds: float
    got_share: float

    def seconds(self, moved_bytes: float) -> float:
        """Of a transfer of so many bytes."""
        return self.latency_seconds + self.byte_seconds * moved_bytes


class Transfer(NamedTuple):
    """One that is over: what was wanted of it, what came, and how long it and the engines took."""

    wanted_tokens: int
    moved_tokens: int
    moved_bytes: int
    seconds: float
    source_seconds: float
    target_seconds: float


def check_transfer(transfer: Transfer) -> None:
    """Raise `InvalidInput` for what is none, or has a count or seconds below 0 or beyond all bounds."""
    if not isinstance(transfer, Transfer):
        raise InvalidInput(f"transfer must be a Transfer, got {transfer!r}")
    for name, value in transfer._asdict().items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 2.0**63:
            raise InvalidInput(f"transfer.{name} must not be negative, and finite, got {value!r}")


_SUMMED = ("weight", "x", "y", "xx", "xy", "source_seconds", "target_seconds", "shares")


@dataclass(slots=True)
class _Sums:
    """Faded sums over transfers: weight, bytes and seconds as x and y, the engines' seconds, the shares that came."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    source_seconds: float = 0.0
    target_seconds: float = 0.0
    shares: float = 0.0
    at: float = 0.0

    def add(self, transfer: Transfer, now: float) -> None:
        """Count one."""
        self.fade(now)
        size, took = float(transfer.moved_bytes), transfer.seconds
        self.weight += 1.0
        self.x += size
        self.y += took
        self.xx += size * size
        self.xy += size * took
        self.source_seconds += transfer.source_seconds
        self.target_seconds += transfer.target_seconds
        self.shares += min(transfer.moved_tokens / transfer.wanted_tokens, 1.0) if transfer.wanted_tokens else 1.0

    def fade(self, now: float) -> None:
        """Let what was counted weigh less."""
        kept = 0.5 ** (max(now - self.at, 0.0) / HALF_LIFE_SECONDS)
        self.at = max(now, self.at)
        for name in _SUMMED:
            setattr(self, name, kept * getattr(self, name))

    def plus(self, other: _Sums, most: float) -> _Sums:
        """With another's sums, which weigh at most so much."""
        share = min(1.0, most / other.weight) if other.weight > 0.0 else 0.0
        found = _Sums(at=self.at)
        for name in _SUMMED:
            setattr(found, name, getattr(self, name) + share * getattr(other, name))
        return found

    def line(self) -> tuple[float, float]:
        """Latency and seconds per byte of the line that fits best among those that fall nowhere and begin above 0."""
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x * mean_x
        slope = (self.xy / self.weight - mean_x * mean_y) / spread if spread > 0.0 else 0.0
        if slope <= 0.0:
            return mean_y, 0.0
        if mean_y < slope * mean_x:
            return 0.0, self.xy / self.xx
        return mean_y - slope * mean_x, slope


def _guess(byte_seconds: float, copy_seconds: float) -> _Sums:
    found = _Sums()
    for size in (0.0, GUESSED_BYTES):
        took = GUESSED_LATENCY_SECONDS + byte_seconds * size
        copy = copy_seconds * size
        found = found.plus(_Sums(1.0, size, took, size * size, size * took, copy, copy, 1.0), 0.5)
    return found


_GUESS = _guess(GUESSED_BYTE_SECONDS, GUESSED_COPY_SECONDS)
_FAST_GUESS = _guess(FAST_BYTE_SECONDS, 0.0)


@dataclass(slots=True)
class LinkTimes:
    """See the module; times are the caller's. Not thread-safe. Every call is O(1), but for the links at the bound."""

    _links: dict[tuple[str, str], _Sums] = field(default_factory=dict)
    _all: _Sums = field(default_factory=_Sums)

    def note(self, source: str, target: str, transfer: Transfer, now: float) -> None:
        """A transfer is over, as was hoped or not."""
        sums = self._links.pop((source, target), None) or _Sums()
        if len(self._links) >= LINKS_MAX:
            del self._links[next(iter(self._links))]
        self._links[source, target] = sums  # the one noted last stands last
        sums.add(transfer, now)
        self._all.add(transfer, now)

    def estimate(self, source: str, target: str, now: float, *, is_fast: bool = False) -> LinkEstimate:
        """What the next one takes; `is_fast`: guessed is a network of 100 Gbit/s, and engines that go on meanwhile.
        Changes no estimate."""
        self._all.fade(now)
        sums = self._links.get((source, target)) or _Sums()
        sums.fade(now)
        found = sums.plus(self._all, 1.0).plus(_FAST_GUESS if is_fast else _GUESS, 1.0)
        latency, byte_seconds = found.line()
        return LinkEstimate(
            latency,
            byte_seconds,
            found.source_seconds / max(found.x, 1.0),
            found.target_seconds / max(found.x, 1.0),
            found.shares / found.weight,
        )

    def forget(self, worker: str) -> None:
        """A worker has left. O(links)."""
        for link in [link for link in self._links if worker in link]:
            del self._links[link]

    def __len__(self) -> int:
        """Links that were measured."""
        return len(self._links)
