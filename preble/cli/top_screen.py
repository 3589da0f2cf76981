"""One frame of `preble top`: a state of the gateway as tables. Owns what is shown and how it fits the terminal.

Names come from workers and clients; what a terminal would obey in them is written as an escape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

from ..errors import MissingExtra
from ..scheduling.records import PRICE_TERMS
from .console import printable

try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise MissingExtra("preble top needs rich: pip install 'preble[top]'") from error

State = dict[str, Any]
STYLES = {"ready": "green", "draining": "blue", "suspect": "yellow", "connecting": "dim"}
BAD = "bold red"  # every other state, also those that a newer gateway knows
ORDER = ("lost", "refused", "suspect", "connecting", "draining", "ready")
BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 12
UNKNOWN = "-"
ROWS_MIN = 3  # of each table, however small the terminal is
ROWS_AROUND = 9  # titles, headings and lines between tables
SOURCES_MAX = 6  # of discovery
ONCE_ROWS = 40
TERMS_COLUMNS = 120  # in a narrower terminal a price is shown without its terms
LOADING = "loading_seconds"  # a term that few prices have,
LOADING_COLUMNS = 9  # which takes so much more


class TopScreen:
    """Where frames go. As a context manager it takes the whole terminal over, and gives it back."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> TopScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, state: State, trouble: str = "") -> None:
        """The next frame, as wide and high as the terminal."""
        size = self._console.size
        self._live.update(frame(state, size.width, size.height, trouble), refresh=True)

    def print(self, state: State) -> None:
        """A frame that stays."""
        self._console.print(frame(state, self._console.width, ONCE_ROWS))


