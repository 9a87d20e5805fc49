"""What a budget comes to in steps of cost, and which budgets cannot be met."""

import math
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth.checks import as_float, choice, mean_within
from perfmodel.bitwidth.problem import Problem
from perfmodel.bitwidth.solve import fronts
from perfmodel.errors import PolicyError
from perfmodel.routing.npz import shown

Budget = Literal["exact", "at-most"]
BUDGETS: tuple[Budget, ...] = ("exact", "at-most")

# Both undo rounding in a product such as 10 * (2.3 - 1): a part of a step, and a few units in the last place of the
# whole product, since a mean is rounded at its own size rather than at what it exceeds the lowest width by.
_SLACK, _RELATIVE = 1e-9, 1e-15


@overload
def increments(num_experts: float, mean_bits: float, lowest: int) -> int: ...
@overload
def increments(num_experts: NDArray[np.float64], mean_bits: float, lowest: int) -> NDArray[np.int64]: ...
def increments(num_experts: float | NDArray[np.float64], mean_bits: float, lowest: int) -> int | NDArray[np.int64]:
    """One-bit increments above the lowest width that a mean allows experts of one size [bit].

    Equation: ``floor(num_experts * (mean_bits - lowest))``, where a product just below a whole number counts as it:
    by less than 1e-9, or than rounding of a large product.

    num_experts : experts that share the budget; or how many times the common divisor of their sizes goes into the sum
    """
    allowed = num_experts * (mean_bits - lowest) + (_SLACK + _RELATIVE * mean_bits * num_experts)
    return np.floor(allowed).astype(np.int64) if isinstance(allowed, np.ndarray) else math.floor(allowed)


def budget_steps(
    problem: Problem, mean_bits: Any, max_bytes: Any, budget: Any, sized: bool
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Budget of every group in steps of cost [G], and whether it is a ceiling [G].

    Raises PolicyError when a budget is not a number, out of range, or below what the lowest widths take.
    """
    choice("budget", budget, BUDGETS)
    if max_bytes is not None:
        if mean_bits is not None:
            raise PolicyError("mean_bits and max_bytes are both given; a budget is one of them")
        return _within_bytes(problem, max_bytes, sized)
    mean, lowest = mean_within(mean_bits, problem.bits), problem.bits[0]
    above_lowest = increments(problem.parameters / problem.size_step, mean, lowest) * problem.size_step
    room = above_lowest - (problem.base - problem.parameters * lowest)
    _refuse_too_little(problem, room, "mean_bits", mean_bits)
    ceiling = ~problem.one_size if budget == "exact" else np.ones(len(room), np.bool_)
    odd = ~ceiling & (room % problem.step != 0)
    if odd.any():
        refuse_unreachable(problem, int(np.argmax(odd)), room, mean)
    return room // problem.step, ceiling


def _within_bytes(problem: Problem, max_bytes: Any, sized: bool) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    if not sized:
        raise PolicyError("max_bytes needs sizes, the number of parameters of every expert")
    ceiling = as_float(max_bytes)
    if not 0 <= ceiling < 2**60:
        raise PolicyError(f"max_bytes is {shown(max_bytes)}; it must be a number of bytes, 0 or more")
    room = math.floor(8 * ceiling) - problem.base
    _refuse_too_little(problem, room, "max_bytes", max_bytes)
    return np.minimum(room // problem.step, problem.most), np.ones(len(room), np.bool_)


def _refuse_too_little(problem: Problem, room: NDArray[np.int64], name: str, given: Any) -> None:
    if not (room < 0).any():
        return
    group = int(np.argmin(room))
    base = problem.base[group]
    least = f"{base / 8:.12g} bytes" if name == "max_bytes" else f"a mean of {base / problem.parameters[group]:.12g}"
    raise PolicyError(f"{name} is {shown(given)}; the lowest widths allowed{_place(problem, group)} take {least}")


def refuse_unreachable(problem: Problem, group: int, room: NDArray[np.int64], mean: float) -> None:
    """Refuse a mean that no assignment of a group meets exactly, and name the nearest that can be met.

    room : int64 [G], what the mean allows above the lowest widths [bit]
    """
    one = problem.only(group)
    reachable = np.flatnonzero(np.isfinite(fronts(one, int(one.most[0]))[0]))
    means, spent = one.mean_bits(reachable[None])[0], reachable * one.step
    nearest = [*means[spent < room[group]][-1:], *means[spent > room[group]][:1]]
    raise PolicyError(
        f"mean_bits is {mean:.15g}, which the {math.prod(one.losses.shape[1:3])} experts{_place(problem, group)} "
        f"cannot meet exactly at {', '.join(map(str, problem.bits))} bits; the nearest that they can meet: "
        f"{' and '.join(f'{near:.15g}' for near in nearest)}; or take budget 'at-most'"
    )


def _place(problem: Problem, group: int) -> str:
    """Which group, where there are several."""
    index = [int(i) for i in np.unravel_index(group, problem.lead)] if problem.lead else []
    names = ("sequence",) if problem.scope == "model" else ("sequence", "layer")
    if len(index) > len(names):
        return f" of {'model' if problem.scope == 'model' else 'layer'} {index}"
    return (
        f" of {', '.join(f'{name} {i}' for name, i in zip(names[-len(index) :], index, strict=True))}" if index else ""
    )
