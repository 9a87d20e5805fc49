"""Loops over the picks of every token and layer: their ranks, and what a placement makes of them."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np

from perfmodel.kernels._jit import loop


@loop("int64[:,:,::1](float64[:,:,::1], boolean[:,:,::1])")
def weight_rank(weights, assigned):
    """How many picks of the same token and layer are ranked better [T, L, k].

    A larger weight is better, and so is the earlier of equal ones. Unassigned picks come out as k, behind all.
    """
    tokens, layers, width = weights.shape
    rank = np.empty((tokens, layers, width), np.int64)
    for t in range(tokens):
        for layer in range(layers):
            for j in range(width):
                if not assigned[t, layer, j]:
                    rank[t, layer, j] = width
                    continue
                better = 0
                for i in range(width):
                    if not assigned[t, layer, i]:
                        continue
                    one, other = weights[t, layer, i], weights[t, layer, j]
                    if one > other or (one == other and i < j):
                        better += 1
                rank[t, layer, j] = better
    return rank


@loop("float64[:,:,::1](float64[:,:,::1], boolean[:,:,::1])")
def weight_before(weights, assigned):
    """Sum of the normalised weights of the better-ranked picks of the same token and layer [T, L, k].

    Ranked as in `weight_rank`; the sum runs in the order of the ranks. 0 for unassigned picks, and everywhere where
    all weights are 0.
    """
    tokens, layers, width = weights.shape
    before = np.zeros((tokens, layers, width))
    order = np.empty(width, np.int64)
    for t in range(tokens):
        for layer in range(layers):
            count = 0
            total = 0.0
            for j in range(width):
                if assigned[t, layer, j]:
                    i = count
                    while i > 0 and weights[t, layer, order[i - 1]] < weights[t, layer, j]:
                        order[i] = order[i - 1]
                        i -= 1
                    order[i] = j
                    count += 1
                    total += weights[t, layer, j]
            if total > 0.0:
                running = 0.0
                for i in range(count):
                    before[t, layer, order[i]] = running
                    running += weights[t, layer, order[i]] / total
    return before


@loop("uint8[:,:,::1](uint8[:,:,::1], int64[::1], int64[:,:,::1])")
def look_up(classes, sequence, ids):
    """Class of every pick [T, L, k], from the class of every expert.

    classes : uint8 [S, L, E], one table a sequence. sequence : int64 [T], sequence of every token.
    ids : int64 [T, L, k], expert of every pick.
    """
    tokens, layers, width = ids.shape
    picks = np.empty((tokens, layers, width), np.uint8)
    for t in range(tokens):
        for layer in range(layers):
            for j in range(width):
                picks[t, layer, j] = classes[sequence[t], layer, ids[t, layer, j]]
    return picks
