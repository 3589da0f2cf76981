"""Where things are: the checkout, the tests' data, and the data that checkouts share."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
SHARED = Path(os.environ.get("PREBLE_SHARED", ROOT.parent / "shared"))  # absent in most places
