"""Warm-ups through the router: the prefill that a plan asks for runs on the plan's worker, and its traffic moves then.

Plans are `tests/scheduling/test_rebalancer.py`'s; here a scheduler says which prefills it wants.
"""

from __future__ import annotations

from typing import Any

from preble import GlobalScheduler
from preble.router.warm_ups import WARM_UPS_MAX
from preble.scheduling.rebalancer import WarmUp
from preble.transport import wire
from tests.router.test_router import PROMPT, SHORT, fleet, good, mute, rejecting
from tests.support.transport import FirstByName, asynchronous, collect, expected_tokens, until


class Asking(GlobalScheduler):
    """A scheduler whose plans ask for the prefills in `asked`."""

    def __init__(self) -> None:
        super().__init__([], policy=FirstByName())
        self.asked: list[WarmUp] = []
        self.done: list[int] = []

    def warm_ups(self) -> list[WarmUp]:
        asked, self.asked = self.asked, []
        return asked

    def warmed(self, plan: int) -> bool:
        self.done.append(plan)
        return True


async def done_and_failed(router: Any, done: int, failed: int) -> None:
    """Wait until so many warm-ups have gone well and wrong."""
    await until(lambda: tally(router) == (done, failed), f"{done} warm-ups done, {failed} failed")


def tally(router: Any) -> tuple[int, int]:
    stats = router.stats()
    return stats["warm_ups_done"], stats["warm_ups_failed"]


@asynchronous
async def test_a_warm_up_runs_on_the_worker_that_the_plan_names() -> None:
    seen: list[wire.GenerationRequest] = []

    async def noting(worker: Any, submit: wire.GenerationRequest) -> None:
        seen.append(submit)
        await good(worker, submit)

    scheduler = Asking()
    async with fleet(good, noting, router_options={"scheduler": scheduler}) as (router, _):
        scheduler.asked = [WarmUp(7, "w1", PROMPT, ("tenant", 1))]
        await done_and_failed(router, 1, 0)
        assert scheduler.done == [7]
        (submit,) = seen
        assert submit.token_ids.tolist() == PROMPT and submit.namespace == ("tenant", 1)
        assert submit.sampling.max_new_tokens == 1
        assert scheduler.stats()["scheduled"] == 0  # nothing was booked for it


@asynchronous
async def test_warm_ups_that_go_wrong_are_counted_and_not_repeated() -> None:
    scheduler = Asking()
    async with fleet(rejecting("queue_full"), mute, router_options={"scheduler": scheduler}) as (router, workers):
        scheduler.asked = [WarmUp(1, "w0", PROMPT, None), WarmUp(2, "nobody", PROMPT, None)]
        await done_and_failed(router, 0, 2)
        scheduler.asked = [WarmUp(3, "w1", PROMPT, None)]
        await until(lambda: router.stats()["warm_ups"] == 3, "the third warm-up")
        await router.remove_worker(workers[1].endpoint)
        await done_and_failed(router, 0, 3)
        assert scheduler.done == []


@asynchronous
async def test_so_many_warm_ups_run_at_a_time_and_no_more() -> None:
    scheduler = Asking()
    async with fleet(good, mute, router_options={"scheduler": scheduler}) as (router, _):
        scheduler.asked = [WarmUp(plan, "w1", PROMPT, None) for plan in range(WARM_UPS_MAX + 2)]
        await done_and_failed(router, 0, 2)
        tokens, _ = await collect(router.generate(PROMPT, SHORT))  # ordinary requests are as they were
        assert tokens == expected_tokens(PROMPT, 12)
