"""An audit in ten lines. Owns the words; every figure is `findings`'s."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from ...sim.replay import Estimate95
from ..console import duration, printable
from .findings import AuditFindings, Lost, RepeatedPrefix
from .what_if import WhatIf

WIDTH = 116
LABEL = 10
TOKENS_SHOWN = 4
TEXT_CHARS = 40
Decode = Callable[[tuple[int, ...]], str]


def tokens(count: float) -> str:
    """ "812", "81 k", "8.1 M"."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f}"


def share(value: float) -> str:
    """A share in percent."""
    return f"{value:.0%}" if value == 0.0 or value >= 0.01 else "under 1%"


def headline(found: AuditFindings) -> str:
    """The one sentence."""
    mine, now = found.e2_ttft(), found.ttft_seconds
    twice = f"{share(found.twice_share.value)} of the prefill was computed before"
    if mine is None or not now:
        saved = 0.0 if found.e2 is None else 1.0 - found.e2.computed_ratio.value
        return f"{twice}; E2 would have computed {share(saved)} fewer tokens" if saved > 0.0 else twice
    if mine.value <= 0.95 * now:
        return f"{twice}; E2 would have brought the first token in {duration(mine.value)}, not {duration(now)}"
    change = "changed little" if mine.value < 1.05 * now else "been slower"
    return f"{twice}; E2 would have {change}: first token in {duration(mine.value)}, not {duration(now)}"


def lines(found: AuditFindings, decode: Decode | None = None) -> list[str]:
    """The report, a line of text each, about ten; longer ones are folded."""
    rows = [
        ("Seen", _seen(found)),
        ("Work", _work(found)),
        ("Twice", _twice(found)),
        ("Cost", _cost(found)),
        ("TTFT", _ttft(found)),
        ("Servers", _servers(found)),
        *(("Prefix", prefix(one, decode)) for one in found.prefixes),
        ("Sure", _sure(found)),
    ]
    rows += [("Missing", text) for text in problems(found)]
    made: list[str] = []
    for name, text in rows:
        folded = textwrap.wrap(text, WIDTH - LABEL, break_long_words=False, break_on_hyphens=False)
        made += [f"{name if not at else '':<{LABEL}}{part}" for at, part in enumerate(folded)]
    return made


def _seen(found: AuditFindings) -> str:
    kinds = sorted({one.engine for one in found.servers if one.engine != "no answer"})
    cut = " (interrupted)" if found.is_interrupted else ""
    answered = sum(one.engine != "no answer" for one in found.servers)
    names = f"{answered} server{'s' * (answered != 1)} ({', '.join(kinds)})"
    asked = f"{found.requests:,} requests, {tokens(found.prompt_tokens)} prompt tokens"
    return f"{names}, {duration(found.seconds)}{cut}, {asked}"


def _work(found: AuditFindings) -> str:
    reused = max(0.0, found.prompt_tokens - found.computed_tokens)
    hit = reused / found.prompt_tokens if found.prompt_tokens else 0.0
    return f"{tokens(found.computed_tokens)} prompt tokens computed, {tokens(reused)} ({share(hit)}) found in a cache"


def _twice(found: AuditFindings) -> str:
    if not found.twice_tokens:
        return "no token was computed for another time"
    return (
        f"{tokens(found.twice_tokens)} of them ({_range(found.twice_share, share)}) had been computed before: "
        f"{tokens(found.elsewhere_tokens)} lay in another server's cache, {tokens(found.again_tokens)} had been evicted"
    )


def _cost(found: AuditFindings) -> str:
    return f"{duration(found.prefill_seconds)} of prefill for nothing, {share(found.busy_share)} of the fleet's time"


