"""What stands in for `dataclasses` and `typing`: the same classes under both decorators, compared part by part."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
import sys
import threading
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import preble
from preble import lazy_typing

PREBLE = Path(preble.__file__).parent
SOURCE = '''
from __future__ import annotations

Outside = int


@dataclass(frozen=True, slots=True)
class Frozen:
    """Has all kinds of defaults."""

    name: str
    size: Outside = 3
    parts: list[str] = field(default_factory=list)
    mode: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("size")

    @property
    def double(self) -> int:
        return 2 * self.size


@dataclass(slots=True)
class Changing:
    """Can be changed, and so has no hash."""

    name: str
    parts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeywordsOnly:
    """Takes nothing by place."""

    low: float = 0.0
    high: float = 1.0


@dataclass(slots=True, eq=False)
class ByIdentity:
    """Equal to itself only."""

    name: str = ""


@dataclass(frozen=True, slots=True)
class Empty:
    """Has no fields."""


class Outer:
    @dataclass(frozen=True, slots=True)
    class Inner:
        """Stands in another class."""

        number: int = 1
'''
OBJECTS: dict[str, Callable[[Any], Any]] = {
    "Frozen": lambda cls: cls("a", parts=["x"]),
    "Changing": lambda cls: cls("a"),
    "KeywordsOnly": lambda cls: cls(high=2.0),
    "ByIdentity": lambda cls: cls("a"),
    "Empty": lambda cls: cls(),
    "Outer.Inner": lambda cls: cls(5),
}


def module_with(name: str, names: dict[str, Any]) -> ModuleType:
    """The classes above under a decorator, as a module that pickle finds."""
    module = ModuleType(name)
    vars(module).update(names)
    sys.modules[name] = module
    exec(SOURCE, vars(module))
    return module


@pytest.fixture
def both() -> Iterator[tuple[ModuleType, ModuleType]]:
    """(ours, the original), new for each test: nothing has been made that is made later."""
    ours = {name: vars(lazy_typing)[name] for name in ("dataclass", "field", "Literal")}
    originals = {"dataclass": dataclasses.dataclass, "field": dataclasses.field, "Literal": typing.Literal}
    modules = (module_with("lazy_typing_ours", ours), module_with("lazy_typing_originals", originals))
    yield modules
    for module in modules:
        del sys.modules[module.__name__]


def found_in(module: ModuleType, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or how it fails."""
    try:
        return call()
    except (TypeError, AttributeError, IndexError) as error:
        return type(error), str(error)


def shape(cls: Any) -> dict[str, Any]:
    """What of a class does not depend on its module."""
    return {
        "signature": str(inspect.signature(cls)),
        "init": (cls.__init__.__qualname__, cls.__init__.__module__ == cls.__module__, cls.__init__.__annotations__),
        "slots": cls.__slots__,
        "match": cls.__match_args__,
        "doc": cls.__doc__,
        "name": (cls.__name__, cls.__qualname__),
        "fields": [(one.name, one.type, repr(one.default), one.kw_only, one.init) for one in dataclasses.fields(cls)],
        "params": repr(cls.__dataclass_params__),
        "hints": typing.get_type_hints(cls),
        "init hints": typing.get_type_hints(cls.__init__),
        "hashable": isinstance(cls.__hash__, Callable),
        "attributes": set(dir(cls)) - {"__dataclass_plan__", "__annotations__", "__weakref__"},
    }


def first_field(value: Any) -> str:
    return str(value.__slots__[0])


