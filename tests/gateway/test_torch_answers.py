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
