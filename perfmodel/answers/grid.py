"""A labelled data set read as one long list of points, a slab of them at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.evaluation import METRICS
from perfmodel.hardware.base import shown, suggestion
from perfmodel.scenario.axis import matching

if TYPE_CHECKING:
    import xarray as xr

#: Points read at once, so that a data set larger than memory can be asked too.
SLAB_POINTS = 2**21

Slab = dict[str, slice]


class Grid:
    """The points of a data set in C order over its dimensions; every metric and axis has a value at every point.

    Raises
    ------
    PerfModelError : not a data set, or one without points.
    """

    def __init__(self, dataset: xr.Dataset) -> None:
        import xarray as xr

        if not isinstance(dataset, xr.Dataset):
            raise PerfModelError(f"dataset: found {type(dataset).__name__}, allowed an xarray.Dataset of a sweep")
        widest = max((v.dims for v in dataset.data_vars.values()), key=len, default=())
        self.sizes = {str(d): int(dataset.sizes[d]) for d in (*widest, *dataset.dims)}
        self.size = math.prod(self.sizes.values())
        if not dataset.data_vars or self.size == 0:
            raise PerfModelError("dataset: found no points, allowed a sweep with at least one metric and one point")
        # Files do not keep the order of what they hold.
        places = {dim: i for i, dim in enumerate(self.sizes)}

        def place(name: Any) -> tuple[int, bool, str]:
            first = min((places[str(d)] for d in dataset[name].dims), default=-1)
            return first, str(name) not in places, str(name)

        axes, metrics = sorted(dataset.coords, key=place), sorted(dataset.data_vars, key=_rank)
        self.dataset = dataset[[*axes, *metrics]]

    @property
    def names(self) -> tuple[str, ...]:
        """Metrics, then axes, always in the same order."""
        return tuple(map(str, (*self.dataset.data_vars, *self.dataset.coords)))

    def find(self, name: object, what: str, *, numeric: bool = True) -> str:
        """A metric or axis of the data set by name, an axis also by its last part (``mean_bits``).

        Raises
        ------
        PerfModelError : anything else (with close matches).
        """
        found = matching(name, self.names) if isinstance(name, str) else None
        if found is None:
            close = suggestion(name, self.names) if isinstance(name, str) else ""
            raise PerfModelError(f"{what}: found {shown(name)}{close}, allowed {', '.join(sorted(self.names))}")
        if numeric and self.dataset[found].dtype.kind not in "fiu":
            raise PerfModelError(f"{what}: {found} holds words, allowed a metric or an axis of numbers")
        return found

    def lines(self, number: int) -> Iterator[tuple[str, Slab]]:
        """Every dimension of more than one position, and the slab of all points along it through one point."""
        here = self._place(number)
        at = {name: slice(i, i + 1) for name, i in here.items()}
        for name, size in self.sizes.items():
            if size > 1:
                yield name, {**at, name: slice(0, size)}

    def _place(self, number: int) -> dict[str, int]:
        places = np.unravel_index(number, tuple(self.sizes.values())) if self.sizes else ()
        return {name: int(i) for name, i in zip(self.sizes, places, strict=True)}

    def slabs(self, points: int | None = None) -> Iterator[tuple[int, Slab]]:
        """Number of the first point, and slices by dimension, of consecutive parts with about ``points`` points."""
        limit = SLAB_POINTS if points is None else points
        names, sizes = list(self.sizes), list(self.sizes.values())
        inner = 1
        split = len(names)  # dimensions from here on are taken whole
        while split > 0 and inner * sizes[split - 1] <= limit:
            split -= 1
            inner *= sizes[split]
        whole = {name: slice(0, size) for name, size in zip(names[split:], sizes[split:], strict=True)}
        if split == 0:
            yield 0, whole
            return
        step = max(1, limit // inner)
        cut, length = names[split - 1], sizes[split - 1]
        first = 0
        for outer in itertools.product(*(range(size) for size in sizes[: split - 1])):
            fixed = {name: slice(i, i + 1) for name, i in zip(names, outer, strict=False)}
            for start in range(0, length, step):
                stop = min(start + step, length)
                yield first, {**fixed, cut: slice(start, stop), **whole}
                first += (stop - start) * inner

    def read(self, name: str, slab: Slab) -> NDArray[Any]:
        """Values of a metric or axis at the points of a slab [points]; numbers as float64."""
        variable = self.dataset[name]
        part = variable.isel({d: slab[str(d)] for d in variable.dims}).transpose(
            *(d for d in self.sizes if d in variable.dims)
        )
        shape = [slab[d].stop - slab[d].start for d in self.sizes]
        own = [n if d in variable.dims else 1 for d, n in zip(self.sizes, shape, strict=True)]
        values = np.asarray(part.values)
        if values.dtype.kind in "fiu":
            values = values.astype(np.float64)
        return np.broadcast_to(values.reshape(own), shape).reshape(-1)

    def columns(self, names: Sequence[str], slab: Slab) -> NDArray[np.float64]:
        """Several of them side by side [points, names]."""
        return np.stack([self.read(name, slab) for name in names], axis=1)

    def point(self, number: int) -> xr.Dataset:
        """One point, every axis and metric a single value."""
        return self.dataset.isel(self._place(number))

    def points(self, numbers: NDArray[np.int64]) -> xr.Dataset:
        """Points in the given order along one dimension ``point``."""
        import xarray as xr

        places = np.unravel_index(numbers, tuple(self.sizes.values())) if self.sizes else ()
        indexers = {name: xr.DataArray(i, dims="point") for name, i in zip(self.sizes, places, strict=True)}
        chosen = self.dataset.isel(indexers)
        missing = [name for name in chosen.variables if "point" not in chosen[name].dims]
        if missing:  # a value that all points share
            spread = {
                name: ("point", np.repeat(np.asarray(chosen[name].values)[None], len(numbers)), chosen[name].attrs)
                for name in missing
            }
            coords = {name: value for name, value in spread.items() if name in chosen.coords}
            metrics = {name: value for name, value in spread.items() if name not in chosen.coords}
            chosen = chosen.drop_vars(missing).assign_coords(coords).assign(metrics)
        return chosen


def _rank(name: Any) -> tuple[int, str]:
    """Metrics in the order of `evaluation.METRICS`, then all others by name."""
    known = list(METRICS)
    return known.index(name) if name in METRICS else len(known), str(name)


def described(point: xr.Dataset, names: Sequence[str] | None = None) -> str:
    """Axis values of one point as a sentence part, such as ``policy=monde, link.bandwidth_gb_per_s=64``."""
    wanted: Mapping[Any, Any] = point.coords if names is None else {name: point[name] for name in names}
    parts = []
    for name, value in wanted.items():
        item = value.values.item()
        parts.append(f"{name}={item:.6g}" if isinstance(item, float) else f"{name}={item}")
    return ", ".join(parts) or "the only point"
