"""A sweep in a few numbers: the range of every metric and the best point of every policy.

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
    could be priced. best : axis values at the best point. empty : points without a value.
    """

    policy: str | None
    metric: str
    unit: str
    low: float | None
    high: float | None
    better: str
    best: dict[str, Any]
    empty: int


def ranges(dataset: "xr.Dataset") -> list[Range]:
    """The range of every metric, by policy where there is more than one."""
    found = []
    for name in dataset.data_vars:
        variable = dataset[name]
        parts: list[tuple[str | None, Any]] = [(None, variable)]
        if "policy" in variable.dims:
            texts = [str(text) for text in dataset["policy"].values]
            parts = [(text, variable.isel(policy=i)) for i, text in enumerate(texts)]
        found += [_range(policy, part) for policy, part in parts]
    return found


def _range(policy: str | None, values: "xr.DataArray") -> Range:
    one = metric(str(values.name))
    empty, low, high = 0, math.inf, -math.inf
    best: dict[str, Any] = {}
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
            best = _at(values, [int(i) + part.start for i, part in zip(inside, cut, strict=True)])
    priced = low <= high
    return Range(policy, one.name, one.unit, low if priced else None, high if priced else None, one.better, best, empty)


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
