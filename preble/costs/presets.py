"""Published cost models by name, as data for `CostModel.preset`; knows no formula.

Published regressions (ms, tokens) of the paper's authors, sglang on one A6000 or A100 and vLLM on one A6000, with
two defects repaired: the quadratic middle branch of the first (it falls below zero) is a straight line between its
neighbours, and the per-request intercept of the 70B fits is charged once a batch. The H100 model is fitted to their
raw points (RMS 5 %).
"""

from __future__ import annotations

from ..lazy_typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "mistral-7b/a6000": {
        "knots": [(0, 22.0), (192, 22.0), (384, 45.845), (8192, 892.433)],
        "scale": 1 / 0.9,
        "context": (1024, 0.32, 0.159, 1.86e-4),
        "pair": (1048576, 0.0, 1.13e-3, 1.75e-3, 2.19e-6),
    },
    "mistral-7b/a100": {
        "knots": [(0, 8.96), (63, 8.96), (64, 10.5), (255, 10.5), (256, 18.386), (8192, 417.673)],
        "scale": 1 / 0.85,
        "context": (1024, 0.32, 0.159, 1.86e-4),
        "pair": (1048576, 0.0, -7.45358651e-4, 1.53422673e-3, 1.36265841e-6),
    },
    "llama-2-7b/a6000-vllm": {
        "knots": [(0, 26.07), (127, 26.07), (384, 55.974), (8192, 1078.822)],
        "scale": 1.0,
        "context": (0, 0.0, 0.0, 1.6637 / 2048),
        "pair": (0, 0.0, 0.0, 0.0, 0.0),
    },
    "llama-3-70b/a100-tp4": {
        "knots": [(0, 28.931389), (8192, 1521.787656)],
        "scale": 1.0,
        "context": (0, 0.0, 0.0, 4.00365142e-3),
        "pair": (0, 0.0, 0.0, 0.0, 2.55050069e-6),
    },
    "llama-3-70b/h100-tp4": {
        "knots": [(0, 36.0), (350, 36.0), (8192, 663.36)],
        "scale": 1.0,
        "context": (0, 0.0, 0.0, 3.148e-3),
        "pair": (0, 0.0, 0.0, 0.0, 7.15e-7),
    },
}
