"""A recording as a workload: token ids for its blocks, and what waits for what. Owns both inventions.

Token ids: each name gets a number, and its block the ids that follow from that number and from no other one. So prompts
share prefixes exactly as far as their names are equal, to the block. A prompt's partial last block is taken for the
beginning of the block that the next turn of its session has in its place, as a conversation that grows has it, and the
answer is what stands there then; so a replay finds answers cached where engines did.

Sessions: a turn that came after the one before it had ended is sent so long after that one's end as it was then. Turns
that overlapped, and requests without a session, come when they came.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import InvalidInput
from ..types import SessionHint
from ..workloads import PromptRequest, Workload
from .recorded import RecordedRequest, RecordedTraffic

IDS_MAX = 2**31 - 1
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A request's place in its session: the turn before it, that had ended, and the seconds in between."""

    before: int
    pause_seconds: float


class BlockIds:
    """Token ids for names, the same for the same name. Raises `InvalidInput` where there are too many."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._numbers: dict[int, int] = {}
        self._within = np.arange(block_size, dtype=np.int32)

    def numbers(self, names: Sequence[int]) -> list[int]:
        """The numbers of names."""
        known = self._numbers
        found = [known.setdefault(name, len(known)) for name in names]
        if len(known) * self._block_size > IDS_MAX:
            raise InvalidInput(f"a recording of more than {IDS_MAX // self._block_size} different blocks cannot replay")
        return found

    def ids(self, numbers: Sequence[int], tokens: int) -> Int32Array:
        """The token ids of blocks by their numbers, shape [tokens], int32."""
        starts = np.array(numbers, np.int32) * np.int32(self._block_size)
        found: Int32Array = (starts[:, None] + self._within).ravel()[:tokens]
        found.setflags(write=False)
        return found


def request_id(row: int) -> str:
    """What a request is called in a workload."""
    return f"r{row}"


def workload_of(recording: RecordedTraffic, rows: Sequence[int] | None = None, *, closed: bool = True) -> Workload:
    """The requests that ran, or those `rows`, as a workload; ids are `request_id` of their rows.

    `closed`: turns wait for the turn before them, else all come when they came. A request without output, since its
    client went away, has one token. Raises `InvalidInput` where there are none.
    """
    chosen = range(len(recording)) if rows is None else rows
    if not len(chosen):
        raise InvalidInput("the recording has no requests to replay")
    turns = turns_of(recording.requests, chosen)
    prompts = _prompts(recording, chosen, turns)
    answers = _answers(recording, prompts, turns)
    requests = []
    for row in chosen:
        one = recording.requests[row]
        turn = turns.get(row) if closed else None
        requests.append(
            PromptRequest(
                request_id(row),
                (prompts[row],),
                max(1, one.output_tokens),
                arrival_seconds=one.arrival_seconds if turn is None else 0.0,
                after=None if turn is None else request_id(turn.before),
                pause_seconds=0.0 if turn is None else turn.pause_seconds,
                output_ids=answers.get(row),
                hint=_hint(one),
                tenant=one.tenant,
                deadline_seconds=one.deadline_seconds,
                priority=one.priority,
            )
        )
    how = "recorded, turns after each other" if closed and turns else "recorded"
    return Workload(recording.name, requests, f"{len(recording)} recorded requests", how)


def turns_of(requests: Sequence[RecordedRequest], rows: Sequence[int]) -> dict[int, SessionTurn]:
    """By row, which turn of its session's it came after: the last to end before it came."""
    found: dict[int, SessionTurn] = {}
    ends: dict[tuple[str, str], list[tuple[float, int]]] = {}  # session and agent -> when its turns ended, in order
    for row in rows:
        one = requests[row]
        if not one.session:
            continue
        own = ends.setdefault((one.session, one.agent), [])
        place = bisect_right(own, (one.arrival_seconds, row))
        if place:
            ended, before = own[place - 1]
            found[row] = SessionTurn(before, one.arrival_seconds - ended)
        if one.finished and one.end_seconds is not None:
            insort(own, (one.end_seconds, row))
    return found


def _prompts(
    recording: RecordedTraffic, rows: Sequence[int], turns: Mapping[int, SessionTurn]
) -> dict[int, Int32Array]:
    """Token ids by row."""
    ids, size = BlockIds(recording.block_size), recording.block_size
    following: dict[int, list[int]] = {}
    for row, turn in turns.items():
        following.setdefault(turn.before, []).append(row)
    numbers = {row: ids.numbers(recording.requests[row].blocks.tolist()) for row in rows}
    found = {}
    for row in reversed(rows):  # the next turn first
        one, own = recording.requests[row], numbers[row]
        full, tail = divmod(one.prompt_tokens, size)
        nexts = (numbers[after] for after in following.get(row, ()) if tail)
        own[full:] = next((after[full : full + 1] for after in nexts if after[:full] == own[:full]), []) or own[full:]
        found[row] = ids.ids(own, one.prompt_tokens)
    return found


def _answers(
    recording: RecordedTraffic, prompts: Mapping[int, Int32Array], turns: Mapping[int, SessionTurn]
) -> dict[int, Int32Array]:
    """The answers that the next turns of their sessions have in their prompts, by row."""
    found = {}
    for row, turn in turns.items():
        before = prompts[turn.before]
        begin, end = len(before), len(before) + recording.requests[turn.before].output_tokens
        prompt = prompts[row]
        if begin < end <= len(prompt) and np.array_equal(prompt[:begin], before):
            found[turn.before] = prompt[begin:end]
    return found


def _hint(one: RecordedRequest) -> SessionHint | None:
    hint = SessionHint(one.session, one.parent_session, one.agent)
    return hint if hint else None
