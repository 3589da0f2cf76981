"""Style as a test: sizes, opening docstrings, left-over marks, machine paths, dead modules. Runs nothing."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PREBLE = ROOT / "preble"
LINE_CHARS_MAX = 120
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 900
CODE = {".py", ".pyx", ".pxd", ".pyi"}
# Spelled in halves, so that this file does not contain what it looks for.
MARKS = re.compile(
    r"\b(" + "|".join(a + b for a, b in [("TO", "DO"), ("FIX", "ME"), ("XX", "X"), ("HA", "CK")]) + r")\b"
)
# Names that meant two things, or that nobody of this field would look for; docs/glossary.md has what they became.
_RETIRED_LINES = (Path(__file__).parent / "retired_names.txt").read_text().split("\n")
RETIRED = re.compile(rf"(?<!\w)(?:{'|'.join(line for line in _RETIRED_LINES if line and line[0] != '#')})(?!\w)")
# Calls that fail a test by themselves; and others' that do, beside the helpers among the tests that assert.
FAILING_CALL = re.compile(r"raises|warns|fail|check|assert_\w+|run_state_machine_as_test|expect")
MERGE_MARKER = re.compile(r"<{7} |>{7} |={7}$|[|]{7} ")
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|farm|root|home|Users)/\w")


def project_files() -> list[Path]:
    """Every text file git knows or would take; in an unpacked source distribution, every file that is not built."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    names = listed.stdout.split("\n") if listed.returncode == 0 else []
    paths = [ROOT / name for name in names if name] or [p for p in ROOT.rglob("*") if ".venv" not in p.parts]
    return sorted(path for path in paths if path.is_file())


FILES = project_files()
SOURCES = [path for path in FILES if path.suffix in CODE]
PYTHON = [path for path in FILES if path.suffix == ".py"]


def name_of(path: Path) -> str:
    """A path as the reader types it."""
    return str(path.relative_to(ROOT))


@cache
def text_of(path: Path) -> str:
    """A file's text; "" of a binary one."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """A Python file's module, functions and handlers. Looks into statements alone: in no expression is one of them."""
    kept: list[ast.AST] = []
    left: list[ast.AST] = [ast.parse(text_of(path))]
    while left:
        node = left.pop()
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ExceptHandler):
            kept.append(node)
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            part = getattr(node, name, None)
            left += part if isinstance(part, list) else []
    return kept


