"""Sends prompts through a `Router` and writes down what came back. Owns calibration and one policy's phase.

Prompts leave at their planned arrival whatever happened to earlier ones (an open loop), so a slow policy builds a queue
as real traffic would. The caller owns the workers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..._cost import CostModel
from ...errors import PrebleError
from ...router.router import Router
from ...scheduler import GlobalScheduler
from ...transport.tasks import end_all
from ...types import SamplingParams
from .corpus import DemoPrompt
from .fleet import DemoFleet
from .plan import Speed
from .progress import Tally
from .report import Phase, Record

CALIBRATION_TOKENS = (256, 1024)
CALIBRATION_BATCH, CALIBRATION_BATCH_TOKENS = 4, 1536
WARM_UP_TOKENS = 600
WATCH_SECONDS = 1.0
PHASE_OVERTIME_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the workers were measured to do: two numbers for the plan, and a cost model for the scheduler."""

    speed: Speed
    cost_model: CostModel


class OutOfTime(PrebleError):
    """The workers did not keep up by far."""


async def run_phase(
    policy: str,
    prompts: Sequence[DemoPrompt],
    fleet: DemoFleet,
    *,
    output_tokens: int,
    cost_model: CostModel,
    seed: int,
    tally: Tally,
    update: Callable[[], None],
) -> Phase:
    """Send every prompt at its time under one policy; failures are records. Raises `WorkerFailed`, `OutOfTime`."""
    records = [Record(p.number, p.document, len(p.token_ids), p.arrival_seconds) for p in prompts]
    scheduler = GlobalScheduler([], policy=policy, cost_model=cost_model, seed=seed)
    async with Router(fleet.endpoints, scheduler=scheduler) as router:
        loop = asyncio.get_running_loop()
        start = loop.time()

        async def ask_at(prompt: DemoPrompt, record: Record) -> None:
            await asyncio.sleep(max(0.0, start + prompt.arrival_seconds - loop.time()))
            tally.sent += 1
            await ask(router, prompt.token_ids, output_tokens, record, lambda: loop.time() - start)
            if record.error is not None:
                tally.failed += 1
            else:
                tally.add(record.ttft_seconds, record.prompt_tokens, record.cached_tokens)
            update()

        tasks = [asyncio.ensure_future(ask_at(p, r)) for p, r in zip(prompts, records, strict=True)]
        await watch(tasks, fleet, prompts[-1].arrival_seconds + PHASE_OVERTIME_SECONDS)
        wall_seconds = loop.time() - start
        return Phase(policy, records, fleet.worker_ids, wall_seconds, scheduler.stats())


async def ask(
    router: Router, token_ids: Sequence[int], output_tokens: int, record: Record, now: Callable[[], float]
) -> None:
    """Send one prompt and fill in its record; an error of this request ends in the record."""
    sampling = SamplingParams(max_new_tokens=output_tokens, ignore_eos=True)
    try:
        async for chunk in router.generate(np.asarray(token_ids, np.int32), sampling):
            if record.first_token_seconds is None and chunk.token_ids:
                record.first_token_seconds = now()
            record.cached_tokens = chunk.cached_tokens or record.cached_tokens
            record.worker = chunk.worker or record.worker
            record.output_tokens += len(chunk.token_ids)
        record.done_seconds = now()
    except PrebleError as error:
        record.error = f"{type(error).__name__}: {error}"


async def watch(tasks: Iterable[asyncio.Future[None]], fleet: DemoFleet, limit_seconds: float) -> None:
    """Wait for all tasks; stop waiting when a worker process has ended or the time is up, and cancel the rest."""
    pending = set(tasks)
    deadline = asyncio.get_running_loop().time() + limit_seconds
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=WATCH_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            fleet.check()
            if pending and asyncio.get_running_loop().time() > deadline:
                raise OutOfTime(
                    f"{len(pending)} requests are unfinished after {limit_seconds:.0f} s; try a lower --rate"
                )
    finally:
        await end_all(*pending)


