"""Style as a test: sizes, opening docstrings, left-over marks, machine paths, dead modules. Runs nothing."""

from __future__ import annotations

import ast
import re
import subprocess
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
RETIRED = re.compile(
    "|".join(
        rf"(?<!\w)(?:{line})(?!\w)"
        for line in (Path(__file__).parent / "retired_names.txt").read_text().split("\n")
        if line and not line.startswith("#")
    )
)
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


def functions_of(path: Path) -> list[tuple[str, int]]:
    """(name, lines) of every function; Cython's are found by indentation, Python's by its parser."""
    if path.suffix in {".py", ".pyi"}:
        nodes = [
            n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        return [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in nodes]
    lines = path.read_text().split("\n")
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
    text = path.read_text()
    if path.suffix == ".py":
        return bool(ast.get_docstring(ast.parse(text)))
    directives = re.compile(r"(#\s*(cython|distutils)\s*:[^\n]*\n|\s*\n)*")
    rest = text[directives.match(text).end() :]
    return rest.startswith(('"""', "# ", 'r"""'))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_lines_fit_the_page(path: Path) -> None:
    long = [n for n, line in enumerate(path.read_text().split("\n"), 1) if len(line) > LINE_CHARS_MAX]
    assert not long, f"{name_of(path)}: lines longer than {LINE_CHARS_MAX} characters: {long}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_fit_the_screen(path: Path) -> None:
    long = [(name, size) for name, size in functions_of(path) if size > FUNCTION_LINES_MAX]
    assert not long, f"{name_of(path)}: functions longer than {FUNCTION_LINES_MAX} lines: {long}"


@pytest.mark.parametrize("path", [p for p in SOURCES if PREBLE in p.parents], ids=name_of)
def test_files_stay_readable(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= FILE_LINES_MAX, f"{name_of(path)} has {lines} lines; split it by what its parts own"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_open_with_what_they_own(path: Path) -> None:
    assert opens_with_words(path), f"{name_of(path)} must open with a docstring: what it owns and what it does not"


def test_no_marks_are_left_over() -> None:
    found = [f"{name_of(p)}:{n}" for p in FILES for n, line in numbered_lines(p) if MARKS.search(line)]
    assert not found, f"finish or file these: {found}"


def test_no_merge_markers() -> None:
    found = [f"{name_of(p)}:{n}" for p in FILES for n, line in numbered_lines(p) if MERGE_MARKER.match(line.lstrip())]
    assert not found, f"a merge left these: {found}"


def test_retired_names_stay_away() -> None:
    shown = [p for p in FILES if PREBLE in p.parents and p.suffix in CODE | {".js", ".css", ".html"}]
    found = [f"{name_of(p)}:{n} {m[0]}" for p in shown for n, line in numbered_lines(p) if (m := RETIRED.search(line))]
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
    found = [f"{name_of(p)}:{n}" for p in FILES for n, line in numbered_lines(p) if MACHINE_PATH.search(line)]
    assert not found, f"paths of one machine: {found}"


def numbered_lines(path: Path) -> list[tuple[int, str]]:
    """The numbered lines of a text file; none of a binary one."""
    try:
        return list(enumerate(path.read_text(encoding="utf-8").split("\n"), 1))
    except UnicodeDecodeError:
        return []


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_no_bare_except(path: Path) -> None:
    nodes = ast.walk(ast.parse(path.read_text()))
    bare = [node.lineno for node in nodes if isinstance(node, ast.ExceptHandler) and node.type is None]
    assert not bare, f"{name_of(path)}: bare except on lines {bare}; name what is expected"


def test_every_module_is_used() -> None:
    text = {path: path.read_text() for path in [*SOURCES, ROOT / "pyproject.toml"]}
    dead = [
        name_of(path)
        for path in SOURCES
        if PREBLE in path.parents and path.suffix in {".py", ".pyx"} and not is_used(path, text)
    ]
    assert not dead, f"modules nobody imports: {dead}"


def is_used(module: Path, text: dict[Path, str]) -> bool:
    """True if some other file names this module in an import, in the table of public names, or as an entry point."""
    if module.name in {"__init__.py", "__main__.py"}:
        return True
    named = re.compile(rf"import[^\n]*\b{module.stem}\b|from[^\n]*\b{module.stem}\b|[\"'.]{module.stem}[\"':]")
    own = {module, module.with_suffix(".pxd"), module.with_suffix(".pyi")}
    return any(named.search(body) for path, body in text.items() if path not in own)


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
