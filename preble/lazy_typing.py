"""`dataclass`, `field`, `replace`, `cast`, `Any`, `Literal` and `TYPE_CHECKING`, as `dataclasses` and `typing` have
them, but without importing these two: a first scheduler would wait longer for them than for all of Preble. Owns what
stands in for them.

Type checkers see the originals. At run time a class gets its `__init__` when the first object is made, and the rest
(`==`, `hash`, `repr`, what `dataclasses.fields` reads) when it is first asked for. `dataclasses` itself makes that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

TYPE_CHECKING = False  # what type checkers know as true
if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
    from typing import Any as Any
    from typing import Literal as Literal
    from typing import cast as cast


class _Factory:
    """The default of a field that is made for each object; in signatures as `dataclasses` shows it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __repr__(self) -> str:
        return "<factory>"


class _Literal:
    """`Literal[...]` is what it says once an annotation is read."""

    def __class_getitem__(cls, values: Any) -> Any:
        import typing

        return typing.Literal[values]


class _Later:
    """An attribute of a class that is made when it is first asked for, and then put in this one's place."""

    def __init__(self, plan: _Plan, name: str) -> None:
        self.plan, self.name = plan, name

    def __get__(self, instance: Any, owner: type) -> Any:
        value = self.plan.init() if self.name == "__init__" else self.plan.by_dataclasses(self.name)
        setattr(self.plan.cls, self.name, value)
        return value.__get__(instance, owner) if callable(value) else value


def _dataclass(*, slots: bool, frozen: bool = False, eq: bool = True, kw_only: bool = False) -> Any:
    """As `dataclasses.dataclass`, for a class with slots whose annotations are all fields."""
    assert slots, "only classes with slots are made here"
    options = {"slots": slots, "frozen": frozen, "eq": eq, "kw_only": kw_only}
    return lambda plain: _Plan(plain, options).cls


def _field(*, default_factory: Callable[[], Any]) -> _Factory:
    return _Factory(default_factory)


def _cast(kind: Any, value: Any) -> Any:
    """The value itself; `kind` is for type checkers."""
    return value


def _replace(value: Any, **changes: Any) -> Any:
    """A copy with other values in some fields."""
    kind = type(value)
    if "__dataclass_plan__" not in vars(kind):  # a subclass, which may have more fields
        import dataclasses

        return dataclasses.replace(value, **changes)
    return kind(**{**{name: getattr(value, name) for name in kind.__slots__}, **changes})


class _Plan:
    """What `dataclasses.dataclass` would make of a plain class: `cls`, some of its attributes at once, others later."""

    def __init__(self, plain: type, options: Mapping[str, bool]) -> None:
        self.options, self.fields = options, plain.__annotations__
        self.body = {name: value for name, value in vars(plain).items() if name not in ("__dict__", "__weakref__")}
        self.defaults = {name: self.body.pop(name) for name in self.fields if name in self.body}
        names = tuple(self.fields)
        self.body |= {"__slots__": names, "__match_args__": () if options["kw_only"] else names}
        self.body |= {"__qualname__": plain.__qualname__, "__dataclass_plan__": self}
        later = ["__init__", "__repr__", "__dataclass_fields__", "__dataclass_params__"]
        later += ["__replace__"] if sys.version_info >= (3, 13) else []
        if options["frozen"]:
            later += ["__getstate__", "__setstate__"]
            self.body |= {"__setattr__": _set, "__delattr__": _delete}
        if options["eq"]:
            later += ["__eq__", "__hash__"] if options["frozen"] else ["__eq__"]
            self.body |= {} if options["frozen"] else {"__hash__": None}
        self.body |= {name: _Later(self, name) for name in later}
        self.cls = type(plain.__name__, plain.__bases__, self.body)

    def by_dataclasses(self, name: str) -> Any:
        """An attribute, from a class that has the same fields and no methods of its own."""
        import dataclasses

        body = {key: self.body[key] for key in ("__module__", "__qualname__", "__doc__")} | self.defaults
        for key, value in self.defaults.items():
            if isinstance(value, _Factory):
                body[key] = dataclasses.field(default_factory=value.make)
        twin = type(self.cls.__name__, (), {**body, "__annotations__": self.fields})
        return vars(dataclasses.dataclass(**self.options)(twin))[name]

    def init(self) -> Any:
        """`__init__`, compiled for the fields."""
        known: dict[str, Any] = {f"_default_{key}": value for key, value in self.defaults.items()}
        parameters = ["self", "*"] if self.options["kw_only"] else ["self"]
        lines = []
        for key in self.fields:
            default, value = f"_default_{key}", key
            parameters.append(f"{key}={default}" if default in known else key)
            if isinstance(known.get(default), _Factory):
                value = f"{default}.make() if {key} is {default} else {key}"
            if self.options["frozen"]:
                known[f"_set_{key}"] = vars(self.cls)[key].__set__
            lines.append(f"_set_{key}(self, {value})" if self.options["frozen"] else f"self.{key} = {value}")
        lines.append("self.__post_init__()" if "__post_init__" in self.body else "pass")
        source = f"def make({', '.join(known)}):\n def __init__({', '.join(parameters)}):\n  "
        made: dict[str, Any] = {}
        exec(source + "\n  ".join(lines) + "\n return __init__", vars(sys.modules[self.cls.__module__]), made)
        init = made["make"](**known)
        init.__qualname__ = f"{self.cls.__qualname__}.__init__"
        init.__annotations__ = {**self.fields, "return": None}
        return init


def _set(self: Any, name: str, value: Any) -> None:
    """`__setattr__` of frozen classes; subclasses may have attributes that are not fields."""
    _check_not_frozen(self, name, "assign to")
    object.__setattr__(self, name, value)


def _delete(self: Any, name: str) -> None:
    """`__delattr__` of frozen classes."""
    _check_not_frozen(self, name, "delete")
    object.__delattr__(self, name)


def _check_not_frozen(value: Any, name: str, what: str) -> None:
    import dataclasses

    if name in value.__dataclass_fields__ or "__dataclass_plan__" in vars(type(value)):
        raise dataclasses.FrozenInstanceError(f"cannot {what} field {name!r}")


if not TYPE_CHECKING:
    Any, Literal = object, _Literal
    dataclass, field, replace, cast = _dataclass, _field, _replace, _cast
