"""A metric, or the gain over a baseline, over two axes in colour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.plots.style import BLACK, COLUMN, PAGE
from perfmodel.plots.sweep.axes import Axis, log_spaced
from perfmodel.plots.sweep.gains import gain, gain_label, gain_sentence
from perfmodel.plots.sweep.isolines import draw_isolines
from perfmodel.plots.sweep.labels import (
    fixed_words,
    metric_label,
    metric_scale,
    metric_words,
    names_of,
    nice_ticks,
    place_axis,
    tick_text,
    together_words,
    with_log,
)
from perfmodel.plots.sweep.origin import origin_words
from perfmodel.plots.sweep.page import legend_above, page, panel_titles, settle
from perfmodel.plots.sweep.selection import Sweep

if TYPE_CHECKING:
    import xarray

#: More panels than this make no readable figure.
MOST_PANELS = 4
#: Up to here every cell is drawn as a shape; more cells become an image.
_MOST_SHAPES = 4000
_MISSING = "#D0D0D0"
_EVEN = "break-even (1×)"


def heatmap_figure(
    dataset: xarray.Dataset,
    *,
    x: str | None = None,
    y: str | None = None,
    metric: str | None = None,
    baseline: str | None = None,
    policy: str | list[str] | None = None,
    at: Mapping[str, Any] | None = None,
) -> Figure:
    """Two axes of a sweep with a metric or a gain in colour; a thick labelled line where the gain is 1.

    Parameters
    ----------
    dataset : a sweep with two numeric axes of two or more values.
    x, y : axes of the figure; by default the two with most values.
    metric : by default the mean time per output token.
    baseline : show the gain over this policy [×]. Without it, the gain over MoNDE (else HOBBIT, else the first
        policy) is shown for all policies, and the metric itself where the sweep or ``policy`` has one policy only.
    policy : policies to draw, one panel each, at most four; by default all.
    at : values of the axes that are not drawn; by default those nearest the scenario's own, as the caption says.

    Raises
    ------
    PerfModelError : unknown names (with close matches), or too few numeric axes.
    """
    whole = Sweep(dataset)
    kind = whole.metric(metric or whole.first_metric())
    across = whole.ordered(x, "x") if x is not None else None
    up = whole.ordered(y, "y") if y is not None else None
    across = across or whole.longest("x", [up.dim] if up else [])
    up = up or whole.longest("y", [across.dim])
    if across.dim == up.dim:
        raise PerfModelError(f"plot --y: {up.name} and {across.name} run along the same dimension")
    for axis in (across, up):
        if len(np.unique(axis.values)) < 2:
            raise PerfModelError(f"plot: {axis.name} has a single value, allowed two or more")
    shown = whole.chosen(policy, len(whole.policies))
    base = None
    if baseline is not None or (policy is None and len(whole.policies) > 1):
        base = whole.baseline(baseline)
        shown = [one for one in shown if one != base]
    if not 1 <= len(shown) <= MOST_PANELS:
        raise PerfModelError(
            f"plot: found {len(shown)} policies to draw, allowed 1 to {MOST_PANELS}; choose with --policy"
        )
    sweep, fixed = whole.fix(at, [across.dim, up.dim])
    dims = [up.dim, across.dim]
    order = np.ix_(np.argsort(up.values, kind="stable"), np.argsort(across.values, kind="stable"))
    tables = {one: sweep.values(kind.name, one, dims)[order] for one in shown}
    if base is not None:
        below = sweep.values(kind.name, base, dims)[order]
        tables = {one: gain(kind, values, below) for one, values in tables.items()}
    names = names_of(whole)
    scale = metric_scale(kind, tables.values())
    if base is None:
        label = metric_label(kind, scale.unit)
        tables = {one: values / scale.size for one, values in tables.items()}
    else:
        label = gain_label(kind, names[base])
    finite = np.concatenate([values[np.isfinite(values)] for values in tables.values()])
    if not len(finite):
        raise PerfModelError(f"plot --metric: {kind.name} has no value anywhere in this figure")
    sentences = [
        f"Colour: {metric_words(kind)}." if base is None else gain_sentence(kind, names[base]),
        _reading(tables, names, None if base is None else names[base]),
        "Lines are interpolated between the points of the sweep.",
        "Grey: not feasible, or no value." if any(np.isnan(values).any() for values in tables.values()) else "",
        together_words(whole, across, up),
        fixed_words(fixed),
        origin_words(whole, fixed),
    ]
    count = len(shown)
    size = (COLUMN, 2.3) if count == 1 else (PAGE, 2.2 if count < 4 else 4.2)
    rows, columns = (1, count) if count < 4 else (2, 2)
    titles, more = panel_titles([names[one] for one in shown], columns)
    crossed = base is not None and any((v < 1).any() and (v > 1).any() for v in tables.values())
    with page(rows, columns, (size[0], size[1] + rows * more), sentences, [_EVEN] if crossed else [], sharey=True) as (
        figure,
        grid,
    ):
        norm = _norm(finite, base is not None)
        for i, (one, axes) in enumerate(zip(shown, grid.flat, strict=True)):
            image = _draw(axes, across, up, tables[one], norm, base is not None)
            axes.set_title(titles[i], loc="left")
            if i % columns:
                axes.set_ylabel("")
        bar = figure.colorbar(image, ax=list(grid.flat), pad=0.02, aspect=25)
        if isinstance(norm, LogNorm):
            bar.ax.yaxis.set_major_locator(FixedLocator(nice_ticks(*_ends(norm))))
            bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
            bar.ax.yaxis.set_minor_locator(NullLocator())
            label = with_log(label)
        bar.outline.set_linewidth(0.5)
        bar.set_label(label)
        if base is not None and finite.min() < 1 < finite.max():
            bar.ax.set_ylim(min(float(finite.min()), 1 / 1.05), max(float(finite.max()), 1.05))
            bar.ax.axhline(1.0, color=BLACK, linewidth=2.0)
        if crossed:
            legend_above(figure, {_EVEN: Line2D([], [], color=BLACK, linewidth=2.0)})
        settle(figure)
        for one, axes in zip(shown, grid.flat, strict=True):
            x_values, y_values = (np.sort(axis.values).astype(np.float64) for axis in (across, up))
            draw_isolines(axes, x_values, y_values, tables[one], ratio=base is not None)
    return figure


def _norm(finite: NDArray[np.float64], ratio: bool) -> Normalize:
    """Colours even in the logarithm where values span much; a ratio has 1 in the middle of its colours."""
    low, high = float(finite.min()), float(finite.max())
    if ratio and low < 1 < high:
        most = max(high, 1 / low, 1.05)
        return LogNorm(1 / most, most)
    if low > 0 and high > 4 * low:
        return LogNorm(low, high)
    room = 0.0 if high > low else 0.05 * abs(high) or 0.05
    return Normalize(low - room, high + room)


def _ends(norm: Normalize) -> tuple[float, float]:
    assert norm.vmin is not None  # `_norm` sets both
    assert norm.vmax is not None
    return norm.vmin, norm.vmax


def _edges(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Borders of cells around their values, half-way between neighbours on the axis as it is drawn."""
    x = np.log(values) if log_spaced(values) else values
    middle = (x[1:] + x[:-1]) / 2
    edges = np.concatenate([[2 * x[0] - middle[0]], middle, [2 * x[-1] - middle[-1]]])
    return np.exp(edges) if log_spaced(values) else edges


