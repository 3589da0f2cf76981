"""Recordings for tests: what a router would have written of a simulated run. Owns no test."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from preble import Recording, sim
from preble.recording import RecordedRequest, RecordedWorker
from preble.recording.names import NAME_BYTES, BlockTable
from preble.recording.recorded import BLOCK_TOKENS, sorted_by_arrival
from preble.sim.results import FINISHED, Result
from preble.workloads import Workload


def recording_of(workload: Workload, result: Result, config: sim.SimConfig, **more: Any) -> Recording:
    """The run as a recording; TTFTs and ends are the simulated ones."""
    table, names = BlockTable(bytes(32), BLOCK_TOKENS), list[list[bytes]]()
    requests = []
    for row, request in enumerate(workload.requests):
        path = table.add(request.token_ids, None)
        new = [path.names[at : at + NAME_BYTES] for at in range(0, len(path.names), NAME_BYTES)]
        names.append([*(names[path.parent][: path.shared] if path.shared else []), *new])
        arrival = float(result.arrival_seconds[row])
        first, end = float(result.first_token_seconds[row]), float(result.finish_seconds[row])
        requests.append(
            RecordedRequest(
                arrival_seconds=arrival,
                sent_seconds=arrival,
                first_token_seconds=None if math.isnan(first) else first,
                end_seconds=None if math.isnan(end) else end,
                worker=result.workers[result.worker[row]] if result.worker[row] >= 0 else "",
                prompt_tokens=request.prompt_tokens,
                blocks=np.frombuffer(b"".join(names[-1]), "<u8").astype(np.uint64),
                output_tokens=int(result.output_tokens[row]),
                cached_tokens=int(result.cached_tokens[row]),
                session="" if request.hint is None else request.hint.session,
                error="" if result.outcome[row] == FINISHED else "WorkerLost",
            )
        )
    workers = tuple(
        RecordedWorker(id=spec.id, kv_capacity_tokens=spec.kv_capacity_tokens, max_running=config.local.max_running)
        for spec in config.specs()
    )
    return Recording(workers=workers, requests=sorted_by_arrival(requests), policy=str(config.policy), **more)
