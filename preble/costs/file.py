"""Cost models as files: JSON with a version, so that a measured model can be named wherever a preset can. Owns the
format and the refusal of damaged or foreign files; what coefficients mean, and whether they are allowed, is
`CostModel`'s.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidConfig

FORMAT = "preble-cost-model"
VERSION = 1
FILE_BYTES_MAX = 16 << 20
COEFFICIENTS = {"knots", "context", "pair"}
MAY_BE = {"start"}  # written where it is more than nothing: so files of models without it are read by older versions


def write(
    path: str | os.PathLike[str], coefficients: Mapping[str, Any], measured: Mapping[str, Any] | None = None
) -> None:
    """Write a model's coefficients (`name`, `knots`, `context`, `pair`, `start`) and where they come from.

    The file appears whole or not at all. Raises `InvalidConfig` where it cannot be written, or `measured` is not JSON.
    """
    final = Path(path)
    shown = sorted(COEFFICIENTS | {key for key in MAY_BE if coefficients.get(key)})
    content = {
        "format": FORMAT,
        "version": VERSION,
        "name": coefficients["name"],
        "coefficients": {key: coefficients[key] for key in shown},
        "measured": dict(measured or {}),
    }
    building = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        building.write_text(text, encoding="utf-8")
        os.replace(building, final)
    except (OSError, TypeError, ValueError, RecursionError) as error:
        building.unlink(missing_ok=True)
        raise InvalidConfig(f"cost model file {final}: cannot be written: {error}") from error


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The coefficients that `write` wrote, with the name. Raises `InvalidConfig` naming the file and what is wrong."""
    content = _json_object(path)
    if content.get("format") != FORMAT:
        raise refused(path, f"not a cost model: format is {content.get('format')!r}, not {FORMAT!r}")
    if content.get("version") != VERSION:
        raise refused(path, f"version {content.get('version')!r}; this Preble reads version {VERSION}")
    coefficients, name = content.get("coefficients"), content.get("name")
    if not isinstance(name, str):
        raise refused(path, f"name must be a string, got {name!r}")
    if not isinstance(coefficients, dict) or set(coefficients) - MAY_BE != COEFFICIENTS:
        names = ", ".join(sorted(COEFFICIENTS))
        raise refused(path, f"coefficients must be {names} and nothing else but {', '.join(sorted(MAY_BE))}")
    return {"name": name, **coefficients}


def refused(path: str | os.PathLike[str], reason: object) -> InvalidConfig:
    """The error that names the file."""
    return InvalidConfig(f"cost model file {os.fspath(path)}: {reason}")


def _json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        raise refused(path, f"cannot be read: {error}") from error
    if len(data) > FILE_BYTES_MAX:
        raise refused(path, f"larger than {FILE_BYTES_MAX} bytes")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise refused(path, f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise refused(path, "not a JSON object")
    return content
