"""The data of a sweep as figures ask for it: axes, metrics and policies by name, and the axes that are held fixed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.evaluation import METRICS, Metric, metric, percentile_of
from perfmodel.plots.sweep.axes import TABLES, Axis, Fixed, own_value, place_along, places_of
from perfmodel.plots.sweep.kinds import not_among
from perfmodel.scenario.axis import AUTO
from perfmodel.sweeps.dataset import scenario_of

if TYPE_CHECKING:
    import xarray

    from perfmodel.scenario import Scenario

POLICY = "policy"
#: Metrics with more points than this are not drawn.
MOST_POINTS = 2_000_000


class Sweep:
    """A dataset of a sweep, opened for drawing.

    Raises
    ------
    PerfModelError : not a dataset of a sweep: no policies, or no metric.
    """

    def __init__(self, dataset: xarray.Dataset) -> None:
        self.dataset = dataset
        self.metrics = tuple(
            str(name) for name, one in dataset.data_vars.items() if np.issubdtype(one.dtype, np.number)
        )
        if not self.metrics or POLICY not in dataset.coords:
            raise PerfModelError("dataset: found no sweep in it, allowed what perfmodel sweep writes")
        self.policies = tuple(dict.fromkeys(str(one) for one in np.atleast_1d(dataset[POLICY].values)))
        self.axes = {
            str(name): Axis(str(name), str(one.dims[0]), one.values, str(one.attrs.get("units", "")))
            for name, one in dataset.coords.items()
            if name != POLICY and one.ndim == 1
        }

    @functools.cached_property
    def scenario(self) -> Scenario | None:
        """The scenario that was priced; None where the dataset cannot tell, or its inputs are gone."""
        try:
            return scenario_of(self.dataset)
        except PerfModelError:
            return None

    def axis(self, name: object, what: str = "x", *, numeric: bool = False) -> Axis:
        """An axis by its dotted name, or by its last part where only one axis has it."""
        short = [one for one in self.axes if one.rpartition(".")[2] == name]
        found = self.axes.get(str(name)) or (self.axes[short[0]] if len(short) == 1 else None)
        if found is None or (numeric and not found.numeric):
            allowed = [one.name for one in self.axes.values() if one.numeric or not numeric]
            raise not_among(f"plot --{what}", name, allowed, " (numeric axes of this sweep)" if numeric else "")
        return found

    def ordered(self, name: object, what: str) -> Axis:
        """A numeric axis along which a line can be drawn."""
        found = self.axis(name, what, numeric=True)
        if found.dim in TABLES:
            raise PerfModelError(f"plot --{what}: found {found.name} {self._in_a_table(found.dim)}")
        return found

    def longest(self, what: str, without: Iterable[str] = ()) -> Axis:
        """The ordered numeric axis with most values, for a figure whose reader names none."""
        dims = {*TABLES, *without}
        several = [one for one in self.axes.values() if one.numeric and len(one.values) > 1]
        known = [one for one in several if one.dim not in dims]
        if known:
            return max(known, key=lambda one: len(one.values))
        tabled = [one for one in several if one.dim in TABLES and one.name not in TABLES]
        if tabled:
            names = ", ".join(one.name for one in tabled)
            raise PerfModelError(f"plot --{what}: found {names} {self._in_a_table(tabled[0].dim)}")
        raise PerfModelError(
            f"plot --{what}: this sweep has no {'further ' if without else ''}numeric axis of two or more"
            f" values; its axes: {', '.join(self.axes) or 'none'}"
        )

    @staticmethod
    def _in_a_table(dim: str) -> str:
        what = {"case": "table of cases", "sample": "sample"}.get(dim, "set of points")
        kinds = "pareto, tornado, breakdown, cdf and roofline"
        return f"of a {what}, which has no lines or cells to draw; allowed: the kinds {kinds}, or a sweep over a grid"

    def metric(self, name: object) -> Metric:
        """A metric that the sweep holds."""
        if name not in self.metrics:
            raise not_among("plot --metric", name, self.metrics, " (metrics of this sweep)")
        if computable(str(name)):
            return metric(name)
        attrs = self.dataset[name].attrs  # what a reader computed and added
        own = attrs.get("long_name")
        if any(own == one.meaning for one in METRICS.values()):
            attrs = {}  # handed on by arithmetic, and no longer true
        better: Any = "higher" if attrs.get("better") == "higher" else "lower"
        meaning = str(attrs.get("long_name") or name)
        return Metric(str(name), str(attrs.get("units", "")), "mean", better, meaning)

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
        raise not_among(f"plot --{what}", name, self.policies, " (policies of this sweep)")

    def chosen(self, policies: str | Sequence[str] | None, most: int) -> list[str]:
        """The policies to draw, in the order of the sweep; by default all of them."""
        words = [policies] if isinstance(policies, str) else policies
        wanted = self.policies if words is None else [self.policy(one) for one in words]
        kept = [one for one in self.policies if one in wanted]
        if len(kept) > most:
            raise PerfModelError(
                f"plot: {len(kept)} policies are too many to draw, allowed {most}; choose with --policy"
            )
        return kept

    def baseline(self, name: object | None) -> str:
        """The policy that gains are taken over: by default MoNDE, else HOBBIT, else the first."""
        if len(self.policies) < 2:
            raise PerfModelError(
                f"plot --baseline: the sweep holds one policy ({self.policies[0]}), and a gain needs two"
            )
        if name is not None:
            return self.policy(name, "baseline")
        for word in ("monde", "hobbit"):
            for one in self.policies:
                if one.partition(":")[0] == word:
                    return one
        return self.policies[0]

    def fix(self, at: Mapping[str, Any] | None, free: Iterable[str] = ()) -> tuple[Sweep, tuple[Fixed, ...]]:
        """Hold every axis fixed whose dimension is not ``free``: at the value of ``at``, else near the scenario's own.

        Nothing is ever averaged over an axis. Policies stay as they are. Where ``at`` names several axes of one
        dimension, the point must have all the values. Without a scenario an axis is held at its middle value.

        Raises
        ------
        PerfModelError : an unknown axis, one that is free, or a value that the sweep does not have.
        """
        kept = {POLICY, *free}
        chosen: dict[str, NDArray[np.bool_]] = {}
        for name, value in (at or {}).items():
            axis = self.axis(name, "at")
            if axis.dim in kept:
                raise PerfModelError(f"plot --at: {axis.name} is drawn, so it cannot be held fixed too")
            chosen[axis.name] = places_of(axis, value)
        places: dict[str, int] = {}
        fixed = []
        for dim in (str(one) for one in self.dataset.dims if one not in kept):
            along = [axis for axis in self.axes.values() if axis.dim == dim]
            masks = {axis.name: chosen[axis.name] for axis in along if axis.name in chosen}
            known = self.scenario if along and any(len(axis.values) > 1 for axis in along) else None
            own = {} if known is None else {axis.name: own_value(known, axis.name) for axis in along}
            places[dim], reason = place_along(along, masks, own) if along else (0, "first")
            for axis in along:
                value = axis.values[[places[dim]]].tolist()[0]
                why = "chosen" if axis.name in masks else reason
                fixed.append(Fixed(axis, value, why, own.get(axis.name) if why == "own" else None))
        return Sweep(self.dataset.isel(places)), tuple(fixed)

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


def computable(name: str) -> bool:
    """Whether a metric is one of perfmodel's, and not one that a reader computed from them."""
    return name in METRICS or percentile_of(name) is not None


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
