"""Types of a scheduler's answers; what they are is said in `decision.pyx`."""

from collections.abc import Hashable, Mapping

class Decision:
    request_id: Hashable
    worker: str
    matched_tokens: int
    prompt_tokens: int
    reason: str
    costs: Mapping[str, float] | None

class Match:
    prompt_tokens: int
    known_tokens: int
    @property
    def matched_tokens(self) -> Mapping[str, int]: ...
    @property
    def best_tokens(self) -> int: ...

def unit_draw(seed: int, sequence: int) -> float: ...
