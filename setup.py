"""Builds the compiled core: every `.pyx` under `preble/` is one extension. Owns build modes; metadata is in
pyproject.toml.

PREBLE_DEBUG=1 turns on bounds checks, C asserts and debug symbols. PREBLE_SANITIZE=address,undefined adds those
sanitizers (run Python with their runtime preloaded). A build in another mode than the last one rebuilds everything.
PREBLE_SKIP_CORE=1 leaves the extensions out: `make` installs first and builds them in place after.

Other builds have no debug information, an eighth of the size. In place they keep the names of functions, for profilers;
what is installed does not. The trees, which every decision walks, are optimised for speed alone; the rest is an eighth
smaller and executes at most 3 % more instructions (`make instructions`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("PREBLE_DEBUG", "") not in ("", "0")
SKIP_CORE = os.environ.get("PREBLE_SKIP_CORE", "") not in ("", "0")
SANITIZE = os.environ.get("PREBLE_SANITIZE", "")
BUILD_DIR = Path("build", "cython")
TREES = Path("preble", "_core")


def compile_flags() -> tuple[list[str], list[str]]:
    """Flags for compiler and linker. No -march=native: a wheel must run on machines other than its builder's."""
    if os.name == "nt":
        return (["/O2"], [])
    release = not (DEBUG or SANITIZE)
    flags = ["-O2", "-fvect-cost-model=dynamic", "-g0"] if release else ["-O1", "-g", "-UNDEBUG"]
    flags.append("-ffp-contract=off")  # a fused multiply-add rounds otherwise: the same run on every processor
    sanitizers = [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"] if SANITIZE else []
    quiet = ["-Wno-unused-function", "-Wno-array-bounds", "-Wno-sign-compare"]  # the habits of generated code
    links = list(sanitizers)
    if sys.platform == "linux":
        flags.append("-frecord-gcc-switches")  # tests/packaging/wheel_test.py reads them in what was built
        links += ["-Wl,-z,noseparate-code"] if release else []  # no padding between parts: 4 KB a module
        links += ["-Wl,--strip-all"] if release and "--inplace" not in sys.argv else []
    return ([*flags, *quiet, *sanitizers], links)


def flags_of(source: Path, compile_args: list[str]) -> list[str]:
    """The flags that one module is compiled with."""
    return [*compile_args, "-O3"] if TREES in source.parents and "-O2" in compile_args else compile_args


def mode_changed() -> bool:
    """True if the previous build used another mode, so that nothing of it may be kept. Records this build's mode."""
    mode, record = f"debug={DEBUG} sanitize={SANITIZE}\n", BUILD_DIR / "mode"
    changed = record.exists() and record.read_text() != mode
    BUILD_DIR.mkdir(parents=True, exist_ok=True)
    record.write_text(mode)
    return changed


def extensions(force: bool) -> list[Extension]:
    """The extensions, cythonized into build/ so that no generated C lies beside the sources."""
    compile_args, link_args = compile_flags()
    declarations = sorted(str(path) for path in Path("preble").rglob("*.pxd"))
    modules = [
        Extension(
            ".".join(source.with_suffix("").parts),
            [str(source)],
            depends=declarations,
            extra_compile_args=flags_of(source, compile_args),
            extra_link_args=link_args,
        )
        for source in sorted(Path("preble").rglob("*.pyx"))
    ]
    directives = {
        "language_level": 3,
        "boundscheck": DEBUG,
        "wraparound": False,
        "cdivision": not DEBUG,
        "initializedcheck": DEBUG,
        "embedsignature": True,
        "freethreading_compatible": True,  # without Python's lock the core's own orders threads
    }
    built: list[Extension] = cythonize(
        modules, build_dir=str(BUILD_DIR), compiler_directives=directives, force=force, nthreads=os.cpu_count() or 1
    )
    return built


if __name__ == "__main__":
    if SKIP_CORE:
        setup()
    else:
        FORCE = mode_changed()
        setup(ext_modules=extensions(FORCE), options={"build_ext": {"force": FORCE, "parallel": os.cpu_count() or 1}})
