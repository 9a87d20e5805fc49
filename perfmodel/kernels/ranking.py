"""Rank the picks of every token by their routing weight."""

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
