"""`preble explain`: decision records as tables, from a file of JSON lines. Owns the choice of records and how they are
printed; what is in one is said in `records.py`.

However long the file is, only the records that are to be printed are kept.
"""

from __future__ import annotations

import argparse
import heapq
import math
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import InvalidInput
from ..scheduling.records import PRICE_TERMS, DecisionRecord, WorkerTerms, read_lines
from .console import aligned, printable

RECORDS_MAX = 1000  # printed at once
HEADER = ("", "worker", "matched", "missed")
LOADS = ("host", "disk", "loading")  # of the matched tokens, and the seconds that takes: a term of the total
PRICE = (*(name.removesuffix("_seconds") for name in PRICE_TERMS), "total")
BESIDE = ("L", "backlog")
LEGEND = """\
* chosen, - no candidate. Seconds: queue, the wait for what is ahead; prefill of what it lacks; others, who wait for it;
decode, its own output there; eviction, computing again what goes for it; balance, for its load; credit, which earlier
requests have saved up for a copy; total, the sum of them.
Beside it: L, the load, which is work given to it within the window; backlog, prefill booked and not done.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="decision records, one JSON object a line")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--id", metavar="ID", help="the records of this request id")
    which.add_argument("--last", type=count, metavar="N", help="the last N records (default: 1)")
    which.add_argument("--worst-regret", type=count, metavar="N", help="the N records with most regret, worst first")


def count(text: str) -> int:
    """An argument that is a number of records."""
    value = int(text)
    if not 1 <= value <= RECORDS_MAX:
        raise argparse.ArgumentTypeError(f"must be in [1, {RECORDS_MAX}], got {text}")
    return value


def run(args: argparse.Namespace) -> int:
    """Print the records asked for. Raises InvalidInput for a file that is none of records, or has none of these."""
    chosen = choose(read_lines(args.file), args)
    if not chosen:
        raise InvalidInput(f"{args.file} has no record{missing(args)}")
    sys.stdout.write("\n".join([*map(text_of, chosen), LEGEND]))
    return 0


def choose(records: Iterable[DecisionRecord], args: argparse.Namespace) -> Sequence[DecisionRecord]:
    if args.id is not None:
        return deque((record for record in records if str(record.request_id) == args.id), maxlen=RECORDS_MAX)
    if args.worst_regret is not None:
        judged = (record for record in records if record.regret_seconds is not None)
        return heapq.nlargest(args.worst_regret, judged, key=lambda record: record.regret_seconds or 0.0)
    return deque(records, maxlen=args.last or 1)


def missing(args: argparse.Namespace) -> str:
    """What was looked for and not found."""
    if args.id is not None:
        return f" of request {args.id!r}"
    return " with a time to first token" if args.worst_regret is not None else ""


# --- one record -------------------------------------------------------------------------------------------------------


def text_of(record: DecisionRecord) -> str:
    """A record as some lines of text: the decision, a row for each worker, what came of it."""
    scored = any(terms.score != terms.total_seconds for terms in record.workers)
    loads = any(terms.loading_seconds for terms in record.workers)
    header = (*HEADER, *(LOADS if loads else []), *PRICE, *BESIDE, *(["score"] if scored else []))
    rows = [header, *(row_of(record, terms, scored, loads) for terms in ordered(record))]
    return "\n".join([*heading(record), "", *aligned(rows, left=2), "", *ending(record)]) + "\n"


def heading(record: DecisionRecord) -> list[str]:
    """What was decided, and against what."""
    head = f"request {printable(record.request_id)}: decision {record.sequence} at {number(record.decided_at)} s, "
    head += f"policy {printable(record.policy)}, {record.prompt_tokens} prompt tokens"
    why = f"chosen {printable(record.worker)} ({printable(record.reason)})"
    if record.runner_up is None:
        why += ", the only candidate"
    else:
        why += f", runner-up {printable(record.runner_up)}, margin {number(record.margin)}"
    if record.shadow is not None:
        same = "the same" if record.shadow.worker == record.worker else printable(record.shadow.worker)
        why += f"; shadow {printable(record.shadow.policy)}: {same} ({printable(record.shadow.reason)})"
    if record.pair is not None:
        why += f"; decoded by {printable(record.pair.decode_worker)}, {record.pair.moved_tokens} tokens moved in "
        why += f"{number(record.pair.transfer_seconds)} s, {number(record.pair.one_seconds)} s on one worker"
    return [head, why]


def ordered(record: DecisionRecord) -> list[WorkerTerms]:
    """The chosen worker, the other candidates, the rest; each by score."""
    return sorted(record.workers, key=lambda one: (one.worker != record.worker, not one.candidate, one.score))


def row_of(record: DecisionRecord, terms: WorkerTerms, scored: bool, loads: bool) -> tuple[str, ...]:
    """A worker's row; with its score where that is not the total of each, and with what it loads where one does."""
    mark = "*" if terms.worker == record.worker else "" if terms.candidate else "-"
    price = (*(getattr(terms, name) for name in PRICE_TERMS), terms.total_seconds)
    beside = (terms.load_seconds, terms.backlog_seconds)
    return (
        mark,
        printable(terms.worker),
        str(terms.matched_tokens),
        str(terms.missed_tokens),
        *([str(terms.host_tokens), str(terms.disk_tokens), number(terms.loading_seconds)] if loads else []),
        *map(number, (*price, *beside, *([terms.score] if scored else []))),
    )


def ending(record: DecisionRecord) -> list[str]:
    if record.outcome is None:
        return ["no outcome: the request had not ended when this was written"]
    outcome, chosen = record.outcome, record.chosen
    lines = [
        f"{outcome.ended} after {number(outcome.seconds)} s, {known(outcome.output_tokens)} output tokens",
        f"first token    {pair(outcome.first_token_seconds, chosen.predicted_seconds, record.late_seconds, ' s')}",
        f"cached tokens  {pair(outcome.cached_tokens, chosen.matched_tokens, record.cached_error_tokens, '')}",
    ]
    regret = "not known" if record.regret_seconds is None else f"{number(record.regret_seconds)} s"
    share = f"{record.locality_regret:.1%} of what was computed ({record.lost_tokens} tokens) was cached elsewhere"
    return [*lines, f"regret         {regret}; {share if record.lost_tokens else 'nothing was computed in vain'}"]


def pair(actual: float | None, expected: float, error: float | None, unit: str) -> str:
    """A number as it came, as it was expected, and the difference."""
    if actual is None or error is None:
        return f"not reported, {number(expected)}{unit} expected"
    sign = "+" if error >= 0 else "-"
    return f"{number(actual)}{unit}, {number(expected)}{unit} expected ({sign}{number(abs(error))})"


def known(value: int | None) -> str:
    return "an unknown number of" if value is None else str(value)


def number(value: float) -> str:
    """Whole numbers as they are, others with four digits after the point."""
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    return f"{value:.4f}"
