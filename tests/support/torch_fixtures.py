"""Shared by the torch tests: one tiny model for the whole session, transformers' own answers, and driving an engine.

Import it only after `pytest.importorskip("torch")`; fixtures come with
`pytest_plugins = ["tests.support.torch_fixtures"]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from preble.engines.base import GenerationRequest, OutputChunk
from preble.engines.torch import TorchEngine
from preble.engines.torch.tiny_models import make_tiny_model
from preble.local import LocalConfig
from preble.types import SamplingParams

Tokens = npt.NDArray[np.int32]
STEPS_MAX = 20_000


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Two cores are shared by the whole test run; more threads than that only get in each other's way."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama-1m in transformers format."""
    return make_tiny_model("llama-1m", tmp_path_factory.mktemp("models"))


class Reference:
    """transformers itself: greedy output by full forward passes without any cache. Answers are kept."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._known: dict[bytes, list[int]] = {}

    @torch.inference_mode()
    def logits(self, token_ids: Iterable[int]) -> torch.Tensor:
        """Logits [vocab] after the last token."""
        row: torch.Tensor = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0, -1]
        return row

    def greedy(self, prompt: Tokens, count: int) -> list[int]:
        """The first `count` output tokens; end-of-sequence tokens do not stop it."""
        output = self._known.setdefault(prompt.tobytes(), [])
        while len(output) < count:
            output.append(int(self.logits([*prompt.tolist(), *output]).argmax()))
        return output[:count]


@pytest.fixture(scope="session")
def reference(tiny_model_dir: Path) -> Reference:
    """transformers' answers for the session's tiny model."""
    return Reference(tiny_model_dir)


@pytest.fixture
def make_engine(tiny_model_dir: Path) -> Iterable[Callable[..., TorchEngine]]:
    """Build float32 CPU engines over the tiny model; keyword arguments go to `LocalConfig`. Closed after the test."""
    engines = []

    def make(model_dir: Path = tiny_model_dir, *, dtype: str = "float32", **local: Any) -> TorchEngine:
        config = LocalConfig(**{"kv_capacity_tokens": 4096, **local})
        engines.append(TorchEngine(model_dir, local=config, dtype=dtype, device="cpu"))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def prompt(seed: int, length: int, vocab_size: int = 2048) -> Tokens:
    """`length` random tokens, none of them special."""
    return np.random.default_rng(seed).integers(3, vocab_size, length).astype(np.int32)


def joined(*parts: Tokens) -> Tokens:
    """One prompt of several parts."""
    return np.concatenate(parts).astype(np.int32)


@dataclass
class Answer:
    """All that an engine said about one request."""

    token_ids: list[int] = field(default_factory=list)
    first_index: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None

    def take(self, chunk: OutputChunk) -> None:
        """Add a chunk; each token must come exactly once, in order, and nothing after the last chunk."""
        assert self.finish_reason is None, f"a chunk after the last: {chunk}"
        if self.first_index is None:
            self.first_index = chunk.index
            self.cached_tokens = chunk.cached_tokens
        assert chunk.index == self.first_index + len(self.token_ids), "output positions have a gap or repeat"
        self.token_ids.extend(chunk.token_ids)
        self.finish_reason, self.error = chunk.finish_reason, chunk.error


class Driver:
    """Submits to an engine and collects its answers by request id."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.answers: dict[str, Answer] = {}

    def submit(
        self,
        request_id: str,
        token_ids: Tokens,
        sampling: SamplingParams,
        *,
        output_offset: int = 0,
        namespace: Any = None,
    ) -> None:
        """Queue one request."""
        self.engine.submit(GenerationRequest(request_id, token_ids, sampling, namespace, output_offset))
        self.answers[request_id] = Answer()

    def step(self) -> None:
        """One iteration."""
        for chunk in self.engine.step():
            self.answers[chunk.request_id].take(chunk)

    def run(self) -> dict[str, Answer]:
        """Until the engine has nothing left to do."""
        for _ in range(STEPS_MAX):
            if not self.engine.has_work():
                return self.answers
            self.step()
        raise AssertionError(f"still busy after {STEPS_MAX} steps:\n{self.engine.scheduler.show()}")

    def ask(self, request_id: str, token_ids: Tokens, sampling: SamplingParams, **options: Any) -> Answer:
        """Run one request, and whatever else is queued, to the end."""
        self.submit(request_id, token_ids, sampling, **options)
        return self.run()[request_id]


def greedy(count: int, **fields: Any) -> SamplingParams:
    """Greedy sampling of exactly `count` tokens, unless a stop token is given."""
    return SamplingParams(**{"max_new_tokens": count, "ignore_eos": True, **fields})
