"""Transfers of KV between two workers without a network: messages lost, late, doubled, swapped and cut by a schedule.

The KV of a token is the token itself, so that a part in the wrong place would be seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.errors import InvalidConfig
from preble.transport import wire
from preble.transport.kv_transfers import KvAsked, KvLimits, KvPull, KvSource
from preble.transport.messages import PULL_ENDS, PullFrom

TOKEN_BYTES = 4
LIMITS = KvLimits(part_bytes=5 * TOKEN_BYTES, parts_ahead=3)
PROMPT = np.arange(100, 200, dtype=np.int32)
Answer = tuple[int, wire.KvPart, bytes]


def pull_of(tokens: int = 99, cached: int = 0, *, wait_us: int = 10_000_000, limits: KvLimits = LIMITS) -> KvPull:
    """A pull that begins at 0 s."""
    return KvPull(PullFrom("tcp://h:1", 7, tokens, wait_us), PROMPT, cached, TOKEN_BYTES, limits, 0.0)


def answer(asked: KvAsked, cached: int = 100) -> Answer:
    """What a source that caches so many tokens of the prompt says."""
    tokens = max(0, min(asked.end, cached) - asked.first)
    data = PROMPT[asked.first : asked.first + tokens].tobytes()
    return asked.number, wire.KvPart(asked.first, tokens, 10), data


class PretendCache:
    """What is cached at the worker that pulls, as its engine would say."""

    def __init__(self, cached: int, room: int = 1000) -> None:
        self.tokens = PROMPT[:cached].tolist()
        self.room = room

    def take_over(self, part: KvAsked, data: bytes) -> int:
        """The engine's answer."""
        found = np.frombuffer(data, np.int32).tolist()
        assert len(found) == part.end - part.first
        if part.first <= len(self.tokens) < part.end and part.end <= self.room:
            self.tokens += found[len(self.tokens) - part.first :]
        return len(self.tokens)


def give(pull: KvPull, cache: PretendCache, number: int, part: wire.KvPart, data: bytes) -> None:
    """One answer comes, and the engine has it at once."""
    taken = pull.take(number, part, len(data))
    if taken is not None:
        pull.taken_over(taken, cache.take_over(taken, data))


def test_a_whole_prefix_comes_in_parts_and_no_more_are_ahead_than_may_be() -> None:
    pull, cache = pull_of(), PretendCache(0)
    waiting = pull.asks()
    assert [(one.first, one.end) for one in waiting] == [(0, 5), (5, 10), (10, 15)]
    assert pull.asks() == []
    while waiting:
        give(pull, cache, *answer(waiting.pop(0)))
        waiting += pull.asks()
        assert len(waiting) <= LIMITS.parts_ahead
    assert pull.end == "done" and pull.cached_tokens == pull.moved_tokens == 99
    assert pull.source_us == 10 * 20
    assert cache.tokens == PROMPT[:99].tolist()


def test_only_what_is_missing_is_asked_for_and_never_the_last_token() -> None:
    pull = pull_of(tokens=100, cached=90)
    assert [(one.first, one.end) for one in pull.asks()] == [(90, 95), (95, 99)]
    assert pull_of(tokens=50, cached=50).end == pull_of(tokens=50, cached=70).end == "done"
    assert pull_of(tokens=50, cached=70).moved_tokens == 0


def test_a_pull_is_cut_where_it_would_be_larger_than_all_of_it_may_be() -> None:
    pull = pull_of(limits=KvLimits(part_bytes=1 << 20, pull_bytes=30 * TOKEN_BYTES))
    assert [(one.first, one.end) for one in pull.asks()] == [(0, 30)]
    assert [(one.first, one.end) for one in pull_of(limits=KvLimits(part_bytes=1)).asks()] == [
        (0, 1),
        (1, 2),
        (2, 3),
        (3, 4),
    ], "a token at least"


@pytest.mark.parametrize(
    ("fault", "end", "cached"),
    [
        (lambda pull, first, second: give(pull, PretendCache(0), *answer(second)), "lost", 0),
        (lambda pull, first, second: pull.refused(0), "refused", 0),
        (lambda pull, first, second: pull.refused(9), "", 0),
        (lambda pull, first, second: pull.expire(9.99), "", 0),
        (lambda pull, first, second: pull.expire(10.0), "late", 0),
        (lambda pull, first, second: pull.cancel(), "cancelled", 0),
        (lambda pull, first, second: pull.lose(), "lost", 0),
        (lambda pull, first, second: give(pull, PretendCache(0), *answer(first, cached=3)), "partial", 3),
        (lambda pull, first, second: give(pull, PretendCache(0), *answer(first, cached=0)), "partial", 0),
        (lambda pull, first, second: give(pull, PretendCache(0, room=4), *answer(first)), "full", 0),
        (lambda pull, first, second: pull.take(0, wire.KvPart(0, 5, 1), 19), "lost", 0),
        (lambda pull, first, second: pull.take(0, wire.KvPart(1, 5, 1), 20), "lost", 0),
        (lambda pull, first, second: pull.take(0, wire.KvPart(0, 6, 1), 24), "lost", 0),
    ],
)
def test_the_first_thing_that_is_not_as_it_should_be_ends_it(
    fault: Callable[[KvPull, KvAsked, KvAsked], object], end: str, cached: int
) -> None:
    pull = pull_of()
    first, second, *_ = pull.asks()
    fault(pull, first, second)
    assert (pull.end, pull.cached_tokens) == (end, cached)
    if end:
        before = pull.cached_tokens
        assert pull.asks() == []
        assert pull.take(*answer(first)[:2], 20) is None, "what comes later counts for nothing"
        pull.cancel()
        pull.expire(99.0)
        assert (pull.end, pull.cached_tokens) == (end, before)


