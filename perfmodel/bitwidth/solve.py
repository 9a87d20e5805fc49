"""Solve a problem of bit widths: the front of every budget, and the assignment of one."""

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth.problem import Problem
from perfmodel.errors import PolicyError
from perfmodel.kernels.knapsack import best_levels, best_shares, cost_fronts, merge_fronts

#: Largest tables of a dynamic program [byte].
_MOST_BYTES = 2**30
#: Most steps of one search over the layers of a model; about half a minute, in which nothing can interrupt it.
_MOST_STEPS = 1e11


def fronts(problem: Problem, last: int) -> NDArray[np.float64]:
    """Smallest loss of every group at every exact cost from 0 to ``last`` steps [G, last + 1], in the problem's unit.

    Infinite where nothing costs just that. Raises PolicyError when the tables would not fit in memory, or layers that
    share a budget would take too long.
    """
    groups, layers = problem.losses.shape[:2]
    ordered = problem.order is not None
    # The result; and two rows of a table in turn for every width, or for the merger, beside a front of every layer.
    widths = len(problem.bits) if ordered else 1
    _check_memory(problem, last, groups + 2 * widths + (layers + 2) * (problem.scope == "model"))
    if problem.scope == "layer":
        return np.asarray(cost_fronts(problem.losses[:, 0], problem.costs[:, 0], last, ordered))
    found = np.empty((groups, last + 1))
    for g in range(groups):
        found[g] = merge_fronts(_layer_fronts(problem, g, last), last)
    return found


def levels(problem: Problem, steps: NDArray[np.int64], ceiling: NDArray[np.bool_]) -> NDArray[np.int8]:
    """Level of every expert [G, L, E] in the best assignment at a cost of ``steps`` [G], exactly or at most.

    All -1 in a group where nothing costs just that. Raises PolicyError as `fronts` does.
    """
    groups, layers, experts, widths = problem.losses.shape
    ordered = problem.order is not None
    most = int(steps.max(initial=0))
    _check_memory(problem, min(most, _dearest(problem.costs)), (experts + 1) * (widths if ordered else 1) + layers)
    if problem.scope == "layer":
        return np.asarray(best_levels(problem.losses[:, 0], problem.costs[:, 0], steps, ceiling, ordered))[:, None]
    _check_memory(problem, most, layers + 1)
    found = np.full((groups, layers, experts), -1, np.int8)
    exactly = np.zeros(layers, np.bool_)
    for g in range(groups):
        shares = best_shares(_layer_fronts(problem, g, int(steps[g])), int(steps[g]), bool(ceiling[g]))
        found[g] = best_levels(problem.losses[g], problem.costs[g], shares, exactly, ordered)
    return found


def assigned_bits(problem: Problem, chosen: NDArray[np.int8]) -> NDArray[np.int8]:
    """Bit width of every expert in the caller's order and shape, for levels [G, L, E] in the problem's order."""
    bits = np.array(problem.bits, np.int8)[np.maximum(chosen, problem.floor)]
    if problem.order is not None:
        by_rank, bits = bits, np.empty_like(bits)
        np.put_along_axis(bits, problem.order, by_rank, axis=-1)
    return bits.reshape(problem.shape)


def _dearest(costs: NDArray[np.int64]) -> int:
    """What the dearest layer of ``costs`` [..., L, E, M] can cost [step]."""
    return int(costs[..., -1].sum(axis=-1).max(initial=0))


def _layer_fronts(problem: Problem, group: int, last: int) -> NDArray[np.float64]:
    """Front of every layer of one group, up to ``last`` or what the dearest can cost."""
    dearest, ordered = _dearest(problem.costs[group]), problem.order is not None
    found = np.asarray(cost_fronts(problem.losses[group], problem.costs[group], min(last, dearest), ordered))
    _check_time(problem, found, last)
    return found


def _check_time(problem: Problem, fronts: NDArray[np.float64], last: int) -> None:
    """Refuse a split of ``last`` steps over fronts [L, R] that would take too long.

    Every step that a layer can cost is tried beside every step that those after it can.
    """
    layers, steps = fronts.shape
    others = np.minimum(last + 1.0, np.arange(layers, 0, -1.0) * steps)
    needed = float(np.isfinite(fronts).sum(axis=1) @ others)
    if needed > _MOST_STEPS:
        raise PolicyError(
            f"one budget for {layers} layers would take {needed:.3g} steps of search, and at most {_MOST_STEPS:.3g} "
            f"are allowed: {last + 1} budgets times {steps} of a layer; {_remedy(problem)}, or take scope 'layer'"
        )


def _check_memory(problem: Problem, last: int, rows: int) -> None:
    """Refuse tables of that many rows of one number a step of cost."""
    needed = 8 * rows * (last + 1)
    if needed > _MOST_BYTES:
        raise PolicyError(
            f"the search would need tables of {needed / 1e9:.3g} GB, and at most {_MOST_BYTES / 1e9:.3g} GB are "
            f"allowed: {rows} x {last + 1} budgets; {_remedy(problem)}"
        )


def _remedy(problem: Problem) -> str:
    """What makes the number of budgets smaller."""
    if problem.one_size.all():
        return f"there are {problem.losses.shape[2]} experts a layer, so take fewer of them at a time"
    return (
        f"a budget counts in steps of {int(problem.step.min())} bits, as sizes have no larger common divisor, so round "
        f"sizes to one"
    )
