"""Smallest loss at every budget, in one pass."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.bitwidth.budget import budget_steps
from perfmodel.bitwidth.checks import finite
from perfmodel.bitwidth.problem import Problem, Scope, make_problem
from perfmodel.bitwidth.solve import assigned_bits, fronts, levels
from perfmodel.bitwidth.table import BITS
from perfmodel.errors import PolicyError
from perfmodel.routing.npz import shown


@dataclass(frozen=True, eq=False)
class BitwidthFront:
    """Smallest summed loss of every group of experts at every budget; made by `bitwidth_front`.

    A group is a layer or, with ``scope="model"``, all layers of a model. Leading axes are those of the losses without
    experts (and, for a model, without layers). Budgets rise from step 0, where every expert is at its lowest width,
    by one step of cost at a time.

    mean_bits : float64 [..., R], mean bits a weight
    cost_bytes : float64 [..., R], bytes of the group's weights; None where sizes were not given
    loss : float64 [..., R], smallest summed loss at exactly this budget; infinite where nothing costs just that
    """

    mean_bits: NDArray[np.float64]
    cost_bytes: NDArray[np.float64] | None
    loss: NDArray[np.float64]
    problem: Problem = field(repr=False)

    @property
    def loss_within(self) -> NDArray[np.float64]:
        """Smallest summed loss within each budget, spent or not [..., R]."""
        return np.minimum.accumulate(self.loss, axis=-1)

    @property
    def efficient(self) -> NDArray[np.bool_]:
        """Which budgets lose less than every smaller one [..., R]: the Pareto front of loss against bits."""
        smaller = np.full_like(self.loss, np.inf)
        smaller[..., 1:] = self.loss_within[..., :-1]
        return self.loss < smaller

    def step_within(self, mean_bits: float) -> NDArray[np.int64]:
        """Step of the smallest loss within a mean budget, the first of equals [...].

        Raises PolicyError when the mean is not a number that the menu spans, or the lowest widths exceed it.
        """
        limit = budget_steps(self.problem, mean_bits, None, "at-most", sized=False)[0].reshape(self.problem.lead)
        allowed = np.arange(self.loss.shape[-1]) <= limit[..., None]
        return np.asarray(np.argmin(np.where(allowed, self.loss, np.inf), axis=-1))

    def bits_at(self, step: ArrayLike) -> NDArray[np.int8]:
        """Bit width of every expert at a step, one for all groups or one for each [..., E].

        Raises PolicyError when a step is not one of the front, or nothing costs just that.
        """
        steps = finite(step, "step", PolicyError)
        last, lead = self.loss.shape[-1] - 1, self.problem.lead
        if ((steps != np.floor(steps)) | (steps < 0) | (steps > last)).any():
            raise PolicyError(f"step is {shown(step)}; it must be whole numbers from 0 to {last}")
        try:
            wanted = np.broadcast_to(steps.astype(np.int64), lead)
        except ValueError:
            raise PolicyError(f"step has shape {list(steps.shape)}; the front has {list(lead)}") from None
        found = np.isfinite(np.take_along_axis(self.loss, wanted[..., None], axis=-1))
        if not found.all():
            raise PolicyError(f"step is {shown(step)}, and nothing costs just that; take steps of finite loss")
        flat = np.ascontiguousarray(wanted.reshape(-1))
        return assigned_bits(self.problem, levels(self.problem, flat, np.zeros(len(flat), np.bool_)))


def bitwidth_front(
    losses: ArrayLike,
    *,
    importance: ArrayLike | None = None,
    bits: ArrayLike = BITS,
    sizes: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    min_bits: ArrayLike | None = None,
    scope: Scope = "layer",
) -> BitwidthFront:
    """Smallest summed loss at every budget, in one pass of the dynamic program.

    With ``importance`` assignments follow the prefix rule, as in `select_bitwidths`, where the parameters are
    described; without it they are free, as in `optimal_bitwidths`.

    Raises PolicyError when shapes do not match, a number is missing, infinite or out of range, or the tables would
    not fit in memory.

    >>> front = bitwidth_front([[2, 1.5, 1, 0.5], [8, 4, 2, 1]])
    >>> front.mean_bits.tolist(), front.loss.tolist()
    ([1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0], [10.0, 6.0, 4.0, 3.0, 2.5, 2.0, 1.5])
    >>> front.bits_at(2).tolist()
    [1, 3]
    """
    problem = make_problem(losses, importance, bits=bits, sizes=sizes, weights=weights, min_bits=min_bits, scope=scope)
    last = int(problem.most.max(initial=0))
    scaled = fronts(problem, last)
    with np.errstate(over="ignore"):
        loss = np.ldexp(scaled, problem.exponent[:, None])
    if (np.isinf(loss) & np.isfinite(scaled)).any():
        raise PolicyError("losses add up to more than a float64 holds; give them in a larger unit")
    steps = np.broadcast_to(np.arange(last + 1), loss.shape)
    shape = (*problem.lead, last + 1)
    cost = None if sizes is None else (problem.spent_bits(steps) / 8).reshape(shape)
    return BitwidthFront(problem.mean_bits(steps).reshape(shape), cost, loss.reshape(shape), problem)
