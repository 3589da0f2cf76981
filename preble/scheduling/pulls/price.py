"""Whether the worker that a request goes to takes over KV from one that caches more of its prompt, or computes it. Owns
which workers can move KV, and the price; how long transfers take is `link_times.py`'s, which are under way
`under_way.py`'s, placing the policy's.

    pull       the request waits until both links are free and for the transfer, as far as it isn't waiting for the
               worker anyway
               + whoever has requests at the source waits while its engine copies
               + who decodes at the worker waits while its engine takes over
               + others of the fleet wait for both engines (kappa), and a quarter as long for either link
    recompute  the request waits for the prefill of what could have come
               + who decodes at the worker waits for it
               + others of the fleet wait for it (kappa)

All in seconds of somebody's waiting, as in E2; but the request itself never waits longer than for computing. Asked is
who is known to cache the prefix, not only predicted to: what still runs there cannot be handed over. And what a pull
saves counts by the share that has come lately. Where pulling is cheaper the request names the cheapest source. No
threshold: a prefix that is too short is one whose prefill takes less than the latency.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..._cost import CostModel
from ...errors import InvalidInput
from ...types import PullCost, check_int
from .link_times import LinkEstimate, LinkTimes, Transfer
from .under_way import UnderWay

LINK_SHARE = 0.25  # of kappa, that others wait for either link while a transfer keeps it busy
SOURCES_MAX = 8  # that are compared, those that cache most; of equals those with the fewest requests


class WorkerSide(NamedTuple):
    """A worker as one end of a transfer: of the prompt `matched_tokens` are estimated cached there. `queue_seconds` of
    prefill wait there, of `live_requests`, of which `decoding_requests` have their first token."""

    worker: str
    matched_tokens: int
    queue_seconds: float = 0.0
    live_requests: int = 0
    decoding_requests: int = 0


def pull_cost(
    source: WorkerSide,
    target: WorkerSide,
    prompt_tokens: int,
    token_bytes: int,
    link: LinkEstimate,
    cost: CostModel,
    link_seconds: float = 0.0,
    pressure: float = 0.0,
) -> PullCost:
    """What it costs and saves to pull; `cost` is that of the target. For `link_seconds` one of the two links is busy;
    `pressure` is E2's kappa. Changes nothing."""
    tokens = min(source.matched_tokens, prompt_tokens - 1)
    own = min(target.matched_tokens, tokens)
    moved_bytes = (tokens - own) * token_bytes
    moving = link.seconds(moved_bytes)
    wait = max(link_seconds + moving - target.queue_seconds, 0.0)
    others_on_link = LINK_SHARE * pressure * moving
    source_seconds = link.source_byte_seconds * moved_bytes * (source.live_requests + pressure) + others_on_link
    target_seconds = link.target_byte_seconds * moved_bytes * (target.decoding_requests + pressure) + others_on_link
    rest = cost.prefill_time(prompt_tokens - tokens, prompt_tokens)
    recompute = max(cost.prefill_time(prompt_tokens - own, prompt_tokens) - rest, 0.0)
    others = recompute * (target.decoding_requests + pressure)
    saved = link.got_share * (recompute + others) - wait - source_seconds - target_seconds
    return PullCost(
        source.worker, tokens, tokens - own, moved_bytes, link_seconds + moving, wait, source_seconds, target_seconds,
        recompute, others, saved, link_seconds,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Ability:
    layout: str
    token_bytes: int


class KvMoves:
    """See the module. Bounded by the workers. Not thread-safe: called under the scheduler's lock, in O(workers)."""

    def __init__(self) -> None:
        self.links = LinkTimes()
        self.under_way = UnderWay()
        self.asked = 0  # pulls that requests were sent with
        self.ended = 0
        self.moved_tokens = 0
        self.wanted_tokens = 0
        self._able: dict[str, _Ability] = {}

    def able(self, worker: str, layout: str, token_bytes: int) -> None:
        """A worker can move KV of this layout, so many bytes a token; "" takes that back. Raises `InvalidInput`."""
        if not isinstance(layout, str):
            raise InvalidInput(f"layout must be a str, got {layout!r}")
        check_int("token_bytes", token_bytes, 1 if layout else 0, 2**31 - 1, InvalidInput)
        if layout:
            self._able[worker] = _Ability(layout, token_bytes)
        else:
            self._able.pop(worker, None)

    def left(self, worker: str) -> None:
        """A worker has left."""
        self._able.pop(worker, None)
        self.links.forget(worker)
        self.under_way.forget(worker)

    def are_alike(self, one: str, other: str) -> bool:
        """Whether two workers can hand KV to each other as far as they say, or neither says anything."""
        return self._able.get(one) == self._able.get(other)

    def token_bytes(self, worker: str) -> int:
        """Of KV, as the worker says; 0 for one that moves none."""
        return self._able[worker].token_bytes if worker in self._able else 0

    def sources(self, worker: str, own_tokens: int, matched: Mapping[str, int], exclude: Collection[str]) -> list[str]:
        """Those that can hand a worker more of a prompt than it has."""
        mine = self._able.get(worker)
        if mine is None:
            return []
        return [
            name
            for name, tokens in matched.items()
            if tokens > own_tokens and name != worker and name not in exclude and self._able.get(name) == mine
        ]

    def cheapest(
        self,
        target: WorkerSide,
        sources: Iterable[WorkerSide],
        prompt_tokens: int,
        cost: CostModel,
        pressure: float,
        now: float,
    ) -> PullCost | None:
        """The pull that saves most, or costs least; None without a source. `pressure` is E2's kappa."""
        nearest = sorted(sources, key=lambda one: (-one.matched_tokens, one.live_requests))[:SOURCES_MAX]
        token_bytes = self._able[target.worker].token_bytes if nearest else 0
        costs = []
        for one in nearest:
            link = self.links.estimate(one.worker, target.worker, now)
            waits = self.under_way.link_seconds(one.worker, target.worker, now)
            costs.append(pull_cost(one, target, prompt_tokens, token_bytes, link, cost, waits, pressure))
        return max(costs, key=lambda found: found.saved_seconds, default=None)

    def begin(self, request: Hashable, target: str, pull: PullCost, now: float) -> None:
        """A request is sent with a pull."""
        self.asked += 1
        self.under_way.begin(request, pull.source, target, min(pull.pull_seconds, pull.worth_seconds), now)

    def end(
        self, request: Hashable, source: str, target: str, transfer: Transfer, now: float, there_tokens: int = 0
    ) -> None:
        """A transfer is over. So much of what was wanted was cached meanwhile: its source did not fail there. What it
        waited for others is no time of its own."""
        wanted = max(transfer.wanted_tokens - max(there_tokens, 0), transfer.moved_tokens)
        seconds = max(transfer.seconds - self.under_way.end(request, source, target), 0.0)
        transfer = transfer._replace(wanted_tokens=wanted, seconds=seconds)
        self.ended += 1
        self.wanted_tokens += transfer.wanted_tokens
        self.moved_tokens += transfer.moved_tokens
        self.links.note(source, target, transfer, now)

    def stats(self) -> dict[str, int]:
        """Counts since the start, and sizes now."""
        return {
            "workers": len(self._able),
            "links": len(self.links),
            "asked": self.asked,
            "ended": self.ended,
            "wanted_tokens": self.wanted_tokens,
            "moved_tokens": self.moved_tokens,
        }
