"""Builds the core with a sanitizer in a copy of its own and runs its tests there: `asan` or `tsan`.

Owns the copy (`build/asan`, `build/tsan`, others for CPython without its lock: package, tests and build), the
sanitizers' options, and the proof that they
are at work: faults planted in `planted.c` must be reported as and where the tests run, and every compiled module must
call the sanitizer. The build in place stays as it is. What the tests assert is theirs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

COPIED = ("preble", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE")
LEFT_OUT = ("*.so", "*.pyd", "__pycache__")  # names of what builds and runs leave behind
CORE_TESTS = (
    *("core/test_radix*", "core/test_token_ids*", "core/test_epochs*", "costs/test_cost*", "kv_index/test_blocks*"),
    *("batching/test_kv_slots*", "test_scheduler*", "test_local*", "policies/test_policy*", "transport/test_wire*"),
    *("scheduling/test_policy_state*", "scheduling/test_peer_bookings*", "scheduling/test_request_ids*"),
    *("snapshot/test_snapshot*",),
    *("stress/test_threads*", "stress/test_allocation*", "stress/test_leaks*"),
)
THREAD_OPERATIONS = 8000  # of each thread
BUILT_FOR = "-free-threaded" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
# UBSan beside ASan reports to standard error, whatever it is reported: kept by pytest, a report would die with its
# process.
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--capture=sys", "--timeout=900")


@dataclass(frozen=True)
class Sanitizer:
    """How one kind of sanitizer is built in, started and proven."""

    flags: str  # of -fsanitize
    runtimes: tuple[str, ...]  # preloaded, since the interpreter is not linked with them
    symbol: str  # what each module it has compiled calls
    options: dict[str, str]  # its environment variables; log_path is added
    faults: dict[str, str]  # planted function: what the report must say ("" for silence)
    pytest: bool  # whether pytest runs what is watched; else it is a script


COMMON = "halt_on_error=1:print_stacktrace=1:exitcode=77"
SANITIZERS = {
    "asan": Sanitizer(
        "address,undefined",
        ("libasan.so", "libubsan.so"),
        "__asan_init",
        {
            # Leaks have a test of their own (test_leaks.py): the interpreter frees little of its memory at its end.
            "ASAN_OPTIONS": f"{COMMON}:detect_leaks=0:detect_stack_use_after_return=1:allocator_may_return_null=1",
            "UBSAN_OPTIONS": COMMON,
            "PYTHONMALLOC": "malloc",  # so that the tokens inside Python's own objects are watched too
        },
        {"read_beyond": "heap-buffer-overflow", "read_freed": "heap-use-after-free", "overflow": "signed integer"},
        True,
    ),
    "tsan": Sanitizer(
        "thread",
        ("libtsan.so",),
        "__tsan_init",
        {"TSAN_OPTIONS": f"{COMMON}:second_deadlock_stack=1:history_size=4"},
        {"race": "data race", "no_race": ""},
        False,
    ),
}


class NotProven(Exception):
    """The sanitizer is not at work, so that a clean run would mean nothing."""


def compiler() -> list[str]:
    """The C compiler that setuptools uses."""
    return (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()


def runtime(name: str) -> str:
    """The path of a sanitizer's runtime, as the compiler knows it."""
    found = subprocess.run([*compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    if not path.is_absolute() or not path.exists():
        raise NotProven(f"{compiler()[0]} has no {name}; install its sanitizer runtimes")
    return str(path.resolve())


def copy_sources(target: Path) -> None:
    """Make the copy equal to the sources, what was built there aside; times are kept, so that little is rebuilt."""
    wanted = set()
    for name in COPIED:
        top = ROOT / name
        files = [path for path in top.rglob("*") if path.is_file()] if top.is_dir() else [top]
        for path in files:
            relative = path.relative_to(ROOT)
            if any(Path(part).match(pattern) for part in relative.parts for pattern in LEFT_OUT):
                continue
            wanted.add(relative)
            copy = target / relative
            if not copy.exists() or copy.stat().st_mtime != path.stat().st_mtime:
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)
    for name in ("preble", "tests"):
        for path in (target / name).rglob("*"):
            if path.is_file() and path.suffix not in {".so", ".pyc"} and path.relative_to(target) not in wanted:
                path.unlink()


def copy_generated(made: Path, target: Path) -> None:
    """Take the C that Cython has made for the build in place, so that it need not be made again: only the compiler's
    flags differ. None of a build with bounds checks, whose C is another; what is older than its source is made anew."""
    mode = made / "mode"
    if not mode.exists() or not mode.read_text().startswith("debug=False"):
        return
    for path in made.rglob("*.c"):
        copy = target / "build" / "cython" / path.relative_to(made)
        if not copy.exists() or copy.stat().st_mtime < path.stat().st_mtime:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)


def build(sanitizer: Sanitizer, target: Path) -> None:
    """Compile the core in the copy, and the planted faults with the same flags."""
    environment = {**os.environ, "PREBLE_SANITIZE": sanitizer.flags}
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=target, env=environment, check=True
    )
    flags = ["-O1", "-g", "-fPIC", "-shared", "-fno-omit-frame-pointer", f"-fsanitize={sanitizer.flags}"]
    source = target / "tests" / "stress" / "planted.c"
    subprocess.run([*compiler(), *flags, "-o", str(planted_library(target)), str(source)], check=True)


