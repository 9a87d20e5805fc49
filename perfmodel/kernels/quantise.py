"""Rounding the columns of a matrix one after another, each row making up for its errors in the columns to come."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import math

from numba import types

from perfmodel.kernels._jit import loop, read_only, scalar

_MATRIX = types.float64[:, ::1]
_VECTOR = types.float64[::1]


@scalar
def _round_half_even(x):
    """The nearest whole number, of two the even one, as NumPy rounds."""
    down = math.floor(x)
    rest = x - down
    if rest > 0.5 or (rest == 0.5 and down % 2.0 != 0.0):
        return down + 1.0
    return down


@loop(
    types.void(
        _MATRIX, _MATRIX, read_only(_MATRIX), types.int64, types.int64, types.int64, types.int64, _VECTOR, _VECTOR
    )
)
def quantise_columns(weights, errors, factor, start, stop, group, bits, scale, zero):
    """Round columns ``start`` to ``stop`` of a matrix in place, in that order [1].

    The rounding error of a column, over the factor's diagonal, is taken off the later columns before ``stop`` in
    proportion to the factor's row; ``errors`` keeps it, so that the caller can do the same to the columns behind.
    Rows are independent of each other.

    At every column that is a multiple of ``group`` a row gets a new grid, from its present weights there and up to the
    next such column. With one bit the grid is ``-s`` and ``s``, s the mean magnitude; otherwise ``2 ** bits`` values at
    equal distances ``s`` from the lowest weight to the highest one, zero among them.

    Parameters
    ----------
    weights : float64 [O, I], C order; rounded in place
    errors : float64 [O, stop - start], C order; written
    factor : float64 [I, I], C order; upper triangle U with ``U' U`` the inverse of the inputs' second moment
    start, stop : columns; a group that begins among them ends there too, or has nothing before it
    group : columns that share a grid, counted from column 0
    bits : 1 or more [bit]
    scale, zero : float64 [O]; grid of every row, kept for the columns behind ``stop``

    References
    ----------
    .. [1] Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
       arXiv:2210.17323, 2022.
    """
    num_rows, num_columns = weights.shape
    top = 2.0**bits - 1.0
    for row in range(num_rows):
        for column in range(start, stop):
            if column % group == 0:
                end = min(column + group, num_columns)
                if bits == 1:
                    total = 0.0
                    for i in range(column, end):
                        total += abs(weights[row, i])
                    scale[row] = total / (end - column)
                else:
                    low, high = 0.0, 0.0
                    for i in range(column, end):
                        low = min(low, weights[row, i])
                        high = max(high, weights[row, i])
                    scale[row] = (high - low) / top
                    zero[row] = 0.0
                    if scale[row] > 0.0:
                        zero[row] = _round_half_even(-low / scale[row])
            value = weights[row, column]
            if bits == 1:
                rounded = scale[row] if value >= 0.0 else -scale[row]
            elif scale[row] > 0.0:
                level = _round_half_even(value / scale[row]) + zero[row]
                rounded = (min(max(level, 0.0), top) - zero[row]) * scale[row]
            else:
                rounded = 0.0
            weights[row, column] = rounded
            error = (value - rounded) / factor[column, column]
            errors[row, column - start] = error
            for i in range(column + 1, stop):
                weights[row, i] -= error * factor[column, i]