# --- calibration ------------------------------------------------------------------------------------------------------


async def warm_up(fleet: DemoFleet, tokens: Sequence[int]) -> None:
    """One prompt to every worker, unlike any of the experiment's, so that first-use costs are paid before."""
    async with Router(fleet.endpoints, policy="round_robin") as router:
        await burst(router, fleet, [rotated(tokens, 0, WARM_UP_TOKENS)] * len(fleet.worker_ids), output_tokens=4)


async def calibrate(fleet: DemoFleet, tokens: Sequence[int], output_tokens: int) -> Calibration:
    """Measure all workers at once, as the phases will load them. `tokens` is any real text.

    1. Single prompts of several lengths: what an idle worker takes, for the cost model.
    2. A batch of prompts per worker, then the same batch again, now cached: the second time is what requests take
       beside their prefill, and the difference is the prefill, both under load.

    Prompts are rotations of `tokens`, so none is a prefix of another and nothing but the repeated batch is reused.
    """
    await warm_up(fleet, tokens)
    workers = len(fleet.worker_ids)
    prefills: list[tuple[int, int, float]] = []
    decodes: list[tuple[int, int, float]] = []
    async with Router(fleet.endpoints, policy="round_robin") as router:
        for turn, length in enumerate(CALIBRATION_TOKENS):
            prompts = [rotated(tokens, 1 + turn * workers + i, length) for i in range(workers)]
            for record in await burst(router, fleet, prompts, output_tokens):
                prefills.append((length, length, record.ttft_seconds))
                decodes.append((1, length, step_seconds(record)))
        first = 1 + len(CALIBRATION_TOKENS) * workers
        batch = range(first, first + CALIBRATION_BATCH * workers)
        prompts = [rotated(tokens, turn, CALIBRATION_BATCH_TOKENS) for turn in batch]
        cold = last_done(await burst(router, fleet, prompts, output_tokens))
        again = await burst(router, fleet, prompts, output_tokens)
        warm = min(last_done(again), 0.9 * cold)
        decodes.append((CALIBRATION_BATCH, CALIBRATION_BATCH_TOKENS, step_seconds(again[-1])))
    speed = Speed(
        prefill_tokens_per_second=CALIBRATION_BATCH * CALIBRATION_BATCH_TOKENS / (cold - warm),
        cached_request_seconds=warm / CALIBRATION_BATCH,
    )
    return Calibration(speed, CostModel.fit(prefills, decode=decodes, name="calibrated"))


def last_done(records: Iterable[Record]) -> float:
    """When the last of these requests was done, in seconds after the first was sent."""
    return max(record.latency_seconds for record in records)


async def burst(router: Router, fleet: DemoFleet, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Record]:
    """Send prompts at once and wait for them. Raises `PrebleError` if one fails."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    records = [Record(number, -1, len(tokens), 0.0) for number, tokens in enumerate(prompts)]
    tasks = [
        asyncio.ensure_future(ask(router, tokens, output_tokens, record, lambda: loop.time() - start))
        for tokens, record in zip(prompts, records, strict=True)
    ]
    await watch(tasks, fleet, PHASE_OVERTIME_SECONDS)
    failed = [record.error for record in records if record.error is not None]
    if failed:
        raise PrebleError(f"calibration failed: {failed[0]}")
    return records


def rotated(tokens: Sequence[int], turn: int, length: int) -> list[int]:
    """`length` tokens of a text, from another place every turn; the text repeats where it is too short."""
    start = 37 * turn % len(tokens)
    repeated = [*tokens[start:], *tokens[:start]] * math.ceil(length / len(tokens))
    return repeated[:length]


def step_seconds(record: Record) -> float:
    """Seconds of one decode step, from first token to last."""
    if record.done_seconds is None or record.first_token_seconds is None:
        raise PrebleError("a calibration request did not finish")
    return max(1e-6, (record.done_seconds - record.first_token_seconds) / max(1, record.output_tokens - 1))
