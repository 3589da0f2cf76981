"""The guard of speed: instructions per operation against a committed baseline. Owns the counting and the comparison;
what is executed is `instructions_script.py`'s. Time is not measured, so a busy machine does not matter.

    make instructions                        count and compare: fails if an operation takes over 5 % more
    make instructions-renew REASON="..."     count and make this the baseline; the reason is kept with it

The baseline, instructions.json, names the compiler and the versions it was made with. Another interpreter alone moves
some counts by more than that (3.11.2 to 3.11.7: up to 13 %), so with other versions an operation fails only at over
25 % more; the differences are printed first. It needs valgrind.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.paths import ROOT

HERE = Path(__file__).resolve().parent
BASELINE = HERE / "instructions.json"
TOLERANCE = 0.05
TOLERANCE_ELSEWHERE = 0.25  # where something of the toolchain is not the baseline's
EMPTY = "an empty loop of "
REASON_CHARS_MIN = 10
NO_VALGRIND = "counting instructions needs {missing}; on Debian or Ubuntu: apt-get install valgrind"


class CannotCount(RuntimeError):
    """Instructions could not be counted; the message says why."""


# --- counting ---------------------------------------------------------------------------------------------------------


def toolchain() -> dict[str, str]:
    """What besides the source decides how many instructions there are."""
    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "compiler": first_line(["cc", "--version"]),
        "cython": first_line([sys.executable, "-c", "import Cython; print(Cython.__version__)"]),
        "numpy": first_line([sys.executable, "-c", "import numpy; print(numpy.__version__)"]),
        "libc": " ".join(platform.libc_ver()),
        "valgrind": first_line(["valgrind", "--version"]),
    }


def first_line(command: list[str]) -> str:
    """The first line a command prints, "unknown" if there is none."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip().partition("\n")[0] or "unknown"


def build_mode() -> str:
    """What setup.py wrote about the last build; as if built for speed where it wrote nothing."""
    record = ROOT / "build/cython/mode"
    return record.read_text() if record.exists() else "debug=False sanitize=\n"


def counted() -> dict[str, float]:
    """Instructions per operation. Takes about a minute. Raises CannotCount."""
    if shutil.which("valgrind") is None:
        raise CannotCount(NO_VALGRIND.format(missing="valgrind, which is not installed"))
    if "debug=True" in build_mode() or "sanitize=\n" not in build_mode():
        raise CannotCount(f"the core is built for finding bugs ({build_mode().strip()}), not for speed; build it anew")
    with tempfile.TemporaryDirectory(prefix="preble-instructions-") as scratch:
        out = Path(scratch) / "callgrind.out"
        said = run_script(request_extension(Path(scratch)), out)
        sections = dict(section for path in sorted(out.parent.glob("callgrind.out*")) if (section := section_of(path)))
    return per_operation(sections, said["done"], said["turns"])


