"""What engines say of their caches: which source counts, how far estimates are trusted, and what is said when engine
and prompts have nothing in common. The naive model's state machine (test_scheduler_machine.py) has random histories."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from preble import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    GlobalScheduler,
    ManualClock,
    SchedulerConfig,
    WorkerSpec,
)
from preble.errors import CacheMismatchWarning, UnknownWorker
from preble.scheduling.cache_mismatch import rejoined
from tests.support.paths import SHARED

CAPTURES = SHARED / "engines-cpu" / "captures"
needs_captures = pytest.mark.skipif(
    not CAPTURES.is_dir(), reason="the captured engine events are not here (PREBLE_SHARED)"
)
ENOUGH = 32  # prompts, or reports of nothing, after which there is a mismatch


def scheduler_of(*names: str, clock: ManualClock | None = None, block_size: int = 1) -> GlobalScheduler:
    specs = [WorkerSpec(name, block_size=block_size, kv_capacity_tokens=10**6) for name in names]
    return GlobalScheduler(specs, clock=clock or ManualClock(0.0), config=SchedulerConfig(history_seconds=180.0))


def serve(scheduler: GlobalScheduler, tokens: list[int], cached: int | None, namespace: Any = None) -> Any:
    """A request from beginning to end."""
    decision = scheduler.schedule(tokens, namespace=namespace)
    assert scheduler.first_token(decision.request_id, cached_tokens=cached)
    assert scheduler.finish(decision.request_id, output_tokens=1, cached_tokens=cached)
    return decision


def of(scheduler: GlobalScheduler, name: str = "a") -> dict[str, Any]:
    worker: dict[str, Any] = scheduler.stats()["workers"][name]
    return worker


def prompt(number: int, length: int = 64) -> list[int]:
    return [1000 * number + i for i in range(length)]


def stored(tokens: list[int], block_size: int = 16, namespace: Any = None) -> BlockStored:
    """The whole blocks of a prompt, as an engine would report of them."""
    ends = range(block_size, len(tokens) + 1, block_size)
    hashes = [hash((tuple(tokens[:end]), namespace)) & (2**63 - 1) for end in ends]
    return BlockStored(hashes, None, tokens[: len(hashes) * block_size], block_size, namespace, None)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Warnings of the tests that are about something else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheMismatchWarning)
        yield


# --- which source counts ----------------------------------------------------------------------------------------------


def test_the_best_source_received_lately_counts() -> None:
    scheduler = scheduler_of("a", block_size=16)
    assert of(scheduler)["cache_source"] == "estimate"
    serve(scheduler, prompt(0), cached=0)
    assert of(scheduler)["cache_source"] == "reports"
    scheduler.schedule(prompt(1), request_id="one")
    scheduler.apply("a", [stored(prompt(1))])
    assert of(scheduler)["cache_source"] == "events"


def test_a_source_that_falls_silent_makes_way_for_the_next() -> None:
    """Only prompts with a new block should be reported by events; all of them by reports."""
    scheduler = scheduler_of("a", block_size=16)
    serve(scheduler, prompt(0), cached=0)
    scheduler.apply("a", [stored(prompt(0))])
    for _ in range(3 * ENOUGH):
        serve(scheduler, prompt(0), cached=48)
    assert of(scheduler)["cache_source"] == "events"
    for number in range(ENOUGH):
        assert of(scheduler)["cache_source"] == "events"
        serve(scheduler, prompt(1 + number), cached=0)
    assert of(scheduler)["cache_source"] == "reports"
    for _ in range(ENOUGH):
        assert of(scheduler)["cache_source"] == "reports"
        serve(scheduler, prompt(0), cached=None)
    assert of(scheduler)["cache_source"] == "estimate"
    scheduler.apply("a", [stored(prompt(900))])
    assert of(scheduler)["cache_source"] == "events"


def test_a_clear_alone_is_no_source() -> None:
    """An engine that reports of no stored blocks does not say what it caches."""
    scheduler = scheduler_of("a")
    scheduler.apply("a", [AllBlocksCleared(), BlockRemoved([7])])
    assert of(scheduler)["cache_source"] == "estimate"


def test_a_report_of_less_prunes_what_hung_below_but_not_where_events_reports() -> None:
    long = [*prompt(0), *range(7, 71)]
    for told, left in ((False, 64), (True, 128)):
        scheduler = scheduler_of("a", block_size=16)
        serve(scheduler, long, cached=0)
        if told:
            scheduler.apply("a", [stored(long)])
        serve(scheduler, prompt(0), cached=0)
        assert scheduler.match([*long, 1]).matched_tokens == {"a": left}


def full_scheduler(told: bool) -> GlobalScheduler:
    """Two thirds of a worker's cache are in use; `told`: by its engine's own word."""
    spec = WorkerSpec("a", block_size=16, kv_capacity_tokens=100)
    scheduler = GlobalScheduler([spec], clock=ManualClock(0.0), config=SchedulerConfig(history_seconds=180.0))
    serve(scheduler, prompt(0), cached=0)
    if told:
        scheduler.apply("a", [stored(prompt(0))])
    return scheduler


def test_what_an_engine_reported_of_is_not_evicted_by_estimate_ahead_of_its_word() -> None:
    """An engine that keeps what the estimate would have evicted never speaks of it again."""
    for told, left in ((False, 32), (True, 64)):
        scheduler = full_scheduler(told)
        serve(scheduler, prompt(1, 60), cached=0)
        assert scheduler.match([*prompt(0), 1]).matched_tokens == {"a": left}
    scheduler.apply("a", [stored(prompt(1)), BlockRemoved(stored(prompt(0)).block_hashes[1:])])
    assert scheduler.match([*prompt(0), 1]).matched_tokens == {"a": 16}
    scheduler.check()


def test_where_word_is_late_estimates_end_a_quarter_above_capacity() -> None:
    scheduler = full_scheduler(told=True)
    for number in range(1, 4):
        serve(scheduler, prompt(number), cached=0)
    assert of(scheduler)["cached_tokens"] == 125
    scheduler.check()


def test_where_an_engine_falls_silent_estimates_end_at_capacity_again() -> None:
    scheduler = full_scheduler(told=True)
    for number in range(ENOUGH):
        assert of(scheduler)["cached_tokens"] > 100 or number < 2
        serve(scheduler, prompt(1 + number), cached=0)
    assert (of(scheduler)["cached_tokens"], of(scheduler)["cache_source"]) == (100, "reports")
    scheduler.apply("a", [stored(prompt(900))])
    scheduler.schedule(prompt(901))
    assert of(scheduler)["cached_tokens"] == 125
    scheduler.check()


def test_a_report_of_more_extends_what_is_estimated() -> None:
    """What was forgotten while the request waited is estimated again, whatever was reported."""
    scheduler = scheduler_of("a", block_size=16)
    decision = scheduler.schedule(prompt(0))
    scheduler.clear_worker("a")
    assert scheduler.match([*prompt(0), 1]).matched_tokens == {}
    scheduler.first_token(decision.request_id, cached_tokens=48)
    assert scheduler.match([*prompt(0), 1]).matched_tokens == {"a": 64}
    assert of(scheduler)["surplus_tokens"] == 48


# --- trust ------------------------------------------------------------------------------------------------------------


def test_honest_reports_leave_full_accuracy() -> None:
    scheduler = scheduler_of("a", block_size=16)
    for _ in range(100):
        serve(scheduler, prompt(0), cached=48 if of(scheduler)["cached_tokens"] else 0)
    told = of(scheduler)
    assert told["cache_accuracy"] == 1.0 and told["judged_reports"] == 99
    assert told["known_tokens"] == told["kept_tokens"] == 99 * 48 and told["surplus_tokens"] == 0


@pytest.mark.usefixtures("quiet")
def test_a_worker_that_always_reports_nothing_is_estimated_an_eighth() -> None:
    scheduler = scheduler_of("a", block_size=16)
    for number in range(10):  # the first has nothing to find; nine that fade count for more than eight
        assert of(scheduler)["cache_accuracy"] == 1.0, number
        assert scheduler.explain(prompt(0)).matched_tokens == (48 if number else 0)
        serve(scheduler, prompt(0), cached=0)
    assert of(scheduler)["cache_accuracy"] == 1.0 / 8


@pytest.mark.usefixtures("quiet")
def test_a_inaccurate_worker_is_left_for_an_honest_one() -> None:
    clock = ManualClock(0.0)
    scheduler = scheduler_of("a", "b", clock=clock, block_size=16)
    for _ in range(20):
        decision = scheduler.schedule(prompt(0), exclude=["b"])
        scheduler.finish(decision.request_id, output_tokens=1, cached_tokens=0)
    assert of(scheduler)["cache_accuracy"] == 1.0 / 8
    assert scheduler.match(prompt(0)).matched_tokens == {"a": 48}  # marks are what they were
    explained = scheduler.explain(prompt(0))
    assert explained.reason == "explore" and explained.worker == "b"
    assert {cost.worker: cost.matched_tokens for cost in explained.workers} == {"a": 0, "b": 0}
    assert scheduler.schedule(prompt(0)).worker == "b"


@pytest.mark.usefixtures("quiet")
def test_accuracy_comes_back_with_time_and_with_honesty() -> None:
    clock = ManualClock(0.0)
    scheduler = scheduler_of("a", clock=clock, block_size=16)
    for _ in range(20):
        serve(scheduler, prompt(0), cached=0)
    seen = [of(scheduler)["cache_accuracy"]]
    for _ in range(80):
        serve(scheduler, prompt(0), cached=48)
        seen.append(of(scheduler)["cache_accuracy"])
    assert seen[0] == 1.0 / 8 and seen == sorted(seen) and seen[-1] == 1.0
    for _ in range(40):
        serve(scheduler, prompt(0), cached=0)
    assert of(scheduler)["cache_accuracy"] < 1.0
    for _ in range(4):
        clock.advance(60.0)
        scheduler.tick()
    assert of(scheduler)["cache_accuracy"] == 1.0  # by four half-lives less than eight of at most 64 reports count
    scheduler.check()


def test_a_worker_that_reports_everything_is_accurate_and_its_surplus_counted() -> None:
    """Nothing contradicts it. Its load is booked too low, which is what it said."""
    scheduler = scheduler_of("a", block_size=16)
    for number in range(40):
        serve(scheduler, prompt(number), cached=64)
    assert of(scheduler)["cache_accuracy"] == 1.0 and of(scheduler)["surplus_tokens"] == 40 * 64
    assert of(scheduler)["window_prefill_seconds"] < 40 * scheduler._cost_model.prefill_time(64, 64)


def test_finding_what_was_not_predicted_is_surplus_and_no_lie() -> None:
    scheduler = scheduler_of("a", block_size=16)
    for number in range(40):
        serve(scheduler, prompt(number), cached=32)
    told = of(scheduler)
    assert (told["cache_accuracy"], told["surplus_tokens"], told["judged_reports"]) == (1.0, 40 * 32, 0)


def test_a_prediction_whose_first_request_still_runs_is_not_judged() -> None:
    """GatewayProcesses of a cold prompt arrive together; the engine has nothing yet for any of them."""
    scheduler = scheduler_of("a", block_size=16)
    decisions = [scheduler.schedule(prompt(0)) for _ in range(40)]
    for decision in decisions:
        scheduler.first_token(decision.request_id, cached_tokens=0)
    assert of(scheduler)["cache_accuracy"] == 1.0 and of(scheduler)["judged_reports"] == 0


@pytest.mark.usefixtures("quiet")
def test_events_are_estimated_whatever_reports_say() -> None:
    scheduler = scheduler_of("a", block_size=16)
    serve(scheduler, prompt(0), cached=0)
    scheduler.apply("a", [stored(prompt(0))])
    for _ in range(40):
        serve(scheduler, prompt(0), cached=0)
    assert of(scheduler)["cache_accuracy"] == 1.0
    for number in range(ENOUGH):
        serve(scheduler, prompt(1 + number), cached=0)
    assert of(scheduler)["cache_source"] == "reports" and of(scheduler)["cache_accuracy"] == 1.0 / 8
    scheduler.apply("a", [stored(prompt(1))])
    assert of(scheduler)["cache_accuracy"] == 1.0
    scheduler.check()


def test_a_number_reported_twice_is_judged_once() -> None:
    scheduler = scheduler_of("a", block_size=16)
    serve(scheduler, prompt(0), cached=0)
    serve(scheduler, prompt(0), cached=48)
    assert of(scheduler)["judged_reports"] == 1


# --- a cache that is empty --------------------------------------------------------------------------------------------


def test_clearing_a_worker_drops_its_marks_and_keeps_its_bookings() -> None:
    scheduler = scheduler_of("a", "b", block_size=16)
    serve(scheduler, prompt(0), cached=0)
    scheduler.schedule(prompt(0), request_id="live", exclude=["b"])
    before = of(scheduler)
    assert scheduler.clear_worker("a") == 64
    after = of(scheduler)
    assert scheduler.match(prompt(0)).matched_tokens == {} and after["cached_tokens"] == after["known_blocks"] == 0
    for key in ("live_requests", "waiting_requests", "load_seconds", "window_requests"):
        assert after[key] == before[key]
    assert scheduler.first_token("live", cached_tokens=0) and scheduler.finish("live", output_tokens=1)
    assert of(scheduler)["judged_reports"] == 0  # what was known to have gone is no lie
    assert scheduler.match(prompt(0)).matched_tokens == {"a": 48}
    with pytest.raises(UnknownWorker, match="nobody"):
        scheduler.clear_worker("nobody")
    scheduler.check()


def test_marks_of_a_cleared_worker_are_swept_by_tick() -> None:
    scheduler = scheduler_of("a", "b")
    for number in range(1000):
        serve(scheduler, prompt(number, 3), cached=0)
    whole = scheduler.stats()["tree"]["marks"]
    assert scheduler.clear_worker("a") > 0
    scheduler.remove_worker("b")
    ghosts = scheduler.stats()["tree"]["ghost_marks"]
    assert 0 < ghosts == whole - 2 * 256  # each call swept one slice
    assert all(not scheduler.match(prompt(number, 3)).matched_tokens for number in range(1000))
    scheduler.check()
    restored = GlobalScheduler.restore(scheduler.snapshot(), clock=ManualClock(0.0))
    restored.check()
    scheduler.add_worker("b")
    serve(scheduler, prompt(0, 3), cached=0)
    scheduler.tick()
    tree = scheduler.stats()["tree"]
    assert (tree["ghost_marks"], tree["marks"]) == (0, 1)
    scheduler.check()


# --- nothing in common ------------------------------------------------------------------------------------------------


def reported_by(scheduler: GlobalScheduler) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.tick()
    return [str(one.message) for one in caught if issubclass(one.category, CacheMismatchWarning)]


def run_apart(
    scheduler: GlobalScheduler,
    engine: Callable[[list[int]], list[int]],
    space: Any = None,
    count: int = ENOUGH,
    first: int = 1,
) -> list[str]:
    """Serve prompts; the engine stores what it makes of them, elsewhere if `space` is given."""
    for number in range(count):
        tokens = [5, 6, 7, *prompt(number + first)]
        decision = scheduler.schedule(tokens, namespace="mine" if space else None)
        scheduler.apply("a", [stored(engine(tokens), namespace=space)])
        scheduler.finish(decision.request_id, output_tokens=1)
    return reported_by(scheduler)


@pytest.mark.parametrize(
    ("engine", "cause", "position", "scheduled", "other"),
    [
        (lambda tokens: [1, *tokens], "extra_token", 0, 5, 1),
        (lambda tokens: tokens[1:], "extra_token", 0, 5, 6),
        (lambda tokens: [9, *tokens[1:]], "first_token", 0, 5, 9),
        (lambda tokens: [*tokens[:2], 8, *tokens[2:]], "first_block", 2, 7, 8),
        (lambda tokens: [100000 + token for token in tokens], "first_token", 0, 5, 100005),
    ],
)
def test_prompts_that_the_engine_changes_are_reported_once(
    engine: Any, cause: str, position: int, scheduled: int, other: int
) -> None:
    scheduler = scheduler_of("a", block_size=16)
    assert run_apart(scheduler, engine, count=ENOUGH - 1) == []
    news = run_apart(scheduler, engine, count=ENOUGH + 1)
    assert len(news) == 1 and "worker 'a'" in news[0]
    assert f"token {position}: scheduled {scheduled}, stored {other}" in news[0]
    (mismatch,) = of(scheduler)["cache_mismatches"]
    assert (mismatch["cause"], mismatch["position"]) == (cause, position)
    assert (mismatch["scheduled_token"], mismatch["stored_token"]) == (scheduled, other)
    assert run_apart(scheduler, engine) == []
    restored = GlobalScheduler.restore(scheduler.snapshot(), clock=ManualClock(0.0))
    assert of(restored)["cache_mismatches"] == [mismatch] and reported_by(restored) == []
    scheduler.check()


def test_a_mismatch_is_over_once_stored_blocks_begin_like_prompts() -> None:
    scheduler = scheduler_of("a", block_size=16)
    assert len(run_apart(scheduler, lambda tokens: [1, *tokens])) == 1
    decision = scheduler.schedule(prompt(5000))
    scheduler.apply("a", [stored(prompt(5000))])
    scheduler.finish(decision.request_id)
    assert reported_by(scheduler) == [] and of(scheduler)["cache_mismatches"] == []
    assert run_apart(scheduler, lambda tokens: [2, *tokens], first=100) == []  # of this cause it was reported
    assert [mismatch["cause"] for mismatch in of(scheduler)["cache_mismatches"]] == ["extra_token"]


def test_another_namespace_is_named_by_its_kind_and_no_salt_is_shown() -> None:
    scheduler = scheduler_of("a", block_size=16)
    (message,) = run_apart(scheduler, lambda tokens: tokens, space=("salt", "xyzzy"))
    assert "in namespace ('salt', ...), but" in message and "first 64 tokens" in message
    assert "xyzzy" not in message and "mine" not in message and "scheduled in of type str" not in message
    assert "xyzzy" not in str(of(scheduler)["cache_mismatches"])
    assert [mismatch["cause"] for mismatch in of(scheduler)["cache_mismatches"]] == ["namespace"]
    both = (("lora", "adapter"), ("salt", "xyzzy"))
    (message,) = run_apart(scheduler_of("a", block_size=16), lambda tokens: tokens, space=both)
    assert "(('lora', 'adapter'), ('salt', ...))" in message and "xyzzy" not in message


def test_another_block_size_is_named() -> None:
    scheduler = scheduler_of("a", block_size=32)
    (message,) = run_apart(scheduler, lambda tokens: tokens, count=8)
    assert "blocks have 16 tokens" in message and "block_size says 32" in message


def test_other_routers_prompts_alone_are_no_mismatch() -> None:
    """Blocks come that nobody here has sent, but nothing of ours is missing."""
    scheduler = scheduler_of("a", block_size=16)
    for number in range(200):
        scheduler.apply("a", [stored(prompt(number))])
    assert reported_by(scheduler) == [] and scheduler.core.accuracy.state(0)[2][5:7] == (0, 200)


def test_prompts_that_the_tree_has_forgotten_are_said_to_be_gone() -> None:
    scheduler = scheduler_of("a", block_size=16)
    for number in range(ENOUGH):
        serve(scheduler, prompt(number), cached=None)
    scheduler.apply("a", [stored(prompt(500 + number)) for number in range(8)])
    scheduler.core.tree.clear_worker(0)
    scheduler.core.tree.expire(1e6)
    (message,) = reported_by(scheduler)
    assert "cannot be said" in message


def test_reports_of_nothing_are_reported_once_and_are_over_with_the_first_hit() -> None:
    scheduler = scheduler_of("a", block_size=16)
    for _ in range(ENOUGH):
        serve(scheduler, prompt(0), cached=0)
    assert reported_by(scheduler) == []
    serve(scheduler, prompt(0), cached=0)
    (message,) = reported_by(scheduler)
    assert "cached_tokens 0" in message and "--enable-cache-report" in message
    assert reported_by(scheduler) == [] and len(of(scheduler)["cache_mismatches"]) == 1
    serve(scheduler, prompt(0), cached=16)
    assert reported_by(scheduler) == [] and of(scheduler)["cache_mismatches"] == []


def test_warnings_made_errors_do_not_end_the_background_thread() -> None:
    scheduler = scheduler_of("a", block_size=16)
    for _ in range(ENOUGH + 1):
        serve(scheduler, prompt(0), cached=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CacheMismatchWarning):
            scheduler.tick()
        scheduler.tick()
    assert len(of(scheduler)["cache_mismatches"]) == 1


def test_where_two_go_on_alike_is_found() -> None:
    text = list(range(100, 140))
    assert rejoined([1, *text], [2, *text]) == (1, 1)
    assert rejoined(text, [0, *text]) == (0, 1) and rejoined([0, 0, *text], text) == (2, 0)
    assert rejoined([1, 2, *text], [3, 4, 5, *text]) == (2, 3)
    assert rejoined([1, *text[:8]], [2, *text[:8]]) == (1, 1)  # short ones: half of them is enough, four at least
    assert rejoined([1, *text[:15]], [2, *text[:15], 2, *text]) == (1, 1)  # the end of one
    assert rejoined([1, *text[:15], 1], [2, *text[:15], 2, *text]) is None
    assert rejoined([1, 5, 6, 7], [2, 5, 6, 7]) is None and rejoined([], text) is None
    assert rejoined(text, [-token for token in text]) is None


# --- real engines -----------------------------------------------------------------------------------------------------

ENGINES = {
    "vllm032_int": 32,
    "vllm032_bytes_evict": 32,
    "sglang0523_20m": 16,
    "sglang0523_page1_evict": 1,
}


def replay(name: str, block_size: int, change: Callable[[list[int]], list[int]], space: Any) -> list[str]:
    """What is warned of while a capture is replayed, with the prompts as the router made them of the engine's."""
    steps: list[tuple[float, int, dict[str, Any]]] = []
    with (CAPTURES / f"{name}.jsonl").open() as file:
        for line in file:
            step = json.loads(line)
            if step["kind"] == "request":
                steps += [(step["t0"], 0, step), (step["t1"], 2, step)]
            elif step["kind"] == "event":
                steps.append((step["t"], 1, step))
    steps.sort(key=lambda one: one[:2])
    scheduler = scheduler_of("a", block_size=block_size)
    news = []
    for _, kind, step in steps:
        if kind == 0:
            scheduler.schedule(change(step["input_ids"]), request_id=step["i"], namespace=space)
        elif kind == 1:
            scheduler.apply_raw("a", bytes.fromhex(step["frames"][2]))
        else:
            scheduler.finish(step["i"], output_tokens=len(step["output_ids"]))
        news += reported_by(scheduler)
    scheduler.check()
    assert of(scheduler)["cache_source"] == "events"
    return news


