r"""The best width of every expert by dynamic programs over whole costs, with and without the prefix rule.

A row is one group of experts that share a budget. ``losses`` and ``costs`` are [B, E, M]: what expert ``e`` loses and
costs at level ``m``. Costs are whole, do not fall with the level, and level 0 is free.

Both programs run from the last expert to the first. Under the prefix rule, where experts are in order of decreasing
importance, let :math:`G_e(m, r)` be the smallest summed loss of the experts from ``e`` on when they cost ``r``
together, no level rises from one to the next, and none is above ``m``:

.. math:: G_e(m, r) = \min\bigl(G_e(m - 1, r),\; loss_{e,m} + G_{e+1}(m, r - cost_{e,m})\bigr)

The answer is :math:`G_0(M - 1, r)`. Without the rule one row of that table is enough:

.. math:: F_e(r) = \min_m \bigl(loss_{e,m} + F_{e+1}(r - cost_{e,m})\bigr)

Time is O(E M R) for costs up to R. Going back through the table takes the lowest level that reaches each entry, so of
equal assignments the one is found whose levels, read from the first expert on, come first in lexicographic order.
Sums are float64 additions from the last expert to the first: what ties on paper may differ in the last bit.
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only, scalar

_LOSSES = read_only(types.float64[:, :, ::1])
_COSTS = read_only(types.int64[:, :, ::1])
_WHOLE = read_only(types.int64[::1])
_FRONTS = read_only(types.float64[:, ::1])
_FLAGS = read_only(types.boolean[::1])

# Which parts of a table are kept, one for each expert or row: all, or two that take turns.
_ALL, _TWO = -1, 1


@scalar
def _fill(loss, cost, last, ordered, table, kept):
    """Fill ``table`` [E + 1 or 2, M or 1, last + 1] with G or F; the answer is in the last row of expert 0."""
    num_experts, num_levels = loss.shape
    for row in range(table.shape[1]):
        for r in range(last + 1):
            table[num_experts & kept, row, r] = np.inf
        table[num_experts & kept, row, 0] = 0.0
    reach = 0  # what the experts so far can cost together
    for e in range(num_experts - 1, -1, -1):
        for m in range(num_levels):
            row = m if ordered else 0
            new, old = table[e & kept, row], table[(e + 1) & kept, row]
            lost, spent = loss[e, m], cost[e, m]
            if m == 0:
                for r in range(last + 1):
                    new[r] = lost + old[r]
                continue
            if ordered:
                lower = table[e & kept, row - 1]
                for r in range(last + 1):
                    new[r] = lower[r]
            for r in range(spent, min(last, reach + spent) + 1):
                total, before = lost + old[r - spent], new[r]
                new[r] = total if total < before else before
        reach = min(last, reach + cost[e, num_levels - 1])


@loop(types.float64[:, ::1](_LOSSES, _COSTS, types.int64, types.boolean))
def cost_fronts(losses, costs, last, ordered):
    """Smallest summed loss of every row at every exact cost from 0 to ``last``: [B, last + 1].

    Infinite where no assignment costs just that. ``ordered`` asks for the prefix rule.
    """
    num_rows, num_levels = losses.shape[0], losses.shape[2]
    rows = num_levels if ordered else 1
    fronts = np.empty((num_rows, last + 1))
    table = np.empty((2, rows, last + 1))
    for b in range(num_rows):
        _fill(losses[b], costs[b], last, ordered, table, _TWO)
        for r in range(last + 1):
            fronts[b, r] = table[0, rows - 1, r]
    return fronts


@scalar
def _spend(front, budget, at_most):
    """What to spend of a budget: all of it or, with ``at_most``, what loses least, and of equals the least."""
    if not at_most:
        return budget
    spent = 0
    for r in range(1, budget + 1):
        if front[r] < front[spent]:
            spent = r
    return spent


@loop(types.int8[:, ::1](_LOSSES, _COSTS, _WHOLE, _FLAGS, types.boolean))
def best_levels(losses, costs, budget, at_most, ordered):
    """Level of every expert [B, E] in the best assignment of every row.

    An assignment costs ``budget`` [B] exactly or, where ``at_most`` [B] says so, no more than that (of equal losses
    the cheapest). All levels are -1 where there is none, or where the budget is negative.

    >>> losses, costs = np.array([[[2.0, 1.5, 1.0], [8.0, 4.0, 2.0]]]), np.array([[[0, 1, 2], [0, 1, 2]]])
    >>> best_levels(losses, costs, np.array([2]), np.array([False]), False).tolist()
    [[0, 2]]
    >>> best_levels(losses, costs, np.array([2]), np.array([False]), True).tolist()
    [[1, 1]]
    """
    num_rows, num_experts, num_levels = losses.shape
    rows = num_levels if ordered else 1
    most = 0
    for b in range(num_rows):
        most = max(most, budget[b])
    levels = np.full((num_rows, num_experts), np.int8(-1))
    table = np.empty((num_experts + 1, rows, most + 1))
    for b in range(num_rows):
        r = budget[b]
        if r < 0:
            continue
        _fill(losses[b], costs[b], r, ordered, table, _ALL)
        row = rows - 1
        r = _spend(table[0, row], r, at_most[b])
        if table[0, row, r] == np.inf:
            continue
        for e in range(num_experts):
            wanted = table[e, row, r]
            m = 0
            while True:
                after = m if ordered else 0
                spent = costs[b, e, m]
                if spent <= r and losses[b, e, m] + table[e + 1, after, r - spent] == wanted:
                    break
                m += 1
            levels[b, e] = m
            row, r = after, r - spent
    return levels


@scalar
def _fill_merged(fronts, last, table, kept):
    r"""Fill ``table`` [B + 1 or 2, last + 1] with the min-plus convolution of the fronts, from the last to the first.

    .. math:: T_b(r) = \min_q \bigl(front_{b,q} + T_{b+1}(r - q)\bigr)
    """
    num_rows, steps = fronts.shape
    for r in range(last + 1):
        table[num_rows & kept, r] = np.inf
    table[num_rows & kept, 0] = 0.0
    reach = 0  # what the rows so far can cost together
    for b in range(num_rows - 1, -1, -1):
        new, old = table[b & kept], table[(b + 1) & kept]
        for r in range(last + 1):
            new[r] = np.inf
        for q in range(min(steps, last + 1)):
            lost = fronts[b, q]
            if lost == np.inf:
                continue
            for r in range(q, min(last, reach + q) + 1):
                total, before = lost + old[r - q], new[r]
                new[r] = total if total < before else before
        reach = min(last, reach + steps - 1)


@loop(types.float64[::1](_FRONTS, types.int64))
def merge_fronts(fronts, last):
    """Smallest summed loss of all rows of ``fronts`` [B, R + 1] at every exact cost from 0 to ``last``: [last + 1]."""
    table = np.empty((2, last + 1))
    _fill_merged(fronts, last, table, _TWO)
    return table[0].copy()


@loop(types.int64[::1](_FRONTS, types.int64, types.boolean))
def best_shares(fronts, budget, at_most):
    """What each row of ``fronts`` [B, R + 1] spends in the best split of a budget [B].

    The shares add up to ``budget`` exactly or, with ``at_most``, to no more (of equal losses to the least). Of equal
    splits an earlier row takes less. All are -1 where there is none. Time is O(B R budget).
    """
    num_rows = fronts.shape[0]
    shares = np.full(num_rows, -1)
    table = np.empty((num_rows + 1, budget + 1))
    _fill_merged(fronts, budget, table, _ALL)
    left = _spend(table[0], budget, at_most)
    if table[0, left] == np.inf:
        return shares
    for b in range(num_rows):
        wanted, q = table[b, left], 0
        while fronts[b, q] + table[b + 1, left - q] != wanted:
            q += 1
        shares[b] = q
        left -= q
    return shares
