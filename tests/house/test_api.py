"""The API reference is today's and complete, and what is public says what a caller must know: each argument, what comes
back, what is raised, from which threads it may be called, what it costs."""

from __future__ import annotations

import re
from typing import Any

import pytest

import preble

pytest.importorskip("griffe", reason="the reference is made by griffe")

from tests.house import api_page

CLASSES = [name for name in preble.__all__ if name != "TokenIds"]


def methods() -> list[Any]:
    """Every public method and property of a public class, with the class."""
    found = [(name, member) for name in CLASSES for member in api_page.callables(api_page.found(name))]
    return [pytest.param(name, member, id=f"{name}.{member.name}") for name, member in found]


METHODS = methods()


def refers(doc: str) -> bool:
    """Whether it leaves what it does not say to another docstring."""
    ways = (r"\bAs `[\w.]+`", "Arguments are those of `", "other arguments hold", "other arguments are `", "as for `")
    return bool(re.search("|".join(ways), doc))


def named_in(name: str, doc: str) -> bool:
    return bool(re.search(rf"`[^`]*\b{name}\b[^`]*`|(?<![\w`]){name}: ", doc))


def test_the_page_is_today_s() -> None:
    written = api_page.PAGE.read_text(encoding="utf-8")
    assert written == api_page.page(), "python -m tests.house.api_page writes it anew"


def test_every_public_name_is_on_the_page_once() -> None:
    names = [name for group in api_page.GROUPS.values() for name in group]
    assert len(names) == len(set(names))
    assert {name for name in names if ":" not in name} == set(preble.__all__)


@pytest.mark.parametrize("name", CLASSES)
def test_a_public_class_says_what_each_argument_and_field_is(name: str) -> None:
    kind = api_page.found(name)
    doc = api_page.doc_of(kind)
    arguments = [one.name.lstrip("*") for one in api_page.maker(name)]
    fields = [member.name for member in api_page.members(kind) if api_page.is_field(member)]
    if name.endswith("Stats"):
        fields = []  # their names say it; what does not speak for itself is in the docstring
    missing = [one for one in dict.fromkeys([*arguments, *fields]) if not named_in(one, doc)]
    assert not missing, f"{name}: the docstring says nothing of {missing}"


@pytest.mark.parametrize("name", ["GlobalScheduler", "Router", "LocalScheduler", "Lease", "CostModel", "Policy",
                                  "Decision", "Match", "ManualClock"])  # fmt: skip
def test_a_public_class_says_which_threads_may_use_it(name: str) -> None:
    assert re.search(r"[Tt]hread|asyncio loop", api_page.doc_of(api_page.found(name)))


@pytest.mark.parametrize(("name", "member"), METHODS)
def test_a_public_method_has_every_part(name: str, member: Any) -> None:
    doc = api_page.doc_of(member)
    assert doc, f"{name}.{member.name} has no docstring"
    if not member.is_function:
        return
    arguments = [one.name.lstrip("*") for one in member.parameters if one.name not in ("self", "cls")]
    missing = [one for one in arguments if not named_in(one, doc)]
    assert not missing or refers(doc), f"{name}.{member.name} says nothing of {missing}"
    if str(member.returns) not in ("None", "Self"):
        assert re.search(r"[Rr]eturns|gives the ", doc), f"{name}.{member.name} does not say what it returns"
    assert re.search(r"[Rr]aises?\b", doc) or refers(doc), f"{name}.{member.name} does not say what it raises"
    assert re.search(r"O\(|Waits for", doc), f"{name}.{member.name} does not say what it costs"


@pytest.mark.parametrize(
    "gone",
    [
        "Returns a Match. Raises X. O(1).",
        "`x`: a number. Raises X. O(1).",
        "`x`: a number. Returns it. O(1).",
        "`x`: a number. Returns it. Raises X.",
    ],
)
def test_a_missing_part_is_found(gone: str) -> None:
    class Kind:
        value = "positional or keyword"

    class Argument:
        name, kind = "x", Kind

    class Docstring:
        value = gone

    class Member:
        name, parameters, returns, docstring, is_function = "call", [Argument], "int", Docstring, True

    with pytest.raises(AssertionError, match=r"Thing\.call"):
        test_a_public_method_has_every_part("Thing", Member)
