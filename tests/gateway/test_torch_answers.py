"""The official `openai` client through the gateway to torch workers with a real model, whose greedy answers are known
from an engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from preble import LocalConfig, SamplingParams
from preble.engines.base import GenerationRequest
from preble.engines.torch import TorchEngine
from preble.gateway.text.tokenizing import TextCodec
from tests.support.gateway import GatewayProcess
from tests.support.transport import WorkerProcess

openai = pytest.importorskip("openai", reason="needs the openai client: pip install 'preble[test]'")
pytest_plugins = ["tests.support.torch_fixtures"]

MESSAGES = [
    {"role": "system", "content": "You are a careful assistant. " * 24},
    {"role": "user", "content": "Which module reads files line by line?"},
]
TOKENS = 24
GREEDY: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}

Answer = Callable[[list[int]], str]


@pytest.fixture(scope="module")
def codec(tiny_model_dir: Path) -> Iterator[TextCodec]:
    """The model's tokenizer."""
    codec = TextCodec(tiny_model_dir, threads=1)
    yield codec
    codec.close()


@pytest.fixture(scope="module")
def answer(tiny_model_dir: Path, codec: TextCodec) -> Iterator[Answer]:
    """The greedy continuation of token ids, as text."""
    engine = TorchEngine(tiny_model_dir, local=LocalConfig(4000), dtype="float32", device="cpu")

    def run(token_ids: list[int]) -> str:
        sampling = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
        engine.submit(GenerationRequest("r", np.array(token_ids, np.int32), sampling))
        tokens: list[int] = []
        while engine.has_work():
            for chunk in engine.step():
                tokens += chunk.token_ids
        return codec.decode(tokens)

    yield run
    engine.close()


@pytest.fixture(scope="module")
def api(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The client of a gateway before two workers."""
    options = ["--model", str(tiny_model_dir), "--dtype", "float32", "--device", "cpu", "--threads", "1"]
    options += ["--kv-capacity-tokens", "4000", "--token-budget", "64", "--max-model-tokens", "600"]
    workers = [WorkerProcess("--engine", "torch", *options, "--id", name) for name in ("a", "b")]
    endpoints = [worker.endpoint for worker in workers]
    log = tmp_path_factory.mktemp("gateway") / "log"
    gateway = GatewayProcess("--workers", *endpoints, "--tokenizer", str(tiny_model_dir), log=log)
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as api:
        yield api
    codes = [gateway.stop(), *(worker.stop() for worker in workers)]
    assert codes == [0, 0, 0]


@pytest.fixture(scope="module")
def model(api: Any) -> str:
    """The model's name, as the gateway lists it."""
    return str(api.models.list().data[0].id)


@pytest.fixture(scope="module")
def prompt_ids(codec: TextCodec) -> list[int]:
    """The chat as the model sees it."""
    return codec.encode_now(codec.chat_template.render(MESSAGES), False).tolist()


def test_a_chat_says_what_the_model_says_whole_and_streamed(
    api: Any, model: str, answer: Answer, prompt_ids: list[int]
) -> None:
    said = answer(prompt_ids)
    whole = api.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (said, "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt_ids), TOKENS)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = api.chat.completions.create(model=model, messages=MESSAGES, **usage, **GREEDY)
    assert "".join(event.choices[0].delta.content or "" for event in events) == said
    assert events[-1].choices[0].finish_reason == "length"
    assert last.usage.prompt_tokens_details.cached_tokens == len(prompt_ids) - 1, "the worker had it all"


def test_a_completion_takes_text_and_ids(api: Any, model: str, answer: Answer, codec: TextCodec) -> None:
    text = "import os\nimport sys\n"
    ids = codec.encode_now(text).tolist()
    reply = api.completions.create(model=model, prompt=text, **GREEDY)
    assert reply.choices[0].text == answer(ids)
    assert api.completions.create(model=model, prompt=ids, **GREEDY).choices[0].text == reply.choices[0].text


def test_several_choices_are_counted_each(api: Any, model: str, answer: Answer, prompt_ids: list[int]) -> None:
    reply = api.chat.completions.create(model=model, messages=MESSAGES, n=3, **GREEDY)
    assert [choice.message.content for choice in reply.choices] == [answer(prompt_ids)] * 3
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt_ids), 3 * TOKENS)


