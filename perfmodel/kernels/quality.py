"""How often the decode steps use each expert in each work class, and what those uses add up to."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only, scalar

_PICKS = read_only(types.uint8[:, :, ::1])
_IDS = read_only(types.uint16[:, :, ::1])


@scalar
def _count(picks, ids, first, last, counts):
    """Add the picks of the steps from ``first`` up to ``last`` to counts [L, E, C]."""
    layers, num_experts = counts.shape[0], counts.shape[1]
    width = picks.shape[2]
    for t in range(first, last):
        for layer in range(layers):
            for j in range(width):
                expert = ids[t, layer, j]
                if expert < num_experts:
                    counts[layer, expert, picks[t, layer, j]] += 1


@scalar
def _add_up(counts, values, sums):
    """Sum of ``count * value`` over all cells, one sum a table of values; what does not occur adds nothing."""
    for v in range(values.shape[0]):
        total = 0.0
        for layer in range(counts.shape[0]):
            for expert in range(counts.shape[1]):
                for c in range(counts.shape[2]):
                    if counts[layer, expert, c] > 0:
                        total += counts[layer, expert, c] * values[v, layer, expert, c]
        sums[v] = total


@loop(types.int64[:, :, ::1](_PICKS, _IDS, types.int64, types.int64))
def count_picks(picks, ids, num_experts, num_classes):
    """Decode picks by layer, expert and work class [L, E, C].

    picks : uint8 [T, L, k], class of every pick. ids : uint16 [T, L, k], its expert; E and above where it has none,
    and such a pick is not counted.
    """
    counts = np.zeros((picks.shape[1], num_experts, num_classes), np.int64)
    _count(picks, ids, 0, picks.shape[0], counts)
    return counts


@loop(types.float64[::1](read_only(types.int64[:, :, ::1]), read_only(types.float64[:, :, :, ::1])))
def weigh(counts, values):
    """Values added up over all picks [V].

    counts : int64 [L, E, C], from `count_picks`. values : float64 [V, L, E, C], what a pick counts, one table a sum;
    NaN matters only where picks are.
    """
    sums = np.empty(values.shape[0])
    _add_up(counts, values, sums)
    return sums


@loop(
    types.Tuple((types.float64[:, ::1], types.int64[:, ::1]))(
        _PICKS, _IDS, read_only(types.int64[::1]), read_only(types.float64[:, :, :, ::1])
    )
)
def weigh_sequences(picks, ids, offsets, values):
    """The same for every sequence on its own: sums [S, V], and picks by work class [S, C].

    offsets : int64 [S + 1], first decode step of each sequence.
    """
    sequences = offsets.shape[0] - 1
    counts = np.empty(values.shape[1:], np.int64)
    sums = np.empty((sequences, values.shape[0]))
    by_class = np.zeros((sequences, counts.shape[2]), np.int64)
    for s in range(sequences):
        counts[:] = 0
        _count(picks, ids, offsets[s], offsets[s + 1], counts)
        _add_up(counts, values, sums[s])
        for layer in range(counts.shape[0]):
            for expert in range(counts.shape[1]):
                for c in range(counts.shape[2]):
                    by_class[s, c] += counts[layer, expert, c]
    return sums, by_class
