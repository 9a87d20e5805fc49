"""The prefix selector: bit widths from 1 to 4 that do not increase as importance falls, under an exact bit budget."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import math

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only, scalar
from perfmodel.kernels.ranking import rank, rank_wide

# What the kernels say: all is well, which array is wrong, or that some rows need another method.
NOTHING, BAD_IMPORTANCE, BAD_LOSSES, BAD_WEIGHTS, COARSE = range(5)

#: From so many experts on `select_prefix_wide` is the faster one.
WIDE = 32

_LARGEST = float(np.finfo(np.float64).max)
# Losses below this power of two add up without overflow.
_SAFE = 960
# A row is left to another method where rounding could cost more than this part of its smallest loss.
_TOLERANCE = 2.0**-30
# Rows that are searched side by side, as many as fit a vector.
_LANES = 8

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
def _unit(most, below):
    """Power of two that brings numbers from 0 to ``most`` to just below ``2 ** below``, or as near as can be."""
    if most == 0.0:
        return 1.0
    _, exponent = math.frexp(most)
    return math.ldexp(1.0, min(below - exponent, 1023))


@scalar
def _wrong(importance, losses, weights):
    """Which array holds a number that is not finite or, of the last two, negative."""
    if not _all_within(importance, -_LARGEST, _LARGEST):
        return BAD_IMPORTANCE
    if not _all_within(losses, 0.0, _LARGEST):
        return BAD_LOSSES
    if not _all_within(weights, 0.0, _LARGEST):
        return BAD_WEIGHTS
    return NOTHING


@scalar
def _units(losses, weighted):
    """Factor of each table [K] that keeps its sums, or its products with weights, from overflow."""
    unit = np.ones(losses.shape[0])
    if weighted or not _all_within(losses, 0.0, 2.0**_SAFE):
        for k in range(losses.shape[0]):
            unit[k] = _unit(losses[k].max(), _SAFE)
    return unit


@scalar
def _below_one(weights, factor):
    """Fill ``factor`` with weights times a power of two."""
    scale = _unit(weights.max(), 0)
    for e in range(weights.shape[0]):
        factor[e] = weights[e] * scale


@scalar
def _add_up(losses, unit, factor, order, gain4, gain3, gain2):
    """Fill the prefix sums [E + 1] of what the fourth, third and second bit gain.

    Returns the loss of all experts at 1 bit, and the sum of all losses at any width.
    """
    fourth, third, second, most, every = 0.0, 0.0, 0.0, 0.0, 0.0
    gain4[0], gain3[0], gain2[0] = 0.0, 0.0, 0.0
    for m in range(order.shape[0]):
        e = order[m]
        loss1, loss2, loss3, loss4 = losses[e, 0] * unit, losses[e, 1] * unit, losses[e, 2] * unit, losses[e, 3] * unit
        fourth += (loss3 - loss4) * factor[e]
        third += (loss2 - loss3) * factor[e]
        second += (loss1 - loss2) * factor[e]
        most += loss1 * factor[e]
        every += ((loss1 + loss2) + (loss3 + loss4)) * factor[e]
        gain4[m + 1], gain3[m + 1], gain2[m + 1] = fourth, third, second
    return most, every


@scalar
def _is_coarse(num_experts, budget, least, every):
    """Whether rounding in sums of losses ``every`` could cost a notable part of the ``least`` loss.

    A prefix sum of E terms is off by E units of 2**-53 of what it adds up, at most; a split takes three of them, which
    hold every loss at most twice, and two splits are compared.
    """
    has_choice = 0 < budget < 3 * num_experts
    return has_choice and (num_experts + 8) * 2.0**-51 * every > _TOLERANCE * least


@scalar
def _cuts_side_by_side(gain4, gain3, gain2, budget, best, cuts):
    """Cuts ``a <= b <= c`` with ``a + b + c = budget`` and the largest ``(gain2[c] + gain4[a]) + gain3[b]``.

    Of several rows at once: gains are [E + 1, lanes]. Writes that sum and ``a * WIDE + b`` [lanes].
    """
    num_experts = gain4.shape[0] - 1
    best[:] = -np.inf
    for a in range(max(0, budget - 2 * num_experts), budget // 3 + 1):
        fourths, left = gain4[a], budget - a
        for b in range(max(a, left - num_experts), left // 2 + 1):
            thirds, seconds, here = gain3[b], gain2[left - b], np.int64(a * WIDE + b)
            for i in range(_LANES):
                total, before, cut = (seconds[i] + fourths[i]) + thirds[i], best[i], cuts[i]
                best[i] = total if total > before else before
                cuts[i] = here if total > before else cut


@scalar
def _cuts_wide(gain4, gain3, gain2, budget, backwards, inner):
    """The same of one row, with an inner loop that becomes vectors: the best ``a`` of each ``b``, then ``b``.

    gain4, gain3, gain2 : float64 [E + 1]
    backwards, inner : float64 [E + 1], scratch
    """
    num_experts = gain4.shape[0] - 1
    for m in range(num_experts + 1):  # c falls where b rises
        backwards[m] = gain2[num_experts - m]
    inner[:] = -np.inf
    for a in range(max(0, budget - 2 * num_experts), budget // 3 + 1):
        left = budget - a
        low = max(a, left - num_experts)
        count = left // 2 + 1 - low
        # Both run upwards from 0, which spares the compiler a test for negative places.
        start = num_experts - left + low
        sums, seconds = inner[low : low + count], backwards[start : start + count]
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
            while gain2[budget - a - b] + gain4[a] != inner[b]:
                a += 1
            if a < first:
                first, second = a, b
    return best, first, second


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
    splits that tie on paper may differ in the last bit. A row where rounding could cost more than 2**-30 of its
    smallest loss, because some of its losses are far larger, is marked by a 0 as its first width. Scratch is allocated
    once a call.

    Parameters
    ----------
    importance : float64 [I, E], C order
    losses : float64 [K, E, 4], C order; loss of each expert at 1, 2, 3 and 4 bits
    weights : float64 [W, E], C order; factor of the loss of each expert; none where W is 0
    budget : R, one-bit increments to hand out in every row, 0 to 3 E
    bits : int8 [N, E], written; row n takes rows n % I, n % K and n % W of the others

    Returns
    -------
    ``NOTHING``; or ``COARSE`` where rows are marked; or which array holds a number that is not finite or, of the last
    two, negative, and then ``bits`` is not written.

    References
    ----------
    .. [1] Fan et al., "Context-Aware Mixture-of-Experts Inference on CXL-Enabled GPU-NDP Systems",
       arXiv:2512.04476, 2025.

    >>> bits = np.empty((1, 2), np.int8)
    >>> losses = np.array([[[2.0, 1.5, 1.0, 0.5], [8.0, 4.0, 2.0, 1.0]]])
    >>> select_prefix(np.array([[0.1, 0.9]]), losses, np.empty((0, 2)), 2, bits), bits.tolist()
    (0, [[1, 3]])
    """
    wrong = _wrong(importance, losses, weights)
    if wrong != NOTHING:
        return wrong
    num_rows, num_experts = bits.shape
    weighted = weights.shape[0] > 0
    unit = _units(losses, weighted)
    gain4, gain3 = np.zeros((num_experts + 1, _LANES)), np.zeros((num_experts + 1, _LANES))
    gain2, places = np.zeros((num_experts + 1, _LANES)), np.empty((_LANES, num_experts), np.int64)
    most, every, best, cuts = np.zeros(_LANES), np.zeros(_LANES), np.empty(_LANES), np.zeros(_LANES, np.int64)
    place, order, factor = np.empty(num_experts, np.int64), np.empty(num_experts, np.int64), np.ones(num_experts)
    i, k, w, coarse = 0, 0, 0, False
    for start in range(0, num_rows, _LANES):
        lanes = min(_LANES, num_rows - start)
        for lane in range(lanes):
            if weighted:
                _below_one(weights[w], factor)
                w = w + 1 if w + 1 < weights.shape[0] else 0
            rank(importance[i], place, order)
            most[lane], every[lane] = _add_up(
                losses[k], unit[k], factor, order, gain4[:, lane], gain3[:, lane], gain2[:, lane]
            )
            for e in range(num_experts):
                places[lane, e] = place[e]
            i = i + 1 if i + 1 < importance.shape[0] else 0
            k = k + 1 if k + 1 < losses.shape[0] else 0
        _cuts_side_by_side(gain4, gain3, gain2, budget, best, cuts)
        for lane in range(lanes):
            row, a, b = start + lane, cuts[lane] // WIDE, cuts[lane] % WIDE
            c = budget - a - b
            for e in range(num_experts):
                m = places[lane, e]
                bits[row, e] = 1 + (m < a) + (m < b) + (m < c)
            if _is_coarse(num_experts, budget, most[lane] - best[lane], every[lane]):
                bits[row, 0], coarse = 0, True
    return COARSE if coarse else NOTHING


