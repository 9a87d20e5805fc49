"""The best point of a sweep, among those that meet a condition."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from perfmodel.answers.constraint import Constraint
from perfmodel.answers.grid import Grid
from perfmodel.answers.origin import notes_of_points
from perfmodel.errors import PerfModelError
from perfmodel.evaluation import METRICS
from perfmodel.evaluation import metric as find_metric
from perfmodel.hardware.base import shown

if TYPE_CHECKING:
    import xarray as xr

    from perfmodel.answers.constraint import Given


def best(
    dataset: xr.Dataset,
    metric: str = "tpot_mean_s",
    constraint: Given = None,
    *,
    maximise: bool | None = None,
) -> xr.Dataset:
    """The point of a sweep where a metric is best.

    Parameters
    ----------
    dataset : result of a sweep; variables that were added to it count as metrics.
    metric : what should be best: a metric, or an axis of numbers.
    constraint : a condition on metrics and axes, such as ``"tpot_p99_s < 0.05 and gpu_memory_bytes <= 8e10"``, or
        several that must all hold; or a function of the data set (of a part of it, when it is large) that returns a
        boolean array over its points. Metrics may be written in other units (``tpot_ms < 50``), and ``==`` takes
        numbers as they are printed.
    maximise : whether more is better; by default as in `evaluation.METRICS`, and less is better for anything else.

    Returns
    -------
    Data set of one point: every axis and metric a single value. Of equal points the first in the order of the data
    set; points where the metric or a value of the condition is unknown do not count. Attributes (JSON): ``any``, axes
    along which the metric does not change from there; ``notes``, those of this point.

    Raises
    ------
    PerfModelError : an unknown name (with close matches), or a condition that cannot be read.
    NoAnswerError : no point meets it; the message says how close the points come.
    """
    grid = Grid(dataset)
    name = grid.find(metric, "metric")
    if maximise is not None and not isinstance(maximise, bool | np.bool_):
        raise PerfModelError(f"maximise: found {shown(maximise)}, allowed True, False or None")
    sign = -1.0 if (more_is_better(grid, name) if maximise is None else maximise) else 1.0
    allowed = Constraint(grid, constraint)
    least, place, known = np.inf, -1, 0
    for first, slab in grid.slabs():
        values = grid.read(name, slab) * sign
        has_value = ~np.isnan(values)
        known += int(has_value.sum())
        has_value &= allowed.holds(slab)
        if has_value.any():
            candidates = np.where(has_value, values, np.inf)
            here = int(np.argmin(candidates))
            if place < 0 or candidates[here] < least:
                least, place = float(candidates[here]), first + here
    if place < 0:
        raise allowed.nowhere("best", [name], known)
    found = grid.point(place)
    extra = {"any": json.dumps(_any(grid, name, allowed, place)), "notes": json.dumps(notes_of_points(dataset, found))}
    return found.assign_attrs(extra)


def more_is_better(grid: Grid, name: str) -> bool:
    """The direction of a metric; anything that is none should be small."""
    if name not in grid.dataset.data_vars:
        return False
    try:
        return find_metric(name).better == "higher"
    except PerfModelError:
        assert name not in METRICS
        return False  # a variable that was added to the sweep


def _any(grid: Grid, name: str, allowed: Constraint, place: int) -> list[str]:
    """Axes along which every point is as good as this one, and allowed too."""
    found: list[str] = []
    for dim, slab in grid.lines(place):
        values = grid.read(name, slab)
        if (values == values[0]).all() and allowed.holds(slab).all():
            found += [str(one) for one, axis in grid.dataset.coords.items() if axis.dims == (dim,)]
    return found
