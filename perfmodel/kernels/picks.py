"""Loops over the picks of every token and layer: their ranks, what a placement makes of them, and which are alike."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only


@loop(types.uint16[:, :, ::1](read_only(types.float64[:, :, ::1]), read_only(types.boolean[:, :, ::1])))
def weight_rank(weights, assigned):
    """How many picks of the same token and layer are ranked better [T, L, k].

    A larger weight is better, and so is the earlier of equal ones. Unassigned picks come out as k, behind all.
    """
    tokens, layers, width = weights.shape
    rank = np.empty((tokens, layers, width), np.uint16)
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


@loop(types.float64[:, :, ::1](read_only(types.float64[:, :, ::1]), read_only(types.boolean[:, :, ::1])))
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


@loop(types.uint8[:, :, ::1](types.uint8[:, :, ::1], read_only(types.int64[::1]), read_only(types.uint16[:, :, ::1])))
def look_up(classes, offsets, ids):
    """Class of every pick [T, L, k], from the class of every expert.

    classes : uint8 [S, L, E + 1], one table a sequence; the last entry of a layer is for unassigned picks.
    offsets : int64 [S + 1], first step of each sequence.
    ids : uint16 [T, L, k], expert of every pick, E where there is none.
    """
    tokens, layers, width = ids.shape
    picks = np.empty((tokens, layers, width), np.uint8)
    # One flat loop over a token's picks is what the compiler makes fast.
    per_token = layers * width
    flat_ids, flat_picks = ids.reshape(tokens, per_token), picks.reshape(tokens, per_token)
    tables = classes.reshape(classes.shape[0], layers * classes.shape[2])
    start = np.empty(per_token, np.int64)
    for i in range(per_token):
        start[i] = i // width * classes.shape[2]
    for s in range(offsets.shape[0] - 1):
        table = tables[s]
        for t in range(offsets[s], offsets[s + 1]):
            for i in range(per_token):
                flat_picks[t, i] = table[start[i] + flat_ids[t, i]]
    return picks


@loop("Tuple((int32[:,::1], int64[::1], int64[::1]))(uint8[:,:,::1], int64[::1], int64)")
def number_rows(picks, digit, num_keys):
    """Number the distinct multisets of classes of all layers.

    Parameters
    ----------
    picks : uint8 [T, L, k], class of every pick; their order does not matter.
    digit : int64 [classes], what one pick of a class adds to the key of its layer: powers of k + 1, so that the
        digits of a key count the picks of each class.
    num_keys : above every key, the size of the table that is filled on the way; below 2**31.

    Returns
    -------
    row [T, L] : number of each token's and layer's multiset.
    keys [R] : key of each number, rising.
    count [R] : how many layers of all tokens have it.
    """
    tokens, layers, width = picks.shape
    row = np.empty((tokens, layers), np.int32)
    cells = tokens * layers
    flat_row, flat_picks = row.reshape(cells), picks.reshape(cells, width)
    place = np.full(num_keys, -1, np.int32)
    for i in range(cells):
        total = np.int64(0)
        for j in range(width):
            total += digit[flat_picks[i, j]]
        flat_row[i] = total
        place[total] = 0
    num_rows = 0
    for key in range(num_keys):
        if place[key] == 0:
            place[key] = num_rows
            num_rows += 1
    keys = np.empty(num_rows, np.int64)
    for key in range(num_keys):
        if place[key] >= 0:
            keys[place[key]] = key
    # Four counters in turn: neighbours often have the same row, and one counter would wait for itself.
    counters = np.zeros((4, num_rows), np.int64)
    for i in range(cells):
        number = place[flat_row[i]]
        flat_row[i] = number
        counters[i % 4, number] += 1
    return row, keys, counters.sum(axis=0)
