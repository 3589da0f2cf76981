"""The choices of one API request: what each is to be, what became of it, and its pieces. Owns no work."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...types import SamplingParams, SessionHint, TokenLogprob

if TYPE_CHECKING:
    from ..._placement.decision import Decision


@dataclass(frozen=True, slots=True)
class ChoiceJob:
    """What one choice is to be. `stops` are strings, of which the one that came is part of the text with `keep_stop`;
    `skip_special_tokens` leaves special tokens out of the text.

    `client`, `first_token_seconds`, `session` and `group` are `Router.generate`'s, `claim` are further arguments of it.
    """

    index: int
    request_id: str
    token_ids: npt.NDArray[np.int32]
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    namespace: Hashable = None
    skip_special_tokens: bool = True
    client: Hashable = None
    first_token_seconds: float | None = None
    session: SessionHint | None = None
    claim: Mapping[str, Any] = field(default_factory=dict)
    keep_stop: bool = False
    group: Hashable = None


@dataclass(slots=True)
class Choice:
    """What became of a job so far. `finish_reason` "stop" comes with what stopped it, a string or a token id.
    `seconds_per_token` is known at its end, where more than its first tokens came."""

    job: ChoiceJob
    output_tokens: int = 0
    cached_tokens: int | None = None
    decision: Decision | None = None
    worker: str = ""
    finish_reason: str | None = None
    stopped_by: str | int | None = None
    seconds_per_token: float | None = None
    reported_prompt_tokens: int | None = None  # by an engine that was sent the prompt as text

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt: as the engine counts them, else as we do."""
        return len(self.job.token_ids) if self.reported_prompt_tokens is None else self.reported_prompt_tokens


@dataclass(frozen=True, slots=True)
class TextPiece:
    """News of a choice: text that may be shown, and the tokens that came, with their log probabilities where those are
    asked for. `last` when the choice has ended."""

    choice: Choice
    text: str
    token_ids: tuple[int, ...] = ()
    last: bool = False
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class RequestProgress:
    """All choices of one request, for usage and logs. `first` is set by the first piece of any choice."""

    choices: list[Choice] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens, each prompt counted once."""
        if len(self.choices) == 1:
            return self.choices[0].prompt_tokens
        return sum({id(one.job.token_ids): one.prompt_tokens for one in self.choices}.values())

    @property
    def output_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(one.output_tokens for one in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were cached, each prompt counted once: as its first choice found it."""
        first: dict[int, int] = {}
        for one in self.choices:
            first.setdefault(id(one.job.token_ids), one.cached_tokens or 0)
        return sum(first.values())


def jobs_for(prompts: Sequence[npt.NDArray[np.int32]], template: ChoiceJob, choices: int) -> list[ChoiceJob]:
    """`choices` jobs for each prompt, like `template`; each with a request id, and a seed where there is one. Those of
    one prompt are a group: their request ends with the last of them."""
    alone = choices == 1 or template.group is not None
    return [
        replace(
            template,
            index=index,
            request_id=f"{template.request_id}/{index}",
            token_ids=prompts[index // choices],
            sampling=_with_seed(template.sampling, index % choices),
            group=template.group if alone else (template.request_id, index // choices),
        )
        for index in range(len(prompts) * choices)
    ]


def _with_seed(sampling: SamplingParams, choice: int) -> SamplingParams:
    if sampling.seed is None or not choice:
        return sampling
    return replace(sampling, seed=(sampling.seed + choice) % 2**63)
