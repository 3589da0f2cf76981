"""The torch engine: runs a Llama-family model directory on CPU or CUDA, with KV reuse across requests.

Owns the check that torch and transformers are installed, and the public name, which imports them. Life of a step:
`engine` asks `LocalScheduler` for a batch, `runner` computes it over the KV pool, `sampling` chooses tokens,
`LocalScheduler` books them. `loading` reads model directories, `attention` reads the pool, `tiny_models` makes models.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...errors import MissingExtra

if TYPE_CHECKING:
    from .engine import TorchEngine as TorchEngine


def need_torch() -> None:
    """Raise `MissingExtra`, which names the remedy, unless torch and transformers are installed. Imports neither."""
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise MissingExtra(f'the torch engine needs {package}: pip install "preble[torch]"')


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name != "TorchEngine":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        need_torch()
        from .engine import TorchEngine

        return TorchEngine
