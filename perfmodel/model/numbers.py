"""Checks of numbers that callers pass to a model."""

import math
from numbers import Real

from perfmodel.errors import ModelConfigError
from perfmodel.families import one_line


def real(value: object) -> float:
    """The value as a float; not-a-number for what is no real number, and for integers beyond floats."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def between(value: object, low: float, high: float, what: str) -> float:
    """The value as a float from ``low`` to ``high``; ModelConfigError otherwise."""
    number = real(value)
    if not low <= number <= high:
        raise ModelConfigError(f"{what} is {one_line(value)}; allowed: a number from {low:g} to {high:g}")
    return number


def bits_of(value: object, what: str) -> float:
    """Bits of a stored number [bit]; ModelConfigError unless above 0 and at most 64."""
    number = real(value)
    if not 0 < number <= 64:
        raise ModelConfigError(f"{what} is {one_line(value)}; allowed: a number above 0 and at most 64")
    return number
