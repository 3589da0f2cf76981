"""Types of `robust_fit.pyx`; what the function promises stands there."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

def robust_factors(
    terms: Floats,
    seconds: Floats,
    weights: Floats,
    ridge: Floats,
    *,
    spread_min: float,
    spread_of_one: float,
    limit: float,
) -> tuple[tuple[float, float, float, float, float], list[list[float]]] | None: ...
