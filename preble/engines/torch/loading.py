"""Reads a model directory in transformers format into plain tensors. Owns what is supported and every refusal.

transformers builds the modules and fills them, so names, shards, ties, biases and rotary tables are its own; this
file takes the tensors out, fused for fewer and larger products. It runs nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import EngineError, InvalidConfig
from ..model_files import tokenizer_fingerprint

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEVICES = ("cpu", "cuda")

# These rotary rules change all frequencies once a sequence grows past a limit; keys in the cache would become wrong.
ROPE_LIMITED_TYPES = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear map: `weight` [in, out] and optional `bias` [out].

    On CPU the weight is stored in that order: a batch of a few rows then runs two to three times faster.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, in] to [n, out]."""
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; `qkv` is query, key and value side by side, `gate_up` gate and up."""

    input_norm: torch.Tensor
    qkv: Projection
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model: its shape, its weights on `device`, and `max_model_tokens`, the longest context it is run with.

    `rope_cos` and `rope_sin` have shape [max_model_tokens, head_dim]; the first half of `rope_sin` is negated, so
    that rotating is one swap of halves and two products.
    """

    name: str
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_model_tokens: int
    norm_eps: float
    eos_token_ids: tuple[int, ...]
    tokenizer_fingerprint: str
    dtype: torch.dtype
    device: torch.device
    activation: Callable[[torch.Tensor], torch.Tensor]
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    head: Projection
    rope_cos: torch.Tensor
    rope_sin: torch.Tensor

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that the keys and values of one token take in all layers."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * int(self.dtype.itemsize)


def choose_device(device: str) -> torch.device:
    """The torch device for "auto", "cpu" or "cuda" (or "cuda:1").

    Raises `InvalidConfig` for anything else, `EngineError` where CUDA is asked for and missing.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = device.partition(":")
    if kind not in DEVICES or (index and not (index.isascii() and index.isdecimal())):
        raise InvalidConfig(f'device must be "auto", "cpu" or "cuda", got {device!r}')
    if kind == "cuda" and not torch.cuda.is_available():
        raise EngineError(f"device {device!r} was asked for, but torch finds no CUDA device")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype for "auto", "float32" or "bfloat16". "auto" is bfloat16 where the hardware multiplies it."""
    if dtype == "auto":
        return torch.bfloat16 if _multiplies_bfloat16(device) else torch.float32
    if dtype not in DTYPES:
        raise InvalidConfig(f'dtype must be "auto", "float32" or "bfloat16", got {dtype!r}')
    return DTYPES[dtype]


def _multiplies_bfloat16(device: torch.device) -> bool:
    """True if bfloat16 products are fast here; oneDNN "supports" them also on CPUs where they are emulated."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def load_model(
    model_dir: str | os.PathLike[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_tokens: int | None = None,
) -> Model:
    """Load the model in `model_dir`. `max_model_tokens` None means as long as the model allows.

    Raises `EngineError` naming the path where files are missing or damaged or the model is of a kind that is not
    supported.
    """
    path = Path(model_dir)
    check_directory(path)
    with muted_transformers():
        module = _load_module(path, dtype)
    limit = context_limit(module.config, path, max_model_tokens)
    return _build(module, path, device, dtype, limit)


def check_directory(path: Path) -> dict[str, Any]:
    """The parsed config.json of `path`, if this engine can run the model. Raises `EngineError` naming the path."""
    if not path.is_dir():
        raise EngineError(f"model directory {path} does not exist or is not a directory")
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(f"model directory {path} has no readable config.json: {error}") from error
    except ValueError as error:
        raise EngineError(f"{file} is not JSON: {error}") from error
    architectures = config.get("architectures") or [] if isinstance(config, dict) else []
    if not any(name in ARCHITECTURES for name in architectures):
        raise EngineError(f"{file} names architectures {architectures}; supported are {', '.join(ARCHITECTURES)}")
    if config.get("quantization_config"):
        raise EngineError(f"{file} describes quantised weights, which are not supported")
    return dict(config)


def context_limit(config: Any, path: Path, asked_tokens: int | None) -> int:
    """The longest context in tokens: what was asked, at most what the model's positions allow.

    Raises `EngineError` where a sliding attention window is shorter: cached keys are shared on the premise that
    every later token sees every earlier one.
    """
    allowed = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) in ROPE_LIMITED_TYPES:
        allowed = min(allowed, int(rope.get("original_max_position_embeddings") or allowed))
    limit = allowed if asked_tokens is None else min(asked_tokens, allowed)
    window = getattr(config, "sliding_window", None)
    if window is not None and window < limit:
        raise EngineError(
            f"the model in {path} attends to a sliding window of {window} tokens, which is not supported for a "
            f"context of {limit}; max_model_tokens={window} would be"
        )
    return limit


@contextlib.contextmanager
def muted_transformers() -> Iterator[None]:
    """No progress bars from transformers while a model is loaded or saved; workers log, they do not draw."""
    from transformers.utils import logging

    drawing = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawing:
            logging.enable_progress_bar()


def _load_module(path: Path, dtype: torch.dtype) -> Any:
    """transformers' own module with its weights on CPU; every parameter must come from the files."""
    from transformers import AutoModelForCausalLM

    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # of half a dozen libraries, with no common base
        raise EngineError(f"cannot load the model in {path}: {error}") from error
    # transformers fills absent weights with random numbers and only warns.
    for problem in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in report.get(problem) or ())
        if names:
            raise EngineError(
                f"the model in {path} has {problem.replace('_', ' ')} in its weights: {', '.join(names[:5])}"
            )
    return module.eval()


