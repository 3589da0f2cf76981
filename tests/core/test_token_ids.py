"""Token ids at the door: every kind of sequence that is taken means the same, every other is refused by name and
changes nothing."""

from __future__ import annotations

import ctypes
import decimal
import importlib.util
from array import array
from collections.abc import Callable
from enum import IntEnum

import numpy as np
import pytest

from preble._radix import RadixTree
from preble.batching._kv_slots import SlotTree
from preble.errors import InvalidInput, InvalidTokens

PROMPT = [5, 0, 2**31 - 1, 7]
HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")


class Token(IntEnum):
    FIVE = 5
    ZERO = 0
    LAST = 2**31 - 1
    SEVEN = 7


class Indexable:
    """An integer in all but name, as numpy's and torch's scalars are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Arrayable:
    """What offers no buffer but an array, as torch tensors do."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return self.values


def read_only(values: np.ndarray) -> np.ndarray:
    values.setflags(write=False)
    return values


def tensor(values: object, **options: object) -> object:
    import torch

    options = {name: getattr(torch, value) if name == "dtype" else value for name, value in options.items()}
    return torch.tensor(values, **options)


ACCEPTED: dict[str, Callable[[], object]] = {
    "list": lambda: PROMPT,
    "tuple": lambda: tuple(PROMPT),
    "list-of-int-enum": lambda: list(Token),
    "list-of-numpy-ints": lambda: [np.int32(5), np.uint8(0), np.int64(2**31 - 1), np.uint64(7)],
    "tuple-of-indexables": lambda: tuple(Indexable(token) for token in PROMPT),
    "numpy-int32": lambda: np.array(PROMPT, np.int32),
    "numpy-uint32": lambda: np.array(PROMPT, np.uint32),
    "numpy-int64": lambda: np.array(PROMPT, np.int64),
    "numpy-little-endian": lambda: np.array(PROMPT, "<i4"),
    "numpy-read-only": lambda: read_only(np.array(PROMPT, np.int32)),
    "numpy-slice": lambda: np.array([1, *PROMPT, 1], np.int32)[1:-1],
    "numpy-one-wide-column": lambda: np.array([PROMPT], np.int32)[0, :],
    "array-int": lambda: array("i", PROMPT),
    "array-unsigned-int": lambda: array("I", PROMPT),
    "array-long": lambda: array("l", PROMPT),
    "array-long-long": lambda: array("q", PROMPT),
    "memoryview": lambda: memoryview(array("i", PROMPT)),
    "memoryview-cast": lambda: memoryview(array("i", PROMPT).tobytes()).cast("i"),
    "memoryview-of-numpy": lambda: memoryview(np.array(PROMPT, np.int64)),
    "ctypes": lambda: (ctypes.c_int32 * 4)(*PROMPT),
    "array-interface": lambda: Arrayable(np.array(PROMPT, np.int64)),
}
ACCEPTED_TENSORS: dict[str, Callable[[], object]] = {
    "torch-int32": lambda: tensor(PROMPT, dtype="int32"),
    "torch-int64": lambda: tensor(PROMPT),
    "torch-row": lambda: tensor([PROMPT])[0],
    "list-of-torch-scalars": lambda: list(tensor(PROMPT)),
}
ACCEPTED_PARAMS = [pytest.param(make, id=name) for name, make in ACCEPTED.items()]
ACCEPTED_PARAMS += [pytest.param(make, id=name, marks=needs_torch) for name, make in ACCEPTED_TENSORS.items()]


@pytest.mark.parametrize("make", ACCEPTED_PARAMS)
def test_every_kind_of_integer_sequence_is_the_same_prompt(make: Callable[[], object]) -> None:
    tree = RadixTree()
    tree.add_worker(100)
    assert tree.insert(make(), 0.0, worker=0) == 0
    tree.check()
    assert tree.show() == "(root)\n  [5 0 2147483647 7]  0:4"
    assert tree.match(PROMPT) == (4, {0: 4})
    assert tree.match(make()) == (4, {0: 4})
    assert tree.insert(make(), 0.0, worker=0) == 4
    assert tree.hits(make(), 0.0) == 2.0
    assert tree.unmark(make(), 0, 1) == 3


@pytest.mark.parametrize("make", ACCEPTED_PARAMS)
def test_a_prompt_is_copied_not_kept(make: Callable[[], object]) -> None:
    """The caller may reuse its buffer; the tree holds no reference to it."""
    tree = RadixTree()
    prompt = make()
    tree.insert(prompt, 0.0)
    if isinstance(prompt, np.ndarray) and prompt.flags.writeable:
        prompt[:] = 1
    if isinstance(prompt, array):
        prompt[0] = 1
        prompt.append(1)  # not possible while somebody holds its buffer
    assert tree.match(PROMPT)[0] == 4


