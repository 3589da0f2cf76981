"""What is proposed about load that moves, from rows made by hand. Carrying it out: `test_rebalancer.py`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from preble.scheduling.rebalance_planner import (
    Group,
    Load,
    Move,
    Proposal,
    by_node,
    homes_of,
    is_satisfied,
    propose_copy,
    propose_move,
    wants_fewer,
    why_grow,
)


def group(
    node: int, worker: int = 0, *, load: float = 0.1, seconds: float = 10.0, waits: tuple[float, float] = (-1.0, -1.0)
) -> Group:
    return Group(node, 1, worker, 100, 10, load, seconds, *waits)


def costs(seconds: float) -> Callable[[Group, int], float]:
    return lambda group, worker: seconds


def move(
    groups: list[Group],
    loads: list[Load],
    *,
    recompute: float = 0.1,
    moves: tuple[Move, ...] = (),
    resting: frozenset[int] = frozenset(),
) -> Proposal | None:
    return propose_move(groups, loads, moves, resting, costs(recompute), ratio=1.5, floor_seconds=5.0)


HEAVY, LIGHT = Load(0, True, 60.0, 8.0), Load(1, True, 20.0, 1.0)


# --- rebalancing ------------------------------------------------------------------------------------------------------


def test_the_prefix_nearest_half_the_gap_moves() -> None:
    groups = [group(1, seconds=3.0), group(2, seconds=17.0), group(3, seconds=26.0), group(4, 1, seconds=20.0)]
    found = move(groups, [HEAVY, LIGHT])
    assert found is not None
    assert (found.kind, found.group.node, found.target) == ("rebalance", 2, 1)
    assert found.saved_seconds == pytest.approx(8.0 - 1.0 - 2 * 0.1)
    assert found.reason == "60.0 s of work in the window against 20.0 s"


@pytest.mark.parametrize(
    ("heavy", "light", "moves"),
    [
        (29.0, 20.0, False),  # not more than 1.5 times
        (31.0, 20.0, True),
        (4.9, 0.0, False),  # not more than the floor apart
        (5.1, 0.0, True),
    ],
)
def test_ratio_and_floor(heavy: float, light: float, moves: bool) -> None:
    loads = [Load(0, True, heavy, 8.0), Load(1, True, light, 1.0)]
    assert (move([group(1, seconds=3.0)], loads) is not None) == moves


def test_a_move_that_costs_more_than_it_saves_is_not_made() -> None:
    assert move([group(1)], [HEAVY, LIGHT], recompute=2.4) is not None  # of 7 s it waits less, two are left
    assert move([group(1)], [HEAVY, LIGHT], recompute=2.6) is None
    assert move([group(1)], [HEAVY, LIGHT], recompute=math.inf) is None  # the prefix has gone


def test_a_prefix_that_is_hardly_asked_for_stays() -> None:
    assert move([group(1)._replace(requests=3)], [HEAVY, LIGHT]) is None
    assert move([group(1)._replace(requests=4)], [HEAVY, LIGHT]) is not None


def test_where_all_wait_nothing_moves() -> None:
    assert move([group(1)], [HEAVY, LIGHT._replace(waiting_seconds=3.9)]) is not None
    assert move([group(1)], [HEAVY, LIGHT._replace(waiting_seconds=4.0)]) is None


def test_nobody_waits_nothing_moves() -> None:
    assert move([group(1)], [HEAVY._replace(waiting_seconds=1.0), LIGHT], recompute=0.0) is None


def test_a_prefix_that_would_turn_the_gap_round_stays() -> None:
    assert move([group(1, seconds=40.0)], [HEAVY, LIGHT]) is None
    assert move([group(1, seconds=39.9)], [HEAVY, LIGHT]) is not None


def test_what_rests_stays_and_the_next_best_goes() -> None:
    groups = [group(1, seconds=20.0), group(2, seconds=5.0)]
    found = move(groups, [HEAVY, LIGHT], resting=frozenset({1}))
    assert found is not None and found.group.node == 2
    assert move(groups, [HEAVY, LIGHT], resting=frozenset({1, 2})) is None


def test_what_is_on_its_way_counts_where_it_goes() -> None:
    groups = [group(1, seconds=5.0)]
    assert move(groups, [HEAVY, LIGHT], moves=(Move(0, 1, 12.0),)) is None  # 48 against 32
    assert move(groups, [HEAVY, LIGHT], moves=(Move(0, 1, 4.0),)) is not None


def test_a_worker_that_takes_no_requests_is_neither_heavy_nor_light() -> None:
    loads = [HEAVY, LIGHT, Load(2, False, 0.0, 0.0), Load(3, False, 900.0, 90.0)]
    found = move([group(1), group(5, 3)], loads)
    assert found is not None and (found.group.worker, found.target) == (0, 1)
    assert move([group(1)], [HEAVY, Load(1, False, 0.0, 0.0)]) is None


def test_the_next_heaviest_helps_where_the_heaviest_has_nothing_to_give() -> None:
    loads = [HEAVY, LIGHT, Load(2, True, 50.0, 9.0)]
    found = move([group(7, 2)], loads)
    assert found is not None and found.group.node == 7


def test_a_rebalancing_ends_before_it_would_begin_again() -> None:
    assert [is_satisfied(level, 10.0) for level in (15.1, 12.1, 12.0, 5.0)] == [False, False, True, True]


# --- copies -----------------------------------------------------------------------------------------------------------


def test_shares_of_a_prefix_come_together() -> None:
    shares = by_node([group(1, 0, load=0.1), group(2, 0), group(1, 3, load=0.5)])
    assert [g.worker for g in shares[1]] == [3, 0]
    assert len(shares[2]) == 1


def test_a_load_above_four_fifths_of_each_wants_one_more() -> None:
    shares = [group(1, 0, load=0.9), group(1, 1, load=0.6)]
    assert why_grow(shares, 1) == "load of 1.50 workers on 1"
    assert why_grow(shares, 2) is None
    assert why_grow([group(1, load=0.81)], 1) is not None
    assert why_grow([group(1, load=0.8)], 1) is None


@pytest.mark.parametrize(
    ("waits", "load", "grows"),
    [
        ((0.5, 1.0), 0.5, True),
        ((0.5, 0.9), 0.5, False),  # not doubled
        ((0.1, 0.4), 0.5, False),  # doubled, and still short
        ((0.5, 1.0), 0.3, False),  # others fill this worker
        ((-1.0, 5.0), 0.5, False),  # nothing to compare with
        ((0.0, 0.5), 0.5, True),
    ],
)
def test_doubled_waits_want_one_more(waits: tuple[float, float], load: float, grows: bool) -> None:
    assert (why_grow([group(1, load=load, waits=waits)], 1) is not None) == grows


def test_fewer_do_where_each_of_the_others_has_less_than_half() -> None:
    assert wants_fewer(0.99, 3)
    assert not wants_fewer(1.0, 3)
    assert not wants_fewer(0.0, 1)
    for copies in range(1, 8):  # what has just grown does not shrink at once, and the other way round
        load = np.nextafter(0.8 * copies, 9)
        assert why_grow([group(1, load=load)], copies) and not wants_fewer(load, copies + 1)


def test_a_copy_goes_where_a_request_waits_least() -> None:
    loads = [Load(0, True, 9.0, 5.0), Load(1, True, 9.0, 3.0), Load(2, True, 1.0, 2.0), Load(3, True, 1.0, 1.0)]
    recompute = {1: 0.0, 2: 0.5, 3: 2.0}
    found = propose_copy([group(1)], {0}, loads, lambda g, worker: recompute[worker], "why")
    assert found is not None
    assert (found.kind, found.target, found.reason) == ("replica", 2, "why")
    assert found.saved_seconds == pytest.approx(5.0 - 2.5)


def test_no_copy_where_nobody_gains() -> None:
    loads = [Load(0, True, 9.0, 2.0), Load(1, True, 0.0, 0.0), Load(2, False, 0.0, 0.0)]
    assert propose_copy([group(1)], {0}, loads, costs(1.1), "why") is None
    assert propose_copy([group(1)], {0}, loads, costs(0.9), "why") is not None
    assert propose_copy([group(1)], {0, 1}, loads, costs(0.0), "why") is None  # all have it
    assert propose_copy([group(1)], {2}, loads, costs(0.0), "why") is None  # nobody who has it takes requests


def test_children_go_longest_first_to_the_least_loaded() -> None:
    homes = homes_of({1: 0.5, 2: 0.4, 3: 0.3, 4: 0.2}, [7, 8], {}, 1.0)
    assert homes == {1: 7, 2: 8, 3: 8, 4: 7}


def test_children_keep_their_home_while_it_is_not_overfull() -> None:
    children = {1: 0.3, 2: 0.3, 3: 0.3, 4: 0.3}
    homes = {1: 7, 2: 7, 3: 8, 4: 8}
    assert homes_of(children, [7, 8], homes, 1.0) == homes
    grown = homes_of(children, [7, 8, 9], homes, 1.0)
    assert sorted(grown.values()) in ([7, 7, 8, 9], [7, 8, 8, 9], [7, 8, 9, 9])
    assert sum(grown[child] == home for child, home in homes.items()) >= 2
    assert set(homes_of(children, [7], homes, 1.0).values()) == {7}  # a home that left is no home


def test_a_child_too_hot_for_one_worker_has_no_home() -> None:
    assert homes_of({1: 0.5, 2: 0.1}, [7, 8], {}, 0.4) == {2: 7}
    assert homes_of({1: 0.5, 2: 0.1}, [7, 8], {1: 8}, 0.4) == {1: 8, 2: 7}  # it keeps one for longer
    assert homes_of({1: 0.9, 2: 0.1}, [7, 8], {1: 8}, 0.4) == {2: 7}


@pytest.mark.parametrize("seed", range(20))
def test_no_home_has_much_more_than_its_part(seed: int) -> None:
    rng = np.random.default_rng(seed)
    children = {child: float(load) for child, load in enumerate(rng.exponential(0.1, 40))}
    homes = {child: int(rng.integers(4)) for child in children}
    placed = homes_of(children, [0, 1, 2, 3], homes, 1.0)
    loads = [sum(load for child, load in children.items() if placed[child] == worker) for worker in range(4)]
    assert sum(loads) == pytest.approx(sum(children.values()))
    assert max(loads) <= sum(loads) / 4 + max(max(children.values()), sum(loads) / 8) + 1e-9
