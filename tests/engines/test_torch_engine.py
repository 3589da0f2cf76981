"""The torch engine against transformers itself: greedy output without a cache is the truth, token for token in float32.

Whatever the engine reuses, chunks, evicts, preempts, batches or resumes, that truth must not change.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.register_assert_rewrite("tests.support.torch_fixtures")
pytest_plugins = ["tests.support.torch_fixtures"]

from preble.engines.base import GenerationRequest  # noqa: E402
from preble.engines.torch import TorchEngine  # noqa: E402
from preble.errors import DuplicateRequest, EngineError, InvalidInput, InvalidTokens, QueueFull  # noqa: E402
from preble.local import LocalConfig  # noqa: E402
from preble.types import PrefixEvicted, SamplingParams  # noqa: E402
from tests.support.torch_fixtures import Driver, Reference, greedy, joined, prompt  # noqa: E402

MakeEngine = Callable[..., TorchEngine]


# --- equality with transformers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_budget", [7, 33, 512])
def test_a_mixed_batch_answers_like_transformers_at_any_chunk_size(
    make_engine: MakeEngine, reference: Reference, token_budget: int
) -> None:
    driver = Driver(make_engine(token_budget=token_budget))
    prompts = {f"r{i}": prompt(i, length) for i, length in enumerate([1, 2, 9, 40, 75, 130])}
    for request_id, token_ids in prompts.items():
        driver.submit(request_id, token_ids, greedy(16))
    answers = driver.run()
    for request_id, token_ids in prompts.items():
        assert answers[request_id].token_ids == reference.greedy(token_ids, 16)
        assert answers[request_id].finish_reason == "length"
    driver.engine.scheduler.check()


def test_the_reference_is_what_generate_returns(reference: Reference) -> None:
    token_ids = prompt(3, 40)
    whole = reference.model.generate(
        torch.tensor(token_ids[None].astype(np.int64)),
        attention_mask=torch.ones(1, 40, dtype=torch.int64),
        max_new_tokens=16,
        do_sample=False,
        use_cache=False,
        eos_token_id=-1,
    )
    assert whole[0, 40:].tolist() == reference.greedy(token_ids, 16)


@pytest.mark.parametrize("token_budget", [11, 512])
def test_a_prefix_hit_reuses_kv_and_changes_no_token(
    make_engine: MakeEngine, reference: Reference, token_budget: int
) -> None:
    driver = Driver(make_engine(token_budget=token_budget))
    shared = prompt(0, 90)
    first = driver.ask("first", joined(shared, prompt(1, 10)), greedy(8))
    second = driver.ask("second", joined(shared, prompt(2, 17)), greedy(8))
    third = driver.ask("third", joined(shared[:50], prompt(3, 5)), greedy(8))
    assert (first.cached_tokens, second.cached_tokens, third.cached_tokens) == (0, 90, 50)
    assert first.token_ids == reference.greedy(joined(shared, prompt(1, 10)), 8)
    assert second.token_ids == reference.greedy(joined(shared, prompt(2, 17)), 8)
    assert third.token_ids == reference.greedy(joined(shared[:50], prompt(3, 5)), 8)


def test_a_repeated_prompt_computes_only_its_last_token(make_engine: MakeEngine, reference: Reference) -> None:
    driver = Driver(make_engine())
    answers = [driver.ask(f"again{i}", prompt(5, 64), greedy(6)) for i in range(3)]
    assert [answer.cached_tokens for answer in answers] == [0, 63, 63]
    assert all(answer.token_ids == reference.greedy(prompt(5, 64), 6) for answer in answers)


def test_a_follow_up_turn_reuses_the_answer_as_well(make_engine: MakeEngine, reference: Reference) -> None:
    driver = Driver(make_engine())
    turn = driver.ask("turn1", prompt(6, 40), greedy(12))
    conversation = joined(prompt(6, 40), np.array(turn.token_ids, np.int32), prompt(7, 9))
    answer = driver.ask("turn2", conversation, greedy(8))
    # All but the last output token has been computed, so all but that one is cached.
    assert answer.cached_tokens == 40 + 12 - 1
    assert answer.token_ids == reference.greedy(conversation, 8)


def test_reused_kv_is_what_the_answer_is_made_of(make_engine: MakeEngine, reference: Reference) -> None:
    """The equality above would notice a wrong cache: with one cached key zeroed in one layer, the answer changes."""
    engine = make_engine()
    driver = Driver(engine)
    token_ids = prompt(8, 60)
    driver.ask("fill", token_ids, greedy(1))
    assert engine._runner is not None
    engine._runner._pool.keys[1].zero_()
    assert driver.ask("hit", token_ids, greedy(12)).token_ids != reference.greedy(token_ids, 12)


def test_namespaces_share_no_cache(make_engine: MakeEngine, reference: Reference) -> None:
    driver = Driver(make_engine())
    hits = [
        driver.ask(f"{name}{i}", prompt(9, 50), greedy(4), namespace=name).cached_tokens
        for i in range(2)
        for name in ("tenant-a", "tenant-b")
    ]
    assert hits == [0, 0, 49, 49]


def test_eviction_changes_no_token_and_is_reported(make_engine: MakeEngine, reference: Reference) -> None:
    engine = make_engine(kv_capacity_tokens=160, token_budget=24)
    driver = Driver(engine)
    documents = [prompt(20 + i, 60) for i in range(4)]
    for number in range(12):
        token_ids = joined(documents[number * 7 % 4], prompt(40 + number, 6))
        answer = driver.ask(f"r{number}", token_ids, greedy(6))
        assert answer.token_ids == reference.greedy(token_ids, 6)
        engine.scheduler.check()
    events = engine.take_events()
    assert engine.scheduler.stats()["evicted_tokens"] > 160
    assert events and all(isinstance(event, PrefixEvicted) for event in events)
    assert engine.take_events() == []


def test_preemption_by_recompute_changes_no_token(make_engine: MakeEngine, reference: Reference) -> None:
    engine = make_engine(kv_capacity_tokens=120, token_budget=16)
    driver = Driver(engine)
    prompts = {f"r{i}": prompt(60 + i, 20) for i in range(5)}
    for request_id, token_ids in prompts.items():
        driver.submit(request_id, token_ids, greedy(40))
    answers = driver.run()
    assert engine.scheduler.stats()["preempted"] > 0
    for request_id, token_ids in prompts.items():
        assert answers[request_id].token_ids == reference.greedy(token_ids, 40)
    engine.scheduler.check()


def test_sampled_output_survives_preemption(make_engine: MakeEngine) -> None:
    def outputs(kv_capacity_tokens: int) -> tuple[list[list[int]], int]:
        driver = Driver(make_engine(kv_capacity_tokens=kv_capacity_tokens, token_budget=16))
        for i in range(5):
            driver.submit(f"r{i}", prompt(60 + i, 20), greedy(40, temperature=1.0, top_p=0.9, seed=i))
        answers = driver.run()
        return [answers[f"r{i}"].token_ids for i in range(5)], driver.engine.scheduler.stats()["preempted"]

    roomy, none = outputs(4096)
    tight, some = outputs(120)
    assert none == 0 < some
    assert roomy == tight


def test_many_concurrent_requests_answer_as_one_by_one(make_engine: MakeEngine) -> None:
    shared = prompt(80, 30)
    prompts = [joined(shared[: 5 * (i % 7)], prompt(81 + i, 1 + 3 * i)) for i in range(20)]
    samplings = [greedy(5 + i % 9, temperature=0.8 * (i % 2), top_p=0.95, seed=i) for i in range(20)]
    alone, together = Driver(make_engine()), Driver(make_engine(token_budget=50, max_running=16))
    for i in range(20):
        alone.ask(f"r{i}", prompts[i], samplings[i])
        together.submit(f"r{i}", prompts[i], samplings[i])
    together.run()
    for i in range(20):
        assert together.answers[f"r{i}"].token_ids == alone.answers[f"r{i}"].token_ids


def test_a_random_day_of_requests_aborts_and_memory_pressure(make_engine: MakeEngine, reference: Reference) -> None:
    rng = np.random.default_rng(7)
    engine = make_engine(kv_capacity_tokens=200, token_budget=19, max_running=6, min_shared_tokens=4)
    driver = Driver(engine)
    documents = [prompt(100 + i, 40) for i in range(3)]
    prompts, aborted = {}, set()
    for number in range(40):
        name = f"r{number}"
        prompts[name] = joined(documents[rng.integers(3)][: rng.integers(1, 41)], prompt(200 + number % 11, 5))
        driver.submit(name, prompts[name], greedy(int(rng.integers(1, 25))))
        for _ in range(rng.integers(0, 8)):
            driver.step()
            engine.scheduler.check()
        if rng.random() < 0.2:
            victim = f"r{rng.integers(number + 1)}"
            if engine.abort(victim):
                aborted.add(victim)
    answers = driver.run()
    engine.scheduler.check()
    assert engine.scheduler.stats()["evicted_tokens"] > 0 and aborted
    for name, answer in answers.items():
        assert answer.finish_reason == ("abort" if name in aborted else "length")
        assert answer.token_ids == reference.greedy(prompts[name], len(answer.token_ids))


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("emitted", [1, 7, 15])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_resumed_on_another_engine_continues_identically(
    make_engine: MakeEngine, emitted: int, temperature: float
) -> None:
    sampling = greedy(16, temperature=temperature, top_p=0.9, seed=11)
    whole = Driver(make_engine()).ask("r", prompt(12, 50), sampling)
    so_far = joined(prompt(12, 50), np.array(whole.token_ids[:emitted], np.int32))
    rest = Driver(make_engine()).ask("r", so_far, sampling, output_offset=emitted)
    assert rest.first_index == emitted
    assert rest.token_ids == whole.token_ids[emitted:]
    assert rest.finish_reason == "length"


def test_a_request_resumed_after_its_last_token_only_learns_its_end(make_engine: MakeEngine) -> None:
    answer = Driver(make_engine()).ask("r", prompt(1, 20), greedy(4), output_offset=4)
    assert (answer.token_ids, answer.first_index, answer.finish_reason) == ([], 4, "length")


def test_a_request_resumed_at_the_context_limit_only_learns_its_end(make_engine: MakeEngine) -> None:
    driver = Driver(make_engine(kv_capacity_tokens=40))
    whole = driver.ask("whole", prompt(1, 30), greedy(100))
    full = joined(prompt(1, 30), np.array(whole.token_ids, np.int32))
    answer = driver.ask("resumed", full, greedy(100), output_offset=10)
    assert (len(full), answer.token_ids, answer.first_index, answer.finish_reason) == (40, [], 10, "length")


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_output_and_is_part_of_it(make_engine: MakeEngine, reference: Reference) -> None:
    expected = reference.greedy(prompt(1, 30), 16)
    stop = next(token for token in expected[4:] if token not in expected[:4])
    cut = expected.index(stop) + 1
    never = next(token for token in range(2048) if token not in expected)
    driver = Driver(make_engine())
    stopped = driver.ask("stopped", prompt(1, 30), greedy(16, stop_token_ids=(never, stop)))
    assert (stopped.token_ids, stopped.finish_reason) == (expected[:cut], "stop")
    free = driver.ask("free", prompt(1, 30), greedy(16))
    assert (free.token_ids, free.finish_reason) == (expected, "length")


def test_the_models_end_of_sequence_stops_unless_ignored(
    make_engine: MakeEngine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    expected = reference.greedy(prompt(1, 30), 16)
    engine = make_engine()
    assert engine.info.eos_token_ids == (2,)
    monkeypatch.setattr(engine, "info", dataclasses.replace(engine.info, eos_token_ids=(expected[0],)))
    driver = Driver(engine)
    answer = driver.ask("stops", prompt(1, 30), SamplingParams(max_new_tokens=16))
    assert (answer.token_ids, answer.finish_reason) == (expected[:1], "stop")
    assert driver.ask("goes on", prompt(1, 30), greedy(16)).token_ids == expected


def test_output_ends_at_the_context_limit(tiny_model_dir: Path, reference: Reference) -> None:
    local = LocalConfig(kv_capacity_tokens=1000)
    engine = TorchEngine(tiny_model_dir, local=local, dtype="float32", device="cpu", max_model_tokens=50)
    assert engine.info.max_model_tokens == 50
    answer = Driver(engine).ask("r", prompt(1, 44), greedy(100))
    assert (answer.token_ids, answer.finish_reason) == (reference.greedy(prompt(1, 44), 6), "length")


def test_output_ends_at_the_kv_capacity(make_engine: MakeEngine, reference: Reference) -> None:
    engine = make_engine(kv_capacity_tokens=40)
    assert engine.info.max_model_tokens == 40
    answer = Driver(engine).ask("r", prompt(1, 30), greedy(100))
    assert (answer.token_ids, answer.finish_reason) == (reference.greedy(prompt(1, 30), 10), "length")


def test_abort_while_waiting_in_prefill_and_in_decode(make_engine: MakeEngine, reference: Reference) -> None:
    engine = make_engine(token_budget=10, max_running=3)
    driver = Driver(engine)
    driver.submit("stays", prompt(1, 8), greedy(30))
    driver.submit("decoding", prompt(2, 2), greedy(30))
    for _ in range(4):
        driver.step()
    driver.submit("prefilling", prompt(3, 100), greedy(30))
    for _ in range(3):
        driver.step()
    driver.submit("waiting", prompt(4, 10), greedy(30))
    for name in ("decoding", "prefilling", "waiting"):
        assert engine.abort(name)
        assert not engine.abort(name)
        engine.scheduler.check()
    assert not engine.abort("never seen")
    answers = driver.run()
    assert len(answers["decoding"].token_ids) > 0 and not answers["prefilling"].token_ids
    assert [answers[name].finish_reason for name in ("decoding", "prefilling", "waiting")] == ["abort"] * 3
    assert answers["decoding"].token_ids == reference.greedy(prompt(2, 2), len(answers["decoding"].token_ids))
    assert answers["stays"].token_ids == reference.greedy(prompt(1, 8), 30)
    assert engine.load().running == engine.load().waiting == engine.load().kv_used_tokens == 0


def test_an_aborted_prefill_leaves_its_chunks_as_cache(make_engine: MakeEngine, reference: Reference) -> None:
    engine = make_engine(token_budget=10)
    driver = Driver(engine)
    driver.submit("gone", prompt(3, 100), greedy(4))
    for _ in range(4):
        driver.step()
    engine.abort("gone")
    answer = driver.ask("same", prompt(3, 100), greedy(4))
    assert answer.cached_tokens == 40
    assert answer.token_ids == reference.greedy(prompt(3, 100), 4)


def test_logits_that_are_not_numbers_end_a_request_with_an_error_and_no_other(
    make_engine: MakeEngine, reference: Reference
) -> None:
    engine = make_engine(token_budget=16)
    assert engine._runner is not None
    engine._runner._model.embedding[1999] = float("nan")
    driver = Driver(engine)
    healthy = prompt(1, 20, vocab_size=1999)
    driver.submit("healthy", healthy, greedy(12))
    driver.submit("poisoned", joined(prompt(2, 30), np.array([1999], np.int32)), greedy(12))
    driver.submit("also healthy", healthy[:9], greedy(12))
    answers = driver.run()
    assert answers["poisoned"].finish_reason == "error"
    assert answers["poisoned"].token_ids == []
    assert "not finite" in (answers["poisoned"].error or "")
    assert answers["healthy"].token_ids == reference.greedy(healthy, 12)
    assert answers["also healthy"].token_ids == reference.greedy(healthy[:9], 12)
    engine.scheduler.check()


def test_a_failing_forward_pass_ends_its_batch_and_the_engine_goes_on(
    make_engine: MakeEngine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_running=1)
    driver = Driver(engine)
    driver.submit("fails", prompt(1, 20), greedy(8))
    driver.submit("waits", prompt(2, 20), greedy(8))

    def out_of_memory(items: Any) -> Any:
        raise RuntimeError("no memory left on this imaginary device")

    with monkeypatch.context() as patch:
        assert engine._runner is not None
        patch.setattr(engine._runner, "forward", out_of_memory, raising=False)
        driver.step()
    answers = driver.run()
    assert answers["fails"].finish_reason == "error"
    assert "imaginary device" in (answers["fails"].error or "")
    assert answers["waits"].token_ids == reference.greedy(prompt(2, 20), 8)
    engine.scheduler.check()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_ids", "options", "error", "message"),
    [
        (np.empty(0, np.int32), {}, InvalidTokens, "non-empty"),
        (np.ones((2, 2), np.int32), {}, InvalidTokens, "1-D"),
        (np.ones(3, np.float32), {}, InvalidTokens, "integer"),
        ([1, 2, 3], {}, InvalidTokens, "array"),
        (np.array([1, -1], np.int32), {}, InvalidTokens, "-1"),
        (np.array([1, 2048], np.int32), {}, InvalidTokens, "2048"),
        (np.ones(64, np.int32), {}, InvalidInput, "64 tokens"),
        (np.ones(5, np.int32), {"output_offset": -1}, InvalidInput, "output_offset"),
        (np.ones(5, np.int32), {"output_offset": 5}, InvalidInput, "output_offset"),
    ],
)
def test_a_bad_request_is_refused_by_name_and_changes_nothing(
    make_engine: MakeEngine, token_ids: Any, options: dict[str, int], error: type[Exception], message: str
) -> None:
    engine = make_engine(kv_capacity_tokens=64)
    with pytest.raises(error, match=message):
        engine.submit(GenerationRequest("bad", token_ids, greedy(4), **options))
    assert not engine.has_work() and engine.load().waiting == 0
    engine.submit(GenerationRequest("bad", prompt(1, 5), greedy(4)))  # the id is still free


def test_a_live_request_id_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.submit(GenerationRequest("twin", prompt(1, 5), greedy(4)))
    with pytest.raises(DuplicateRequest, match="twin"):
        engine.submit(GenerationRequest("twin", prompt(2, 5), greedy(4)))
    assert engine.load().waiting == 1


def test_a_full_queue_refuses_and_keeps_what_it_has(make_engine: MakeEngine, reference: Reference) -> None:
    driver = Driver(make_engine(max_waiting=2))
    for i in range(2):
        driver.submit(f"r{i}", prompt(i, 10), greedy(4))
    with pytest.raises(QueueFull):
        driver.submit("r2", prompt(2, 10), greedy(4))
    answers = driver.run()
    assert all(answers[f"r{i}"].token_ids == reference.greedy(prompt(i, 10), 4) for i in range(2))


def test_a_closed_engine_drops_its_requests_and_refuses_new_ones(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.submit(GenerationRequest("r", prompt(1, 5), greedy(4)))
    engine.step()
    engine.close()
    engine.close()
    assert not engine.has_work() and engine.step() == [] and not engine.abort("r")
    with pytest.raises(EngineError, match="closed"):
        engine.submit(GenerationRequest("s", prompt(1, 5), greedy(4)))


# --- questions --------------------------------------------------------------------------------------------------------


def test_info_and_load_reports_the_handshake_what_is_cached(make_engine: MakeEngine, tiny_model_dir: Path) -> None:
    import hashlib

    engine = make_engine(kv_capacity_tokens=500, max_running=9, token_budget=30)
    info = engine.info
    assert (info.engine, info.model, info.block_size) == ("torch", "llama-1m-seed0", 1)
    assert (info.kv_capacity_tokens, info.max_running, info.max_model_tokens) == (500, 9, 500)
    digest = hashlib.sha256((tiny_model_dir / "tokenizer.json").read_bytes()).hexdigest()
    assert info.tokenizer_fingerprint == digest
    driver = Driver(engine)
    driver.submit("a", prompt(1, 30), greedy(5))
    driver.submit("b", prompt(2, 100), greedy(5))
    assert (engine.load().waiting, engine.load().waiting_uncached_tokens) == (2, 130)
    driver.step()
    assert (engine.load().running, engine.load().waiting, engine.load().kv_used_tokens) == (1, 1, 30)
    driver.run()
    # The last output token of each is never computed, so its KV does not exist.
    assert engine.load().kv_cached_tokens == 34 + 104 and engine.load().kv_used_tokens == 0


@pytest.mark.parametrize("available", [True, False])
def test_the_default_kv_capacity_is_a_share_of_memory(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, available: bool
) -> None:
    kv_bytes = 2 * 3 * 2 * 32 * 4  # keys and values, layers, heads, dimensions, float32
    pages = "SC_AVPHYS_PAGES" if available else "SC_PHYS_PAGES"
    memory = {pages: kv_bytes, "SC_PAGE_SIZE": 4000}
    monkeypatch.setattr("os.sysconf_names", dict.fromkeys(memory, 0))
    monkeypatch.setattr("os.sysconf", memory.__getitem__)
    engine = TorchEngine(tiny_model_dir, dtype="float32", device="cpu")
    assert engine.info.kv_capacity_tokens == engine.info.max_model_tokens == 1000
    memory["SC_PAGE_SIZE"] = 10**9
    bounded = TorchEngine(tiny_model_dir, dtype="float32", device="cpu")
    assert (bounded.info.kv_capacity_tokens, bounded.info.max_model_tokens) == (1 << 18, 8192)
    memory["SC_PAGE_SIZE"] = 1
    with pytest.raises(EngineError, match="no memory for a KV cache on cpu"):
        TorchEngine(tiny_model_dir, dtype="float32", device="cpu")


def test_bfloat16_runs_and_stays_near_float32(make_engine: MakeEngine, reference: Reference) -> None:
    engine = make_engine(dtype="bfloat16", token_budget=13)
    answer = Driver(engine).ask("r", prompt(1, 60), greedy(20))
    assert len(answer.token_ids) == 20
    # Rounding may flip close calls, but a chosen token is never far from the best one.
    for count, token in enumerate(answer.token_ids):
        logits = reference.logits([*prompt(1, 60).tolist(), *answer.token_ids[:count]])
        assert float(logits.max() - logits[token]) < 0.15 * float(logits.std())


def test_threads_are_set_for_the_process(tiny_model_dir: Path) -> None:
    before = torch.get_num_threads()
    try:
        TorchEngine(tiny_model_dir, local=LocalConfig(kv_capacity_tokens=16), device="cpu", threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    with pytest.raises(InvalidInput, match="threads"):
        TorchEngine(tiny_model_dir, device="cpu", threads=0)


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(make_engine: MakeEngine) -> None:
    def sampled(seed: int) -> list[int]:
        return Driver(make_engine()).ask("r", prompt(4, 20), greedy(24, temperature=1.0, seed=seed)).token_ids

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)