def test_a_memory_mapped_prompt_is_read_without_its_owner_knowing(tmp_path) -> None:
    path = tmp_path / "tokens"
    np.array(PROMPT, np.int32).tofile(path)
    tree = RadixTree()
    tree.insert(np.memmap(path, np.int32, mode="r"), 0.0)
    assert tree.match(PROMPT)[0] == 4


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "empty-list": (lambda: [], "is empty"),
    "empty-tuple": (lambda: (), "is empty"),
    "empty-array": (lambda: array("i"), "is empty"),
    "empty-numpy": (lambda: np.zeros(0, np.int64), "is empty"),
    "negative-in-list": (lambda: [5, 0, -1], r"\[2\] is -1"),
    "negative-in-int32": (lambda: np.array([5, 0, 3, -7], np.int32), r"\[3\] is outside"),
    "negative-in-int64": (lambda: np.array([5, -(2**40)], np.int64), r"\[1\] is -1099511627776"),
    "too-large-in-list": (lambda: [5, 2**31], r"\[1\] is 2147483648"),
    "too-large-for-any-machine-word": (lambda: [10**30], r"\[0\] is 1000000000000000000000000000000"),
    "too-large-in-uint32": (lambda: np.array([5, 2**31], np.uint32), r"\[1\] is outside"),
    "too-large-in-int64": (lambda: np.array([5, 0, 2**31], np.int64), r"\[2\] is 2147483648"),
    "too-large-numpy-int": (lambda: [5, np.uint64(2**63)], r"\[1\] is 9223372036854775808"),
    "negative-indexable": (lambda: [Indexable(-4)], r"\[0\] is -4"),
    "float-in-list": (lambda: [5, 1.0], r"\[1\] is a float"),
    "bool-in-list": (lambda: [5, True], r"\[1\] is a bool"),
    "numpy-bool-in-list": (lambda: [5, np.True_], r"\[1\] is a bool"),
    "numpy-float-in-list": (lambda: [5, np.float64(1)], r"\[1\] is a float64"),
    "string-in-list": (lambda: ["5"], r"\[0\] is a str"),
    "none-in-list": (lambda: [5, None], r"\[1\] is a NoneType"),
    "decimal-in-list": (lambda: [decimal.Decimal(5)], r"\[0\] is a Decimal"),
    "nested-list": (lambda: [[5, 0]], r"\[0\] is a list"),
    "list-of-arrays": (lambda: [np.array([5, 0])], r"\[0\] is a ndarray"),
    "string": (lambda: "hello", "is a str"),
    "bytes": (lambda: b"hello", "format 'B'"),
    "bytearray": (lambda: bytearray(8), "format 'B'"),
    "none": (lambda: None, "is a NoneType"),
    "integer": (lambda: 5, "is a int"),
    "set": (lambda: {5, 0}, "is a set"),
    "dict": (lambda: {5: 0}, "is a dict"),
    "range": (lambda: range(5), "is a range"),
    "generator": (lambda: (token for token in PROMPT), "is a generator"),
    "float-array": (lambda: np.array([5.0, 0.0]), "format 'd'"),
    "half-array": (lambda: np.array([5.0], np.float16), "format 'e'"),
    "bool-array": (lambda: np.array([True, False]), r"format '\?'"),
    "short-array": (lambda: np.array(PROMPT[:2], np.int16), "format 'h'"),
    "uint64-array": (lambda: np.array(PROMPT, np.uint64), "format '[LQ]'"),
    "unsigned-long-long-array": (lambda: array("Q", PROMPT), "format 'Q'"),
    "char-array": (lambda: np.array(["a", "b"]), "format"),
    "object-array": (lambda: np.array(PROMPT, object), "format 'O'"),
    "struct-array": (lambda: np.zeros(3, [("a", np.int32)]), "format"),
    "big-endian-int32": (lambda: np.array(PROMPT, ">i4"), "format '>i'"),
    "big-endian-int64": (lambda: np.array(PROMPT, ">i8"), "format '>"),
    "two-dimensions": (lambda: np.array([PROMPT, PROMPT], np.int32), "2 dimensions"),
    "one-row-in-two-dimensions": (lambda: np.array([PROMPT], np.int32), "2 dimensions"),
    "no-dimension": (lambda: np.array(5, np.int32), "0 dimensions"),
    "numpy-scalar": (lambda: np.int64(5), "0 dimensions"),
    "strided": (lambda: np.array(PROMPT, np.int32)[::2], "C-contiguous"),
    "reversed": (lambda: np.array(PROMPT, np.int32)[::-1], "C-contiguous"),
    "strided-memoryview": (lambda: memoryview(array("i", PROMPT))[::2], "C-contiguous"),
    "column": (lambda: np.array([PROMPT, PROMPT], np.int32)[:, 1], "C-contiguous"),
    "dates": (lambda: np.array(["2024-01-01"], "datetime64[D]"), "C-contiguous buffer"),
    "released-memoryview": (lambda: released_memoryview(), "C-contiguous buffer"),
    "array-interface-of-floats": (lambda: Arrayable(np.array([1.5])), "format 'd'"),
    "array-interface-of-nothing": (lambda: Arrayable([5]), "is a list"),
}
REFUSED_TENSORS: dict[str, tuple[Callable[[], object], str]] = {
    "torch-float": (lambda: tensor([5.0]), "format 'f'"),
    "torch-bfloat16": (lambda: tensor([5.0], dtype="bfloat16"), "is a Tensor that gives no array"),
    "torch-needs-grad": (lambda: tensor([5.0], requires_grad=True), "is a Tensor that gives no array"),
    "torch-meta-device": (lambda: tensor([5], device="meta"), "is a Tensor that gives no array"),
    "torch-bool": (lambda: tensor([True]), r"format '\?'"),
    "torch-two-dimensions": (lambda: tensor([PROMPT]), "2 dimensions"),
    "torch-strided": (lambda: tensor(PROMPT)[::2], "C-contiguous"),
    "torch-empty": (lambda: tensor([], dtype="int64"), "is empty"),
    "list-of-torch-floats": (lambda: list(tensor([5.0])), r"\[0\] is a Tensor"),
}
REFUSED_PARAMS = [pytest.param(make, words, id=name) for name, (make, words) in REFUSED.items()]
REFUSED_PARAMS += [
    pytest.param(make, words, id=name, marks=needs_torch) for name, (make, words) in REFUSED_TENSORS.items()
]


