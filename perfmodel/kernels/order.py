"""Order statistics of many numbers, without sorting them all."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import math

import numpy as np

from perfmodel.kernels._jit import loop, scalar

_BUCKETS = 1024


@scalar
def _select(values, first, last, k):
    """The k-th smallest of ``values[first:last]``, which change places (three-way quickselect)."""
    low, high = first, last - 1
    target = first + k
    while low < high:
        middle = (low + high) // 2
        one, two, three = values[low], values[middle], values[high]
        pivot = max(min(one, two), min(max(one, two), three))
        less, i, more = low, low, high
        while i <= more:
            value = values[i]
            if value < pivot:
                values[i], values[less] = values[less], value
                less += 1
                i += 1
            elif value > pivot:
                values[i], values[more] = values[more], value
                more -= 1
            else:
                i += 1
        if target < less:
            high = less - 1
        elif target > more:
            low = more + 1
        else:
            return pivot
    return values[target]


@scalar
def _interpolate(low, high, fraction):
    """NumPy's linear interpolation, which reaches both ends exactly."""
    if low == high or fraction == 0.0:
        return low  # also next to an infinite one
    if fraction >= 0.5:
        return high - (high - low) * (1.0 - fraction)
    return low + (high - low) * fraction


@scalar
def _order_statistics(values, rank, fraction, found, column):
    """Fill ``found[:, column]`` [Q]: between the steps of ``rank`` and the next one, ``fraction`` of the way.

    The values fall into buckets of equal width; only the buckets that hold a wanted rank are looked into.
    """
    size = values.shape[0]
    least, most, total = values[0], values[0], 0.0
    for t in range(size):
        least, most = min(least, values[t]), max(most, values[t])
        total += values[t]
    scale = _BUCKETS / (most - least)
    if math.isnan(total) or most == least or not math.isfinite(scale) or not math.isfinite(total):
        _by_selection(values, rank, fraction, found, column, math.isnan(total))
        return
    bucket = np.empty(size, np.int32)
    start = np.zeros(_BUCKETS + 1, np.int32)
    for t in range(size):
        bucket[t] = min(np.int32((values[t] - least) * scale), _BUCKETS - 1)
    for t in range(size):
        start[bucket[t] + 1] += 1
    for i in range(_BUCKETS):
        start[i + 1] += start[i]
    wanted = np.zeros(_BUCKETS, np.int32)
    place = np.empty((rank.shape[0], 2), np.int32)
    for q in range(rank.shape[0]):
        for side in range(2):
            at = min(rank[q] + side, size - 1)
            low, high = 0, _BUCKETS
            while high - low > 1:
                middle = (low + high) // 2
                if start[middle] <= at:
                    low = middle
                else:
                    high = middle
            place[q, side] = low
            wanted[low] = 1
    inside = np.empty(size)
    filled = start[:-1].copy()
    for t in range(size):
        i = bucket[t]
        if wanted[i]:
            inside[filled[i]] = values[t]
            filled[i] += 1
    for q in range(rank.shape[0]):
        i, j = place[q, 0], place[q, 1]
        low = _select(inside, start[i], start[i + 1], rank[q] - start[i])
        high = _select(inside, start[j], start[j + 1], min(rank[q] + 1, size - 1) - start[j])
        found[q, column] = _interpolate(low, high, fraction[q])


@scalar
def _by_selection(values, rank, fraction, found, column, undefined):
    """The same for values that no buckets of equal width can hold: all equal, or infinite."""
    copy = values.copy()
    size = values.shape[0]
    for q in range(rank.shape[0]):
        low = _select(copy, 0, size, rank[q])
        high = _select(copy, 0, size, min(rank[q] + 1, size - 1))
        found[q, column] = math.nan if undefined else _interpolate(low, high, fraction[q])


@loop("float64[:,::1](float64[:,::1], int64[::1], float64[::1])")
def order_statistics(values, rank, fraction):
    """Order statistics of every row of ``values`` [N, T], interpolated, [Q, N]; see `token_percentiles`."""
    found = np.empty((rank.shape[0], values.shape[0]))
    for n in range(values.shape[0]):
        _order_statistics(values[n], rank, fraction, found, n)
    return found
