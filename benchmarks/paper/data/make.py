"""Makes the slices of published traces in this folder from the whole files. Owns which rows they have.

    python -m benchmarks.paper.data.make FOLDER     # with mooncake_conversation.jsonl.gz, azure_code_2023.csv.gz, ...

Mooncake: five samples without a conversation in common, each of whole conversations (rows with the same second block),
drawn at random until they have `ROWS` rows. A stretch of so few rows in a row would have next to no prefix in common.
Azure: the times of the rows from `AZURE_SKIP` on, enough for five samples.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
SAMPLES = 5
ROWS = 240
AZURE_SKIP = 200
AZURE_ROWS = {"code": 800, "conv": 409}  # of each of the samples


def main(folder: Path) -> None:
    for name in ("conversation", "synthetic"):
        with gzip.open(folder / f"mooncake_{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        for number, sample in enumerate(conversations(rows)):
            text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in sample)
            write(f"mooncake_{name}_{number}.jsonl.gz", text)
    for name, count in AZURE_ROWS.items():
        with gzip.open(folder / f"azure_{name}_2023.csv.gz", "rt", encoding="utf-8") as file:
            head, *lines = file.read().splitlines()
        kept = lines[AZURE_SKIP : AZURE_SKIP + SAMPLES * count]
        write(f"azure_{name}.csv.gz", "\n".join([head, *kept, ""]))


def conversations(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Samples of whole conversations, each in the order of time."""
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row["hash_ids"][min(1, len(row["hash_ids"]) - 1)], []).append(place)
    names = list(groups)
    drawn = iter(np.random.default_rng(0).permutation(len(names)).tolist())
    samples = []
    for _ in range(SAMPLES):
        places: list[int] = []
        while len(places) < ROWS:
            places += groups[names[next(drawn)]]
        samples.append([rows[place] for place in sorted(places)])
    return samples


def write(name: str, text: str) -> None:
    """A gzip file without a time in it."""
    (HERE / name).write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
