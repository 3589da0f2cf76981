"""Requests to replay: prompts as token ids, output lengths, arrivals, and what must come before what. Owns their data.

Readers, generators and arrival processes make these; the simulator, the study and the benchmarks use them. A prompt is
kept as the parts it is made of, which requests share, and becomes one array only when it is asked for: a workload of
72,000 prompts of 3,900 tokens each fits in the memory of its segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..errors import InvalidInput
from ..types import PRIORITIES, SessionHint, check_int, check_seconds

Int32Array = npt.NDArray[np.int32]


def unwritable(ids: npt.ArrayLike) -> Int32Array:
    """Token ids as an array that requests may share, int32."""
    array = np.asarray(ids, dtype=np.int32)
    array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True, eq=False)
class PromptRequest:
    """One request of a workload. Raises `InvalidInput` naming the field.

    `parts`: int32 arrays, shape [n] each, whose concatenation is the prompt; requests share them, nobody writes to
    them. `group`: the prefix group it belongs to (tool, document, video, problem, agent). `output_tokens`: how many
    tokens it generates; `output_ids`: those tokens where they are known, shape [output_tokens].

    `arrival_seconds`: when it is sent, from the start of the workload. In a closed loop it is sent `pause_seconds`
    after the request named `after` has finished, and not before `arrival_seconds`.

    What a client says beside: `hint`, its session and that one's parent; `after_tool`, whether the pause before it was
    a tool's; `sampled`, whether it is one of several samples of its `group`'s prompt, all of which are waited for;
    `tenant`, whose it is; `deadline_seconds`, how long after its arrival its first token is still of use; `priority`,
    "interactive" or "batch".
    """

    request_id: str
    parts: tuple[Int32Array, ...]
    output_tokens: int
    group: str = ""
    arrival_seconds: float = 0.0
    after: str | None = None
    pause_seconds: float = 0.0
    output_ids: Int32Array | None = None
    hint: SessionHint | None = None
    after_tool: bool = False
    sampled: bool = False
    tenant: str = ""
    deadline_seconds: float | None = None
    priority: str = "interactive"

    def __post_init__(self) -> None:
        check_int("PromptRequest.output_tokens", self.output_tokens, 1, 2**31 - 1, InvalidInput)
        if not self.parts or not any(len(part) for part in self.parts):
            raise InvalidInput(f"PromptRequest.parts of {self.request_id!r} are empty")
        for name in ("arrival_seconds", "pause_seconds"):
            check_seconds(f"PromptRequest.{name}", getattr(self, name), InvalidInput)
        if self.deadline_seconds is not None:
            check_seconds("PromptRequest.deadline_seconds", self.deadline_seconds, InvalidInput)
            if not self.deadline_seconds:
                raise InvalidInput(f"PromptRequest.deadline_seconds must be positive, got {self.deadline_seconds!r}")
        if self.priority not in PRIORITIES:
            raise InvalidInput(f"PromptRequest.priority must be one of {', '.join(PRIORITIES)}, got {self.priority!r}")

    @property
    def prompt_tokens(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def token_ids(self) -> Int32Array:
        """The prompt, shape [prompt_tokens], int32. Made anew at each access where there are several parts."""
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)

    def at(self, arrival_seconds: float) -> PromptRequest:
        """The same request, arriving then."""
        return replace(self, arrival_seconds=arrival_seconds)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival (of the file, where none were drawn). `name` is for titles, `source` says where the
    requests come from and `arrivals` how their times were made ("none", "poisson 4 rps", "traced", ...); `notes` say
    how much of what was left out, or put in where the file does not say it."""

    name: str
    requests: Sequence[PromptRequest]
    source: str = ""
    arrivals: str = "none"
    notes: tuple[str, ...] = ()

    @property
    def has_sessions(self) -> bool:
        """Whether it has sessions whose turns wait for each other."""
        return any(request.hint is not None and request.after is not None for request in self.requests)

    def __len__(self) -> int:
        return len(self.requests)
