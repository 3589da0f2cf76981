"""What explanations run beside a writer reads a node's fields by atomic loads alone. Owns the list of those files.

A field read twice, or plainly, may change in between: ThreadSanitizer sees that only if its threads meet there.
"""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

# Files of which readers run all functions.
READERS = ("_placement/e2.pyx", "_placement/copy_credits.pxd", "_placement/redirects.pyx")
FIELD = re.compile(r"(\w*\(&)?node_at\([^()]*\)\.\w+")


def plain_reads(text: str) -> list[str]:
    """Reads of a node's field that no load does."""
    return [found[0] for found in FIELD.finditer(text) if not (found[1] or "").startswith("load")]


@pytest.mark.parametrize("name", READERS)
def test_what_readers_run_loads_the_fields_of_nodes(name: str) -> None:
    """Regression: `credited_node` read a run that a split replaces."""
    text = (ROOT / "preble" / name).read_text()
    assert FIELD.search(text), "no field of a node is read here any more"
    assert not plain_reads(text)


def test_a_plain_read_is_seen() -> None:
    assert plain_reads("while load32(&node_at(t, i).parent) != run_end(node_at(t, above).run):") == [
        "node_at(t, above).run"
    ]