def frame(state: State, width: int, height: int, trouble: str = "") -> RenderableType:
    """A state as something to print in `height` lines of `width` columns; the workers get half of them."""
    sources = state["gateway"].get("discovery") or []
    places = min(len(sources), SOURCES_MAX) + (len(sources) > SOURCES_MAX)
    rows = max(height - ROWS_AROUND - places - bool(sources), 4 * ROWS_MIN)
    workers = min(len(state["workers"]), max(rows // 2, ROWS_MIN))
    rest = max((rows - workers) // 3, ROWS_MIN)
    return Group(
        header(state, trouble),
        *([source_table(sources)] if sources else []),
        worker_table(state["workers"], workers),
        decision_table(state["decisions"][:rest], shown_terms(state["decisions"][:rest], width)),
        prefix_table(state["prefixes"][:rest]),
        event_table(state["events"][:rest]),
    )


def shown_terms(decisions: Sequence[State], width: int) -> tuple[str, ...]:
    """The terms of a price that fit; loading is one of them where something is loaded."""
    if not any(one["chosen"].get(LOADING) for one in decisions):
        return PRICE_TERMS if width >= TERMS_COLUMNS else ()
    after = PRICE_TERMS.index("prefill_seconds") + 1
    terms = (*PRICE_TERMS[:after], LOADING, *PRICE_TERMS[after:])
    return terms if width >= TERMS_COLUMNS + LOADING_COLUMNS else ()


def header(state: State, trouble: str) -> Text:
    """The fleet in three lines; in a fourth what is wrong."""
    gateway, totals, fleet = state["gateway"], state["totals"], state["fleet"]
    ready = sum(worker["state"] == "ready" for worker in state["workers"])
    word = "draining" if gateway["draining"] else "ready" if gateway["ready"] else "no workers"
    text = Text.assemble(
        ("Preble ", "bold"), (word, "green" if word == "ready" else "bold red"),
        f"  {ready} of {len(state['workers']) + state['workers_left_out']} workers",
        f"  policy {printable(totals['policy'])}  up {duration(state['uptime_seconds'])}\n",
        f"{number(fleet['requests_per_second'], '.1f')} requests/s  {totals['live_requests']} live",
        f"  {number(fleet['output_tokens_per_second'], ',.0f')} tokens/s  errors {number(fleet['errors'], '.1%')}",
        f"  {number(fleet['waiting'], '.0f')} waiting\n",
        f"cached {share(fleet['hit'])}{loaded_word(fleet)}  first token {seconds(fleet['first_token_p50'])}",
        f" (p99 {seconds(fleet['first_token_p99'])})  per token {seconds(fleet['seconds_per_token_p50'])}",
        f" (p99 {seconds(fleet['seconds_per_token_p99'])})",
    )  # fmt: skip
    if trouble:
        text.append(f"\n{printable(trouble)}", "bold red")
    return text


def loaded_word(numbers: State) -> str:
    """How much of what was cached came from host memory or disk, if any did."""
    return f" ({share(numbers['loaded'])} of it loaded)" if numbers.get("loaded") else ""


def source_table(sources: Sequence[State]) -> Table:
    """Where servers are looked for: each source of discovery, what it named, and what keeps some of that from use."""
    table = _table("discovery", "", ">answered", ">found", ">ready", ">taken", ">refused", "why")
    for one in sources[:SOURCES_MAX]:
        word = source_word(one)
        age, answered = one["age_seconds"], one["has_answered"]
        _add(
            table,
            printable(one["source"]),
            Text(word, "green" if word == "in step" else STYLES["suspect"]),
            UNKNOWN if age is None else f"{duration(age)} ago",
            str(one["named"]) if answered else UNKNOWN,
            str(one["found"]["ready"]) if answered else UNKNOWN,
            str(sum(one["servers"].values())),
            str(one["left_out"] + one["workers"].get("refused", 0)),
            printable(next(iter(source_whys(one)), "")),
        )
    if len(sources) > SOURCES_MAX:
        _add(table, f"and {len(sources) - SOURCES_MAX} more")
    return table


def source_word(source: State) -> str:
    """How a source of discovery stands."""
    if not source["has_answered"]:
        return "kept list" if source["age_seconds"] is not None else "no answer" if source["failing"] else "asking"
    return "no answer" if source["failing"] else "doubted" if source["is_doubted"] else "in step"


def source_whys(source: State) -> list[str]:
    """What keeps it from answering, then which of its servers are not used, and why."""
    failing = f"failed {source['failures']} times: {source['failing']}" if source["failing"] else ""
    unkept = f"not kept: {source['keep_failing']}" if source["keep_failing"] else ""
    left_out = {**source["unusable"], **source["refused"]}
    return [why for why in (failing, unkept, *(f"{name}: {why}" for name, why in left_out.items())) if why]


def worker_table(workers: Sequence[State], most: int) -> Table:
    """The workers, those in trouble first; with the tokens they cache below the GPU's memory, where one does."""
    below = any(worker.get("away_tokens") for worker in workers)
    table = _table(
        "worker", "state", "load", "", ">queue", ">running", ">kv", *([">below"] if below else []), ">hit", ""
    )
    order = {name: place for place, name in enumerate(ORDER)}
    ordered = sorted(workers, key=lambda worker: (order.get(worker["state"], -1), worker["id"]))
    for worker in ordered[:most]:
        _add(
            table,
            printable(worker["id"]),
            Text(worker["state"], STYLES.get(worker["state"], BAD)),
            share(worker["load"]),
            spark(worker["history"]["load"]),
            str(worker["waiting"]),
            str(worker["running"]),
            share(worker["kv"]),
            *([f"{worker['away_tokens']:,}"] if below else []),
            share(worker["hit"]),
            spark(worker["history"]["hit"]),
        )
    if len(ordered) > most:
        _add(table, f"and {len(ordered) - most} more")
    return table


def decision_table(decisions: Sequence[State], terms: Sequence[str]) -> Table:
    """The last decisions, with those terms of the chosen worker's price, and the whole of it."""
    price = (*terms, "total_seconds")
    columns = (f">{name.removesuffix('_seconds')}" for name in price)
    table = _table("decided", "worker", "why", ">cached/prompt", *columns, ">first")
    for one in decisions:
        chosen, outcome = one["chosen"], one["outcome"]
        first_token = "running" if outcome is None else seconds(outcome["first_token_seconds"])
        _add(
            table,
            f"{duration(one['seconds_ago'])} ago",
            printable(one["worker"]),
            printable(one["reason"]),
            f"{chosen['matched_tokens']:,}/{one['prompt_tokens']:,}",
            *(seconds(chosen[name]) for name in price),
            first_token,
        )
    return table


def prefix_table(prefixes: Sequence[State]) -> Table:
    table = _table("prefix", ">tokens", ">requests", ">load", "workers")
    for one in prefixes:
        holders = ", ".join(printable(holder["worker"]) for holder in one["holders"][:6])
        more = one["holders_count"] - len(one["holders"][:6])
        where = f"{holders} and {more} more" if more > 0 else holders
        _add(table, one["name"], f"{one['prefix_tokens']:,}", str(one["requests"]), share(one["load"]), where)
    return table


def event_table(events: Sequence[State]) -> Table:
    table = _table("event", "", "")
    for one in events:
        _add(table, f"{duration(one['seconds_ago'])} ago", *map(printable, event_words(one)))
    return table


def event_words(event: State) -> tuple[str, str]:
    """(what, which) of an event."""
    kind = event["kind"]
    if kind == "worker":
        return event["after"], f"{event['worker']} (was {event['before']}) {event['why']}".rstrip()
    if kind == "policy":
        return kind, f"{event['after']} instead of {event['before']}"
    why = event["why"] if event["phase"] == "ended" else event["reason"]
    where = f"{event['prefix_tokens']:,} tokens, {event['from_worker']} -> {event['to_worker']}"
    return f"{kind} {event['phase']}", f"{where}: {why}"


def _table(*names: str) -> Table:
    """A table without lines; a name that begins with > is that of a column of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold dim", expand=False)
    for name in names:
        right = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    return table


def _add(table: Table, *cells: str | Text) -> None:
    """A row. A string is text: rich would take brackets in it for markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


# --- numbers ----------------------------------------------------------------------------------------------------------


def share(value: float | None) -> str:
    return number(value, ".0%")


def number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def seconds(value: float | None) -> str:
    """Seconds with the unit that fits."""
    if value is None:
        return UNKNOWN
    return f"{value * 1e3:.0f} ms" if abs(value) < 0.9995 else f"{value:.1f} s"


def duration(value: float) -> str:
    """A time that has passed, in whole units."""
    whole = int(value)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def spark(values: Sequence[float | None]) -> str:
    """The latest values as blocks, of 1 or the highest; a gap where there was none."""
    latest = list(values)[-SPARK_COLUMNS:]
    top = max([1.0, *(value for value in latest if value is not None)])
    marks = (" " if value is None else BLOCKS[min(int(value / top * 8), 7)] for value in latest)
    return "".join(marks).rjust(SPARK_COLUMNS)
