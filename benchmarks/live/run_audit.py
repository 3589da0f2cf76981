"""Whether `preble audit` claims what then happens: it listens to live SGLang servers under round robin, and the same
traffic is then placed by E2.

    python -m benchmarks.live.run_audit --repetitions 5 --json benchmarks/results/audit-cpu.json

Within a repetition both meet the same engines with emptied caches and the same arrivals; each repetition draws its own.
The audit runs as its user would run it, as a process of its own that is interrupted once all is answered. Its claim is
the ratio of E2's mean time to first token to round robin's; what was seen is that ratio by the client's clock. Engines,
documents and questions are those of `run_engines.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.facts import environment
from benchmarks.common.paths import ROOT
from benchmarks.common.tables import markdown, rounded
from benchmarks.live import engine_fleet
from benchmarks.live.engine_load import Fleet, Request, choose_documents, flush, run_arm
from benchmarks.live.engine_report import interval, summary
from benchmarks.live.run_engines import (
    DOCUMENT_TOKENS,
    WARM_UP_REQUESTS,
    Load,
    model_of,
    sglang_python,
    shape_of,
    stdlib_files,
    warm_up,
)

AUDIT_MINUTES = 60.0  # longer than any repetition: it is interrupted
ANSWER_SECONDS = 180.0
Found = dict[str, Any]


async def audited(urls: Sequence[str], fleet: Fleet, requests: Sequence[Request], output_tokens: int) -> Found:
    """Round robin, with an audit listening: {"outcomes": ..., "audit": what it wrote, "said": its report}."""
    with tempfile.TemporaryDirectory() as folder:
        written, picture = Path(folder, "audit.json"), Path(folder, "audit.png")
        command = [sys.executable, "-m", "preble.cli", "audit", *urls, "--minutes", str(AUDIT_MINUTES)]
        command += ["--json", str(written), "--picture", str(picture)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdout=pipe, stderr=pipe, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        assert process.stderr is not None
        while b"listening to" not in (line := await process.stderr.readline()):
            if not line:
                raise RuntimeError("the audit ended before it listened")
        outcomes = await run_arm("round robin", fleet, requests, output_tokens)
        process.send_signal(signal.SIGINT)
        out, error = await asyncio.wait_for(process.communicate(), ANSWER_SECONDS)
        if process.returncode:
            raise RuntimeError(f"the audit failed: {error.decode()[-2000:]}")
        return {"outcomes": outcomes, "audit": json.loads(written.read_text()), "said": out.decode()}


async def repetition(fleet: Fleet, requests: Sequence[Request], output_tokens: int) -> Found:
    """One: what was claimed and what was seen."""
    await flush(fleet.addresses)
    first = await audited(fleet.addresses, fleet, requests, output_tokens)
    was = summary(first["outcomes"])
    mine = summary(await run_arm("e2", fleet, requests, output_tokens))
    audit = first["audit"]
    prompt_tokens = sum(one.prompt_tokens for one in first["outcomes"] if not one.error)
    return {
        "claimed_ratio": audit["e2"]["ttft_ratio"]["value"],
        "claimed_low": audit["e2"]["ttft_ratio"]["low"],
        "claimed_high": audit["e2"]["ttft_ratio"]["high"],
        "seen_ratio": mine["mean_ttft_seconds"] / was["mean_ttft_seconds"],
        "claimed_computed_ratio": audit["e2"]["computed_ratio"],
        "seen_computed_ratio": (1.0 - mine["hit_fraction"]) / (1.0 - was["hit_fraction"]),
        "round_robin_ttft_seconds": was["mean_ttft_seconds"],
        "e2_ttft_seconds": mine["mean_ttft_seconds"],
        "audit_ttft_seconds": audit["ttft_seconds"],
        "model_error": audit["model_error"],
        "computed_error": audit["computed_tokens"] / ((1.0 - was["hit_fraction"]) * prompt_tokens) - 1.0,
        "twice_share": audit["twice_share"]["value"],
        "workers_enough": audit["e2"]["workers_enough"],
        "failed": [was["failed"], mine["failed"]],
        "seen": audit["seen"],
        "requests": audit["requests"],
        "sure": audit["sure"],
        "said": first["said"],
    }


async def measure(args: argparse.Namespace) -> Found:
    """Everything; the result as it is kept."""
    from tokenizers import Tokenizer

    model = model_of(args)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    load = Load(args.documents, args.requests, args.rps, args.output_tokens, args.seed)
    texts = (path.read_text(errors="replace") for path in stdlib_files())
    documents = choose_documents((tokenizer.encode(text).ids for text in texts), load.documents, *DOCUMENT_TOKENS)
    found = environment(args.seed)
    shape = replace(shape_of(args, model), metrics=True)
    runs = []
    async with engine_fleet.sglang_servers(sglang_python(args), shape) as urls:
        fleet = Fleet(urls)
        loads = [load.of_repetition(n, documents, question_of(tokenizer)) for n in range(args.repetitions)]
        await warm_up(fleet, loads[0][:WARM_UP_REQUESTS], args.output_tokens)
        for requests in loads:
            runs.append(await repetition(fleet, requests, args.output_tokens))
            print(line(runs[-1]), flush=True)
    settings = {name: getattr(args, name) for name in ("workers", "documents", "requests", "rps", "output_tokens")}
    return {"facts": found, "date": datetime.date.today().isoformat(), "settings": settings, "runs": runs}


def question_of(tokenizer: Any) -> Any:
    """A text as tokens."""
    return lambda text: tokenizer.encode(text).ids


def line(run: Found) -> str:
    """A repetition for the person who waits."""
    return (
        f"E2 over round robin, mean TTFT: claimed {run['claimed_ratio']:.2f} [{run['claimed_low']:.2f} to "
        f"{run['claimed_high']:.2f}], seen {run['seen_ratio']:.2f}; tokens computed: claimed "
        f"{run['claimed_computed_ratio']:.2f}, seen {run['seen_computed_ratio']:.2f}; replay {run['model_error']:+.0%} "
        f"off; {run['sure']}"
    )


def page(result: Found) -> str:
    """The figures over repetitions."""
    names = ("claimed_ratio", "seen_ratio", "claimed_computed_ratio", "seen_computed_ratio", "model_error")
    rows = []
    for name in names:
        mean, half = interval([run[name] for run in result["runs"]])
        rows.append([name.replace("_", " "), f"{mean:.3f}", f"± {half:.3f}"])
    return markdown(["figure", "mean", "95 %"], rows)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = engine_fleet.options(__doc__, workers=2, ports=200, requests=160, rps=5.0, output_tokens=12, docs="no page")
    made.add_argument("--engines", default=str(ROOT / ".engines"), help="environments of tests/live/install.py")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--model", help="model directory; default: one with random weights, small on a CPU")
    made.add_argument("--documents", type=int, default=18)
    return made


def main() -> None:
    """Measure, then show."""
    args = parser().parse_args()
    result = json.loads(args.page.read_text()) if args.page else rounded(asyncio.run(measure(args)))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(page(result))


if __name__ == "__main__":
    main()
