"""Checks of what describes experts: importance, losses, sizes, widths and options."""

import difflib
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PolicyError, TraceError
from perfmodel.routing.npz import one_line, shown

#: Widest format of a loss table and of a menu [bit].
WIDEST = 16
#: Largest array of float64 that is taken [1]: 4 GiB.
LARGEST = 2**29


def finite(values: Any, name: str, error: type[PolicyError] | type[TraceError]) -> NDArray[np.float64]:
    """``values`` as float64, refusing everything that is not a finite real number."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as reason:
        raise error(f"{name} is not an array of numbers: {one_line(reason)}") from None
    if array.dtype.kind not in "iuf" and array.size:
        raise error(f"{name} holds values of type {array.dtype}; they must be real numbers")
    if array.size > LARGEST:
        raise error(f"{name} has shape {list(array.shape)}, {array.size} numbers; it may hold {LARGEST}")
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


def choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuse a word that is not one of those allowed."""
    if not isinstance(value, str) or value not in allowed:
        near = difflib.get_close_matches(value[:80], allowed, 1) if isinstance(value, str) else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PolicyError(f"{name} is {shown(value)}; it must be {' or '.join(map(repr, allowed))}{hint}")


def as_float(value: Any) -> float:
    """One real number as a float, infinite where it is too large; nan for everything else, true and false too."""
    if type(value) is float:
        return value
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def mean_within(mean_bits: Any, bits: tuple[int, ...]) -> float:
    """``mean_bits`` as a float, refused unless it is a number that the menu spans."""
    mean = as_float(mean_bits)
    if not bits[0] <= mean <= bits[-1]:
        raise PolicyError(f"mean_bits is {shown(mean_bits)}; it must be a number from {bits[0]} to {bits[-1]}")
    return mean


def menu(bits: Any, name: str, error: type[PolicyError] | type[TraceError]) -> tuple[int, ...]:
    """A menu of widths as a tuple of whole numbers, rising."""
    found = finite(bits, name, error)
    whole = found.ndim == 1 and found.size > 0 and bool((found == np.floor(found)).all())
    if not whole or found.min() < 1 or found.max() > WIDEST or (np.diff(found) <= 0).any():
        given = shown(np.asarray(bits).tolist())
        raise error(f"{name} is {given}; it must be whole numbers from 1 to {WIDEST}, rising")
    return tuple(int(width) for width in found)


def per_expert(values: Any, name: str, num_experts: int) -> NDArray[np.float64]:
    """Finite numbers, one for each expert on the last axis."""
    array = finite(values, name, PolicyError)
    check_last_axis(array, name, num_experts)
    return array


def check_last_axis(array: NDArray[Any], name: str, num_experts: int) -> None:
    """Refuse an array that does not hold one number for each expert on its last axis."""
    if array.ndim < 1 or array.shape[-1] != num_experts:
        raise PolicyError(f"{name} has shape {list(array.shape)}; it must be [..., {num_experts}], one for each expert")


def check_memory(shape: tuple[int, ...], each: int) -> None:
    """Refuse broadcast axes whose numbers, of ``each`` bytes, would not fit in memory."""
    needed = math.prod(shape) * each
    if needed > 8 * LARGEST:
        raise PolicyError(
            f"the arrays broadcast to {list(shape)}, which takes {needed / 1e9:.3g} GB and may take "
            f"{8 * LARGEST / 1e9:.3g} GB; give part of the leading axes at a time"
        )


def common_lead(given: Mapping[str, NDArray[Any]]) -> tuple[int, ...]:
    """Broadcast leading axes of arrays [..., E]; ``losses`` has one axis more."""
    try:
        return np.broadcast_shapes(*(array.shape[: _lead_axes(name, array)] for name, array in given.items()))
    except ValueError:
        named = [f"{name} {list(array.shape)}" for name, array in given.items() if _lead_axes(name, array) > 0]
        raise PolicyError(f"the leading axes of {' and '.join(named)} do not match") from None


def _lead_axes(name: str, array: NDArray[Any]) -> int:
    """How many leading axes an array has."""
    return array.ndim - (2 if name == "losses" else 1)
