"""Preble before two live engines, against round robin, a fixed partition and the SGLang gateway: TTFT, latency, hits.

    python -m benchmarks.live.run_engines --repetitions 3 --json benchmarks/results/engines-cpu.json --docs
    python -m benchmarks.live.run_engines --device cuda --model DIR --json benchmarks/results/engines-cuda.json

Files of the standard library are the documents; requests are questions about them that arrive as a Poisson process.
Within a repetition every arm (`engine_load`) meets the same engines, with emptied caches, and the same arrivals; which
arm goes first changes from one repetition to the next. Hits are what the engines report.

Engines (`engine_fleet`) come from an environment that tests/live/install.py has made; on a GPU machine any environment
with SGLang in it will do. Where there is none, workers with Preble's torch engine take their place, without the
gateway, and on a GPU with a model of Mistral 7B's shape and random weights. The gateway is the sglang-router of
`make peers`; where it is missing, the arm is left out, and the page says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.facts import environment
from benchmarks.common.paths import ROOT
from benchmarks.common.tables import rounded
from benchmarks.live import engine_fleet
from benchmarks.live.engine_load import Fleet, Request, choose_documents, make_requests, order_of, run_arm, shifted
from benchmarks.live.engine_report import page, summary, write_docs
from preble.engines.torch.tiny_models import make_tiny_model, stdlib_directory

DOCUMENT_TOKENS = (1200, 2000)
WARM_UP_REQUESTS = 16
Found = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """How much is asked."""

    documents: int
    requests: int
    rps: float
    output_tokens: int
    seed: int

    def of_repetition(self, repetition: int, documents: list[list[int]], encode: Any) -> list[Request]:
        """Each repetition draws its own documents and arrivals, so that intervals hold for more than one draw."""
        return make_requests(documents, question(encode), self.requests, self.rps, self.seed + repetition)


def question(encode: Any) -> Any:
    """The text that follows a document, as tokens."""
    return lambda number: encode(f"\nQuestion {number}: what does part {number} of this module do?")


# --- measuring --------------------------------------------------------------------------------------------------------


async def compare(fleet: Fleet, loads: Sequence[list[Request]], output_tokens: int) -> list[Found]:
    """A run of every arm with every load, after one that is not counted. Engines that cannot be emptied get other
    tokens in each run."""
    await warm_up(fleet, loads[0][:WARM_UP_REQUESTS], output_tokens)
    runs: list[Found] = []
    for repetition, requests in enumerate(loads):
        for place, arm in enumerate(order_of(fleet.arms(), repetition)):
            mine = requests if fleet.http else shifted(requests, len(runs) + 1, fleet.vocabulary)
            outcomes = await run_arm(arm, fleet, mine, output_tokens)
            runs.append({"arm": arm, "repetition": repetition, "place": place, **summary(outcomes)})
            print(line(runs[-1]), flush=True)
    return runs


async def warm_up(fleet: Fleet, requests: Sequence[Request], output_tokens: int) -> None:
    """Every engine answers before anything is counted: what is compiled or loaded at first use then is. Raises
    RuntimeError if one does not."""
    for address in fleet.addresses:
        outcomes = await run_arm("partition", Fleet([address], fleet.http), requests, output_tokens)
        failed = sorted({outcome.error for outcome in outcomes if outcome.error})
        if failed:
            raise RuntimeError(f"{address} fails to answer: {', '.join(failed)}; logs are in build/engines")


def line(run: Found) -> str:
    """A run for the person who waits."""
    if "mean_ttft_seconds" not in run:
        return f"{run['repetition']} {run['arm']:12} all {run['failed']} requests failed: {run['failures']}"
    times = f"TTFT {run['mean_ttft_seconds']:.3f} / {run['p99_ttft_seconds']:.3f} s"
    rest = f"latency {run['mean_latency_seconds']:.3f} s, hits {run['hit_fraction']:.3f}, failed {run['failed']}"
    return f"{run['repetition']} {run['arm']:12} {times}, {rest}"


# --- what is started --------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def fleet_of(args: argparse.Namespace, model: Path) -> AsyncIterator[tuple[Fleet, str]]:
    """Start the engines; yields them and what they are."""
    where = "one core each" if args.device == "cpu" else "one card"
    python, shape = sglang_python(args), shape_of(args, model)
    name = f"{args.workers} %s, {where}, {model.name}, {args.capacity_tokens} tokens of KV cache each"
    if python.exists():
        async with engine_fleet.sglang_servers(python, shape) as urls:
            gateway = None
            if engine_fleet.gateway_version(args.gateway):
                gateway = lambda: engine_fleet.gateway(args.gateway, urls, args.base_port)  # noqa: E731
            yield Fleet(urls, gateway=gateway), name % f"SGLang {version_of(python, 'sglang')} servers"
    else:
        async with engine_fleet.torch_workers(shape) as endpoints:
            vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
            yield Fleet(endpoints, http=False, vocabulary=vocabulary), name % "workers with Preble's torch engine"


def shape_of(args: argparse.Namespace, model: Path) -> engine_fleet.Shape:
    """The engines' settings."""
    return engine_fleet.Shape(model, args.device, args.workers, args.capacity_tokens, args.max_running, args.base_port)


