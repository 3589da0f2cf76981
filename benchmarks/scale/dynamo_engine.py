"""NVIDIA Dynamo's offline replay as a process that answers: `dynamo_replay.py` starts it in the peers' environment.

Owns what is asked of that package (`ai-dynamo-runtime`); it imports nothing of Preble. Its first argument is a file of
requests, a line of JSON each (`input_length`, `output_length`, `hash_ids`). Every line on stdin is a question:

    {"requests": [[number, arrival_ms], ...], "engine": {...}, "options": {...}}

and every answer a line of JSON on stdout: for each request, in the order of its arrival, milliseconds from its arrival
to its first and its last token, prompt tokens that were cached, and the worker.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any


def answer(lines: list[str], question: dict[str, Any]) -> dict[str, Any]:
    """What the replay finds. Raises what the package does."""
    from dynamo._core import run_mocker_trace_replay

    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as trace:
        for number, arrival_ms in question["requests"]:
            trace.write(f'{{"timestamp": {arrival_ms!r}, {lines[number][1:]}')
        trace.flush()
        options = question["options"]
        names = ("extra_engine_args", "prefill_engine_args", "decode_engine_args")
        engines = {name: {"engine": question["engine"] | options.pop(name)} for name in names if name in options}
        found = run_mocker_trace_replay([trace.name], capture_per_request=True, **engines, **options)
    unserved = [one for one in found.per_request if one["terminal_status"] != "completed"]
    if unserved:
        raise SystemExit(f"{len(unserved)} were not served, the first of them: {unserved[0]}")
    worker = "decode_worker_idx"  # in one pool, the one that does both
    rows = [
        [one["ttft_ms"], one["e2e_latency_ms"], one["reused_input_tokens"], one[worker], one["input_length"]]
        for one in found.per_request
    ]
    return {"served": rows, "duration_ms": found.summary["duration_ms"]}


def main() -> None:
    """Answer until stdin ends."""
    os.environ.setdefault("DYN_LOG", "off")
    with open(sys.argv[1]) as file:
        lines = file.readlines()
    for question in sys.stdin:
        sys.stdout.write(json.dumps(answer(lines, json.loads(question))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
