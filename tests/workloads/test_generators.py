"""Generated workloads against the published statistics and the experiments' parameters. Arrivals: another file."""

from __future__ import annotations

import hashlib
import subprocess
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from preble.errors import InvalidInput
from preble.workloads import Workload, generate
from preble.workloads.generators import MAKERS
from preble.workloads.lengths import TABLE1, drawn_output_tokens, shared_out, spread, spread_below

# Requests and groups near the data sets' own ratio (39 requests a tool, 10 a problem, 18 a document, 8.6 a video).
SIZES = {
    "toolbench": (7800, 200),
    "videoqa": (2064, 240),
    "loogle": (1953, 105),
    "programming": (2000, 200),
    "embodied": (4700, 100),
}


def prompt_tokens(workload: Workload) -> np.ndarray:
    return np.array([request.prompt_tokens for request in workload.requests])


def output_tokens(workload: Workload) -> np.ndarray:
    return np.array([request.output_tokens for request in workload.requests])


def shared_fraction(workload: Workload) -> np.ndarray:
    """The part of each prompt that an infinite cache would hold when requests are served in order.

    Counted in whole parts: generated prompts agree in whole parts or not at all.
    """
    seen: set[object] = set()
    fractions = []
    for request in workload.requests:
        path: tuple = ()
        hit = 0
        for part in request.parts:
            path = (path, id(part))
            hit += len(part) if path in seen else 0
            seen.add(path)
        fractions.append(hit / request.prompt_tokens)
    return np.array(fractions)


# --- Table 1 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SIZES))
def test_lengths_are_those_of_table_1(name: str) -> None:
    requests, groups = SIZES[name]
    workload = generate(name, requests=requests, groups=groups, seed=4, shape="table1")
    row = TABLE1[name]
    assert len(workload) == requests
    assert prompt_tokens(workload).mean() == pytest.approx(row.prompt_tokens[0], rel=0.03)
    assert prompt_tokens(workload).std() == pytest.approx(row.prompt_tokens[1], rel=0.06)
    assert output_tokens(workload).mean() == pytest.approx(row.output_tokens[0], rel=0.03)
    assert output_tokens(workload).std() == pytest.approx(row.output_tokens[1], rel=0.05)
    assert 100 * shared_fraction(workload).mean() == pytest.approx(row.shared_percent[0], abs=4.0)


@pytest.mark.parametrize("name", ["toolbench", "videoqa", "programming", "embodied"])
def test_key_portions_are_those_of_table_1(name: str) -> None:
    requests, groups = SIZES[name]
    workload = generate(name, requests=requests, groups=groups, seed=4, shape="table1")
    fractions = []
    for request in workload.requests:
        system, own = (
            (0, len(request.parts[1])) if name == "embodied" else (len(request.parts[1]), len(request.parts[2]))
        )
        # The deepest part longer than all before it: the group's own, or the system prompt where that is longer.
        fractions.append((own if own > system else system) / request.prompt_tokens)
    assert 100 * np.mean(fractions) == pytest.approx(TABLE1[name].key_portion_percent[0], abs=5.0)


def test_the_tools_lengths_have_the_published_quantiles() -> None:
    tokens = prompt_tokens(generate("toolbench", requests=7800, groups=200, seed=4))
    assert np.mean(tokens <= 1024) == pytest.approx(0.107, abs=0.03)
    assert np.mean(tokens <= 2048) == pytest.approx(0.67, abs=0.03)
    assert tokens.max() <= 4096


def test_conversations_are_like_the_first_half_of_mooncakes_trace() -> None:
    workload = generate("conversation", requests=5606, groups=3866, seed=4)
    tokens = prompt_tokens(workload)
    assert tokens.mean() == pytest.approx(12935, rel=0.05) and tokens.std() == pytest.approx(16805, rel=0.05)
    assert output_tokens(workload).mean() == pytest.approx(346, rel=0.02)
    assert output_tokens(workload).std() == pytest.approx(251, rel=0.02)
    hit = (shared_fraction(workload) * tokens).sum() / tokens.sum()
    assert hit == pytest.approx(0.347, abs=0.03)


def test_one_conversation_opens_with_the_system_prompt_and_the_mean_first_message() -> None:
    (request,) = generate("conversation", requests=1, groups=1, seed=0).requests
    assert request.prompt_tokens == 512 + 12_200


def test_conversations_stay_within_their_context() -> None:
    tokens = prompt_tokens(generate("conversation", requests=4000, groups=2000, seed=0))
    assert 125_000 < tokens.max() <= 131_072


# --- the experiments --------------------------------------------------------------------------------------------------


