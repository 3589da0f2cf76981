"""Types of `sample_terms.pyx`; what the functions promise stands there."""

import numpy as np
import numpy.typing as npt

from ..._cost import CostModel

Floats = npt.NDArray[np.float64]

def prefill_terms(prior: CostModel, rows: Floats) -> Floats: ...
def decode_terms(prior: CostModel, rows: Floats, own_share_min: float) -> tuple[Floats, npt.NDArray[np.bool_]]: ...
