"""The radix tree of all prompts of a workload, with how many requests lie below each node. Owns nodes and splitting.

It is built once, in file order, and never shrinks, so it needs no locks, marks or byte budget. A node's label is not
copied: it is a place in the parts of the prompt that made the node. Parts that requests share are compared by identity
first, so a document of 23,000 tokens costs one pointer comparison for every question about it but the first.

After the prompts 1 2 3 4 and 1 2 5 (a split keeps the old node as the lower half, so that what points to the end of
a prompt stays right):

    root -- [1 2] -- [3 4]     1 request ends here
                  \\- [5]       1 request ends here
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


class Node:
    """`tokens` tokens of `parts`, from token `offset` of part `index` on. The counts are set by `PromptTree.count`."""

    __slots__ = ("children", "ends", "index", "key", "offset", "parts", "requests", "tokens")

    def __init__(self, parts: Sequence[Tokens], index: int, offset: int, tokens: int) -> None:
        self.parts = parts
        self.index = index
        self.offset = offset
        self.tokens = tokens
        self.children: dict[int, Node] = {}  # by first token
        self.ends = 0  # requests whose prompt ends with this node
        self.requests = 0  # requests whose prompt contains this node
        self.key: Node = self  # the key portion of the requests that end here

    @property
    def first_token(self) -> int:
        """The token by which the parent finds this node."""
        return int(self.parts[self.index][self.offset])


class PromptTree:
    """Prompts as a radix tree. Add all of them, then `count` once, then read the nodes."""

    def __init__(self) -> None:
        self.root = Node((), 0, 0, 0)
        self.requests = 0

    def add(self, parts: Sequence[Tokens]) -> tuple[Node, int]:
        """Add a prompt given as the parts it is made of, int32, shape [n] each; nobody may write to them afterwards.

        Returns the node it ends with and how many of its leading tokens stood in the tree before.
        """
        parts = [part for part in parts if len(part)]
        node, index, offset, shared_tokens = self.root, 0, 0, 0
        while index < len(parts):
            child = node.children.get(int(parts[index][offset]))
            if child is None:
                node = self._add_leaf(node, parts, index, offset)
                break
            agreed, cut, (index, offset) = agreement(child, parts, index, offset)
            shared_tokens += agreed
            node = child if agreed == child.tokens else split(node, child, agreed, cut)
        node.ends += 1
        self.requests += 1
        return node, shared_tokens

    def _add_leaf(self, parent: Node, parts: Sequence[Tokens], index: int, offset: int) -> Node:
        leaf = Node(parts, index, offset, sum(map(len, parts[index:])) - offset)
        parent.children[leaf.first_token] = leaf
        return leaf

    def count(self) -> int:
        """Set `requests` and `key` of every node; returns the number of nodes, the empty root left out."""
        order: list[tuple[Node, Node]] = []  # (parent, node), parents first
        stack = [(self.root, self.root, 0)]
        while stack:
            parent, node, before_tokens = stack.pop()
            order.append((parent, node))
            node.requests = node.ends
            node.key = node if node.tokens > before_tokens else parent.key
            stack.extend((node, child, before_tokens + node.tokens) for child in node.children.values())
        for parent, node in reversed(order[1:]):
            parent.requests += node.requests
        return len(order) - 1


def split(parent: Node, node: Node, tokens: int, cut: tuple[int, int]) -> Node:
    """Cut `node` after its first `tokens` tokens, where `cut` is (part, offset); returns the new upper half."""
    upper = Node(node.parts, node.index, node.offset, tokens)
    parent.children[node.first_token] = upper
    node.index, node.offset = cut
    node.tokens -= tokens
    upper.children[node.first_token] = node
    return upper


def agreement(
    node: Node, parts: Sequence[Tokens], index: int, offset: int
) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """How far a prompt goes along with a node: (tokens, place after them in the node's parts, place in the prompt's).

    The two may be cut into parts at different tokens.
    """
    ours, here, start = node.parts, node.index, node.offset
    agreed = 0
    while agreed < node.tokens and index < len(parts):
        left, right = ours[here], parts[index]
        count = min(len(left) - start, len(right) - offset, node.tokens - agreed)
        same = count
        if left is not right or start != offset:
            same = common_prefix(left[start : start + count], right[offset : offset + count])
        agreed, start, offset = agreed + same, start + same, offset + same
        if same < count:
            break
        if start == len(left):
            here, start = here + 1, 0
        if offset == len(right):
            index, offset = index + 1, 0
    return agreed, (here, start), (index, offset)


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Leading tokens in which two arrays of one length agree."""
    differs = left != right
    first = int(differs.argmax())
    return first if differs[first] else len(left)
