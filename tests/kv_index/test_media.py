"""Where a cached prefix lies (GPU memory, host memory, disk) and what that is worth: events of engines, a capacity
where nobody reports, seconds of loading, how they are learned, and what answers say of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import preble
from preble import BlockRemoved, BlockStored, ManualClock, PrefixEvicted, SchedulerConfig, WorkerSpec
from preble.errors import InvalidConfig, InvalidInput
from preble.types import RequestPlaced
from tests.kv_index.test_apply_raw import RECORDINGS, note_prefixes, recorded_payloads

SIZE = 16
PROMPT = list(range(4096))
HASHES = list(range(1, 257))
HOST_SECONDS, DISK_SECONDS = 1e-5, 5e-5


def fleet(*specs: WorkerSpec, **config: Any) -> preble.GlobalScheduler:
    specs = specs or (WorkerSpec("a", block_size=SIZE), WorkerSpec("b", block_size=SIZE))
    return preble.GlobalScheduler(
        specs, cost_model="mistral-7b/a6000", clock=ManualClock(100.0), config=SchedulerConfig(**config)
    )


def stored(first: int, end: int, medium: str | None) -> BlockStored:
    """Blocks of the prompt, from one to before another."""
    parent = HASHES[first - 1] if first else None
    return BlockStored(HASHES[first:end], parent, PROMPT[first * SIZE : end * SIZE], SIZE, medium=medium)


def of(sched: preble.GlobalScheduler, worker: str, prompt: list[int]) -> preble.types.WorkerCost:
    """A worker's terms for a prompt."""
    return next(cost for cost in sched.explain(prompt).workers if cost.worker == worker)


def serve(sched: preble.GlobalScheduler, prompt: list[int], seconds: float = 0.1, **asked: Any) -> preble.Decision:
    """A request's whole life, its first token so many seconds after it came."""
    decision = sched.schedule(prompt, **asked)
    clock: Any = sched._clock
    clock.advance(seconds)
    sched.first_token(decision.request_id, cached_tokens=decision.matched_tokens)
    sched.finish(decision.request_id, output_tokens=1)
    return decision


# --- events of engines ------------------------------------------------------------------------------------------------


def test_what_moves_to_host_memory_is_loaded_for_seconds() -> None:
    sched, prompt = fleet(), [*PROMPT, 7]
    sched.apply("a", [stored(0, 256, "GPU"), stored(0, 256, "CPU")])
    assert sched.match(prompt).matched_tokens == {"a": 4096} and sched.match(prompt).media == {}
    assert of(sched, "a", prompt).loading_seconds == 0.0

    sched.apply("a", [BlockRemoved(HASHES[128:], "GPU")])
    assert sched.match(prompt).matched_tokens == {"a": 4096}
    assert sched.match(prompt).media == {"a": {"gpu": 2048, "host": 2048, "disk": 0}}
    terms = of(sched, "a", prompt)
    assert (terms.matched_tokens, terms.host_tokens, terms.disk_tokens) == (4096, 2048, 0)
    assert terms.loading_seconds == pytest.approx(2048 * HOST_SECONDS)
    assert sched.stats()["workers"]["a"]["away_tokens"] == 2048

    sched.apply("a", [BlockRemoved(HASHES[192:], "CPU")])  # the last copy of these
    assert sched.match(prompt).media == {"a": {"gpu": 2048, "host": 1024, "disk": 0}}
    sched.apply("a", [stored(128, 192, "GPU")])  # loaded
    assert sched.match(prompt).matched_tokens == {"a": 3072} and sched.match(prompt).media == {}
    sched.check()


@pytest.mark.parametrize(
    ("medium", "where"),
    [("CPU", "host"), ("CPU_PINNED", "host"), ("DISK", "disk"), ("STORAGE", "disk"), ("EXTERNAL", "disk")],
)
def test_the_engines_words_for_media(medium: str, where: str) -> None:
    sched, prompt = fleet(), [*PROMPT, 7]
    sched.apply("a", [stored(0, 256, "GPU"), stored(0, 256, medium), BlockRemoved(HASHES, "GPU")])
    there = {"gpu": 0, "host": 0, "disk": 0} | {where: 4096}
    assert sched.match(prompt).media == {"a": there}
    seconds = HOST_SECONDS if where == "host" else DISK_SECONDS
    assert of(sched, "a", prompt).loading_seconds == pytest.approx(4096 * seconds)


