"""Requests that wait for another one's pull; what else there is of them is in `worker/test_kv_mover`."""

from __future__ import annotations

from preble.engines.base import GenerationRequest
from tests.support.kv import TokenEngine
from tests.worker.test_kv_mover import PROMPT, Side, full, request, until_true


def test_who_wants_what_turns_out_to_be_cached_waits_no_more() -> None:
    """Regression: it waited for a part, or as long as computing what it shares would take."""
    source, target = Side(full()), Side(TokenEngine({None: PROMPT[:100]}))
    try:
        source.busy = target.busy = True  # no part comes, and what is cached is not known yet
        assert target.mover.pull("leader", request(source.mover.endpoint))
        assert target.mover.pull("follower", GenerationRequest("f", PROMPT[:91]))
        until_true(lambda: target.jobs and target.mover.counters.pulls_joined)
        target.jobs.pop()()
        result = target.result()
        assert (result.engine_id, result.end, result.cached_tokens) == ("follower", "joined", 90)
    finally:
        for side in (source, target):
            side.mover.close()
