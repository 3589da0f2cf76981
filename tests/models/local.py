"""A naive model of the local scheduler and a pretend device, to hold the real one against. Owns nothing of the product.

Everything here is recomputed from scratch at every question: caches are dictionaries of whole prefixes, groups are list
comprehensions, and no number is kept that could be counted instead.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from preble.batching.waiting_queue import DEADLINE_TOKENS
from preble.local import Batch, LocalConfig

Key = tuple[Hashable, tuple[int, ...]]
URGENT = -1  # the group of those with a deadline, which takes no turns


def next_token(prefix: tuple[int, ...], vocab_size: int = 6) -> int:
    """What the pretend model says after `prefix`: a function of all of it, so that any mix-up shows in the output."""
    state = 17
    for token in prefix:
        state = (state * 31 + token + 1) % 1_000_003
    return state % vocab_size


def expected_output(prompt: tuple[int, ...], max_new_tokens: int, stops: frozenset[int]) -> list[int]:
    """The output of a request that runs alone, without cache, chunks or preemption."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        tokens.append(next_token(tuple(tokens)))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class NaiveCache:
    """Cached prefixes, each with when it was last let go and how many hold it; a token is one entry, at its prefix."""

    def __init__(self) -> None:
        self.entries: dict[Key, list[int]] = {}  # (namespace, prefix) -> [last used, holders]
        self.clock = 0

    def matched(self, namespace: Hashable, tokens: tuple[int, ...]) -> int:
        return max((n for n in range(len(tokens) + 1) if n == 0 or (namespace, tokens[:n]) in self.entries), default=0)

    def pinned(self) -> int:
        return sum(holders > 0 for _, holders in self.entries.values())

    def hold(self, namespace: Hashable, tokens: tuple[int, ...], start: int, end: int) -> int:
        """Hold positions start..end-1, caching those that are not; returns how many were cached already."""
        known = 0
        for n in range(start + 1, end + 1):
            known += (namespace, tokens[:n]) in self.entries
            self.entries.setdefault((namespace, tokens[:n]), [0, 0])[1] += 1
        return known

    def release(self, namespace: Hashable, tokens: tuple[int, ...]) -> None:
        self.clock += 1
        for n in range(1, len(tokens) + 1):
            entry = self.entries[(namespace, tokens[:n])]
            entry[0] = self.clock
            entry[1] -= 1

    def evict(self, count: int) -> None:
        """Drop `count` tokens: always the least recently used of those that nothing cached continues."""
        for _ in range(count):
            parents = {(namespace, prefix[:-1]) for namespace, prefix in self.entries}
            leaves = [key for key, (_, holders) in self.entries.items() if not holders and key not in parents]
            del self.entries[min(leaves, key=lambda leaf: self.entries[leaf][0])]


@dataclass(eq=False)
class NaiveRequest:
    """One request as the model sees it; `held` tokens are the tree's, `computed` - `held` its own."""

    request_id: str
    number: int
    arrival: float
    prompt: tuple[int, ...]
    max_new_tokens: int
    stops: frozenset[int]
    namespace: Hashable
    deadline: float | None = None  # seconds from its arrival; so long that nothing comes too late
    rank: float = 0.0  # who has the lowest one is next within a group
    output: list[int] = field(default_factory=list)
    running: bool = False
    preempted: bool = False
    held: int = 0
    computed: int = 0
    scheduled: int = 0
    prefill_end: int = 0
    cached_tokens: int | None = None

    @property
    def known(self) -> tuple[int, ...]:
        return self.prompt + tuple(self.output)

    @property
    def decoding(self) -> bool:
        return self.computed >= self.prefill_end


