"""At which token what an engine stores leaves the prompts that were sent there, and that an engine which reports
truthfully is never said to differ, whoever else uses it and however late its events are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble import AllBlocksCleared, BlockRemoved, BlockStored, GlobalScheduler
from tests.scheduling.test_cache_mismatch import ENOUGH, of, prompt, reported_by, scheduler_of

SYSTEM = [7_000_000 + i for i in range(150)]
Render = Callable[[list[int]], list[int]]


class Engine:
    """Stores the whole blocks of what it makes of a prompt and of its output, and reports each new block once, with
    the hash of the block before as its parent. `chunk`: blocks of an event at most. `known`: its blocks, oldest first,
    each with the one before."""

    def __init__(self, render: Render = list, block_size: int = 16, chunk: int = 1 << 20) -> None:
        self.render, self.block_size, self.chunk = render, block_size, chunk
        self.known: dict[int, int | None] = {}

    def serve(self, tokens: list[int], output: list[int] | None = None) -> list[BlockStored]:
        made = [*self.render(tokens), *(output or ())]
        size, above, events = self.block_size, None, []
        fresh: list[int] = []
        ends = range(size, len(made) + 1, size)
        for end in ends:
            name = hash(tuple(made[:end])) & (2**63 - 1)
            if name not in self.known:
                fresh.append(name)
            self.known[name] = above
            above = name
            if fresh and (len(fresh) == self.chunk or end == ends[-1]):
                first = end - size * len(fresh)
                events.append(BlockStored(fresh, self.known[fresh[0]], made[first:end], size, None, None))
                fresh = []
        return events

    def evict(self, count: int) -> list[BlockRemoved]:
        gone: list[int] = []
        while self.known and len(gone) < count:
            above = set(self.known.values())
            gone.append(next(name for name in self.known if name not in above))
            del self.known[gone[-1]]
        return [BlockRemoved(gone)]

    def clear(self) -> list[AllBlocksCleared]:
        self.known.clear()
        return [AllBlocksCleared()]


def send(scheduler: GlobalScheduler, engine: Engine, tokens: list[int], output: list[int] | None = None) -> None:
    decision = scheduler.schedule(tokens)
    for event in engine.serve(tokens, output):
        scheduler.apply("a", [event])
    scheduler.finish(decision.request_id, output_tokens=1)


def own(number: int) -> list[int]:
    """A prompt that shares nothing."""
    return prompt(number + 1, 200)


def shared(number: int) -> list[int]:
    """A prompt behind the system prompt that all share."""
    return [*SYSTEM, *prompt(number + 1, 100)]


def replaced(at: int) -> Render:
    return lambda tokens: [*tokens[:at], 9_999, *tokens[at + 1 :]]


def inserted(at: int) -> Render:
    return lambda tokens: [*tokens[:at], 9_999, 9_998, *tokens[at:]]


def lacking(at: int) -> Render:
    return lambda tokens: [*tokens[:at], *tokens[at + 1 :]]


def otherwise(at: int) -> Render:
    return lambda tokens: [*tokens[:at], *(token + 10**8 for token in tokens[at:])]


@pytest.mark.parametrize("at", [0, 20, 40, 150])
@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
@pytest.mark.parametrize("prompts", [own, shared])
@pytest.mark.parametrize(
    ("render", "words"),
    [
        (replaced, "1 scheduled token(s) are 1 other(s) there, and both go on alike"),
        (inserted, "the engine has 2 more token(s) there, and both go on alike"),
        (lacking, "the engine lacks 1 token(s) there, and both go on alike"),
        (otherwise, "nothing alike follows within 256 tokens, so why is not known"),
    ],
)
def test_the_first_token_that_differs_is_named_wherever_it_is(
    render: Any, words: str, at: int, block_size: int, chunk: int, prompts: Any
) -> None:
    scheduler = scheduler_of("a", block_size=block_size)
    engine = Engine(render(at), block_size, chunk)
    for number in range(ENOUGH - 1):
        send(scheduler, engine, prompts(number))
    assert reported_by(scheduler) == []
    send(scheduler, engine, prompts(ENOUGH))
    (message,) = reported_by(scheduler)
    (mismatch,) = of(scheduler)["cache_mismatches"]
    sent = prompts(ENOUGH)
    assert message.startswith("worker 'a': ") and (mismatch["worker"], mismatch["position"]) == ("a", at)
    if prompts is shared and at < len(SYSTEM):
        assert mismatch["scheduled_token"] == sent[at] and mismatch["stored_token"] == engine.render(sent)[at]
    assert f"token {at}: scheduled {mismatch['scheduled_token']}, stored {mismatch['stored_token']}." in message
    if not (at == 0 and render in (inserted, lacking)):
        assert words in message
    assert ("why is not known" in message) == (render is otherwise)
    scheduler.check()


# --- no false alarms --------------------------------------------------------------------------------------------------


def test_outputs_are_no_mismatch_however_the_next_turn_renders_them() -> None:
    """An answer's blocks hang behind the prompt's; the next turn has other tokens there."""
    scheduler, engine = scheduler_of("a", block_size=16), Engine()
    for number in range(2 * ENOUGH):
        turn = shared(number)
        for step in range(3):
            send(scheduler, engine, turn, [5_000_000 + i for i in range(40)])
            turn = [*turn, *(6_000_000 + 100 * step + i for i in range(60))]
            assert reported_by(scheduler) == []


def test_other_clients_that_share_the_system_prompt_are_no_mismatch() -> None:
    scheduler, engine = scheduler_of("a", block_size=16), Engine()
    for number in range(2 * ENOUGH):
        for other in range(10):
            scheduler.apply("a", engine.serve([*SYSTEM, *prompt(1000 + 10 * number + other, 100)]))
        send(scheduler, engine, shared(number))
        assert reported_by(scheduler) == []


def test_prompts_that_are_not_reported_at_all_are_not_said_to_differ() -> None:
    """The engine had them before this router came; other clients' blocks are new."""
    scheduler, engine = scheduler_of("a", block_size=16), Engine()
    for number in range(ENOUGH):
        engine.serve(shared(number))
    for number in range(ENOUGH):
        send(scheduler, engine, shared(number))
        if number % 2:
            scheduler.apply("a", engine.serve([*prompt(1000 + number, 100)]))
    assert reported_by(scheduler) == []


