"""Types of `block_numbers.pyx`; what the function promises stands there."""

import numpy as np
import numpy.typing as npt

def numbered(names: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]: ...
