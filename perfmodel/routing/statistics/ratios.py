"""Quotients and means that may not exist."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def divide(parts: NDArray[Any], whole: NDArray[Any]) -> Floats:
    """Quotient, NaN where the divisor is zero; ``whole`` may lack axes at the end."""
    divisor = np.asarray(whole)[(..., *(np.newaxis for _ in range(parts.ndim - whole.ndim)))]
    result = np.full(np.broadcast_shapes(parts.shape, divisor.shape), np.nan)
    np.divide(parts, divisor, out=result, where=np.asarray(divisor != 0))
    return result


def mean_known(values: Floats, axis: int = 0) -> Floats:
    """Mean over one axis of the values that are not NaN; NaN where all are."""
    known = ~np.isnan(values)
    return divide(np.where(known, values, 0.0).sum(axis), known.sum(axis))