def planted_library(target: Path) -> Path:
    return target / "planted.so"


def environment_of(sanitizer: Sanitizer, target: Path, log: Path) -> dict[str, str]:
    """The environment of every process under the sanitizer; most reports go to files."""
    settings = dict(sanitizer.options)
    for name in settings:
        if name.endswith("_OPTIONS"):
            settings[name] += f":log_path={log}"
    if "TSAN_OPTIONS" in settings:
        settings["TSAN_OPTIONS"] += f":suppressions={target / 'tests' / 'stress' / 'tsan.supp'}"
    preload = " ".join(runtime(name) for name in sanitizer.runtimes)
    return {**os.environ, **settings, "LD_PRELOAD": preload, "PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"}


def take_reports(log: Path) -> str:
    """What the sanitizer has written since the last call; its files are removed."""
    text = ""
    for path in sorted(log.parent.glob(f"{log.name}.*")):
        text += path.read_text(errors="replace")
        path.unlink()
    return text


def prove(sanitizer: Sanitizer, target: Path, log: Path) -> None:
    """Raise NotProven unless every module is compiled with the sanitizer and every planted fault is reported."""
    environment = environment_of(sanitizer, target, log)
    prove_build(sanitizer, target)
    prove_loaded(sanitizer, target, environment)
    for function, report in sanitizer.faults.items():
        ended = run_planted(sanitizer, target, environment, function)
        text = take_reports(log) + ended.stderr
        if report and (ended.returncode == 0 or report not in text):
            raise NotProven(f"the planted fault {function!r} was not reported as {report!r}: {text or 'silence'}")
        if not report and (ended.returncode or text):
            raise NotProven(f"{function!r} has no fault and was reported: {text}")


def run_planted(
    sanitizer: Sanitizer, target: Path, environment: dict[str, str], function: str
) -> subprocess.CompletedProcess[str]:
    """Run a planted fault as the tests are run."""
    program, library = str(target / "tests" / "stress" / "planted.py"), str(planted_library(target))
    if not sanitizer.pytest:
        return run_quietly([program, library, function], target, environment)
    planted = {"PREBLE_PLANTED": os.pathsep.join([library, function])}
    return run_quietly([*PYTEST, program], target, {**environment, **planted})


def prove_build(sanitizer: Sanitizer, target: Path) -> None:
    """Raise NotProven unless each source has a module that calls the sanitizer."""
    modules = sorted((target / "preble").rglob("*.so"))
    sources = sorted((target / "preble").rglob("*.pyx"))
    if len(modules) != len(sources) or not modules:
        raise NotProven(f"{len(sources)} modules to compile, {len(modules)} compiled")
    for module in modules:
        if sanitizer.symbol.encode() not in module.read_bytes():
            raise NotProven(f"{module.name} does not call {sanitizer.symbol}")


def prove_loaded(sanitizer: Sanitizer, target: Path, environment: dict[str, str]) -> None:
    """Raise NotProven unless Python loads the copy's modules, and the sanitizer's runtime with them."""
    where = f"import preble._radix as m, ctypes; print(m.__file__); ctypes.CDLL(None).{sanitizer.symbol}"
    seen = run_quietly(["-c", where], target, environment)
    if seen.returncode or Path(seen.stdout.strip()).parent != target / "preble":
        raise NotProven(f"the build under test is not the one loaded, or has no runtime: {seen.stdout}{seen.stderr}")


def run_quietly(arguments: list[str], target: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=target, capture_output=True, text=True, check=False
    )


def command(sanitizer: Sanitizer, target: Path, arguments: list[str]) -> list[str]:
    """What runs under the sanitizer."""
    if not sanitizer.pytest:
        return [sys.executable, "-m", "tests.stress.threads", "--operations", str(THREAD_OPERATIONS), *arguments]
    files = sorted(
        str(path.relative_to(target)) for name in CORE_TESTS for path in (target / "tests").glob(f"{name}.py")
    )
    return [sys.executable, *PYTEST, *files, *arguments]


def say(text: str) -> None:
    """Print at once, so that the order is right beside what other processes print."""
    sys.stdout.write(f"== {text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the core's tests under a sanitizer.")
    parser.add_argument("kind", choices=sorted(SANITIZERS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for pytest (asan) or threads.py (tsan)")
    chosen = parser.parse_args()
    sanitizer, target = SANITIZERS[chosen.kind], ROOT / "build" / (chosen.kind + BUILT_FOR)
    log = target / "report"
    say(f"compiling the core with -fsanitize={sanitizer.flags} in {target.relative_to(ROOT)}")
    copy_sources(target)
    copy_generated(ROOT / "build" / "cython", target)
    build(sanitizer, target)
    take_reports(log)
    try:
        prove(sanitizer, target, log)
    except NotProven as error:
        say(f"{chosen.kind} would prove nothing: {error}")
        return 2
    say(f"the sanitizer is at work: it judged the planted {', '.join(sanitizer.faults)} rightly")
    watched = command(sanitizer, target, chosen.arguments)
    ended = subprocess.run(watched, env=environment_of(sanitizer, target, log), cwd=target, check=False)
    reports = take_reports(log)
    if reports:
        say(f"reported by the sanitizer:\n{reports}")
    failed = bool(ended.returncode or reports)
    say(f"{chosen.kind}: {f'FAILED, exit status {ended.returncode}' if failed else 'clean'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
