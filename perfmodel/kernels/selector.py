"""The prefix selector: bit widths from 1 to 4 that do not increase as importance falls, under an exact bit budget."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import math

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only, scalar

# What `select_prefix` found wrong.
NOTHING, BAD_IMPORTANCE, BAD_LOSSES, BAD_WEIGHTS = range(4)

_LARGEST = float(np.finfo(np.float64).max)
# Losses up to this add up without overflow.
_SAFE = 2.0**960
# From so many experts on, vectors are worth their start.
_MANY = 32

_ROWS = read_only(types.float64[:, ::1])
_TABLES = read_only(types.float64[:, :, ::1])


@scalar
def _all_within(values, low, high):
    """Whether every number is from ``low`` to ``high``; nan is not."""
    outside = 0
    for value in values.flat:
        outside += not (low <= value <= high)
    return outside == 0


@scalar
def _unit(most):
    """Power of two that brings numbers from 0 to ``most`` below 1."""
    if most == 0.0:
        return 1.0
    _, exponent = math.frexp(most)
    return math.ldexp(1.0, -max(exponent, -1000))


@scalar
def _rank(importance, place, order):
    """Fill ``order`` with the experts by decreasing importance, ties by index.

    Counts for every expert those that come before it. That has no branch to mispredict, so it is faster than sorting
    up to hundreds of experts, and the search is quadratic as well.
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
def _cuts_of_few(gain4, gain3, gain2, budget):
    """Cuts ``a <= b <= c`` with ``a + b + c = budget`` and the largest ``(gain4[a] + gain2[-1 - c]) + gain3[b]``."""
    num_experts = gain4.shape[0] - 1
    best, first, second = -np.inf, 0, 0
    for a in range(max(0, budget - 2 * num_experts), budget // 3 + 1):
        left = budget - a
        low = max(a, left - num_experts)
        count = left // 2 + 1 - low
        # Both run upwards from 0, which spares the compiler a test for negative places.
        thirds, seconds = gain3[low : low + count], gain2[num_experts - left + low : num_experts - left + low + count]
        for i in range(count):
            total = (seconds[i] + gain4[a]) + thirds[i]
            if total > best:
                best, first, second = total, a, low + i
    return first, second


@scalar
def _cuts_of_many(gain4, gain3, gain2, budget, inner):
    """The same with an inner loop that the compiler turns into vectors: the best ``a`` of each ``b``, then ``b``.

    inner : float64 [E + 1], scratch
    """
    num_experts = gain4.shape[0] - 1
    inner[:] = -np.inf
    for a in range(max(0, budget - 2 * num_experts), budget // 3 + 1):
        left = budget - a
        low = max(a, left - num_experts)
        count = left // 2 + 1 - low
        sums, seconds = inner[low : low + count], gain2[num_experts - left + low : num_experts - left + low + count]
        for i in range(count):
            total, before = seconds[i] + gain4[a], sums[i]
            sums[i] = total if total > before else before
    best = -np.inf
    for b in range(num_experts + 1):
        best = max(best, inner[b] + gain3[b])
    first, second = budget, 0
    for b in range(num_experts + 1):
        if inner[b] + gain3[b] == best:
            a = max(0, budget - b - num_experts)
            while gain2[num_experts - budget + a + b] + gain4[a] != inner[b]:
                a += 1
            if a < first:
                first, second = a, b
    return first, second


@loop(types.int64(_ROWS, _TABLES, _ROWS, types.int64, types.int8[:, ::1]))
def select_prefix(importance, losses, weights, budget, bits):
    r"""Fill ``bits`` with the best widths that follow the order of importance; return what was wrong.

    With experts in order of decreasing importance, the first ``a`` get 4 bits, those up to ``b`` get 3, those up to
    ``c`` get 2 and the rest 1. Their increments above 1 bit are ``a + b + c``. Prefix sums of what the fourth, the
    third and the second bit of each expert gain give the gain of every such split in O(1), and all splits of a row
    are tried in O(E^2) [1]:

    .. math:: \max_{a \le b \le c,\; a + b + c = R} G_4(a) + G_3(b) + G_2(c),
              \quad G_q(m) = \sum_{i < m} w_i \bigl(loss_i(q - 1) - loss_i(q)\bigr)

    Ties go to the smallest ``a``, then the smallest ``b``. Sums are float64 additions in order of importance, so two
    splits that tie on paper may differ in the last bit. Scratch is allocated once a call.

    Parameters
    ----------
    importance : float64 [I, E], C order
    losses : float64 [K, E, 4], C order; loss of each expert at 1, 2, 3 and 4 bits
    weights : float64 [W, E], C order; factor of the loss of each expert; none where W is 0
    budget : R, one-bit increments to hand out in every row, 0 to 3 E
    bits : int8 [N, E], written; row n takes rows n % I, n % K and n % W of the others

    Returns
    -------
    ``NOTHING``, or which array holds a number that is not finite or, of the last two, negative; then ``bits`` is
    not written.

    References
    ----------
    .. [1] Fan et al., "Context-Aware Mixture-of-Experts Inference on CXL-Enabled GPU-NDP Systems",
       arXiv:2512.04476, 2025.

    >>> bits = np.empty((1, 2), np.int8)
    >>> losses = np.array([[[2.0, 1.5, 1.0, 0.5], [8.0, 4.0, 2.0, 1.0]]])
    >>> select_prefix(np.array([[0.1, 0.9]]), losses, np.empty((0, 2)), 2, bits), bits.tolist()
    (0, [[1, 3]])
    """
    if not _all_within(importance, -_LARGEST, _LARGEST):
        return BAD_IMPORTANCE
    if not _all_within(losses, 0.0, _LARGEST):
        return BAD_LOSSES
    if not _all_within(weights, 0.0, _LARGEST):
        return BAD_WEIGHTS
    num_rows, num_experts = bits.shape
    weighted = weights.shape[0] > 0
    unit = np.ones(losses.shape[0])
    if weighted or not _all_within(losses, 0.0, _SAFE):
        for k in range(losses.shape[0]):
            unit[k] = _unit(losses[k].max())
    # Prefix sums; those of the second bit stand from the last place to the first, as c falls where b rises.
    gain4, gain3, gain2 = np.zeros(num_experts + 1), np.zeros(num_experts + 1), np.zeros(num_experts + 1)
    place, order, factor = np.empty(num_experts, np.int64), np.empty(num_experts, np.int64), np.ones(num_experts)
    inner = np.empty(num_experts + 1)
    i, k, w = 0, 0, 0
    for row in range(num_rows):
        if weighted:
            scale = _unit(weights[w].max())
            for e in range(num_experts):
                factor[e] = weights[w, e] * scale
            w = w + 1 if w + 1 < weights.shape[0] else 0
        _rank(importance[i], place, order)
        fourth, third, second = 0.0, 0.0, 0.0
        for m in range(num_experts):
            e = order[m]
            loss1, loss2 = losses[k, e, 0] * unit[k], losses[k, e, 1] * unit[k]
            loss3, loss4 = losses[k, e, 2] * unit[k], losses[k, e, 3] * unit[k]
            fourth += (loss3 - loss4) * factor[e]
            third += (loss2 - loss3) * factor[e]
            second += (loss1 - loss2) * factor[e]
            gain4[m + 1], gain3[m + 1], gain2[num_experts - 1 - m] = fourth, third, second
        if num_experts < _MANY:
            a, b = _cuts_of_few(gain4, gain3, gain2, budget)
        else:
            a, b = _cuts_of_many(gain4, gain3, gain2, budget, inner)
        c = budget - a - b
        for m in range(num_experts):
            bits[row, order[m]] = 1 + (m < a) + (m < b) + (m < c)
        i = i + 1 if i + 1 < importance.shape[0] else 0
        k = k + 1 if k + 1 < losses.shape[0] else 0
    return NOTHING