def test_what_has_come_is_taken_over_before_the_end_is_said() -> None:
    """Regression: a prefix whose next part was missing ended while the engine still had parts of it before it."""
    pull, cache = pull_of(), PretendCache(0)
    first, second, third = pull.asks()
    number, part, data = answer(first)
    taken = pull.take(number, part, len(data))
    assert taken == first
    assert pull.take(*answer(third)[:2], 20) is None and pull.end == ""
    assert pull.take(*answer(second)[:2], 20) is None, "nothing more is taken"
    assert pull.asks() == []
    pull.taken_over(first, cache.take_over(first, data))
    assert (pull.end, pull.cached_tokens) == ("lost", 5)


@given(
    cached=st.integers(0, 99),
    at_source=st.integers(0, 100),
    room=st.sampled_from([1000, 60]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=200, deadline=None)
def test_whatever_the_network_does_what_is_cached_is_the_prefix(
    cached: int, at_source: int, room: int, seed: int
) -> None:
    rng = random.Random(seed)
    faults = rng.choice([0.0, 0.02, 0.1, 0.4])
    pull, cache = pull_of(cached=cached, wait_us=200), PretendCache(cached, room)
    on_the_way: list[Answer] = []
    now, steps = 0.0, 0
    while not pull.end:
        steps += 1
        assert steps < 2000, "it never ends"
        for asked in pull.asks():
            for _ in range(rng.choice([0, 2]) if rng.random() < faults else 1):  # lost, doubled
                on_the_way.append(answer(asked, at_source))
        if on_the_way:
            place = rng.randrange(len(on_the_way)) if rng.random() < faults else 0  # overtaken
            number, part, data = on_the_way.pop(place)
            if rng.random() < faults:
                data = data[:-1]
            if rng.random() < faults:
                pull.refused(number)
            give(pull, cache, number, part, data)
        now += 1e-6
        pull.expire(now)
        assert pull.cached_tokens <= len(cache.tokens) and cache.tokens == PROMPT[: len(cache.tokens)].tolist()
    assert pull.end in PULL_ENDS
    for one in on_the_way:  # late
        give(pull, cache, *one)
    assert cache.tokens == PROMPT[: len(cache.tokens)].tolist()
    if not faults and room == 1000:
        assert pull.cached_tokens == len(cache.tokens) == max(cached, min(at_source, 99))
        assert pull.end == ("done" if max(cached, at_source) >= 99 else "partial")


def asked_of(epoch: int, layout: str) -> wire.Envelope:
    """An ask as it is received."""
    frame = wire.encode(wire.KvAsk(layout, PROMPT, 0, ("a", 1)), epoch=epoch, session=3, seq=1)
    return wire.decode(frame, wire.KV_ASKS)


def test_a_source_answers_only_what_is_of_its_life_and_its_kind_and_so_many_at_a_time() -> None:
    source = KvSource("torch-x", 7, KvLimits(asks=2))
    codes = [getattr(source.refusal(asked_of(*of)), "code", None) for of in [(6, "torch-x"), (7, "torch-y")]]
    assert codes == ["epoch", "layout"] and source.waiting == 0
    assert [source.refusal(asked_of(7, "torch-x")) for _ in range(2)] == [None, None]
    refusal = source.refusal(asked_of(7, "torch-x"))
    assert refusal is not None and refusal.code == "busy" and source.waiting == 2
    source.answered()
    assert source.refusal(asked_of(7, "torch-x")) is None
    assert source.refusals == 3


def test_a_router_s_frames_are_no_asks_and_asks_are_no_router_s() -> None:
    from preble.errors import ProtocolError

    with pytest.raises(ProtocolError, match="not expected from this side"):
        wire.decode(wire.encode(wire.Ping(1)), wire.KV_ASKS)
    with pytest.raises(ProtocolError, match="not expected from this side"):
        wire.decode(wire.encode(wire.KvAsk("x", PROMPT, 0)), wire.ROUTER_MESSAGES)


def test_bounds_are_positive() -> None:
    for name in KvLimits.__slots__:
        with pytest.raises(InvalidConfig, match=name):
            KvLimits(**{name: 0})
