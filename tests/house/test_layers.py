"""The house rule as a test: imports point down, siblings on floor 4 stay apart, the lower floors touch no world.

The floors are those of docs/design.md. Imports inside functions and under TYPE_CHECKING count like any other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PREBLE = ROOT / "preble"

# A package's modules stand where the package does, and `local_queue` stands where `local` does.
FLOORS = [
    {"errors", "types", "_clock", "clock", "content", "config"},
    {
        *("_atomic", "_guard", "_epochs", "_memory", "_compare", "_tokens", "_layout", "_table", "_retired"),
        "_victims",
        *("_nodes", "_tree", "_slots", "_audit", "_radix", "_cost", "_trust"),
        *("_msgpack", "_decode", "_events", "_block_table", "_block_layout", "_block_places", "_block_store"),
        "_blocks",
    },
    {"policy", "policies", "metrics", "_groups", "_steers", "_e2", "_gauges"},
    {
        "scheduler",
        "snapshot",
        "_snapshot",
        "records",
        "shadow",
        "leases",
        "truth",
        "mirror",
        "shifting",
        "shifts",
        "membership",
        "scaling",
        "hottest",
        "_handover",
        "local",
        "_batch",
        "_answers",
        "_booking",
        "calibration",
        "_hot",
    },
    {"transport", "engines", "sim", "workloads"},
    {
        "router",
        "worker",
        "gateway",
        "cli",
        "console",
        "demo",
        "study",
        "simulate",
        "profiler",
        "explain",
        "launcher",
        "up",
        "keygen",
        "tiny_model",
        "engine_choice",
        "attach",
        "top",
        "integrations",
    },
]
EDGES = 4
# On floor 4 a package may import itself, and of its siblings only these.
EDGE_EXCEPTIONS = {
    ("engines", "transport.messages"),
    ("engines", "transport.wire"),
    ("sim", "workloads"),
    ("sim", "engines.simulated"),
}
# What SGLang and vLLM say on their own sockets is read in one place, for embedded engines and for running servers.
EDGE_EXCEPTIONS |= {
    ("engines", "transport." + name) for name in ("kv_events", "kv_feed", "namespaces", "server_facts", "http_server")
}
# Below floor 4: nothing that waits, talks or differs from run to run. `clock` alone may ask the machine for the time.
WORLDLY = {"asyncio", "datetime", "http", "multiprocessing", "secrets", "select", "selectors", "socket", "subprocess"}
WORLDLY |= {"time", "urllib", "uuid", "zmq"}

SOURCES = sorted(
    path for path in PREBLE.rglob("*") if path.suffix in {".py", ".pyx", ".pxd", ".pyi"} and path.name != "__init__.pyi"
)


def module_of(path: Path) -> str:
    """`preble/engines/base.py` -> "engines.base"; the package's own `__init__` is ""."""
    parts = list(path.relative_to(PREBLE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> int:
    """The floor a module stands on; fails for one that was never given a floor."""
    top = module.split(".")[0]
    name = top
    while name:
        for number, names in enumerate(FLOORS):
            if name in names:
                return number
        name = name.rpartition("_")[0]
    raise AssertionError(f"preble.{module} has no floor: add {top!r} to FLOORS in tests/house/test_layers.py")


MODULES = {module_of(path) for path in SOURCES}


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


def preble_imports(path: Path) -> set[str]:
    """The modules of preble that a file imports, as names under `preble` ("" is the package's face)."""
    module = module_of(path)
    package = module.split(".") if path.name == "__init__.py" and module else module.split(".")[:-1]
    found = set()
    for level, name in imported_names(path):
        if name.endswith("__version__"):
            continue  # the one name that the face itself owns
        if level:
            kept = package[: len(package) - (level - 1)]
            found.add(resolve(".".join([*kept, name])))
        elif name.split(".")[0] == "preble":
            found.add(resolve(name.partition(".")[2]))
    return found - {module}


def resolve(name: str) -> str:
    """Cut an imported name down to the module that holds it."""
    parts = name.split(".")
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts)


def may_import(importer: str, imported: str) -> bool:
    """True if the house allows this import."""
    here, there = floor_of(importer), floor_of(imported)
    if here == there == EDGES:
        own, other = importer.split(".")[0], imported.split(".")[0]
        excused = any(
            own == package and (imported == name or imported.startswith(f"{name}."))
            for package, name in EDGE_EXCEPTIONS
        )
        return own == other or excused
    return there <= here


@pytest.mark.parametrize("path", [p for p in SOURCES if module_of(p)], ids=lambda p: str(p.relative_to(PREBLE)))
def test_imports_point_down(path: Path) -> None:
    module = module_of(path)
    wrong = sorted(name for name in preble_imports(path) if not name or not may_import(module, name))
    assert not wrong, f"preble.{module} (floor {floor_of(module)}) may not import {wrong}; '' is the package's face"


def test_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        if module_of(path):
            graph.setdefault(module_of(path), set()).update(preble_imports(path))
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_the_cost_model_may_see_the_tree_and_never_the_reverse() -> None:
    for path in SOURCES:
        if module_of(path) and floor_of(module_of(path)) == 1 and module_of(path) != "_cost":
            assert preble_imports(path).isdisjoint({"_cost", "_e2"}), f"{path.name} imports what stands on it"


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCES if module_of(p) and floor_of(module_of(p)) < EDGES and module_of(p) != "clock"],
    ids=lambda p: str(p.relative_to(PREBLE)),
)
def test_time_chance_and_sockets_are_passed_in_below_floor_4(path: Path) -> None:
    worldly = sorted(name for level, name in imported_names(path) if not level and name.split(".")[0] in WORLDLY)
    assert not worldly, f"{path.name} imports {worldly}; below floor {EDGES} the world is an argument"
    global_random = re.findall(r"\brandom\.(?!Random\b|default_rng\b)[a-z]\w*\(", path.read_text())
    assert not global_random, f"{path.name} draws from the global random state: {global_random}"


def test_floor_rules_catch_what_they_are_for() -> None:
    assert may_import("scheduler", "policy")
    assert not may_import("policy", "scheduler")
    assert may_import("engines.base", "types")
    assert not may_import("transport.wire", "engines.base")
    assert may_import("worker", "engines.base")
    names = set(cython_imports("from ._radix cimport Tree, Node as N\nfrom libc.stdint cimport int32_t\nimport zmq\n"))
    assert {(1, "_radix.Tree"), (0, "libc.stdint.int32_t"), (0, "zmq")} <= names
