"""Real engines for the live tests: settings, worker processes, prompts, and what an engine says when asked directly.

Owns processes and files, no assertion. PREBLE_ENGINES names a directory of environments made by `install.py` (default
.engines/), PREBLE_SHARED one with real prompts (workloads/prompts/tool_use.jsonl.gz); where that is missing, files of
the standard library are the documents.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from preble.engines.torch.tiny_models import make_tiny_model, stdlib_directory
from tests.support.paths import ROOT, SHARED

ENGINES_DIR = Path(os.environ.get("PREBLE_ENGINES", ROOT / ".engines"))
LOGS = ROOT / "build" / "live"
READY_SECONDS = 900.0
CAPACITY_TOKENS = 4096

# float32, so that an answer does not depend on how a prompt was cut into chunks or who shared its batch. Caches are
# small, so that a few dozen prompts evict each other.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "sglang": {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "page_size": 16,
        "max_total_tokens": CAPACITY_TOKENS,
        "max_running_requests": 8,
        "context_length": 4096,
        "mem_fraction_static": 0.3,
        "dtype": "float32",
    },
    "vllm": {
        "max_model_len": 4096,
        "block_size": 32,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": CAPACITY_TOKENS // 32 + 1,
        "enforce_eager": True,
        "dtype": "float32",
    },
}
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def python_of(engine: str) -> Path:
    """The interpreter of the engine's environment."""
    return ENGINES_DIR / engine / "bin" / "python"


def model_dir() -> Path:
    """A model of a million random weights."""
    return make_tiny_model("llama-1m", ENGINES_DIR / "models")


def environment() -> dict[str, str]:
    """What engines without a GPU or a network need to know."""
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}


class LiveWorker:
    """`preble worker` with a real engine, pinned to one core. A second `start`, after its end, restarts it."""

    def __init__(self, engine: str, number: int) -> None:
        self.engine = engine
        self.number = number
        self.endpoint = "tcp://127.0.0.1:*"
        self.process: subprocess.Popen[bytes]
        LOGS.mkdir(parents=True, exist_ok=True)
        self.log = LOGS / f"{engine}-{number}.log"
        self.output = LOGS / f"{engine}-{number}.out"

    def start(self) -> None:
        """Start the process, at the endpoint it had before, if any."""
        cores = sorted(os.sched_getaffinity(0))
        command = [str(python_of(self.engine)), "-m", "preble.cli", "worker", "--engine", self.engine]
        command += ["--model", str(model_dir()), "--bind", self.endpoint, "--id", f"{self.engine}-{self.number}"]
        command += ["--cpu", str(cores[self.number % len(cores)])]
        for key, value in ARGUMENTS[self.engine].items():
            command += ["--engine-arg", f"{key}={json.dumps(value) if isinstance(value, bool) else value}"]
        with open(self.log, "a") as log, open(self.output, "w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=log, env=environment(), start_new_session=True
            )

    def wait(self) -> None:
        """Until it is ready; fails with the end of its log. Engines write to standard output, too."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            lines = self.output.read_text().splitlines(keepends=True)
            ready = [line for line in lines if line.startswith("READY ") and line.endswith("\n")]
            if ready:
                self.endpoint = ready[0].split()[1]
                return
            time.sleep(0.1)
        raise AssertionError(f"{self.engine} did not get ready; {self.log} ends: {self.log.read_text()[-2000:]}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker, not to the engine's own processes."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the worker alone; whatever it leaves behind is ended too, once it is gone."""
        self.process.kill()
        self.process.wait(30.0)
        self._end_group()

    def stop(self) -> int:
        """SIGTERM, as an operator's; the exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            return self.process.wait(60.0)
        finally:
            self._end_group()

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def ask_directly(engine: str, questions: list[tuple[list[int], int]]) -> subprocess.Popen[bytes]:
    """Start to ask the engine itself; `answers` has the result once it is done."""
    LOGS.mkdir(parents=True, exist_ok=True)
    asked = json.dumps({"arguments": ARGUMENTS[engine], "questions": questions})
    (LOGS / f"{engine}-questions.json").write_text(asked)
    script = str(ROOT / "tests" / "live" / "ask_directly.py")
    command = [str(python_of(engine)), script, engine, str(model_dir()), str(LOGS / f"{engine}-answers.json")]
    with open(LOGS / f"{engine}-questions.json") as source, open(LOGS / f"{engine}-direct.log", "w") as log:
        return subprocess.Popen(command, stdin=source, stdout=log, stderr=log, env=environment())


def answers(engine: str, asking: subprocess.Popen[bytes]) -> list[list[int]]:
    """What the engine said."""
    code = asking.wait(READY_SECONDS)
    assert code == 0, f"asking {engine} directly failed; see {LOGS / f'{engine}-direct.log'}"
    found: list[list[int]] = json.loads((LOGS / f"{engine}-answers.json").read_text())
    return found


# --- prompts ----------------------------------------------------------------------------------------------------------


def prompts(documents: int, turns: int, tokens_max: int) -> list[list[int]]:
    """`documents` texts with `turns` different endings each: four texts take turns until each had all but its last
    ending, then the next four; at the end all of them come back once more, when most have been evicted."""
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    groups = [group for group in _real_groups() if len(group) >= turns][:documents]
    groups = groups if len(groups) == documents else list(_stdlib_groups(documents, turns))
    blocks = [groups[first : first + 4] for first in range(0, documents, 4)]
    order = [group[turn] for block in blocks for turn in range(turns - 1) for group in block]
    order += [group[-1] for group in groups]
    return [tokenizer.encode(shared).ids[: tokens_max - 40] + tokenizer.encode(own).ids[:40] for shared, own in order]


def _real_groups() -> Iterator[list[tuple[str, str]]]:
    """(shared text, own text) of the requests for each tool, where these prompts are present."""
    file = SHARED / "workloads" / "prompts" / "tool_use.jsonl.gz"
    if not file.is_file():
        return
    with gzip.open(file.with_name("tool_use_segments.jsonl.gz"), "rt") as lines:
        segments = {row["id"]: row.get("text") for row in map(json.loads, lines)}
    groups: dict[str, list[tuple[str, str]]] = {}
    with gzip.open(file, "rt") as lines:
        for row in map(json.loads, lines):
            parts = [part for part in row["parts"] if part.get("role") != "history"]
            shared = "".join(segments.get(part.get("seg")) or "" for part in parts)
            own = "".join(part.get("text", "") for part in parts)
            groups.setdefault(row["group"], []).append((shared, own))
    yield from (group for _, group in sorted(groups.items()) if all(len(shared) > 1500 for shared, _ in group[:8]))


def _stdlib_groups(documents: int, turns: int) -> Iterator[list[tuple[str, str]]]:
    files = sorted(path for path in stdlib_directory().glob("*.py") if path.stat().st_size > 8000)[:documents]
    for file in files:
        text = file.read_text(errors="replace")
        yield [(text, f"\nQuestion {turn}: what does {file.stem} number {turn} do?") for turn in range(turns)]