def _ttft(found: AuditFindings) -> str:
    now, e2, mine = found.ttft_seconds, found.e2, found.e2_ttft()
    if e2 is None:
        return f"mean {duration(now)}; no request to try E2 on" if now else "no request to try E2 on"
    if not now or e2.error is None:
        return f"not measured, so nothing is claimed of it; E2 would have computed {_computed(e2)}"
    p99 = found.ttft_p99_seconds
    measured = f"mean {duration(now)}" + (f", p99 {duration(p99)}" if p99 else "")
    if mine is None:
        return (
            f"{measured}; no claim of E2's: the replay's own error of {share(e2.uncertainty or 0.0)} is larger than "
            f"the change it shows; E2 would have computed {_computed(e2)}"
        )
    tail = found.e2_ttft_p99()
    rest = f", p99 {_range(tail, duration)}" if tail is not None else ", no claim of p99"
    return f"{measured}; E2 would have made it {_range(mine, duration)}{rest}"


def _computed(e2: WhatIf) -> str:
    return f"{_range(e2.computed_ratio, share)} of the prompt tokens that were"


def _servers(found: AuditFindings) -> str:
    if found.e2 is None:
        return "unknown"
    count, enough = found.e2.workers, found.e2.workers_enough
    if count == 1:
        return "one: there is nothing to choose between"
    if enough is None:
        return f"no claim whether E2 needs all {count}: the same error"
    if enough == count:
        return f"E2 needs all {count} for the same traffic at today's times to first token"
    return f"E2 needs {enough} of the {count} for the same traffic, no slower than today: {count - enough} fewer"


def prefix(one: RepeatedPrefix, decode: Decode | None) -> str:
    """One prefix: which, how long, how often, where."""
    begins = f"begins {' '.join(map(str, one.head[:TOKENS_SHOWN]))}"
    if decode is not None:
        begins = f"begins {printable(' '.join(decode(one.head).split())[:TEXT_CHARS])!r}"
    after = f" after {one.start:,}" if one.start else ""
    return (
        f"{one.name[:8]}  {one.end - one.start:,} tokens{after}, {one.requests:,} requests, at {one.servers} "
        f"server{'s' * (one.servers != 1)}, {tokens(one.repeated_tokens)} computed again; {begins}"
    )


def _sure(found: AuditFindings) -> str:
    words = [f"events show {share(found.seen / max(1, found.requests))} of the requests"]
    if found.seen < found.requests:
        words.append("the others, all cached, are spread by the metrics' rates")
    if found.e2 is not None and found.e2.error is not None:
        words.append(f"the replay of what was is {_off(found.e2.error)} the measured TTFT{_apart(found.e2)}")
    elif found.e2 is not None:
        words.append("nothing to check the replay against (SGLang: --enable-metrics)")
    words += losses(found.lost)
    return f"{found.sure}: {'; '.join(words)}"


def _off(error: float) -> str:
    if abs(error) < 0.005:
        return "on"
    return f"{abs(error):.0%} {'above' if error > 0 else 'below'}"


def _apart(e2: WhatIf) -> str:
    """How far off it is where it was not fitted."""
    if e2.error_apart is None:
        return " (as the metrics have the engines: too few requests to fit them)"
    return f", {_off(e2.error_apart)} it where nothing was fitted"


def losses(lost: Lost) -> list[str]:
    """What was lost or dropped, in words; nothing where nothing was."""
    said = (
        (lost.gaps, f"{lost.gaps} gaps in events, {lost.resyncs} for good"),
        (lost.restarts, f"{lost.restarts} restarts"),
        (lost.unreadable, f"{lost.unreadable} batches unreadable"),
        (lost.unanswered, f"{lost.unanswered} questions unanswered"),
        (lost.unplaced_tokens, f"{tokens(lost.unplaced_tokens)} tokens after a start nobody saw"),
        (lost.dropped + lost.forgotten_units, f"{lost.dropped + lost.forgotten_units:,} records dropped at the bounds"),
    )
    return [text for count, text in said if count] or ["no event lost"]


def problems(found: AuditFindings) -> list[str]:
    """What servers lack, each thing once."""
    return list(dict.fromkeys(text for server in found.servers for text in server.problems))


def _range(value: Estimate95, words: Callable[[float], str]) -> str:
    return f"{words(value.value)} [{words(value.low)} to {words(value.high)}]"