def test_sampled_choices_differ_and_a_seed_repeats_them(api: Any, model: str) -> None:
    sampled = {"max_tokens": TOKENS, "temperature": 1.0, "seed": 5, "n": 2, "extra_body": {"ignore_eos": True}}
    first, again = (api.chat.completions.create(model=model, messages=MESSAGES, **sampled) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts[0] != texts[1]
    assert [choice.message.content for choice in again.choices] == texts


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer(
    api: Any, model: str, answer: Answer, prompt_ids: list[int], stream: bool
) -> None:
    said = answer(prompt_ids)
    stop = said[len(said) // 2 : len(said) // 2 + 3]
    reply = api.chat.completions.create(model=model, messages=MESSAGES, stop=stop, stream=stream, **GREEDY)
    if stream:
        events = list(reply)
        text, reason = "".join(event.choices[0].delta.content or "" for event in events), events[-1].choices[0]
    else:
        text, reason = reply.choices[0].message.content, reply.choices[0]
    assert (text, reason.finish_reason) == (said[: said.index(stop)], "stop")


def test_what_does_not_fit_the_model_is_refused(api: Any, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        api.completions.create(model=model, prompt=[5] * 590, max_tokens=50)
    assert refused.value.code == "context_length_exceeded"


# --- what engines have beside OpenAI's plain fields -------------------------------------------------------------------


def test_log_probabilities_of_a_chat_come_whole_and_streamed(api: Any, model: str, codec: TextCodec) -> None:
    asked = {"model": model, "messages": MESSAGES, "logprobs": True, "top_logprobs": 3, **GREEDY}
    choice = api.chat.completions.create(**asked).choices[0]
    content = choice.logprobs.content
    assert len(content) == TOKENS
    for one in content:
        best = one.top_logprobs[0]
        assert (one.token, one.logprob) == (best.token, best.logprob), "greedy takes the likeliest"
        assert len(one.top_logprobs) == 3 and bytes(one.bytes) == one.token.encode()
        assert 0 >= best.logprob >= one.top_logprobs[1].logprob >= one.top_logprobs[2].logprob
    assert "".join(one.token for one in content).replace("\ufffd", "") in choice.message.content.replace("\ufffd", "")
    events = list(api.chat.completions.create(stream=True, **asked))
    streamed = [one for event in events if event.choices[0].logprobs for one in event.choices[0].logprobs.content]
    assert streamed == content
    plain = api.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    assert plain.choices[0].logprobs is None


def test_log_probabilities_of_a_completion_come_whole_and_streamed(api: Any, model: str) -> None:
    asked = {"model": model, "prompt": "import os", "logprobs": 2, **GREEDY}
    found = api.completions.create(**asked).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == TOKENS
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values()) and 1 <= len(top) <= 2
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(TOKENS)]
    parts = [event.choices[0].logprobs for event in api.completions.create(stream=True, **asked)]
    parts = [part for part in parts if part is not None]
    assert [token for part in parts for token in part.tokens] == found.tokens
    assert [offset for part in parts for offset in part.text_offset] == found.text_offset


def test_sglangs_log_probabilities_are_triples(api: Any, codec: TextCodec) -> None:
    params = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    asked = {"text": "import os", "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    url = str(api.base_url).removesuffix("v1/") + "generate"
    answer = api._client.post(url, json=asked).json()
    meta = answer["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert [top[0] for top in meta["output_top_logprobs"]] == meta["output_token_logprobs"]
    assert all(text is None for _, _, text in meta["output_token_logprobs"])
    texts = api._client.post(url, json={**asked, "return_text_in_logprobs": True}).json()["meta_info"]
    said = [text for _, _, text in texts["output_token_logprobs"]]
    assert said == [codec.decode([token], skip_special_tokens=False) for token in answer["output_ids"]]
    assert (
        "output_token_logprobs"
        not in api._client.post(url, json={**asked, "return_logprob": False}).json()["meta_info"]
    )


def test_a_bias_and_a_penalty_reach_the_model(api: Any, model: str, prompt_ids: list[int], codec: TextCodec) -> None:
    body = {**GREEDY["extra_body"], "repetition_penalty": 1.5, "top_k": 4}
    asked = {**GREEDY, "extra_body": body, "logit_bias": {"77": 100}, "frequency_penalty": 2.0}
    reply = api.chat.completions.create(model=model, messages=MESSAGES, **asked)
    assert reply.choices[0].message.content.startswith(codec.decode([77]))


def test_what_torch_does_not_have_is_refused_by_name(api: Any, model: str) -> None:
    for asked, param in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "structured_outputs.regex"),
        ({"extra_body": {"regex": "a+"}}, "regex"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            api.chat.completions.create(model=model, messages=MESSAGES, **asked)
        assert refused.value.param == param


def test_a_stop_string_may_stay_in_the_text(api: Any, model: str, answer: Answer, prompt_ids: list[int]) -> None:
    said = answer(prompt_ids)
    stop = said[len(said) // 2 : len(said) // 2 + 3]
    cut = said.index(stop)
    asked = {**GREEDY, "stop": stop}
    for more, text in (({}, said[:cut]), ({"include_stop_str_in_output": True}, said[: cut + len(stop)])):
        asked["extra_body"] = {**GREEDY["extra_body"], **more}
        assert api.chat.completions.create(model=model, messages=MESSAGES, **asked).choices[0].message.content == text
