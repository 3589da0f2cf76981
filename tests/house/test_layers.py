"""The house rule as a test: a folder imports only what stands below it, and below the engines nobody touches the world.

LAYERS is the house of docs/design.md, bottom first. Imports inside functions and under TYPE_CHECKING count like any
other, and so do Cython's cimports.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PREBLE = ROOT / "preble"

# Folders, and the files at the top of preble/, by layer. A folder stands where the longest name here that begins its
# path does.
LAYERS = (
    ("errors", "lazy_typing", "types", "config", "multimodal"),
    ("_core", "costs"),
    ("_radix", "_cost", "clock"),
    ("_kv_index", "policies", "batching", "transport", "launch", "workloads"),
    ("_placement", "local"),
    ("_snapshot",),
    ("scheduling",),
    ("scheduler", "recording"),
    ("router", "engines"),
    ("worker", "sim"),
    ("gateway",),
    ("integrations",),
    ("cli",),
)
FOLDERS_MAX = 20
TOP_FILES_MAX = 16
FOLDER_FILES_MAX = 25
PRIVATE_READS_MAX = 10
# Below these: nothing that waits, talks or differs from run to run. `clock` alone may ask the machine for the time.
WORLD_BEGINS = {
    "transport",
    "launch",
    "workloads",
    "router",
    "engines",
    "worker",
    "sim",
    "gateway",
    "integrations",
    "cli",
}
WORLDLY = {"asyncio", "datetime", "http", "multiprocessing", "secrets", "select", "selectors", "socket", "subprocess"}
WORLDLY |= {"time", "urllib", "uuid", "zmq"}

LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
SOURCES = sorted(path for path in PREBLE.rglob("*") if path.suffix in {".py", ".pyx", ".pxd", ".pyi"})


def module_of(path: Path) -> str:
    """`preble/engines/base.py` -> "engines.base"; a package's own `__init__` is the package, preble's is ""."""
    parts = list(path.relative_to(PREBLE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def place_of(module: str) -> str:
    """The folder, or the file at the top of preble/, that a module lies in."""
    return module.split(".")[0]


def layer_of(module: str) -> int:
    """The layer a module stands on; fails for one that was never given a layer."""
    place = place_of(module)
    assert place in LAYER_OF, f"preble.{module} has no layer: add {place!r} to LAYERS in {Path(__file__).name}"
    return LAYER_OF[place]


MODULES = {module_of(path) for path in SOURCES}
INSIDE = [path for path in SOURCES if module_of(path)]


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """(level, dotted name) of every import; level 0 is absolute. A name from `from x import y` arrives as "x.y"."""
    if path.suffix in {".pyx", ".pxd"}:
        yield from cython_imports(path.read_text())
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = f"{node.module}." if node.module else ""
            yield from ((node.level, base + alias.name) for alias in node.names)


def cython_imports(text: str) -> Iterator[tuple[int, str]]:
    """The same for Cython, whose `cimport` Python's parser does not know."""
    for match in re.finditer(r"^[ \t]*from\s+(\.*)([\w.]*)\s+c?import\s+(\([^)]*\)|[^\n#]+)", text, re.M):
        dots, base, names = match.groups()
        for name in re.findall(r"(\w+)(?:\s+as\s+\w+)?", names):
            yield len(dots), f"{base}.{name}" if base else name
    for match in re.finditer(r"^[ \t]*c?import\s+([^\n#]+)", text, re.M):
        yield from ((0, name.split()[0]) for name in match.group(1).split(","))


@cache
def preble_imports(path: Path) -> frozenset[str]:
    """The modules of preble that a file imports, as names under `preble` ("" is the package's face)."""
    module = module_of(path)
    package = module.split(".") if path.stem == "__init__" and module else module.split(".")[:-1]
    found = set()
    for level, name in imported_names(path):
        if name.endswith("__version__"):
            continue  # the one name that the face itself owns
        if level:
            kept = package[: len(package) - (level - 1)]
            found.add(resolve(".".join([*kept, name])))
        elif name.split(".")[0] == "preble":
            found.add(resolve(name.partition(".")[2]))
    return frozenset(found - {module})


def resolve(name: str) -> str:
    """Cut an imported name down to the module that holds it."""
    parts = name.split(".")
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts)


def may_import(importer: str, imported: str) -> bool:
    """True if the house allows this import: what is below, what is beside, what is in the same folder."""
    return layer_of(imported) <= layer_of(importer)


