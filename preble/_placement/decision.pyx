"""What a scheduler answers: `Decision` and `Match`, made in compiled code with their fields worked out when asked for.
Owns these two and the draw of chance that policies get; they hold no reference to the scheduler."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free


cimport cython


@cython.freelist(64)
@cython.no_gc
cdef class Decision:
    """Where a request goes: made by `schedule`, for the request with `request_id`. Immutable, so thread-safe.

    `worker`: its id. `matched_tokens`: of the prompt's `prompt_tokens`, those estimated cached there. `reason`: E2's
    "exploit", "explore", "escape", "rebalance", "replica" or "rendezvous" (docs/e2.md), else the policy's own word.
    `costs`: every worker's seconds, by id, where `explain` asked for them, else None. Where a scheduler asks for a
    request's id, its Decision will do.
    """

    def __init__(self):
        raise TypeError("a Decision is made by GlobalScheduler.schedule")

    def __repr__(self) -> str:
        return (f"Decision(worker={self.worker!r}, reason={self.reason!r}, matched_tokens={self.matched_tokens}, "
                f"prompt_tokens={self.prompt_tokens}, request_id={self.request_id!r})")


cdef Decision new_decision(object request_id, str worker, uint32_t matched, uint32_t prompt, str reason, object costs):
    """A finished Decision. It is not tracked by the garbage collector: it refers to plain data, and to the caller's
    request id."""
    cdef Decision decision = Decision.__new__(Decision)
    decision.request_id = request_id
    decision.worker = worker
    decision.matched_tokens = matched
    decision.prompt_tokens = prompt
    decision.reason = reason
    decision.costs = costs
    return decision


@cython.no_gc
cdef class Match:
    """What is estimated cached of a prompt of `prompt_tokens`. `matched_tokens` maps worker id to tokens (0 left out),
    in whole blocks and at most the prompt less one.

    `media` maps worker id to where these tokens are, for workers that have some in host memory or on disk.
    `known_tokens` is the longest prefix in the tree, cached anywhere or not. Immutable, so thread-safe.
    """

    def __init__(self):
        raise TypeError("a Match is made by GlobalScheduler.match")

    def __dealloc__(self):
        free(self.held.held)

    @property
    def matched_tokens(self) -> dict[str, int]:
        """Tokens by worker id; made when first asked for."""
        cdef uint32_t i
        with cython.critical_section(self):      # nothing where Python has its lock
            if self.by_name is None:
                self.by_name = {self.names[self.held.met[i]]: self.held.held[self.held.met[i]]
                                for i in range(self.held.count)
                                if self.held.held[self.held.met[i]] and self.names[self.held.met[i]] is not None}
            return self.by_name

    @property
    def media(self) -> dict[str, dict[str, int]]:
        """Tokens by worker id and medium: "gpu", "host", "disk". Made when asked for."""
        cdef uint32_t i, at, here, far
        found = {}
        if self.held.here == NULL:
            return found
        for at in range(self.held.count):
            i = self.held.met[at]
            here = min(self.held.here[i], self.held.held[i])
            far = min(self.held.far[i], self.held.held[i] - here)
            if here < self.held.held[i] and self.names[i] is not None:
                found[self.names[i]] = {"gpu": here, "host": self.held.held[i] - here - far, "disk": far}
        return found

    @property
    def best_tokens(self) -> int:
        """The longest estimated-cached prefix over all workers, in tokens."""
        return max(self.matched_tokens.values(), default=0)

    def __eq__(self, other) -> bool:
        if not isinstance(other, Match):
            return NotImplemented
        return (self.prompt_tokens == other.prompt_tokens and self.known_tokens == other.known_tokens
                and self.matched_tokens == other.matched_tokens)

    def __hash__(self) -> int:
        return hash((self.prompt_tokens, self.known_tokens, frozenset(self.matched_tokens.items())))

    def __repr__(self) -> str:
        return (f"Match(prompt_tokens={self.prompt_tokens}, known_tokens={self.known_tokens}, "
                f"matched_tokens={self.matched_tokens})")


def unit_draw(uint64_t seed, uint64_t sequence) -> float:
    """A number in [0, 1) that depends on (seed, sequence) only (splitmix64), so that explaining a decision does not
    use up chance."""
    cdef uint64_t z = seed * <uint64_t> 0x9E3779B97F4A7C15 + (sequence + 1) * <uint64_t> 0xD1B54A32D192ED03
    z = (z ^ (z >> 30)) * <uint64_t> 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * <uint64_t> 0x94D049BB133111EB
    return <double> ((z ^ (z >> 31)) >> 11) / 9007199254740992.0