def _draw(axes: Axes, across: Axis, up: Axis, table: NDArray[np.float64], norm: Normalize, ratio: bool) -> QuadMesh:
    x, y = (np.sort(one.values).astype(np.float64) for one in (across, up))
    low, high = _ends(norm)
    both = ratio and low < 1 < high
    colours = matplotlib.colormaps["PuOr" if both else "cividis"].with_extremes(bad=_MISSING)
    cells = np.ma.masked_invalid(table)
    image = axes.pcolormesh(
        _edges(x), _edges(y), cells, norm=norm, cmap=colours, rasterized=table.size > _MOST_SHAPES,
        edgecolors="face", linewidth=0.1,
    )  # fmt: skip
    axes.set_facecolor(_MISSING)
    place_axis(axes, "x", across, most=6)
    place_axis(axes, "y", up, most=7)
    axes.set_xlim(_edges(x)[0], _edges(x)[-1])
    axes.set_ylim(_edges(y)[0], _edges(y)[-1])
    return image


def _reading(tables: Mapping[str, NDArray[np.float64]], names: Mapping[str, str], base: str | None) -> str:
    """Says where there is no break-even line to draw."""
    if base is None:
        return ""
    finite = {names[one]: table[np.isfinite(table)] for one, table in tables.items()}
    above = [name for name, values in finite.items() if len(values) and (values > 1).all()]
    below = [name for name, values in finite.items() if len(values) and (values < 1).all()]
    sentences = [f"Better everywhere: {', '.join(above)}."] if above else []
    return " ".join([*sentences, *([f"Worse everywhere: {', '.join(below)}."] if below else [])])
