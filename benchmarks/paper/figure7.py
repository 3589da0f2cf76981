"""Figure 7: five workloads on three fleets, latency against request rate. Owns the grid, its comparison with what was
published, and the check of the paper's ratios."""

from __future__ import annotations

from collections.abc import Iterator

from cells import Cell, Found

WORKLOADS = ("toolbench", "embodied", "programming", "videoqa", "loogle")
SYSTEMS = ("sglang_rr", "rr", "sglang_oracle", "oracle", "e2-paper", "e2")

# Rates of the published pictures; for H100, of the published configurations or such as reach saturation.
RATES: dict[tuple[str, str], tuple[float, ...]] = {
    ("2xa6000", "toolbench"): (3, 6, 9, 12, 15, 18),
    ("2xa6000", "embodied"): (5, 10, 20, 30, 40),
    ("2xa6000", "programming"): (1, 2, 2.5, 3, 3.5, 4),
    ("2xa6000", "videoqa"): (0.5, 1, 2, 3, 4, 5, 7),
    ("2xa6000", "loogle"): (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0),
    ("4xa6000", "toolbench"): (6, 12, 18, 24, 30, 36),
    ("4xa6000", "embodied"): (10, 20, 40, 60, 80),
    ("4xa6000", "programming"): (2, 4, 5, 6, 7, 8),
    ("4xa6000", "videoqa"): (1, 2, 4, 6, 8, 10),
    ("4xa6000", "loogle"): (0.2, 0.4, 0.6, 1.0, 1.4, 1.6, 1.8),
    ("2xh100-tp4", "toolbench"): (4, 8, 12, 16, 20, 24),
    ("2xh100-tp4", "embodied"): (3, 6, 12, 18, 24),
    ("2xh100-tp4", "programming"): (1.5, 3, 4.5, 5.5, 6.5),
    ("2xh100-tp4", "videoqa"): (1, 2, 4, 6, 8),
    ("2xh100-tp4", "loogle"): (0.2, 0.4, 0.6, 0.8, 1.0, 1.2),
}


def grid(quick: bool) -> Iterator[Cell]:
    """All cells; `quick`: three rates of each row, a tenth of the requests, without the paper's own E2."""
    for (fleet, workload), rates in RATES.items():
        chosen = (rates[0], rates[len(rates) // 2], rates[-1]) if quick else rates
        for rps in chosen:
            for system in SYSTEMS:
                if not (quick and system in ("e2-paper", "sglang_oracle")):
                    yield Cell("figure7", workload, fleet, system, rps, share=0.1 if quick else 1.0)


def curve(found: Found, fleet: str, workload: str, system: str, metric: str) -> tuple[list[float], list[float]]:
    """(rates, values) of one line of the figure."""
    points = sorted(
        (cell.rps, figures[metric])
        for cell, figures in found.items()
        if (cell.experiment, cell.fleet, cell.workload, cell.system) == ("figure7", fleet, workload, system)
    )
    return [rate for rate, _ in points], [value for _, value in points]
