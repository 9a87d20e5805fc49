"""The selector that spends a bit budget on near-data experts, and the optimum beside it."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.bitwidth.budget import Budget, budget_steps, increments, refuse_unreachable
from perfmodel.bitwidth.checks import (
    LARGEST,
    check_last_axis,
    check_memory,
    common_lead,
    finite,
    mean_within,
    not_negative,
)
from perfmodel.bitwidth.problem import Problem, Scope, check_shapes, make_problem
from perfmodel.bitwidth.solve import assigned_bits, levels
from perfmodel.bitwidth.table import BITS
from perfmodel.errors import PolicyError
from perfmodel.kernels.selector import (
    BAD_IMPORTANCE,
    BAD_LOSSES,
    BAD_WEIGHTS,
    COARSE,
    WIDE,
    select_prefix,
    select_prefix_wide,
)

_NO_ROWS = np.empty((0, 0))
_BAD = {BAD_IMPORTANCE: "importance", BAD_LOSSES: "losses", BAD_WEIGHTS: "weights"}
#: Losses that are taken to the dynamic program at once.
_AT_ONCE = 2**22


def select_bitwidths(
    importance: ArrayLike,
    losses: ArrayLike,
    mean_bits: float | None = None,
    *,
    bits: ArrayLike = BITS,
    budget: Budget = "exact",
    sizes: ArrayLike | None = None,
    max_bytes: float | None = None,
    weights: ArrayLike | None = None,
    min_bits: ArrayLike | None = None,
    scope: Scope = "layer",
) -> NDArray[np.int8]:
    r"""Bit width of each near-data expert under a budget, by the prefix rule.

    Experts of a layer are ordered by decreasing importance (ties: lower index first). Of all assignments whose bits
    do not increase along that order and which meet the budget, one with the smallest summed loss is taken:

    .. math:: \min_b \sum_i w_i\, loss_i(b_i) \quad\text{with}\quad b_1 \ge b_2 \ge \dots \ge b_E

    Ties: the bits that come first in lexicographic order along the order of importance, so the fewest experts at 4
    bits, then the fewest at 3. Sums are float64: what ties on paper may differ in the last bit, and the loss found is
    within 1e-9 of the smallest, in proportion.

    Parameters
    ----------
    importance : finite numbers [..., E]; usually [sequences, layers, experts on the near-data device]
    losses : finite numbers, not negative [..., E, widths]; output error of each expert at each width. Leading axes
        of all arrays broadcast.
    mean_bits : mean bits a weight over the group that shares the budget, within the menu [bit]
    bits : the menu of widths, whole and rising, 1 to 16 [bit]
    budget : ``exact`` spends ``floor(E * (mean_bits - bits[0]))`` bits above the lowest width, no more and no less;
        ``at-most`` takes the smallest loss within them (ties: the fewest bits). Where experts of a group differ in
        size no total can be met at will, so their budget is a ceiling in any case.
    sizes : parameters of each expert, whole numbers [..., E]; without them all experts count alike
    max_bytes : ceiling of the weights of a group in place of ``mean_bits`` [byte]; needs ``sizes``
    weights : factors of the losses, finite and not negative [..., E]; see `objective_weights`
    min_bits : floor of every expert, one number or [..., E] [bit]. The prefix rule holds for the widths before
        those below the floor are lifted to it; lifting counts against the budget.
    scope : the group that shares a budget: each ``layer``, or the whole ``model``, the last two axes [layers, E]
        together. The prefix rule holds within layers in both; the split over layers is the best one (ties: the
        earlier layer takes less).

    Returns
    -------
    int8 [..., E] : a width of the menu for each expert, in the caller's order; empty when E is 0

    Raises
    ------
    PolicyError : when shapes do not match, a number is missing, infinite or out of range, or the budget cannot be
        met; the message then names the nearest that can

    References
    ----------
    Fan et al., "Context-Aware Mixture-of-Experts Inference on CXL-Enabled GPU-NDP Systems", arXiv:2512.04476.

    >>> select_bitwidths([0.1, 0.9], [[2, 1.5, 1, 0.5], [8, 4, 2, 1]], 2.0).tolist()
    [1, 3]
    """
    plain = sizes is None and max_bytes is None and min_bits is None
    if plain and _is(budget, "exact") and _is(scope, "layer") and _is_usual(bits):
        return _searched(importance, losses, mean_bits, weights)
    # An importance of None would ask for the optimum.
    rank = finite(importance, "importance", PolicyError)
    problem = make_problem(losses, rank, bits=bits, sizes=sizes, weights=weights, min_bits=min_bits, scope=scope)
    return _chosen(problem, mean_bits, max_bytes, budget, sized=sizes is not None)


def optimal_bitwidths(
    losses: ArrayLike,
    mean_bits: float | None = None,
    *,
    bits: ArrayLike = BITS,
    budget: Budget = "exact",
    sizes: ArrayLike | None = None,
    max_bytes: float | None = None,
    weights: ArrayLike | None = None,
    min_bits: ArrayLike | None = None,
    scope: Scope = "layer",
) -> NDArray[np.int8]:
    """Bit width of each expert with the smallest summed loss under a budget, in whatever order.

    The optimum of a multiple-choice knapsack, by dynamic programming; what `select_bitwidths` loses against it is
    the price of the prefix rule. Parameters, budgets and errors are those of `select_bitwidths`.

    Ties: the bits that come first in lexicographic order, in the caller's order of experts.

    >>> losses = [[2, 1.5, 1, 0.5], [8, 4, 2, 1]]
    >>> optimal_bitwidths(losses, 2.0).tolist(), select_bitwidths([0.9, 0.1], losses, 2.0).tolist()
    ([1, 3], [2, 2])
    """
    problem = make_problem(losses, None, bits=bits, sizes=sizes, weights=weights, min_bits=min_bits, scope=scope)
    return _chosen(problem, mean_bits, max_bytes, budget, sized=sizes is not None)


def _chosen(problem: Problem, mean_bits: Any, max_bytes: Any, budget: Any, *, sized: bool) -> NDArray[np.int8]:
    steps, ceiling = budget_steps(problem, mean_bits, max_bytes, budget, sized)
    found = levels(problem, steps, ceiling)
    if found.size and found.min() < 0:
        refuse_unreachable(problem, int(np.argwhere(found < 0)[0, 0]), steps * problem.step, float(mean_bits))
    return assigned_bits(problem, found)


def _searched(importance: Any, losses: Any, mean_bits: Any, weights: Any) -> NDArray[np.int8]:
    """The usual case in one compiled call, which checks the numbers too; messages are made only on failure."""
    rank, loss = _floats(importance, "importance"), _floats(losses, "losses")
    check_shapes(loss, rank, len(BITS))
    lead, num_experts = rank.shape[:-1], rank.shape[-1]
    given = {"importance": rank, "losses": loss}
    same = loss.shape[:-2] == lead
    if weights is not None:
        given["weights"] = factor = _floats(weights, "weights")
        check_last_axis(factor, "weights", num_experts)
        same = same and factor.shape[:-1] == lead
    if not same:
        lead = common_lead(given)
        check_memory((*lead, num_experts), 1)
    budget = increments(num_experts, mean_within(mean_bits, BITS), BITS[0])
    bits = np.empty((*lead, num_experts), np.int8)
    if num_experts == 0:
        return bits
    rows = [_as_rows(rank, lead, 1), _as_rows(loss, lead, 2), _NO_ROWS]
    if weights is not None:
        rows[2] = _as_rows(given["weights"], lead, 1)
    found = bits.reshape(-1, num_experts)
    said = (select_prefix if num_experts < WIDE else select_prefix_wide)(*rows, budget, found)
    if said in _BAD:
        name = _BAD[said]
        not_negative(finite(given[name], name, PolicyError), name, PolicyError)
    elif said == COARSE:
        _search_again(rows, budget, found)
    return bits


def _search_again(rows: list[NDArray[np.float64]], budget: int, bits: NDArray[np.int8]) -> None:
    """Fill the rows that the compiled search has marked, by the dynamic program, which adds up only what counts.

    A loss far larger than the smallest sum would drown it in prefix sums.
    """
    marked = np.flatnonzero(bits[:, 0] == 0)
    rank, loss, factor = rows
    for part in np.split(marked, range(0, len(marked), max(1, _AT_ONCE // loss[0].size))[1:]):
        problem = make_problem(
            loss[part % len(loss)],
            rank[part % len(rank)],
            bits=BITS,
            sizes=None,
            weights=factor[part % len(factor)] if len(factor) else None,
            min_bits=None,
            scope="layer",
        )
        steps = np.full(len(part), budget)
        bits[part] = assigned_bits(problem, levels(problem, steps, np.zeros(len(part), np.bool_)))


def _floats(values: Any, name: str) -> NDArray[np.float64]:
    """``values`` as float64 as they are, where they are that already; else converted and checked."""
    if type(values) is np.ndarray and values.dtype == np.float64 and values.size <= LARGEST and values.flags.aligned:
        return values
    return finite(values, name, PolicyError)


def _as_rows(array: NDArray[np.float64], lead: tuple[int, ...], own: int) -> NDArray[np.float64]:
    """Rows of the last ``own`` axes in C order; where fewer than ``lead`` asks for, they repeat in turn."""
    mine, axes = array.shape[:-own], array.shape[-own:]
    if lead[len(lead) - len(mine) :] != mine:
        check_memory((*lead, *axes), array.itemsize)
        array = np.broadcast_to(array, (*lead, *axes))
    rows = array[None] if not lead else array.reshape(-1, *axes)
    return rows if rows.flags.c_contiguous else np.ascontiguousarray(rows)


def _is(value: Any, word: str) -> bool:
    return isinstance(value, str) and value == word


def _is_usual(bits: Any) -> bool:
    if bits is BITS:
        return True
    return type(bits) in (tuple, list) and all(type(width) is int for width in bits) and tuple(bits) == BITS