def functions_of(path: Path) -> list[tuple[str, int]]:
    """(name, lines) of every function; Cython's are found by indentation, Python's by its parser."""
    if path.suffix in {".py", ".pyi"}:
        nodes = [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        return [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in nodes]
    lines = text_of(path).split("\n")
    opening = re.compile(r"\s*(async\s+)?(def|cdef|cpdef)\s(?!class\b)[^=]*\(")
    starts = [i for i, line in enumerate(lines) if opening.match(line)]
    return [(lines[i].strip(), body_lines(lines, i)) for i in starts]


def body_lines(lines: list[str], start: int) -> int:
    """Lines of the indented block that the line `start` opens, its trailing blank lines left out."""
    indent = len(lines[start]) - len(lines[start].lstrip())
    last, depth = start, 0
    for i in range(start, len(lines)):
        line = lines[i]
        inside = len(line) - len(line.lstrip()) > indent
        if i > start and line.strip() and not inside and depth <= 0 and not line.lstrip().startswith(")"):
            break
        depth += line.count("(") - line.count(")")
        if line.strip():
            last = i
    return last - start + 1


def opens_with_words(path: Path) -> bool:
    """True if the file opens with a docstring; compiled sources and stubs may open with a comment instead."""
    if path.suffix == ".py":
        module = nodes_of(path)[0]
        return isinstance(module, ast.Module) and bool(ast.get_docstring(module))
    text = text_of(path)
    directives = re.compile(r"(#\s*(cython|distutils)\s*:[^\n]*\n|\s*\n)*")
    rest = text[directives.match(text).end() :]
    return rest.startswith(('"""', "# ", 'r"""'))


def test_lines_fit_the_page() -> None:
    long = [f"{name_of(p)}:{n}" for p in SOURCES for n, line in numbered_lines(p) if len(line) > LINE_CHARS_MAX]
    assert not long, f"lines longer than {LINE_CHARS_MAX} characters: {long}"


def test_functions_fit_the_screen() -> None:
    long = [(name_of(p), name, size) for p in SOURCES for name, size in functions_of(p) if size > FUNCTION_LINES_MAX]
    assert not long, f"functions longer than {FUNCTION_LINES_MAX} lines: {long}"


def test_files_stay_readable() -> None:
    long = {name_of(p): text_of(p).count("\n") for p in SOURCES if PREBLE in p.parents}
    long = {name: lines for name, lines in long.items() if lines > FILE_LINES_MAX}
    assert not long, f"split these by what their parts own: {long}"


def test_files_open_with_what_they_own() -> None:
    mute = [name_of(p) for p in SOURCES if not opens_with_words(p)]
    assert not mute, f"these must open with a docstring: what the file owns and what it does not: {mute}"


def test_no_marks_are_left_over() -> None:
    found = [f"{name_of(path)} {one[0]}" for path in FILES for one in MARKS.finditer(text_of(path))]
    assert not found, f"finish or file these: {found}"


def test_no_merge_markers() -> None:
    found = [f"{name_of(p)}:{n}" for p in FILES for n, line in numbered_lines(p) if MERGE_MARKER.match(line.lstrip())]
    assert not found, f"a merge left these: {found}"


def test_retired_names_stay_away() -> None:
    shown = [p for p in FILES if PREBLE in p.parents and p.suffix in CODE | {".js", ".css", ".html"}]
    found = [f"{name_of(path)} {one[0]}" for path in shown for one in RETIRED.finditer(text_of(path))]
    assert not found, f"docs/glossary.md has other words for these: {found}"


@pytest.mark.parametrize(
    "gone", ["told", "_told_at", "Steer", "is_mirrored", "hottest", "watched", "TrustBook", "facts_of"]
)
def test_retired_names_are_found(gone: str) -> None:
    assert RETIRED.search(f"x = {gone}(1)")


@pytest.mark.parametrize("fine", ["next_sibling", "GaugeMetricFamily", "dashboard", "shift_count", "toldo"])
def test_names_of_the_field_are_not_retired(fine: str) -> None:
    assert not RETIRED.search(f"x = {fine}(1)")


def test_no_machine_paths() -> None:
    found = [f"{name_of(path)} {one[0]}" for path in FILES for one in MACHINE_PATH.finditer(text_of(path))]
    assert not found, f"paths of one machine: {found}"


def numbered_lines(path: Path) -> list[tuple[int, str]]:
    """The numbered lines of a text file; one empty line of a binary one."""
    return list(enumerate(text_of(path).split("\n"), 1))


def test_no_bare_except() -> None:
    found = [(path, node) for path in PYTHON for node in nodes_of(path) if isinstance(node, ast.ExceptHandler)]
    bare = [f"{name_of(path)}:{node.lineno}" for path, node in found if node.type is None]
    assert not bare, f"bare except; name what is expected: {bare}"
    assert found, "no except at all was found"


def test_every_test_can_fail() -> None:
    """It asserts, expects an exception, or calls something that does: what only runs through shows little."""
    tests = [path for path in PYTHON if ROOT / "tests" in path.parents]
    functions = [
        (f"{name_of(path)}: {node.name}", node.name, *what_fails(node))
        for path in tests
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    failing = {name for _, name, fails, _ in functions if fails}
    tame = [
        where
        for where, name, fails, called in functions
        if name.startswith("test_") and not fails and not called & failing
    ]
    assert not tame, f"these assert nothing: {tame}"


def what_fails(function: ast.AST) -> tuple[bool, set[str]]:
    """Whether a function asserts or raises by itself, and the names of what it calls."""
    nodes = list(ast.walk(function))
    functions = [node.func for node in nodes if isinstance(node, ast.Call)]
    called = {one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in functions}
    own = any(isinstance(node, ast.Assert | ast.Raise) for node in nodes)
    return own or any(map(FAILING_CALL.fullmatch, called)), called


@pytest.mark.parametrize(
    ("body", "fails"), [("assert x", True), ("with pytest.raises(E): f()", True), ("f(x).y()", False)]
)
def test_a_test_that_asserts_nothing_is_found(body: str, fails: bool) -> None:
    found, called = what_fails(ast.parse(body))
    assert found is fails and (fails or called == {"f", "y"})


def test_every_module_is_used() -> None:
    """Some other file names it in an import, in the table of public names, or as an entry point."""
    names = {path: names_in(text_of(path)) for path in [*SOURCES, ROOT / "pyproject.toml"]}
    files = Counter(name for found in names.values() for name in found)
    dead = []
    for path in (path for path in SOURCES if PREBLE in path.parents and path.suffix in {".py", ".pyx"}):
        own = (path, path.with_suffix(".pxd"), path.with_suffix(".pyi"))
        if path.stem not in ("__init__", "__main__") and files[path.stem] == sum(
            path.stem in names.get(one, ()) for one in own
        ):
            dead.append(name_of(path))
    assert not dead, f"modules nobody imports: {dead}"


def names_in(text: str) -> set[str]:
    """The words that may name a module: after `import` or `from` on a line, in quotes or after a dot."""
    word = re.compile(r"\b\w+\b")
    found = set(re.findall(r"""(?<=["'.])\w+(?=["':])""", text))
    for line in re.finditer(r"(?:import|from)[^\n]*", text):
        found.update(word.findall(text, line.start() + 4, line.end()))
    return found


def test_a_module_that_nobody_names_is_found() -> None:
    assert names_in("from .a.b import c\nx = d('e:main')\nprefrom f\n") == {"a", "b", "import", "c", "e", "f"}
    assert not names_in('"""Of the module g, and its h."""\ng = 1\n')


def test_the_rule_reads_what_others_write_as_readers_must() -> None:
    """Regression: an explanation read a cost model plainly, which a worker that left took away, and crashed."""
    plain = re.compile(r"(?<!&)(?<!\w)(?:self\.loads\.rows\[[^\]]*\]|row)\.\w+")
    lines = numbered_lines(ROOT / "preble" / "_placement/e2.pyx")
    assert sum("&row." in line for _, line in lines) > 5, "the rule reads rows by another name: look for that"
    assert not [(number, line) for number, line in lines if plain.search(line)]


def test_body_lines_counts_a_cython_function_as_a_reader_does() -> None:
    lines = ["cdef int f(", "    int a,", ") noexcept nogil:", "    return a", "", "", "cdef int g():", "    return 1"]
    assert body_lines(lines, 0) == 4
    assert body_lines(lines, 6) == 2
