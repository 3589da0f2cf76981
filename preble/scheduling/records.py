"""Decision records: what was known when a request was placed, and what became of it. Owns the records' shape, the ring
that keeps the latest of them, and their form as JSON lines; who decides what and when is the scheduler's.

A record is made with the decision and joined once, when its request ends. Regret, as it is defined here:

    lost tokens       cached on some worker when the request was placed, and yet computed by the chosen one
    locality regret   lost / (novel + lost), novel being what nobody had: the share of the work that was avoidable
    regret seconds    actual time to first token, less the least that any other worker was predicted to take; never
                      below 0, and 0 where there was no other

A worker's prediction is its backlog (prefill booked and not yet done) and the request's own prefill there. That is a
time to first token; what the policy compared is another thing, and counts what others lose, too.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from .._placement.decision import Decision, unit_draw
from ..errors import InvalidConfig, InvalidInput
from ..types import Explanation, PairCost, PairDecision, SessionHint, check_int
from .record_sink import Sink

FORMAT = 2  # 1 had the terms of an older rule, which do not add up to its total; they are refused
LINE_CHARS_MAX = 1 << 24  # of one record as JSON; a longer line is none
_SAMPLING = 0x5DEECE66D  # apart from the draws that policies get


# --- the records ------------------------------------------------------------------------------------------------------


# The terms of a worker's price, in the order in which they are shown; with `loading_seconds`, which few workers have,
# they add up to `total_seconds`.
PRICE_TERMS = (
    "queue_seconds",
    "prefill_seconds",
    "others_seconds",
    "decode_seconds",
    "eviction_seconds",
    "balance_seconds",
    "credit_seconds",
)


@dataclass(frozen=True, slots=True)
class WorkerTerms:
    """One worker in one decision: what `types.WorkerCost` says of it, and the prefill booked on it and not yet done
    (`backlog_seconds`). The seven of PRICE_TERMS and `loading_seconds`, for the `host_tokens` and `disk_tokens` among
    the matched, add up to `total_seconds`; the load L and the backlog are beside them, for information. `score` is
    what the policy compared (`total_seconds` for E2); only a `candidate` could be chosen."""

    worker: str
    matched_tokens: int
    missed_tokens: int
    queue_seconds: float
    prefill_seconds: float
    others_seconds: float
    decode_seconds: float
    eviction_seconds: float
    balance_seconds: float
    credit_seconds: float
    total_seconds: float
    load_seconds: float
    backlog_seconds: float
    score: float
    candidate: bool
    loading_seconds: float = 0.0
    host_tokens: int = 0
    disk_tokens: int = 0

    @property
    def predicted_seconds(self) -> float:
        """Time to first token if the backlog is worked off first."""
        return self.backlog_seconds + self.prefill_seconds + self.loading_seconds


_AS_EXPLAINED = tuple(field.name for field in fields(WorkerTerms) if field.name != "backlog_seconds")


@dataclass(frozen=True, slots=True)
class ShadowChoice:
    """What the shadow policy would have done, if it was not in error."""

    policy: str
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request; `seconds` counts from the decision. None stands for what nobody reported."""

    ended: str  # "finished" or "cancelled"
    seconds: float
    first_token_seconds: float | None
    cached_tokens: int | None
    output_tokens: int | None


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One decision with every worker that could have taken the request, and its outcome once it has ended.

    `sequence` counts the scheduler's decisions, `decided_at` is its clock. `margin` is the runner-up's score less the
    chosen worker's; with no other candidate it is 0 and `runner_up` None. `session` is what the client said its request
    belongs to; no decision depends on it. `pair`: the two workers that serve it, where it is not one; then `worker` is
    the one that prefills, as far as the first token, and `workers` are those that may (`explain_pair`).
    """

    request_id: Hashable
    sequence: int
    decided_at: float
    policy: str
    reason: str
    prompt_tokens: int
    worker: str
    runner_up: str | None
    margin: float
    workers: tuple[WorkerTerms, ...]
    shadow: ShadowChoice | None = None
    outcome: Outcome | None = None
    session: SessionHint | None = None
    pair: PairCost | None = None

    @property
    def chosen(self) -> WorkerTerms:
        """The terms of the worker that got the request."""
        return next(terms for terms in self.workers if terms.worker == self.worker)

    @property
    def cached_error_tokens(self) -> int | None:
        """Cached tokens, the engine's word less our estimate: below 0 where we expected too much."""
        if self.outcome is None or self.outcome.cached_tokens is None:
            return None
        return self.outcome.cached_tokens - self.chosen.matched_tokens

    @property
    def late_seconds(self) -> float | None:
        """Time to first token, actual less predicted for the chosen worker."""
        if self.outcome is None or self.outcome.first_token_seconds is None:
            return None
        return self.outcome.first_token_seconds - self.chosen.predicted_seconds

    @property
    def regret_seconds(self) -> float | None:
        """By how much the first token came later than the best prediction for another worker."""
        if self.outcome is None or self.outcome.first_token_seconds is None:
            return None
        actual = self.outcome.first_token_seconds
        others = (terms.predicted_seconds for terms in self.workers if terms.worker != self.worker)
        return max(actual - min(others, default=actual), 0.0)

    @property
    def lost_tokens(self) -> int:
        """Cached somewhere and computed again. By the engine's word on what was cached, else by our estimate."""
        reported = None if self.outcome is None else self.outcome.cached_tokens
        cached = self.chosen.matched_tokens if reported is None else reported
        return max(max(terms.matched_tokens for terms in self.workers) - cached, 0)

    @property
    def locality_regret(self) -> float:
        """lost / (novel + lost), in [0, 1]; 0 where nothing was computed."""
        novel = self.prompt_tokens - max(terms.matched_tokens for terms in self.workers)
        reported = None if self.outcome is None else self.outcome.cached_tokens
        if reported is not None:  # more than anybody was estimated to have was there all the same
            novel = min(novel, self.prompt_tokens - reported)
        computed = novel + self.lost_tokens
        return self.lost_tokens / computed if computed else 0.0


