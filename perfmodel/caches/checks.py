"""The arrays that a replay takes: each check returns a clean one or raises."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.kernels.cache import NOTHING
from perfmodel.kernels.tally import NO_EXPERT


def check_shape(name: str, array: NDArray[Any], shape: tuple[int | tuple[int, ...] | None, ...]) -> None:
    """Refuse another shape than this one, in which None is any length."""
    fits = array.ndim == len(shape) and all(
        want is None or found in (want if isinstance(want, tuple) else (want,))
        for found, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(
            "any"
            if want is None
            else " or ".join(map(str, dict.fromkeys(want)))
            if isinstance(want, tuple)
            else f"{want}"
            for want in shape
        )
        raise TraceError(f"{name} has shape {array.shape}, expected ({wanted})")


def checked_ids(name: str, value: NDArray[np.uint16], num_experts: int) -> NDArray[np.uint16]:
    """Ids as an array whose entries are experts or no pick."""
    if not 1 <= num_experts <= NO_EXPERT:
        raise TraceError(f"num_experts is {num_experts!r}, expected 1 to {NO_EXPERT}")
    array = np.asarray(value)
    if array.dtype != np.uint16 or array.ndim != 3:
        raise TraceError(f"{name} has dtype {array.dtype} and {array.ndim} axes, expected uint16 and 3 axes")
    if ((array > num_experts) & (array != NO_EXPERT)).any():
        wrong = array[(array > num_experts) & (array != NO_EXPERT)][0]
        raise TraceError(f"{name} holds expert {wrong}, expected 0 to {num_experts - 1}, or {NO_EXPERT} for none")
    return np.ascontiguousarray(array)


def checked_offsets(value: NDArray[np.int64], steps: int) -> NDArray[np.int64]:
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or array.ndim != 1 or len(array) < 2:
        raise TraceError(f"offsets have dtype {array.dtype} and shape {array.shape}, expected whole numbers [S + 1]")
    array = array.astype(np.int64)
    if array[0] != 0 or array[-1] != steps or (np.diff(array) < 0).any():
        raise TraceError(f"offsets run from {array[0]} to {array[-1]}, expected to rise from 0 to {steps}")
    return array


def checked_wanted(name: str, value: NDArray[np.uint8] | None, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    if value is None:
        return np.empty((0, 0, 0), np.uint8)
    array = np.asarray(value)
    check_shape(name, array, shape)
    if array.dtype != np.uint8 or array.max(initial=0) > NOTHING:
        raise TraceError(f"{name} is no uint8 array of 0 (high), 1 (low) and 2 (nothing)")
    return np.ascontiguousarray(array)


def checked_numbers(name: str, value: NDArray[np.floating[Any]], shape: tuple[int | None, ...]) -> NDArray[np.float64]:
    array = np.asarray(value)
    check_shape(name, array, shape)
    if array.dtype.kind != "f" or not (np.isfinite(array) & (array >= 0)).all():
        raise TraceError(f"{name} has other entries than finite numbers >= 0")
    return np.ascontiguousarray(array, np.float64)


def checked_match(value: NDArray[np.int64] | None, steps: int, rows: int) -> NDArray[np.int64]:
    if value is None:
        if rows != 1:
            raise TraceError(f"match is missing, but likelihood has {rows} rows, expected 1")
        return np.zeros(steps, np.int64)
    array = np.asarray(value)
    check_shape("match", array, (steps,))
    if array.dtype.kind not in "iu" or (steps and not 0 <= array.min() <= array.max() < rows):
        raise TraceError(f"match has other entries than whole numbers from 0 to {rows - 1}")
    return array.astype(np.int64)
