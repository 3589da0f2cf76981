"""What there is to know about a model directory in transformers format, for engines that load the model themselves.

Owns reading them; needs neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..errors import InvalidConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model")
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def model_name(model: str) -> str:
    """What a model is called towards routers: the directory's name, or the name it was asked for by."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def tokenizer_fingerprint(path: Path) -> str:
    """sha256 of tokenizer.json in hexadecimal, "" without that file. Equal fingerprints mean equal token ids."""
    file = path / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def has_tokenizer(model: str) -> bool:
    """Whether an engine can load a tokenizer of its own; what is no directory is the engine's to find."""
    path = Path(model)
    return not path.is_dir() or any((path / name).is_file() for name in _TOKENIZER_FILES)


def sampling_defaults(path: Path) -> dict[str, float]:
    """How the model's maker says to choose tokens where a request does not: `temperature`, `top_p`, `top_k`, `min_p`,
    `repetition_penalty` of generation_config.json, those that are numbers. Raises `InvalidConfig` for a file that is
    none."""
    config = _json(path / "generation_config.json")
    return {name: config[name] for name in _DEFAULTS if type(config.get(name)) in (int, float)}


def eos_token_ids(path: Path) -> tuple[int, ...]:
    """End-of-sequence tokens, from generation_config.json if it has any, else from config.json; () without either.

    Raises `InvalidConfig` for a file that is none.
    """
    for name in ("generation_config.json", "config.json"):
        eos = _json(path / name).get("eos_token_id")
        if eos is not None:
            return tuple(int(token) for token in (eos if isinstance(eos, list) else [eos]))
    return ()


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise InvalidConfig(f"{file}: {error}") from None
    return values if isinstance(values, dict) else {}
