"""Knobs as `--set KEY=VALUE` gives them. Owns how a text becomes a field's value, and what is said of a wrong one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ...config import SchedulerConfig
from ...errors import InvalidInput
from ...policies.named import nearest

WORDS = {"true": True, "yes": True, "false": False, "no": False}


def scheduler_config(given: Sequence[str], **others: Any) -> SchedulerConfig:
    """A configuration with these KEY=VALUEs, the last of a key counting, over `others`. Raises `InvalidInput` for a key
    that is none, with the nearest, or a value of another type; `InvalidConfig` for one out of range."""
    defaults = {field.name: field.default for field in fields(SchedulerConfig)}
    found = dict(others)
    for text in given:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise InvalidInput(f"--set must be KEY=VALUE, such as history_seconds=60, got {text!r}")
        if key not in defaults:
            near = nearest(key, defaults)
            raise InvalidInput(f"--set {text}: there is no knob {key!r}{near or '; there are ' + ', '.join(defaults)}")
        found[key] = value_of(key, value, defaults[key])
    return SchedulerConfig(**found)


def value_of(key: str, text: str, default: Any) -> Any:
    """A value as the field has it by default: a number, a whole number, or true, false and a word."""
    try:
        if isinstance(default, int):
            return int(text.replace("_", ""))
        if isinstance(default, float):
            number = float(text)
            if math.isfinite(number):
                return number
            raise ValueError
    except ValueError:
        kind = "whole number" if isinstance(default, int) else "finite number"
        raise InvalidInput(f"--set {key}: must be a {kind}, got {text!r}") from None
    return WORDS.get(text.lower(), text)


def plain(value: Any) -> Any:
    """A configuration's value as JSON has it: numbers, texts, lists and tables, with their type's name where types
    matter."""
    if hasattr(value, "coefficients"):
        return {"name": value.name, **{key: plain(item) for key, item in value.coefficients().items()}}
    names = getattr(value, "__dataclass_fields__", None)
    if names is not None and not isinstance(value, type):
        return {"type": type(value).__name__, **{name: plain(getattr(value, name)) for name in names}}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    return str(getattr(value, "name", value))
