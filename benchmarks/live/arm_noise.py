"""How quiet the machine was during a run of `run_arms.py`: time stolen by the hypervisor, CPU that others used, load,
and whether its cores computed as fast as in the repetition's other runs (`core_speed`).

Reads /proc and changes nothing. Shares are of all processors' time together. What this process started, and what that
started, is not another's. A process of ours that ended during the run is counted with the others, so a run's ends are
taken while all of its processes live.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
STOLEN_SHARE_MAX = 0.02
OTHERS_SHARE_MAX = 0.05
SPEED_SHARE_MAX = 0.1  # by so much a core may be faster or slower than in the other runs of a repetition
Found = dict[str, Any]


@dataclass(frozen=True)
class Ticks:
    """Clock ticks of all processors since the machine started: all, stolen, in any process, in processes of ours."""

    all: int
    stolen: int
    busy: int
    ours: int


def processor_ticks(stat: str) -> tuple[int, int, int]:
    """(all, stolen, busy) of the text of /proc/stat."""
    user, nice, system, idle, iowait, irq, softirq, stolen = map(int, stat.splitlines()[0].split()[1:9])
    busy = user + nice + system + irq + softirq
    return busy + idle + iowait + stolen, stolen, busy


def process_ticks(proc: Path = PROC) -> dict[int, tuple[int, int]]:
    """(parent, ticks used, ended children's included) of every process."""
    found = {}
    for directory in proc.iterdir():
        if directory.name.isdigit():
            try:
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            found[int(directory.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    return found


def ticks_of_family(processes: dict[int, tuple[int, int]], root: int) -> int:
    """Ticks used by a process and by all that came of it."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    waiting, total = [root], 0
    while waiting:
        pid = waiting.pop()
        total += processes.get(pid, (0, 0))[1]
        waiting += children.get(pid, [])
    return total


def now() -> Ticks:
    """The counters of this machine; none where it has no /proc."""
    if not (PROC / "stat").exists():
        return Ticks(0, 0, 0, 0)
    return Ticks(*processor_ticks((PROC / "stat").read_text()), ticks_of_family(process_ticks(), os.getpid()))


def between(first: Ticks, last: Ticks, load_before: float) -> Found:
    """What is kept beside a run."""
    ticks = max(1, last.all - first.all)
    others = (last.busy - first.busy) - (last.ours - first.ours)
    return {
        "stolen_share": (last.stolen - first.stolen) / ticks,
        "others_share": max(0.0, others / ticks),
        "load_1_minute_before": load_before,
    }


def is_noisy(quiet: Found, others: Sequence[Found] = ()) -> bool:
    """Whether a run is repeated, and marked if it stays. `others`: quiet runs that it is compared with."""
    if quiet["stolen_share"] > STOLEN_SHARE_MAX or quiet["others_share"] > OTHERS_SHARE_MAX:
        return True
    speeds = [one["product_seconds"] for one in others if "product_seconds" in one]
    if not speeds or "product_seconds" not in quiet:
        return False
    return abs(quiet["product_seconds"] / statistics.median(speeds) - 1.0) > SPEED_SHARE_MAX