def test_videos_are_cropped_and_long_ones_are_asked_about_more() -> None:
    workload = generate("videoqa", requests=1800, groups=240, seed=0)
    counts, lengths = Counter(), {}
    for request in workload.requests:
        assert len(set(request.parts[2].tolist())) == 1, "a video is a run of one token id"
        lengths[request.group] = len(request.parts[2])
        counts[request.group] += 1
    assert len({int(request.parts[2][0]) for request in workload.requests}) == len(lengths) == 240
    cropped = 17 + max(lengths.values())
    assert cropped == 8192
    long = [counts[group] for group, length in lengths.items() if length == 8192 - 17]
    short = [counts[group] for group, length in lengths.items() if length < 6000]
    assert np.mean(long) > 2 * np.mean(short)


def test_documents_are_cut_to_the_context_and_outputs_forced() -> None:
    workload = generate("loogle", requests=1800, groups=100, seed=0)
    assert prompt_tokens(workload).max() + 45 <= 32768
    assert set(output_tokens(workload).tolist()) == {45}
    counts = np.array(list(Counter(request.group for request in workload.requests).values()))
    assert counts.mean() == pytest.approx(18, rel=0.02) and counts.std() == pytest.approx(8.6 * 18 / 18.6, rel=0.1)


def test_problems_follow_one_long_system_prompt_and_programs_are_capped() -> None:
    workload = generate("programming", requests=1000, groups=100, seed=0)
    first = workload.requests[0]
    assert len(first.parts[0]) + len(first.parts[1]) == 2400
    assert all(request.parts[1] is first.parts[1] for request in workload.requests)
    assert max(len(request.parts[2]) for request in workload.requests) <= 3245
    assert output_tokens(workload).max() == 512
    assert set(Counter(request.group for request in workload.requests).values()) == {10}


@pytest.mark.parametrize("name", ["videoqa", "loogle", "programming"])
def test_no_two_prompts_are_equal_where_each_question_has_a_uuid(name: str) -> None:
    workload = generate(name, requests=300, groups=10, seed=0)
    endings = {tuple(request.parts[-1].tolist()) for request in workload.requests}
    assert len(endings) == 300 and min(map(len, endings)) >= 26


@pytest.mark.parametrize("name", ["embodied", "conversation"])
def test_turns_wait_for_the_turn_before_and_extend_its_prompt(name: str) -> None:
    workload = generate(name, requests=400, groups=20, seed=0)
    by_id = {}
    for request in workload.requests:
        if request.after is not None:
            before = by_id[request.after]  # it stood earlier
            assert before.group == request.group
            same = [a is b for a, b in zip(before.parts, request.parts, strict=False)]
            assert all(same) and len(request.parts) > len(before.parts)
            if before.output_ids is not None:
                assert request.parts[len(before.parts)] is before.output_ids
                assert before.output_tokens == len(before.output_ids)
        by_id[request.request_id] = request
    assert sum(request.after is None for request in workload.requests) == 20
    order = [request.group for request in workload.requests]
    assert sum(a != b for a, b in zip(order, order[1:], strict=False)) > 300, (
        "turns of different groups are interleaved"
    )
    assert (workload.requests[0].output_ids is not None) == (name == "conversation")


def test_embodied_outputs_are_forced_in_the_experiment() -> None:
    assert set(output_tokens(generate("embodied", requests=400, groups=20, seed=0)).tolist()) == {26}


def test_a_mixed_workload_is_four_tools_to_one_video() -> None:
    workload = generate("mixed", requests=900, groups=70, seed=0)
    kinds = Counter(request.request_id.split("-")[0] for request in workload.requests)
    assert kinds == {"toolbench": 720, "videoqa": 180}
    groups = Counter(group.split("-")[0] for group in {request.group for request in workload.requests})
    assert groups == {"toolbench": 40, "videoqa": 30}
    first_half = Counter(request.request_id.split("-")[0] for request in workload.requests[:450])
    assert first_half["videoqa"] == pytest.approx(90, abs=25), "they are shuffled together"


def test_zipf_makes_the_first_groups_popular() -> None:
    workload = generate("toolbench", requests=20_000, groups=200, seed=0, zipf=1.1)
    counts = np.array([count for _, count in Counter(request.group for request in workload.requests).most_common()])
    shares = np.arange(1, 201) ** -1.1
    shares /= shares.sum()
    assert counts[0] / 20_000 == pytest.approx(shares[0], rel=0.05)
    assert counts[:10].sum() / 20_000 == pytest.approx(shares[:10].sum(), rel=0.03)


# --- every workload ---------------------------------------------------------------------------------------------------


