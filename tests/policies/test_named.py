"""Policies by text: built-in ones with arguments, one's own by module:Class, and what is said of each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from preble import GlobalScheduler, Policy
from preble.errors import InvalidConfig
from preble.policies.base import resolve
from preble.policies.cache_aware import CacheAware
from preble.policies.named import split_names

OWN = """
from preble import Policy

class Mine(Policy):
    name = reason = "mine"

    def __init__(self, weight=1.0, home="a"):
        if weight < 0:
            raise ValueError("weight is negative")
        self.weight, self.home = weight, home

    def score(self, request, workers):
        return [float(name != self.home) for name in workers.ids]

class Outer:
    class Inner(Mine):
        pass

class NoPolicy:
    pass

class Silent(Policy):
    pass

number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of a user's, and one that fails."""
    (tmp_path / "own_rules_here.py").write_text(OWN)
    (tmp_path / "own_rules_broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_ones_own_class_decides() -> None:
    sched = GlobalScheduler(["a", "b"], policy='own_rules_here:Mine(weight=2, home="b")')
    assert sched.schedule([1, 2, 3]).worker == "b"
    assert sched.policy == "mine"


@pytest.mark.parametrize("text", ["own_rules_here:Mine", "own_rules_here:Mine()", "own_rules_here:Outer.Inner"])
def test_without_arguments(text: str) -> None:
    policy = resolve(text)
    assert isinstance(policy, Policy)
    assert vars(policy) == {"weight": 1.0, "home": "a"}


def test_built_in_rules_take_arguments_beside_those_that_their_names_stand_for() -> None:
    plain, struct = resolve("cache_aware(cache_threshold=0.7)"), resolve("cache_aware:struct(balance_requests=9)")
    assert isinstance(plain, CacheAware) and isinstance(struct, CacheAware)
    assert (plain.cache_threshold, plain.balance_requests) == (0.7, 64)
    assert (struct.cache_threshold, struct.balance_requests, struct.name) == (0.5, 9, "cache_aware:struct")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rond_robin", "did you mean 'round_robin'"),
        ("no_such_module_here:Mine", "module 'no_such_module_here' cannot be imported: ModuleNotFoundError"),
        ("own_rules_broken:Mine", "cannot be imported: ZeroDivisionError"),
        ("own_rules_here:Mime", "has no 'Mime'; did you mean 'Mine'"),
        ("own_rules_here:", "has no ''"),
        (":Mine", "module '' cannot be imported"),
        ("own_rules_here:NoPolicy", "is no preble.Policy"),
        ("own_rules_here:number", "is a int, not a class"),
        ("own_rules_here:Silent", "overrides neither"),
        ("own_rules_here:Mine(wieght=2)", "unexpected keyword argument 'wieght'; did you mean 'weight'"),
        ("own_rules_here:Mine(weight=-1)", "ValueError: weight is negative"),
        ("own_rules_here:Mine(2)", "arguments must be KEY=VALUE"),
        ("own_rules_here:Mine(**{})", "arguments must be KEY=VALUE"),
        ("own_rules_here:Mine(weight=open)", "malformed node"),
        ("own_rules_here:Mine(", "was never closed; write NAME"),
        ("own_rules_here:Mine(weight=1) + 1", "arguments must be KEY=VALUE"),
        ("e2(exploit_ratio=0.5)", "its knobs are SchedulerConfig's"),
        ("cache_aware(cache_threshold=3)", "CacheAware.cache_threshold must be in"),
    ],
)
def test_a_wrong_one_is_named_with_the_nearest(text: str, words: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        resolve(text)
    assert words in str(error.value)


def test_commas_of_arguments_separate_no_policies() -> None:
    text = """e2, x:Y(a=1, b=[2, 3], c="d,)e"),cache_aware(cache_threshold=0.5)"""
    assert split_names(text) == ["e2", """x:Y(a=1, b=[2, 3], c="d,)e")""", "cache_aware(cache_threshold=0.5)"]
    assert split_names("") == [""]
