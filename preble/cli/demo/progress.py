"""The running numbers of a phase of the demo, shown while it lasts. Owns no screen."""

from __future__ import annotations


class Tally:
    """Running numbers of one phase, fed one finished request at a time. Not thread-safe."""

    def __init__(self, policy: str, total: int) -> None:
        self.policy, self.total = policy, total
        self.sent = self.done = self.failed = 0
        self.ttft_sum = 0.0
        self.prompt_tokens = self.reused_tokens = 0

    def add(self, ttft_seconds: float, prompt_tokens: int, reused_tokens: int) -> None:
        """Count a request that got all its tokens."""
        self.done += 1
        self.ttft_sum += ttft_seconds
        self.prompt_tokens += prompt_tokens
        self.reused_tokens += reused_tokens

    @property
    def text(self) -> str:
        """ "mean TTFT 412 ms, 87% of prompt tokens reused, 3 in flight"."""
        waiting = self.sent - self.done - self.failed
        failed = f", {self.failed} FAILED" if self.failed else ""
        if not self.done:
            return f"{waiting} in flight{failed}"
        reused = self.reused_tokens / max(1, self.prompt_tokens)
        mean = self.ttft_sum / self.done * 1000
        return f"mean TTFT {mean:6,.0f} ms, {reused:4.0%} of prompt tokens reused, {waiting:2d} in flight{failed}"
