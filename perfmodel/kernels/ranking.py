"""The experts of a layer by decreasing importance."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np

from perfmodel.kernels._jit import scalar


@scalar
def rank(importance, place, order):
    """Fill ``order`` with the experts by decreasing importance, ties by index.

    Counts for every expert those that come before it. That has no branch to mispredict, so it is faster than sorting
    up to hundreds of experts, and the selector's search is quadratic as well.

    place : int64 [E], written; how many come before each expert
    """
    num_experts = importance.shape[0]
    for e in range(num_experts):
        place[e] = 0
    for e in range(1, num_experts):
        value, before = importance[e], 0
        for other in range(e):
            later = importance[other] < value
            place[other] += later
            before += not later
        place[e] += before
    for e in range(num_experts):
        order[place[e]] = e


@scalar
def rank_wide(importance, keys, taken, place, order):
    """The same through rounded values, of which twice as many fit a vector; ties among them are settled after.

    place : int32 [E], written; how many come before each expert
    keys, taken : float32, int32 [E], scratch
    """
    num_experts = importance.shape[0]
    for e in range(num_experts):
        keys[e] = importance[e]
    for e in range(num_experts):
        value, before = keys[e], np.int32(0)
        for other in range(num_experts):
            before += np.int32(keys[other] > value)
        place[e] = before
    pairs = 0
    for e in range(num_experts):
        pairs += place[e]
    if pairs == num_experts * (num_experts - 1) // 2:  # one of every two comes first: no ties
        for e in range(num_experts):
            order[place[e]] = e
        return
    taken[:] = 0
    for e in range(num_experts):
        before = place[e]
        order[before + taken[before]] = e
        taken[before] += 1
    # Insertion among those that differ by less than rounding; it moves nothing else.
    for m in range(1, num_experts):
        e, value = order[m], importance[order[m]]
        while m > 0 and importance[order[m - 1]] < value:
            order[m] = order[m - 1]
            m -= 1
        order[m] = e
    for m in range(num_experts):
        place[order[m]] = m
