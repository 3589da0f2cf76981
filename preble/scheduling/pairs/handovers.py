"""Hand-overs: requests from when a pair is booked until the worker that decodes has brought a token. Owns who is on the
way to which worker, with how much KV, and who waits there. Bounded by the live requests and the workers; every call but
`check` is O(1).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Decoder:
    """A worker that decodes: tokens of KV on the way to it; whose prefill is over, and since when, in this order."""

    coming_tokens: int = 0
    waiting: dict[Hashable, float] = field(default_factory=dict)


class HandOvers:
    """See the module; times are the caller's, workers by name. Not thread-safe."""

    def __init__(self) -> None:
        self._coming: dict[Hashable, tuple[_Decoder, int]] = {}  # by a live request's key: to whom, and tokens of KV
        self._decoders: dict[str, _Decoder] = {}

    def booked(self, key: Hashable, worker: str, moved_tokens: int) -> None:
        """A request will be decoded by a worker, which is to get so much KV."""
        decoder = self._decoders.setdefault(worker, _Decoder())
        decoder.coming_tokens += moved_tokens
        self._coming[key] = decoder, moved_tokens

    def prefilled(self, key: Hashable, now: float) -> None:
        """Its prefill is over; it waits, unless its decode has begun."""
        if key in self._coming:
            self._coming[key][0].waiting[key] = now

    def ended(self, key: Hashable) -> None:
        """It is not on its way any more: it is decoded, or over."""
        decoder, moved_tokens = self._coming.pop(key, (None, 0))
        if decoder is not None:
            decoder.coming_tokens -= moved_tokens
            decoder.waiting.pop(key, None)

    def closed(self, worker: str) -> None:
        """A worker has left; requests on their way to it end on their own."""
        self._decoders.pop(worker, None)

    def coming_tokens(self, worker: str) -> int:
        """Tokens of KV on the way to a worker, those whose prefill is not over included."""
        found = self._decoders.get(worker)
        return 0 if found is None else found.coming_tokens

    def waiting_seconds(self, worker: str, now: float) -> float:
        """For how long a request has been waiting for a worker: the one that has longest; 0 where none waits."""
        found = self._decoders.get(worker)
        since = now if found is None else next(iter(found.waiting.values()), now)
        return max(now - since, 0.0)

    def check(self, to_begin: Collection[Hashable]) -> None:
        """Assert that all are yet to begin, and that sums equal their parts. O(requests x workers)."""
        assert self._coming.keys() <= set(to_begin), "it is known who decodes a request that nobody is to decode"
        for worker, decoder in self._decoders.items():
            own = {key: tokens for key, (to, tokens) in self._coming.items() if to is decoder}
            assert decoder.coming_tokens == sum(own.values()), f"tokens of KV on their way to {worker}"
            assert decoder.waiting.keys() <= own.keys(), f"one waits for {worker} that is not on its way there"
