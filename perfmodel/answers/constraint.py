"""Which points of a sweep may be an answer: those that meet a condition in words, or a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.answers.conditions import Condition, joined
from perfmodel.answers.grid import Grid, Slab, described
from perfmodel.errors import NoAnswerError, PerfModelError
from perfmodel.scenario.numbers import plain

if TYPE_CHECKING:
    import xarray as xr

    Given = str | Sequence[str] | Callable[[xr.Dataset], Any] | None

#: Share of a bound up to which a point that misses it lies on it.
_TOUCHES = 1e-12


class Constraint:
    """A condition on the points of a grid, or none.

    Parameters
    ----------
    given : a text as in `Condition`, several that must all hold, a function of a data set that returns true or false
        for each of its points, or None.

    Raises
    ------
    PerfModelError : anything else, and a text that cannot be read.
    """

    def __init__(self, grid: Grid, given: Given) -> None:
        self.grid = grid
        self.condition: Condition | None = None
        self.function: Callable[[xr.Dataset], Any] | None = None
        if isinstance(given, str):
            self.condition = joined([given], grid.names)
        elif isinstance(given, list | tuple) and given:
            self.condition = joined(given, grid.names)
        elif callable(given) and not isinstance(given, type):
            self.function = given
        elif given is not None:
            found = type(given).__name__
            raise PerfModelError(
                f"constraint: found {found}, allowed a text such as 'tpot_p99_s < 0.05', several, or a function"
            )

    def holds(self, slab: Slab) -> NDArray[np.bool_]:
        """Whether each point of a slab may be an answer [points]."""
        if self.condition is not None:
            return self.condition(lambda one: self.grid.read(one, slab)).holds
        if self.function is not None:
            return _by_function(self.function, self.grid, slab)
        return np.ones(int(np.prod([part.stop - part.start for part in slab.values()])), np.bool_)

    def nowhere(self, what: str, names: Sequence[str], known: int) -> NoAnswerError:
        """Why no point is an answer, and how close the nearest one comes.

        what : the question. names : metrics that must have a value. known : points at which they have.
        """
        grid, condition = self.grid, self.condition
        if known == 0:
            several = "values" if len(names) > 1 else "a value"
            return NoAnswerError(f"{what}: none of {grid.size} points has {several} of {', '.join(names)}")
        if condition is None:
            return NoAnswerError(f"{what}: no point of {grid.size} meets the constraint")
        parts = condition.comparisons
        met, nearest = np.zeros(len(parts), np.int64), np.inf
        place, worst = -1, ""
        for first, slab in grid.slabs():
            values = np.isnan(grid.columns(names, slab)).any(axis=1)
            verdicts = condition.each(lambda one, slab=slab: grid.read(one, slab))  # type: ignore[misc]
            met += [int((v.holds & ~values).sum()) for v in verdicts]
            miss = np.where(values, np.inf, np.maximum.reduce([v.miss for v in verdicts]))
            here = int(np.argmin(miss))
            if miss[here] < nearest:
                nearest, place = float(miss[here]), first + here
                worst = parts[int(np.argmax([v.miss[here] for v in verdicts]))]
        text = f"{what}: no point of {grid.size} meets {condition.text!r}"
        if len(parts) > 1:
            text += "; " + ", ".join(f"{part} holds at {n}" for part, n in zip(parts, met.tolist(), strict=True))
        if place < 0:
            return NoAnswerError(text, {"nearest": None})
        point = grid.point(place)
        involved = [one for one in condition.names if one in point.data_vars] or list(condition.names)
        axes = described(point, [str(one) for one in point.coords if one not in involved])
        by = "only just" if nearest <= _TOUCHES else f"by {100 * nearest:.3g} %"
        values_there = {str(one): plain(point[one].values.item()) for one in (*point.coords, *involved)}
        return NoAnswerError(
            f"{text}; the nearest, at {axes}, has {described(point, involved)} and misses {worst} {by}",
            {"nearest": {name: None if value != value else value for name, value in values_there.items()}},
        )


def _by_function(constraint: Callable[[xr.Dataset], Any], grid: Grid, slab: Slab) -> NDArray[np.bool_]:
    import xarray as xr

    answer = constraint(grid.dataset.isel(slab))
    shape = {name: part.stop - part.start for name, part in slab.items()}
    sizes = {name: shape[name] for name in grid.sizes}
    if isinstance(answer, xr.DataArray) and set(answer.dims) <= set(sizes):
        answer = answer.expand_dims({n: s for n, s in sizes.items() if n not in answer.dims}).transpose(*sizes)
    found = np.asarray(False if isinstance(answer, xr.Dataset) else answer)
    try:
        fits = np.broadcast_shapes(found.shape, tuple(sizes.values())) == tuple(sizes.values())
    except ValueError:
        fits = False
    if not fits or found.dtype != np.bool_ or isinstance(answer, xr.Dataset):
        kind = "a Dataset" if isinstance(answer, xr.Dataset) else f"{found.dtype} of shape {list(found.shape)}"
        raise PerfModelError(
            f"constraint: the function returned {kind}, allowed true or false for every point, {list(sizes.values())}"
        )
    return np.broadcast_to(found, tuple(sizes.values())).reshape(-1).astype(np.bool_)
