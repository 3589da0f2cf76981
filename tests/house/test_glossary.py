"""The glossary is short, a line a term, and names what there is."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

TERMS_MAX = 50
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "glossary.md").read_text().split("\n")
    if line.startswith("| ") and not line.startswith("| term")
]


def test_terms_are_few_and_each_stands_once() -> None:
    terms = [term for row in ROWS for term in row[0].split(", ")]
    assert 20 < len(ROWS) <= TERMS_MAX
    assert len(terms) == len(set(terms))
    assert all(len(row) == 3 and all(row) for row in ROWS), "term, what it means here, its name elsewhere"


def test_what_the_glossary_names_is_in_the_code() -> None:
    sources = (path for path in (ROOT / "preble").rglob("*") if path.suffix in {".py", ".pyx", ".pxd"})
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources)))
    named = {word for row in ROWS for quoted in re.findall(r"`([^`]+)`", row[1]) for word in re.findall(r"\w+", quoted)}
    assert named and named <= words, named - words
