"""A service: many requests at once, some of whose clients go away, over engines that batch.

A lease is all that a real service needs around its own engine calls: it books a worker, and gives the booking back
however its block ends. The engine here is a stand-in that sleeps for as long as the cost model says.
"""

import asyncio

import preble

COST = preble.CostModel.preset("mistral-7b/a6000")
SPEED = 0.02  # the stand-in engine runs fifty times faster than the real one


async def answer(scheduler: preble.GlobalScheduler, token_ids: list[int]) -> str:
    """Serve one request on the worker the scheduler chose."""
    async with scheduler.lease(token_ids) as lease:
        decision = lease.decision
        missed = decision.prompt_tokens - decision.matched_tokens
        await asyncio.sleep(SPEED * COST.prefill_time(missed, decision.prompt_tokens))
        lease.first_token(cached_tokens=decision.matched_tokens)
        await asyncio.sleep(SPEED * COST.decode_time(16, decision.prompt_tokens, batch=4))
        lease.finish(output_tokens=16)
        return lease.worker


async def main() -> None:
    documents = [[d * 10_000 + i for i in range(1500)] for d in range(6)]
    with preble.GlobalScheduler(["worker-a", "worker-b"]) as scheduler:
        requests = [asyncio.create_task(answer(scheduler, documents[n % 6] + [70_000 + n] * 50)) for n in range(60)]
        await asyncio.sleep(0)  # all of them are placed now
        for impatient in requests[::10]:
            impatient.cancel()
        results = await asyncio.gather(*requests, return_exceptions=True)
        stats = scheduler.stats()
    gone = sum(isinstance(result, asyncio.CancelledError) for result in results)
    print(f"served {len(results) - gone}, cancelled {gone}, still booked {stats['live_requests']}")
    for name, worker in stats["workers"].items():
        print(f"{name}: {worker['window_requests']} requests, {worker['cached_tokens']} tokens estimated cached")


if __name__ == "__main__":
    asyncio.run(main())
