"""The torch engine: runs a Llama-family model directory on CPU or CUDA, with KV reuse across requests.

Owns the check that torch and transformers are installed, and the public name. Life of a step: `engine` asks
`LocalScheduler` for a batch, `runner` computes it over the KV pool, `sampling` chooses tokens, `LocalScheduler`
books them. `loading` reads model directories, `attention` reads the pool.
"""

from __future__ import annotations

from importlib.util import find_spec

from ...errors import MissingExtra

for _package in ("torch", "transformers"):
    if find_spec(_package) is None:
        raise MissingExtra(f'the torch engine needs {_package}: pip install "preble[torch]"')

from .engine import TorchEngine  # noqa: E402  (after the check, so that the error names the remedy)

__all__ = ["TorchEngine"]
