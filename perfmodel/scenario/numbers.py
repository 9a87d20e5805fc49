"""Numbers as callers give them: Python's own and NumPy's scalars alike."""

from numbers import Integral, Real

import numpy as np


def real(value: object) -> float | None:
    """A number as a float; None for anything else, truth values and numbers beyond all limits among it."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def whole(value: object) -> int | None:
    """A whole number of an integer type; None for anything else."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        return None
    return int(value)


def plain(value: object) -> object:
    """A NumPy scalar as Python's own, for messages; everything else as it is."""
    return value.item() if isinstance(value, np.generic) else value