@needs_captures
@pytest.mark.parametrize("name", ENGINES)
def test_a_healthy_replay_warns_of_nothing(name: str) -> None:
    assert replay(name, ENGINES[name], lambda tokens: tokens, None) == []


@needs_captures
@pytest.mark.parametrize("name", ENGINES)
def test_a_replay_with_another_bos_names_the_token_in_front(name: str) -> None:
    (message,) = replay(name, ENGINES[name], lambda tokens: [9999, *tokens], None)
    assert "BOS" in message and "First difference at token 0: scheduled 9999" in message


@needs_captures
@pytest.mark.parametrize("at", [20, 40, 150])
@pytest.mark.parametrize("name", ENGINES)
def test_a_replay_with_another_token_further_on_names_it(name: str, at: int) -> None:
    (message,) = replay(name, ENGINES[name], lambda tokens: [*tokens[:at], 9999, *tokens[at + 1 :]], None)
    assert f"First difference at token {at}: scheduled 9999" in message and "both go on alike" in message


@needs_captures
@pytest.mark.parametrize("name", ENGINES)
def test_a_replay_in_another_namespace_names_both(name: str) -> None:
    (message,) = replay(name, ENGINES[name], lambda tokens: tokens, ("salt", "x"))
    assert "in namespace None, but requests are scheduled in ('salt', ...)" in message


@needs_captures
@pytest.mark.parametrize("name", ENGINES)
def test_a_replay_with_another_page_size_names_both(name: str) -> None:
    (message,) = replay(name, 64, lambda tokens: tokens, None)
    assert f"blocks have {ENGINES[name]} tokens, WorkerSpec.block_size says 64" in message
