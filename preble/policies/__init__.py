"""The built-in placement rules other than "e2". Owns the table of their names; each rule is a file here and is imported
when a scheduler asks for it by name.

`preble.policies.base` owns the interface they implement, and turns names into objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

# Name -> (module here, class, arguments of its constructor).
_RULES: Mapping[str, tuple[str, str, Mapping[str, float | str]]] = {
    "round_robin": ("simple", "RoundRobin", {}),
    "random": ("simple", "Random", {}),
    "least_loaded": ("simple", "LeastLoaded", {}),
    "power_of_two": ("simple", "PowerOfTwo", {}),
    "longest_prefix": ("simple", "LongestPrefix", {}),
    "prefix_hash": ("prefix_hash", "PrefixHash", {}),
    "cache_aware": ("cache_aware", "CacheAware", {}),
    "cache_aware:struct": (
        "cache_aware",
        "CacheAware",
        {"cache_threshold": 0.5, "balance_requests": 32, "balance_ratio": 1.1, "name": "cache_aware:struct"},
    ),
    "cache_aware_spill": ("cache_aware", "CacheAwareSpill", {}),
    "kv_cost": ("kv_cost", "KvCost", {}),
    "lmetric": ("kv_cost", "LMetric", {}),
    "aibrix_prefix": ("aibrix", "AibrixPrefix", {}),
    "aibrix_preble": ("aibrix", "AibrixPreble", {}),
    "session_hash": ("session", "SessionHash", {}),
    "session_least": ("session", "SessionLeast", {}),
    "llmd_sticky": ("llmd", "LlmdSticky", {}),
    "dualmap": ("dualmap", "DualMap", {}),
    "e2-paper": ("e2_paper", "E2Paper", {}),
    "e2-paper:printed": ("e2_paper", "E2Paper", {"exploit_share": 0.0, "name": "e2-paper:printed"}),
}

# Rules that no name alone can make -> (module here, class, what the constructor must be given).
_WITH_ARGUMENTS: Mapping[str, tuple[str, str, str]] = {
    "oracle_partition": ("oracle", "OraclePartition", "the group of every request"),
}

NAMES = tuple(_RULES)


def build(name: str) -> object | None:
    """A new policy object by its name; None if there is no such rule. Raises LookupError, with what to do about it, for
    a rule that must be given something."""
    if name in _WITH_ARGUMENTS:
        module, kind, given = _WITH_ARGUMENTS[name]
        raise LookupError(f"policy {name!r} must be given {given}: pass preble.policies.{module}.{kind}(...)")
    found = rule(name)
    return None if found is None else found[0](**found[1])


def rule(name: str) -> tuple[type[object], Mapping[str, float | str]] | None:
    """The class of a rule and the arguments that its name stands for; None if there is no such rule."""
    if name not in _RULES:
        return None
    module, kind, arguments = _RULES[name]
    return getattr(import_module(f".{module}", __name__), kind), arguments
