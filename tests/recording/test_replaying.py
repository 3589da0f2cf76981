"""A recording as a workload: prompts share what names share, turns wait for turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from preble import Recording
from preble.errors import InvalidInput
from preble.recording import RecordedRequest, RecordedWorker
from preble.recording.replaying import workload_of

BLOCK = 4


def recorded(at: float, prompt: list[int], output: int = 2, **more: Any) -> RecordedRequest:
    """A request for a prompt, with names as a writer gives them."""
    ends = [*range(BLOCK, len(prompt), BLOCK), len(prompt)]
    names = np.array([hash(tuple(prompt[:end])) & (2**64 - 1) for end in ends], np.uint64)
    values: dict[str, Any] = {
        "sent_seconds": at,
        "first_token_seconds": at + 0.5,
        "end_seconds": at + 1.0,
        "worker": "a",
    }
    return RecordedRequest(
        arrival_seconds=at, prompt_tokens=len(prompt), blocks=names, output_tokens=output, **{**values, **more}
    )


def recording(*requests: RecordedRequest) -> Recording:
    """Of one worker."""
    worker = RecordedWorker(id="a", kv_capacity_tokens=1000)
    return Recording(workers=(worker,), requests=requests, block_size=BLOCK)


def shared(one: Any, other: Any) -> int:
    """Tokens of the longest common prefix."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


def test_prompts_share_what_their_names_share_to_the_block() -> None:
    prompts = [list(range(10)), list(range(8)) + [99, 98], list(range(6)) + [97], list(range(10))]
    found = recording(*(recorded(float(at), prompt) for at, prompt in enumerate(prompts))).workload()
    ids = [request.token_ids for request in found.requests]
    assert [len(one) for one in ids] == [10, 10, 7, 10]
    assert [shared(ids[0], one) for one in ids] == [10, 8, 4, 10]
    assert all(one.dtype == np.int32 and one.min() >= 0 for one in ids)
    assert [request.arrival_seconds for request in found.requests] == [0.0, 1.0, 2.0, 3.0]


def test_a_turn_waits_for_the_one_before_it_and_finds_its_answer() -> None:
    first = list(range(10))
    second = first + [50, 51] + list(range(60, 67))
    found = recording(
        recorded(0.0, first, session="aa"),
        recorded(0.2, [7], session="bb"),
        recorded(4.0, second, session="aa"),
        recorded(4.5, [8, 9], session="aa"),  # the turn before it had not ended
    ).workload()
    one, other, turn, beside = found.requests
    assert (turn.after, turn.pause_seconds, turn.arrival_seconds) == (one.request_id, 3.0, 0.0)
    assert other.after is None and other.arrival_seconds == 0.2
    assert beside.after == one.request_id and beside.pause_seconds == 3.5
    assert shared(one.token_ids, turn.token_ids) == 10, "the partial block is the beginning of the next turn's"
    assert one.output_ids is not None and one.output_ids.tolist() == turn.token_ids[10:12].tolist()
    assert turn.hint is not None and turn.hint.session == "aa"
    open_loop = workload_of(
        recording(recorded(0.0, first, session="aa"), recorded(4.0, second, session="aa")), closed=False
    )
    assert [request.after for request in open_loop.requests] == [None, None]
    assert open_loop.requests[1].arrival_seconds == 4.0


def test_agents_of_a_session_and_failed_turns_do_not_wait_for_each_other() -> None:
    found = recording(
        recorded(0.0, [1], session="aa", agent="01"),
        recorded(2.0, [2], session="aa", agent="02"),
        recorded(3.0, [3], session="cc", error="WorkerLost"),
        recorded(5.0, [4], session="cc"),
    ).workload()
    assert [request.after for request in found.requests] == [None] * 4


def test_requests_that_were_given_up_have_a_token_at_least() -> None:
    found = recording(recorded(0.0, [1, 2], output=0, error="cancelled")).workload()
    assert found.requests[0].output_tokens == 1
    with pytest.raises(InvalidInput, match="no requests"):
        recording().workload()
