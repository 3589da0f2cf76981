"""The KV pool and attention over it. Owns the pool's tensors and how a mixed batch reads them; chooses no slots.

A batch is a row per token: decodes first, then prefill chunks. Every row sees the context of its own request, whose
keys and values lie in pool slots in any order, so each attention call first gathers them:

    decodes          padded to the longest of their group   query [B, kv_heads, group, head_dim]   mask hides padding
    a prefill chunk  one call each                          query [kv_heads, group, n, head_dim]   mask is causal

`group` is the number of query heads that share a key head. It takes the place of the query length for decodes, and
for chunks the keys are expanded along it without a copy, so grouped heads never cost a repeated key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from ...batching._batch import BatchItem

# Tokens gathered by one call for decodes, at most (a single longer context is a call of its own). On CPU the copies
# should stay in the core's cache until attention reads them; on CUDA calls are what costs, and the bound is on
# temporary memory.
CPU_GATHER_TOKENS_MAX = 1 << 10
CUDA_GATHER_TOKENS_MAX = 1 << 17

Int32Array = npt.NDArray[np.int32]


class KvPool:
    """Keys and values of all cached tokens: two tensors [layers, slots, kv_heads, head_dim], zero at first.

    Not thread-safe: one buffer serves all reads.
    """

    def __init__(
        self, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (layers, slots, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._scratch = self.keys.new_empty((2, 0, kv_heads, head_dim))

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [n, kv_heads, head_dim] in `slots` [n] (int64)."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `slots` [n], in that order: two tensors [n, kv_heads, head_dim].

        They are valid until the next call: fresh memory for every copy would cost more than the copying.
        """
        count = len(slots)
        if self._scratch.shape[1] < count:
            self._scratch = self.keys.new_empty((2, max(count, 2 * self._scratch.shape[1]), *self.keys.shape[2:]))
        keys, values = self._scratch[0, :count], self._scratch[1, :count]
        torch.index_select(self.keys[layer], 0, slots, out=keys)
        torch.index_select(self.values[layer], 0, slots, out=values)
        return keys, values

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of what `slots` [n] hold in all layers: [2, layers, n, kv_heads, head_dim], keys first."""
        layers, _, kv_heads, head_dim = self.keys.shape
        block = self.keys.new_empty((2, layers, len(slots), kv_heads, head_dim))
        torch.index_select(self.keys, 1, slots, out=block[0])
        torch.index_select(self.values, 1, slots, out=block[1])
        return block

    def restore(self, slots: torch.Tensor, block: torch.Tensor) -> None:
        """Store in `slots` [n] what `read` has given."""
        self.keys.index_copy_(1, slots, block[0])
        self.values.index_copy_(1, slots, block[1])


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one token each that attend together, their contexts padded to one length.

    `rows` [B]; `slots` [B * length]; `mask` [B, 1, 1, length], None without padding.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None

    def attend(self, pool: KvPool, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Fill this group's rows of `out` [rows, heads, head_dim] from `queries` of the same shape."""
        keys, values = pool.gather(layer, self.slots)
        count, kv_heads, head_dim = len(self.rows), keys.shape[1], keys.shape[2]
        shape = (count, -1, kv_heads, head_dim)
        result = scaled_dot_product_attention(
            queries[self.rows].view(count, kv_heads, -1, head_dim),
            keys.view(shape).transpose(1, 2),
            values.view(shape).transpose(1, 2),
            attn_mask=self.mask,
        )
        out.index_copy_(0, self.rows, result.reshape(count, -1, head_dim))


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows `first` .. `end` - 1, consecutive tokens of one request.

    `slots` [context]; `mask` [n, context], None for a chunk that starts at position 0 and is plainly causal.
    """

    first: int
    end: int
    slots: torch.Tensor
    mask: torch.Tensor | None

    def attend(self, pool: KvPool, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Fill this chunk's rows of `out` [rows, heads, head_dim] from `queries` of the same shape."""
        keys, values = pool.gather(layer, self.slots)
        rows, kv_heads, head_dim = self.end - self.first, keys.shape[1], keys.shape[2]
        query = queries[self.first : self.end].view(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        group = query.shape[1]
        result = scaled_dot_product_attention(
            query,
            keys.transpose(0, 1)[:, None].expand(-1, group, -1, -1),
            values.transpose(0, 1)[:, None].expand(-1, group, -1, -1),
            attn_mask=self.mask,
            is_causal=self.mask is None,
        )
        out[self.first : self.end].view(rows, kv_heads, group, head_dim).copy_(result.permute(2, 0, 1, 3))


class AttentionPlan:
    """How the rows of one batch attend: made once for a step, used by every layer."""

    def __init__(self, decodes: list[DecodeGroup], chunks: list[PrefillChunk]) -> None:
        self._parts: list[DecodeGroup | PrefillChunk] = [*decodes, *chunks]

    def attend(self, pool: KvPool, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attention output [rows, heads, head_dim] of `queries` of that shape.

        Keys and values of the rows themselves must be in the pool by now.
        """
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for part in self._parts:
            part.attend(pool, layer, queries, out)
        return out


def plan_batch(items: Sequence[BatchItem], dtype: torch.dtype, device: torch.device) -> AttentionPlan:
    """The plan for all rows of a batch, in the order of its items."""
    singles: list[tuple[int, Int32Array]] = []
    chunks = []
    row = 0
    for item in items:
        end = row + len(item.token_ids)
        if end - row == 1:
            singles.append((row, item.context_slots))
        else:
            chunks.append(_chunk(row, end, item, dtype, device))
        row = end
    return AttentionPlan(_groups(singles, dtype, device), chunks)


def plan_last_rows(items: Sequence[BatchItem], dtype: torch.dtype, device: torch.device) -> AttentionPlan:
    """The plan for one row per item, its last token: all that the last layer computes of items which sample."""
    return AttentionPlan(_groups([(row, item.context_slots) for row, item in enumerate(items)], dtype, device), [])


def _chunk(row: int, end: int, item: BatchItem, dtype: torch.dtype, device: torch.device) -> PrefillChunk:
    mask = None
    if item.start > 0:
        mask = torch.full((end - row, len(item.context_slots)), -math.inf, dtype=dtype, device=device)
        mask.triu_(item.start + 1)
    return PrefillChunk(row, end, _to_device(item.context_slots, device), mask)


def _groups(singles: list[tuple[int, Int32Array]], dtype: torch.dtype, device: torch.device) -> list[DecodeGroup]:
    return [_group(members, dtype, device) for members in group_by_length(singles, device.type)]


def group_by_length(singles: list[tuple[int, Int32Array]], device_type: str) -> Iterator[list[tuple[int, Int32Array]]]:
    """Split (row, context slots) pairs into groups that share an attention call, longest first.

    No group is empty, at most half of its tokens are padding, and it gathers no more than the device's bound.
    """
    tokens_max = CPU_GATHER_TOKENS_MAX if device_type == "cpu" else CUDA_GATHER_TOKENS_MAX
    members: list[tuple[int, Int32Array]] = []
    for single in sorted(singles, key=lambda single: -len(single[1])):
        if members:
            longest = len(members[0][1])
            if 2 * len(single[1]) < longest or (len(members) + 1) * longest > tokens_max:
                yield members
                members = []
        members.append(single)
    if members:
        yield members


def _group(members: list[tuple[int, Int32Array]], dtype: torch.dtype, device: torch.device) -> DecodeGroup:
    """Pad with the row's own first slot: its values are finite, so a weight of zero hides them."""
    length = len(members[0][1])
    slots = np.empty((len(members), length), np.int32)
    for index, (_, context) in enumerate(members):
        slots[index, : len(context)] = context
        slots[index, len(context) :] = context[0]
    rows = np.array([row for row, _ in members], np.int64)
    mask = None
    lengths = np.array([len(context) for _, context in members])
    if lengths[-1] < length:
        hidden = np.arange(length)[None, :] >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -math.inf)
        mask = mask.to(device)[:, None, None, :]
    return DecodeGroup(_to_device(rows, device), _to_device(slots.reshape(-1), device), mask)


def _to_device(array: npt.NDArray[np.integer], device: torch.device) -> torch.Tensor:
    """A private tensor of `array`: batches hand out views that do not outlive the step."""
    return torch.tensor(array, device=device)
