"""Checks what `make wheel` built: what is in the two files, and that the wheel works where nothing else is installed.

    python tests/packaging/wheel_test.py dist                   the base install and the cheap extras
    python tests/packaging/wheel_test.py dist --all-extras      every extra (gigabytes)

Owns the checks; `exercise.py` is what runs inside the new environment. Versions are those of constraints.txt where it
names them.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent.parent
INSTALLED_BYTES_MAX = 6_000_000  # of the compiled modules; with debug information they have 22 MB
BUILT = {".so", ".pyd", ".pyc", ".pyo", ".o", ".a", ".egg", ".whl"}

# Of every extra, what must import once it is installed and nothing else of ours is.
EXTRAS = {
    "gateway": "preble.gateway.program, preble.gateway.app, preble.gateway.core.metrics, aiohttp",
    "attach": "aiohttp, preble.cli.attach",
    "epp": "preble.gateway.picker.messages",
    "kubernetes": "kubernetes.aio.client, kubernetes.aio.config, aiohttp",
    "dns": "dns.asyncresolver",
    "otel": "opentelemetry.sdk.trace, opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "top": "preble.cli.top_screen",
    "bench": "matplotlib, rich, preble.cli.demo.plot, preble.cli.console",
    "mistral": "mistral_common, sentencepiece",
    "torch": "preble.engines.torch.engine, preble.engines.torch.tiny_models, transformers",
    "ray": "ray.serve",
    "sglang": "sglang",
    "vllm": "vllm",
    "test": "pytest, hypothesis, openai",
    "docs": "zensical",
    "build": "build, auditwheel",
    "dev": "Cython, mypy",
}
CHEAP = ("gateway", "attach", "epp", "otel", "top", "bench", "mistral")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# --- what is in the files ---------------------------------------------------------------------------------------------


def tracked(*folders: str) -> set[str]:
    """What git tracks there."""
    done = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def check_sdist(path: Path) -> None:
    """All that git tracks is in it, so that it can be built and tested; nothing built, and nothing else."""
    with tarfile.open(path) as tar:
        names = {member.name.partition("/")[2] for member in tar if member.isfile()}
    missing = tracked() - names
    assert not missing, f"{path.name} lacks {sorted(missing)}"
    made = {name for name in names - tracked() if not re.fullmatch(r"PKG-INFO|setup\.cfg|preble\.egg-info/.*", name)}
    assert not made, f"{path.name} has what git does not: {sorted(made)[:10]}"
    built = {name for name in names if PurePosixPath(name).suffix in BUILT}
    assert not built, f"{path.name} has what was built: {sorted(built)}"
    say(f"ok  {path.name}: {len(names)} files, all that git tracks")


def check_wheel(path: Path) -> str:
    """The package and its metadata, whole, and nothing else; returns the version."""
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        (folder,) = {name.split("/")[0] for name in names if name.split("/")[0].endswith(".dist-info")}
        metadata = email.message_from_bytes(wheel.read(f"{folder}/METADATA"))
        modules = {name: wheel.read(name) for name in names if name.endswith((".so", ".pyd"))}
    for name, code in modules.items():
        check_machine_code(name, code)
    installed_bytes = sum(map(len, modules.values()))
    assert installed_bytes <= INSTALLED_BYTES_MAX, f"the compiled modules of {path.name} have {installed_bytes:,} bytes"
    foreign = {name for name in names if name.split("/")[0] not in ("preble", folder)}
    assert not foreign, f"{path.name} has more than the package: {sorted(foreign)[:10]}"
    sources = tracked("preble")
    missing = {name for name in sources if not name.endswith(".pyx")} - names
    assert not missing, f"{path.name} lacks {sorted(missing)}"
    compiled = {name.split(".")[0] for name in names if name.endswith((".so", ".pyd"))}
    assert compiled == {name.removesuffix(".pyx") for name in sources if name.endswith(".pyx")}, sorted(compiled)
    more = {name for name in names if name.startswith("preble/")} - sources
    assert all(name.endswith((".so", ".pyd")) for name in more), sorted(more)
    assert f"{folder}/licenses/LICENSE" in names
    assert set(metadata.get_all("Provides-Extra", [])) == set(EXTRAS), "an extra that is not tested here"
    say(f"ok  {path.name}: {path.stat().st_size:,} bytes; {len(compiled)} modules of {installed_bytes:,} bytes")
    return str(metadata["Version"])


def check_machine_code(name: str, code: bytes) -> None:
    """Compiled for any machine of its kind, by the compiler's own note of its flags, which Linux builds have."""
    assert b"-ffp-contract=off" in code or "linux" not in name, f"{name} has no note of how it was compiled"
    for flag in set(re.findall(rb"-march=([\w.-]+)", code)):
        assert flag in (b"x86-64", b"armv8-a"), f"{name} was compiled for {flag.decode()}"


