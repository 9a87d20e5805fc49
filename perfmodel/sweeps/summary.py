"""A sweep in a few numbers: the range of every metric and the best point of every policy, or all points of a small one.

Results larger than memory are read one chunk after another.
"""

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perfmodel.evaluation import metric

if TYPE_CHECKING:
    import xarray as xr

#: Values read at once where nothing says how the data lie.
_MOST_VALUES = 2**22


class Range(NamedTuple):
    """A metric of one policy over all points.

    policy : its text, or None where policies do not have a dimension of their own. low, high : None where no point
    could be priced. best : axis values at the best point. any : those axes along which the metric does not change from
    there, so that any of their values is as good. empty : points without a value.
    """

    policy: str | None
    metric: str
    unit: str
    low: float | None
    high: float | None
    better: str
    best: dict[str, Any]
    any: tuple[str, ...]
    empty: int


def ranges(dataset: "xr.Dataset") -> list[Range]:
    """The range of every metric, by policy where policies are a dimension."""
    found = []
    for name in dataset.data_vars:
        variable = dataset[name]
        parts: list[tuple[str | None, Any]] = [(None, variable)]
        if "policy" in variable.dims:
            texts = [str(text) for text in dataset["policy"].values]
            parts = [(text, variable.isel(policy=i)) for i, text in enumerate(texts)]
        found += [_range(policy, part) for policy, part in parts]
    return found


def points(dataset: "xr.Dataset") -> list[tuple[dict[str, Any], list[float | None]]]:
    """Axis values of every point, and its metrics in the order of the dataset; None where it has no value.

    For datasets of a few points.
    """
    variables = list(dataset.data_vars.values())
    values = [np.asarray(variable.values) for variable in variables]
    found = []
    for place in np.ndindex(values[0].shape):
        numbers = [float(array[place]) for array in values]
        row = [None if math.isnan(one) else one for one in numbers]
        found.append((_at(variables[0], list(place)), row))
    return found


def _range(policy: str | None, values: "xr.DataArray") -> Range:
    one = metric(str(values.name))
    empty, low, high = 0, math.inf, -math.inf
    place: list[int] = []
    for cut in _cuts(values):
        chunk = np.asarray(values[cut].values)
        missing = int(np.isnan(chunk).sum())
        empty += missing
        if missing == chunk.size:
            continue
        lowest, highest = float(np.nanmin(chunk)), float(np.nanmax(chunk))
        improved = lowest < low if one.better == "lower" else highest > high
        low, high = min(low, lowest), max(high, highest)
        if improved:  # so of equal points the first one
            flat = np.nanargmin(chunk) if one.better == "lower" else np.nanargmax(chunk)
            inside = np.unravel_index(int(flat), chunk.shape)
            place = [int(i) + part.start for i, part in zip(inside, cut, strict=True)]
    if low > high:
        return Range(policy, one.name, one.unit, None, None, one.better, {}, (), empty)
    best = _at(values, place)
    return Range(policy, one.name, one.unit, low, high, one.better, best, _any(values, place), empty)


def _any(values: "xr.DataArray", place: list[int]) -> tuple[str, ...]:
    """Axes along which every value is the one at a place."""
    here = dict(zip(values.dims, place, strict=True))
    found: list[str] = []
    for dim, size in zip(values.dims, values.shape, strict=True):
        if size > 1:
            line = np.asarray(values.isel({name: i for name, i in here.items() if name != dim}).values)
            if (line == line[0]).all():
                found += [str(name) for name, axis in values.coords.items() if axis.dims == (dim,)]
    return tuple(found)


def _at(values: "xr.DataArray", place: list[int]) -> dict[str, Any]:
    """Axis values of one point."""
    index = dict(zip(values.dims, place, strict=True))
    point = {}
    for name, coordinate in values.coords.items():
        if coordinate.dims:
            value = coordinate[{dim: index[dim] for dim in coordinate.dims}].values.item()
            point[str(name)] = value
    return point


def _cuts(values: "xr.DataArray") -> Iterator[tuple[slice, ...]]:
    """The chunks of the data; for data in memory, slabs along the first dimension."""
    shape = values.shape
    chunks = values.encoding.get("preferred_chunks")
    if chunks:
        sizes = [int(chunks.get(dim, length)) for dim, length in zip(values.dims, shape, strict=True)]
    else:
        rest = math.prod(shape[1:])
        sizes = [max(_MOST_VALUES // max(rest, 1), 1), *shape[1:]] if shape else []
    starts = [range(0, length, size) for length, size in zip(shape, sizes, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(
            slice(start, min(start + size, length)) for start, size, length in zip(corner, sizes, shape, strict=True)
        )