PARTS: dict[str, Callable[[Any], Any]] = {
    "repr": repr,
    "hash": lambda one: hash(one) == hash(copy.copy(one)),
    "asdict": dataclasses.asdict,
    "astuple": dataclasses.astuple,
    "is a dataclass": dataclasses.is_dataclass,
    "copies": lambda one: repr(copy.copy(one)) + repr(copy.deepcopy(one)),
    "pickles": lambda one: repr(pickle.loads(pickle.dumps(one))),
    "pickled state": lambda one: one.__reduce_ex__(2)[2],
    "equal": lambda one: (one == one, one != one, one == copy.copy(one), one == 5),
    "set a field": lambda one: setattr(one, first_field(one), "b"),
    "delete a field": lambda one: delattr(one, first_field(one)),
    "replace": lambda one: repr(dataclasses.replace(one, **{first_field(one): "b"})),
    "an unknown argument": lambda one: type(one)(nothing=1),
    "no arguments": lambda one: repr(type(one)()),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_class_looks_like_the_original(both: tuple[ModuleType, ModuleType], name: str) -> None:
    ours, original = (shape(found_in(module, name)) for module in both)
    assert ours == original


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", OBJECTS)
def test_each_first_use_does_what_the_original_does(both: tuple[ModuleType, ModuleType], name: str, part: str) -> None:
    made = (OBJECTS[name](found_in(module, name)) for module in both)
    ours, original = (outcome(partial(PARTS[part], one)) for one in made)
    assert ours == original


def test_defaults_are_made_for_each_object_and_checks_run(both: tuple[ModuleType, ModuleType]) -> None:
    ours, _ = both
    one, other = ours.Changing("a"), ours.Changing("b")
    one.parts["x"] = 1
    assert other.parts == {}
    with pytest.raises(ValueError, match="size"):
        ours.Frozen("a", -1)


def test_frozen_objects_take_no_other_attribute_either(both: tuple[ModuleType, ModuleType]) -> None:
    one = both[0].Frozen("a")
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'double'"):
        one.double = 3
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'other'"):
        del one.other


def test_subclasses_may_be_plain_or_dataclasses(both: tuple[ModuleType, ModuleType]) -> None:
    base = both[0].Frozen

    class Plain(base):  # type: ignore[misc, valid-type]
        pass

    @dataclasses.dataclass(frozen=True)
    class More(base):  # type: ignore[misc, valid-type]
        extra: int = 7

    plain, more = Plain("a"), More("a", 1, extra=8)
    plain.note = "of the subclass"
    with pytest.raises(dataclasses.FrozenInstanceError):
        plain.name = "b"
    del plain.note
    assert [one.name for one in dataclasses.fields(More)] == ["name", "size", "parts", "mode", "extra"]
    assert lazy_typing.replace(more, size=2) == More("a", 2, extra=8)
    assert type(lazy_typing.replace(plain, size=2)) is Plain


def test_replace_changes_what_it_is_told_and_checks_it(both: tuple[ModuleType, ModuleType]) -> None:
    one = both[0].Frozen("a", 4)
    assert lazy_typing.replace(one, name="b") == both[0].Frozen("b", 4)
    with pytest.raises(ValueError, match="size"):
        lazy_typing.replace(one, size=-1)
    with pytest.raises(TypeError, match="nothing"):
        lazy_typing.replace(one, nothing=1)


def test_the_first_use_may_come_from_any_thread(both: tuple[ModuleType, ModuleType]) -> None:
    cls, start = both[0].Outer.Inner, threading.Barrier(8)

    def use(number: int) -> bool:
        start.wait()
        one, other = cls(number), cls(number=number)
        return one == other and hash(one) == hash(other) and repr(one) == f"Outer.Inner(number={number})"

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(8)))


def lazy_classes() -> list[type]:
    """Those of the package."""
    users = [path for path in sorted(PREBLE.rglob("*.py")) if "lazy_typing import" in path.read_text()]
    names = [".".join(path.relative_to(PREBLE.parent).with_suffix("").parts) for path in users]
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    return [value for value in values if isinstance(value, type) and "__dataclass_plan__" in vars(value)]


@pytest.mark.parametrize("cls", lazy_classes(), ids=lambda cls: cls.__name__)
def test_every_annotation_of_a_class_of_the_package_is_a_field(cls: Any) -> None:
    assert [one.name for one in dataclasses.fields(cls)] == list(cls.__annotations__)
    assert len(inspect.signature(cls).parameters) == len(cls.__annotations__)


def test_an_annotation_with_literal_reads_as_the_original() -> None:
    hints = typing.get_type_hints(preble.SchedulerConfig)
    assert hints["calibrate"] == bool | typing.Literal["auto"]
