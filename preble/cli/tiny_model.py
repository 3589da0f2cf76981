"""`preble tiny-model`: a model directory with random weights, to try workers without a download. Owns the command.

    preble tiny-model tiny              about 1M parameters, a trained tokenizer, a chat template
    preble tiny-model big --spec llama-20m --seed 3

Its answers are noise; its token counts, KV cache and timings are real. How it is made is `engines.tiny_models`'.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..engines.torch.tiny_models import SPECS, make_tiny_model_at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="the model's directory, which must not exist yet")
    parser.add_argument("--spec", choices=sorted(SPECS), default="llama-1m", help="its shape (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Make the model and print its directory. Raises `InvalidInput`, `MissingExtra`, `EngineError`."""
    sys.stdout.write(f"{make_tiny_model_at(args.spec, args.directory, seed=args.seed)}\n")
    return 0
