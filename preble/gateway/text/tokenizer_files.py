"""The files of a tokenizer: a directory, or a hub's name for one. Owns what is fetched, and what is said where that is
not possible."""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import InvalidConfig, MissingExtra

# What `TextCodec` reads; weights are not among them.
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template*", "config.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def tokenizer_directory(name: str) -> str:
    """The directory of that name; of a hub's name (org/name) the one that its files were fetched into, as
    huggingface_hub keeps them: HF_TOKEN, HF_ENDPOINT and HF_HOME hold. Raises `InvalidConfig` with what to do."""
    if Path(name).exists() or not _HUB_NAME.fullmatch(name):
        return name
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingExtra(f"tokenizer {name}: it takes huggingface_hub: pip install 'preble[gateway]'") from error
    try:
        directory: str = snapshot_download(name, allow_patterns=list(FILES))
    except Exception as error:
        raise InvalidConfig(
            f"tokenizer {name}: there is no such directory, and the hub did not give it ({type(error).__name__}). "
            "Where no hub can be reached, copy the model's tokenizer.json, tokenizer_config.json and "
            "chat_template.jinja into a directory, and name that; a gated model needs HF_TOKEN"
        ) from error
    return directory