def test_blocks_behind_unknown_ones_may_be_any_prompts() -> None:
    """The system prompt's blocks were stored before this router came, so what hangs behind them has no place."""
    scheduler, engine = scheduler_of("a", block_size=16), Engine()
    engine.serve(SYSTEM)
    for number in range(2 * ENOUGH):
        send(scheduler, engine, shared(number))
        scheduler.apply("a", engine.serve([*prompt(1000 + number, 100)]))
        assert reported_by(scheduler) == []
    assert of(scheduler)["orphan_blocks"] > 0


def test_a_part_of_a_prompt_is_neither_the_prompt_nor_something_else() -> None:
    """Chunks of a long prompt come one by one; only the last one reaches its end."""
    scheduler = scheduler_of("a", block_size=16)
    engine = Engine(replaced(150), 16, chunk=2)
    for number in range(ENOUGH):
        send(scheduler, engine, own(number))
    assert "after 150 tokens" in reported_by(scheduler)[0]
    send(scheduler, Engine(chunk=2), own(1000))
    assert reported_by(scheduler) == [] and of(scheduler)["cache_mismatches"] == []


def test_a_short_prompt_behind_which_all_differ_is_reported_once_and_hides_nothing() -> None:
    """The system prompt alone was sent once. What follows differs in the block that it ends in."""
    scheduler, engine = scheduler_of("a", block_size=16), Engine(replaced(155))
    send(scheduler, engine, SYSTEM)
    for number in range(ENOUGH):
        send(scheduler, engine, shared(number))
    assert "token 155: " in reported_by(scheduler)[0]