@loop(types.int64(_ROWS, _TABLES, _ROWS, types.int64, types.int8[:, ::1]))
def select_prefix_wide(importance, losses, weights, budget, bits):
    """As `select_prefix`, faster for many experts, one row after the other."""
    wrong = _wrong(importance, losses, weights)
    if wrong != NOTHING:
        return wrong
    num_rows, num_experts = bits.shape
    weighted = weights.shape[0] > 0
    unit = _units(losses, weighted)
    gain4, gain3, gain2 = np.zeros(num_experts + 1), np.zeros(num_experts + 1), np.zeros(num_experts + 1)
    backwards, inner = np.empty(num_experts + 1), np.empty(num_experts + 1)
    keys, taken = np.empty(num_experts, np.float32), np.empty(num_experts, np.int32)
    place, order, factor = np.empty(num_experts, np.int32), np.empty(num_experts, np.int64), np.ones(num_experts)
    i, k, w, coarse = 0, 0, 0, False
    for row in range(num_rows):
        if weighted:
            _below_one(weights[w], factor)
            w = w + 1 if w + 1 < weights.shape[0] else 0
        rank_wide(importance[i], keys, taken, place, order)
        most, every = _add_up(losses[k], unit[k], factor, order, gain4, gain3, gain2)
        best, a, b = _cuts_wide(gain4, gain3, gain2, budget, backwards, inner)
        c = budget - a - b
        for e in range(num_experts):
            m = place[e]
            bits[row, e] = 1 + (m < a) + (m < b) + (m < c)
        if _is_coarse(num_experts, budget, most - best, every):
            bits[row, 0], coarse = 0, True
        i = i + 1 if i + 1 < importance.shape[0] else 0
        k = k + 1 if k + 1 < losses.shape[0] else 0
    return COARSE if coarse else NOTHING
