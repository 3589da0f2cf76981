"""A naive model of how far estimates about one worker's cache are relied on: plain numbers, no shared code with the
real one. Owns nothing of marks or bookings; `models/scheduler.py` asks it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class NaiveAccuracy:
    """What was reported of one worker's cache. Amounts are in tokens."""

    block_size: int
    known: float = 0.0
    kept: float = 0.0
    reports: float = 0.0
    known_total: int = 0
    kept_total: int = 0
    reports_total: int = 0
    surplus_total: int = 0
    seen_events: bool = False
    seen_reports: bool = False
    prompts_since_events: int = 0
    prompts_since_report: int = 0

    @property
    def on_events(self) -> bool:
        return self.seen_events and self.prompts_since_events < 32

    @property
    def source(self) -> str:
        if self.on_events:
            return "events"
        return "reports" if self.seen_reports and self.prompts_since_report < 32 else "estimate"

    @property
    def eighths(self) -> int:
        """How much of what is marked is estimated: all, until enough reports found less than three quarters."""
        if self.on_events or self.reports < 8 or self.kept >= 0.75 * self.known:
            return 8
        share = 8 * self.kept / self.known
        return max(1, int(share) + (share > int(share)))

    def estimated(self, held: int) -> int:
        return held if self.eighths == 8 or not held else max(1, held // 8 * self.eighths)

    def prompt_done(self, prompt: int, matched: int, cached: int | None) -> None:
        self.prompts_since_report += 1
        if prompt - 1 - max(matched, cached or 0) >= self.block_size:
            self.prompts_since_events += 1

    def reported(self, prompt: int, matched: int, confirmed: int, cached: int, marked: bool) -> None:
        self.seen_reports, self.prompts_since_report = True, 0
        self.surplus_total += max(0, cached - matched)
        known = min(confirmed, prompt - 1) // self.block_size * self.block_size
        if not known or not marked:
            return
        kept = min(known, cached)
        self.reports_total, self.known_total = self.reports_total + 1, self.known_total + known
        self.kept_total += kept
        self.reports = self.reports * (1 - 1 / 64) + 1
        self.known = self.known * (1 - 1 / 64) + known
        self.kept = self.kept * (1 - 1 / 64) + kept

    def stored(self) -> None:
        self.seen_events, self.prompts_since_events = True, 0

    def cleared(self) -> None:
        self.known = self.kept = self.reports = 0.0

    def fade(self, seconds: float, half_life: float) -> None:
        factor = 2.0 ** (-seconds / half_life)
        self.known, self.kept, self.reports = self.known * factor, self.kept * factor, self.reports * factor

    def stats(self) -> dict[str, object]:
        return {
            "cache_source": self.source,
            "cache_accuracy": self.eighths / 8,
            "judged_reports": self.reports_total,
            "known_tokens": self.known_total,
            "kept_tokens": self.kept_total,
            "surplus_tokens": self.surplus_total,
        }
