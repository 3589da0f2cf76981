"""Runs one of the faults planted in `planted.c`, as a sanitizer command's proof that it would see a real one.

Usage: `planted.py LIBRARY FUNCTION`, or as a test, since what runs tests may keep a report to itself: `pytest
planted.py` with both in PREBLE_PLANTED. Owns no expectation: `sanitize.py` knows what must be reported.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

TIMES = 1000


def test_planted() -> None:
    run(*os.environ["PREBLE_PLANTED"].split(os.pathsep))


def run(library: str, function: str) -> None:
    fault = getattr(ctypes.CDLL(library), function)  # ctypes lets go of the GIL, as the core does
    if "race" not in function:
        fault()
        return
    threads = [threading.Thread(target=fault, args=[ctypes.c_long(TIMES)]) for _ in range(2)]
    for thread in threads:  # each waits inside for the other
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    run(*sys.argv[1:])