def released_memoryview() -> memoryview:
    view = memoryview(array("i", PROMPT))
    view.release()
    return view


@pytest.mark.parametrize(("make", "words"), REFUSED_PARAMS)
def test_everything_else_is_refused_by_name_and_changes_nothing(make: Callable[[], object], words: str) -> None:
    tree = RadixTree()
    tree.add_worker(100)
    tree.insert([5, 0, 3], 0.0, worker=0)
    before = (tree.show(), tree.stats(), tree.version, tree.hits([5], 0.0))
    for call in [
        lambda: tree.insert(make(), 0.0, worker=0),
        lambda: tree.insert(make(), 0.0, namespace="new"),
        lambda: tree.match(make()),
        lambda: tree.match(make(), namespace="new"),
        lambda: tree.matched(make(), 0),
        lambda: tree.hits(make(), 0.0),
        lambda: tree.unmark(make(), 0, 0),
        lambda: SlotTree().hold(make(), 0.0),
    ]:
        with pytest.raises(InvalidTokens, match="token_ids.*" + words):
            call()
    assert (tree.show(), tree.stats(), tree.version, tree.hits([5], 0.0)) == before
    tree.check()


def test_a_refused_buffer_is_let_go() -> None:
    """An array cannot grow while its buffer is held; a reference kept after a refusal would make that visible."""
    tree = RadixTree()
    for prompt in [array("i", [1, -1]), array("Q", [1, 2]), array("q", [1, 2**40]), array("d", [1.0])]:
        for _ in range(3):
            with pytest.raises(InvalidTokens):
                tree.insert(prompt, 0.0)
        prompt.append(1)


def test_ids_of_the_known_part_are_not_read_twice_but_never_stored_wrong() -> None:
    """Matched ids equal stored ones, so only the rest is checked: a negative id is found wherever it stands."""
    tree = RadixTree()
    tree.insert(np.arange(100, dtype=np.int32), 0.0)
    for at in [0, 1, 50, 99, 100, 120]:
        prompt = np.arange(121, dtype=np.int32)
        prompt[at] = -1
        with pytest.raises(InvalidTokens, match=rf"token_ids\[{at}\]"):
            tree.insert(prompt, 0.0)
        with pytest.raises(InvalidTokens, match=rf"token_ids\[{at}\]"):
            tree.match(prompt)
    assert tree.show(2) == "(root)\n  [0 1 ...100]"


@pytest.mark.parametrize("count", [1, 7, 31, 32, 33, 64, 95, 130])
def test_a_negative_id_is_found_wherever_it_stands(count: int) -> None:
    tree = RadixTree()
    for at in range(count):
        prompt = np.full(count, 2**31 - 1, np.int32)
        tree.match(prompt)
        prompt[at] = -(2**31)
        with pytest.raises(InvalidTokens, match=rf"token_ids\[{at}\]"):
            tree.match(prompt)


def test_a_list_that_changes_while_it_is_read_is_refused() -> None:
    prompt: list[object] = [1, 2]

    class Treacherous:
        def __index__(self) -> int:
            prompt.clear()
            return 3

    prompt += [Treacherous(), *range(100_000)]
    with pytest.raises(InvalidTokens, match="token_ids changed its length"):
        RadixTree().match(prompt)


def test_what_an_element_raises_of_its_own_reaches_the_caller() -> None:
    class Broken:
        def __index__(self) -> int:
            raise KeyError("out of order")

    with pytest.raises(KeyError, match="out of order"):
        RadixTree().match([1, Broken()])


@pytest.mark.parametrize(
    "slots", [[-1, 2], [1, 2**31], np.array([1, -5], np.int32), [1.5, 2], "ab", np.zeros((1, 2), np.int32)]
)
def test_bad_slots_are_refused_under_their_own_name(slots: object) -> None:
    tree = SlotTree()
    hold = tree.hold([1, 2], 0.0)
    with pytest.raises(InvalidInput, match="slots") as error:
        tree.extend(hold, [1, 2], slots, 0.0)
    assert "token_ids" not in str(error.value)
    assert tree.worker_tokens(0) == hold.matched_tokens == 0
    tree.check()
