"""The forward pass: token ids of a batch in, logits out. Owns the arithmetic of Llama-family layers; decides nothing.

Rows are tokens of all items, one after the other. The last layer computes keys and values for every row, but
attention and the rest only for rows whose logits are wanted: with chunked prefill most rows exist only for their
KV.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import rms_norm

from ...batching._batch import BatchItem
from .attention import AttentionPlan, KvPool, plan_batch, plan_last_rows
from .loading import Layer, Model


class Runner:
    """Runs one model over its own KV pool of `kv_slots` tokens. Not thread-safe."""

    def __init__(self, model: Model, kv_slots: int) -> None:
        self._model = model
        self._pool = KvPool(len(model.layers), kv_slots, model.kv_heads, model.head_dim, model.dtype, model.device)

    @torch.inference_mode()
    def read_kv(self, slots: np.ndarray) -> memoryview:
        """KV of `slots` [n] int32 as bytes in the host's memory, a copy: keys, then values, each layer by layer."""
        block = self._pool.read(torch.tensor(slots, dtype=torch.int64, device=self._model.device))
        return memoryview(block.cpu().view(torch.uint8).numpy().reshape(-1))

    @torch.inference_mode()
    def write_kv(self, slots: np.ndarray, data: bytes | memoryview, skip: int) -> None:
        """Store what `read_kv` has given, but for its first `skip` tokens, in `slots` [n]."""
        model = self._model
        shape = (2, len(model.layers), -1, model.kv_heads, model.head_dim)
        block = torch.frombuffer(bytearray(data), dtype=model.dtype).view(shape)[:, :, skip:]
        self._pool.restore(
            torch.tensor(slots, dtype=torch.int64, device=model.device), block.to(model.device, copy=False)
        )

    @torch.inference_mode()
    def forward(self, items: Sequence[BatchItem]) -> torch.Tensor:
        """Compute `items`, write their KV, and return float32 logits [sampling items, vocab_size] in their order.

        Each item's context must have been computed before, except for its own tokens. Cost: all rows through all
        layers.
        """
        model = self._model
        rows = _Rows(items, model)
        x = model.embedding.index_select(0, rows.token_ids)
        last = len(model.layers) - 1
        plan = plan_batch(items, model.dtype, model.device) if last > 0 else None
        for index in range(last):
            assert plan is not None
            query = self._attention_input(index, x, rows)
            x = self._finish_layer(index, x, query, plan)
        query = self._attention_input(last, x, rows)
        if not rows.sampling:
            return torch.empty((0, model.vocab_size), dtype=torch.float32, device=model.device)
        x, query = x.index_select(0, rows.last_rows), query.index_select(0, rows.last_rows)
        x = self._finish_layer(last, x, query, plan_last_rows(rows.sampling, model.dtype, model.device))
        return model.head(self._norm(x, model.final_norm)).float()

    def _attention_input(self, index: int, x: torch.Tensor, rows: _Rows) -> torch.Tensor:
        """Queries [rows, heads, head_dim] of layer `index`; its keys and values go to the pool."""
        model, layer = self._model, self._model.layers[index]
        qkv = layer.qkv(self._norm(x, layer.input_norm)).view(len(x), -1, model.head_dim)
        turned, values = qkv.split((model.heads + model.kv_heads, model.kv_heads), 1)
        if layer.query_norm is not None:
            turned = self._norm_heads(turned, layer)
        turned = rotate(turned, rows.cos, rows.sin)
        queries, keys = turned.split((model.heads, model.kv_heads), 1)
        self._pool.write(index, rows.write_slots, keys, values)
        return queries

    def _finish_layer(self, index: int, x: torch.Tensor, query: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """The layer's output [rows, hidden] for residual `x` of the same rows as `query`."""
        layer = self._model.layers[index]
        attended = plan.attend(self._pool, index, query)
        x = x + layer.output(attended.view(len(x), -1))
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, -1)
        return x.add_(layer.down(self._model.activation(gate).mul_(up)))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, self._model.norm_eps)

    def _norm_heads(self, turned: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Qwen3 norms every query and key head before rotating."""
        assert layer.query_norm is not None and layer.key_norm is not None
        queries, keys = turned.split((self._model.heads, self._model.kv_heads), 1)
        return torch.cat((self._norm(queries, layer.query_norm), self._norm(keys, layer.key_norm)), 1)


class _Rows:
    """Per-row inputs of one step, on the device."""

    def __init__(self, items: Sequence[BatchItem], model: Model) -> None:
        positions = np.concatenate([np.arange(item.start, item.start + len(item.token_ids)) for item in items])
        position_ids = torch.tensor(positions, device=model.device)
        self.token_ids = _concatenate([item.token_ids for item in items], model.device)
        self.write_slots = _concatenate([item.write_slots for item in items], model.device)
        self.cos = model.rope_cos.index_select(0, position_ids)[:, None, :]
        self.sin = model.rope_sin.index_select(0, position_ids)[:, None, :]
        self.sampling = [item for item in items if item.samples]
        ends = np.cumsum([len(item.token_ids) for item in items])
        lasts = [int(end) - 1 for item, end in zip(items, ends, strict=True) if item.samples]
        self.last_rows = torch.tensor(lasts, dtype=torch.int64, device=model.device)


def _concatenate(arrays: list[np.ndarray], device: torch.device) -> torch.Tensor:
    """One int64 tensor of all arrays: torch's index_copy and embedding want that type."""
    return torch.tensor(np.concatenate(arrays), dtype=torch.int64, device=device)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [rows, heads, head_dim] with cos and signed sin [rows, 1, head_dim]."""
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((second, first), -1), sin)