# --- keeping them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecording:
    """Which decisions are recorded, and where records go. Raises InvalidConfig naming the field.

    share: of all decisions, drawn by the scheduler's seed; those with `explain=True` are recorded in any case.
    per_second: beside the share, the first so many decisions of each second, so that an idle fleet's are all there.
    keep: the latest so many records are kept. Memory: about 0.4 KB for each worker in each of them.
    sink: called with each record when its request has ended, or a file that gets it as a line of JSON.
    sink_queue: records that may wait for the sink; what comes on top is dropped, and counted.
    """

    share: float = 1.0
    keep: int = 1024
    sink: Callable[[DecisionRecord], object] | str | os.PathLike[str] | None = None
    sink_queue: int = 1024
    per_second: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, (int, float)) or not 0.0 <= self.share <= 1.0:
            raise InvalidConfig(f"DecisionRecording.share must be a number in [0, 1], got {self.share!r}")
        check_int("DecisionRecording.keep", self.keep, 1, 1 << 20)
        check_int("DecisionRecording.sink_queue", self.sink_queue, 1, 1 << 20)
        check_int("DecisionRecording.per_second", self.per_second, 0, 1 << 20)
        if not (self.sink is None or callable(self.sink) or isinstance(self.sink, (str, os.PathLike))):
            raise InvalidConfig(f"DecisionRecording.sink must be a callable, a path or None, got {self.sink!r}")


@dataclass(slots=True, eq=False)
class _OpenRecord:
    """What was reported so far about a recorded request that goes on."""

    number: int
    first_token_seconds: float | None = None
    cached_tokens: int | None = None


