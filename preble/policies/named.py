"""Policies by text, as command lines and configuration files name them. Owns that grammar and its errors.

    round_robin                        a built-in rule
    cache_aware(cache_threshold=0.5)   with arguments of its constructor
    rules:Mine                         the class Mine of the module rules, which must be a `Policy`
    rules:Mine(weight=0.5, home="a")   with arguments

Arguments are Python literals, each with its name. A module is imported as Python imports it: installed, or on the path;
the `preble` command has the current folder on it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module

from ..errors import InvalidConfig
from ..lazy_typing import Any


def split_names(text: str) -> list[str]:
    """The policies of a list with commas; those in brackets and quotes separate arguments."""
    names, depth, quote, begin = [], 0, "", 0
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            names.append(text[begin:at].strip())
            begin = at + 1
    return [*names, text[begin:].strip()]


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """(name, arguments) of a policy's text. Raises InvalidConfig."""
    name, bracket, _ = text.partition("(")
    if not bracket:
        return text, {}
    import ast

    try:
        call = ast.parse(f"f{text[len(name) :]}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            raise ValueError("arguments must be KEY=VALUE")
        return name.strip(), {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, SyntaxError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise InvalidConfig(
            f'policy {text!r}: {reason}; write NAME(KEY=VALUE, ...), such as rules:Mine(weight=0.5, home="a")'
        ) from None


def own_class(name: str) -> type[Any]:
    """What `module:Class` names. Raises InvalidConfig for a module that cannot be imported, or lacks it."""
    module, _, kind = name.partition(":")
    try:
        found: Any = import_module(module)
    except Exception as error:
        raise InvalidConfig(
            f"policy {name!r}: module {module!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    for part in kind.split("."):
        known = vars(found)
        if part not in known:
            classes = [one for one, value in known.items() if isinstance(value, type)]
            raise InvalidConfig(f"policy {name!r}: {module!r} has no {kind!r}{nearest(part, classes)}")
        found = known[part]
    if not isinstance(found, type):
        raise InvalidConfig(f"policy {name!r} is a {type(found).__name__}, not a class that is a preble.Policy")
    return found


def built(kind: type[Any], given: Mapping[str, Any], text: str) -> Any:
    """An object of a class. Raises InvalidConfig where its constructor refuses the arguments, naming the nearest."""
    import inspect

    try:
        inspect.signature(kind).bind(**given)
    except TypeError as error:
        taken = [name for name in inspect.signature(kind).parameters if name not in ("args", "kwargs")]
        strange = next((name for name in given if name not in taken), "")
        raise InvalidConfig(f"policy {text!r}: {error}{nearest(strange, taken) if strange else ''}") from None
    try:
        return kind(**given)
    except InvalidConfig:
        raise
    except Exception as error:
        raise InvalidConfig(f"policy {text!r}: {type(error).__name__}: {error}") from error


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'round_robin'?", or nothing where no name is like it."""
    found = get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]!r}?" if found else ""
