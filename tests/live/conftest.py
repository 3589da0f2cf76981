"""Keeps the live tests out of `make test`: they need engines of several gigabytes. `make test-live` runs them."""

import os

collect_ignore_glob = [] if os.environ.get("PREBLE_LIVE_TESTS") == "1" else ["test_*.py"]