def request_extension(scratch: Path) -> Path:
    """callgrind_request.c, compiled. Raises CannotCount if valgrind's header is not there or it does not compile."""
    out = scratch / "callgrind_request.so"
    command = ["cc", "-O2", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
    done = subprocess.run([*command, str(HERE / "callgrind_request.c"), "-o", str(out)], capture_output=True, text=True)
    if "valgrind/callgrind.h" in done.stderr:
        raise CannotCount(NO_VALGRIND.format(missing="the header valgrind/callgrind.h"))
    if done.returncode:
        raise CannotCount(f"callgrind_request.c does not compile: {done.stderr.strip()}")
    return out


def run_script(extension: Path, out: Path) -> dict[str, Any]:
    """Run the script under callgrind, in an environment that is the same everywhere; returns what it printed."""
    valgrind = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH")}
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    done = subprocess.run(
        [*valgrind, sys.executable, "-m", "benchmarks.decision.instructions_script", str(extension)],
        env={**kept, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise CannotCount(f"the script failed under valgrind:\n{done.stderr.strip()}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def section_of(path: Path) -> tuple[str, int] | None:
    """(name, instructions) of a file that callgrind wrote at the script's request; None for its last one."""
    text = path.read_text()
    name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.M)
    total = re.search(r"^(?:totals|summary): (\d+)", text, re.M)
    return (name.group(1), int(total.group(1))) if name and total else None


def per_operation(sections: dict[str, int], done: dict[str, int], turns: dict[str, int]) -> dict[str, float]:
    """Each section without what its loop costs, over how often the operation was done. Raises CannotCount if one is
    missing."""
    missing = [name for name in done for key in (name, f"{EMPTY}{turns[name]}") if key not in sections]
    if missing:
        raise CannotCount(f"callgrind wrote no counts for {', '.join(missing)}")
    return {name: (sections[name] - sections[f"{EMPTY}{turns[name]}"]) / times for name, times in done.items()}


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What the comparison says: a line for each operation, what failed, and what is merely worth knowing."""

    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare(baseline: dict[str, float], now: dict[str, float], tolerance: float = TOLERANCE) -> Verdict:
    """Hold counts against the baseline's. An operation that only one of them has is a failure, too."""
    verdict = Verdict()
    for name in [*baseline, *(name for name in now if name not in baseline)]:
        if name not in now:
            verdict.failures.append(f"{name}: in the baseline, but not counted any more; renew the baseline")
        elif name not in baseline:
            verdict.failures.append(f"{name}: {now[name]:.0f} instructions, but not in the baseline; renew it")
        else:
            hold(verdict, name, baseline[name], now[name], tolerance)
    return verdict


def hold(verdict: Verdict, name: str, was: float, now: float, tolerance: float) -> None:
    """One operation's part of the verdict."""
    change = now / was - 1 if was else float(now > 0)
    verdict.lines.append(f"{name:40} {was:12.0f} {now:12.0f} {100 * change:+8.2f} %")
    if now > was * (1 + tolerance):
        verdict.failures.append(f"{name}: {now:.0f} instructions, {100 * change:+.1f} % over the baseline's {was:.0f}")
    elif now < was * (1 - tolerance):
        verdict.notes.append(
            f"{name}: {now:.0f} instructions, {100 * change:+.1f} % under the baseline's {was:.0f}: renew the baseline,"
            " or a later loss of this gain will pass"
        )


def differences(baseline: dict[str, str], now: dict[str, str]) -> list[str]:
    """What the baseline was made with that is not here."""
    names = [*baseline, *(name for name in now if name not in baseline)]
    return [
        f"{name}: the baseline was made with {baseline.get(name, 'none')}, here is {now.get(name, 'none')}"
        for name in names
        if baseline.get(name) != now.get(name)
    ]


# --- the two commands -------------------------------------------------------------------------------------------------


def check() -> int:
    """Compare with the baseline; 1 if an operation takes more."""
    if not BASELINE.exists():
        print('no baseline; `make instructions-renew REASON="..."` makes one', file=sys.stderr)
        return 1
    baseline, tools = json.loads(BASELINE.read_text()), toolchain()
    elsewhere = differences(baseline["toolchain"], tools)
    for difference in elsewhere:
        print(f"note: {difference}")
    verdict = compare(baseline["instructions"], counted(), TOLERANCE_ELSEWHERE if elsewhere else TOLERANCE)
    print(f"{'instructions per operation':40} {'baseline':>12} {'now':>12} {'change':>10}")
    print("\n".join(verdict.lines))
    for note in verdict.notes:
        print(f"note: {note}")
    for failure in verdict.failures:
        print(f"FAILED {failure}", file=sys.stderr)
    if verdict.failures:
        print('if that is meant: make instructions-renew REASON="why it is worth it"', file=sys.stderr)
    return 1 if verdict.failures else 0


def renew(reason: str) -> int:
    """Make what is counted now the baseline."""
    if len(reason.strip()) < REASON_CHARS_MIN:
        print('a new baseline needs a reason: make instructions-renew REASON="..."', file=sys.stderr)
        return 1
    commit = first_line(["git", "rev-parse", "--short=10", "HEAD"])
    counts = {name: round(count) for name, count in counted().items()}
    baseline = {"reason": reason.strip(), "commit": commit, "toolchain": toolchain(), "instructions": counts}
    BASELINE.write_text(json.dumps(baseline, indent=1) + "\n")
    print("\n".join(f"{name:40} {count:12}" for name, count in counts.items()))
    return 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", metavar="REASON", help="make what is counted now the baseline")
    args = parser.parse_args(words)
    try:
        return check() if args.renew is None else renew(args.renew)
    except CannotCount as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
