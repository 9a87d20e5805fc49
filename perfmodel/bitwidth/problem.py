"""A bit budget as a problem in whole costs: what the options of the selector and of its fronts come to."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth.checks import check_memory, choice, common_lead, finite, menu, not_negative, per_expert
from perfmodel.errors import PolicyError

Scope = Literal["layer", "model"]
SCOPES: tuple[Scope, ...] = ("layer", "model")

#: Largest number of parameters of one expert; sums of costs in bits stay whole below it.
_LARGEST = 10**12
#: Power of two below which scaled losses stay, so that sums of any that fit in memory cannot overflow.
_ROOM = 960


@dataclass(frozen=True, eq=False)
class Problem:
    """Groups of experts that share a budget: G groups of L layers (one, unless the scope is a model) of E experts.

    Arrays follow ``order`` where there is one, else the caller's order of experts.

    losses : float64 [G, L, E, M], times the weights, divided by ``2 ** exponent`` of the group: sums cannot overflow,
        and no choice depends on the unit of losses
    costs : int64 [G, L, E, M], what a width costs above the expert's lowest, in steps
    floor : int64 [G, L, E], lowest level that an expert may have; levels below it are costed as the floor is
    order : int64 [G, L, E], the experts by decreasing importance; None without the prefix rule
    exponent : int64 [G]
    parameters : int64 [G], parameters of a group; its experts where sizes are not given
    base : int64 [G], what a group costs with every expert at its lowest width [bit]
    step : int64 [G], one step of cost [bit]
    size_step : int64 [G], common divisor of the sizes in a group
    one_size : bool [G], whether all experts of a group are of one size
    bits : the menu
    shape : of the caller's arrays without widths, [..., E]
    """

    losses: NDArray[np.float64]
    costs: NDArray[np.int64]
    floor: NDArray[np.int64]
    order: NDArray[np.int64] | None
    exponent: NDArray[np.int64]
    parameters: NDArray[np.int64]
    base: NDArray[np.int64]
    step: NDArray[np.int64]
    size_step: NDArray[np.int64]
    one_size: NDArray[np.bool_]
    bits: tuple[int, ...]
    shape: tuple[int, ...]
    scope: Scope

    @property
    def lead(self) -> tuple[int, ...]:
        """Shape of the groups."""
        return self.shape[:-2] if self.scope == "model" else self.shape[:-1]

    @property
    def most(self) -> NDArray[np.int64]:
        """Cost of every group with every expert at its widest, in steps [G]."""
        return np.asarray(self.costs[..., -1].sum(axis=(1, 2)))

    def spent_bits(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bits of every group's weights at costs in steps [G, R]."""
        return self.base[:, None] + steps * self.step[:, None]

    def mean_bits(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Mean bits a weight of every group at costs in steps [G, R]."""
        return np.asarray(self.spent_bits(steps) / np.maximum(self.parameters, 1)[:, None])

    def only(self, group: int) -> "Problem":
        """One group alone."""
        given = {name: getattr(self, name) for name in self.__dataclass_fields__}
        part: dict[str, Any] = {
            name: value[group : group + 1] for name, value in given.items() if isinstance(value, np.ndarray)
        }
        return replace(self, shape=self.shape[len(self.lead) :], **part)


def make_problem(
    losses: Any,
    importance: Any,
    *,
    bits: Any,
    sizes: Any,
    weights: Any,
    min_bits: Any,
    scope: Any,
) -> Problem:
    """Check everything that describes the experts, broadcast it and put it into whole costs.

    Raises PolicyError in one line.
    """
    widths = menu(bits, "bits", PolicyError)
    choice("scope", scope, SCOPES)
    given, loss = _checked(losses, importance, widths, sizes, weights, min_bits)
    num_experts = loss.shape[-2]
    shape = (*common_lead({**given, "losses": loss}), num_experts)
    if scope == "model" and len(shape) < 2:
        raise PolicyError(f"scope 'model' needs losses [..., layers, experts, {len(widths)}], found {list(loss.shape)}")

    check_memory((*shape, len(widths)), loss.itemsize)
    lead, layers = (shape[:-2], shape[-2]) if scope == "model" else (shape[:-1], 1)
    grouped = (math.prod(lead), layers, num_experts)
    flat = {name: np.broadcast_to(array, shape).reshape(grouped) for name, array in given.items()}
    table = np.broadcast_to(loss, (*shape, len(widths))).reshape(*grouped, len(widths))
    order = None
    if importance is not None:
        order = np.argsort(-flat["importance"], axis=-1, kind="stable")
        flat = {name: np.take_along_axis(array, order, axis=-1) for name, array in flat.items()}
        table = np.take_along_axis(table, order[..., None], axis=-2)

    # As large as sums allow, so that the smallest losses are still numbers beside the largest.
    table, exponent = _scaled(table, _ROOM)
    if weights is not None:
        factor, more = _scaled(flat["weights"], 0)
        table, exponent = table * factor[..., None], exponent + more
    size = flat["sizes"] if sizes is not None else np.ones(grouped, np.int64)
    floor = flat["min_bits"]
    levels = np.maximum(np.arange(len(widths)), floor[..., None])
    cost = size[..., None] * np.array(widths)[levels]
    lowest = cost[..., :1].copy()
    cost -= lowest
    # Without experts there is no divisor, and 0 stands for it.
    step, size_step = (_common_divisor(array) for array in (cost, size))
    return Problem(
        losses=np.ascontiguousarray(np.take_along_axis(table, levels, axis=-1)),
        costs=np.ascontiguousarray(cost // step[:, None, None, None]),
        floor=floor,
        order=order,
        exponent=exponent,
        parameters=size.sum(axis=(1, 2)),
        base=lowest.sum(axis=(1, 2, 3)),
        step=step,
        size_step=size_step,
        one_size=(size == size_step[:, None, None]).all(axis=(1, 2)),
        bits=widths,
        shape=shape,
        scope=scope,
    )


def check_shapes(loss: NDArray[Any], rank: NDArray[Any] | None, num_widths: int) -> None:
    """Refuse losses that are not [..., E, widths], and importance that is not [..., E]."""
    good = loss.ndim >= 2 and loss.shape[-1] == num_widths
    if rank is None and not good:
        raise PolicyError(f"losses has shape {list(loss.shape)}; it must be [..., experts, {num_widths}]")
    if rank is not None and not (good and rank.ndim >= 1 and loss.shape[-2] == rank.shape[-1]):
        raise PolicyError(
            f"importance has shape {list(rank.shape)} and losses {list(loss.shape)}; "
            f"they must be [..., experts] and [..., experts, {num_widths}]"
        )


def _checked(
    losses: Any, importance: Any, widths: tuple[int, ...], sizes: Any, weights: Any, min_bits: Any
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    """Every given array [..., E] by name, ``min_bits`` as levels; and the losses."""
    rank = None if importance is None else finite(importance, "importance", PolicyError)
    loss = finite(losses, "losses", PolicyError)
    check_shapes(loss, rank, len(widths))
    not_negative(loss, "losses", PolicyError)
    num_experts = loss.shape[-2]
    given: dict[str, NDArray[Any]] = {"min_bits": _checked_floor(min_bits, widths, num_experts)}
    if rank is not None:
        given["importance"] = rank
    if sizes is not None:
        given["sizes"] = _checked_sizes(sizes, num_experts)
    if weights is not None:
        given["weights"] = per_expert(weights, "weights", num_experts)
        not_negative(given["weights"], "weights", PolicyError)
    return given, loss


def _checked_sizes(sizes: Any, num_experts: int) -> NDArray[np.int64]:
    array = per_expert(sizes, "sizes", num_experts)
    bad = (array != np.floor(array)) | (array < 1) | (array > _LARGEST)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise PolicyError(f"sizes{list(where)} is {array[where]:g}; it must be a whole number from 1 to {_LARGEST:g}")
    return array.astype(np.int64)


def _checked_floor(min_bits: Any, widths: tuple[int, ...], num_experts: int) -> NDArray[np.int64]:
    """Lowest allowed level of every expert: the first width of the menu that is not below its floor."""
    if min_bits is None:
        return np.zeros(num_experts, np.int64)
    array = finite(min_bits, "min_bits", PolicyError)
    if array.ndim == 0:
        array = np.full(num_experts, float(array))
    array = per_expert(array, "min_bits", num_experts)
    bad = (array < 0) | (array > widths[-1])
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise PolicyError(f"min_bits{list(where)} is {array[where]:g}; it must be a number from 0 to {widths[-1]}")
    return np.searchsorted(widths, array).astype(np.int64)


def _common_divisor(array: NDArray[np.int64]) -> NDArray[np.int64]:
    """Largest number that divides all of a group [G]; 1 where there are none but zeros."""
    rows = array.reshape(len(array), math.prod(array.shape[1:]))
    return np.asarray(np.maximum(np.gcd.reduce(rows, axis=1), 1))


def _scaled(array: NDArray[Any], below: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Groups divided by the power of two that brings them to just below ``2 ** below``, and its exponent [G]."""
    axes = tuple(range(1, array.ndim))
    exponent = np.frexp(array.max(axis=axes, initial=0.0, keepdims=True))[1] - below
    return np.ldexp(array, -exponent), exponent.reshape(-1).astype(np.int64)
