"""The simulated engine: its answers, its clock, and the engine protocol over the real local scheduler."""

from __future__ import annotations

import numpy as np
import pytest

import preble
from preble.clock import ManualClock
from preble.engines.base import Engine, GenerationRequest
from preble.engines.simulated import SimulatedEngine, extend_hash, prefix_hash
from preble.errors import DuplicateRequest, EngineError, InvalidConfig, InvalidInput, InvalidTokens, QueueFull
from preble.local import LocalConfig
from preble.types import PrefixEvicted, SamplingParams


class CountingCost:
    """10 ms for an iteration and 1 ms for each token; remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def iteration_time(self, prefill_chunks=(), decode_contexts=()):
        self.asked.append((list(prefill_chunks), list(decode_contexts)))
        return 0.010 + 0.001 * (sum(n for n, _ in prefill_chunks) + len(decode_contexts))


def make_engine(capacity=2000, cost=None, clock=None, eos=None, **config):
    """An engine on virtual time: sleeping advances its clock."""
    clock = clock or ManualClock()
    options = {"eos_token_id": eos[0], "eos_probability": eos[1]} if eos else {}
    local = LocalConfig(capacity, **config)
    return SimulatedEngine(cost or CountingCost(), local, clock=clock, sleep=clock.advance, **options)


def make_request(name, tokens, max_new=8, offset=0, namespace=None, **sampling):
    params = SamplingParams(max_new_tokens=max_new, **sampling)
    return GenerationRequest(name, np.array(tokens, np.int32), params, namespace, offset)


def run(engine):
    """Step to the end; gives {request id: tokens} and all chunks."""
    tokens, chunks = {}, []
    while engine.has_work():
        for chunk in engine.step():
            engine.scheduler.check()
            chunks.append(chunk)
            tokens.setdefault(chunk.request_id, []).extend(chunk.token_ids)
    return tokens, chunks


def alone(tokens, max_new=8, **options):
    """The output of a prompt that runs alone."""
    engine = make_engine(**options)
    engine.submit(make_request("x", tokens, max_new))
    return run(engine)[0]["x"]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_the_hash_is_the_same_whether_built_at_once_or_token_by_token():
    rng = np.random.default_rng(0)
    for length in (1, 2, 63, 1000):
        tokens = rng.integers(0, 2**31, length).astype(np.int32)
        state = 0
        for token in tokens:
            state = extend_hash(state, int(token))
        assert state == prefix_hash(tokens)


def test_every_token_of_the_prefix_and_its_order_decide_the_next_one():
    base = list(range(40))
    swapped = [1, 0, *base[2:]]
    outputs = [alone(base), alone(base[1:]), alone(swapped), alone([*base, 0]), alone([0, *base])]
    assert len({tuple(output) for output in outputs}) == len(outputs)
    assert alone(base) == outputs[0]


def test_answers_are_known_by_heart():
    """Other workers, of this version or the next, must go on with the same tokens: these may only change on purpose."""
    assert alone([1, 2, 3], max_new=4) == [21190, 505, 16701, 28582]


def test_a_resumed_request_continues_exactly_where_it_stopped():
    prompt = [5, 6, 7, 8]
    whole = alone(prompt, max_new=10)
    for emitted in range(1, 10):
        engine = make_engine()
        engine.submit(make_request("r", prompt + whole[:emitted], max_new=10, offset=emitted))
        tokens, chunks = run(engine)
        assert tokens["r"] == whole[emitted:]
        assert [chunk.index for chunk in chunks] == list(range(emitted, 10))
        assert chunks[-1].finish_reason == "length"


def test_a_request_resumed_after_its_last_token_only_ends():
    engine = make_engine()
    engine.submit(make_request("r", [1, 2, 3, 4], max_new=2, offset=2))
    assert engine.has_work()
    (chunk,) = engine.step()
    assert (chunk.index, tuple(chunk.token_ids), chunk.finish_reason) == (2, (), "length")
    assert not engine.has_work()


def test_outputs_do_not_depend_on_company_chunks_or_memory():
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 100, 30).tolist()
    prompts = {f"r{i}": shared[: 10 + i * 2] + rng.integers(0, 100, 12).tolist() for i in range(10)}
    engine = make_engine(capacity=90, token_budget=16, max_running=5)
    for name, prompt in prompts.items():
        engine.submit(make_request(name, prompt, max_new=20))
    tokens, _ = run(engine)
    stats = engine.scheduler.stats()
    assert stats["preempted"] > 0 and stats["evicted_tokens"] > 0 and stats["cached_tokens"] > 0
    for name, prompt in prompts.items():
        assert tokens[name] == alone(prompt, max_new=20)


# --- ends -------------------------------------------------------------------------------------------------------------


def test_without_an_eos_probability_outputs_run_to_their_length():
    _, chunks = run_one(make_engine(eos=(2, 0.0)), max_new=200)
    assert chunks[-1].finish_reason == "length" and chunks[-1].index == 199
    assert all(2 not in chunk.token_ids for chunk in chunks)


def test_eos_comes_with_about_its_probability_and_is_the_last_token():
    lengths = []
    for seed in range(200):
        tokens, chunks = run_one(make_engine(eos=(2, 0.1)), prompt=[seed, 1, 1], max_new=500)
        assert chunks[-1].finish_reason == "stop"
        assert tokens[-1] == 2 and 2 not in tokens[:-1]
        lengths.append(len(tokens))
    assert 8 < sum(lengths) / len(lengths) < 12


def test_all_tokens_but_eos_come_up_by_chance():
    engine = SimulatedEngine(
        CountingCost(), LocalConfig(500), clock=ManualClock(), time_scale=0.0, vocab_size=5, eos_token_id=2
    )
    assert set(run_one(engine, max_new=300)[0]) == {0, 1, 3, 4}


def test_a_request_that_ignores_eos_never_sees_it():
    tokens, chunks = run_one(make_engine(eos=(2, 1.0)), max_new=50, ignore_eos=True)
    assert len(tokens) == 50 and 2 not in tokens
    assert chunks[-1].finish_reason == "length"
    assert run_one(make_engine(eos=(2, 1.0)), max_new=50)[0] == [2]


def test_a_stop_token_of_the_request_ends_it():
    whole = alone([9, 9], max_new=10)
    tokens, chunks = run_one(make_engine(), prompt=[9, 9], max_new=10, stop_token_ids=(whole[4],), ignore_eos=True)
    assert tokens == whole[:5]
    assert chunks[-1].finish_reason == "stop"


def test_an_output_ends_where_the_kv_capacity_does():
    engine = make_engine(capacity=20)
    tokens, chunks = run_one(engine, prompt=list(range(15)), max_new=100)
    assert len(tokens) == 6 == engine.info.max_model_tokens - 15
    assert chunks[-1].finish_reason == "length"


def run_one(engine, prompt=(1, 2, 3), max_new=8, **sampling):
    engine.submit(make_request("one", prompt, max_new, **sampling))
    tokens, chunks = run(engine)
    return tokens["one"], chunks


# --- time -------------------------------------------------------------------------------------------------------------


def test_iterations_take_what_the_cost_model_says():
    cost, clock = CountingCost(), ManualClock()
    engine = make_engine(cost=cost, clock=clock, token_budget=64)
    engine.submit(make_request("a", range(100), max_new=3))
    run(engine)
    assert cost.asked == [([(64, 64)], []), ([(36, 100)], []), ([], [101]), ([], [102])]
    assert clock() == pytest.approx(0.074 + 0.046 + 0.011 + 0.011)


def test_a_cached_prefix_makes_the_next_request_fast_and_is_reported_once():
    cost, clock = CountingCost(), ManualClock()
    engine = make_engine(cost=cost, clock=clock, token_budget=512)
    engine.submit(make_request("a", range(400), max_new=2))
    run(engine)
    cost.asked.clear()
    engine.submit(make_request("b", [*range(399), 7, 7], max_new=2))
    _, chunks = run(engine)
    assert cost.asked[0] == ([(2, 401)], [])
    assert [chunk.cached_tokens for chunk in chunks] == [399, None]


def test_time_scale_stretches_the_sleep_and_zero_means_none():
    for scale in (0.0, 0.5, 3.0):
        slept = []
        engine = SimulatedEngine(
            CountingCost(), LocalConfig(100), clock=ManualClock(), sleep=slept.append, time_scale=scale
        )
        run_one(engine, max_new=2)
        assert slept == pytest.approx([0.013 * scale, 0.011 * scale] if scale else [])


def test_a_simulator_can_hold_many_engines_between_begin_and_end():
    clock = ManualClock()
    engines = [make_engine(clock=clock) for _ in range(2)]
    engines[0].submit(make_request("a", range(50), max_new=1))
    engines[1].submit(make_request("b", range(10), max_new=1))
    seconds = [engine.begin_step() for engine in engines]
    assert seconds == pytest.approx([0.060, 0.020])
    assert clock() == 0.0
    assert [chunk.request_id for chunk in engines[1].end_step()] == ["b"]
    assert [chunk.request_id for chunk in engines[0].end_step()] == ["a"]


def test_a_step_cannot_begin_twice():
    engine = make_engine()
    engine.submit(make_request("a", range(50), max_new=1))
    engine.begin_step()
    with pytest.raises(InvalidInput, match="in flight"):
        engine.begin_step()
    assert len(engine.end_step()) == 1


def test_a_step_with_nothing_to_do_takes_no_time():
    cost = CountingCost()
    engine = make_engine(cost=cost)
    assert engine.begin_step() == 0.0
    assert engine.end_step() == [] == engine.step()
    assert cost.asked == []


def test_the_real_cost_models_drive_it():
    clock = ManualClock()
    engine = make_engine(cost=preble.CostModel.preset("mistral-7b/a6000"), clock=clock, capacity=5000)
    engine.submit(make_request("a", range(3000), max_new=1))
    run(engine)
    cold = clock()
    engine.submit(make_request("b", [*range(2900), 1], max_new=1))
    run(engine)
    assert 0.0 < clock() - cold < cold / 5


# --- the protocol -----------------------------------------------------------------------------------------------------


def test_it_is_an_engine():
    engine: Engine = make_engine(capacity=500, eos=(2, 0.5), max_running=7)
    info = engine.info
    assert (info.engine, info.kv_capacity_tokens, info.max_running, info.eos_token_ids) == ("simulated", 500, 7, (2,))
    assert not engine.has_work()


def test_a_request_aborted_while_it_waits_is_never_computed():
    engine = make_engine(max_running=1, token_budget=8)
    engine.submit(make_request("running", [1, 2, 3], max_new=20))
    engine.step()
    engine.submit(make_request("gone", list(range(10, 40))))
    engine.step()
    assert engine.load().waiting == 1 and engine.abort("gone") and engine.load().waiting == 0
    tokens, _ = run(engine)
    stats = engine.scheduler.stats()
    assert (stats["admitted"], stats["computed_tokens"]) == (1, 3 + 19) and not tokens["gone"]


def test_abort_gives_one_last_chunk_in_every_state():
    engine = make_engine(max_running=1, token_budget=8)
    engine.submit(make_request("waiting", [1, 2, 3]))
    assert engine.abort("waiting") and not engine.abort("waiting")
    assert shape(engine.step()) == [("waiting", 0, 0, "abort")]

    engine.submit(make_request("prefilling", range(20)))
    assert engine.step() == []
    assert engine.abort("prefilling")
    assert shape(engine.step()) == [("prefilling", 0, 0, "abort")]

    engine.submit(make_request("decoding", [4, 5]))
    assert shape(engine.step() + engine.step()) == [("decoding", 0, 1, None), ("decoding", 1, 1, None)]
    assert engine.abort("decoding")
    assert shape(engine.step()) == [("decoding", 2, 0, "abort")]
    assert not engine.has_work() and engine.load().kv_used_tokens == 0
    assert not engine.abort("never seen")


def test_a_request_aborted_while_its_step_runs_gets_no_token_of_it():
    engine = make_engine()
    engine.submit(make_request("a", [1, 2]))
    engine.submit(make_request("b", [3, 4]))
    engine.begin_step()
    assert engine.abort("a")
    assert shape(engine.end_step()) == [("a", 0, 0, "abort"), ("b", 0, 1, None)]


def test_the_same_id_submitted_again_while_the_aborted_one_computes_starts_from_its_own_prompt():
    engine = make_engine()
    engine.submit(make_request("a", [1, 2]))
    engine.begin_step()
    engine.abort("a")
    engine.submit(make_request("a", [3, 4, 5], max_new=4))
    assert shape(engine.end_step()) == [("a", 0, 0, "abort")]
    assert run(engine)[0]["a"] == alone([3, 4, 5], max_new=4)


def test_refused_requests_leave_no_trace():
    engine = make_engine(capacity=50, max_waiting=1)
    engine.submit(make_request("a", [1, 2]))
    with pytest.raises(DuplicateRequest, match="'a'"):
        engine.submit(make_request("a", [1, 2]))
    with pytest.raises(QueueFull, match="max_waiting"):
        engine.submit(make_request("b", [1, 2]))
    with pytest.raises(InvalidInput, match="51 tokens"):
        engine.submit(make_request("b", range(51)))
    with pytest.raises(InvalidTokens, match="token_ids"):
        engine.submit(make_request("b", []))
    with pytest.raises(InvalidTokens, match="-1"):
        engine.submit(make_request("b", [-1]))
    with pytest.raises(InvalidInput, match="output_offset"):
        engine.submit(make_request("b", [1, 2], offset=2))
    assert list(run(engine)[0]) == ["a"]


def test_evictions_come_out_as_events():
    engine = make_engine(capacity=60)
    engine.submit(make_request("a", range(40), max_new=1, namespace="n"))
    run(engine)
    assert engine.take_events() == []
    engine.submit(make_request("b", range(100, 140), max_new=1))
    run(engine)
    (event,) = engine.take_events()
    assert isinstance(event, PrefixEvicted)
    assert (list(event.token_ids), event.kept_tokens, event.namespace) == (list(range(40)), 20, "n")
    assert engine.take_events() == []


def test_load_reports_what_runs_and_waits():
    engine = make_engine(max_running=1)
    engine.submit(make_request("a", range(30), max_new=5))
    engine.submit(make_request("b", [50, *range(9)], max_new=5))
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.kv_used_tokens, load.kv_cached_tokens) == (1, 1, 30, 30)
    assert load.waiting_uncached_tokens == 10


def test_a_closed_engine_takes_nothing_and_closes_twice():
    engine = make_engine()
    engine.submit(make_request("a", [1, 2]))
    engine.close()
    engine.close()
    assert not engine.has_work() and engine.step() == []
    with pytest.raises(EngineError, match="closed"):
        engine.submit(make_request("b", [1, 2]))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"time_scale": -1.0}, "time_scale"),
        ({"time_scale": float("nan")}, "time_scale"),
        ({"vocab_size": 1}, "vocab_size"),
        ({"eos_token_id": 32_000}, "eos_token_id"),
        ({"eos_probability": 0.5}, "eos_probability"),
        ({"eos_token_id": 1, "eos_probability": 1.5}, "eos_probability"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, name):
    with pytest.raises(InvalidConfig, match=name):
        SimulatedEngine(CountingCost(), LocalConfig(100), **options)


def shape(chunks):
    return [(chunk.request_id, chunk.index, len(chunk.token_ids), chunk.finish_reason) for chunk in chunks]