class Records:
    """The ring of one scheduler. All calls come under its writers' lock.

    A record that is pushed out before its request has ended goes to the sink as it is, without an outcome.
    """

    def __init__(self, recording: DecisionRecording, seed: int) -> None:
        if not isinstance(recording, DecisionRecording):
            raise InvalidConfig(f"record must be a preble.scheduling.records.DecisionRecording, got {recording!r}")
        self._recording, self._seed = recording, seed
        self._ring: dict[int, DecisionRecord] = {}  # by number, oldest first
        self._live: dict[Hashable, _OpenRecord] = {}  # by key
        self._keys: dict[int, Hashable] = {}  # of those, by number
        self._sink = None if recording.sink is None else Sink(recording.sink, to_json, recording.sink_queue)
        self._second_began, self._this_second = -math.inf, 0
        self._counts = dict.fromkeys(("made", "joined", "pushed_out", "pushed_out_live", "errors"), 0)

    def samples(self, sequence: int) -> bool:
        """Whether this decision is one of the share."""
        return unit_draw(self._seed ^ _SAMPLING, sequence) < self._recording.share

    def is_early(self, now: float) -> bool:
        """Count a decision; whether it is one of the first `per_second` of its second."""
        if not self._recording.per_second:
            return False
        if not 0.0 <= now - self._second_began < 1.0:
            self._second_began, self._this_second = now, 0
        self._this_second += 1
        return self._this_second <= self._recording.per_second

    def add(self, key: Hashable, record: DecisionRecord) -> None:
        """Keep the record of a decision; at the bound the oldest is pushed out."""
        number = self._counts["made"]
        self._counts["made"] += 1
        self._ring[number] = record
        self._live[key] = _OpenRecord(number)
        self._keys[number] = key
        if len(self._ring) > self._recording.keep:
            self._push_out(next(iter(self._ring)))

    def _push_out(self, number: int) -> None:
        record = self._ring.pop(number)
        self._counts["pushed_out"] += 1
        key = self._keys.pop(number, None)
        if key is not None:
            del self._live[key]
            self._counts["pushed_out_live"] += 1
            self._send(record)

    def session(self, key: Hashable, session: SessionHint) -> None:
        """A live request belongs to a session; nothing to do where it was not recorded."""
        live = self._live.get(key)
        if live is not None:
            self._ring[live.number] = replace(self._ring[live.number], session=session)

    def failed(self) -> None:
        """A decision that was to be recorded could not be: its policy failed, or changed the fleet, when asked why."""
        self._counts["errors"] += 1

    def first_token(self, key: Hashable, now: float, cached_tokens: int | None) -> None:
        """A live request has its first token; nothing to do where it was not recorded."""
        live = self._live.get(key)
        if live is not None:
            if live.first_token_seconds is None:
                live.first_token_seconds = now - self._ring[live.number].decided_at
            live.cached_tokens = live.cached_tokens if cached_tokens is None else cached_tokens

    def ended(self, key: Hashable, now: float, how: str, cached_tokens: int | None, output_tokens: int | None) -> None:
        """A live request is over: its record is joined, and goes to the sink."""
        live = self._live.pop(key, None)
        if live is None:
            return
        del self._keys[live.number]
        record = self._ring[live.number]
        cached = live.cached_tokens if cached_tokens is None else cached_tokens
        outcome = Outcome(how, now - record.decided_at, live.first_token_seconds, cached, output_tokens)
        self._ring[live.number] = joined = replace(record, outcome=outcome)
        self._counts["joined"] += 1
        self._send(joined)

    def _send(self, record: DecisionRecord) -> None:
        if self._sink is not None:
            self._sink.offer(record)

    def all(self) -> tuple[DecisionRecord, ...]:
        """Those kept, oldest first."""
        return tuple(self._ring.values())

    def close(self) -> None:
        """Let the sink catch up. The one call that needs no lock, and should not hold it."""
        if self._sink is not None:
            self._sink.close()

    def check(self, live: Collection[Hashable]) -> None:
        """Assert the invariants; `live` has the ids of all live requests."""
        assert self._live.keys() <= set(live), "records of requests that are over wait for their ending"
        assert len(self._ring) <= self._recording.keep, f"{len(self._ring)} records kept"
        waiting = {one.number for one in self._live.values()}
        assert waiting == {number for number, record in self._ring.items() if record.outcome is None}
        counts = self._counts
        assert counts["made"] == counts["joined"] + counts["pushed_out_live"] + len(waiting)
        assert counts["made"] == counts["pushed_out"] + len(self._ring)

    def stats(self) -> dict[str, Any]:
        """Counters, and how many are kept and yet to be joined."""
        sink = {} if self._sink is None else self._sink.stats()
        return {**self._counts, "kept": len(self._ring), "live": len(self._live), "sink": sink}


def record_of(
    decision: Decision | PairDecision,
    why: Explanation,
    backlog: Mapping[str, float],
    sequence: int,
    now: float,
    shadow: ShadowChoice | None,
) -> DecisionRecord | None:
    """A decision as a record; None if `why` does not know its worker: its policy has changed the fleet when asked. A
    policy that answers otherwise when asked twice is taken at its second word. `why` and `backlog` (seconds by worker)
    are of the moment before it was booked."""
    workers = tuple(
        WorkerTerms(
            backlog_seconds=backlog.get(cost.worker, 0.0), **{name: getattr(cost, name) for name in _AS_EXPLAINED}
        )
        for cost in why.workers
    )
    worker = decision.worker if why.pair is None else why.worker
    own = next((terms.score for terms in workers if terms.worker == worker), None)
    if own is None:
        return None
    others = [(terms.score, terms.worker) for terms in workers if terms.candidate and terms.worker != worker]
    score, runner_up = min(others, default=(own, None))
    return DecisionRecord(
        request_id=decision.request_id,
        sequence=sequence,
        decided_at=now,
        policy=why.policy,
        reason=decision.reason,
        prompt_tokens=decision.prompt_tokens,
        worker=worker,
        runner_up=runner_up,
        margin=score - own if score != own else 0.0,
        workers=workers,
        shadow=shadow,
        pair=why.pair,
    )


