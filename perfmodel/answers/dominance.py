"""The points of a sweep that no other point beats in everything at once."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perfmodel.answers.constraint import Constraint
from perfmodel.answers.grid import Grid
from perfmodel.answers.origin import notes_of_points
from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    import xarray as xr

    from perfmodel.answers.constraint import Given

_PEEL = 256


def pareto(
    dataset: xr.Dataset,
    minimise: Sequence[str] | str = (),
    maximise: Sequence[str] | str = (),
    constraint: Given = None,
) -> xr.Dataset:
    """Points of a sweep that are not dominated.

    A point dominates another when it is at least as good in every objective and better in one.

    Parameters
    ----------
    dataset : result of a sweep.
    minimise, maximise : names of metrics, or of axes that hold numbers, that should be small or large; axes also by
        their last part (``mean_bits``).
    constraint : which points count, as in `best`: ``"link.bandwidth_gb_per_s == 64"`` holds an axis.

    Returns
    -------
    The points along one dimension ``point``, with all their axes and metrics, from the best of the first objective
    on. Points without a value in some objective are left out; of points that are equal in all objectives the first one
    in the order of the data set stands for all. The notes are those of these points. Takes O(n log n) for up to two
    objectives, and for three in practice.

    Raises
    ------
    PerfModelError : no objective, an unknown one (with close matches), one given twice, or a bad constraint.
    NoAnswerError : no point has values and meets the constraint; the message says how close the points come.
    """
    grid = Grid(dataset)
    names, signs = _objectives(grid, minimise, maximise)
    allowed, total = Constraint(grid, constraint), 0
    kept, numbers = np.empty((0, len(names))), np.empty(0, np.int64)
    for first, slab in grid.slabs():
        values = grid.columns(names, slab) * signs
        has_values = ~np.isnan(values).any(axis=1)
        total += int(has_values.sum())
        known = np.flatnonzero(has_values & allowed.holds(slab))
        kept = np.concatenate((kept, values[known]))
        numbers = np.concatenate((numbers, known + first))
        front = nondominated(kept)
        kept, numbers = kept[front], numbers[front]
    if len(numbers) == 0:
        raise allowed.nowhere("pareto", names, total)
    found = grid.points(numbers)
    goals = {name: "minimise" if sign > 0 else "maximise" for name, sign in zip(names, signs.tolist(), strict=True)}
    return found.assign_attrs(
        {
            **dataset.attrs,
            "title": "perfmodel pareto",
            "kind": "pareto",
            "objectives": json.dumps(goals),
            "notes": json.dumps(notes_of_points(dataset, found)),
        }
    )


def _objectives(
    grid: Grid, minimise: Sequence[str] | str, maximise: Sequence[str] | str
) -> tuple[list[str], NDArray[np.float64]]:
    small, large = (_listed(one) for one in (minimise, maximise))
    names = [grid.find(name, "objective") for name in (*small, *large)]
    if not names:
        raise PerfModelError("pareto: found no objective, allowed at least one metric or axis to minimise or maximise")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise PerfModelError(f"objective: {twice[0]} is given twice")
    return names, np.array([1.0] * len(small) + [-1.0] * len(large))


def _listed(names: object) -> list[object]:
    found = names.tolist() if isinstance(names, np.ndarray) else names
    return list(found) if isinstance(found, Iterable) and not isinstance(found, str) else [found]


def nondominated(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Rows that no other row dominates, all columns being minimised; of equal rows the first.

    Parameters
    ----------
    values : [points, objectives], without NaN.

    Returns
    -------
    Row numbers [front], ordered by the first column, then the second, and so on.
    """
    count = values.shape[1]
    order = np.lexsort(values.T[::-1])  # by the first column, and stable, so the first of equal rows comes first
    rows = values[order]
    new = np.ones(len(rows), np.bool_)
    new[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    order, rows = order[new], rows[new]
    if len(rows) == 0:
        return order
    # What may dominate a row comes before it, and all rows differ: better or equal in the other columns decides.
    if count == 1:
        return order[:1]
    if count == 2:
        least = np.minimum.accumulate(rows[:, 1])
        return order[np.concatenate(([True], rows[1:, 1] < least[:-1]))]
    return order[_stairs(rows) if count == 3 else _peeled(rows)]


def _stairs(rows: NDArray[np.float64]) -> NDArray[np.int64]:
    """Three columns: the front of the last two so far is a flight of stairs, kept sorted."""
    second: list[float] = []  # rising
    third: list[float] = []  # falling
    kept = []
    for i, (y, z) in enumerate(rows[:, 1:].tolist()):
        at = bisect.bisect_right(second, y)
        if at > 0 and third[at - 1] <= z:
            continue
        kept.append(i)
        at = bisect.bisect_left(second, y)
        end = at
        while end < len(third) and third[end] >= z:
            end += 1
        second[at:end], third[at:end] = [y], [z]
    return np.array(kept, dtype=np.int64)


def _peeled(rows: NDArray[np.float64]) -> NDArray[np.int64]:
    """Any number of columns: rows that are good in the sum of ranks sort out the others, a few at a time."""
    ranks = np.stack([np.unique(column, return_inverse=True)[1] for column in rows.T], axis=1).sum(axis=1)
    left = np.argsort(ranks, kind="stable")  # who dominates has the smaller sum, so it comes first
    kept: list[NDArray[np.int64]] = []
    while len(left):
        head, left = left[:_PEEL], left[_PEEL:]
        best: list[int] = []
        for i in head.tolist():
            chosen = rows[best]
            if not (chosen <= rows[i]).all(axis=1).any():
                best.append(i)
        kept.append(np.array(best, dtype=np.int64))
        for i in best:
            left = left[(rows[left] < rows[i]).any(axis=1)]
    return np.sort(np.concatenate(kept))
