"""YAML that somebody else wrote, read without harm. Owns the bound on how deeply it may be nested: the library's loader
calls itself for each level, and a hundred thousand of them end the process."""

from __future__ import annotations

from typing import Any

import msgspec

NESTED_MAX = 32  # lists and tables within each other; a configuration has four


def decode_yaml(data: bytes) -> Any:
    """The content as plain values. Raises `ValueError` with the line for what is no YAML, or is nested too deeply;
    `ImportError` without PyYAML. Looks at most at one level more than there may be."""
    _check_depth(data)
    return msgspec.yaml.decode(data)


def _check_depth(data: bytes) -> None:
    """The parser under the loader keeps its levels in a list of its own."""
    import yaml

    depth = 0
    try:
        for event in yaml.parse(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > NESTED_MAX:
                mark = event.start_mark
                where = f"line {mark.line + 1}, column {mark.column + 1}"
                raise ValueError(f"{where}: lists and tables are nested more than {NESTED_MAX} deep")
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
