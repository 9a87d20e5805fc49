"""Gain over a baseline along an axis, one line a policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.plots.drawing import handles
from perfmodel.plots.style import BLACK, COLUMN, LINES, PAGE
from perfmodel.plots.sweep.axes import Axis
from perfmodel.plots.sweep.gains import gain, gain_label, gain_sentence
from perfmodel.plots.sweep.labels import (
    axis_words,
    fixed_words,
    log_axis,
    names_of,
    place_axis,
    together_words,
    value_words,
    with_log,
)
from perfmodel.plots.sweep.origin import origin_words
from perfmodel.plots.sweep.page import legend_above, page
from perfmodel.plots.sweep.selection import Sweep

if TYPE_CHECKING:
    import xarray

#: More panels than this make no readable figure.
MOST_PANELS = 6


def speedup_figure(
    dataset: xarray.Dataset,
    *,
    x: str | None = None,
    panels: str | None = None,
    metric: str | None = None,
    baseline: str | None = None,
    policy: str | Sequence[str] | None = None,
    at: Mapping[str, Any] | None = None,
) -> Figure:
    """Gain over a baseline policy [×] along a numeric axis, one line a policy.

    Parameters
    ----------
    dataset : a sweep of two or more policies.
    x : axis of the figure; by default the numeric one with most values.
    panels : an axis that gets one panel a value, at most six.
    metric : by default the mean time per output token; the gain is above 1 where the policy is better.
    baseline : a policy; by default MoNDE, else HOBBIT, else the first.
    policy : policies to draw; by default all.
    at : values of the axes that are not drawn; by default those nearest the scenario's own, as the caption says.

    Raises
    ------
    PerfModelError : unknown names (with close matches), one policy only, or an axis without an order.
    """
    whole = Sweep(dataset)
    kind = whole.metric(metric or whole.first_metric())
    base = whole.baseline(baseline)
    rows = whole.axis(panels, "panels") if panels is not None else None
    along = whole.ordered(x, "x") if x is not None else whole.longest("x", [rows.dim] if rows else [])
    if rows is not None and rows.dim == along.dim:
        raise PerfModelError(f"plot --panels: {rows.name} and {along.name} run along the same dimension")
    if rows is not None and not 1 <= len(rows.values) <= MOST_PANELS:
        raise PerfModelError(f"plot --panels: {rows.name} has {len(rows.values)} values, allowed up to {MOST_PANELS}")
    shown = [one for one in whole.chosen(policy, len(LINES)) if one != base]
    if not shown:
        raise PerfModelError(f"plot --policy: only the baseline {base} is left, and a gain needs another")
    sweep, fixed = whole.fix(at, [along.dim] + ([rows.dim] if rows else []))
    dims = [rows.dim, along.dim] if rows else [along.dim]
    order = np.argsort(along.values, kind="stable")
    base_values = sweep.values(kind.name, base, dims)
    gains = {one: np.atleast_2d(gain(kind, sweep.values(kind.name, one, dims), base_values)) for one in shown}
    gains = {one: found[:, order] for one, found in gains.items()}
    if not any(np.isfinite(found).any() for found in gains.values()):
        raise PerfModelError(f"plot --metric: no point has {kind.name} for {base} and another policy")
    names = names_of(whole)
    count = len(rows.values) if rows else 1
    columns = {1: 1, 2: 2, 4: 2}.get(count, 3)
    sentences = [
        gain_sentence(kind, names[base]),
        together_words(whole, along),
        fixed_words(fixed),
        "A line has gaps where a plan is not feasible." if _gaps(gains.values()) else "",
        origin_words(whole, fixed),
    ]
    entries = [*(names[one] for one in shown), f"{names[base]} (baseline)"]
    size = (COLUMN, 1.9) if count == 1 else (PAGE, 1.95 * -(-count // columns))
    with page(-(-count // columns), columns, size, sentences, entries, sharey=True) as (figure, grid):
        for panel, axes in enumerate(grid.flat):
            if panel >= count:
                axes.set_visible(False)
                continue
            _draw(axes, along, np.sort(along.values), whole.policies, {p: g[panel] for p, g in gains.items()}, names)
            axes.axhline(1.0, color=BLACK, linewidth=0.9, zorder=1.5, label=entries[-1])
            if rows is not None:
                axes.set_title(f"{axis_words(rows.name)} {value_words(rows, rows.values[panel])}", loc="left")
            if panel % columns == 0:
                axes.set_ylabel(gain_label(kind, names[base]))
        _scale(grid.flat[0], list(gains.values()))
        for axes in grid[1:, 0]:
            axes.set_ylabel(grid[0, 0].get_ylabel())
        legend_above(figure, handles(grid.flat[0]))
    return figure


def _draw(
    axes: Axes,
    along: Axis,
    x: NDArray[Any],
    policies: Sequence[str],
    gains: Mapping[str, NDArray[np.float64]],
    names: Mapping[str, str],
) -> None:
    for policy, values in gains.items():
        look = LINES[list(policies).index(policy) % len(LINES)]
        axes.plot(x, values, **look.options(), markevery=max(1, len(x) // 12), label=names[policy], zorder=3)
    place_axis(axes, "x", along, most=6)
    axes.grid(axis="y")


def _scale(axes: Axes, gains: Sequence[NDArray[np.float64]]) -> None:
    """A y axis that holds 1, logarithmic where the gains span much."""
    finite = np.concatenate([found[np.isfinite(found)] for found in gains] + [np.ones(1)])
    low, high = float(finite.min()), float(finite.max())
    if high > 5 * low:
        log_axis(axes, "y", low / 1.25, high * 1.25)
        axes.set_ylabel(with_log(axes.get_ylabel()))
    else:
        room = 0.06 * (high - low) or 0.1
        axes.set_ylim(0 if low > 0.2 * high and low < 0.7 * high else low - room, high + room)


def _gaps(gains: Iterable[NDArray[np.float64]]) -> bool:
    return any(bool(np.isnan(found).any()) for found in gains)
