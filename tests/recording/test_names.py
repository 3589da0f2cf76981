"""Blocks' names: equal where prefixes are, of no use without the key, and bounded."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.recording.names import NAME_BYTES, BlockPath, BlockTable, hidden

KEY, OTHER_KEY = bytes(32), bytes(range(32))
Prompts = list[list[int]]


def names_of(table: BlockTable, prompts: Prompts, namespaces: list[object] | None = None) -> list[list[bytes]]:
    """All names of each prompt, as a reader puts them together."""
    found: list[list[bytes]] = []
    for prompt, namespace in zip(prompts, namespaces or [None] * len(prompts), strict=True):
        path = table.add(np.array(prompt, np.int32), namespace)
        new = [path.names[at : at + NAME_BYTES] for at in range(0, len(path.names), NAME_BYTES)]
        found.append([*(found[path.parent][: path.shared] if path.shared else []), *new])
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 40),
)
def test_names_are_equal_as_far_as_prefixes_are(prompts: Prompts, block: int, nodes_max: int) -> None:
    found = names_of(BlockTable(KEY, block, nodes_max), prompts)
    for prompt, names in zip(prompts, found, strict=True):
        assert len(names) == -(-len(prompt) // block)
        for other, others in zip(prompts, found, strict=True):
            for depth in range(1, min(len(names), len(others)) + 1):
                same = prompt[: depth * block] == other[: depth * block]
                assert (names[depth - 1] == others[depth - 1]) is same


def test_a_known_prefix_is_said_by_the_request_that_brought_it() -> None:
    table = BlockTable(KEY, 2)
    first = table.add(np.array([1, 2, 3, 4, 5], np.int32), None)
    assert (first.parent, first.shared, len(first.names)) == (-1, 0, 3 * NAME_BYTES)
    second = table.add(np.array([1, 2, 3, 4, 6, 7], np.int32), None)
    assert (second.parent, second.shared, len(second.names)) == (0, 2, NAME_BYTES)
    assert table.add(np.array([1, 2, 3, 4, 6, 7], np.int32), None) == BlockPath(1, 3, b"")


def test_other_keys_and_namespaces_give_other_names() -> None:
    prompt = [[1, 2, 3, 4]]
    one = names_of(BlockTable(KEY, 2), prompt)[0]
    assert set(one).isdisjoint(names_of(BlockTable(OTHER_KEY, 2), prompt)[0])
    assert set(one).isdisjoint(names_of(BlockTable(KEY, 2), prompt, ["tenant"])[0])
    assert one == names_of(BlockTable(KEY, 2), prompt)[0], "one key, one name, in any process"
    assert hidden(KEY, "session", "a") != hidden(OTHER_KEY, "session", "a") != hidden(OTHER_KEY, "tenant", "a")
    assert hidden(KEY, "session", "") == b""


def test_the_table_is_emptied_at_its_bound_and_names_stay_the_same() -> None:
    table, free = BlockTable(KEY, 1, nodes_max=4), BlockTable(KEY, 1)
    prompts = [[1, 2, 3], [4, 5, 6], [1, 2, 7], [1, 2, 7]]
    assert names_of(table, prompts) == names_of(free, prompts)
    assert table.add(np.array([9] * 50, np.int32), None).shared == 0
    assert table.nodes <= 4, "a prompt longer than the table is named and not kept"


def test_namespaces_are_bounded() -> None:
    table = BlockTable(KEY, 1)
    for number in range(5000):
        table.add(np.array([1], np.int32), f"salt {number}")
    assert table.namespaces <= 4096


def test_a_request_that_was_not_written_is_referred_to_by_none() -> None:
    table = BlockTable(KEY, 1)
    prompt = np.array([1, 2], np.int32)
    table.add(prompt, None)
    table.add(np.array([1, 2, 3], np.int32), None)
    table.take_back()
    assert table.add(np.array([1, 2, 3], np.int32), None).parent == -1
    assert table.add(np.array([1, 2, 3], np.int32), None).parent == 1