def ordered(graph: dict[str, set[str]]) -> None:
    """Fail, with the circle, if the graph has one."""
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_imports_point_down() -> None:
    wrong = {}
    for path in INSIDE:
        module = module_of(path)
        up = sorted(name for name in preble_imports(path) if not name or not may_import(module, name))
        if up:
            wrong[f"{module} (layer {layer_of(module)})"] = up
    assert not wrong, f"these may not import what stands above them; '' is the package's face: {wrong}"


def test_no_two_folders_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for path in INSIDE:
        place = place_of(module_of(path))
        graph.setdefault(place, set()).update(
            place_of(name) for name in preble_imports(path) if place_of(name) != place
        )
    ordered(graph)


def test_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for path in INSIDE:
        graph.setdefault(module_of(path), set()).update(preble_imports(path))
    ordered(graph)


def test_the_house_has_few_folders_and_none_is_crowded() -> None:
    folders = {place_of(module_of(path)) for path in INSIDE if path.parent != PREBLE}
    assert folders <= set(LAYER_OF)
    assert len(folders) <= FOLDERS_MAX
    counts: dict[Path, int] = {}
    for path in [*PREBLE.rglob("*"), *(ROOT / "tests").rglob("*"), *(ROOT / "benchmarks").rglob("*")]:
        if path.is_file() and path.suffix not in {".so", ".pyd", ".pyc", ".c", ".cpp"}:
            counts[path.parent] = counts.get(path.parent, 0) + 1
    crowded = {str(folder): count for folder, count in counts.items() if count > FOLDER_FILES_MAX}
    assert not crowded
    assert counts[PREBLE] <= TOP_FILES_MAX


def test_modules_keep_to_what_others_show() -> None:
    found = [
        f"{path.relative_to(PREBLE)}: {read}" for path in INSIDE if path.suffix == ".py" for read in private_reads(path)
    ]
    assert len(found) <= PRIVATE_READS_MAX, found


def private_reads(path: Path) -> list[str]:
    """Private names of other modules that this one reads: `other._name`, and `from .other import _name`.

    An attribute that the module itself sets on `self`, or defines, is its own. The underscored methods of named tuples
    (`_replace`, `_asdict`, `_make`) and `os._exit` are public by their documentation.
    """
    documented = {"_replace", "_asdict", "_make", "_fields", "_exit"}
    nodes = list(ast.walk(ast.parse(path.read_text())))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node)
    }
    found = []
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not of_self(node):
            if node.attr not in own | documented:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("preble")):
            names = (alias.name for alias in node.names if is_private(alias.name))
            found += [f"line {node.lineno}: import {name}" for name in names if name not in LAYER_OF]
    return found


def is_private(name: str) -> bool:
    """True for `_name`, false for `__name__`."""
    return name.startswith("_") and not name.startswith("__")


def of_self(node: ast.Attribute) -> bool:
    """True for `self.x`, `cls.x` and `super().x`."""
    if isinstance(node.value, ast.Call):
        return isinstance(node.value.func, ast.Name) and node.value.func.id == "super"
    return isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}


def test_class_names_are_used_once() -> None:
    seen: dict[str, list[str]] = {}
    for path in INSIDE:
        if path.suffix in {".py", ".pyx"}:
            for name in re.findall(r"^\s*(?:cdef\s+)?class\s+(\w+)", path.read_text(), re.M):
                seen.setdefault(name, []).append(str(path.relative_to(PREBLE)))
    assert not {name: paths for name, paths in seen.items() if len(paths) > 1}


@pytest.mark.parametrize(
    "path",
    [p for p in INSIDE if place_of(module_of(p)) not in WORLD_BEGINS and module_of(p) != "clock"],
    ids=lambda p: str(p.relative_to(PREBLE)),
)
def test_time_chance_and_sockets_are_passed_in_below_the_world(path: Path) -> None:
    worldly = sorted(name for level, name in imported_names(path) if not level and name.split(".")[0] in WORLDLY)
    assert not worldly, f"{path.name} imports {worldly}; there the world is an argument"
    global_random = re.findall(r"\brandom\.(?!Random\b|default_rng\b)[a-z]\w*\(", path.read_text())
    assert not global_random, f"{path.name} draws from the global random state: {global_random}"


def test_layer_rules_catch_what_they_are_for() -> None:
    assert may_import("scheduler", "policies.base")
    assert not may_import("policies.base", "scheduler")
    assert may_import("engines.base", "types")
    assert not may_import("transport.wire", "engines.base")
    assert may_import("worker.process", "engines.base")
    names = set(cython_imports("from ._radix cimport Tree, Node as N\nfrom libc.stdint cimport int32_t\nimport zmq\n"))
    assert {(1, "_radix.Tree"), (0, "libc.stdint.int32_t"), (0, "zmq")} <= names
