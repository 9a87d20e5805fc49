"""Where the better of two policies changes, as a line over a further axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.evaluation import metric as find_metric
from perfmodel.plots.drawing import handles
from perfmodel.plots.style import BLACK, BLUE, COLUMN
from perfmodel.plots.sweep.axes import Axis, log_spaced
from perfmodel.plots.sweep.labels import (
    axis_label,
    axis_words,
    log_axis,
    metric_words,
    place_axis,
    value_words,
    with_log,
)
from perfmodel.plots.sweep.origin import origin_words
from perfmodel.plots.sweep.page import legend_above, page
from perfmodel.plots.sweep.selection import Sweep
from perfmodel.plots.words import policy_names

if TYPE_CHECKING:
    import xarray

_MARKERS = ("o", "s", "^", "D", "v")
#: Tick labels of a word axis are cut after so many letters.
_WORD = 16


def break_even_figure(dataset: xarray.Dataset) -> Figure:
    """Value of an axis at which one policy overtakes another, over a further axis; who is better stands on each side.

    Parameters
    ----------
    dataset : from ``answers.break_even`` with ``along``.

    Raises
    ------
    PerfModelError : a single search, which is a number and not a line, or no change of the winner anywhere.
    """
    dims = [str(dim) for dim in dataset["break_even"].dims if dim != "crossing"]
    if not dims:
        raise PerfModelError(
            "plot break-even: found a single search, allowed one for each value of a further axis (break-even --along)"
        )
    dim = dims[0]
    coordinate = dataset[dim]
    along = Axis(dim, dim, coordinate.values, str(coordinate.attrs.get("units", "")))
    name = str(dataset.attrs["axis"])
    values = np.asarray(dataset["break_even"].transpose(dim, "crossing").values, dtype=np.float64)
    if not np.isfinite(values).any():
        winners = ", ".join(dict.fromkeys(map(str, dataset["winner"].values)))
        raise PerfModelError(f"plot break-even: the better policy does not change anywhere; it is {winners}")
    finite = values[np.isfinite(values)]
    up = Axis(name, name, finite, str(dataset.attrs.get("axis_units", "")))
    policies = [str(dataset.attrs[one]) for one in ("a", "b")]
    names = dict(zip(policies, policy_names(policies), strict=True))
    order = np.argsort(along.values, kind="stable") if along.numeric else np.arange(len(along.values))
    without = [
        f"{value_words(along, along.values[i])} ({names.get(who, who)})"
        for i in order
        if (who := str(dataset["winner"].values[i]))
    ]
    low, high = (value_words(up, float(dataset.attrs[end])) for end in ("low", "high"))
    kind = find_metric(str(dataset.attrs["metric"]))
    sentences = [
        f"Equal {metric_words(kind)} of {names[policies[0]]} and {names[policies[1]]}.",
        f"Searched: {axis_words(name)} from {low} to {high}; lines join the places found.",
        f"No change, and who is better: {', '.join(without)}." if without else "",
        origin_words(Sweep(_as_sweep(dataset))),
    ]
    count = values.shape[1]
    entries = [f"{f'{i + 1}: ' if count > 1 else ''}{_change(dataset, i, names)}" for i in range(count)]
    with page(1, 1, (COLUMN, 2.2), sentences, entries) as (figure, grid):
        axes = grid[0, 0]
        x = np.sort(along.values).astype(np.float64) if along.numeric else np.arange(len(order), dtype=np.float64)
        for i in range(count):
            axes.plot(
                x, values[order, i], color=BLUE if i == 0 else BLACK, marker=_MARKERS[i % len(_MARKERS)],
                markersize=3.6, linewidth=1.4, linestyle="-" if i == 0 else "--", markeredgecolor=BLACK,
                markeredgewidth=0.5, label=entries[i],
            )  # fmt: skip
        _scale(axes, up, finite)
        if along.numeric:
            place_axis(axes, "x", along, most=6)
        else:
            axes.set_xticks(x, [str(along.values[i])[:_WORD] for i in order], rotation=30, ha="right")
            axes.set_xlabel(axis_words(along.name))
        axes.grid()
        legend_above(figure, handles(axes))
    return figure


def _change(dataset: xarray.Dataset, crossing: int, names: dict[str, str]) -> str:
    """Who is better below and above a line, where that is the same all along it."""
    sides = []
    for side, word in (("before", "below"), ("after", "above")):
        found = {str(one) for one in dataset[side].isel(crossing=crossing).values if str(one)}
        who = found.pop() if len(found) == 1 else "either"
        sides.append(f"{names.get(who, who)} better {word}")
    return ", ".join(sides)


def _scale(axes: Axes, up: Axis, finite: NDArray[np.float64]) -> None:
    low, high = float(finite.min()), float(finite.max())
    label = axis_label(up)
    if low > 0 and (high > 5 * low or log_spaced(finite)):
        log_axis(axes, "y", low / 1.4, high * 1.4)
        label = with_log(label)
    else:
        room = 0.12 * (high - low) or 0.1 * abs(high) or 1.0
        axes.set_ylim(low - room, high + room)
    axes.set_ylabel(label)


def _as_sweep(dataset: xarray.Dataset) -> xarray.Dataset:
    """The answer with its first policy, so that its provenance is read like that of a sweep."""
    return dataset.assign_coords(policy=str(dataset.attrs["a"]))
