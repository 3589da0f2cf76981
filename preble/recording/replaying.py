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
from .block_numbers import numbered
from .recorded import RecordedRequest, RecordedTraffic

IDS_MAX = 2**31 - 1
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A request's place in its session: the turn before it, that had ended, and the seconds in between."""

    before: int
    pause_seconds: float


class BlockNumbers:
    """The names of requests' blocks as numbers, in the order in which names come first: block `starts[i] + k` is block
    k of the i-th request. `first`: by number, the place among the requests of the first that has it. Raises
    `InvalidInput` where there are too many names. O(blocks)."""

    def __init__(self, requests: Sequence[RecordedRequest], block_size: int) -> None:
        counts = np.array([len(one.blocks) for one in requests], np.int64)
        self.starts = np.concatenate([[0], np.cumsum(counts)])
        names = np.concatenate([one.blocks for one in requests]) if len(requests) else np.empty(0, np.uint64)
        self.numbers, firsts = numbered(names)
        if len(firsts) * block_size > IDS_MAX:
            raise InvalidInput(f"a recording of more than {IDS_MAX // block_size} different blocks cannot replay")
        self.first = np.searchsorted(self.starts, firsts, "right") - 1

    def of(self, place: int) -> Int32Array:
        """The numbers of a request's blocks. A view; not to be written to."""
        return self.numbers[self.starts[place] : self.starts[place + 1]]


def request_id(row: int) -> str:
    """What a request is called in a workload."""
    return f"r{row}"


def workload_of(
    recording: RecordedTraffic,
    rows: Sequence[int] | None = None,
    *,
    closed: bool = True,
    blocks: BlockNumbers | None = None,
) -> Workload:
    """The requests that ran, or those `rows`, as a workload; ids are `request_id` of their rows. `blocks`: of these,
    where they are known.

    `closed`: turns wait for the turn before them, else all come when they came. A request without output, since its
    client went away, has one token. Raises `InvalidInput` where there are none.
    """
    chosen = range(len(recording)) if rows is None else rows
    if not len(chosen):
        raise InvalidInput("the recording has no requests to replay")
    turns = turns_of(recording.requests, chosen)
    if blocks is None:
        blocks = BlockNumbers([recording.requests[row] for row in chosen], recording.block_size)
    prompts = _prompts(recording, chosen, turns, blocks)
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
    recording: RecordedTraffic, rows: Sequence[int], turns: Mapping[int, SessionTurn], blocks: BlockNumbers
) -> dict[int, Int32Array]:
    """Token ids by row. They are views of one array."""
    size, requests = recording.block_size, [recording.requests[row] for row in rows]
    numbers = _with_next_blocks(rows, requests, blocks, turns, size)
    ids = (numbers[:, None] * np.int32(size) + np.arange(size, dtype=np.int32)).ravel()
    ids.setflags(write=False)
    starts = (blocks.starts * size).tolist()
    ends = [min(start + one.prompt_tokens, end) for one, start, end in zip(requests, starts, starts[1:], strict=False)]
    return {row: ids[start:end] for row, start, end in zip(rows, starts, ends, strict=False)}


def _with_next_blocks(
    rows: Sequence[int],
    requests: Sequence[RecordedRequest],
    blocks: BlockNumbers,
    turns: Mapping[int, SessionTurn],
    size: int,
) -> Int32Array:
    """The numbers of all blocks, where each partial last one is the beginning of the block that the next turn has in
    its place."""
    found: Int32Array = blocks.numbers.copy()
    own = [found[begin:end] for begin, end in zip(blocks.starts, blocks.starts[1:], strict=False)] if turns else []
    places = {row: place for place, row in enumerate(rows)}
    following: dict[int, list[int]] = {}
    for row, turn in turns.items():
        following.setdefault(places[turn.before], []).append(places[row])
    for place in sorted(following, reverse=True):  # the next turn first
        full, tail = divmod(requests[place].prompt_tokens, size)
        nexts = (own[after] for after in following[place] if tail)
        begun = next((after for after in nexts if np.array_equal(after[:full], own[place][:full])), None)
        if begun is not None and len(begun) > full:
            own[place][full:] = begun[full]
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
