"""Checks that arrays of importance and of losses share."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PolicyError, TraceError


def finite(values: Any, name: str, error: type[PolicyError] | type[TraceError]) -> NDArray[np.float64]:
    """``values`` as float64, refusing everything that is not a finite real number."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as reason:
        raise error(f"{name} is not an array of numbers: {reason}") from None
    if array.dtype.kind not in "iuf" and array.size:
        raise error(f"{name} holds values of type {array.dtype}; they must be real numbers")
    if array.size == 0:
        return np.empty(array.shape)
    with np.errstate(over="ignore"):
        array = array.astype(np.float64)
    _refuse(array, ~np.isfinite(array), name, "finite", error)
    return array


def not_negative(array: NDArray[np.float64], name: str, error: type[PolicyError] | type[TraceError]) -> None:
    _refuse(array, array < 0, name, "0 or more", error)


def _refuse(
    array: NDArray[np.float64],
    bad: NDArray[np.bool_],
    name: str,
    allowed: str,
    error: type[PolicyError] | type[TraceError],
) -> None:
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        place = f"{name}{list(where)}" if where else name
        raise error(f"{place} is {array[where]}; it must be {allowed}")
