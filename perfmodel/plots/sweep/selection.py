"""The data of a sweep as figures ask for it: axes, metrics and policies by name, and the axes that are held fixed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.evaluation import Metric, metric
from perfmodel.hardware.base import shown
from perfmodel.plots.sweep.kinds import not_among
from perfmodel.scenario.axis import AUTO

if TYPE_CHECKING:
    import xarray

    from perfmodel.scenario import Scenario

POLICY = "policy"
#: Dimensions whose points follow no order along any axis.
TABLES = ("case", "sample", "point")
#: More points than this are not drawn.
MOST_POINTS = 2_000_000
#: Two numbers that differ by less than this share are the same value of an axis.
_SAME = 1e-9


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
    """An axis that is held at one value; ``chosen`` by the reader, or else the first value of the sweep."""

    axis: Axis
    value: Any
    chosen: bool


class Sweep:
    """A dataset of a sweep, opened for drawing.

    Raises
    ------
    PerfModelError : not a dataset of a sweep: no policies, or no metric.
    """

    def __init__(self, dataset: xarray.Dataset) -> None:
        self.dataset = dataset
        self.metrics = tuple(str(name) for name in dataset.data_vars)
        if not self.metrics or POLICY not in dataset.coords:
            raise PerfModelError("dataset: found no sweep in it, allowed what perfmodel sweep writes")
        self.policies = tuple(dict.fromkeys(str(one) for one in np.atleast_1d(dataset[POLICY].values)))
        self.axes = {
            str(name): Axis(str(name), str(one.dims[0]), one.values, str(one.attrs.get("units", "")))
            for name, one in dataset.coords.items()
            if name != POLICY and one.ndim == 1
        }

    def axis(self, name: object, what: str = "axis", *, numeric: bool = False) -> Axis:
        """An axis by its dotted name, or by its last part where only one axis has it."""
        short = [one for one in self.axes if one.rpartition(".")[2] == name]
        found = self.axes.get(str(name)) or (self.axes[short[0]] if len(short) == 1 else None)
        if found is None or (numeric and not found.numeric):
            allowed = [one.name for one in self.axes.values() if one.numeric or not numeric]
            raise not_among(f"{what} of the plot", name, allowed, " (numeric axes of this sweep)" if numeric else "")
        return found

    def ordered(self, name: object, what: str) -> Axis:
        """A numeric axis along which a line can be drawn."""
        found = self.axis(name, what, numeric=True)
        if found.dim in TABLES:
            raise PerfModelError(
                f"{what} of the plot: {found.name} varies together with others in a {found.dim} table, and nothing"
                " can be held fixed there; allowed: the kinds pareto and tornado, or a sweep over a grid"
            )
        return found

    def longest(self, what: str, without: Iterable[str] = ()) -> Axis:
        """The ordered numeric axis with most values, for a figure whose reader names none."""
        dims = {*TABLES, *without}
        known = [one for one in self.axes.values() if one.numeric and one.dim not in dims and len(one.values) > 1]
        if not known:
            raise PerfModelError(
                f"{what} of the plot: this sweep has no {'further ' if without else ''}numeric axis of two or more"
                f" values; its axes: {', '.join(self.axes) or 'none'}"
            )
        return max(known, key=lambda one: len(one.values))

    def metric(self, name: object) -> Metric:
        """A metric that the sweep holds."""
        if name not in self.metrics:
            raise not_among("metric of the plot", name, self.metrics, " (metrics of this sweep)")
        return metric(str(name))

    def first_metric(self) -> str:
        """The mean time per output token where it is there, else the first metric."""
        return "tpot_mean_s" if "tpot_mean_s" in self.metrics else self.metrics[0]

    def policy(self, name: object, what: str = "policy") -> str:
        """A policy by its text, or by its name alone where only one policy has it."""
        short = [one for one in self.policies if one.partition(":")[0] == name]
        if name in self.policies:
            return str(name)
        if len(short) == 1:
            return short[0]
        raise not_among(f"{what} of the plot", name, self.policies, " (policies of this sweep)")

    def chosen(self, policies: str | Sequence[str] | None, most: int) -> list[str]:
        """The policies to draw, in the order of the sweep; by default all of them."""
        words = [policies] if isinstance(policies, str) else policies
        wanted = self.policies if words is None else [self.policy(one) for one in words]
        kept = [one for one in self.policies if one in wanted]
        if len(kept) > most:
            raise PerfModelError(
                f"policy of the plot: {len(kept)} policies are too many to draw, allowed {most}; choose with policy"
            )
        return kept

    def baseline(self, name: object | None) -> str:
        """The policy that gains are taken over: by default MoNDE, else HOBBIT, else the first."""
        if len(self.policies) < 2:
            raise PerfModelError(
                f"baseline of the plot: the sweep holds one policy ({self.policies[0]}), and a gain needs two"
            )
        if name is not None:
            return self.policy(name, "baseline")
        for word in ("monde", "hobbit"):
            for one in self.policies:
                if one.partition(":")[0] == word:
                    return one
        return self.policies[0]

    def fix(self, at: Mapping[str, Any] | None, free: Iterable[str] = ()) -> tuple[Sweep, tuple[Fixed, ...]]:
        """Hold every axis fixed whose dimension is not ``free``: at the value of ``at``, or else at its first value.

        Nothing is ever averaged over an axis. Policies stay as they are. Where ``at`` names several axes of one
        dimension, the point must have all the values.

        Raises
        ------
        PerfModelError : an unknown axis, one that is free, or a value that the sweep does not have.
        """
        kept = {POLICY, *free}
        chosen: dict[str, dict[str, NDArray[np.bool_]]] = {}
        for name, value in (at or {}).items():
            axis = self.axis(name, "--at")
            if axis.dim in kept:
                raise PerfModelError(f"--at of the plot: {axis.name} is drawn, so it cannot be held fixed too")
            chosen.setdefault(axis.dim, {})[axis.name] = _equal(axis, value)
        places = {str(dim): 0 for dim in self.dataset.dims if dim not in kept}
        for dim, masks in chosen.items():
            both = np.flatnonzero(np.logical_and.reduce(list(masks.values())))
            if not len(both):
                raise PerfModelError(f"--at of the plot: no point of the sweep has these values of {', '.join(masks)}")
            places[dim] = int(both[0])
        fixed = tuple(
            Fixed(axis, axis.values[[places[axis.dim]]].tolist()[0], axis.dim in chosen)
            for axis in self.axes.values()
            if axis.dim in places
        )
        return Sweep(self.dataset.isel(places)), fixed

    def values(self, name: str, policy: str, dims: Sequence[str]) -> NDArray[np.float64]:
        """A metric of one policy along ``dims``, which must be all that is left; NaN where a point has another one."""
        found = self.dataset[name]
        if POLICY in self.dataset.dims:
            found = found.isel({POLICY: self.policies.index(policy)}) if POLICY in found.dims else found
        else:
            found = found.where(self.dataset[POLICY] == policy)
        missing = [dim for dim in dims if dim not in found.dims]
        if missing:  # a metric that does not depend on the axis
            found = found.expand_dims({dim: self.dataset.sizes[dim] for dim in missing})
        if found.size > MOST_POINTS:
            raise PerfModelError(
                f"plot: {found.size} points are too many to draw, allowed up to {MOST_POINTS}; hold axes fixed (--at)"
            )
        return np.asarray(found.transpose(*dims).values, dtype=np.float64)


def settings_of(scenario: Scenario, fixed: Iterable[Fixed]) -> dict[str, Any]:
    """Axis values as the scenario takes them; numbers of axes that also hold words are texts in a dataset."""
    found = {}
    for one in fixed:
        if one.axis.name in TABLES:
            continue
        info, value = scenario.axis(one.axis.name), one.value
        if info.numeric and isinstance(value, str) and value != AUTO:
            value = int(value) if info.whole else float(value)
        found[info.name] = value
    return found


def _equal(axis: Axis, value: Any) -> NDArray[np.bool_]:
    """Where an axis has a value, which may be text from a command line."""
    found: NDArray[np.bool_]
    if axis.numeric:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        found = np.isclose(axis.values.astype(np.float64), number, rtol=_SAME, atol=0)
    else:
        found = np.array([str(one) == str(value) for one in axis.values], dtype=bool)
    if not found.any():
        names = [f"{one:g}" if axis.numeric else str(one) for one in np.unique(axis.values)]
        listed = ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:4])}, ..., {names[-1]}"
        raise PerfModelError(f"--at of the plot: {axis.name}: found {shown(value)}, allowed {listed}")
    return found


def log_spaced(values: NDArray[Any]) -> bool:
    """Whether at least three positive numbers lie more evenly on a logarithmic axis than on a plain one."""
    x = np.unique(values).astype(np.float64)
    if len(x) < 3 or x[0] <= 0 or x[-1] < 4 * x[0]:
        return False
    plain, log = np.diff(x), np.diff(np.log(x))
    return bool(log.std() / log.mean() < plain.std() / plain.mean())
