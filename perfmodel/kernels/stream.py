"""Reading weights from memory: plain sums, and products with one token of weights of 8 and 4 bits.

What measures a machine runs these. They work on whole numbers inside, which a compiler may add up in any order and so
in vectors, as engines for CPUs do: activations are rounded to 8 bits in the same groups as the weights.
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np

from perfmodel.kernels._jit import loop, numba, read_only

#: Weights that share one scale, and the stored bits of that scale.
GROUP = 64
SCALE_BITS = 32

_BYTES = read_only(numba.uint8[:, :, ::1])
_SIGNED = read_only(numba.int8[:, :, ::1])
_SCALES = read_only(numba.float32[:, :, ::1])
_TOKEN = read_only(numba.int8[::1])
_TOKEN_SCALES = read_only(numba.float32[::1])
_RANGE = (numba.int64, numba.int64, numba.int64, numba.int64)
_OUT = numba.float32[:, ::1]


@loop(numba.uint64(read_only(numba.uint64[::1])))
def read_words(words):
    """Sum of all words modulo 2^64, which reads every one of them once."""
    total = np.uint64(0)
    for i in range(words.size):
        total += words[i]
    return total


@loop(numba.void(_SIGNED, _SCALES, _TOKEN, _TOKEN_SCALES, *_RANGE, _OUT))
def gemv_int8(weights, scales, token, token_scales, first, count, low, high, out):
    """Products of 8-bit matrices with one 8-bit token, some rows of each.

    Equation: ``out[e, r] = sum_g scales[e, r, g] token_scales[g] sum_(c in g) weights[e, r, c] token[c]``

    Parameters
    ----------
    weights : int8 [E, R, C], C a multiple of GROUP. scales : float32 [E, R, C / GROUP].
    token, token_scales : int8 [C] and float32 [C / GROUP].
    first, count : matrices first, first + 1, ..., modulo E. low, high : rows of each.
    out : float32 [E, R], where the products go.
    """
    groups = scales.shape[2]
    for step in range(first, first + count):
        e = step % weights.shape[0]
        for r in range(low, high):
            total = np.float32(0)
            for g in range(groups):
                dot = np.int32(0)
                for c in range(g * GROUP, (g + 1) * GROUP):
                    dot = np.int32(dot + np.int32(weights[e, r, c]) * np.int32(token[c]))
                total += scales[e, r, g] * token_scales[g] * np.float32(dot)
            out[e, r] = total


@loop(numba.void(_BYTES, _SCALES, _TOKEN, _TOKEN_SCALES, *_RANGE, _OUT))
def gemv_int4(weights, scales, token, token_scales, first, count, low, high, out):
    """The same of 4-bit matrices, two weights a byte: uint8 [E, R, C / 2].

    The lower halves of the bytes of a group are its first 32 weights, the upper halves the others; 8 stands for 0.
    """
    groups = scales.shape[2]
    half = GROUP // 2
    for step in range(first, first + count):
        e = step % weights.shape[0]
        for r in range(low, high):
            total = np.float32(0)
            for g in range(groups):
                dot = np.int32(0)
                for i in range(half):
                    byte = np.int32(weights[e, r, g * half + i])
                    dot = np.int32(
                        dot
                        + ((byte & 15) - 8) * np.int32(token[g * GROUP + i])
                        + ((byte >> 4) - 8) * np.int32(token[g * GROUP + half + i])
                    )
                total += scales[e, r, g] * token_scales[g] * np.float32(dot)
            out[e, r] = total
