"""Speed of the torch engine: prefill, prefix hit, and decode by batch size, beside transformers' own `generate`.

    taskset -c 0 python -m benchmarks.live.torch_engine [--model DIR] [--dtype auto] [--threads 1] [--seed 0]
    python -m benchmarks.live.torch_engine --device cuda --dtype bfloat16 --model DIR

Without --model it makes the demo's model of 20 million random weights. Each figure is the median of `--repeats` runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

from preble import LocalConfig, SamplingParams
from preble.engines.base import GenerationRequest
from preble.engines.torch import TorchEngine
from preble.engines.torch.tiny_models import make_tiny_model

OUTPUT_TOKENS = 32


class Bench:
    """One engine, random prompts, and a count that keeps request ids apart."""

    def __init__(self, engine: TorchEngine, vocab_size: int, seed: int) -> None:
        self._engine = engine
        self._rng = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        self._count = 0

    def prompt(self, length: int) -> np.ndarray:
        """Random tokens, none of them special."""
        return self._rng.integers(3, self._vocab_size, length).astype(np.int32)

    def run(self, prompts: list[np.ndarray], output_tokens: int) -> tuple[float, float]:
        """Seconds until every request has its first token, and until all have all."""
        for token_ids in prompts:
            sampling = SamplingParams(max_new_tokens=output_tokens, ignore_eos=True)
            self._engine.submit(GenerationRequest(f"r{self._count}", token_ids, sampling))
            self._count += 1
        start, first, started = time.perf_counter(), 0.0, 0
        while self._engine.has_work():
            chunks = self._engine.step()
            started += sum(chunk.cached_tokens is not None for chunk in chunks)
            if started == len(prompts) and not first:
                first = time.perf_counter() - start
        return first, time.perf_counter() - start

    def prefill_seconds(self, length: int) -> float:
        """A prompt that shares nothing."""
        return self.run([self.prompt(length)], 1)[0]

    def hit_seconds(self, length: int) -> float:
        """20 new tokens behind a cached prefix."""
        shared = self.prompt(length)
        self.run([shared], 1)
        return self.run([np.concatenate((shared, self.prompt(20)))], 1)[0]

    def decode_tokens_per_second(self, batch: int, context: int) -> float:
        """All sequences of the batch together, once all have their first token."""
        shared = self.prompt(context)
        self.run([shared], 1)
        prompts = [np.concatenate((shared[:-1], self.prompt(1))) for _ in range(batch)]
        first, total = self.run(prompts, OUTPUT_TOKENS)
        return batch * (OUTPUT_TOKENS - 1) / (total - first)


def transformers_rates(path: Path, dtype: str, device: str, prompt: np.ndarray) -> tuple[float, float]:
    """(prefill seconds, decode tokens per second) of `generate` with its cache, batch size 1."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device)
    token_ids = torch.tensor(prompt[None].astype(np.int64), device=device)
    seconds = []
    for count in (1, 1, OUTPUT_TOKENS):  # the first warms up
        start = time.perf_counter()
        model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
        )
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[1], (OUTPUT_TOKENS - 1) / (seconds[2] - seconds[1])


def median(measure: Callable[[], float], repeats: int) -> float:
    """The median of `repeats` runs, after one that warms up."""
    measure()
    return statistics.median(measure() for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        measure(args, args.model or make_tiny_model("llama-20m", scratch))


def measure(args: argparse.Namespace, path: Path) -> None:
    """Print every figure for the model in `path`."""
    engine = TorchEngine(path, local=LocalConfig(40_000), dtype=args.dtype, device=args.device, threads=args.threads)
    dtype = str(engine.dtype).removeprefix("torch.")
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {args.threads} thread(s)"
    machine = cpu if args.device == "cpu" else torch.cuda.get_device_name()
    print(f"{machine}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"model {engine.info.model}, {dtype}, seed {args.seed}, median of {args.repeats}")
    vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
    bench = Bench(engine, vocab_size, args.seed)
    for length in (256, 2000):
        seconds = median(lambda n=length: bench.prefill_seconds(n), args.repeats)
        print(f"prefill {length:5d} tokens           {seconds * 1e3:8.1f} ms  {length / seconds:8.0f} tok/s")
        seconds = median(lambda n=length: bench.hit_seconds(n), args.repeats)
        print(f"hit on  {length:5d} tokens, 20 new   {seconds * 1e3:8.1f} ms")
    for context in (256, 2000):
        for batch in (1, 8):
            rate = median(lambda b=batch, c=context: bench.decode_tokens_per_second(b, c), args.repeats)
            print(f"decode  batch {batch}, context {context:5d}               {rate:8.0f} tok/s")
    for length in (256, 2000):
        seconds, rate = transformers_rates(path, dtype, args.device, bench.prompt(length))
        print(f"transformers generate, {length:5d}     {seconds * 1e3:8.1f} ms, decode {rate:5.0f} tok/s")


if __name__ == "__main__":
    main()
