"""What a request does to its logits before a token is chosen: biases, penalties, tokens that must not come yet. Owns
one request's counts of its tokens; draws nothing.

A request that is resumed brings its output along, so its penalties count on where they stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ...types import SamplingParams

_SHAPES = {"repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "min_new_tokens"}
_SHAPES |= {"allowed_token_ids"}


class LogitShaper:
    """The shaping of one request's logits. `ends`: tokens that end its output. Not thread-safe.

    Cost: a pass over the vocabulary for each token, and 5 or 6 bytes of the device for each of the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: npt.NDArray[np.int32],
        output: npt.NDArray[np.int32],
        ends: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._params = params
        self._ends = torch.tensor([token for token in ends if token < vocab_size], dtype=torch.int64, device=device)
        bias = params.logit_bias or {}
        self._bias_ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self._biases = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        self._forbidden: torch.Tensor | None = None
        if params.allowed_token_ids:
            self._forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self._forbidden[torch.tensor(params.allowed_token_ids, dtype=torch.int64, device=device)] = False
        counts = np.bincount(output, minlength=vocab_size)[:vocab_size]
        seen = np.bincount(prompt, minlength=vocab_size)[:vocab_size] + counts > 0
        self._counts = torch.tensor(counts, dtype=torch.float32, device=device)
        self._seen = torch.tensor(seen, device=device)

    def saw(self, token: int) -> None:
        """One more output token."""
        self._counts[token] += 1
        self._seen[token] = True

    def shaped(self, row: torch.Tensor, position: int) -> torch.Tensor:
        """New logits for output position `position`; `row` [vocab] stays as it is."""
        params = self._params
        row = row.index_add(0, self._bias_ids, self._biases)
        repetition = params.repetition_penalty
        if repetition is not None and repetition != 1.0:
            row = torch.where(self._seen, torch.where(row > 0, row / repetition, row * repetition), row)
        if params.frequency_penalty:
            row = row - params.frequency_penalty * self._counts
        if params.presence_penalty:
            row = row - params.presence_penalty * (self._counts > 0)
        if position < (params.min_new_tokens or 0):
            row = row.index_fill(0, self._ends, -torch.inf)
        if self._forbidden is not None:
            row = row.masked_fill(self._forbidden, -torch.inf)
        return row


def shaper_for(
    params: SamplingParams,
    token_ids: npt.NDArray[np.int32],
    output_offset: int,
    ends: Sequence[int],
    vocab_size: int,
    device: torch.device,
) -> LogitShaper | None:
    """The shaper of a request whose last `output_offset` tokens are output already; None where nothing is shaped."""
    if _SHAPES.isdisjoint(params.needs()):
        return None
    prompt_tokens = len(token_ids) - output_offset
    return LogitShaper(params, token_ids[:prompt_tokens], token_ids[prompt_tokens:], ends, vocab_size, device)
