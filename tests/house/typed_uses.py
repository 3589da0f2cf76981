"""Uses of the public names for type checkers to read; nobody runs it. A line that ends in `# wrong` must be an error,
every other one must not. See `test_types.py`."""

from array import array
from typing import Any, Literal, assert_type

import numpy as np

import preble
from preble.errors import PrebleError


class Tensor:
    """As torch declares its own."""

    def __array__(self, dtype: Any = None) -> Any:
        """The array as numpy's."""


scheduler = preble.GlobalScheduler(["a", preble.WorkerSpec("b")], policy="e2", seed=1)
ids: list[int] = [1, 2, 3]

# --- token ids --------------------------------------------------------------------------------------------------------

scheduler.schedule(ids)
scheduler.schedule((1, 2, 3))
scheduler.schedule(array("i", ids))
scheduler.schedule(memoryview(array("i", ids)))
scheduler.schedule(np.array(ids, np.int32))
scheduler.schedule(np.arange(3))
scheduler.schedule(np.arange(3, dtype=np.uint32))
scheduler.schedule(Tensor())
scheduler.schedule_many([ids, ids])
scheduler.match(np.zeros(3, np.int64))
scheduler.explain(ids, max_new_tokens=3)
scheduler.schedule("text")  # wrong
scheduler.schedule(b"bytes")  # wrong
scheduler.schedule(bytearray(8))  # wrong
scheduler.schedule(["a"])  # wrong
scheduler.schedule([1.5])  # wrong
scheduler.schedule(None)  # wrong
scheduler.schedule(3)  # wrong
scheduler.schedule(range(3))  # wrong
scheduler.schedule({1, 2})  # wrong
scheduler.schedule(np.zeros(3))  # wrong
scheduler.match("text")  # wrong
scheduler.explain([None])  # wrong
scheduler.schedule_many(["text"])  # wrong
scheduler.lease(b"bytes")  # wrong


def placed(token_ids: preble.TokenIds) -> str:
    return scheduler.schedule(token_ids).worker


placed("text")  # wrong

# --- a request's life -------------------------------------------------------------------------------------------------

decision = scheduler.schedule(ids, request_id=("a", 7), namespace="tenant", session=preble.SessionHint("s"))
assert_type(decision, preble.Decision)
assert_type(decision.worker, str)
assert_type(decision.matched_tokens, int)
decision.worker = "b"  # wrong
scheduler.first_token(decision, cached_tokens=1)
scheduler.finish(decision, output_tokens=5)
scheduler.finish(decision.request_id)
scheduler.cancel([1])  # wrong
scheduler.finish(decision, output_tokens="5")  # wrong
scheduler.finish(decision, output_tokens=1.5)  # wrong
scheduler.schedule(ids, max_new_tokens="5")  # wrong
scheduler.schedule(ids, session="s")  # wrong

with scheduler.lease(ids) as lease:
    assert_type(lease, preble.Lease)
    lease.first_token()
    scheduler.renew(lease)
    lease.finish(output_tokens="5")  # wrong

match: preble.Match = scheduler.match(ids)
assert_type(match.best_tokens, int)
why: preble.Explanation = scheduler.explain(ids)
assert_type(why.runner_up, str | None)
cost: preble.WorkerCost = why.workers[0]
assert_type(cost.queue_seconds, float)

# --- stats ------------------------------------------------------------------------------------------------------------

stats: preble.SchedulerStats = scheduler.stats()
assert_type(stats["live_requests"], int)
assert_type(stats["workers"]["a"]["load_seconds"], float)
assert_type(stats["workers"]["a"]["cache_source"], Literal["estimate", "reports", "events"])
assert_type(stats["tree"]["bytes_used"], int)
stats["live_request"]  # wrong
stats["workers"]["a"]["load"]  # wrong

# --- configuration ----------------------------------------------------------------------------------------------------

preble.SchedulerConfig(history_seconds=60.0, calibrate="auto")
preble.SchedulerConfig(calibrate="always")  # wrong
preble.SchedulerConfig(history=60.0)  # wrong
preble.LocalConfig(1000, order="fcfs", eviction="lru")
preble.LocalConfig(1000, order="newest")  # wrong
preble.LocalConfig(1000, eviction="random")  # wrong


class Mine(preble.Policy):
    name = "mine"


preble.GlobalScheduler(["a"], policy=Mine)
preble.GlobalScheduler(["a"], policy=Mine())
preble.GlobalScheduler(["a"], policy=3)  # wrong
preble.GlobalScheduler([1])  # wrong

# --- the router -------------------------------------------------------------------------------------------------------


async def through_a_router() -> None:
    config = preble.RouterConfig(refuse_wait_seconds=None)
    knobs = preble.SchedulerConfig()
    async with preble.Router(["tcp://a:1"], cost_model="neutral", scheduler_config=knobs, config=config) as router:
        answer = router.generate(np.arange(5), preble.SamplingParams(max_new_tokens=3), priority="batch")
        async for chunk in answer:
            assert_type(chunk, preble.StreamChunk)
            assert_type(chunk.finish_reason, Literal["stop", "length", "abort"] | None)
            assert_type(chunk.token_ids, tuple[int, ...])
        await answer.aclose()
        router.generate("text")
        router.generate(b"bytes")  # wrong
        router.generate(["a"])  # wrong
        router.generate(ids, priority="urgent")  # wrong
        async with router.route(ids) as where:
            assert_type(where, preble.Decision)
        assert_type(router.stats()["finished"], int)
        router.stats()["workers"]["tcp://a:1"]["status"]  # wrong
    preble.Router(["tcp://a:1"], tokenizer=lambda text: list(text.encode()))
    preble.Router(["tcp://a:1"], tokenizer=3)  # wrong


local = preble.LocalScheduler(preble.LocalConfig(1000))
local_stats: preble.LocalStats = local.stats()
assert_type(local_stats["oldest_arrival_seconds"], float | None)
local_stats["oldest"]  # wrong
fine: type[PrebleError] = preble.errors.NoWorkers
typo = preble.Sceduler  # wrong
