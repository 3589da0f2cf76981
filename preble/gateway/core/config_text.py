"""The gateway's options as people read them: what each is, the configuration that is in force, the table of the
documentation, the JSON schema. Owns no sentence: those stand in `config` and in the docstring of `SchedulerConfig`."""

from __future__ import annotations

import inspect
import re
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from ...config import SchedulerConfig
from .config import FIELDS, SECRET, SECTIONS, TABLES, FieldPath, GatewayConfig, value_of
from .config_sources import Loaded
from .config_tables import DiscoveryTable, KeyTable, ServerTable, has_secret, without_secrets

UNITS = frozenset({"seconds", "bytes", "tokens"})
_KNOB = re.compile(r"^(\w+): (.+?)(?=^\w+: |\Z)", re.M | re.S)


@lru_cache(1)
def descriptions() -> dict[FieldPath, str]:
    """A sentence for each option; those of the scheduler from its docstring, which Python drops with -OO."""
    found: dict[FieldPath, str] = {(name,): _description(hint) for name, hint in _hints().items()}
    knobs = dict(_KNOB.findall(inspect.cleandoc(SchedulerConfig.__doc__ or "")))
    for path in FIELDS:
        if len(path) == 2:
            text = " ".join(knobs.get(path[-1], "").split())
            found[path] = text[:1].upper() + text[1:]
    return found


@lru_cache(1)
def _hints() -> dict[str, Any]:
    return get_type_hints(GatewayConfig, include_extras=True)


def _description(hint: Any) -> str:
    return next((meta.description for meta in get_args(hint) if isinstance(meta, Meta) and meta.description), "")


def default_text(path: FieldPath) -> str:
    """The default as a person writes it: "8 MiB", "none"."""
    value = value_of(GatewayConfig(), path)
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if path[-1].endswith("_bytes") and value % (1 << 20) == 0:
        return f"{value >> 20} MiB" if value % (1 << 30) else f"{value >> 30} GiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def metavar(path: FieldPath) -> str:
    """What stands for the value in a list of options."""
    choices = next((get_args(kind) for kind in get_args(_hints().get(path[0])) if get_origin(kind) is Literal), None)
    if choices is not None:
        return "{" + ",".join(choices) + "}"
    word, value = path[-1].rpartition("_")[2], value_of(GatewayConfig(), path)
    if isinstance(value, bool):
        return "{true,false}"
    if word in UNITS or not isinstance(value, int | float):
        return "N" if word == "minute" else word.upper()
    return "N"


def sections() -> dict[str, list[FieldPath]]:
    """The options under their headings, in order."""
    found: dict[str, list[FieldPath]] = {}
    heading = ""
    for path in FIELDS:
        heading = SECTIONS.get(path[0], heading)
        found.setdefault(heading, []).append(path)
    return found


def table() -> str:
    """Every option as Markdown, for docs/configuration.md."""
    lines = []
    for heading, paths in sections().items():
        lines += [f"## {heading}", "", "| key | default | what |", "|---|---|---|"]
        lines += [f"| `{'.'.join(path)}` | {default_text(path)} | {descriptions()[path]} |" for path in paths]
        lines.append("")
        for path in paths:
            if path[-1] in TABLES:
                lines += _table_of(path[-1])
    return "\n".join(lines)


def _table_of(name: str) -> list[str]:
    """The fields of a list of tables, as Markdown."""
    kind = {"servers": ServerTable, "discovery": DiscoveryTable, "keys": KeyTable}[name]
    lines = [f"Each of `{name}`:", "", "| field | what |", "|---|---|"]
    hints = get_type_hints(kind, include_extras=True)
    hints = {field: hints[field] for field in sorted(hints, key=lambda field: field not in kind.__annotations__)}
    return [*lines, *(f"| `{field}` | {_description(hint)} |" for field, hint in hints.items()), ""]


def schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, for editors."""
    found: dict[str, Any] = msgspec.json.schema(GatewayConfig)
    knobs = found["$defs"]["SchedulerConfig"]["properties"]
    for path, text in descriptions().items():
        if len(path) == 2:
            knobs[path[-1]]["description"] = text
    found["$defs"]["SchedulerConfig"]["additionalProperties"] = False
    return found


def shown(loaded: Loaded) -> str:
    """The configuration as a YAML file that says where each value is from; secrets are only counted."""
    lines = [f"# {remark}" for remark in loaded.remarks]
    for path in FIELDS:
        if path[0] == "scheduler" and "scheduler:" not in lines:
            lines.append("scheduler:")
        value = value_of(loaded.config, path)
        text = msgspec.json.encode(value).decode()
        if path[-1] in TABLES:
            hidden = sum(map(has_secret, value))
            text = msgspec.json.encode([without_secrets(table) for table in value]).decode()
            text += f"  # {hidden} keys, not shown" if hidden else ""
        elif path[-1] in SECRET:
            text = f"[]  # {len(value)} keys, not shown"
        origin = loaded.origins.get(".".join(path))
        indent = "  " * (len(path) - 1)
        lines.append(f"{indent}{path[-1]}: {text}" + (f"  # {origin}" if origin else ""))
    return "\n".join(lines) + "\n"
