"""The table of the gateways' benchmark: each row's CPU beside smg's, losses first."""

from __future__ import annotations

from typing import Any

from benchmarks.gateway.bench_gateway import DIRECT, PACES, table

US = {
    "preble": {1: 300.0, 16: 200.0, 64: 150.0},
    "smg": {1: 100.0, 16: 100.0, 64: 100.0},
    "other": dict.fromkeys((1, 16, 64), 90.0),
}


def cells(*names: str) -> list[dict[str, Any]]:
    times = {"ms_p50": 1.0, "added_ms_p50": 0.5, "added_ms_p99": 0.7}
    return [
        {"gateway": name, "kind": kind, "connections": n, "cpu_us": US.get(name, US["smg"])[n], **times}
        for name in (DIRECT, *names)
        for kind, paces in PACES.items()
        for n in paces
    ]


def test_each_row_has_its_cpu_beside_smgs_and_losses_come_first() -> None:
    rows = [line for line in table({"cells": cells("other", "smg", "preble")}).splitlines() if "0.50" in line]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == ["preble", "smg", "other"] * len(PACES)
    assert rows[0] == "| preble | 0.50 | 0.70 | 300 | 3.00 | 0.50 | 0.70 | 200 | 2.00 | 0.50 | 0.70 | 150 | 1.50 |"


def test_without_smg_there_is_no_ratio() -> None:
    rows = [line for line in table({"cells": cells("preble")}).splitlines() if "0.50" in line]
    assert len(rows) == len(PACES) and all(row.count("| - |") == 3 for row in rows)
