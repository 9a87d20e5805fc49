"""How many experts of a layer get how many of the tokens that are computed together."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only


@loop(
    types.void(
        read_only(types.uint16[:, :, ::1]),
        read_only(types.int64[::1]),
        types.int64,
        types.int64,
        types.int64[::1],
    )
)
def window_occupancy(ids, offsets, num_experts, tokens, totals):
    """Count experts by the picks they get within windows of consecutive rows.

    Parameters
    ----------
    ids : uint16 [T, L, k], experts; anything from ``num_experts`` on is no pick.
    offsets : int64 [S + 1], first row of each sequence. Windows follow each other from there, and what is left at the
        end of a sequence is no window.
    tokens : rows of a window, at least 1.
    totals : int64 [tokens + 1], zeros; ``totals[m]`` becomes the number of experts with ``m`` picks, over all windows
        and layers.
    """
    counts = np.empty(num_experts, np.int64)
    for s in range(offsets.shape[0] - 1):
        for start in range(offsets[s], offsets[s + 1] - tokens + 1, tokens):
            for layer in range(ids.shape[1]):
                counts[:] = 0
                for t in range(start, start + tokens):
                    for j in range(ids.shape[2]):
                        if ids[t, layer, j] < num_experts:
                            counts[ids[t, layer, j]] += 1
                for e in range(num_experts):
                    totals[counts[e]] += 1
