"""The public face: its names, its stubs, what `import preble` costs. Behaviour behind the names is tested elsewhere."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import preble

PREBLE = Path(preble.__file__).parent
PUBLIC_NAMES_MAX = 28
COMPILED = sorted(".".join(path.relative_to(PREBLE).with_suffix("").parts) for path in PREBLE.rglob("*.pyx"))
HEAVY = {"numpy", "torch", "transformers", "zmq", "asyncio", "msgpack", "msgspec", "matplotlib", "rich", "dataclasses"}
HEAVY |= {"typing"}
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize("name", preble.__all__)
def test_every_public_name_resolves_to_a_documented_thing(name: str) -> None:
    thing = getattr(preble, name)
    assert thing.__doc__, f"preble.{name} has no docstring"
    assert name in dir(preble)


def test_the_public_face_is_small_and_sorted() -> None:
    assert len(preble.__all__) <= PUBLIC_NAMES_MAX
    assert list(preble.__all__) == sorted(set(preble.__all__))


def test_type_checkers_see_the_names_that_python_sees() -> None:
    tree = ast.parse((PREBLE / "__init__.py").read_text())
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    shown = {
        alias.asname: node.module for node in guard.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    shown.pop("errors")
    assert shown == preble._HOMES


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="Sceduler"):
        preble.Sceduler  # noqa: B018


def test_errors_come_with_the_package() -> None:
    assert issubclass(preble.errors.NoWorkers, preble.errors.PrebleError)


def test_importing_preble_loads_nothing_heavy(run_python: RunPython) -> None:
    code = "import sys; before = set(sys.modules); import preble; print(*sorted(set(sys.modules) - before))"
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    loaded = {name.split(".")[0] for name in result.stdout.split()}
    assert "preble" in loaded
    assert loaded.isdisjoint(HEAVY), f"import preble loads {sorted(loaded & HEAVY)}"


def test_a_first_decision_loads_nothing_that_takes_long(run_python: RunPython) -> None:
    code = (
        "import sys; before = set(sys.modules); import preble\n"
        "preble.GlobalScheduler(['a', 'b']).schedule([1, 2, 3])\n"
        "print(*set(sys.modules) - before)"
    )
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    loaded = {name.split(".")[0] for name in result.stdout.split()}
    assert "preble" in loaded
    assert loaded.isdisjoint(HEAVY | {"re", "enum", "inspect", "contextlib", "functools", "threading"}), sorted(loaded)


def test_a_request_s_life_needs_no_numpy_until_costs_are_fitted(run_python: RunPython) -> None:
    code = """if True:
        import sys, preble
        clock = preble.ManualClock()
        scheduler = preble.GlobalScheduler(["a"], clock=clock)
        for number in range(24):
            decision = scheduler.schedule([1, 2, number])
            clock.advance(0.1)
            scheduler.first_token(decision.request_id)
            clock.advance(0.1)
            scheduler.finish(decision.request_id, output_tokens=8)
        scheduler.stats()
        print("numpy" in sys.modules)
        scheduler.tick()
        print("numpy" in sys.modules)
    """
    result = run_python("-c", code)
    assert result.stdout.split() == ["False", "True"], result.stderr


def source_of(module: str, suffix: str) -> Path:
    """The file of a compiled module, by its dotted name under preble."""
    return PREBLE.joinpath(*module.split(".")).with_suffix(suffix)


def public_members(cls: type) -> set[str]:
    """Public names that a compiled class itself defines, Cython's own machinery left out."""
    return {name for name in vars(cls) if not name.startswith("_")}


def stub_of(module: str) -> dict[str, set[str]]:
    """Public top-level names of a stub, each with its public members (empty for functions and constants)."""
    found: dict[str, set[str]] = {}
    for node in ast.parse(source_of(module, ".pyi").read_text()).body:
        if isinstance(node, ast.ClassDef):
            members = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            members |= {
                n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            }
            found[node.name] = {name for name in members if not name.startswith("_")}
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = set()
    return {name: members for name, members in found.items() if not name.startswith("_")}


def compiled_names(module: str) -> dict[str, set[str]]:
    """The same for the compiled module: what it defines, not what it imports."""
    text = source_of(module, ".pyx").read_text()
    defined = set(re.findall(r"^(?:cdef class|class|def|cpdef\s+\w+)\s+(\w+)", text, re.M))
    loaded = importlib.import_module(f"preble.{module}")
    names = {name for name in defined if not name.startswith("_") and hasattr(loaded, name)}
    return {
        name: public_members(getattr(loaded, name)) if isinstance(getattr(loaded, name), type) else set()
        for name in names
    }


@pytest.mark.parametrize("module", COMPILED)
def test_stubs_say_what_the_compiled_module_has(module: str) -> None:
    real = compiled_names(module)
    if not real:
        assert not source_of(module, ".pyi").exists(), f"{module} shows nothing to Python and needs no stub"
        return
    stub = stub_of(module)
    assert set(real) <= set(stub), f"{module}.pyi lacks {sorted(set(real) - set(stub))}"
    for name, members in real.items():
        missing, extra = members - stub[name], stub[name] - members
        assert not missing, f"{module}.pyi: {name} lacks {sorted(missing)}"
        assert not extra, f"{module}.pyi: {name} promises {sorted(extra)}, which the module does not have"