# --- as JSON lines ----------------------------------------------------------------------------------------------------


def to_json(record: DecisionRecord) -> str:
    """One line, without its end. A request id that is neither text nor a whole number is written as its repr, and a
    number that is not finite (a policy's score may be) as "inf" or "-inf"."""
    return json.dumps({"format": FORMAT, **_plain(record)}, allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and all(isinstance(one, WorkerTerms) for one in value):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, (str, int)) else repr(value)


def from_json(line: str) -> DecisionRecord:
    """The record of a line. Raises InvalidInput saying what is wrong with it; a line of another FORMAT is refused."""
    try:
        data = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"not JSON: {error}") from None
    found = data.pop("format", None) if isinstance(data, dict) else None
    if found != FORMAT:
        other = f", this one is of another version of Preble: {found}" if type(found) is int else ""
        raise InvalidInput(f'not a record: an object with "format": {FORMAT} is expected{other}')
    record: DecisionRecord = _read(DecisionRecord, data, "record")
    if record.worker not in {terms.worker for terms in record.workers}:
        raise InvalidInput(f"record.worker {record.worker!r} is not among record.workers")
    return record


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _read(kind: type[Any], data: Any, name: str) -> Any:
    """An object of a dataclass; every field must be there, of its kind, and no other. Lines that are older than
    `session`, `shared` or `pair` lack them."""
    known = {field.name: str(field.type) for field in fields(kind)}
    if kind is DecisionRecord and isinstance(data, dict):
        data.setdefault("session", None)
        data.setdefault("pair", None)
    if kind is SessionHint and isinstance(data, dict):
        data.setdefault("shared", False)
    if kind is WorkerTerms and isinstance(data, dict):
        data = {"loading_seconds": 0.0, "host_tokens": 0, "disk_tokens": 0, **data}
    if not isinstance(data, dict) or data.keys() != known.keys():
        raise InvalidInput(f"{name} must be an object with {', '.join(known)}")
    return kind(**{key: _read_value(known[key], data[key], f"{name}.{key}") for key in known})


def _read_value(kind: str, value: Any, name: str) -> Any:
    if kind.endswith(" | None"):
        return None if value is None else _read_value(kind.removesuffix(" | None"), value, name)
    if kind in _NESTED:
        return _read(_NESTED[kind], value, name)
    if kind.startswith("tuple") and isinstance(value, list):
        return tuple(_read(WorkerTerms, one, f"{name}[{i}]") for i, one in enumerate(value))
    if kind == "float" and isinstance(value, str) and value in ("inf", "-inf"):
        return float(value)
    allowed = _KINDS.get(kind, ())
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise InvalidInput(f"{name} must be of type {kind}, got {value!r}")
    checked: Any = value
    try:
        return float(checked) if kind == "float" else checked
    except OverflowError:
        raise InvalidInput(f"{name} is too large for a float") from None


_NESTED: dict[str, type[Any]] = {
    **{"ShadowChoice": ShadowChoice, "Outcome": Outcome, "SessionHint": SessionHint, "PairCost": PairCost}
}
_KINDS: dict[str, tuple[type, ...]] = {
    "Hashable": (str, int, bool),
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
}


def write_lines(path: str | os.PathLike[str], records: Iterable[DecisionRecord]) -> int:
    """Write records to a new file, one a line; returns how many. Raises OSError."""
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        for record in records:
            file.write(to_json(record) + "\n")
            count += 1
    return count


def read_lines(path: str | os.PathLike[str]) -> Iterator[DecisionRecord]:
    """The records of a file, one after the other; empty lines are passed over. Raises InvalidInput naming the line, or
    for a file that cannot be read."""
    number = 0
    try:
        with open(path, encoding="utf-8") as file:
            while line := file.readline(LINE_CHARS_MAX):
                number += 1
                if line.strip():
                    yield from_json(line)
    except InvalidInput as error:
        raise InvalidInput(f"{os.fspath(path)}, line {number}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{os.fspath(path)} cannot be read: {error}") from None
