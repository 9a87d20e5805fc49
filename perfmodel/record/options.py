"""Options of everything that runs a model, checked before anything is loaded."""

import math
from numbers import Real
from typing import Any

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.routing.npz import shown

#: Number formats that a model may be run in.
DTYPES = ("float32", "bfloat16", "float16")


def is_whole(value: Any) -> bool:
    """Whether this is a whole number, of Python or NumPy; true and false are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def at_least(value: int, least: int, name: str) -> int:
    """A whole number from ``least`` up. Raises :class:`PerfModelError` for anything else."""
    found: object = value
    if not is_whole(found) or value < least:
        raise PerfModelError(f"{name}: found {shown(value)}, allowed: a whole number from {least} up")
    return int(value)


def number(value: float, name: str, lowest: float, highest: float, allowed: str) -> float:
    """A number from ``lowest`` to ``highest``. Raises :class:`PerfModelError` for anything else."""
    found: object = value
    fine = isinstance(found, Real) and not isinstance(found, bool)
    if not fine or not lowest <= value <= highest or not math.isfinite(value):
        raise PerfModelError(f"{name}: found {shown(value)}, allowed: {allowed}")
    return float(value)


def flag(value: bool, name: str) -> bool:
    """True or false. Raises :class:`PerfModelError` for anything else."""
    found: object = value
    if not isinstance(found, bool | np.bool_):
        raise PerfModelError(f"{name}: found {shown(value)}, allowed: True or False")
    return bool(value)


def check_dtype(dtype: str) -> None:
    """Refuse a number format that no model is run in."""
    given: object = dtype
    if not isinstance(given, str) or given not in DTYPES:
        raise PerfModelError(f"dtype: found {shown(dtype)}, allowed: {', '.join(DTYPES)}")