def digest(workload: Workload) -> str:
    """A hash of everything a request has."""
    sha = hashlib.sha256()
    for r in workload.requests:
        sha.update(repr((r.request_id, r.group, r.output_tokens, r.after, r.arrival_seconds)).encode())
        sha.update(r.token_ids.tobytes())
    return sha.hexdigest()


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_seed_gives_one_workload_and_another_gives_another(name: str) -> None:
    once, again, other = (generate(name, requests=120, groups=8, seed=seed) for seed in (3, 3, 4))
    assert digest(once) == digest(again) != digest(other)
    assert len(once) == 120 and len({request.request_id for request in once.requests}) == 120
    assert len({request.group for request in once.requests}) == 8
    for request in once.requests:
        ids = request.token_ids
        assert ids.dtype == np.int32 and ids[0] == 1 and ids[1:].min() >= 3
        assert not any(part.flags.writeable for part in request.parts)


def test_a_workload_is_the_same_on_every_machine() -> None:
    """Figures of one commit are compared with another's: a change here changes what all of them are about."""
    known = {
        "conversation": "46e9ee1a07111ce5",
        "embodied": "f8f2bd4812365156",
        "loogle": "57ad313a5f97ff6e",
        "mixed": "3bdd7e84ffe960cf",
        "programming": "6bd8977daac75f11",
        "toolbench": "9a88362604d470ac",
        "videoqa": "0b8bf766cbbe6d5f",
    }
    assert {name: digest(generate(name, requests=300, groups=20, seed=7))[:16] for name in MAKERS} == known


@pytest.mark.parametrize("name", sorted(set(MAKERS) - {"mixed"}))
def test_the_smallest_workload_is_one_request(name: str) -> None:
    assert generate(name, requests=1, groups=1, seed=0).requests[0].prompt_tokens > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "chess"}, "name must be one of .*toolbench"),
        ({"requests": 0}, "requests"),
        ({"requests": 10_000_001}, "requests"),
        ({"groups": 11}, "groups"),
        ({"seed": -1}, "seed"),
        ({"zipf": 0.0}, "zipf"),
        ({"name": "embodied", "zipf": 1.1}, "has turns"),
        ({"shape": "paper"}, "shape"),
        ({"name": "mixed", "groups": 1}, "groups must be at least 2"),
        ({"name": "embodied", "requests": 200, "groups": 1}, "200 turns a group do not fit in 4096"),
        ({"name": "conversation", "requests": 400, "groups": 1}, "400 turns do not fit in 131072"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        generate(**{"name": "toolbench", "requests": 10, "groups": 2, "seed": 0, **arguments})


def test_the_package_is_loaded_only_when_asked_for(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_python("-c", "import sys, preble; print([m for m in sys.modules if 'workloads' in m or m == 'numpy'])")
    assert done.stdout.strip() == "[]", done.stderr


# --- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [24, 200, 5000])
def test_spread_lengths_have_the_moments_asked_for(count: int) -> None:
    lengths = spread(np.random.default_rng(0), count, (1000.0, 400.0))
    assert lengths.mean() == pytest.approx(1000.0, rel=0.001) and lengths.std() == pytest.approx(400.0, rel=0.002)
    assert lengths.tolist() != sorted(lengths.tolist())
    assert spread(np.random.default_rng(0), 3, (26.0, 0.0)).tolist() == [26, 26, 26]
    assert spread(np.random.default_rng(0), 50, (10.0, 30.0), low=2).min() == 2


def test_spread_below_leaves_out_what_is_longer_and_keeps_the_shape_below() -> None:
    lengths = spread_below(np.random.default_rng(0), 4000, (1000.0, 400.0), 1200)
    assert lengths.max() <= 1200
    below = [n for n in np.random.default_rng(1).lognormal(*parameters(1000.0, 400.0), 40_000) if n <= 1200]
    assert lengths.mean() == pytest.approx(float(np.mean(below)), rel=0.01)


def parameters(mean: float, std: float) -> tuple[float, float]:
    """(mu, sigma), solved from the moments by hand: var = (exp(sigma^2) - 1) mean^2."""
    sigma2 = np.log(1 + std**2 / mean**2)
    return float(np.log(mean) - sigma2 / 2), float(np.sqrt(sigma2))


def test_shared_out_gives_everything_in_proportion() -> None:
    rng = np.random.default_rng(0)
    assert shared_out(rng, 10, np.array([1.0, 1.0, 3.0])).tolist() == [2, 2, 6]
    assert sorted(shared_out(rng, 11, np.ones(3)).tolist()) == [3, 4, 4]
    odd = {tuple(shared_out(np.random.default_rng(seed), 4, np.ones(3)).tolist()) for seed in range(20)}
    assert odd == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}, "what is over goes by lot"


def test_drawn_outputs_follow_the_row_and_depend_on_the_key_only() -> None:
    drawn = np.array([drawn_output_tokens("toolbench", str(key)) for key in range(4000)])
    assert drawn.mean() == pytest.approx(43, rel=0.03) and drawn.std() == pytest.approx(16, rel=0.05)
    assert drawn_output_tokens("toolbench", "17") == drawn[17] and drawn.min() >= 1