@pytest.mark.parametrize("form", ["array", "map"])
@pytest.mark.parametrize("host", ["CPU", "CPU_PINNED"])
def test_an_engines_own_bytes(form: str, host: str) -> None:
    """As SGLang (hierarchical cache) and vLLM (offloading) publish it: two blocks, their copies, one leaves the GPU."""
    names: dict[str, tuple[str, ...]] = {}
    names["BlockStored"] = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    names["BlockRemoved"] = ("block_hashes", "medium")
    told: list[tuple[str, list[Any]]] = [
        ("BlockStored", [[11, 12], None, PROMPT[:32], SIZE, None, "GPU"]),
        ("BlockStored", [[11, 12], None, PROMPT[:32], SIZE, None, host]),
        ("BlockRemoved", [[12], "GPU"]),
    ]
    as_array = [[tag, *fields] for tag, fields in told]
    as_map = [{"type": tag, **dict(zip(names[tag], fields, strict=True))} for tag, fields in told]
    sched = fleet()
    assert sched.apply_raw("a", msgspec.msgpack.encode([0.0, as_array if form == "array" else as_map, 0])) == 2
    assert sched.match(PROMPT[:33]).media == {"a": {"gpu": 16, "host": 16, "disk": 0}}


@pytest.mark.parametrize("name", RECORDINGS)
def test_recorded_engines_with_a_copy_of_all_in_host_memory(name: str) -> None:
    """Beside a scheduler that gets what the engine published, one that gets the same and a copy in host memory of each
    stored block: what is on the GPU is the same to both, and nothing is lost but by a reset."""
    plain, behind = (
        preble.GlobalScheduler([WorkerSpec("a", 10**6, RECORDINGS[name])], clock=ManualClock(10.0)) for _ in range(2)
    )
    prefixes: dict[Any, list[int]] = {}
    there = on_gpu = all_of_it = 0
    for number, payload in enumerate(recorded_payloads(name)):
        time, events, rank = msgspec.msgpack.decode(payload)
        copies = [{**event, "medium": "CPU"} for event in events if event["type"] == "BlockStored"]
        plain.apply_raw("a", payload)
        behind.apply_raw("a", msgspec.msgpack.encode([time, [*copies, *events], rank]))
        note_prefixes(prefixes, events)
        if number % 10 == 0:
            for prefix in list(prefixes.values())[:: len(prefixes) // 40 + 1]:
                prompt = [*prefix, 7]
                known, found = plain.match(prompt).matched_tokens.get("a", 0), behind.match(prompt)
                here = found.media.get("a", {"gpu": found.matched_tokens.get("a", 0)})["gpu"]
                assert here <= known <= found.matched_tokens.get("a", 0)
                there, on_gpu, all_of_it = there + known, on_gpu + here, all_of_it + found.matched_tokens.get("a", 0)
            behind.check()
    assert there >= on_gpu >= 0.99 * there > 0
    assert all_of_it > there or "evict" not in name, "what was evicted is in host memory"


def test_blocks_that_were_only_ever_in_host_memory_are_there() -> None:
    """A prefix that a connector has fetched from elsewhere; then the engine goes on from it on the GPU."""
    sched, prompt = fleet(), [*PROMPT, 7]
    sched.apply("a", [stored(0, 64, "CPU"), stored(64, 128, "GPU")])
    assert sched.match(prompt).media == {"a": {"gpu": 0, "host": 2048, "disk": 0}}, "the first miss ends what is there"
    sched.apply("a", [stored(0, 64, "GPU")])
    assert sched.match(prompt).matched_tokens == {"a": 2048} and sched.match(prompt).media == {}


def test_what_comes_from_disk_to_host_memory_is_nearer() -> None:
    sched, prompt = fleet(), [*PROMPT, 7]
    sched.apply("a", [stored(0, 256, "DISK"), stored(0, 256, "CPU")])
    assert sched.match(prompt).media == {"a": {"gpu": 0, "host": 4096, "disk": 0}}
    sched.apply("a", [BlockRemoved(HASHES[100:], "CPU")])
    assert sched.match(prompt).media["a"]["disk"] >= 4096 - 1600, "a node is as far as the farthest of it"
    sched.check()


def test_a_split_keeps_what_is_away() -> None:
    sched = fleet()
    sched.apply("a", [stored(0, 256, "GPU"), stored(0, 256, "CPU"), BlockRemoved(HASHES[64:], "GPU")])
    other = [*PROMPT[:2000], *range(10**6, 10**6 + 500)]
    sched.schedule(other, exclude=["b"])
    assert sched.match([*PROMPT, 7]).media == {"a": {"gpu": 1024, "host": 3072, "disk": 0}}
    sched.check()


def test_where_only_the_gpu_is_reported_and_host_memory_is_known_of() -> None:
    """vLLM may offload and say nothing of it."""
    sched = fleet(WorkerSpec("a", block_size=SIZE, below_capacity_tokens=400_000), WorkerSpec("b", block_size=SIZE))
    sched.apply("a", [stored(0, 256, "GPU"), BlockRemoved(HASHES[100:], "GPU")])
    assert sched.match([*PROMPT, 7]).media == {"a": {"gpu": 1600, "host": 2496, "disk": 0}}
    sched.apply("b", [stored(0, 256, "GPU"), BlockRemoved(HASHES[100:], "GPU")])
    assert sched.match([*PROMPT, 7]).matched_tokens == {"a": 4096, "b": 1600}


def test_where_a_prefix_lies_is_an_estimate_that_events_change() -> None:
    """What an event moves counts as a change, whether the tokens stay cached or not, and in a batch as alone."""
    moved = [stored(0, 64, "GPU"), stored(64, 128, "GPU")]
    for batches in ([[event] for event in moved], [moved]):
        sched = fleet(WorkerSpec("a", block_size=SIZE, below_capacity_tokens=400_000))
        assert sum(sched.apply("a", batch) for batch in batches) == 2
        assert sum(sched.apply("a", batch) for batch in batches) == 0
        assert sched.apply("a", [BlockRemoved(HASHES[100:128], "GPU")]) == 1, "to host memory, which nobody reports"
        assert sched.apply("a", [stored(100, 128, "CPU"), stored(0, 100, "CPU")]) == 0, "and there it was"
        assert sched.apply("a", [BlockRemoved(HASHES[:100], "GPU")]) == 1
        assert [sum(sched.apply("a", batch) for batch in batches) for _ in range(2)] == [2, 0], "loaded, and used"
        sched.check()


def test_a_wrong_medium_changes_nothing() -> None:
    sched = fleet()
    serve(sched, PROMPT, exclude=["b"])
    with pytest.raises(InvalidInput, match="moved_to"):
        sched.apply("a", [PrefixEvicted(PROMPT, 0, moved_to=7)])  # type: ignore[arg-type]
    assert sched.match([*PROMPT, 7]).media == {}
    with pytest.raises(InvalidConfig, match="below_capacity_tokens"):
        WorkerSpec("a", below_capacity_tokens=-1)
    with pytest.raises(InvalidConfig, match="host_token_seconds"):
        SchedulerConfig(host_token_seconds=-1.0)


# --- the price --------------------------------------------------------------------------------------------------------


def test_the_worker_with_the_prefix_on_its_gpu_is_preferred_and_host_memory_to_nothing() -> None:
    sched, prompt = fleet(), [*PROMPT, 7]
    sched.apply("a", [stored(0, 256, "CPU")])
    assert sched.explain(prompt).worker == "a", "loading is cheaper than computing"
    sched.apply("b", [stored(0, 256, "GPU")])
    assert sched.explain(prompt).worker == "b", "and nothing is cheaper than loading"
    first = sched.schedule(list(range(10**6, 10**6 + 8000)), exclude=["a"])
    assert sched.explain(prompt).worker == "a", "but not than waiting"
    assert sched.schedule(prompt).reason == "exploit" and first.worker == "b"


def test_what_takes_longer_to_load_than_to_compute_is_computed() -> None:
    sched, prompt = fleet(host_token_seconds=1.0), [*PROMPT, 7]
    sched.apply("a", [stored(0, 256, "GPU"), stored(0, 256, "CPU"), BlockRemoved(HASHES[100:], "GPU")])
    terms = of(sched, "a", prompt)
    assert (terms.matched_tokens, terms.loading_seconds, terms.host_tokens) == (1600, 0.0, 0)
    assert sched.schedule(prompt).matched_tokens == 1600


def test_room_for_what_goes_to_host_memory_costs_its_way_back() -> None:
    sched = fleet(WorkerSpec("a", 4096, SIZE), WorkerSpec("b", 4096, SIZE, below_capacity_tokens=65536))
    for other in ("b", "a"):
        serve(sched, PROMPT, exclude=[other])
        serve(sched, [*PROMPT, 7], exclude=[other])  # so that what is cached is used
    new = list(range(10**6, 10**6 + 3000))
    assert 0.0 < of(sched, "b", new).eviction_seconds < 0.2 * of(sched, "a", new).eviction_seconds


def test_what_has_no_room_in_host_memory_is_gone() -> None:
    """Regression: a full host memory cost as little as an empty one, so documents gathered before it and were lost."""
    below = {"a": 0, "b": 65536, "full": 4096, "nearly": 5600}
    sched = fleet(*(WorkerSpec(name, 4096, SIZE, below_capacity_tokens=room) for name, room in below.items()))
    for name in below:
        for prompt in (PROMPT, [*PROMPT, 7]):
            serve(sched, prompt, exclude=[other for other in below if other != name])
    costs = {name: of(sched, name, list(range(10**6, 10**6 + 3000))).eviction_seconds for name in below}
    assert costs["full"] == pytest.approx(costs["a"], rel=0.01), "each token that comes drives one out for good"
    assert costs["b"] < 0.2 * costs["a"]
    assert 0.4 * costs["a"] < costs["nearly"] < 0.7 * costs["a"], "half of them have room"


# --- what loads take --------------------------------------------------------------------------------------------------


def test_loads_are_learned_from_times_to_first_token() -> None:
    """Truth is four times what was stated, and every first token is 20 ms late for other reasons."""
    truth, late = 4 * HOST_SECONDS, 0.02
    sched = fleet()
    serve(sched, PROMPT, exclude=["b"])
    for turn in range(60):
        sched.apply("a", [PrefixEvicted(PROMPT, 0, moved_to="CPU")])
        for prompt in ([*PROMPT, 10**6 + turn], list(range(turn * 10**4 + 10**7, turn * 10**4 + 10**7 + 500))):
            match = sched.match(prompt)
            loaded = match.media.get("a", {"host": 0})["host"]
            own = sched.prefill_seconds("a", len(prompt), match.matched_tokens.get("a", 0))
            serve(sched, prompt, own + loaded * truth + late, exclude=["b"])
    stats = sched.stats()["workers"]
    assert stats["a"]["host_token_seconds"] == pytest.approx(truth, rel=0.05)
    assert stats["a"]["disk_token_seconds"] == DISK_SECONDS, "nothing was loaded from there"
    assert stats["b"]["host_token_seconds"] == HOST_SECONDS, "nor by that worker"
    sched.check()


def test_a_first_token_that_waited_for_others_says_nothing_of_loads() -> None:
    sched = fleet()
    serve(sched, PROMPT, exclude=["b"])
    sched.apply("a", [PrefixEvicted(PROMPT, 0, moved_to="CPU")])
    sched.schedule(list(range(10**6, 10**6 + 5000)), exclude=["b"])
    serve(sched, [*PROMPT, 7], 5.0, exclude=["b"])
    assert sched.stats()["workers"]["a"]["host_token_seconds"] == HOST_SECONDS


def test_a_load_is_not_taken_for_slow_prefill() -> None:
    """Where costs are learned, too, what a load takes is not counted as computing."""
    clock = ManualClock(100.0)
    sched = preble.GlobalScheduler(["a"], clock=clock, config=SchedulerConfig(host_token_seconds=1e-4))
    serve(sched, PROMPT)
    for turn in range(60):
        sched.apply("a", [PrefixEvicted(PROMPT, 0, moved_to="CPU")])
        own = sched.prefill_seconds("a", 4097, 4096)
        serve(sched, [*PROMPT, 10**6 + turn], own + 4096 * 1e-4)
        clock.advance(1.0)
        sched.tick()
    factor = sched.stats()["workers"]["a"]["cost"]["prefill_factor"]
    assert factor < 2.0, "a first token took seventeen times what computing it takes"


def test_what_decisions_count_on_loading_is_counted() -> None:
    """By worker and medium; what another router has placed is counted there."""
    sched, key = fleet(), ("host_loaded_tokens", "disk_loaded_tokens")

    def counted(worker: str) -> tuple[int, ...]:
        stats: Any = sched.stats()["workers"][worker]
        return tuple(stats[name] for name in key)

    sched.apply("a", [stored(0, 64, "CPU"), stored(64, 128, "DISK")])
    decision = sched.schedule([*PROMPT[:2048], 7])
    assert (decision.worker, counted("a"), counted("b")) == ("a", (1024, 1024), (0, 0))
    sched.apply("a", [RequestPlaced("A", "r", [*PROMPT[:2048], 8])])
    assert counted("a") == (1024, 1024)
    sched.first_token(decision.request_id)
    serve(sched, [*PROMPT[:2048], 9])
    assert counted("a") == (1024, 1024), "it is on the GPU now"
    sched.remove_worker("a")
    sched.add_worker(WorkerSpec("a", block_size=SIZE))
    assert counted("a") == (0, 0), "the index was another worker's"


# --- where nobody reports ---------------------------------------------------------------------------------------------


def test_what_was_used_least_recently_is_in_host_memory_where_nobody_reports() -> None:
    spec = WorkerSpec("a", kv_capacity_tokens=1000, below_capacity_tokens=2000)
    sched = fleet(spec)
    prompts = [list(range(n * 1000, n * 1000 + 600)) for n in range(4)]
    for prompt in prompts[:2]:
        serve(sched, prompt)
    assert sched.match(prompts[0]).media == {"a": {"gpu": 400, "host": 199, "disk": 0}}, "leaves first, in part"
    serve(sched, prompts[2])
    assert sched.match(prompts[0]).media == {"a": {"gpu": 0, "host": 599, "disk": 0}}
    assert sched.match(prompts[1]).media == {"a": {"gpu": 400, "host": 199, "disk": 0}}
    serve(sched, prompts[0])  # it is loaded, and what was used before it goes
    assert sched.match(prompts[0]).media == {}
    assert sched.match(prompts[1]).media["a"]["gpu"] == 0
    stats = sched.stats()["workers"]["a"]
    assert (stats["cached_tokens"], stats["away_tokens"]) == (1800, 800)
    serve(sched, prompts[3])
    assert sched.stats()["workers"]["a"]["cached_tokens"] == 2000, "what host memory has no room for is gone"
    assert sched.match(prompts[1]).matched_tokens["a"] == 200
    sched.check()


def test_a_request_that_was_cancelled_has_loaded_nothing() -> None:
    sched = fleet()
    serve(sched, PROMPT, exclude=["b"])
    sched.apply("a", [PrefixEvicted(PROMPT, 1600, moved_to="CPU")])
    decision = sched.schedule([*PROMPT, 7], exclude=["b"])
    sched.cancel(decision.request_id)
    assert sched.match([*PROMPT, 7]).media == {"a": {"gpu": 1600, "host": 2496, "disk": 0}}
    serve(sched, [*PROMPT, 7], exclude=["b"])
    assert sched.match([*PROMPT, 7]).media == {}


def test_a_snapshot_keeps_where_prefixes_lie_and_what_loads_take() -> None:
    sched = fleet(WorkerSpec("a", block_size=SIZE, below_capacity_tokens=10**6), WorkerSpec("b", block_size=SIZE))
    sched.apply("a", [stored(0, 256, "GPU"), stored(0, 256, "DISK"), BlockRemoved(HASHES[128:], "GPU")])
    serve(sched, [*PROMPT[:1024], 7], exclude=["b"])
    serve(sched, [*PROMPT, 7], 3.0, exclude=["b"])
    sched.apply("a", [PrefixEvicted(PROMPT, 512, moved_to="CPU")])
    again = preble.GlobalScheduler.restore(sched.snapshot(), clock=ManualClock(sched.now()))
    again.check()
    prompt = [*PROMPT, 8]
    assert again.match(prompt).media == sched.match(prompt).media != {}
    assert again.explain(prompt) == sched.explain(prompt)
    assert again.workers == sched.workers
    key = "disk_token_seconds"
    assert again.stats()["workers"]["a"][key] == sched.stats()["workers"]["a"][key] > DISK_SECONDS


def test_who_leaves_takes_its_host_memory_along() -> None:
    """Decisions ask once whether any worker has some; the next worker of that index has none."""
    new = list(range(10**6, 10**6 + 3000))

    def full(name: str, **spec: Any) -> None:
        sched.add_worker(WorkerSpec(name, 4096, SIZE, **spec))
        serve(sched, PROMPT, exclude=["a"])
        serve(sched, [*PROMPT, 7], exclude=["a"])

    sched = fleet(WorkerSpec("a", 4096, SIZE))
    full("b", below_capacity_tokens=65536)
    cheap = of(sched, "b", new).eviction_seconds
    sched.check()
    again = preble.GlobalScheduler.restore(sched.snapshot(), clock=ManualClock(sched.now()))
    again.check()
    assert of(again, "b", new).eviction_seconds == cheap > 0.0
    sched.remove_worker("b")
    sched.check()
    full("c")
    sched.check()
    assert of(sched, "c", new).eviction_seconds > 5 * cheap


def test_a_cleared_cache_has_nothing_away() -> None:
    sched = fleet()
    sched.apply("a", [stored(0, 256, "CPU")])
    assert sched.clear_worker("a") == 4096
    assert sched.match([*PROMPT, 7]).media == {} and sched.stats()["workers"]["a"]["away_tokens"] == 0
    sched.check()
    sched.tick()
    sched.check()
