"""What a result needs to be repeated: commit, machine, versions, command. Owns no measurement."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.paths import ROOT


def first_line(command: list[str]) -> str:
    """The first line a command prints, "unknown" if there is none."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip().partition("\n")[0] or "unknown"


def commit() -> str:
    """The checkout's commit, with "+" if files that git knows have changed since."""
    name = first_line(["git", "rev-parse", "--short=10", "HEAD"])
    changed = first_line(["git", "status", "--porcelain", "--untracked-files=no", "--", "preble", "benchmarks"])
    return name if changed == "unknown" else f"{name}+"


def machine() -> str:
    """Processors by name and number, and the kernel."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"{os.cpu_count()} x {processor}, {platform.system()} {platform.release().split('-')[0]}"


def command() -> str:
    """What started this process, as it is typed; files without their folders, which are one machine's business."""
    program = Path(sys.argv[0]).resolve()
    inside = ROOT / "benchmarks" in program.parents
    module = ".".join(program.relative_to(ROOT).with_suffix("").parts) if inside else program.stem
    return shlex.join(["python", "-m", module, *(Path(word).name if os.sep in word else word for word in sys.argv[1:])])


def typed_today(command: str) -> str:
    """A recorded command as it is typed today: results from before the benchmarks were modules name a file."""

    def module(match: re.Match[str]) -> str:
        [path] = (ROOT / "benchmarks").glob(f"*/{match[1]}.py")
        return f"-m benchmarks.{path.parent.name}.{match[1]}"

    return re.sub(r"\bbenchmarks/(\w+)\.py", module, command)


def environment(seed: int) -> dict[str, Any]:
    """All of it."""
    import numpy as np

    return {
        "commit": commit(),
        "machine": machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "compiler": first_line(["cc", "--version"]),
        "load_1_minute": round(os.getloadavg()[0], 2),
        "seed": seed,
        "command": command(),
    }
