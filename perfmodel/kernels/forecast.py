"""How well the picks in one layer foretell those in the next, by a table of pairs."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only
from perfmodel.kernels.tally import NO_EXPERT

_IDS = read_only(types.uint16[:, :, ::1])
_INTS = read_only(types.int64[::1])


@loop(
    types.void(
        _IDS, types.int64, types.int64, types.int64, _INTS,
        types.float64[:, :, ::1], types.int64[:, ::1], types.int64[:, ::1],
    )
)  # fmt: skip
def learn_pairs(ids, start, first, last, offsets, pairs, own, following):
    """Count in the rows of the sequences with even numbers which experts are picked in one layer and the next.

    ids, start, first, last, offsets : as in `reuse.stack_distances`.
    pairs : float64 [L - 1, E, E], rows that pick the first expert in a layer and the second in the next (exact counts).
    own, following : int64 [L - 1, E], rows that pick an expert in the layer, and in the next.
    """
    rows, layers, width = ids.shape
    for s in range(first + first % 2, last, 2):
        for row in range(max(offsets[s], start) - start, min(offsets[s + 1], start + rows) - start):
            for layer in range(layers - 1):
                for j in range(width):
                    after = ids[row, layer + 1, j]
                    if after != NO_EXPERT:
                        following[layer, after] += 1
                    before = ids[row, layer, j]
                    if before == NO_EXPERT:
                        continue
                    own[layer, before] += 1
                    for i in range(width):
                        other = ids[row, layer + 1, i]
                        if other != NO_EXPERT:
                            pairs[layer, before, other] += 1


@loop(
    types.void(
        _IDS, types.int64, types.int64, types.int64, _INTS, _INTS, read_only(types.float64[:, :, ::1]),
        read_only(types.boolean[:, ::1]), types.int64[:, :, ::1], types.int64[:, ::1],
    )
)  # fmt: skip
def foretell(ids, start, first, last, offsets, group, chances, popular, found, asked):
    """Add up how many picks of the sequences with odd numbers were foretold from the picks of the layer before.

    chances : float64 [L - 1, E, E], chance of the second expert in the next layer if the first is picked; the k experts
        with the largest sum over a row's picks are foretold, the lower number first among equals.
    popular : bool [L - 1, E], the experts that are foretold whatever the row picks.
    found : int64 [G, L - 1, 2], picks that either way foretold. asked : int64 [G, L - 1], all picks.
    """
    rows, layers, width = ids.shape
    experts = chances.shape[1]
    score = np.empty(experts)
    for s in range(first + 1 - first % 2, last, 2):
        g = group[s]
        for row in range(max(offsets[s], start) - start, min(offsets[s + 1], start + rows) - start):
            for layer in range(layers - 1):
                score[:] = 0.0
                for j in range(width):
                    before = ids[row, layer, j]
                    if before != NO_EXPERT:
                        chance = chances[layer, before]
                        for expert in range(experts):
                            score[expert] += chance[expert]
                for j in range(width):
                    after = ids[row, layer + 1, j]
                    if after == NO_EXPERT:
                        continue
                    asked[g, layer] += 1
                    found[g, layer, 1] += popular[layer, after]
                    mine = score[after]
                    better = 0
                    for other in range(experts):
                        better += score[other] > mine
                    if better < width:
                        for other in range(after):
                            better += score[other] == mine
                    found[g, layer, 0] += better < width
