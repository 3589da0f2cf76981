"""What requests may ask of the torch engine beyond plain sampling: each does what it says, alone and among others, and
a request that is resumed goes on exactly.

Greedy requests are compared with logits that transformers computes, changed here by the rule in the docs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from preble.engines.base import GenerationRequest  # noqa: E402
from preble.engines.torch import TorchEngine  # noqa: E402
from preble.engines.torch.sampling import TokenChoice, choose_tokens, logprobs_of  # noqa: E402
from preble.errors import EngineError, InvalidInput  # noqa: E402
from preble.types import Grammar, SamplingParams  # noqa: E402
from tests.support.torch_fixtures import Driver, Reference, Tokens, greedy, joined, prompt  # noqa: E402

pytest_plugins = ["tests.support.torch_fixtures"]
PROBABILITIES = [0.5, 0.25, 0.125, 0.0625, 0.0625]
PROMPT = prompt(3, 20)
COUNT = 16
SHAPES: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": {11: 100.0, 12: -100.0}},
    "allowed": {"allowed_token_ids": tuple(range(20, 60))},
    "all": {
        "frequency_penalty": 0.5,
        "presence_penalty": -1.0,
        "repetition_penalty": 1.3,
        "logit_bias": {40: 1.0},
        "allowed_token_ids": tuple(range(0, 90, 2)),
    },
}


def shaped(logits: torch.Tensor, prompt_ids: list[int], output: list[int], asked: dict[str, Any]) -> torch.Tensor:
    """Bias, then penalties, said in loops."""
    row = logits.clone()
    for token, bias in asked.get("logit_bias", {}).items():
        row[token] += bias
    for token in set(prompt_ids) | set(output):
        repetition = asked.get("repetition_penalty", 1.0)
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(output):
        row[token] -= asked.get("frequency_penalty", 0.0) * output.count(token) + asked.get("presence_penalty", 0.0)
    for token in set(range(len(row))) - set(asked.get("allowed_token_ids", range(len(row)))):
        row[token] = -torch.inf
    return row


def expected(reference: Reference, token_ids: Tokens, asked: dict[str, Any], count: int = COUNT) -> list[int]:
    """The greedy output under such shaping."""
    output: list[int] = []
    while len(output) < count:
        logits = reference.logits([*token_ids.tolist(), *output])
        output.append(int(shaped(logits, token_ids.tolist(), output, asked).argmax()))
    return output


@pytest.mark.parametrize("name", SHAPES)
def test_shaped_greedy_output_is_what_the_rule_gives(
    make_engine: Callable[..., TorchEngine], reference: Reference, name: str
) -> None:
    driver = Driver(make_engine(token_budget=16))
    driver.submit("plain", PROMPT, greedy(COUNT))
    driver.submit("asked", PROMPT, greedy(COUNT, **SHAPES[name]))
    answers = driver.run()
    wanted = expected(reference, PROMPT, SHAPES[name])
    assert answers["asked"].token_ids == wanted
    assert answers["plain"].token_ids == reference.greedy(PROMPT, COUNT) != wanted


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_request_that_is_resumed_goes_on_exactly(
    make_engine: Callable[..., TorchEngine], name: str, temperature: float
) -> None:
    asked = greedy(COUNT, temperature=temperature, seed=4, top_k=50, min_p=0.001, **SHAPES[name])
    whole = Driver(make_engine()).ask("r", PROMPT, asked).token_ids
    for offset in (1, 7):
        begun = joined(PROMPT, np.array(whole[:offset], np.int32))
        rest = Driver(make_engine()).ask("r", begun, asked, output_offset=offset)
        assert (rest.first_index, rest.token_ids) == (offset, whole[offset:])


def test_no_end_comes_before_the_least_length(make_engine: Callable[..., TorchEngine], reference: Reference) -> None:
    said = reference.greedy(PROMPT, 8)
    engine = make_engine()
    plain = Driver(engine).ask("a", PROMPT, greedy(8, stop_token_ids=(said[0],)))
    assert (plain.token_ids, plain.finish_reason) == (said[:1], "stop")
    kept = Driver(engine).ask("b", PROMPT, greedy(8, stop_token_ids=(said[0],), min_new_tokens=3))
    assert said[0] not in kept.token_ids[:3] and len(kept.token_ids) > 3


def test_log_probabilities_are_the_models_own_whatever_is_asked_beside(
    make_engine: Callable[..., TorchEngine], reference: Reference
) -> None:
    asked = greedy(6, logprobs=3, temperature=0.7, seed=1, frequency_penalty=1.0, logit_bias={9: 50.0})
    engine = make_engine()
    engine.submit(GenerationRequest("r", PROMPT, asked))
    engine.submit(GenerationRequest("other", PROMPT, greedy(6)))
    found, output, others = [], [], []
    while engine.has_work():
        for chunk in engine.step():
            (found if chunk.request_id == "r" else others).extend(chunk.logprobs)
            output += chunk.token_ids if chunk.request_id == "r" else ()
    assert len(found) == len(output) == 6 and not others
    for position, (token, one) in enumerate(zip(output, found, strict=True)):
        logprobs = reference.logits([*PROMPT.tolist(), *output[:position]]).log_softmax(-1)
        best = logprobs.topk(3)
        assert one.logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
        assert [other for other, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def frequencies(params: SamplingParams, count: int = 2000) -> list[float]:
    """How often each token is chosen."""
    row = torch.tensor([[math.log(p) for p in PROBABILITIES]]).expand(count, -1)
    tokens = choose_tokens(row, [TokenChoice(params, position) for position in range(count)])
    return [tokens.count(token) / count for token in range(len(PROBABILITIES))]


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_k": 0}, 5),
        ({"top_k": -1}, 5),
        ({"top_k": 9}, 5),
        ({"min_p": 0.3}, 2),
        ({"min_p": 1.0}, 1),
        ({"top_k": 3, "top_p": 0.8}, 2),  # of what top_k leaves, 0.857 is the share of two
        ({"top_k": 3, "top_p": 0.9}, 3),
        ({"min_p": 0.3, "top_k": 1}, 1),
    ],
)
def test_only_the_likeliest_are_drawn_in_proportion(asked: dict[str, Any], kept: int) -> None:
    mass = sum(PROBABILITIES[:kept])
    got = frequencies(SamplingParams(temperature=1.0, seed=0, **asked))
    for token, frequency in enumerate(got):
        wanted = PROBABILITIES[token] / mass if token < kept else 0.0
        assert frequency == pytest.approx(wanted, abs=0.05) and (frequency > 0) == (token < kept)


def test_one_alternative_more_than_tokens_there_are() -> None:
    row = torch.tensor([0.0, 1.0])
    assert [token for token, _ in logprobs_of(row, 0, 20).top] == [1, 0]


def test_what_the_engine_lacks_is_refused_by_name(make_engine: Callable[..., TorchEngine]) -> None:
    engine = make_engine()
    for asked, complaint in (
        ({"grammar": Grammar("regex", "a+")}, "^regex: the engine torch does not have it"),
        ({"logit_bias": {2048: 1.0}}, "^logit_bias: token ids must be below 2048"),
        ({"allowed_token_ids": (1, 2048)}, "^allowed_token_ids: token ids must be below 2048"),
        (
            {"allowed_token_ids": (7,), "stop_token_ids": (7,), "min_new_tokens": 2},
            "^allowed_token_ids: all of them end",
        ),
        ({"bad_words": ("a",)}, "^bad_words: the engine torch does not have it"),
    ):
        with pytest.raises(InvalidInput, match=complaint):
            engine.submit(GenerationRequest("r", PROMPT, greedy(3, **asked)))
        assert not engine.has_work()


def test_what_is_not_said_is_the_models_own_way(
    make_engine: Callable[..., TorchEngine], tiny_model_dir: Path, tmp_path: Path
) -> None:
    for file in tiny_model_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = tmp_path / "generation_config.json"
    config.unlink(missing_ok=True)
    config.write_text('{"temperature": 0.8, "top_k": 1, "repetition_penalty": 1.8, "eos_token_id": 2}')
    unsaid = greedy(COUNT, temperature=None)
    own = Driver(make_engine(tmp_path)).ask("r", PROMPT, unsaid).token_ids
    plain = make_engine()
    said = greedy(COUNT, temperature=0.8, top_k=1, repetition_penalty=1.8)
    assert own == Driver(plain).ask("a", PROMPT, said).token_ids
    drawn = [Driver(plain).ask(name, PROMPT, unsaid).token_ids for name in ("b", "c")]
    assert drawn[0] != drawn[1], "without a seed every request draws anew"
    config.write_text('{"temperature": -1}')
    with pytest.raises(EngineError, match="generation_config.json .*temperature"):
        make_engine(tmp_path)
