"""What a release is made from: one version, package data, extras, flags of the compiler. Builds nothing.

`make wheel-test` builds, and tests what was built.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest

import preble
from tests.support.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = {".py", ".pyx"}  # modules; everything else in the package is package data


def load(path: Path) -> ModuleType:
    """A program that is no module of a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wheel_test = load(ROOT / "tests" / "packaging" / "wheel_test.py")


def tracked() -> list[str]:
    """What git tracks."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    return listed.stdout.split()


def test_the_version_stands_in_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"] and "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "preble.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", preble.__version__)
    said = re.compile(rf"version\w*\s*[=:]\s*[\"']?{re.escape(preble.__version__)}\b", re.I)
    places = [name for name in tracked() if name.endswith((".py", ".toml", ".pyx")) and said.search(read(name))]
    assert places == ["preble/__init__.py"]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_changelog_begins_with_this_version() -> None:
    first = re.search(r"^## (\S+)", read("CHANGELOG.md"), re.M)
    assert first is not None and first[1] == preble.__version__


def test_package_data_names_every_file_of_the_package_that_is_no_module() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    patterns = [f"{package.replace('.', '/')}/{pattern}" for package in data for pattern in data[package]]
    files = [name for name in tracked() if name.startswith("preble/") and Path(name).suffix not in SOURCES]
    left = [name for name in files if not any(fnmatch(name, pattern) for pattern in patterns)]
    assert not left, f"a wheel would lack {left}"


def test_every_extra_is_tested_with_a_wheel_and_pinned() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(wheel_test.EXTRAS) == set(extras) and set(wheel_test.CHEAP) <= set(extras)
    pinned = {re.split(r"==", line)[0] for line in read("constraints.txt").splitlines() if line[:1] not in ("#", "")}
    for extra in set(extras) - {"sglang", "vllm"}:  # those bring environments of their own
        for requirement in extras[extra]:
            name = re.split(r"[\[<>=; ]", requirement)[0].lower()
            assert name in pinned, f"{name}, of the extra {extra}, is not in constraints.txt"


def test_the_classifiers_and_the_wheels_are_for_the_same_pythons() -> None:
    named = {text.rpartition(" ")[2] for text in PROJECT["project"]["classifiers"] if "Python :: 3." in text}
    built = re.findall(r"cp3(\d+)-", PROJECT["tool"]["cibuildwheel"]["build"])
    assert named == {f"3.{minor}" for minor in built}
    assert PROJECT["project"]["requires-python"] == f">=3.{min(map(int, built))}"


@pytest.mark.parametrize("variable", ["", "PREBLE_DEBUG"])
def test_nothing_is_compiled_for_the_builders_machine_alone(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("Cython")
    monkeypatch.chdir(ROOT)
    if variable:
        monkeypatch.setenv(variable, "1")
    compile_args, link_args = load(ROOT / "setup.py").compile_flags()
    assert not [flag for flag in (*compile_args, *link_args) if flag.startswith(("-march", "-mtune", "-mcpu", "-mavx"))]


@pytest.mark.parametrize("argument", ["bdist_wheel", "--inplace"])
def test_what_is_installed_has_no_debug_information_and_no_symbols(
    argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("Cython")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["setup.py", argument])
    compile_args, link_args = load(ROOT / "setup.py").compile_flags()
    assert "-g0" in compile_args and "-g" not in compile_args
    assert ("-Wl,--strip-all" in link_args) == (argument != "--inplace" and sys.platform == "linux")


def test_a_debug_build_keeps_both(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("Cython")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PREBLE_DEBUG", "1")
    compile_args, link_args = load(ROOT / "setup.py").compile_flags()
    assert "-g" in compile_args and "-g0" not in compile_args and not link_args


def test_the_trees_alone_are_optimised_for_speed_whatever_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("Cython")
    monkeypatch.chdir(ROOT)
    setup = load(ROOT / "setup.py")
    tree, other = Path("preble", "_core", "tree", "nodes.pyx"), Path("preble", "_cost.pyx")
    assert setup.flags_of(tree, ["-O2", "-g0"]) == ["-O2", "-g0", "-O3"] and setup.flags_of(other, ["-O2"]) == ["-O2"]
    assert setup.flags_of(tree, ["-O1", "-g"]) == ["-O1", "-g"]


def test_machine_code_for_one_processor_is_found() -> None:
    wheel_test.check_machine_code("a.so", b"GNU C17 -mtune=generic -march=x86-64 -O3")
    with pytest.raises(AssertionError, match="no note"):
        wheel_test.check_machine_code("a.cpython-311-x86_64-linux-gnu.so", b"stripped of it")
    with pytest.raises(AssertionError, match="skylake-avx512"):
        wheel_test.check_machine_code("a.so", b"GNU C17 -march=skylake-avx512 -O3")