# --- in environments of its own -----------------------------------------------------------------------------------


def new_environment(directory: Path, requirement: str) -> Path:
    """The Python of a new environment with `requirement` installed; its pip sees no other configuration of ours."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    call([*command, "-c", str(ROOT / "constraints.txt"), requirement], directory)
    return python


def call(command: list[str], directory: Path) -> str:
    """The output of a command that must succeed, run in `directory` with nothing of this environment in its way."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=directory, env=kept, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def check_base(wheel: Path, version: str) -> None:
    """The wheel alone brings three packages, works, and says what to install for the rest."""
    with tempfile.TemporaryDirectory(prefix="preble-wheel-") as name:
        directory = Path(name)
        python = new_environment(directory, str(wheel))
        listing = call([str(python), "-m", "pip", "list", "--format", "freeze"], directory)
        installed = {line.split("==")[0].split(" @")[0] for line in listing.split("\n") if line} - {"pip", "setuptools"}
        assert installed == {"preble", "numpy", "msgspec", "pyzmq"}, sorted(installed)
        exercise = directory / "exercise.py"
        exercise.write_text((ROOT / "tests" / "packaging" / "exercise.py").read_text())
        output = call([str(python), str(exercise)], directory)
        assert f"exercised preble {version}" in output, output
        serve = [directory / "bin" / "preble", "serve", "--workers", "tcp://127.0.0.1:5601"]
        done = subprocess.run(serve, cwd=directory, capture_output=True, text=True)
        assert done.returncode == 1 and "pip install 'preble[gateway]'" in done.stderr, done.stderr
    say(f"ok  base install: {', '.join(sorted(installed))}")


def check_extra(wheel: Path, extra: str) -> None:
    """The extra installs in an environment of its own, and what it brings imports."""
    with tempfile.TemporaryDirectory(prefix="preble-wheel-") as name:
        directory = Path(name)
        python = new_environment(directory, f"{wheel}[{extra}]")
        call([str(python), "-c", f"import {EXTRAS[extra]}"], directory)
    say(f"ok  extra {extra}: {EXTRAS[extra]}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Check a built source distribution and wheel.")
    parser.add_argument("dist", type=Path, help="the directory with both")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--all-extras", action="store_true", help=f"not only {', '.join(CHEAP)}")
    chosen.add_argument("--extras", nargs="*", choices=sorted(EXTRAS), help="these")
    args = parser.parse_args()
    (sdist,), (wheel,) = args.dist.glob("*.tar.gz"), args.dist.glob("*.whl")
    check_sdist(sdist)
    version = check_wheel(wheel)
    assert sdist.name == f"preble-{version}.tar.gz"
    check_base(wheel.resolve(), version)
    extras = args.extras if args.extras is not None else EXTRAS if args.all_extras else CHEAP
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # pip waits for the network and the disk as often as it works
        list(pool.map(partial(check_extra, wheel.resolve()), extras))
    return 0


if __name__ == "__main__":
    sys.exit(main())
