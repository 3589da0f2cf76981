"""Files of requests that a command reads: the options, the tokenizer, what is said of it. Owns no format."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import workloads
from ..errors import InvalidInput, MissingExtra
from ..workloads import Tokenizer, Workload
from ..workloads.readers import READERS, TEXTLESS
from .console import positive_int

TOKENIZER_HELP = "words, mistral, or a model's folder with tokenizer.json (default: {}); files without text need none"


def add_options(add: Callable[..., Any], tokenizer: str) -> None:
    """The options of whatever reads files. `tokenizer` says the default."""
    add("--format", choices=tuple(READERS), metavar="NAME", help="of the file (default: looks at it; docs/own-data.md)")
    add("--tokenizer", metavar="NAME|DIR", help=TOKENIZER_HELP.format(tokenizer))
    add("--output-tokens", type=positive_int, default=128, metavar="N",
        help="of answers whose length the file does not say (default: 128)")  # fmt: skip


def read(args: argparse.Namespace, path: Path, limit: int | None, default: Callable[[], Tokenizer]) -> Workload:
    """Read a file as the options say. `default` makes the tokenizer where none is asked for, and only for text."""
    name = args.format or workloads.format_of(path)
    tokenizer = None if name in TEXTLESS else named(args.tokenizer) if args.tokenizer else default()
    return workloads.read(path, tokenizer=tokenizer, format=name, limit=limit, output_tokens=args.output_tokens)


def named(name: str) -> Tokenizer:
    """The tokenizer of `--tokenizer`. Raises `MissingExtra` where what it needs is not installed, `InvalidInput`."""
    try:
        if name in ("words", "mistral"):
            return workloads.words() if name == "words" else workloads.mistral()
        if not Path(name).exists():
            raise InvalidInput(f"--tokenizer must be words, mistral, or a folder with tokenizer.json, got {name!r}")
        return workloads.from_file(name)
    except MissingExtra as error:
        raise MissingExtra(f"{error}; or choose --tokenizer words") from error


def said(workload: Workload) -> str:
    """The notes on a workload, a line each."""
    return "".join(f"note: {note}\n" for note in workload.notes)