def test_what_both_have_again_is_looked_for_within_a_bound() -> None:
    """Behind 300 other tokens it is not seen; the position is named all the same."""
    for count, words in ((200, "the engine has 200 more token(s) there"), (300, "nothing alike follows within 256")):
        scheduler = scheduler_of("a", block_size=16)
        engine = Engine(lambda tokens, n=count: [*tokens[:40], *range(1, 1 + n), *tokens[40:]])
        for number in range(ENOUGH):
            send(scheduler, engine, prompt(number, 400))
        (message,) = reported_by(scheduler)
        assert words in message and "token 40: scheduled " in message


def test_of_too_many_ends_to_look_at_one_counts_as_the_prompt_s() -> None:
    """70 prompts were sent that differ in the last block alone, then the engine reports the others."""
    scheduler = scheduler_of("a", block_size=16)
    for number in range(70):
        scheduler.finish(scheduler.schedule([*prompt(0), number, 7]).request_id, output_tokens=1)
    assert scheduler.core.accuracy.state(0)[2][5:7] == (1, 0)
    scheduler.apply("a", Engine().serve(prompt(0)))
    assert scheduler.core.accuracy.state(0)[2][5:7] == (0, 0)


def test_a_long_prompt_s_first_difference_is_found_wherever_it_is() -> None:
    scheduler, engine = scheduler_of("a", block_size=16), Engine(inserted(9_000))
    long = [8_000_000 + i for i in range(9_500)]
    for number in range(ENOUGH):
        send(scheduler, engine, [*long, *prompt(number, 100)])
    assert "token 9000: scheduled 8009000, stored 9999." in reported_by(scheduler)[0]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """What happens in turn: (what, which conversation or how many, how many events are received after it)."""
    kinds = st.sampled_from(["send", "send", "send", "turn", "other", "same", "evict", "clear"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 12), st.integers(0, 6)), min_size=60, max_size=200))


@settings(max_examples=60, deadline=None)
@given(histories(), st.sampled_from([1, 16, 32]), st.sampled_from([1, 2, 1 << 20]), st.booleans(), st.integers(0, 24))
def test_an_engine_that_reports_truthfully_is_never_accused(
    history: list[tuple[str, int, int]], block_size: int, chunk: int, early: bool, late_max: int
) -> None:
    """Own and other clients' conversations from the same system prompts, outputs, evictions and cleared caches; events
    come before a request's first token or up to `late_max` events late."""
    scheduler, engine = scheduler_of("a", block_size=block_size), Engine(block_size=block_size, chunk=chunk)
    turns = {which: [*SYSTEM[: 40 * (which % 4)], *prompt(which + 1, 40)] for which in range(13)}
    waiting: list[Any] = []
    for number, (what, which, received) in enumerate(history):
        output = [100_000 * number + 7 * which + i for i in range(which * 5)]
        tokens = [*turns[which], *prompt(10_000 + number, 30)] if what in ("send", "other") else turns[which]
        if what == "turn":
            turns[which] = [*turns[which], *output, *prompt(20_000 + number, 25)]
            tokens = turns[which]
        if what == "evict":
            waiting += engine.evict(which)
        elif what == "clear":
            waiting += engine.clear() if which == 0 else []
        elif what == "other":
            waiting += engine.serve(tokens, output)
        else:
            decision = scheduler.schedule(tokens)
            waiting += engine.serve(tokens, output)
            if early:
                scheduler.apply("a", waiting)
                waiting.clear()
            scheduler.finish(decision.request_id, output_tokens=1)
        count = max(received, len(waiting) - late_max)
        scheduler.apply("a", waiting[:count])
        del waiting[:count]
        assert reported_by(scheduler) == []
    scheduler.check()