def _build(module: Any, path: Path, device: torch.device, dtype: torch.dtype, limit: int) -> Model:
    """Take the tensors out of `module`, layer by layer, so that a layer's copy is dropped before the next is made."""
    config, body = module.config, module.model
    mover = _Mover(device, dtype)
    cos, sin = _rope_tables(body.rotary_emb, limit, path, _head_dim(config))
    embedding = mover.tensor(body.embed_tokens.weight)
    tied = module.lm_head.weight is body.embed_tokens.weight
    head = mover.projection(module.lm_head, tied_to=embedding if tied else None)
    layers = []
    for index, layer in enumerate(body.layers):
        layers.append(mover.layer(layer))
        body.layers[index] = torch.nn.Identity()
    return Model(
        name=path.resolve().name,
        vocab_size=int(embedding.shape[0]),
        heads=int(config.num_attention_heads),
        kv_heads=int(config.num_key_value_heads),
        head_dim=_head_dim(config),
        max_model_tokens=limit,
        norm_eps=float(config.rms_norm_eps),
        eos_token_ids=_eos_token_ids(module),
        tokenizer_fingerprint=tokenizer_fingerprint(path),
        dtype=dtype,
        device=device,
        activation=_activation(config.hidden_act),
        embedding=embedding,
        layers=tuple(layers),
        final_norm=mover.tensor(body.norm.weight),
        head=head,
        rope_cos=mover.tensor(cos),
        rope_sin=mover.tensor(sin),
    )


class _Mover:
    """Copies module weights to one device and dtype, in the layout that `Projection` wants."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def tensor(self, source: torch.Tensor) -> torch.Tensor:
        """`source` without gradient, on the device."""
        return source.detach().to(self._device, self._dtype)

    def projection(self, *linears: Any, tied_to: torch.Tensor | None = None) -> Projection:
        """The linear modules side by side. On CUDA, where the layout hardly matters, a tied weight is shared."""
        weight = self.tensor(torch.cat([linear.weight for linear in linears])) if tied_to is None else tied_to
        biases = [linear.bias for linear in linears]
        bias = None if biases[0] is None else self.tensor(torch.cat(biases))
        return Projection(weight.t().contiguous() if self._device.type == "cpu" else weight.t(), bias)

    def layer(self, source: Any) -> Layer:
        """One decoder layer."""
        attention, mlp = source.self_attn, source.mlp
        query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        return Layer(
            input_norm=self.tensor(source.input_layernorm.weight),
            qkv=self.projection(attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm=None if query_norm is None else self.tensor(query_norm.weight),
            key_norm=None if key_norm is None else self.tensor(key_norm.weight),
            output=self.projection(attention.o_proj),
            mlp_norm=self.tensor(source.post_attention_layernorm.weight),
            gate_up=self.projection(mlp.gate_proj, mlp.up_proj),
            down=self.projection(mlp.down_proj),
        )


def _rope_tables(rotary: Any, limit: int, path: Path, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of all positions below `limit`, computed by the model's own rotary module in float32."""
    with torch.inference_mode():
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(limit)[None])
    if cos.shape[-1] != head_dim:
        raise EngineError(
            f"the model in {path} rotates {cos.shape[-1]} of {head_dim} dimensions, which is not supported"
        )
    half = head_dim // 2
    return cos[0].clone(), torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    from transformers.activations import ACT2FN

    activation: Callable[[torch.Tensor], torch.Tensor] = ACT2FN[name]
    return activation


def _eos_token_ids(module: Any) -> tuple[int, ...]:
    """End-of-sequence tokens, from generation_config.json if it has any, else from config.json."""
    for config in (module.generation_config, module.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return tuple(int(token) for token in (eos if isinstance(eos, (list, tuple)) else [eos]))
    return ()
