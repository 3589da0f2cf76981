"""Makes an environment in which SGLang or vLLM really runs on a machine without a GPU, with this checkout in it.

usage: python tests/live/install.py --engine sglang|vllm [--into DIR]

Owns the environments of the live tests: one per engine, under .engines/ by default, because the two need different
versions of the same packages. The checkout is installed as it lies there, compiled core included, so the interpreter
must be the one the core was built for (`make build`). A finished environment is kept and costs nothing the next time.
About 2 minutes and 3.5 GB each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent.parent
SHIM = HERE / "sglang_cpu"
ENGINES = ("sglang", "vllm")


def main() -> None:
    """Make the environment, or say that it is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--into", type=Path, help="directory of the environment; default .engines/ENGINE")
    chosen = parser.parse_args()
    install(chosen.engine, chosen.into or CHECKOUT / ".engines" / chosen.engine)


def install(engine: str, into: Path) -> Path:
    """Return the environment of `engine`, made if it is missing, incomplete or of other requirements."""
    refuse_other_core()
    stamp, wanted = into / "installed.json", recipe(engine)
    if stamp.exists() and stamp.read_text() == wanted:
        say(f"{engine} is installed in {into}")
        return into
    shutil.rmtree(into, ignore_errors=True)
    say(f"installing {engine} into {into} (about 2 minutes, 3.5 GB)")
    venv.create(into, with_pip=True)
    plain, alone, removed = requirements(engine)
    pip(into, "install", *plain)
    if alone:
        pip(into, "install", "--no-deps", *alone)
    if removed:
        pip(into, "uninstall", "--yes", *removed)
    if engine == "sglang":
        add_shim(into)
    pip(into, "install", "--editable", str(CHECKOUT), PREBLE_SKIP_CORE="1")
    run([python_of(into), "-c", f"import preble, {engine}"])
    stamp.write_text(wanted)
    return into


def refuse_other_core() -> None:
    """The compiled core must be there, and for this interpreter; anything else would fail later and less clearly."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if not (CHECKOUT / "preble" / f"_radix{suffix}").exists():
        sys.exit(f"{sys.executable} needs preble/_radix{suffix}, which is not there: run `make build` with this Python")


def recipe(engine: str) -> str:
    """All that an environment is made from; another text means another environment."""
    parts = {path.name: path.read_text() for path in sorted(SHIM.glob("*.py"))} if engine == "sglang" else {}
    lists = [*requirements(engine)]
    return json.dumps({"python": sys.version, "checkout": str(CHECKOUT), "requirements": lists, "shim": parts})


def requirements(engine: str) -> tuple[list[str], list[str], list[str]]:
    """Packages to install, to install without dependencies, and to take out again."""
    lines = (HERE / f"requirements-{engine}.txt").read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    alone = [line.removeprefix("--no-deps ") for line in lines if line.startswith("--no-deps ")]
    removed = [line.removeprefix("-") for line in lines if line.startswith("-") and not line.startswith("--")]
    return [line for line in lines if not line.startswith("-")], alone, removed


def add_shim(into: Path) -> None:
    """Put the stand-ins where every process of the engine finds them, without a variable that must be set."""
    packages = Path(output([python_of(into), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]))
    shutil.copy(SHIM / "sgl_kernel.py", packages / "sgl_kernel.py")
    with open(packages / "torchvision" / "extension.py", "a") as extension:
        extension.write("\n\n" + (SHIM / "torchvision_operators.py").read_text())


def python_of(environment: Path) -> str:
    """The interpreter of an environment."""
    return str(environment / "bin" / "python")


def pip(environment: Path, *words: str, **variables: str) -> None:
    """Run pip quietly; its own messages are shown where it fails."""
    command = [python_of(environment), "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    run(command, {**os.environ, **variables})


def run(command: list[str], environment: dict[str, str] | None = None) -> None:
    """Run a command, and end with its exit code where it fails."""
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        sys.exit(f"failed with exit code {code}: {' '.join(command[:6])}")


def output(command: list[str]) -> str:
    """What a command prints, without the line's end."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def say(text: str) -> None:
    """Report the person who waits."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
