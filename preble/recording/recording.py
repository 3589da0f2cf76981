"""`preble.Recording`: traffic on record with its files and its workload. Owns nothing but the methods."""

from __future__ import annotations

import os

from ..workloads import Workload
from .lines import read_files, write_file
from .recorded import RecordedTraffic
from .replaying import workload_of


class Recording(RecordedTraffic):
    """Requests on record, in the order of their arrival, and the workers they ran on; fields are `RecordedTraffic`'s.

    Made by `read`, or of requests that somebody else has seen. Thread-safe: nothing changes it. Raises `InvalidInput`.
    """

    __slots__ = ()

    @classmethod
    def read(cls, *paths: str | os.PathLike[str]) -> Recording:
        """Returns what is recorded in `paths`: a recording's file with those that were rotated away (FILE.1, ...), or
        those of several processes together. O(bytes).

        A file that was cut within a record is read up to there. Raises `InvalidInput` naming the file and what is wrong
        with it: it is none, is damaged, is of another version, or is not of the same recording as the others.
        """
        return cls(**read_files(paths))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it to `path` as one new file, whole or not at all. Raises `InvalidInput` where it cannot be written.
        O(requests)."""
        write_file(path, self)

    def workload(self) -> Workload:
        """Returns its requests with invented token ids, to simulate; see `replaying.workload_of`. Raises
        `InvalidInput`. O(tokens)."""
        return workload_of(self)
