"""The best point of a sweep, among those that meet a condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.answers.conditions import Condition
from perfmodel.answers.grid import Grid, Slab, described
from perfmodel.errors import PerfModelError
from perfmodel.evaluation import metric as find_metric

if TYPE_CHECKING:
    import xarray as xr

    Constraint = str | Callable[[xr.Dataset], Any] | None


def best(dataset: xr.Dataset, metric: str = "tpot_mean_s", constraint: Constraint = None) -> xr.Dataset:
    """The point of a sweep where a metric is best, by the direction of `evaluation.METRICS`.

    Parameters
    ----------
    dataset : result of a sweep.
    metric : what should be best.
    constraint : a condition on metrics and axes, such as ``"tpot_p99_s < 0.05 and gpu_memory_bytes <= 8e10"``; or a
        function of the data set (of a part of it, when it is large) that returns a boolean array over its points.

    Returns
    -------
    Data set of one point: every axis and metric a single value. Of equal points the first in the order of the data
    set; points where the metric or a value of the condition is unknown do not count.

    Raises
    ------
    PerfModelError : an unknown name (with close matches), a condition that cannot be read, or no point that meets it;
        the message then says how close the points come.
    """
    grid = Grid(dataset)
    name = grid.find(metric, "metric")
    sign = -1.0 if name in dataset.data_vars and find_metric(name).better == "higher" else 1.0
    condition = Condition(constraint, grid.names) if isinstance(constraint, str) else None
    if condition is None and constraint is not None and not callable(constraint):
        found = type(constraint).__name__
        raise PerfModelError(f"constraint: found {found}, allowed a text such as 'tpot_p99_s < 0.05', or a function")
    least, place, known = np.inf, -1, 0
    for first, slab in grid.slabs():
        values = grid.read(name, slab) * sign
        has_value = ~np.isnan(values)
        known += int(has_value.sum())
        if condition is not None:
            has_value &= condition(lambda one, slab=slab: grid.read(one, slab)).holds  # type: ignore[misc]
        elif callable(constraint):
            has_value &= _by_function(constraint, grid, slab)
        if has_value.any():
            candidates = np.where(has_value, values, np.inf)
            here = int(np.argmin(candidates))
            if place < 0 or candidates[here] < least:
                least, place = float(candidates[here]), first + here
    if place < 0:
        raise PerfModelError(_why_none(grid, name, known, condition))
    return grid.point(place)


def _by_function(constraint: Callable[[xr.Dataset], Any], grid: Grid, slab: Slab) -> NDArray[np.bool_]:
    import xarray as xr

    answer = constraint(grid.dataset.isel(slab))
    shape = {name: part.stop - part.start for name, part in slab.items()}
    sizes = {name: shape[name] for name in grid.sizes}
    if isinstance(answer, xr.DataArray) and set(answer.dims) <= set(sizes):
        answer = answer.expand_dims({n: s for n, s in sizes.items() if n not in answer.dims}).transpose(*sizes)
    found = np.asarray(answer)
    try:
        fits = np.broadcast_shapes(found.shape, tuple(sizes.values())) == tuple(sizes.values())
    except ValueError:
        fits = False
    if not fits or found.dtype != np.bool_:
        raise PerfModelError(
            f"constraint: the function returned {np.asarray(answer).dtype} of shape {list(np.shape(answer))},"
            f" allowed true or false for every point, {list(sizes.values())}"
        )
    return np.broadcast_to(found, tuple(sizes.values())).reshape(-1).astype(np.bool_)


def _why_none(grid: Grid, name: str, known: int, condition: Condition | None) -> str:
    """How close the points come to a condition that none of them meets."""
    if known == 0:
        return f"best: none of {grid.size} points has a value of {name}"
    if condition is None:
        return f"best: no point of {grid.size} meets the constraint"
    parts = condition.comparisons
    met, nearest = np.zeros(len(parts), np.int64), np.inf
    place, worst = -1, ""
    for first, slab in grid.slabs():
        values = np.isnan(grid.read(name, slab))
        verdicts = condition.each(lambda one, slab=slab: grid.read(one, slab))  # type: ignore[misc]
        met += [int((v.holds & ~values).sum()) for v in verdicts]
        miss = np.where(values, np.inf, np.maximum.reduce([v.miss for v in verdicts]))
        here = int(np.argmin(miss))
        if miss[here] < nearest:
            nearest, place = float(miss[here]), first + here
            worst = parts[int(np.argmax([v.miss[here] for v in verdicts]))]
    text = f"best: no point of {grid.size} meets {condition.text!r}"
    if len(parts) > 1:
        text += "; " + ", ".join(f"{part} holds at {n}" for part, n in zip(parts, met.tolist(), strict=True))
    if place < 0:
        return text
    point = grid.point(place)
    involved = [one for one in condition.names if one in point.data_vars] or list(condition.names)
    axes = described(point, [str(one) for one in point.coords if one not in involved])
    return f"{text}; the nearest, at {axes}, has {described(point, involved)} and misses {worst} by {nearest:.2g} of it"