def sglang_python(args: argparse.Namespace) -> Path:
    """The interpreter of the environment with SGLang."""
    return Path(args.engines) / "sglang" / "bin" / "python"


def stdlib_files() -> list[Path]:
    """The standard library's modules, then those of its packages."""
    inner = [path for path in stdlib_directory().glob("*/*.py") if path.parent.name != "site-packages"]
    return [*sorted(stdlib_directory().glob("*.py")), *sorted(inner)]


def version_of(python: Path, package: str) -> str:
    """The version of a package in another environment."""
    asked = [str(python), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def model_of(args: argparse.Namespace) -> Path:
    """The model's directory; made where it is none of the caller's."""
    if args.model:
        return Path(args.model)
    models = Path(args.engines) / "models"
    return make_tiny_model("llama-20m", models) if args.device == "cpu" else mistral_shaped(models)


def mistral_shaped(models: Path, device: str = "cuda", **smaller: int) -> Path:
    """A model of Mistral 7B's shape, or a `smaller` one, with random weights (14 GB), made on the device, and the tiny
    model's tokenizer. That is written last: a directory that has one is complete."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig

    directory = models / "mistral-7b-shaped"
    if not (directory / "tokenizer.json").exists():
        torch.manual_seed(0)
        config = MistralConfig(max_position_embeddings=32_768, sliding_window=None, **smaller)
        with torch.device(device):
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
        AutoTokenizer.from_pretrained(make_tiny_model("llama-20m", models)).save_pretrained(directory)
    return directory


def left_out(args: argparse.Namespace, fleet: Fleet) -> dict[str, str]:
    """What was not measured, and why."""
    if fleet.gateway is not None:
        return {}
    why = "sglang-router is not installed: make peers" if fleet.http else "it needs SGLang servers"
    return {"the SGLang gateway": why}


# --- the command ------------------------------------------------------------------------------------------------------


async def measure(args: argparse.Namespace) -> Found:
    """Everything; the result as it is kept."""
    from tokenizers import Tokenizer

    model = model_of(args)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    load = Load(args.documents, args.requests, args.rps, args.output_tokens, args.seed)
    texts = (path.read_text(errors="replace") for path in stdlib_files())
    documents = choose_documents((tokenizer.encode(text).ids for text in texts), load.documents, *DOCUMENT_TOKENS)
    loads = [load.of_repetition(n, documents, lambda t: tokenizer.encode(t).ids) for n in range(args.repetitions)]
    found = environment(args.seed)
    async with fleet_of(args, model) as (fleet, engines):
        runs = await compare(fleet, loads, args.output_tokens)
        settings = {name.replace("_", " "): getattr(args, name) for name in SETTINGS}
        settings["tokens of a document"] = f"{min(map(len, documents))} to {max(map(len, documents))}"
        if args.device == "cpu" and fleet.http:
            settings["dtype"] = engine_fleet.cpu_dtype(Path("/proc/cpuinfo"))
        if fleet.gateway is not None:
            settings["sglang-router"] = engine_fleet.gateway_version(args.gateway)
        return {
            "facts": found,
            "date": datetime.date.today().isoformat(),
            "fleet": engines,
            "settings": settings,
            "left_out": left_out(args, fleet),
            "runs": runs,
        }


SETTINGS = ("documents", "requests", "rps", "output_tokens", "repetitions", "max_running")


def engine_options(purpose: str | None, *, rps: float, docs: str) -> argparse.ArgumentParser:
    """The options of this program, and of others before the same engines."""
    made = engine_fleet.options(purpose, workers=2, ports=200, requests=160, rps=rps, output_tokens=12, docs=docs)
    made.add_argument("--engines", default=str(ROOT / ".engines"), help="environments of tests/live/install.py")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--model", help="model directory; default: one with random weights, small on a CPU")
    made.add_argument("--documents", type=int, default=18)
    return made


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = engine_options(__doc__, rps=9.0, docs="docs/results-live.md")
    made.add_argument("--gateway", type=Path, default=ROOT / ".venv-peers/bin/python", help="Python with sglang-router")
    return made


def main() -> None:
    """Measure or read, then show."""
    args = parser().parse_args()
    result = json.loads(args.page.read_text()) if args.page else rounded(asyncio.run(measure(args)))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.docs:
        write_docs(result)
    print(page(result))


if __name__ == "__main__":
    main()
