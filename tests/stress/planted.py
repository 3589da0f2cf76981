"""Runs one of the faults planted in `planted.c`, as a sanitizer command's proof that it would see a real one.

Usage: `planted.py LIBRARY FUNCTION`. Owns no expectation: `sanitize.py` knows what must be reported.
"""

from __future__ import annotations

import ctypes
import sys
import threading

TIMES = 1000


def main() -> None:
    library, function = sys.argv[1:]
    fault = getattr(ctypes.CDLL(library), function)  # ctypes lets go of the GIL, as the core does
    if "race" not in function:
        fault()
        return
    threads = [
        threading.Thread(target=fault, args=[ctypes.c_long(TIMES)]) for _ in range(2)
    ]  # each waits for the other
    for thread in threads:  # each waits inside for the other
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
