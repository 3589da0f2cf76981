"""Asks SGLang or vLLM without Preble: what would the engine itself say, greedy? Runs in the engine's own environment.

usage: python tests/live/ask_directly.py sglang|vllm MODEL_DIR OUT.json < QUESTIONS.json

Reads {"arguments": {...}, "questions": [[token ids, new tokens], ...]}, writes the list of output token ids. Knows
nothing of Preble on purpose: it is what Preble's answers are compared with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Questions = list[tuple[list[int], int]]


def ask_sglang(model: str, arguments: dict[str, Any], questions: Questions) -> list[list[int]]:
    """One after the other, so that nothing depends on who shares a batch with whom."""
    import sglang

    engine = sglang.Engine(model_path=model, skip_tokenizer_init=True, **arguments)
    answers = []
    for token_ids, new in questions:
        sampling = {"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True}
        answers.append(list(engine.generate(input_ids=token_ids, sampling_params=sampling)["output_ids"]))
    engine.shutdown()
    return answers


def ask_vllm(model: str, arguments: dict[str, Any], questions: Questions) -> list[list[int]]:
    """One after the other, so that nothing depends on who shares a batch with whom."""
    from vllm import LLM, SamplingParams

    engine = LLM(model, skip_tokenizer_init=True, **arguments)
    answers = []
    for token_ids, new in questions:
        sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
        outputs = engine.generate({"prompt_token_ids": token_ids}, sampling, use_tqdm=False)
        answers.append(list(outputs[0].outputs[0].token_ids))
    return answers


if __name__ == "__main__":
    name, model_dir, out = sys.argv[1:]
    asked = json.load(sys.stdin)
    ask = {"sglang": ask_sglang, "vllm": ask_vllm}[name]
    Path(out).write_text(json.dumps(ask(model_dir, asked["arguments"], asked["questions"])))
