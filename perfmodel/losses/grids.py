"""Rounding to nearest: the grid of every row of a matrix, or of every group of its columns."""

import numpy as np
from numpy.typing import NDArray

#: Bits of a stored scale, one a grid.
_SCALE_BITS = 16


def rounded(weights: NDArray[np.float64], bits: int, group: int | None = None) -> NDArray[np.float64]:
    """A matrix with every weight at the nearest value of its grid.

    Every row, or every ``group`` columns of a row (the last group may be shorter), has a grid of its own. With 1 bit
    it is ``-s`` and ``s``, with s the mean magnitude, the best scale for the signs. With more, ``2 ** bits`` values at
    equal distances that reach from the lowest weight to the highest one and hold zero:

        low = min(w, 0), high = max(w, 0), s = (high - low) / (2 ** bits - 1), z = round(-low / s)
        w -> (clip(round(w / s) + z, 0, 2 ** bits - 1) - z) s

    Halves are rounded to even. Scales are kept in full precision.

    Parameters
    ----------
    weights : float64 [outputs, inputs], finite
    bits : bits of a weight [bit]
    group : columns that share a grid; all where None
    """
    size = weights.shape[1]
    step = size if group is None else group
    return np.concatenate([_rounded(weights[:, i : i + step], bits) for i in range(0, size, step)], axis=1)


def _rounded(weights: NDArray[np.float64], bits: int) -> NDArray[np.float64]:
    if bits == 1:
        scale = np.abs(weights).mean(axis=1, keepdims=True)
        return np.asarray(np.where(weights >= 0, scale, -scale))
    top = 2.0**bits - 1
    low = np.minimum(weights.min(axis=1, keepdims=True), 0)
    high = np.maximum(weights.max(axis=1, keepdims=True), 0)
    scale = (high - low) / top
    scale[scale == 0] = 1  # a row of zeros stays one
    zero = np.round(-low / scale)
    return np.asarray((np.clip(np.round(weights / scale) + zero, 0, top) - zero) * scale)


def scale_bits_per_weight(shapes: list[tuple[int, int]], bits: int, group: int | None = None) -> float:
    """Bits that scales and zeros add to every weight of several matrices [bit].

    A scale takes 16 bits. From 2 bits up a grid has a zero too, which is one of its own levels and takes ``bits``.

    shapes : outputs and inputs of every matrix

    >>> scale_bits_per_weight([(14336, 4096)], 4, 128)
    0.15625
    """
    grids = sum(outputs * -(-inputs // (inputs if group is None else group)) for outputs, inputs in shapes)
    return grids * (_SCALE_BITS + (bits if bits > 1 else 0)) / sum(outputs * inputs for outputs, inputs in shapes)
