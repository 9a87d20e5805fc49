"""Axes of a sweep, and the values at which those that are not drawn are held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown
from perfmodel.scenario.axis import AUTO, FILES

if TYPE_CHECKING:
    from perfmodel.scenario import Scenario

#: Dimensions whose points follow no order along any axis.
TABLES = ("case", "sample", "point")
#: Two numbers that differ by less than this share are the same value of an axis.
_SAME = 1e-9
#: A number that was typed names the nearest value up to this share away: values are printed with four digits or more.
_TYPED = 1e-3

#: Why an axis is held where it is: the reader (or a sweep with a single value) says so; it is nearest the scenario's
#: own value; it is in the middle of the values; it is the first, as the values have no order.
Reason = Literal["chosen", "own", "middle", "first"]


class Axis(NamedTuple):
    """One axis of a sweep: its dotted name, the dimension it runs along, its values and their unit."""

    name: str
    dim: str
    values: NDArray[Any]
    unit: str

    @property
    def numeric(self) -> bool:
        """Whether the values are numbers."""
        return bool(np.issubdtype(self.values.dtype, np.number))


class Fixed(NamedTuple):
    """An axis that is held at one value, and why there; ``own`` is the scenario's own value where it is known."""

    axis: Axis
    value: Any
    reason: Reason
    own: Any = None


def places_of(axis: Axis, value: object) -> NDArray[np.bool_]:
    """Where an axis has a value, which may be text from a command line, with fewer digits than the value has.

    Raises
    ------
    PerfModelError : no value is that near, or several are; with the nearest ones.
    """
    found: NDArray[np.bool_] = np.array([str(one) == str(value) for one in axis.values], dtype=bool)
    number, numbers = _number(value), np.array([_number(one) for one in axis.values], dtype=np.float64)
    if not found.any() and np.isfinite(number):
        found = np.isclose(numbers, number, rtol=_SAME, atol=0)
    if not found.any() and np.isfinite(number):
        distinct = np.unique(numbers[np.isfinite(numbers)])
        away = np.abs(distinct - number)
        near = np.argsort(away, kind="stable")
        close = near[away[near] <= _TYPED * abs(number)]
        if len(close) == 1 or (len(close) > 1 and 2 * away[close[0]] < away[close[1]]):
            found = numbers == distinct[close[0]]
        elif len(close) > 1:
            both = " and ".join(_exact(one) for one in np.sort(distinct[close[:2]]))
            raise PerfModelError(f"plot --at: {axis.name}: found {shown(value)}, which may be {both}; give more digits")
    if not found.any():
        raise PerfModelError(f"plot --at: {axis.name}: found {shown(value)}, allowed {_nearest(axis, number)}")
    return found


def _number(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        return float("nan")


def _exact(value: float) -> str:
    return f"{value:.9g}"


def _nearest(axis: Axis, number: float, most: int = 8) -> str:
    """The values of an axis in words; of many numbers those nearest to what was asked for."""
    if not axis.numeric:
        names = list(dict.fromkeys(map(str, axis.values)))
        return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    values = np.unique(axis.values).astype(np.float64)
    if len(values) <= most:
        return ", ".join(map(_exact, values))
    ends = f"{len(values)} values from {_exact(values[0])} to {_exact(values[-1])}"
    if not np.isfinite(number):
        return ends
    close = np.sort(values[np.argsort(np.abs(values - number), kind="stable")[:3]])
    return f"{ends}, the nearest {', '.join(map(_exact, close))}"


def own_value(scenario: Scenario, name: str) -> Any:
    """The value of an axis as the scenario stands; None where it has none, or its policies have several."""
    try:
        info = scenario.axis(name)
    except PerfModelError:
        return None  # what a reader added to the dataset
    if info.kind == "hardware":
        return scenario.system.get(info.name) if info.name in scenario.system.numeric_keys() else None
    if info.kind == "workload":
        prompts = scenario.trace.prompt_len
        recorded = {"prompt": prompts, "output": scenario.trace.sequence_lengths - prompts}
        word = info.name.removeprefix("workload.")
        given = getattr(scenario, word)
        return float(np.mean(recorded[word])) if given is None and word in recorded else given
    if info.kind == "option":
        option = info.name.removeprefix("policy.")
        having = [policy for policy in scenario.policies if hasattr(policy, option)]
        values = {getattr(policy, option) for policy in having}
        value = values.pop() if len(values) == 1 else None
        return AUTO if value is None and having and not values else value
    return scenario.references.get(info.kind) if info.kind in FILES else None


def place_along(
    axes: Sequence[Axis], chosen: Mapping[str, NDArray[np.bool_]], own: Mapping[str, Any]
) -> tuple[int, Reason]:
    """Where to hold a dimension, and why.

    Parameters
    ----------
    axes : everything that runs along it. chosen : where axes have the values that the reader gave, by name.
    own : the scenario's own values by name, None where unknown.
    """
    count = len(axes[0].values)
    allowed = np.flatnonzero(np.logical_and.reduce([np.ones(count, dtype=bool), *chosen.values()]))
    if not len(allowed):
        raise PerfModelError(f"plot --at: no point of the sweep has these values of {', '.join(chosen)}")
    if len(allowed) == 1:
        return int(allowed[0]), "chosen"
    away = [_distance(axis, own.get(axis.name)) for axis in axes if axis.name not in chosen]
    known = [one for one in away if one is not None]
    if known:
        return int(allowed[np.argmin(np.sum(known, axis=0)[allowed])]), "own"
    free = [axis for axis in axes if axis.name not in chosen and axis.numeric and axis.name not in TABLES]
    if len(free) == 1 and axes[0].dim not in TABLES:
        order = allowed[np.argsort(free[0].values[allowed], kind="stable")]
        return int(order[(len(order) - 1) // 2]), "middle"
    return int(allowed[0]), "first"


def _distance(axis: Axis, own: Any) -> NDArray[np.float64] | None:
    """Squared distance of every value from the own one, in shares of the range; None where it has no meaning."""
    if own is None or axis.name in TABLES:
        return None
    if not axis.numeric:
        same = np.array([str(one) == str(own) or _number(one) == _number(own) for one in axis.values])
        return np.where(same, 0.0, 1.0) if same.any() else None
    values, here = axis.values.astype(np.float64), _number(own)
    if not np.isfinite(here):
        return None
    if here > 0 and (values > 0).all():
        values, here = np.log(values), float(np.log(here))
    return np.asarray(((values - here) / (float(np.ptp(values)) or 1.0)) ** 2)


def log_spaced(values: NDArray[Any]) -> bool:
    """Whether at least three positive numbers lie more evenly on a logarithmic axis than on a plain one."""
    x = np.unique(values).astype(np.float64)
    if len(x) < 3 or x[0] <= 0 or x[-1] < 4 * x[0]:
        return False
    plain, log = np.diff(x), np.diff(np.log(x))
    return bool(log.std() / log.mean() < plain.std() / plain.mean())
