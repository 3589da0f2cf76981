"""Where things are: the checkout, its pages, the committed results, and the data that checkouts share."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
SHARED = Path(os.environ.get("PREBLE_SHARED", ROOT.parent / "shared"))  # absent in most places
