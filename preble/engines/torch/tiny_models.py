"""Makes tiny Llama models with random weights and a real tokenizer, so that tests and the demo need no download.

Owns the specs, the training of a byte-level BPE tokenizer on this machine's own Python standard library, and the
cache on disk. It does not run models (that is `preble.engines.torch`). Answers of such a model are noise; its token
counts, its KV cache and its timings are real. Needs torch, transformers and tokenizers, imported only when a model
is made.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import EngineError, InvalidInput
from . import need_torch

SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>")
PAD_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID = range(3)

# One line per turn, so that prompts which share their first turns share their first tokens.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinySpec:
    """Shape of one tiny model. `corpus_bytes_max` bounds the text its tokenizer is trained on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    corpus_bytes_max: int
    max_model_tokens: int = 8192


SPECS = {
    "llama-1m": TinySpec(2048, 128, 352, 3, 4, 2, 32, corpus_bytes_max=600_000),
    "llama-20m": TinySpec(8192, 384, 1152, 8, 6, 2, 64, corpus_bytes_max=4_000_000),
}


def make_tiny_model(spec: str, directory: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Return the directory of model `spec` under `directory`, in transformers format; it is made if it is not there.

    The directory appears under its final name only when complete, so a killed or a concurrent maker leaves no half
    model. The same seed gives the same weights on every machine; the tokenizer depends on the Python version, whose
    standard library it is trained on. Raises `InvalidInput` for an unknown spec, `MissingExtra` without torch,
    `EngineError` if the directory cannot be written.
    """
    if spec not in SPECS:
        raise InvalidInput(f"spec must be one of {sorted(SPECS)}, got {spec!r}")
    final = Path(directory) / f"{spec}-seed{seed}"
    if not final.is_dir():
        _make(SPECS[spec], final, seed)
    return final


def make_tiny_model_at(spec: str, final: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Make model `spec` as the directory `final`, which must not exist yet; otherwise like `make_tiny_model`.

    Raises `InvalidInput` for an unknown spec or a `final` that exists, which is left as it is.
    """
    if spec not in SPECS:
        raise InvalidInput(f"spec must be one of {sorted(SPECS)}, got {spec!r}")
    path = Path(final)
    if path.exists():
        raise InvalidInput(f"{path} exists already; nothing was changed")
    _make(SPECS[spec], path, seed)
    return path


def _make(spec: TinySpec, final: Path, seed: int) -> None:
    """Build the model beside `final`, then move it there."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    except OSError as error:
        raise EngineError(f"cannot make a model in {final.parent}: {error}") from error
    try:
        _write_model(spec, building, seed)
        building.chmod(0o755)
        _publish(building, final)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _publish(building: Path, final: Path) -> None:
    """Move the finished directory to its name; a concurrent maker that was first has made the same model."""
    try:
        os.rename(building, final)
    except OSError as error:
        if not final.is_dir():
            raise EngineError(f"cannot make the model {final}: {error}") from error


def _write_model(spec: TinySpec, path: Path, seed: int) -> None:
    need_torch()
    from .loading import muted_transformers

    with muted_transformers():
        _random_model(spec, seed).save_pretrained(path)
        train_tokenizer(spec).save_pretrained(path)


def _random_model(spec: TinySpec, seed: int) -> Any:
    """A `LlamaForCausalLM` in bfloat16 with random weights; torch's own random state is left as it was.

    Weights are not tied: with tied random embeddings a model mostly repeats its last token, whatever came before, and
    outputs would not show a wrong KV cache.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_model_tokens,
        initializer_range=0.06,
        tie_word_embeddings=False,
        pad_token_id=PAD_TOKEN_ID,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(torch.bfloat16)


def train_tokenizer(spec: TinySpec) -> Any:
    """A `PreTrainedTokenizerFast` of exactly `spec.vocab_size` byte-level BPE tokens.

    Raises `EngineError` where the standard library's source is missing or too small for that.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus(spec.corpus_bytes_max), trainer)
    if bpe.get_vocab_size() != spec.vocab_size:
        raise EngineError(
            f"the standard library in {stdlib_directory()} yields {bpe.get_vocab_size()} tokens, "
            f"{spec.vocab_size} are needed: is its source installed?"
        )
    pad, bos, eos = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=pad, bos_token=bos, eos_token=eos, model_max_length=spec.max_model_tokens
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def stdlib_directory() -> Path:
    """Where this Python keeps the source of its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def corpus(bytes_max: int) -> Iterator[str]:
    """Source texts of top-level standard-library modules, sorted by name, until `bytes_max` characters were given."""
    left = bytes_max
    packages = sorted(path for path in stdlib_directory().glob("*/*.py") if path.parent.name != "site-packages")
    for path in itertools.chain(sorted(stdlib_directory().glob("*.py")), packages):
        if left <= 0:
            return
        text = path.read_text(encoding="utf-8", errors="replace")[:left]
        left -= len(text)
        yield text
