"""Stands in for the compiled `sgl_kernel` where that has no build: SGLang on a machine without a GPU. For tests only.

SGLang asks whether fast CPU kernels are there and takes its own plain torch code where they are not, with one
exception: the table of KV slots, which is filled here. Any other kernel it asks for raises when called, not when
imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0+cpu"


def assign_req_to_token_pool_cpu(rows: Any, table: Any, starts: Any, ends: Any, slots: Any, *_pool_width: Any) -> None:
    """Write the new KV slots of each request into its row of the table: columns starts[i]:ends[i], in order."""
    counts = (ends - starts).tolist()
    for row, start, new in zip(rows.tolist(), starts.tolist(), slots.split(counts), strict=True):
        table[row, start : start + len(new)] = new.to(table.dtype)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Any other kernel: importable, so that modules which never call it load."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: Any, **_named: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for CPUs")

    return missing
