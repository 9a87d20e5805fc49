"""A loss table: every expert at every width in colour, losses against bits, and how unlike experts are."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from perfmodel.losses.summary import LossSummary
from perfmodel.plots.style import BLACK, GREY, LINES, PAGE
from perfmodel.plots.sweep.labels import log_axis, nice_ticks, tick_text
from perfmodel.plots.sweep.page import page
from perfmodel.plots.words import number, plain

#: Widths that are drawn at once.
_MOST_WIDTHS = 4
_MISSING = "#D0D0D0"
#: Up to here every cell is drawn as a shape; more cells become an image.
_MOST_SHAPES = 4000


def losses_figure(summary: LossSummary) -> Figure:
    """Losses of every expert in colour, one panel a width; losses against bits by layer; worst over best by layer.

    Colour is the loss over the mean of its width [×, log], so that all panels share one scale. A cross marks an expert
    whose loss is larger at this width than at the next narrower one. At most four widths are drawn.
    """
    table = summary.table
    shown = np.unique(np.linspace(0, len(table.bits) - 1, min(len(table.bits), _MOST_WIDTHS)).round().astype(int))
    height = float(np.clip(0.055 * table.num_layers, 1.2, 3.0))
    with page(1, 1, (PAGE, height + 2.6), _sentences(summary, shown)) as (figure, grid):
        grid[0, 0].remove()
        outer = figure.add_gridspec(2, 1, height_ratios=[height, 1.6])
        count = len(shown)
        above, below = (
            outer[0].subgridspec(1, count + 1, width_ratios=[1.0] * count + [0.06]),
            outer[1].subgridspec(1, 2),
        )
        _heat_maps([figure.add_subplot(above[i]) for i in range(count + 1)], summary, shown)
        _curves(figure.add_subplot(below[0]), summary)
        _spread(figure.add_subplot(below[1]), summary, shown)
    return figure


def _sentences(summary: LossSummary, shown: NDArray[np.int64]) -> list[str]:
    table, count = summary.table, summary.num_experts
    falls = [w for w in summary.widths if w.fall_geometric is not None]
    listed = ", ".join(f"{number(w.fall_geometric or 0)}× to {_bits(w.bits)}" for w in falls)
    fewer = len(shown) < len(table.bits)
    return [
        f"Loss table {plain(table.name)} ({table.origin}): {table.num_layers} layers of {table.num_experts} experts;"
        " loss is the mean squared error of an expert's output.",
        f"An added bit lowers it {listed} (geometric mean)." if falls else "",
        f"Crosses: the loss of {count - summary.monotone} of {count} experts rises with bits somewhere."
        if summary.breakers
        else f"The loss of all {count} experts falls or stays with every added bit.",
        "Bands: least to largest expert of the layer.",
        f"Drawn at {', '.join(str(table.bits[i]) for i in shown)} of {', '.join(map(str, table.bits))} bits."
        if fewer
        else "",
        "Grey: a loss of 0." if (table.losses == 0).any() else "",
    ]


def _heat_maps(places: list[Axes], summary: LossSummary, shown: NDArray[np.int64]) -> None:
    """One panel a width, and the scale of the colours in the last place."""
    panels, scale = places[:-1], places[-1]
    table = summary.table
    means = np.array([one.mean_loss for one in summary.widths])
    relative = np.ma.masked_less_equal(table.losses / np.where(means > 0, means, 1.0), 0.0)
    norm = _norm(relative[..., shown])
    for i, (axes, width) in enumerate(zip(panels, shown.tolist(), strict=True)):
        image = _heat_map(axes, relative[..., width], norm)
        marked = [one for one in summary.breakers if one.to_bits == table.bits[width]]
        for colour, weight in ((BLACK, 2.4), ("white", 1.0)):
            axes.plot(
                [one.expert for one in marked], [one.layer for one in marked], "x",
                color=colour, markersize=4, markeredgewidth=weight,
            )  # fmt: skip
        axes.set_title(f"{_bits(table.bits[width])}, mean {_short(means[width])}", loc="left")
        axes.set_xlabel("expert")
        axes.set_ylabel("" if i else "layer")
        if i:
            axes.tick_params(labelleft=False)
    bar = scale.figure.colorbar(image, cax=scale)
    low, high = float(norm.vmin or 1), float(norm.vmax or 1)
    bar.ax.yaxis.set_major_locator(FixedLocator(_ticks(low, high)))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.outline.set_linewidth(0.5)
    bar.set_label("loss over mean of its width (×, log)")


def _norm(relative: Any) -> LogNorm:
    known = relative.compressed()
    low, high = (float(known.min()), float(known.max())) if len(known) else (1.0, 1.0)
    return LogNorm(min(low, 0.9), max(high, 1.1))


def _heat_map(axes: Axes, cells: Any, norm: LogNorm) -> QuadMesh:
    layers, experts = cells.shape
    colours = matplotlib.colormaps["cividis"].with_extremes(bad=_MISSING)
    image = axes.pcolormesh(
        np.arange(experts + 1) - 0.5, np.arange(layers + 1) - 0.5, cells, norm=norm, cmap=colours,
        rasterized=cells.size > _MOST_SHAPES, edgecolors="face", linewidth=0.1,
    )  # fmt: skip
    axes.set_facecolor(_MISSING)
    axes.set_xlim(-0.5, experts - 0.5)
    axes.set_ylim(layers - 0.5, -0.5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True))
    return image


def _curves(axes: Axes, summary: LossSummary) -> None:
    """Mean loss of every layer against bits; three layers in colour, with all their experts between two bounds."""
    table = summary.table
    # No axis reaches much beyond these ends, and sums stay finite.
    drawable = np.clip(table.losses, None, 1e300)
    losses = np.where(drawable > 1e-300, drawable, np.nan)
    means = np.where((mean := drawable.mean(axis=1)) > 1e-300, mean, np.nan)
    order = np.argsort(drawable.mean(axis=(1, 2)), kind="stable")
    chosen = {"least": order[0], "median": order[len(order) // 2], "largest": order[-1]}
    for row in means:
        axes.plot(table.bits, row, color=GREY, linewidth=0.4, alpha=0.7, zorder=1)
    axes.plot([], [], color=GREY, linewidth=0.4, label="every layer")
    drawn = dict(zip(reversed(chosen.values()), reversed(chosen.keys()), strict=True))
    for line, (layer, name) in zip(LINES, drawn.items(), strict=False):
        axes.plot(table.bits, means[layer], **line.options(), label=f"layer {layer} ({name})", zorder=3)
        axes.fill_between(
            table.bits, losses[layer].min(axis=0), losses[layer].max(axis=0),
            color=line.colour, alpha=0.25, linewidth=0, zorder=2,
        )  # fmt: skip
    known = losses[~np.isnan(losses)]
    if len(known):
        log_axis(axes, "y", float(known.min()) / 1.3, float(known.max()) * 1.3)
    axes.set_xticks(table.bits)
    axes.set_xlabel("bits of a weight (bit)")
    axes.set_ylabel("loss (MSE, log)")
    _legend(axes, 2)


def _spread(axes: Axes, summary: LossSummary, shown: NDArray[np.int64]) -> None:
    """Worst over best expert of every layer."""
    table = summary.table
    highest = 1.0
    for line, width in zip(LINES, shown.tolist(), strict=False):
        losses = table.losses[..., width]
        least = losses.min(axis=1)
        ratio = np.divide(losses.max(axis=1), least, out=np.full(len(least), np.nan), where=least > 0)
        axes.plot(ratio, **line.options(2.0), label=_bits(table.bits[width]))
        highest = max(highest, float(np.nanmax(ratio, initial=1.0)))
    if highest > 10:
        log_axis(axes, "y", 1.0, 1.2 * highest)
    else:
        axes.set_ylim(bottom=1.0)
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_ylabel(f"worst / best expert (×{', log' if highest > 10 else ''})")
    _legend(axes, 4)


def _legend(axes: Axes, ncols: int) -> None:
    axes.grid(axis="y")
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=ncols, borderaxespad=0.2, handlelength=1.6, columnspacing=0.8
    )


def _ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic scale, three or so of equal distances where its ends are too close for round ones."""
    ticks = nice_ticks(low, high)
    if len(ticks) < 3:
        even = np.asarray(MaxNLocator(5, min_n_ticks=3).tick_values(low, high)).tolist()
        ticks = [tick for tick in even if low <= tick <= high]
    return ticks


def _bits(width: int) -> str:
    return f"{width} bit{'s' * (width > 1)}"


def _short(value: float) -> str:
    return f"{value:.3g}"
