"""What KV depends on beside the tokens, as a name: two engines of one name may hand their caches to each other. Owns
the name only.

Weights are known by a sample of each tensor, for hashing all of a large model would take longer than loading it:
whoever trains, merges or quantises changes most numbers of what it changes at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields

import torch

from .loading import Layer, Model, Projection

_SAMPLE = 1024  # numbers of a tensor, evenly spaced


def kv_layout(model: Model) -> str:
    """A name of 40 characters or so: equal for engines that compute the same KV of the same tokens, in the same bytes.
    Cost: a read of some numbers of each tensor."""
    shape = (len(model.layers), model.heads, model.kv_heads, model.head_dim, model.vocab_size, model.norm_eps)
    digest = hashlib.sha256(repr((shape, str(model.dtype), model.device.type)).encode())
    for tensor in _tensors(model):
        digest.update(_sample(tensor))
    return f"torch-{digest.hexdigest()[:32]}"


def _tensors(model: Model) -> Iterator[torch.Tensor]:
    """All that keys and values are made of; not the output's head. Rotations: of the first positions, which every
    engine has, however long its contexts may be."""
    yield model.embedding
    yield from (model.rope_cos[:2], model.rope_sin[:2])
    for layer in model.layers:
        for field in fields(Layer):
            part = getattr(layer, field.name)
            if isinstance(part, Projection):
                yield from (one for one in (part.weight, part.bias) if one is not None)
            elif part is not None:
                yield part


def _sample(tensor: torch.Tensor) -> bytes:
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.t().reshape(-1)
    chosen = flat[:: max(len(flat) // _SAMPLE, 1)][: 2 * _SAMPLE]
    return bytes(chosen.contiguous().cpu().view(torch.uint8).numpy().tobytes())