class NaiveLocal:
    """The local scheduler in the plainest terms. `next_batch` gives (request id, start, tokens, samples, is_decode)."""

    def __init__(self, config: LocalConfig) -> None:
        self.config = config
        self.places = min(config.max_running, config.token_budget if config.chunked_prefill else config.max_running)
        self.cache = NaiveCache()
        self.requests: dict[str, NaiveRequest] = {}
        self.resuming: list[str] = []  # preempted, next one first
        self.credits = dict.fromkeys(range(config.priority_groups + 1), 0)
        self.cached_at_start: dict[str, int] = {}
        self.arrived = 0
        self.latest_arrival = float("-inf")
        self.decodes_till_look = 0
        self.turns = 7  # picks by turn since one for age; every eighth pick may be for age

    # --- facts --------------------------------------------------------------------------------------------------------

    def running(self) -> list[NaiveRequest]:
        return sorted((r for r in self.requests.values() if r.running), key=lambda r: r.number)

    def free(self) -> int:
        own = sum(r.computed + r.scheduled - r.held for r in self.running())
        return self.config.kv_capacity_tokens - len(self.cache.entries) - own

    def available(self) -> int:
        return self.free() + len(self.cache.entries) - self.cache.pinned()

    def cached_now(self, request: NaiveRequest) -> int:
        return self.cache.matched(request.namespace, request.known)

    def group(self, request: NaiveRequest) -> int:
        """By what was cached as the round began; one of their own with a deadline."""
        if self.config.order != "priority":
            return 0
        if request.deadline is not None:
            return URGENT
        return self.config.priority_groups * self.cached_at_start[request.request_id] // len(request.known)

    # --- coming and going ---------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: tuple[int, ...],
        max_new: int,
        stops: frozenset[int],
        namespace: Hashable,
        now: float,
        deadline: float | None = None,
    ) -> None:
        request = NaiveRequest(name, self.arrived, now, prompt, max_new, stops, namespace, deadline)
        self.latest_arrival = max(self.latest_arrival, now)
        uncached = len(prompt) - min(self.cached_now(request), len(prompt) - 1)
        wait = self.config.max_wait_seconds if deadline is None else deadline * (1 + uncached / DEADLINE_TOKENS)
        request.rank = self.latest_arrival + wait
        self.requests[name] = request
        self.arrived += 1

    def cancel(self, request_id: str) -> None:
        request = self.requests.pop(request_id)
        if request_id in self.resuming:
            self.resuming.remove(request_id)
        if request.running:
            request.scheduled = 0
            self.stop(request)

    def stop(self, request: NaiveRequest) -> None:
        self.cache.hold(request.namespace, request.known, request.held, request.computed)
        self.cache.release(request.namespace, request.known[: request.computed])
        request.running = False
        request.held = request.computed = 0

    def adopt(self, namespace: Hashable, tokens: tuple[int, ...]) -> int:
        """KV of all these tokens comes from elsewhere; returns how many are cached then."""
        known = self.cache.matched(namespace, tokens)
        self.cache.hold(namespace, tokens, 0, known)
        new, end = len(tokens) - known, known
        if new and new + len(self.running()) <= self.available():
            if new > self.free():
                self.cache.evict(max(new - self.free(), self.config.kv_capacity_tokens // 256))
            self.cache.hold(namespace, tokens, known, len(tokens))
            end = len(tokens)
        self.cache.release(namespace, tokens[:end])
        return end

    def use(self, namespace: Hashable, tokens: tuple[int, ...]) -> None:
        """Somebody reads what of a prefix is cached."""
        known = self.cache.matched(namespace, tokens)
        self.cache.hold(namespace, tokens, 0, known)
        self.cache.release(namespace, tokens[:known])

    def preempt_newest(self) -> None:
        request = self.running()[-1]
        self.stop(request)
        request.preempted = True
        self.resuming.insert(0, request.request_id)

    def schedule(self, request: NaiveRequest, count: int, batch: list[tuple[str, int, int, bool, bool]]) -> None:
        missing = count - self.free()
        if missing > 0:
            self.cache.evict(max(missing, self.config.kv_capacity_tokens // 256))
        request.scheduled = count
        samples = request.computed + count == len(request.known)
        batch.append((request.request_id, request.computed, count, samples, request.decoding))

    # --- one iteration ------------------------------------------------------------------------------------------------

    def next_batch(self, now: float) -> list[tuple[str, int, int, bool, bool]]:
        batch: list[tuple[str, int, int, bool, bool]] = []
        if not self.config.chunked_prefill:
            return self.next_whole_batch(batch, now)
        self.decode_all(batch)
        budget = self.config.token_budget - len(batch)
        under_way = [r for r in self.running() if not r.decoding]
        budget -= self.admit_short(batch, budget // 2, under_way, now)
        budget = self.continue_prefills(batch, budget, under_way)
        self.admit(batch, budget, now)
        return batch

    def next_whole_batch(
        self, batch: list[tuple[str, int, int, bool, bool]], now: float
    ) -> list[tuple[str, int, int, bool, bool]]:
        """Without chunks: what was discarded, or else newcomers where it is time to look, or else decodes."""
        self.continue_prefills(batch, self.config.kv_capacity_tokens, [r for r in self.running() if not r.decoding])
        if not batch and self.decodes_till_look == 0:
            self.admit(batch, self.config.token_budget, now)
        if not batch:
            self.decode_all(batch)
            self.decodes_till_look = (self.decodes_till_look or self.config.decodes_per_look) - 1
            if not batch:
                self.decodes_till_look = 0
                self.admit(batch, self.config.token_budget, now)
        return batch

    def decode_all(self, batch: list[tuple[str, int, int, bool, bool]]) -> None:
        def decoding() -> list[NaiveRequest]:
            return [r for r in self.running() if r.decoding]

        while len(decoding()) > self.available():
            self.preempt_newest()
        decodes = decoding()
        if len(decodes) > self.free():
            self.cache.evict(max(len(decodes) - self.free(), self.config.kv_capacity_tokens // 256))
        for request in decodes:
            self.schedule(request, 1, batch)

    def continue_prefills(
        self, batch: list[tuple[str, int, int, bool, bool]], budget: int, under_way: list[NaiveRequest]
    ) -> int:
        """Gives the budget left."""
        for request in under_way:
            count = min(budget, request.prefill_end - request.computed, self.available())
            if count == 0:
                break
            self.schedule(request, count, batch)
            budget -= count
        return budget

    def admit_short(
        self, batch: list[tuple[str, int, int, bool, bool]], budget: int, under_way: list[NaiveRequest], now: float
    ) -> int:
        """Who is computed whole within the budget goes before prefills under way; gives what that takes."""
        if not self.config.short_first or not under_way or len(self.running()) == len(self.requests):
            return 0
        needed = sum(r.prefill_end - r.computed for r in under_way)
        taken, passed_over = 0, set[str]()
        self.cached_at_start = {r.request_id: self.cached_now(r) for r in self.newcomers(set())}
        while taken < budget and len(self.running()) < self.places and len(passed_over) < 8:
            request, by_turn = self.pick(passed_over, now)
            if request is None:
                break
            uncached = len(request.known) - min(self.cached_now(request), len(request.known) - 1)
            is_short = uncached <= budget - taken and not self.is_being_computed(request)
            if is_short and self.fits(request, needed):
                self.let_in(request, by_turn, passed_over)
                self.schedule(request, uncached, batch)
                taken += uncached
            else:
                passed_over.add(request.request_id)
        self.end_round()
        return taken

    def let_in(self, request: NaiveRequest, by_turn: bool, passed_over: set[str]) -> None:
        if by_turn and self.config.order == "priority":
            self.charge(self.group(request), passed_over)
        if by_turn:
            self.turns += 1
        elif not request.preempted:
            self.turns = 0
        self.start(request)

    def end_round(self) -> None:
        for group in self.credits:
            if not any(self.group(r) == group for r in self.newcomers(set())):
                self.credits[group] = 0

    def admit(self, batch: list[tuple[str, int, int, bool, bool]], budget: int, now: float) -> None:
        if budget <= 0 or len(self.running()) >= self.places or len(self.running()) == len(self.requests):
            return
        passed_over: set[str] = set()
        self.cached_at_start = {r.request_id: self.cached_now(r) for r in self.newcomers(set())}
        while budget > 0 and len(self.running()) < self.places:
            request, by_turn = self.pick(passed_over, now)
            if request is None:
                break
            if self.is_being_computed(request):
                passed_over.add(request.request_id)
                continue
            uncached = len(request.known) - min(self.cached_now(request), len(request.known) - 1)
            if not self.config.chunked_prefill and batch and uncached > budget:
                break
            if not self.fits(request, 0):
                break
            self.let_in(request, by_turn, passed_over)
            count = request.prefill_end - request.computed
            if self.config.chunked_prefill:
                count = min(budget, count)
            self.schedule(request, count, batch)
            budget -= count
        self.end_round()

    def newcomers(self, passed_over: set[str]) -> list[NaiveRequest]:
        waiting = [r for r in self.requests.values() if not r.running and not r.preempted]
        return sorted((r for r in waiting if r.request_id not in passed_over), key=lambda r: r.number)

    def pick(self, passed_over: set[str], now: float) -> tuple[NaiveRequest | None, bool]:
        """The next request to consider, and whether that is by order, not by a special right."""
        for request_id in self.resuming:
            if request_id not in passed_over:
                return self.requests[request_id], False
        waiting = self.newcomers(passed_over)
        if not waiting:
            return None, False
        if self.turns >= 7 and now - waiting[0].arrival > self.config.max_wait_seconds:
            return waiting[0], False
        if self.config.order == "longest_prefix":
            return min(waiting, key=lambda r: (-self.cached_at_start[r.request_id], r.number)), True
        groups = {self.group(r) for r in waiting} - {URGENT} or {URGENT}
        turn = max(groups, key=lambda g: (self.credits.get(g, 0) + max(1, g), g))
        return min((r for r in waiting if self.group(r) in (turn, URGENT)), key=lambda r: (r.rank, r.number)), True

    def charge(self, picked: int, passed_over: set[str]) -> None:
        if picked == URGENT:
            return
        for group in {self.group(r) for r in self.newcomers(passed_over)} - {URGENT}:
            self.credits[group] += max(1, group)
            self.credits[picked] -= max(1, group)

    def is_being_computed(self, request: NaiveRequest) -> bool:
        extra = self.config.min_shared_tokens
        end = self.cached_now(request) + extra
        if extra == 0 or end > len(request.known) - 1:
            return False
        return any(
            other.namespace == request.namespace and other.known[: other.prefill_end][:end] == request.known[:end]
            for other in self.running()
            if not other.decoding
        )

    def fits(self, request: NaiveRequest, spared: int) -> bool:
        """Whether its prefill and a token for each running request fit beside what is held, and so much stays.

        Where that depends on the request's own cached prefix, asking makes the prefix the most recently used one.
        """
        cached = min(self.cached_now(request), len(request.known) - 1)
        unplanned = sum(max(0, r.prefill_end - r.computed - r.scheduled) for r in self.running())
        assert spared or unplanned == 0 or self.available() == 0, (
            "a prefill under way leaves budget or memory to others"
        )
        unheld = sum(self.cache.entries[(request.namespace, request.known[:n])][1] == 0 for n in range(1, cached + 1))
        missing = len(request.known) - cached + len(self.running()) + spared
        if missing > self.available() - unheld and missing <= self.available():
            self.cache.hold(request.namespace, request.known, 0, cached)
            self.cache.release(request.namespace, request.known[:cached])
        return missing <= self.available() - unheld

    def start(self, request: NaiveRequest) -> None:
        if request.preempted:
            self.resuming.remove(request.request_id)
        cached = min(self.cached_now(request), len(request.known) - 1)
        self.cache.hold(request.namespace, request.known, 0, cached)
        request.running, request.preempted = True, False
        request.held = request.computed = cached
        request.prefill_end = len(request.known)
        if request.cached_tokens is None:
            request.cached_tokens = cached

    def complete(
        self, batch: list[tuple[str, int, int, bool, bool]], tokens: Mapping[str, int]
    ) -> list[tuple[str, int, int, int | None, str | None]]:
        """Book a batch; gives (request id, token, index, cached tokens, finish reason)."""
        outputs = []
        for request_id, _, _, samples, is_decode in batch:
            request = self.requests.get(request_id)
            if request is None or not request.scheduled:
                continue
            request.computed += request.scheduled
            request.scheduled = 0
            if not is_decode:
                self.cache.hold(request.namespace, request.known, request.held, request.computed)
                request.held = request.computed
            if samples:
                request.output.append(tokens[request_id])
                reason = "stop" if tokens[request_id] in request.stops else None
                if reason is None and len(request.output) == request.max_new_tokens:
                    reason = "length"
                outputs.append((request_id, tokens[request_id], len(request.output) - 1, request.cached_tokens, reason))
                if reason is not None:
                    self.stop(request)
                    del self.requests[request_id]
        return outputs

    def discard(self) -> None:
        for request in self.requests.values():
            request.scheduled = 0


class PretendDevice:
    """KV memory that remembers, for every slot, the prefix it was computed from, and refuses any other use of it."""

    def __init__(self) -> None:
        self.memory: dict[int, Key] = {}

    def run(self, batch: Batch, known: Mapping[str, Key]) -> dict[str, int]:
        """Compute a batch as an engine would; gives the sampled tokens. `known`: request id -> (namespace, tokens)."""
        written = [int(slot) for item in batch.items for slot in item.write_slots]
        assert len(written) == len(set(written)), "two tokens of one batch are written to one slot"
        for item in batch.items:
            self._check_context(item.request_id, item, known[item.request_id], set(written))
        tokens = {}
        for item in batch.items:
            namespace, sequence = known[item.request_id]
            for i, slot in enumerate(item.write_slots):
                self.memory[int(slot)] = (namespace, sequence[: item.start + i + 1])
            if item.samples:
                assert item.start + len(item.token_ids) == len(sequence), "sampled before the last known token"
                tokens[item.request_id] = next_token(sequence)
        return tokens

    def write(self, namespace: Hashable, tokens: tuple[int, ...], known: int, slots: Any) -> None:
        """Store KV that comes from elsewhere: that of the tokens from `known` on."""
        assert len(slots) == len(tokens) - known
        for i, slot in enumerate(slots):
            self.memory[int(slot)] = (namespace, tokens[: known + i + 1])

    def _check_context(self, request_id, item, key, written) -> None:
        namespace, sequence = key
        end = item.start + len(item.token_ids)
        assert tuple(item.token_ids) == sequence[item.start : end], f"{request_id}: wrong tokens to compute"
        assert len(item.context_slots) == end
        assert list(item.context_slots[item.start :]) == list(item.write_slots)
        for position, slot in enumerate(item.context_slots[: item.start]):
            found = self.memory.get(int(slot))
            assert found == (namespace, sequence[: position + 1]), f"{request_id}: stale KV at {position}"
            assert int(slot) not in written, f"{request_id}: reads a slot that this batch writes"
